//! `cfq review`: the critic reviews commits of a repository, or the result of a task.

use std::io::IsTerminal;
use std::path::PathBuf;

use anyhow::Context;
use cfq_agent_runner::workstream::{ReviewRangeRequest, StartPointRequest, StopCondition};
use cfq_proto::client::Client;
use cfq_proto::http::ArtifactChain;
use cfq_proto::ids::{ArtifactId, TaskId, TaskKey};
use cfq_proto::task::{ReviewDepth, ReviewRequest, TaskSpec};

use crate::args::ReviewArgs;
use crate::commands::submit::{accepted, print_warnings};
use crate::commands::{show, wait, watch};
use crate::exit::{self, Code};
use crate::output::Output;
use crate::repo;

pub async fn run(client: &Client, out: Output, args: ReviewArgs) -> anyhow::Result<Code> {
    if args.change.trim().is_empty() {
        return Err(exit::usage("name a commit, a range BASE..HEAD or a task; without an argument, HEAD is reviewed"));
    }
    let key = args.idempotency_key.clone().unwrap_or_else(|| TaskId::fresh().to_string());
    let spec = match task_of(&args.change) {
        Some(task) => of_task(client, task, &args).await?,
        None => of_commits(&args)?,
    };
    let reply = client.submit(&spec, Some(&key)).await?;
    if args.no_wait {
        out.print(&reply, accepted)?;
        print_warnings(out, &reply);
        out.status(&format!("follow it: cfq watch {0}; read it: cfq show {0}", reply.number));
        return Ok(Code::Done);
    }
    out.status(&accepted(&reply));
    print_warnings(out, &reply);
    let task = TaskKey::Number(reply.number);
    // Without a terminal, stdout has only the review.
    let code = match out.json || !std::io::stdout().is_terminal() {
        true => watch::until_signalled(task, wait::until_settled(client, task)).await?,
        false => {
            watch::until_signalled(
                task,
                watch::follow(
                    client,
                    out,
                    task,
                    0,
                    watch::WatchOptions { tokens: false, ..watch::WatchOptions::default() },
                ),
            )
            .await?
        }
    };
    let detail = client.task(task).await?;
    out.print_lines(&detail, show::review)?;
    if code != Code::Done {
        out.status(&format!("details: cfq show {}", reply.number));
    }
    Ok(code)
}

/// The task that the argument names as `t42` or by its id; commits have numbers, too.
fn task_of(change: &str) -> Option<TaskKey> {
    let is_task = change.starts_with('t') || change.contains('-');
    change.parse().ok().filter(|_| is_task)
}

/// The review of a task's result.
async fn of_task(client: &Client, task: TaskKey, args: &ReviewArgs) -> anyhow::Result<TaskSpec> {
    if args.repo.is_some() {
        return Err(exit::usage("--repo DIR belongs to commits; the repository of a task is known"));
    }
    let detail = client.task(task).await?;
    let mut spec = of_chain(&detail.spec, client.artifacts(task, args.iteration).await?)?;
    if let Some(description) = &args.description {
        spec.description.clone_from(description);
    }
    if let Some(pattern) = args.context.iter().find(|path| path.contains(['*', '?', '['])) {
        return Err(exit::usage(format!(
            "--context {pattern}: patterns belong to commits; for a task, name the files"
        )));
    }
    spec.context_files.extend(args.context.iter().cloned());
    Ok(with_arguments(spec, args))
}

/// The review of the last artifact of the chain, of a task with this specification.
pub fn of_chain(of: &TaskSpec, chain: ArtifactChain) -> anyhow::Result<TaskSpec> {
    let artifact = chain.artifacts.last();
    let id = artifact.map(|artifact| artifact.id);
    let head = artifact.and_then(|artifact| artifact.commit.clone()).ok_or_else(|| {
        exit::usage(format!(
            "the last reply of {} could not be turned into files, so there is nothing to review: name another iteration",
            chain.number
        ))
    })?;
    Ok(TaskSpec {
        constraints: of.constraints.clone(),
        context_files: of.context_files.clone(),
        language: of.language.clone(),
        ..new_spec(of.repo.clone(), of.description.clone(), chain.base, head, id)
    })
}

/// The review of commits.
fn of_commits(args: &ReviewArgs) -> anyhow::Result<TaskSpec> {
    if args.iteration.is_some() {
        return Err(exit::usage("--iteration belongs to a task, as in `cfq review t42 --iteration 2`"));
    }
    let dir = match &args.repo {
        Some(dir) => dir.clone(),
        None => std::env::current_dir().context("cannot determine the current folder; use --repo DIR")?,
    };
    let dir: PathBuf = repo::existing_folder("--repo DIR", &dir)?;
    let start = StartPointRequest { dir: dir.clone(), base: None, context_files: args.context.clone() };
    let request = ReviewRangeRequest { start, range: args.change.clone() };
    let (stop, _cancel) = StopCondition::after(repo::MAX_ACCESS);
    let found = repo::access()?.review_range(request, &stop);
    let found = found.map_err(|error| repo::not_usable("--repo DIR", &dir, error))?;
    if found.base == found.head {
        return Err(exit::usage(format!(
            "{} has no commits of its own, so there is nothing to review: name a range BASE..HEAD whose HEAD is ahead",
            args.change
        )));
    }
    let description = args.description.clone().unwrap_or(found.messages);
    let description =
        if description.trim().is_empty() { "The change has no description.".to_owned() } else { description };
    let mut spec = new_spec(found.root.to_string_lossy().into_owned(), description, found.base, found.head, None);
    spec.context_files = found.context_files;
    Ok(with_arguments(spec, args))
}

fn with_arguments(mut spec: TaskSpec, args: &ReviewArgs) -> TaskSpec {
    spec.agents.beta.model.clone_from(&args.beta);
    spec.priority = args.priority.unwrap_or_default();
    spec.labels.clone_from(&args.label);
    if let Some(review) = &mut spec.review {
        review.depth = args.depth;
    }
    spec
}

fn new_spec(repo: String, description: String, base: String, head: String, artifact: Option<ArtifactId>) -> TaskSpec {
    TaskSpec {
        base: Some(base),
        review: Some(ReviewRequest { head, artifact, depth: ReviewDepth::default() }),
        ..TaskSpec::new(description, repo)
    }
}
