//! A job can be declared inside a function, and two functions may each have one of the same name.
#![deny(warnings)]

fn one() -> &'static str {
    struct Local;

    impl Local {
        const NAME: &str = "local";
    }

    #[jobq::job(name = "first")]
    fn resize(image_id: i64) {
        println!("{image_id} {}", Local::NAME);
    }

    resize(1);
    let _ = resize::new(1);
    resize::NAME
}

fn two() -> &'static str {
    use jobq::job;

    #[derive(serde::Serialize, serde::Deserialize)]
    struct Size(u32);

    if true {
        #[job]
        fn resize(size: Size) {
            println!("{}", size.0);
        }
        let _ = resize::new(Size(1));
        return resize::NAME;
    }
    "none"
}

#[test]
fn it_works() {
    assert_eq!(one(), "first");
    assert_eq!(two(), "resize");
}
