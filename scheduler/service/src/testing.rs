//! Test fixture of this crate. A private Postgres and NATS are started by the first test that needs them, shared by all
//! tests that run at the same time, and stopped after the last of them. Each test has its own database, a copy of one
//! whose schema is migrated: a copy takes a fraction of the time of all migrations.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};

use cfq_deploy::stack::StackAddresses;
use cfq_deploy::{Paths, Stack, StackOptions};
use cfq_proto::http::NodeView;
use cfq_proto::ids::{ApiTokenId, BootId, NodeId, RunnerId, TaskId, TaskNumber};
use cfq_proto::messages::{NodeRegistration, RunnerRegistration};
use cfq_proto::node::{KvTiers, Ledger, ModelState, Residency};
use cfq_proto::subject::Identity;
use cfq_proto::task::TaskSpec;
use cfq_proto::timing::Timing;
use tokio::sync::{OnceCell, oneshot};

use crate::config::{DatabaseConfig, SchedulerLimits};
use crate::store::{Leadership, NewTask, Store, Submitted};

pub const MODEL: &str = "openai:box/m";

/// The running Postgres and NATS; both are stopped on drop.
struct TestServices {
    addresses: StackAddresses,
    /// Name of the migrated database.
    template: OnceCell<String>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Drop for TestServices {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

fn shared_services() -> Arc<TestServices> {
    static SHARED: Mutex<Weak<TestServices>> = Mutex::new(Weak::new());
    let mut shared = SHARED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some(services) = shared.upgrade() {
        return services;
    }
    let services = Arc::new(start_services());
    *shared = Arc::downgrade(&services);
    services
}

fn start_services() -> TestServices {
    let (ready, started) = std::sync::mpsc::sync_channel(1);
    let (stop, stopped) = oneshot::channel();
    // The kernel kills Postgres and NATS when the thread that spawned them ends, so this thread must run as long as
    // they do.
    let thread = std::thread::spawn(move || {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o711)).unwrap();
        let cache = Paths::from_environment().unwrap().cache;
        let paths = Paths { data: folder.path().join("data"), cache, config: folder.path().join("config") };
        let identities = vec![Identity::Node(node()), Identity::Runner(runner())];
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        runtime.block_on(async {
            // A machine with many cores runs many tests at a time.
            let options = StackOptions { identities, postgres_connections: 2_000, ..StackOptions::default() };
            let stack = Stack::start(&paths, options).await.unwrap();
            ready.send(stack.addresses().clone()).unwrap();
            let _dropped = stopped.await;
            stack.stop().await.unwrap();
        });
    });
    let addresses = started.recv().unwrap();
    TestServices { addresses, template: OnceCell::new(), stop: Some(stop), thread: Some(thread) }
}

impl TestServices {
    fn admin(&self) -> DatabaseConfig {
        let address = &self.addresses.postgres;
        DatabaseConfig {
            host: address.host.to_str().unwrap().to_owned(),
            port: address.port,
            user: address.user.clone(),
            database: address.database.clone(),
            password_file: Some(address.password_file.clone()),
        }
    }

    /// Creates a database whose schema is migrated. No scheduler was started on it, so it counts as new.
    async fn create_migrated_database(&self) -> DatabaseConfig {
        let admin = self.admin();
        let template = async || {
            let database = create_database(&admin, "").await;
            let template = DatabaseConfig { database, ..admin.clone() };
            let store = Store::new(&template, Timing::default(), SchedulerLimits::default()).unwrap();
            store.apply_migrations().await.unwrap();
            store.close().await;
            template.database
        };
        let template = self.template.get_or_init(template).await;
        DatabaseConfig { database: create_database(&admin, &format!("template {template}")).await, ..admin }
    }
}

/// One test's database, and the services that it uses.
pub struct TestEnv {
    pub store: Store,
    pub database: DatabaseConfig,
    services: Arc<TestServices>,
}

impl TestEnv {
    pub async fn new() -> Self {
        Self::over(tokio::task::spawn_blocking(shared_services).await.unwrap(), Timing::default()).await
    }

    /// Starts a Postgres and NATS for this test only. Tests that run a scheduler need this, because schedulers
    /// connected to the same NATS share the incoming requests.
    pub async fn alone(timing: Timing) -> Self {
        Self::over(Arc::new(tokio::task::spawn_blocking(start_services).await.unwrap()), timing).await
    }

    async fn over(services: Arc<TestServices>, timing: Timing) -> Self {
        let database = services.create_migrated_database().await;
        let store = Store::new(&database, timing, SchedulerLimits::default()).unwrap();
        store.migrate().await.unwrap();
        Self { store, database, services }
    }

    /// The database, and a copy of it on which a scheduler was started, like one that was restored from a backup.
    pub async fn copied(self) -> (Self, Self) {
        let Self { store, database, services } = self;
        let timing = store.timing().clone();
        store.close().await;
        let copy = create_database(&services.admin(), &format!("template {}", database.database)).await;
        let copy = DatabaseConfig { database: copy, ..database.clone() };
        let open = |database: DatabaseConfig| {
            let store = Store::new(&database, timing.clone(), SchedulerLimits::default()).unwrap();
            Self { store, database, services: services.clone() }
        };
        let (original, copy) = (open(database), open(copy));
        copy.store.migrate().await.unwrap();
        (original, copy)
    }

    pub fn nats(&self, identity: &Identity) -> cfq_link::NatsConfig {
        self.services.addresses.nats.config(identity)
    }

    pub async fn acquire_leadership(&self) -> Leadership {
        self.store.acquire_leadership(uuid::Uuid::now_v7(), true).await.unwrap().unwrap()
    }

    pub async fn submit(&self) -> (TaskId, TaskNumber) {
        match self.store.submit(&new_task(None)).await.unwrap() {
            Submitted::Created { id, number, .. } => (id, number),
            other => panic!("{other:?}"),
        }
    }

    pub async fn join_node(&self) -> BootId {
        let boot = BootId::fresh();
        self.store.register_node(&node_registration(boot)).await.unwrap().unwrap();
        boot
    }

    pub async fn join_runner(&self) -> BootId {
        let boot = BootId::fresh();
        self.store.register_runner(&runner_registration(boot)).await.unwrap().unwrap();
        boot
    }
}

/// Creates a database with a new name, which is returned.
async fn create_database(admin: &DatabaseConfig, options: &str) -> String {
    let name = format!("test_{}", uuid::Uuid::now_v7().simple());
    let admin = Store::new(admin, Timing::default(), SchedulerLimits::default()).unwrap();
    admin.raw(&format!("create database {name} {options}")).await;
    admin.close().await;
    name
}

pub fn node() -> NodeId {
    NodeId::new("den").unwrap()
}

pub fn runner() -> RunnerId {
    RunnerId::new("r1").unwrap()
}

/// Registration of a node process that holds the same lock in every boot, as after a restart on its machine.
pub fn node_registration(boot: BootId) -> NodeRegistration {
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
    NodeRegistration {
        node: node(),
        boot,
        version: "0.1.0".into(),
        devices: vec![],
        ledger,
        machine_boot: None,
        credentials_lock: Some("8:1".into()),
        receives_pushed_orders: true,
    }
}

pub fn runner_registration(boot: BootId) -> RunnerRegistration {
    RunnerRegistration {
        runner: runner(),
        boot,
        version: "0.1.0".into(),
        machine_boot: None,
        credentials_lock: Some("8:2".into()),
        slots: Some(1),
    }
}

/// A node as the API shows it, with one model or none.
pub fn node_view(name: &str, alive: bool, model: Option<&str>) -> NodeView {
    let NodeRegistration { boot, version, devices, mut ledger, .. } = node_registration(BootId::fresh());
    match model {
        Some(model) => ledger.models[0].model = model.parse().unwrap(),
        None => ledger.models.clear(),
    }
    NodeView {
        id: NodeId::new(name).unwrap(),
        boot,
        version,
        alive,
        cordoned: false,
        devices,
        ledger,
        last_seen: 0.0,
        running: 0,
        placed: 0,
    }
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
        token: ApiTokenId::OWNER,
        spec: spec(),
        agents_without_model: Vec::new(),
        title: "add a function".into(),
        threshold: 85.0,
        max_iterations: 5,
        key: key.map(str::to_owned),
        body_hash: "h".into(),
    }
}

pub fn token_file(folder: &tempfile::TempDir) -> PathBuf {
    let path = folder.path().join("token");
    replace_token(&path, "0123456789abcdef");
    path
}

/// Replaces the token file atomically, as `cfq token rotate` does.
pub fn replace_token(path: &Path, token: &str) {
    cfq_deploy::files::write_private(path, token.as_bytes(), None).unwrap();
}
