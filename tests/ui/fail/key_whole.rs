use jobq::job;

#[job(key = order)]
async fn resize(#[payload] order: std::collections::HashMap<String, i64>) {
    println!("{order:?}");
}

fn main() {}
