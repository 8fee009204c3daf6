//! Reads the function under `#[job]` and checks that it can be a job.
//!
//! The body is kept as it is, unparsed: it may be half typed, and is none of our business. All
//! mistakes of a signature are reported, each at its own token; a parameter with a mistake is
//! marked, so that what is written in its place causes no further error.

use jobq_core::queue;
use proc_macro2::{Delimiter, Span, TokenStream, TokenTree};
use quote::{ToTokens, quote};
use syn::ext::IdentExt;
use syn::parse::{Parse, ParseStream, Parser};
use syn::punctuated::Punctuated;
use syn::{
    Attribute, FnArg, GenericParam, Ident, Lit, Meta, Pat, PatType, PathArguments, ReturnType,
    Safety, Signature, Token, Type, Visibility,
};

use crate::args::{Options, Problems};

/// The function under `#[job]`.
pub(crate) struct JobFn {
    pub(crate) attrs: Vec<Attribute>,
    pub(crate) vis: Visibility,
    pub(crate) sig: Signature,
    pub(crate) body: TokenStream,
    /// The parameters, once [`check`](Self::check) has read them.
    pub(crate) params: Vec<Param>,
}

/// A parameter of the function.
pub(crate) struct Param {
    /// Its name, if its pattern is one.
    pub(crate) name: Option<Ident>,
    pub(crate) ty: Type,
    pub(crate) role: Role,
    /// Whether its type cannot be repeated elsewhere, because an error was reported for it.
    pub(crate) broken: bool,
}

/// Where a parameter's value comes from.
pub(crate) enum Role {
    /// From the payload; with the `#[serde(...)]` of its field.
    Payload { serde: Vec<Attribute>, form: Form },
    /// From the runtime, by value.
    Injected,
    /// From the runtime, as `&JobContext`.
    InjectedRef,
}

/// What the `#[serde(...)]` of a parameter asks of its type.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Form {
    /// To be written and read.
    #[default]
    Plain,
    /// To have a default too.
    Default,
    /// Whatever the functions named there ask.
    Custom,
    /// As [`Plain`](Self::Plain); the parameter is the whole payload.
    Whole,
}

/// What to do where a parameter has no key of its own in the payload.
const UNIQUE_BY_FIELDS: &str = "leave `by` out, or name its fields at enqueue: \
                                `.unique(Unique::by(&[\"…\"]))`";
const KEY_OF_FIELDS: &str = "give the key at enqueue: `.key(\"…\")`";

impl Parse for JobFn {
    fn parse(input: ParseStream) -> syn::Result<Self> {
        Ok(Self {
            attrs: input.call(Attribute::parse_outer)?,
            vis: input.parse()?,
            sig: input.parse()?,
            body: input.parse()?,
            params: Vec::new(),
        })
    }
}

impl ToTokens for JobFn {
    fn to_tokens(&self, tokens: &mut TokenStream) {
        let Self { attrs, vis, sig, body, .. } = self;
        tokens.extend(quote!(#(#attrs)* #vis #sig #body));
    }
}

impl JobFn {
    /// Reads a function; what is none is an error with a cure.
    pub(crate) fn read(item: TokenStream) -> syn::Result<Self> {
        let read = syn::parse2::<Self>(item.clone());
        let is_fn = |tree: TokenTree| matches!(tree, TokenTree::Ident(word) if word == "fn");
        if read.is_err() && !item.clone().into_iter().any(is_fn) {
            return Err(not_a_function(item));
        }
        read
    }

    /// The kind: what stored jobs call the function.
    pub(crate) fn kind(&self, options: &Options) -> String {
        options.name.as_ref().map_or_else(|| self.sig.ident.unraw().to_string(), syn::LitStr::value)
    }

    /// Whether the function stands where no type can stand beside it, in an `impl` or trait.
    pub(crate) fn is_method(&self) -> bool {
        matches!(self.sig.inputs.first(), Some(FnArg::Receiver(_)))
    }

    /// Whether types in the signature may name the function's own generic parameters.
    pub(crate) fn is_generic(&self) -> bool {
        !self.sig.generics.params.is_empty()
    }

    /// The parameters that make up the payload.
    pub(crate) fn payload(&self) -> impl Iterator<Item = &Param> {
        self.params.iter().filter(|param| matches!(param.role, Role::Payload { .. }))
    }

    /// Reads the parameters, takes our attributes off them, and reports every mistake.
    pub(crate) fn check(&mut self, options: &Options, problems: &mut Problems) {
        self.check_head(options, problems);
        self.check_generics(problems);
        let generic = self.is_generic();
        let mut params = Vec::new();
        for input in &mut self.sig.inputs {
            match input {
                FnArg::Receiver(receiver) => problems.at(
                    receiver.self_token,
                    "a job is no method: a worker has no `self` to call it on; move it out of the \
                     `impl`, and take what it needs as parameters or as `State<T>`",
                ),
                FnArg::Typed(input) => params.push(Param::read(input, generic, problems)),
            }
        }
        self.params = params;
        self.check_payload(problems);
        self.check_unique(options, problems);
        self.check_key(options, problems);
        self.check_return(problems);
    }

    fn check_head(&mut self, options: &Options, problems: &mut Problems) {
        let sig = &mut self.sig;
        if let Some(token) = sig.constness.take() {
            problems.at(token, "a job is run by a worker, not by the compiler; remove `const`");
        }
        if let Safety::Unsafe(token) = &sig.safety {
            let words = "a worker calls the function, so it must be safe; remove `unsafe` and put \
                         it around the code that needs it";
            problems.at(token, words);
        }
        if let Some(abi) = &sig.abi {
            let words = "a worker calls the function from Rust; remove `extern`";
            problems.at(abi, words);
        }
        if let Some(variadic) = sig.variadic.take() {
            let words = "a payload has a fixed set of parameters; take a `Vec<T>` instead of `...`";
            problems.at(variadic.dots, words);
        }
        if options.name.is_none() {
            let kind = sig.ident.unraw().to_string();
            if let Err(error) = queue::check_name("job", &kind) {
                let words = format!("{error}, and give it here: `#[job(name = \"…\")]`");
                problems.at(&sig.ident, words);
            }
        }
        for attr in &self.attrs {
            if attr.path().segments.last().is_some_and(|segment| segment.ident == "job") {
                problems.at(attr, "one `#[job]` is enough; join their options in the first");
            }
        }
        self.attrs.retain(|attr| {
            attr.path().segments.last().is_none_or(|segment| segment.ident != "job")
        });
        match self.body.clone().into_iter().next() {
            Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {}
            other => {
                let place = other.map_or_else(|| sig.fn_token.to_token_stream(), Into::into);
                problems.at(place, "a job function needs a body: write `{ .. }`");
                self.attrs.push(syn::parse_quote!(#[allow(unused_variables)]));
                self.body = quote!({ loop {} });
            }
        }
    }

    fn check_generics(&self, problems: &mut Problems) {
        let generics = &self.sig.generics;
        if generics.params.is_empty() {
            if let Some(clause) = &generics.where_clause {
                problems.at(clause, "a job has no type parameters to bound; remove the `where`");
            }
            return;
        }
        let lifetimes = |param: &GenericParam| matches!(param, GenericParam::Lifetime(_));
        problems.at(
            &generics.params,
            if generics.params.iter().all(lifetimes) {
                "a job owns its payload, which is read back from the database; remove the \
                 lifetimes and take owned types, such as `String`"
            } else {
                "a job must have one concrete payload; write a job function for each type, which \
                 calls the generic function"
            },
        );
    }

    /// Checks what concerns more than one parameter of the payload.
    fn check_payload(&self, problems: &mut Problems) {
        let whole = |param: &Param| matches!(param.role, Role::Payload { form: Form::Whole, .. });
        if let Some(sole) = self.payload().find(|param| whole(param)) {
            for other in self.payload().filter(|param| !std::ptr::eq(*param, sole)) {
                problems.at(
                    &other.ty,
                    "another parameter is `#[payload]`, the whole payload; put this into it, or \
                     remove `#[payload]` there",
                );
            }
            return;
        }
        let mut keys: Vec<(String, &Param)> = Vec::new();
        for param in self.payload() {
            let Some(key) = param.key() else { continue };
            if keys.iter().any(|(other, _)| *other == key) {
                let words = format!(
                    "another parameter has the JSON key {key:?} too, so that one value would be \
                     lost; give this one another `rename`"
                );
                problems.at(&param.name, words);
            }
            keys.push((key, param));
        }
    }

    /// Checks that jobs are unique by parameters that there are.
    fn check_unique(&self, options: &Options, problems: &mut Problems) {
        if let Some(by) = options.unique.as_ref().and_then(|unique| unique.by.as_ref()) {
            self.check_names(by, UNIQUE_BY_FIELDS, problems);
        }
    }

    /// Checks that keys are made of parameters that there are.
    fn check_key(&self, options: &Options, problems: &mut Problems) {
        if let Some(key) = &options.key {
            self.check_names(key, KEY_OF_FIELDS, problems);
        }
    }

    /// Checks that parameters are there, and have keys in the payload; `instead` is what to do where
    /// they have none.
    fn check_names(&self, names: &[Ident], instead: &str, problems: &mut Problems) {
        for name in names {
            let words = match self.params.iter().find(|param| param.name.as_ref() == Some(name)) {
                Some(param) if !matches!(param.role, Role::Payload { .. }) => {
                    format!("`{name}` is injected, not stored; name a parameter of the payload")
                }
                Some(Param { role: Role::Payload { form: Form::Whole, .. }, .. }) => {
                    format!("`{name}` is the whole payload; {instead}")
                }
                Some(param) if param.key().is_none() => {
                    format!("`{name}` has no key of its own in the payload; {instead}")
                }
                Some(_) => continue,
                None => {
                    let names = self.payload().filter_map(|param| param.name.as_ref());
                    let names: Vec<String> = names.map(|name| format!("`{name}`")).collect();
                    let there = match names.len() {
                        0 => "the function has none".to_owned(),
                        _ => format!("there are {}", names.join(", ")),
                    };
                    format!("no parameter of the payload is named `{name}`; {there}")
                }
            };
            problems.at(name, words);
        }
    }

    fn check_return(&self, problems: &mut Problems) {
        let ReturnType::Type(_, ty) = &self.sig.output else { return };
        let (place, words) = match first_misfit(ty.to_token_stream(), true) {
            _ if matches!(peel(ty), Type::Never(_)) => {
                (ty.to_token_stream(), "a job ends some day; return `()` or `Result<(), E>`")
            }
            None => return,
            // The function's own lifetimes are reported where they are declared.
            Some(Misfit::Lifetime { elided: false, .. }) if self.is_generic() => return,
            Some(Misfit::Impl(place)) if names_future(ty) => (
                place,
                "write `async fn` and return what the future would: `()`, `Result<(), E>` or \
                 `Result<T, E>`",
            ),
            Some(Misfit::Impl(place) | Misfit::Infer(place)) => (
                place,
                "a job's result is stored, so its type must be named: `()`, `Result<(), E>` or \
                 `Result<T, E>`",
            ),
            Some(Misfit::Reference(place) | Misfit::Lifetime { place, .. }) => (
                place,
                "a job's result is stored, so it is owned; return `String` instead of `&str`, `T` \
                 instead of `&T`",
            ),
        };
        problems.at(place, words);
    }
}

impl Param {
    /// Reads a parameter and takes our attributes off it.
    fn read(input: &mut PatType, generic: bool, problems: &mut Problems) -> Self {
        let mut marks = Marks::default();
        input.attrs.retain(|attr| marks.keeps(attr, problems));
        let name = match &*input.pat {
            Pat::Ident(pat) => Some(pat.ident.clone()),
            _ => None,
        };
        let mut param = Self {
            name,
            ty: (*input.ty).clone(),
            role: Role::Injected,
            broken: generic || marks.broken,
        };
        if let (Some(inject), Some(payload)) = (&marks.inject, &marks.payload) {
            problems.at(inject, "`#[inject]` and `#[payload]` exclude each other; remove one");
            problems.at(payload, "`#[payload]` is given here");
            param.broken = true;
            return param;
        }
        let recognised = if marks.payload.is_some() { None } else { injected_by_name(&param.ty) };
        match recognised {
            Some(role) => param.role = role,
            None if marks.inject.is_some() => {}
            None => {
                let form = if marks.payload.is_some() { Form::Whole } else { marks.form };
                param.role = Role::Payload { serde: marks.serde, form };
                param.broken |= !is_plain_name(&input.pat, problems);
                param.broken |= !fits_payload(&param.ty, generic, problems);
                return param;
            }
        }
        for attr in &marks.serde {
            problems.at(attr, "this parameter is injected, not stored; remove `#[serde]`");
        }
        param.broken |= !fits_injection(&param.ty, &param.role, generic, problems);
        param
    }

    /// Whether serde is told what to do with its very type.
    pub(crate) fn is_custom(&self) -> bool {
        matches!(self.role, Role::Payload { form: Form::Custom, .. })
    }

    /// The key in the payload's JSON, as far as it is known here.
    pub(crate) fn key(&self) -> Option<String> {
        let Role::Payload { serde, .. } = &self.role else { return None };
        let mut key = self.name.as_ref()?.unraw().to_string();
        for meta in serde.iter().flat_map(serde_metas) {
            if meta.path().is_ident("flatten") {
                return None;
            }
            if meta.path().is_ident("rename") {
                key = string_value(&meta)?;
            }
        }
        Some(key)
    }
}

/// What serde takes on a field and may ask of its type what we do not know.
const SERDE_WORDS: [&str; 6] =
    ["default", "with", "serialize_with", "deserialize_with", "skip_serializing_if", "bound"];

/// The attributes of a parameter that are ours.
#[derive(Default)]
struct Marks {
    inject: Option<Attribute>,
    payload: Option<Attribute>,
    serde: Vec<Attribute>,
    form: Form,
    broken: bool,
}

impl Marks {
    /// Takes note of an attribute; whether it stays on the parameter.
    fn keeps(&mut self, attr: &Attribute, problems: &mut Problems) -> bool {
        let path = attr.path();
        if path.is_ident("inject") || path.is_ident("payload") {
            if !matches!(attr.meta, Meta::Path(_)) {
                let path = path.to_token_stream();
                problems.at(attr, format!("`#[{path}]` takes nothing; write just `#[{path}]`"));
            }
            let mark = if path.is_ident("inject") { &mut self.inject } else { &mut self.payload };
            *mark = Some(attr.clone());
            false
        } else if path.is_ident("serde") {
            self.read_serde(attr, problems);
            self.serde.push(attr.clone());
            false
        } else if path.is_ident("cfg") || path.is_ident("cfg_attr") {
            let words = "a payload must be the same in every build, or one could not read what \
                         another wrote; make the parameter an `Option<T>`, or put `#[cfg]` on two \
                         job functions with different names";
            problems.at(attr, words);
            false
        } else {
            true
        }
    }

    fn read_serde(&mut self, attr: &Attribute, problems: &mut Problems) {
        for meta in serde_metas(attr) {
            let Some(word) = meta.path().get_ident().map(ToString::to_string) else { continue };
            match &*word {
                "skip" | "skip_serializing" | "skip_deserializing" => {
                    let words = format!(
                        "with `{word}` the argument would be lost between enqueue and run; remove \
                         it, or remove the parameter"
                    );
                    problems.at(meta, words);
                    self.broken = true;
                }
                "rename" if matches!(meta, Meta::List(_)) => {
                    let words = "the function reads what its `new` wrote, so a key has one name: \
                                 `rename = \"…\"`";
                    problems.at(meta, words);
                    self.broken = true;
                }
                "rename" | "alias" | "flatten" => {}
                _ if !SERDE_WORDS.contains(&&*word) => {
                    let known = SERDE_WORDS.join("`, `");
                    let words = format!(
                        "serde has no attribute `{word}` that fits a parameter; there are `rename`, \
                         `alias`, `flatten`, `{known}`"
                    );
                    problems.at(meta, words);
                    self.broken = true;
                }
                "default" if matches!(meta, Meta::Path(_)) && self.form == Form::Plain => {
                    self.form = Form::Default;
                }
                _ => self.form = Form::Custom,
            }
        }
    }
}

/// The error for another item than a function, at the word that says what it is.
fn not_a_function(item: TokenStream) -> syn::Error {
    let head = |input: ParseStream| {
        input.call(Attribute::parse_outer)?;
        input.parse::<Visibility>()?;
        let place = input.span();
        input.parse::<TokenStream>()?;
        Ok(place)
    };
    let place = head.parse2(item).unwrap_or_else(|_| Span::call_site());
    let words = "`#[job]` goes on a function: `#[job] async fn resize(image_id: i64) { .. }`";
    syn::Error::new(place, words)
}

/// What is inside `#[serde(...)]`; nothing if it cannot be read, which serde will report.
fn serde_metas(attr: &Attribute) -> Vec<Meta> {
    let Meta::List(list) = &attr.meta else { return Vec::new() };
    Punctuated::<Meta, Token![,]>::parse_terminated
        .parse2(list.tokens.clone())
        .map_or_else(|_| Vec::new(), |metas| metas.into_iter().collect())
}

fn string_value(meta: &Meta) -> Option<String> {
    match &meta.require_name_value().ok()?.value {
        syn::Expr::Lit(syn::ExprLit { lit: Lit::Str(text), .. }) => Some(text.value()),
        _ => None,
    }
}

/// Recognises what the runtime injects by the last segment of its path.
fn injected_by_name(ty: &Type) -> Option<Role> {
    match peel(ty) {
        Type::Path(path) => {
            let segment = path.path.segments.last()?;
            match &*segment.ident.to_string() {
                "State" if matches!(segment.arguments, PathArguments::AngleBracketed(_)) => {
                    Some(Role::Injected)
                }
                "JobContext" | "CancellationToken" if segment.arguments.is_none() => {
                    Some(Role::Injected)
                }
                _ => None,
            }
        }
        Type::Reference(reference) => matches!(injected_by_name(&reference.elem)?, Role::Injected)
            .then_some(Role::InjectedRef),
        _ => None,
    }
}

/// Whether the pattern is a name, and so the key in the payload.
fn is_plain_name(pat: &Pat, problems: &mut Problems) -> bool {
    let words = match pat {
        Pat::Ident(pat) if pat.ident.unraw().to_string().starts_with('_') => {
            "job arguments need a name; it becomes the JSON key, so begin it with a letter \
             (`let _ = name;` in the body if it is not used)"
        }
        Pat::Ident(pat) if pat.by_ref.is_none() && pat.subpat.is_none() => return true,
        Pat::Wild(_) => "job arguments need a name; it becomes the JSON key",
        _ => {
            "job arguments need a name; it becomes the JSON key, so write `name: T` and take it \
             apart in the body (if the runtime injects it, mark it `#[inject]`)"
        }
    };
    problems.at(pat, words);
    false
}

/// Whether the type is an owned, named one.
fn fits_payload(ty: &Type, generic: bool, problems: &mut Problems) -> bool {
    match first_misfit(ty.to_token_stream(), false) {
        None => return true,
        Some(Misfit::Reference(place)) => {
            let mut owned = owned_form(&place);
            if let Type::Reference(reference) = peel(ty)
                && !ends_in(&reference.elem, "str")
                && matches!(peel(&reference.elem), Type::Path(_))
            {
                owned += "; if the runtime injects it, take it by value and mark it `#[inject]`";
            }
            let words =
                format!("a payload is owned, because it is read back from the database; {owned}");
            problems.at(place, words);
        }
        Some(Misfit::Impl(place)) => {
            problems.at(place, "a job must have one concrete payload; name the type");
        }
        // The function's own lifetimes are reported where they are declared.
        Some(Misfit::Lifetime { elided: false, .. }) if generic => {}
        Some(Misfit::Lifetime { place, .. }) => problems.at(
            place,
            "a payload is owned, because it is read back from the database; use an owned type, \
             or `'static` here",
        ),
        Some(Misfit::Infer(place)) => {
            problems.at(place, "a parameter of a job has a type of its own; name it");
        }
    }
    false
}

/// Whether the type can be injected, as far as its form goes.
fn fits_injection(ty: &Type, role: &Role, generic: bool, problems: &mut Problems) -> bool {
    if let (Role::InjectedRef, Type::Reference(reference)) = (role, peel(ty)) {
        let is_context = ends_in(&reference.elem, "JobContext");
        if !is_context {
            let name = readable(&reference.elem);
            let words =
                format!("only `&JobContext` is injected as a reference; take `{name}` by value");
            problems.at(ty, words);
        } else if let Some(token) = &reference.mutability {
            problems.at(token, "the context is shared; write `&JobContext`");
        } else if let (Some(lifetime), false) = (&reference.lifetime, generic) {
            problems.at(lifetime, "the context lives as long as the attempt; write `&JobContext`");
        } else {
            return true;
        }
        return false;
    }
    let (place, words) = match first_misfit(ty.to_token_stream(), true) {
        None => return true,
        Some(Misfit::Lifetime { elided: false, .. }) if generic => return false,
        Some(Misfit::Impl(place) | Misfit::Infer(place)) => {
            (place, "the runtime finds state by its type; name the type")
        }
        Some(Misfit::Reference(place) | Misfit::Lifetime { place, .. }) => (
            place,
            "what is injected is owned; put something cheap to clone into the runtime, such as an \
             `Arc<T>`, and take it as `State<Arc<T>>`",
        ),
    };
    problems.at(place, words);
    false
}

/// A part of a type that no stored or injected value can have, with its tokens.
enum Misfit {
    Reference(TokenStream),
    Impl(TokenStream),
    Lifetime { place: TokenStream, elided: bool },
    Infer(TokenStream),
}

/// Finds the first such part.
///
/// In a payload a `&'static T` is one; elsewhere it is not, and what stands in parentheses is not
/// looked at, since it may be `dyn Fn(&T)`.
fn first_misfit(tokens: TokenStream, static_is_fine: bool) -> Option<Misfit> {
    let trees: Vec<TokenTree> = tokens.into_iter().collect();
    for (index, tree) in trees.iter().enumerate() {
        let rest = || trees[index..].iter().cloned().collect::<TokenStream>();
        match tree {
            TokenTree::Punct(punct) if punct.as_char() == '&' => {
                let is_static = lifetime_at(&trees, index + 1).is_some_and(|name| name == "static");
                if !(is_static && static_is_fine) {
                    return Some(Misfit::Reference(reference_at(&trees, index)));
                }
            }
            TokenTree::Punct(punct) if punct.as_char() == '\'' => {
                let name = lifetime_at(&trees, index)?;
                if name != "static" {
                    let place = trees[index..].iter().take(2).cloned().collect();
                    return Some(Misfit::Lifetime { place, elided: name == "_" });
                }
            }
            TokenTree::Ident(word) if word == "impl" => return Some(Misfit::Impl(rest())),
            TokenTree::Ident(word) if word == "_" => {
                return Some(Misfit::Infer(tree.clone().into()));
            }
            TokenTree::Group(group) => {
                let hidden = group.delimiter() == Delimiter::Parenthesis && static_is_fine;
                if !hidden && let Some(misfit) = first_misfit(group.stream(), static_is_fine) {
                    return Some(misfit);
                }
            }
            _ => {}
        }
    }
    None
}

/// The name of the lifetime that begins at `index`, without its apostrophe.
fn lifetime_at(trees: &[TokenTree], index: usize) -> Option<String> {
    match (trees.get(index)?, trees.get(index + 1)?) {
        (TokenTree::Punct(punct), TokenTree::Ident(name)) if punct.as_char() == '\'' => {
            Some(name.to_string())
        }
        _ => None,
    }
}

/// The reference type that begins at `index`, or else its `&`.
fn reference_at(trees: &[TokenTree], index: usize) -> TokenStream {
    let rest: TokenStream = trees[index..].iter().cloned().collect();
    let reference = |input: ParseStream| {
        let reference = input.parse::<syn::TypeReference>()?;
        input.parse::<TokenStream>()?;
        Ok(reference.into_token_stream())
    };
    reference.parse2(rest).unwrap_or_else(|_| trees[index].clone().into())
}

/// What to write instead of a reference.
fn owned_form(reference: &TokenStream) -> String {
    let Ok(reference) = syn::parse2::<syn::TypeReference>(reference.clone()) else {
        return "use an owned type".to_owned();
    };
    match peel(&reference.elem) {
        ty if ends_in(ty, "str") => "use `String`".to_owned(),
        ty if ends_in(ty, "Path") => "use `PathBuf`".to_owned(),
        Type::Slice(slice) => format!("use `Vec<{}>`", readable(&slice.elem)),
        ty => format!("use `{}`", readable(ty)),
    }
}

/// The type as people write it: `Vec<u8>`, not `Vec < u8 >`.
fn readable(ty: &Type) -> String {
    let text = ty.to_token_stream().to_string();
    let spaced = [(" < ", "<"), (" <", "<"), ("< ", "<"), (" >", ">"), (" :: ", "::"), (" ,", ",")];
    spaced.iter().fold(text, |text, (from, to)| text.replace(from, to))
}

/// Whether the type is a path whose last segment is `name`.
fn ends_in(ty: &Type, name: &str) -> bool {
    matches!(peel(ty), Type::Path(path)
        if path.path.segments.last().is_some_and(|segment| segment.ident == name))
}

fn names_future(ty: &Type) -> bool {
    ty.to_token_stream().to_string().contains("Future")
}

/// Takes off parentheses and the invisible groups of `macro_rules!` macros.
fn peel(mut ty: &Type) -> &Type {
    loop {
        ty = match ty {
            Type::Group(group) => &group.elem,
            Type::Paren(paren) => &paren.elem,
            other => return other,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn payload_words(ty: &str) -> Option<String> {
        let ty = syn::parse_str(ty).expect("a type");
        let mut problems = Problems::default();
        let fits = fits_payload(&ty, false, &mut problems);
        let words = problems.into_compile_errors().map(|errors| errors.to_string());
        assert_eq!(fits, words.is_none());
        words
    }

    #[test]
    fn an_owned_type_is_suggested_for_each_reference() {
        for (ty, owned) in [
            ("&str", "`String`"),
            ("&'static std::path::Path", "`PathBuf`"),
            ("&[Vec<u8>]", "`Vec<Vec<u8>>`"),
            (
                "&mut std::collections::HashMap<String, u8>",
                "`std::collections::HashMap<String, u8>`",
            ),
            ("Option<Box<&'static (u8, i64)>>", "`(u8, i64)`"),
            ("Vec<(u8, &str)>", "`String`"),
        ] {
            let words = payload_words(ty).expect(ty);
            assert!(words.contains(owned), "{ty}: {words}");
        }
    }

    #[test]
    fn owned_types_fit_a_payload() {
        for ty in ["i64", "Cow<'static, str>", "[u8; 4]", "(u8, Vec<String>)", "<u8 as A>::B", "()"]
        {
            assert_eq!(payload_words(ty), None, "{ty}");
        }
    }

    #[test]
    fn what_is_injected_is_known_by_the_last_segment() {
        let role = |ty: &str| injected_by_name(&syn::parse_str(ty).expect("a type"));
        for ty in ["State<u8>", "a::b::State<(u8,)>", "jobq::JobContext", "(CancellationToken)"] {
            assert!(matches!(role(ty), Some(Role::Injected)), "{ty}");
        }
        assert!(matches!(role("&'a mut JobContext"), Some(Role::InjectedRef)));
        for ty in ["State", "JobContext<u8>", "MyState<u8>", "&&JobContext", "[JobContext; 1]"] {
            assert!(role(ty).is_none(), "{ty}");
        }
    }
}
