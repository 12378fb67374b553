//! What is loaded while others wait for room before it.

use cfq_proto::model::ModelId;

use super::cards::is_idle;
use super::room::{Room, least};
use super::{Loaded, Loader};
use crate::engine::candle::need_corrected;

impl Loader {
    /// Beside all that wait before it: nobody goes for it, and it takes nothing of what those will have. On a machine with
    /// cards it waits for its turn, since where those end up is not known yet.
    pub(super) fn room_behind(&mut self, before: usize, model: &ModelId) -> Room {
        if self.cards.as_ref().is_ok_and(|cards| !cards.is_empty()) {
            return Room::Coming;
        }
        let mut kept = 0u64;
        let first: Vec<ModelId> = self.waiting.iter().take(before).cloned().collect();
        for first in first {
            let Some(least) = self.least_of(&first) else { return Room::Coming };
            kept = kept.saturating_add(self.needed.get(&first).copied().unwrap_or(0).max(least));
        }
        let Some(least) = self.least_of(model) else { return Room::Coming };
        let goes = |model: &ModelId, l: &Loaded| is_idle(l) && self.is_fresh(model, l) && !self.is_pinned(model);
        let fresh = self.loaded.iter().filter(|(model, l)| goes(model, l)).map(|(_, l)| l);
        let coming: u64 = self.leaving.iter().map(|(_, loaded)| loaded).chain(fresh).map(|loaded| loaded.need).sum();
        let spare = self.free().saturating_add(coming).saturating_sub(kept).min(self.have());
        if least <= spare { Room::Made(spare) } else { Room::Coming }
    }

    /// What one that waits needs at the least; its file's header is read once. `None` while it is not here: those that are
    /// here would wait for it to be fetched.
    fn least_of(&mut self, model: &ModelId) -> Option<u64> {
        if let Some(least) = self.least.get(model) {
            return Some(*least);
        }
        let bytes = match need_corrected(&self.here(model)?, self.limits(0), self.correction(model)) {
            Ok(need) => need.total(),
            // One that cannot be read takes nothing: the load says what is wrong with it.
            Err(error) => least(&error),
        };
        self.least.insert(model.clone(), bytes);
        Some(bytes)
    }
}
