//! Tests of an upgrade: a newer cfq migrates the database while an older scheduler runs.

use super::*;

/// The row that a newer cfq writes when it migrates the database.
const NEWER_MIGRATION: &str = "insert into _sqlx_migrations (version, description, success, checksum, execution_time)
                               values (9999, 'later', true, '', 0)";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scheduler_stops_when_a_newer_cfq_migrates_the_database() {
    let mut cluster = TestCluster::start().await;
    cluster.env.store.raw(NEWER_MIGRATION).await;
    let (_stop, served) = cluster.service.take().unwrap();
    let error = in_time(served).await.unwrap().unwrap_err().to_string();
    assert!(error.contains("newer cfq") && error.contains("Run that version"), "{error}");
    in_time(async { while cluster.env.store.has_leader().await.unwrap() {} }).await;
    let (_stop, served) = serve(&cluster.config);
    assert!(in_time(served).await.unwrap().unwrap_err().to_string().contains("newer cfq"), "nor does it start again");
}
