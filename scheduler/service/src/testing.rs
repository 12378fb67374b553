//! What the tests of this crate stand on: a real private Postgres and NATS, started by the first test that needs them,
//! shared by those that run beside it, stopped by the last; and a database of its own for each test.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, Weak};

use cfq_deploy::stack::Facts;
use cfq_deploy::{Options, Paths, Stack};
use cfq_proto::ids::{BootId, NodeId, RunnerId, TaskId, TaskNumber};
use cfq_proto::messages::{NodeHello, RunnerHello};
use cfq_proto::node::{KvTiers, Ledger, ModelState, Residency};
use cfq_proto::subject::Identity;
use cfq_proto::task::TaskSpec;
use cfq_proto::timing::Timing;
use tokio::sync::oneshot;

use crate::config::{DatabaseConfig, Limits};
use crate::store::{Leadership, NewTask, Store, Submitted};

pub const MODEL: &str = "openai:box/m";

struct Engines {
    facts: Facts,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Drop for Engines {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

fn engines() -> Arc<Engines> {
    static SHARED: Mutex<Weak<Engines>> = Mutex::new(Weak::new());
    let mut shared = SHARED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some(engines) = shared.upgrade() {
        return engines;
    }
    let engines = Arc::new(start());
    *shared = Arc::downgrade(&engines);
    engines
}

fn start() -> Engines {
    let (ready, started) = std::sync::mpsc::sync_channel(1);
    let (stop, stopped) = oneshot::channel();
    // Children die with the thread that spawned them, so one thread lives as long as they shall.
    let thread = std::thread::spawn(move || {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o711)).unwrap();
        let cache = Paths::from_environment().unwrap().cache;
        let paths = Paths { data: folder.path().join("data"), cache, config: folder.path().join("config") };
        let identities = vec![Identity::Node(node()), Identity::Runner(runner())];
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        runtime.block_on(async {
            let options = Options { identities, ..Options::default() };
            let stack = Stack::start(&paths, options).await.unwrap();
            ready.send(stack.facts().clone()).unwrap();
            let _dropped = stopped.await;
            stack.stop().await.unwrap();
        });
    });
    Engines { facts: started.recv().unwrap(), stop: Some(stop), thread: Some(thread) }
}

/// One test's database.
pub struct Lab {
    pub store: Store,
    pub database: DatabaseConfig,
    engines: Arc<Engines>,
}

impl Lab {
    pub async fn new() -> Self {
        Self::over(tokio::task::spawn_blocking(engines).await.unwrap(), Timing::default()).await
    }

    /// With engines nobody else uses: schedulers of one NATS share its requests.
    pub async fn alone(timing: Timing) -> Self {
        Self::over(Arc::new(tokio::task::spawn_blocking(start).await.unwrap()), timing).await
    }

    async fn over(engines: Arc<Engines>, timing: Timing) -> Self {
        let facts = &engines.facts.postgres;
        let mut database = DatabaseConfig {
            host: facts.host.to_str().unwrap().to_owned(),
            port: facts.port,
            user: facts.user.clone(),
            database: facts.database.clone(),
            password_file: Some(facts.password_file.clone()),
        };
        let name = format!("test_{}", uuid::Uuid::now_v7().simple());
        let admin = Store::new(&database, timing.clone(), Limits::default()).unwrap();
        admin.raw(&format!("create database {name}")).await;
        admin.close().await;
        database.database = name;
        let store = Store::new(&database, timing, Limits::default()).unwrap();
        store.migrate().await.unwrap();
        Self { store, database, engines }
    }

    pub fn nats(&self, identity: &Identity) -> cfq_link::NatsConfig {
        self.engines.facts.nats.config(identity)
    }

    pub async fn lead(&self) -> Leadership {
        self.store.take_lead(uuid::Uuid::now_v7()).await.unwrap().unwrap()
    }

    pub async fn submit(&self) -> (TaskId, TaskNumber) {
        match self.store.submit(&new_task(None)).await.unwrap() {
            Submitted::Created { id, number } => (id, number),
            other => panic!("{other:?}"),
        }
    }

    pub async fn join_node(&self) -> BootId {
        let boot = BootId::fresh();
        self.store.node_hello(&node_hello(boot)).await.unwrap().unwrap();
        boot
    }

    pub async fn join_runner(&self) -> BootId {
        let boot = BootId::fresh();
        let hello = RunnerHello { runner: runner(), boot, version: "0.1.0".into() };
        self.store.runner_hello(&hello).await.unwrap().unwrap();
        boot
    }
}

pub fn node() -> NodeId {
    NodeId::new("den").unwrap()
}

pub fn runner() -> RunnerId {
    RunnerId::new("r1").unwrap()
}

pub fn node_hello(boot: BootId) -> NodeHello {
    let model = ModelState {
        model: MODEL.parse().unwrap(),
        residency: Residency::Resident,
        device: "proxy".into(),
        need_bytes: 0,
        context_tokens: 8192,
        kv_tokens_free: 8192,
        kv_tiers: KvTiers::default(),
        running: 0,
        max_sequences: 1,
        prefill_rate: 100.0,
        decode_rate: 10.0,
        load_rate: 0.0,
        tokens_per_byte: 0.3,
    };
    let ledger = Ledger { version: 1, models: vec![model], ..Ledger::default() };
    NodeHello { node: node(), boot, version: "0.1.0".into(), devices: vec![], ledger }
}

pub fn spec() -> TaskSpec {
    serde_json::from_value(serde_json::json!({
        "description": "add a function",
        "repo": "/home/me/project",
        "agents": {"alpha": {"model": MODEL}, "beta": {"model": MODEL}},
        "threshold": 85.0, "max_iterations": 5, "timeout_minutes": 30.0,
    }))
    .unwrap()
}

pub fn new_task(key: Option<&str>) -> NewTask {
    NewTask {
        id: TaskId::fresh(),
        spec: spec(),
        title: "add a function".into(),
        threshold: 85.0,
        max_iterations: 5,
        key: key.map(str::to_owned),
        body_hash: "h".into(),
    }
}

pub fn token_file(folder: &tempfile::TempDir) -> PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let path = folder.path().join("token");
    std::fs::write(&path, "0123456789abcdef").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    path
}
