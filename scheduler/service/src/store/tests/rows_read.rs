//! Tests that a query reads only the rows that it needs in a large database. They count rows, not time.

use super::*;
use crate::config::SchedulerLimits;

/// Maximum number of rows that a query may read. The queries need a few rows each; Postgres reads some of its own.
const FEW: i64 = 500;

/// A store with one connection, so that the statistics of its queries can be flushed.
pub(super) fn single_connection(env: &TestEnv) -> Store {
    let limits = SchedulerLimits { database_connections: 1, ..SchedulerLimits::default() };
    Store::new(&env.database, env.store.timing.clone(), limits).unwrap()
}

/// Number of rows and index entries that `work` reads.
pub(super) async fn rows_read<T>(store: &Store, work: impl Future<Output = T>) -> (i64, T) {
    let read = "select (select sum(seq_tup_read + coalesce(idx_tup_fetch, 0)) from pg_stat_user_tables)::bigint
                     + (select sum(idx_tup_read) from pg_stat_user_indexes)::bigint";
    store.raw("select pg_stat_force_next_flush()").await;
    let before = store.count(read).await;
    let done = work.await;
    store.raw("select pg_stat_force_next_flush()").await;
    (store.count(read).await - before, done)
}

/// Adds `count` tasks of priority P3. `state` is an SQL expression of `n`, the number of the task from 1.
pub(super) async fn add_tasks(env: &TestEnv, count: i64, state: &str) {
    env.store
        .raw(&format!(
            "insert into tasks (id, body_hash, spec, title, priority, state, threshold, max_iterations)
             select gen_random_uuid(), 'h', '{{}}', 'many', 3, {state}, 85, 5 from generate_series(1, {count}) as n"
        ))
        .await;
}

#[tokio::test]
async fn grant_reads_few_rows_beside_many_ready_and_waiting_tasks() {
    let env = TestEnv::new().await;
    let boot = env.join_runner().await;
    let mut urgent = crate::testing::new_task(None);
    urgent.spec.priority = cfq_proto::task::Priority::P0;
    env.store.submit(&urgent).await.unwrap();
    // Half of them wait for a job that is not placed.
    add_tasks(&env, 20_000, "'ready'").await;
    env.store
        .raw(
            "with waiting as (select id from tasks where title = 'many' order by number desc limit 10000),
                  job as (insert into jobs (id, task, seq, role, n, model, priority, prompt, prompt_bytes, prefix, max_tokens, state)
                          select id, id, 0, 'alpha', 0, 'path:/m', 3, '{}', 1, '[]', 1, 'queued' from waiting returning id)
             update tasks set waits_for = job.id from job
             where job.id = tasks.id",
        )
        .await;
    env.store.raw("analyze").await;
    let store = single_connection(&env);
    let request = LeaseRequest { boot, request: None };
    // The connection's first query also reads the catalogue.
    store.raw("select 1 from tasks limit 1").await;
    let (read, reply) = rows_read(&store, store.grant(&runner(), &request)).await;
    let LeaseReply::Granted { grant: Payload::Inline(grant), .. } = reply.unwrap() else { panic!("a grant") };
    assert_eq!(grant.fence.task, urgent.id);
    assert!(read <= FEW, "{read} rows read");
}

#[tokio::test]
async fn sweep_and_metrics_read_few_rows_beside_many_ended_tasks() {
    let mut r = running().await;
    add_tasks(&r.env, 100_000, "(array['merged', 'accepted', 'failed', 'cancelled'])[1 + n % 4]").await;
    r.env
        .store
        .raw(
            "update tasks set deadline = now() where title = 'many';
             insert into jobs (id, task, seq, role, n, model, priority, prompt, prompt_bytes, prefix, max_tokens, state)
             select gen_random_uuid(), id, 0, 'alpha', 0, 'path:/m', 3, '{}', 1, '[]', 1, 'done'
             from tasks where title = 'many' limit 10000;
             analyze",
        )
        .await;
    let store = single_connection(&r.env);
    r.env.store = store.clone();
    store.raw("select 1 from tasks limit 1").await;
    for table in ["jobs", "tasks"] {
        let renewed = "lease_expires = clock_timestamp() + interval '6 seconds'";
        store.raw(&format!("update {table} set {renewed} where state = 'running'")).await;
    }
    let (read, swept) = rows_read(&store, store.sweep_now(r.leadership)).await;
    swept.unwrap();
    assert!(read <= FEW, "the sweep read {read} rows");
    let (read, swept) = rows_read(&store, store.sweep_deadlines(r.leadership)).await;
    swept.unwrap();
    assert!(read <= FEW, "the sweep of deadlines read {read} rows");
    let (read, gauges) = rows_read(&store, store.gauges()).await;
    let gauges = gauges.unwrap();
    assert!(read <= FEW, "the metrics read {read} rows");
    assert_eq!(gauges.tasks.get("running"), Some(&1));
    assert_eq!(gauges.jobs.get("running"), Some(&1));
    let (read, open) = rows_read(&store, store.count_open_tasks()).await;
    assert_eq!(open.unwrap(), 1);
    assert!(read <= FEW, "the limit on open tasks read {read} rows");
}
