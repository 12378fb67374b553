//! The prompts of a loaded model, prepared by its child process one after the other.

use std::path::PathBuf;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cfq_engine::{ModelFacts, PromptRequest, PromptTokenizer, PromptTokens};
use cfq_proto::job::JobFailure;
use cfq_proto::model::ModelId;
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::{mpsc, oneshot};

use super::client::Child;
use super::messages::{Order, Reply};
use super::{MAX_CONSECUTIVE_KILLS, Sandbox, SandboxError};

/// Maximum number of prompts that wait for the child in its queue; others wait for a place.
const MAX_QUEUED_PROMPTS: usize = 16;

type TokensReply = oneshot::Sender<Result<PromptTokens, JobFailure>>;

enum Work {
    Tokenize(PromptRequest, TokensReply),
    /// Ends the child until the next prompt, which counts as the first one.
    Release,
}

#[derive(Debug, Default)]
struct Shared {
    /// Why the model takes no more prompts.
    failure: Mutex<Option<String>>,
    /// Process id of the child; `None` while there is none.
    pid: Mutex<Option<u32>>,
}

/// Prepares the prompts of one model in a child process. A thread owns the child; it ends, with the child, when this is
/// dropped.
#[derive(Debug)]
pub struct SandboxedPrompts {
    work: mpsc::Sender<Work>,
    shared: Arc<Shared>,
}

impl Shared {
    fn failure(&self) -> MutexGuard<'_, Option<String>> {
        // Poisoning is ignored: the data is consistent even if a thread panicked while it held the lock.
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pid(&self) -> MutexGuard<'_, Option<u32>> {
        self.pid.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SandboxedPrompts {
    pub(super) fn start(sandbox: Sandbox, model: ModelId, path: PathBuf) -> Result<(Self, ModelFacts), SandboxError> {
        let failed = |source| SandboxError::Start { path: path.clone(), source };
        let (work, queue) = mpsc::channel(MAX_QUEUED_PROMPTS);
        let (ready, started) = sync_channel(1);
        let shared = Arc::new(Shared::default());
        let owner = Owner { sandbox, model, path: path.clone(), shared: shared.clone(), child: None, kills: 0 };
        let thread = std::thread::Builder::new().name("sandbox".to_owned());
        thread.spawn(move || owner.run(&ready, queue)).map_err(failed)?;
        let facts = started.recv().map_err(|gone| failed(std::io::Error::other(gone)))??;
        Ok((Self { work, shared }, facts))
    }

    /// Process id of the child; `None` while there is none.
    pub fn child(&self) -> Option<u32> {
        *self.shared.pid()
    }
}

impl PromptTokenizer for SandboxedPrompts {
    fn tokenize(&self, request: PromptRequest) -> BoxFuture<'_, Result<PromptTokens, JobFailure>> {
        async move {
            let gone = || JobFailure::Engine { reason: "the thread that prepares prompts has ended".to_owned() };
            let (reply, tokens) = oneshot::channel();
            self.work.send(Work::Tokenize(request, reply)).await.map_err(|_| gone())?;
            tokens.await.map_err(|_| gone())?
        }
        .boxed()
    }

    fn failure(&self) -> Option<String> {
        self.shared.failure().clone()
    }

    fn release(&self) {
        // If the queue is full, the child is needed.
        let _ = self.work.try_send(Work::Release);
    }
}

/// The thread that starts the child and sends it the prompts.
struct Owner {
    sandbox: Sandbox,
    model: ModelId,
    path: PathBuf,
    shared: Arc<Shared>,
    child: Option<Child>,
    /// Number of kills since the last prompt that the child has answered.
    kills: u32,
}

impl Owner {
    fn run(mut self, ready: &SyncSender<Result<ModelFacts, SandboxError>>, mut queue: mpsc::Receiver<Work>) {
        let started = self.start();
        let failed = started.is_err();
        if ready.send(started).is_err() || failed {
            return;
        }
        while let Some(work) = queue.blocking_recv() {
            match work {
                Work::Tokenize(_, reply) if reply.is_closed() => {}
                Work::Tokenize(request, reply) => {
                    let result = self.tokenize(request, &reply);
                    // The caller may have been cancelled.
                    let _ = reply.send(result);
                }
                Work::Release => {
                    self.set_child(None);
                    self.kills = 0;
                    self.shared.failure().take();
                }
            }
        }
    }

    fn start(&mut self) -> Result<ModelFacts, SandboxError> {
        let (child, facts) = Child::start(&self.sandbox, &self.path)?;
        self.set_child(Some(child));
        Ok(facts)
    }

    fn set_child(&mut self, child: Option<Child>) {
        *self.shared.pid() = child.as_ref().map(Child::pid);
        self.child = child;
    }

    fn tokenize(&mut self, request: PromptRequest, reply: &TokensReply) -> Result<PromptTokens, JobFailure> {
        if let Some(reason) = self.shared.failure().clone() {
            return Err(JobFailure::Engine { reason });
        }
        match self.exchange(request, reply) {
            Ok(Reply::Tokens(tokens)) => {
                self.kills = 0;
                Ok(tokens)
            }
            Ok(Reply::Failed(failure)) => {
                self.kills = 0;
                Err(failure)
            }
            Ok(Reply::Started { .. } | Reply::File { .. }) => Err(self.killed(&SandboxError::Cancelled)),
            Err(error) => Err(self.killed(&error)),
        }
    }

    fn exchange(&mut self, request: PromptRequest, reply: &TokensReply) -> Result<Reply, SandboxError> {
        if self.child.is_none() {
            self.start()?;
        }
        let limit = self.sandbox.limits.prompt;
        match &mut self.child {
            Some(child) => child.prompt(&Order::Tokenize(request), limit, &|| reply.is_closed()),
            None => Err(SandboxError::Cancelled),
        }
    }

    /// Ends the child after an error, and counts the error unless the caller cancelled the prompt.
    fn killed(&mut self, error: &SandboxError) -> JobFailure {
        self.set_child(None);
        let model = &self.model;
        let reason = format!("the prompt cannot be prepared for {model}: {}", crate::error_text::with_causes(error));
        if !matches!(error, SandboxError::Cancelled) {
            self.kills += 1;
            tracing::warn!(%model, reason, kills = self.kills, "the process that prepares prompts was ended");
        }
        if self.kills >= MAX_CONSECUTIVE_KILLS {
            let kills = self.kills;
            let reason = format!(
                "{kills} prompts in a row could not be prepared; the last: {reason}. To retry, run `cfq models unload \
                 {model}` and `cfq models load {model}`"
            );
            *self.shared.failure() = Some(reason);
        }
        JobFailure::Engine { reason }
    }
}
