//! `cfq logs TASK` and `cfq logs --process NAME`

use std::path::Path;

use anyhow::Context;
use cfq_proto::client::Client;
use cfq_proto::ids::TaskKey;

use crate::commands::watch::describe;
use crate::exit::{Code, usage};
use crate::output::{self, Output};

pub async fn task(client: &Client, out: Output, task: TaskKey) -> anyhow::Result<Code> {
    let list = client.events(task, 0).await?;
    for event in &list.events {
        if out.json {
            output::print_line(&output::json(event)?);
        } else if let Some(text) = describe(&event.body) {
            let second = event.at as i64 % 86_400;
            let clock = format!("{:02}:{:02}:{:02}", second / 3600, second / 60 % 60, second % 60);
            let line = format!("{clock}Z {} {}", event.number, output::sanitize(&text));
            output::print_line(&output::indent_rest(&line));
        }
    }
    Ok(Code::Done)
}

const PROCESSES: [&str; 7] = ["scheduler", "node", "runner", "postgres", "nats", "up", "join"];

pub fn process(data: &Path, name: &str) -> anyhow::Result<Code> {
    if !PROCESSES.contains(&name) {
        return Err(usage(format!("unknown process {name:?}; valid names: {}", PROCESSES.join(", "))));
    }
    let path = data.join("log").join(format!("{name}.log"));
    if !path.exists() {
        return Err(usage(format!(
            "{} does not exist: has `cfq up`, or for `join` and `node` `cfq join`, run with this data folder?",
            path.display()
        )));
    }
    let bytes = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    output::print_line(output::sanitize(&String::from_utf8_lossy(&bytes)).trim_end());
    Ok(Code::Done)
}
