//! Tests of what the service refuses at its start and at the registration of others.

use super::*;

#[tokio::test]
async fn used_port_is_reported_with_its_setting() {
    let env = TestEnv::new().await;
    let folder = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let config = Config {
        database: env.database.clone(),
        nats: env.nats(&Identity::Scheduler),
        http: HttpConfig {
            bind: taken.local_addr().unwrap(),
            socket: None,
            socket_on_stdin: false,
            allow_plaintext: false,
            lan: None,
            token_file: token_file(&folder),
            allowed_hosts: vec![],
        },
        defaults: Defaults::default(),
        limits: SchedulerLimits::default(),
        retention: Default::default(),
        timing: Timing::default(),
    };
    let error = crate::run(config, |_| axum::Router::new(), std::future::pending()).await.unwrap_err();
    assert!(error.to_string().contains("http.bind"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn former_register_verb_is_refused_with_a_reason() {
    let mut cluster = TestCluster::start().await;
    let registration = node_registration(cluster.node_boot);
    let reply: RegisterReply = request_reply(&cluster.node, subject::node(&node(), "hello"), registration).await;
    let RegisterReply::Refused { reason, retry_ms: None } = reply else { panic!("{reply:?}") };
    assert!(reason.contains("older than the scheduler"), "{reason}");
    cluster.stop().await;
}
