//! Tests of credentials, permissions and settings, inspected on running servers.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use async_nats::ConnectOptions;
use cfq_deploy::{ServiceOptions, doctor};
use cfq_proto::ids::NodeId;
use cfq_proto::subject::{self, Identity};
use sqlx::{Connection, PgConnection};

use crate::lab::{Lab, connect, database, join, node};

#[tokio::test(flavor = "multi_thread")]
async fn connections_without_credentials_are_refused() {
    let lab = Lab::new();
    let stack = lab.start().await;
    let addresses = stack.addresses();
    for options in [database(&addresses.postgres), database(&addresses.postgres).password("guess")] {
        assert!(PgConnection::connect_with(&options).await.is_err());
        assert!(PgConnection::connect_with(&options.username("postgres").database("postgres")).await.is_err());
    }
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&addresses.postgres.host), 0o700);
    assert_eq!(mode(&addresses.postgres.password_file), 0o600);
    assert_eq!(mode(&addresses.nats.seed_file(&node())), 0o600);
    assert!(ConnectOptions::new().max_reconnects(1).connect(&addresses.nats.url).await.is_err());
    let stranger = nkeys::KeyPair::new_user().seed().unwrap();
    assert!(ConnectOptions::with_nkey(stranger).max_reconnects(1).connect(&addresses.nats.url).await.is_err());
    let mut connection = connect(&addresses.postgres).await.unwrap();
    let tcp: String = sqlx::query_scalar("SELECT setting FROM pg_settings WHERE name = 'listen_addresses'")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    assert_eq!(tcp, "");
    let admin: bool = sqlx::query_scalar("SELECT rolsuper FROM pg_roles WHERE rolname = current_user")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    assert!(!admin);
    stack.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn node_grants_cover_only_its_own_subjects() {
    use futures::StreamExt;
    let lab = Lab::new();
    let stack = lab.start().await;
    let nats = &stack.addresses().nats;
    let scheduler = join(nats, &Identity::Scheduler).await;
    let mut received = scheduler.subscribe("cfq.v1.>").await.unwrap();
    scheduler.flush().await.unwrap();
    let client = join(nats, &node()).await;
    let other = NodeId::new("attic").unwrap();
    let other_heartbeat = subject::node(&other, "heartbeat");
    let forbidden = [other_heartbeat, "cfq.v1.cmd.node.den".into(), "$JS.API.STREAM.CREATE.X".into()];
    for forbidden in forbidden {
        client.publish(forbidden, "forged".into()).await.unwrap();
    }
    let me = NodeId::new("den").unwrap();
    client.publish(subject::node(&me, "heartbeat"), "mine".into()).await.unwrap();
    client.flush().await.unwrap();
    let first = tokio::time::timeout(Duration::from_secs(10), received.next()).await.unwrap().unwrap();
    assert_eq!(&first.payload[..], b"mine", "the forged messages were sent first and dropped");
    let streams = async_nats::jetstream::new(scheduler.clone());
    let config = async_nats::jetstream::stream::Config {
        name: subject::WORK_STREAM.into(),
        subjects: vec![subject::WORK_ALL.into()],
        ..Default::default()
    };
    streams.create_stream(config).await.unwrap();
    stack.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_reports_running_services_and_weakened_settings() {
    let lab = Lab::new();
    let stack = lab.start().await;
    let find = |checks: &[doctor::Check], name: &str| checks.iter().find(|check| check.name == name).unwrap().clone();
    let checks = doctor::checks(&lab.paths, &ServiceOptions::default()).await;
    for name in [
        "postgres fsync",
        "postgres full_page_writes",
        "postgres synchronous_commit",
        "postgres data_checksums",
        "nats port",
        "keys",
    ] {
        assert_eq!(find(&checks, name).status, doctor::CheckStatus::Ok, "{checks:?}");
    }
    assert!(find(&checks, "running").what.contains(&std::process::id().to_string()));
    let mut connection = connect(&stack.addresses().postgres).await.unwrap();
    sqlx::query("ALTER ROLE cfq SET synchronous_commit = off").execute(&mut connection).await.unwrap();
    let checks = doctor::checks(&lab.paths, &ServiceOptions::default()).await;
    let weakened = find(&checks, "postgres synchronous_commit");
    assert_eq!(weakened.status, doctor::CheckStatus::Fail);
    assert!(weakened.next_step.is_some());
    stack.stop().await.unwrap();
    let checks = doctor::checks(&lab.paths, &ServiceOptions::default()).await;
    assert_eq!(find(&checks, "running").what, "cfq is not running on this data folder");
    serde_json::to_string(&checks).unwrap();
}
