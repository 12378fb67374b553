//! Tests of tasks that wait for others.

use cfq_proto::ids::{ApiTokenId, TaskId, TaskKey};
use cfq_proto::task::TaskState;
use cfq_proto::task_ref::TaskRef;

use super::super::{Hint, NewTask, Submitted};
use super::*;
use crate::testing::new_task;

fn after(predecessors: &[TaskId]) -> NewTask {
    let mut task = new_task(None);
    task.spec.after = predecessors.iter().map(|id| TaskRef::Key(TaskKey::Id(*id))).collect();
    task
}

async fn submit_after(env: &TestEnv, predecessors: &[TaskId]) -> TaskId {
    match env.store.submit(&after(predecessors)).await.unwrap() {
        Submitted::Created { id, .. } => id,
        other => panic!("{other:?}"),
    }
}

async fn state(env: &TestEnv, task: TaskId) -> (TaskState, String) {
    let detail = env.store.task_detail(task).await.unwrap().unwrap();
    (detail.summary.state, detail.reason)
}

/// Ends a task as its last step would.
async fn end(env: &TestEnv, task: TaskId, to: TaskState) {
    let mut tx = env.store.begin().await.unwrap();
    let row = super::super::tasks::lock_task(&mut tx, task).await.unwrap().unwrap();
    let from = TaskState::Running;
    let row = super::super::tasks::TaskRow { state: from, ..row };
    assert!(super::super::tasks::move_task(&mut tx, &row, to, "a test").await.unwrap());
    tx.commit().await.unwrap();
}

/// Waits until a query whose text is like this waits for a lock.
async fn wait_for_blocked_query(env: &TestEnv, like: &str) {
    let waiting = format!(
        "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and query like '{like}'
           and datname = current_database()"
    );
    let mut tries = 0;
    while env.store.count(&waiting).await == 0 {
        tries += 1;
        assert!(tries < 200, "no query like {like} waits for a lock");
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn task_is_ready_after_its_last_predecessor_ends_well() {
    let env = TestEnv::new().await;
    let leadership = env.acquire_leadership().await;
    let (first, second) = (env.submit().await.0, env.submit().await.0);
    let task = submit_after(&env, &[second, first, second]).await;
    assert_eq!(state(&env, task).await, (TaskState::Blocked, "waits for t1, t2".into()));
    end(&env, first, TaskState::Merged).await;
    assert_eq!(env.store.sweep_starts(leadership).await.unwrap(), vec![]);
    assert_eq!(state(&env, task).await, (TaskState::Blocked, "waits for t2".into()));
    end(&env, second, TaskState::Accepted).await;
    assert_eq!(env.store.sweep_starts(leadership).await.unwrap(), vec![Hint::TaskReady]);
    assert_eq!(state(&env, task).await.0, TaskState::Ready);
    assert_eq!(env.store.count("select count(*) from task_dependencies where due").await, 0);
    assert_eq!(state(&env, submit_after(&env, &[first, second]).await).await.0, TaskState::Ready, "both have ended");
}

#[tokio::test]
async fn failed_predecessor_blocks_until_its_retry_ends_well() {
    let env = TestEnv::new().await;
    let leadership = env.acquire_leadership().await;
    let first = env.submit().await.0;
    let (task, ended) = (submit_after(&env, &[first]).await, submit_after(&env, &[first]).await);
    env.store.cancel(ended, "a test", Run::Commit).await.unwrap();
    env.store.cancel(first, "a test", Run::Commit).await.unwrap();
    env.store.sweep_starts(leadership).await.unwrap();
    let (blocked, reason) = state(&env, task).await;
    assert!(blocked == TaskState::Blocked && reason.contains("t1 is cancelled: run `cfq retry t1`"), "{reason}");
    let late = env.store.submit(&after(&[first])).await.unwrap();
    assert!(matches!(&late, Submitted::Created { warning: Some(text), .. } if text.contains("t1 is cancelled")));

    let retry_of = |id: TaskId| Some(TaskRef::Key(TaskKey::Id(id)));
    let mut cyclic = after(&[task]);
    cyclic.spec.retry_of = retry_of(first);
    let refused = env.store.submit(&cyclic).await.unwrap();
    assert!(matches!(refused, Submitted::RetryCycle { number } if number.0 == 2), "{refused:?}");
    let mut retry = new_task(None);
    retry.spec.retry_of = retry_of(task);
    let refused = env.store.submit(&retry).await.unwrap();
    assert!(matches!(refused, Submitted::NotRetriable { state: TaskState::Blocked, .. }), "{refused:?}");
    retry.spec.retry_of = retry_of(first);
    let Submitted::Created { id: retry, number, .. } = env.store.submit(&retry).await.unwrap() else { panic!() };
    env.store.sweep_starts(leadership).await.unwrap();
    assert_eq!(state(&env, task).await, (TaskState::Blocked, format!("waits for {number}")));
    end(&env, retry, TaskState::Merged).await;
    env.store.sweep_starts(leadership).await.unwrap();
    assert_eq!(state(&env, task).await.0, TaskState::Ready);
    let edges = format!("select count(*) from task_dependencies where predecessor = '{first}'");
    assert_eq!(env.store.count(&edges).await, 1, "the edge of the ended dependent is not moved");
    assert_eq!(env.store.task_detail(retry).await.unwrap().unwrap().summary.retry_of, Some(first));
}

#[tokio::test]
async fn submit_waits_for_the_end_of_its_predecessor_to_commit() {
    let env = TestEnv::new().await;
    let first = env.submit().await.0;
    let sql = "update tasks set state = 'merged', ended_at = now()";
    let ending = env.store.hold(sql).await;
    let submit = tokio::spawn({
        let (store, task) = (env.store.clone(), after(&[first]));
        async move { store.submit(&task).await.unwrap() }
    });
    wait_for_blocked_query(&env, "%for share%").await;
    ending.commit().await.unwrap();
    let submitted = submit.await.unwrap();
    assert!(matches!(submitted, Submitted::Created { state: TaskState::Ready, .. }), "{submitted:?}");
}

#[tokio::test]
async fn task_for_which_three_others_wait_is_raised_once() {
    use cfq_proto::task::Priority;
    let r = running().await;
    let (env, first) = (&r.env, r.task.task);
    let priority = async |task| env.store.task_detail(task).await.unwrap().unwrap().summary;
    let key = format!(
        "select round(extract(epoch from order_key - created_at) / 60)::bigint from tasks where id = '{first}'"
    );
    let second = submit_after(env, &[first]).await;
    submit_after(env, &[second]).await;
    env.store.sweep_starts(r.leadership).await.unwrap();
    assert!(!priority(first).await.is_bottleneck, "two tasks wait for it");
    env.store.raw("update jobs set state = 'queued', lease = null, lease_expires = null").await;
    let last = submit_after(env, &[first]).await;
    let hints = env.store.sweep_starts(r.leadership).await.unwrap();
    assert!(hints.contains(&Hint::Leader(super::super::LeaderHint::Job(r.job.job))), "{hints:?}");
    let raised = priority(first).await;
    assert_eq!((raised.priority, raised.is_bottleneck, env.store.count(&key).await), (Priority::P1, true, 10));
    assert!(!priority(second).await.is_bottleneck);
    assert_eq!(env.store.live_jobs().await[0].priority, Priority::P1);
    submit_after(env, &[second, last]).await;
    env.store.sweep_starts(r.leadership).await.unwrap();
    assert_eq!(priority(first).await.priority, Priority::P1, "raised once");
    let events = env.store.task_events(first, 0).await.unwrap();
    let changes =
        events.iter().filter(|event| matches!(event.body, cfq_proto::event::EventBody::PriorityChanged { .. }));
    assert_eq!(changes.count(), 1);
    // The walk passes unraised tasks: the chain makes the second task a bottleneck through its last one.
    let deep = submit_after(env, &[last]).await;
    submit_after(env, &[deep]).await;
    env.store.sweep_starts(r.leadership).await.unwrap();
    assert!(priority(last).await.is_bottleneck && !priority(second).await.is_bottleneck);
}

#[tokio::test]
async fn task_is_queued_until_its_time_and_then_waits_for_predecessors() {
    let env = TestEnv::new().await;
    let leadership = env.acquire_leadership().await;
    let first = env.submit().await.0;
    let now_s = env.store.clock_ms().await.unwrap() / 1000;
    let (mut later, mut blocked) = (new_task(None), after(&[first]));
    (later.spec.run_at, blocked.spec.run_at) = (Some(now_s + 3600), Some(now_s + 3600));
    for task in [&later, &blocked] {
        env.store.submit(task).await.unwrap();
    }
    env.store.sweep_starts(leadership).await.unwrap();
    let (queued, reason) = state(&env, later.id).await;
    assert_eq!(queued, TaskState::Queued);
    assert!(reason.starts_with("starts at 20") && reason.ends_with('Z'), "{reason}");
    assert_eq!(state(&env, blocked.id).await.0, TaskState::Queued);
    let key = "select round(extract(epoch from order_key - created_at) / 60)::bigint from tasks where id = ";
    assert_eq!(env.store.count(&format!("{key}'{}'", later.id)).await, 60 + 20, "it ages from its time on");
    env.store.raw("update tasks set run_at = now() where run_at is not null").await;
    assert_eq!(env.store.sweep_starts(leadership).await.unwrap(), vec![Hint::TaskReady]);
    assert_eq!(state(&env, later.id).await.0, TaskState::Ready);
    assert_eq!(state(&env, blocked.id).await, (TaskState::Blocked, "waits for t1".into()));
    let mut past = new_task(None);
    past.spec.run_at = Some(now_s - 5);
    let submitted = env.store.submit(&past).await.unwrap();
    assert!(matches!(submitted, Submitted::Created { state: TaskState::Ready, .. }), "{submitted:?}");
}

#[tokio::test]
async fn sweep_reads_few_rows_beside_many_waiting_tasks() {
    let env = TestEnv::new().await;
    let leadership = env.acquire_leadership().await;
    rows_read::add_tasks(&env, 20_000, "case when n % 2 = 0 then 'queued' else 'blocked' end").await;
    env.store
        .raw(
            "update tasks set run_at = now() + interval '1 day' where state = 'queued';
             insert into task_dependencies (task, predecessor, due)
             select b.id, q.id, false from tasks b join tasks q on q.number = b.number + 1 where b.state = 'blocked';
             analyze",
        )
        .await;
    let store = rows_read::single_connection(&env);
    store.raw("select 1 from tasks limit 1").await;
    let (read, swept) = rows_read::rows_read(&store, store.sweep_starts(leadership)).await;
    assert_eq!(swept.unwrap(), vec![]);
    assert!(read <= 500, "{read} rows read");
}

#[tokio::test]
async fn unknown_predecessor_is_refused_and_a_batch_is_written_as_a_whole() {
    let env = TestEnv::new().await;
    let unknown = TaskId::fresh();
    let first = new_task(Some("k#0"));
    let (mut second, mut third) = (after(&[first.id]), after(&[unknown]));
    (second.key, third.key) = (Some("k#1".into()), Some("k#2".into()));
    let refused = env.store.submit_batch(&[first.clone(), second.clone(), third]).await.unwrap();
    let [Submitted::UnknownTask { field: "after", key: TaskKey::Id(id) }] = refused[..] else { panic!("{refused:?}") };
    assert_eq!((id, env.store.count("select count(*) from tasks").await), (unknown, 0));
    let batch = [first, second];
    let (one, two) = tokio::join!(env.store.submit_batch(&batch), env.store.submit_batch(&batch));
    let is_created = |result: &Vec<Submitted>| result.iter().all(|task| matches!(task, Submitted::Created { .. }));
    assert_eq!([one.unwrap(), two.unwrap()].iter().filter(|result| is_created(result)).count(), 1);
    assert_eq!(env.store.count("select count(*) from tasks").await, 2);
    assert_eq!(state(&env, batch[1].id).await.0, TaskState::Blocked);
}

#[tokio::test]
async fn leader_repairs_a_task_that_is_blocked_with_nothing_open() {
    let env = TestEnv::new().await;
    let leadership = env.acquire_leadership().await;
    let first = env.submit().await.0;
    let (task, blocked) = (submit_after(&env, &[first]).await, env.submit().await.0);
    let waiting = submit_after(&env, &[blocked]).await;
    env.store.sweep_starts(leadership).await.unwrap();
    env.store.raw(&format!("update tasks set state = 'merged', ended_at = now() where id = '{first}'")).await;
    assert_eq!(env.store.sweep_starts(leadership).await.unwrap(), vec![], "no edge is marked");
    assert_eq!(env.store.repair_blocked_tasks(leadership).await.unwrap(), vec![Hint::TaskReady]);
    assert_eq!(state(&env, task).await.0, TaskState::Ready);
    assert_eq!(state(&env, waiting).await.0, TaskState::Blocked);
}

#[tokio::test]
async fn predecessor_of_an_open_task_is_not_deleted() {
    let env = TestEnv::new().await;
    let first = env.submit().await.0;
    let task = submit_after(&env, &[first]).await;
    env.store.cancel(first, "a test", Run::Commit).await.unwrap();
    env.store.raw("update tasks set ended_at = now() - interval '91 days' where ended_at is not null").await;
    let now_s = env.store.clock_ms().await.unwrap() as f64 / 1000.0;
    let expiry = super::super::Expiry { tasks_ended_before: Some(now_s - 1.0), nodes_seen_before: None };
    assert_eq!(env.store.count_expired(&expiry).await.unwrap().tasks, 0);
    assert!(env.store.delete_expired_tasks(now_s - 1.0).await.unwrap().is_none());
    env.store.cancel(task, "a test", Run::Commit).await.unwrap();
    env.store.raw("update tasks set ended_at = now() - interval '91 days' where ended_at is not null").await;
    assert_eq!(env.store.delete_expired_tasks(now_s - 1.0).await.unwrap().unwrap().tasks, 2);
    assert_eq!(env.store.count("select count(*) from task_dependencies").await, 0);
}

async fn retry(env: &TestEnv, task: TaskId) -> TaskId {
    match env.store.retry(task, ApiTokenId::OWNER, Run::Commit).await.unwrap() {
        super::super::RetryOutcome::Done { new: Some((id, _)), .. } => id,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn concurrent_batches_that_retry_the_same_tasks_are_all_written() {
    let env = TestEnv::new().await;
    let (first, second) = (env.submit().await.0, env.submit().await.0);
    for task in [first, second] {
        env.store.cancel(task, "a test", Run::Commit).await.unwrap();
    }
    let batch = |retried: [TaskId; 2]| {
        let tasks = retried.map(|task| {
            let mut new = new_task(None);
            new.spec.retry_of = Some(TaskRef::Key(TaskKey::Id(task)));
            new
        });
        let store = env.store.clone();
        async move { store.submit_batch(&tasks).await.map(|created| created.len()) }
    };
    for _ in 0..20 {
        let (one, other) = tokio::join!(batch([first, second]), batch([second, first]));
        assert_eq!((one.unwrap(), other.unwrap()), (2, 2));
    }
}

/// Users retry several cancelled tasks from the oldest to the newest.
#[tokio::test]
async fn retried_task_waits_for_the_retry_of_its_predecessor() {
    let env = TestEnv::new().await;
    let leadership = env.acquire_leadership().await;
    let first = env.submit().await.0;
    let task = submit_after(&env, &[first]).await;
    env.store.cancel(first, "a test", Run::Commit).await.unwrap();
    env.store.cancel(task, "a test", Run::Commit).await.unwrap();
    let first = retry(&env, first).await;
    let task = retry(&env, task).await;
    assert_eq!(state(&env, task).await, (TaskState::Blocked, "waits for t3".into()));
    end(&env, first, TaskState::Failed).await;
    let failed = first;
    let first = retry(&env, first).await;
    assert_eq!(state(&env, submit_after(&env, &[failed]).await).await.1, "waits for t5", "a task that was retried");
    env.store.sweep_starts(leadership).await.unwrap();
    assert_eq!(state(&env, task).await, (TaskState::Blocked, "waits for t5".into()));
    end(&env, first, TaskState::Merged).await;
    env.store.sweep_starts(leadership).await.unwrap();
    assert_eq!(state(&env, task).await.0, TaskState::Ready);
}

#[tokio::test]
async fn paused_task_resumes_into_the_state_of_its_predecessors() {
    let env = TestEnv::new().await;
    let leadership = env.acquire_leadership().await;
    let first = env.submit().await.0;
    let task = submit_after(&env, &[first]).await;
    env.store.pause(task, "a test", Run::Commit).await.unwrap();
    assert_eq!(env.store.sweep_starts(leadership).await.unwrap(), vec![], "paused");
    env.store.resume(task, "a test", Run::Commit).await.unwrap();
    assert_eq!(state(&env, task).await, (TaskState::Blocked, "waits for t1".into()));
    env.store.pause(task, "a test", Run::Commit).await.unwrap();
    end(&env, first, TaskState::Merged).await;
    env.store.sweep_starts(leadership).await.unwrap();
    assert_eq!(state(&env, task).await.0, TaskState::Paused);
    env.store.resume(task, "a test", Run::Commit).await.unwrap();
    assert_eq!(state(&env, task).await.0, TaskState::Ready);
}

/// The sweep may clear the mark of an edge whose predecessor ends at this moment.
#[tokio::test]
async fn end_of_a_predecessor_marks_an_edge_that_is_marked_already() {
    let env = TestEnv::new().await;
    let leadership = env.acquire_leadership().await;
    let first = env.submit().await.0;
    let task = submit_after(&env, &[first]).await;
    env.store.raw("update task_dependencies set due = true").await;
    let mut ending = env.store.begin().await.unwrap();
    let row = super::super::tasks::lock_task(&mut ending, first).await.unwrap().unwrap();
    assert!(super::super::tasks::move_task(&mut ending, &row, TaskState::Cancelled, "a test").await.unwrap());
    let sweep = tokio::spawn({
        let store = env.store.clone();
        async move { store.sweep_starts(leadership).await }
    });
    wait_for_blocked_query(&env, "%due = false%").await;
    ending.commit().await.unwrap();
    sweep.await.unwrap().unwrap();
    env.store.sweep_starts(leadership).await.unwrap();
    let (_, reason) = state(&env, task).await;
    assert!(reason.contains("t1 is cancelled"), "{reason}");
}

#[tokio::test]
async fn retry_of_a_raised_task_is_not_raised_again() {
    let env = TestEnv::new().await;
    let leadership = env.acquire_leadership().await;
    let first = env.submit().await.0;
    for _ in 0..3 {
        submit_after(&env, &[first]).await;
    }
    env.store.sweep_starts(leadership).await.unwrap();
    env.store.cancel(first, "a test", Run::Commit).await.unwrap();
    let retry = retry(&env, first).await;
    env.store.sweep_starts(leadership).await.unwrap();
    let summary = env.store.task_detail(retry).await.unwrap().unwrap().summary;
    assert_eq!((summary.priority, summary.is_bottleneck), (cfq_proto::task::Priority::P1, true));
}

#[tokio::test]
async fn failed_predecessor_of_a_kept_task_is_not_deleted() {
    let env = TestEnv::new().await;
    let (first, merged) = (env.submit().await.0, env.submit().await.0);
    let task = submit_after(&env, &[first, merged]).await;
    env.store.cancel(first, "a test", Run::Commit).await.unwrap();
    end(&env, merged, TaskState::Merged).await;
    env.store.raw("update tasks set ended_at = now() - interval '2 days' where ended_at is not null").await;
    env.store.cancel(task, "a test", Run::Commit).await.unwrap();
    let day_ago = env.store.clock_ms().await.unwrap() as f64 / 1000.0 - 86_400.0;
    assert_eq!(env.store.delete_expired_tasks(day_ago).await.unwrap().unwrap().tasks, 1, "the merged one");
    let retry = retry(&env, task).await;
    assert!(state(&env, retry).await.1.contains("t1 is cancelled"), "the retry waits for it too");
}
