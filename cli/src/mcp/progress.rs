//! `get_progress_summary`: the state of a task, at once or after the next change.

use std::time::{Duration, Instant};

use cfq_proto::client::{Client, ClientError};
use cfq_proto::event::{Event, EventBody};
use cfq_proto::http::{EscalationView, IterationView, JobSummary, TaskDetail};
use cfq_proto::ids::TaskKey;
use cfq_proto::job::JobState;
use cfq_proto::loop_step::Decision;
use cfq_proto::task::TaskState;
use rmcp::model::ProgressNotificationParam;
use rmcp::service::{RequestContext, RoleServer};

use super::access::Access;
use super::arguments::{GetProgressSummary, Verbosity};
use super::error::ToolError;
use super::replies::{Delivered, IterationScore, ModelCall, OpenQuestion, Progress, ProgressTexts, Review};
use super::submission::tasks_before;
use crate::commands::watch::waits_for_user;
use crate::output;

/// Maximum time of one wait. Clients end a call without a reply after a minute.
const MAX_WAIT_S: f64 = 45.0;
/// Interval of the requests for new events.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Interval of the progress notifications while nothing changes.
const NOTIFY_INTERVAL: Duration = Duration::from_secs(5);

/// `get_progress_summary`.
pub async fn get(
    access: &Access,
    arguments: GetProgressSummary,
    context: &RequestContext<RoleServer>,
) -> Result<Progress, ToolError> {
    let wait_s = super::arguments::in_range("wait_s", Some(arguments.wait_s), (0.0, MAX_WAIT_S), 0.0)?;
    let client = access.client()?;
    let task = arguments.session_id.0;
    // The events are read before the details, so that no change between the two requests is missed by the next wait.
    let mut seen = Seen::new(arguments.after_event);
    let changed_before = seen.read(&client, task).await?;
    let mut detail = client.task(task).await?;
    if wait_s > 0.0 && !changed_before && !is_settled(&detail) {
        let wait = Wait { access, task, context, began: Instant::now(), limit: Duration::from_secs_f64(wait_s) };
        wait.for_change(&mut seen).await?;
        detail = access.client()?.task(task).await?;
    }
    let tasks_before = place_in_line(&client, &detail).await;
    Ok(summary(&detail, arguments.verbosity, seen.last, tasks_before))
}

/// The state of a task, without a wait.
pub async fn now(client: &Client, task: TaskKey, verbosity: Verbosity) -> Result<Progress, ToolError> {
    let mut seen = Seen::new(None);
    seen.read(client, task).await?;
    let detail = client.task(task).await?;
    let tasks_before = place_in_line(client, &detail).await;
    Ok(summary(&detail, verbosity, seen.last, tasks_before))
}

/// Number of tasks that start before this one, if it waits for a free place.
async fn place_in_line(client: &Client, detail: &TaskDetail) -> Option<u64> {
    match detail.summary.state {
        TaskState::Ready => tasks_before(client, TaskKey::Id(detail.summary.id)).await,
        _ => None,
    }
}

/// True if the task has ended or waits for a decision: it does not change by itself.
fn is_settled(detail: &TaskDetail) -> bool {
    detail.summary.state.is_settled() || waits_for_user(detail)
}

/// The events that were read so far.
struct Seen {
    /// Number of the last event that was read; 0 before the first request.
    last: i64,
    /// Number of the last event that the caller knows.
    known: Option<i64>,
}

impl Seen {
    fn new(known: Option<i64>) -> Self {
        Self { last: 0, known }
    }

    /// Reads new events; true if one of them is a change. Without a known event, those of the first request are none.
    async fn read(&mut self, client: &Client, task: TaskKey) -> Result<bool, ClientError> {
        let first = self.last == 0;
        let after = if first { self.known.unwrap_or(0) } else { self.last };
        let events = client.events(task, after).await?.events;
        self.last = events.last().map_or(after, |event| event.task_seq);
        Ok(events.iter().any(is_change) && !(first && self.known.is_none()))
    }
}

/// True if the caller wants to know: each attempt of a model call is not reported.
fn is_change(event: &Event) -> bool {
    match &event.body {
        EventBody::TaskSubmitted
        | EventBody::TaskStateChanged { .. }
        | EventBody::StepCommitted { .. }
        | EventBody::QuestionOpened { .. }
        | EventBody::QuestionAnswered { .. } => true,
        EventBody::JobChanged { state, .. } => matches!(state, JobState::Failed | JobState::Dead),
        EventBody::PriorityChanged { .. } | EventBody::RunnerChanged { .. } | EventBody::RunnerActivity { .. } => false,
    }
}

/// A wait for a change of a task.
struct Wait<'c> {
    access: &'c Access,
    task: TaskKey,
    context: &'c RequestContext<RoleServer>,
    began: Instant,
    limit: Duration,
}

impl Wait<'_> {
    /// Waits until something changed, the time is over or the caller gave up. A server that cannot be reached
    /// meanwhile is asked again: it may restart.
    async fn for_change(&self, seen: &mut Seen) -> Result<(), ToolError> {
        let mut notified = Instant::now();
        while let Some(rest) = self.limit.checked_sub(self.began.elapsed()).filter(|rest| !rest.is_zero()) {
            tokio::select! {
                () = self.context.ct.cancelled() => return Ok(()),
                () = tokio::time::sleep(rest.min(POLL_INTERVAL)) => {}
            }
            // A server that is not running may start again; the request after the wait reports it if it does not.
            if let Ok(client) = self.access.client() {
                match seen.read(&client, self.task).await {
                    Ok(true) => return Ok(()),
                    Ok(false) => {}
                    Err(ClientError::Unreachable { .. } | ClientError::Refused { status: 429 | 503, .. }) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            if notified.elapsed() >= NOTIFY_INTERVAL {
                notified = Instant::now();
                self.notify().await;
            }
        }
        Ok(())
    }

    /// Tells a client that asked for it that the call is alive; many extend their time limit then.
    async fn notify(&self) {
        let Some(token) = self.context.meta.get_progress_token() else { return };
        let progress = ProgressNotificationParam::new(token, self.began.elapsed().as_secs_f64())
            .with_total(self.limit.as_secs_f64())
            .with_message(format!("no change of {} yet", self.task));
        // If the client is gone, the call ends with the connection.
        drop(self.context.peer.notify_progress(progress).await);
    }
}

fn summary(detail: &TaskDetail, verbosity: Verbosity, last_event: i64, tasks_before: Option<u64>) -> Progress {
    let task = &detail.summary;
    let question = detail.escalation.as_ref().filter(|_| !task.state.is_terminal());
    Progress {
        session_id: task.id,
        task: task.number.to_string(),
        state: task.state,
        loop_state: task.loop_state,
        ended: task.state.is_terminal(),
        needs_decision: !task.state.is_terminal() && is_settled(detail),
        iteration: task.iteration,
        max_iterations: task.max_iterations,
        best_score: task.best_score,
        quality_threshold: task.threshold,
        working_time_s: detail.active_ms as f64 / 1000.0,
        age_s: age_s(task.created_at),
        tasks_before,
        question: question.map(open_question),
        result: delivered(detail),
        iterations: match verbosity {
            Verbosity::Minimal => Vec::new(),
            Verbosity::Standard | Verbosity::Detailed => {
                detail.iterations.iter().map(|iteration| score(iteration, detail.best_iteration)).collect()
            }
        },
        model_calls: model_calls(&detail.jobs, verbosity),
        last_event,
        next_step: next_step(detail, last_event),
        untrusted_content: ProgressTexts {
            title: task.title.clone(),
            reason: detail.reason.clone(),
            question: question.map(|question| question.explanation.clone()),
            reviews: reviews(&detail.iterations, verbosity),
        },
    }
}

/// Time since `created_at`, in seconds. The clocks of two machines may differ.
pub fn age_s(created_at: f64) -> f64 {
    let now = jiff::Timestamp::now().as_millisecond() as f64 / 1000.0;
    ((now - created_at).max(0.0) * 10.0).round() / 10.0
}

pub fn open_question(escalation: &EscalationView) -> OpenQuestion {
    OpenQuestion {
        question_id: escalation.question,
        reason: escalation.reason,
        available_actions: escalation.available_actions.clone(),
        recommendation: escalation.recommendation.clone(),
    }
}

fn delivered(detail: &TaskDetail) -> Option<Delivered> {
    let branch = detail.delivered_branch.clone()?;
    let repo = detail.spec.repo.clone();
    let merge_command = format!("git -C {} merge {branch}", output::shell_word(&repo));
    Some(Delivered { repo, branch, commit: detail.delivered_commit.clone(), merge_command })
}

fn score(iteration: &IterationView, best: Option<u32>) -> IterationScore {
    IterationScore {
        iteration: iteration.iteration,
        score: iteration.review.as_ref().map(|review| review.quality_score),
        best: best == Some(iteration.iteration),
        quarantine: iteration.quarantine,
        decision: iteration.decided.as_ref().map(|decided| {
            let word = match decided.decision {
                Decision::Converged => "converged",
                Decision::ReviewComplete => "reviewed",
                Decision::Revise => "revise",
                Decision::Escalate { .. } => "escalate",
                Decision::Fail { .. } => "fail",
            };
            word.to_owned()
        }),
    }
}

fn reviews(iterations: &[IterationView], verbosity: Verbosity) -> Vec<Review> {
    let first = match verbosity {
        Verbosity::Minimal => iterations.len(),
        Verbosity::Standard => iterations.len().saturating_sub(1),
        Verbosity::Detailed => 0,
    };
    let review = |iteration: &IterationView| Review {
        iteration: iteration.iteration,
        review: iteration.review.clone(),
        findings: iteration.findings.iter().map(ToString::to_string).collect(),
    };
    iterations[first..].iter().map(review).filter(|r| r.review.is_some() || !r.findings.is_empty()).collect()
}

fn model_calls(jobs: &[JobSummary], verbosity: Verbosity) -> Vec<ModelCall> {
    let is_listed = |job: &&JobSummary| match verbosity {
        Verbosity::Minimal => false,
        Verbosity::Standard => !matches!(job.state, JobState::Done | JobState::Cancelled),
        Verbosity::Detailed => true,
    };
    let call = |job: &JobSummary| ModelCall {
        agent: job.role.to_string(),
        model: job.model.to_string(),
        state: job.state.to_string(),
        node: job.node.as_ref().map(ToString::to_string),
        attempts: job.attempt,
        seconds: job.usage.as_ref().map(|usage| usage.total_ms as f64 / 1000.0),
        output_tokens: job.usage.as_ref().map(|usage| usage.output_tokens),
    };
    jobs.iter().filter(is_listed).map(call).collect()
}

/// What the caller does next, as text.
fn next_step(detail: &TaskDetail, last_event: i64) -> String {
    let (number, state) = (detail.summary.number, detail.summary.state);
    match state {
        TaskState::Merged | TaskState::Accepted if detail.delivered_branch.is_some() => {
            "read the diff with get_artifact, then merge the branch with merge_command".to_owned()
        }
        TaskState::Merged | TaskState::Accepted => {
            format!("read the diff with get_artifact; `cfq pull {number}` creates a branch with it")
        }
        TaskState::Reviewed => "read the review in untrusted_content.reviews".to_owned(),
        TaskState::Failed | TaskState::Cancelled => {
            format!("read the reason; `cfq retry {number}` submits the task again, as a new one")
        }
        TaskState::Escalated | TaskState::WaitingOnHuman => {
            "call resolve_escalation with one of available_actions, or ask the user".to_owned()
        }
        TaskState::Paused => format!("a user paused it: ask the user; `cfq resume {number}` continues it"),
        TaskState::Blocked if waits_for_user(detail) => {
            format!(
                "a task that it depends on failed or was cancelled: retry that one, or call cancel_task for {number}"
            )
        }
        TaskState::Queued | TaskState::Blocked | TaskState::Ready | TaskState::Running => {
            format!("call get_progress_summary again with wait_s 45 and after_event {last_event}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_waits_for_steps_and_not_for_attempts() {
        let event = |body: EventBody| Event {
            id: 1,
            task: cfq_proto::ids::TaskId::fresh(),
            number: cfq_proto::ids::TaskNumber(1),
            task_seq: 1,
            at: 0.0,
            body,
        };
        let reason = String::new();
        let changed = EventBody::TaskStateChanged { from: TaskState::Ready, to: TaskState::Running, reason };
        assert!(is_change(&event(changed)));
        let (runner, change) = ("r".to_owned(), cfq_proto::event::RunnerChange::Granted);
        assert!(!is_change(&event(EventBody::RunnerChanged { runner, attempt: 1, change })));
    }
}
