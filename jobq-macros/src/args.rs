//! Reads the options of `#[job(...)]`.
//!
//! Each option is read whether or not the ones before it could be, so that every mistake is
//! reported at once. Durations and names go through the parsers of `jobq-core`, and numbers are
//! held to the limits of `JobOptions::checked` in the same words: a value is refused alike as a
//! literal here, as a `const` by the compiler, and at run time.

use std::time::Duration;

use jobq_core::key::OnBlock;
use jobq_core::retry::Backoff;
use jobq_core::unique::{OnConflict, Unique, UniqueScope};
use jobq_core::{duration, queue};
use proc_macro2::{Span, TokenStream, TokenTree};
use quote::{ToTokens, quote};
use syn::ext::IdentExt;
use syn::parse::discouraged::Speculative;
use syn::parse::{ParseStream, Parser};
use syn::{Expr, ExprLit, ExprUnary, Ident, Lit, LitStr, Path, Token, UnOp};

/// Everything that is wrong with one job function.
#[derive(Default)]
pub(crate) struct Problems(Option<syn::Error>);

impl Problems {
    pub(crate) fn at(&mut self, place: impl ToTokens, words: impl std::fmt::Display) {
        self.add(syn::Error::new_spanned(place, words));
    }

    pub(crate) fn add(&mut self, error: syn::Error) {
        match &mut self.0 {
            Some(errors) => errors.combine(error),
            none => *none = Some(error),
        }
    }

    /// One `compile_error!` for each; `None` when nothing is wrong.
    pub(crate) fn into_compile_errors(self) -> Option<TokenStream> {
        self.0.map(syn::Error::into_compile_error)
    }
}

/// What was given in `#[job(...)]`; `None` is the default.
pub(crate) struct Options {
    pub(crate) queue: Option<LitStr>,
    pub(crate) name: Option<LitStr>,
    pub(crate) aliases: Vec<LitStr>,
    pub(crate) lease: Option<Value<Duration>>,
    pub(crate) timeout: Option<Value<Duration>>,
    pub(crate) max_attempts: Option<Value<u32>>,
    pub(crate) max_crashes: Option<Value<u32>>,
    pub(crate) priority: Option<Value<i16>>,
    pub(crate) backoff: Option<BackoffOptions>,
    pub(crate) retention: Option<Value<Duration>>,
    pub(crate) expires: Option<Value<Duration>>,
    pub(crate) unique: Option<UniqueOptions>,
    /// The parameters of which the key is made.
    pub(crate) key: Option<Vec<Ident>>,
    pub(crate) on_block: Option<OnBlock>,
    pub(crate) krate: Option<Path>,
    pub(crate) register: bool,
}

/// What was given in `backoff(...)`.
pub(crate) struct BackoffOptions {
    pub(crate) base: Option<Value<Duration>>,
    pub(crate) factor: Option<Value<f64>>,
    pub(crate) cap: Option<Value<Duration>>,
    pub(crate) span: Span,
}

/// What was given as `unique` or in `unique(...)`.
#[derive(Default)]
pub(crate) struct UniqueOptions {
    /// The parameters named in `by(...)`.
    pub(crate) by: Option<Vec<Ident>>,
    pub(crate) scope: Option<UniqueScope>,
    pub(crate) on_conflict: Option<OnConflict>,
}

/// The value of an option.
pub(crate) enum Value<T> {
    /// Written out, and checked here.
    Literal(T),
    /// A `const` expression, which the compiler evaluates and checks.
    Const(Expr),
}

/// What there is, with an example of each.
const OPTIONS: &[(&str, &str)] = &[
    ("queue", "queue = \"images\""),
    ("name", "name = \"resize\""),
    ("aliases", "aliases(\"old_name\")"),
    ("lease", "lease = \"30s\""),
    ("timeout", "timeout = \"5m\""),
    ("max_attempts", "max_attempts = 20"),
    ("max_crashes", "max_crashes = 3"),
    ("priority", "priority = 0"),
    ("backoff", "backoff(base = \"5s\", factor = 2.0, cap = \"1h\")"),
    ("retention", "retention = \"7d\""),
    ("expires", "expires = \"10m\""),
    ("unique", "unique(by(image_id), scope = \"until_started\", on_conflict = \"replace\")"),
    ("key", "key = image_id"),
    ("on_block", "on_block = \"skip\""),
    ("crate", "crate = \"my::jobq\""),
    ("register", "register = false"),
];

/// What there is in `backoff(...)`.
const BACKOFF_OPTIONS: &[(&str, &str)] =
    &[("base", "base = \"5s\""), ("factor", "factor = 2.0"), ("cap", "cap = \"1h\"")];

/// What there is in `unique(...)`.
const UNIQUE_OPTIONS: &[(&str, &str)] = &[
    ("by", "by(image_id)"),
    ("scope", "scope = \"until_started\""),
    ("on_conflict", "on_conflict = \"replace\""),
    ("max_wait", "max_wait = \"1m\""),
];

/// The options that need no value.
const FLAGS: &[&str] = &["unique"];

/// What people call things elsewhere.
const OTHER_WORDS: &[(&str, &str)] = &[
    ("attempts", "max_attempts"),
    ("retry", "max_attempts"),
    ("retries", "max_attempts"),
    ("max_retries", "max_attempts"),
    ("crashes", "max_crashes"),
    ("kind", "name"),
    ("alias", "aliases"),
    ("channel", "queue"),
    ("delay", "backoff"),
    ("keep", "retention"),
    ("ttl", "expires"),
    ("expiry", "expires"),
    ("deadline", "expires"),
    ("krate", "crate"),
    ("min", "base"),
    ("initial", "base"),
    ("multiplier", "factor"),
    ("max", "cap"),
    ("dedupe", "unique"),
    ("args", "by"),
    ("keys", "by"),
    ("until", "scope"),
    ("for", "scope"),
    ("period", "scope"),
    ("conflict", "on_conflict"),
];

impl Options {
    /// Reads the options; those that cannot be read are reported and left at their default.
    pub(crate) fn read(tokens: TokenStream, problems: &mut Problems) -> Self {
        let mut options = Self {
            queue: None,
            name: None,
            aliases: Vec::new(),
            lease: None,
            timeout: None,
            max_attempts: None,
            max_crashes: None,
            priority: None,
            backoff: None,
            retention: None,
            expires: None,
            unique: None,
            key: None,
            on_block: None,
            krate: None,
            register: true,
        };
        let mut on_block = None;
        for entry in entries(tokens, "`#[job]`", OPTIONS, problems) {
            let problems = &mut *problems;
            match entry.key {
                "queue" => options.queue = entry.name("queue", problems),
                "name" => options.name = entry.name("job", problems),
                "aliases" => options.aliases = entry.names(problems),
                "lease" => options.lease = entry.duration(problems),
                "timeout" => options.timeout = entry.duration(problems),
                "max_attempts" => options.max_attempts = entry.number(problems),
                "max_crashes" => options.max_crashes = entry.number(problems),
                "priority" => options.priority = entry.number(problems),
                "backoff" => options.backoff = entry.backoff(problems),
                "retention" => options.retention = entry.duration(problems),
                "expires" => options.expires = entry.duration(problems),
                "unique" => options.unique = entry.unique(problems),
                "key" => {
                    // What is wrong with it is said; then `on_block` is not to be complained about too.
                    options.key = Some(entry.key_parameters(problems).unwrap_or_default());
                }
                "on_block" => {
                    on_block = Some(entry.ident.clone());
                    options.on_block = entry.on_block(problems);
                }
                "crate" => options.krate = entry.path(problems),
                "register" => options.register = entry.bool(problems).unwrap_or(true),
                _ => {} // `entries` lets only the keys of `OPTIONS` through.
            }
        }
        if let (None, Some(place)) = (&options.key, on_block) {
            let words = "`on_block` is for jobs with a key: `key = image_id`; for a key that is given at \
                         enqueue, say `.on_block(…)` there too";
            problems.at(place, words);
        }
        options
    }

    /// Refuses aliases that are given twice or are the job's own name.
    pub(crate) fn check_aliases(&self, name: &str, problems: &mut Problems) {
        for (index, alias) in self.aliases.iter().enumerate() {
            let value = alias.value();
            if self.aliases[..index].iter().any(|other| other.value() == value) {
                problems.at(alias, format!("the alias {value:?} is given twice; give it once"));
            } else if value == name {
                let words = "is the job's own name; an alias is a former name: remove it";
                problems.at(alias, format!("the alias {value:?} {words}"));
            }
        }
    }
}

/// One `key = value` or `key(value, ...)`.
struct Entry {
    ident: Ident,
    key: &'static str,
    example: &'static str,
    given: Given,
}

enum Given {
    Value(Expr),
    List(TokenTree, TokenStream),
    /// Its name alone, as those of [`FLAGS`] may be given.
    Name,
}

/// The names of parameters in a list.
fn parameters(list: TokenStream, key: &str, example: &str, problems: &mut Problems) -> Vec<Ident> {
    let mut names: Vec<Ident> = Vec::new();
    for item in split_at_commas(list) {
        match syn::parse2::<Ident>(ungroup_tokens(item.clone())) {
            Ok(name) if names.contains(&name) => {
                problems.at(&name, format!("`{name}` is given twice; give it once"));
            }
            Ok(name) => names.push(name),
            Err(_) => {
                problems.at(item, format!("`{key}` takes names of parameters: `{example}`"));
            }
        }
    }
    names
}

/// Splits `key = value, key(list), ...` and refuses unknown and repeated keys.
fn entries(
    tokens: TokenStream,
    place: &str,
    known: &'static [(&'static str, &'static str)],
    problems: &mut Problems,
) -> Vec<Entry> {
    let mut entries: Vec<Entry> = Vec::new();
    let mut seen: Vec<Ident> = Vec::new();
    let all = |input: ParseStream| {
        while !input.is_empty() {
            match entry(input, place, known, &mut seen, problems) {
                Ok(entry) => entries.extend(entry),
                Err(error) => {
                    problems.add(error);
                    skip_to_comma(input);
                    continue;
                }
            }
            if input.is_empty() || input.parse::<Token![,]>().is_ok() {
                continue;
            }
            problems.add(input.error("expected a `,` before this"));
            if !input.peek(Ident::peek_any) {
                skip_to_comma(input);
            }
        }
        Ok(())
    };
    if let Err(error) = all.parse2(tokens) {
        problems.add(error);
    }
    entries
}

/// Reads one entry; `None` when it was refused but could be read past.
fn entry(
    input: ParseStream,
    place: &str,
    known: &'static [(&'static str, &'static str)],
    seen: &mut Vec<Ident>,
    problems: &mut Problems,
) -> syn::Result<Option<Entry>> {
    let example = known[0].1;
    if !input.peek(Ident::peek_any) {
        return Err(input.error(format!("expected an option, such as `{example}`")));
    }
    let ident = input.call(Ident::parse_any)?;
    let written = ident.to_string();
    let option = known.iter().find(|(key, _)| *key == written);
    let example = option.map_or(example, |(_, example)| *example);
    let given = if input.peek(Token![=]) && !input.peek(Token![==]) {
        let equals: Token![=] = input.parse()?;
        if input.is_empty() || input.peek(Token![,]) {
            return Err(syn::Error::new_spanned(
                equals,
                format!("`{written}` has no value after the `=`; write `{example}`"),
            ));
        }
        let ahead = input.fork();
        let value: Expr = ahead.parse()?;
        input.advance_to(&ahead);
        Some(Given::Value(value))
    } else if input.peek(syn::token::Paren) {
        let tree: TokenTree = input.parse()?;
        match &tree {
            TokenTree::Group(group) => Some(Given::List(tree.clone(), group.stream())),
            _ => None,
        }
    } else {
        None
    };
    let Some((key, example)) = option else {
        problems.at(&ident, unknown(&written, place, known));
        return Ok(None);
    };
    if let Some(first) = seen.iter().find(|first| *first == key) {
        problems.at(&ident, format!("`{key}` is given twice; remove one of the two"));
        problems.at(first, format!("`{key}` is given here first"));
        return Ok(None);
    }
    seen.push(ident.clone());
    let given = if FLAGS.contains(key) { given.or(Some(Given::Name)) } else { given };
    let Some(given) = given else {
        problems.at(&ident, format!("`{key}` needs a value; write `{example}`"));
        return Ok(None);
    };
    Ok(Some(Entry { ident, key, example, given }))
}

fn skip_to_comma(input: ParseStream) {
    while let Ok(tree) = input.parse::<TokenTree>() {
        if matches!(&tree, TokenTree::Punct(punct) if punct.as_char() == ',') {
            break;
        }
    }
}

/// The words for a key that does not exist.
fn unknown(written: &str, place: &str, known: &[(&str, &str)]) -> String {
    let keys: Vec<String> = known.iter().map(|(key, _)| format!("`{key}`")).collect();
    let keys = keys.join(", ");
    if written == "blocking" {
        return "there is no option `blocking`; write `fn` instead of `async fn` and the job runs \
                on a thread where it may block"
            .to_owned();
    }
    match nearest(written, known) {
        Some(key) => {
            format!("{place} has no option `{written}`; did you mean `{key}`? There are {keys}")
        }
        None => format!("{place} has no option `{written}`; there are {keys}"),
    }
}

/// The key that was probably meant.
fn nearest<'a>(written: &str, known: &[(&'a str, &'a str)]) -> Option<&'a str> {
    let is_known = |wanted: &str| known.iter().map(|(key, _)| *key).find(|key| *key == wanted);
    let lower = written.to_ascii_lowercase();
    if let Some(key) = is_known(&lower) {
        return Some(key);
    }
    let other_word = OTHER_WORDS.iter().find(|(word, _)| *word == lower);
    if let Some(key) = other_word.and_then(|(_, key)| is_known(key)) {
        return Some(key);
    }
    let (key, distance) = known
        .iter()
        .map(|(key, _)| (*key, distance(&lower, key)))
        .min_by_key(|(_, distance)| *distance)?;
    (distance <= 1 + key.len() / 4 && distance < key.len()).then_some(key)
}

/// How many letters have to be added, removed, changed or swapped to make `b` of `a`.
fn distance(a: &str, b: &str) -> usize {
    let a: Vec<char> = a.chars().collect();
    let b: Vec<char> = b.chars().collect();
    let mut rows: Vec<Vec<usize>> = vec![(0..=b.len()).collect()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let change = usize::from(a[i - 1] != b[j - 1]);
            let mut least =
                (rows[i - 1][j] + 1).min(row[j - 1] + 1).min(rows[i - 1][j - 1] + change);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

/// A number that an option takes, and what it must be.
pub(crate) trait Number: Sized {
    const WHAT: &'static str;

    /// Reads a literal with its sign; `None` if it is no such number at all.
    fn read(literal: &Lit, negative: bool) -> Option<Result<Self, TooLarge>>;

    /// What is wrong with the number as the value of `key`, in the words of
    /// `JobOptions::checked`.
    fn problem(&self, key: &str) -> Option<&'static str>;

    /// Its type, in code.
    fn ty() -> TokenStream;
}

/// The number is beyond its type.
pub(crate) struct TooLarge;

fn integer<T: TryFrom<i128>>(literal: &Lit, negative: bool) -> Option<Result<T, TooLarge>> {
    let Lit::Int(literal) = literal else { return None };
    let number = literal.base10_parse::<i128>().map_err(|_| TooLarge);
    Some(number.and_then(|number| {
        T::try_from(if negative { -number } else { number }).map_err(|_| TooLarge)
    }))
}

impl Number for u32 {
    const WHAT: &'static str = "a whole number";

    fn read(literal: &Lit, negative: bool) -> Option<Result<Self, TooLarge>> {
        // A negative number is as wrong as 0, and the words about 0 are the better ones.
        integer::<i128>(literal, negative)
            .map(|number| number.and_then(|n| Self::try_from(n.max(0)).map_err(|_| TooLarge)))
    }

    fn problem(&self, key: &str) -> Option<&'static str> {
        match key {
            "max_attempts" if *self < 1 => {
                Some("`max_attempts` must be at least 1: it counts the first run")
            }
            "max_attempts" if *self > i32::MAX as u32 => {
                Some("`max_attempts` must be at most 2147483647")
            }
            "max_crashes" if *self < 1 => Some("`max_crashes` must be at least 1"),
            "max_crashes" if *self > i16::MAX as u32 => Some("`max_crashes` must be at most 32767"),
            _ => None,
        }
    }

    fn ty() -> TokenStream {
        quote!(::core::primitive::u32)
    }
}

impl Number for i16 {
    const WHAT: &'static str = "a whole number";

    fn read(literal: &Lit, negative: bool) -> Option<Result<Self, TooLarge>> {
        integer(literal, negative)
    }

    fn problem(&self, _: &str) -> Option<&'static str> {
        (!queue::PRIORITIES.contains(self))
            .then_some("`priority` must be from -4 (last) to 4 (first)")
    }

    fn ty() -> TokenStream {
        quote!(::core::primitive::i16)
    }
}

impl Number for f64 {
    const WHAT: &'static str = "a number";

    fn read(literal: &Lit, negative: bool) -> Option<Result<Self, TooLarge>> {
        let digits = match literal {
            Lit::Float(literal) => literal.base10_digits().to_owned(),
            Lit::Int(literal) => literal.base10_digits().to_owned(),
            _ => return None,
        };
        let number: Self = digits.parse().ok()?;
        if number.is_finite() {
            Some(Ok(if negative { -number } else { number }))
        } else {
            Some(Err(TooLarge))
        }
    }

    fn problem(&self, _: &str) -> Option<&'static str> {
        (*self < 1.0).then_some("`backoff` needs a `factor` of at least 1")
    }

    fn ty() -> TokenStream {
        quote!(::core::primitive::f64)
    }
}

impl Entry {
    /// The value after `=`.
    fn value(self, problems: &mut Problems) -> Option<Expr> {
        match self.given {
            Given::Value(value) => Some(ungroup(value)),
            Given::List(list, _) => {
                problems.at(list, format!("`{}` takes one value: `{}`", self.key, self.example));
                None
            }
            Given::Name => None,
        }
    }

    fn string(self, problems: &mut Problems) -> Option<LitStr> {
        let (key, example) = (self.key, self.example);
        match self.value(problems)? {
            Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) => Some(text),
            other => {
                problems.at(other, format!("`{key}` takes a string literal: `{example}`"));
                None
            }
        }
    }

    fn name(self, what: &'static str, problems: &mut Problems) -> Option<LitStr> {
        let name = self.string(problems)?;
        check_name(what, &name, problems).then_some(name)
    }

    fn names(self, problems: &mut Problems) -> Vec<LitStr> {
        let list = match &self.given {
            Given::List(tree, list) => {
                if list.is_empty() {
                    problems.at(tree, format!("`aliases` names none; write `{}`", self.example));
                }
                list.clone()
            }
            Given::Value(value) => {
                let words = format!("`aliases` takes a list: `{}`", self.example);
                problems.at(value, words);
                return Vec::new();
            }
            Given::Name => return Vec::new(),
        };
        let mut names = Vec::new();
        let refuse = |place: TokenStream, problems: &mut Problems| {
            let words = format!("`aliases` takes string literals: `{}`", self.example);
            problems.at(place, words);
        };
        for item in split_at_commas(list) {
            match syn::parse2::<LitStr>(ungroup_tokens(item.clone())) {
                Ok(name) if check_name("job", &name, problems) => names.push(name),
                Ok(_) => {}
                Err(_) => refuse(item, problems),
            }
        }
        names
    }

    fn duration(self, problems: &mut Problems) -> Option<Value<Duration>> {
        let (key, example) = (self.key, self.example);
        let text = match self.value(problems)? {
            Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) => text,
            other if literal(&other).is_some() => {
                let words = format!(
                    "`{key}` takes a duration: `{example}`, or a `const` of type \
                     `std::time::Duration`"
                );
                problems.at(other, words);
                return None;
            }
            other => return Some(Value::Const(other)),
        };
        let duration = match duration::parse(&text.value()) {
            Ok(duration) => duration,
            Err(error) => {
                problems.at(text, error);
                return None;
            }
        };
        if let Some(words) = duration_problem(key, duration) {
            problems.at(text, words);
            return None;
        }
        Some(Value::Literal(duration))
    }

    fn number<T: Number>(self, problems: &mut Problems) -> Option<Value<T>> {
        let (key, example) = (self.key, self.example);
        let value = self.value(problems)?;
        let Some((lit, negative)) = literal(&value) else {
            return Some(Value::Const(value));
        };
        match T::read(lit, negative) {
            None => problems.at(value, format!("`{key}` takes {}: `{example}`", T::WHAT)),
            Some(Err(TooLarge)) if key == "priority" => {
                problems.at(value, "`priority` must be from -4 (last) to 4 (first)");
            }
            Some(Err(TooLarge)) => problems.at(value, format!("`{key}` is too large")),
            Some(Ok(number)) => match number.problem(key) {
                Some(words) => problems.at(value, words),
                None => return Some(Value::Literal(number)),
            },
        }
        None
    }

    fn bool(self, problems: &mut Problems) -> Option<bool> {
        let (key, example) = (self.key, self.example);
        match self.value(problems)? {
            Expr::Lit(ExprLit { lit: Lit::Bool(value), .. }) => Some(value.value),
            other => {
                problems.at(other, format!("`{key}` takes `true` or `false`: `{example}`"));
                None
            }
        }
    }

    fn path(self, problems: &mut Problems) -> Option<Path> {
        let example = self.example;
        let text = self.string(problems)?;
        let path = text.parse_with(Path::parse_mod_style).ok();
        if path.is_none() {
            let words = format!("`crate` takes the path of jobq in your crate: `{example}`");
            problems.at(text, words);
        }
        path
    }

    fn backoff(self, problems: &mut Problems) -> Option<BackoffOptions> {
        let (tree, list) = match self.given {
            Given::List(tree, list) => (tree, list),
            Given::Value(value) => {
                problems.at(value, format!("`backoff` takes a list: `{}`", self.example));
                return None;
            }
            Given::Name => return None,
        };
        let mut backoff =
            BackoffOptions { base: None, factor: None, cap: None, span: self.ident.span() };
        let given = entries(list, "`backoff`", BACKOFF_OPTIONS, problems);
        for entry in given {
            match entry.key {
                "base" => backoff.base = entry.duration(problems),
                "factor" => backoff.factor = entry.number(problems),
                "cap" => backoff.cap = entry.duration(problems),
                _ => {} // `entries` lets only the keys of `BACKOFF_OPTIONS` through.
            }
        }
        if known(backoff.base.as_ref(), Backoff::DEFAULT.base)
            .zip(known(backoff.cap.as_ref(), Backoff::DEFAULT.cap))
            .is_some_and(|(base, cap)| base > cap)
        {
            problems.at(
                tree,
                format!(
                    "`backoff` needs a `base` that is not longer than its `cap`; without \
                     one, `base` is {} and `cap` is {}",
                    duration::display(Backoff::DEFAULT.base),
                    duration::display(Backoff::DEFAULT.cap),
                ),
            );
            return None;
        }
        Some(backoff)
    }
}

impl Entry {
    fn unique(self, problems: &mut Problems) -> Option<UniqueOptions> {
        let mut unique = UniqueOptions::default();
        let (tree, list) = match self.given {
            Given::Name => return Some(unique),
            Given::List(tree, list) => (tree, list),
            Given::Value(value) => {
                let words = format!("`unique` stands alone or takes a list: `{}`", self.example);
                problems.at(value, words);
                return None;
            }
        };
        let (mut max_wait, mut debounces) = (None, None);
        for entry in entries(list, "`unique`", UNIQUE_OPTIONS, problems) {
            let place = entry.ident.clone();
            match entry.key {
                "by" => unique.by = entry.parameters(problems),
                "scope" => unique.scope = entry.scope(problems),
                "on_conflict" => {
                    let word = entry.string(problems)?;
                    match &*word.value() {
                        "skip" => unique.on_conflict = Some(OnConflict::Skip),
                        "error" => unique.on_conflict = Some(OnConflict::Error),
                        "replace" => unique.on_conflict = Some(OnConflict::Replace),
                        "debounce" => debounces = Some(word),
                        _ => problems.at(
                            word,
                            "`on_conflict` is \"skip\", \"error\", \"replace\" or \"debounce\"",
                        ),
                    }
                }
                "max_wait" => max_wait = entry.time(problems).map(|time| (place, time)),
                _ => {} // `entries` lets only the keys of `UNIQUE_OPTIONS` through.
            }
        }
        match (debounces, max_wait) {
            (Some(_), Some((_, max_wait))) => {
                unique.on_conflict = Some(OnConflict::Debounce { max_wait });
            }
            (Some(word), None) => problems.at(
                word,
                "\"debounce\" needs the longest time that the first job may be put off: \
                 `max_wait = \"1m\"`",
            ),
            (None, Some((place, _))) => {
                problems.at(place, "`max_wait` is for `on_conflict = \"debounce\"` only");
            }
            (None, None) => {}
        }
        let checked = Unique {
            by: None,
            scope: unique.scope.unwrap_or(Unique::DEFAULT.scope),
            on_conflict: unique.on_conflict.unwrap_or(Unique::DEFAULT.on_conflict),
        };
        if let Some(words) = checked.problem() {
            problems.at(tree, words);
        }
        Some(unique)
    }

    /// The names in `by(...)`.
    fn parameters(self, problems: &mut Problems) -> Option<Vec<Ident>> {
        let (tree, list) = match self.given {
            Given::List(tree, list) => (tree, list),
            Given::Value(value) => {
                problems.at(value, format!("`by` takes a list of parameters: `{}`", self.example));
                return None;
            }
            Given::Name => return None,
        };
        if list.is_empty() {
            problems.at(tree, Unique::by(&[]).problem().unwrap_or_default());
            return None;
        }
        Some(parameters(list, self.key, self.example, problems))
    }

    /// The names in `key = name` or `key(...)`.
    fn key_parameters(self, problems: &mut Problems) -> Option<Vec<Ident>> {
        const HOW: &str = "`key` takes a parameter, or a list of them: `key = image_id` or \
                           `key(user_id, image_id)`; a key that is made of none is given at enqueue: \
                           `.key(\"…\")`";
        match self.given {
            Given::List(tree, list) if list.is_empty() => problems.at(tree, HOW),
            Given::List(_, list) => {
                return Some(parameters(list, "key", "key(user_id, image_id)", problems));
            }
            Given::Value(value) => {
                let value = ungroup(value);
                match syn::parse2::<Ident>(value.to_token_stream()) {
                    Ok(name) => return Some(vec![name]),
                    Err(_) => problems.at(value, HOW),
                }
            }
            Given::Name => {}
        }
        None
    }

    fn on_block(self, problems: &mut Problems) -> Option<OnBlock> {
        let word = self.string(problems)?;
        match &*word.value() {
            "block" => Some(OnBlock::Block),
            "skip" => Some(OnBlock::Skip),
            _ => {
                problems.at(word, "`on_block` is \"block\" or \"skip\"");
                None
            }
        }
    }

    /// A word, or how long.
    fn scope(self, problems: &mut Problems) -> Option<UniqueScope> {
        let text = self.string(problems)?;
        Some(match &*text.value() {
            "until_started" => UniqueScope::UntilStarted,
            "until_finished" => UniqueScope::UntilFinished,
            "forever" => UniqueScope::Forever,
            time => match duration::parse(time) {
                Ok(time) => UniqueScope::For(time),
                Err(error) => {
                    let words = "`scope` is \"until_started\", \"until_finished\", \"forever\" or a \
                                 duration";
                    problems.at(text, format!("{words}: {error}"));
                    return None;
                }
            },
        })
    }

    /// A duration that is written out.
    fn time(self, problems: &mut Problems) -> Option<Duration> {
        let text = self.string(problems)?;
        duration::parse(&text.value()).map_err(|error| problems.at(text, error)).ok()
    }
}

/// The value if it is known here: written out, or the default.
fn known<T: Copy>(value: Option<&Value<T>>, default: T) -> Option<T> {
    match value {
        None => Some(default),
        Some(Value::Literal(value)) => Some(*value),
        Some(Value::Const(_)) => None,
    }
}

/// What is wrong with the duration as the value of `key`, in the words of `JobOptions::checked`.
fn duration_problem(key: &str, duration: Duration) -> Option<&'static str> {
    match key {
        "lease" if duration < Duration::from_secs(1) => {
            Some("`lease` must be at least 1s: it is renewed every third of it")
        }
        "lease" if duration.as_secs() > 30 * 86_400 => Some(
            "`lease` must be at most 30d: it is how long a dead worker keeps its jobs; use \
             `timeout` to bound a run",
        ),
        "timeout" if duration.is_zero() => {
            Some("`timeout` must be longer than 0s; leave it out for none")
        }
        "expires" if duration.is_zero() => {
            Some("`expires` must be longer than 0s; leave it out for none")
        }
        _ => None,
    }
}

/// Whether the name is allowed; if not, reports it.
fn check_name(what: &'static str, name: &LitStr, problems: &mut Problems) -> bool {
    let checked = queue::check_name(what, &name.value());
    if let Err(error) = &checked {
        problems.at(name, error);
    }
    checked.is_ok()
}

/// The literal, and whether a minus stands before it.
fn literal(value: &Expr) -> Option<(&Lit, bool)> {
    match value {
        Expr::Lit(ExprLit { lit, .. }) => Some((lit, false)),
        Expr::Unary(ExprUnary { op: UnOp::Neg(_), expr, .. }) => match &**expr {
            Expr::Lit(ExprLit { lit, .. }) => Some((lit, true)),
            _ => None,
        },
        _ => None,
    }
}

/// Takes off the invisible group around what a `macro_rules!` macro was given.
fn ungroup(mut value: Expr) -> Expr {
    loop {
        match value {
            Expr::Group(group) => value = *group.expr,
            other => return other,
        }
    }
}

fn ungroup_tokens(tokens: TokenStream) -> TokenStream {
    let mut trees = tokens.clone().into_iter();
    match (trees.next(), trees.next()) {
        (Some(TokenTree::Group(group)), None)
            if group.delimiter() == proc_macro2::Delimiter::None =>
        {
            ungroup_tokens(group.stream())
        }
        _ => tokens,
    }
}

fn split_at_commas(tokens: TokenStream) -> Vec<TokenStream> {
    let mut items = vec![TokenStream::new()];
    for tree in tokens {
        match &tree {
            TokenTree::Punct(punct) if punct.as_char() == ',' => items.push(TokenStream::new()),
            _ => items.last_mut().into_iter().for_each(|item| item.extend([tree.clone()])),
        }
    }
    items.retain(|item| !item.is_empty());
    items
}

impl<T> Value<T> {
    /// Where a `const` value begins and ends.
    pub(crate) fn place(&self) -> Option<(Span, Span)> {
        match self {
            Self::Literal(_) => None,
            Self::Const(value) => {
                let mut spans = value.to_token_stream().into_iter().map(|tree| tree.span());
                let first = spans.next()?;
                Some((first, spans.last().unwrap_or(first)))
            }
        }
    }
}

impl BackoffOptions {
    /// Where an error about it is, if one of its values is a `const` expression.
    pub(crate) fn place(&self) -> Option<(Span, Span)> {
        let is_const = |value: &Option<Value<Duration>>| matches!(value, Some(Value::Const(_)));
        (is_const(&self.base)
            || is_const(&self.cap)
            || matches!(self.factor, Some(Value::Const(_))))
        .then_some((self.span, self.span))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> (Options, Vec<String>) {
        let mut problems = Problems::default();
        let options = Options::read(text.parse().expect("tokens"), &mut problems);
        let words = problems.0.into_iter().flatten().map(|error| error.to_string());
        (options, words.collect())
    }

    fn literal<T: Copy>(value: Option<&Value<T>>) -> Option<T> {
        match value {
            Some(Value::Literal(value)) => Some(*value),
            _ => None,
        }
    }

    #[test]
    fn every_example_given_in_a_message_is_accepted() {
        for (key, example) in OPTIONS {
            let with = if *key == "on_block" { "key = image_id, " } else { "" };
            let (_, words) = read(&format!("{with}{example}"));
            assert_eq!(words, [""; 0], "{key}");
        }
        for (key, example) in BACKOFF_OPTIONS {
            let (_, words) = read(&format!("backoff({example})"));
            assert_eq!(words, [""; 0], "{key}");
        }
        for (key, example) in UNIQUE_OPTIONS {
            let debounce = if *key == "max_wait" { "on_conflict = \"debounce\"," } else { "" };
            let (_, words) = read(&format!("unique({debounce} {example})"));
            assert_eq!(words, [""; 0], "{key}");
        }
    }

    #[test]
    fn literals_are_read() {
        let text = r#"queue = "a", name = "b", aliases("c", "d",), lease = "1m", timeout = "5m",
            max_attempts = 1_000, max_crashes = 0x10, priority = -4, retention = "0s",
            backoff(base = "1s", factor = 2, cap = "1d"), crate = "::x::y", register = false,"#;
        let (options, words) = read(text);
        assert_eq!(words, [""; 0]);
        assert_eq!(options.queue.map(|name| name.value()).as_deref(), Some("a"));
        assert_eq!(options.name.map(|name| name.value()).as_deref(), Some("b"));
        assert_eq!(options.aliases.len(), 2);
        assert_eq!(literal(options.lease.as_ref()), Some(Duration::from_secs(60)));
        assert_eq!(literal(options.timeout.as_ref()), Some(Duration::from_secs(300)));
        assert_eq!(literal(options.retention.as_ref()), Some(Duration::ZERO));
        assert_eq!(literal(options.max_attempts.as_ref()), Some(1000));
        assert_eq!(literal(options.max_crashes.as_ref()), Some(16));
        assert_eq!(literal(options.priority.as_ref()), Some(-4));
        let backoff = options.backoff.expect("it was given");
        assert_eq!(literal(backoff.base.as_ref()), Some(Duration::from_secs(1)));
        assert_eq!(literal(backoff.factor.as_ref()), Some(2.0));
        assert_eq!(literal(backoff.cap.as_ref()), Some(Duration::from_secs(86_400)));
        assert!(options.krate.is_some());
        assert!(!options.register);
    }

    #[test]
    fn const_expressions_are_kept_for_the_compiler() {
        let text = "lease = A::B, max_attempts = f::<1, 2>(3), priority = -X, timeout = { T }";
        let (options, words) = read(text);
        assert_eq!(words, [""; 0]);
        assert!(matches!(options.lease, Some(Value::Const(_))));
        assert!(matches!(options.max_attempts, Some(Value::Const(_))));
        assert!(matches!(options.priority, Some(Value::Const(_))));
        assert!(matches!(options.timeout, Some(Value::Const(_))));
    }

    #[test]
    fn a_mistake_hides_no_other_and_spoils_no_other_option() {
        let (options, words) = read(
            r#"queue = "a b", , lease, nam = 1, priority = = 3, timeout = "1s" max_attempts = 4,
                "x", max_crashes = 5, max_crashes = 6, register = 1"#,
        );
        let found = [
            "queue name",
            "expected an option",
            "`lease` needs a value",
            "did you mean `name`",
            "expected an expression",
            "expected a `,`",
            "expected an option",
            "given twice",
            "given here first",
            "`true` or `false`",
        ];
        for part in found {
            assert!(words.iter().any(|words| words.contains(part)), "{part}: {words:#?}");
        }
        assert_eq!(words.len(), found.len(), "{words:#?}");
        assert_eq!(literal(options.timeout.as_ref()), Some(Duration::from_secs(1)));
        assert_eq!(literal(options.max_attempts.as_ref()), Some(4));
        assert_eq!(literal(options.max_crashes.as_ref()), Some(5));
    }

    #[test]
    fn the_nearest_option_is_suggested_and_nothing_far_away() {
        for (written, meant) in [
            ("qeue", Some("queue")),
            ("Queue", Some("queue")),
            ("max_attempt", Some("max_attempts")),
            ("maxattempts", Some("max_attempts")),
            ("retries", Some("max_attempts")),
            ("time_out", Some("timeout")),
            ("back_off", Some("backoff")),
            ("krate", Some("crate")),
            ("uniqe", Some("unique")),
            ("dedupe", Some("unique")),
            ("cron", None),
            ("x", None),
            ("colour", None),
        ] {
            assert_eq!(nearest(written, OPTIONS), meant, "{written}");
        }
        assert_eq!(nearest("max", BACKOFF_OPTIONS), Some("cap"));
        assert_eq!(nearest("queue", BACKOFF_OPTIONS), None);
    }

    #[test]
    fn what_makes_a_job_unique_is_read() {
        let (options, words) = read("unique");
        assert_eq!(words, [""; 0]);
        let unique = options.unique.expect("it was given");
        assert!(unique.by.is_none() && unique.scope.is_none() && unique.on_conflict.is_none());
        let (options, words) = read(
            r#"unique(by(a, b,), scope = "1h30m", on_conflict = "debounce", max_wait = "2d")"#,
        );
        assert_eq!(words, [""; 0]);
        let unique = options.unique.expect("it was given");
        assert_eq!(unique.by.expect("given"), ["a", "b"]);
        assert_eq!(unique.scope, Some(UniqueScope::For(Duration::from_secs(5_400))));
        let max_wait = Duration::from_secs(2 * 86_400);
        assert_eq!(unique.on_conflict, Some(OnConflict::Debounce { max_wait }));
    }

    #[test]
    fn what_would_keep_no_twin_out_is_refused() {
        for (text, part) in [
            ("unique = true", "stands alone"),
            ("unique(by())", "by no parameter"),
            ("unique(by = a)", "list of parameters"),
            ("unique(by(a, a))", "given twice"),
            ("unique(by(a.b))", "names of parameters"),
            ("unique(scope = \"0s\")", "keeps no job out"),
            ("unique(scope = \"until_done\")", "until_started"),
            ("unique(scope = 3)", "string literal"),
            ("unique(on_conflict = \"merge\")", "\"debounce\""),
            ("unique(on_conflict = \"debounce\")", "max_wait"),
            ("unique(on_conflict = \"debounce\", max_wait = \"0s\")", "longer than 0s"),
            ("unique(on_conflict = \"skip\", max_wait = \"1s\")", "for `on_conflict"),
            ("unique(until = \"1h\")", "did you mean `scope`"),
            ("unique(key = 1)", "has no option"),
        ] {
            let words = read(text).1;
            assert!(words.iter().any(|words| words.contains(part)), "{text}: {words:?}");
            assert_eq!(words.len(), 1, "{text}: {words:?}");
        }
    }

    #[test]
    fn numbers_are_held_to_their_limits() {
        for (text, refused) in [
            ("max_attempts = 1", false),
            ("max_attempts = 2147483647", false),
            ("max_attempts = 2147483648", true),
            ("max_attempts = 4294967296", true),
            ("max_attempts = 0", true),
            ("max_crashes = 32767", false),
            ("max_crashes = 32768", true),
            ("priority = 4", false),
            ("priority = 5", true),
            ("priority = -5", true),
            ("priority = 99999", true),
            ("backoff(factor = 1)", false),
            ("backoff(factor = 0.99)", true),
            ("backoff(factor = -2.0)", true),
            ("backoff(factor = 1e999)", true),
            ("expires = \"1ms\"", false),
            ("expires = \"0s\"", true),
            ("lease = \"1s\"", false),
            ("lease = \"999ms\"", true),
            ("lease = \"30d\"", false),
            ("lease = \"31d\"", true),
            ("timeout = \"0ms\"", true),
            ("backoff(base = \"1h\")", false),
            ("backoff(base = \"1h1ms\")", true),
            ("backoff(cap = \"5s\")", false),
            ("backoff(cap = \"4s\")", true),
        ] {
            assert_eq!(!read(text).1.is_empty(), refused, "{text}");
        }
    }
}
