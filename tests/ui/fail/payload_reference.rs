use jobq::job;

use std::collections::BTreeMap;

#[job]
async fn resize(widths: &BTreeMap<i64, u32>) {
    println!("{widths:?}");
}

fn main() {}
