//! Submission of tasks: `execute_task_spec` and `submit_task`.

use std::path::{Path, PathBuf};

use cfq_proto::client::{Client, ClientError};
use cfq_proto::http::{ErrorCode, Explanation, SubmitReply, TaskExplanation, TaskWait};
use cfq_proto::ids::{TaskId, TaskKey};
use cfq_proto::task::TaskSpec;
use serde_json::Value;

use super::access::Access;
use super::arguments::{ExecuteTaskSpec, SubmitTask};
use super::error::ToolError;
use super::repeat::{is_unanswered, until_answered};
use super::replies::Accepted;
use crate::{connect, repo};

/// `execute_task_spec`.
pub async fn execute_task_spec(access: &Access, arguments: ExecuteTaskSpec) -> Result<Accepted, ToolError> {
    let ExecuteTaskSpec { spec, max_iterations, quality_threshold } = arguments;
    let task = TaskSpec {
        language: spec.language,
        context_files: spec.context_files,
        constraints: spec.constraints,
        examples: spec.examples,
        base: spec.base,
        agents: spec.agents,
        threshold: quality_threshold,
        max_iterations,
        timeout_minutes: spec.timeout_minutes,
        priority: spec.priority,
        after: spec.depends_on,
        labels: spec.labels,
        ..TaskSpec::new(spec.description, spec.repo.unwrap_or_default())
    };
    submit(access, task, spec.idempotency_key).await
}

/// `submit_task`.
pub async fn submit_task(access: &Access, arguments: SubmitTask) -> Result<Accepted, ToolError> {
    let mut fields = arguments.task;
    // Without a repository, the task uses the one of the current folder.
    fields.entry("repo").or_insert_with(|| "".into());
    let fields = serde_json::Map::from_iter([("task".to_owned(), Value::Object(fields))]);
    let TaskArgument { task } = super::arguments::parse(Some(fields))?;
    submit(access, task, arguments.idempotency_key).await
}

/// A whole task, whose errors name the argument `task`.
#[derive(serde::Deserialize)]
struct TaskArgument {
    task: TaskSpec,
}

async fn submit(access: &Access, mut task: TaskSpec, key: Option<String>) -> Result<Accepted, ToolError> {
    if task.description.trim().is_empty() {
        return Err(ToolError::argument("description", "is empty: say what to do"));
    }
    let client = access.client()?;
    task = match access {
        Access::Local { .. } => with_start(task).await?,
        Access::Http { .. } => on_server(task)?,
    };
    submit_prepared(&client, task, key).await
}

/// Submits a task whose repository and base are known.
pub async fn submit_prepared(client: &Client, task: TaskSpec, key: Option<String>) -> Result<Accepted, ToolError> {
    let base = task.base.clone();
    let key = key.unwrap_or_else(|| TaskId::fresh().to_string());
    let reply = send(client, &task, &key).await?;
    let tasks_before = tasks_before(client, TaskKey::Id(reply.id)).await;
    Ok(Accepted {
        session_id: reply.id,
        task: reply.number.to_string(),
        state: reply.state,
        created: Some(reply.created),
        idempotency_key: Some(key),
        tasks_before,
        base,
        warnings: reply.warnings,
        next_step: format!("call get_progress_summary with session_id {} and wait_s 45", reply.id),
        outcome: None,
    })
}

/// The task with its repository and the commit from which it starts.
async fn with_start(mut task: TaskSpec) -> Result<TaskSpec, ToolError> {
    let dir = folder("repo", &task.repo)?;
    let (base, files) = (task.base.clone(), task.context_files.clone());
    let found =
        tokio::task::spawn_blocking(move || repo::resolve_for("the argument repo", &dir, base.as_deref(), &files))
            .await;
    let start = found.map_err(|error| ToolError(format!("cannot open the repository: {error}")))??;
    task.repo = start.root.to_string_lossy().into_owned();
    task.base = Some(start.base);
    task.context_files = start.context_files;
    Ok(task)
}

/// The task of a caller over HTTP. Its repository is on the server's machine, where the runner opens it.
fn on_server(task: TaskSpec) -> Result<TaskSpec, ToolError> {
    match task.repo.as_str() {
        "" => Err(ToolError::argument(
            "repo",
            "is missing: name the absolute path of a repository on the server's machine",
        )),
        repo if Path::new(repo).is_absolute() => Ok(task),
        repo => Err(ToolError::argument("repo", format!("{repo:?} is not an absolute path on the server's machine"))),
    }
}

/// The folder that a caller named with `argument`; the current one if it is empty.
pub fn folder(argument: &str, dir: &str) -> Result<PathBuf, ToolError> {
    match dir {
        "" => std::env::current_dir().map_err(|error| {
            ToolError::argument(argument, format!("cannot determine the current folder ({error}); name a repository"))
        }),
        dir => absolute(argument, dir),
    }
}

/// Resolves a path of the caller. Relative paths are refused: the caller does not know the current folder.
pub fn absolute(argument: &str, dir: &str) -> Result<PathBuf, ToolError> {
    if let (Some(rest), Some(home)) = (dir.strip_prefix("~/"), std::env::var_os("HOME")) {
        return Ok(PathBuf::from(home).join(rest));
    }
    match Path::new(dir) {
        path if path.is_absolute() => Ok(path.to_owned()),
        _ => Err(ToolError::argument(argument, format!("{dir:?} is not an absolute path"))),
    }
}

/// Submits the task. The key makes it safe to repeat the request.
async fn send(client: &Client, task: &TaskSpec, key: &str) -> Result<SubmitReply, ToolError> {
    until_answered(|| client.submit(task, Some(key))).await.map_err(|error| match error {
        ClientError::Refused { body, .. } if body.code == ErrorCode::KeyReused => {
            // The commit to start from belongs to the task, so a new commit makes another task of the same call.
            let message = format!(
                "{}. If the repository got a commit since the first call, name the commit of the first call as base; if the \
                 call names an artifact by its session, name the artifact_id instead",
                body.message
            );
            ToolError::argument("idempotency_key", message)
        }
        error if is_unanswered(&error) => ToolError(format!(
            "{}. The task may have been stored: call again with idempotency_key {key:?}, which creates it at most once",
            connect::describe_error(&error)
        )),
        error => error.into(),
    })
}

/// Number of tasks that start before this one, if it waits for a free place; `None` too if the server does not say.
pub async fn tasks_before(client: &Client, task: TaskKey) -> Option<u64> {
    match client.explain(task).await {
        Ok(Explanation {
            task: TaskExplanation { waits_for: Some(TaskWait::RunnerSlot { before, .. }), .. }, ..
        }) => Some(before),
        _ => None,
    }
}
