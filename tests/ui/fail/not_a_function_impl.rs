use jobq::job;

struct Images;

#[job]
impl Images {}

fn main() {}
