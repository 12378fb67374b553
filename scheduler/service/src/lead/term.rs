//! One term of a leader. A single task owns the planner's cache: it reads rows, plans, carries the plan out one
//! compare-and-set at a time, and reads back what each left. Hints say which row to read; once every sweep all live rows
//! are read again, so a lost hint costs a second.
//!
//! What one row makes fail ends that row's turn and nothing else: the rest of the plan and of the sweep goes on. Only what
//! says that Postgres or NATS was away renews the grace (see `grace`).

use std::collections::BTreeSet;
use std::time::Instant;

use cfq_proto::ids::{JobId, NodeId};
use cfq_proto::messages::{JobFence, NodeCommand, WarmUp};
use cfq_proto::subject;
use cfq_scheduler_core::{Effect, Limits, State, plan, warmer};
use tokio::time::{MissedTickBehavior, interval};

use super::Leader;
use super::clock::DatabaseClock;
use super::grace::Grace;
use crate::bus::stream::{self, StreamError};
use crate::store::{LeaderHint, Leadership, PlaceOrder, StoreError};

/// Hints worked off before the next plan.
const BATCH: usize = 256;

struct Term<'a> {
    leader: &'a Leader,
    lead: Leadership,
    state: State,
    /// `None` until it was read for the first time.
    clock: Option<DatabaseClock>,
    grace: Grace,
}

/// Returns when the term is over because somebody else leads, or the hints cannot be heard.
pub async fn serve(leader: &Leader, lead: Leadership) {
    let timing = leader.store.timing();
    let limits = Limits {
        lease_ttl_ms: timing.lease_ttl_ms,
        accept_ms: timing.accept_ms,
        retry_ceiling_ms: timing.retry_ceiling_ms,
    };
    let mut hints = match leader.session.subscribe::<LeaderHint>(subject::HINT_LEADER).await {
        Ok(hints) => hints,
        Err(error) => {
            tracing::warn!(%error, "cannot listen for hints");
            return;
        }
    };
    let mut warm_ups = match leader.session.subscribe::<WarmUp>(subject::WARM_ALL).await {
        Ok(warm_ups) => warm_ups,
        Err(error) => {
            tracing::warn!(%error, "cannot listen for what runners foresee");
            return;
        }
    };
    let mut term = Term {
        leader,
        lead,
        state: State::new(limits),
        clock: None,
        grace: Grace::new(Instant::now(), timing.lease_ttl(), timing.lease_margin()),
    };
    let mut sweeps = interval(timing.sweep());
    sweeps.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // Fine enough that acceptance and back-off times are met within a sixth.
    let mut ticks = interval(
        (timing.accept() / 6).clamp(std::time::Duration::from_millis(20), std::time::Duration::from_millis(500)),
    );
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let mut jobs = BTreeSet::new();
        let mut nodes = BTreeSet::new();
        let done = tokio::select! {
            _ = sweeps.tick() => term.sweep().await,
            _ = ticks.tick() => Ok(()),
            Some(foreseen) = warm_ups.next() => {
                match foreseen.body {
                    Ok(ahead) => term.pass_on(ahead).await,
                    Err(error) => tracing::debug!(%error, "refused what a runner foresees"),
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
                        Err(error) => tracing::warn!(%error, "refused a hint"),
                    }
                    if jobs.len() + nodes.len() >= BATCH { break }
                    received = futures::FutureExt::now_or_never(hints.next()).flatten();
                }
                term.look(&jobs, &nodes).await
            }
        };
        let done = match done {
            Ok(()) => term.plan().await,
            Err(error) => Err(error),
        };
        match done {
            Ok(()) => {}
            Err(StoreError::NotLeader { generation }) => {
                tracing::warn!(generation, "a plan was rejected: another scheduler leads");
                return;
            }
            Err(error) => {
                tracing::warn!(%error, cause = ?std::error::Error::source(&error), "the leader cannot work now");
                if error.is_outage() {
                    term.grace.renew(Instant::now());
                }
                tokio::time::sleep(timing.sweep()).await;
            }
        }
    }
}

impl Term<'_> {
    /// Reads the rows that changed.
    async fn look(&mut self, jobs: &BTreeSet<JobId>, nodes: &BTreeSet<NodeId>) -> Result<(), StoreError> {
        if !nodes.is_empty() {
            self.nodes().await?;
        }
        for job in jobs {
            self.job(*job).await?;
        }
        Ok(())
    }

    /// A row that is left alone is no part of the plan: it would keep room free that it cannot take.
    async fn job(&mut self, job: JobId) -> Result<(), StoreError> {
        let store = &self.leader.store;
        if store.aside().holds(job.0) {
            self.state.job_over(job, 0);
            return Ok(());
        }
        match store.job_now(job).await {
            Ok(Some((Some(row), changed_ms))) => self.state.job(row, changed_ms),
            Ok(Some((None, over_ms))) => self.state.job_over(job, over_ms),
            Ok(None) => self.state.job_over(job, 0),
            Err(error) => self.at_fault(job, error)?,
        }
        Ok(())
    }

    /// An error that is this job's alone ends its turn; one that may pass by itself is met again with the next plan.
    fn at_fault(&mut self, job: JobId, error: StoreError) -> Result<(), StoreError> {
        if !error.spares_others() {
            return Err(error);
        }
        if error.may_retry() {
            tracing::warn!(%job, %error, cause = ?std::error::Error::source(&error), "a job's row is not free now");
        } else {
            self.leader.store.aside().put("job", job.0, &error);
            self.state.job_over(job, 0);
        }
        Ok(())
    }

    async fn nodes(&mut self) -> Result<(), StoreError> {
        let rows = self.leader.store.core_nodes().await?;
        let gone: Vec<NodeId> =
            self.state.node_ids().filter(|id| !rows.iter().any(|r| r.id == **id)).cloned().collect();
        gone.iter().for_each(|id| self.state.node_gone(id));
        rows.into_iter().for_each(|row| self.state.node(row));
        Ok(())
    }

    /// Reads everything again, looks after the stream, and ends what ran out of time.
    async fn sweep(&mut self) -> Result<(), StoreError> {
        let store = &self.leader.store;
        let asked = Instant::now();
        let read = DatabaseClock::new(store.clock_ms().await?);
        if self.grace.reading(self.clock.as_ref(), &read, asked.elapsed()) {
            tracing::warn!("the database's clock jumped or answered late; leases get one TTL before they are swept");
        }
        self.clock = Some(read);
        self.nodes().await?;
        let rows = store.live_jobs().await?;
        let over: Vec<JobId> = self.state.job_ids().filter(|id| !rows.iter().any(|(r, _)| r.id == *id)).collect();
        for job in over {
            self.job(job).await?;
        }
        rows.into_iter().for_each(|(row, changed_ms)| self.state.job(row, changed_ms));
        match stream::ensure(&self.leader.session).await {
            Ok(false) => {}
            Ok(true) => self.consumers().await,
            Err(error) => {
                tracing::warn!(%error, "nats does not answer");
                self.grace.renew(Instant::now());
            }
        }
        if self.grace.holds(Instant::now()) {
            return Ok(());
        }
        let (hints, jobs, tasks) = store.sweep(self.lead).await?;
        self.leader.metrics.jobs_lost.inc_by(jobs as u64);
        self.leader.metrics.tasks_lost.inc_by(tasks as u64);
        if jobs + tasks > 0 {
            tracing::warn!(jobs, tasks, "leases ran out");
            for hint in &hints {
                if let crate::store::Hint::Leader(LeaderHint::Job(job)) = hint {
                    self.job(*job).await?;
                }
            }
        }
        self.leader.link.tell(hints).await;
        self.leader.link.tell(store.sweep_deadlines(self.lead).await?).await;
        Ok(())
    }

    /// The stream is new: so must the consumers be.
    async fn consumers(&self) {
        let nodes = match self.leader.store.core_nodes().await {
            Ok(nodes) => nodes,
            Err(error) => return tracing::warn!(%error, "cannot read the nodes"),
        };
        let (session, timing) = (&self.leader.session, self.leader.store.timing());
        for node in nodes {
            if let Err(error) = stream::ensure_consumer(session, &node.id, node.boot, timing, false).await {
                tracing::warn!(node = %node.id, %error, "cannot make the node's consumer");
            }
        }
    }

    /// Plans and carries the plan out. An effect that the database rejects leaves its row as it is; it is read again.
    async fn plan(&mut self) -> Result<(), StoreError> {
        let Some(now_ms) = self.clock.map(|clock| clock.now_ms()) else { return Ok(()) };
        for effect in plan(&self.state, now_ms) {
            let job = effect.job();
            if let Err(error) = self.carry_out(effect, now_ms).await {
                self.at_fault(job, error)?;
            }
        }
        Ok(())
    }

    async fn carry_out(&mut self, effect: Effect, now_ms: i64) -> Result<(), StoreError> {
        let store = &self.leader.store;
        match effect {
            Effect::Place { job, attempt, node, boot, reason } => {
                let order = PlaceOrder { job, attempt, node, boot, reason };
                let placed = store.place(self.lead, &order).await?;
                self.job(job).await?;
                if let Some(work) = placed {
                    self.leader.metrics.placements.inc();
                    tracing::info!(%job, attempt, node = %order.node, reason = order.reason, "placed");
                    self.publish(&order.node, boot, &work).await;
                    cfq_link::failpoint::hit("scheduler.place.after_publish");
                }
            }
            Effect::Resend { job, attempt, lease, node, boot } => {
                self.state.resent(job, lease, now_ms);
                if let Some(work) = store.placed_order(JobFence { job, attempt, lease }).await? {
                    self.leader.metrics.republished.inc();
                    tracing::info!(%job, attempt, %node, "nobody accepted it yet, sent again");
                    self.publish(&node, boot, &work).await;
                }
            }
            Effect::Unplace { job, attempt, lease, node, deaf, why } => {
                tracing::info!(%job, attempt, %node, why, "placement taken back");
                store.unplace(self.lead, JobFence { job, attempt, lease }, &why).await?;
                self.job(job).await?;
                if deaf {
                    self.state.deaf(&node, now_ms);
                    self.consumers().await;
                }
            }
            Effect::Fail { job, attempt, failure } => {
                tracing::warn!(%job, attempt, %failure, "job failed");
                if let Some(hints) = store.fail_queued(self.lead, job, attempt, &failure).await? {
                    self.leader.link.tell(hints).await;
                }
                self.job(job).await?;
            }
            Effect::Unavailable { job, attempt, reason } => {
                store.note_unavailable(self.lead, job, attempt, &reason).await?;
                self.job(job).await?;
            }
            Effect::Load { job, node, boot, model, reason } => {
                tracing::info!(%job, %node, %model, reason, "model wanted");
                let command = NodeCommand::Load { model: model.clone() };
                if let Err(error) = self.leader.session.publish(&subject::node_command(&node), &command).await {
                    tracing::debug!(%node, %error, "not sent; it is asked for again");
                }
                self.state.asked_to_load(node, boot, model, now_ms);
            }
            Effect::Explain { job, attempt, waiting, no_node_ms } => {
                let written = store.explain(self.lead, job, attempt, &waiting, no_node_ms).await?;
                self.job(job).await?;
                if written {
                    self.state.explained(job, waiting, now_ms);
                }
            }
        }
        Ok(())
    }

    /// To the node where the call would be placed. Nothing is written down: whatever becomes of it is right.
    async fn pass_on(&mut self, ahead: WarmUp) {
        let Some(now_ms) = self.clock.map(|clock| clock.now_ms()) else { return };
        let Some(node) = warmer(&self.state, &ahead, now_ms) else { return };
        self.state.warmed(&node, &ahead);
        let command = NodeCommand::Warm { ahead };
        if let Err(error) = self.leader.session.publish(&subject::node_command(&node), &command).await {
            tracing::debug!(%node, %error, "warm-up not sent");
        }
    }

    /// A publish that fails is repeated by the acceptance time.
    async fn publish(&self, node: &NodeId, boot: cfq_proto::ids::BootId, work: &cfq_proto::messages::WorkOrder) {
        match stream::publish(&self.leader.session, node, boot, work).await {
            Ok(()) => {}
            Err(StreamError::Gone) => {
                tracing::warn!("the work stream is gone, making it again");
                match stream::ensure(&self.leader.session).await {
                    Ok(_) => self.consumers().await,
                    Err(error) => tracing::warn!(%error, "cannot make the work stream"),
                }
            }
            Err(error) => tracing::warn!(%error, "order not published"),
        }
    }
}
