//! Execution of one attempt of a job, from the work order to the committed report.
//!
//! KV tokens are reserved before the order is accepted, and nothing is computed before the scheduler has committed the
//! acceptance. After that the lease determines what may be published: nothing while it is suspended; once it is lost,
//! the attempt is dropped. The result and the lease are kept until the scheduler replies that the result is committed
//! or the attempt is stale.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cfq_engine::{AdmitError, Admitted, Generation, GenerationError, GenerationEvent};
use cfq_link::lease::{LeaseHandle, LeaseStatus};
use cfq_link::{LinkError, blobs, clock, failpoint};
use cfq_proto::job::{Completion, JobFailure, Outcome, Prompt, ReleaseReason};
use cfq_proto::messages::{Accept, FenceReply, JobResult, Preparing, Refusal, Refuse, TokenFrame, WorkOrder};
use cfq_proto::subject;
use futures::FutureExt;
use serde::Serialize;

use super::context::{AttemptStop, NodeContext, RunningAttempt};
use super::error::{ModelFault, panic_message};
use super::journal::JournalWriter;
use super::model_registry::ModelStatus;
use super::report::{RETRY_INTERVAL, report_until_final};

/// Interval at which generated text is published: short enough for readers to follow, long enough to limit the number
/// of messages.
const FRAME_INTERVAL: Duration = Duration::from_millis(75);

pub(super) struct Attempt {
    pub(super) context: Arc<NodeContext>,
    pub(super) running: RunningAttempt,
    pub(super) order: WorkOrder,
}

/// Result of the admission of a job.
enum AdmissionOutcome {
    /// The sequence is admitted. The second field identifies the vocabulary of the engine's token ids; `None` if the
    /// engine reports no token ids.
    Admitted(Admitted, Option<i64>),
    /// The job fails: it is accepted only to report this failure.
    Fail(JobFailure),
    Refuse(Refusal),
}

impl Attempt {
    pub(super) async fn run(mut self) {
        let fence = self.running.fence;
        let mut stop = self.running.stop.clone();
        let limit = self.context.timing.prepare_timeout();
        let admission = tokio::select! {
            admission = self.prepare() => match admission {
                Some(admission) => admission,
                None => return,
            },
            () = self.report_preparing() => {
                tracing::info!(job = %fence.job, "order dropped while its prompt was prepared: it is stale");
                return;
            }
            // A failure is counted, so that the job is not tried without end.
            () = tokio::time::sleep(limit) => {
                let reason = format!("preparing the prompt takes longer than {} s", limit.as_secs_f64());
                AdmissionOutcome::Fail(JobFailure::Engine { reason })
            }
            // The preparation of the prompt is cancelled. The reason is handled below.
            _ = stop.stopped() => self.refuse_for_now(None, 0),
        };
        let admission = match self.running.stop.reason() {
            None => admission,
            // The order is refused, so that the scheduler places the job elsewhere immediately.
            Some(AttemptStop::Yielded { .. }) => self.refuse_for_now(None, 0),
            // Reported, so that the order does not count as one that this node did not accept.
            Some(AttemptStop::Drained) => {
                let outcome = Outcome::Released { reason: ReleaseReason::Drained };
                self.request_until_final("result", &JobResult { fence, boot: self.context.boot, outcome }).await;
                return;
            }
            Some(reason @ (AttemptStop::Cancelled | AttemptStop::LostLease)) => {
                tracing::debug!(job = %fence.job, %reason, "attempt stopped before its order was accepted");
                return;
            }
        };
        if let AdmissionOutcome::Refuse(refusal) = admission {
            tracing::info!(job = %fence.job, ?refusal, "order refused");
            let refuse = Refuse { fence, boot: self.context.boot, refusal };
            self.request_until_final("refuse", &refuse).await;
            return;
        }
        failpoint::hit("node.before_accept");
        let asked_at = Instant::now();
        match self.request_until_final("accept", &Accept { fence, boot: self.context.boot }).await {
            Some(FenceReply::Committed) => {}
            Some(FenceReply::Refused { reason }) => {
                let reason = format!("the scheduler refused this node's acceptance of the job: {reason}");
                let refusal = Refusal::Never { reason };
                self.request_until_final("refuse", &Refuse { fence, boot: self.context.boot, refusal }).await;
                return;
            }
            Some(FenceReply::Stale | FenceReply::Unavailable { .. }) | None => {
                tracing::info!(job = %fence.job, "order dropped: it is stale, or the scheduler did not answer in time");
                return;
            }
        }
        let lease = self.context.keeper.hold(fence.lease, asked_at);
        failpoint::hit("node.accepted");
        match self.run_accepted(admission, &lease).await {
            Ok(outcome) => {
                let report = JobResult { fence, boot: self.context.boot, outcome };
                report_until_final(&self.context.session, &self.context.subject("result"), report, &lease).await;
            }
            Err(reason) => tracing::info!(job = %fence.job, %reason, "attempt dropped without a report"),
        }
    }

    /// Runs an accepted job and returns the outcome to report; `Err` if nothing may be reported.
    async fn run_accepted(&mut self, admission: AdmissionOutcome, lease: &LeaseHandle) -> Result<Outcome, AttemptStop> {
        let (admitted, vocabulary) = match admission {
            AdmissionOutcome::Admitted(admitted, vocabulary) => (admitted, vocabulary),
            AdmissionOutcome::Fail(failure) => return Ok(Outcome::Failed { failure }),
            // Unreachable: refused orders were never accepted.
            AdmissionOutcome::Refuse(_) => return Err(AttemptStop::Cancelled),
        };
        let journal = JournalWriter::start(&self.context, self.running.fence, vocabulary, admitted.resumed());
        match self.generate(admitted.start(), journal, lease).await {
            Ok(Ok(completion)) => self.store_completion(completion, lease).await,
            Ok(Err(failure)) => Ok(Outcome::Failed { failure }),
            Err(stop) => match stop.release_reason() {
                Some(reason) => Ok(Outcome::Released { reason }),
                None => Err(stop),
            },
        }
    }

    fn refuse_for_now(&self, need: Option<u64>, have: u64) -> AdmissionOutcome {
        AdmissionOutcome::Refuse(Refusal::NotNow { need, have, ledger_version: self.context.registry.ledger().version })
    }

    /// Fetches the prompt and admits the job. `None` if the order has to be dropped.
    async fn prepare(&self) -> Option<AdmissionOutcome> {
        let prompt = match self.prompt().await {
            Ok(prompt) => prompt,
            Err(error) => {
                let refusal = permanent_refusal(&error);
                if refusal.is_none() {
                    // The connection is lost. The scheduler places the job again unless the job was cancelled.
                    let job = self.running.fence.job;
                    tracing::warn!(%job, %error, "the prompt cannot be fetched; the order is dropped");
                }
                return refusal.map(AdmissionOutcome::Refuse);
            }
        };
        failpoint::delays("node.preparing").await;
        Some(match AssertUnwindSafe(self.admit(prompt)).catch_unwind().await {
            Ok(admission) => admission,
            Err(panic) => AdmissionOutcome::Fail(self.on_admission_panic(&*panic)),
        })
    }

    /// Reports repeatedly that the prompt is being prepared. Returns when the order is stale. A report that fails is
    /// not handled: the next one follows, and the order is sent again if none arrives.
    async fn report_preparing(&self) {
        let subject = self.context.subject("preparing");
        let report = Preparing { fence: self.running.fence, boot: self.context.boot };
        let interval = self.context.timing.accept_timeout() / 3;
        loop {
            tokio::time::sleep(interval).await;
            match self.context.session.request_within::<_, FenceReply>(&subject, &report, interval).await {
                Ok(FenceReply::Stale) => return,
                Ok(FenceReply::Committed | FenceReply::Refused { .. } | FenceReply::Unavailable { .. }) => {}
                Err(error) => tracing::debug!(%error, "no reply to the report that the prompt is being prepared"),
            }
        }
    }

    async fn prompt(&self) -> Result<Prompt, LinkError> {
        let lease = self.running.fence.lease;
        blobs::get(&self.context.session, &self.context.subject("blob_get"), lease, self.order.prompt.clone()).await
    }

    async fn admit(&self, prompt: Prompt) -> AdmissionOutcome {
        let (model, registry) = (&self.order.model, &self.context.registry);
        if registry.yields_to(model).is_some() {
            return self.refuse_for_now(None, 0);
        }
        let engine = match registry.status(model) {
            Some(ModelStatus::Resident(engine)) => engine,
            Some(
                ModelStatus::Loading | ModelStatus::Unloading(_) | ModelStatus::OnDisk(_) | ModelStatus::Unusable(_),
            ) => return self.refuse_for_now(None, 0),
            None => {
                let reason = format!("{model} is not served by this node");
                return AdmissionOutcome::Refuse(Refusal::Never { reason });
            }
        };
        registry.record_use(model);
        match engine.admit_resumed(prompt, self.order.generated.clone().unwrap_or_default()).await {
            Ok(admitted) => AdmissionOutcome::Admitted(admitted, engine.vocabulary()),
            Err(AdmitError::NotNow { need, have }) => self.refuse_for_now(need, have),
            Err(AdmitError::Never { reason }) => AdmissionOutcome::Refuse(Refusal::Never { reason }),
            Err(AdmitError::Failed(failure)) => AdmissionOutcome::Fail(failure),
        }
    }

    /// Handles a panic during admission, before the engine has the prompt, for example because no thread or no memory
    /// is available. The failure is reported, so that it counts as an attempt, and the node exits. If it were not
    /// reported, the job would be placed again indefinitely.
    fn on_admission_panic(&self, panic: &(dyn Any + Send)) -> JobFailure {
        let fault = ModelFault::AdmissionPanicked { message: panic_message(panic).to_owned() };
        let reason = fault.to_string();
        self.context.registry.set_fault(&self.order.model, fault);
        JobFailure::Engine { reason }
    }

    /// Repeats a request until the scheduler gives a final reply. `None` if the lease may have expired in the meantime;
    /// then the order is dropped.
    async fn request_until_final<Q: Serialize>(&mut self, verb: &str, body: &Q) -> Option<FenceReply> {
        let subject = self.context.subject(verb);
        let request = async {
            loop {
                match self.context.session.request::<_, FenceReply>(&subject, body).await {
                    Ok(FenceReply::Unavailable { reason }) => {
                        tracing::debug!(verb, %reason, "scheduler unavailable; the request is repeated");
                    }
                    Ok(FenceReply::Refused { reason }) => {
                        tracing::error!(request = verb, %reason, "the scheduler refused the request");
                        return FenceReply::Refused { reason };
                    }
                    Ok(reply) => return reply,
                    Err(error) => tracing::debug!(verb, %error, "no reply; the request is repeated"),
                }
                tokio::time::sleep(RETRY_INTERVAL + clock::jitter(RETRY_INTERVAL / 2)).await;
            }
        };
        let timing = &self.context.timing;
        tokio::time::timeout(timing.lease_ttl() + timing.accept_timeout(), request).await.ok()
    }

    /// Reads the generation to its end while the lease is held. `Err` if the attempt was stopped.
    async fn generate(
        &mut self,
        mut generation: Generation,
        mut journal: JournalWriter,
        lease: &LeaseHandle,
    ) -> Result<Result<Completion, JobFailure>, AttemptStop> {
        let mut frames = FramePublisher { attempt: self, text: String::new(), offset: 0 };
        let mut stop = frames.attempt.running.stop.clone();
        let mut stopped = None;
        let mut tick = tokio::time::interval(FRAME_INTERVAL);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let lost = lease.lost();
        tokio::pin!(lost);
        loop {
            tokio::select! {
                event = generation.next() => match event {
                    GenerationEvent::Step { text, tokens } => {
                        lease.record_step();
                        journal.append(&tokens);
                        frames.text.push_str(&text);
                    }
                    GenerationEvent::Done(ended) => {
                        frames.publish(lease).await;
                        return match ended {
                            Ok(completion) => Ok(Ok(completion)),
                            Err(GenerationError::Failed(failure)) => Ok(Err(failure)),
                            Err(GenerationError::Cancelled) => {
                                // Readers have received this text, so the next attempt must resume after it.
                                journal.close().await;
                                Err(stopped.unwrap_or(AttemptStop::Cancelled))
                            }
                        };
                    }
                },
                _ = tick.tick() => {
                    frames.publish(lease).await;
                    if stopped.is_some()
                        && let Some(failure) = self.engine_failure()
                    {
                        return Ok(Err(failure));
                    }
                }
                () = &mut lost => return Err(AttemptStop::LostLease),
                reason = stop.stopped(), if stopped.is_none() => {
                    if let Some(failure) = self.engine_failure() {
                        return Ok(Err(failure));
                    }
                    stopped = Some(reason);
                    generation.cancel();
                }
            }
        }
    }

    /// The failure of an engine that will never end the generation, because it hangs.
    fn engine_failure(&self) -> Option<JobFailure> {
        let failure = self.context.registry.engine_failure(&self.order.model)?;
        Some(JobFailure::Engine { reason: format!("the engine stopped: {failure}") })
    }

    /// Returns the outcome that reports the completion. A large completion is first stored as a blob.
    async fn store_completion(&self, completion: Completion, lease: &LeaseHandle) -> Result<Outcome, AttemptStop> {
        let subject = self.context.subject("blob_put");
        loop {
            if lease.settled().await == LeaseStatus::Lost {
                return Err(AttemptStop::LostLease);
            }
            lease.record_step();
            let put = blobs::put(&self.context.session, &subject, lease.id(), completion.clone()).await;
            let reason = match put {
                Ok(completion) => return Ok(Outcome::Done { completion }),
                Err(LinkError::Blob { reason, .. }) => reason,
                Err(error @ LinkError::TooLarge { .. }) => error.to_string(),
                Err(error) => {
                    tracing::warn!(%error, "result not stored; the request is repeated");
                    tokio::time::sleep(RETRY_INTERVAL + clock::jitter(RETRY_INTERVAL / 2)).await;
                    continue;
                }
            };
            let failure = JobFailure::Engine { reason: format!("the result could not be stored: {reason}") };
            return Ok(Outcome::Failed { failure });
        }
    }
}

/// The refusal of an order whose prompt can never be fetched; `None` if a retry may succeed. The lease is not checked
/// here: if the job's lease has been lost, the scheduler reports this in its reply to the refusal.
fn permanent_refusal(error: &LinkError) -> Option<Refusal> {
    match error {
        LinkError::Blob { .. } | LinkError::Message { .. } | LinkError::TooLarge { .. } => {
            Some(Refusal::Never { reason: format!("the prompt cannot be fetched: {error}") })
        }
        LinkError::Seed { .. }
        | LinkError::Certificate(_)
        | LinkError::CredentialsTaken { .. }
        | LinkError::Connect { .. }
        | LinkError::AuthRejected { .. }
        | LinkError::ServerTooOld { .. }
        | LinkError::Forbidden { .. }
        | LinkError::NoReply { .. }
        | LinkError::Send { .. }
        | LinkError::Listen { .. }
        | LinkError::Thread { .. } => None,
    }
}

/// Publishes generated text to readers.
struct FramePublisher<'a> {
    attempt: &'a Attempt,
    text: String,
    offset: u64,
}

impl FramePublisher<'_> {
    /// Publishes the collected text if the lease is live; otherwise keeps it for the next call.
    async fn publish(&mut self, lease: &LeaseHandle) {
        if self.text.is_empty() || lease.status() != LeaseStatus::Live {
            return;
        }
        let text = std::mem::take(&mut self.text);
        let length = text.len() as u64;
        let order = &self.attempt.order;
        let frame = TokenFrame { task: order.task, fence: order.fence, role: order.role, offset: self.offset, text };
        self.offset += length;
        let context = &self.attempt.context;
        if let Err(error) = context.session.publish(&subject::tokens(&context.node, order.fence.job), &frame).await {
            // A lost frame does no harm: the result contains the whole text.
            tracing::debug!(%error, "frame not published");
        }
        failpoint::hit("node.generating");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_blob_refuses_the_order_and_missing_reply_does_not() {
        let gone = LinkError::Blob { hash: "abc".to_owned(), reason: "no such blob".to_owned() };
        assert!(matches!(permanent_refusal(&gone), Some(Refusal::Never { reason }) if reason.contains("no such blob")));
        assert!(permanent_refusal(&LinkError::NoReply { subject: "s".to_owned() }).is_none());
    }
}
