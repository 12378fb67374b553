//! The node's NATS side: it says hello, beats, pulls work, and keeps every result until the scheduler has it.
//!
//! Failpoints, in the order an attempt meets them: `node.pulled`, `node.before_accept`, `node.accepted`,
//! `node.generating` (each published frame), `node.before_report`, `node.reported`.

mod attempt;
mod fleet;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cfq_link::lease::{BeatExtras, LeaseKeeper};
use cfq_link::stop::{self, Stop, Stopper};
use cfq_link::{LinkError, Session, failpoint};
use cfq_proto::ids::{BootId, NodeId};
use cfq_proto::messages::{HelloReply, JobFence, NodeCommand, NodeHello, WorkOrder};
use cfq_proto::node::Device;
use cfq_proto::subject::{self, Identity, WORK_STREAM};
use cfq_proto::timing::Timing;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;

use crate::config::Config;
use crate::gpu;
use crate::node::attempt::Attempt;
use crate::node::fleet::Fleet;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the node cannot reach the cluster")]
    Link(#[from] LinkError),
    #[error("the scheduler refuses this node: {reason}")]
    Refused { reason: String },
}

/// What the tasks of a node share.
pub(crate) struct Shared {
    pub(crate) node: NodeId,
    pub(crate) boot: BootId,
    pub(crate) session: Session,
    pub(crate) keeper: LeaseKeeper,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) timing: Timing,
    /// Attempts in hand, and how to stop each.
    attempts: Mutex<HashMap<JobFence, Stopper>>,
    hello_wanted: Notify,
}

impl Shared {
    fn attempts(&self) -> MutexGuard<'_, HashMap<JobFence, Stopper>> {
        self.attempts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes an attempt in hand; `None` if it is already, as with an order that came twice.
    fn begin(self: &Arc<Self>, fence: JobFence) -> Option<InHand> {
        let (stopper, stop) = stop::pair();
        match self.attempts().entry(fence) {
            std::collections::hash_map::Entry::Occupied(_) => None,
            std::collections::hash_map::Entry::Vacant(free) => {
                free.insert(stopper);
                Some(InHand { fence, stop, shared: self.clone() })
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
    let (fleet, servers) = Fleet::new(&config, changes.clone());
    let inventory = gpu::inventory();
    tracing::info!(node = %config.node, %boot, devices = inventory.words, "node starts");
    for (name, expected) in crate::thread_environment(config.threads) {
        if std::env::var(name).is_err() {
            tracing::warn!("{name} is not set: matrix work takes every core; start the node with {name}={expected}");
        }
    }
    let devices = watch::Sender::new(inventory.devices);
    let identity = Identity::Node(config.node.clone());
    let session = Session::connect(&config.nats, identity.clone(), &config.timing).await?;
    let commands = session.subscribe::<NodeCommand>(&subject::node_command(&config.node)).await?;
    let extras = {
        let (fleet, devices) = (fleet.clone(), devices.subscribe());
        move || BeatExtras { ledger: Some(fleet.ledger()), devices: Some(devices.borrow().clone()) }
    };
    let beat_subject = subject::node(&config.node, "beat");
    let keeper =
        LeaseKeeper::start(config.nats.clone(), identity, boot, beat_subject, config.timing.clone(), extras)?;
    let shared = Arc::new(Shared {
        node: config.node.clone(),
        boot,
        session,
        keeper,
        fleet,
        timing: config.timing.clone(),
        attempts: Mutex::default(),
        hello_wanted: Notify::new(),
    });

    let mut around = JoinSet::new();
    for server in servers {
        around.spawn(server.watch(config.timing.clone()));
    }
    around.spawn(nudge(shared.clone(), changes));
    around.spawn(obey(shared.clone(), commands));
    around.spawn(look_at_devices(devices.clone(), config.timing.clone()));
    let served = serve(&shared, &config, &devices, shutdown).await;
    around.shutdown().await;
    shared.keeper.stop();
    tracing::info!(node = %shared.node, "node stopped");
    served
}

async fn serve(
    shared: &Arc<Shared>,
    config: &Config,
    devices: &watch::Sender<Vec<Device>>,
    shutdown: impl Future<Output = ()>,
) -> Result<(), Error> {
    tokio::pin!(shutdown);
    let mut consumer = tokio::select! {
        said = hello(shared, devices) => said?,
        () = &mut shutdown => return Ok(()),
    };
    let loading = {
        let (shared, config) = (shared.clone(), config.clone());
        // A load cannot be interrupted; the process may end during it.
        tokio::task::spawn_blocking(move || shared.fleet.load_files(&config))
    };
    let mut hello_again = shared.keeper.hello_wanted();
    let mut work = JoinSet::new();
    loop {
        tokio::select! {
            () = &mut shutdown => break,
            pulled = pull(shared, &consumer) => {
                if let Some(order) = pulled {
                    take_up(shared, order, &mut work);
                }
            }
            changed = hello_again.changed() => {
                if changed.is_err() {
                    break;
                }
                consumer = hello(shared, devices).await?;
            }
            () = shared.hello_wanted.notified() => consumer = hello(shared, devices).await?,
            Some(ended) = work.join_next(), if !work.is_empty() => {
                if let Err(error) = ended {
                    tracing::error!(%error, "an attempt's task failed");
                }
            }
        }
    }
    loading.abort();
    drain(shared, work).await;
    Ok(())
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

/// The next order, already acknowledged. Cancelling it between pull and acknowledgement only makes the order come again.
async fn pull(shared: &Shared, consumer: &str) -> Option<WorkOrder> {
    let delivery = match shared.session.pull::<WorkOrder>(WORK_STREAM, consumer, shared.timing.poll()).await {
        Ok(delivery) => delivery?,
        Err(error) => {
            // No such consumer: the stream was lost or belongs to another boot. A hello makes it again.
            tracing::warn!(%error, "cannot pull work");
            tokio::time::sleep(Duration::from_millis(250)).await;
            shared.hello_wanted.notify_one();
            return None;
        }
    };
    if let Err(error) = delivery.double_ack().await {
        // It may come again, which changes nothing.
        tracing::warn!(%error, "acknowledgement of an order not confirmed");
    }
    match delivery.body {
        Ok(order) => {
            failpoint::hit("node.pulled");
            Some(order)
        }
        Err(error) => {
            tracing::error!(%error, "an order that cannot be read was dropped");
            None
        }
    }
}

fn take_up(shared: &Arc<Shared>, order: WorkOrder, work: &mut JoinSet<()>) {
    match shared.begin(order.fence) {
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
    for stopper in shared.attempts().values() {
        stopper.stop();
    }
    let ended = async { while work.join_next().await.is_some() {} };
    if tokio::time::timeout(shared.timing.drain(), ended).await.is_err() {
        tracing::warn!(left = work.len(), "attempts not handed back in time; their leases will run out");
    }
}

/// Every change of a ledger makes a beat.
async fn nudge(shared: Arc<Shared>, changes: Arc<watch::Sender<()>>) {
    let mut changed = changes.subscribe();
    while changed.changed().await.is_ok() {
        shared.keeper.nudge();
    }
}

async fn obey(shared: Arc<Shared>, mut commands: cfq_link::session::Incoming<NodeCommand>) {
    while let Some(command) = commands.next().await {
        match command.body {
            Ok(NodeCommand::Cancel { fence }) => {
                if let Some(stopper) = shared.attempts().get(&fence) {
                    tracing::info!(job = %fence.job, attempt = fence.attempt, "cancelled");
                    stopper.stop();
                }
            }
            Ok(NodeCommand::Report) => shared.hello_wanted.notify_one(),
            Err(error) => tracing::warn!(%error, "a command that cannot be read was dropped"),
        }
    }
}

/// Temperatures and what others hold change slowly; drivers answer slowly.
async fn look_at_devices(devices: watch::Sender<Vec<Device>>, timing: Timing) {
    loop {
        tokio::time::sleep(timing.beat() * 5).await;
        if let Ok(inventory) = tokio::task::spawn_blocking(gpu::inventory).await {
            devices.send_replace(inventory.devices);
        }
    }
}
