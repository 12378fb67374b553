//! `cfq watch TASK`: prints the task's events and the generated text until the task finishes or waits for a human.
//!
//! The connection may break at any time, for example when another scheduler takes over; watching resumes after the last
//! event received.

use std::ops::Range;
use std::time::{Duration, Instant};

use cfq_proto::client::{Client, ClientError, Frame};
use cfq_proto::event::{Event, EventBody};
use cfq_proto::http::{LinkedTask, TaskDetail, TokensData};
use cfq_proto::ids::{JobId, TaskKey};
use cfq_proto::job::JobState;
use cfq_proto::loop_step::{Decision, Step};
use cfq_proto::task::TaskState;
use futures::StreamExt;

use crate::exit::{self, Code};
use crate::live::Screen;
use crate::output::{self, Output};

/// Time without a connection after which watching ends with an error.
pub const RECONNECT_TIMEOUT: Duration = Duration::from_secs(60);
/// Time without events after which the server is asked why a call is still queued.
const REASON_QUERY_DELAY: Duration = Duration::from_secs(1);

/// Runs [`follow`] until the task finishes or waits for a human, or until a signal ends the watch. The signal does not
/// affect the task.
pub async fn run(client: &Client, out: Output, task: TaskKey, seen: i64, tokens: bool) -> anyhow::Result<Code> {
    let first_request = async {
        // A server that was never reached is probably not running; `follow` waits for one that went away.
        let is_review = client.task(task).await?.spec.review.is_some();
        Ok((follow(client, out, task, seen, tokens).await?, is_review))
    };
    let (code, is_review) = until_signalled(task, first_request).await?;
    out.status(&match code {
        Code::NeedsHuman => format!("the task needs a human: see the reason and the actions with `cfq show {task}`"),
        Code::Done if is_review => format!("read the review: cfq show {task}"),
        Code::Done => format!("view the changes: cfq diff {task}      details: cfq show {task}"),
        _ => format!("details: cfq show {task}"),
    });
    Ok(code)
}

/// Waits for `work` about a task; a signal ends the wait.
pub async fn until_signalled<T>(task: TaskKey, work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::select! {
        done = work => done,
        () = cfq_link::stop::signalled() => Err(exit::CodedError {
            code: Code::Interrupted,
            message: format!(
                "no longer watching; the task continues: `cfq watch {task}` follows it, `cfq cancel {task}` cancels it"
            ),
        }
        .into()),
    }
}

/// Prints the events after `seen` until the task finishes or waits for a human. Returns the exit code for that state.
pub async fn follow(client: &Client, out: Output, task: TaskKey, seen: i64, tokens: bool) -> anyhow::Result<Code> {
    let mut view =
        WatchView { out, tokens, printed: PrintedText::default(), seen, read: 0, screen: Screen::new(!out.json) };
    let mut disconnected_since: Option<Instant> = None;
    loop {
        match watch_connection(client, task, &mut view, &mut disconnected_since).await {
            Ok(Some(state)) => return Ok(exit::of_state(state)),
            Ok(None) | Err(ClientError::Unreachable { .. }) => {}
            Err(ClientError::Refused { status: 429 | 503, .. }) => {}
            Err(error) => return Err(error.into()),
        }
        view.screen.progress.server_unreachable = true;
        let since = *disconnected_since.get_or_insert_with(Instant::now);
        if since.elapsed() > RECONNECT_TIMEOUT {
            return Err(exit::unreachable(format!(
                "lost the connection to the server while watching {task}; the task is not affected: run \
                 `cfq watch {task}` again when the server is back"
            )));
        }
        view.screen.redraw_while(tokio::time::sleep(Duration::from_millis(300))).await;
    }
}

/// Watches over one connection. Returns the state in which the task finished or waits for a human, or `None` if the
/// connection ended earlier.
async fn watch_connection(
    client: &Client,
    task: TaskKey,
    view: &mut WatchView,
    disconnected_since: &mut Option<Instant>,
) -> Result<Option<TaskState>, ClientError> {
    // If the task has already finished or waits for a human, the watch ends after its past events.
    let detail = view.screen.redraw_while(client.task(task)).await?;
    *disconnected_since = None;
    view.screen.progress.server_unreachable = false;
    view.screen.progress.set_task(detail.summary.number, detail.summary.max_iterations);
    let past = view.screen.redraw_while(client.events(task, view.read)).await?;
    let mut state = detail.summary.state;
    for event in past.events {
        if let EventBody::TaskStateChanged { to, .. } = &event.body {
            state = *to;
        }
        view.on_event(&event);
    }
    if detail.summary.state.is_settled() {
        return Ok(Some(detail.summary.state));
    }
    if view.on_waiting(&detail) {
        return Ok(Some(detail.summary.state));
    }
    // The task finished, or began to wait for a human, between the two responses: the event is among the past events,
    // and the feed does not repeat it.
    if state.is_settled() {
        let now = view.screen.redraw_while(client.task(task)).await?.summary.state;
        if now.is_settled() {
            return Ok(Some(now));
        }
    }
    let frames = view.screen.redraw_while(client.watch(task, view.read)).await?;
    let mut frames = std::pin::pin!(frames);
    loop {
        let next = tokio::time::timeout(REASON_QUERY_DELAY, view.screen.redraw_while(frames.next())).await;
        let frame = match next {
            Ok(Some(frame)) => frame,
            Ok(None) => return Ok(None),
            Err(_) => {
                if view.screen.is_live() && view.screen.progress.is_queued() {
                    let detail = view.screen.redraw_while(client.task(task)).await?;
                    view.screen.progress.set_pending_reason(&detail.jobs);
                }
                if view.screen.progress.is_waiting() {
                    let detail = view.screen.redraw_while(client.task(task)).await?;
                    if view.on_waiting(&detail) {
                        return Ok(Some(detail.summary.state));
                    }
                }
                continue;
            }
        };
        *disconnected_since = None;
        match frame? {
            Frame::Event(event) if event.task_seq > view.read => {
                view.on_event(&event);
                if let EventBody::TaskStateChanged { to, .. } = &event.body
                    && to.is_settled()
                {
                    return Ok(Some(*to));
                }
            }
            Frame::Event(_) => {}
            Frame::Tokens(tokens) => view.on_tokens(&tokens),
        }
    }
}

/// Whether the task may start only after a user has decided, because a predecessor failed or was cancelled.
pub fn waits_for_user(detail: &TaskDetail) -> bool {
    let failed = |task: &LinkedTask| matches!(task.state, TaskState::Failed | TaskState::Cancelled);
    detail.summary.state == TaskState::Blocked && detail.predecessors.iter().any(failed)
}

struct WatchView {
    out: Output,
    /// Whether generated text is printed.
    tokens: bool,
    printed: PrintedText,
    /// Number of the last event before the watch. Events up to this number only update the progress and are not
    /// printed.
    seen: i64,
    /// Number of the last event received.
    read: i64,
    screen: Screen,
}

impl WatchView {
    /// Shows why the task may not start yet. True if a user has to decide first, because a predecessor failed or was
    /// cancelled.
    fn on_waiting(&mut self, detail: &TaskDetail) -> bool {
        let reason = detail.summary.waiting_reason.as_deref().map(output::sanitize);
        if self.screen.progress.set_waiting(reason.as_deref())
            && let Some(reason) = &reason
            && !self.out.json
        {
            self.screen.print_line(&detail.summary.number.to_string(), reason);
        }
        waits_for_user(detail)
    }

    fn on_tokens(&mut self, tokens: &TokensData) {
        self.screen.progress.on_tokens(tokens, self.screen.now());
        if !self.tokens {
            return;
        }
        if self.out.json {
            if let Ok(text) = output::json(tokens) {
                output::print_line(&text);
            }
            return;
        }
        let (separator, new) = self.printed.take_new_text(tokens);
        if !separator.is_empty() && self.screen.is_in_text() {
            self.screen.append_text(tokens.role, separator);
        }
        if !new.is_empty() {
            self.screen.append_text(tokens.role, &output::sanitize(new));
        }
    }

    fn on_event(&mut self, event: &Event) {
        self.read = event.task_seq;
        self.screen.progress.on_event(event);
        if event.task_seq <= self.seen {
            return;
        }
        if self.out.json {
            if let Ok(text) = output::json(event) {
                output::print_line(&text);
            }
            return;
        }
        if let Some(text) = describe(&event.body) {
            self.screen.print_line(&event.number.to_string(), &output::sanitize(&text));
        }
    }
}

/// The printed part of a job's text. An attempt that resumes a lost attempt sends the job's text again from the
/// beginning.
#[derive(Debug, Default)]
struct PrintedText {
    job: Option<JobId>,
    /// Offset of `text` in the job's output, in bytes.
    from: u64,
    text: String,
}

impl PrintedText {
    /// Returns the part of the frame that was not printed yet, and a separator to print before it: a note that text is
    /// missing, or that a new attempt generates different text, else empty.
    fn take_new_text<'a>(&mut self, tokens: &'a TokensData) -> (&'static str, &'a str) {
        let new = tokens.text.as_str();
        if self.job != Some(tokens.job) {
            *self = Self { job: Some(tokens.job), from: tokens.offset, text: new.to_owned() };
            return ("", new);
        }
        let printed = self.from + self.text.len() as u64;
        if tokens.offset > printed {
            *self = Self { from: tokens.offset, text: new.to_owned(), ..*self };
            return (" [...] ", new);
        }
        let overlap = self.from.max(tokens.offset)..printed.min(tokens.offset + new.len() as u64);
        let same = overlap.is_empty()
            || new.as_bytes().get(relative(&overlap, tokens.offset))
                == self.text.as_bytes().get(relative(&overlap, self.from));
        if !same || tokens.offset < self.from {
            *self = Self { from: tokens.offset, text: new.to_owned(), ..*self };
            return (if same { " [...] " } else { "\n[a new attempt generates different text]\n" }, new);
        }
        let rest = usize::try_from(printed - tokens.offset).ok().and_then(|at| new.get(at..)).unwrap_or("");
        self.text.push_str(rest);
        ("", rest)
    }
}

/// Converts a byte range of the job's output to a range of a text that starts at offset `start` of that output.
fn relative(bytes: &Range<u64>, start: u64) -> Range<usize> {
    let at = |byte: u64| usize::try_from(byte.saturating_sub(start)).unwrap_or(usize::MAX);
    at(bytes.start)..at(bytes.end)
}

/// One line that describes the event for display; `None` for events that are not displayed.
pub fn describe(body: &EventBody) -> Option<String> {
    match body {
        EventBody::TaskSubmitted => Some("submitted".to_owned()),
        EventBody::TaskStateChanged { to, reason, .. } if reason.is_empty() => Some(format!("is {to}")),
        EventBody::TaskStateChanged { to, reason, .. } => Some(format!("is {to}: {reason}")),
        EventBody::StepCommitted { step, .. } => describe_step(step),
        EventBody::JobChanged { role, model, state, node, reason, failure, usage, .. } => match state {
            JobState::Queued if reason.is_empty() => None,
            JobState::Queued => Some(format!("{role} queued: {reason}")),
            JobState::Placed => {
                let node = node.as_ref().map_or("?", |n| n.as_str());
                Some(format!("{role} ({model}) placed on {node}: {reason}"))
            }
            JobState::Running => None,
            JobState::Done => usage.map(|u| {
                let resumed = match u.resumed_tokens {
                    0 => String::new(),
                    resumed => format!(", {resumed} of them from a lost attempt"),
                };
                format!(
                    "{role} done: {} tokens in {}, {:.0} tokens/s{resumed}",
                    u.output_tokens,
                    output::duration(u.total_ms),
                    u.tokens_per_second()
                )
            }),
            JobState::Failed | JobState::Dead | JobState::Cancelled => {
                let reason = failure.as_ref().map_or_else(|| reason.clone(), ToString::to_string);
                Some(format!("{role} {state}: {reason}"))
            }
        },
        EventBody::PriorityChanged { from, to, reason } => {
            Some(format!("priority changed from {from} to {to}: {reason}"))
        }
        EventBody::QuestionOpened { text, .. } => Some(format!("question: {text}")),
        EventBody::QuestionAnswered { answer, by, .. } => Some(format!("answered by {by}: {answer}")),
        EventBody::RunnerChanged { runner, change, .. } => Some(format!("{change} ({runner})")),
        EventBody::RunnerActivity { activity, .. } => Some(format!("is {activity}")),
    }
}

fn describe_step(step: &Step) -> Option<String> {
    Some(match step {
        Step::Started { base, .. } => format!("started from {}", base.get(..12).unwrap_or(base)),
        Step::Generated { artifact } => match artifact {
            cfq_proto::blob::Payload::Inline(a) => {
                let paths: Vec<&str> = a.files.iter().map(|f| f.path.as_str()).collect();
                match paths.is_empty() {
                    _ if a.job == JobId::NONE => format!("read the change of {}", paths.join(", ")),
                    true => format!("iteration {}: wrote no usable files", a.iteration),
                    false => format!("iteration {}: wrote {}", a.iteration, paths.join(", ")),
                }
            }
            cfq_proto::blob::Payload::Blob(_) => "wrote a large artifact".to_owned(),
        },
        Step::Checked { findings, ran, .. } if findings.is_empty() => {
            if ran.is_empty() {
                "checks passed".to_owned()
            } else {
                format!("checks: {}", output::check_runs(ran))
            }
        }
        Step::Checked { findings, .. } => {
            let all: Vec<String> = findings.iter().map(ToString::to_string).collect();
            format!("checks found {}", all.join("; "))
        }
        Step::Reviewed { review, .. } => {
            format!("reviewed: {:.0}/100, {}", review.quality_score, output::count(review.defects.len(), "defect"))
        }
        Step::Decided { decided, .. } => match &decided.decision {
            Decision::Converged => format!("converged: {}", decided.explanation),
            Decision::ReviewComplete => format!("reviewed: {}", decided.explanation),
            Decision::Revise => format!("revising: {}", decided.explanation),
            Decision::Escalate { reason, .. } => format!("escalated ({reason}): {}", decided.explanation),
            Decision::Fail { reason } => format!("failed: {reason}"),
        },
        Step::Resolved { action, by } => format!("resolved by {by}: {}", action.kind().as_str()),
        Step::PrOpened { branch, .. } => format!("opened an internal pull request from {branch}"),
        Step::PrMoved { to, reason } => format!("pull request {to}: {reason}"),
        Step::MergeIntent { ran, .. } if ran.is_empty() => return None,
        Step::MergeIntent { ran, .. } => format!("merge checks: {}", output::check_runs(ran)),
        Step::Merged { commit } => format!("merged as {}", commit.get(..12).unwrap_or(commit)),
        Step::Delivered { branch, .. } => format!("delivered as branch {branch}"),
        // The change of the task's state is displayed instead.
        Step::HandOffHeld { .. } | Step::HandedOff { .. } => return None,
        Step::Cancelled { by } => format!("cancelled by {by}"),
    })
}

#[cfg(test)]
mod tests {
    use cfq_proto::job::JobRole;

    use super::*;

    fn frame(attempt: i32, offset: u64, text: &str) -> TokensData {
        let job = "018f4a5e-0000-7000-8000-000000000001".parse().unwrap();
        TokensData { job, attempt, role: JobRole::Alpha, offset, text: text.to_owned() }
    }

    #[test]
    fn repeated_text_is_printed_once_and_changed_text_again() {
        let mut printed = PrintedText::default();
        let other = TokensData { job: "018f4a5e-0000-7000-8000-000000000002".parse().unwrap(), ..frame(1, 0, "hm") };
        let seen: Vec<_> = [
            (frame(1, 0, "def ä"), ("", "def ä")),
            (frame(1, 6, "dd"), ("", "dd")),
            // The node was lost: the next attempt sends the text from the beginning, in larger pieces.
            (frame(2, 0, "def äd"), ("", "")),
            (frame(2, 7, "d(a"), ("", "(a")),
            (frame(2, 14, "b)"), (" [...] ", "b)")),
            (frame(3, 14, "c)"), ("\n[a new attempt generates different text]\n", "c)")),
            (frame(4, 0, "def"), (" [...] ", "def")),
            (frame(4, 3, ""), ("", "")),
            (other, ("", "hm")),
        ]
        .into();
        for (tokens, want) in &seen {
            assert_eq!(printed.take_new_text(tokens), *want, "{tokens:?}");
        }
    }
}
