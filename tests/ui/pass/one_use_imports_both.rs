//! One `use` imports the function and its twin, also under another name or through a glob.
mod jobs {
    use jobq::job;

    #[job]
    pub fn resize(image_id: i64) {
        println!("{image_id}");
    }

    pub mod mail {
        #[jobq::job]
        pub fn greet(name: String) {
            println!("{name}");
        }
    }
}

use jobs::mail::*;
use jobs::resize;
use jobs::resize as shrink;

async fn enqueue<T: jobq::EnqueueTarget>(target: fn() -> T) -> jobq::Result<()> {
    resize::enqueue(target(), 7).await?;
    shrink::enqueue(target(), 7).await?;
    greet::enqueue(target(), "Ada".to_owned()).await?;
    jobq::enqueue_many(target(), [shrink::new(1), greet::new("Ada".to_owned())]).await?;
    Ok(())
}

#[test]
fn it_works() {
    resize(1);
    shrink(2);
    greet("Ada".to_owned());
    let _ = enqueue::<&jobq::Client>;
}
