//! Everything a job function may return.
#![deny(warnings)]

use jobq::{BoxError, Control, job};

type Answer<T = ()> = Result<T, BoxError>;

#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Control(#[from] Control),
    #[error("io")]
    Io(#[from] std::io::Error),
}

#[job]
async fn nothing() {}

#[job]
async fn unit() -> () {}

#[job]
async fn text_error(id: i64) -> Result<(), String> {
    Err(format!("{id}"))
}

#[job]
async fn static_error() -> Result<(), &'static str> {
    Err("no")
}

#[job]
async fn any_error(path: String) -> Result<u64, Box<dyn std::error::Error + Send + Sync>> {
    Ok(std::fs::metadata(path)?.len())
}

#[job]
async fn alias(path: String) -> Answer<Vec<String>> {
    Ok(vec![path])
}

#[job]
fn own(path: std::path::PathBuf) -> std::result::Result<(), Failure> {
    if path.as_os_str().is_empty() {
        return Err(jobq::discard("no path").into());
    }
    std::fs::read(path)?;
    Ok(())
}

#[test]
fn it_works() {
    let _ = [nothing::new(), unit::new(), text_error::new(1), static_error::new()];
    let _ = [any_error::new(String::new()), alias::new(String::new()), own::new("x".into())];
}
