//! `cfq watch TASK`: prints the task's events and the generated text until the task finishes or waits for a human.
//!
//! The connection may break at any time, for example when another scheduler takes over; watching resumes after the last
//! event received.

mod printed_text;

use std::time::{Duration, Instant};

use cfq_proto::client::{Client, ClientError, Frame};
use cfq_proto::event::{Event, EventBody};
use cfq_proto::http::{LinkedTask, TaskDetail, TaskQuery, TokensData};
use cfq_proto::ids::TaskKey;
use cfq_proto::job::{JobRole, JobState};
use cfq_proto::task::TaskState;
use futures::StreamExt;
use schemars::JsonSchema;
use serde::Serialize;

use crate::args::WatchArgs;
use crate::commands::describe::{Detail, describe};
use crate::exit::{self, Code};
use crate::live::{ReviewLines, Screen};
use crate::output::{self, Output};
use printed_text::PrintedText;

/// Time without a connection after which watching ends with an error.
pub const RECONNECT_TIMEOUT: Duration = Duration::from_secs(60);
/// Time without events after which the server is asked why a call is still queued.
const REASON_QUERY_DELAY: Duration = Duration::from_secs(1);

/// Runs [`follow`] until the task finishes or waits for a human, or until a signal ends the watch. The signal does not
/// affect the task.
pub async fn run(
    client: &Client,
    out: Output,
    task: TaskKey,
    seen: i64,
    options: WatchOptions,
) -> anyhow::Result<Code> {
    let first_request = async {
        // A server that was never reached is probably not running; `follow` waits for one that went away.
        let is_review = client.task(task).await?.spec.review.is_some();
        let code = follow(client, out, task, seen, options).await?;
        // Only for a hint.
        let is_needed = code == Code::Done && !out.json;
        let branch = if is_needed { client.task(task).await.ok().and_then(|task| task.delivered_branch) } else { None };
        Ok((code, is_review, branch))
    };
    let (code, is_review, branch) = until_signalled(task, first_request).await?;
    out.status(&match code {
        Code::NeedsHuman => {
            format!("the task needs a human: `cfq resolve {task}` prints the question and the answers, `cfq show {task}` all details")
        }
        Code::Done if is_review => format!("read the review: cfq show {task}"),
        Code::Done => {
            let merge = branch.map(|branch| format!("\nmerge them: git merge {branch}")).unwrap_or_default();
            format!("view the changes: cfq diff {task}      details: cfq show {task}{merge}")
        }
        _ => format!("details: cfq show {task}"),
    });
    Ok(code)
}

/// What a watch shows.
#[derive(Debug, Clone, Copy)]
pub struct WatchOptions {
    /// Whether generated text is printed.
    pub tokens: bool,
    /// Whether the critic's replies are printed in JSON, and not as lines.
    pub raw: bool,
    pub detail: Detail,
    /// False if several tasks are followed at once: then there is no status line.
    pub is_single: bool,
}

impl Default for WatchOptions {
    fn default() -> Self {
        Self { tokens: true, raw: false, detail: Detail::Short, is_single: true }
    }
}

/// Text of a model with `--json`; events have a `type` too.
#[derive(Serialize, JsonSchema)]
pub struct TokensLine<'t> {
    r#type: &'static str,
    #[serde(flatten)]
    tokens: &'t TokensData,
}

/// `cfq watch`: follows one task, or several at once.
pub async fn command(client: &Client, out: Output, args: WatchArgs) -> anyhow::Result<Code> {
    let WatchArgs { tasks, no_tokens, raw, verbose } = args;
    let options = WatchOptions { tokens: !no_tokens, raw, detail: Detail::of(verbose), is_single: true };
    match &tasks[..] {
        [] => {
            let task = newest(client).await?;
            run(client, out, task, 0, options).await
        }
        [task] => run(client, out, *task, 0, options).await,
        tasks => follow_all(client, out, tasks, options).await,
    }
}

/// Follows several tasks at once, without the generated text: that of several models would be interleaved.
pub async fn follow_all(
    client: &Client,
    out: Output,
    tasks: &[TaskKey],
    options: WatchOptions,
) -> anyhow::Result<Code> {
    let options = WatchOptions { is_single: false, tokens: options.tokens && out.json, ..options };
    let mut ids = Vec::with_capacity(tasks.len());
    for task in tasks {
        let id = TaskKey::Id(client.task(*task).await?.summary.id);
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
    let all = futures::future::try_join_all(ids.iter().map(|task| follow(client, out, *task, 0, options)));
    let codes = until_signalled_all(tasks, all).await?;
    Ok(codes.into_iter().fold(Code::Done, Code::worse))
}

/// The newest task that has not ended, else the newest.
async fn newest(client: &Client) -> anyhow::Result<TaskKey> {
    let open: Vec<TaskState> = TaskState::ALL.into_iter().filter(|state| !state.is_terminal()).collect();
    for states in [open, Vec::new()] {
        let list = client.list_tasks(&TaskQuery { states, limit: 1, ..TaskQuery::default() }).await?;
        if let Some(task) = list.tasks.first() {
            return Ok(TaskKey::Number(task.number));
        }
    }
    Err(exit::usage("no tasks; submit one with `cfq submit \"...\"`"))
}

/// Waits for `work` about a task; a signal ends the wait.
pub async fn until_signalled<T>(task: TaskKey, work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    until_signalled_all(&[task], work).await
}

async fn until_signalled_all<T>(tasks: &[TaskKey], work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let names = tasks.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
    let task = if tasks.len() == 1 { "the task continues" } else { "the tasks continue" };
    let it = if tasks.len() == 1 { "it" } else { "them" };
    tokio::select! {
        done = work => done,
        () = cfq_link::stop::signalled() => Err(exit::CodedError {
            code: Code::Interrupted,
            message: format!(
                "no longer watching; {task}: `cfq watch {names}` follows {it}, `cfq cancel {names}` cancels {it}"
            ),
        }
        .into()),
    }
}

/// Prints the events after `seen` until the task finishes or waits for a human. Returns the exit code for that state.
pub async fn follow(
    client: &Client,
    out: Output,
    task: TaskKey,
    seen: i64,
    options: WatchOptions,
) -> anyhow::Result<Code> {
    let screen = Screen::new(!out.json && options.is_single);
    let printed = PrintedText::default();
    let mut view = WatchView { out, options, printed, review: ReviewLines::default(), seen, read: 0, screen };
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
    options: WatchOptions,
    printed: PrintedText,
    /// The critic's reply that is being written.
    review: ReviewLines,
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
        if !self.options.tokens {
            return;
        }
        if self.out.json {
            if let Ok(text) = output::json(&TokensLine { r#type: "tokens", tokens }) {
                output::print_line(&text);
            }
            return;
        }
        let is_other_job = !self.printed.is_of(tokens.job);
        let (separator, new) = self.printed.take_new_text(tokens);
        if tokens.role == JobRole::Beta && !self.options.raw {
            if is_other_job || !separator.is_empty() {
                self.review = ReviewLines::default();
            }
            if !separator.is_empty() {
                let line_end = if self.screen.is_in_text() { "\n" } else { "" };
                self.screen.append_text(tokens.role, &format!("{line_end}{}", separator.trim()));
            }
            for line in self.review.push(&new) {
                let line_end = if self.screen.is_in_text() { "\n" } else { "" };
                self.screen.append_text(tokens.role, &format!("{line_end}{}", output::sanitize(&line)));
            }
            return;
        }
        if !separator.is_empty() {
            let separator = if self.screen.is_in_text() { separator } else { separator.trim_start() };
            self.screen.append_text(tokens.role, separator);
        }
        if !new.is_empty() {
            self.screen.append_text(tokens.role, &output::sanitize(&new));
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
        if let EventBody::JobChanged { role: JobRole::Beta, state: JobState::Done, .. } = &event.body {
            // A reply that is no report is printed as it is.
            let review = std::mem::take(&mut self.review);
            if !review.found && !review.text().is_empty() {
                self.screen.append_text(JobRole::Beta, &output::sanitize(review.text()));
            }
        }
        if let Some(text) = describe(&event.body, self.options.detail) {
            self.screen.print_line(&event.number.to_string(), &output::sanitize(&text));
        }
    }
}
