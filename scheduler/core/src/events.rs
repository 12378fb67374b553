//! Events: the rows that the scheduler service reads, and what it has done. Each event updates the indexes of the
//! [`PlannerState`] and records what the next step has to look at.

use std::sync::Arc;

use cfq_proto::ids::{BootId, JobId, LeaseId, NodeId};
use cfq_proto::messages::PrefillHint;
use cfq_proto::model::ModelId;
use cfq_proto::node::Residency;
use cfq_proto::prefix::chain;

use crate::acceptance::counted_report_ms;
use crate::cost::placement_cost;
use crate::job::{Job, JobPhase};
use crate::node::{Exclusion, Node};
use crate::pending_reason::PendingReason;
use crate::state::{EndedJob, Explained, PlannerState, Resends};
use crate::timers::Timer;

impl PlannerState {
    /// Stores the current row of a job that has not ended. `changed_ms` is the time of the row's last write.
    pub fn on_job_row(&mut self, job: Job, changed_ms: i64) {
        let before = self.jobs.remove(&job.id);
        let is_known = before.as_ref().is_some_and(|before| before.phase.is_same_as(&job.phase));
        if let Some(before) = before {
            self.unlink(&before);
            if matches!(job.phase, JobPhase::Running { .. })
                && let Some((node, _)) = job.holder()
                // The node has accepted a job, so it is responsive again.
                && self.unresponsive.remove(node).is_some()
            {
                self.on_structure_changed(node);
            }
            let left = before.holder().filter(|holder| Some(*holder) != job.holder()).map(|(node, _)| node.clone());
            if !matches!(job.phase, JobPhase::Queued) {
                self.release_reservation(&before);
            }
            if let Some(node) = left {
                self.record_end(before, changed_ms);
                self.on_job_left(&node);
            }
        }
        if !is_known {
            self.record_prompt(&job, changed_ms);
        }
        let report_ms = counted_report_ms(self, &job.phase);
        let is_answered = |resends: &Resends| report_ms.is_some_and(|at_ms| resends.last_ms <= at_ms);
        if !matches!(job.phase, JobPhase::Placed { .. }) || self.resends.get(&job.id).is_some_and(is_answered) {
            self.resends.remove(&job.id);
        }
        if !matches!(job.phase, JobPhase::Queued) {
            self.explained.remove(&job.id);
        }
        let (id, holder) = (job.id, job.holder().map(|(node, _)| node.clone()));
        self.link(&job);
        self.jobs.insert(id, job);
        if let Some(node) = holder {
            self.refresh_rooms(&node);
        }
    }

    /// Removes a job that is done, failed, dead or cancelled since `ended_ms`.
    pub fn on_job_ended(&mut self, job: JobId, ended_ms: i64) {
        self.resends.remove(&job);
        self.explained.remove(&job);
        let Some(before) = self.jobs.remove(&job) else { return };
        self.unlink(&before);
        self.release_reservation(&before);
        self.changes.timers.set(Timer::Job(job), None);
        self.record_prompt(&before, ended_ms);
        if let Some(node) = before.holder().map(|(node, _)| node.clone()) {
            self.record_end(before, ended_ms);
            self.on_job_left(&node);
        }
    }

    /// Adds a job to the indexes.
    fn link(&mut self, job: &Job) {
        *self.jobs_of_task.entry(job.task).or_default() += 1;
        match &job.phase {
            JobPhase::Queued => {
                self.queue.insert(job);
                self.changes.models.insert(job.model.clone());
                self.changes.queued.insert(job.id);
            }
            JobPhase::Placed { node, .. } => {
                self.held.entry(node.clone()).or_default().insert(job.id);
                self.changes.placed.insert(job.id);
            }
            JobPhase::Running { node, .. } => {
                self.held.entry(node.clone()).or_default().insert(job.id);
                self.changes.timers.set(Timer::Job(job.id), None);
            }
        }
    }

    /// Removes a job from the indexes.
    fn unlink(&mut self, job: &Job) {
        if let Some(count) = self.jobs_of_task.get_mut(&job.task) {
            *count -= 1;
            if *count == 0 {
                self.jobs_of_task.remove(&job.task);
            }
        }
        match &job.phase {
            JobPhase::Queued => {
                self.queue.remove(job);
                self.changes.models.insert(job.model.clone());
                self.changes.queued.remove(&job.id);
            }
            JobPhase::Placed { node, .. } | JobPhase::Running { node, .. } => {
                if let Some(held) = self.held.get_mut(node) {
                    held.remove(&job.id);
                    if held.is_empty() {
                        self.held.remove(node);
                    }
                }
                self.changes.placed.remove(&job.id);
            }
        }
    }

    /// Ends the reservation of a job that is no longer queued; the jobs behind it may use its node.
    fn release_reservation(&mut self, job: &Job) {
        if let Some(released) = self.reservations.get(&job.model).filter(|reservation| reservation.job == job.id) {
            self.rooms.touch(&released.node, &job.model);
            self.reservations.remove(&job.model);
            self.changes.models.insert(job.model.clone());
        }
    }

    /// Records the job's prompt as the one that its node used last. A placed job counts already, so that a job with the
    /// same prefix is placed on the same node.
    fn record_prompt(&mut self, job: &Job, now_ms: i64) {
        let Some((node, boot)) = job.holder() else { return };
        if let JobPhase::Placed { .. } = &job.phase
            && let Some(row) = self.nodes.get(node)
            && let Some(model) = row.model(&job.model)
        {
            let cached_blocks = self.prefix_index.cached_blocks(row, model, &job.prefix);
            let prefill_ms = placement_cost(job, model, 0, cached_blocks).prefill_ms;
            self.prefix_index.record_prefill(node, boot, &job.model, prefill_ms, now_ms);
        }
        self.prefix_index.record_prompt(node, boot, &job.model, &job.prefix, now_ms);
    }

    /// Corrects what was expected of a node that a job has left.
    fn on_job_left(&mut self, node: &NodeId) {
        if !self.held.contains_key(node) {
            self.prefix_index.on_idle(node);
        }
        self.refresh_rooms(node);
    }

    /// Records that the node was asked to compute the prompt of an expected call.
    pub fn on_prefill_hint_sent(&mut self, node: &NodeId, hint: &PrefillHint) {
        if let Some((boot, seen_ms)) = self.nodes.get(node).map(|node| (node.boot, node.seen_ms)) {
            let chain = chain(hint.model.as_str(), &hint.messages);
            self.prefix_index.record_prompt(node, boot, &hint.model, &chain, seen_ms);
            self.refresh_rooms(node);
        }
    }

    /// Keeps an ended job while its node's ledger still counts it.
    fn record_end(&mut self, before: Job, ended_ms: i64) {
        if let (JobPhase::Running { accepted_ms, .. }, Some((id, boot))) = (&before.phase, before.holder())
            && let Some(node) = self.nodes.get(id)
            && node.boot == boot
            && *accepted_ms < node.seen_ms
            && ended_ms >= node.seen_ms
        {
            self.ended.entry(id.clone()).or_default().push(EndedJob { job: before, ended_ms });
        }
    }

    /// Stores the current row of a node.
    pub fn on_node_row(&mut self, node: Node) {
        let (id, boot) = (node.id.clone(), node.boot);
        if let Some(ended) = self.ended.get_mut(&id) {
            ended.retain(|e| e.job.holder().is_some_and(|(_, of)| of == boot) && e.ended_ms >= node.seen_ms);
            if ended.is_empty() {
                self.ended.remove(&id);
            }
        }
        if self.unresponsive.get(&id).is_some_and(|(of, _)| *of != boot) {
            self.unresponsive.remove(&id);
        }
        let before = self.nodes.get(&id).cloned();
        self.loads_in_progress.on_ledger(&node, before.as_deref());
        let is_excluded = !node.exclusions.is_empty() || self.unresponsive.contains_key(&id);
        let is_changed = before.as_ref().is_none_or(|before| {
            changes_who_can_serve(before, &node) || is_excluded && before.ledger.version != node.ledger.version
        });
        if is_changed && before.is_some() {
            self.forget_models(&id);
        }
        if before.is_none_or(|before| (before.boot, before.seen_ms) != (boot, node.seen_ms)) {
            self.prefix_index.on_ledger(&node);
        }
        self.nodes.insert(id.clone(), Arc::new(node));
        if is_changed {
            self.index_models(&id);
            self.check_placements_on(&id);
        }
        self.changes.nodes.insert(id.clone());
        self.refresh_rooms(&id);
    }

    /// Removes a node whose row was deleted.
    pub fn on_node_gone(&mut self, node: &NodeId) {
        self.forget_models(node);
        self.nodes.remove(node);
        self.check_placements_on(node);
        self.changes.nodes.insert(node.clone());
        self.prefix_index.forget_node(node);
        self.load_requests.retain(|(requested, _), _| requested != node);
        self.loads_in_progress.forget(node);
        self.unresponsive.remove(node);
        self.ended.remove(node);
    }

    fn index_models(&mut self, node: &NodeId) {
        for model in self.models_listed_by(node) {
            self.nodes_by_model.entry(model).or_default().insert(node.clone());
        }
        self.on_structure_changed(node);
    }

    fn forget_models(&mut self, node: &NodeId) {
        self.on_structure_changed(node);
        for model in self.models_listed_by(node) {
            self.rooms.remove(node, &model);
            if let Some(nodes) = self.nodes_by_model.get_mut(&model) {
                nodes.remove(node);
                if nodes.is_empty() {
                    self.nodes_by_model.remove(&model);
                }
            }
        }
    }

    fn models_listed_by(&self, node: &NodeId) -> Vec<ModelId> {
        let models = self.nodes.get(node).into_iter().flat_map(|node| &node.ledger.models);
        models.map(|model| model.model.clone()).collect()
    }

    /// Records that the node can serve other jobs than before.
    pub(crate) fn on_structure_changed(&mut self, node: &NodeId) {
        for model in self.models_listed_by(node) {
            self.rooms.on_structure_changed(&model);
            if self.queue.contains_model(&model) {
                self.changes.models.insert(model.clone());
                self.changes.stale.insert(model, None);
            }
        }
    }

    /// Looks again at the placements that the node has not accepted: it may be lost.
    pub(crate) fn check_placements_on(&mut self, node: &NodeId) {
        let placed = self.held_jobs(node).filter(|job| matches!(job.phase, JobPhase::Placed { .. }));
        let placed: Vec<JobId> = placed.map(|job| job.id).collect();
        self.changes.placed.extend(placed);
    }

    /// Computes again what room the node has.
    pub(crate) fn refresh_rooms(&mut self, node: &NodeId) {
        let Some(node) = self.nodes.get(node).cloned() else { return };
        let rooms: Vec<_> = self.rooms_of(&node).map(|(model, room)| (model.clone(), room)).collect();
        for (model, room) in rooms {
            self.rooms.set(&node.id, &model, room);
            // A node without room may still be the one where a job can start first.
            let matters = self.rooms.count(&model) > 0 || self.reservations.contains_key(&model);
            if matters && self.queue.contains_model(&model) {
                self.changes.models.insert(model);
            }
        }
    }

    /// Records that an [`Effect::Resend`](crate::Effect::Resend) was carried out.
    pub fn on_resent(&mut self, job: JobId, lease: LeaseId, now_ms: i64) {
        let count = self.resends.get(&job).filter(|r| r.lease == lease).map_or(0, |r| r.count) + 1;
        self.resends.insert(job, Resends { lease, count, last_ms: now_ms });
        self.changes.placed.insert(job);
    }

    /// Records that the node sends heartbeats but did not accept what was published to it: it gets no work until its
    /// ledger changes.
    pub fn on_node_unresponsive(&mut self, node: &NodeId, now_ms: i64) {
        if let Some(row) = self.nodes.get(node) {
            let exclusion = Exclusion { version: row.ledger.version, at_ms: now_ms };
            self.unresponsive.insert(node.clone(), (row.boot, exclusion));
            self.on_structure_changed(node);
            self.changes.nodes.insert(node.clone());
        }
    }

    /// Records that an [`Effect::Load`](crate::Effect::Load) was carried out.
    pub fn on_load_requested(&mut self, node: NodeId, boot: BootId, model: ModelId, now_ms: i64) {
        self.load_requests.insert((node, model), (boot, now_ms));
    }

    /// Excludes a jump of the clock ahead, to `now_ms`, from the times for which jobs have had no node or no success.
    pub fn on_clock_jump(&mut self, jump_ms: i64, now_ms: i64) {
        let shifted = |at_ms: i64| at_ms.saturating_add(jump_ms).min(now_ms);
        for job in self.jobs.values_mut() {
            job.first_failure_ms = job.first_failure_ms.map(shifted);
        }
        for explained in self.explained.values_mut() {
            explained.at_ms = shifted(explained.at_ms);
        }
        self.loads_in_progress.on_clock_jump(jump_ms, now_ms);
        self.look_at_all();
    }

    /// Records that an [`Effect::Explain`](crate::Effect::Explain) was carried out. Call it after the job's row was
    /// read again.
    pub fn on_pending_explained(&mut self, job: JobId, pending: PendingReason, now_ms: i64) {
        self.explained.insert(job, Explained { pending, at_ms: now_ms });
        self.changes.queued.insert(job);
    }
}

/// Whether the node can serve other jobs than before, apart from its free capacity.
fn changes_who_can_serve(before: &Node, now: &Node) -> bool {
    before.boot != now.boot
        || before.ledger.draining != now.ledger.draining
        || before.cordoned != now.cordoned
        || before.ledger.yields != now.ledger.yields
        || before.exclusions != now.exclusions
        || !residencies(before).eq(residencies(now))
}

fn residencies(node: &Node) -> impl Iterator<Item = (&ModelId, &Residency)> {
    node.ledger.models.iter().map(|model| (&model.model, &model.residency))
}
