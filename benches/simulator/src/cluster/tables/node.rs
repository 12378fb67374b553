//! Fenced writes: reports of nodes, and a user's cancel.

use std::collections::BTreeMap;

use cfq_proto::ids::BootId;
use cfq_proto::job::JobFailure;
use cfq_proto::node::Ledger;
use cfq_scheduler_core::{BackoffPolicy, Exclusion, JobPhase, Node, UnreportedEnd};

use super::super::checks::Violations;
use super::super::messages::{AttemptResult, Fence};
use super::{JobEnd, JobRow, Tables, job_id};

const BACKOFF: BackoffPolicy = BackoffPolicy { base_ms: 1_000, cap_ms: 256_000 };

impl Tables {
    /// Node: placed -> running. True if the attempt is current.
    pub fn accept(&mut self, node: usize, boot: BootId, fence: Fence, now_ms: i64) -> bool {
        let Some(row) = self.held(node, boot, fence) else {
            self.counts.rejected += 1;
            return false;
        };
        if matches!(row.job.phase, JobPhase::Running { .. }) {
            return true;
        }
        let (name, expires_ms) = (self.names[node].clone(), now_ms + self.lease_ttl_ms);
        self.write(fence.job, now_ms, |row| {
            row.lease_expires_ms = expires_ms;
            row.job.phase = JobPhase::Running { node: name, boot, accepted_ms: now_ms };
        });
        self.last_accepted_ms.insert(boot, now_ms);
        if let Some(attempt) = self.attempt_mut(fence.job, node, fence.attempt) {
            attempt.attempt.accepted_ms = Some(now_ms);
        }
        true
    }

    /// Node: placed -> queued, because it has no capacity now.
    pub fn refuse(&mut self, node: usize, boot: BootId, fence: Fence, ledger_version: u64, now_ms: i64) {
        let is_placed =
            self.held(node, boot, fence).is_some_and(|row| matches!(row.job.phase, JobPhase::Placed { .. }));
        if !is_placed {
            self.counts.rejected += 1;
            return;
        }
        self.counts.refused += 1;
        let model = self.jobs.get(&fence.job).map(|row| row.job.model.clone());
        if let (Some(row), Some(model)) = (self.nodes[node].as_mut(), model) {
            row.exclusions.insert(model, Exclusion { version: ledger_version, at_ms: now_ms });
            self.changed_nodes.push(node);
        }
        self.forget_attempt(fence.job, node);
        self.write(fence.job, now_ms, |row| row.job.phase = JobPhase::Queued);
    }

    /// Node: the first token of an attempt.
    pub fn first_token(&mut self, node: usize, boot: BootId, fence: Fence) -> bool {
        if self.held(node, boot, fence).is_none() {
            return false;
        }
        if let Some(attempt) = self.attempt_mut(fence.job, node, fence.attempt) {
            attempt.attempt.has_first_token = true;
        }
        true
    }

    /// Node: running -> done, queued or failed. True if the report is committed, now or by an earlier copy.
    pub fn result(
        &mut self,
        node: usize,
        boot: BootId,
        fence: Fence,
        result: AttemptResult,
        now_ms: i64,
        violations: &mut Violations,
    ) -> bool {
        let is_running =
            self.held(node, boot, fence).is_some_and(|row| matches!(row.job.phase, JobPhase::Running { .. }));
        if !is_running {
            self.counts.rejected += 1;
            return result == AttemptResult::Done
                && self.ended.get(&fence.job).is_some_and(|job| (job.end, job.lease) == (JobEnd::Done, fence.lease));
        }
        self.forget_attempt(fence.job, node);
        let ceiling_ms = self.retry_ceiling_ms;
        match result {
            AttemptResult::Done => self.end(fence.job, JobEnd::Done, violations),
            AttemptResult::Failed => {
                let name = self.names[node].clone();
                let mut is_over = false;
                self.write(fence.job, now_ms, |row| {
                    let is_first = row.job.node_failures.0.is_empty();
                    let first = row.job.first_failure_ms.filter(|_| !is_first).unwrap_or(now_ms);
                    row.job.node_failures.record(row.job.id, name, now_ms, BACKOFF);
                    row.job.first_failure_ms = Some(first);
                    row.job.last_failure = Some(JobFailure::Unavailable { reason: "simulated".into() });
                    row.job.phase = JobPhase::Queued;
                    is_over = now_ms >= first.saturating_add_unsigned(ceiling_ms);
                });
                if is_over {
                    self.end(fence.job, JobEnd::Failed, violations);
                }
            }
        }
        true
    }

    /// Node: its first message of a boot. Leases of earlier boots end at once. Returns false for an old boot.
    pub fn register(
        &mut self,
        node: usize,
        boot: BootId,
        ledger: Ledger,
        now_ms: i64,
        violations: &mut Violations,
    ) -> bool {
        if self.nodes[node].as_ref().is_some_and(|row| row.boot > boot) {
            self.counts.rejected += 1;
            return false;
        }
        if self.nodes[node].as_ref().is_none_or(|row| row.boot != boot) {
            let name = self.names[node].clone();
            let of_other_boot =
                |row: &JobRow| row.job.holder().is_some_and(|(of, held_by)| *of == name && held_by != boot);
            let held = self.held[node].iter().filter(|job| self.jobs.get(job).is_some_and(of_other_boot));
            for job in held.copied().collect::<Vec<_>>() {
                self.end_lost_attempt(job, UnreportedEnd::NodeLost, now_ms, violations);
            }
            let id = self.names[node].clone();
            self.nodes[node] =
                Some(Node { id, boot, ledger, seen_ms: now_ms, cordoned: false, exclusions: BTreeMap::new() });
            self.changed_nodes.push(node);
        }
        true
    }

    /// Node: a heartbeat. Extends the leases that the boot still holds; returns which of the listed ones it holds.
    /// `None` if the boot is not the registered one.
    pub fn heartbeat(
        &mut self,
        node: usize,
        boot: BootId,
        ledger: Ledger,
        held: &[Fence],
        now_ms: i64,
    ) -> Option<BTreeMap<u64, bool>> {
        let ttl_ms = self.lease_ttl_ms;
        let row = self.nodes[node].as_mut().filter(|row| row.boot == boot)?;
        let was_silent = now_ms - row.seen_ms > ttl_ms;
        // A heartbeat that was overtaken by a later one sets the ledger back until the next one.
        (row.seen_ms, row.ledger) = (now_ms, ledger);
        self.changed_nodes.push(node);
        if was_silent {
            self.withdraw_suspicions(node, |attempt| attempt.boot == boot);
        }
        let expires_ms = now_ms + self.lease_ttl_ms;
        let mut kept = BTreeMap::new();
        for fence in held {
            let is_held = self.held(node, boot, *fence).is_some();
            kept.insert(fence.lease, is_held);
            if let Some(row) = self.jobs.get_mut(&fence.job).filter(|_| is_held)
                && matches!(row.job.phase, JobPhase::Running { .. })
            {
                self.leases.remove(&(row.lease_expires_ms, fence.job));
                row.lease_expires_ms = expires_ms;
                self.leases.insert((expires_ms, fence.job));
            }
        }
        for fence in held.iter().filter(|fence| kept.get(&fence.lease) == Some(&false)) {
            self.withdraw_suspicions(node, |a| a.attempt.job == job_id(fence.job) && a.number == fence.attempt);
        }
        Some(kept)
    }

    /// User: any state that has not ended -> cancelled.
    pub fn cancel(&mut self, job: usize, violations: &mut Violations) {
        if let Some((node, _)) = self.holder(job) {
            self.forget_attempt(job, node);
        }
        self.end(job, JobEnd::Cancelled, violations);
    }
}
