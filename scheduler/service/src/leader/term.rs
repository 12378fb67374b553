//! One term of a leader, from its election until it loses the leader row. A single async task owns the planner's cache:
//! it reads the rows named in hints, makes a plan, applies the plan one compare-and-set at a time, and reads back each
//! row that it wrote. A periodic sweep ends expired leases and reads all live rows again, so a lost hint delays a
//! change by at most one sweep interval.
//!
//! An error that concerns one row skips only that row; the rest of the plan and of the sweep continues. Such an error
//! does not renew the grace period (see `grace`); an outage of Postgres or NATS does.

use std::collections::BTreeSet;
use std::time::Instant;

use cfq_proto::ids::{JobId, NodeId};
use cfq_proto::messages::{JobFence, NodeCommand, PrefillHint};
use cfq_proto::subject;
use cfq_scheduler_core::{Effect, PlannerState, PlannerTiming, UnplaceReason, join_by_node, plan, prefill_node};
use tokio::time::{MissedTickBehavior, interval};

use super::Leader;
use super::clock::DatabaseClock;
use super::grace::Grace;
use crate::bus::stream::{self, StreamError};
use crate::store::{LeaderHint, Leadership, PlaceOrder, StoreError};

/// Maximum number of hints that are applied before the next plan.
const MAX_HINTS_PER_PLAN: usize = 256;

/// State of the leader during one term.
struct Term<'a> {
    leader: &'a Leader,
    leadership: Leadership,
    state: PlannerState,
    /// Last reading of the database's clock; `None` until the first sweep.
    clock: Option<DatabaseClock>,
    grace: Grace,
}

/// Runs the term: places jobs and ends expired leases until another scheduler leads or the subscription to hints ends.
pub async fn run(leader: &Leader, leadership: Leadership) {
    let timing = leader.store.timing();
    let planner_timing = PlannerTiming {
        lease_ttl_ms: timing.lease_ttl_ms,
        accept_timeout_ms: timing.accept_timeout_ms,
        retry_ceiling_ms: timing.retry_ceiling_ms,
    };
    let mut hints = match leader.session.subscribe::<LeaderHint>(subject::HINT_LEADER).await {
        Ok(hints) => hints,
        Err(error) => {
            tracing::warn!(%error, "cannot subscribe to hints");
            return;
        }
    };
    let mut prefill_hints = match leader.session.subscribe::<PrefillHint>(subject::PREFILL_HINTS_ALL).await {
        Ok(prefill_hints) => prefill_hints,
        Err(error) => {
            tracing::warn!(%error, "cannot subscribe to prefill hints");
            return;
        }
    };
    let mut term = Term {
        leader,
        leadership,
        state: PlannerState::new(planner_timing),
        clock: None,
        grace: Grace::new(Instant::now(), timing.lease_ttl(), timing.lease_margin()),
    };
    let mut sweeps = interval(timing.sweep());
    sweeps.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // Each tick runs the planner, which checks whether a backoff has ended, or a node has not accepted a job in time.
    // Ticks at a sixth of the accept timeout notice both soon enough.
    let mut ticks = interval(
        (timing.accept_timeout() / 6)
            .clamp(std::time::Duration::from_millis(20), std::time::Duration::from_millis(500)),
    );
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let mut jobs = BTreeSet::new();
        let mut nodes = BTreeSet::new();
        let done = tokio::select! {
            _ = sweeps.tick() => term.sweep().await,
            _ = ticks.tick() => Ok(()),
            Some(message) = prefill_hints.next() => {
                match message.body {
                    Ok(hint) => term.forward_prefill_hint(hint).await,
                    Err(error) => tracing::debug!(%error, "unreadable prefill hint ignored"),
                }
                continue;
            }
            hint = hints.next() => {
                let Some(first) = hint else { return };
                let mut received = Some(first);
                while let Some(hint) = received {
                    match hint.body {
                        Ok(LeaderHint::Job(job)) => { jobs.insert(job); }
                        Ok(LeaderHint::Node(node)) => { nodes.insert(node); }
                        Err(error) => tracing::warn!(%error, "unreadable hint to the leader ignored"),
                    }
                    if jobs.len() + nodes.len() >= MAX_HINTS_PER_PLAN { break }
                    received = futures::FutureExt::now_or_never(hints.next()).flatten();
                }
                term.refresh(&jobs, &nodes).await
            }
        };
        let done = match done {
            Ok(()) => term.plan().await,
            Err(error) => Err(error),
        };
        match done {
            Ok(()) => {}
            Err(StoreError::NotLeader { term }) => {
                tracing::warn!(term, "plan rejected, another scheduler leads");
                return;
            }
            Err(error) => {
                tracing::warn!(%error, cause = ?std::error::Error::source(&error), "plan or sweep failed, retrying");
                if error.is_outage() {
                    term.grace.renew(Instant::now());
                }
                tokio::time::sleep(timing.sweep()).await;
            }
        }
    }
}

impl Term<'_> {
    /// Updates the cache with the rows named in hints.
    async fn refresh(&mut self, jobs: &BTreeSet<JobId>, nodes: &BTreeSet<NodeId>) -> Result<(), StoreError> {
        if !nodes.is_empty() {
            self.refresh_nodes().await?;
        }
        for job in jobs {
            self.refresh_job(*job).await?;
        }
        Ok(())
    }

    /// Reads one job's row into the cache. A job whose row is skipped for now after an error is removed from the cache;
    /// otherwise the planner would reserve capacity for a job that cannot be placed.
    async fn refresh_job(&mut self, job: JobId) -> Result<(), StoreError> {
        let store = &self.leader.store;
        if store.row_backoff().contains(job.0) {
            self.state.on_job_ended(job, 0);
            return Ok(());
        }
        match store.live_job(job).await {
            Ok(Some((Some(row), changed_ms))) => self.state.on_job_row(row, changed_ms),
            Ok(Some((None, over_ms))) => self.state.on_job_ended(job, over_ms),
            Ok(None) => self.state.on_job_ended(job, 0),
            Err(error) => self.on_job_error(job, error)?,
        }
        Ok(())
    }

    /// Skips the job if the error concerns only its row; returns the error otherwise. A transient error leaves the job
    /// in the cache, so that the next plan tries it again.
    fn on_job_error(&mut self, job: JobId, error: StoreError) -> Result<(), StoreError> {
        if !error.is_row_local() {
            return Err(error);
        }
        if error.may_retry() {
            let cause = std::error::Error::source(&error);
            tracing::warn!(%job, %error, ?cause, "job row unavailable, retried with the next plan");
        } else {
            self.leader.store.row_backoff().defer("job", job.0, &error);
            self.state.on_job_ended(job, 0);
        }
        Ok(())
    }

    async fn refresh_nodes(&mut self) -> Result<(), StoreError> {
        let rows = self.leader.store.core_nodes().await?;
        let gone: Vec<NodeId> =
            self.state.node_ids().filter(|id| !rows.iter().any(|r| r.id == **id)).cloned().collect();
        gone.iter().for_each(|id| self.state.on_node_gone(id));
        rows.into_iter().for_each(|row| self.state.on_node_row(row));
        Ok(())
    }

    /// Reads all live rows again, makes sure that the work stream exists, ends expired leases, and escalates or fails
    /// tasks whose deadline has passed.
    async fn sweep(&mut self) -> Result<(), StoreError> {
        let store = &self.leader.store;
        let asked = Instant::now();
        let read = DatabaseClock::new(store.clock_ms().await?);
        if self.grace.on_clock_reading(self.clock.as_ref(), &read, asked.elapsed()) {
            tracing::warn!("database clock jumped or was slow to answer: no lease is ended for one lease TTL");
        }
        self.clock = Some(read);
        self.refresh_nodes().await?;
        let rows = store.live_jobs().await?;
        let over: Vec<JobId> = self.state.job_ids().filter(|id| !rows.iter().any(|(r, _)| r.id == *id)).collect();
        for job in over {
            self.refresh_job(job).await?;
        }
        rows.into_iter().for_each(|(row, changed_ms)| self.state.on_job_row(row, changed_ms));
        match stream::ensure(&self.leader.session).await {
            Ok(false) => {}
            Ok(true) => self.ensure_consumers().await,
            Err(error) => {
                let cause = std::error::Error::source(&error);
                tracing::warn!(%error, ?cause, "nats does not answer: no lease is ended for one lease TTL");
                self.grace.renew(Instant::now());
            }
        }
        if self.grace.is_active(Instant::now()) {
            return Ok(());
        }
        let (hints, jobs, tasks) = store.sweep(self.leadership).await?;
        self.leader.metrics.job_leases_expired.inc_by(jobs as u64);
        self.leader.metrics.task_leases_expired.inc_by(tasks as u64);
        if jobs + tasks > 0 {
            tracing::warn!(jobs, tasks, "leases expired");
            for hint in &hints {
                if let crate::store::Hint::Leader(LeaderHint::Job(job)) = hint {
                    self.refresh_job(*job).await?;
                }
            }
        }
        self.leader.link.send_hints(hints).await;
        self.leader.link.send_hints(store.sweep_deadlines(self.leadership).await?).await;
        Ok(())
    }

    /// Makes sure that every node has its NATS consumer, for example after the work stream was created again.
    async fn ensure_consumers(&self) {
        let nodes = match self.leader.store.core_nodes().await {
            Ok(nodes) => nodes,
            Err(error) => return tracing::warn!(%error, "cannot read the nodes"),
        };
        let (session, timing) = (&self.leader.session, self.leader.store.timing());
        for node in nodes {
            if let Err(error) = stream::ensure_consumer(session, &node.id, node.boot, timing, false).await {
                let cause = std::error::Error::source(&error);
                tracing::warn!(node = %node.id, %error, ?cause, "cannot create the node's consumer");
            }
        }
    }

    /// Plans and applies the plan. An effect that the database rejects leaves its row unchanged; the row is read again.
    async fn plan(&mut self) -> Result<(), StoreError> {
        let Some(now_ms) = self.clock.map(|clock| clock.now_ms()) else { return Ok(()) };
        for effect in plan(&self.state, now_ms) {
            let job = effect.job();
            if let Err(error) = self.apply(effect, now_ms).await {
                self.on_job_error(job, error)?;
            }
        }
        Ok(())
    }

    async fn apply(&mut self, effect: Effect, now_ms: i64) -> Result<(), StoreError> {
        let store = &self.leader.store;
        match effect {
            Effect::Place { job, attempt, node, boot, reason } => {
                let order = PlaceOrder { job, attempt, node, boot, reason };
                let placed = store.place(self.leadership, &order).await?;
                self.refresh_job(job).await?;
                if let Some(work) = placed {
                    self.leader.metrics.placements.inc();
                    tracing::info!(%job, attempt, node = %order.node, reason = order.reason, "placed");
                    self.publish(&order.node, boot, &work).await;
                    cfq_link::failpoint::hit("scheduler.place.after_publish");
                }
            }
            Effect::Resend { job, attempt, lease, node, boot } => {
                self.state.on_resent(job, lease, now_ms);
                if let Some(work) = store.placed_order(JobFence { job, attempt, lease }).await? {
                    self.leader.metrics.work_orders_resent.inc();
                    tracing::info!(%job, attempt, %node, "job not accepted in time, work order sent again");
                    self.publish(&node, boot, &work).await;
                }
            }
            Effect::Unplace { job, attempt, lease, node, reason } => {
                let text = format!("{node} {reason}");
                tracing::info!(%job, attempt, %node, reason = text, "placement withdrawn");
                store.unplace(self.leadership, JobFence { job, attempt, lease }, &text).await?;
                self.refresh_job(job).await?;
                match reason {
                    UnplaceReason::NodeUnresponsive => {
                        self.state.on_node_unresponsive(&node, now_ms);
                        self.ensure_consumers().await;
                    }
                    UnplaceReason::NodeLost => {}
                }
            }
            Effect::Fail { job, attempt, failure } => {
                tracing::warn!(%job, attempt, %failure, "job failed");
                if let Some(hints) = store.fail_queued(self.leadership, job, attempt, &failure).await? {
                    self.leader.link.send_hints(hints).await;
                }
                self.refresh_job(job).await?;
            }
            Effect::NoteUnavailable { job, attempt, reports } => {
                store.note_unavailable(self.leadership, job, attempt, &join_by_node(&reports)).await?;
                self.refresh_job(job).await?;
            }
            Effect::Load { job, node, boot, model, reason } => {
                tracing::info!(%job, %node, %model, reason, "model load requested");
                let command = NodeCommand::Load { model: model.clone() };
                if let Err(error) = self.leader.session.publish(&subject::node_command(&node), &command).await {
                    tracing::debug!(%node, %error, "load command not sent, requested again later");
                }
                self.state.on_load_requested(node, boot, model, now_ms);
            }
            Effect::Explain { job, attempt, pending, no_node_ms } => {
                let written = store.explain(self.leadership, job, attempt, &pending, no_node_ms).await?;
                self.refresh_job(job).await?;
                if written {
                    self.state.on_pending_explained(job, pending, now_ms);
                }
            }
        }
        Ok(())
    }

    /// Forwards a prefill hint to the node on which its job would be placed now. The hint is not stored, because losing
    /// it costs only time.
    async fn forward_prefill_hint(&mut self, hint: PrefillHint) {
        let Some(now_ms) = self.clock.map(|clock| clock.now_ms()) else { return };
        let Some(node) = prefill_node(&self.state, &hint, now_ms) else { return };
        self.state.on_prefill_hint_sent(&node, &hint);
        let command = NodeCommand::Prefill { hint };
        if let Err(error) = self.leader.session.publish(&subject::node_command(&node), &command).await {
            tracing::debug!(%node, %error, "prefill hint not sent");
        }
    }

    /// Publishes a work order. If that fails, the planner has the order published again once the node has not accepted
    /// the job in time.
    async fn publish(&self, node: &NodeId, boot: cfq_proto::ids::BootId, work: &cfq_proto::messages::WorkOrder) {
        match stream::publish(&self.leader.session, node, boot, work).await {
            Ok(()) => {}
            Err(StreamError::Missing) => {
                tracing::warn!("work stream is missing, creating it again");
                match stream::ensure(&self.leader.session).await {
                    Ok(_) => self.ensure_consumers().await,
                    Err(error) => {
                        let cause = std::error::Error::source(&error);
                        tracing::warn!(%error, ?cause, "cannot create the work stream");
                    }
                }
            }
            Err(error) => {
                tracing::warn!(%error, cause = ?std::error::Error::source(&error), "work order not published");
            }
        }
    }
}
