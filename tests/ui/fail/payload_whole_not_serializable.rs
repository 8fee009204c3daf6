use jobq::job;

struct Order;

#[job]
async fn ship(#[payload] order: Order) {
    let _ = order;
}

fn main() {}
