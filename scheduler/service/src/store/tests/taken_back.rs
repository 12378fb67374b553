//! Tasks that are taken from their runners, and those that wait for a place without one.

use cfq_proto::looping::{ActionKind, Decision, LoopState};
use cfq_proto::messages::{Beat, GiveUp, Held, Release, RunnerHello};
use cfq_proto::pr::PrState;
use cfq_proto::review::Quarantine;
use cfq_proto::task::TaskState;

use super::loops::{decided, reviewed};
use super::*;
use crate::store::Hint;

/// The runner of this task is lost for the last time.
async fn lost_for_the_last_time(lab: &Lab, fence: TaskFence) -> cfq_proto::http::TaskDetail {
    lab.store.raw("update tasks set losses = 1000").await;
    let ask = GiveUp { fence, reason: "its disk is broken".into() };
    assert_eq!(lab.store.give_up(&runner(), &ask).await.unwrap().0, FenceReply::Committed);
    let detail = lab.store.task_detail(fence.task).await.unwrap().unwrap();
    assert!(detail.reason.contains("its disk is broken"), "{}", detail.reason);
    assert_eq!(detail.runner, None);
    detail
}

#[tokio::test]
async fn without_a_result_it_fails_by_a_step_and_its_jobs_end() {
    let r = running().await;
    committed(&r.lab, r.task, 0, started()).await;
    let detail = lost_for_the_last_time(&r.lab, r.task).await;
    assert_eq!((detail.summary.state, detail.summary.loop_state), (TaskState::Failed, LoopState::Failed));
    assert_eq!(r.lab.store.count("select count(*) from steps where kind = 'decided'").await, 1);
    assert_eq!(state_of(&r.lab, r.job.job).await, JobState::Cancelled);
}

#[tokio::test]
async fn with_a_result_it_escalates_and_the_result_can_be_accepted() {
    let (lab, _, fence) = reviewed(None).await;
    let detail = lost_for_the_last_time(&lab, fence).await;
    assert_eq!((detail.summary.state, detail.summary.loop_state), (TaskState::Escalated, LoopState::Escalated));
    let escalation = detail.escalation.unwrap();
    assert!(escalation.available_actions.contains(&ActionKind::AcceptBestEffort), "{escalation:?}");
}

#[tokio::test]
async fn what_is_dangerous_escalates_and_never_fails_by_itself() {
    let lab = Lab::new().await;
    let boot = lab.join_runner().await;
    lab.submit().await;
    let fence = grant(&lab, boot).await.fence;
    committed(&lab, fence, 0, started()).await;
    committed(&lab, fence, 1, generated(artifact(1))).await;
    let quarantine = Some(Quarantine::Dangerous);
    committed(&lab, fence, 2, Step::Checked { iteration: 1, findings: vec![], quarantine }).await;
    let detail = lost_for_the_last_time(&lab, fence).await;
    assert_eq!(detail.summary.state, TaskState::Escalated);
    assert!(!detail.escalation.unwrap().available_actions.contains(&ActionKind::AcceptBestEffort));
}

#[tokio::test]
async fn a_hand_off_is_held_with_its_pull_request_open() {
    let (lab, _, fence) = reviewed(None).await;
    committed(&lab, fence, 4, decided(1, Decision::Converged, Some(1))).await;
    let pr = Step::PrOpened { head: "c1".into(), base: "b0".into(), branch: "worker-1/task-1".into() };
    let pr = committed(&lab, fence, 5, pr).await.unwrap();
    let detail = lost_for_the_last_time(&lab, fence).await;
    assert_eq!((detail.summary.state, detail.summary.loop_state), (TaskState::WaitingOnHuman, LoopState::Converged));
    assert_eq!(lab.store.prs(Some(pr)).await.unwrap()[0].state, PrState::PendingQc);
    assert!(detail.escalation.is_some(), "a question is open");
}

#[tokio::test]
async fn a_record_that_nobody_can_read_still_ends() {
    let (lab, _, fence) = reviewed(None).await;
    lab.store.raw("update steps set step = '{}' where seq = 1").await;
    lab.store.raw("update tasks set losses = 1000").await;
    let ask = GiveUp { fence, reason: "a step that this version does not know".into() };
    lab.store.give_up(&runner(), &ask).await.unwrap();
    let ended = "select count(*) from tasks where state = 'failed' and loop_state = 'failed' and lease is null";
    assert_eq!(lab.store.count(ended).await, 1);
}

async fn beats(lab: &Lab, boot: BootId, lease: cfq_proto::ids::LeaseId, step_age_ms: u64) {
    let beat = Beat { boot, held: vec![Held { lease, step_age_ms }], ledger: None, devices: None };
    lab.store.runner_beat(&runner(), &beat).await.unwrap();
}

const EXPIRE: &str = "update tasks set lease_expires = now() - interval '1 second'";

#[tokio::test]
async fn a_runner_that_beats_and_gets_no_further_is_given_four_tries() {
    let lab = Lab::new().await;
    let (id, _) = lab.submit().await;
    let (boot, lead) = (lab.join_runner().await, lab.lead().await);
    for round in 1..=4 {
        assert_ne!(lab.store.task_detail(id).await.unwrap().unwrap().summary.state, TaskState::Failed, "{round}");
        let fence = grant(&lab, boot).await.fence;
        beats(&lab, boot, fence.lease, 0).await;
        beats(&lab, boot, fence.lease, 601_000).await;
        lab.store.raw(EXPIRE).await;
        lab.store.sweep(lead).await.unwrap();
    }
    let detail = lab.store.task_detail(id).await.unwrap().unwrap();
    assert_eq!(detail.summary.state, TaskState::Failed);
    assert!(detail.reason.contains("got no step done in 600 s"), "{}", detail.reason);
}

#[tokio::test]
async fn a_runner_that_never_heard_of_its_task_or_moves_again_is_not_stuck() {
    let lab = Lab::new().await;
    let (id, _) = lab.submit().await;
    let (boot, lead) = (lab.join_runner().await, lab.lead().await);
    let losses = "select losses::bigint from tasks";
    grant(&lab, boot).await;
    lab.store.raw("update runners set last_seen = now()").await;
    lab.store.raw(EXPIRE).await;
    lab.store.sweep(lead).await.unwrap();
    assert_eq!(lab.store.count(losses).await, 1, "the answer was lost, and it beats");
    let fence = grant(&lab, boot).await.fence;
    beats(&lab, boot, fence.lease, 601_000).await;
    beats(&lab, boot, fence.lease, 0).await;
    lab.store.raw(EXPIRE).await;
    lab.store.sweep(lead).await.unwrap();
    assert_eq!(lab.store.count(losses).await, 2);
    let detail = lab.store.task_detail(id).await.unwrap().unwrap();
    assert!(detail.reason.contains("was not heard from"), "{}", detail.reason);
}

#[tokio::test]
async fn one_task_that_cannot_be_taken_back_keeps_no_runner_out() {
    let lab = Lab::new().await;
    let boot = lab.join_runner().await;
    lab.submit().await;
    let bad = grant(&lab, boot).await.fence;
    lab.submit().await;
    let good = grant(&lab, boot).await.fence;
    lab.store.raw("alter table tasks add constraint broken check (number <> 1 or losses = 0)").await;
    let hello = RunnerHello { runner: runner(), boot: BootId::fresh(), version: "0.1.0".into() };
    assert!(lab.store.runner_hello(&hello).await.unwrap().is_some(), "welcome");
    assert_eq!(grant(&lab, hello.boot).await.fence.task, good.task);
    let detail = lab.store.task_detail(bad.task).await.unwrap().unwrap();
    assert_eq!(detail.summary.state, TaskState::Running, "it is left alone");
}

#[tokio::test]
async fn a_task_whose_job_waits_for_a_place_is_granted_once_it_has_one() {
    let r = running().await;
    report(&r.lab, r.job, r.node, Outcome::Released { reason: "drain".into() }).await;
    let waiting = cfq_scheduler_core::Waiting::NoNodeUp;
    r.lab.store.explain(r.lead, r.job.job, 1, &waiting, 0).await.unwrap();
    let ask = Release { fence: r.task, waits_for: Some(r.job.job) };
    assert_eq!(r.lab.store.release(&runner(), &ask).await.unwrap().0, FenceReply::Committed);
    assert_eq!(r.lab.store.release(&runner(), &ask).await.unwrap().0, FenceReply::Committed, "told twice");
    let detail = r.lab.store.task_detail(r.task.task).await.unwrap().unwrap();
    assert_eq!((detail.summary.state, detail.reason.as_str()), (TaskState::Ready, "waits: no node is up"));
    assert_eq!(r.lab.store.grant(&runner(), r.runner).await.unwrap(), LeaseReply::None);
    // What it waits for is another thing now, and its own row was not touched.
    let waiting = cfq_scheduler_core::Waiting::Room;
    r.lab.store.explain(r.lead, r.job.job, 1, &waiting, 0).await.unwrap();
    let detail = r.lab.store.task_detail(r.task.task).await.unwrap().unwrap();
    assert_eq!(detail.reason, "waits for room on a node");
    // Another task has the slot meanwhile.
    let (other, _) = r.lab.submit().await;
    assert_eq!(grant(&r.lab, r.runner).await.fence.task, other);
    let placed = place(&r.lab, r.lead, r.job.job, r.node).await.fence;
    assert_eq!(r.lab.store.grant(&runner(), r.runner).await.unwrap(), LeaseReply::None, "the node may yet refuse");
    let ask = Accept { fence: placed, boot: r.node };
    let (reply, hints) = r.lab.store.accept(&node(), &ask).await.unwrap();
    assert_eq!(reply, FenceReply::Committed);
    assert!(hints.contains(&Hint::WorkWaits), "{hints:?}");
    let again = grant(&r.lab, r.runner).await.fence;
    assert_eq!((again.task, again.attempt), (r.task.task, r.task.attempt + 1));
    assert_eq!(job(&r.lab, again).await.id, r.job.job, "its job went on");
    let detail = r.lab.store.task_detail(r.task.task).await.unwrap().unwrap();
    assert_eq!(detail.reason, "", "what it waited for is over");
    assert_eq!(r.lab.store.count("select losses::bigint from tasks order by number limit 1").await, 0);
}

#[tokio::test]
async fn a_task_whose_waiting_job_fails_is_granted_to_hear_it() {
    let r = running().await;
    report(&r.lab, r.job, r.node, Outcome::Released { reason: "drain".into() }).await;
    let ask = Release { fence: r.task, waits_for: Some(r.job.job) };
    r.lab.store.release(&runner(), &ask).await.unwrap();
    let failure = cfq_proto::job::JobFailure::Unavailable { reason: "down".into() };
    let hints = r.lab.store.fail_queued(r.lead, r.job.job, 1, &failure).await.unwrap().unwrap();
    assert!(hints.contains(&Hint::WorkWaits), "{hints:?}");
    assert_eq!(grant(&r.lab, r.runner).await.fence.task, r.task.task);
}

#[tokio::test]
async fn leases_and_a_lead_from_before_the_clock_was_set_back_run_out() {
    let r = running().await;
    r.lab.store.raw("update jobs set lease_expires = now() + interval '1 hour'").await;
    r.lab.store.raw("update tasks set lease_expires = now() + interval '1 hour'").await;
    let (_, jobs, tasks) = r.lab.store.sweep(r.lead).await.unwrap();
    assert_eq!((jobs, tasks), (1, 1));
    r.lab.store.raw("update leader set expires_at = now() + interval '1 hour'").await;
    assert!(r.lab.store.take_lead(uuid::Uuid::now_v7()).await.unwrap().is_some());
}
