//! What the checks say about base commits, so that a check runs there once, not for each result.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::checks_file::ProjectCheck;
use super::verdict::BaseTests;

/// Maximum number of entries. When it is exceeded, all are dropped, and computed again where they are needed.
const MAX_ENTRIES: usize = 16;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    commit: String,
    check: ProjectCheck,
}

/// The tests of base commits, in memory.
#[derive(Debug, Default)]
pub(super) struct BaseCache(Mutex<HashMap<Key, Arc<BaseTests>>>);

impl BaseCache {
    pub fn get(&self, commit: &str, check: &ProjectCheck) -> Option<Arc<BaseTests>> {
        let key = Key { commit: commit.to_owned(), check: check.clone() };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned()
    }

    pub fn insert(&self, commit: &str, check: &ProjectCheck, tests: BaseTests) -> Arc<BaseTests> {
        let (key, tests) = (Key { commit: commit.to_owned(), check: check.clone() }, Arc::new(tests));
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if entries.len() >= MAX_ENTRIES {
            entries.clear();
        }
        entries.insert(key, tests.clone());
        tests
    }
}
