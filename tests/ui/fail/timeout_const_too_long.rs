use std::time::Duration;

use jobq::job;

#[job(timeout = Duration::MAX)]
async fn endless() {}

fn main() {}
