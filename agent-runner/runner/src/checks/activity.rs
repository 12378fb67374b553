//! What the checks of each task do at the moment, for users.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The activities of all tasks, by the names of their folders.
#[derive(Debug, Clone, Default)]
pub(super) struct Activities(Arc<Mutex<HashMap<String, String>>>);

/// The activity of one task. Dropping it ends the activity.
#[derive(Debug)]
pub(super) struct Activity {
    name: String,
    all: Activities,
}

impl Activities {
    pub fn get(&self, name: &str) -> Option<String> {
        self.lock().get(name).cloned()
    }

    pub fn of(&self, name: &str) -> Activity {
        Activity { name: name.to_owned(), all: self.clone() }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Activity {
    /// Sets the activity, as text that continues a sentence.
    pub fn set(&self, text: String) {
        self.all.lock().insert(self.name.clone(), text);
    }
}

impl Drop for Activity {
    fn drop(&mut self) {
        self.all.lock().remove(&self.name);
    }
}
