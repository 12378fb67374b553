//! `cfq watch TASK`: its events and the text as it is generated, until it rests.
//!
//! The connection may break at any time (a scheduler dies, another answers); watching goes on after the last event seen.

use std::ops::Range;
use std::time::{Duration, Instant};

use cfq_proto::client::{Client, ClientError, Frame};
use cfq_proto::event::{Event, EventBody};
use cfq_proto::http::TokensData;
use cfq_proto::ids::{JobId, TaskKey};
use cfq_proto::job::JobState;
use cfq_proto::looping::{Decision, Step};
use cfq_proto::task::TaskState;
use futures::StreamExt;

use crate::exit::{self, Code};
use crate::live::Screen;
use crate::output::{self, Output};

/// Away for longer than this, the server is not coming back by itself.
const PATIENCE: Duration = Duration::from_secs(60);
/// A call that waited this long without news is asked why.
const QUIET: Duration = Duration::from_secs(1);

/// [`follow`] for somebody who may leave at any time; the task goes on without them.
pub async fn run(client: &Client, out: Output, task: TaskKey, seen: i64, tokens: bool) -> anyhow::Result<Code> {
    let code = tokio::select! {
        code = follow(client, out, task, seen, tokens) => code?,
        () = cfq_link::stop::signalled() => return Err(exit::Coded {
            code: Code::Interrupted,
            message: format!("no longer watching; the task goes on: `cfq watch {task}` follows it, `cfq cancel {task}` ends it"),
        }
        .into()),
    };
    out.talk(&match code {
        Code::NeedsHuman => format!("it needs you: `cfq show {task}` says why, and what can be done"),
        Code::Done => format!("look at it: cfq diff {task}      all of it: cfq show {task}"),
        _ => format!("what happened: cfq show {task}"),
    });
    Ok(code)
}

/// Shows what came after event `seen`. Returns the code of the state the task rests in.
pub async fn follow(client: &Client, out: Output, task: TaskKey, seen: i64, tokens: bool) -> anyhow::Result<Code> {
    let mut view = View { out, tokens, shown: Shown::default(), seen, read: 0, screen: Screen::new(!out.json) };
    let mut away_since: Option<Instant> = None;
    loop {
        match once(client, task, &mut view, &mut away_since).await {
            Ok(Some(state)) => return Ok(exit::of_state(state)),
            Ok(None) | Err(ClientError::Unreachable { .. }) => {}
            Err(ClientError::Refused { status: 503, .. }) => {}
            Err(error) => return Err(error.into()),
        }
        view.screen.progress.away = true;
        let since = *away_since.get_or_insert_with(Instant::now);
        if since.elapsed() > PATIENCE {
            return Err(exit::unreachable(format!(
                "lost the server while watching {task}; the task is safe: `cfq watch {task}` goes on when the server is back"
            )));
        }
        view.screen.during(tokio::time::sleep(Duration::from_millis(300))).await;
    }
}

async fn once(
    client: &Client,
    task: TaskKey,
    view: &mut View,
    away_since: &mut Option<Instant>,
) -> Result<Option<TaskState>, ClientError> {
    // What it is now, so that a task that rested long ago ends the watch after its past was shown.
    let detail = view.screen.during(client.task(task)).await?;
    *away_since = None;
    view.screen.progress.away = false;
    view.screen.progress.of(detail.summary.number, detail.summary.max_iterations);
    let past = view.screen.during(client.events(task, view.read)).await?;
    let mut state = detail.summary.state;
    for event in past.events {
        if let EventBody::TaskStateChanged { to, .. } = &event.body {
            state = *to;
        }
        view.event(&event);
    }
    if detail.summary.state.is_resting() {
        return Ok(Some(detail.summary.state));
    }
    // It came to rest between the two answers: the event was among these, and the feed does not say it again.
    if state.is_resting() {
        let now = view.screen.during(client.task(task)).await?.summary.state;
        if now.is_resting() {
            return Ok(Some(now));
        }
    }
    let frames = view.screen.during(client.watch(task, view.read)).await?;
    let mut frames = std::pin::pin!(frames);
    loop {
        let quiet = tokio::time::timeout(QUIET, view.screen.during(frames.next())).await;
        let frame = match quiet {
            Ok(Some(frame)) => frame,
            Ok(None) => return Ok(None),
            Err(_) => {
                if view.screen.is_live() && view.screen.progress.is_waiting() {
                    let detail = view.screen.during(client.task(task)).await?;
                    view.screen.progress.explain(&detail.jobs);
                }
                continue;
            }
        };
        *away_since = None;
        match frame? {
            Frame::Event(event) if event.task_seq > view.read => {
                view.event(&event);
                if let EventBody::TaskStateChanged { to, .. } = &event.body
                    && to.is_resting()
                {
                    return Ok(Some(*to));
                }
            }
            Frame::Event(_) => {}
            Frame::Tokens(tokens) => view.tokens(&tokens),
        }
    }
}

struct View {
    out: Output,
    tokens: bool,
    shown: Shown,
    /// Events up to this one were seen before the watch began: they say where the run is and are not shown.
    seen: i64,
    /// The last event that was read.
    read: i64,
    screen: Screen,
}

impl View {
    fn tokens(&mut self, tokens: &TokensData) {
        self.screen.progress.tokens(tokens, self.screen.now());
        if !self.tokens {
            return;
        }
        if self.out.json {
            if let Ok(text) = serde_json::to_string(tokens) {
                output::line(&text);
            }
            return;
        }
        let (before, new) = self.shown.take(tokens);
        if !before.is_empty() && self.screen.is_in_text() {
            self.screen.text(tokens.role, before);
        }
        if !new.is_empty() {
            self.screen.text(tokens.role, &output::plain(new));
        }
    }

    fn event(&mut self, event: &Event) {
        self.read = event.task_seq;
        self.screen.progress.event(event);
        if event.task_seq <= self.seen {
            return;
        }
        if self.out.json {
            if let Ok(text) = serde_json::to_string(event) {
                output::line(&text);
            }
            return;
        }
        if let Some(text) = describe(&event.body) {
            self.screen.line(&event.number.to_string(), &output::plain(&text));
        }
    }
}

/// What was shown of a job's text. An attempt that goes on where another was lost tells its text from the beginning.
#[derive(Debug, Default)]
struct Shown {
    job: Option<JobId>,
    /// Where `text` begins in the job's output, in bytes.
    from: u64,
    text: String,
}

impl Shown {
    /// What of this is new, with a word to show before it where it does not simply go on.
    fn take<'a>(&mut self, tokens: &'a TokensData) -> (&'static str, &'a str) {
        let new = tokens.text.as_str();
        if self.job != Some(tokens.job) {
            *self = Self { job: Some(tokens.job), from: tokens.offset, text: new.to_owned() };
            return ("", new);
        }
        let shown = self.from + self.text.len() as u64;
        if tokens.offset > shown {
            *self = Self { from: tokens.offset, text: new.to_owned(), ..*self };
            return (" [...] ", new);
        }
        let known = self.from.max(tokens.offset)..shown.min(tokens.offset + new.len() as u64);
        let same = known.is_empty()
            || new.as_bytes().get(within(&known, tokens.offset)) == self.text.as_bytes().get(within(&known, self.from));
        if !same || tokens.offset < self.from {
            *self = Self { from: tokens.offset, text: new.to_owned(), ..*self };
            return (if same { " [...] " } else { "\n[another attempt, which writes it differently]\n" }, new);
        }
        let rest = usize::try_from(shown - tokens.offset).ok().and_then(|at| new.get(at..)).unwrap_or("");
        self.text.push_str(rest);
        ("", rest)
    }
}

/// These bytes of an output in a text that begins at `begins` of it.
fn within(bytes: &Range<u64>, begins: u64) -> Range<usize> {
    let at = |byte: u64| usize::try_from(byte.saturating_sub(begins)).unwrap_or(usize::MAX);
    at(bytes.start)..at(bytes.end)
}

/// One line for a person, or nothing where the event only matters to machines.
pub fn describe(body: &EventBody) -> Option<String> {
    match body {
        EventBody::TaskSubmitted => Some("submitted".to_owned()),
        EventBody::TaskStateChanged { to, reason, .. } if reason.is_empty() => Some(format!("is {to}")),
        EventBody::TaskStateChanged { to, reason, .. } => Some(format!("is {to}: {reason}")),
        EventBody::StepCommitted { step, .. } => describe_step(step),
        EventBody::JobChanged { role, model, state, node, reason, failure, usage, .. } => match state {
            JobState::Queued if reason.is_empty() => None,
            JobState::Queued => Some(format!("{role} waits: {reason}")),
            JobState::Placed => {
                let node = node.as_ref().map_or("?", |n| n.as_str());
                Some(format!("{role} ({model}) goes to {node}: {reason}"))
            }
            JobState::Running => None,
            JobState::Done => usage.map(|u| {
                let resumed = match u.resumed_tokens {
                    0 => String::new(),
                    some => format!(", {some} of them kept from a lost node"),
                };
                format!(
                    "{role} done: {} tokens in {}, {:.0} tokens/s{resumed}",
                    u.output_tokens,
                    output::duration(u.total_ms),
                    u.rate()
                )
            }),
            JobState::Failed | JobState::Dead | JobState::Cancelled => {
                let why = failure.as_ref().map_or_else(|| reason.clone(), ToString::to_string);
                Some(format!("{role} {state}: {why}"))
            }
        },
        EventBody::QuestionOpened { text, .. } => Some(format!("asks: {text}")),
        EventBody::QuestionAnswered { answer, by, .. } => Some(format!("answered by {by}: {answer}")),
        EventBody::RunnerChanged { runner, what, .. } => Some(format!("{what} ({runner})")),
    }
}

fn describe_step(step: &Step) -> Option<String> {
    Some(match step {
        Step::Started { base, .. } => format!("started from {}", base.get(..12).unwrap_or(base)),
        Step::Generated { artifact } => match artifact {
            cfq_proto::blob::Carried::Inline(a) => {
                let paths: Vec<&str> = a.files.iter().map(|f| f.path.as_str()).collect();
                format!(
                    "iteration {}: wrote {}",
                    a.iteration,
                    if paths.is_empty() { "nothing usable".into() } else { paths.join(", ") }
                )
            }
            cfq_proto::blob::Carried::Blob(_) => "wrote a large artifact".to_owned(),
        },
        Step::Checked { findings, .. } if findings.is_empty() => "checks passed".to_owned(),
        Step::Checked { findings, .. } => {
            let all: Vec<String> = findings.iter().map(|f| format!("{}:{} {}", f.path, f.line, f.message)).collect();
            format!("checks found {}", all.join("; "))
        }
        Step::Reviewed { review, .. } => {
            format!("reviewed: {:.0}/100, {}", review.quality_score, output::count(review.defects.len(), "defect"))
        }
        Step::Decided { decided, .. } => match &decided.decision {
            Decision::Converged => format!("converged: {}", decided.why),
            Decision::Revise => format!("revises: {}", decided.why),
            Decision::Escalate { reason, .. } => format!("escalates ({reason}): {}", decided.why),
            Decision::Fail { reason } => format!("fails: {reason}"),
        },
        Step::Resolved { action, by } => format!("{by} resolved it: {}", action.kind().as_str()),
        Step::PrOpened { branch, .. } => format!("opened an internal pull request from {branch}"),
        Step::PrMoved { to, why } => format!("pull request {to}: {why}"),
        Step::MergeIntent { .. } => return None,
        Step::Merged { commit } => format!("merged as {}", commit.get(..12).unwrap_or(commit)),
        Step::Delivered { branch, .. } => format!("delivered as branch {branch}"),
        // What the task becomes by it says it.
        Step::HandOffHeld { .. } | Step::HandedOff { .. } => return None,
        Step::Cancelled { by } => format!("cancelled by {by}"),
    })
}

#[cfg(test)]
mod tests {
    use cfq_proto::task::Agent;

    use super::*;

    fn frame(attempt: i32, offset: u64, text: &str) -> TokensData {
        let job = "018f4a5e-0000-7000-8000-000000000001".parse().unwrap();
        TokensData { job, attempt, role: Agent::Alpha, offset, text: text.to_owned() }
    }

    #[test]
    fn what_an_attempt_repeats_is_not_shown_again_and_what_it_changes_is() {
        let mut shown = Shown::default();
        let other = TokensData { job: "018f4a5e-0000-7000-8000-000000000002".parse().unwrap(), ..frame(1, 0, "hm") };
        let seen: Vec<_> = [
            (frame(1, 0, "def ä"), ("", "def ä")),
            (frame(1, 6, "dd"), ("", "dd")),
            // Lost with its node: another tells it from the beginning, in larger pieces.
            (frame(2, 0, "def äd"), ("", "")),
            (frame(2, 7, "d(a"), ("", "(a")),
            (frame(2, 14, "b)"), (" [...] ", "b)")),
            (frame(3, 14, "c)"), ("\n[another attempt, which writes it differently]\n", "c)")),
            (frame(4, 0, "def"), (" [...] ", "def")),
            (frame(4, 3, ""), ("", "")),
            (other, ("", "hm")),
        ]
        .into();
        for (tokens, want) in &seen {
            assert_eq!(shown.take(tokens), *want, "{tokens:?}");
        }
    }
}
