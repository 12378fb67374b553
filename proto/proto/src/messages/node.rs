//! Messages from and to nodes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{JobFence, PrefillHint};
use crate::blob::Payload;
use crate::ids::{BootId, NodeId, TaskId};
use crate::job::{GeneratedTokens, JobRole, Outcome, Prompt};
use crate::model::ModelId;
use crate::node::{Device, Ledger};

/// Registration of one boot of a node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeRegistration {
    /// Name of the node; the subject must contain the same name.
    pub node: NodeId,
    /// Id of this start of the node process.
    pub boot: BootId,
    /// cfq version of the node.
    pub version: String,
    /// All devices of the node.
    pub devices: Vec<Device>,
    /// Ledger (capacity report) at registration.
    pub ledger: Ledger,
    /// Identifies the current start of the node's machine; `None` if it is unknown. With it, the scheduler
    /// distinguishes a restart of the machine from a crash of the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine_boot: Option<String>,
    /// Id of the lock on the credentials file that this process holds; `None` if it holds none. No two live processes
    /// hold the same lock, so a later boot with the same lock proves that the process of the earlier boot has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credentials_lock: Option<String>,
    /// Whether the node receives work orders on [`crate::subject::order`]. False from a node of an early 0.1 build,
    /// which pulled them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub receives_pushed_orders: bool,
}

/// Work order: the work of one attempt at a job, as published to a node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkOrder {
    /// Fence of the attempt.
    pub fence: JobFence,
    /// Task of the job.
    pub task: TaskId,
    /// Role that makes the call.
    pub role: JobRole,
    /// Model to run.
    pub model: ModelId,
    /// Prompt of the call.
    pub prompt: Payload<Prompt>,
    /// Tokens that an earlier attempt generated before its node was lost; this attempt resumes after them.
    #[serde(default, alias = "written", skip_serializing_if = "Option::is_none")]
    pub generated: Option<GeneratedTokens>,
}

/// Maximum length of an attempt's journal, in tokens. If the node is lost, output tokens beyond this length are
/// generated again.
pub const MAX_JOURNAL_TOKENS: usize = 16_384;

/// Request to add to the journal of an attempt the tokens that it generated since its last request of this kind. The
/// request is idempotent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Journal {
    /// Fence of the attempt.
    pub fence: JobFence,
    /// The sender's boot.
    pub boot: BootId,
    /// Number of tokens from earlier attempts after which this attempt resumed.
    pub resumed: u32,
    /// Number of output tokens before the first new one, including the resumed tokens.
    pub after: u32,
    /// The new tokens.
    #[serde(alias = "written")]
    pub generated: GeneratedTokens,
}

/// Report that the node is preparing the prompt of a work order, which it has neither accepted nor refused yet. The node
/// repeats it during the preparation, so that the scheduler does not place the job elsewhere. If the reply is
/// `Stale`, the node drops the order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Preparing {
    /// Fence of the attempt.
    pub fence: JobFence,
    /// The sender's boot.
    pub boot: BootId,
}

/// Acceptance of a work order; the job changes from placed to running. The node sends it before it starts any work, and
/// drops the order if the reply is `Stale`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Accept {
    /// Fence of the attempt.
    pub fence: JobFence,
    /// The sender's boot.
    pub boot: BootId,
}

/// Why a node refuses a work order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Refusal {
    /// No capacity for this model now; the node gets no more work for this model until the node's ledger has a later
    /// version.
    NotNow {
        /// Tokens the job needs; `None` if the node did not count them.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        need: Option<u64>,
        /// Tokens the KV pool can admit.
        have: u64,
        /// Version of the ledger that the refusal is based on.
        ledger_version: u64,
    },
    /// This node can never run the job, and the job is not placed on it again.
    Never {
        /// Why the node can never run the job.
        reason: String,
    },
}

/// Refusal of a work order; the job changes from placed back to queued.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Refuse {
    /// Fence of the attempt.
    pub fence: JobFence,
    /// The sender's boot.
    pub boot: BootId,
    /// Why the node refuses the order.
    pub refusal: Refusal,
}

/// Result of an attempt. The node keeps the lease and repeats the report until the reply is `Committed` or `Stale`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobResult {
    /// Fence of the attempt.
    pub fence: JobFence,
    /// The sender's boot.
    pub boot: BootId,
    /// How the attempt ended.
    pub outcome: Outcome,
}

/// Part of an attempt's output text, published during the generation. Lost frames are not repeated; the result of the
/// attempt holds the whole text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenFrame {
    /// Task of the job.
    pub task: TaskId,
    /// Fence of the attempt.
    pub fence: JobFence,
    /// Role that makes the call.
    pub role: JobRole,
    /// Offset of `text` in the output so far, in bytes; it lets the receiver detect a lost frame.
    pub offset: u64,
    /// The new text.
    pub text: String,
}

/// Command of the scheduler to a node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum NodeCommand {
    /// Stop the attempt after its current forward pass at the latest, and report `Released`: the attempt is no longer
    /// the current one.
    Cancel {
        /// Fence of the attempt.
        fence: JobFence,
    },
    /// Register and send a heartbeat now: the scheduler needs the node's current state.
    Report,
    /// Load a model. If sent as a request, the node replies with a [`ModelReply`] before the load finishes; the result
    /// of the load appears later in the ledger.
    Load {
        /// Model to load.
        model: ModelId,
    },
    /// Unload a model once its running sequences have ended. If sent as a request, the node replies with a
    /// [`ModelReply`].
    Unload {
        /// Model to unload.
        model: ModelId,
    },
    /// Prefill the prompt of an expected call while the node is idle. The call itself will be placed like any other
    /// call.
    #[serde(alias = "warm")]
    Prefill {
        /// Hint that holds the expected prompt.
        #[serde(alias = "ahead")]
        hint: PrefillHint,
    },
}

/// Reply to [`NodeCommand::Load`] and [`NodeCommand::Unload`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ModelReply {
    /// The model is loaded and can answer.
    Loaded,
    /// The model is being loaded, or waits until memory has been freed for it.
    Loading {
        /// First ledger version that shows the load.
        ledger_version: u64,
    },
    /// The model is not loaded.
    Unloaded,
    /// The model admits no more sequences and is unloaded when the running sequences have ended.
    #[serde(alias = "ending")]
    Unloading {
        /// Number of running sequences.
        running: u32,
        /// First ledger version that shows the unload.
        ledger_version: u64,
    },
    /// The command cannot be carried out.
    Refused {
        /// Reason: the memory needed and the memory available, or what is wrong with the model.
        reason: String,
    },
}
