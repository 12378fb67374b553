//! Models that found no room: each is left alone for a while, longer with every try, so that nobody tries for ever.
//!
//! Meanwhile the ledger calls it unusable, with the reason and the wait; after that it is on disk again, and the next job
//! that wants it has it tried. By hand (`cfq models load`) it is tried at once.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cfq_proto::model::ModelId;
use cfq_proto::node::ModelState;

/// Doublings of the first wait: with the usual accept time, three minutes.
const MOST: u32 = 4;

struct Waiting {
    tries: u32,
    /// When it may be tried again, and as what; `None` while it is.
    due: Option<(Instant, ModelState)>,
}

pub(super) struct Later {
    first: Duration,
    waiting: BTreeMap<ModelId, Waiting>,
}

impl Later {
    pub(super) fn new(first: Duration) -> Self {
        Self { first, waiting: BTreeMap::new() }
    }

    /// How long it is left alone, this time.
    pub(super) fn put_off(&mut self, model: &ModelId, state: ModelState, now: Instant) -> Duration {
        let waiting = self.waiting.entry(model.clone()).or_insert(Waiting { tries: 0, due: None });
        let wait = self.first * (1 << waiting.tries.min(MOST));
        waiting.tries += 1;
        waiting.due = Some((now + wait, state));
        wait
    }

    pub(super) fn forget(&mut self, model: &ModelId) {
        self.waiting.remove(model);
    }

    /// When something is due next.
    pub(super) fn next(&self) -> Option<Instant> {
        self.waiting.values().filter_map(|waiting| waiting.due.as_ref().map(|(at, _)| *at)).min()
    }

    /// Those whose time has come; told once.
    pub(super) fn due(&mut self, now: Instant) -> Vec<(ModelId, ModelState)> {
        let due = |(model, waiting): (&ModelId, &mut Waiting)| {
            let (_, state) = waiting.due.take_if(|(at, _)| *at <= now)?;
            Some((model.clone(), state))
        };
        self.waiting.iter_mut().filter_map(due).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::fleet::unknown;
    use cfq_proto::node::Residency;

    #[test]
    fn each_try_is_followed_by_a_longer_wait_up_to_a_point_and_success_forgets_it() {
        let (mut later, now) = (Later::new(Duration::from_secs(12)), Instant::now());
        let model: ModelId = "path:/m.gguf".parse().unwrap();
        let state = unknown(&model, Residency::Available);
        let waits: Vec<u64> = (0..7).map(|_| later.put_off(&model, state.clone(), now).as_secs()).collect();
        assert_eq!(waits, [12, 24, 48, 96, 192, 192, 192]);
        assert_eq!(later.next(), Some(now + Duration::from_secs(192)));
        assert!(later.due(now + Duration::from_secs(191)).is_empty());
        assert_eq!(later.due(now + Duration::from_secs(192)), [(model.clone(), state.clone())]);
        assert!(later.due(now + Duration::from_secs(192)).is_empty() && later.next().is_none(), "told once");
        later.forget(&model);
        assert_eq!(later.put_off(&model, state, now).as_secs(), 12);
    }
}
