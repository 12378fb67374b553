//! Tests of database connections whose other end vanishes, for example because a firewall forgot them: they stay open and
//! never answer. The leader must give up such a connection and go on with another one.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, UnixStream};
use tokio::sync::Notify;

use super::*;

/// Time limit of a test: several time limits of the leader, one after the other.
const RECOVERY_LIMIT: Duration = Duration::from_secs(120);

/// A TCP proxy in front of Postgres. A connection that sends a certain text for the first time carries nothing back from
/// then on, but stays open. This happens to a number of connections; later ones work.
struct SilencingProxy {
    port: u16,
    /// Number of connections that may still become silent.
    left: Arc<AtomicUsize>,
}

impl SilencingProxy {
    async fn start(server: PathBuf, text: &'static str, connections: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let left = Arc::new(AtomicUsize::new(connections));
        let budget = left.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (server, budget) = (server.clone(), budget.clone());
                tokio::spawn(async move {
                    let Ok(server) = UnixStream::connect(server).await else { return };
                    let (mut from_client, mut to_client) = client.into_split();
                    let (mut from_server, mut to_server) = server.into_split();
                    let silenced = Arc::new(Notify::new());
                    let silence = silenced.clone();
                    let requests = async move {
                        let mut buffer = vec![0; 1 << 16];
                        loop {
                            let Ok(read @ 1..) = from_client.read(&mut buffer).await else { return };
                            let sent = &buffer[..read];
                            let has_text = sent.windows(text.len()).any(|window| window == text.as_bytes());
                            let take = |left: usize| left.checked_sub(1);
                            if has_text && budget.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take).is_ok() {
                                silence.notify_one();
                            }
                            if to_server.write_all(sent).await.is_err() {
                                return;
                            }
                        }
                    };
                    let replies = async move {
                        tokio::select! {
                            _ = tokio::io::copy(&mut from_server, &mut to_client) => {}
                            () = silenced.notified() => std::future::pending().await,
                        }
                    };
                    tokio::select! {
                        () = requests => {}
                        () = replies => {}
                    }
                });
            }
        });
        Self { port, left }
    }
}

/// Starts a scheduler in which connections become silent at this statement, and runs a job.
async fn recovers_from_silence_at(statement: &'static str, connections: usize) {
    let mut cluster = TestCluster::start().await;
    cluster.stop().await;
    let database = &mut cluster.config.database;
    let socket = PathBuf::from(&database.host).join(format!(".s.PGSQL.{}", database.port));
    let proxy = SilencingProxy::start(socket, statement, connections).await;
    (database.host, database.port) = ("127.0.0.1".into(), proxy.port);
    cluster.service = Some(serve(&cluster.config));
    let work = async {
        ready(&cluster.client).await;
        cluster.register().await;
        cluster.client.submit(&spec(), None).await.unwrap();
        let fence = cluster.take_task().await;
        let job = cluster.submit_job(fence).await;
        loop {
            // The leases of task and node are extended until the job is placed.
            let held = vec![HeldLease { lease: fence.lease, step_age_ms: 0 }];
            let of_runner = Heartbeat { boot: cluster.runner_boot, held, ledger: None, devices: None };
            let subject = subject::runner(&runner(), "heartbeat");
            let _reply: HeartbeatReply = request_reply(&cluster.runner, subject, of_runner).await;
            cluster.node_heartbeat(vec![]).await;
            if cluster.get_job(fence, job.id).await.state == JobState::Placed {
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(RECOVERY_LIMIT, work).await.expect("the leader goes on");
    assert_eq!(proxy.left.load(Ordering::SeqCst), 0, "the connections became silent");
    cluster.stop().await;
}

macro_rules! silence_tests {
    ($($name:ident: $statement:literal, $connections:literal;)*) => {
        $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            recovers_from_silence_at($statement, $connections).await;
        })*
    };
}

silence_tests! {
    // As many connections as the leader's pool has: none of them may remain occupied.
    leader_goes_on_after_silence_in_the_sweep: "select (extract(epoch from clock_timestamp()) * 1000)::bigint as", 4;
    leader_goes_on_after_silence_in_the_election: "update leader set term = term + 1", 2;
    leader_goes_on_after_silence_in_a_placement: "update jobs set state = 'placed'", 1;
    leader_goes_on_after_silence_in_a_read: "from nodes where $1::text[] is null", 1;
}
