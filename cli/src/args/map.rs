//! Arguments of `cfq map`.

use std::path::PathBuf;

use clap::Args;

use crate::repo_map::{DEFAULT_TOKENS, MAX_TOKENS, MIN_TOKENS};

#[derive(Debug, Args)]
pub struct MapArgs {
    /// A folder in the repository, for example ~/shop
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub repo: PathBuf,
    /// Commit, branch or tag to map, for example main [default: HEAD]
    #[arg(long, value_name = "COMMIT")]
    pub base: Option<String>,
    /// Levels of files that are listed, for example 1 for those at the top [default: all]
    #[arg(long, value_name = "LEVELS", value_parser = clap::value_parser!(u32).range(1..))]
    pub depth: Option<u32>,
    /// Include test files
    #[arg(long)]
    pub tests: bool,
    /// Maximum length of the map, in estimated tokens
    #[arg(long, value_name = "N", default_value_t = DEFAULT_TOKENS,
          value_parser = clap::value_parser!(u32).range(i64::from(MIN_TOKENS)..=i64::from(MAX_TOKENS)))]
    pub tokens: u32,
    /// Part of the map, if it is longer, for example 2; the first part has the most important files and definitions
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub part: u32,
    /// File, folder or definition that is ranked higher, for example src/parser.rs, with what it uses; can be repeated
    #[arg(long, value_name = "PATH|NAME")]
    pub focus: Vec<String>,
}
