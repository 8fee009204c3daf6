use jobq::job;

struct Mailer;

#[job]
async fn greet(name: String, #[inject] mailer: Mailer) {
    let _ = (name, mailer);
}

fn main() {}
