//! `cfq serve scheduler|node|runner CONFIG`: runs one process of cfq. `cfq up` starts each of the three in this way,
//! with a configuration file that it has written.

use std::path::Path;

use anyhow::Context;
use serde::de::DeserializeOwned;

use crate::args::ServeCommand;
use crate::exit::Code;

pub async fn run(process: ServeCommand) -> anyhow::Result<Code> {
    let stop = cfq_link::stop::signalled();
    match process {
        ServeCommand::Scheduler { config } => {
            cfq_scheduler::run(read(&config)?, stop).await.context("the scheduler stopped")?;
        }
        ServeCommand::Node { config } => {
            cfq_inference_node::run(read(&config)?, stop).await.context("the node stopped")?;
        }
        ServeCommand::Runner { config } => {
            cfq_agent_runner::run(read(&config)?, stop).await.context("the runner stopped")?;
        }
    }
    Ok(Code::Done)
}

fn read<T: DeserializeOwned>(path: &Path) -> anyhow::Result<T> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    toml::from_str(&text).with_context(|| format!("{} is not a valid configuration of this process", path.display()))
}
