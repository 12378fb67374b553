//! A call whose client waits. When it is dropped, because the client has the result or has disconnected, the call is
//! deleted and its job cancelled.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use cfq_link::stop::Stop;
use cfq_proto::ids::{JobId, TaskId};
use cfq_proto::job::{Completion, JobFailure, JobState, PromptForm};
use cfq_proto::messages::{JobFence, TokenFrame};
use tokio::task::JoinSet;

use super::error::OpenAiError;
use super::parameters::Delivery;
use crate::api::Api;
use crate::api::access::Access;
use crate::api::error::ApiError;
use crate::api::open_limit::OpenPermit;
use crate::call_watch::{CallSignal, CallWatch};
use crate::store::{ClientCallView, NewClientCall, StoreError, limited};

/// Interval at which the database is queried even without a wake-up, which may be lost.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Interval between two checks of frames of other attempts, which a node can send without limit. Frames that arrive in between
/// are not sent; their text comes with the result.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// Time limit of a check.
const CHECK_TIMEOUT: Duration = Duration::from_millis(500);
/// Time after which a call that failed to be written is deleted.
const COMMIT_GRACE: Duration = Duration::from_secs(3);

/// A call whose client waits.
pub struct OpenClientCall {
    pub job: JobId,
    /// Deletes the call on drop; also if the client disconnects while the call is written.
    guard: CallGuard,
    watch: CallWatch,
    /// The running query, if there is one, and when the next one begins. It is a task of its own, so that it ends and frees
    /// its connection while the client accepts no data.
    query: JoinSet<CallQuery>,
    next_query: Instant,
    /// A frame that is being checked.
    received: Option<Arc<TokenFrame>>,
    /// The attempt whose frames are sent.
    checked: Option<JobFence>,
    /// Time before which frames of other attempts are not checked.
    next_check: Instant,
    stop: Stop,
    /// Access of the request.
    access: Access,
    /// Whether text is sent as it is generated; otherwise its frames are ignored.
    is_streamed: bool,
    /// The parameter that holds the prompt.
    prompt_param: &'static str,
}

/// Result of a query.
enum CallQuery {
    Read(Result<Option<ClientCallView>, StoreError>),
    /// The token of the request is no longer valid.
    TokenEnded,
}

/// What happened to a call.
#[derive(Debug)]
pub enum Progress {
    Tokens(Arc<TokenFrame>),
    Done(Box<Completion>),
    Failed(OpenAiError),
}

/// Deletes a call on drop.
struct CallGuard {
    api: Api,
    call: TaskId,
    _permit: OpenPermit,
}

impl CallGuard {
    fn new(api: Api, call: TaskId, permit: OpenPermit) -> Self {
        api.metrics.open_calls.inc();
        Self { api, call, _permit: permit }
    }
}

impl Drop for CallGuard {
    fn drop(&mut self) {
        self.api.metrics.open_calls.dec();
        self.api.ended_calls.add(self.call);
    }
}

impl OpenClientCall {
    /// Writes the call. The job is committed when this returns.
    pub async fn begin(api: Api, access: Access, new: NewClientCall, delivery: Delivery) -> Result<Self, OpenAiError> {
        let permit = api.calls.open(&access, access.limits().and_then(|(_, limits)| limits.calls))?;
        // Before the job can change.
        let watch = api.wakeup.calls().watch(new.id);
        let prompt_param = match new.prompt.form {
            PromptForm::Chat => "messages",
            PromptForm::Text => "prompt",
        };
        let guard = CallGuard::new(api.clone(), new.id, permit);
        let (job, guard) = submit(api.clone(), new, guard).await?;
        let (stop, now) = (api.stop.clone(), Instant::now());
        let next_query = now + POLL_INTERVAL;
        let (query, received, checked) = (JoinSet::new(), None, None);
        Ok(Self {
            job,
            guard,
            watch,
            query,
            next_query,
            received,
            checked,
            next_check: now,
            stop,
            access,
            is_streamed: delivery != Delivery::Json,
            prompt_param,
        })
    }

    /// Waits for new text or for the end. Text is returned while a query waits for the database.
    pub async fn next(&mut self) -> Progress {
        loop {
            // It is kept during the check, because the caller may stop waiting.
            if let Some(frame) = self.received.clone() {
                let is_sent = self.is_of_running_attempt(&frame).await;
                self.received = None;
                if is_sent {
                    return Progress::Tokens(frame);
                }
            }
            if self.query.is_empty() && Instant::now() >= self.next_query {
                let (api, access, call) = (self.guard.api.clone(), self.access.clone(), self.guard.call);
                self.query.spawn(async move {
                    match api.guard.tokens().is_valid(&access).await {
                        true => CallQuery::Read(limited("reading a call", api.store.call(call)).await),
                        false => CallQuery::TokenEnded,
                    }
                });
                self.next_query = Instant::now() + POLL_INTERVAL;
            }
            let is_idle = self.query.is_empty();
            tokio::select! {
                Some(read) = self.query.join_next() => {
                    if let Some(end) = read.ok().and_then(|read| self.end(read)) {
                        return end;
                    }
                }
                signal = self.watch.next() => match signal {
                    CallSignal::Changed => self.next_query = Instant::now(),
                    CallSignal::Tokens(frame) if self.is_streamed => self.received = Some(frame),
                    CallSignal::Tokens(_) => {}
                },
                () = tokio::time::sleep_until(self.next_query.into()), if is_idle => {}
                () = self.stop.raised() => {
                    return Progress::Failed(OpenAiError::unavailable("cfq is stopping: retry when it runs again"));
                }
            }
        }
    }

    /// Whether the frame is of the attempt that runs. A node may send frames of any attempt, but it knows the lease of its own
    /// attempts only. Each attempt is checked once; while the database is unavailable, its frames are trusted.
    async fn is_of_running_attempt(&mut self, frame: &TokenFrame) -> bool {
        if self.checked == Some(frame.fence) {
            return true;
        }
        if Instant::now() < self.next_check {
            return false;
        }
        self.next_check = Instant::now() + CHECK_INTERVAL;
        let running = self.guard.api.store.is_running(self.guard.call, &frame.fence);
        match tokio::time::timeout(CHECK_TIMEOUT, limited("checking an attempt", running)).await {
            Ok(Ok(true)) => {
                self.checked = Some(frame.fence);
                true
            }
            Ok(Ok(false)) => false,
            Ok(Err(_)) | Err(_) => {
                tracing::debug!("the attempt of a frame is not checked, because the database is slow or unavailable");
                true
            }
        }
    }

    /// The end of the call, if the query found it.
    fn end(&self, query: CallQuery) -> Option<Progress> {
        let read = match query {
            CallQuery::Read(read) => read,
            CallQuery::TokenEnded => {
                let message =
                    "the API key was replaced or revoked during the call: send the request again with a valid one";
                return Some(Progress::Failed(ApiError::unauthorized(message).into()));
            }
        };
        match read {
            Ok(Some(view)) => end_of(view, self.prompt_param),
            Ok(None) => Some(Progress::Failed(lost())),
            Err(error) if error.may_retry() => {
                tracing::debug!(call = %self.guard.call, %error, "cannot read a call yet");
                None
            }
            Err(error) => Some(Progress::Failed(error.into())),
        }
    }
}

/// Writes a call, also if the client disconnects meanwhile, so that the call is deleted after it was written.
async fn submit(api: Api, new: NewClientCall, guard: CallGuard) -> Result<(JobId, CallGuard), OpenAiError> {
    let written = tokio::spawn(async move {
        match limited("writing a call", api.store.submit_call(new)).await {
            Ok((job, hints)) => {
                api.link.send_hints(hints).await;
                Ok((job, guard))
            }
            Err(error) => {
                // The database may still commit the call.
                tokio::spawn(async move {
                    tokio::time::sleep(COMMIT_GRACE).await;
                    drop(guard);
                });
                Err(OpenAiError::from(error))
            }
        }
    });
    written.await.unwrap_or_else(|_| Err(OpenAiError::unavailable("the call was not written: send it again")))
}

/// The result of a call, or why there is none; `None` if it is queued or running.
fn end_of(view: ClientCallView, prompt_param: &'static str) -> Option<Progress> {
    let failure = match (view.state, view.completion, view.failure) {
        (JobState::Queued | JobState::Placed | JobState::Running, _, _) => return None,
        (JobState::Done, Some(completion), _) => return Some(Progress::Done(Box::new(completion))),
        (JobState::Failed | JobState::Dead, _, Some(failure)) => failed(&failure, prompt_param),
        (JobState::Done | JobState::Failed | JobState::Dead, _, _) => OpenAiError::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "the call ended without a result: send the request again",
        ),
        (JobState::Cancelled, _, _) => OpenAiError::new(StatusCode::CONFLICT, "the call was cancelled on the server"),
    };
    Some(Progress::Failed(failure))
}

fn failed(failure: &JobFailure, prompt_param: &'static str) -> OpenAiError {
    match failure {
        JobFailure::TooLong { need, have } => {
            let message = format!(
                "{prompt_param}: the text has {} tokens, but the model's context has {have}, which must hold the reply, too: send less \
                 text, or use a model with a longer context",
                need.saturating_sub(1)
            );
            OpenAiError::invalid(prompt_param, message).with_code("context_length_exceeded")
        }
        JobFailure::Rejected { reason } => OpenAiError::new(StatusCode::BAD_REQUEST, reason),
        JobFailure::Unavailable { reason } => OpenAiError::unavailable(reason),
        JobFailure::Engine { reason } => OpenAiError::new(StatusCode::INTERNAL_SERVER_ERROR, reason),
    }
}

/// The leader deleted the call, because this process could not extend it, or Postgres crashed just after it was written.
fn lost() -> OpenAiError {
    OpenAiError::unavailable("the call was lost while the database was unavailable: send it again")
}
