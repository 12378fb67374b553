//! `cfq pull TASK`: the best artifact as a branch, made again from base and artifacts, so that it works from any clone that
//! has the base, also for a task that was never delivered.

use std::path::{Path, PathBuf};

use cfq_agent_runner::workstream::{self, Delivery};
use cfq_proto::client::Client;
use cfq_proto::http::TaskDetail;
use cfq_proto::ids::TaskKey;
use cfq_proto::task::TaskState;
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
    let repo = match repo {
        Some(dir) => repo::start(&dir, None)?.root,
        None => PathBuf::from(&detail.spec.repo),
    };
    let delivery = bring(client, &detail, &repo, iteration).await?;
    if detail.summary.state == TaskState::WaitingOnHuman {
        let task = detail.summary.number;
        out.talk(&format!("{task} still waits for you: `cfq resolve {task} --action accept_best_effort` ends it"));
    }
    out.data(&Pulled { branch: delivery.branch, commit: delivery.commit, repo }, |p| {
        format!(
            "branch {0} in {1}\nlook at it: git diff HEAD...{0}\nmerge it:   git merge {0}",
            p.branch,
            p.repo.display()
        )
    })?;
    Ok(Code::Done)
}

/// The artifact of an iteration (the best if `None`) as a branch in `repo`; the same again is the same branch.
pub async fn bring(
    client: &Client,
    detail: &TaskDetail,
    repo: &Path,
    iteration: Option<u32>,
) -> anyhow::Result<Delivery> {
    let task = detail.summary.number;
    let chain = client.artifacts(TaskKey::Number(task), iteration).await?;
    let Some(asked) = chain.artifacts.last().map(|a| a.iteration) else {
        return Err(exit::usage(format!("{task} has made nothing yet; `cfq watch {task}` shows it at work")));
    };
    // What is quarantined stays where it is; what could not be turned into files has nothing to bring.
    let presentable =
        detail.iterations.iter().any(|i| i.iteration == asked && i.quarantine.is_none() && i.commit.is_some());
    if !presentable {
        return Err(exit::usage(format!(
            "iteration {asked} of {task} is quarantined and is not brought into a repository; `cfq diff {task}` shows it"
        )));
    }
    let branch = workstream::branch_name(chain.number, &detail.spec.description);
    let into = repo.to_path_buf();
    let made = tokio::task::spawn_blocking(move || workstream::deliver(&into, &branch, &chain.base, &chain.artifacts));
    made.await?.map_err(|error| exit::usage(error.to_string()))
}
