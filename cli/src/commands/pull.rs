//! `cfq pull TASK`: the best artifact as a branch, made again from base and artifacts, so that it works from any clone that
//! has the base, also for a task that was never delivered.

use std::path::PathBuf;

use cfq_agent_runner::workstream;
use cfq_proto::client::Client;
use cfq_proto::ids::TaskKey;
use serde::Serialize;

use crate::exit::{self, Code};
use crate::output::Output;
use crate::repo;

#[derive(Serialize)]
struct Pulled {
    branch: String,
    commit: String,
    repo: PathBuf,
}

pub async fn run(
    client: &Client,
    out: Output,
    task: TaskKey,
    repo: Option<PathBuf>,
    iteration: Option<u32>,
) -> anyhow::Result<Code> {
    let detail = client.task(task).await?;
    let chain = client.artifacts(task, iteration).await?;
    if chain.artifacts.is_empty() {
        return Err(exit::usage(format!("{task} has made nothing yet; `cfq watch {task}` shows it at work")));
    }
    let repo = match repo {
        Some(dir) => repo::start(&dir, None)?.root,
        None => PathBuf::from(&detail.spec.repo),
    };
    let branch = workstream::branch_name(chain.number, &detail.spec.description);
    let into = repo.clone();
    let delivery =
        tokio::task::spawn_blocking(move || workstream::deliver(&into, &branch, &chain.base, &chain.artifacts))
            .await?
            .map_err(|error| exit::usage(error.to_string()))?;
    out.data(&Pulled { branch: delivery.branch, commit: delivery.commit, repo }, |p| {
        format!(
            "branch {} in {}\nlook at it: git diff HEAD...{}\nmerge it:   git merge {}",
            p.branch,
            p.repo.display(),
            p.branch,
            p.branch
        )
    })?;
    Ok(Code::Done)
}
