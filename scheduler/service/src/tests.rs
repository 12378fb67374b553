//! Tests of the whole service with a real Postgres and NATS: each test acts as a node, a runner and an HTTP client.

mod faults;
mod late_requests;
mod orders;
mod refusals;
mod replies;
mod silent_connections;
mod unaccepted;
mod upgrade;

use std::time::Duration;

use cfq_link::Session;
use cfq_link::session::Incoming;
use cfq_proto::blob::Payload;
use cfq_proto::client::{Client, Frame};
use cfq_proto::ids::{BootId, JobId, TaskKey};
use cfq_proto::job::{Completion, FinishReason, JobRequest, JobRole, JobState, JobView, Outcome, Prompt, Usage};
use cfq_proto::messages::{
    Accept, FenceReply, Heartbeat, HeartbeatReply, HeldLease, JobGet, JobReply, JobResult, JobSubmit, LeaseReply,
    LeaseRequest, NodeCommand, RegisterReply, RunnerCommand, RunnerRegistration, TaskFence, TokenFrame, WorkOrder,
};
use cfq_proto::subject::{self, Identity};
use cfq_proto::task::{Agent, TaskState};
use cfq_proto::timing::Timing;
use futures::StreamExt;
use tokio::sync::{Mutex, oneshot};

use crate::config::{Config, Defaults, HttpConfig, SchedulerLimits};
use crate::testing::{MODEL, TestEnv, node, node_registration, runner, spec, token_file};

const TIMEOUT: Duration = Duration::from_secs(90);

type Service = (oneshot::Sender<()>, tokio::task::JoinHandle<Result<(), crate::Error>>);

/// A running scheduler, its services, and the clients of one test.
struct TestCluster {
    env: TestEnv,
    client: Client,
    node: Session,
    node_boot: BootId,
    /// The node's subscription to its work orders.
    orders: Mutex<Incoming<WorkOrder>>,
    runner: Session,
    runner_boot: BootId,
    service: Option<Service>,
    config: Config,
    _folder: tempfile::TempDir,
}

/// Repeats the request until a reply arrives.
async fn request_reply<Q, A>(session: &Session, subject: String, body: Q) -> A
where
    Q: serde::Serialize,
    A: serde::de::DeserializeOwned,
{
    in_time(session.request_until_answered(&subject, &body)).await.unwrap()
}

async fn in_time<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(TIMEOUT, what).await.expect("finished before the timeout")
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl TestCluster {
    async fn start() -> Self {
        Self::within(SchedulerLimits::default()).await
    }

    async fn within(limits: SchedulerLimits) -> Self {
        Self::with_timing(limits, Timing::default().faster(4)).await
    }

    async fn with_timing(limits: SchedulerLimits, timing: Timing) -> Self {
        let env = TestEnv::alone(timing.clone()).await;
        let folder = tempfile::tempdir().unwrap();
        let config = Config {
            database: env.database.clone(),
            nats: env.nats(&Identity::Scheduler),
            http: HttpConfig {
                bind: format!("127.0.0.1:{}", free_port()).parse().unwrap(),
                socket: None,
                socket_on_stdin: false,
                allow_plaintext: false,
                lan: None,
                token_file: token_file(&folder),
                allowed_hosts: vec![],
            },
            defaults: Defaults::default(),
            limits,
            retention: Default::default(),
            timing: timing.clone(),
        };
        let service = serve(&config);
        let http = cfq_link::outbound::api_client().unwrap();
        let client = Client::new(http, &format!("http://{}", config.http.bind), "0123456789abcdef");
        ready(&client).await;
        let node_identity = Identity::Node(node());
        let runner_identity = Identity::Runner(runner());
        let node = Session::connect(&env.nats(&node_identity), node_identity, &timing).await.unwrap();
        let node_boot = BootId::fresh();
        let this = Self {
            orders: Mutex::new(subscribe_to_orders(&node, node_boot).await),
            node,
            runner: Session::connect(&env.nats(&runner_identity), runner_identity, &timing).await.unwrap(),
            node_boot,
            runner_boot: BootId::fresh(),
            env,
            client,
            service: Some(service),
            config,
            _folder: folder,
        };
        this.register().await;
        this
    }

    async fn register(&self) {
        let registration = node_registration(self.node_boot);
        let reply: RegisterReply = request_reply(&self.node, subject::node(&node(), "register"), registration).await;
        let consumer = format!("den_{}", self.node_boot);
        assert_eq!(reply, RegisterReply::Registered { consumer, pushes_orders: true });
        let registration = RunnerRegistration {
            runner: runner(),
            boot: self.runner_boot,
            version: "0.1.0".into(),
            machine_boot: None,
            credentials_lock: None,
            slots: None,
        };
        let subject = subject::runner(&runner(), "register");
        let reply: RegisterReply = request_reply(&self.runner, subject, registration).await;
        assert!(matches!(reply, RegisterReply::Registered { .. }), "{reply:?}");
    }

    async fn node_heartbeat(&self, held: Vec<HeldLease>) -> HeartbeatReply {
        let heartbeat = Heartbeat { boot: self.node_boot, held, ledger: None, devices: None };
        request_reply(&self.node, subject::node(&node(), "heartbeat"), heartbeat).await
    }

    async fn take_task(&self) -> TaskFence {
        match self.request_lease().await {
            LeaseReply::Granted { grant: Payload::Inline(grant), .. } => grant.fence,
            other => panic!("{other:?}"),
        }
    }

    async fn request_lease(&self) -> LeaseReply {
        let request = LeaseRequest { boot: self.runner_boot, request: None };
        request_reply(&self.runner, subject::runner(&runner(), "lease"), request).await
    }

    async fn submit_job(&self, fence: TaskFence) -> cfq_proto::job::JobView {
        let prompt =
            Prompt { messages: vec![], sampling: Default::default(), format: Default::default(), ..Prompt::default() };
        let request = JobRequest {
            role: Agent::Alpha,
            n: 0,
            model: MODEL.parse().unwrap(),
            prompt: Payload::Inline(prompt),
            prompt_bytes: 100,
            prefix: vec![],
            max_tokens: 50,
            has_fallback: false,
        };
        let submit = JobSubmit { fence, seq: 0, request };
        match request_reply(&self.runner, subject::runner(&runner(), "job_submit"), submit).await {
            JobReply::Job { job } => job,
            other => panic!("{other:?}"),
        }
    }

    async fn get_job(&self, fence: TaskFence, job: JobId) -> JobView {
        match request_reply(&self.runner, subject::runner(&runner(), "job_get"), JobGet { fence, job }).await {
            JobReply::Job { job } => job,
            other => panic!("{other:?}"),
        }
    }

    /// Receives the node's next work order. While waiting, the node sends heartbeats, so that it is not considered lost.
    async fn receive_order(&self) -> WorkOrder {
        let mut orders = self.orders.lock().await;
        let received = async {
            loop {
                self.node_heartbeat(vec![]).await;
                if let Ok(order) = tokio::time::timeout(Duration::from_millis(300), orders.next()).await {
                    return order.unwrap().body.unwrap();
                }
            }
        };
        in_time(received).await
    }

    async fn accept(&self, order: &WorkOrder) -> FenceReply {
        let accept = Accept { fence: order.fence, boot: self.node_boot };
        request_reply(&self.node, subject::node(&node(), "accept"), accept).await
    }

    async fn report(&self, order: &WorkOrder, outcome: Outcome) -> FenceReply {
        let report = JobResult { fence: order.fence, boot: self.node_boot, outcome };
        request_reply(&self.node, subject::node(&node(), "result"), report).await
    }

    /// Stops the scheduler. Attempts that are placed or running stay so in the database.
    async fn stop(&mut self) {
        let (stop, served) = self.service.take().unwrap();
        stop.send(()).unwrap();
        in_time(served).await.unwrap().unwrap();
    }
}

async fn subscribe_to_orders(session: &Session, boot: BootId) -> Incoming<WorkOrder> {
    let orders = session.subscribe(&subject::order(&node(), boot)).await.unwrap();
    session.flush().await.unwrap();
    orders
}

fn serve(config: &Config) -> Service {
    let (stop, stopped) = oneshot::channel::<()>();
    let config = config.clone();
    let served = tokio::spawn(crate::run(config, |_| axum::Router::new(), async move {
        let _sent_or_dropped = stopped.await;
    }));
    (stop, served)
}

async fn ready(client: &Client) {
    in_time(async {
        while client.check_ready().await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
}

fn done() -> Outcome {
    let usage = Usage::default();
    Outcome::Done {
        completion: Payload::Inline(Completion {
            text: "hi".into(),
            finish: FinishReason::Stop,
            usage,
            logprobs: Vec::new(),
        }),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn job_runs_end_to_end_and_the_feed_streams_it() {
    let mut cluster = TestCluster::start().await;
    let submitted = cluster.client.submit(&spec(), None).await.unwrap();
    let key = TaskKey::Number(submitted.number);
    let mut hints = cluster.runner.subscribe::<RunnerCommand>(&subject::runner_command(&runner())).await.unwrap();
    let fence = cluster.take_task().await;
    let job = cluster.submit_job(fence).await;
    assert_eq!(job.state, JobState::Queued);
    let order = cluster.receive_order().await;
    assert_eq!((order.fence.job, order.fence.attempt), (job.id, 1));
    assert_eq!(cluster.accept(&order).await, FenceReply::Committed);
    let reply = cluster.node_heartbeat(vec![HeldLease { lease: order.fence.lease, step_age_ms: 0 }]).await;
    assert_eq!(reply.extended, vec![order.fence.lease]);

    let mut frames = Box::pin(cluster.client.watch(key, 0).await.unwrap());
    let tokens = TokenFrame { task: fence.task, fence: order.fence, role: JobRole::Alpha, offset: 0, text: "h".into() };
    let token = in_time(async {
        loop {
            // Token frames are not stored: a frame sent before the feed subscribes is lost, so it is sent repeatedly.
            cluster.node.publish(&subject::tokens(&node(), job.id), &tokens).await.unwrap();
            if let Ok(Some(Ok(Frame::Tokens(data)))) =
                tokio::time::timeout(Duration::from_millis(100), frames.next()).await
            {
                return data;
            }
        }
    })
    .await;
    assert_eq!((token.job, token.text.as_str()), (job.id, "h"));
    in_time(async {
        // The job's running time stays zero until the first token is recorded.
        while cluster.get_job(fence, job.id).await.running_ms == 0 {
            tokio::task::yield_now().await
        }
    })
    .await;

    assert_eq!(cluster.report(&order, done()).await, FenceReply::Committed);
    let command = in_time(async {
        loop {
            let hint = hints.next().await.unwrap().body.unwrap();
            if cluster.submit_job(fence).await.state == JobState::Done {
                return hint;
            }
        }
    });
    assert!(matches!(command.await, RunnerCommand::JobChanged { .. }));
    let detail = cluster.client.task(key).await.unwrap();
    assert!(detail.jobs[0].placement.contains("den of 1 open"), "{}", detail.jobs[0].placement);
    let events = cluster.client.events(key, 0).await.unwrap().events;
    assert_eq!(events.iter().map(|e| e.task_seq).collect::<Vec<_>>(), (1..=events.len() as i64).collect::<Vec<_>>());
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unaccepted_order_is_resent_and_cancel_reaches_node_and_runner() {
    let mut cluster = TestCluster::start().await;
    let submitted = cluster.client.submit(&spec(), None).await.unwrap();
    let fence = cluster.take_task().await;
    cluster.submit_job(fence).await;
    let first = cluster.receive_order().await;
    let again = cluster.receive_order().await;
    assert_eq!(first, again, "the same attempt, because it was not accepted");
    assert_eq!(cluster.accept(&again).await, FenceReply::Committed);
    let mut node_commands = cluster.node.subscribe::<NodeCommand>(&subject::node_command(&node())).await.unwrap();
    let mut runner_commands =
        cluster.runner.subscribe::<RunnerCommand>(&subject::runner_command(&runner())).await.unwrap();
    cluster.node.flush().await.unwrap();
    cluster.runner.flush().await.unwrap();
    // One round trip per session ensures that both subscriptions are active before the cancel is sent.
    cluster.node_heartbeat(vec![]).await;
    assert_eq!(cluster.request_lease().await, LeaseReply::None);
    let cancelled = cluster.client.cancel(TaskKey::Number(submitted.number), "enough").await.unwrap();
    assert_eq!(cancelled.state, TaskState::Cancelled);
    let command = in_time(node_commands.next()).await.unwrap().body.unwrap();
    assert_eq!(command, NodeCommand::Cancel { fence: again.fence });
    let command = in_time(async {
        loop {
            if let RunnerCommand::Cancel { fence } = runner_commands.next().await.unwrap().body.unwrap() {
                return fence;
            }
        }
    });
    assert_eq!(command.await, fence);
    assert_eq!(cluster.report(&again, done()).await, FenceReply::Stale);
    let lost = cluster.node_heartbeat(vec![HeldLease { lease: again.fence.lease, step_age_ms: 0 }]).await;
    assert_eq!(lost.lost, vec![again.fence.lease]);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_node_loses_its_job_across_a_scheduler_restart() {
    // The test sends the runner's heartbeats between other requests, which take longer on a busy machine.
    let timing = Timing::default().faster(2);
    let mut cluster = TestCluster::with_timing(SchedulerLimits::default(), timing).await;
    cluster.client.submit(&spec(), None).await.unwrap();
    let fence = cluster.take_task().await;
    let job = cluster.submit_job(fence).await;
    let order = cluster.receive_order().await;
    assert_eq!(cluster.accept(&order).await, FenceReply::Committed);
    // A second scheduler takes over while the job is on the node. The second scheduler need not wait for the leader row
    // to expire, because the first scheduler releases the row when it stops.
    cluster.stop().await;
    cluster.service = Some(serve(&cluster.config));
    ready(&cluster.client).await;
    let requeued = in_time(async {
        loop {
            // The runner sends heartbeats, the node does not.
            let held = vec![HeldLease { lease: fence.lease, step_age_ms: 0 }];
            let keep_alive = Heartbeat { boot: cluster.runner_boot, held, ledger: None, devices: None };
            let subject = subject::runner(&runner(), "heartbeat");
            let reply: HeartbeatReply = request_reply(&cluster.runner, subject, keep_alive).await;
            assert!(reply.lost.is_empty(), "{reply:?}");
            let view = cluster.submit_job(fence).await;
            if view.state == JobState::Queued {
                return view;
            }
        }
    })
    .await;
    assert_eq!((requeued.id, requeued.attempt), (job.id, 1));
    assert_eq!(cluster.report(&order, done()).await, FenceReply::Stale);
    // The node sends heartbeats again, so the second attempt is placed on it.
    let second = cluster.receive_order().await;
    assert_eq!((second.fence.job, second.fence.attempt), (job.id, 2));
    cluster.stop().await;
}
