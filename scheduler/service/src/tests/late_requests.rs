//! Tests of requests that are lost, or delivered after their sender has stopped waiting.

use cfq_link::LinkError;
use cfq_link::lease::{HeartbeatExtras, LeaseKeeper, LeaseStatus};
use cfq_proto::ids::{LeaseId, LeaseRequestId};
use cfq_proto::messages::Release;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::*;
use crate::bus::stream::{self, StreamError};

/// A TCP proxy that delivers nothing to the client while it is paused, like a connection to a stopped process.
struct PausableProxy {
    url: String,
    paused: watch::Sender<bool>,
}

impl PausableProxy {
    async fn start(target: &str) -> Self {
        let target = target.trim_start_matches("nats://").to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("nats://{}", listener.local_addr().unwrap());
        let (paused, is_paused) = watch::channel(false);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (from_client, to_client) = client.into_split();
                let Ok(server) = TcpStream::connect(&target).await else { return };
                let (from_server, to_server) = server.into_split();
                tokio::spawn(copy(from_client, to_server, watch::channel(false).1));
                tokio::spawn(copy(from_server, to_client, is_paused.clone()));
            }
        });
        Self { url, paused }
    }
}

async fn copy(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin, mut is_paused: watch::Receiver<bool>) {
    let mut bytes = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut bytes).await {
        // An error means that the test has ended.
        drop(is_paused.wait_for(|is_paused| !is_paused).await);
        if to.write_all(&bytes[..count]).await.is_err() {
            return;
        }
    }
}

/// A grant to a runner that does not wait for it would keep the task from all runners until the lease expires.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_request_that_arrives_after_its_deadline_is_dropped() {
    let mut cluster = TestCluster::start().await;
    cluster.stop().await;
    let proxy = PausableProxy::start(&cluster.config.nats.url).await;
    let mut behind_proxy = cluster.config.clone();
    behind_proxy.nats.url = proxy.url.clone();
    cluster.service = Some(serve(&behind_proxy));
    ready(&cluster.client).await;
    assert_eq!(cluster.request_lease().await, LeaseReply::None, "there is no task yet");
    let task = cluster.client.submit(&spec(), None).await.unwrap();

    proxy.paused.send_replace(true);
    let subject = subject::runner(&runner(), "lease");
    let late = LeaseRequest { boot: cluster.runner_boot, request: Some(LeaseRequestId::fresh()) };
    let timeout = Duration::from_millis(300);
    let reply = cluster.runner.request_within::<_, LeaseReply>(&subject, &late, timeout).await;
    assert!(matches!(reply, Err(LinkError::NoReply { .. })), "{reply:?}");
    tokio::time::sleep(timeout).await;
    proxy.paused.send_replace(false);

    // Requests of one verb are read in order, so the late one was read before this one.
    let request = LeaseRequest { boot: cluster.runner_boot, request: Some(LeaseRequestId::fresh()) };
    match request_reply(&cluster.runner, subject, request).await {
        LeaseReply::Granted { grant: Payload::Inline(grant), .. } => assert_eq!(grant.fence.task, task.id),
        other => panic!("the late request took the task: {other:?}"),
    }
    cluster.stop().await;
}

/// A request that waits for a lock gets a reply before its sender's timeout, and still takes effect.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_in_progress_is_answered_before_its_sender_stops_waiting() {
    let mut cluster = TestCluster::start().await;
    cluster.client.submit(&spec(), None).await.unwrap();
    let fence = cluster.take_task().await;
    let held = cluster.env.store.hold("lock table tasks in exclusive mode").await;
    let (subject, release) = (subject::runner(&runner(), "release"), Release { fence, waits_for: None });
    // Shorter than the lock timeout.
    let timeout = Duration::from_secs(2);
    match cluster.runner.request_within(&subject, &release, timeout).await.unwrap() {
        FenceReply::Unavailable { reason } => assert_eq!(reason.to_string(), "the request is still in progress"),
        other => panic!("{other:?}"),
    }
    held.rollback().await.unwrap();
    // The first request ends now; the second one ends before or after it.
    let repeated = request_reply(&cluster.runner, subject.clone(), release).await;
    assert!(matches!(repeated, FenceReply::Committed | FenceReply::Stale), "{repeated:?}");
    assert_eq!(cluster.take_task().await.task, fence.task, "the task was released");

    // A runner sends a new lease request after `unavailable`, and would not use the grant of the one in progress.
    let held = cluster.env.store.hold("lock table tasks in access exclusive mode").await;
    let subject = subject::runner(&runner(), "lease");
    let lease = LeaseRequest { boot: cluster.runner_boot, request: Some(LeaseRequestId::fresh()) };
    let reply = cluster.runner.request_within::<_, LeaseReply>(&subject, &lease, timeout).await;
    assert!(matches!(reply, Err(LinkError::NoReply { .. })), "{reply:?}");
    held.rollback().await.unwrap();
    cluster.stop().await;
}

/// A request that waits for ever would keep its place among the publications of orders, until none is left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jetstream_request_that_is_not_answered_ends() {
    let env = TestEnv::new().await;
    let mut nats = env.nats(&Identity::Scheduler);
    let proxy = PausableProxy::start(&nats.url).await;
    nats.url = proxy.url.clone();
    let session = Session::connect(&nats, Identity::Scheduler, &Timing::default()).await.unwrap();
    stream::ensure(&session).await.unwrap();
    proxy.paused.send_replace(true);
    let (node, boot) = (node(), BootId::fresh());
    let (found, created, ()) = in_time(async {
        tokio::join!(
            stream::ensure(&session),
            stream::ensure_consumer(&session, &node, boot),
            stream::delete_consumer(&session, &node, boot),
        )
    })
    .await;
    let is_unanswered = |error: Option<StreamError>| matches!(error, Some(StreamError::NoAnswer));
    assert!(is_unanswered(found.err()) && is_unanswered(created.err()));
    proxy.paused.send_replace(false);
    in_time(async { while stream::ensure(&session).await.is_err() {} }).await;
}

/// A scheduler that is stopped answers no heartbeat. The next one goes to another scheduler, before the lease ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_heartbeat_is_repeated_before_the_lease_ends() {
    // A lease lasts 2.5 s after the last confirmed heartbeat, and the next heartbeat is sent after 1 s.
    let timing = Timing { heartbeat_ms: 1_000, lease_ttl_ms: 4_000, lease_margin_ms: 1_500, ..Timing::default() };
    let env = TestEnv::alone(timing.clone()).await;
    let scheduler = Session::connect(&env.nats(&Identity::Scheduler), Identity::Scheduler, &timing).await.unwrap();
    let subject = subject::node(&node(), "heartbeat");
    let mut heartbeats = scheduler.subscribe::<Heartbeat>(&subject).await.unwrap();
    scheduler.flush().await.unwrap();
    let identity = Identity::Node(node());
    let nats = env.nats(&identity);
    let keeper =
        LeaseKeeper::start(nats, identity, BootId::fresh(), subject, timing, HeartbeatExtras::default).unwrap();
    let lease = keeper.hold(LeaseId::fresh(), std::time::Instant::now());
    let is_confirmed = |heartbeat: &Heartbeat| heartbeat.held.iter().any(|held| held.lease == lease.id());
    let confirmed = HeartbeatReply { extended: vec![lease.id()], ..HeartbeatReply::default() };
    let answer_one = async |heartbeats: &mut Incoming<Heartbeat>| loop {
        let heartbeat = heartbeats.next().await.unwrap();
        heartbeat.reply(&confirmed).await.unwrap();
        if is_confirmed(heartbeat.body.as_ref().unwrap()) {
            return;
        }
    };
    in_time(answer_one(&mut heartbeats)).await;
    for round in 0..3 {
        // No reply to this one.
        in_time(heartbeats.next()).await.unwrap();
        tokio::select! {
            () = in_time(answer_one(&mut heartbeats)) => {}
            () = until_suspended(&lease) => panic!("round {round}: the lease was suspended"),
        }
    }
    keeper.stop();
}

async fn until_suspended(lease: &cfq_link::lease::LeaseHandle) {
    while lease.status() != LeaseStatus::Suspended {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
