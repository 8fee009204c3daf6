//! Writes what `#[job]` makes of a function: the function itself, its twin type, and one
//! `const _` with all the rest.
//!
//! The twin is an enum without variants: types and functions have separate namespaces, so it may
//! have the function's name, in a module as in a function's body. Nothing here decides anything
//! at run time; that is library code, which this names by absolute paths.
//!
//! What stands for the user's code but is not it (the twin's name, the parameters of `new`) has
//! the place of the user's code and the context of the macro: errors and editors point to the
//! right token, lints about style and use do not fire twice.

use std::time::Duration;

use proc_macro2::{Ident, Literal, Span, TokenStream, TokenTree};
use quote::{ToTokens, format_ident, quote, quote_spanned};
use syn::ext::IdentExt;
use syn::spanned::Spanned;
use syn::{Expr, ReturnType, Type};

use crate::args::{BackoffOptions, Number, Options, Value};
use crate::handler::{Form, JobFn, Param, Role};

/// The expansion of a function without mistakes.
pub(crate) fn job(function: &JobFn, options: &Options) -> TokenStream {
    let jobq = krate(options);
    let private = quote!(#jobq::__private);
    let twin = twin(function);
    let declaration = declaration(function, &twin);
    let signature = signature(function, &private, &twin);
    let (payload, payload_type) = payload(function, &private, &twin);
    let methods = methods(function, &jobq, &twin, &payload_type);
    let runner = runner(function, &private, &twin, &payload_type);
    let def = def(function, options, &jobq, &twin);
    let here = Span::call_site();
    let checked = checked(&jobq, &fields(options, &jobq, true), (here, here));
    let register = options.register.then(|| quote!(#private::register! { #twin }));
    let deprecated = function.attrs.iter().any(|attr| attr.path().is_ident("deprecated"));
    let allow_deprecated = deprecated.then(|| quote!(#[allow(deprecated)]));
    let kind = function.kind(options);
    // A payload that is not `Send` is an error here.
    let payload_place = respan(&payload_type, twin.span());
    quote! {
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
                type Payload = #payload_place;
                const NAME: &'static ::core::primitive::str = #kind;
                const DEF: &'static #jobq::JobDef = #def;
            }
            #register
        };
    }
}

/// What is left of a function with mistakes: the function, and a twin with the same methods, so
/// that nothing else in the program stops compiling because of them.
pub(crate) fn stub(function: &JobFn, options: &Options, errors: &TokenStream) -> TokenStream {
    if function.is_method() {
        return quote!(#function #errors);
    }
    let jobq = krate(options);
    let private = quote!(#jobq::__private);
    let twin = twin(function);
    let declaration = declaration(function, &twin);
    let methods = stub_methods(function, &jobq, &twin);
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
                    needs: ::std::vec::Vec::new,
                    handler: #private::Handler::Blocking(|_| loop {}),
                };
            }
        };
        #errors
    }
}

/// The twin type's declaration.
fn declaration(function: &JobFn, twin: &Ident) -> TokenStream {
    let vis = in_place_of(function.vis.to_token_stream());
    // `not(doctest)`: the examples in the function's documentation are tested once, there.
    let docs = function.attrs.iter().filter_map(|attr| {
        let meta = &attr.meta;
        if attr.path().is_ident("doc") {
            Some(quote!(#[cfg_attr(not(doctest), #meta)]))
        } else {
            attr.path().is_ident("deprecated").then(|| attr.to_token_stream())
        }
    });
    quote! {
        #(#docs)*
        #vis enum #twin {}
    }
}

/// One `impl` for each type in the function's signature, so that each is checked once.
fn signature(function: &JobFn, private: &TokenStream, twin: &Ident) -> TokenStream {
    let params = function.params.iter().enumerate().filter_map(|(n, param)| {
        let n = index(n);
        let ty = &param.ty;
        let (role, ty) = match &param.role {
            Role::Payload { form: Form::Custom, .. } => return None,
            Role::Payload { form: Form::Default, .. } => (quote!(DefaultParam), ty.to_token_stream()),
            Role::Payload { .. } => (quote!(Param), ty.to_token_stream()),
            Role::Injected => (quote!(Injected), ty.to_token_stream()),
            Role::InjectedRef => (quote!(Injected), referent(ty)),
        };
        Some(quote! { impl #private::#role<__Jobq, #n> for #twin { type Type = #ty; } })
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

/// The payload's declaration, and its type.
///
/// It is generic over the twin where serde shall see `Param::Type`, which always can be stored,
/// and not the user's type, which may not, and would then cause one error after the other.
fn payload(function: &JobFn, private: &TokenStream, twin: &Ident) -> (TokenStream, TokenStream) {
    let mut bounds = Vec::new();
    let mut fields = Vec::new();
    let mut whole = false;
    for (n, param) in function.params.iter().enumerate() {
        let Role::Payload { serde, form } = &param.role else { continue };
        let n = index(n);
        let name = field_name(param);
        let role = match form {
            Form::Plain | Form::Whole => Some(quote!(#private::Param<__Jobq, #n>)),
            Form::Default => Some(quote!(#private::DefaultParam<__Jobq, #n>)),
            Form::Custom => None,
        };
        let ty = match &role {
            Some(role) => quote!(#private::Field<<__J as #role>::Type>),
            None => param.ty.to_token_stream(),
        };
        whole |= *form == Form::Whole;
        bounds.extend(role);
        fields.push(quote!(#(#serde)* #name: #ty));
    }
    let bounds = (!bounds.is_empty()).then(|| quote!(__J: #(#bounds)+*));
    let serde_bound = bounds.as_ref().map(|bounds| {
        let bounds = bounds.to_string();
        quote!(, bound = #bounds)
    });
    let form = if whole {
        quote!(transparent)
    } else {
        let expecting = format!("an object with the parameters of `{}`", function.sig.ident.unraw());
        quote!(expecting = #expecting)
    };
    let serde_path = quote!(#private::serde).to_string();
    let (generics, payload_type) = match &bounds {
        Some(bounds) => (quote!(<#bounds>), quote!(__JobqPayload::<#twin>)),
        None => (TokenStream::new(), quote!(__JobqPayload)),
    };
    let declaration = quote! {
        #[doc(hidden)]
        #[derive(#private::serde::Serialize, #private::serde::Deserialize)]
        #[serde(crate = #serde_path #serde_bound, #form)]
        pub struct __JobqPayload #generics { #(#fields),* }
    };
    (declaration, payload_type)
}

/// `new`, `enqueue` and `NAME`.
fn methods(
    function: &JobFn,
    jobq: &TokenStream,
    twin: &Ident,
    payload_type: &TokenStream,
) -> TokenStream {
    let names: Vec<Ident> = function.payload().map(field_name).collect();
    let params: Vec<TokenStream> = function
        .payload()
        .zip(&names)
        .map(|(param, name)| {
            let ty = &param.ty;
            quote!(#name: #ty)
        })
        .collect();
    let fields = function.payload().zip(&names).map(|(param, name)| match param.role {
        Role::Payload { form: Form::Custom, .. } => quote!(#name),
        _ => quote!(#name: #jobq::__private::Field(#name)),
    });
    let new = quote!(#jobq::NewJob::of::<Self>(&#payload_type { #(#fields),* }));
    let target = target_name(&names);
    let enqueue = quote!(Self::new(#(#names),*).enqueue(#target).await);
    method_impl(function, jobq, twin, &target, &params, &new, &enqueue)
}

/// `new`, `enqueue` and `NAME` for a function with mistakes.
fn stub_methods(function: &JobFn, jobq: &TokenStream, twin: &Ident) -> TokenStream {
    let params: Vec<TokenStream> = function
        .payload()
        .map(|param| {
            let name = param.name.as_ref().map_or_else(|| quote!(_), |_| {
                field_name(param).into_token_stream()
            });
            let ty = &param.ty;
            if param.broken { quote!(#name: impl ::core::marker::Sized) } else { quote!(#name: #ty) }
        })
        .collect();
    let names: Vec<Ident> = function.payload().filter_map(|param| param.name.clone()).collect();
    let body = quote!(loop {});
    method_impl(function, jobq, twin, &target_name(&names), &params, &body, &body)
}

fn method_impl(
    function: &JobFn,
    jobq: &TokenStream,
    twin: &Ident,
    target: &Ident,
    params: &[TokenStream],
    new: &TokenStream,
    enqueue: &TokenStream,
) -> TokenStream {
    let vis = in_place_of(function.vis.to_token_stream());
    let function_name = &function.sig.ident;
    let new_doc = format!("A new `{function_name}` job with these arguments, to be enqueued.");
    let enqueue_doc = format!(
        "Enqueues a `{function_name}` job with these arguments.\n\n# Errors\n\nAs `NewJob::enqueue`."
    );
    quote! {
        #[automatically_derived]
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
fn runner(
    function: &JobFn,
    private: &TokenStream,
    twin: &Ident,
    payload_type: &TokenStream,
) -> TokenStream {
    let ident = &function.sig.ident;
    let local = |n: usize| format_ident!("__jobq_{n}");
    let injected = function.params.iter().enumerate().filter_map(|(n, param)| {
        let (local, n) = (local(n), index(n));
        (!matches!(param.role, Role::Payload { .. }))
            .then(|| quote!(let #local = #private::inject::<#twin, __Jobq, #n>(&__jobq_call);))
    });
    let arguments = function.params.iter().enumerate().map(|(n, param)| {
        let local = local(n);
        match param.role {
            Role::Payload { form, .. } => {
                let name = field_name(param);
                let unwrap = (form != Form::Custom).then(|| quote!(.0));
                quote!(__jobq_payload.#name #unwrap)
            }
            Role::Injected => quote!(#local),
            Role::InjectedRef => quote!(&#local),
        }
    });
    let awaited = function.sig.asyncness.map(|_| quote!(.await));
    let body = quote! {
        let __jobq_payload = match __jobq_call.payload::<#payload_type>() {
            ::core::result::Result::Ok(__jobq_payload) => __jobq_payload,
            ::core::result::Result::Err(__jobq_outcome) => return __jobq_outcome,
        };
        #(#injected)*
        ::core::mem::drop(__jobq_call);
        #private::outcome::<#twin, __Jobq>(#ident(#(#arguments),*) #awaited)
    };
    let outcome = quote!(#private::Outcome);
    if function.sig.asyncness.is_none() {
        return quote!(fn __jobq_run(__jobq_call: #private::Call) -> #outcome { #body });
    }
    // If the function's future is not `Send`, this is where that is an error.
    let place = in_place(ident.span());
    let future = quote_spanned!(place=> ::std::boxed::Box::pin(async move { #body }));
    quote! {
        fn __jobq_run(__jobq_call: #private::Call) -> #private::BoxFuture<'static, #outcome> {
            #future
        }
    }
}

/// The job's definition.
fn def(function: &JobFn, options: &Options, jobq: &TokenStream, twin: &Ident) -> TokenStream {
    let private = quote!(#jobq::__private);
    let aliases = &options.aliases;
    let fields = fields(options, jobq, false);
    let needs = function.params.iter().enumerate().filter_map(|(n, param)| {
        let n = index(n);
        (!matches!(param.role, Role::Payload { .. }))
            .then(|| quote!(#private::need::<#twin, __Jobq, #n>(&mut __jobq_needs);))
    });
    let needs: TokenStream = needs.collect();
    let needs = if needs.is_empty() {
        quote!(::std::vec::Vec::new)
    } else {
        quote!(|| {
            let mut __jobq_needs = ::std::vec::Vec::new();
            #needs
            __jobq_needs
        })
    };
    let handler = if function.sig.asyncness.is_some() { quote!(Async) } else { quote!(Blocking) };
    quote! {
        &#jobq::JobDef {
            kind: <Self as #jobq::Job>::NAME,
            aliases: &[#(#aliases),*],
            options: #jobq::JobOptions { #fields ..#jobq::JobOptions::DEFAULT },
            file: ::core::file!(),
            line: ::core::line!(),
            needs: #needs,
            handler: #private::Handler::#handler(__jobq_run),
        }
    }
}

/// The fields of `JobOptions` that were given. Where `checks` are wanted, each `const` expression
/// is checked by itself, so that it is the place of the error.
fn fields(options: &Options, jobq: &TokenStream, checks: bool) -> TokenStream {
    let field = |name: &str, place: Option<(Span, Span)>, value: TokenStream| {
        let name = Ident::new(name, Span::call_site());
        match place {
            Some(place) if checks => {
                let checked = checked(jobq, &quote!(#name: #value,), place);
                quote!(#name: #checked.#name,)
            }
            _ => quote!(#name: #value,),
        }
    };
    let some = |value| quote!(::core::option::Option::Some(#value));
    let Options { queue, lease, timeout, retention, .. } = options;
    let Options { max_attempts, max_crashes, priority, .. } = options;
    let queue = queue.as_ref().map(|name| quote!(queue: #name,));
    let lease = lease.as_ref().map(|it| field("lease", it.place(), duration(it)));
    let timeout = timeout.as_ref().map(|it| field("timeout", it.place(), some(duration(it))));
    let retention = retention.as_ref().map(|it| field("retention", it.place(), some(duration(it))));
    let attempts = max_attempts.as_ref().map(|it| field("max_attempts", it.place(), number(it)));
    let crashes = max_crashes.as_ref().map(|it| field("max_crashes", it.place(), number(it)));
    let priority = priority.as_ref().map(|it| field("priority", it.place(), number(it)));
    let backoff = options.backoff.as_ref().map(|given| {
        let place = given.has_const().then_some((given.span, given.span));
        field("backoff", place, backoff(given, jobq))
    });
    quote!(#queue #lease #timeout #retention #attempts #crashes #priority #backoff)
}

fn backoff(backoff: &BackoffOptions, jobq: &TokenStream) -> TokenStream {
    let base = backoff.base.as_ref().map(duration).map(|value| quote!(base: #value,));
    let factor = backoff.factor.as_ref().map(number).map(|value| quote!(factor: #value,));
    let cap = backoff.cap.as_ref().map(duration).map(|value| quote!(cap: #value,));
    quote!(#jobq::__private::Backoff { #base #factor #cap ..#jobq::__private::Backoff::DEFAULT })
}

/// The default options but for these fields, checked from the first to the last place.
fn checked(jobq: &TokenStream, fields: &TokenStream, (first, last): (Span, Span)) -> TokenStream {
    let options = respan(&quote!(#jobq::JobOptions), in_place(first));
    let default = quote!(#jobq::JobOptions::DEFAULT);
    quote_spanned!(in_place(last)=> #options { #fields ..#default }.checked())
}

fn duration(value: &Value<Duration>) -> TokenStream {
    match value {
        Value::Const(value) => typed(&quote!(::core::time::Duration), value),
        Value::Literal(duration) => {
            let millis = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
            quote!(::core::time::Duration::from_millis(#millis))
        }
    }
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

/// Where jobq is.
fn krate(options: &Options) -> TokenStream {
    options.krate.as_ref().map_or_else(|| quote!(::jobq), ToTokens::to_token_stream)
}

/// The twin type's name.
fn twin(function: &JobFn) -> Ident {
    let mut name = function.sig.ident.clone();
    name.set_span(in_place(name.span()));
    name
}

/// A payload parameter's name, as a field and in `new`.
fn field_name(param: &Param) -> Ident {
    let mut name = match &param.name {
        Some(name) => name.clone(),
        // Only a function with mistakes has such a parameter.
        None => Ident::new("__jobq_unnamed", param.ty.span()),
    };
    name.set_span(in_place(name.span()));
    name
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
fn referent(ty: &Type) -> TokenStream {
    match ty {
        Type::Reference(reference) => reference.elem.to_token_stream(),
        Type::Group(group) => referent(&group.elem),
        Type::Paren(paren) => referent(&paren.elem),
        other => other.to_token_stream(),
    }
}

fn index(n: usize) -> Literal {
    Literal::usize_unsuffixed(n)
}

/// The place of `span`, in the context of the macro.
fn in_place(span: Span) -> Span {
    Span::call_site().located_at(span)
}

/// The tokens in their places, in the context of the macro.
fn in_place_of(tokens: TokenStream) -> TokenStream {
    tokens
        .into_iter()
        .map(|mut tree| {
            if let TokenTree::Group(group) = &tree {
                let inner = in_place_of(group.stream());
                let mut new = proc_macro2::Group::new(group.delimiter(), inner);
                new.set_span(in_place(group.span()));
                return TokenTree::Group(new);
            }
            tree.set_span(in_place(tree.span()));
            tree
        })
        .collect()
}

fn respan(tokens: &TokenStream, span: Span) -> TokenStream {
    tokens
        .clone()
        .into_iter()
        .map(|mut tree| {
            tree.set_span(span);
            tree
        })
        .collect()
}
