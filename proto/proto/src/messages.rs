//! Messages between the services over NATS. Requests travel on the sender's own subject (see [`crate::subject`]), so a
//! node cannot act for another one; the body of a request names the boot (process start) that sent the request.
//!
//! | subject                                 | request                | reply              |
//! |-----------------------------------------|------------------------|--------------------|
//! | `cfq.v1.node.<id>.register`             | [`NodeRegistration`]   | [`RegisterReply`]  |
//! | `cfq.v1.node.<id>.heartbeat`            | [`Heartbeat`]          | [`HeartbeatReply`] |
//! | `cfq.v1.node.<id>.preparing`            | [`Preparing`]          | [`FenceReply`]     |
//! | `cfq.v1.node.<id>.accept`               | [`Accept`]             | [`FenceReply`]     |
//! | `cfq.v1.node.<id>.refuse`               | [`Refuse`]             | [`FenceReply`]     |
//! | `cfq.v1.node.<id>.journal`              | [`Journal`]            | [`FenceReply`]     |
//! | `cfq.v1.node.<id>.result`               | [`JobResult`]          | [`FenceReply`]     |
//! | `cfq.v1.node.<id>.tokens.<job>`         | [`TokenFrame`], published without a reply |
//! | `cfq.v1.runner.<id>.register`           | [`RunnerRegistration`] | [`RegisterReply`]  |
//! | `cfq.v1.runner.<id>.lease`              | [`LeaseRequest`]       | [`LeaseReply`]     |
//! | `cfq.v1.runner.<id>.heartbeat`          | [`Heartbeat`]          | [`HeartbeatReply`] |
//! | `cfq.v1.runner.<id>.step`               | [`StepRequest`]        | [`StepReply`]      |
//! | `cfq.v1.runner.<id>.main_get`           | [`MainGet`]            | [`MainReply`]      |
//! | `cfq.v1.runner.<id>.job_submit`         | [`JobSubmit`]          | [`JobReply`]       |
//! | `cfq.v1.runner.<id>.job_get`            | [`JobGet`]             | [`JobReply`]       |
//! | `cfq.v1.runner.<id>.job_cancel`         | [`JobCancel`]          | [`FenceReply`]     |
//! | `cfq.v1.runner.<id>.prefill_hint`       | [`PrefillHint`], published without a reply  |
//! | `cfq.v1.runner.<id>.release`            | [`Release`]            | [`FenceReply`]     |
//! | `cfq.v1.runner.<id>.abandon`            | [`Abandon`]            | [`FenceReply`]     |
//! | `cfq.v1.{node,runner}.<id>.blob_put`    | [`BlobPut`]            | [`BlobPutReply`]   |
//! | `cfq.v1.{node,runner}.<id>.blob_get`    | [`BlobGet`]            | [`BlobGetReply`]   |
//! | `cfq.v1.cmd.node.<id>`                  | [`NodeCommand`], published by the scheduler; `load` and `unload` may be requests with a [`ModelReply`] |
//! | `cfq.v1.cmd.runner.<id>`                | [`RunnerCommand`], published by the scheduler |
//! | `cfq.v1.hint.runners`                   | [`RunnerCommand::TaskReady`], published by the scheduler to all runners |
//! | `cfq.v1.work.<node>.<boot>`             | [`WorkOrder`], published by the scheduler into the JetStream stream |
//! | `cfq.v1.order.<node>.<boot>`            | the same [`WorkOrder`], pushed to the node by JetStream, without acknowledgement |
//!
//! Commands and hints may be lost: heartbeats and polls deliver the same information. A work order may be lost or
//! delivered twice: the scheduler publishes it again until the node accepts or refuses it, and the node recognizes a
//! repeated order by its fence. Every request is idempotent; when
//! no reply arrives, the sender repeats it with the same body.

mod blob;
mod main_branch;
mod node;
mod reason;
mod runner;

pub use blob::{BlobGet, BlobGetReply, BlobPut, BlobPutReply};
pub use main_branch::{MainGet, MainReply, MainState, RecordedMerge};
pub use node::{
    Accept, JobResult, Journal, MAX_JOURNAL_TOKENS, ModelReply, NodeCommand, NodeRegistration, Preparing, Refusal,
    Refuse, TokenFrame, WorkOrder,
};
pub use reason::{RefusedReason, UnavailableReason};
pub use runner::{
    Abandon, ActivityReport, Grant, JobCancel, JobGet, JobReply, JobSubmit, LeaseReply, LeaseRequest, Release,
    RunnerCommand, RunnerRegistration, StepReply, StepRequest,
};

use serde::{Deserialize, Serialize};

use crate::ids::{BootId, JobId, LeaseId, TaskId};
use crate::job::ChatMessage;
use crate::model::ModelId;
use crate::node::{Device, Ledger};
use crate::task::Agent;

/// Fence (fencing token) of one attempt at a job: identifies the attempt in a request. The scheduler rejects the
/// request if the attempt or its lease is not the current one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct JobFence {
    /// Id of the job.
    pub job: JobId,
    /// Number of the attempt, from 1.
    pub attempt: i32,
    /// Id of the attempt's lease.
    pub lease: LeaseId,
}

/// Fence of one runner's attempt at a task: identifies the attempt in a request. The scheduler rejects the request if
/// the attempt or its lease is not the current one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TaskFence {
    /// Id of the task.
    pub task: TaskId,
    /// Number of the attempt, from 1.
    pub attempt: i32,
    /// Id of the attempt's lease.
    pub lease: LeaseId,
}

/// Reply to [`NodeRegistration`] and [`RunnerRegistration`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum RegisterReply {
    /// The boot is registered. For a node: the work stream and the node's consumer exist, so work orders arrive.
    #[serde(alias = "welcome")]
    Registered {
        /// Name of the consumer on [`crate::subject::WORK_STREAM`]; empty for a runner.
        consumer: String,
        /// Nodes only: whether work orders are pushed to [`crate::subject::order`]. False from a scheduler of an
        /// early 0.1 build, from which nodes pulled them.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        pushes_orders: bool,
    },
    /// The boot is not accepted, for example because its version is too old.
    Refused {
        /// Why the boot is refused, and what the user should do next.
        reason: String,
        /// Time in milliseconds until the lease of the process that uses the id ends, unless that process sends another
        /// heartbeat; then the boot may register. `None` if the boot is refused permanently.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        retry_ms: Option<u64>,
    },
}

/// One held lease, as a heartbeat lists it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HeldLease {
    /// Id of the lease.
    pub lease: LeaseId,
    /// Time since the work under the lease last made a step (a token, a prefill chunk, a committed step), in
    /// milliseconds.
    pub step_age_ms: u64,
}

/// Periodic report of the leases that a node or runner holds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// The sender's boot.
    pub boot: BootId,
    /// All leases held.
    pub held: Vec<HeldLease>,
    /// Nodes only: the ledger (capacity report), if it changed since the last confirmed heartbeat.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ledger: Option<Ledger>,
    /// Nodes only: the devices, if they changed since the last confirmed heartbeat.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub devices: Option<Vec<Device>>,
}

/// Reply to [`Heartbeat`].
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct HeartbeatReply {
    /// Leases that this reply extends by one TTL from now.
    pub extended: Vec<LeaseId>,
    /// Leases that the sender does not hold any more: the sender must stop the work under these leases, drop the state
    /// of that work and publish nothing more about it.
    pub lost: Vec<LeaseId>,
    /// The scheduler does not know this boot: the sender must register again.
    #[serde(alias = "hello_again")]
    pub register_again: bool,
}

/// Reply to a fenced write, a request that carries a [`JobFence`] or [`TaskFence`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FenceReply {
    /// The write is committed in Postgres, by this request or by an earlier one with the same content.
    Committed,
    /// The attempt or lease is not the current one: nothing was changed; the sender drops the work.
    Stale,
    /// The write can never be committed: repeating the request does not help.
    Refused {
        /// Why the write can never be committed.
        reason: RefusedReason,
    },
    /// The write cannot be committed now (no leader, database unreachable): the sender repeats the request.
    Unavailable {
        /// Why the write cannot be committed now.
        reason: UnavailableReason,
    },
}

/// Expected beginning of a prompt, for speculative prefill. It is a hint, not a job: the receiver may ignore it. A
/// wrong or lost hint has only one effect: the call's prompt is not in the prefix cache when the call starts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PrefillHint {
    /// Task of the expected call.
    pub task: TaskId,
    /// Role of the expected call. A later hint for the same task and role replaces an earlier one.
    pub role: Agent,
    /// Model of the expected call.
    pub model: ModelId,
    /// Messages of the prompt that are known so far; the last one may be incomplete.
    pub messages: Vec<ChatMessage>,
    /// `max_tokens` of the expected call. The choice of the node depends on it; for models with separate RoPE factors
    /// for long contexts, so do the computed keys and values.
    pub max_tokens: u32,
    /// `deterministic` of the expected call: the computed keys and values depend on it.
    pub deterministic: bool,
}
