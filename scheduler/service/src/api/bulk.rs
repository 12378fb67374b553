//! `POST /tasks/actions`: one action on many tasks. Each task is changed in a transaction of its own, so a task that
//! cannot be changed stops no other. A request processes a bounded number of tasks; the client repeats it for the rest.

use std::time::{Duration, Instant};

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{Extension, State};
use cfq_proto::http::{
    BulkOutcome, BulkPosition, BulkReply, BulkRequest, BulkResult, ListPosition, MAX_TASKS_PER_BULK_REQUEST,
    TaskAction, TaskSort,
};
use cfq_proto::ids::{TaskId, TaskKey, TaskNumber};
use cfq_proto::task::{Priority, TaskState};

use super::Api;
use super::access::Access;
use super::control::{AFTER_STEP, WITHDRAWN, ended, not_pausable, requested_already};
use super::error::ApiError;
use super::submit::read_body;
use super::tasks::{check_reason, too_late_to_cancel, unknown_message};
use super::validate::{check_label_count, parse_body};
use crate::store::{
    Cancelled, PauseOutcome, PriorityOutcome, ResumeOutcome, RetryOutcome, Run, StoreError, TaskFilter,
};

/// Time after which a request processes no further task; well below the time limit of requests.
const MAX_TIME: Duration = Duration::from_secs(3);

pub async fn act(
    State(api): State<Api>,
    Extension(access): Extension<Access>,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<Json<BulkReply>, ApiError> {
    let request: BulkRequest = parse_body(&read_body(&api, bytes)?)?;
    if let TaskAction::Cancel { reason } | TaskAction::Pause { reason } = &request.action {
        check_reason(reason)?;
    }
    check_label_count(&request.labels)?;
    let began = Instant::now();
    let mut reply = BulkReply { results: Vec::new(), next: None };
    match (request.tasks.is_empty(), request.state, request.all || !request.labels.is_empty()) {
        (false, None, false) => {
            if request.tasks.len() > MAX_TASKS_PER_BULK_REQUEST {
                let message =
                    format!("tasks: at most {MAX_TASKS_PER_BULK_REQUEST} per request; send the rest separately");
                return Err(ApiError::invalid("tasks", message));
            }
            let keys: Result<Vec<TaskKey>, _> = request.tasks.iter().map(|key| key.parse::<TaskKey>()).collect();
            let keys = keys.map_err(|e| ApiError::invalid("tasks", format!("tasks: {e}")))?;
            for key in keys {
                if began.elapsed() > MAX_TIME {
                    break;
                }
                reply.results.push(act_on_named(&api, &access, key, &request).await);
            }
        }
        (true, Some(_), _) | (true, None, true) if !(request.all && request.state.is_some()) => {
            let states = request.state.map_or_else(|| request.action.states(), |state| vec![state]);
            act_on_selected(&api, &access, &request, states, began, &mut reply).await?;
        }
        _ => {
            let message = "tasks: name tasks, or select them with `labels`, `state` or `all`; not with `state` and `all` \
                           together";
            return Err(ApiError::invalid("tasks", message));
        }
    }
    Ok(Json(reply))
}

async fn act_on_named(api: &Api, access: &Access, key: TaskKey, request: &BulkRequest) -> BulkResult {
    match api.store.find_task(key).await {
        Ok(Some(task)) => match access.may_change(&api.store, task).await {
            Ok(true) => act_on(api, access, task, None, request).await,
            Ok(false) => refused(Some(task), None, access.not_own(&key.to_string())),
            Err(error) => failed(Some(task), None, error),
        },
        Ok(None) => match (key, &request.action) {
            (TaskKey::Number(number @ TaskNumber(..0)), TaskAction::Cancel { .. }) => {
                cancel_call(api, access, number, request)
                    .await
                    .unwrap_or_else(|error| failed(None, Some(number), error))
            }
            _ => unknown(&key.to_string()),
        },
        Err(error) => failed(None, None, error),
    }
}

/// Cancels a call of an API client.
async fn cancel_call(
    api: &Api,
    access: &Access,
    number: TaskNumber,
    request: &BulkRequest,
) -> Result<BulkResult, StoreError> {
    let Some(call) = api.store.find_call(number).await? else { return Ok(unknown(&number.to_string())) };
    if !access.may_change(&api.store, call).await? {
        return Ok(refused(Some(call), Some(number), access.not_own(&number.to_string())));
    }
    let (outcome, run) = if request.dry_run {
        (BulkOutcome::WouldChange, Run::Dry)
    } else {
        let (cancelled, hints) = api.store.cancel_call(call).await?;
        if !cancelled {
            return Ok(unknown(&number.to_string()));
        }
        api.link.send_hints(hints).await;
        (BulkOutcome::Done, Run::Commit)
    };
    Ok(result(call, number, TaskState::Cancelled, outcome, format!("{number} {} cancelled", becomes(run))))
}

async fn act_on_selected(
    api: &Api,
    access: &Access,
    request: &BulkRequest,
    states: Vec<TaskState>,
    began: Instant,
    reply: &mut BulkReply,
) -> Result<(), ApiError> {
    let position = match request.after {
        Some(position) => position,
        None => BulkPosition { task: TaskNumber(0), until: api.store.last_task_number().await? },
    };
    let filter = TaskFilter { states, labels: request.labels.clone(), ..TaskFilter::default() };
    let after = ListPosition { priority: Priority::P0, number: position.task };
    let limit = MAX_TASKS_PER_BULK_REQUEST;
    let mut found = api.store.find_tasks(&filter, TaskSort::Oldest, Some(after), limit as i64 + 1).await?;
    if request.action == TaskAction::Resume && request.state.is_none() {
        // A requested pause is withdrawn, so that the task is not paused after this.
        let requested = api.store.tasks_with_requested_pause(&request.labels, position.task, limit as i64 + 1).await?;
        found.extend(requested);
        found.sort_by_key(|(_, number)| *number);
        found.dedup();
    }
    let selected: Vec<_> = found.into_iter().filter(|(_, number)| *number <= position.until).collect();
    let ids: Vec<TaskId> = selected.iter().map(|(task, _)| *task).collect();
    let own = match access.is_limited_to_own_tasks() {
        true => Some(api.store.tasks_of_token(access.token_id(), &ids).await?),
        false => None,
    };
    for (processed, (task, number)) in selected.iter().enumerate() {
        if processed == limit || processed > 0 && began.elapsed() > MAX_TIME {
            let last = selected.get(processed - 1).map_or(position.task, |(_, number)| *number);
            reply.next = Some(BulkPosition { task: last, until: position.until });
            break;
        }
        // A selection stands for the tasks that the token may change.
        if own.as_ref().is_none_or(|own| own.contains(task)) {
            reply.results.push(act_on(api, access, *task, Some(*number), request).await);
        }
    }
    Ok(())
}

/// Carries out the action on one task.
async fn act_on(
    api: &Api,
    access: &Access,
    task: TaskId,
    number: Option<TaskNumber>,
    request: &BulkRequest,
) -> BulkResult {
    let run = if request.dry_run { Run::Dry } else { Run::Commit };
    let done = match &request.action {
        TaskAction::Cancel { reason } => cancel(api, access, task, reason, run).await,
        TaskAction::Pause { reason } => pause(api, access, task, reason, run).await,
        TaskAction::Resume => resume(api, access, task, run).await,
        TaskAction::Retry => retry(api, access, task, run).await,
        TaskAction::SetPriority { priority } => set_priority(api, access, task, *priority, run).await,
    };
    let mut result = done.unwrap_or_else(|error| failed(Some(task), number, error));
    result.number = result.number.or(number);
    if request.dry_run && result.outcome == BulkOutcome::Done {
        result.outcome = BulkOutcome::WouldChange;
    }
    result
}

fn unknown(key: &str) -> BulkResult {
    refused(None, None, unknown_message(key))
}

/// The result for a task whose state is not known.
fn refused(id: Option<TaskId>, number: Option<TaskNumber>, message: String) -> BulkResult {
    BulkResult { id, number, state: None, retried_by: None, outcome: BulkOutcome::Refused, message }
}

fn failed(id: Option<TaskId>, number: Option<TaskNumber>, error: StoreError) -> BulkResult {
    tracing::warn!(%error, cause = ?std::error::Error::source(&error), "an action on a task failed");
    let name = number.map_or_else(|| "the task".to_owned(), |number| number.to_string());
    let message = match error.may_retry() {
        true => format!("{name} could not be changed now: retry in a moment"),
        false => format!("{name} could not be changed: the cause is in the scheduler's log"),
    };
    BulkResult { id, number, state: None, retried_by: None, outcome: BulkOutcome::Failed, message }
}

/// The result for a task that exists.
fn result(task: TaskId, number: TaskNumber, state: TaskState, outcome: BulkOutcome, message: String) -> BulkResult {
    BulkResult { id: Some(task), number: Some(number), state: Some(state), retried_by: None, outcome, message }
}

/// "is", or what it would be after a dry run.
fn becomes(run: Run) -> &'static str {
    match run {
        Run::Commit => "is",
        Run::Dry => "would be",
    }
}

async fn cancel(api: &Api, access: &Access, task: TaskId, reason: &str, run: Run) -> Result<BulkResult, StoreError> {
    let state = TaskState::Cancelled;
    Ok(match api.store.cancel(task, &access.author(reason), run).await? {
        Cancelled::Done { number, hints } => {
            api.send_hints(hints, run).await;
            result(task, number, state, BulkOutcome::Done, format!("{number} {} cancelled", becomes(run)))
        }
        Cancelled::Already { number } => {
            result(task, number, state, BulkOutcome::Unchanged, format!("{number} is cancelled already"))
        }
        Cancelled::TooLate { number, state, reason } => {
            result(task, number, state, BulkOutcome::Refused, too_late_to_cancel(number, &reason))
        }
        Cancelled::Unknown => unknown(&task.to_string()),
    })
}

async fn pause(api: &Api, access: &Access, task: TaskId, reason: &str, run: Run) -> Result<BulkResult, StoreError> {
    Ok(match api.store.pause(task, &access.author(reason), run).await? {
        PauseOutcome::Done { number, hints } => {
            api.send_hints(hints, run).await;
            let message = format!("{number} {} paused", becomes(run));
            result(task, number, TaskState::Paused, BulkOutcome::Done, message)
        }
        PauseOutcome::AfterStep { number } => {
            let state = TaskState::Running;
            let message = match run {
                Run::Commit => format!("{number} is {state}: {AFTER_STEP}"),
                Run::Dry => format!("{number} would be paused after the running step"),
            };
            result(task, number, state, BulkOutcome::Done, message)
        }
        PauseOutcome::Already { number, state: state @ TaskState::Paused } => {
            result(task, number, state, BulkOutcome::Unchanged, format!("{number} is paused already"))
        }
        PauseOutcome::Already { number, state } => result(
            task,
            number,
            state,
            BulkOutcome::Unchanged,
            format!("{number} is {state}: {}", requested_already(state)),
        ),
        PauseOutcome::Refused { number, state } => {
            result(task, number, state, BulkOutcome::Refused, not_pausable(number, state))
        }
        PauseOutcome::Unknown => unknown(&task.to_string()),
    })
}

async fn resume(api: &Api, access: &Access, task: TaskId, run: Run) -> Result<BulkResult, StoreError> {
    Ok(match api.store.resume(task, &access.actor(), run).await? {
        ResumeOutcome::Done { number, state, hints } => {
            api.send_hints(hints, run).await;
            result(task, number, state, BulkOutcome::Done, format!("{number} {} {state}", becomes(run)))
        }
        ResumeOutcome::Withdrawn { number, state } => {
            let message = match run {
                Run::Commit => format!("{number} is {state}: {WITHDRAWN}"),
                Run::Dry => format!("the requested pause of {number} would be withdrawn"),
            };
            result(task, number, state, BulkOutcome::Done, message)
        }
        ResumeOutcome::NotPaused { number, state } => {
            let message = format!("{number} is {state}: only a paused task can be resumed");
            result(task, number, state, BulkOutcome::Refused, message)
        }
        ResumeOutcome::Unknown => unknown(&task.to_string()),
    })
}

async fn retry(api: &Api, access: &Access, task: TaskId, run: Run) -> Result<BulkResult, StoreError> {
    let _permit = match api.open_tasks.admit(&api.store, access, 1).await? {
        Ok(permit) => permit,
        // The reply to an earlier request may have been lost.
        Err(refusal) => match api.store.retry(task, access.token_id(), Run::Dry).await? {
            RetryOutcome::Already { number, state, by } => return Ok(retried_already(task, number, state, by)),
            RetryOutcome::Done { .. } | RetryOutcome::Refused { .. } | RetryOutcome::Unknown => {
                return Ok(refused(Some(task), None, refusal.message().to_owned()));
            }
        },
    };
    Ok(match api.store.retry(task, access.token_id(), run).await? {
        RetryOutcome::Done { number, state, new } => {
            let message = match new {
                Some((_, new)) => {
                    api.open_tasks.on_created().await;
                    api.link.on_new_task();
                    format!("{number} is retried by {new}")
                }
                None => format!("{number} would be retried"),
            };
            let retried_by = new.map(|(_, new)| new);
            BulkResult { retried_by, ..result(task, number, state, BulkOutcome::Done, message) }
        }
        RetryOutcome::Already { number, state, by } => retried_already(task, number, state, by),
        RetryOutcome::Refused { number, state } => {
            let message = match state {
                TaskState::Merged => format!("{number} is {state}: submit a new task instead"),
                _ => format!("{number} is {state}: only failed, cancelled and accepted tasks can be retried"),
            };
            result(task, number, state, BulkOutcome::Refused, message)
        }
        RetryOutcome::Unknown => unknown(&task.to_string()),
    })
}

fn retried_already(task: TaskId, number: TaskNumber, state: TaskState, by: TaskNumber) -> BulkResult {
    let message = format!("{number} is retried by {by} already");
    BulkResult { retried_by: Some(by), ..result(task, number, state, BulkOutcome::Unchanged, message) }
}

async fn set_priority(
    api: &Api,
    access: &Access,
    task: TaskId,
    priority: Priority,
    run: Run,
) -> Result<BulkResult, StoreError> {
    Ok(match api.store.set_priority(task, priority, &access.actor(), run).await? {
        PriorityOutcome::Done { number, state, from, hints } => {
            api.send_hints(hints, run).await;
            let message = match run {
                Run::Commit => format!("{number} has priority {priority} now, before {from}"),
                Run::Dry => format!("{number} would have priority {priority}, has {from}"),
            };
            result(task, number, state, BulkOutcome::Done, message)
        }
        PriorityOutcome::Already { number, state } => {
            result(task, number, state, BulkOutcome::Unchanged, format!("{number} has priority {priority} already"))
        }
        PriorityOutcome::Ended { number, state } => {
            result(task, number, state, BulkOutcome::Refused, ended(number, state))
        }
        PriorityOutcome::Unknown => unknown(&task.to_string()),
    })
}
