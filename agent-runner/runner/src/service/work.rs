//! One granted task from grant to rest, loss or hand-back.

use std::sync::Arc;

use cfq_convergence::History;
use cfq_link::lease::HeldLease;
use cfq_proto::blob::Carried;
use cfq_proto::looping::{Step, StepRecord};
use cfq_proto::messages::{FenceReply, GiveUp, Grant, Release};
use cfq_proto::subject;

use super::Shared;
use super::cluster::{Cluster, fetch};
use super::slots::{Ear, End};
use crate::driver::{Assignment, Drive, Stopped};
use crate::pipeline::limits;
use crate::workstream::Worktrees;

pub(super) struct Granted {
    pub lease: HeldLease,
    pub grant: Carried<Grant>,
}

pub(super) struct Worker {
    shared: Arc<Shared>,
    granted: Granted,
    number: usize,
    ear: Ear,
}

impl Worker {
    /// `number` and ear of the slot it works in.
    pub fn new(shared: Arc<Shared>, granted: Granted, (number, ear): (usize, Ear)) -> Self {
        Self { shared, granted, number, ear }
    }

    pub async fn run(self) {
        let Self { shared, granted: Granted { lease, grant }, number, mut ear } = self;
        let grant = tokio::select! {
            grant = fetch(&shared, &lease, grant) => grant,
            () = lease.lost() => Err(Stopped::Lost),
        };
        let grant = match grant {
            Ok(grant) => grant,
            Err(stopped) => return tracing::warn!(lease = %lease.id(), %stopped, "a grant could not be taken up"),
        };
        let (fence, task) = (grant.fence, grant.number);
        ear.listens_to(fence.task);
        tracing::info!(%task, attempt = fence.attempt, steps = grant.steps.len(), "took a task");
        let driven = drive(shared.clone(), lease.clone(), grant, number, ear.jobs.clone());
        tokio::select! {
            ended = driven => match ended {
                Ok(history) => tracing::info!(%task, state = %history.state, "the task rests"),
                Err(Stopped::Lost) => tracing::info!(%task, "lost the task"),
                Err(Stopped::Waits { job }) => release(&shared, Release { fence, waits_for: Some(job) }).await,
                Err(Stopped::Refused { reason }) => {
                    tracing::error!(%task, reason, "cannot drive a task, giving it up");
                    give_up(&shared, &lease, GiveUp { fence, reason }).await;
                }
            },
            () = lease.lost() => tracing::info!(%task, "lost the task"),
            end = ended(&mut ear) => match end {
                End::Cancelled => tracing::info!(%task, "the task was taken back"),
                End::Drain => release(&shared, Release { fence, waits_for: None }).await,
            },
        }
        drop(lease);
        let worktrees = Worktrees::new(&shared.config.data_dir);
        let removed = tokio::task::spawn_blocking(move || worktrees.remove(task, fence.attempt)).await;
        if let Ok(Err(error)) = removed {
            tracing::warn!(%task, error = error.in_words(), "an old worktree stays until the next start");
        }
    }
}

async fn ended(ear: &mut Ear) -> End {
    match ear.end.wait_for(Option::is_some).await {
        Ok(end) => end.unwrap_or(End::Drain),
        // The slots are gone: the process ends.
        Err(_) => End::Drain,
    }
}

async fn drive(
    shared: Arc<Shared>,
    lease: HeldLease,
    grant: Grant,
    worker: usize,
    jobs: Arc<tokio::sync::Notify>,
) -> Result<History, Stopped> {
    let Grant { fence, number, spec, steps, .. } = grant;
    let port = Cluster { shared: shared.clone(), fence, lease, jobs };
    let mut history = History::default();
    for record in steps {
        let record = whole(&port, record).await?;
        history.push(&record).map_err(|error| Stopped::Refused { reason: error.to_string() })?;
    }
    let limits = limits(&spec, &shared.declaration);
    let assignment =
        Assignment { task: fence.task, number, attempt: fence.attempt, spec: Arc::new(spec), limits, history, worker };
    Drive::new(port, assignment, shared.config.data_dir.clone(), shared.config.timing.clone()).run().await
}

/// The record with its artifact inside.
async fn whole(port: &Cluster, record: StepRecord) -> Result<StepRecord, Stopped> {
    let step = match record.step {
        Step::Generated { artifact } => Step::Generated { artifact: Carried::Inline(port.fetch(artifact).await?) },
        other => other,
    };
    Ok(StepRecord { step, ..record })
}

/// Hands the task back. Whether or not it is answered, the lease is let go.
async fn release(shared: &Shared, ask: Release) {
    let fence = ask.fence;
    let subject = subject::runner(&shared.config.runner, "release");
    match shared.session.request_until_answered::<_, FenceReply>(&subject, &ask).await {
        Ok(FenceReply::Committed) => tracing::info!(task = %fence.task, "handed a task back"),
        Ok(FenceReply::Stale) => tracing::info!(task = %fence.task, "the task was not ours any more"),
        Ok(FenceReply::Refused { reason } | FenceReply::Unavailable { reason }) => {
            tracing::warn!(task = %fence.task, reason, "could not hand a task back")
        }
        Err(error) => tracing::warn!(task = %fence.task, %error, "could not hand a task back"),
    }
}

/// Tells the scheduler why. After a wait, because the same runner may be the next to try; as long as the lease lives, because
/// without it nobody would know the reason.
async fn give_up(shared: &Shared, lease: &HeldLease, ask: GiveUp) {
    let subject = subject::runner(&shared.config.runner, "give_up");
    let told = async {
        loop {
            tokio::time::sleep(shared.config.timing.backoff_base()).await;
            match shared.session.request::<_, FenceReply>(&subject, &ask).await {
                Ok(FenceReply::Committed | FenceReply::Stale) => return,
                Ok(FenceReply::Refused { reason }) => return tracing::error!(reason, "cannot give a task up"),
                Ok(FenceReply::Unavailable { reason }) => tracing::debug!(reason, "cannot give a task up yet"),
                Err(error) => tracing::debug!(%error, "cannot give a task up yet"),
            }
        }
    };
    tokio::select! {
        () = told => {}
        () = lease.lost() => {}
    }
}
