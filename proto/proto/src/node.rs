//! State that a node reports: its devices, its models, and the ledger that placement reads.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::model::ModelId;

/// Kind of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DeviceKind {
    /// The processor.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
}

/// One device of a node. Memory sizes are in bytes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Device {
    /// Id of the device: `cpu`, or `cuda:` and the index that nvidia-smi shows for the GPU, such as `cuda:0`.
    pub id: String,
    /// Kind of the device.
    pub kind: DeviceKind,
    /// Product name of the device.
    pub name: String,
    /// Total memory of the device.
    pub memory_total: u64,
    /// Memory used by other processes.
    pub memory_others: u64,
    /// CUDA compute capability, such as `8.6`; GPUs only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_capability: Option<String>,
    /// Temperature, in degrees Celsius.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperature_c: Option<u32>,
    /// Current power draw, in milliwatts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_mw: Option<u32>,
    /// Power limit set in the driver, in milliwatts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_limit_mw: Option<u32>,
    /// UUID of the GPU, which does not change when another GPU is added or lost; GPUs only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Reasons why the device's clock is throttled now, as text.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub throttled: Vec<String>,
    /// Processes that use the device, sorted by memory, largest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub processes: Vec<DeviceProcess>,
}

/// A process that uses a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceProcess {
    /// Process id.
    pub pid: u32,
    /// GPU memory that the process uses, in bytes; `None` if the driver does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<u64>,
    /// Name of the program; `None` if the node cannot read it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// True if the process is the node itself.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub own: bool,
}

/// Whether a model can serve calls.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Residency {
    /// Loaded, or a proxy whose endpoint answers.
    Resident,
    /// On disk, and loaded on demand. If sequences still run on the model, it is being unloaded.
    Available,
    /// Being loaded.
    Loading,
    /// Cannot serve calls.
    Unusable {
        /// Why the model cannot serve calls (a broken file, too little memory, an endpoint that is down).
        reason: String,
    },
}

/// State of a model on a node, with the numbers from which placement computes the cost of a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ModelState {
    /// The model.
    pub model: ModelId,
    /// Whether the model can serve calls.
    pub residency: Residency,
    /// Device that the model is or would be loaded on; `proxy` for a model behind a server or program.
    pub device: String,
    /// Memory that a load needs (weights, KV pool, scratch), in bytes; 0 for a proxy.
    pub need_bytes: u64,
    /// Maximum length of a sequence, prompt and output, in tokens.
    pub context_tokens: u32,
    /// Tokens the KV pool can still admit; for a proxy: the context length times the number of free slots.
    pub kv_tokens_free: u64,
    /// Tokens whose keys and values are cached for reuse. Placement assumes that the most recent prompts on this node
    /// are cached, up to this many tokens.
    #[serde(default, skip_serializing_if = "KvTiers::is_empty")]
    pub kv_tiers: KvTiers,
    /// Number of running sequences.
    pub running: u32,
    /// Maximum number of running sequences.
    pub max_sequences: u32,
    /// Measured prefill rate (throughput while prompts are computed), in tokens per second; 0 if unknown.
    pub prefill_rate: f64,
    /// Measured decode rate, in tokens per second; 0 if unknown.
    pub decode_rate: f64,
    /// Measured load rate, in bytes per second; 0 if unknown.
    pub load_rate: f64,
    /// Measured tokens per byte of prompt content, for estimates; about 0.3.
    pub tokens_per_byte: f64,
}

/// Cached keys and values of a model by tier, in tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct KvTiers {
    /// Tokens in the model's KV pool.
    pub device: u64,
    /// Tokens offloaded to host memory, which are copied back instead of computed again.
    #[serde(alias = "parked")]
    pub offloaded: u64,
}

impl KvTiers {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Ledger: a node's report of its models and free capacity. Placement uses the latest version that the scheduler has
/// received; the node checks its capacity again when it receives a job.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
pub struct Ledger {
    /// Version of the ledger; increases with every change within one boot.
    pub version: u64,
    /// All models of the node.
    pub models: Vec<ModelState>,
    /// Memory that a load may use without evicting another model, in bytes.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub free_bytes: u64,
    /// True if the node is stopping and takes no new work.
    pub draining: bool,
    /// Models that take no work while another program of the machine's owner uses their GPU, with a description of that
    /// use.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub yields: BTreeMap<ModelId, String>,
}

fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}
