//! Writes what `#[job]` makes of a function: the function itself, its twin type, and one
//! `const _` with all the rest.
//!
//! The twin is an enum without variants: types and functions have separate namespaces, so it may
//! have the function's name, in a module as in a function's body. Nothing here decides anything
//! at run time; that is library code, which this names by absolute paths.
//!
//! What stands for the user's code but is not it (the twin's name, the parameters of `new`) has
//! the place of the user's code and the context of the macro: errors and editors point to the
//! right token, and lints about names and use do not fire twice.

use std::time::Duration;

use jobq_core::key::OnBlock;
use jobq_core::unique::{OnConflict, UniqueScope};
use proc_macro2::{Group, Ident, Literal, Span, TokenStream, TokenTree};
use quote::{ToTokens, format_ident, quote, quote_spanned};
use syn::ext::IdentExt;
use syn::spanned::Spanned;
use syn::{Expr, ReturnType, Type};

use crate::args::{BackoffOptions, Number, Options, UniqueOptions, Value};
use crate::handler::{Form, JobFn, Param, Role};

/// The expansion of a function without mistakes.
pub(crate) fn job(function: &JobFn, options: &Options) -> TokenStream {
    Writer::new(function, options).job()
}

/// What is left of a function with mistakes: the function, and a twin with the same methods, so
/// that nothing else in the program stops compiling because of them.
pub(crate) fn stub(function: &JobFn, options: &Options, errors: &TokenStream) -> TokenStream {
    if function.is_method() {
        return quote!(#function #errors);
    }
    let stub = Writer::new(function, options).stub();
    quote!(#stub #errors)
}

struct Writer<'a> {
    function: &'a JobFn,
    options: &'a Options,
    /// The path of jobq.
    jobq: TokenStream,
    /// The path of what only this file names.
    private: TokenStream,
    /// The twin's name.
    twin: Ident,
}

impl<'a> Writer<'a> {
    fn new(function: &'a JobFn, options: &'a Options) -> Self {
        let jobq = options.krate.as_ref().map_or_else(|| quote!(::jobq), ToTokens::to_token_stream);
        let private = quote!(#jobq::__private);
        let name = &function.sig.ident;
        let twin = in_place_of(name);
        Self { function, options, jobq, private, twin }
    }

    fn job(&self) -> TokenStream {
        let Self { function, jobq, private, twin, .. } = self;
        let declaration = self.declaration();
        let signature = self.signature();
        let payload = self.payload();
        let methods = self.methods();
        let runner = self.runner();
        let def = self.def();
        let checked = self.checked(&self.fields(true), Span::call_site(), Span::call_site());
        let register = self.options.register.then(|| quote!(#private::register! { #twin }));
        let is_deprecated = function.attrs.iter().any(|attr| attr.path().is_ident("deprecated"));
        let allow_deprecated = is_deprecated.then(|| quote!(#[allow(deprecated)]));
        let kind = function.kind(self.options);
        // A payload is owned, also by a function that only reads it.
        let allow_owned = function.sig.asyncness.is_none();
        let allow_owned = allow_owned.then(|| quote!(#[allow(clippy::needless_pass_by_value)]));
        // A payload that is not `Send` is an error at the function's name.
        let payload_type = respan(&self.payload_type(), twin.span());
        quote! {
            #allow_owned
            #function
            #declaration
            #allow_deprecated
            const _: () = {
                // Private, and so is what is implemented with it: see `Param`.
                enum __Jobq {}
                #signature
                #payload
                #methods
                #runner
                // Evaluated whether or not the job is used.
                const _: #jobq::JobOptions = #checked;
                #[automatically_derived]
                impl #jobq::Job for #twin {
                    type Payload = #payload_type;
                    const NAME: &'static ::core::primitive::str = #kind;
                    const DEF: &'static #jobq::JobDef = #def;
                }
                #register
            };
        }
    }

    fn stub(&self) -> TokenStream {
        let Self { function, jobq, private, twin, .. } = self;
        let declaration = self.declaration();
        let methods = self.stub_methods();
        quote! {
            #function
            #declaration
            #[allow(deprecated)]
            const _: () = {
                #methods
                #[automatically_derived]
                impl #jobq::Job for #twin {
                    type Payload = ();
                    const NAME: &'static ::core::primitive::str = "";
                    const DEF: &'static #jobq::JobDef = &#jobq::JobDef {
                        kind: "",
                        aliases: &[],
                        options: #jobq::JobOptions::DEFAULT,
                        file: "",
                        line: 0,
                        module: "",
                        needs: ::std::vec::Vec::new,
                        handler: #private::Handler::Blocking(|_| loop {}),
                    };
                }
            };
        }
    }

    /// The twin type, documented like the function.
    fn declaration(&self) -> TokenStream {
        let vis = self.vis();
        let twin = &self.twin;
        let attrs = self.function.attrs.iter().filter_map(|attr| {
            let meta = &attr.meta;
            if attr.path().is_ident("doc") {
                // Examples in the documentation are tested once, as the function's.
                Some(quote!(#[cfg_attr(not(doctest), #meta)]))
            } else {
                attr.path().is_ident("deprecated").then(|| attr.to_token_stream())
            }
        });
        quote! {
            #(#attrs)*
            #[allow(non_camel_case_types)]
            #vis enum #twin {}
        }
    }

    /// One `impl` for each type in the function's signature, so that each is checked once.
    fn signature(&self) -> TokenStream {
        let Self { function, private, twin, .. } = self;
        let params = function.params.iter().enumerate().filter_map(|(n, param)| {
            let role = self.param_trait(n, param)?;
            let ty = match param.role {
                Role::InjectedRef => referent(&param.ty),
                _ => &param.ty,
            };
            Some(quote!(impl #role for #twin { type Type = #ty; }))
        });
        let returned = match &function.sig.output {
            ReturnType::Default => quote!(()),
            ReturnType::Type(_, ty) => ty.to_token_stream(),
        };
        quote! {
            #(#params)*
            impl #private::Returned<__Jobq> for #twin { type Type = #returned; }
        }
    }

    /// The trait that says what is asked of the type of parameter `n`.
    fn param_trait(&self, n: usize, param: &Param) -> Option<TokenStream> {
        let role = match &param.role {
            Role::Payload { form: Form::Plain | Form::Whole, .. } => quote!(Param),
            Role::Payload { form: Form::Default, .. } => quote!(DefaultParam),
            Role::Payload { form: Form::Custom, .. } => return None,
            Role::Injected | Role::InjectedRef => quote!(Injected),
        };
        let private = &self.private;
        let n = Literal::usize_unsuffixed(n);
        Some(quote!(#private::#role<__Jobq, #n>))
    }

    /// The payload's declaration.
    ///
    /// It is generic over the twin where serde shall see `Param::Type`, which always can be stored,
    /// and not the user's type, which may not, and would then cause one error after the other.
    fn payload(&self) -> TokenStream {
        let Self { function, private, .. } = self;
        let mut bounds = Vec::new();
        let mut fields = Vec::new();
        let mut form = {
            let name = function.sig.ident.unraw();
            let expecting = format!("an object with the parameters of `{name}`");
            quote!(expecting = #expecting)
        };
        for (n, param) in function.params.iter().enumerate() {
            let Role::Payload { serde, form: param_form } = &param.role else { continue };
            let name = field_name(param);
            let ty = if let Some(role) = self.param_trait(n, param) {
                bounds.push(role.clone());
                quote!(#private::Field<<__J as #role>::Type>)
            } else {
                param.ty.to_token_stream()
            };
            fields.push(quote!(#(#serde)* #name: #ty));
            if *param_form == Form::Whole {
                form = quote!(transparent);
            }
        }
        let serde_path = quote!(#private::serde).to_string();
        let (generics, serde_bound) = if bounds.is_empty() {
            (TokenStream::new(), TokenStream::new())
        } else {
            let bounds = quote!(__J: #(#bounds)+*);
            let text = bounds.to_string();
            (quote!(<#bounds>), quote!(bound = #text,))
        };
        quote! {
            #[doc(hidden)]
            #[derive(#private::serde::Serialize, #private::serde::Deserialize)]
            #[serde(crate = #serde_path, #serde_bound #form)]
            pub struct __JobqPayload #generics { #(#fields),* }
        }
    }

    fn payload_type(&self) -> TokenStream {
        let twin = &self.twin;
        let is_generic = |param: &Param| self.param_trait(0, param).is_some();
        let arguments = self.function.payload().any(is_generic).then(|| quote!(::<#twin>));
        quote!(__JobqPayload #arguments)
    }

    /// `new`, `enqueue` and `NAME`.
    fn methods(&self) -> TokenStream {
        let Self { function, jobq, private, .. } = self;
        let names: Vec<Ident> = function.payload().map(field_name).collect();
        let params = function.payload().zip(&names).map(|(param, name)| {
            let ty = &param.ty;
            quote!(#name: #ty)
        });
        let fields = function.payload().zip(&names).map(|(param, name)| {
            if param.is_custom() { quote!(#name) } else { quote!(#name: #private::Field(#name)) }
        });
        let payload = self.payload_type();
        let new = quote!(#jobq::NewJob::of::<Self>(&#payload { #(#fields),* }));
        let target = target_name(&names);
        let enqueue = quote!(Self::new(#(#names),*).enqueue(#target).await);
        self.method_impl(&target, &params.collect::<Vec<_>>(), &new, &enqueue)
    }

    /// `new`, `enqueue` and `NAME` for a function with mistakes: they take whatever was meant.
    fn stub_methods(&self) -> TokenStream {
        let mut names = Vec::new();
        let params = self.function.payload().map(|param| {
            let name = param.name.as_ref().map(|_| field_name(param));
            let ty = &param.ty;
            let ty = if param.broken { quote!(impl ::core::marker::Sized) } else { quote!(#ty) };
            names.extend(name.clone());
            name.map_or_else(|| quote!(_: #ty), |name| quote!(#name: #ty))
        });
        let params: Vec<TokenStream> = params.collect();
        let body = quote!(loop {});
        self.method_impl(&target_name(&names), &params, &body, &body)
    }

    fn method_impl(
        &self,
        target: &Ident,
        params: &[TokenStream],
        new: &TokenStream,
        enqueue: &TokenStream,
    ) -> TokenStream {
        let Self { jobq, twin, .. } = self;
        let vis = self.vis();
        let new_doc = format!("A new `{twin}` job with these arguments, to be enqueued.");
        let enqueue_doc = format!(
            "Enqueues a `{twin}` job with these arguments.\n\n# Errors\n\nAs `NewJob::enqueue`."
        );
        quote! {
            #[automatically_derived]
            #[allow(clippy::too_many_arguments)]
            impl #twin {
                /// What stored jobs call this function.
                #vis const NAME: &'static ::core::primitive::str = <Self as #jobq::Job>::NAME;
                #[doc = #new_doc]
                #vis fn new(#(#params),*) -> #jobq::NewJob {
                    #new
                }
                #[doc = #enqueue_doc]
                #vis async fn enqueue(
                    #target: impl #jobq::EnqueueTarget,
                    #(#params),*
                ) -> #jobq::Result<#jobq::Enqueued> {
                    #enqueue
                }
            }
        }
    }

    /// The function through which a worker runs the job.
    fn runner(&self) -> TokenStream {
        let Self { function, private, twin, .. } = self;
        let name = &function.sig.ident;
        let payload = self.payload_type();
        let mut injected = Vec::new();
        let arguments = function.params.iter().enumerate().map(|(n, param)| {
            let local = format_ident!("__jobq_{n}");
            let field = field_name(param);
            if !matches!(param.role, Role::Payload { .. }) {
                let n = Literal::usize_unsuffixed(n);
                let inject = quote!(#private::inject::<#twin, __Jobq, #n>);
                injected.push(quote!(let #local = #inject(&__jobq_call);));
            }
            match param.role {
                Role::Payload { .. } if param.is_custom() => quote!(__jobq_payload.#field),
                Role::Payload { .. } => quote!(__jobq_payload.#field.0),
                Role::Injected => quote!(#local),
                Role::InjectedRef => quote!(&#local),
            }
        });
        let arguments: Vec<TokenStream> = arguments.collect();
        let awaited = function.sig.asyncness.map(|_| quote!(.await));
        let body = quote! {
            let __jobq_payload = match __jobq_call.payload::<#payload>() {
                ::core::result::Result::Ok(__jobq_payload) => __jobq_payload,
                ::core::result::Result::Err(__jobq_outcome) => return __jobq_outcome,
            };
            #(#injected)*
            ::core::mem::drop(__jobq_call);
            #private::outcome::<#twin, __Jobq>(#name(#(#arguments),*) #awaited)
        };
        let outcome = quote!(#private::Outcome);
        if function.sig.asyncness.is_none() {
            return quote!(fn __jobq_run(__jobq_call: #private::Call) -> #outcome { #body });
        }
        // A future that is not `Send` is an error at the function's name.
        let boxed = respan(&quote!(#private::boxed), twin.span());
        let future = quote_spanned!(twin.span()=> #boxed(async move { #body }));
        quote! {
            fn __jobq_run(__jobq_call: #private::Call) -> #private::BoxFuture<'static, #outcome> {
                #future
            }
        }
    }

    /// The job's definition.
    fn def(&self) -> TokenStream {
        let Self { function, jobq, private, .. } = self;
        let aliases = &self.options.aliases;
        let fields = self.fields(false);
        let needs = self.needs();
        let handler =
            if function.sig.asyncness.is_some() { quote!(Async) } else { quote!(Blocking) };
        quote! {
            &#jobq::JobDef {
                kind: <Self as #jobq::Job>::NAME,
                aliases: &[#(#aliases),*],
                options: #jobq::JobOptions { #fields },
                file: ::core::file!(),
                line: ::core::line!(),
                module: ::core::module_path!(),
                needs: #needs,
                handler: #private::Handler::#handler(__jobq_run),
            }
        }
    }

    fn needs(&self) -> TokenStream {
        let Self { function, private, twin, .. } = self;
        let mut needs = Vec::new();
        for (n, param) in function.params.iter().enumerate() {
            if !matches!(param.role, Role::Payload { .. }) {
                let n = Literal::usize_unsuffixed(n);
                needs.push(quote!(#private::need::<#twin, __Jobq, #n>(&mut __jobq_needs);));
            }
        }
        if needs.is_empty() {
            return quote!(::std::vec::Vec::new);
        }
        quote! {
            || {
                let mut __jobq_needs = ::std::vec::Vec::new();
                #(#needs)*
                __jobq_needs
            }
        }
    }

    /// The fields of `JobOptions`, of which those that were given are written out. Where `checks` are wanted, each `const`
    /// expression is checked by itself, so that it is the place of the error.
    fn fields(&self, checks: bool) -> TokenStream {
        let jobq = &self.jobq;
        let field = |name: &str, place: Option<(Span, Span)>, value: TokenStream| {
            let name = Ident::new(name, Span::call_site());
            match place {
                Some((first, last)) if checks => {
                    let alone = quote!(#name: #value, ..#jobq::JobOptions::DEFAULT);
                    let checked = self.checked(&alone, first, last);
                    quote!(#name: #checked.#name,)
                }
                _ => quote!(#name: #value,),
            }
        };
        let some = |value| quote!(::core::option::Option::Some(#value));
        let Options { queue, lease, timeout, max_attempts, .. } = self.options;
        let Options { max_crashes, priority, backoff, retention, expires, unique, .. } =
            self.options;
        let Options { key, on_block, .. } = self.options;
        let fields = [
            queue.as_ref().map(|it| field("queue", None, it.to_token_stream())),
            lease.as_ref().map(|it| field("lease", it.place(), duration(it))),
            timeout.as_ref().map(|it| field("timeout", it.place(), some(duration(it)))),
            max_attempts.as_ref().map(|it| field("max_attempts", it.place(), number(it))),
            max_crashes.as_ref().map(|it| field("max_crashes", it.place(), number(it))),
            priority.as_ref().map(|it| field("priority", it.place(), number(it))),
            backoff.as_ref().map(|it| field("backoff", it.place(), self.backoff(it))),
            retention.as_ref().map(|it| field("retention", it.place(), some(duration(it)))),
            expires.as_ref().map(|it| field("expires", it.place(), some(duration(it)))),
            unique.as_ref().map(|it| field("unique", None, some(self.unique(it)))),
            key.as_ref().map(|it| {
                let names = self.json_keys(it);
                field("key", None, some(quote!(&[#(#names),*])))
            }),
            on_block.map(|it| {
                let variant = match it {
                    OnBlock::Block => quote!(Block),
                    OnBlock::Skip => quote!(Skip),
                };
                field("on_block", None, quote!(#jobq::OnBlock::#variant))
            }),
        ];
        let others = fields.iter().any(Option::is_none);
        let others = others.then(|| quote!(..#jobq::JobOptions::DEFAULT));
        let fields = fields.iter().flatten();
        quote!(#(#fields)* #others)
    }

    fn backoff(&self, backoff: &BackoffOptions) -> TokenStream {
        let private = &self.private;
        let default = |field: &str| {
            let field = Ident::new(field, Span::call_site());
            quote!(#private::Backoff::DEFAULT.#field)
        };
        let base = backoff.base.as_ref().map_or_else(|| default("base"), duration);
        let factor = backoff.factor.as_ref().map_or_else(|| default("factor"), number);
        let cap = backoff.cap.as_ref().map_or_else(|| default("cap"), duration);
        quote!(#private::Backoff { base: #base, factor: #factor, cap: #cap })
    }

    /// What parameters are called in the payload.
    fn json_keys(&self, names: &[Ident]) -> Vec<String> {
        let named = |name| move |param: &&Param| param.name.as_ref() == Some(name);
        let key = |name| self.function.payload().find(named(name))?.key();
        names.iter().filter_map(key).collect()
    }

    fn unique(&self, unique: &UniqueOptions) -> TokenStream {
        let jobq = &self.jobq;
        let mut written = quote!(#jobq::Unique::DEFAULT);
        if let Some(by) = &unique.by {
            let keys = self.json_keys(by);
            written = quote!(#jobq::Unique::by(&[#(#keys),*]));
        }
        match unique.scope {
            None | Some(UniqueScope::UntilFinished) => {}
            Some(UniqueScope::UntilStarted) => written.extend(quote!(.until_started())),
            Some(UniqueScope::Forever) => written.extend(quote!(.forever())),
            Some(UniqueScope::For(time)) => {
                let time = literal_duration(time);
                written.extend(quote!(.lasting(#time)));
            }
        }
        let on_conflict = match unique.on_conflict {
            None | Some(OnConflict::Skip) => return written,
            Some(OnConflict::Error) => quote!(Error),
            Some(OnConflict::Replace) => quote!(Replace),
            Some(OnConflict::Debounce { max_wait }) => {
                let max_wait = literal_duration(max_wait);
                quote!(Debounce { max_wait: #max_wait })
            }
        };
        quote!(#written.on_conflict(#jobq::OnConflict::#on_conflict))
    }

    /// Options with these fields, checked; what is wrong is an error from the
    /// `first` to the `last` place.
    fn checked(&self, fields: &TokenStream, first: Span, last: Span) -> TokenStream {
        let jobq = &self.jobq;
        let options = respan(&quote!(#jobq::JobOptions), in_place(first));
        quote_spanned!(in_place(last)=> #options { #fields }.checked())
    }

    /// The function's visibility.
    fn vis(&self) -> TokenStream {
        each_in_place(self.function.vis.to_token_stream())
    }
}

fn duration(value: &Value<Duration>) -> TokenStream {
    match value {
        Value::Const(value) => typed(&quote!(::core::time::Duration), value),
        Value::Literal(duration) => literal_duration(*duration),
    }
}

fn literal_duration(duration: Duration) -> TokenStream {
    let millis = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    quote!(::core::time::Duration::from_millis(#millis))
}

fn number<T: Number + ToTokens>(value: &Value<T>) -> TokenStream {
    match value {
        Value::Const(value) => typed(&T::ty(), value),
        Value::Literal(number) => number.to_token_stream(),
    }
}

/// A `const` expression, whose type is wrong there and nowhere else.
fn typed(ty: &TokenStream, value: &Expr) -> TokenStream {
    let place = in_place(value.span());
    let ty = respan(ty, place);
    quote_spanned!(place=> { let __jobq_value: #ty = #value; __jobq_value })
}

/// A payload parameter's name, as a field and in `new`.
fn field_name(param: &Param) -> Ident {
    match &param.name {
        Some(name) => in_place_of(name),
        // Only an injected parameter has none, or one with a mistake.
        None => Ident::new("__jobq_unnamed", Span::call_site()),
    }
}

/// A name for `enqueue`'s target that no parameter has; it is seen in documentation and editors.
fn target_name(taken: &[Ident]) -> Ident {
    let mut name = "target".to_owned();
    while taken.iter().any(|taken| *taken == name) {
        name.push('_');
    }
    Ident::new(&name, Span::call_site())
}

/// The type behind a reference.
fn referent(ty: &Type) -> &Type {
    match ty {
        Type::Reference(reference) => &reference.elem,
        Type::Group(group) => referent(&group.elem),
        Type::Paren(paren) => referent(&paren.elem),
        other => other,
    }
}

/// The place of `span`, in the context of the macro.
fn in_place(span: Span) -> Span {
    Span::call_site().located_at(span)
}

/// The name in its place, in the context of the macro, and so in the macro's edition: what is a
/// keyword there need not be one in the user's.
fn in_place_of(name: &Ident) -> Ident {
    if *name == "gen" {
        return Ident::new_raw("gen", in_place(name.span()));
    }
    let mut copy = name.clone();
    copy.set_span(in_place(name.span()));
    copy
}

/// Each token in its place, in the context of the macro.
fn each_in_place(tokens: TokenStream) -> TokenStream {
    let each = tokens.into_iter().map(|mut tree| {
        let place = in_place(tree.span());
        if let TokenTree::Group(group) = &tree {
            tree = Group::new(group.delimiter(), each_in_place(group.stream())).into();
        }
        tree.set_span(place);
        tree
    });
    each.collect()
}

/// The tokens, all in one place.
fn respan(tokens: &TokenStream, span: Span) -> TokenStream {
    let each = tokens.clone().into_iter().map(|mut tree| {
        tree.set_span(span);
        tree
    });
    each.collect()
}
