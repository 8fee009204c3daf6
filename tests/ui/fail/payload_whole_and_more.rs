use jobq::job;

#[derive(serde::Serialize, serde::Deserialize)]
struct Order {
    id: i64,
}

#[job]
async fn ship(#[payload] order: Order, carrier: String) {
    println!("{} {carrier}", order.id);
}

fn main() {}
