use cfq_proto::http::{JobFilter, TaskSort};
use cfq_proto::ids::{ApiTokenId, TaskId};
use cfq_proto::job::{JobRole, Sampling};
use cfq_proto::task::Priority;

use super::super::calls::{delete, insert};
use super::super::place::mark_placed;
use super::super::roll_back;
use super::super::tasks::lock_task;
use super::super::{Hint, LeaderHint, NewClientCall, TaskFilter};
use super::*;

async fn submit_call(env: &TestEnv, text: &str) -> (TaskId, JobId) {
    let messages = vec![ChatMessage { role: ChatRole::User, content: text.into() }];
    let prompt = Prompt { messages, sampling: Sampling::default(), format: Default::default(), ..Prompt::default() };
    let id = TaskId::fresh();
    let model = MODEL.parse().unwrap();
    let call = NewClientCall { id, token: ApiTokenId::OWNER, model, priority: Priority::P1, prompt };
    let (job, hints) = env.store.submit_call(call).await.unwrap();
    assert_eq!(hints, [Hint::Leader(LeaderHint::Job(job))]);
    (id, job)
}

/// Number of rows that belong to calls.
async fn rows_left(env: &TestEnv) -> i64 {
    env.store
        .count(
            "select (select count(*) from tasks where state = 'call') + (select count(*) from jobs)
                  + (select count(*) from attempts) + (select count(*) from blob_refs) + (select count(*) from blobs)
                  + (select count(*) from blob_chunks) + (select count(*) from events)",
        )
        .await
}

#[tokio::test]
async fn call_runs_like_any_job_and_leaves_nothing() {
    let env = TestEnv::new().await;
    let (boot, leadership) = (env.join_node().await, env.acquire_leadership().await);
    // The prompt is too large for a message, so it is a blob.
    let (call, job) = submit_call(&env, &"hello\0 ".repeat(100_000)).await;
    let live = env.store.live_jobs().await;
    assert_eq!((live.len(), live[0].role, live[0].priority), (1, JobRole::Client, Priority::P1));
    assert_eq!(env.store.call(call).await.unwrap().unwrap().state, JobState::Queued);

    let order = PlaceOrder { job, attempt: 1, node: node(), boot, reason: "cheapest".into() };
    let order = env.store.place(leadership, &order).await.unwrap().unwrap();
    let Payload::Blob(prompt) = &order.prompt else { panic!("a blob") };
    assert!(env.store.blob_get(&of_node(order.fence.lease), &prompt.hash, 0).await.unwrap().is_some());
    assert_eq!(accept(&env, order.fence, boot).await, FenceReply::Committed);
    assert_eq!(report(&env, order.fence, boot, done("answer")).await, FenceReply::Committed);
    let view = env.store.call(call).await.unwrap().unwrap();
    assert_eq!((view.state, view.completion.unwrap().text), (JobState::Done, "answer".to_owned()));
    assert_eq!(env.store.count("select count(*) from events").await, 0);

    assert_eq!(env.store.end_call(call).await.unwrap(), [Hint::Leader(LeaderHint::Job(job))]);
    assert_eq!((rows_left(&env).await, env.store.call(call).await.unwrap()), (0, None));
    assert_eq!(report(&env, order.fence, boot, done("answer")).await, FenceReply::Stale);
    assert_eq!(accept(&env, order.fence, boot).await, FenceReply::Stale);
    assert_eq!(env.store.end_call(call).await.unwrap(), []);
}

#[tokio::test]
async fn call_of_a_client_that_has_gone_is_cancelled_and_that_of_a_waiting_one_is_not() {
    let env = TestEnv::new().await;
    let (boot, leadership) = (env.join_node().await, env.acquire_leadership().await);
    let (gone, job) = submit_call(&env, "a").await;
    let (waits, _) = submit_call(&env, "b").await;
    let order = PlaceOrder { job, attempt: 1, node: node(), boot, reason: "cheapest".into() };
    let fence = env.store.place(leadership, &order).await.unwrap().unwrap().fence;
    assert_eq!(accept(&env, fence, boot).await, FenceReply::Committed);

    env.store.raw("update tasks set call_expires = now() - interval '1 second'").await;
    env.store.extend_calls(&[waits, TaskId::fresh()]).await.unwrap();
    let now_ms = env.store.clock_ms().await.unwrap();
    let (hints, ended) = env.store.sweep_calls(leadership, now_ms).await.unwrap();
    assert_eq!(ended, 1);
    assert!(hints.contains(&Hint::CancelJob { node: node(), fence }), "{hints:?}");
    assert_eq!(env.store.call(gone).await.unwrap(), None);
    assert!(env.store.call(waits).await.unwrap().is_some());
    assert_eq!(env.store.sweep_calls(leadership, now_ms).await.unwrap(), (vec![], 0));

    // An expiry that no extension could have set is from before the clock was set back.
    env.store.raw("update tasks set call_expires = now() + interval '1 hour'").await;
    assert_eq!(env.store.sweep_calls(leadership, now_ms).await.unwrap().1, 1);
    assert_eq!(rows_left(&env).await, 0);
}

#[tokio::test]
async fn call_that_is_extended_while_the_sweep_runs_is_kept() {
    let env = TestEnv::new().await;
    let leadership = env.acquire_leadership().await;
    let (call, _) = submit_call(&env, "a").await;
    env.store.raw("update tasks set call_expires = now() - interval '1 second'").await;
    let now_ms = env.store.clock_ms().await.unwrap();
    // The sweep finds the call and then waits for this transaction.
    let extension = env.store.hold("update tasks set call_expires = now() + interval '10 seconds'").await;
    let store = env.store.clone();
    let sweep = tokio::spawn(async move { store.sweep_calls(leadership, now_ms).await });
    let waiting =
        "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()";
    while env.store.count(waiting).await == 0 {
        tokio::task::yield_now().await;
    }
    extension.commit().await.unwrap();
    assert_eq!(sweep.await.unwrap().unwrap(), (vec![], 0));
    assert!(env.store.call(call).await.unwrap().is_some());
}

#[tokio::test]
async fn call_is_cancelled_by_its_number_and_its_client_is_told() {
    let env = TestEnv::new().await;
    let (call, _) = submit_call(&env, "a").await;
    assert_eq!(env.store.find_call("c1".parse().unwrap()).await.unwrap(), Some(call));
    assert_eq!(env.store.find_call("t1".parse().unwrap()).await.unwrap(), None);
    assert!(env.store.cancel_call(call).await.unwrap().0);
    assert_eq!(env.store.call(call).await.unwrap().unwrap().state, JobState::Cancelled);
    assert_eq!(env.store.cancel_call(call).await.unwrap(), (false, vec![]), "it has ended");
    let (task, _) = env.submit().await;
    assert_eq!(env.store.cancel_call(task).await.unwrap(), (false, vec![]));
}

#[tokio::test]
async fn call_appears_in_no_list_of_tasks_and_takes_no_number() {
    let env = TestEnv::new().await;
    let (call, job) = submit_call(&env, "a").await;
    let (task, number) = env.submit().await;
    assert_eq!(number.to_string(), "t1");
    let all = env.store.find_tasks(&TaskFilter::default(), TaskSort::Newest, None, 10).await.unwrap();
    assert_eq!(all, [(task, number)]);
    for key in [call.to_string(), "t1".to_owned()] {
        let found = env.store.find_task(key.parse().unwrap()).await.unwrap();
        assert_eq!(found, (key == "t1").then_some(task), "{key}");
    }
    assert_eq!(env.store.open_tasks_by_state().await.unwrap(), [("ready".to_owned(), 1)].into());
    assert_eq!(env.store.count_open_tasks().await.unwrap(), 1);
    assert!(env.store.task_queue().await.unwrap().running.is_empty());
    // No runner gets it.
    let runner = env.join_runner().await;
    assert_eq!(grant(&env, runner).await.fence.task, task);
    assert!(matches!(grant_reply(&env, runner).await, LeaseReply::None));

    let jobs = env.store.list_jobs(&JobFilter::default(), None, 10).await.unwrap();
    assert_eq!((jobs.len(), jobs[0].id, jobs[0].task.to_string()), (1, job, "c1".to_owned()));
    let explained = env.store.explanation(call, Some(job)).await.unwrap().unwrap();
    assert_eq!((explained.task.number.to_string(), explained.jobs[0].id), ("c1".to_owned(), job));
    env.store.raw("update jobs set state = 'dead'").await;
    assert!(env.store.dead_letters(None, 10).await.unwrap().is_empty());
}

/// Only writing, placing and deleting a call do not wait for the disk: for all else, a node or a user relies on the
/// commit.
#[tokio::test]
async fn only_writing_placing_and_deleting_a_call_do_not_wait_for_the_disk() {
    let env = TestEnv::new().await;
    let (boot, runner) = (env.join_node().await, env.join_runner().await);
    let setting = async |tx: &mut sqlx::PgConnection| -> String {
        sqlx::query_scalar("show synchronous_commit").fetch_one(tx).await.unwrap()
    };
    let mut tx = env.store.begin().await.unwrap();
    let new = NewClientCall {
        id: TaskId::fresh(),
        token: ApiTokenId::OWNER,
        model: MODEL.parse().unwrap(),
        priority: Priority::P1,
        prompt: Prompt::default(),
    };
    insert(&mut tx, JobId::fresh(), new, 1000.0).await.unwrap();
    assert_eq!(setting(&mut tx).await, "off");
    roll_back(tx, ()).await.unwrap();

    let (call, of_call) = submit_call(&env, "x").await;
    env.submit().await;
    let fence = grant(&env, runner).await.fence;
    let of_task = job(&env, fence).await.id;
    for (job, expected) in [(of_call, "off"), (of_task, "on")] {
        let mut tx = env.store.begin().await.unwrap();
        let order = PlaceOrder { job, attempt: 1, node: node(), boot, reason: String::new() };
        assert!(mark_placed(&mut tx, &order, LeaseId::fresh(), "").await.unwrap().is_some());
        assert_eq!(setting(&mut tx).await, expected);
        roll_back(tx, ()).await.unwrap();
    }

    let mut tx = env.store.begin().await.unwrap();
    let row = lock_task(&mut tx, call).await.unwrap().unwrap();
    assert_eq!(setting(&mut tx).await, "on");
    delete(&mut tx, &row, "test").await.unwrap();
    assert_eq!(setting(&mut tx).await, "off");
    tx.commit().await.unwrap();
    let mut tx = env.store.begin().await.unwrap();
    assert_eq!(setting(&mut tx).await, "on", "the setting ends with its transaction");
    roll_back(tx, ()).await.unwrap();
}
