//! Tests of dead letters.

use cfq_proto::ids::TaskKey;
use cfq_proto::job::JobFailure;
use cfq_proto::loop_step::{ActionKind, Decided, Decision, EscalationReason};
use cfq_proto::task::TaskState;

use super::super::Requeued;
use super::*;

/// Makes the running job a dead letter, by one more loss of its node than permitted.
async fn kill(r: &Running) {
    r.env.store.raw("update jobs set losses = 1000, lease_expires = now() - interval '1 second'").await;
    r.env.store.raw("update nodes set last_seen = now() - interval '1 hour'").await;
    r.env.store.sweep_now(r.leadership).await.unwrap();
    assert_eq!(state_of(&r.env, r.job.job).await, JobState::Dead);
}

fn escalation() -> Step {
    let available_actions = vec![ActionKind::SwitchLlm, ActionKind::Abort];
    let decision = Decision::Escalate { reason: EscalationReason::AgentError, available_actions };
    let decided = Decided { decision, explanation: "given up".into(), best_iteration: None, best_score: None };
    Step::Decided { iteration: 0, decided }
}

#[tokio::test]
async fn dead_letter_is_listed_with_its_attempts_until_its_task_ends() {
    let r = running().await;
    assert!(r.env.store.dead_letters(None, 10).await.unwrap().is_empty());
    kill(&r).await;
    let listed = r.env.store.dead_letters(None, 10).await.unwrap();
    assert_eq!((listed.len(), listed[0].job, listed[0].losses), (1, r.job.job, 1001));
    assert!(r.env.store.dead_letters(Some(r.job.job), 10).await.unwrap().is_empty(), "the next page");
    for key in [TaskKey::Id(r.task.task), TaskKey::Number(listed[0].number), r.job.job.to_string().parse().unwrap()] {
        assert_eq!(r.env.store.find_dead_letter(key).await.unwrap(), Some(r.job.job), "{key}");
    }
    let detail = r.env.store.dead_letter(r.job.job).await.unwrap().unwrap();
    let attempt = &detail.attempts[0];
    assert_eq!((attempt.attempt, attempt.outcome.as_deref(), &attempt.node), (1, Some("lost"), &node()));
    assert!(attempt.accepted_at.is_some() && attempt.ended_at.is_some(), "{attempt:?}");
    r.env.store.cancel(r.task.task, "me", Run::Commit).await.unwrap();
    assert!(r.env.store.dead_letters(None, 10).await.unwrap().is_empty());
    let late = r.env.store.requeue(r.job.job, "me").await.unwrap();
    assert!(matches!(late, Requeued::TaskEnded { state: TaskState::Cancelled, .. }), "{late:?}");
}

#[tokio::test]
async fn requeue_before_the_runner_saw_the_end_queues_the_job_with_new_limits() {
    let r = running().await;
    let not_dead = r.env.store.requeue(r.job.job, "me").await.unwrap();
    assert!(matches!(not_dead, Requeued::NotDead { state: JobState::Running }), "{not_dead:?}");
    kill(&r).await;
    let done = r.env.store.requeue(r.job.job, "me").await.unwrap();
    assert!(matches!(done, Requeued::Done { state: TaskState::Running, .. }), "{done:?}");
    let job = r.env.store.live_jobs().await.remove(0);
    assert_eq!((job.losses, job.unaccepted, job.suspicions, job.last_failure), (0, 0, 0, None));
    assert!(matches!(r.env.store.requeue(r.job.job, "me").await.unwrap(), Requeued::NotDead { .. }));
    // Failures in the middle of an answer before the requeue do not count.
    r.env.store.raw("update attempts set outcome = 'failed', first_token_at = now()").await;
    let mut later = Vec::new();
    for attempt in 1..=7 {
        let fence = place(&r.env, r.leadership, r.job.job, r.node).await.fence;
        accept(&r.env, fence, r.node).await;
        r.env.store.record_first_token(&fence).await.unwrap();
        let failure = JobFailure::Unavailable { reason: "broken".into() };
        report(&r.env, fence, r.node, Outcome::Failed { failure }).await;
        later.push(state_of(&r.env, r.job.job).await);
        if later.last() == Some(&JobState::Dead) {
            assert_eq!(attempt, 6, "the limit is five, without the attempt before the requeue");
        }
        if later.last() != Some(&JobState::Queued) {
            break;
        }
    }
    assert_eq!(later.last(), Some(&JobState::Dead), "{later:?}");
}

/// The runner read the end of the call before the requeue, and escalates after it.
#[tokio::test]
async fn escalation_for_a_call_that_was_requeued_meanwhile_is_not_committed() {
    let r = running().await;
    committed(&r.env, r.task, 0, started()).await;
    r.env.store.raw("update jobs set seq = 1").await;
    kill(&r).await;
    assert!(matches!(r.env.store.requeue(r.job.job, "me").await.unwrap(), Requeued::Done { .. }));
    assert_eq!(step(&r.env, r.task, 1, escalation()).await, StepReply::Stale);
    assert_eq!(state_of(&r.env, r.job.job).await, JobState::Queued);
    assert_eq!(r.env.store.count("select count(*) from tasks where losses = 0 and state = 'ready'").await, 1);
    let fence = grant(&r.env, r.runner).await.fence;
    let found = view(r.env.store.submit_job(&runner(), &submit_job(fence, 1)).await.unwrap().0);
    assert_eq!((found.id, found.state), (r.job.job, JobState::Queued));
    // After the call has failed again, the loop escalates.
    r.env.store.raw("update jobs set state = 'dead'").await;
    committed(&r.env, fence, 1, escalation()).await;
}

#[tokio::test]
async fn requeue_after_the_escalation_makes_the_job_the_next_call_of_the_task() {
    let r = running().await;
    committed(&r.env, r.task, 0, started()).await;
    r.env.store.raw("update jobs set seq = 1").await;
    kill(&r).await;
    committed(&r.env, r.task, 1, escalation()).await;
    let done = r.env.store.requeue(r.job.job, "me").await.unwrap();
    assert!(matches!(done, Requeued::Done { state: TaskState::Ready, .. }), "{done:?}");
    let grant = grant(&r.env, r.runner).await;
    assert_eq!(grant.steps.len(), 3, "started, escalated, resolved");
    let found = view(r.env.store.submit_job(&runner(), &submit_job(grant.fence, 3)).await.unwrap().0);
    assert_eq!((found.id, found.state, found.running_ms), (r.job.job, JobState::Queued, 0));
    assert_eq!(r.env.store.count("select count(*) from questions where state = 'open'").await, 0);
}

#[tokio::test]
async fn review_and_call_of_an_earlier_step_are_not_requeued() {
    let r = running().await;
    committed(&r.env, r.task, 0, started()).await;
    kill(&r).await;
    let late = r.env.store.requeue(r.job.job, "me").await.unwrap();
    assert!(matches!(late, Requeued::Superseded { .. }), "{late:?}");
    r.env.store.raw("update jobs set seq = 1, role = 'beta'").await;
    committed(&r.env, r.task, 1, escalation()).await;
    let review = r.env.store.requeue(r.job.job, "me").await.unwrap();
    assert!(matches!(review, Requeued::NotRepeatable { .. }), "{review:?}");
    assert_eq!(r.env.store.count("select count(*) from questions where state = 'open'").await, 1);
}

/// The runner has moved to the fallback; the dead letter must not run beside it.
#[tokio::test]
async fn call_that_moved_to_the_fallback_is_not_requeued() {
    let r = running().await;
    committed(&r.env, r.task, 0, started()).await;
    r.env.store.raw("update jobs set seq = 1, has_fallback = true").await;
    kill(&r).await;
    let mut fallback = submit_job(r.task, 1);
    fallback.request.n = 1;
    view(r.env.store.submit_job(&runner(), &fallback).await.unwrap().0);
    let late = r.env.store.requeue(r.job.job, "me").await.unwrap();
    assert!(matches!(late, Requeued::Superseded { .. }), "{late:?}");
}
