//! One term of a leader, from its election until it loses the leader row. Async tasks share the work, so that none
//! waits for another:
//! - [`sweeper`](super::sweeper) ends expired leases and needs only Postgres,
//! - [`preemption`](super::preemption) names the running tasks that tasks of P0 preempt,
//! - [`starts`](super::starts) starts tasks that waited for others or for their time, and fires schedules,
//! - [`work_stream`](super::work_stream) keeps the JetStream stream and the nodes' consumers in place,
//! - this module owns the planner's cache: it reads the rows named in hints, asks the planner for the next effects, and
//!   applies them by compare-and-set. It also reads again, at intervals, the rows that have changed, so a lost hint only
//!   delays a change.
//!
//! An error that concerns one row skips only that row; the rest of the plan continues.

mod observations;
mod requests;

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

use cfq_proto::ids::{JobId, NodeId};
use cfq_proto::messages::{JobFence, NodeCommand, PrefillHint};
use cfq_proto::subject;
use cfq_scheduler_core::{Effect, JobPhase, PlannerState, PlannerTiming, UnplaceReason, join_by_node, plan_step};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

use requests::subscribe;

use super::explain::ExplainRequest;
use super::nats_check::NatsCheck;
use super::publisher::Publisher;
use super::rereads::Rereads;
use super::sweeper::{Observed, Sweeper};
use super::wait_estimates::WaitEstimates;
use super::work_stream::WorkStream;
use super::{Leader, preemption, starts};
use crate::store::{LeaderHint, Leadership, LiveJob, PlaceOrder, RowVersion, StoreError, limited};

/// Maximum number of hints that are applied before the next plan.
const MAX_HINTS_PER_PLAN: usize = 256;
/// Maximum time for applying one plan. The effects that are left are planned again, after the rows named in new hints
/// were read: a long plan must not delay the placement of a job that was submitted meanwhile.
const MAX_PLAN_TIME: Duration = Duration::from_millis(250);
/// Time for which a job whose row is locked is left out of the plan, so that waiting for its lock delays no other job.
const ROW_UNAVAILABLE_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of job rows that one query reads.
const MAX_ROWS_PER_READ: usize = 1_000;
/// Maximum number of placements that are planned at once.
const MAX_EFFECTS_PER_STEP: usize = 256;
/// Time after which the planner looks at all jobs and nodes, whatever has changed.
const LOOK_AT_ALL_INTERVAL: Duration = Duration::from_secs(60);

/// State of the leader during one term.
struct Term<'a> {
    leader: &'a Leader,
    leadership: Leadership,
    state: PlannerState,
    /// Version of each job's row in the cache.
    versions: HashMap<JobId, RowVersion>,
    /// Jobs whose rows were locked, or otherwise unavailable, and when they are tried again.
    unavailable: HashMap<JobId, Instant>,
    /// When the planner looked at all jobs and nodes last.
    looked_at_all: Instant,
    /// What the last sweep found; `None` until the first sweep.
    observed: watch::Receiver<Option<Observed>>,
    /// Jumps of the clock that the cache knows: the value of [`Observed::jumps_ms`].
    known_jumps_ms: i64,
    publisher: Publisher,
    waits: WaitEstimates,
}

/// Runs the term: places jobs and ends expired leases until another scheduler leads or the subscription to hints ends.
pub async fn run(leader: &Leader, leadership: Leadership, confirmed: watch::Receiver<Instant>, nats: NatsCheck) {
    let timing = leader.store.timing();
    let planner_timing = PlannerTiming {
        lease_ttl_ms: timing.lease_ttl_ms,
        accept_timeout_ms: timing.accept_timeout_ms,
        prepare_timeout_ms: timing.prepare_timeout_ms,
        retry_ceiling_ms: timing.retry_ceiling_ms,
    };
    let (observer, observed) = watch::channel(None);
    let work_stream = WorkStream::default();
    // Dropping the set at the end of the term ends its tasks.
    let mut helpers = JoinSet::new();
    helpers.spawn(Sweeper::new(leader.clone(), leadership, observer, confirmed, nats).run());
    helpers.spawn(preemption::run(leader.clone(), leadership));
    helpers.spawn(starts::run(leader.clone(), leadership));
    helpers.spawn(work_stream.clone().run(leader.clone()));
    let mut hints = subscribe::<LeaderHint>(leader, subject::HINT_LEADER).await;
    let mut prefill_hints = subscribe::<PrefillHint>(leader, subject::PREFILL_HINTS_ALL).await;
    let mut explains = subscribe::<ExplainRequest>(leader, subject::LEADER_EXPLAIN).await;
    let mut term = Term {
        leader,
        leadership,
        state: PlannerState::new(planner_timing),
        versions: HashMap::new(),
        unavailable: HashMap::new(),
        looked_at_all: Instant::now(),
        observed,
        known_jumps_ms: 0,
        publisher: Publisher::new(leader.session.clone(), work_stream),
        waits: WaitEstimates::new(),
    };
    let mut rereads = Rereads::new(timing.sweep());
    // Each tick runs the planner, which checks whether a backoff has ended, or a node has not accepted a job in time.
    // Ticks at a sixth of the accept timeout notice both soon enough.
    let mut ticks =
        interval((timing.accept_timeout() / 6).clamp(Duration::from_millis(20), Duration::from_millis(500)));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut is_plan_cut = false;
    // Rows named in hints that are not read yet.
    let (mut jobs, mut nodes) = (BTreeSet::new(), BTreeSet::new());
    loop {
        let done = tokio::select! {
            ended = helpers.join_next() => {
                if let Some(Err(error)) = ended {
                    tracing::error!(%error, "a task of the leader panicked; the term ends");
                }
                return;
            }
            () = rereads.due() => {
                let began = Instant::now();
                term.exclude_clock_jumps();
                let done = term.reread().await;
                match &done {
                    Ok(()) => rereads.on_done(began.elapsed()),
                    Err(_) => rereads.on_failed(),
                }
                done
            }
            _ = ticks.tick() => Ok(()),
            () = std::future::ready(()), if is_plan_cut => Ok(()),
            Some(message) = prefill_hints.next() => {
                match message.body {
                    Ok(hint) => term.forward_prefill_hint(hint).await,
                    Err(error) => tracing::debug!(%error, "unreadable prefill hint ignored"),
                }
                continue;
            }
            Some(request) = explains.next() => {
                term.answer_explain(request).await;
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
                term.exclude_clock_jumps();
                let done = term.refresh(&jobs, &nodes).await;
                if done.is_ok() {
                    jobs.clear();
                    nodes.clear();
                }
                done
            }
        };
        let done = match done {
            Ok(()) => term.plan().await,
            Err(error) => Err(error),
        };
        match done {
            Ok(is_cut) => is_plan_cut = is_cut,
            Err(StoreError::NotLeader { term }) => {
                tracing::warn!(term, "plan rejected, another scheduler leads");
                return;
            }
            Err(error) => {
                tracing::warn!(%error, cause = ?std::error::Error::source(&error), "plan failed, retrying");
                tokio::time::sleep(timing.sweep()).await;
            }
        }
    }
}

impl Term<'_> {
    /// Updates the cache with the rows named in hints.
    async fn refresh(&mut self, jobs: &BTreeSet<JobId>, nodes: &BTreeSet<NodeId>) -> Result<(), StoreError> {
        if !nodes.is_empty() {
            let rows = limited("reading nodes", self.leader.store.core_nodes_of(nodes)).await?;
            let gone = nodes.iter().filter(|id| !rows.iter().any(|row| row.id == **id));
            gone.for_each(|id| self.state.on_node_gone(id));
            rows.into_iter().for_each(|row| self.state.on_node_row(row));
        }
        let skipped = self.leader.store.row_backoff().rows();
        let (skipped, jobs): (Vec<JobId>, Vec<JobId>) = jobs.iter().partition(|job| skipped.contains(&job.0));
        skipped.into_iter().for_each(|job| self.on_job_ended(job, 0));
        let rows = limited("reading jobs", self.leader.store.live_jobs_of(&jobs)).await?;
        // A call of an API client is deleted at its end.
        let found: BTreeSet<JobId> = rows.iter().map(|row| row.id).collect();
        let now_ms = self.now_ms().unwrap_or(0);
        jobs.into_iter().filter(|job| !found.contains(job)).for_each(|job| self.on_job_ended(job, now_ms));
        rows.into_iter().for_each(|row| self.on_live_row(row));
        Ok(())
    }

    /// Reads again all nodes, and the jobs whose rows changed since they were last read.
    async fn reread(&mut self) -> Result<(), StoreError> {
        let live = limited("reading the versions of jobs", self.leader.store.live_job_versions()).await?;
        let ended: Vec<JobId> = self.state.job_ids().filter(|id| !live.contains_key(id)).collect();
        for job in ended {
            self.refresh_job(job).await?;
        }
        let changed: Vec<JobId> =
            live.iter().filter(|(id, version)| self.versions.get(id) != Some(version)).map(|(id, _)| *id).collect();
        for rows in changed.chunks(MAX_ROWS_PER_READ) {
            for row in limited("reading jobs", self.leader.store.live_jobs_of(rows)).await? {
                self.on_live_row(row);
            }
        }
        // The nodes are read last: a plan with old times of their heartbeats would take live nodes for lost.
        let rows = limited("reading the nodes", self.leader.store.core_nodes()).await?;
        let registered: BTreeSet<&NodeId> = rows.iter().map(|row| &row.id).collect();
        let gone: Vec<NodeId> = self.state.node_ids().filter(|id| !registered.contains(id)).cloned().collect();
        gone.iter().for_each(|id| self.state.on_node_gone(id));
        rows.into_iter().for_each(|row| self.state.on_node_row(row));
        self.publisher.retain(self.state.placed_leases());
        Ok(())
    }

    fn on_live_row(&mut self, row: LiveJob) {
        match row.job {
            Some(job) => {
                self.versions.insert(job.id, row.version);
                self.state.on_job_row(job, row.changed_ms);
            }
            None => self.on_job_ended(row.id, row.changed_ms),
        }
    }

    fn on_job_ended(&mut self, job: JobId, ended_ms: i64) {
        self.versions.remove(&job);
        self.waits.on_ended(job);
        self.state.on_job_ended(job, ended_ms);
    }

    /// Reads one job's row into the cache. A job whose row is skipped for now after an error is removed from the cache;
    /// otherwise the planner would reserve capacity for a job that cannot be placed.
    async fn refresh_job(&mut self, job: JobId) -> Result<(), StoreError> {
        let store = &self.leader.store;
        if store.row_backoff().contains(job.0) {
            self.on_job_ended(job, 0);
            return Ok(());
        }
        match limited("reading a job", store.live_job(job)).await {
            Ok(Some(row)) => self.on_live_row(row),
            Ok(None) => self.on_job_ended(job, self.now_ms().unwrap_or(0)),
            Err(error) => self.on_job_error(job, error)?,
        }
        Ok(())
    }

    /// Skips the job if the error concerns only its row; returns the error otherwise. After a transient error, the row is
    /// read again soon.
    fn on_job_error(&mut self, job: JobId, error: StoreError) -> Result<(), StoreError> {
        if !error.is_row_local() {
            return Err(error);
        }
        if error.may_retry() {
            let cause = std::error::Error::source(&error);
            tracing::warn!(%job, %error, ?cause, "job row unavailable, retried soon");
            self.unavailable.insert(job, Instant::now() + ROW_UNAVAILABLE_INTERVAL);
            // Without this, the job would be planned again in each step, in place of others.
            if self.state.job(job).is_some_and(|job| matches!(job.phase, JobPhase::Queued)) {
                self.on_job_ended(job, 0);
            }
        } else {
            self.leader.store.row_backoff().defer("job", job.0, &error);
            self.on_job_ended(job, 0);
        }
        Ok(())
    }

    /// Carries out the next effects, for at most [`MAX_PLAN_TIME`]. Returns whether effects are left. An effect that the
    /// database rejects leaves its row unchanged; the row is read again.
    async fn plan(&mut self) -> Result<bool, StoreError> {
        let Some(now_ms) = self.now_ms() else { return Ok(false) };
        self.exclude_clock_jumps();
        let began = Instant::now();
        let due = self.unavailable.extract_if(|_, until| *until <= began).map(|(job, _)| job);
        for job in due.collect::<Vec<_>>() {
            self.refresh_job(job).await?;
        }
        if self.looked_at_all.elapsed() > LOOK_AT_ALL_INTERVAL {
            self.state.look_at_all();
            self.looked_at_all = began;
        }
        let step = plan_step(&mut self.state, now_ms, MAX_EFFECTS_PER_STEP);
        for effect in step.effects {
            let job = effect.job();
            if self.unavailable.contains_key(&job) {
                continue;
            }
            if began.elapsed() > MAX_PLAN_TIME {
                return Ok(true);
            }
            if let Err(error) = self.apply(effect, now_ms).await {
                self.on_job_error(job, error)?;
            }
        }
        if !step.is_cut {
            self.waits.update(&self.state, now_ms);
        }
        Ok(step.is_cut)
    }

    async fn apply(&mut self, effect: Effect, now_ms: i64) -> Result<(), StoreError> {
        let store = &self.leader.store;
        match effect {
            Effect::Place { job, attempt, node, boot, reason } => {
                let order = PlaceOrder { job, attempt, node, boot, reason };
                let placed = limited("placing a job", store.place(self.leadership, &order)).await?;
                self.refresh_job(job).await?;
                if let Some(work) = placed {
                    self.leader.metrics.placements.inc();
                    if let Some(ratio) = self.waits.on_placed(job, now_ms) {
                        self.leader.metrics.wait_estimate_ratio.observe(ratio);
                    }
                    tracing::info!(%job, attempt, node = %order.node, reason = order.reason, "placed");
                    self.publisher.publish(order.node, boot, work);
                }
            }
            Effect::Resend { job, attempt, lease, node, boot } => {
                self.state.on_resent(job, lease, now_ms);
                if let Some(work) =
                    limited("reading a placed job", store.placed_order(JobFence { job, attempt, lease })).await?
                {
                    self.leader.metrics.work_orders_resent.inc();
                    tracing::info!(%job, attempt, %node, "job not accepted in time, work order sent again");
                    self.publisher.publish_again(node, boot, work);
                }
            }
            Effect::Unplace { job, attempt, lease, node, reason } => {
                let text = format!("{node} {reason}");
                tracing::info!(%job, attempt, %node, reason = text, "placement withdrawn");
                let end = self.end_of_placement(&node, lease, reason);
                let fence = JobFence { job, attempt, lease };
                let hints = limited("revoking a placement", store.unplace(self.leadership, fence, end, &text)).await?;
                self.refresh_job(job).await?;
                self.leader.link.send_hints(hints.unwrap_or_default()).await;
                match reason {
                    UnplaceReason::NodeUnresponsive => {
                        self.state.on_node_unresponsive(&node, now_ms);
                        self.publisher.repair_stream();
                    }
                    UnplaceReason::NodeLost => {}
                }
            }
            Effect::Fail { job, attempt, failure } => {
                tracing::warn!(%job, attempt, %failure, "job failed");
                let failed = store.fail_queued(self.leadership, job, attempt, &failure);
                if let Some(hints) = limited("failing a job", failed).await? {
                    self.leader.link.send_hints(hints).await;
                }
                self.refresh_job(job).await?;
            }
            Effect::NoteUnavailable { job, attempt, reports } => {
                let reports = join_by_node(&reports);
                let noted = store.note_unavailable(self.leadership, job, attempt, &reports);
                limited("recording that a model is unavailable", noted).await?;
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
                let explained = store.explain(self.leadership, job, attempt, &pending, no_node_ms);
                let written = limited("recording why a job is pending", explained).await?;
                self.refresh_job(job).await?;
                if written {
                    self.state.on_pending_explained(job, pending, now_ms);
                }
            }
        }
        Ok(())
    }
}
