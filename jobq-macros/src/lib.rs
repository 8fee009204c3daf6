//! The `#[job]` attribute of the jobq job queue; use it as `jobq::job`.
//!
//! `args` reads the options, `handler` checks the function, `expand` writes what is made of both.

use proc_macro2::TokenStream;

use crate::args::{Options, Problems};
use crate::handler::JobFn;

mod args;
mod expand;
mod handler;

/// Turns a function into a job.
///
/// The function stays what it is: call it, and test it, like any other. Beside it the attribute
/// makes a type of the same name, with
///
/// - `resize::new(image_id, width)`, a [`NewJob`] to set options on and enqueue,
/// - `resize::enqueue(&pool, image_id, width)`, which enqueues at once, also in your own
///   transaction,
/// - `resize::NAME`, what stored jobs call the function, and the trait [`Job`].
///
/// One `use` imports both.
///
/// ```
/// use jobq::{EnqueueTarget, JobContext, State, job};
///
/// # type Error = std::io::Error;
/// # #[derive(Clone)]
/// # struct ImageStore;
/// # impl ImageStore { async fn shrink(&self, _: i64, _: u32) -> Result<(), Error> { Ok(()) } }
/// /// Makes a small copy of an image.
/// #[job(queue = "images", timeout = "5m", max_attempts = 5)]
/// async fn resize(
///     image_id: i64,
///     width: u32,
///     State(store): State<ImageStore>,
///     ctx: &JobContext,
/// ) -> Result<(), Error> {
///     println!("attempt {}", ctx.attempt());
///     store.shrink(image_id, width).await
/// }
///
/// async fn upload(database: impl EnqueueTarget) -> jobq::Result<()> {
///     resize::enqueue(database, 7, 640).await?;
///     Ok(())
/// }
///
/// # fn main() {
/// let job = resize::new(7, 640).priority(2);
/// assert_eq!(resize::NAME, "resize");
/// # }
/// ```
///
/// # The function
///
/// An `async fn`, or a plain `fn`, which is run on a thread where it may block. It returns `()`,
/// `Result<(), E>` or `Result<T, E>`: see [`IntoOutcome`].
///
/// # Parameters
///
/// Each parameter is part of the payload, stored as a JSON object with the parameters' names as
/// keys, unless it is one of these, which the runtime injects:
///
/// | Parameter | What it is |
/// |---|---|
/// | `State(store): State<ImageStore>` | what the application gave the runtime |
/// | `ctx: &JobContext`, `ctx: JobContext` | the attempt: its number, the job's id, … |
/// | `cancelled: CancellationToken` | set when the attempt should stop |
/// | `#[inject] x: X` | any type of yours that is [`Inject`] |
///
/// A parameter of the payload is `Serialize + DeserializeOwned` (serde need not be in your
/// `Cargo.toml` for that). It takes serde's field attributes: with `#[serde(default)]` a new
/// parameter can be added while jobs without it are stored; an `Option<T>` needs none.
/// `#[payload] order: Order` makes one parameter the whole payload.
///
/// # Options
///
/// | Option | Meaning | Default |
/// |---|---|---|
/// | `queue = "images"` | the queue its jobs go to | `"default"` |
/// | `name = "resize"` | what stored jobs call the function | its name |
/// | `aliases("shrink")` | former names whose stored jobs it also runs | none |
/// | `lease = "30s"` | how long a worker that falls silent keeps a job | 30 s |
/// | `timeout = "5m"` | the longest an attempt may take | none |
/// | `max_attempts = 5` | how many attempts a job gets in all | 20 |
/// | `max_crashes = 3` | how often a job may crash its process | 3 |
/// | `priority = 1` | from 4 (first) to -4 (last) within its queue | 0 |
/// | `backoff(base = "2s", factor = 2.0, cap = "10m")` | the wait before a retry | 5 s, 2.0, 1 h |
/// | `retention = "7d"` | how long a finished job is kept | the queue's |
/// | `expires = "10m"` | in which time from when it is due a job has to be started | none |
/// | `unique`, `unique(…)` | of jobs with equal parameters only one is to be; see below | no |
/// | `key = image_id`, `key(user_id, image_id)` | jobs with the same run one at a time, in order; see below | none |
/// | `on_block = "skip"` | those behind a job with their key that cannot run now go on | `"block"`: they wait |
/// | `crate = "my::jobq"` | where jobq is, if renamed or re-exported | `::jobq` |
/// | `register = false` | leaves it to you to give the job to the runtime | `true` |
///
/// Durations are written `"250ms"`, `"30s"`, `"1h30m"`, `"7d"`. Durations and numbers can be
/// `const` expressions too: `timeout = MY_TIMEOUT`.
///
/// # Unique jobs
///
/// With `unique` a job keeps its *twins* out: those with equal parameters. What is in
/// `unique(…)`:
///
/// | Option | Meaning | Default |
/// |---|---|---|
/// | `by(image_id)` | the parameters that make two jobs twins | all |
/// | `scope = "until_finished"` | until it is completed, dead or cancelled | this |
/// | `scope = "until_started"` | until it is claimed for the first time | |
/// | `scope = "1h"` | for this long from when it was enqueued | |
/// | `scope = "forever"` | for ever | |
/// | `on_conflict = "skip"` | a twin is not written; its enqueue returns the id of the one there | this |
/// | `on_conflict = "error"` | a twin's enqueue fails, and writes nothing | |
/// | `on_conflict = "replace"` | the one there is given the twin's payload, time and priority | |
/// | `on_conflict = "debounce", max_wait = "1m"` | the same, but put off by no more than `max_wait` | |
///
/// [`Unique`] says more, and how to choose for each job.
///
/// # Keys
///
/// Jobs with one key run one at a time, in the order in which they were enqueued, however many workers
/// there are. `key = image_id` makes the key of the job that is enqueued for image 7 `image_id=7`; jobs
/// of other kinds that have the same key are in the same line. If all of its parameters are `null`, a
/// job has no key. `.key("…")` gives one job a key of its own.
///
/// [`Unique`]: ../jobq/struct.Unique.html
/// [`NewJob`]: ../jobq/struct.NewJob.html
/// [`Job`]: ../jobq/trait.Job.html
/// [`Inject`]: ../jobq/trait.Inject.html
/// [`IntoOutcome`]: ../jobq/trait.IntoOutcome.html
#[proc_macro_attribute]
pub fn job(
    options: proc_macro::TokenStream,
    item: proc_macro::TokenStream,
) -> proc_macro::TokenStream {
    job_tokens(options.into(), item.into()).into()
}

/// Reads, checks, writes. Whatever is wrong, the function is part of what comes out.
fn job_tokens(options: TokenStream, item: TokenStream) -> TokenStream {
    let mut problems = Problems::default();
    let options = Options::read(options, &mut problems);
    let mut function = match JobFn::read(item.clone()) {
        Ok(function) => function,
        Err(error) => {
            problems.add(error);
            return [Some(item), problems.into_compile_errors()].into_iter().flatten().collect();
        }
    };
    function.check(&options, &mut problems);
    options.check_aliases(&function.kind(&options), &mut problems);
    match problems.into_compile_errors() {
        None => expand::job(&function, &options),
        Some(errors) => expand::stub(&function, &options, &errors),
    }
}

#[cfg(test)]
mod tests {
    use proc_macro2::{Delimiter, Group, Ident, Literal, Punct, Spacing, Span, TokenTree};

    use super::*;

    const RESIZE: &str = r"
        /// Makes a small copy of an image.
        pub async fn resize(
            image_id: i64,
            width: u32,
            State(store): State<ImageStore>,
            ctx: &JobContext,
        ) -> Result<(), Error> {
            store.resize(image_id, width, ctx).await
        }
    ";

    fn expand(options: &str, item: &str) -> TokenStream {
        job_tokens(options.parse().expect("tokens"), item.parse().expect("tokens"))
    }

    fn count(tokens: TokenStream) -> usize {
        let inner = |tree| match tree {
            TokenTree::Group(group) => 2 + count(group.stream()),
            _ => 1,
        };
        tokens.into_iter().map(inner).sum()
    }

    /// Every hundred jobs cost as much to compile as the tokens written for them.
    #[test]
    fn the_expansion_stays_small() {
        let written = count(expand(r#"queue = "images", max_attempts = 5"#, RESIZE));
        let given = count(RESIZE.parse().expect("tokens"));
        assert!(written - given < 1_100, "{} tokens were added", written - given);
    }

    #[test]
    fn the_expansion_is_a_file_of_rust() {
        let text = r#"lease = A, backoff(base = B), aliases("x"), register = false"#;
        for options in ["", text, "crate = \"a::b\"", "nonsense = 1"] {
            let file = syn::parse2::<syn::File>(expand(options, RESIZE)).expect(options);
            assert_eq!(file.items.len(), if options == "nonsense = 1" { 4 } else { 3 });
        }
    }

    #[test]
    fn the_function_comes_out_whatever_is_wrong() {
        for (options, item) in [
            ("", "async fn f(x: &str, (a, b): (u8, u8)) -> ! { half typed . }"),
            ("queue =", "pub(crate) fn f<T>(x: T) where T: Copy { }"),
            (",,,", "fn f(self) {}"),
            ("lease = 1", "struct F { x: u8 }"),
            ("", "fn f( {"),
            ("", ""),
        ] {
            let Ok(item) = item.parse::<TokenStream>() else { continue };
            let written = job_tokens(options.parse().expect("tokens"), item.clone()).to_string();
            assert!(written.starts_with(&item.to_string()), "{item}: {written}");
            assert!(written.contains("compile_error"), "{item}: {written}");
        }
    }

    #[test]
    fn no_token_stream_makes_the_macro_panic() {
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        for _ in 0..4_000 {
            let options = random.stream(OPTION_WORDS, 3);
            let item = random.stream(ITEM_WORDS, 3);
            let _ = job_tokens(options, item);
        }
    }

    /// What comes close to being right gets further than what is random throughout.
    #[test]
    fn no_change_of_a_right_token_stream_makes_the_macro_panic() {
        let options = r#"queue = "a", lease = "1s", backoff(base = "1s", factor = 1.5), aliases("x"),
            max_attempts = 3, priority = -1, timeout = T, crate = "a::b", register = true,
            unique(by(image_id, a), scope = "1h", on_conflict = "debounce", max_wait = "1m"),
            key(image_id, a), on_block = "skip""#;
        let items = [
            RESIZE,
            "#[a] pub(in a::b) fn f(#[serde(default, rename = \"x\", with = \"a\")] mut a: Vec<u8>, \
             #[inject] b: B, #[payload] c: [C; 3], d: &mut D, self: Box<E>) -> impl Future {}",
            "async unsafe extern \"C\" fn r#f<'a, T: A>(_: Cow<'a, T>, x: &dyn Y, ...) where T: B;",
        ];
        let options: TokenStream = options.parse().expect("tokens");
        let items = items.map(|item| item.parse::<TokenStream>().expect("tokens"));
        let mut random = Random(1);
        for round in 0..4_000 {
            let item = random.changed(items[round % items.len()].clone());
            let options = random.changed(options.clone());
            let _ = job_tokens(options, item);
        }
    }

    const OPTION_WORDS: &[&str] = &[
        "queue",
        "name",
        "aliases",
        "lease",
        "timeout",
        "max_attempts",
        "max_crashes",
        "priority",
        "backoff",
        "base",
        "factor",
        "cap",
        "retention",
        "expires",
        "crate",
        "register",
        "true",
        "unique",
        "by",
        "scope",
        "on_conflict",
        "max_wait",
        "key",
        "on_block",
    ];

    const ITEM_WORDS: &[&str] = &[
        "async",
        "fn",
        "pub",
        "crate",
        "self",
        "mut",
        "impl",
        "dyn",
        "State",
        "JobContext",
        "serde",
        "inject",
        "payload",
        "cfg",
        "where",
        "unsafe",
        "extern",
        "const",
        "job",
        "f",
        "x",
        "u8",
        "_",
        "static",
        "default",
        "rename",
        "for",
        "ref",
        "struct",
    ];

    /// A generator of pseudo-random numbers (xorshift64*, by Sebastiano Vigna).
    struct Random(u64);

    impl Random {
        fn below(&mut self, bound: usize) -> usize {
            self.0 ^= self.0 >> 12;
            self.0 ^= self.0 << 25;
            self.0 ^= self.0 >> 27;
            let number = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33;
            usize::try_from(number).unwrap_or(0) % bound
        }

        fn stream(&mut self, words: &[&str], depth: usize) -> TokenStream {
            let length = self.below(12);
            (0..length).map(|_| self.tree(words, depth)).collect()
        }

        fn tree(&mut self, words: &[&str], depth: usize) -> TokenTree {
            let here = Span::call_site();
            match self.below(10) {
                0..4 => Ident::new(words[self.below(words.len())], here).into(),
                4..7 => {
                    let signs = ['=', ',', ':', '&', '<', '>', '-', '#', '.', '!', '*', ';', '|'];
                    let spacing = [Spacing::Alone, Spacing::Joint][self.below(2)];
                    Punct::new(signs[self.below(signs.len())], spacing).into()
                }
                7 if self.below(4) == 0 => Ident::new_raw("type", here).into(),
                7 => {
                    let literals = [
                        Literal::string("30s"),
                        Literal::string("3o s"),
                        Literal::string(""),
                        Literal::string("a::b"),
                        Literal::i128_unsuffixed(i128::MAX),
                        Literal::u64_suffixed(7),
                        Literal::f64_unsuffixed(1.5),
                        Literal::character('\u{0}'),
                        Literal::byte_string(b"\xff"),
                        Literal::c_string(c"c"),
                    ];
                    literals[self.below(literals.len())].clone().into()
                }
                _ if depth == 0 => Ident::new("end", here).into(),
                _ => {
                    let delimiters = [
                        Delimiter::Parenthesis,
                        Delimiter::Brace,
                        Delimiter::Bracket,
                        Delimiter::None,
                    ];
                    let delimiter = delimiters[self.below(delimiters.len())];
                    Group::new(delimiter, self.stream(words, depth - 1)).into()
                }
            }
        }

        /// Removes, repeats, replaces or moves a token somewhere in the stream.
        fn changed(&mut self, tokens: TokenStream) -> TokenStream {
            let mut trees: Vec<TokenTree> = tokens.into_iter().collect();
            if trees.is_empty() {
                return self.stream(ITEM_WORDS, 2);
            }
            let at = self.below(trees.len());
            if let TokenTree::Group(group) = &trees[at]
                && self.below(4) != 0
            {
                let inner = self.changed(group.stream());
                trees[at] = Group::new(group.delimiter(), inner).into();
                return trees.into_iter().collect();
            }
            match self.below(4) {
                0 => drop(trees.remove(at)),
                1 => trees.insert(at, trees[at].clone()),
                2 => trees[at] = self.tree(ITEM_WORDS, 2),
                _ => {
                    let other = self.below(trees.len());
                    trees.swap(at, other);
                }
            }
            trees.into_iter().collect()
        }
    }
}
