use cfq_proto::ids::LeaseId;
use cfq_proto::job::JobState;
use cfq_proto::messages::{Beat, FenceReply, GiveUp, Held, LeaseReply, Release, RunnerHello};
use cfq_proto::task::{Priority, TaskState};

use super::*;
use crate::store::StoreError;
use crate::testing::{new_task, node_hello};

fn beat(boot: BootId, held: &[(LeaseId, u64)]) -> Beat {
    let held = held.iter().map(|(lease, step_age_ms)| Held { lease: *lease, step_age_ms: *step_age_ms }).collect();
    Beat { boot, held, ledger: None, devices: None }
}

#[tokio::test]
async fn a_beat_extends_exactly_what_moves_and_says_what_is_lost() {
    let r = running().await;
    r.lab.store.raw("update jobs set lease_expires = now() + interval '1 second'").await;
    let stranger = LeaseId::fresh();
    let reply = r.lab.store.node_beat(&node(), &beat(r.node, &[(r.job.lease, 0), (stranger, 0)])).await.unwrap();
    assert_eq!((reply.extended, reply.lost, reply.hello_again), (vec![r.job.lease], vec![stranger], false));
    let left = "select extract(epoch from lease_expires - now())::bigint from jobs";
    assert!(r.lab.store.count(left).await > 3);
    r.lab.store.raw("update jobs set lease_expires = now() + interval '1 second'").await;
    let reply = r.lab.store.node_beat(&node(), &beat(r.node, &[(r.job.lease, 10_000_000)])).await.unwrap();
    assert_eq!((reply.extended, reply.lost), (vec![], vec![]), "a stuck one is neither");
    assert!(r.lab.store.count(left).await <= 1);
    let reply = r.lab.store.node_beat(&node(), &beat(BootId::fresh(), &[(r.job.lease, 0)])).await.unwrap();
    assert!(reply.hello_again && reply.lost == vec![r.job.lease], "{reply:?}");
}

#[tokio::test]
async fn a_new_boot_releases_at_once_what_the_old_one_held() {
    let r = running().await;
    let boot = r.lab.join_node().await;
    assert_ne!(boot, r.node);
    assert_eq!(state_of(&r.lab, r.job.job).await, JobState::Queued);
    assert_eq!(r.lab.store.count("select losses::bigint from jobs").await, 1);
    assert_eq!(report(&r.lab, r.job, r.node, done("late")).await, FenceReply::Stale);
    r.lab.join_runner().await;
    let reply = r.lab.store.runner_beat(&runner(), &beat(r.runner, &[(r.task.lease, 0)])).await.unwrap();
    assert!(reply.hello_again && reply.lost == vec![r.task.lease], "{reply:?}");
    assert_eq!(r.lab.store.count("select count(*) from tasks where state = 'ready'").await, 1);
}

#[tokio::test]
async fn an_expired_task_is_taken_over_with_all_its_steps() {
    let r = running().await;
    committed(&r.lab, r.task, 0, started()).await;
    r.lab.store.raw("update tasks set lease_expires = now() - interval '1 second'").await;
    let (hints, _, tasks) = r.lab.store.sweep(r.lead).await.unwrap();
    assert_eq!(tasks, 1);
    assert!(hints.contains(&crate::store::Hint::WorkWaits));
    let next = grant(&r.lab, r.runner).await;
    assert_eq!(next.fence.attempt, r.task.attempt + 1);
    assert_eq!(next.steps.len(), 1);
    assert_eq!(step(&r.lab, r.task, 1, generated(artifact(1))).await, StepReply::Stale, "the old attempt");
    committed(&r.lab, next.fence, 1, generated(artifact(1))).await;
}

#[tokio::test]
async fn the_sweep_leaves_what_was_renewed_or_ended_meanwhile() {
    let r = running().await;
    let (_, jobs, tasks) = r.lab.store.sweep(r.lead).await.unwrap();
    assert_eq!((jobs, tasks), (0, 0));
    report(&r.lab, r.job, r.node, done("x")).await;
    let (_, jobs, _) = r.lab.store.sweep(r.lead).await.unwrap();
    assert_eq!(jobs, 0);
    assert_eq!(state_of(&r.lab, r.job.job).await, JobState::Done);
}

#[tokio::test]
async fn a_task_that_nobody_can_drive_fails_with_the_reason() {
    let lab = Lab::new().await;
    let (id, _) = lab.submit().await;
    let boot = lab.join_runner().await;
    let reason = "step 3 does not follow from those before it".to_owned();
    for round in 1..=11 {
        let fence = grant(&lab, boot).await.fence;
        let ask = GiveUp { fence, reason: reason.clone() };
        let (reply, hints) = lab.store.give_up(&runner(), &ask).await.unwrap();
        assert_eq!(reply, FenceReply::Committed);
        assert_eq!(hints.contains(&crate::store::Hint::WorkWaits), round < 11, "another may try");
        let (again, _) = lab.store.give_up(&runner(), &ask).await.unwrap();
        assert_eq!(again, FenceReply::Stale, "told twice, counted once");
        let task = lab.store.task_detail(id).await.unwrap().unwrap();
        let state = if round < 11 { TaskState::Ready } else { TaskState::Failed };
        assert_eq!(task.summary.state, state);
        assert!(task.reason.contains(&reason), "{}", task.reason);
    }
}

#[tokio::test]
async fn a_task_that_outlives_many_runners_without_a_step_fails() {
    let lab = Lab::new().await;
    let (id, _) = lab.submit().await;
    let (boot, lead) = (lab.join_runner().await, lab.lead().await);
    for _ in 0..11 {
        grant(&lab, boot).await;
        lab.store.raw("update runners set last_seen = now() - interval '1 minute'").await;
        lab.store.raw("update tasks set lease_expires = now() - interval '1 second'").await;
        lab.store.sweep(lead).await.unwrap();
    }
    let detail = lab.store.task_detail(id).await.unwrap().unwrap();
    assert_eq!(detail.summary.state, TaskState::Failed);
    assert!(detail.reason.contains("no runner got any further"), "{}", detail.reason);
}

#[tokio::test]
async fn tasks_are_granted_by_priority_then_age_once_each_and_an_old_one_first() {
    let lab = Lab::new().await;
    let boot = lab.join_runner().await;
    let mut made = Vec::new();
    for priority in [Priority::P3, Priority::P1, Priority::P1, Priority::P0] {
        let mut task = new_task(None);
        task.spec.priority = priority;
        lab.store.submit(&task).await.unwrap();
        made.push(task.id);
    }
    lab.store.raw("update tasks set created_at = now() - interval '41 minutes' where priority = 3").await;
    let mut order = Vec::new();
    for _ in 0..4 {
        order.push(grant(&lab, boot).await.fence.task);
    }
    assert_eq!(order, vec![made[0], made[3], made[1], made[2]]);
    assert_eq!(lab.store.grant(&runner(), boot).await.unwrap(), LeaseReply::None);
}

#[tokio::test]
async fn many_runners_asking_at_once_get_different_tasks() {
    let lab = Lab::new().await;
    let boot = lab.join_runner().await;
    for _ in 0..6 {
        lab.submit().await;
    }
    let asked = futures::future::join_all((0..10).map(|_| grant_or_none(&lab, boot))).await;
    let granted: Vec<_> = asked.into_iter().flatten().collect();
    let distinct: std::collections::BTreeSet<_> = granted.iter().collect();
    assert_eq!((granted.len(), distinct.len()), (6, 6));
}

async fn grant_or_none(lab: &Lab, boot: BootId) -> Option<cfq_proto::ids::TaskId> {
    match lab.store.grant(&runner(), boot).await.unwrap() {
        LeaseReply::Granted { grant: Carried::Inline(grant), .. } => Some(grant.fence.task),
        LeaseReply::None => None,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_draining_runner_hands_its_task_back_and_a_strange_boot_gets_none() {
    let r = running().await;
    let strange = r.lab.store.grant(&runner(), BootId::fresh()).await.unwrap();
    assert!(matches!(strange, LeaseReply::Unavailable { .. }), "{strange:?}");
    let release = Release { fence: r.task, waits_for: None };
    assert_eq!(r.lab.store.release(&runner(), &release).await.unwrap().0, FenceReply::Committed);
    assert_eq!(r.lab.store.release(&runner(), &release).await.unwrap().0, FenceReply::Committed, "told twice");
    assert_eq!(step(&r.lab, r.task, 0, started()).await, StepReply::Stale);
    let again = grant(&r.lab, r.runner).await;
    assert_eq!(r.lab.store.release(&runner(), &release).await.unwrap().0, FenceReply::Stale);
    assert_eq!(job(&r.lab, again.fence).await.id, r.job.job, "its job went on");
}

#[tokio::test]
async fn a_late_hello_of_an_older_boot_takes_nothing_back_while_the_later_one_is_heard() {
    let lab = Lab::new().await;
    let (old_node, old_runner) = (lab.join_node().await, lab.join_runner().await);
    let (node_boot, runner_boot) = (lab.join_node().await, lab.join_runner().await);
    let runner_hello = RunnerHello { runner: runner(), boot: old_runner, version: "0.1.0".into() };
    assert_eq!(lab.store.node_hello(&node_hello(old_node)).await.unwrap(), None);
    assert_eq!(lab.store.runner_hello(&runner_hello).await.unwrap(), None);
    assert!(!lab.store.node_beat(&node(), &beat(node_boot, &[])).await.unwrap().hello_again);
    assert!(!lab.store.runner_beat(&runner(), &beat(runner_boot, &[])).await.unwrap().hello_again);
    // The clock was set back and the node started anew: the later boot is silent.
    lab.store.raw("update nodes set last_seen = now() - interval '1 minute'").await;
    lab.store.raw("update runners set last_seen = now() - interval '1 minute'").await;
    assert!(lab.store.node_hello(&node_hello(old_node)).await.unwrap().is_some());
    assert!(lab.store.runner_hello(&runner_hello).await.unwrap().is_some());
}

#[tokio::test]
async fn a_beat_is_given_up_before_the_next_one_comes() {
    let lab = Lab::new().await;
    let (node_boot, runner_boot) = (lab.join_node().await, lab.join_runner().await);
    let mut blocker = lab.store.pool.begin().await.unwrap();
    let lock = "select 1 from nodes, runners for update";
    sqlx::raw_sql(sqlx::AssertSqlSafe(lock.to_owned())).execute(&mut *blocker).await.unwrap();
    let began = std::time::Instant::now();
    let (den, driver) = (node(), runner());
    let (of_node, of_runner) = (beat(node_boot, &[]), beat(runner_boot, &[]));
    let (first, second) = tokio::join!(lab.store.node_beat(&den, &of_node), lab.store.runner_beat(&driver, &of_runner));
    assert!(matches!(first, Err(StoreError::TooSlow { .. })), "{first:?}");
    assert!(matches!(second, Err(StoreError::TooSlow { .. })), "{second:?}");
    assert!(began.elapsed() < std::time::Duration::from_millis(lab.store.timing.beat_ms));
    blocker.rollback().await.unwrap();
    assert!(!lab.store.node_beat(&node(), &of_node).await.unwrap().hello_again);
}

#[tokio::test]
async fn a_node_reads_its_prompt_before_it_accepts_and_nobody_after_it_was_taken_back() {
    use cfq_proto::blob::BlobHash;
    let r = running().await;
    let hash = BlobHash::of(b"prompt");
    r.lab.store.blob_put(r.task.lease, &hash, 6, 0, b"prompt").await.unwrap();
    r.lab.store.raw("update jobs set state = 'placed', lease_expires = null, accepted_at = null").await;
    let (_, bytes) = r.lab.store.blob_get(r.job.lease, &hash, 0).await.unwrap().unwrap();
    assert_eq!(bytes, b"prompt");
    let written = r.lab.store.blob_put(r.job.lease, &hash, 6, 0, b"prompt").await.unwrap();
    assert!(matches!(written, crate::store::Put::Refused(_)), "{written:?}");
    r.lab.store.unplace(r.lead, r.job, "deaf").await.unwrap();
    assert_eq!(r.lab.store.blob_get(r.job.lease, &hash, 0).await.unwrap(), None);
}
