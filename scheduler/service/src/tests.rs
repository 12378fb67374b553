//! The whole service over a real Postgres and NATS: a node and a runner that this test plays, and the HTTP client.

mod faults;

use std::time::Duration;

use cfq_link::Session;
use cfq_proto::blob::Carried;
use cfq_proto::client::{Client, Frame};
use cfq_proto::ids::{BootId, JobId, TaskKey};
use cfq_proto::job::{Completion, FinishReason, JobRequest, JobState, JobView, Outcome, Prompt, Usage};
use cfq_proto::messages::{
    Accept, Beat, BeatReply, FenceReply, Held, HelloReply, JobAsk, JobLook, JobReply, JobReport, LeaseReply,
    LeaseRequest, NodeCommand, RunnerCommand, RunnerHello, TaskFence, TokenFrame, WorkOrder,
};
use cfq_proto::subject::{self, Identity};
use cfq_proto::task::{Agent, TaskState};
use cfq_proto::timing::Timing;
use futures::StreamExt;
use tokio::sync::oneshot;

use crate::config::{Config, Defaults, HttpConfig, Limits};
use crate::testing::{Lab, MODEL, node, node_hello, runner, spec, token_file};

const PATIENCE: Duration = Duration::from_secs(20);

type Service = (oneshot::Sender<()>, tokio::task::JoinHandle<Result<(), crate::Error>>);

struct Running {
    lab: Lab,
    client: Client,
    node: Session,
    node_boot: BootId,
    runner: Session,
    runner_boot: BootId,
    service: Option<Service>,
    config: Config,
    _folder: tempfile::TempDir,
}

/// Asks until somebody answers.
async fn asked<Q: serde::Serialize, A: serde::de::DeserializeOwned>(session: &Session, subject: String, body: Q) -> A {
    soon(session.request_until_answered(&subject, &body)).await.unwrap()
}

async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what).await.expect("it came in time")
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl Running {
    async fn start() -> Self {
        Self::within(Limits::default()).await
    }

    async fn within(limits: Limits) -> Self {
        let timing = Timing::default().faster(4);
        let lab = Lab::alone(timing.clone()).await;
        let folder = tempfile::tempdir().unwrap();
        let config = Config {
            database: lab.database.clone(),
            nats: lab.nats(&Identity::Scheduler),
            http: HttpConfig {
                bind: format!("127.0.0.1:{}", free_port()).parse().unwrap(),
                token_file: token_file(&folder),
                allowed_hosts: vec![],
            },
            defaults: Defaults::default(),
            limits,
            timing: timing.clone(),
        };
        let service = serve(&config);
        let http = cfq_link::outbound::api_client().unwrap();
        let client = Client::new(http, &format!("http://{}", config.http.bind), "0123456789abcdef");
        ready(&client).await;
        let node_identity = Identity::Node(node());
        let runner_identity = Identity::Runner(runner());
        let this = Self {
            node: Session::connect(&lab.nats(&node_identity), node_identity, &timing).await.unwrap(),
            runner: Session::connect(&lab.nats(&runner_identity), runner_identity, &timing).await.unwrap(),
            node_boot: BootId::fresh(),
            runner_boot: BootId::fresh(),
            lab,
            client,
            service: Some(service),
            config,
            _folder: folder,
        };
        this.hello().await;
        this
    }

    async fn hello(&self) {
        let reply: HelloReply = asked(&self.node, subject::node(&node(), "hello"), node_hello(self.node_boot)).await;
        assert_eq!(reply, HelloReply::Welcome { consumer: "den".into() });
        let hello = RunnerHello { runner: runner(), boot: self.runner_boot, version: "0.1.0".into() };
        let reply: HelloReply = asked(&self.runner, subject::runner(&runner(), "hello"), hello).await;
        assert!(matches!(reply, HelloReply::Welcome { .. }), "{reply:?}");
    }

    async fn node_beat(&self, held: Vec<Held>) -> BeatReply {
        let beat = Beat { boot: self.node_boot, held, ledger: None, devices: None };
        asked(&self.node, subject::node(&node(), "beat"), beat).await
    }

    async fn take_task(&self) -> TaskFence {
        match self.ask_lease().await {
            LeaseReply::Granted { grant: Carried::Inline(grant), .. } => grant.fence,
            other => panic!("{other:?}"),
        }
    }

    async fn ask_lease(&self) -> LeaseReply {
        asked(&self.runner, subject::runner(&runner(), "lease"), LeaseRequest { boot: self.runner_boot }).await
    }

    async fn ask_job(&self, fence: TaskFence) -> cfq_proto::job::JobView {
        let prompt = Prompt { messages: vec![], sampling: Default::default(), format: Default::default() };
        let request = JobRequest {
            role: Agent::Alpha,
            n: 0,
            model: MODEL.parse().unwrap(),
            prompt: Carried::Inline(prompt),
            prompt_bytes: 100,
            prefix: vec![],
            max_tokens: 50,
        };
        let ask = JobAsk { fence, seq: 0, request };
        match asked(&self.runner, subject::runner(&runner(), "job"), ask).await {
            JobReply::Job { job } => job,
            other => panic!("{other:?}"),
        }
    }

    /// The next order, while the node beats as a live one does.
    async fn look_at(&self, fence: TaskFence, job: JobId) -> JobView {
        match asked(&self.runner, subject::runner(&runner(), "job_look"), JobLook { fence, job }).await {
            JobReply::Job { job } => job,
            other => panic!("{other:?}"),
        }
    }

    async fn pull(&self) -> WorkOrder {
        let pulled = async {
            loop {
                self.node_beat(vec![]).await;
                match self.node.pull::<WorkOrder>(subject::WORK_STREAM, "den", Duration::from_millis(300)).await {
                    Ok(Some(delivery)) => {
                        delivery.double_ack().await.unwrap();
                        return delivery.body.unwrap();
                    }
                    Ok(None) => {}
                    Err(error) => assert!(matches!(error, cfq_link::LinkError::NoAnswer { .. }), "{error}"),
                }
            }
        };
        soon(pulled).await
    }

    async fn accept(&self, order: &WorkOrder) -> FenceReply {
        let accept = Accept { fence: order.fence, boot: self.node_boot };
        asked(&self.node, subject::node(&node(), "accept"), accept).await
    }

    async fn report(&self, order: &WorkOrder, outcome: Outcome) -> FenceReply {
        let report = JobReport { fence: order.fence, boot: self.node_boot, outcome };
        asked(&self.node, subject::node(&node(), "result"), report).await
    }

    /// Stops the scheduler; what it had placed stays placed.
    async fn stop(&mut self) {
        let (stop, served) = self.service.take().unwrap();
        stop.send(()).unwrap();
        soon(served).await.unwrap().unwrap();
    }
}

fn serve(config: &Config) -> Service {
    let (stop, stopped) = oneshot::channel::<()>();
    let config = config.clone();
    let served = tokio::spawn(crate::run(config, async move {
        let _either_way = stopped.await;
    }));
    (stop, served)
}

async fn ready(client: &Client) {
    soon(async {
        while client.ready().await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
}

fn done() -> Outcome {
    let usage = Usage::default();
    Outcome::Done {
        completion: Carried::Inline(Completion {
            text: "hi".into(),
            finish: FinishReason::Stop,
            usage,
            logprobs: Vec::new(),
        }),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_goes_from_a_runner_through_a_node_and_back_and_the_feed_shows_it() {
    let mut r = Running::start().await;
    let submitted = r.client.submit(&spec(), None).await.unwrap();
    let key = TaskKey::Number(submitted.number);
    let mut hints = r.runner.subscribe::<RunnerCommand>(&subject::runner_command(&runner())).await.unwrap();
    let fence = r.take_task().await;
    let job = r.ask_job(fence).await;
    assert_eq!(job.state, JobState::Queued);
    let order = r.pull().await;
    assert_eq!((order.fence.job, order.fence.attempt), (job.id, 1));
    assert_eq!(r.accept(&order).await, FenceReply::Committed);
    let reply = r.node_beat(vec![Held { lease: order.fence.lease, step_age_ms: 0 }]).await;
    assert_eq!(reply.extended, vec![order.fence.lease]);

    let mut frames = Box::pin(r.client.watch(key, 0).await.unwrap());
    let tokens = TokenFrame { task: fence.task, fence: order.fence, role: Agent::Alpha, offset: 0, text: "h".into() };
    let token = soon(async {
        loop {
            // Frames are ephemeral: one sent before the feed listens is nobody's.
            r.node.publish(&subject::tokens(&node(), job.id), &tokens).await.unwrap();
            if let Ok(Some(Ok(Frame::Tokens(data)))) =
                tokio::time::timeout(Duration::from_millis(100), frames.next()).await
            {
                return data;
            }
        }
    })
    .await;
    assert_eq!((token.job, token.text.as_str()), (job.id, "h"));
    soon(async {
        // Time runs from the first token, whoever asks and however.
        while r.look_at(fence, job.id).await.running_ms == 0 {
            tokio::task::yield_now().await
        }
    })
    .await;

    assert_eq!(r.report(&order, done()).await, FenceReply::Committed);
    let told = soon(async {
        loop {
            let hint = hints.next().await.unwrap().body.unwrap();
            if r.ask_job(fence).await.state == JobState::Done {
                return hint;
            }
        }
    });
    assert!(matches!(told.await, RunnerCommand::JobChanged { .. }));
    let detail = r.client.task(key).await.unwrap();
    assert!(detail.jobs[0].placement.contains("den of 1 open"), "{}", detail.jobs[0].placement);
    let events = r.client.events(key, 0).await.unwrap().events;
    assert_eq!(events.iter().map(|e| e.task_seq).collect::<Vec<_>>(), (1..=events.len() as i64).collect::<Vec<_>>());
    r.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_order_nobody_takes_comes_again_and_cancel_reaches_node_and_runner() {
    let mut r = Running::start().await;
    let submitted = r.client.submit(&spec(), None).await.unwrap();
    let fence = r.take_task().await;
    r.ask_job(fence).await;
    let first = r.pull().await;
    let again = r.pull().await;
    assert_eq!(first, again, "the same attempt, because it was never accepted");
    assert_eq!(r.accept(&again).await, FenceReply::Committed);
    let mut node_commands = r.node.subscribe::<NodeCommand>(&subject::node_command(&node())).await.unwrap();
    let mut runner_commands = r.runner.subscribe::<RunnerCommand>(&subject::runner_command(&runner())).await.unwrap();
    r.node.flush().await.unwrap();
    r.runner.flush().await.unwrap();
    // A round trip: the subscriptions stand before the cancel is sent.
    r.node_beat(vec![]).await;
    assert_eq!(r.ask_lease().await, LeaseReply::None);
    let cancelled = r.client.cancel(TaskKey::Number(submitted.number), "enough").await.unwrap();
    assert_eq!(cancelled.state, TaskState::Cancelled);
    let command = soon(node_commands.next()).await.unwrap().body.unwrap();
    assert_eq!(command, NodeCommand::Cancel { fence: again.fence });
    let command = soon(async {
        loop {
            if let RunnerCommand::Cancel { fence } = runner_commands.next().await.unwrap().body.unwrap() {
                return fence;
            }
        }
    });
    assert_eq!(command.await, fence);
    assert_eq!(r.report(&again, done()).await, FenceReply::Stale);
    let lost = r.node_beat(vec![Held { lease: again.fence.lease, step_age_ms: 0 }]).await;
    assert_eq!(lost.lost, vec![again.fence.lease]);
    r.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_node_loses_its_job_and_the_next_scheduler_goes_on_where_this_one_stopped() {
    let mut r = Running::start().await;
    r.client.submit(&spec(), None).await.unwrap();
    let fence = r.take_task().await;
    let job = r.ask_job(fence).await;
    let order = r.pull().await;
    assert_eq!(r.accept(&order).await, FenceReply::Committed);
    // Another scheduler takes over a placed world; the first one hands over at once.
    r.stop().await;
    r.service = Some(serve(&r.config));
    ready(&r.client).await;
    let requeued = soon(async {
        loop {
            // The runner lives, the node says nothing.
            let held = vec![Held { lease: fence.lease, step_age_ms: 0 }];
            let keep = Beat { boot: r.runner_boot, held, ledger: None, devices: None };
            let beat: BeatReply = asked(&r.runner, subject::runner(&runner(), "beat"), keep).await;
            assert!(beat.lost.is_empty(), "{beat:?}");
            let view = r.ask_job(fence).await;
            if view.state == JobState::Queued {
                return view;
            }
        }
    })
    .await;
    assert_eq!((requeued.id, requeued.attempt), (job.id, 1));
    assert_eq!(r.report(&order, done()).await, FenceReply::Stale);
    // It beats again: the second attempt comes to it.
    let second = r.pull().await;
    assert_eq!((second.fence.job, second.fence.attempt), (job.id, 2));
    r.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wiped_stream_is_made_again_with_its_consumers_and_the_order_comes() {
    let mut r = Running::start().await;
    let scheduler = Session::connect(&r.config.nats, Identity::Scheduler, &r.config.timing).await.unwrap();
    async_nats::jetstream::new(scheduler.client().clone()).delete_stream(subject::WORK_STREAM).await.unwrap();
    r.client.submit(&spec(), None).await.unwrap();
    let fence = r.take_task().await;
    let job = r.ask_job(fence).await;
    assert_eq!(r.pull().await.fence.job, job.id);
    r.stop().await;
}

#[tokio::test]
async fn a_port_that_is_taken_is_said_so() {
    let lab = Lab::new().await;
    let folder = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let config = Config {
        database: lab.database.clone(),
        nats: lab.nats(&Identity::Scheduler),
        http: HttpConfig { bind: taken.local_addr().unwrap(), token_file: token_file(&folder), allowed_hosts: vec![] },
        defaults: Defaults::default(),
        limits: Limits::default(),
        timing: Timing::default(),
    };
    let error = crate::run(config, std::future::pending()).await.unwrap_err();
    assert!(error.to_string().contains("http.bind"), "{error}");
}
