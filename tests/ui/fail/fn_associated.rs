use jobq::job;

struct Images;

impl Images {
    #[job]
    async fn resize(image_id: i64) {
        println!("{image_id}");
    }
}

fn main() {}
