//! Tests that a query reads only the rows that it needs in a large database. They count rows, not time.

use super::*;
use crate::config::SchedulerLimits;

/// Rows of each kind in the large tables.
const MANY: i64 = 25_000;
/// Maximum number of rows that a query may read. The queries need a few rows each; Postgres reads some of its own.
const FEW: i64 = 500;

/// A store with one connection, so that the statistics of its queries can be flushed.
fn single_connection(env: &TestEnv) -> Store {
    let limits = SchedulerLimits { database_connections: 1, ..SchedulerLimits::default() };
    Store::new(&env.database, env.store.timing.clone(), limits).unwrap()
}

/// Number of rows and index entries that `work` reads in the tables of tasks, jobs and events.
async fn rows_read<T>(store: &Store, work: impl Future<Output = T>) -> (i64, T) {
    let read = "select (select sum(seq_tup_read + idx_tup_fetch) from pg_stat_user_tables
                        where relname in ('tasks', 'jobs', 'events'))::bigint
                     + (select sum(idx_tup_read) from pg_stat_user_indexes
                        where relname in ('tasks', 'jobs', 'events'))::bigint";
    store.raw("select pg_stat_force_next_flush()").await;
    let before = store.count(read).await;
    let done = work.await;
    store.raw("select pg_stat_force_next_flush()").await;
    (store.count(read).await - before, done)
}

/// Adds `MANY` tasks in this state, of priority P3.
async fn add_tasks(env: &TestEnv, state: &str) {
    env.store
        .raw(&format!(
            "insert into tasks (id, body_hash, spec, title, priority, state, threshold, max_iterations)
             select gen_random_uuid(), 'h', (select spec from tasks order by number limit 1), 'many', 3, '{state}', 85, 5
             from generate_series(1, {MANY})"
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
    add_tasks(&env, "ready").await;
    // As many tasks wait for a job that is not placed.
    add_tasks(&env, "ready").await;
    env.store
        .raw(
            "with waiting as (select id from tasks where title = 'many' order by number desc limit 25000),
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
    for state in ["merged", "accepted", "failed", "cancelled"] {
        add_tasks(&r.env, state).await;
    }
    r.env
        .store
        .raw(
            "update tasks set deadline = now() where title = 'many';
             insert into jobs (id, task, seq, role, n, model, priority, prompt, prompt_bytes, prefix, max_tokens, state)
             select gen_random_uuid(), id, 0, 'alpha', 0, 'path:/m', 3, '{}', 1, '[]', 1, 'done'
             from tasks where title = 'many';
             analyze;
             update jobs set lease_expires = now() + interval '1 hour' where state = 'running';
             update tasks set lease_expires = now() + interval '1 hour' where state = 'running'",
        )
        .await;
    let store = single_connection(&r.env);
    r.env.store = store.clone();
    store.raw("select 1 from tasks limit 1").await;
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
