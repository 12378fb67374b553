//! What a node says about itself: its devices, its models, and the ledger placement reads.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::model::ModelId;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DeviceKind {
    Cpu,
    Cuda,
}

/// One device of a node. Sizes in bytes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Device {
    /// `cpu`, `cuda:0`, ...
    pub id: String,
    pub kind: DeviceKind,
    pub name: String,
    pub memory_total: u64,
    /// Held by other processes.
    pub memory_others: u64,
    /// `8.6`; CUDA only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_capability: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperature_c: Option<u32>,
    /// Drawn now, and the most the driver lets it draw, in milliwatts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_mw: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_limit_mw: Option<u32>,
    /// The card's own name, which stays when another is added or lost; cards only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Why it runs slower than it could, in words; nothing while it does not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub throttled: Vec<String>,
    /// Who computes or draws on it, the most memory first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub processes: Vec<DeviceProcess>,
}

/// A process with something on a card.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceProcess {
    pub pid: u32,
    /// Bytes of the card's memory; the driver may not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<u64>,
    /// Where it may be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The node itself.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub own: bool,
}

/// Whether a model can answer now.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Residency {
    /// Loaded, or a proxy whose endpoint answers.
    Resident,
    /// On disk, and loaded when somebody wants it; while sequences run it is on its way out.
    Available,
    Loading,
    /// Cannot serve, with the reason in words (a broken file, no room, endpoint down).
    Unusable {
        reason: String,
    },
}

/// A model on a node, with what placement needs to price a job on it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ModelState {
    pub model: ModelId,
    pub residency: Residency,
    /// Where it is, or would be, loaded; `proxy` for an endpoint.
    pub device: String,
    /// Bytes a load needs (weights, pool, scratch); 0 for a proxy.
    pub need_bytes: u64,
    /// Longest sequence, prompt and output, in tokens.
    pub context_tokens: u32,
    /// Tokens the KV pool can still admit; for a proxy: context times free slots.
    pub kv_tokens_free: u64,
    /// Keys and values it holds of prompts and texts that were, and can go on from. Placement counts on the
    /// prompts that ran there last, as far as this reaches.
    #[serde(default, skip_serializing_if = "KvTiers::is_empty")]
    pub kv_tiers: KvTiers,
    /// Sequences running.
    pub running: u32,
    /// At most this many at once.
    pub max_sequences: u32,
    /// Measured, tokens per second; 0 while unknown.
    pub prefill_rate: f64,
    pub decode_rate: f64,
    /// Measured load, bytes per second; 0 while unknown.
    pub load_rate: f64,
    /// Measured tokens per byte of prompt content, for estimates; about 0.3.
    pub tokens_per_byte: f64,
}

/// Where a model's keys and values are, in tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct KvTiers {
    /// In the model's own pool.
    pub device: u64,
    /// Parked in the node's memory: copied back instead of computed again.
    pub parked: u64,
}

impl KvTiers {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A node's own account of its room. Placement admits against the latest version; the node enforces it again.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
pub struct Ledger {
    /// Grows with every change within one boot.
    pub version: u64,
    pub models: Vec<ModelState>,
    /// Bytes that a load may take without another model giving way.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub free_bytes: u64,
    /// Takes no new work: it is stopping.
    pub draining: bool,
    /// Models that take no work while the machine's owner uses a card for something else, and in words for what.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub yields: BTreeMap<ModelId, String>,
}

fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}
