//! What the checks of each task do at the moment, for users.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The activities of all tasks, by the names of their folders.
#[derive(Debug, Clone, Default)]
pub(super) struct CurrentActivities(Arc<Mutex<HashMap<String, String>>>);

/// Sets the activity of one task. Dropping it ends the activity.
#[derive(Debug)]
pub(super) struct ActivityGuard {
    name: String,
    all: CurrentActivities,
}

impl CurrentActivities {
    pub fn get(&self, name: &str) -> Option<String> {
        self.lock().get(name).cloned()
    }

    pub fn guard(&self, name: &str) -> ActivityGuard {
        ActivityGuard { name: name.to_owned(), all: self.clone() }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ActivityGuard {
    /// Sets the activity, as text that continues a sentence.
    pub fn set(&self, text: String) {
        self.all.lock().insert(self.name.clone(), text);
    }
}

impl Drop for ActivityGuard {
    fn drop(&mut self) {
        self.all.lock().remove(&self.name);
    }
}
