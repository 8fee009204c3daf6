use jobq::{JobContext, job};

#[job(queue = "my images", name = 5)]
unsafe fn resize(image_id: &str, (width, height): (u32, u32), _: u8, ctx: &mut JobContext) -> ! {
    panic!("{image_id} {width} {height} {}", ctx.id())
}

fn main() {}
