//! The process's side: answers one request and ends.

use std::io::{BufRead, BufReader, Write};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use super::client::STOP_GRACE;
use super::messages::{Message, Order, Request};
use super::sandbox::{forbid_system_calls, limit_resources, restrict_files};
use crate::workstream::deliver::{DeliveryRecorder, deliver_within};
use crate::workstream::delivery_record::EarlierDelivery;
use crate::workstream::error::{GitError, io_context};
use crate::workstream::map_of_commit::Parsers;
use crate::workstream::mirror::Mirror;
use crate::workstream::size_limits::{SizeLimits, StopCondition};
use crate::workstream::source::head_commit;

/// Answers the request on standard input: the whole work of the process that
/// [`RepositoryAccess`](super::RepositoryAccess) starts. Must be called before any thread is started.
///
/// # Errors
/// An I/O error if the request cannot be read, the limits cannot be set, or the reply cannot be written.
pub fn serve_repository_access() -> std::io::Result<()> {
    limit_resources()?;
    let mut input = BufReader::new(std::io::stdin());
    let mut line = String::new();
    input.read_line(&mut line)?;
    let Order { within_ms, request } = serde_json::from_str(&line)?;
    let has_landlock = match restrict_files(&request) {
        Ok(restricted) => restricted,
        Err(error) => return send(&error.into()),
    };
    let (stop, guard) = StopCondition::after(within_ms.map_or(Duration::MAX, Duration::from_millis));
    let (sender, confirmations) = sync_channel(1);
    std::thread::Builder::new().name("stop".into()).spawn(move || {
        // Ends when the runner closes the pipe or dies.
        for line in input.lines() {
            if line.is_err() || sender.send(()).is_err() {
                break;
            }
        }
        drop((sender, guard));
        std::thread::sleep(STOP_GRACE);
        std::process::exit(1);
    })?;
    let parsers = matches!(request, Request::RepoMap(_)).then(Parsers::start).transpose()?;
    let has_seccomp = forbid_system_calls()?;
    send(&Message::Started { has_landlock, has_seccomp })?;
    let reply = answer(request, confirmations, parsers, &stop).unwrap_or_else(Message::from);
    send(&reply)
}

fn send(message: &Message) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    let mut output = std::io::stdout();
    output.write_all(&line)?;
    output.flush()
}

fn answer(
    request: Request,
    confirmations: Receiver<()>,
    parsers: Option<Parsers>,
    stop: &StopCondition,
) -> Result<Message, GitError> {
    match request {
        Request::Head { repository } => head_commit(&repository).map(|commit| Message::Done { commit }),
        Request::Copy { repository, data_dir, commit } => {
            let mirror = Mirror::open(&data_dir, &repository)?;
            mirror.copy_base(&commit, &SizeLimits::default(), stop).map(|()| Message::Done { commit })
        }
        Request::Deliver { request, is_recorded, earlier } => {
            let recorder = RunnerRecorder { earlier, confirmations };
            let recorder = Some(&recorder as &dyn DeliveryRecorder).filter(|_| is_recorded);
            deliver_within(&request, recorder, stop).map(Message::from)
        }
        Request::StartPoint(request) => request.find().map(Message::StartPoint),
        Request::ReviewRange(request) => request.find().map(Message::ReviewRange),
        Request::Folder(request) => request.answer().map(Message::Folder),
        Request::Uncommitted(request) => request.count().map(|files| Message::Uncommitted { files }),
        Request::RepoMap(request) => {
            let parsers = match parsers {
                Some(parsers) => parsers,
                None => io_context("start threads", Parsers::start())?,
            };
            request.answer(&parsers, stop).map(Message::RepoMap)
        }
    }
}

/// Records a delivery through the runner.
struct RunnerRecorder {
    earlier: Option<EarlierDelivery>,
    confirmations: Receiver<()>,
}

impl RunnerRecorder {
    /// Waits until the runner has acted on the message.
    fn step(&self, message: &Message) -> Result<(), GitError> {
        io_context("report to the runner", send(message))?;
        let gone = |_| GitError::Cancelled { operation: "deliver".to_owned() };
        self.confirmations.recv().map_err(gone)
    }
}

impl DeliveryRecorder for RunnerRecorder {
    fn earlier(&self) -> Result<Option<EarlierDelivery>, GitError> {
        Ok(self.earlier.clone())
    }

    fn record(&self, git_dir: String, branch: String, commit: String, created: bool) -> Result<(), GitError> {
        self.step(&Message::Record { git_dir, branch, commit, created })
    }

    fn locked(&self) -> Result<(), GitError> {
        self.step(&Message::Locked)
    }
}
