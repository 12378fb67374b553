//! `cfq serve scheduler|node|runner CONFIG`: runs one process of cfq. `cfq up` starts each of the three in this way,
//! with a configuration file that it has written. The runner starts `cfq serve repository-access` to open a repository;
//! the node starts `cfq serve sandbox` to parse model files, see `main.rs` for both.

use std::path::Path;

use anyhow::Context;
use cfq_inference_node::sandbox::Sandbox;
use cfq_sandbox::SandboxLauncher;
use serde::de::DeserializeOwned;

use crate::args::ServeCommand;
use crate::exit::{self, Code};
use crate::mcp;
use crate::repo;

pub async fn run(process: ServeCommand) -> anyhow::Result<Code> {
    let stop = cfq_link::stop::signalled();
    match process {
        ServeCommand::Scheduler { config } => {
            let mcp = mcp::http_routes().context("cannot create an HTTP client")?;
            let ended = cfq_scheduler::run(read(&config)?, mcp, stop).await;
            ended.map_err(|error| stopped("scheduler", error.is_refusal(), error))?;
        }
        ServeCommand::Node { config } => {
            let mut config: cfq_inference_node::Config = read(&config)?;
            let sandbox = Sandbox::of_this_program(["serve", "sandbox"]).context("the path of cfq is unknown")?;
            config.sandbox = Some(sandbox);
            let ended = cfq_inference_node::run(config, stop).await;
            ended.map_err(|error| stopped("node", error.is_refusal(), error))?;
        }
        ServeCommand::Runner { config } => {
            let launcher = sandbox_launcher();
            let ended = cfq_agent_runner::run(read(&config)?, repo::access()?, launcher, stop).await;
            ended.map_err(|error| stopped("runner", error.is_refusal(), error))?;
        }
        ServeCommand::RepositoryAccess | ServeCommand::SandboxLauncher => {
            return Err(exit::usage("this process is started by the runner"));
        }
        ServeCommand::Sandbox => return Err(exit::usage("the sandbox is started by the node")),
    }
    Ok(Code::Done)
}

/// Starts cfq again as the launcher of a sandbox.
pub fn sandbox_launcher() -> SandboxLauncher {
    SandboxLauncher::of_this_program(["serve", "sandbox-launcher"])
}

/// Why a process stopped. A refusal has the exit code of wrong usage, because the user has to change something.
fn stopped(process: &str, is_refusal: bool, error: impl Into<anyhow::Error>) -> anyhow::Error {
    let error = error.into().context(format!("the {process} stopped"));
    if is_refusal { exit::usage(format!("{error:#}")) } else { error }
}

fn read<T: DeserializeOwned>(path: &Path) -> anyhow::Result<T> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    toml::from_str(&text).with_context(|| format!("{} is not a valid configuration of this process", path.display()))
}
