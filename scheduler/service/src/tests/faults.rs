//! Tests of partial database faults: the parts of the service that a fault does not affect must continue.

use cfq_proto::ids::LeaseId;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::*;

impl TestCluster {
    /// Sends heartbeats of the node, and of the runner with these leases, until the returned task is aborted.
    fn send_heartbeats(&self, leases: Vec<LeaseId>) -> tokio::task::JoinHandle<()> {
        let (node_session, runner_session) = (self.node.clone(), self.runner.clone());
        let of_node = Heartbeat { boot: self.node_boot, held: vec![], ledger: None, devices: None };
        let held = leases.into_iter().map(|lease| HeldLease { lease, step_age_ms: 0 }).collect();
        let of_runner = Heartbeat { boot: self.runner_boot, held, ledger: None, devices: None };
        tokio::spawn(async move {
            loop {
                let _reply: HeartbeatReply =
                    request_reply(&node_session, subject::node(&node(), "heartbeat"), of_node.clone()).await;
                let _reply: HeartbeatReply =
                    request_reply(&runner_session, subject::runner(&runner(), "heartbeat"), of_runner.clone()).await;
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        })
    }

    /// Waits until the job is queued, while the runner sends heartbeats and the node does not.
    async fn wait_until_queued_without_node(&self, fence: TaskFence, job: JobId) {
        in_time(async {
            loop {
                let held = vec![HeldLease { lease: fence.lease, step_age_ms: 0 }];
                let keep_alive = Heartbeat { boot: self.runner_boot, held, ledger: None, devices: None };
                let subject = subject::runner(&runner(), "heartbeat");
                let _reply: HeartbeatReply = request_reply(&self.runner, subject, keep_alive).await;
                if self.get_job(fence, job).await.state == JobState::Queued {
                    return;
                }
            }
        })
        .await;
    }
}

/// Another stream takes the subjects of the work orders, so that JetStream refuses the work stream.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_are_swept_while_jetstream_refuses_the_work_stream() {
    let mut cluster = TestCluster::start().await;
    cluster.client.submit(&spec(), None).await.unwrap();
    let fence = cluster.take_task().await;
    let job = cluster.submit_job(fence).await;
    let order = cluster.receive_order().await;
    assert_eq!(cluster.accept(&order).await, FenceReply::Committed);
    let scheduler = Session::connect(&cluster.config.nats, Identity::Scheduler, &cluster.config.timing).await.unwrap();
    let jetstream = async_nats::jetstream::new(scheduler.client().clone());
    let other = async_nats::jetstream::stream::Config {
        name: "OTHER".into(),
        subjects: vec![subject::WORK_ALL.into()],
        ..Default::default()
    };
    in_time(async {
        // The scheduler may create its stream again in between.
        while jetstream.create_stream(other.clone()).await.is_err() {
            let _missing = jetstream.delete_stream(subject::WORK_STREAM).await;
        }
    })
    .await;
    cluster.wait_until_queued_without_node(fence, job.id).await;
    // Work goes on once JetStream accepts the stream.
    jetstream.delete_stream("OTHER").await.unwrap();
    let again = cluster.receive_order().await;
    assert_eq!((again.fence.job, again.fence.attempt), (job.id, 2));
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn placement_does_not_wait_until_all_pending_reasons_are_recorded() {
    let mut cluster = TestCluster::start().await;
    cluster.client.submit(&spec(), None).await.unwrap();
    cluster.client.submit(&spec(), None).await.unwrap();
    let (fence, second) = (cluster.take_task().await, cluster.take_task().await);
    let first = cluster.submit_job(fence).await;
    let order = cluster.receive_order().await;
    assert_eq!(cluster.accept(&order).await, FenceReply::Committed);
    let copies = format!(
        "set local statement_timeout = 0;
         insert into jobs select (jsonb_populate_record(null::jobs, to_jsonb(j) || jsonb_build_object(
             'id', gen_random_uuid(), 'n', 100 + i, 'model', 'openai:gone/m', 'state', 'queued', 'attempt', 0,
             'placement', '', 'node', null, 'node_boot', null, 'lease', null, 'placed_at', null, 'accepted_at', null,
             'lease_expires', null, 'completion', null, 'usage', null))).* from jobs j, generate_series(1, 10000) i where j.id = '{}'",
        first.id
    );
    assert_eq!(cluster.report(&order, done()).await, FenceReply::Committed);
    let heartbeats = cluster.send_heartbeats(vec![fence.lease, second.lease]);
    cluster.env.store.raw(&copies).await;
    let unexplained = "select count(*) from jobs where state = 'queued' and placement = ''";
    in_time(async { while cluster.env.store.count(unexplained).await == 10_000 {} }).await;
    cluster.submit_job(second).await;
    assert_eq!(cluster.receive_order().await.fence.attempt, 1);
    assert_ne!(cluster.env.store.count(unexplained).await, 0, "the job was placed before all reasons were recorded");
    heartbeats.abort();
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreadable_rows_block_no_grant_sweep_or_placement() {
    let mut cluster = TestCluster::start().await;
    let unreadable = cluster.client.submit(&spec(), None).await.unwrap();
    let good = cluster.client.submit(&spec(), None).await.unwrap();
    let other = cluster.client.submit(&spec(), None).await.unwrap();
    cluster.env.store.raw(&format!("update tasks set spec = '{{}}' where id = '{}'", unreadable.id)).await;
    let fence = cluster.take_task().await;
    assert_eq!(fence.task, good.id, "the unreadable task, which ranks first, is skipped");
    let job = cluster.submit_job(fence).await;
    let order = cluster.receive_order().await;
    assert_eq!(cluster.accept(&order).await, FenceReply::Committed);
    let second = cluster.take_task().await;
    assert_eq!(second.task, other.id);
    let queued = cluster.submit_job(second).await;
    cluster.env.store.raw(&format!("update jobs set node_failures = '[]' where id = '{}'", queued.id)).await;
    cluster.wait_until_queued_without_node(fence, job.id).await;
    let again = cluster.receive_order().await;
    assert_eq!((again.fence.job, again.fence.attempt), (job.id, 2));
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heartbeat_is_answered_while_all_request_connections_wait() {
    let limits = SchedulerLimits { database_connections: 2, ..SchedulerLimits::default() };
    let mut cluster = TestCluster::within(limits).await;
    cluster.client.submit(&spec(), None).await.unwrap();
    let fence = cluster.take_task().await;
    let blocked = cluster.env.store.hold("lock table tasks in exclusive mode").await;
    let requests: Vec<_> = (0..6)
        .map(|_| {
            let (session, body) = (cluster.runner.clone(), cfq_proto::messages::Release { fence, waits_for: None });
            tokio::spawn(async move {
                let subject = subject::runner(&runner(), "release");
                session.request::<_, FenceReply>(&subject, &body).await
            })
        })
        .collect();
    let waiting =
        "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'";
    in_time(async { while cluster.env.store.count(waiting).await < 2 {} }).await;
    let heartbeat = Heartbeat { boot: cluster.node_boot, held: vec![], ledger: None, devices: None };
    let reply: HeartbeatReply = cluster.node.request(&subject::node(&node(), "heartbeat"), &heartbeat).await.unwrap();
    assert!(!reply.register_again);
    // The lock is released only after the heartbeat was answered.
    blocked.rollback().await.unwrap();
    for request in requests {
        // Any reply is accepted here, including unavailable: this test is about the heartbeat.
        let _answer = in_time(request).await.unwrap();
    }
    cluster.stop().await;
}

/// A TCP proxy whose connections stay open but carry nothing once it is cut.
struct CuttableProxy {
    url: String,
    cut: watch::Sender<bool>,
}

impl CuttableProxy {
    async fn start(target: &str) -> Self {
        let target = target.trim_start_matches("nats://").to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("nats://{}", listener.local_addr().unwrap());
        let (cut, is_cut) = watch::channel(false);
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let (target, mut is_cut) = (target.clone(), is_cut.clone());
                tokio::spawn(async move {
                    let Ok(mut server) = TcpStream::connect(target).await else { return };
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut client, &mut server) => return,
                        _ = is_cut.changed() => {}
                    }
                    // Keeps both connections open.
                    std::future::pending().await
                });
            }
        });
        Self { url, cut }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leader_that_is_cut_off_from_nats_is_replaced() {
    let mut cluster = TestCluster::start().await;
    cluster.stop().await;
    let proxy = CuttableProxy::start(&cluster.config.nats.url).await;
    let mut behind_proxy = cluster.config.clone();
    behind_proxy.nats.url = proxy.url.clone();
    cluster.service = Some(serve(&behind_proxy));
    ready(&cluster.client).await;
    let mut second_config = cluster.config.clone();
    second_config.http.bind = format!("127.0.0.1:{}", free_port()).parse().unwrap();
    let (stop_second, second) = serve(&second_config);
    let term = cluster.env.store.count("select term from leader").await;
    proxy.cut.send_replace(true);
    in_time(async { while cluster.env.store.count("select term from leader").await == term {} }).await;
    // The NATS server closes the connection of the former leader, which answers no ping. Until then, it sends some of
    // the requests there.
    tokio::time::sleep(Duration::from_secs(5)).await;
    cluster.client.submit(&spec(), None).await.unwrap();
    let fence = cluster.take_task().await;
    let heartbeats = cluster.send_heartbeats(vec![fence.lease]);
    let job = cluster.submit_job(fence).await;
    let order = cluster.receive_order().await;
    assert_eq!(order.fence.job, job.id);
    assert_eq!(cluster.accept(&order).await, FenceReply::Committed);
    heartbeats.abort();
    stop_second.send(()).unwrap();
    in_time(second).await.unwrap().unwrap();
}
