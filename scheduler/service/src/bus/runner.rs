//! Handlers for the NATS requests of runners.

use std::sync::Arc;

use cfq_link::LinkError;
use cfq_link::stop::Stop;
use cfq_proto::ids::RunnerId;
use cfq_proto::messages::{
    Abandon, ActivityReport, BlobGet, BlobGetReply, BlobPut, BlobPutReply, FenceReply, Heartbeat, HeartbeatReply,
    JobCancel, JobGet, JobReply, JobSubmit, LeaseReply, LeaseRequest, MainGet, MainReply, RegisterReply, Release,
    RunnerRegistration, StepReply, StepRequest,
};
use tokio::task::JoinSet;

use super::node::{
    FORMER_REGISTER, fence_reply, get_chunk, may_succeed_later, put_chunk, refuse_former_register, refuse_used_id,
};
use super::{Bus, log_failure, refusal, unavailable};
use crate::store::{BlobLease, StoreError};
use crate::version;

pub(super) async fn serve(bus: &Arc<Bus>, loops: &mut JoinSet<()>, stop: &Stop) -> Result<(), LinkError> {
    bus.answer(loops, stop, "runner", "heartbeat", heartbeat).await?;
    bus.answer(loops, stop, "runner", "register", register).await?;
    bus.answer(loops, stop, "runner", FORMER_REGISTER, refuse_former_register).await?;
    bus.answer(loops, stop, "runner", "lease", lease).await?;
    bus.answer(loops, stop, "runner", "step", step).await?;
    bus.answer(loops, stop, "runner", "main_get", main_get).await?;
    bus.answer(loops, stop, "runner", "job_submit", job_submit).await?;
    bus.answer(loops, stop, "runner", "job_get", job_get).await?;
    bus.answer(loops, stop, "runner", "job_cancel", job_cancel).await?;
    bus.answer(loops, stop, "runner", "activity", activity).await?;
    bus.answer(loops, stop, "runner", "release", release).await?;
    bus.answer(loops, stop, "runner", "abandon", abandon).await?;
    bus.answer(loops, stop, "runner", "blob_put", blob_put).await?;
    bus.answer(loops, stop, "runner", "blob_get", blob_get).await
}

async fn register(bus: Arc<Bus>, sender: String, registration: RunnerRegistration) -> Option<RegisterReply> {
    if registration.runner.as_str() != sender {
        let name = &registration.runner;
        let reason = format!("{sender} cannot register as {name}: give it the NATS credentials of that name");
        return Some(RegisterReply::Refused { reason, retry_ms: None });
    }
    if let Some(reason) = version::refusal(&registration.version) {
        return Some(RegisterReply::Refused { reason, retry_ms: None });
    }
    match bus.store.register_runner(&registration).await {
        Ok(Err(in_use)) => Some(refuse_used_id(&sender, in_use)),
        Ok(Ok(hints)) => {
            let RunnerRegistration { runner, boot, version, .. } = &registration;
            tracing::info!(%runner, %boot, version, "runner registered");
            bus.link.send_hints(hints).await;
            Some(RegisterReply::Registered { consumer: String::new(), pushes_orders: false })
        }
        Err(error) => {
            log_failure(&error, "runner register");
            None
        }
    }
}

async fn heartbeat(bus: Arc<Bus>, sender: String, heartbeat: Heartbeat) -> Option<HeartbeatReply> {
    let runner: RunnerId = sender.parse().ok()?;
    let recorded = bus.heartbeats.record_runner_heartbeat(&runner, &heartbeat).await;
    bus.heartbeat_failures.on_runner(&runner, !recorded.as_ref().is_err_and(StoreError::may_retry));
    match recorded {
        Ok(reply) => Some(reply),
        Err(error) => {
            log_failure(&error, "runner heartbeat");
            None
        }
    }
}

async fn lease(bus: Arc<Bus>, sender: String, request: LeaseRequest) -> Option<LeaseReply> {
    let runner: RunnerId = sender.parse().ok()?;
    Some(match bus.store.grant(&runner, &request).await {
        Ok(reply) => reply,
        Err(error) => LeaseReply::Unavailable { reason: unavailable(&error, "lease") },
    })
}

async fn step(bus: Arc<Bus>, sender: String, request: StepRequest) -> Option<StepReply> {
    let runner: RunnerId = sender.parse().ok()?;
    Some(match bus.store.commit_step(&runner, &request).await {
        Ok((reply, hints)) => {
            bus.link.send_hints(hints).await;
            reply
        }
        Err(error) if may_succeed_later(&error) => StepReply::Unavailable { reason: unavailable(&error, "step") },
        Err(error) => StepReply::Illegal { reason: refusal(&error, "step").to_string() },
    })
}

async fn main_get(bus: Arc<Bus>, sender: String, request: MainGet) -> Option<MainReply> {
    let runner: RunnerId = sender.parse().ok()?;
    Some(match bus.store.main_branch(&runner, &request).await {
        Ok(reply) => reply,
        Err(error) if may_succeed_later(&error) => MainReply::Unavailable { reason: unavailable(&error, "main get") },
        Err(error) => MainReply::Refused { reason: refusal(&error, "main get") },
    })
}

async fn job_submit(bus: Arc<Bus>, sender: String, request: JobSubmit) -> Option<JobReply> {
    let runner: RunnerId = sender.parse().ok()?;
    Some(match bus.store.submit_job(&runner, &request).await {
        Ok((reply, hints)) => {
            bus.link.send_hints(hints).await;
            reply
        }
        Err(error) if may_succeed_later(&error) => JobReply::Unavailable { reason: unavailable(&error, "job submit") },
        Err(error) => JobReply::Refused { reason: refusal(&error, "job submit") },
    })
}

async fn job_get(bus: Arc<Bus>, sender: String, request: JobGet) -> Option<JobReply> {
    let runner: RunnerId = sender.parse().ok()?;
    Some(match bus.store.get_job(&runner, &request).await {
        Ok(reply) => reply,
        Err(error) if may_succeed_later(&error) => JobReply::Unavailable { reason: unavailable(&error, "job get") },
        Err(error) => JobReply::Refused { reason: refusal(&error, "job get") },
    })
}

async fn job_cancel(bus: Arc<Bus>, sender: String, request: JobCancel) -> Option<FenceReply> {
    let runner: RunnerId = sender.parse().ok()?;
    let answer = bus.store.cancel_job(&runner, &request).await;
    Some(fence_reply(&bus, "job cancel", answer).await)
}

async fn activity(bus: Arc<Bus>, sender: String, report: ActivityReport) -> Option<FenceReply> {
    let runner: RunnerId = sender.parse().ok()?;
    let answer = bus.store.record_activity(&runner, &report).await.map(|reply| (reply, Vec::new()));
    Some(fence_reply(&bus, "activity", answer).await)
}

async fn release(bus: Arc<Bus>, sender: String, request: Release) -> Option<FenceReply> {
    let runner: RunnerId = sender.parse().ok()?;
    let answer = bus.store.release(&runner, &request).await;
    Some(fence_reply(&bus, "release", answer).await)
}

async fn abandon(bus: Arc<Bus>, sender: String, request: Abandon) -> Option<FenceReply> {
    let runner: RunnerId = sender.parse().ok()?;
    let answer = bus.store.abandon(&runner, &request).await;
    Some(fence_reply(&bus, "abandon", answer).await)
}

async fn blob_put(bus: Arc<Bus>, sender: String, put: BlobPut) -> Option<BlobPutReply> {
    let lease = BlobLease::Runner(sender.parse().ok()?, put.lease);
    Some(put_chunk(&bus, &lease, &put).await)
}

async fn blob_get(bus: Arc<Bus>, sender: String, get: BlobGet) -> Option<BlobGetReply> {
    let lease = BlobLease::Runner(sender.parse().ok()?, get.lease);
    Some(get_chunk(&bus, &lease, &get).await)
}
