//! A call whose client waits. If it is dropped, because the client has the result or has hung up, the call is deleted and
//! its job cancelled.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use cfq_link::stop::Stop;
use cfq_proto::ids::{JobId, TaskId};
use cfq_proto::job::{Completion, JobFailure, JobState, Prompt};
use cfq_proto::messages::TokenFrame;
use cfq_proto::model::ModelId;
use cfq_proto::task::Priority;
use tokio::sync::OwnedSemaphorePermit;

use super::error::OpenAiError;
use crate::api::Api;
use crate::api::error::ApiError;
use crate::api::token::TokenEpoch;
use crate::call_watch::{CallSignal, CallWatch};
use crate::store::{CallView, NewCall};

/// Interval at which the database is queried even without a wake-up, which may be lost.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Seconds after which a client should retry if too many calls are open.
const RETRY_AFTER_SECONDS: u32 = 5;

/// A call whose client waits.
#[derive(Debug)]
pub struct OpenCall {
    pub id: TaskId,
    pub job: JobId,
    api: Api,
    watch: CallWatch,
    next_poll: Instant,
    stop: Stop,
    /// Epoch of the token of the request.
    epoch: TokenEpoch,
    _permit: OwnedSemaphorePermit,
}

/// What happened to a call.
#[derive(Debug)]
pub enum Progress {
    Tokens(Arc<TokenFrame>),
    Done(Box<Completion>),
    Failed(OpenAiError),
}

impl OpenCall {
    /// Writes the call. The job is committed when this returns.
    pub async fn begin(
        api: Api,
        epoch: TokenEpoch,
        model: ModelId,
        priority: Priority,
        prompt: Prompt,
    ) -> Result<Self, OpenAiError> {
        let permit = api.calls.clone().try_acquire_owned().map_err(|_| {
            let message = format!("{} calls are open, which is the limit: retry when some have ended", api.call_limit);
            ApiError::too_many_requests(message, RETRY_AFTER_SECONDS)
        })?;
        let id = TaskId::fresh();
        // Before the job can change.
        let watch = api.wakeup.calls().watch(id);
        let (job, hints) = api.store.submit_call(NewCall { id, model, priority, prompt }).await?;
        api.link.send_hints(hints).await;
        let stop = api.stop.clone();
        let next_poll = Instant::now() + POLL_INTERVAL;
        api.metrics.open_calls.inc();
        Ok(Self { id, job, api, watch, next_poll, stop, epoch, _permit: permit })
    }

    /// Waits for new text or for the end.
    pub async fn next(&mut self) -> Progress {
        loop {
            if Instant::now() >= self.next_poll {
                self.next_poll = Instant::now() + POLL_INTERVAL;
                if self.api.guard.token().epoch() != self.epoch {
                    let message = "the token was replaced during the call: send the request again with the new one";
                    return Progress::Failed(ApiError::unauthorized(message).into());
                }
                match self.api.store.call(self.id).await {
                    Ok(Some(view)) => {
                        if let Some(end) = end_of(view) {
                            return end;
                        }
                    }
                    Ok(None) => return Progress::Failed(lost()),
                    Err(error) if error.may_retry() => {
                        tracing::debug!(call = %self.id, %error, "cannot read a call yet")
                    }
                    Err(error) => return Progress::Failed(error.into()),
                }
            }
            tokio::select! {
                signal = self.watch.next() => match signal {
                    CallSignal::Changed => self.next_poll = Instant::now(),
                    CallSignal::Tokens(frame) => return Progress::Tokens(frame),
                },
                () = tokio::time::sleep_until(self.next_poll.into()) => {}
                () = self.stop.raised() => {
                    return Progress::Failed(OpenAiError::unavailable("cfq is stopping: retry when it runs again"));
                }
            }
        }
    }
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        let (api, call) = (self.api.clone(), self.id);
        api.metrics.open_calls.dec();
        // If this cannot be done, the leader ends the call soon, because nobody extends it any more.
        tokio::spawn(async move {
            match api.store.end_call(call).await {
                Ok(hints) => api.link.send_hints(hints).await,
                Err(error) => tracing::debug!(%call, %error, "call not deleted yet"),
            }
        });
    }
}

/// The result of a call, or why there is none; `None` while it is queued or running.
fn end_of(view: CallView) -> Option<Progress> {
    let failure = match (view.state, view.completion, view.failure) {
        (JobState::Queued | JobState::Placed | JobState::Running, _, _) => return None,
        (JobState::Done, Some(completion), _) => return Some(Progress::Done(Box::new(completion))),
        (JobState::Failed | JobState::Dead, _, Some(failure)) => failed(&failure),
        (JobState::Done | JobState::Failed | JobState::Dead, _, _) => OpenAiError::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "the call ended without a result: send the request again",
        ),
        (JobState::Cancelled, _, _) => lost(),
    };
    Some(Progress::Failed(failure))
}

fn failed(failure: &JobFailure) -> OpenAiError {
    let message = failure.to_string();
    match failure {
        JobFailure::TooLong { .. } => {
            let message = format!("{message}: shorten the messages");
            OpenAiError::invalid("messages", message).with_code("context_length_exceeded")
        }
        JobFailure::Rejected { .. } => OpenAiError::new(StatusCode::BAD_REQUEST, message),
        JobFailure::Unavailable { .. } => OpenAiError::unavailable(message),
        JobFailure::Engine { .. } => OpenAiError::new(StatusCode::INTERNAL_SERVER_ERROR, message),
    }
}

/// The leader deleted the call, because this process could not extend it.
fn lost() -> OpenAiError {
    OpenAiError::unavailable("the call was ended, because the database was unavailable for too long: send it again")
}
