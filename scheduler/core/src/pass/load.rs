//! Requests to load the model of a waiting job.

use cfq_proto::node::{ModelState, Residency};

use super::Pass;
use crate::candidates::{Candidates, accepts};
use crate::job::Job;
use crate::model_loading::{LoadRequest, request_load};
use crate::state::is_ready;

impl<'a> Pass<'a> {
    /// Requests a load of the job's model if no node has it resident.
    pub(super) fn request_load(&mut self, job: &'a Job) {
        let state = self.state;
        let able = || {
            let able = state.live_nodes_with(&job.model, self.now_ms);
            able.filter(|(node, _)| !job.refused_by.contains_key(&node.id))
        };
        let is_resident = able().any(|(node, model)| is_ready(node, model));
        let on_disk = |model: &ModelState| matches!(model.residency, Residency::Available);
        let is_load_possible = !is_resident && able().any(|(_, model)| on_disk(model));
        self.needs_load |= is_load_possible;
        if self.loads.is_none() {
            return;
        }
        let candidates = Candidates::of(state, job, self.now_ms);
        if !job.may_be_poison() {
            self.block_evictions(&candidates);
        }
        if !is_load_possible {
            return;
        }
        let is_loading = candidates.able.iter().any(|(n, m)| {
            !n.cordoned && m.residency == Residency::Loading && !state.is_load_overdue(&n.id, &m.model, self.now_ms)
        });
        if is_loading {
            return;
        }
        let loaders = candidates.able.iter().copied().filter(|(n, _)| {
            accepts(state, job, n, self.now_ms)
                && !state.has_overdue_load(&n.id, self.now_ms)
                && self.occupancy(&n.id).admits(job)
        });
        let loaders = loaders.collect();
        let request = self.loads.as_mut().and_then(|loads| request_load(job, loaders, &state.prefix_index, loads));
        if let Some(request) = request {
            self.close_models_to_evict(request);
        }
    }

    /// While the job waits for capacity on these nodes, nothing is evicted there for the jobs behind it.
    fn block_evictions(&mut self, candidates: &Candidates<'a>) {
        let Some(loads) = &mut self.loads else { return };
        for (node, _) in &candidates.open {
            loads.entry(&node.id).or_default().eviction_blocked = true;
        }
    }

    /// Stops placements on the models that have to be evicted for a load.
    fn close_models_to_evict(&mut self, request: LoadRequest<'a>) {
        let node = request.node;
        let is_idle = |model: &ModelState| {
            let is_planned = self.planned.contains_key(&(node.id.clone(), model.model.clone()));
            !is_planned && self.state.capacity(node, model).concurrent == 0
        };
        for model in request.models_to_evict(is_idle) {
            self.rooms.remove(&node.id, &model.model);
        }
        self.closed.insert(node.id.clone());
    }
}
