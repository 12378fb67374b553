//! Configuration of the machine for the checks of projects: `[checks]` in `cfq.toml`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use cfq_link::child::Account;
use serde::{Deserialize, Serialize};

use super::registry_proxy::Registry;

/// Which programs the checks of projects may use, in addition to those of the system.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ProjectChecksConfig {
    /// Files and folders that checks may read and execute, for example those of a compiler in a home folder. Each
    /// folder, and `bin` in it, is searched for programs.
    pub readable: Vec<PathBuf>,
    /// Environment variables of the checks and preparations.
    pub env: BTreeMap<String, String>,
    /// Hosts that preparations may reach, as `HOST` or `HOST:PORT`.
    pub registries: Vec<Registry>,
    /// Folder in which commits are checked out for their checks; by default the runner's data folder.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dir: Option<PathBuf>,
    /// Account that checks run as. Needed if the runner runs as root, and then it must be able to enter `dir`, and the
    /// runner to change the owner of files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub account: Option<Account>,
}

impl Default for ProjectChecksConfig {
    fn default() -> Self {
        Self { readable: Vec::new(), env: BTreeMap::new(), registries: Registry::public(), dir: None, account: None }
    }
}
