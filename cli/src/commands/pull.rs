//! `cfq pull TASK`: creates a branch with the best artifact. The branch is rebuilt from the base commit and the
//! artifacts, so this works in any clone that has the base, also for a task that was never delivered.

use std::path::{Path, PathBuf};

use cfq_agent_runner::workstream::{self, DeliveredBranch, DeliveryRequest, StopCondition};
use cfq_proto::client::Client;
use cfq_proto::http::TaskDetail;
use cfq_proto::ids::{TaskKey, TaskNumber};
use cfq_proto::task::TaskState;
use schemars::JsonSchema;
use serde::Serialize;

use crate::exit::{self, Code};
use crate::output::{self, Output};
use crate::repo;

#[derive(Serialize, JsonSchema)]
pub struct Pulled {
    /// Number of the task.
    number: TaskNumber,
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
        Some(dir) => repo::resolve(&dir, None, &[])?.root,
        None => PathBuf::from(&detail.spec.repo),
    };
    let delivered = create_branch(client, &detail, &repo, iteration).await?;
    if detail.summary.state == TaskState::WaitingOnHuman {
        let task = detail.summary.number;
        out.status(&format!(
            "{task} still waits for a human; to end the task: cfq resolve {task} --action accept_best_effort"
        ));
    }
    out.print(&Pulled { number: detail.summary.number, branch: delivered.branch, commit: delivered.commit, repo }, |p| {
        let (branch, repo) = (&p.branch, p.repo.display());
        let word = output::shell_word(&p.repo.to_string_lossy());
        format!(
            "branch {branch} in {repo}\nview it:  git -C {word} diff HEAD...{branch}\nmerge it: git -C {word} merge {branch}"
        )
    })?;
    Ok(Code::Done)
}

/// Creates a branch in `repo` with the artifact of `iteration`; if `iteration` is `None`, with the best artifact.
/// Idempotent.
pub async fn create_branch(
    client: &Client,
    detail: &TaskDetail,
    repo: &Path,
    iteration: Option<u32>,
) -> anyhow::Result<DeliveredBranch> {
    let task = detail.summary.number;
    if detail.spec.review.is_some() {
        return Err(exit::usage(format!("{task} only reviews a change that exists: it has no result to pull")));
    }
    let chain = client.artifacts(TaskKey::Number(task), iteration).await?;
    let Some(requested) = chain.artifacts.last().map(|a| a.iteration) else {
        return Err(exit::usage(format!("{task} has no result yet; follow it with `cfq watch {task}`")));
    };
    let Some(view) = detail.iterations.iter().find(|i| i.iteration == requested) else {
        return Err(exit::usage(format!("{task} has no iteration {requested}; see `cfq show {task}`")));
    };
    let refused = match view.quarantine {
        _ if view.unchecked => Some("has not been checked"),
        // A reply without usable files has no commit.
        _ if view.commit.is_none() => Some("has no usable files"),
        Some(quarantine) if !quarantine.permits_acceptance() => Some("is quarantined"),
        _ => None,
    };
    if let Some(reason) = refused {
        return Err(exit::usage(format!(
            "iteration {requested} of {task} {reason} and cannot be pulled; view it with `cfq diff {task}`"
        )));
    }
    if view.quarantine.is_some() {
        let text = format!("cfq: warning: checks of the project fail on iteration {requested}; see `cfq show {task}`");
        output::print_stderr(&text);
    }
    let branch = workstream::branch_name(chain.number, &detail.spec.description);
    let repository = repo.to_path_buf();
    let request = DeliveryRequest { repository, branch, base: chain.base, artifacts: chain.artifacts };
    let (access, (stop, _cancel)) = (repo::access()?, StopCondition::after(repo::MAX_ACCESS));
    let deliver = move || access.deliver(request, None, &stop);
    tokio::task::spawn_blocking(deliver).await?.map_err(|error| exit::usage(error.to_string()))
}
