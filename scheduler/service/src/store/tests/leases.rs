use cfq_proto::ids::{LeaseId, LeaseRequestId};
use cfq_proto::job::JobState;
use cfq_proto::messages::{
    Abandon, FenceReply, Heartbeat, HeldLease, LeaseReply, NodeRegistration, Release, RunnerRegistration,
};
use cfq_proto::task::{Priority, TaskState};
use cfq_scheduler_core::UnreportedEnd;

use super::*;
use crate::store::StoreError;
use crate::testing::{new_task, node_registration, runner_registration};

fn heartbeat(boot: BootId, held: &[(LeaseId, u64)]) -> Heartbeat {
    let held = held.iter().map(|(lease, step_age_ms)| HeldLease { lease: *lease, step_age_ms: *step_age_ms }).collect();
    Heartbeat { boot, held, ledger: None, devices: None }
}

#[tokio::test]
async fn heartbeat_extends_progressing_leases_and_reports_lost_ones() {
    let r = running().await;
    r.env.store.raw("update jobs set lease_expires = now() + interval '1 second'").await;
    let unknown = LeaseId::fresh();
    let held = [(r.job.lease, 0), (unknown, 0)];
    let reply = r.env.store.record_node_heartbeat(&node(), &heartbeat(r.node, &held)).await.unwrap();
    assert_eq!((reply.extended, reply.lost, reply.register_again), (vec![r.job.lease], vec![unknown], false));
    let left = "select extract(epoch from lease_expires - now())::bigint from jobs";
    assert!(r.env.store.count(left).await > 3);
    r.env.store.raw("update jobs set lease_expires = now() + interval '1 second'").await;
    let stalled = heartbeat(r.node, &[(r.job.lease, 10_000_000)]);
    let reply = r.env.store.record_node_heartbeat(&node(), &stalled).await.unwrap();
    assert_eq!((reply.extended, reply.lost), (vec![], vec![]), "a stalled lease is neither");
    assert!(r.env.store.count(left).await <= 1);
    let other_boot = heartbeat(BootId::fresh(), &[(r.job.lease, 0)]);
    let reply = r.env.store.record_node_heartbeat(&node(), &other_boot).await.unwrap();
    assert!(reply.register_again && reply.lost == vec![r.job.lease], "{reply:?}");
}

#[tokio::test]
async fn new_boot_releases_the_leases_of_the_old_one_at_once() {
    let r = running().await;
    let boot = r.env.join_node().await;
    assert_ne!(boot, r.node);
    assert_eq!(state_of(&r.env, r.job.job).await, JobState::Queued);
    assert_eq!(r.env.store.count("select losses::bigint from jobs").await, 1);
    assert_eq!(report(&r.env, r.job, r.node, done("late")).await, FenceReply::Stale);
    r.env.join_runner().await;
    let of_runner = heartbeat(r.runner, &[(r.task.lease, 0)]);
    let reply = r.env.store.record_runner_heartbeat(&runner(), &of_runner).await.unwrap();
    assert!(reply.register_again && reply.lost == vec![r.task.lease], "{reply:?}");
    assert_eq!(r.env.store.count("select count(*) from tasks where state = 'ready'").await, 1);
}

#[tokio::test]
async fn expired_task_is_granted_again_with_all_its_steps() {
    let r = running().await;
    committed(&r.env, r.task, 0, started()).await;
    r.env.store.raw("update tasks set lease_expires = now() - interval '1 second'").await;
    let (hints, _, tasks) = r.env.store.sweep_now(r.leadership).await.unwrap();
    assert_eq!(tasks, 1);
    assert!(hints.contains(&crate::store::Hint::TaskReady));
    let next = grant(&r.env, r.runner).await;
    assert_eq!(next.fence.attempt, r.task.attempt + 1);
    assert_eq!(next.steps.len(), 1);
    assert_eq!(step(&r.env, r.task, 1, generated(artifact(1))).await, StepReply::Stale, "the old attempt");
    committed(&r.env, next.fence, 1, generated(artifact(1))).await;
}

#[tokio::test]
async fn sweep_ignores_live_leases_and_ended_jobs() {
    let r = running().await;
    let (_, jobs, tasks) = r.env.store.sweep_now(r.leadership).await.unwrap();
    assert_eq!((jobs, tasks), (0, 0));
    report(&r.env, r.job, r.node, done("x")).await;
    let (_, jobs, _) = r.env.store.sweep_now(r.leadership).await.unwrap();
    assert_eq!(jobs, 0);
    assert_eq!(state_of(&r.env, r.job.job).await, JobState::Done);
}

#[tokio::test]
async fn task_that_every_runner_abandons_fails_with_the_reason() {
    let env = TestEnv::new().await;
    let (id, _) = env.submit().await;
    let boot = env.join_runner().await;
    let reason = "step 3 is not valid after the steps before it".to_owned();
    for round in 1..=11 {
        let fence = grant(&env, boot).await.fence;
        let request = Abandon { fence, reason: reason.clone() };
        let (reply, hints) = env.store.abandon(&runner(), &request).await.unwrap();
        assert_eq!(reply, FenceReply::Committed);
        assert_eq!(hints.contains(&crate::store::Hint::TaskReady), round < 11, "another runner may try");
        let (again, _) = env.store.abandon(&runner(), &request).await.unwrap();
        assert_eq!(again, FenceReply::Stale, "repeated, counted once");
        let task = env.store.task_detail(id).await.unwrap().unwrap();
        let state = if round < 11 { TaskState::Ready } else { TaskState::Failed };
        assert_eq!(task.summary.state, state);
        assert!(task.reason.contains(&reason), "{}", task.reason);
    }
}

#[tokio::test]
async fn task_that_loses_many_runners_without_a_step_fails() {
    let env = TestEnv::new().await;
    let (id, _) = env.submit().await;
    let (boot, leadership) = (env.join_runner().await, env.acquire_leadership().await);
    for _ in 0..11 {
        grant(&env, boot).await;
        env.store.raw("update runners set last_seen = now() - interval '1 minute'").await;
        env.store.raw("update tasks set lease_expires = now() - interval '1 second'").await;
        env.store.sweep_now(leadership).await.unwrap();
    }
    let detail = env.store.task_detail(id).await.unwrap().unwrap();
    assert_eq!(detail.summary.state, TaskState::Failed);
    assert!(detail.reason.contains("no runner made progress"), "{}", detail.reason);
}

#[tokio::test]
async fn tasks_are_granted_by_creation_time_plus_ten_minutes_per_class() {
    let env = TestEnv::new().await;
    let boot = env.join_runner().await;
    let mut made = Vec::new();
    for priority in [Priority::P3, Priority::P1, Priority::P1, Priority::P0, Priority::P2, Priority::P2] {
        let mut task = new_task(None);
        task.spec.priority = priority;
        env.store.submit(&task).await.unwrap();
        made.push(task.id);
    }
    // As if the tasks had been created earlier: the P3 task comes after the P1 tasks and before the P2 tasks.
    for (priority, minutes) in [(1, 5), (3, 21)] {
        let earlier = format!("order_key - interval '{minutes} minutes'");
        env.store.raw(&format!("update tasks set order_key = {earlier} where priority = {priority}")).await;
    }
    let mut order = Vec::new();
    for _ in 0..6 {
        order.push(grant(&env, boot).await.fence.task);
    }
    assert_eq!(order, [made[3], made[1], made[2], made[0], made[4], made[5]]);
    assert_eq!(grant_reply(&env, boot).await, LeaseReply::None);
}

#[tokio::test]
async fn concurrent_grants_return_different_tasks() {
    let env = TestEnv::new().await;
    let boot = env.join_runner().await;
    for _ in 0..6 {
        env.submit().await;
    }
    let asked = futures::future::join_all((0..10).map(|_| grant_or_none(&env, boot))).await;
    let granted: Vec<_> = asked.into_iter().flatten().collect();
    let distinct: std::collections::BTreeSet<_> = granted.iter().collect();
    assert_eq!((granted.len(), distinct.len()), (6, 6));
}

async fn grant_or_none(env: &TestEnv, boot: BootId) -> Option<cfq_proto::ids::TaskId> {
    match grant_reply(env, boot).await {
        LeaseReply::Granted { grant: Payload::Inline(grant), .. } => Some(grant.fence.task),
        LeaseReply::None => None,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn draining_runner_releases_its_task_and_unknown_boot_gets_none() {
    let r = running().await;
    let unknown_boot = grant_reply(&r.env, BootId::fresh()).await;
    assert!(matches!(unknown_boot, LeaseReply::Unavailable { .. }), "{unknown_boot:?}");
    let release = Release { fence: r.task, waits_for: None };
    assert_eq!(r.env.store.release(&runner(), &release).await.unwrap().0, FenceReply::Committed);
    assert_eq!(r.env.store.release(&runner(), &release).await.unwrap().0, FenceReply::Committed, "repeated");
    assert_eq!(step(&r.env, r.task, 0, started()).await, StepReply::Stale);
    let again = grant(&r.env, r.runner).await;
    assert_eq!(r.env.store.release(&runner(), &release).await.unwrap().0, FenceReply::Stale);
    assert_eq!(job(&r.env, again.fence).await.id, r.job.job, "the same job continues");
}

#[tokio::test]
async fn late_registration_of_an_older_boot_is_refused_while_the_newer_is_live() {
    let env = TestEnv::new().await;
    let (old_node, old_runner) = (env.join_node().await, env.join_runner().await);
    let (node_boot, runner_boot) = (env.join_node().await, env.join_runner().await);
    let (of_node, of_runner) = (node_registration(old_node), runner_registration(old_runner));
    assert!(env.store.register_node(&of_node).await.unwrap().is_err());
    assert!(env.store.register_runner(&of_runner).await.unwrap().is_err());
    assert!(!env.store.record_node_heartbeat(&node(), &heartbeat(node_boot, &[])).await.unwrap().register_again);
    assert!(!env.store.record_runner_heartbeat(&runner(), &heartbeat(runner_boot, &[])).await.unwrap().register_again);
    // The clock was set back, then the node restarted: the boot with the later id sends no heartbeats any more.
    env.store.raw("update nodes set last_seen = now() - interval '1 minute'").await;
    env.store.raw("update runners set last_seen = now() - interval '1 minute'").await;
    assert!(env.store.register_node(&of_node).await.unwrap().is_ok());
    assert!(env.store.register_runner(&of_runner).await.unwrap().is_ok());
}

#[tokio::test]
async fn blocked_heartbeat_times_out_before_the_next_one() {
    let env = TestEnv::new().await;
    let (node_boot, runner_boot) = (env.join_node().await, env.join_runner().await);
    let mut blocker = env.store.pool.begin().await.unwrap();
    let lock = "select 1 from nodes, runners for update";
    sqlx::raw_sql(sqlx::AssertSqlSafe(lock.to_owned())).execute(&mut *blocker).await.unwrap();
    let started = std::time::Instant::now();
    let (den, driver) = (node(), runner());
    let (of_node, of_runner) = (heartbeat(node_boot, &[]), heartbeat(runner_boot, &[]));
    let (first, second) = tokio::join!(
        env.store.record_node_heartbeat(&den, &of_node),
        env.store.record_runner_heartbeat(&driver, &of_runner)
    );
    assert!(matches!(first, Err(StoreError::TooSlow { .. })), "{first:?}");
    assert!(matches!(second, Err(StoreError::TooSlow { .. })), "{second:?}");
    assert!(started.elapsed() < std::time::Duration::from_millis(env.store.timing.heartbeat_ms));
    blocker.rollback().await.unwrap();
    assert!(!env.store.record_node_heartbeat(&node(), &of_node).await.unwrap().register_again);
}

#[tokio::test]
async fn placed_node_reads_its_prompt_and_loses_access_when_unplaced() {
    use cfq_proto::blob::BlobHash;
    let r = running().await;
    let hash = BlobHash::of(b"prompt");
    r.env.store.blob_put(&of_runner(r.task.lease), &hash, 6, 0, b"prompt").await.unwrap();
    r.env.store.raw("update jobs set state = 'placed', lease_expires = null, accepted_at = null").await;
    let (_, bytes) = r.env.store.blob_get(&of_node(r.job.lease), &hash, 0).await.unwrap().unwrap();
    assert_eq!(bytes, b"prompt");
    let written = r.env.store.blob_put(&of_node(r.job.lease), &hash, 6, 0, b"prompt").await.unwrap();
    assert!(matches!(written, crate::store::PutOutcome::Refused(_)), "{written:?}");
    r.env.store.unplace(r.leadership, r.job, UnreportedEnd::NotAccepted, "unresponsive").await.unwrap();
    assert_eq!(r.env.store.blob_get(&of_node(r.job.lease), &hash, 0).await.unwrap(), None);
}

#[tokio::test]
async fn locked_job_row_delays_no_other_lease_of_its_node() {
    let r = running().await;
    r.env.submit().await;
    let other_task = grant(&r.env, r.runner).await.fence;
    let other = job(&r.env, other_task).await.id;
    let other = place(&r.env, r.leadership, other, r.node).await.fence;
    assert_eq!(accept(&r.env, other, r.node).await, FenceReply::Committed);
    let locked = r.env.store.hold("select 1 from jobs order by created_at limit 1 for update").await;
    let held = heartbeat(r.node, &[(r.job.lease, 0), (other.lease, 0)]);
    let reply = r.env.store.record_node_heartbeat(&node(), &held).await.unwrap();
    assert_eq!((reply.extended, reply.lost), (vec![other.lease], vec![]), "the locked lease is extended next time");
    locked.rollback().await.unwrap();
    let reply = r.env.store.record_node_heartbeat(&node(), &held).await.unwrap();
    assert_eq!(reply.extended.len(), 2);
    // An expired lease whose row is locked is left for the next sweep.
    r.env.store.raw("update jobs set lease_expires = now() - interval '1 second'").await;
    let locked = r.env.store.hold("select 1 from jobs order by created_at limit 1 for update").await;
    assert_eq!(r.env.store.sweep_now(r.leadership).await.unwrap().1, 1);
    locked.rollback().await.unwrap();
    assert_eq!(r.env.store.sweep_now(r.leadership).await.unwrap().1, 1);
}

#[tokio::test]
async fn repeated_lease_request_gets_the_same_grant() {
    let env = TestEnv::new().await;
    let boot = env.join_runner().await;
    env.submit().await;
    env.submit().await;
    let request = LeaseRequest { boot, request: Some(LeaseRequestId::fresh()) };
    let asker = runner();
    let (first, second) = tokio::join!(env.store.grant(&asker, &request), env.store.grant(&asker, &request));
    let LeaseReply::Granted { lease, grant: Payload::Inline(granted) } = first.unwrap() else { panic!("a grant") };
    let LeaseReply::Granted { lease: again, grant: Payload::Inline(repeated) } = second.unwrap() else {
        panic!("a grant")
    };
    assert_eq!((lease, granted), (again, repeated), "concurrent requests with one id get one task");
    let confirmed = env.store.record_runner_heartbeat(&runner(), &heartbeat(boot, &[(lease, 0)])).await.unwrap();
    assert_eq!(confirmed.extended, vec![lease]);
    let next =
        env.store.grant(&runner(), &LeaseRequest { boot, request: Some(LeaseRequestId::fresh()) }).await.unwrap();
    assert!(matches!(&next, LeaseReply::Granted { lease: other, .. } if *other != lease), "{next:?}");
}

#[tokio::test]
async fn grant_that_never_arrived_and_machine_restart_are_not_losses_of_the_task() {
    let env = TestEnv::new().await;
    let leadership = env.acquire_leadership().await;
    env.submit().await;
    let losses = "select losses::bigint from tasks";
    let join = async |machine: &str| {
        let boot = BootId::fresh();
        let machine_boot = Some(machine.to_owned());
        let registration = RunnerRegistration { machine_boot, ..runner_registration(boot) };
        env.store.register_runner(&registration).await.unwrap().unwrap();
        boot
    };
    let request = |boot| LeaseRequest { boot, request: Some(LeaseRequestId::fresh()) };
    let boot = join("monday").await;
    env.store.grant(&runner(), &request(boot)).await.unwrap();
    env.store.raw("update tasks set lease_expires = now() - interval '1 second'").await;
    env.store.sweep_now(leadership).await.unwrap();
    assert_eq!(env.store.count(losses).await, 0, "the runner never received the grant");
    let LeaseReply::Granted { lease, .. } = env.store.grant(&runner(), &request(boot)).await.unwrap() else { panic!() };
    env.store.record_runner_heartbeat(&runner(), &heartbeat(boot, &[(lease, 0)])).await.unwrap();
    let boot = join("tuesday").await;
    assert_eq!(env.store.count(losses).await, 0, "the machine was restarted");
    env.store.grant(&runner(), &request(boot)).await.unwrap();
    join("tuesday").await;
    assert_eq!(env.store.count(losses).await, 1, "the process was restarted");
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum ReleasedBy {
    Registration,
    SweepOfEarlierBoots,
    SweepOfExpiredLeases,
}

/// A row that is locked during the registration is released later: by the repeated registration, or by a sweep. The
/// restart of the machine is remembered until then, so nothing is counted.
#[tokio::test]
async fn work_of_an_earlier_boot_that_was_locked_is_released_later_and_counted_as_at_the_registration() {
    for released_by in [ReleasedBy::Registration, ReleasedBy::SweepOfEarlierBoots, ReleasedBy::SweepOfExpiredLeases] {
        let r = running().await;
        let counts = "select (select losses + suspicions from jobs)::bigint + (select losses from tasks)::bigint";
        r.env.store.raw("update nodes set machine_boot = 'monday'; update runners set machine_boot = 'monday'").await;
        let machine_boot = Some("tuesday".to_owned());
        let of_node = NodeRegistration { machine_boot: machine_boot.clone(), ..node_registration(BootId::fresh()) };
        let of_runner = RunnerRegistration { machine_boot, ..runner_registration(BootId::fresh()) };
        let locked = r.env.store.hold("select 1 from jobs, tasks for update").await;
        assert!(r.env.store.register_node(&of_node).await.unwrap().is_ok(), "registered");
        assert!(r.env.store.register_runner(&of_runner).await.unwrap().is_ok(), "registered");
        assert_eq!(r.env.store.count("select count(*) from jobs where state = 'running'").await, 1);
        locked.rollback().await.unwrap();
        match released_by {
            ReleasedBy::Registration => {
                assert!(r.env.store.register_node(&of_node).await.unwrap().is_ok(), "again");
                assert!(r.env.store.register_runner(&of_runner).await.unwrap().is_ok(), "again");
            }
            ReleasedBy::SweepOfEarlierBoots => {
                r.env.store.release_jobs_of_earlier_boots(None).await.unwrap();
                r.env.store.release_tasks_of_earlier_boots(None).await.unwrap();
            }
            ReleasedBy::SweepOfExpiredLeases => {
                let expired = "lease_expires = now() - interval '1 second'";
                r.env.store.raw(&format!("update jobs set {expired}")).await;
                r.env.store.raw(&format!("update tasks set {expired}, lease_request = null")).await;
                r.env.store.sweep_now(r.leadership).await.unwrap();
            }
        }
        assert_eq!(state_of(&r.env, r.job.job).await, JobState::Queued);
        assert_eq!(r.env.store.count("select count(*) from tasks where state = 'ready'").await, 1);
        assert_eq!(r.env.store.count(counts).await, 0, "the machine was restarted; released by {released_by:?}");
    }
}

/// The new boot waits for the lease of the earlier one, because it may be a copy on another machine. When the lease
/// ends, it is clear that the machine was restarted.
#[tokio::test]
async fn lease_that_ends_while_the_restarted_machine_waits_is_no_loss() {
    let r = running().await;
    r.env.store.raw("update nodes set machine_boot = 'monday'; update runners set machine_boot = 'monday'").await;
    let (machine_boot, credentials_lock) = (Some("tuesday".to_owned()), Some("tuesday:8:1".to_owned()));
    let of_node = NodeRegistration {
        machine_boot: machine_boot.clone(),
        credentials_lock: credentials_lock.clone(),
        ..node_registration(BootId::fresh())
    };
    let of_runner = RunnerRegistration { machine_boot, credentials_lock, ..runner_registration(BootId::fresh()) };
    assert!(r.env.store.register_node(&of_node).await.unwrap().is_err(), "the lease has not ended");
    assert!(r.env.store.register_runner(&of_runner).await.unwrap().is_err(), "the lease has not ended");
    let past = "now() - interval '1 second'";
    for table in ["jobs", "tasks"] {
        r.env.store.raw(&format!("update {table} set lease_expires = {past}")).await;
    }
    // The node was killed just after a heartbeat that extended its leases: that it was seen is written last.
    r.env
        .store
        .raw("update tasks set lease_request = null; update nodes set last_seen = now() - interval '5.8 s'")
        .await;
    assert_eq!(r.env.store.sweep_now(r.leadership).await.unwrap().1, 1);
    let counts = "select (select losses + suspicions from jobs)::bigint + (select losses from tasks)::bigint";
    assert_eq!(r.env.store.count(counts).await, 0);
    for table in ["nodes", "runners"] {
        r.env.store.raw(&format!("update {table} set last_seen = now() - interval '7 s'")).await;
    }
    assert!(r.env.store.register_node(&of_node).await.unwrap().is_ok());
    assert!(r.env.store.register_runner(&of_runner).await.unwrap().is_ok());
}

#[tokio::test]
async fn task_whose_grants_no_runner_receives_ends_with_the_evidence() {
    let env = TestEnv::new().await;
    let (id, _) = env.submit().await;
    let (boot, leadership) = (env.join_runner().await, env.acquire_leadership().await);
    let lose_a_grant = async || {
        let request = LeaseRequest { boot, request: Some(LeaseRequestId::fresh()) };
        let LeaseReply::Granted { lease, .. } = env.store.grant(&runner(), &request).await.unwrap() else { panic!() };
        env.store.raw("update tasks set lease_expires = now() - interval '1 second'").await;
        lease
    };
    for _ in 0..15 {
        lose_a_grant().await;
        env.store.sweep_now(leadership).await.unwrap();
    }
    // A runner receives one grant, so the count starts again.
    let lease = lose_a_grant().await;
    env.store.record_runner_heartbeat(&runner(), &heartbeat(boot, &[(lease, 0)])).await.unwrap();
    let release = "update tasks set state = 'ready', lease = null, lease_expires = null";
    env.store.raw(release).await;
    for _ in 0..21 {
        let detail = env.store.task_detail(id).await.unwrap().unwrap();
        assert_eq!(detail.summary.state, TaskState::Ready, "{}", detail.reason);
        lose_a_grant().await;
        env.store.sweep_now(leadership).await.unwrap();
    }
    let detail = env.store.task_detail(id).await.unwrap().unwrap();
    assert_eq!(detail.summary.state, TaskState::Failed);
    assert!(detail.reason.contains("granted 21 times") && detail.reason.contains("r1"), "{}", detail.reason);
    assert_eq!(env.store.count("select losses::bigint from tasks").await, 0, "they are no losses");
}
