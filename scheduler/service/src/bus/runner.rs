//! What runners ask.

use std::sync::Arc;

use cfq_link::LinkError;
use cfq_link::stop::Stop;
use cfq_proto::ids::RunnerId;
use cfq_proto::messages::{
    Beat, BeatReply, FenceReply, GiveUp, HelloReply, JobAsk, JobDrop, JobLook, JobReply, LeaseReply, LeaseRequest,
    Release, RunnerHello, StepReply, StepRequest,
};
use tokio::task::JoinSet;

use super::node::{blob_get, blob_put, fenced, later_boot, may_pass, too_old};
use super::{Bus, reason};

pub(super) async fn serve(bus: &Arc<Bus>, loops: &mut JoinSet<()>, stop: &Stop) -> Result<(), LinkError> {
    bus.answer(loops, stop, "runner", "beat", beat).await?;
    bus.answer(loops, stop, "runner", "hello", hello).await?;
    bus.answer(loops, stop, "runner", "lease", lease).await?;
    bus.answer(loops, stop, "runner", "step", step).await?;
    bus.answer(loops, stop, "runner", "job", job).await?;
    bus.answer(loops, stop, "runner", "job_look", job_look).await?;
    bus.answer(loops, stop, "runner", "job_cancel", job_cancel).await?;
    bus.answer(loops, stop, "runner", "release", release).await?;
    bus.answer(loops, stop, "runner", "give_up", give_up).await?;
    bus.answer(loops, stop, "runner", "blob_put", blob_put).await?;
    bus.answer(loops, stop, "runner", "blob_get", blob_get).await
}

async fn hello(bus: Arc<Bus>, sender: String, hello: RunnerHello) -> Option<HelloReply> {
    if hello.runner.as_str() != sender {
        return Some(HelloReply::Refused { reason: format!("{sender} cannot say hello as {}", hello.runner) });
    }
    if let Some(reason) = too_old(&hello.version) {
        return Some(HelloReply::Refused { reason });
    }
    match bus.store.runner_hello(&hello).await {
        Ok(None) => Some(HelloReply::Refused { reason: later_boot(&sender) }),
        Ok(Some(hints)) => {
            tracing::info!(runner = %hello.runner, boot = %hello.boot, version = hello.version, "runner joined");
            bus.link.tell(hints).await;
            Some(HelloReply::Welcome { consumer: String::new() })
        }
        Err(error) => {
            reason(&error, "runner hello");
            None
        }
    }
}

async fn beat(bus: Arc<Bus>, sender: String, beat: Beat) -> Option<BeatReply> {
    let runner: RunnerId = sender.parse().ok()?;
    match bus.beats.runner_beat(&runner, &beat).await {
        Ok(reply) => Some(reply),
        Err(error) => {
            reason(&error, "runner beat");
            None
        }
    }
}

async fn lease(bus: Arc<Bus>, sender: String, ask: LeaseRequest) -> Option<LeaseReply> {
    let runner: RunnerId = sender.parse().ok()?;
    Some(match bus.store.grant(&runner, ask.boot).await {
        Ok(reply) => reply,
        Err(error) => LeaseReply::Unavailable { reason: reason(&error, "lease") },
    })
}

async fn step(bus: Arc<Bus>, sender: String, ask: StepRequest) -> Option<StepReply> {
    let runner: RunnerId = sender.parse().ok()?;
    Some(match bus.store.commit_step(&runner, &ask).await {
        Ok((reply, hints)) => {
            bus.link.tell(hints).await;
            reply
        }
        Err(error) if may_pass(&error) => StepReply::Unavailable { reason: reason(&error, "step") },
        Err(error) => StepReply::Illegal { reason: reason(&error, "step") },
    })
}

async fn job(bus: Arc<Bus>, sender: String, ask: JobAsk) -> Option<JobReply> {
    let runner: RunnerId = sender.parse().ok()?;
    Some(match bus.store.ask_job(&runner, &ask).await {
        Ok((reply, hints)) => {
            bus.link.tell(hints).await;
            reply
        }
        Err(error) if may_pass(&error) => JobReply::Unavailable { reason: reason(&error, "job") },
        Err(error) => JobReply::Refused { reason: reason(&error, "job") },
    })
}

async fn job_look(bus: Arc<Bus>, sender: String, ask: JobLook) -> Option<JobReply> {
    let runner: RunnerId = sender.parse().ok()?;
    Some(match bus.store.look_at_job(&runner, &ask).await {
        Ok(reply) => reply,
        Err(error) if may_pass(&error) => JobReply::Unavailable { reason: reason(&error, "job look") },
        Err(error) => JobReply::Refused { reason: reason(&error, "job look") },
    })
}

async fn job_cancel(bus: Arc<Bus>, sender: String, ask: JobDrop) -> Option<FenceReply> {
    let runner: RunnerId = sender.parse().ok()?;
    let answer = bus.store.drop_job(&runner, &ask).await;
    Some(fenced(&bus, "job_cancel", answer).await)
}

async fn release(bus: Arc<Bus>, sender: String, ask: Release) -> Option<FenceReply> {
    let runner: RunnerId = sender.parse().ok()?;
    let answer = bus.store.release(&runner, &ask).await;
    Some(fenced(&bus, "release", answer).await)
}

async fn give_up(bus: Arc<Bus>, sender: String, ask: GiveUp) -> Option<FenceReply> {
    let runner: RunnerId = sender.parse().ok()?;
    let answer = bus.store.give_up(&runner, &ask).await;
    Some(fenced(&bus, "give_up", answer).await)
}
