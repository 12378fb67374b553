//! Cache of the outcomes of checks on the commits with which others are compared: a check runs there once, not for each
//! result or merge.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::checks_file::ProjectCheck;
use super::verdict::Baseline;

/// Maximum number of entries: those of base commits, of results that passed and of merges, with several checks each.
/// When it is exceeded, all are dropped, and computed again where they are needed.
const MAX_ENTRIES: usize = 256;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    commit: String,
    check: ProjectCheck,
    /// Id of what is installed for the check.
    environment: String,
}

/// The baselines, in memory.
#[derive(Debug, Default)]
pub(super) struct BaselineCache(Mutex<HashMap<Key, Arc<Baseline>>>);

impl BaselineCache {
    pub fn get(&self, commit: &str, check: &ProjectCheck, environment: &str) -> Option<Arc<Baseline>> {
        let key = Key { commit: commit.to_owned(), check: check.clone(), environment: environment.to_owned() };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned()
    }

    pub fn insert(&self, commit: &str, check: &ProjectCheck, environment: &str, baseline: Arc<Baseline>) {
        let key = Key { commit: commit.to_owned(), check: check.clone(), environment: environment.to_owned() };
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if entries.len() >= MAX_ENTRIES {
            entries.clear();
        }
        entries.insert(key, baseline);
    }
}
