//! The `#[job]` attribute.
use proc_macro::TokenStream;
/// x
#[proc_macro_attribute]
pub fn job(_args: TokenStream, item: TokenStream) -> TokenStream {
    item
}
