//! One attempt at a job, from the order to the committed report.
//!
//! Room is reserved before the order is accepted, and nothing is computed before the acceptance is committed. From then on
//! the lease decides: while it is suspended nothing is published, once it is lost everything is dropped. The result and
//! the lease are kept until the scheduler says that the result is committed, or not wanted any more.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cfq_link::lease::{HeldLease, LeaseStatus};
use cfq_link::{LinkError, blobs, failpoint};
use cfq_proto::job::{Completion, JobFailure, Outcome, Prompt};
use cfq_proto::messages::{Accept, FenceReply, JobReport, Refusal, Refuse, TokenFrame, WorkOrder};
use cfq_proto::subject;
use futures::FutureExt;
use serde::Serialize;

use crate::engine::{Admitted, Ended, Event, Generation, Refused};
use crate::node::fleet::Standing;
use crate::node::journal::Notes;
use crate::node::{InHand, Shared};

/// Tokens are gathered for this long before they are published: fast enough to read along, few enough messages.
const FRAME: Duration = Duration::from_millis(75);
/// Wait between two tries of a request the scheduler could not serve.
const AGAIN: Duration = Duration::from_millis(200);

pub(super) struct Attempt {
    pub(super) shared: Arc<Shared>,
    pub(super) in_hand: InHand,
    pub(super) order: WorkOrder,
}

/// What admission came to.
enum Start {
    /// With the name of its vocabulary, if it tells of tokens.
    Work(Admitted, Option<i64>),
    /// Accepted only to report this.
    Fail(JobFailure),
    Refuse(Refusal),
}

impl Attempt {
    pub(super) async fn run(mut self) {
        let fence = self.in_hand.fence;
        let start = match self.prompt().await {
            Ok(prompt) => match AssertUnwindSafe(self.admit(prompt)).catch_unwind().await {
                Ok(start) => start,
                Err(panic) => Start::Fail(self.unadmitted(&*panic)),
            },
            Err(error) => match for_good(&error) {
                Some(refusal) => Start::Refuse(refusal),
                None => {
                    // The connection is gone: the scheduler places it again if it is wanted.
                    tracing::warn!(job = %fence.job, %error, "prompt cannot be fetched; order dropped");
                    return;
                }
            },
        };
        let start = match self.in_hand.stop.is_raised() {
            // Said at once, so that it goes elsewhere at once.
            true if self.shared.fleet.yields(&self.order.model).is_some() => self.not_now(None, 0),
            true => {
                tracing::debug!(job = %fence.job, "stopped before it was accepted");
                return;
            }
            false => start,
        };
        if let Start::Refuse(refusal) = start {
            tracing::info!(job = %fence.job, ?refusal, "order refused");
            let refuse = Refuse { fence, boot: self.shared.boot, refusal };
            self.settle("refuse", &refuse).await;
            return;
        }
        failpoint::hit("node.before_accept");
        let asked_at = Instant::now();
        match self.settle("accept", &Accept { fence, boot: self.shared.boot }).await {
            Some(FenceReply::Committed) => {}
            Some(FenceReply::Refused { reason }) => {
                let refusal = Refusal::Never { reason: format!("its acceptance cannot be written: {reason}") };
                self.settle("refuse", &Refuse { fence, boot: self.shared.boot, refusal }).await;
                return;
            }
            Some(FenceReply::Stale | FenceReply::Unavailable { .. }) | None => {
                tracing::info!(job = %fence.job, "order is not current any more");
                return;
            }
        }
        let lease = self.shared.keeper.hold(fence.lease, asked_at);
        failpoint::hit("node.accepted");
        let outcome = match start {
            Start::Work(admitted, vocabulary) => {
                let journal = Notes::of(&self, vocabulary, admitted.resumed());
                match self.generate(admitted.start(), journal, &lease).await {
                    Some(Ok(completion)) => self.carry(completion, &lease).await,
                    Some(Err(Ended::Failed(failure))) => Some(Outcome::Failed { failure }),
                    Some(Err(Ended::Cancelled)) => Some(Outcome::Released { reason: self.stopped_for() }),
                    None => None,
                }
            }
            Start::Fail(failure) => Some(Outcome::Failed { failure }),
            Start::Refuse(_) => None,
        };
        match outcome {
            Some(outcome) => self.report(outcome, &lease).await,
            None => tracing::info!(job = %fence.job, "lease lost; work dropped"),
        }
    }

    fn not_now(&self, need: Option<u64>, have: u64) -> Start {
        Start::Refuse(Refusal::NotNow { need, have, ledger_version: self.shared.fleet.ledger().version })
    }

    fn stopped_for(&self) -> String {
        let makes_way = |whom| format!("its node makes way for {whom}");
        self.shared.fleet.yields(&self.order.model).map_or_else(|| "stopped on its node".to_owned(), makes_way)
    }

    async fn prompt(&self) -> Result<Prompt, LinkError> {
        let lease = self.in_hand.fence.lease;
        blobs::get(&self.shared.session, &self.shared.subject("blob_get"), lease, self.order.prompt.clone()).await
    }

    async fn admit(&self, prompt: Prompt) -> Start {
        let model = &self.order.model;
        if self.shared.fleet.yields(model).is_some() {
            return self.not_now(None, 0);
        }
        let engine = match self.shared.fleet.standing(model) {
            Some(Standing::Ready(engine)) => engine,
            Some(Standing::Loading | Standing::Leaving(_) | Standing::OnDisk(_) | Standing::Unusable(_)) => {
                return self.not_now(None, 0);
            }
            None => return Start::Refuse(Refusal::Never { reason: format!("{model} is not served by this node") }),
        };
        self.shared.fleet.use_now(model);
        match engine.admit_after(prompt, self.order.written.clone().unwrap_or_default()).await {
            Ok(admitted) => Start::Work(admitted, engine.vocabulary()),
            Err(Refused::NotNow { need, have }) => self.not_now(need, have),
            Err(Refused::Never { reason }) => Start::Refuse(Refusal::Never { reason }),
            Err(Refused::Failed(failure)) => Start::Fail(failure),
        }
    }

    /// A panic on the way to the engine, as where no thread or no memory is to be had any more. The job is told of it, so
    /// that it is counted, and the node ends: dropped without a word, the order would come again for ever.
    fn unadmitted(&self, panic: &(dyn Any + Send)) -> JobFailure {
        let said = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
        let reason = format!("the node failed before the engine: {}", said.unwrap_or("a panic without words"));
        self.shared.fleet.faulty(&self.order.model, reason.clone());
        JobFailure::Engine { reason }
    }

    /// Asks until the answer is final. `None`: the lease could have been swept meanwhile, so the order is given up.
    async fn settle<Q: Serialize>(&mut self, verb: &str, body: &Q) -> Option<FenceReply> {
        let subject = self.shared.subject(verb);
        let ask = async {
            loop {
                match self.shared.session.request::<_, FenceReply>(&subject, body).await {
                    Ok(FenceReply::Unavailable { reason }) => tracing::debug!(verb, reason, "asking again"),
                    Ok(FenceReply::Refused { reason }) => {
                        tracing::error!(verb, reason, "the scheduler cannot write this");
                        return FenceReply::Refused { reason };
                    }
                    Ok(settled) => return settled,
                    Err(error) => tracing::debug!(verb, %error, "asking again"),
                }
                tokio::time::sleep(AGAIN).await;
            }
        };
        tokio::time::timeout(self.shared.timing.lease_ttl() + self.shared.timing.accept(), ask).await.ok()
    }

    /// Reads the generation to its end while the lease holds. `None`: the lease is lost.
    async fn generate(
        &mut self,
        mut generation: Generation,
        mut journal: Notes,
        lease: &HeldLease,
    ) -> Option<Result<Completion, Ended>> {
        let mut frames = Frames { attempt: self, text: String::new(), offset: 0 };
        let mut stop = frames.attempt.in_hand.stop.clone();
        let mut stopped = false;
        let mut tick = tokio::time::interval(FRAME);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let lost = lease.lost();
        tokio::pin!(lost);
        loop {
            tokio::select! {
                event = generation.next() => match event {
                    Event::Step { text, tokens } => {
                        lease.step();
                        journal.wrote(&tokens);
                        frames.text.push_str(&text);
                    }
                    Event::Done(how) => {
                        frames.publish(lease).await;
                        if matches!(how, Err(Ended::Cancelled)) {
                            // Whoever read along has read this; the next attempt goes on from there.
                            journal.close().await;
                        }
                        return Some(how);
                    }
                },
                _ = tick.tick() => frames.publish(lease).await,
                () = &mut lost => return None,
                () = stop.raised(), if !stopped => {
                    stopped = true;
                    generation.cancel();
                }
            }
        }
    }

    /// The completion, stored first if it is large. `None`: the lease is lost.
    async fn carry(&self, completion: Completion, lease: &HeldLease) -> Option<Outcome> {
        let subject = self.shared.subject("blob_put");
        loop {
            if lease.settled().await == LeaseStatus::Lost {
                return None;
            }
            lease.step();
            match blobs::put(&self.shared.session, &subject, lease.id(), completion.clone()).await {
                Ok(completion) => return Some(Outcome::Done { completion }),
                Err(LinkError::Blob { reason, .. }) => {
                    let failure = JobFailure::Engine { reason: format!("the result could not be stored: {reason}") };
                    return Some(Outcome::Failed { failure });
                }
                Err(error) => tracing::warn!(%error, "result not stored yet"),
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// Repeats the report until it is committed or not wanted, as long as the lease holds. A result that can never be written
    /// is reported as a failure instead, once: kept alive, it would look like work for ever.
    async fn report(&self, outcome: Outcome, lease: &HeldLease) {
        let fence = self.in_hand.fence;
        let mut report = JobReport { fence, boot: self.shared.boot, outcome };
        let mut refused = false;
        let subject = self.shared.subject("result");
        failpoint::hit("node.before_report");
        loop {
            if lease.settled().await == LeaseStatus::Lost {
                tracing::info!(job = %fence.job, "lease lost before the report was committed");
                return;
            }
            // Waiting for the scheduler is no standstill of the work.
            lease.step();
            match self.shared.session.request::<_, FenceReply>(&subject, &report).await {
                Ok(FenceReply::Committed) => {
                    failpoint::hit("node.reported");
                    tracing::info!(job = %fence.job, attempt = fence.attempt, outcome = named(&report.outcome), "reported");
                    return;
                }
                Ok(FenceReply::Stale) => {
                    tracing::info!(job = %fence.job, attempt = fence.attempt, "report is stale");
                    return;
                }
                Ok(FenceReply::Refused { reason }) if refused => {
                    tracing::error!(job = %fence.job, reason, "not even the failure can be written; its lease runs out");
                    return;
                }
                Ok(FenceReply::Refused { reason }) => {
                    tracing::error!(job = %fence.job, reason, "the result cannot be written, reported as a failure");
                    refused = true;
                    let reason = format!("the result could not be written: {reason}");
                    report.outcome = Outcome::Failed { failure: JobFailure::Engine { reason } };
                    continue;
                }
                Ok(FenceReply::Unavailable { reason }) => tracing::debug!(reason, "reporting again"),
                Err(error) => tracing::debug!(%error, "reporting again"),
            }
            tokio::time::sleep(AGAIN).await;
        }
    }
}

/// What a prompt that can never be fetched is answered with; `None` if asking again may help. If the lease is not ours any
/// more, the scheduler says so to the refusal.
fn for_good(error: &LinkError) -> Option<Refusal> {
    match error {
        LinkError::Blob { .. } | LinkError::Message { .. } => {
            Some(Refusal::Never { reason: format!("the prompt cannot be fetched: {error}") })
        }
        LinkError::Seed { .. }
        | LinkError::Connect { .. }
        | LinkError::Unwelcome { .. }
        | LinkError::Forbidden { .. }
        | LinkError::NoAnswer { .. }
        | LinkError::Send { .. }
        | LinkError::Listen { .. }
        | LinkError::Thread { .. } => None,
    }
}

fn named(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Done { .. } => "done",
        Outcome::Failed { .. } => "failed",
        Outcome::Released { .. } => "released",
    }
}

/// Text on its way to whoever watches.
struct Frames<'a> {
    attempt: &'a Attempt,
    text: String,
    offset: u64,
}

impl Frames<'_> {
    /// Publishes what has gathered, unless the lease is in doubt: then it waits.
    async fn publish(&mut self, lease: &HeldLease) {
        if self.text.is_empty() || lease.status() != LeaseStatus::Live {
            return;
        }
        let text = std::mem::take(&mut self.text);
        let length = text.len() as u64;
        let order = &self.attempt.order;
        let frame = TokenFrame { task: order.task, fence: order.fence, role: order.role, offset: self.offset, text };
        self.offset += length;
        let shared = &self.attempt.shared;
        if let Err(error) = shared.session.publish(&subject::tokens(&shared.node, order.fence.job), &frame).await {
            // The result holds the whole text.
            tracing::debug!(%error, "frame not published");
        }
        failpoint::hit("node.generating");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_refused_for_good_refuses_the_order_and_silence_does_not() {
        let gone = LinkError::Blob { hash: "abc".to_owned(), reason: "no such blob".to_owned() };
        assert!(matches!(for_good(&gone), Some(Refusal::Never { reason }) if reason.contains("no such blob")));
        assert!(for_good(&LinkError::NoAnswer { subject: "s".to_owned() }).is_none());
    }
}
