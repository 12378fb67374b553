//! The rows that the scheduler keeps in Postgres, and its writes. Each write compares fence and state, as the SQL of
//! `scheduler/service/src/store` does; this file is a model of that SQL, except for the rule of suspicion and the
//! backoff, which are the scheduler's own functions.

mod leader;
mod node;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use cfq_proto::ids::{BootId, JobId, LeaseId, NodeId, TaskId};
use cfq_proto::job::JobRole;
use cfq_proto::model::ModelId;
use cfq_proto::task::Priority;
use cfq_scheduler_core::{BootAttempt, Job, JobPhase, Node, NodeFailures};
use uuid::Uuid;

use super::checks::Violations;
use super::config::Timing;
use super::messages::Fence;
use crate::trace::Call;

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

/// A job that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndedJob {
    /// How it ended.
    pub end: JobEnd,
    /// Lease of its last attempt.
    pub lease: u64,
    /// When it ended, in ms.
    pub ended_ms: i64,
}

/// An attempt, as far as the rule of suspicion reads it.
#[derive(Debug, Clone, Copy)]
struct Attempt {
    boot: BootId,
    attempt: BootAttempt,
    number: i32,
    ended_ms: Option<i64>,
    is_unplaced: bool,
    /// Whether its job is suspected because of the loss of the node.
    is_suspected: bool,
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
    /// Jobs that have ended.
    pub ended: HashMap<usize, EndedJob>,
    /// Nodes, by index.
    pub nodes: Vec<Option<Node>>,
    /// Names of the nodes, by index.
    pub names: Vec<NodeId>,
    indices: HashMap<NodeId, usize>,
    models: Vec<ModelId>,
    attempts: Vec<Vec<Attempt>>,
    /// Jobs that are placed or running on each node.
    pub held: Vec<BTreeSet<usize>>,
    last_accepted_ms: HashMap<BootId, i64>,
    /// Running jobs by the expiry of their leases.
    pub leases: BTreeSet<(i64, usize)>,
    /// Queued jobs of each model, by creation.
    pub waiting: Vec<BTreeSet<(i64, usize)>>,
    /// Term of the current leader.
    pub term: u64,
    next_lease: u64,
    /// The database's clock, in ms.
    pub now_ms: i64,
    lease_ttl_ms: i64,
    retry_ceiling_ms: u64,
    /// What happened.
    pub counts: TableCounts,
    /// Jobs and nodes whose rows changed since the leader last read them.
    pub changed_jobs: Vec<usize>,
    /// See `changed_jobs`.
    pub changed_nodes: Vec<usize>,
    /// Jobs that have ended since the list was last emptied.
    pub just_ended: Vec<usize>,
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
    pub fn new(names: Vec<NodeId>, models: Vec<ModelId>, timing: &Timing) -> Self {
        Self {
            jobs: HashMap::new(),
            ended: HashMap::new(),
            nodes: vec![None; names.len()],
            indices: names.iter().cloned().enumerate().map(|(index, name)| (name, index)).collect(),
            attempts: vec![Vec::new(); names.len()],
            held: vec![BTreeSet::new(); names.len()],
            last_accepted_ms: HashMap::new(),
            names,
            leases: BTreeSet::new(),
            waiting: vec![BTreeSet::new(); models.len()],
            models,
            term: 0,
            next_lease: 1,
            now_ms: 0,
            lease_ttl_ms: timing.lease_ttl_ms as i64,
            retry_ceiling_ms: timing.retry_ceiling_ms,
            counts: TableCounts::default(),
            changed_jobs: Vec::new(),
            changed_nodes: Vec::new(),
            just_ended: Vec::new(),
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
            role: JobRole::Alpha,
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
            has_fallback: false,
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
        let before = self.holder(index);
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
        if let Some((node, _)) = before {
            self.held[node].remove(&index);
        }
        if let Some((node, _)) = self.holder(index) {
            self.held[node].insert(index);
        }
        self.changed_jobs.push(index);
    }

    /// Ends a job. A job that has ended does not change any more.
    fn end(&mut self, index: usize, end: JobEnd, violations: &mut Violations) {
        if let Some((node, _)) = self.holder(index) {
            self.held[node].remove(&index);
        }
        let Some(row) = self.jobs.remove(&index) else { return };
        let model = self.model_index(&row.job.model);
        self.waiting[model].remove(&(row.job.created_ms, index));
        self.leases.remove(&(row.lease_expires_ms, index));
        self.just_ended.push(index);
        let ended = EndedJob { end, lease: row.lease, ended_ms: self.now_ms };
        if let Some(before) = self.ended.insert(index, ended) {
            violations.report(|| format!("job {index} was {:?} and became {end:?}", before.end));
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

    fn holder(&self, job: usize) -> Option<(usize, BootId)> {
        let (node, boot) = self.jobs.get(&job)?.job.holder()?;
        Some((self.node_index(node), boot))
    }

    fn attempt_mut(&mut self, job: usize, node: usize, number: i32) -> Option<&mut Attempt> {
        self.attempts[node].iter_mut().find(|a| a.attempt.job == job_id(job) && a.number == number)
    }

    /// `is_lost_unaccepted`: the attempt was never accepted and its node did not report its end.
    fn end_attempt(&mut self, job: usize, node: usize, now_ms: i64, is_lost_unaccepted: bool, is_suspected: bool) {
        let number = self.jobs.get(&job).map_or(0, |row| row.job.attempt);
        if let Some(attempt) = self.attempt_mut(job, node, number) {
            attempt.ended_ms = Some(now_ms);
            (attempt.is_unplaced, attempt.is_suspected) = (is_lost_unaccepted, is_suspected);
        }
    }

    /// Withdraws the suspicions because of the loss of this node, for the attempts that the filter selects: the node sends
    /// heartbeats again, so it was not stopped.
    fn withdraw_suspicions(&mut self, node: usize, selects: impl Fn(&Attempt) -> bool) {
        let suspected = self.attempts[node].iter_mut().filter(|a| a.is_suspected && selects(a));
        let jobs: Vec<usize> = suspected.map(|a| (a.is_suspected = false, job_index(a.attempt.job)).1).collect();
        for job in jobs {
            self.write(job, self.now_ms, |row| row.job.suspicions = row.job.suspicions.saturating_sub(1));
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
}
