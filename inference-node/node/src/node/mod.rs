//! The node's NATS side: it says hello, beats, pulls work, and keeps every result until the scheduler has it.
//!
//! Failpoints, in the order an attempt meets them: `node.pulled`, `node.before_accept`, `node.accepted`,
//! `node.generating` (each published frame), `node.before_report`, `node.reported`.

mod attempt;
mod fleet;
mod journal;
mod loader;
mod make_way;
mod warm;

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cfq_link::lease::{BeatExtras, LeaseKeeper};
use cfq_link::stop::{self, Stop, Stopper};
use cfq_link::{LinkError, Session, failpoint};
use cfq_proto::ids::{BootId, NodeId};
use cfq_proto::messages::{Beat, BeatReply, HelloReply, JobFence, NodeCommand, NodeHello, WorkOrder};
use cfq_proto::model::ModelId;
use cfq_proto::node::Device;
use cfq_proto::subject::{self, Identity, WORK_STREAM};
use cfq_proto::timing::Timing;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinSet;

use crate::config::Config;
use crate::gpu::{self, Inventory, Trouble};
use crate::models::{Presence, Store};
use crate::node::attempt::Attempt;
use crate::node::fleet::{Fleet, Wish, with_causes};
use crate::node::loader::Loader;
use crate::node::make_way::{Policy, make_way};
use crate::node::warm::{Expected, warm};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the node cannot reach the cluster")]
    Link(#[from] LinkError),
    #[error("the scheduler refuses this node: {reason}")]
    Refused { reason: String },
    /// What a panic left of the engine's memory cannot be trusted, and a fresh process loads the model in seconds.
    #[error("the engine of {model} stopped: {reason}; the node ends, its supervisor starts a new one")]
    Engine { model: ModelId, reason: String },
    /// A node that can load nothing, and let nothing go, is of no use for long.
    #[error("what loads this node's models stopped: {reason}; the node ends, its supervisor starts a new one")]
    Loader { reason: String },
}

/// What the tasks of a node share.
pub(crate) struct Shared {
    pub(crate) node: NodeId,
    pub(crate) boot: BootId,
    pub(crate) session: Session,
    pub(crate) keeper: LeaseKeeper,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) timing: Timing,
    /// Attempts in hand, on which model, and how to stop each.
    attempts: Mutex<HashMap<JobFence, (ModelId, Stopper)>>,
    hello_wanted: Notify,
    expected: Expected,
}

impl Shared {
    fn attempts(&self) -> MutexGuard<'_, HashMap<JobFence, (ModelId, Stopper)>> {
        self.attempts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes an attempt in hand; `None` if it is already, as with an order that came twice.
    fn begin(self: &Arc<Self>, order: &WorkOrder) -> Option<InHand> {
        let (fence, (stopper, stop)) = (order.fence, stop::pair());
        match self.attempts().entry(fence) {
            std::collections::hash_map::Entry::Occupied(_) => None,
            std::collections::hash_map::Entry::Vacant(free) => {
                free.insert((order.model.clone(), stopper));
                Some(InHand { fence, stop, shared: self.clone() })
            }
        }
    }

    /// Stops what runs on models that make way.
    fn hand_back(&self) {
        for (model, stopper) in self.attempts().values() {
            if self.fleet.yields(model).is_some() {
                stopper.stop();
            }
        }
    }

    pub(crate) fn subject(&self, verb: &str) -> String {
        subject::node(&self.node, verb)
    }
}

/// An attempt this node works on; dropped, it is out of its hands.
pub(crate) struct InHand {
    pub(crate) fence: JobFence,
    /// Raised by a cancel or when the node stops.
    pub(crate) stop: Stop,
    shared: Arc<Shared>,
}

impl Drop for InHand {
    fn drop(&mut self) {
        self.shared.attempts().remove(&self.fence);
    }
}

/// Serves until `shutdown` completes, then hands its work back.
pub async fn run(config: Config, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
    let boot = BootId::fresh();
    let changes = Arc::new(watch::Sender::new(()));
    let (fleet, wished, servers) = Fleet::new(&config, changes.clone());
    let inventory = gpu::inventory();
    tracing::info!(node = %config.node, %boot, devices = inventory.words, "node starts");
    for (name, expected) in crate::thread_environment(config.threads) {
        if std::env::var(name).is_err() {
            tracing::warn!("{name} is not set: matrix work takes every core; start the node with {name}={expected}");
        }
    }
    let troubles = told_of(&[], &inventory);
    let devices = watch::Sender::new(inventory.devices);
    let identity = Identity::Node(config.node.clone());
    let session = Session::connect(&config.nats, identity.clone(), &config.timing).await?;
    let commands = session.subscribe::<NodeCommand>(&subject::node_command(&config.node)).await?;
    let extras = {
        let (fleet, devices) = (fleet.clone(), devices.subscribe());
        move || BeatExtras { ledger: Some(fleet.ledger()), devices: Some(devices.borrow().clone()) }
    };
    let beat_subject = subject::node(&config.node, "beat");
    let keeper = LeaseKeeper::start(config.nats.clone(), identity, boot, beat_subject, config.timing.clone(), extras)?;
    let shared = Arc::new(Shared {
        node: config.node.clone(),
        boot,
        session,
        keeper,
        fleet,
        timing: config.timing.clone(),
        attempts: Mutex::default(),
        hello_wanted: Notify::new(),
        expected: Expected::new(config.critic_warm_up),
    });

    let changed = changes.subscribe();
    let mut around = JoinSet::new();
    for server in servers {
        around.spawn(server.watch(config.timing.clone()));
    }
    around.spawn(nudge(shared.clone(), changes));
    around.spawn(warm(shared.clone()));
    around.spawn(obey(shared.clone(), config.store(), commands));
    if let Some(policy) = Policy::of(&config) {
        around.spawn(make_way(shared.clone(), policy, devices.subscribe()));
    }
    around.spawn(look_at_devices(devices.clone(), troubles, config.timing.clone()));
    let served = serve(&shared, &config, &devices, (changed, wished), shutdown).await;
    around.shutdown().await;
    shared.fleet.close();
    shared.keeper.stop();
    tracing::info!(node = %shared.node, "node stopped");
    served
}

async fn serve(
    shared: &Arc<Shared>,
    config: &Config,
    devices: &watch::Sender<Vec<Device>>,
    (changed, wished): (watch::Receiver<()>, std::sync::mpsc::Receiver<Wish>),
    shutdown: impl Future<Output = ()>,
) -> Result<(), Error> {
    let (consumer, mut welcomed) = watch::channel(None);
    let (orders, mut ordered) = mpsc::channel(16);
    // Never cancelled between asking and answer: the server would give the next order to a pull nobody reads.
    let puller = tokio::spawn(pull(shared.clone(), consumer.subscribe(), orders));
    let greeting = greet(shared, devices, consumer);
    let breakdown = breakdown(&shared.fleet, changed);
    tokio::pin!(shutdown, greeting, breakdown);
    let mut wished = Some(wished);
    let mut work = JoinSet::new();
    let served = loop {
        tokio::select! {
            () = &mut shutdown => break Ok(()),
            refused = &mut greeting => break Err(refused),
            broken = &mut breakdown => {
                tracing::error!(error = %broken, "the node hands its work back and ends");
                break Err(broken);
            }
            welcome = welcomed.wait_for(Option::is_some), if wished.is_some() => {
                if let (Ok(_), Some(wished)) = (welcome, wished.take()) {
                    let (fleet, config) = (shared.fleet.clone(), config.clone());
                    load(&shared.fleet, move || Loader::new(&fleet, &config, wished).run());
                }
            }
            Some(order) = ordered.recv() => take_up(shared, order, &mut work),
            Some(ended) = work.join_next(), if !work.is_empty() => {
                if let Err(error) = ended {
                    tracing::error!(%error, "an attempt's task failed");
                }
            }
        }
    };
    puller.abort();
    drain(shared, work).await;
    served
}

/// On a thread of its own: a load cannot be interrupted, and the process must be able to end during it. A panic inside of a
/// load is that model's; one around it leaves nobody who could load or unload, and the node ends over it.
fn load(fleet: &Arc<Fleet>, work: impl FnOnce() + Send + 'static) {
    let watched = fleet.clone();
    let started = std::thread::Builder::new().name("loader".to_owned()).spawn(move || {
        if let Err(panic) = std::panic::catch_unwind(AssertUnwindSafe(work)) {
            let said = panic.downcast_ref::<String>().map(String::as_str);
            let said = said.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without words");
            tracing::error!(reason = said, "the loader stopped");
            watched.without_loader(said.to_owned());
        }
    });
    if let Err(error) = started {
        fleet.without_loader(format!("no thread for it: {error}"));
    }
}

/// Says hello now and whenever it is wanted again; returns when the scheduler refuses this node.
async fn greet(
    shared: &Shared,
    devices: &watch::Sender<Vec<Device>>,
    consumer: watch::Sender<Option<String>>,
) -> Error {
    let mut beats_want = shared.keeper.hello_wanted();
    loop {
        match hello(shared, devices).await {
            Ok(name) => consumer.send_replace(Some(name)),
            Err(error) => return error,
        };
        // One hello answers all that was wanted so far.
        beats_want.mark_unchanged();
        tokio::select! {
            () = shared.hello_wanted.notified() => {}
            changed = beats_want.changed() => {
                if changed.is_err() {
                    std::future::pending::<()>().await;
                }
            }
        }
    }
}

/// Says hello until somebody answers, and returns the consumer to pull from.
async fn hello(shared: &Shared, devices: &watch::Sender<Vec<Device>>) -> Result<String, Error> {
    loop {
        let body = NodeHello {
            node: shared.node.clone(),
            boot: shared.boot,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            devices: devices.borrow().clone(),
            ledger: shared.fleet.ledger(),
        };
        match shared.session.request::<_, HelloReply>(&shared.subject("hello"), &body).await {
            Ok(HelloReply::Welcome { consumer }) => {
                tracing::info!(consumer, "welcomed");
                shared.keeper.nudge();
                return Ok(consumer);
            }
            Ok(HelloReply::Refused { reason }) => return Err(Error::Refused { reason }),
            Err(error) => {
                tracing::debug!(%error, "hello not answered yet");
                tokio::time::sleep(shared.timing.beat() / 4).await;
            }
        }
    }
}

/// Pulls orders for ever and passes them on, acknowledged.
async fn pull(shared: Arc<Shared>, mut consumer: watch::Receiver<Option<String>>, orders: mpsc::Sender<WorkOrder>) {
    loop {
        let name = match consumer.wait_for(Option::is_some).await {
            Ok(name) => name.clone().unwrap_or_default(),
            Err(_) => return,
        };
        let delivery = match shared.session.pull::<WorkOrder>(WORK_STREAM, &name, shared.timing.poll()).await {
            Ok(Some(delivery)) => delivery,
            Ok(None) => continue,
            Err(error) => {
                // No such consumer: the stream was lost, or belongs to another boot. A hello makes it again.
                tracing::warn!(%error, "cannot pull work");
                shared.hello_wanted.notify_one();
                tokio::time::sleep(shared.timing.beat() / 4).await;
                continue;
            }
        };
        if let Err(error) = delivery.double_ack().await {
            // It may come again, which changes nothing.
            tracing::warn!(%error, "acknowledgement of an order not confirmed");
        }
        match delivery.body {
            Ok(order) => {
                failpoint::hit("node.pulled");
                if orders.send(order).await.is_err() {
                    return;
                }
            }
            Err(error) => tracing::error!(%error, "an order that cannot be read was dropped"),
        }
    }
}

fn take_up(shared: &Arc<Shared>, order: WorkOrder, work: &mut JoinSet<()>) {
    shared.expected.has_come(order.task, order.role);
    match shared.begin(&order) {
        Some(in_hand) => {
            work.spawn(Attempt { shared: shared.clone(), in_hand, order }.run());
        }
        None => tracing::debug!(job = %order.fence.job, "order came again"),
    }
}

/// Stops every attempt, and waits until the scheduler knows or the time for it is over.
async fn drain(shared: &Shared, mut work: JoinSet<()>) {
    shared.fleet.drain();
    shared.keeper.nudge();
    for (_, stopper) in shared.attempts().values() {
        stopper.stop();
    }
    let ended = async { while work.join_next().await.is_some() {} };
    if tokio::time::timeout(shared.timing.drain(), ended).await.is_err() {
        tracing::warn!(left = work.len(), "attempts not handed back in time; their leases will run out");
        return;
    }
    // The last word, so that nothing more is placed here: the heartbeat may end before its next beat.
    let last = Beat { boot: shared.boot, held: Vec::new(), ledger: Some(shared.fleet.ledger()), devices: None };
    let subject = shared.subject("beat");
    let said = shared.session.request::<_, BeatReply>(&subject, &last);
    if !matches!(tokio::time::timeout(shared.timing.beat(), said).await, Ok(Ok(_))) {
        tracing::debug!("nobody heard that this node stops");
    }
}

/// Returns when an engine, or the loader, will never work again.
async fn breakdown(fleet: &Fleet, mut changed: watch::Receiver<()>) -> Error {
    loop {
        if let Some((model, reason)) = fleet.broken() {
            return Error::Engine { model, reason };
        }
        if let Some(reason) = fleet.loader_failed() {
            return Error::Loader { reason };
        }
        if changed.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// Every change of a ledger makes a beat.
async fn nudge(shared: Arc<Shared>, changes: Arc<watch::Sender<()>>) {
    let mut changed = changes.subscribe();
    while changed.changed().await.is_ok() {
        shared.keeper.nudge();
    }
}

async fn obey(shared: Arc<Shared>, store: Store, mut commands: cfq_link::session::Incoming<NodeCommand>) {
    while let Some(command) = commands.next().await {
        let reply = match &command.body {
            Ok(NodeCommand::Cancel { fence }) => {
                if let Some((_, stopper)) = shared.attempts().get(fence) {
                    tracing::info!(job = %fence.job, attempt = fence.attempt, "cancelled");
                    stopper.stop();
                }
                continue;
            }
            Ok(NodeCommand::Report) => {
                shared.hello_wanted.notify_one();
                continue;
            }
            Ok(NodeCommand::Warm { ahead }) => {
                shared.expected.wish(ahead.clone());
                continue;
            }
            Ok(NodeCommand::Load { model }) => shared.fleet.load(model, || is_here(&store, model)),
            Ok(NodeCommand::Unload { model }) => shared.fleet.unload(model),
            Err(error) => {
                tracing::warn!(%error, "a command that cannot be read was dropped");
                continue;
            }
        };
        tracing::info!(command = ?command.body, ?reply, "asked about a model");
        if let Err(error) = command.reply(&reply).await {
            tracing::debug!(%error, "answer not sent");
        }
    }
}

/// A model that no configuration names is served by hand only if nothing has to be fetched for it.
fn is_here(store: &Store, model: &ModelId) -> Result<(), String> {
    match store.presence(model) {
        Ok(Presence::Here) => Ok(()),
        Ok(Presence::Missing { .. }) => {
            Err(format!("{model} is not on this node's machine: `cfq models pull {model}` there fetches it"))
        }
        Err(error) => Err(with_causes(&error)),
    }
}

/// Temperatures and what others hold change slowly; drivers answer slowly.
async fn look_at_devices(devices: watch::Sender<Vec<Device>>, mut troubles: Vec<Trouble>, timing: Timing) {
    loop {
        tokio::time::sleep(timing.beat() * 5).await;
        if let Ok(inventory) = tokio::task::spawn_blocking(gpu::inventory).await {
            troubles = told_of(&troubles, &inventory);
            devices.send_replace(inventory.devices);
        }
    }
}

/// Says once what does not answer any more, and what answers again. A card whose driver went silent besides is no better.
fn told_of(before: &[Trouble], now: &Inventory) -> Vec<Trouble> {
    for trouble in now.troubles.iter().filter(|trouble| !before.contains(trouble)) {
        tracing::error!(device = trouble.of, next_step = trouble.next_step, "{} {}", trouble.of, trouble.what);
    }
    let mut left = now.troubles.clone();
    for old in before.iter().filter(|trouble| !now.troubles.iter().any(|t| t.of == trouble.of)) {
        if now.driver.is_some() && (old.of == gpu::DRIVER || now.devices.iter().any(|d| d.id == old.of)) {
            tracing::info!(device = old.of, "{} answers again", old.of);
        } else {
            left.push(old.clone());
        }
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_of_the_loader_ends_the_node_and_says_what_it_said() {
        let folder = tempfile::tempdir().unwrap();
        let config: Config = serde_json::from_value(serde_json::json!({
            "node": "den", "nats": { "url": "nats://127.0.0.1:1" }, "model_dir": folder.path(), "models": [],
        }))
        .unwrap();
        let changes = Arc::new(watch::Sender::new(()));
        let (fleet, _wished, _) = Fleet::new(&config, changes.clone());
        let changed = changes.subscribe();
        load(&fleet, || panic!("a sum that went wrong"));
        let ended = tokio::time::timeout(std::time::Duration::from_secs(60), breakdown(&fleet, changed)).await.unwrap();
        assert!(matches!(&ended, Error::Loader { reason } if reason == "a sum that went wrong"), "{ended}");
    }
}
