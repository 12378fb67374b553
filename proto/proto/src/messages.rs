//! What the parts say to each other over NATS. Requests travel on the sender's own subject (see [`crate::subject`]), so a
//! node cannot speak for another; the body says which boot of it speaks.
//!
//! | subject                          | request            | answer              |
//! |----------------------------------|--------------------|---------------------|
//! | `cfq.v1.node.<id>.hello`         | [`NodeHello`]      | [`HelloReply`]      |
//! | `cfq.v1.node.<id>.beat`          | [`Beat`]           | [`BeatReply`]       |
//! | `cfq.v1.node.<id>.accept`        | [`Accept`]         | [`FenceReply`]      |
//! | `cfq.v1.node.<id>.refuse`        | [`Refuse`]         | [`FenceReply`]      |
//! | `cfq.v1.node.<id>.journal`       | [`Journal`]        | [`FenceReply`]      |
//! | `cfq.v1.node.<id>.result`        | [`JobReport`]      | [`FenceReply`]      |
//! | `cfq.v1.node.<id>.tokens.<job>`  | [`TokenFrame`], published, no answer      |
//! | `cfq.v1.runner.<id>.hello`       | [`RunnerHello`]    | [`HelloReply`]      |
//! | `cfq.v1.runner.<id>.lease`       | [`LeaseRequest`]   | [`LeaseReply`]      |
//! | `cfq.v1.runner.<id>.beat`        | [`Beat`]           | [`BeatReply`]       |
//! | `cfq.v1.runner.<id>.step`        | [`StepRequest`]    | [`StepReply`]       |
//! | `cfq.v1.runner.<id>.job`         | [`JobAsk`]         | [`JobReply`]        |
//! | `cfq.v1.runner.<id>.job_look`    | [`JobLook`]        | [`JobReply`]        |
//! | `cfq.v1.runner.<id>.job_cancel`  | [`JobDrop`]        | [`FenceReply`]      |
//! | `cfq.v1.runner.<id>.warm`        | [`WarmUp`], published, no answer          |
//! | `cfq.v1.runner.<id>.release`     | [`Release`]        | [`FenceReply`]      |
//! | `cfq.v1.runner.<id>.give_up`     | [`GiveUp`]         | [`FenceReply`]      |
//! | `cfq.v1.{node,runner}.<id>.blob_put` | [`BlobPut`]    | [`BlobPutReply`]    |
//! | `cfq.v1.{node,runner}.<id>.blob_get` | [`BlobGet`]    | [`BlobGetReply`]    |
//! | `cfq.v1.cmd.node.<id>`           | [`NodeCommand`], published by the scheduler; `load` and `unload` may ask for a [`ModelReply`] |
//! | `cfq.v1.cmd.runner.<id>`         | [`RunnerCommand`], published by the scheduler |
//! | `cfq.v1.hint.runners`            | [`RunnerCommand::WorkWaits`], published by the scheduler to all |
//! | `cfq.v1.work.<node>.<boot>`      | [`WorkOrder`], JetStream, double-acked by the node |
//!
//! Commands and hints may be lost: everything they say is also found by asking (beats, polls). An answer that does not
//! come is asked for again with the same body; every request is idempotent.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::blob::{BlobHash, Carried};
use crate::ids::{BootId, JobId, LeaseId, NodeId, RunnerId, TaskId, TaskNumber};
use crate::job::{ChatMessage, JobRequest, JobView, Outcome, Prompt, Written};
use crate::looping::{Step, StepRecord};
use crate::model::ModelId;
use crate::node::{Device, Ledger};
use crate::task::{Agent, TaskSpec};

/// Names one attempt at a job, and the right to act for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct JobFence {
    pub job: JobId,
    pub attempt: i32,
    pub lease: LeaseId,
}

/// Names one attempt of a runner at a task, and the right to act for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TaskFence {
    pub task: TaskId,
    pub attempt: i32,
    pub lease: LeaseId,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeHello {
    pub node: NodeId,
    pub boot: BootId,
    /// cfq's version.
    pub version: String,
    pub devices: Vec<Device>,
    pub ledger: Ledger,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunnerHello {
    pub runner: RunnerId,
    pub boot: BootId,
    pub version: String,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum HelloReply {
    /// For a node: its stream and consumer exist and it may pull.
    Welcome {
        /// Name of the consumer on [`crate::subject::WORK_STREAM`]; empty for a runner.
        consumer: String,
    },
    /// With the reason and the way out, for example an older version.
    Refused { reason: String },
}

/// One held lease, as a beat lists it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Held {
    pub lease: LeaseId,
    /// How long ago its work last made a step (a token, a prefill chunk, a committed step), in milliseconds.
    pub step_age_ms: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Beat {
    pub boot: BootId,
    pub held: Vec<Held>,
    /// Nodes only: the ledger, when it changed since the last confirmed beat.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ledger: Option<Ledger>,
    /// Nodes only, like the ledger.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub devices: Option<Vec<Device>>,
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct BeatReply {
    /// Leases extended by one TTL from now.
    pub extended: Vec<LeaseId>,
    /// Leases that are not the sender's any more: stop the work, drop its state, publish nothing.
    pub lost: Vec<LeaseId>,
    /// The scheduler does not know this boot: say hello again.
    pub hello_again: bool,
}

/// The work of one attempt, as published to a node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkOrder {
    pub fence: JobFence,
    pub task: TaskId,
    pub role: Agent,
    pub model: ModelId,
    pub prompt: Carried<Prompt>,
    /// What an attempt before it had written when its node was lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub written: Option<Written>,
}

/// More than this is not journalled: whoever takes the job over begins after so many.
pub const JOURNAL_MOST: usize = 16_384;

/// Tokens an attempt wrote since it last said so. Told twice it changes nothing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Journal {
    pub fence: JobFence,
    pub boot: BootId,
    /// Tokens the attempt took over.
    pub resumed: u32,
    /// Tokens before these, those taken over included.
    pub after: u32,
    pub written: Written,
}

/// The node took an order: placed -> running. Sent before any work begins; `Stale` means drop it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Accept {
    pub fence: JobFence,
    pub boot: BootId,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Refusal {
    /// No room for this model now; the node gets no more work for it until its ledger is a later one.
    NotNow {
        /// Tokens it would take, where the node counted them.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        need: Option<u64>,
        have: u64,
        ledger_version: u64,
    },
    /// This node can never run it; counts against the requirement.
    Never { reason: String },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Refuse {
    pub fence: JobFence,
    pub boot: BootId,
    pub refusal: Refusal,
}

/// How an attempt ended. The node repeats it, and keeps its lease, until the answer is `Committed` or `Stale`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobReport {
    pub fence: JobFence,
    pub boot: BootId,
    pub outcome: Outcome,
}

/// The answer to every fenced write of a node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FenceReply {
    /// It is in Postgres (now, or already before).
    Committed,
    /// The attempt or lease is not the current one: nothing was changed; drop the work.
    Stale,
    /// It cannot be written, now or later: asking again does not help.
    Refused { reason: String },
    /// Not now (no leader, database away): ask again.
    Unavailable { reason: String },
}

/// Text as it is generated. Ephemeral: lost frames are not repeated, the result holds the whole text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenFrame {
    pub task: TaskId,
    pub fence: JobFence,
    pub role: Agent,
    /// Offset of `text` in the output so far, in bytes: a gap is visible.
    pub offset: u64,
    pub text: String,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum NodeCommand {
    /// Stop within one step and report `Released`; the attempt is not current any more.
    Cancel { fence: JobFence },
    /// The scheduler lost its view of the node: say hello and beat now.
    Report,
    /// Make a model ready. Where it was a request, the answer is a [`ModelReply`]; how it ends the ledger tells.
    Load { model: ModelId },
    /// Let a model go, as soon as the sequences that run on it have ended; the same answer.
    Unload { model: ModelId },
    /// Compute this ahead while there is nothing else to do. The call will be placed like any other.
    Warm { ahead: WarmUp },
}

/// What a model will be asked soon, as far as it is known: the beginning of a prompt. A hint and no job: whoever has it may
/// do nothing with it, and where it is wrong or lost the call it is about begins as if there had been none.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WarmUp {
    pub task: TaskId,
    /// Whose call it will be. Of one task and role, a later hint takes the place of an earlier one.
    pub role: Agent,
    pub model: ModelId,
    /// The last one ends where nothing more is known.
    pub messages: Vec<ChatMessage>,
    /// As the call will ask: what is computed for it depends on these too.
    pub max_tokens: u32,
    pub deterministic: bool,
}

/// What comes of [`NodeCommand::Load`] and [`NodeCommand::Unload`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ModelReply {
    /// It can answer already.
    Loaded,
    /// It is being loaded, or waits for room that is being made. A ledger of this version or a later one shows it.
    Loading { ledger_version: u64 },
    /// It is not loaded.
    Unloaded,
    /// It takes no more sequences, and goes when those that run have ended.
    Ending { running: u32, ledger_version: u64 },
    /// Why not: the arithmetic, or what is wrong with the model.
    Refused { reason: String },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum RunnerCommand {
    /// Some task is ready: ask for a lease.
    WorkWaits,
    /// A job of this task changed: ask for it.
    JobChanged { task: TaskId, job: JobId },
    /// The lease is not yours any more (cancelled, swept): stop and drop.
    Cancel { fence: TaskFence },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LeaseRequest {
    pub boot: BootId,
}

/// Everything a runner needs to go on from the last committed step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Grant {
    pub fence: TaskFence,
    pub number: TaskNumber,
    /// With every default filled in: base, models, threshold, limits.
    pub spec: TaskSpec,
    /// Seconds since 1970.
    pub created_at: i64,
    /// All committed steps, in order; the next `seq` is their count. Artifacts above the inline limit come as blobs.
    pub steps: Vec<StepRecord>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum LeaseReply {
    Granted {
        /// Also outside the grant, because a grant that is a blob is fetched under it.
        lease: LeaseId,
        grant: Carried<Grant>,
    },
    /// No task is ready.
    None,
    Unavailable {
        reason: String,
    },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepRequest {
    pub fence: TaskFence,
    /// Count of the steps before it.
    pub seq: i32,
    pub step: Step,
    /// Working time of the task up to and with this step, in milliseconds.
    pub active_ms: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum StepReply {
    /// In Postgres, now or already before with the same body. Only now may the runner act on it.
    Committed {
        /// Seconds since 1970, on the database's clock.
        at: i64,
        /// With `PrOpened`: the pull request's number.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pr: Option<i64>,
    },
    /// Lease, attempt or seq are not current: stop and drop.
    Stale,
    /// The step is illegal in the loop's state, or can never be written: a bug on one side; the task is not changed.
    Illegal {
        reason: String,
    },
    Unavailable {
        reason: String,
    },
}

/// Asks for a job: makes it, or returns the existing one for (task, seq, role, n).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobAsk {
    pub fence: TaskFence,
    pub seq: i32,
    pub request: JobRequest,
}

/// How a job stands that was asked for before: the prompt does not travel again.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobLook {
    pub fence: TaskFence,
    pub job: JobId,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum JobReply {
    Job {
        job: JobView,
    },
    Stale,
    /// It cannot be written or read, now or later.
    Refused {
        reason: String,
    },
    Unavailable {
        reason: String,
    },
}

/// The runner gives up on a job (a limit was reached): it ends as cancelled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobDrop {
    pub fence: TaskFence,
    pub job: JobId,
}

/// A runner hands its task back: running -> ready, nothing counted. Either it drains, or the task waits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Release {
    pub fence: TaskFence,
    /// A job that waits for a place: until it has one, the task is granted to nobody.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<JobId>,
}

/// A runner that cannot drive its task says why and lets go of it: running -> ready, counted as a loss, or failed with this
/// reason if that went on too often.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GiveUp {
    pub fence: TaskFence,
    pub reason: String,
}

/// One chunk of a blob. The blob exists once all its chunks are there and the hash matches.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BlobPut {
    /// The live lease this is sent under.
    pub lease: LeaseId,
    pub hash: BlobHash,
    /// Of the whole blob, in bytes.
    pub size: u64,
    /// From 0; every chunk but the last has [`crate::blob::CHUNK`] bytes.
    pub index: u32,
    /// Base64.
    pub data: String,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum BlobPutReply {
    /// This chunk is committed.
    Kept,
    /// The lease is not live, or the bytes do not match the size or the hash: then nothing of the blob is kept.
    Refused {
        reason: String,
    },
    Unavailable {
        reason: String,
    },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BlobGet {
    pub lease: LeaseId,
    pub hash: BlobHash,
    pub index: u32,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum BlobGetReply {
    Chunk {
        size: u64,
        data: String,
    },
    /// No such blob, or the lease may not see it.
    Refused {
        reason: String,
    },
    Unavailable {
        reason: String,
    },
}
