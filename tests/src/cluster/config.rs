//! Configuration files of a test cluster's services.

use std::collections::BTreeMap;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;

use cfq_agent_runner::checks::ProjectChecksConfig;
use cfq_inference_node::Endpoint;
use cfq_link::child::Account;
use cfq_proto::ids::{NodeId, RunnerId};
use cfq_proto::model::ModelId;
use cfq_proto::task::{AgentBinding, AgentBindings};

use super::{Cluster, TOKEN, free_address, model_dir};

impl Cluster {
    /// Writes the token file and the configuration of every service.
    pub(super) fn write_configs(&self, nodes: &[NodeId; 2], runners: &[RunnerId; 2]) {
        std::fs::write(self.file("token"), TOKEN).unwrap();
        std::fs::set_permissions(self.file("token"), std::fs::Permissions::from_mode(0o600)).unwrap();
        let agents = AgentBindings {
            alpha: AgentBinding { model: self.options.alpha.parse().ok(), ..AgentBinding::default() },
            beta: AgentBinding { model: self.options.beta.parse().ok(), ..AgentBinding::default() },
        };
        let scheduler = cfq_scheduler::Config {
            database: self.database.config(),
            nats: self.nats.config("scheduler"),
            http: cfq_scheduler::HttpConfig {
                bind: self.bind,
                socket: None,
                socket_on_stdin: false,
                allow_plaintext: false,
                lan: None,
                token_file: self.file("token"),
                allowed_hosts: Vec::new(),
            },
            defaults: cfq_scheduler::Defaults { agents, threshold: 85.0, max_iterations: 5, timeout_minutes: 30.0 },
            limits: cfq_scheduler::SchedulerLimits::default(),
            retention: cfq_scheduler::RetentionConfig::default(),
            timing: self.options.timing.clone(),
        };
        let mut models: Vec<ModelId> =
            ["alpha", "alpha2", "beta"].iter().map(|m| self.model(m)).chain(self.options.models.clone()).collect();
        models.sort();
        models.dedup();
        let context_tokens = self.options.context_tokens;
        let endpoint = Endpoint { url: self.models.url(), key: None, max_sequences: Some(4), context_tokens };
        let node = cfq_inference_node::Config {
            node: nodes[0].clone(),
            nats: self.nats.config("node"),
            models,
            endpoints: BTreeMap::from([("scripted".to_owned(), endpoint)]),
            commands: self.options.commands.clone(),
            command_dir: None,
            model_dir: self.options.model_dir.clone().unwrap_or_else(model_dir),
            model_quota: None,
            threads: None,
            memory_limit: self.options.memory_limit,
            device: cfq_inference_node::gpu::DeviceChoice::Cpu,
            kv_offload_bytes: None,
            kv_offload_format: Default::default(),
            weight_cache_bytes: self.options.weight_cache_bytes,
            speculative_prefill: self.options.speculative_prefill,
            yield_bytes: self.options.yield_bytes,
            yield_ignores: cfq_inference_node::default_yield_ignores(),
            max_sequences: 4,
            timing: self.options.timing.clone(),
            hub: self.options.hub.clone(),
            sandbox: None,
        };
        let runner = cfq_agent_runner::Config {
            runner: runners[0].clone(),
            nats: self.nats.config("runner"),
            data_dir: self.runner_data("runner"),
            concurrency: self.options.runner_slots,
            timing: self.options.timing.clone(),
            server_policies_folder: Some(self.server_policies_folder()),
            checks: self.project_checks(),
        };
        let write = |name: &str, text: String| std::fs::write(self.file(name), text).unwrap();
        write("scheduler.toml", toml::to_string(&scheduler).unwrap());
        let http = cfq_scheduler::HttpConfig { bind: free_address(), ..scheduler.http.clone() };
        let second_scheduler = cfq_scheduler::Config { http, ..scheduler };
        write("second_scheduler.toml", toml::to_string(&second_scheduler).unwrap());
        write("node.toml", toml::to_string(&node).unwrap());
        let second_node =
            cfq_inference_node::Config { node: nodes[1].clone(), nats: self.nats.config("second_node"), ..node };
        write("second_node.toml", toml::to_string(&second_node).unwrap());
        write("runner.toml", toml::to_string(&runner).unwrap());
        let second_runner = cfq_agent_runner::Config {
            runner: runners[1].clone(),
            nats: self.nats.config("second_runner"),
            data_dir: self.runner_data("second_runner"),
            ..runner
        };
        write("second_runner.toml", toml::to_string(&second_runner).unwrap());
    }

    /// Folder whose files the checks of projects may read.
    pub fn readable_folder(&self) -> PathBuf {
        self.file("readable")
    }

    /// Checks never run as root, so they run as `nobody` if the tests run as root.
    fn project_checks(&self) -> ProjectChecksConfig {
        /// User and group.
        const NOBODY: Account = Account { uid: 65534, gid: 65534 };
        std::fs::create_dir_all(self.readable_folder()).unwrap();
        let config = ProjectChecksConfig {
            readable: vec![self.readable_folder()],
            registries: self.options.registries.clone(),
            ..ProjectChecksConfig::default()
        };
        if std::fs::metadata("/proc/self").map_or(1, |process| process.uid()) != 0 {
            return config;
        }
        let dir = self.file("checks");
        std::fs::create_dir_all(&dir).unwrap();
        for path in [self.dir.path(), &dir, &self.readable_folder()] {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o711)).unwrap();
        }
        ProjectChecksConfig { dir: Some(dir), account: Some(NOBODY), ..config }
    }
}
