//! The node against a scripted scheduler over a real nats-server, which is found or fetched as the product does it: what no
//! real scheduler would send in one run (an order twice, a blob that is gone, a lease taken away in the middle).

use std::collections::HashMap;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_nats::jetstream;
use cfq_deploy::engines::{EngineOptions, Finder, Kind};
use cfq_deploy::{Paths, Talk};
use cfq_inference_node::{Config, run};
use cfq_link::{NatsConfig, Session};
use cfq_proto::blob::{BlobHash, BlobRef, Carried};
use cfq_proto::ids::{JobId, LeaseId, NodeId, TaskId};
use cfq_proto::job::{Outcome, OutputFormat, Prompt};
use cfq_proto::messages::*;
use cfq_proto::model::ModelId;
use cfq_proto::node::{Ledger, Residency};
use cfq_proto::subject::{self, Identity, WORK_ALL, WORK_STREAM};
use cfq_proto::task::Agent;
use cfq_proto::timing::Timing;
use tokio::sync::oneshot;

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
        let (paths, options) = (Paths::from_environment().unwrap(), EngineOptions::default());
        Finder { paths: &paths, options: &options, account: None, pinned: None, may_fetch: true, talk: Talk::Stderr }
            .find(Kind::Nats)
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
    let url = within(async {
        loop {
            let said = std::fs::read(&ports).ok().and_then(|b| serde_json::from_slice::<serde_json::Value>(&b).ok());
            match said.as_ref().and_then(|v| v["nats"][0].as_str()) {
                Some(url) => break url.to_owned(),
                None => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    })
    .await;
    Nats { child, url, _folder: folder }
}

async fn within<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(90), what).await.expect("in time")
}

#[derive(Default)]
struct Seen {
    ledger: Ledger,
    held: Vec<LeaseId>,
    accepted: Vec<JobFence>,
    refused: HashMap<JobId, Refusal>,
    reports: HashMap<JobId, Outcome>,
    text: HashMap<JobId, String>,
    journals: HashMap<JobId, Vec<u32>>,
    /// Answers beats with "lost" for these.
    take_away: Vec<LeaseId>,
}

/// A scheduler that welcomes, extends and commits everything, and remembers it.
struct Scheduler {
    session: Session,
    seen: Arc<Mutex<Seen>>,
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
                retention: jetstream::stream::RetentionPolicy::WorkQueue,
                ..Default::default()
            })
            .await
            .unwrap();
        let (seen, boot) = (Arc::new(Mutex::new(Seen::default())), Arc::new(Mutex::new(None)));
        let mut requests = session.subscribe::<serde_json::Value>("cfq.v1.node.*.*").await.unwrap();
        let mut frames = session.subscribe::<TokenFrame>(&subject::tokens_of("*")).await.unwrap();
        let (notes, node, current) = (seen.clone(), node.clone(), boot.clone());
        tokio::spawn(async move {
            while let Some(message) = requests.next().await {
                let body = message.body.as_ref().unwrap().clone();
                let (_, verb) = subject::sender(message.subject()).unwrap();
                match verb {
                    "hello" => {
                        let hello: NodeHello = serde_json::from_value(body).unwrap();
                        *current.lock().unwrap() = Some(hello.boot);
                        let consumer = subject::consumer(&node);
                        let settings = jetstream::consumer::pull::Config {
                            durable_name: Some(consumer.clone()),
                            filter_subject: subject::work(&node, hello.boot),
                            ..Default::default()
                        };
                        stream.create_consumer(settings).await.unwrap();
                        message.reply(&HelloReply::Welcome { consumer }).await.unwrap();
                    }
                    "beat" => {
                        let beat: Beat = serde_json::from_value(body).unwrap();
                        let reply = {
                            let mut seen = notes.lock().unwrap();
                            seen.held = beat.held.iter().map(|h| h.lease).collect();
                            if let Some(ledger) = beat.ledger {
                                assert!(ledger.version >= seen.ledger.version);
                                seen.ledger = ledger;
                            }
                            let (lost, extended) = seen.held.iter().partition(|l| seen.take_away.contains(l));
                            BeatReply { extended, lost, hello_again: current.lock().unwrap().is_none() }
                        };
                        message.reply(&reply).await.unwrap();
                    }
                    "blob_get" => {
                        message.reply(&BlobGetReply::Refused { reason: "no such blob".to_owned() }).await.unwrap();
                    }
                    other => {
                        {
                            let mut seen = notes.lock().unwrap();
                            match other {
                                "accept" => seen.accepted.push(serde_json::from_value::<Accept>(body).unwrap().fence),
                                "refuse" => {
                                    let refuse: Refuse = serde_json::from_value(body).unwrap();
                                    seen.refused.insert(refuse.fence.job, refuse.refusal);
                                }
                                "result" => {
                                    let report: JobReport = serde_json::from_value(body).unwrap();
                                    assert!(
                                        seen.held.contains(&report.fence.lease),
                                        "the lease is kept until it is reported"
                                    );
                                    seen.reports.insert(report.fence.job, report.outcome);
                                }
                                "journal" => {
                                    let told: Journal = serde_json::from_value(body).unwrap();
                                    let journal = seen.journals.entry(told.fence.job).or_default();
                                    assert_eq!(journal.len(), told.after as usize);
                                    journal.extend(told.written.tokens);
                                }
                                _ => panic!("{other}"),
                            }
                        }
                        message.reply(&FenceReply::Committed).await.unwrap();
                    }
                }
            }
        });
        let notes = seen.clone();
        tokio::spawn(async move {
            while let Some(frame) = frames.next().await {
                let frame = frame.body.unwrap();
                let mut seen = notes.lock().unwrap();
                let text = seen.text.entry(frame.fence.job).or_default();
                assert_eq!(text.len() as u64, frame.offset);
                text.push_str(&frame.text);
            }
        });
        Self { session, seen, boot }
    }

    async fn until<T>(&self, look: impl Fn(&Seen) -> Option<T>) -> T {
        within(async {
            loop {
                if let Some(found) = look(&self.seen.lock().unwrap()) {
                    break found;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await
    }

    async fn place(&self, node: &NodeId, model: &ModelId, prompt: Prompt) -> WorkOrder {
        let fence = JobFence { job: JobId::fresh(), attempt: 1, lease: LeaseId::fresh() };
        let order = WorkOrder {
            fence,
            task: TaskId::fresh(),
            role: Agent::Alpha,
            model: model.clone(),
            prompt: Carried::Inline(prompt),
            written: None,
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
async fn an_order_becomes_frames_and_a_report() {
    let nats = nats().await;
    let node = NodeId::new("den").unwrap();
    let link = NatsConfig { url: nats.url.clone(), seed_file: None };
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

    let first = scheduler.until(|s| s.ledger.models.first().map(|m| m.residency.clone())).await;
    assert_eq!(first, Residency::Loading, "seen before it is loaded");
    scheduler.until(|s| (s.ledger.models[0].residency == Residency::Resident).then_some(())).await;

    let order = scheduler.place(&node, &model, smollm::ask("List three fruits.")).await;
    scheduler.send(&node, &order).await;
    let job = order.fence.job;
    let outcome = scheduler.until(|s| s.reports.get(&job).cloned()).await;
    let Outcome::Done { completion: Carried::Inline(completion) } = outcome else { panic!("{outcome:?}") };
    let streamed = scheduler.until(|s| s.text.get(&job).filter(|t| t.len() >= completion.text.len()).cloned()).await;
    assert_eq!(streamed, completion.text);
    assert_eq!(scheduler.until(|s| Some(s.accepted.len())).await, 1, "the order that came twice is worked once");
    scheduler.until(|s| s.held.is_empty().then_some(())).await;

    let other: ModelId = "openai:box/m".parse().unwrap();
    let order = scheduler.place(&node, &other, smollm::ask("x")).await;
    let refusal = scheduler.until(|s| s.refused.get(&order.fence.job).cloned()).await;
    assert!(matches!(refusal, Refusal::Never { .. }));

    let mut order = order;
    order.fence = JobFence { job: JobId::fresh(), attempt: 1, lease: LeaseId::fresh() };
    order.prompt = Carried::Blob(BlobRef { hash: BlobHash::of(b"gone"), size: 4 });
    scheduler.send(&node, &order).await;
    let refusal = scheduler.until(|s| s.refused.get(&order.fence.job).cloned()).await;
    assert!(matches!(&refusal, Refusal::Never { reason } if reason.contains("no such blob")), "{refusal:?}");

    let mut long = smollm::ask("Count from one to one thousand.");
    long.sampling.max_tokens = 8000;
    // It may not end before that.
    long.format = OutputFormat::JsonSchema {
        schema: serde_json::json!({ "type": "array", "items": { "type": "integer" }, "minItems": 5000 }),
    };
    let cancelled = scheduler.place(&node, &model, long.clone()).await;
    scheduler.until(|s| s.text.get(&cancelled.fence.job).map(|_| ())).await;
    let command = NodeCommand::Cancel { fence: cancelled.fence };
    scheduler.session.publish(&subject::node_command(&node), &command).await.unwrap();
    let outcome = scheduler.until(|s| s.reports.get(&cancelled.fence.job).cloned()).await;
    assert!(matches!(outcome, Outcome::Released { .. }), "{outcome:?}");
    // Whoever read along has read nothing that the next attempt does not begin with.
    let journal = scheduler.until(|s| s.journals.get(&cancelled.fence.job).cloned()).await;
    let engine = smollm::engine();
    let told: Vec<u8> = journal.iter().flat_map(|token| engine.vocabulary().bytes_of(*token).to_vec()).collect();
    let read = scheduler.until(|s| s.text.get(&cancelled.fence.job).cloned()).await;
    assert!(
        !read.is_empty() && told.starts_with(read.as_bytes()),
        "{read:?} was read, {:?} told",
        String::from_utf8(told)
    );

    let lost = scheduler.place(&node, &model, long.clone()).await;
    scheduler.until(|s| s.text.get(&lost.fence.job).map(|_| ())).await;
    scheduler.seen.lock().unwrap().take_away.push(lost.fence.lease);
    scheduler.until(|s| (s.held.is_empty() && s.ledger.models[0].running == 0).then_some(())).await;
    assert!(!scheduler.seen.lock().unwrap().reports.contains_key(&lost.fence.job));

    let last = scheduler.place(&node, &model, long).await;
    scheduler.until(|s| s.text.get(&last.fence.job).map(|_| ())).await;
    stop.send(()).unwrap();
    within(running).await.unwrap().unwrap();
    let outcome = scheduler.until(|s| s.reports.get(&last.fence.job).cloned()).await;
    assert!(matches!(outcome, Outcome::Released { .. }), "{outcome:?}");
    assert!(scheduler.seen.lock().unwrap().ledger.draining);
}
