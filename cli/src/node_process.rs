//! The node process of this machine, for `cfq up` and `cfq join`.

use std::time::Duration;

use cfq_deploy::{Paths, files};
use cfq_inference_node::proxy::coding_agents;
use cfq_link::NatsConfig;
use cfq_link::child::Account;
use cfq_proto::ids::NodeId;
use cfq_proto::timing::Timing;

use crate::config::Config;
use crate::environment;
use crate::output;
use crate::rights::{self, ProcessRights};
use crate::supervise::{self, Start, SupervisedProcess};

/// Time that processes have to stop after the drain timeout.
const STOP_MARGIN: Duration = Duration::from_secs(5);

/// A node to start. It serves the models of `config`.
pub struct NodeStart<'a> {
    pub paths: &'a Paths,
    pub config: &'a Config,
    pub id: NodeId,
    pub nats: NatsConfig,
    pub timing: Timing,
    /// The account that the node runs as, if cfq runs as root.
    pub account: Option<Account>,
    /// Whether the coding agents that need no table can be used before a configured model names them. They need a login, so
    /// a machine that joined offers only those with a table.
    pub offers_coding_agents: bool,
}

/// Time for an orderly stop of a process.
pub fn stop_grace(timing: &Timing) -> Duration {
    timing.drain_timeout() + STOP_MARGIN
}

/// Starts the node. Warns of what limits it.
pub fn start(node: NodeStart<'_>) -> anyhow::Result<SupervisedProcess> {
    let NodeStart { paths, config, id, nats, timing, account, offers_coding_agents } = node;
    let grace = stop_grace(&timing);
    let command_dir = paths.data.join("commands");
    let mut commands = config.all_commands();
    if offers_coding_agents {
        for name in coding_agents() {
            commands.entry(name).or_default();
        }
    }
    let settings = cfq_inference_node::Config {
        node: id,
        nats,
        models: config.models(),
        endpoints: config.endpoints.clone(),
        commands,
        command_dir: Some(command_dir.clone()),
        model_dir: config.model_dir(paths),
        model_quota: config.node.model_quota,
        threads: config.node.threads,
        memory_limit: config.node.memory_limit,
        device: config.node.device,
        kv_offload_bytes: config.node.kv_offload_bytes,
        kv_offload_format: config.node.kv_offload_format,
        weight_cache_bytes: config.node.weight_cache_bytes,
        speculative_prefill: config.node.speculative_prefill,
        yield_bytes: config.node.yield_bytes,
        yield_ignores: config.node.yield_ignores.clone(),
        max_sequences: config.node.max_sequences,
        timing,
        hub: config.hub.clone(),
        sandbox: None,
    };
    if let Some(account) = account {
        rights::prepare_node(&settings.model_dir, account)?;
    }
    files::create_folder(&command_dir, 0o700, account)?;
    if let Some(missing) = rights::missing_sandbox_limits() {
        output::print_stderr(&format!("cfq: warning: {missing}; use only model files that you trust"));
    }
    let secrets = config.secret_variables();
    let mut environment = environment::of_node(std::env::vars_os(), secrets.iter().map(String::as_str));
    let threads = cfq_inference_node::thread_environment(config.node.threads);
    environment.extend(threads.into_iter().map(|(variable, value)| (variable.into(), value.into())));
    if let Some(account) = account {
        environment.extend(rights::gpu_environment(paths, account)?);
    }
    let rights = ProcessRights::of_node(account);
    let level = &config.log.level;
    supervise::start("node", &settings, Start { paths, level, grace, environment, rights, stdin: None })
}
