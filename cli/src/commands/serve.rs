//! `cfq serve scheduler|node|runner CONFIG`: runs one process of cfq. `cfq up` starts each of the three in this way,
//! with a configuration file that it has written.

use std::path::Path;

use anyhow::Context;
use serde::de::DeserializeOwned;

use crate::args::ServeCommand;
use crate::exit::{self, Code};

pub async fn run(process: ServeCommand) -> anyhow::Result<Code> {
    let stop = cfq_link::stop::signalled();
    match process {
        ServeCommand::Scheduler { config } => {
            cfq_scheduler::run(read(&config)?, stop).await.context("the scheduler stopped")?;
        }
        ServeCommand::Node { config } => {
            let ended = cfq_inference_node::run(read(&config)?, stop).await;
            ended.map_err(|error| stopped("node", error.is_refusal(), error))?;
        }
        ServeCommand::Runner { config } => {
            let ended = cfq_agent_runner::run(read(&config)?, stop).await;
            ended.map_err(|error| stopped("runner", error.is_refusal(), error))?;
        }
    }
    Ok(Code::Done)
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
