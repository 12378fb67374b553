//! Drives one granted task until it ends or waits for a human, its lease is lost, or it is released.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cfq_convergence::History;
use cfq_link::clock;
use cfq_link::lease::LeaseHandle;
use cfq_proto::blob::Payload;
use cfq_proto::ids::TaskNumber;
use cfq_proto::loop_step::{Step, StepRecord};
use cfq_proto::messages::{Abandon, FenceReply, Grant, Release};
use cfq_proto::subject;

use super::RunnerContext;
use super::nats_port::{NatsTaskPort, fetch_payload};
use super::slots::{SlotSignals, TaskStop};
use crate::driver::{Assignment, Stopped, TaskDriver};
use crate::pipeline::loop_limits;
use crate::policy_files::ServerPolicies;
use crate::workstream::Worktrees;

/// Wait before a release is repeated after the scheduler replied that it was unavailable.
const RELEASE_RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// A lease and the grant received with it.
pub(super) struct GrantedTask {
    pub lease: LeaseHandle,
    pub grant: Payload<Grant>,
}

/// Driver of one granted task in one slot.
pub(super) struct Worker {
    context: Arc<RunnerContext>,
    granted: GrantedTask,
    number: usize,
    signals: SlotSignals,
}

impl Worker {
    /// Creates the driver of a granted task. `number` is its worker number, from 1, and `signals` the receiving side of
    /// its slot.
    pub fn new(context: Arc<RunnerContext>, granted: GrantedTask, (number, signals): (usize, SlotSignals)) -> Self {
        Self { context, granted, number, signals }
    }

    /// Drives the task, then drops the lease and removes the worktree.
    pub async fn run(self) {
        let Self { context, granted: GrantedTask { lease, grant }, number, mut signals } = self;
        let grant = tokio::select! {
            grant = fetch_payload(&context, &lease, grant) => grant,
            () = lease.lost() => Err(Stopped::LeaseLost),
        };
        let grant = match grant {
            Ok(grant) => grant,
            Err(stopped) => {
                return tracing::warn!(lease = %lease.id(), %stopped, "cannot load the leased task, dropping the lease");
            }
        };
        let (fence, task) = (grant.fence, grant.number);
        signals.set_task(fence.task);
        tracing::info!(%task, attempt = fence.attempt, steps = grant.steps.len(), "task leased");
        let driven = drive(context.clone(), lease.clone(), grant, number, signals.job_changed.clone());
        tokio::select! {
            ended = driven => match ended {
                Ok(history) => tracing::info!(%task, state = %history.state, "task ended or waits for a human"),
                Err(Stopped::LeaseLost) => tracing::info!(%task, "lease lost, task dropped"),
                Err(Stopped::WaitingForPlacement { job }) => {
                    release(&context, &lease, Release { fence, waits_for: Some(job) }).await
                }
                Err(Stopped::Released) => tracing::info!(%task, "task paused or preempted after its step"),
                Err(Stopped::CannotDrive(reason)) => {
                    tracing::error!(%task, %reason, "cannot drive the task, abandoning it");
                    abandon(&context, &lease, Abandon { fence, reason: reason.to_string() }).await;
                }
            },
            () = lease.lost() => tracing::info!(%task, "lease lost, task dropped"),
            stop = stop_requested(&mut signals) => match stop {
                TaskStop::Cancelled => tracing::info!(%task, "task cancelled by the scheduler"),
                TaskStop::Drain => release(&context, &lease, Release { fence, waits_for: None }).await,
            },
        }
        drop(lease);
        let worktrees = Worktrees::new(&context.config.data_dir);
        let removed = tokio::task::spawn_blocking(move || worktrees.remove(task, fence.attempt)).await;
        if let Ok(Err(error)) = removed {
            let error = error.with_causes();
            tracing::warn!(%task, error, "cannot remove the worktree, it stays until the next start");
        }
    }
}

/// Waits until the driver must stop.
async fn stop_requested(signals: &mut SlotSignals) -> TaskStop {
    match signals.stop.wait_for(Option::is_some).await {
        Ok(reason) => reason.unwrap_or(TaskStop::Drain),
        // The slots were dropped: the process stops.
        Err(_) => TaskStop::Drain,
    }
}

async fn drive(
    context: Arc<RunnerContext>,
    lease: LeaseHandle,
    grant: Grant,
    worker: usize,
    job_changed: Arc<tokio::sync::Notify>,
) -> Result<History, Stopped> {
    let Grant { fence, number, spec, steps, reviewed, .. } = grant;
    let port = NatsTaskPort { context: context.clone(), fence, lease, job_changed };
    let mut history = History::default();
    for record in steps {
        let record = with_inline_artifact(&port, record).await?;
        history.push(&record).map_err(|error| Stopped::CannotDrive(error.into()))?;
    }
    let limits = loop_limits(&spec, &context.declaration);
    let (task, attempt, spec) = (fence.task, fence.attempt, Arc::new(spec));
    let assignment = Assignment { task, number, attempt, spec, limits, history, worker, reviewed };
    let config = &context.config;
    let (repositories, checks) = (context.repositories.clone(), context.checks.clone());
    let policies = read_server_policies(config.server_policies_folder.clone(), number).await;
    let (data_dir, timing) = (config.data_dir.clone(), config.timing.clone());
    TaskDriver::new(port, assignment, data_dir, repositories, checks, policies, timing).run().await
}

/// Reads the server policies. They are read for each attempt, so that a change needs no restart.
async fn read_server_policies(folder: Option<PathBuf>, task: TaskNumber) -> Arc<ServerPolicies> {
    let Some(folder) = folder else { return Arc::default() };
    let read = tokio::task::spawn_blocking(move || ServerPolicies::read(&folder)).await;
    let policies = read.unwrap_or_else(|error| ServerPolicies::unreadable(error.to_string()));
    for problem in &policies.problems {
        tracing::warn!(%task, problem, "the prompts lack a server policy");
    }
    Arc::new(policies)
}

/// Returns the record with its artifact loaded.
async fn with_inline_artifact(port: &NatsTaskPort, record: StepRecord) -> Result<StepRecord, Stopped> {
    let step = match record.step {
        Step::Generated { artifact } => Step::Generated { artifact: Payload::Inline(port.fetch(artifact).await?) },
        other => other,
    };
    Ok(StepRecord { step, ..record })
}

/// Releases the task to the scheduler. Repeats the request while the scheduler is unavailable and the lease is not lost:
/// a task that is not released counts as lost together with its runner.
async fn release(context: &RunnerContext, lease: &LeaseHandle, request: Release) {
    let fence = request.fence;
    let subject = subject::runner(&context.config.runner, "release");
    let released = async {
        loop {
            match context.session.request_until_answered::<_, FenceReply>(&subject, &request).await {
                Ok(FenceReply::Committed) => return tracing::info!(task = %fence.task, "task released"),
                Ok(FenceReply::Stale) => {
                    return tracing::info!(task = %fence.task, "task not released, the lease is stale");
                }
                Ok(FenceReply::Refused { reason }) => {
                    return tracing::warn!(task = %fence.task, %reason, "cannot release the task");
                }
                Ok(FenceReply::Unavailable { reason }) => {
                    tracing::info!(task = %fence.task, %reason, "cannot release the task yet, retrying");
                }
                Err(error) => return tracing::warn!(task = %fence.task, %error, "cannot release the task"),
            }
            tokio::time::sleep(RELEASE_RETRY_INTERVAL + clock::jitter(RELEASE_RETRY_INTERVAL / 2)).await;
        }
    };
    tokio::select! {
        () = released => {}
        () = lease.lost() => tracing::info!(task = %fence.task, "lease lost before the task was released"),
    }
}

/// Abandons the task and reports the reason. Waits before each request, because this runner may be the next to lease
/// the task, and would then fail again at once. Repeats the request while the lease is live, because otherwise the
/// reason would be lost.
async fn abandon(context: &RunnerContext, lease: &LeaseHandle, request: Abandon) {
    let subject = subject::runner(&context.config.runner, "abandon");
    let abandoned = async {
        loop {
            tokio::time::sleep(context.config.timing.backoff_base()).await;
            match context.session.request::<_, FenceReply>(&subject, &request).await {
                Ok(FenceReply::Committed | FenceReply::Stale) => return,
                Ok(FenceReply::Refused { reason }) => {
                    return tracing::error!(%reason, "scheduler refused the request to abandon the task");
                }
                Ok(FenceReply::Unavailable { reason }) => {
                    tracing::debug!(%reason, "cannot abandon the task yet, retrying")
                }
                Err(error) => tracing::debug!(%error, "cannot abandon the task yet, retrying"),
            }
        }
    };
    tokio::select! {
        () = abandoned => {}
        () = lease.lost() => {}
    }
}
