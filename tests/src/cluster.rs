//! A test cluster: scheduler, node and runner as processes of the real binary, each with a separate log, on a dedicated
//! NATS server and a new database. Leases are about a third of the defaults, waits about a tenth.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{LazyLock, Mutex};
use std::time::Duration;

use cfq_agent_runner::checks::Registry;
use cfq_inference_node::CommandConfig;
use cfq_inference_node::models::HubConfig;
use cfq_proto::client::Client;
use cfq_proto::http::TaskDetail;
use cfq_proto::ids::{NodeId, RunnerId, TaskKey};
use cfq_proto::model::ModelId;
use cfq_proto::task::TaskSpec;
use cfq_proto::timing::Timing;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::postgres::Database;
use crate::repo::UserRepo;
use crate::scripted::ModelServer;
use crate::{binary, nats, wait};

mod config;
mod diagnostics;
mod processes;
mod waits;

pub use diagnostics::tail;
pub use processes::{free_address, kill_with_parent};

/// Maximum duration of a wait for an expected state. Long enough for a loaded two-core machine; normally the state is
/// reached in a fraction of this time.
pub const WAIT_LIMIT: Duration = Duration::from_secs(90);

/// The API token of every test cluster.
pub const TOKEN: &str = "test-token-0123456789";

/// Options of a test cluster.
#[derive(Clone)]
pub struct Options {
    /// Models that the node serves in addition to the scripted ones.
    pub models: Vec<ModelId>,
    /// Context length of the models on the scripted server, in tokens.
    pub context_tokens: Option<u32>,
    /// Programs that answer prompts.
    pub commands: BTreeMap<String, CommandConfig>,
    /// Default models of the two agents.
    pub alpha: String,
    pub beta: String,
    pub timing: Timing,
    /// Model folder; if `None`, the one that all tests on this machine share.
    pub model_dir: Option<PathBuf>,
    pub hub: HubConfig,
    /// A service and a failpoint: the service aborts when it reaches the failpoint, once.
    pub failpoint: Option<(String, String)>,
    /// The node's memory limit for models, in bytes.
    pub memory_limit: Option<u64>,
    /// Size of the node's weight cache, in bytes.
    pub weight_cache_bytes: u64,
    /// Whether speculative prefill is on: the node prefills the critic's prompt while the creator still generates.
    pub speculative_prefill: bool,
    /// GPU memory of another program, in bytes, at which the node yields the GPU to it.
    pub yield_bytes: Option<u64>,
    /// Additional environment variables of the node's process.
    pub node_environment: Vec<(String, String)>,
    /// Whether the cluster has a dedicated Postgres server, in which the test may inject faults.
    pub dedicated_postgres: bool,
    /// Whether a second node, `n2`, serves the same models as `n1`. Its service is named `second_node`.
    pub second_node: bool,
    /// Whether a second runner, `r2`, with a data folder of its own drives tasks. Its service is named `second_runner`.
    pub second_runner: bool,
    /// Number of tasks that each runner drives at the same time.
    pub runner_slots: usize,
    /// Hosts that preparations of checks may reach.
    pub registries: Vec<Registry>,
    /// Whether a second scheduler stands by. Its service is named `second_scheduler`.
    pub second_scheduler: bool,
}

impl Default for Options {
    fn default() -> Self {
        let mut timing = Timing::default().faster(10);
        timing.request_timeout_ms = 2_000;
        // Long enough for a machine on which other programs use all cores: a heartbeat passes through four processes.
        (timing.lease_ttl_ms, timing.lease_margin_ms, timing.heartbeat_ms) = (2_000, 300, 400);
        timing.accept_timeout_ms = 1_000;
        // The ceiling is short, so that retries of a call to an unavailable scripted model end soon.
        timing.retry_ceiling_ms = 3_000;
        Self {
            models: Vec::new(),
            context_tokens: None,
            commands: BTreeMap::new(),
            alpha: "openai:scripted/alpha".into(),
            beta: "openai:scripted/beta".into(),
            timing,
            model_dir: None,
            hub: HubConfig::default(),
            failpoint: None,
            memory_limit: None,
            weight_cache_bytes: cfq_inference_node::default_weight_cache_bytes(),
            speculative_prefill: true,
            yield_bytes: None,
            node_environment: Vec::new(),
            dedicated_postgres: false,
            second_node: false,
            second_runner: false,
            runner_slots: 2,
            registries: Vec::new(),
            second_scheduler: false,
        }
    }
}

impl Options {
    /// Gives the leader the product's times, so that it keeps its term while other programs use all cores. For tests of
    /// what only the leader's memory contains, such as the prompts that nodes have cached.
    pub fn with_leader_times_of_the_product(mut self) -> Self {
        let product = Timing::default();
        (self.timing.leader_renewal_ms, self.timing.leader_ttl_ms) = (product.leader_renewal_ms, product.leader_ttl_ms);
        self
    }
}

/// A running cluster; its processes are killed on drop.
pub struct Cluster {
    pub client: Client,
    pub models: ModelServer,
    pub nats: nats::Server,
    pub database: Database,
    // Declared after the servers that use this folder, so that it is dropped after them.
    pub dir: tempfile::TempDir,
    pub options: Options,
    bind: SocketAddr,
    services: Mutex<BTreeMap<String, Child>>,
    /// Limit of the node's address space, in bytes; it applies from the node's next start.
    address_space: Mutex<Option<u64>>,
    _processor: Option<SemaphorePermit<'static>>,
}

/// Clusters whose nodes run models themselves need a processor core each. As many run at a time as there are cores, so
/// that more tests than cores can run side by side: the others wait most of the time.
static PROCESSORS: LazyLock<Semaphore> =
    LazyLock::new(|| Semaphore::new(std::thread::available_parallelism().map_or(1, |cores| cores.get())));

/// The services of every cluster; `Options::second_node` and its neighbours add others.
pub const SERVICES: [&str; 3] = ["scheduler", "node", "runner"];

/// Runs `cfq ARGS` until it exits, as a client of `cluster`, with its data and configuration folders below `home`.
pub fn cfq(cluster: &Cluster, home: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(tokio::task::block_in_place(binary::cfq));
    command.args(args).current_dir(home).stdin(Stdio::null());
    command.env("CFQ_DATA", home.join("data")).env("CFQ_CONFIG", home.join("config"));
    command.env("CFQ_URL", cluster.client.url()).env("CFQ_TOKEN", TOKEN);
    tokio::task::block_in_place(|| command.output().unwrap())
}

impl Cluster {
    /// Starts a cluster with the default options and waits until it is ready.
    pub async fn start() -> Self {
        Self::start_with(Options::default()).await
    }

    /// Starts a cluster and waits until it is ready.
    pub async fn start_with(options: Options) -> Self {
        let _processor = match options.models.is_empty() {
            true => None,
            false => Some(PROCESSORS.acquire().await.unwrap()),
        };
        let dir = tempfile::Builder::new().prefix("cfq-test-").tempdir().unwrap();
        nats::make_traversable(dir.path());
        let models = ModelServer::start().await;
        for name in ["alpha", "alpha2", "beta"] {
            models.script(name, vec![]);
        }
        let nodes = ["n1", "n2"].map(|name| NodeId::new(name).unwrap());
        let runners = ["r1", "r2"].map(|name| RunnerId::new(name).unwrap());
        let nats = nats::Server::start(dir.path(), &nodes, &runners).await;
        let database = match options.dedicated_postgres {
            true => Database::on_dedicated_server(dir.path()).await,
            false => Database::fresh().await,
        };
        let bind = free_address();
        let http = cfq_link::outbound::api_client().unwrap();
        let client = Client::new(http, &format!("http://{bind}"), TOKEN);
        let cluster = Self {
            client,
            models,
            nats,
            database,
            bind,
            options,
            services: Mutex::default(),
            address_space: Mutex::default(),
            _processor,
            dir,
        };
        cluster.write_configs(&nodes, &runners);
        for service in cluster.services() {
            cluster.start_service(service);
        }
        cluster.wait_until_ready().await;
        cluster.wait_until_runners_alive().await;
        cluster
    }

    /// Data folder of a runner's service.
    pub fn runner_data(&self, service: &str) -> PathBuf {
        self.file(&format!("{service}-data"))
    }

    /// Folder of the server policies; it does not exist at first.
    pub fn server_policies_folder(&self) -> PathBuf {
        self.file("policies")
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn services(&self) -> impl Iterator<Item = &'static str> {
        let second = [
            self.options.second_node.then_some("second_node"),
            self.options.second_runner.then_some("second_runner"),
            self.options.second_scheduler.then_some("second_scheduler"),
        ];
        SERVICES.into_iter().chain(second.into_iter().flatten())
    }

    /// Id of a scripted model.
    pub fn model(&self, name: &str) -> ModelId {
        format!("openai:scripted/{name}").parse().unwrap()
    }

    /// Specification of a small task on the user's repository.
    pub fn spec(&self, repo: &UserRepo) -> TaskSpec {
        serde_json::from_value(serde_json::json!({
            "description": "Write a Python function add(a, b) in add.py that returns the sum of two numbers.",
            "language": "python",
            "repo": repo.path(),
            "base": repo.fingerprint().commit,
        }))
        .unwrap()
    }

    pub async fn submit(&self, spec: &TaskSpec) -> TaskKey {
        TaskKey::Id(self.client.submit(spec, None).await.unwrap().id)
    }

    /// Submits a task with an idempotency key, and retries until the server accepts it.
    pub async fn submit_with_retries(&self, spec: &TaskSpec, key: &str) -> cfq_proto::http::SubmitReply {
        wait::until("a submit to be accepted", WAIT_LIMIT, || async {
            self.client.submit(spec, Some(key)).await.map_err(|e| e.to_string())
        })
        .await
    }

    /// The task's id as a key for the client.
    pub fn key(&self, detail: &TaskDetail) -> TaskKey {
        TaskKey::Id(detail.summary.id)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // Also runs when a failed test unwinds: no process may be left running.
        let mut services = std::mem::take(&mut *self.services.lock().unwrap_or_else(|e| e.into_inner()));
        for child in services.values_mut() {
            drop(child.kill());
            drop(child.wait());
        }
    }
}

/// Path of the model folder in which the small model is kept between test runs.
pub fn model_dir() -> PathBuf {
    crate::postgres::user_paths().models()
}
