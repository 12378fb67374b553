use super::super::StoreError;
use super::*;

#[tokio::test]
async fn a_newer_database_is_refused_with_the_way_out() {
    let lab = Lab::new().await;
    lab.store.migrate().await.unwrap();
    lab.store
        .raw("insert into _sqlx_migrations (version, description, success, checksum, execution_time) values (9999, 'later', true, '', 0)")
        .await;
    let error = lab.store.migrate().await.unwrap_err();
    assert!(matches!(error, StoreError::Newer { version: 9999 }), "{error:?}");
    assert!(error.to_string().contains("newer cfq"), "{error}");
}

#[tokio::test]
async fn a_beat_is_a_heap_only_update() {
    let r = running().await;
    let hot = "select n_tup_upd - n_tup_hot_upd from pg_stat_user_tables where relname = 'jobs'";
    // Statistics reach the view when a session has been idle for a moment; asking for them flushes them.
    r.lab.store.raw("select pg_stat_force_next_flush()").await;
    let before = r.lab.store.count(hot).await;
    for _ in 0..20 {
        r.lab
            .store
            .raw("update jobs set lease_expires = now() + interval '6 seconds'; select pg_stat_force_next_flush()")
            .await;
    }
    // A full page moves the row now and then; with lease_expires in an index each of the 20 would.
    let moved = r.lab.store.count(hot).await - before;
    assert!(moved <= 4, "{moved}");
}

/// Rows as the schema before `0003` held them are read by this build.
#[tokio::test]
async fn a_filled_older_database_is_brought_up_to_date() {
    let r = running().await;
    for undo in [
        "alter table attempts drop column journal, drop column vocabulary",
        "alter table tasks drop column waits_for, drop column stuck",
        "alter table nodes drop column left_out, add column left_out_version bigint, add column left_out_at timestamptz",
        "update nodes set left_out_version = 3, left_out_at = now()",
        "delete from _sqlx_migrations where version > 2",
    ] {
        r.lab.store.raw(undo).await;
    }
    r.lab.store.migrate().await.unwrap();
    assert!(r.lab.store.core_nodes().await.unwrap()[0].left_out.is_empty());
    assert_eq!(r.lab.store.live_jobs().await.unwrap().len(), 1);
    assert_eq!(report(&r.lab, r.job, r.node, done("x")).await, FenceReply::Committed);
    committed(&r.lab, r.task, 0, started()).await;
    assert!(r.lab.store.task_detail(r.task.task).await.unwrap().is_some());
}
