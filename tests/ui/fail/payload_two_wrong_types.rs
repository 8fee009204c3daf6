use jobq::job;

struct ImageStore;
struct Mailer;

#[job]
async fn resize(store: ImageStore, image_id: i64, mailer: Mailer) {
    let _ = (store, image_id, mailer);
}

fn main() {}
