use jobq::Job;

struct Resize;

fn name<J: Job>() -> &'static str {
    J::NAME
}

fn main() {
    println!("{}", name::<Resize>());
}
