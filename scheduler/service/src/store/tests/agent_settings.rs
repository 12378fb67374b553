//! Tests of changes of the agents' models while jobs wait, run and fail.

use cfq_proto::job::JobFailure;
use cfq_proto::model::ModelId;
use cfq_proto::task::Agent;

use super::super::Requeued;
use super::*;

fn other() -> ModelId {
    "path:/m/other.gguf".parse().unwrap()
}

/// A running job of a task whose creator's model follows the agent's.
async fn following() -> Running {
    let r = running().await;
    r.env.store.raw("update tasks set agents_without_model = '{alpha}'").await;
    r
}

/// Sets Alpha's model; returns the numbers of moved and of running calls.
async fn set(r: &Running, model: Option<&ModelId>) -> (usize, usize) {
    let change = r.env.store.set_agent_model(Agent::Alpha, model, "me").await.unwrap();
    (change.moved_calls, change.running_calls)
}

async fn model_of(r: &Running) -> ModelId {
    view_of(&r.env, r.job.job).await.model
}

#[tokio::test]
async fn failed_attempt_of_a_running_job_is_repeated_with_the_new_model() {
    let r = following().await;
    let before = model_of(&r).await;
    assert_eq!(set(&r, Some(&other())).await, (0, 1));
    assert_eq!(set(&r, Some(&other())).await, (0, 0), "the same model again");
    assert_eq!(model_of(&r).await, before, "the attempt finishes with its model");
    // The old model's failure would be final.
    let failure = JobFailure::Rejected { reason: "no such model".into() };
    report(&r.env, r.job, r.node, Outcome::Failed { failure }).await;
    assert_eq!((state_of(&r.env, r.job.job).await, model_of(&r).await), (JobState::Queued, other()));
    assert_eq!(r.env.store.count("select failures::bigint + losses from jobs").await, 0);
    let order = place(&r.env, r.leadership, r.job.job, r.node).await;
    assert_eq!(order.model, other());
    assert_eq!(accept(&r.env, order.fence, r.node).await, FenceReply::Committed);
    report(&r.env, order.fence, r.node, done("text")).await;
    assert_eq!(state_of(&r.env, r.job.job).await, JobState::Done);
}

#[tokio::test]
async fn plan_for_the_old_model_is_rejected_after_the_job_has_moved() {
    let r = following().await;
    report(&r.env, r.job, r.node, Outcome::Released { reason: ReleaseReason::Drained }).await;
    let attempt = view_of(&r.env, r.job.job).await.attempt;
    assert_eq!(set(&r, Some(&other())).await, (1, 0));
    let store = &r.env.store;
    let failure = JobFailure::Unavailable { reason: "no node has the old model".into() };
    assert!(store.fail_queued(r.leadership, r.job.job, attempt, &failure).await.unwrap().is_none());
    assert!(!store.note_unavailable(r.leadership, r.job.job, attempt, "down").await.unwrap());
    let order = PlaceOrder { job: r.job.job, attempt: attempt + 1, node: node(), boot: r.node, reason: String::new() };
    assert!(store.place(r.leadership, &order).await.unwrap().is_none());
    assert_eq!(place(&r.env, r.leadership, r.job.job, r.node).await.model, other());
}

#[tokio::test]
async fn dead_letter_is_requeued_with_the_new_model_and_the_task_released_once() {
    let r = following().await;
    r.env.store.raw("update jobs set losses = 1000, lease_expires = now() - interval '1 second'").await;
    r.env.store.raw("update nodes set last_seen = now() - interval '1 hour'").await;
    r.env.store.sweep_now(r.leadership).await.unwrap();
    assert_eq!(state_of(&r.env, r.job.job).await, JobState::Dead);
    assert_eq!(set(&r, Some(&other())).await, (0, 0));
    assert!(matches!(r.env.store.requeue(r.job.job, "me").await.unwrap(), Requeued::Done { .. }));
    assert_eq!(model_of(&r).await, other());
    // The runner has the old settings.
    let (reply, _) = r.env.store.submit_job(&runner(), &submit_job(r.task, 0)).await.unwrap();
    assert_eq!(reply, JobReply::Stale);
    let granted = grant(&r.env, r.runner).await;
    assert_eq!(granted.spec.agents.alpha.model, Some(other()));
    let (reply, _) = r.env.store.submit_job(&runner(), &submit_job(granted.fence, 0)).await.unwrap();
    assert_eq!(view(reply).model, other());
}

#[tokio::test]
async fn task_that_names_its_model_keeps_it_and_the_configuration_returns() {
    let r = running().await;
    let configured = model_of(&r).await;
    assert_eq!(set(&r, Some(&other())).await, (0, 0));
    report(&r.env, r.job, r.node, Outcome::Released { reason: ReleaseReason::Drained }).await;
    assert_eq!(model_of(&r).await, configured);
    r.env
        .store
        .raw("update tasks set agents_without_model = '{alpha}'; update jobs set model = 'path:/m/other.gguf'")
        .await;
    assert_eq!(set(&r, None).await, (1, 0));
    assert_eq!(model_of(&r).await, configured);
}
