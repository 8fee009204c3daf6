//! What `#[job]` accepts. Each file is a user's module; all are compiled into one test.

mod attributes_around;
mod crate_path;
mod from_macro_rules;
mod function_stays_a_function;
mod in_function_bodies;
mod injected;
mod one_use_imports_both;
mod options;
mod parameters;
mod private_types_in_public_jobs;
mod returns;
mod serde_attributes;
mod several_in_one_module;
mod shadowed_names;
mod visibilities;
mod whole_payload;
mod without_prelude;
