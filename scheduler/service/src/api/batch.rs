//! `POST /tasks:batch`: several tasks, which may refer to each other by name. All are accepted, or none.

use std::collections::BTreeMap;

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{Extension, State};
use axum::http::{HeaderMap, StatusCode};
use cfq_proto::blob::BlobHash;
use cfq_proto::http::{BatchReply, BatchRequest};
use cfq_proto::ids::{TaskId, TaskKey};
use cfq_proto::task::TaskSpec;
use cfq_proto::task_ref::{TaskName, TaskRef};
use cfq_scheduler_core::{Cycle, dependency_order};

use super::Api;
use super::access::Access;
use super::error::ApiError;
use super::submit::{check_retried, idempotency_key, new_task, on_submitted, read_body, reply};
use super::validate;
use crate::store::{NewTask, Submitted};

/// Maximum number of tasks in a batch: they are written in one transaction.
const MAX_BATCH_TASKS: usize = 100;

pub async fn submit(
    State(api): State<Api>,
    Extension(access): Extension<Access>,
    headers: HeaderMap,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<(StatusCode, Json<BatchReply>), ApiError> {
    let key = idempotency_key(&headers, &access)?;
    let request: BatchRequest = validate::parse_body(&read_body(&api, bytes)?)?;
    if !(1..=MAX_BATCH_TASKS).contains(&request.tasks.len()) {
        let message = format!("tasks: must contain 1 to {MAX_BATCH_TASKS} tasks; submit the others in another batch");
        return Err(ApiError::invalid("tasks", message));
    }
    let canonical = serde_json::to_vec(&request).map_err(|e| ApiError::malformed(e.to_string()))?;
    let hash = BlobHash::of(&canonical).to_string();
    let predecessors = predecessors_in_batch(&request.tasks)?;
    let order = dependency_order(&predecessors).map_err(|cycle| cyclic(&request.tasks, &cycle))?;
    let mut tasks = Vec::with_capacity(request.tasks.len());
    for (n, spec) in request.tasks.into_iter().enumerate() {
        validate::check_retry_of(&spec).map_err(|error| error.in_task(n))?;
        let key = key.as_ref().map(|key| format!("{key}#{n}"));
        tasks.push(new_task(&api, &access, spec, key, hash.clone()).map_err(|error| error.in_task(n))?);
    }
    replace_names_by_ids(&mut tasks);
    let mut warnings = Vec::with_capacity(tasks.len());
    // Held until the tasks are written.
    let admitted = api.open_tasks.admit(&api.store, &access, tasks.len()).await?;
    let (_permit, mut refusal) = match admitted {
        Ok(permit) => (Some(permit), None),
        Err(refusal) => (None, Some(refusal)),
    };
    for (n, task) in tasks.iter().enumerate() {
        match admit(&api, &access, task, refusal.take()).await? {
            Ok(found) => warnings.push(found),
            // The reply to an earlier request with this key may have been lost.
            Err(_) if task.key.is_some() && is_known(&api, &tasks).await? => warnings.push(Vec::new()),
            Err(refusal) => return Err(refusal.in_task(n)),
        }
    }
    let ordered: Vec<NewTask> = order.iter().map(|n| tasks[*n].clone()).collect();
    let mut results = api.store.submit_batch(&ordered).await?;
    if results.len() != ordered.len() {
        let refusal = results.pop().ok_or_else(|| ApiError::malformed("the batch has no tasks"))?;
        return Err(reply(refusal, Vec::new()).err().unwrap_or_else(|| ApiError::malformed("the batch was refused")));
    }
    let mut replies = Vec::with_capacity(results.len());
    for (result, n) in results.into_iter().zip(order) {
        on_submitted(&api, &result).await;
        replies.push((n, reply(result, std::mem::take(&mut warnings[n]))?));
    }
    replies.sort_by_key(|(n, _)| *n);
    let is_new = replies.iter().any(|(_, reply)| reply.created);
    let status = if is_new { StatusCode::CREATED } else { StatusCode::OK };
    Ok((status, Json(BatchReply { tasks: replies.into_iter().map(|(_, reply)| reply).collect() })))
}

/// Whether a task may be created now: its warnings, or the reason to refuse the batch. `refusal` is that of the limits on
/// open tasks.
async fn admit(
    api: &Api,
    access: &Access,
    task: &NewTask,
    refusal: Option<ApiError>,
) -> Result<Result<Vec<String>, ApiError>, ApiError> {
    if let Some(refusal) = refusal {
        return Ok(Err(refusal));
    }
    check_retried(api, access, &task.spec).await?;
    let current = api.agents.current();
    Ok(api.nodes.check_models(&api.store, &task.agents(&current), &current).await?)
}

/// Whether an earlier request created the batch.
async fn is_known(api: &Api, tasks: &[NewTask]) -> Result<bool, ApiError> {
    let Some(first) = tasks.first() else { return Ok(false) };
    Ok(api.store.find_by_key(first).await? != Submitted::TooLate)
}

/// For each task, the indexes of the tasks of the batch on which it depends.
fn predecessors_in_batch(tasks: &[TaskSpec]) -> Result<Vec<Vec<usize>>, ApiError> {
    let mut index: BTreeMap<&TaskName, usize> = BTreeMap::new();
    for (n, task) in tasks.iter().enumerate() {
        if let Some(name) = &task.name
            && index.insert(name, n).is_some()
        {
            let message = format!("name: two tasks of the batch have the name {name}; give each its own name");
            return Err(ApiError::invalid("name", message).in_task(n));
        }
    }
    let mut predecessors = Vec::with_capacity(tasks.len());
    for (n, task) in tasks.iter().enumerate() {
        let mut of_task = Vec::new();
        for name in task.after.iter().filter_map(name_of) {
            let Some(found) = index.get(name) else {
                let message = format!(
                    "after: no task of the batch has the name {name}: use such a name, a number as in t42, or a task id"
                );
                return Err(ApiError::invalid("after", message).in_task(n));
            };
            of_task.push(*found);
        }
        predecessors.push(of_task);
    }
    Ok(predecessors)
}

fn name_of(task: &TaskRef) -> Option<&TaskName> {
    match task {
        TaskRef::Name(name) => Some(name),
        TaskRef::Key(_) => None,
    }
}

fn cyclic(tasks: &[TaskSpec], Cycle(cycle): &Cycle) -> ApiError {
    // Only tasks with a name can be in a cycle.
    let names = cycle.iter().chain(cycle.first()).filter_map(|n| tasks[*n].name.as_ref());
    let names: Vec<&str> = names.map(TaskName::as_str).collect();
    let message = format!(
        "after: the tasks wait for each other: {}; remove one of these entries from `after`",
        names.join(" after ")
    );
    ApiError::invalid("after", message)
}

/// Replaces references to names by the ids of the new tasks, because names mean nothing outside their batch.
fn replace_names_by_ids(tasks: &mut [NewTask]) {
    let ids: BTreeMap<TaskName, TaskId> =
        tasks.iter().filter_map(|task| Some((task.spec.name.clone()?, task.id))).collect();
    for reference in tasks.iter_mut().flat_map(|task| task.spec.after.iter_mut()) {
        if let Some(id) = name_of(reference).and_then(|name| ids.get(name)) {
            *reference = TaskRef::Key(TaskKey::Id(*id));
        }
    }
}
