//! Messages from and to nodes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{JobFence, PrefillHint};
use crate::blob::Payload;
use crate::ids::{BootId, NodeId, TaskId};
use crate::job::{GeneratedTokens, Outcome, Prompt};
use crate::model::ModelId;
use crate::node::{Device, Ledger};
use crate::task::Agent;

/// Registration of one boot of a node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeRegistration {
    /// Name of the node; the subject must carry the same one.
    pub node: NodeId,
    /// This start of the process.
    pub boot: BootId,
    /// cfq version of the node.
    pub version: String,
    /// All devices of the node.
    pub devices: Vec<Device>,
    /// The ledger at registration.
    pub ledger: Ledger,
}

/// Work of one attempt, as published to a node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkOrder {
    /// The attempt.
    pub fence: JobFence,
    /// Task of the job.
    pub task: TaskId,
    /// Role of the call.
    pub role: Agent,
    /// Model to run.
    pub model: ModelId,
    /// Prompt of the call.
    pub prompt: Payload<Prompt>,
    /// Tokens that an earlier attempt generated before its node was lost; this attempt resumes after them.
    #[serde(default, alias = "written", skip_serializing_if = "Option::is_none")]
    pub generated: Option<GeneratedTokens>,
}

/// Maximum tokens journalled per attempt. After a loss, tokens beyond it are generated again.
pub const MAX_JOURNAL_TOKENS: usize = 16_384;

/// Tokens that an attempt generated since its last journal message. Idempotent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Journal {
    /// The attempt.
    pub fence: JobFence,
    /// The sender's boot.
    pub boot: BootId,
    /// Number of tokens the attempt resumed after.
    pub resumed: u32,
    /// Number of tokens before these, including the resumed ones.
    pub after: u32,
    /// The new tokens.
    #[serde(alias = "written")]
    pub generated: GeneratedTokens,
}

/// Acceptance of an order: placed -> running. The node sends it before any work begins and drops the order on `Stale`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Accept {
    /// The attempt.
    pub fence: JobFence,
    /// The sender's boot.
    pub boot: BootId,
}

/// Why a node does not take an order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Refusal {
    /// No capacity for this model now; the node gets no more work for it until its ledger has a later version.
    NotNow {
        /// Tokens the job needs, where the node counted them.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        need: Option<u64>,
        /// Tokens the KV pool can admit.
        have: u64,
        /// Version of the ledger that the refusal is based on.
        ledger_version: u64,
    },
    /// This node can never run the job; counts against the job's requirement.
    Never {
        /// Why not.
        reason: String,
    },
}

/// Refusal of an order: placed -> queued.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Refuse {
    /// The attempt.
    pub fence: JobFence,
    /// The sender's boot.
    pub boot: BootId,
    /// Why the node does not take it.
    pub refusal: Refusal,
}

/// Result of an attempt. The node keeps the lease and repeats the report until the reply is `Committed` or `Stale`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobReport {
    /// The attempt.
    pub fence: JobFence,
    /// The sender's boot.
    pub boot: BootId,
    /// How the attempt ended.
    pub outcome: Outcome,
}

/// Text as it is generated. Ephemeral: lost frames are not repeated, the result holds the whole text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenFrame {
    /// Task of the job.
    pub task: TaskId,
    /// The attempt.
    pub fence: JobFence,
    /// Role of the call.
    pub role: Agent,
    /// Offset of `text` in the output so far, in bytes; it makes a gap visible.
    pub offset: u64,
    /// The new text.
    pub text: String,
}

/// Command of the scheduler to a node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum NodeCommand {
    /// Stop the attempt within one step and report `Released`; it is not current any more.
    Cancel {
        /// The attempt.
        fence: JobFence,
    },
    /// The scheduler lost its view of the node: register and send a heartbeat now.
    Report,
    /// Load a model. If sent as a request, the answer is a [`ModelReply`]; the ledger shows how the load ends.
    Load {
        /// The model.
        model: ModelId,
    },
    /// Unload a model once its running sequences have ended. If sent as a request, the answer is a [`ModelReply`].
    Unload {
        /// The model.
        model: ModelId,
    },
    /// Prefill this prompt while the node is idle. The call itself will be placed like any other.
    #[serde(alias = "warm")]
    Prefill {
        /// The expected prompt.
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
        /// A ledger of this version or a later one shows the load.
        ledger_version: u64,
    },
    /// The model is not loaded.
    Unloaded,
    /// The model admits no more sequences and is unloaded when the running ones have ended.
    #[serde(alias = "ending")]
    Unloading {
        /// Number of running sequences.
        running: u32,
        /// A ledger of this version or a later one shows the unload.
        ledger_version: u64,
    },
    /// The command cannot be carried out.
    Refused {
        /// The memory arithmetic, or what is wrong with the model.
        reason: String,
    },
}
