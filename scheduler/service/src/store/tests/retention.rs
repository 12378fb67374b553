//! Tests of the deletion of ended tasks.

use cfq_proto::blob::BlobHash;

use super::rows_read::{add_tasks, rows_read, single_connection};
use super::*;

const DAY_S: f64 = 24.0 * 60.0 * 60.0;

async fn now_s(env: &TestEnv) -> f64 {
    env.store.clock_ms().await.unwrap() as f64 / 1000.0
}

/// Tables with rows of tasks, and the column that names the task.
const TABLES: [(&str, &str); 10] = [
    ("tasks", "id"),
    ("jobs", "task"),
    ("events", "task"),
    ("steps", "task"),
    ("iterations", "task"),
    ("artifacts", "task"),
    ("reviews", "task"),
    ("internal_prs", "task"),
    ("questions", "task"),
    ("blob_refs", "task"),
];

#[tokio::test]
async fn expired_task_is_deleted_with_everything_that_belongs_to_it() {
    let r = running().await;
    let env = &r.env;
    committed(env, r.task, 0, started()).await;
    committed(env, r.task, 1, generated(artifact(1))).await;
    let (own, shared) = (BlobHash::of(b"own"), BlobHash::of(b"both"));
    env.store.blob_put(&of_runner(r.task.lease), &own, 3, 0, b"own").await.unwrap();
    env.store.blob_put(&of_runner(r.task.lease), &shared, 4, 0, b"both").await.unwrap();
    env.submit().await;
    let kept = grant(env, r.runner).await.fence;
    env.store.blob_put(&of_runner(kept.lease), &shared, 4, 0, b"both").await.unwrap();
    let expired = r.task.task;
    env.store.raw(&format!("update tasks set retry_of = '{expired}' where id = '{}'", kept.task)).await;
    env.store.raw(&format!("update tasks set waits_for = '{}' where id = '{expired}'", r.job.job)).await;
    let question = "insert into questions (id, task, state, text, reason, actions, recommendation)
                    values (gen_random_uuid(), $task, 'closed', '', '{}', '[]', '')";
    env.store.raw(&question.replace("$task", &format!("'{expired}'"))).await;
    env.store.cancel(expired, "a test", Run::Commit).await.unwrap();
    let now = now_s(env).await;
    let expiry = |days: f64| super::super::Expiry {
        tasks_ended_before: Some(now - days * DAY_S),
        nodes_seen_before: Some(now - days * DAY_S),
    };
    assert_eq!(env.store.count_expired(&expiry(90.0)).await.unwrap().tasks, 0, "it ended just now");
    assert!(env.store.delete_expired_tasks(now - 90.0 * DAY_S).await.unwrap().is_none());
    env.store.raw("update tasks set ended_at = ended_at - interval '91 days' where ended_at is not null").await;

    let counted = env.store.count_expired(&expiry(90.0)).await.unwrap();
    let events = env.store.task_events(expired, 0).await.unwrap().len() as u64;
    assert_eq!((counted.tasks, counted.events, counted.blob_bytes, counted.nodes), (1, events, 3, 0));
    let deleted = env.store.delete_expired_tasks(now - 90.0 * DAY_S).await.unwrap().unwrap();
    assert_eq!((deleted.tasks, deleted.events, deleted.blob_bytes), (1, events, 3), "as counted");
    assert!(env.store.delete_expired_tasks(now - 90.0 * DAY_S).await.unwrap().is_none());
    for (table, column) in TABLES {
        let left = format!("select count(*) from {table} where {column} = '{expired}'");
        assert_eq!(env.store.count(&left).await, 0, "{table}");
    }
    assert_eq!(env.store.count("select count(*) from attempts").await, 0);
    assert_eq!(env.store.count("select count(*) from tasks where retry_of is null").await, 1, "the other task");
    assert_eq!(env.store.blob_get(&of_runner(kept.lease), &shared, 0).await.unwrap(), Some((4, b"both".to_vec())));
    committed(env, kept, 0, started()).await;
}

#[tokio::test]
async fn locked_and_open_tasks_are_left_and_block_nothing() {
    let env = TestEnv::new().await;
    let ids = [env.submit().await.0, env.submit().await.0, env.submit().await.0];
    env.store.cancel(ids[0], "a test", Run::Commit).await.unwrap();
    env.store.cancel(ids[1], "a test", Run::Commit).await.unwrap();
    let later = now_s(&env).await + DAY_S;
    let locked = env.store.hold("select 1 from tasks where number = 1 for update").await;
    assert_eq!(env.store.delete_expired_tasks(later).await.unwrap().unwrap().tasks, 1);
    assert!(env.store.delete_expired_tasks(later).await.unwrap().is_none(), "locked");
    locked.rollback().await.unwrap();
    assert_eq!(env.store.delete_expired_tasks(later).await.unwrap().unwrap().tasks, 1);
    assert_eq!(
        env.store
            .list_tasks(&Default::default(), Default::default(), None, 10)
            .await
            .unwrap()
            .into_iter()
            .map(|t| t.id)
            .collect::<Vec<_>>(),
        [ids[2]]
    );
}

#[tokio::test]
async fn deletion_reads_few_rows_beside_many_kept_tasks() {
    let env = TestEnv::new().await;
    let (expired, _) = env.submit().await;
    env.store.cancel(expired, "a test", Run::Commit).await.unwrap();
    let before = now_s(&env).await + 1.0;
    add_tasks(&env, 25_000, "'merged'").await;
    env.store
        .raw(
            "update tasks set ended_at = now() + interval '1 hour' where title = 'many';
             insert into events (task, number, task_seq, body) select id, number, 1, '{}' from tasks where title = 'many';
             insert into questions (id, task, state, text, reason, actions, recommendation)
                 select gen_random_uuid(), id, 'closed', '', '{}', '[]', '' from tasks where title = 'many';
             insert into blobs (hash, size, chunks) values ('x', 1, 1);
             insert into blob_refs (hash, task) select 'x', id from tasks where title = 'many';
             analyze"
        )
        .await;
    let store = single_connection(&env);
    store.raw("select 1 from tasks limit 1").await;
    let (read, deleted) = rows_read(&store, store.delete_expired_tasks(before)).await;
    assert_eq!(deleted.unwrap().unwrap().tasks, 1);
    assert!(read <= 500, "{read} rows read");
}

#[tokio::test]
async fn nodes_and_runners_without_heartbeats_are_deleted_unless_they_hold_work() {
    let r = running().await;
    r.env.store.raw("update nodes set last_seen = now() - interval '31 days'").await;
    r.env.store.raw("update runners set last_seen = now() - interval '31 days'").await;
    let before = now_s(&r.env).await - 30.0 * DAY_S;
    let deleted = r.env.store.delete_lost_nodes(before).await.unwrap();
    assert_eq!((deleted.nodes, deleted.runners), (0, 0));
    r.env.store.cancel(r.task.task, "a test", Run::Commit).await.unwrap();
    let deleted = r.env.store.delete_lost_nodes(before).await.unwrap();
    assert_eq!((deleted.nodes, deleted.runners), (1, 1));
}
