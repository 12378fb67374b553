//! The rows that the scheduler keeps in Postgres, and its writes. Each write compares fence and state, as the SQL of
//! `scheduler/service/src/store` does; this file is a model of that SQL, except for the rule of suspicion and the
//! backoff, which are the scheduler's own functions.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use cfq_proto::ids::{BootId, JobId, LeaseId, NodeId, TaskId};
use cfq_proto::job::JobFailure;
use cfq_proto::model::ModelId;
use cfq_proto::node::Ledger;
use cfq_proto::task::{Agent, Priority};
use cfq_scheduler_core::{
    BackoffPolicy, BootAttempt, Exclusion, Job, JobPhase, Node, NodeFailures, UnreportedEnd, is_suspect,
};
use uuid::Uuid;

use super::checks::Violations;
use super::messages::{AttemptResult, Fence};
use crate::trace::Call;

/// Limits of the scheduler's configuration.
const MAX_SUSPICIONS: u32 = 3;
const MAX_LOST_OR_UNACCEPTED: u32 = 20;
const BACKOFF: BackoffPolicy = BackoffPolicy { base_ms: 1_000, cap_ms: 256_000 };
/// Time, in lease TTLs, for which an attempt that ended unreported counts as held when another one of its boot ends.
const SAME_LOSS_TTLS: i64 = 3;
/// Tokens of the chat template that the cost model adds to each prompt.
const CHAT_TEMPLATE_TOKENS: u64 = 32;

/// State of a job that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum JobEnd {
    /// Its reply is complete.
    Done,
    /// No node can run it, or the retry ceiling was reached.
    Failed,
    /// Dead letter.
    Dead,
    /// Cancelled by its user.
    Cancelled,
}

/// A job that has not ended.
#[derive(Debug, Clone)]
pub struct JobRow {
    /// The columns that the planner reads.
    pub job: Job,
    /// Number of the current lease.
    pub lease: u64,
    /// When a running job's lease expires, in ms.
    pub lease_expires_ms: i64,
    /// Number of writes of this row.
    pub version: u64,
    /// Time of the last write, in ms.
    pub changed_ms: i64,
}

/// An attempt, as far as the rule of suspicion reads it.
#[derive(Debug, Clone, Copy)]
struct Attempt {
    boot: BootId,
    attempt: BootAttempt,
    number: i32,
    ended_ms: Option<i64>,
    is_unplaced: bool,
}

/// Numbers of what happened in the tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TableCounts {
    /// Placements committed.
    pub placed: u64,
    /// Writes rejected because their fence or state was not the current one.
    pub rejected: u64,
    /// Attempts lost with their node or lease.
    pub lost: u64,
    /// Refusals of nodes.
    pub refused: u64,
}

/// All rows.
#[derive(Debug)]
pub struct Tables {
    /// Jobs that have not ended.
    pub jobs: HashMap<usize, JobRow>,
    /// Jobs that have ended, with the lease under which they ended.
    pub ended: HashMap<usize, (JobEnd, u64)>,
    /// Nodes, by index.
    pub nodes: Vec<Option<Node>>,
    /// Names of the nodes, by index.
    pub names: Vec<NodeId>,
    indices: HashMap<NodeId, usize>,
    models: Vec<ModelId>,
    attempts: Vec<Vec<Attempt>>,
    last_accepted_ms: HashMap<BootId, i64>,
    /// Running jobs by the expiry of their leases.
    pub leases: BTreeSet<(i64, usize)>,
    /// Queued jobs of each model, by creation.
    pub waiting: Vec<BTreeSet<(i64, usize)>>,
    /// Term of the current leader.
    pub term: u64,
    next_lease: u64,
    lease_ttl_ms: i64,
    /// What happened.
    pub counts: TableCounts,
    /// Jobs and nodes whose rows changed since the leader last read them.
    pub changed_jobs: Vec<usize>,
    /// See `changed_jobs`.
    pub changed_nodes: Vec<usize>,
}

/// Id of a call's job.
pub fn job_id(job: usize) -> JobId {
    JobId(Uuid::from_u128(job as u128 + 1))
}

/// Index of the call of a job.
pub fn job_index(job: JobId) -> usize {
    (job.0.as_u128() - 1) as usize
}

/// Id of a boot.
pub fn boot_id(node: usize, boot: u32) -> BootId {
    BootId(Uuid::from_u128((u128::from(boot) << 64) | (node as u128 + 1)))
}

fn lease_id(lease: u64) -> LeaseId {
    LeaseId(Uuid::from_u128(u128::from(lease)))
}

/// Number of a lease.
pub fn lease_number(lease: LeaseId) -> u64 {
    lease.0.as_u128() as u64
}

impl Tables {
    /// Tables without jobs and nodes.
    pub fn new(names: Vec<NodeId>, models: Vec<ModelId>, lease_ttl_ms: u64) -> Self {
        Self {
            jobs: HashMap::new(),
            ended: HashMap::new(),
            nodes: vec![None; names.len()],
            indices: names.iter().cloned().enumerate().map(|(index, name)| (name, index)).collect(),
            attempts: vec![Vec::new(); names.len()],
            last_accepted_ms: HashMap::new(),
            names,
            leases: BTreeSet::new(),
            waiting: vec![BTreeSet::new(); models.len()],
            models,
            term: 0,
            next_lease: 1,
            lease_ttl_ms: lease_ttl_ms as i64,
            counts: TableCounts::default(),
            changed_jobs: Vec::new(),
            changed_nodes: Vec::new(),
        }
    }

    /// Index of a node.
    pub fn node_index(&self, node: &NodeId) -> usize {
        self.indices.get(node).copied().unwrap_or(usize::MAX)
    }

    /// Index of a model.
    pub fn model_index(&self, model: &ModelId) -> usize {
        self.models.iter().position(|id| id == model).unwrap_or(usize::MAX)
    }

    /// Inserts a job.
    pub fn submit(&mut self, index: usize, call: &Call, priority: Priority, now_ms: i64) {
        let job = Job {
            id: job_id(index),
            task: TaskId(Uuid::from_u128(index as u128 + 1)),
            role: Agent::Alpha,
            model: self.models[call.model].clone(),
            priority,
            deadline_ms: None,
            created_ms: now_ms,
            prompt_bytes: call.prompt_tokens.saturating_sub(CHAT_TEMPLATE_TOKENS),
            prefix: call.chain.clone(),
            max_tokens: call.output_tokens,
            counted_tokens: None,
            refused_by: BTreeMap::new(),
            node_failures: NodeFailures::default(),
            first_failure_ms: None,
            no_node_ms: 0,
            losses: 0,
            unaccepted: 0,
            suspicions: 0,
            last_failure: None,
            attempt: 0,
            phase: JobPhase::Queued,
        };
        self.waiting[call.model].insert((now_ms, index));
        let row = JobRow { job, lease: 0, lease_expires_ms: 0, version: 0, changed_ms: now_ms };
        self.jobs.insert(index, row);
        self.changed_jobs.push(index);
    }

    /// Writes a row that exists: keeps the indexes and records the change.
    fn write(&mut self, index: usize, now_ms: i64, change: impl FnOnce(&mut JobRow)) {
        let Some(row) = self.jobs.get_mut(&index) else { return };
        let key = (row.job.created_ms, index);
        let model = self.models.iter().position(|id| *id == row.job.model).unwrap_or(0);
        self.leases.remove(&(row.lease_expires_ms, index));
        change(row);
        row.version += 1;
        row.changed_ms = now_ms;
        match &row.job.phase {
            JobPhase::Queued => {
                self.waiting[model].insert(key);
            }
            JobPhase::Placed { .. } => {
                self.waiting[model].remove(&key);
            }
            JobPhase::Running { .. } => {
                self.waiting[model].remove(&key);
                self.leases.insert((row.lease_expires_ms, index));
            }
        }
        self.changed_jobs.push(index);
    }

    /// Ends a job. A job that has ended does not change any more.
    fn end(&mut self, index: usize, end: JobEnd, violations: &mut Violations) {
        let Some(row) = self.jobs.remove(&index) else { return };
        let model = self.model_index(&row.job.model);
        self.waiting[model].remove(&(row.job.created_ms, index));
        self.leases.remove(&(row.lease_expires_ms, index));
        if let Some((before, _)) = self.ended.insert(index, (end, row.lease)) {
            violations.report(|| format!("job {index} was {before:?} and became {end:?}"));
        }
        self.changed_jobs.push(index);
    }

    /// The row if the fence is its current one.
    fn fenced(&self, fence: Fence) -> Option<&JobRow> {
        self.jobs.get(&fence.job).filter(|row| row.job.attempt == fence.attempt && row.lease == fence.lease)
    }

    fn reject<T>(&mut self) -> Option<T> {
        self.counts.rejected += 1;
        None
    }

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
            row.job.phase = JobPhase::Placed { node: name, boot, lease: lease_id(lease), placed_ms: now_ms };
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
    fn end_lost_attempt(&mut self, job: usize, end: UnreportedEnd, now_ms: i64, violations: &mut Violations) {
        let Some((node, boot)) = self.holder(job) else { return };
        let suspected = end != UnreportedEnd::Infrastructure && self.suspects(job, node, boot, end, now_ms);
        let is_counted = end != UnreportedEnd::Infrastructure;
        let is_running = self.jobs.get(&job).is_some_and(|row| matches!(row.job.phase, JobPhase::Running { .. }));
        self.end_attempt(job, node, now_ms, !is_running);
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

    fn holder(&self, job: usize) -> Option<(usize, BootId)> {
        let (node, boot) = self.jobs.get(&job)?.job.holder()?;
        Some((self.node_index(node), boot))
    }

    fn attempt_mut(&mut self, job: usize, node: usize, number: i32) -> Option<&mut Attempt> {
        self.attempts[node].iter_mut().find(|a| a.attempt.job == job_id(job) && a.number == number)
    }

    /// `is_lost_unaccepted`: the attempt was never accepted and its node did not report its end.
    fn end_attempt(&mut self, job: usize, node: usize, now_ms: i64, is_lost_unaccepted: bool) {
        let number = self.jobs.get(&job).map_or(0, |row| row.job.attempt);
        if let Some(attempt) = self.attempt_mut(job, node, number) {
            attempt.ended_ms = Some(now_ms);
            attempt.is_unplaced = is_lost_unaccepted;
        }
    }

    /// Removes an attempt whose end its node reported: it is no evidence about others.
    fn forget_attempt(&mut self, job: usize, node: usize) {
        self.attempts[node].retain(|a| a.attempt.job != job_id(job));
    }

    /// The row if the fence is its current one and this boot of the node holds the attempt.
    fn held(&self, node: usize, boot: BootId, fence: Fence) -> Option<&JobRow> {
        self.fenced(fence).filter(|row| row.job.holder() == Some((&self.names[node], boot)))
    }

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
        ceiling_ms: u64,
        violations: &mut Violations,
    ) -> bool {
        let is_running =
            self.held(node, boot, fence).is_some_and(|row| matches!(row.job.phase, JobPhase::Running { .. }));
        if !is_running {
            self.counts.rejected += 1;
            return self.ended.get(&fence.job) == Some(&(JobEnd::Done, fence.lease)) && result == AttemptResult::Done;
        }
        self.forget_attempt(fence.job, node);
        match result {
            AttemptResult::Done => self.end(fence.job, JobEnd::Done, violations),
            AttemptResult::Failed => {
                let name = self.names[node].clone();
                let mut is_over = false;
                self.write(fence.job, now_ms, |row| {
                    let first = row.job.first_failure_ms.unwrap_or(now_ms);
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
            let on_it = |(index, row): (&usize, &JobRow)| {
                row.job.holder().is_some_and(|(of, held_by)| *of == name && held_by != boot).then_some(*index)
            };
            let mut held: Vec<usize> = self.jobs.iter().filter_map(on_it).collect();
            held.sort_unstable();
            for job in held {
                self.end_lost_attempt(job, UnreportedEnd::NodeLost, now_ms, violations);
            }
            let id = self.names[node].clone();
            self.nodes[node] = Some(Node { id, boot, ledger, seen_ms: now_ms, exclusions: BTreeMap::new() });
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
        ledger: Option<Ledger>,
        held: &[Fence],
        now_ms: i64,
    ) -> Option<BTreeMap<u64, bool>> {
        let row = self.nodes[node].as_mut().filter(|row| row.boot == boot)?;
        row.seen_ms = now_ms;
        if let Some(ledger) = ledger {
            // A heartbeat that was overtaken by a later one changes nothing.
            if ledger.version >= row.ledger.version {
                row.ledger = ledger;
            }
        }
        self.changed_nodes.push(node);
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
