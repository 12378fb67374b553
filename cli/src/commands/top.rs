//! `cfq top`: a live view of the nodes, the tasks and the model calls, for a terminal.

mod view;

use std::time::Duration;

use cfq_proto::client::{Client, ClientError};
use cfq_proto::http::{ClusterStatus, JobFilter, JobListItem, NodeView, TaskQuery, TaskSort, TaskSummary};
use cfq_proto::job::JobState;
use cfq_proto::task::TaskState;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};

use crate::connect;
use crate::exit::{self, Code};
use crate::output::Output;

/// Interval of the requests to the server.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);
/// Interval at which the reading thread notices that the view has ended.
const INPUT_INTERVAL: Duration = Duration::from_millis(250);
/// Maximum number of tasks, and of model calls of each state, that are shown.
const MAX_SHOWN: u32 = 100;

/// What the view shows.
#[derive(Debug, Clone, PartialEq)]
struct Snapshot {
    status: ClusterStatus,
    nodes: Vec<NodeView>,
    /// Running tasks, then ready ones, each by priority.
    tasks: Vec<TaskSummary>,
    /// Running calls, then waiting ones.
    calls: Vec<JobListItem>,
}

/// What the user does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Input {
    /// The size of the terminal changed.
    Resize,
    Quit,
    /// Ctrl-C.
    Interrupt,
}

pub async fn run(client: &Client, out: Output) -> anyhow::Result<Code> {
    use std::io::IsTerminal;
    if out.json || !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        return Err(exit::usage(
            "`cfq top` needs a terminal: in scripts use `cfq status`, `cfq nodes`, `cfq ls` and `cfq jobs`, with --json \
             for JSON",
        ));
    }
    // The first error is reported before the terminal changes.
    let first = fetch(client).await?;
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    let mut terminal =
        ratatui::try_init().map_err(|error| exit::failed(format!("cannot use this terminal: {error}")))?;
    let ended = tokio::select! {
        ended = show(client, first, &mut terminal) => ended,
        _ = terminate.recv() => Ok(Code::Interrupted),
        _ = tokio::signal::ctrl_c() => Ok(Code::Interrupted),
    };
    ratatui::restore();
    ended
}

async fn show(
    client: &Client,
    mut snapshot: Snapshot,
    terminal: &mut ratatui::DefaultTerminal,
) -> anyhow::Result<Code> {
    let mut error = None;
    let mut inputs = read_inputs();
    let mut refreshed = std::pin::pin!(refresh(client));
    loop {
        terminal.draw(|frame| view::draw(frame, &snapshot, error.as_deref()))?;
        // The keys are read while a server does not respond.
        tokio::select! {
            fetched = &mut refreshed => {
                match fetched {
                    Ok(newer) => (snapshot, error) = (newer, None),
                    Err(failed) => error = Some(connect::describe_error(&failed)),
                }
                refreshed.set(refresh(client));
            }
            input = inputs.recv() => match input {
                Some(Ok(Input::Resize)) => {}
                Some(Ok(Input::Quit)) => return Ok(Code::Done),
                Some(Ok(Input::Interrupt)) => return Ok(Code::Interrupted),
                Some(Err(failed)) => return Err(exit::failed(format!("cannot read from this terminal: {failed}"))),
                None => return Ok(Code::Done),
            },
        }
    }
}

/// Reads the terminal in a thread, which ends soon after the receiver is dropped.
fn read_inputs() -> tokio::sync::mpsc::Receiver<std::io::Result<Input>> {
    let (sender, receiver) = tokio::sync::mpsc::channel(16);
    std::thread::spawn(move || {
        while !sender.is_closed() {
            let Some(input) = next_input().transpose() else { continue };
            let is_last = input.is_err();
            if sender.blocking_send(input).is_err() || is_last {
                return;
            }
        }
    });
    receiver
}

/// The next input that has a meaning; none if there is none for some time.
fn next_input() -> std::io::Result<Option<Input>> {
    if !event::poll(INPUT_INTERVAL)? {
        return Ok(None);
    }
    Ok(match event::read()? {
        Event::Key(key) if key.kind == KeyEventKind::Press => match key.code {
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => Some(Input::Interrupt),
            KeyCode::Char('q') | KeyCode::Esc => Some(Input::Quit),
            _ => None,
        },
        Event::Resize(..) => Some(Input::Resize),
        _ => None,
    })
}

async fn refresh(client: &Client) -> Result<Snapshot, ClientError> {
    tokio::time::sleep(REFRESH_INTERVAL).await;
    fetch(client).await
}

async fn fetch(client: &Client) -> Result<Snapshot, ClientError> {
    let tasks = |states| TaskQuery { states, sort: TaskSort::Priority, limit: MAX_SHOWN, ..TaskQuery::default() };
    let calls = |state| JobFilter { states: vec![state], limit: MAX_SHOWN, ..JobFilter::default() };
    let (running, ready) = (tasks(vec![TaskState::Running]), tasks(vec![TaskState::Ready]));
    let (generating, queued) = (calls(JobState::Running), calls(JobState::Queued));
    let (status, nodes, running, ready, generating, queued) = tokio::try_join!(
        client.status(),
        client.nodes(),
        client.list_tasks(&running),
        client.list_tasks(&ready),
        client.jobs(&generating),
        client.jobs(&queued),
    )?;
    let tasks = running.tasks.into_iter().chain(ready.tasks).collect();
    let calls = generating.jobs.into_iter().chain(queued.jobs).collect();
    Ok(Snapshot { status, nodes, tasks, calls })
}
