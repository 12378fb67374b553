//! Maps of repositories: the folders, the files and the definitions of a commit, the most important ones first, in a
//! text that fits into a number of tokens. A model that reads the map knows where things are without reading the files.
//!
//! The definitions come from [tree-sitter](https://tree-sitter.github.io) grammars ([`FileSymbols`]). Files and
//! definitions are ranked by personalized PageRank over the references between files. Aider's
//! [repository map](https://aider.chat/docs/repomap.html) works the same way. The same files give the same text, byte
//! for byte.

mod cache;
mod focus;
mod folders;
mod grammar;
mod layout;
mod map;
mod map_error;
mod part;
mod rank;
mod symbols;
mod test_paths;
mod tokens;

pub use cache::{CacheError, SymbolCache};
pub use grammar::has_symbols;
pub use map::{MapRequest, RepoMap, repo_map};
pub use map_error::MapError;
pub use symbols::{FileSymbols, MAX_SOURCE_BYTES};
pub use tokens::estimated_tokens;
