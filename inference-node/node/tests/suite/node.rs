//! Tests of the node with a scripted scheduler over a real nats-server, which is found or fetched as in production. The
//! scheduler produces cases that a real one rarely does: it sends an order twice, refers to a missing blob, and revokes
//! a lease during an attempt.

use std::collections::{HashMap, HashSet};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_nats::jetstream;
use cfq_deploy::services::{Finder, ServiceKind};
use cfq_deploy::{Paths, ServiceOptions, StatusOutput};
use cfq_inference_node::{Config, run};
use cfq_link::{NatsConfig, Session};
use cfq_proto::blob::{BlobHash, BlobRef, Payload};
use cfq_proto::ids::{JobId, LeaseId, NodeId, TaskId};
use cfq_proto::job::{JobRole, Outcome, OutputFormat, Prompt};
use cfq_proto::messages::*;
use cfq_proto::model::ModelId;
use cfq_proto::node::{Ledger, Residency};
use cfq_proto::subject::{self, Identity, WORK_ALL, WORK_STREAM};
use cfq_proto::timing::Timing;
use futures::FutureExt;
use tokio::io::AsyncWriteExt;
use tokio::sync::oneshot;

use crate::proxy::{Script, serve};
use crate::smollm;

struct Nats {
    child: Child,
    url: String,
    _folder: tempfile::TempDir,
}

impl Drop for Nats {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

async fn nats() -> Nats {
    let program = tokio::task::spawn_blocking(|| {
        let (paths, options) = (Paths::from_environment().unwrap(), ServiceOptions::default());
        Finder {
            paths: &paths,
            options: &options,
            account: None,
            pinned: None,
            may_fetch: true,
            status: StatusOutput::Stderr,
        }
        .find(ServiceKind::Nats)
        .unwrap()
        .path
    })
    .await
    .unwrap();
    let folder = tempfile::tempdir().unwrap();
    let child = Command::new(program)
        .args(["-a", "127.0.0.1", "-p", "-1", "-js", "-sd"])
        .arg(folder.path().join("js"))
        .arg("--ports_file_dir")
        .arg(folder.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let ports = folder.path().join(format!("nats-server_{}.ports", child.id()));
    let url = in_time(async {
        loop {
            let written = std::fs::read(&ports).ok().and_then(|b| serde_json::from_slice::<serde_json::Value>(&b).ok());
            match written.as_ref().and_then(|v| v["nats"][0].as_str()) {
                Some(url) => break url.to_owned(),
                None => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    })
    .await;
    Nats { child, url, _folder: folder }
}

const WAIT_LIMIT: Duration = Duration::from_secs(90);

async fn in_time<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(WAIT_LIMIT, future).await.expect("in time")
}

/// Messages that the scheduler has received, and the leases that it reports as lost.
#[derive(Default)]
struct Received {
    ledger: Ledger,
    /// Models that a ledger showed as usable.
    usable: HashSet<ModelId>,
    held: Vec<LeaseId>,
    accepted: Vec<JobFence>,
    refused: HashMap<JobId, Refusal>,
    reports: HashMap<JobId, Outcome>,
    text: HashMap<JobId, String>,
    journals: HashMap<JobId, Vec<u32>>,
    /// Leases that the replies to heartbeats report as lost.
    lost_leases: Vec<LeaseId>,
}

/// A scheduler that accepts every registration, lease extension and commit, and records them.
struct Scheduler {
    session: Session,
    received: Arc<Mutex<Received>>,
    boot: Arc<Mutex<Option<cfq_proto::ids::BootId>>>,
}

impl Scheduler {
    async fn start(config: &NatsConfig, node: &NodeId) -> Self {
        let session = Session::connect(config, Identity::Scheduler, &Timing::default()).await.unwrap();
        let context = jetstream::new(session.client().clone());
        let stream = context
            .create_stream(jetstream::stream::Config {
                name: WORK_STREAM.to_owned(),
                subjects: vec![WORK_ALL.to_owned()],
                retention: jetstream::stream::RetentionPolicy::Interest,
                ..Default::default()
            })
            .await
            .unwrap();
        let (received, boot) = (Arc::new(Mutex::new(Received::default())), Arc::new(Mutex::new(None)));
        let mut requests = session.subscribe::<serde_json::Value>("cfq.v1.node.*.*").await.unwrap();
        let mut frames = session.subscribe::<TokenFrame>(&subject::tokens_of("*")).await.unwrap();
        let (record, node, current) = (received.clone(), node.clone(), boot.clone());
        tokio::spawn(async move {
            while let Some(message) = requests.next().await {
                let body = message.body.as_ref().unwrap().clone();
                let (_, verb) = subject::sender(message.subject()).unwrap();
                match verb {
                    "register" => {
                        let registration: NodeRegistration = serde_json::from_value(body).unwrap();
                        *current.lock().unwrap() = Some(registration.boot);
                        let consumer = subject::consumer(&node, registration.boot);
                        let settings = jetstream::consumer::push::Config {
                            durable_name: Some(consumer.clone()),
                            deliver_subject: subject::order(&node, registration.boot),
                            filter_subject: subject::work(&node, registration.boot),
                            ack_policy: jetstream::consumer::AckPolicy::None,
                            ..Default::default()
                        };
                        stream.create_consumer(settings).await.unwrap();
                        let reply = RegisterReply::Registered { consumer, pushes_orders: true };
                        message.reply(&reply).await.unwrap();
                    }
                    "heartbeat" => {
                        let heartbeat: Heartbeat = serde_json::from_value(body).unwrap();
                        let reply = {
                            let mut received = record.lock().unwrap();
                            received.held = heartbeat.held.iter().map(|h| h.lease).collect();
                            if let Some(ledger) = heartbeat.ledger {
                                assert!(ledger.version >= received.ledger.version);
                                let usable = ledger.models.iter().filter(|m| m.residency == Residency::Resident);
                                received.usable.extend(usable.map(|m| m.model.clone()));
                                received.ledger = ledger;
                            }
                            let (lost, extended) = received.held.iter().partition(|l| received.lost_leases.contains(l));
                            HeartbeatReply { extended, lost, register_again: current.lock().unwrap().is_none() }
                        };
                        message.reply(&reply).await.unwrap();
                    }
                    "blob_get" => {
                        message.reply(&BlobGetReply::Refused { reason: "no such blob".to_owned() }).await.unwrap();
                    }
                    other => {
                        {
                            let mut received = record.lock().unwrap();
                            match other {
                                "accept" => {
                                    received.accepted.push(serde_json::from_value::<Accept>(body).unwrap().fence)
                                }
                                "refuse" => {
                                    let refused: Refuse = serde_json::from_value(body).unwrap();
                                    received.refused.insert(refused.fence.job, refused.refusal);
                                }
                                "result" => {
                                    let report: JobResult = serde_json::from_value(body).unwrap();
                                    assert!(
                                        received.held.contains(&report.fence.lease),
                                        "the lease is kept until the result is reported"
                                    );
                                    received.reports.insert(report.fence.job, report.outcome);
                                }
                                "journal" => {
                                    let chunk: Journal = serde_json::from_value(body).unwrap();
                                    let journal = received.journals.entry(chunk.fence.job).or_default();
                                    assert_eq!(journal.len(), chunk.after as usize);
                                    journal.extend(chunk.generated.tokens);
                                }
                                // Sent if a preparation takes long, as on a busy machine.
                                "preparing" => {}
                                _ => panic!("{other}"),
                            }
                        }
                        message.reply(&FenceReply::Committed).await.unwrap();
                    }
                }
            }
        });
        let record = received.clone();
        tokio::spawn(async move {
            while let Some(frame) = frames.next().await {
                let frame = frame.body.unwrap();
                let mut received = record.lock().unwrap();
                let text = received.text.entry(frame.fence.job).or_default();
                assert_eq!(text.len() as u64, frame.offset);
                text.push_str(&frame.text);
            }
        });
        Self { session, received, boot }
    }

    /// Waits until `find` returns a value.
    async fn wait_for<T>(&self, find: impl Fn(&Received) -> Option<T>) -> T {
        in_time(async {
            loop {
                if let Some(found) = find(&self.received.lock().unwrap()) {
                    break found;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await
    }

    /// Sends a new work order.
    async fn place(&self, node: &NodeId, model: &ModelId, prompt: Prompt) -> WorkOrder {
        let fence = JobFence { job: JobId::fresh(), attempt: 1, lease: LeaseId::fresh() };
        let order = WorkOrder {
            fence,
            task: TaskId::fresh(),
            role: JobRole::Alpha,
            model: model.clone(),
            prompt: Payload::Inline(prompt),
            generated: None,
        };
        self.send(node, &order).await;
        order
    }

    async fn send(&self, node: &NodeId, order: &WorkOrder) {
        let boot = self.boot.lock().unwrap().unwrap();
        self.session.publish(&subject::work(node, boot), order).await.unwrap();
    }
}

#[tokio::test]
async fn work_order_becomes_token_frames_and_a_report() {
    let nats = nats().await;
    let node = NodeId::new("den").unwrap();
    let link = NatsConfig { url: nats.url.clone(), ca_file: None, seed_file: None };
    let scheduler = Scheduler::start(&link, &node).await;
    smollm::file();
    let model = smollm::id();
    let config: Config = serde_json::from_value(serde_json::json!({
        "node": node, "nats": link, "models": [model], "model_dir": smollm::models_dir(),
        "timing": Timing::default().faster(4),
    }))
    .unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let running = tokio::spawn(run(config, async {
        let _ = stopped.await;
    }));

    let first = scheduler.wait_for(|s| s.ledger.models.first().map(|m| m.residency.clone())).await;
    assert_eq!(first, Residency::Loading, "reported before it is loaded");
    scheduler.wait_for(|s| (s.ledger.models[0].residency == Residency::Resident).then_some(())).await;

    let order = scheduler.place(&node, &model, smollm::user_prompt("List three fruits.")).await;
    scheduler.send(&node, &order).await;
    let job = order.fence.job;
    let outcome = scheduler.wait_for(|s| s.reports.get(&job).cloned()).await;
    let Outcome::Done { completion: Payload::Inline(completion) } = outcome else { panic!("{outcome:?}") };
    let streamed = scheduler.wait_for(|s| s.text.get(&job).filter(|t| t.len() >= completion.text.len()).cloned()).await;
    assert_eq!(streamed, completion.text);
    assert_eq!(scheduler.wait_for(|s| Some(s.accepted.len())).await, 1, "the repeated order is executed once");
    scheduler.wait_for(|s| s.held.is_empty().then_some(())).await;

    let other: ModelId = "openai:box/m".parse().unwrap();
    let order = scheduler.place(&node, &other, smollm::user_prompt("x")).await;
    let refusal = scheduler.wait_for(|s| s.refused.get(&order.fence.job).cloned()).await;
    assert!(matches!(refusal, Refusal::Never { .. }));

    let mut order = order;
    order.fence = JobFence { job: JobId::fresh(), attempt: 1, lease: LeaseId::fresh() };
    order.prompt = Payload::Blob(BlobRef { hash: BlobHash::of(b"gone"), size: 4 });
    scheduler.send(&node, &order).await;
    let refusal = scheduler.wait_for(|s| s.refused.get(&order.fence.job).cloned()).await;
    assert!(matches!(&refusal, Refusal::Never { reason } if reason.contains("no such blob")), "{refusal:?}");

    let mut long = smollm::user_prompt("Count from one to one thousand.");
    long.sampling.max_tokens = 8000;
    // The schema prevents the model from ending the output early.
    long.format = OutputFormat::JsonSchema {
        schema: serde_json::json!({ "type": "array", "items": { "type": "integer" }, "minItems": 5000 }),
    };
    let cancelled = scheduler.place(&node, &model, long.clone()).await;
    scheduler.wait_for(|s| s.text.get(&cancelled.fence.job).map(|_| ())).await;
    let command = NodeCommand::Cancel { fence: cancelled.fence };
    scheduler.session.publish(&subject::node_command(&node), &command).await.unwrap();
    let outcome = scheduler.wait_for(|s| s.reports.get(&cancelled.fence.job).cloned()).await;
    assert!(matches!(outcome, Outcome::Released { .. }), "{outcome:?}");
    // The streamed text is a prefix of what the next attempt resumes with.
    let journal = scheduler.wait_for(|s| s.journals.get(&cancelled.fence.job).cloned()).await;
    let engine = smollm::engine();
    let resumed: Vec<u8> = journal.iter().flat_map(|token| engine.vocabulary().token_bytes(*token).to_vec()).collect();
    let read = scheduler.wait_for(|s| s.text.get(&cancelled.fence.job).cloned()).await;
    assert!(
        !read.is_empty() && resumed.starts_with(read.as_bytes()),
        "{read:?} was streamed, {:?} is in the journal",
        String::from_utf8(resumed)
    );

    let lost = scheduler.place(&node, &model, long.clone()).await;
    scheduler.wait_for(|s| s.text.get(&lost.fence.job).map(|_| ())).await;
    scheduler.received.lock().unwrap().lost_leases.push(lost.fence.lease);
    scheduler.wait_for(|s| (s.held.is_empty() && s.ledger.models[0].running == 0).then_some(())).await;
    assert!(!scheduler.received.lock().unwrap().reports.contains_key(&lost.fence.job));

    let last = scheduler.place(&node, &model, long).await;
    scheduler.wait_for(|s| s.text.get(&last.fence.job).map(|_| ())).await;
    stop.send(()).unwrap();
    in_time(running).await.unwrap().unwrap();
    let outcome = scheduler.wait_for(|s| s.reports.get(&last.fence.job).cloned()).await;
    assert!(matches!(outcome, Outcome::Released { .. }), "{outcome:?}");
    assert!(scheduler.received.lock().unwrap().ledger.draining);
}

/// A node of this build would wait in vain for the work orders of a scheduler from which nodes pull them.
#[tokio::test]
async fn node_does_not_work_with_a_scheduler_of_an_earlier_build() {
    let nats = nats().await;
    let link = NatsConfig { url: nats.url.clone(), ca_file: None, seed_file: None };
    let scheduler = Session::connect(&link, Identity::Scheduler, &Timing::default()).await.unwrap();
    let mut registrations = scheduler.subscribe::<NodeRegistration>("cfq.v1.node.den.register").await.unwrap();
    scheduler.flush().await.unwrap();
    tokio::spawn(async move {
        while let Some(registration) = registrations.next().await {
            let reply = serde_json::json!({ "type": "registered", "consumer": "den" });
            registration.reply(&reply).await.unwrap();
        }
    });
    let folder = tempfile::tempdir().unwrap();
    let config: Config = serde_json::from_value(serde_json::json!({
        "node": "den", "nats": link, "models": [], "model_dir": folder.path(),
    }))
    .unwrap();
    let error = in_time(run(config, std::future::pending())).await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains("the scheduler's cfq is older") && text.contains("install"), "{text}");
}

/// The scheduler accepts a model for an agent as soon as a ledger shows that it is usable.
#[tokio::test]
async fn model_of_a_server_that_is_down_is_never_shown_as_usable() {
    static IS_DOWN: AtomicBool = AtomicBool::new(false);
    let script: Script = |mut stream| {
        async move {
            let is_down = IS_DOWN.load(Ordering::Relaxed);
            let reply: &[u8] = match is_down {
                false => b"HTTP/1.1 200 OK\r\ncontent-length: 11\r\nconnection: close\r\n\r\n{\"data\":[]}",
                true => b"HTTP/1.1 503 Down\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
            };
            if is_down {
                // The node sends its ledger meanwhile.
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            let _ = stream.write_all(reply).await;
        }
        .boxed()
    };
    let (nats, (url, mut requests)) = (nats().await, serve(script).await);
    tokio::spawn(async move { while requests.recv().await.is_some() {} });
    let node = NodeId::new("den").unwrap();
    let link = NatsConfig { url: nats.url.clone(), ca_file: None, seed_file: None };
    let scheduler = Scheduler::start(&link, &node).await;
    let [first, late] = ["openai:box/first", "openai:box/late"].map(|model| model.parse::<ModelId>().unwrap());
    let config: Config = serde_json::from_value(serde_json::json!({
        "node": node, "nats": link, "models": [first], "model_dir": smollm::models_dir(),
        "endpoints": { "box": { "url": url } }, "timing": Timing::default().faster(4),
    }))
    .unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let running = tokio::spawn(run(config, async {
        let _ = stopped.await;
    }));
    scheduler.wait_for(|s| s.usable.contains(&first).then_some(())).await;
    IS_DOWN.store(true, Ordering::Relaxed);
    let load = NodeCommand::Load { model: late.clone() };
    scheduler.session.publish(&subject::node_command(&node), &load).await.unwrap();
    let is_unusable = |ledger: &Ledger| {
        let shown = ledger.models.iter().find(|m| m.model == late);
        shown.is_some_and(|m| matches!(m.residency, Residency::Unusable { .. }))
    };
    scheduler.wait_for(|s| is_unusable(&s.ledger).then_some(())).await;
    assert!(!scheduler.received.lock().unwrap().usable.contains(&late));
    stop.send(()).unwrap();
    in_time(running).await.unwrap().unwrap();
}
