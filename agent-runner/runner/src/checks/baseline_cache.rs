//! Cache of the outcomes of checks on the commits with which others are compared: a check runs there once, not for each
//! result or merge.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::checks_file::ProjectCheck;
use super::verdict::Baseline;

/// Maximum number of entries: those of base commits, of results that passed and of merges, with several checks each.
const MAX_ENTRIES: usize = 256;
/// Maximum number of names of tests in all entries. Results of models decide on the number of their tests.
const MAX_TESTS: usize = 200_000;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    commit: String,
    check: ProjectCheck,
    /// Id of what is installed for the check.
    environment: String,
}

#[derive(Debug)]
struct Entry {
    baseline: Arc<Baseline>,
    /// Value of the counter when it was used last.
    used: u64,
}

#[derive(Debug, Default)]
struct Entries {
    entries: HashMap<Key, Entry>,
    /// Number of uses so far.
    uses: u64,
}

/// The baselines, in memory. Those that were not used for the longest time are removed.
#[derive(Debug, Default)]
pub(super) struct BaselineCache(Mutex<Entries>);

impl BaselineCache {
    pub fn get(&self, commit: &str, check: &ProjectCheck, environment: &str) -> Option<Arc<Baseline>> {
        let key = Key { commit: commit.to_owned(), check: check.clone(), environment: environment.to_owned() };
        let mut cache = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        cache.uses += 1;
        let used = cache.uses;
        let entry = cache.entries.get_mut(&key)?;
        entry.used = used;
        Some(entry.baseline.clone())
    }

    pub fn insert(&self, commit: &str, check: &ProjectCheck, environment: &str, baseline: Arc<Baseline>) {
        let key = Key { commit: commit.to_owned(), check: check.clone(), environment: environment.to_owned() };
        let mut cache = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        cache.uses += 1;
        let used = cache.uses;
        cache.entries.insert(key, Entry { baseline, used });
        let mut tests: usize = cache.entries.values().map(|entry| entry.baseline.count()).sum();
        while cache.entries.len() > MAX_ENTRIES || tests > MAX_TESTS && cache.entries.len() > 1 {
            let oldest = cache.entries.iter().min_by_key(|(_, entry)| entry.used).map(|(key, _)| key.clone());
            let Some(removed) = oldest.and_then(|key| cache.entries.remove(&key)) else { return };
            tests -= removed.baseline.count();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checks::project_checks;

    #[test]
    fn entries_that_were_not_used_for_the_longest_time_are_removed() {
        let check = &project_checks(Some("[[check]]\nname = \"a\"\nrun = [\"x\"]\n")).unwrap().checks[0];
        let cache = BaselineCache::default();
        let names = |n: usize| (0..n).map(|n| format!("c{n}")).collect::<Vec<_>>();
        for commit in names(MAX_ENTRIES) {
            cache.insert(&commit, check, "", Arc::default());
        }
        assert!(cache.get("c0", check, "").is_some());
        cache.insert("new", check, "", Arc::default());
        let kept = |commit: &str| cache.get(commit, check, "").is_some();
        assert!(kept("c0") && kept("new") && !kept("c1") && kept("c2"));
        let large = || Arc::new(Baseline::with_tests(MAX_TESTS / 2));
        for commit in ["large 1", "large 2"] {
            cache.insert(commit, check, "", large());
        }
        assert!(kept("c2"), "up to the limit");
        cache.insert("large 3", check, "", large());
        assert!(!kept("large 1") && kept("large 2") && kept("large 3"));
    }
}
