//! Backoff of models that did not fit: the wait before a model is tried again grows with every attempt.
//!
//! During the wait, the ledger (the node's report of its models to the scheduler) lists the model as unusable, with the
//! reason. After the wait, the ledger lists it as on disk, and the next job that needs it triggers another attempt. A
//! request by a user (`cfq models load`) is tried immediately.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cfq_proto::model::ModelId;
use cfq_proto::node::ModelState;

/// Maximum number of times the first wait is doubled. The first wait is four times `accept_timeout_ms`, 12 s by
/// default, so the longest is about three minutes.
const MAX_DOUBLINGS: u32 = 4;

#[derive(Debug, Clone, PartialEq)]
struct ModelBackoff {
    tries: u32,
    /// End of the wait, and the state that is published then; `None` after the wait has ended.
    due: Option<(Instant, ModelState)>,
}

/// The backoff of all models.
#[derive(Debug, Clone, PartialEq)]
pub struct Backoff {
    first: Duration,
    entries: BTreeMap<ModelId, ModelBackoff>,
}

impl Backoff {
    pub fn new(first: Duration) -> Self {
        Self { first, entries: BTreeMap::new() }
    }

    /// Starts the next wait of the model and returns its duration. [`Self::take_due`] returns `state` when the wait is
    /// over.
    pub fn start(&mut self, model: &ModelId, state: ModelState, now: Instant) -> Duration {
        let entry = self.entries.entry(model.clone()).or_insert(ModelBackoff { tries: 0, due: None });
        let wait = self.first * (1 << entry.tries.min(MAX_DOUBLINGS));
        entry.tries += 1;
        entry.due = Some((now + wait, state));
        wait
    }

    /// Resets the backoff of the model: its next wait is as long as the first one.
    pub fn reset(&mut self, model: &ModelId) {
        self.entries.remove(model);
    }

    /// The earliest end of a wait; `None` if no model waits.
    pub fn next_due(&self) -> Option<Instant> {
        self.entries.values().filter_map(|entry| entry.due.as_ref().map(|(at, _)| *at)).min()
    }

    /// Returns the models whose wait is over, each only once, with the states given to [`Self::start`].
    pub fn take_due(&mut self, now: Instant) -> Vec<(ModelId, ModelState)> {
        let due = |(model, entry): (&ModelId, &mut ModelBackoff)| {
            let (_, state) = entry.due.take_if(|(at, _)| *at <= now)?;
            Some((model.clone(), state))
        };
        self.entries.iter_mut().filter_map(due).collect()
    }
}

#[cfg(test)]
mod tests {
    use cfq_proto::node::Residency;

    use super::*;
    use crate::node::model_registry::model_state;

    #[test]
    fn waits_double_up_to_a_limit_and_are_reset() {
        let (mut backoff, now) = (Backoff::new(Duration::from_secs(12)), Instant::now());
        let model: ModelId = "path:/m.gguf".parse().unwrap();
        let state = model_state(&model, Residency::Available);
        let waits: Vec<u64> = (0..7).map(|_| backoff.start(&model, state.clone(), now).as_secs()).collect();
        assert_eq!(waits, [12, 24, 48, 96, 192, 192, 192]);
        assert_eq!(backoff.next_due(), Some(now + Duration::from_secs(192)));
        assert!(backoff.take_due(now + Duration::from_secs(191)).is_empty());
        assert_eq!(backoff.take_due(now + Duration::from_secs(192)), [(model.clone(), state.clone())]);
        let later = now + Duration::from_secs(192);
        assert!(backoff.take_due(later).is_empty() && backoff.next_due().is_none(), "each is returned once");
        backoff.reset(&model);
        assert_eq!(backoff.start(&model, state, now).as_secs(), 12);
    }
}
