//! Writes of the leader. Each of them compares the leader's term.

use cfq_proto::ids::BootId;
use cfq_scheduler_core::{BootAttempt, Job, JobPhase, UnreportedEnd, is_suspect};

use super::super::checks::Violations;
use super::super::messages::Fence;
use super::{Attempt, JobEnd, SAME_LOSS_TTLS, Tables, job_id, lease_id};

/// Limits of the scheduler's configuration.
const MAX_SUSPICIONS: u32 = 3;
const MAX_LOST_OR_UNACCEPTED: u32 = 20;

impl Tables {
    /// Leader: queued -> placed. Returns the fence of the new attempt.
    pub fn place(
        &mut self,
        term: u64,
        job: usize,
        attempt: i32,
        node: usize,
        boot: BootId,
        now_ms: i64,
    ) -> Option<Fence> {
        let is_queued = self
            .jobs
            .get(&job)
            .is_some_and(|row| matches!(row.job.phase, JobPhase::Queued) && row.job.attempt == attempt - 1);
        let same_boot = self.nodes[node].as_ref().is_some_and(|row| row.boot == boot);
        if term != self.term || !is_queued || !same_boot {
            return self.reject();
        }
        let lease = self.next_lease;
        self.next_lease += 1;
        let name = self.names[node].clone();
        self.write(job, now_ms, |row| {
            row.lease = lease;
            row.job.attempt = attempt;
            row.job.no_node_ms = 0;
            if row.job.node_failures.0.is_empty() {
                row.job.first_failure_ms = None;
            }
            row.job.phase =
                JobPhase::Placed { node: name, boot, lease: lease_id(lease), placed_ms: now_ms, preparing_ms: None };
        });
        let record = BootAttempt { job: job_id(job), placed_ms: now_ms, accepted_ms: None, has_first_token: false };
        let old_ms = now_ms - SAME_LOSS_TTLS * self.lease_ttl_ms;
        self.attempts[node]
            .retain(|a| a.ended_ms.is_none_or(|ended| ended > old_ms) || a.is_unplaced && a.boot == boot);
        self.attempts[node].push(Attempt {
            boot,
            attempt: record,
            number: attempt,
            ended_ms: None,
            is_unplaced: false,
            is_suspected: false,
        });
        self.counts.placed += 1;
        Some(Fence { job, attempt, lease })
    }

    /// Leader: whether an attempt is still placed, to publish it again.
    pub fn is_placed(&self, fence: Fence) -> bool {
        self.fenced(fence).is_some_and(|row| matches!(row.job.phase, JobPhase::Placed { .. }))
    }

    /// Leader: placed -> queued or dead.
    pub fn unplace(
        &mut self,
        term: u64,
        fence: Fence,
        end: UnreportedEnd,
        now_ms: i64,
        violations: &mut Violations,
    ) -> bool {
        if term != self.term || !self.is_placed(fence) {
            self.counts.rejected += 1;
            return false;
        }
        self.end_lost_attempt(fence.job, end, now_ms, violations);
        true
    }

    /// Leader: queued -> failed.
    pub fn fail(&mut self, term: u64, job: usize, attempt: i32, violations: &mut Violations) -> bool {
        let is_current = self
            .jobs
            .get(&job)
            .is_some_and(|row| matches!(row.job.phase, JobPhase::Queued) && row.job.attempt == attempt);
        if term != self.term || !is_current {
            self.counts.rejected += 1;
            return false;
        }
        self.end(job, JobEnd::Failed, violations);
        true
    }

    /// Leader: records why a queued job waits. Returns whether it was written.
    pub fn record_wait(
        &mut self,
        term: u64,
        job: usize,
        attempt: i32,
        now_ms: i64,
        change: impl FnOnce(&mut Job),
    ) -> bool {
        let is_current = self
            .jobs
            .get(&job)
            .is_some_and(|row| matches!(row.job.phase, JobPhase::Queued) && row.job.attempt == attempt);
        if term != self.term || !is_current {
            self.counts.rejected += 1;
            return false;
        }
        self.write(job, now_ms, |row| change(&mut row.job));
        true
    }

    /// Leader: ends expired leases.
    pub fn sweep(&mut self, term: u64, now_ms: i64, violations: &mut Violations) {
        while let Some(&(expires_ms, job)) = self.leases.first() {
            if term != self.term || expires_ms >= now_ms {
                return;
            }
            let holder = self.jobs.get(&job).and_then(|row| row.job.holder().map(|(node, boot)| (node.clone(), boot)));
            let Some((node, boot)) = holder else { return };
            let row = self.nodes[self.node_index(&node)].as_ref().filter(|row| row.boot == boot);
            let is_alive = row.is_some_and(|row| row.alive(now_ms, self.lease_ttl_ms as u64));
            let end = if is_alive { UnreportedEnd::Stalled } else { UnreportedEnd::NodeLost };
            self.end_lost_attempt(job, end, now_ms, violations);
        }
    }

    /// Ends an attempt that its node did not report: the job is requeued or becomes a dead letter.
    pub(super) fn end_lost_attempt(
        &mut self,
        job: usize,
        end: UnreportedEnd,
        now_ms: i64,
        violations: &mut Violations,
    ) {
        let Some((node, boot)) = self.holder(job) else { return };
        let suspected = end != UnreportedEnd::Infrastructure && self.suspects(job, node, boot, end, now_ms);
        let is_counted = end != UnreportedEnd::Infrastructure;
        let is_running = self.jobs.get(&job).is_some_and(|row| matches!(row.job.phase, JobPhase::Running { .. }));
        self.end_attempt(job, node, now_ms, !is_running, suspected && end == UnreportedEnd::NodeLost);
        self.counts.lost += 1;
        self.write(job, now_ms, |row| {
            match is_running {
                true => row.job.losses += u32::from(is_counted),
                false => row.job.unaccepted += u32::from(is_counted),
            }
            row.job.suspicions += u32::from(suspected);
            row.job.phase = JobPhase::Queued;
        });
        let is_over_limit = self.jobs.get(&job).is_some_and(|row| {
            row.job.suspicions > MAX_SUSPICIONS || row.job.losses + row.job.unaccepted > MAX_LOST_OR_UNACCEPTED
        });
        if is_over_limit {
            self.end(job, JobEnd::Dead, violations);
        }
    }

    fn suspects(&self, job: usize, node: usize, boot: BootId, end: UnreportedEnd, now_ms: i64) -> bool {
        let recently_ms = now_ms - SAME_LOSS_TTLS * self.lease_ttl_ms;
        let number = self.jobs.get(&job).map_or(0, |row| row.job.attempt);
        let of_boot = || self.attempts[node].iter().filter(|a| a.boot == boot);
        let own = of_boot().find(|a| a.attempt.job == job_id(job) && a.number == number);
        let counts = |a: &&Attempt| {
            a.attempt.job != job_id(job)
                && (a.ended_ms.is_none_or(|ended| ended > recently_ms)
                    || a.is_unplaced && end == UnreportedEnd::NotAccepted)
        };
        let others: Vec<BootAttempt> = of_boot().filter(counts).map(|a| a.attempt).collect();
        own.is_some_and(|own| is_suspect(end, &own.attempt, &others, self.last_accepted_ms.get(&boot).copied()))
    }
}
