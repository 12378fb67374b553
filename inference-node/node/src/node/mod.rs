//! The node's connection to the cluster over NATS: registers, sends heartbeats, receives work orders, and keeps every
//! result until the scheduler has committed it.
//!
//! This file starts the async tasks; [`context`] contains the state that they share.
//!
//! Failpoints, in the order in which an attempt passes them: `node.received`, `node.before_accept`, `node.accepted`,
//! `node.generating` (each published frame), `node.before_report`, `node.reported`.

mod attempt;
mod commands;
mod context;
mod devices;
mod engine_watchdog;
mod error;
mod gpu_yield;
mod journal;
mod loader;
mod model_registry;
mod registration;
mod report;
mod speculative_prefill;
mod unusable;
mod work_orders;

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use cfq_link::Session;
use cfq_link::credentials_lock::CredentialsLock;
use cfq_link::lease::{HeartbeatExtras, LeaseKeeper};
use cfq_link::session::Incoming;
use cfq_proto::ids::BootId;
use cfq_proto::messages::{NodeCommand, WorkOrder};
use cfq_proto::node::Device;
use cfq_proto::subject::{self, Identity};
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinSet;

pub use self::error::{Error, LoaderFailure, ModelFault};

use self::context::{AttemptTable, NodeContext};
use self::error::panic_message;
use self::gpu_yield::YieldPolicy;
use self::model_registry::{LoaderCommand, ModelRegistry};
use self::speculative_prefill::PrefillQueue;
use crate::config::Config;
use crate::gpu;

/// Runs the node until `shutdown` completes, then releases its jobs.
pub async fn run(config: Config, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
    let credentials_lock = CredentialsLock::acquire(&config.nats)?;
    let boot = BootId::fresh();
    let changes = Arc::new(watch::Sender::new(()));
    let (registry, loader_commands) = ModelRegistry::new(&config, changes.clone());
    let inventory = gpu::inventory();
    tracing::info!(node = %config.node, %boot, devices = inventory.summary, "node starts");
    for (name, expected) in crate::thread_environment(config.threads) {
        if std::env::var(name).is_err() {
            tracing::warn!(
                "{name} is not set, so matrix products use all cores; to leave one core free, start the node with \
                 {name}={expected}"
            );
        }
    }
    let missing = if config.sandbox.is_some() { crate::sandbox::missing_limits() } else { Vec::new() };
    if !missing.is_empty() {
        tracing::warn!(?missing, "this kernel does not limit the processes that parse model files as usual");
    }
    let problems = devices::log_changes(&[], &inventory);
    let devices = watch::Sender::new(inventory.devices);
    let identity = Identity::Node(config.node.clone());
    let session = Session::connect(&config.nats, identity.clone(), &config.timing).await?;
    let commands = session.subscribe::<NodeCommand>(&subject::node_command(&config.node)).await?;
    let orders = session.subscribe::<WorkOrder>(&subject::order(&config.node, boot)).await?;
    let extras = {
        let (registry, devices) = (registry.clone(), devices.subscribe());
        move || HeartbeatExtras { ledger: Some(registry.ledger()), devices: Some(devices.borrow().clone()) }
    };
    let heartbeats = subject::node(&config.node, "heartbeat");
    let keeper = LeaseKeeper::start(config.nats.clone(), identity, boot, heartbeats, config.timing.clone(), extras)?;
    let prefill_queue = Arc::new(PrefillQueue::new(config.speculative_prefill));
    let context = Arc::new(NodeContext {
        node: config.node.clone(),
        boot,
        credentials_lock,
        session,
        keeper,
        registry: registry.clone(),
        timing: config.timing.clone(),
        registration_wanted: Notify::new(),
        prefill_queue: prefill_queue.clone(),
        attempts: AttemptTable::default(),
    });

    let changed = changes.subscribe();
    let mut tasks = JoinSet::new();
    for watch in registry.proxies().watch(&config.timing) {
        tasks.spawn(watch);
    }
    tasks.spawn(send_heartbeat_on_change(context.clone(), changes));
    tasks.spawn(engine_watchdog::run(registry.clone(), config.timing.job_step_timeout()));
    tasks.spawn(speculative_prefill::run(prefill_queue, registry));
    tasks.spawn(commands::run(context.clone(), config.store(), commands));
    if let Some(policy) = YieldPolicy::from_config(&config) {
        tasks.spawn(gpu_yield::run(context.clone(), policy, devices.subscribe()));
    }
    tasks.spawn(devices::run(devices.clone(), problems, config.timing.clone()));
    let served = serve(&context, &config, &devices, orders, (changed, loader_commands), shutdown).await;
    tasks.shutdown().await;
    context.registry.close();
    if served.is_ok() {
        loader::load_record::remove_records_of_loads(&config.store(), &context.registry.ledger());
    }
    context.keeper.stop();
    tracing::info!(node = %context.node, "node stopped");
    served
}

async fn serve(
    context: &Arc<NodeContext>,
    config: &Config,
    devices: &watch::Sender<Vec<Device>>,
    orders: Incoming<WorkOrder>,
    (changed, loader_commands): (watch::Receiver<()>, mpsc::Receiver<LoaderCommand>),
    shutdown: impl Future<Output = ()>,
) -> Result<(), Error> {
    let (registrations, mut registered) = watch::channel(false);
    let (received, mut ordered) = mpsc::channel(16);
    let receiver = tokio::spawn(work_orders::receive(orders, received));
    let registration = registration::run(context, devices, registrations);
    let breakdown = breakdown(&context.registry, changed);
    tokio::pin!(shutdown, registration, breakdown);
    let mut loader_commands = Some(loader_commands);
    let mut attempts = JoinSet::new();
    let served = loop {
        tokio::select! {
            () = &mut shutdown => break Ok(()),
            refused = &mut registration => break Err(refused),
            broken = &mut breakdown => {
                tracing::error!(error = %broken, "the node releases its jobs and exits");
                break Err(broken);
            }
            first = registered.wait_for(|is_registered| *is_registered), if loader_commands.is_some() => {
                if let (Ok(_), Some(commands)) = (first, loader_commands.take()) {
                    let (registry, config) = (context.registry.clone(), config.clone());
                    spawn_loader(&context.registry, move || loader::run(&registry, &config, commands));
                }
            }
            Some(order) = ordered.recv() => work_orders::start(context, order, &mut attempts),
            Some(ended) = attempts.join_next(), if !attempts.is_empty() => {
                if let Err(error) = ended {
                    tracing::error!(%error, "attempt task panicked");
                }
            }
        }
    };
    receiver.abort();
    work_orders::drain(context, attempts).await;
    served
}

/// Runs the loader on a thread of its own, because a load cannot be interrupted and the process must be able to exit
/// during a load. A panic inside a load makes only that model unusable. Any other panic of the loader leaves the node
/// without a loader, so the node exits.
fn spawn_loader(registry: &Arc<ModelRegistry>, work: impl FnOnce() -> std::io::Result<()> + Send + 'static) {
    let watched = registry.clone();
    let thread = std::thread::Builder::new().name("loader".to_owned()).spawn(move || {
        let failure = match std::panic::catch_unwind(AssertUnwindSafe(work)) {
            Ok(Ok(())) => return,
            Ok(Err(error)) => LoaderFailure::NoRuntime { detail: error.to_string() },
            Err(panic) => LoaderFailure::Panicked { message: panic_message(&*panic).to_owned() },
        };
        tracing::error!(reason = %failure, "model loader failed");
        watched.set_loader_failure(failure);
    });
    if let Err(error) = thread {
        registry.set_loader_failure(LoaderFailure::NoThread { detail: error.to_string() });
    }
}

/// Returns when an engine or the loader fails in a way that only a restart of the process can repair.
async fn breakdown(registry: &ModelRegistry, mut changed: watch::Receiver<()>) -> Error {
    loop {
        if let Some((model, failure)) = registry.broken_engine() {
            return Error::Engine { model, failure };
        }
        if let Some(failure) = registry.loader_failure() {
            return Error::Loader { failure };
        }
        if changed.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// Sends a heartbeat whenever the ledger changes.
async fn send_heartbeat_on_change(context: Arc<NodeContext>, changes: Arc<watch::Sender<()>>) {
    let mut changed = changes.subscribe();
    while changed.changed().await.is_ok() {
        context.keeper.heartbeat_now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn panic_of_the_loader_ends_the_node_with_its_message() {
        let folder = tempfile::tempdir().unwrap();
        let config: Config = serde_json::from_value(serde_json::json!({
            "node": "den", "nats": { "url": "nats://127.0.0.1:1" }, "model_dir": folder.path(), "models": [],
        }))
        .unwrap();
        let changes = Arc::new(watch::Sender::new(()));
        let (registry, _commands) = ModelRegistry::new(&config, changes.clone());
        let changed = changes.subscribe();
        spawn_loader(&registry, || panic!("a sum that went wrong"));
        let ended = breakdown(&registry, changed);
        let ended = tokio::time::timeout(std::time::Duration::from_secs(60), ended).await.unwrap();
        let Error::Loader { failure } = &ended else { panic!("{ended}") };
        assert_eq!(*failure, LoaderFailure::Panicked { message: "a sum that went wrong".to_owned() });
    }
}
