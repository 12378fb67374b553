//! Assertions of the simulated machine about the planner's actions.

use cfq_proto::model::ModelId;

use super::{LOAD_GRACE_PERIOD, Sim, gpu_for};
use crate::node::loader::plan::apply;
use crate::node::loader::plan::event::LoaderEvent;
use crate::node::loader::plan::state::ResidentModel;

impl Sim {
    pub(super) fn check_capacity(&self) {
        self.unreserved_bytes();
        for gpu in self.state.gpus() {
            let engines = self.state.engines().map(|(_, loaded)| loaded);
            let shares = engines.flat_map(|loaded| &loaded.gpus).filter(|share| share.gpu == gpu.index);
            let taken: u64 = shares.map(|share| share.bytes).sum();
            assert!(
                taken <= gpu.free_bytes_at_open,
                "GPU {} has {} bytes and {taken} are taken",
                gpu.index,
                gpu.free_bytes_at_open
            );
        }
        // The weights of an unloaded model may exceed the cache until the planner drops them.
        let largest = self.models.values().map(|model| model.weights).max().unwrap_or(0);
        assert!(self.cached.values().sum::<u64>() <= self.state.config.weight_cache_bytes + largest);
    }

    /// Asserts that the victim is not pinned, and that the wanted model fits beside the pinned models.
    pub(super) fn check_eviction(&self, victim: &ModelId, wanted: &ModelId) {
        assert!(!self.pinned.contains(victim), "{victim} is pinned");
        let (_, evicted) = self.state.unloading.iter().find(|(model, _)| model == victim).unwrap();
        let sim = &self.models[wanted];
        let pinned = || self.state.loaded.iter().filter(|(model, _)| self.pinned.contains(*model));
        if evicted.gpus.is_empty() {
            let stays: u64 = pinned().map(|(_, loaded)| loaded.host_bytes).sum();
            let smallest = sim.estimate().smallest_bytes();
            assert!(
                smallest + stays <= self.state.config.host_bytes,
                "{victim} is evicted, but {wanted} still does not fit"
            );
        } else {
            let free = self.state.gpus().iter().map(|gpu| {
                let shares = pinned().flat_map(|(_, loaded)| &loaded.gpus).filter(|share| share.gpu == gpu.index);
                gpu.free_bytes_at_open - shares.map(|share| share.bytes).sum::<u64>()
            });
            assert!(
                gpu_for(sim, &free.collect::<Vec<_>>()).is_some(),
                "{victim} is evicted, but {wanted} still does not fit"
            );
        }
    }

    /// Asserts that a model is refused only if it would not fit even after all permitted evictions.
    pub(super) fn check_refusal(&self, model: &ModelId) {
        if !self.state.gpus().is_empty() {
            return;
        }
        let is_pinned = |model: &ModelId| self.pinned.contains(model) && self.state.loaded.contains_key(model);
        let bytes = |pinned: bool| {
            let engines = self.state.engines().filter(|(model, _)| is_pinned(model) == pinned);
            engines.map(|(_, loaded)| loaded.host_bytes).sum::<u64>()
        };
        let observed = self.observe();
        let unallocated: u64 = observed.engines.values().map(|engine| engine.unallocated_bytes).sum();
        let freed = bytes(false) + self.cached.values().sum::<u64>();
        let available = (observed.available_bytes + freed).saturating_sub(unallocated);
        let possible = available.min(self.state.config.host_bytes - bytes(true));
        let smallest = self.models[model].estimate().smallest_bytes();
        assert!(smallest > possible, "{model} needs {smallest} and is refused, although evictions free {possible}");
    }

    /// Asserts that a load of `taken` bytes leaves enough memory for the models `before` it in the queue.
    pub(super) fn check_backfill(&self, taken: u64, before: &[ModelId]) {
        // A waiting model that is still being unloaded is skipped, so the model behind it may be the first.
        if before.is_empty() || !self.state.gpus().is_empty() {
            return;
        }
        let is_freed_soon = |(model, loaded): &(&ModelId, &ResidentModel)| {
            let in_grace = self.now - loaded.loaded_at < LOAD_GRACE_PERIOD
                && self.last_use.get(*model).copied().unwrap_or(0) == loaded.used_before;
            !self.pinned.contains(*model) && self.engines[*model].running == 0 && in_grace
        };
        let freed_soon = self.state.loaded.iter().filter(is_freed_soon).map(|(_, loaded)| loaded);
        let unloading = self.state.unloading.iter().map(|(_, loaded)| loaded);
        let soon_free: u64 = freed_soon.chain(unloading).map(|loaded| loaded.host_bytes).sum();
        let reserved = before.iter().map(|model| {
            let smallest = self.models[model].estimate().smallest_bytes();
            let smallest = if self.models[model].is_readable { smallest } else { 0 };
            self.state.last_bytes.get(model).copied().unwrap_or(0).max(smallest)
        });
        let reserved: u64 = reserved.sum();
        let free = self.unreserved_bytes() + soon_free;
        assert!(reserved + taken <= free, "{before:?} need {reserved}, {taken} are taken, {free} are free");
    }

    pub(super) fn check_planning_again_changes_nothing(&self) {
        for event in [LoaderEvent::Continue, LoaderEvent::EnginesChanged] {
            let mut again = self.state.clone();
            again.observed = self.observe();
            let before = again.clone();
            assert_eq!(apply(&mut again, event, self.now), []);
            assert!(again == before, "{again:?}\nafter {before:?}");
        }
    }
}
