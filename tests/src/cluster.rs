//! A test cluster: scheduler, node and runner as processes of the real binary, each with a separate log, on a dedicated
//! NATS server and a new database. Leases and waits are about a tenth of the defaults.
//!
//! This is one file because it contains the whole life cycle of the fixture, from configuration to shutdown.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use cfq_inference_node::Endpoint;
use cfq_inference_node::models::HubConfig;
use cfq_proto::client::Client;
use cfq_proto::http::{NodeView, TaskDetail};
use cfq_proto::ids::{NodeId, RunnerId, TaskKey};
use cfq_proto::job::JobState;
use cfq_proto::model::ModelId;
use cfq_proto::node::Residency;
use cfq_proto::task::{AgentBinding, AgentBindings, TaskSpec, TaskState};
use cfq_proto::timing::Timing;

use crate::postgres::Database;
use crate::repo::UserRepo;
use crate::scripted::ModelServer;
use crate::{binary, nats, signal, wait};

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
    /// Whether speculative prefill is on: the node computes a critic's prompt while the creator generates.
    pub speculative_prefill: bool,
    /// GPU memory of another program, in bytes, at which the node yields the GPU to it.
    pub yield_bytes: Option<u64>,
    /// Additional environment variables of the node's process.
    pub node_environment: Vec<(String, String)>,
    /// Use a dedicated Postgres server, in which the test may inject faults.
    pub dedicated_postgres: bool,
    /// Run a second node, `n2`, that serves the same models as `n1`: the service `second_node`.
    pub second_node: bool,
}

impl Default for Options {
    fn default() -> Self {
        let mut timing = Timing::default().faster(10);
        timing.request_ms = 2_000;
        // The ceiling is short, so that retries of a call to an unavailable scripted model end soon.
        timing.retry_ceiling_ms = 3_000;
        Self {
            models: Vec::new(),
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
        }
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
}

/// The services of every cluster; `Options::second_node` adds another.
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
        let dir = tempfile::Builder::new().prefix("cfq-test-").tempdir().unwrap();
        nats::make_traversable(dir.path());
        let models = ModelServer::start().await;
        for name in ["alpha", "alpha2", "beta"] {
            models.script(name, vec![]);
        }
        let nodes = ["n1", "n2"].map(|name| NodeId::new(name).unwrap());
        let runner = RunnerId::new("r1").unwrap();
        let nats = nats::Server::start(dir.path(), &nodes, &runner).await;
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
            dir,
        };
        cluster.write_configs(&nodes, &runner);
        for service in cluster.services() {
            cluster.start_service(service);
        }
        cluster.wait_until_ready().await;
        cluster
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn services(&self) -> impl Iterator<Item = &'static str> {
        SERVICES.into_iter().chain(self.options.second_node.then_some("second_node"))
    }

    fn write_configs(&self, nodes: &[NodeId; 2], runner: &RunnerId) {
        std::fs::write(self.file("token"), TOKEN).unwrap();
        std::fs::set_permissions(self.file("token"), std::fs::Permissions::from_mode(0o600)).unwrap();
        let agents = AgentBindings {
            alpha: AgentBinding { model: self.options.alpha.parse().ok(), ..AgentBinding::default() },
            beta: AgentBinding { model: self.options.beta.parse().ok(), ..AgentBinding::default() },
        };
        let scheduler = cfq_scheduler::Config {
            database: self.database.config(),
            nats: self.nats.config("scheduler"),
            http: cfq_scheduler::HttpConfig {
                bind: self.bind,
                token_file: self.file("token"),
                allowed_hosts: Vec::new(),
            },
            defaults: cfq_scheduler::Defaults { agents, threshold: 85.0, max_iterations: 5, timeout_minutes: 30.0 },
            limits: cfq_scheduler::SchedulerLimits::default(),
            timing: self.options.timing.clone(),
        };
        let mut models: Vec<ModelId> =
            ["alpha", "alpha2", "beta"].iter().map(|m| self.model(m)).chain(self.options.models.clone()).collect();
        models.sort();
        models.dedup();
        let endpoint = Endpoint { url: self.models.url(), key: None, max_sequences: 4 };
        let node = cfq_inference_node::Config {
            node: nodes[0].clone(),
            nats: self.nats.config("node"),
            models,
            endpoints: BTreeMap::from([("scripted".to_owned(), endpoint)]),
            model_dir: self.options.model_dir.clone().unwrap_or_else(model_dir),
            model_quota: None,
            threads: None,
            memory_limit: self.options.memory_limit,
            device: cfq_inference_node::gpu::DeviceChoice::Cpu,
            kv_offload_bytes: None,
            kv_offload_format: Default::default(),
            weight_cache_bytes: self.options.weight_cache_bytes,
            speculative_prefill: self.options.speculative_prefill,
            yield_bytes: self.options.yield_bytes,
            yield_ignores: cfq_inference_node::default_yield_ignores(),
            max_sequences: 4,
            timing: self.options.timing.clone(),
            hub: self.options.hub.clone(),
        };
        let runner = cfq_agent_runner::Config {
            runner: runner.clone(),
            nats: self.nats.config("runner"),
            data_dir: self.file("runner-data"),
            concurrency: 2,
            timing: self.options.timing.clone(),
        };
        let write = |name: &str, text: String| std::fs::write(self.file(name), text).unwrap();
        write("scheduler.toml", toml::to_string(&scheduler).unwrap());
        write("node.toml", toml::to_string(&node).unwrap());
        let second_node =
            cfq_inference_node::Config { node: nodes[1].clone(), nats: self.nats.config("second_node"), ..node };
        write("second_node.toml", toml::to_string(&second_node).unwrap());
        write("runner.toml", toml::to_string(&runner).unwrap());
    }

    /// Starts a service's process; its log is appended to.
    pub fn start_service(&self, service: &str) {
        let log = std::fs::OpenOptions::new().create(true).append(true).open(self.log(service)).unwrap();
        let mut command = Command::new(binary::cfq());
        command
            .args(["serve", if service == "second_node" { "node" } else { service }])
            .arg(self.file(&format!("{service}.toml")))
            .env("CFQ_LOG", "info,cfq=debug")
            .env("RUST_BACKTRACE", "1")
            .envs(cfq_inference_node::thread_environment(None))
            .env_remove("HF_ENDPOINT")
            .env_remove("HF_TOKEN")
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .process_group(0);
        if let Some((owner, name)) = &self.options.failpoint
            && owner == service
        {
            command.env("CFQ_FAILPOINT", name).env("CFQ_FAILPOINT_ONCE", self.file("failpoint-hit"));
        }
        if service == "node" {
            if let Some(bytes) = *self.address_space.lock().unwrap() {
                limit_address_space(&mut command, bytes);
            }
            command.envs(self.options.node_environment.iter().map(|(name, value)| (name, value)));
        }
        kill_with_parent(&mut command);
        let child = command.spawn().unwrap();
        let old = self.services.lock().unwrap().insert(service.to_owned(), child);
        drop(old);
    }

    /// Path of a service's log file.
    pub fn log(&self, service: &str) -> PathBuf {
        self.file(&format!("{service}.log"))
    }

    /// Sends SIGKILL to a service's process and waits until the process has ended.
    pub fn kill9(&self, service: &str) {
        let mut services = self.services.lock().unwrap();
        let mut child = services.remove(service).unwrap_or_else(|| panic!("{service} is not running"));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Limits the node's address space to `bytes`, from its next start on.
    pub fn limit_address_space(&self, bytes: u64) {
        *self.address_space.lock().unwrap() = Some(bytes);
    }

    pub fn pid(&self, service: &str) -> u32 {
        self.services.lock().unwrap()[service].id()
    }

    pub fn signal(&self, service: &str, signal: i32) {
        let services = self.services.lock().unwrap();
        signal::send(services[service].id(), signal);
    }

    /// Waits until the configured failpoint has aborted its service, then starts the service again.
    pub async fn restart_after_failpoint(&self) {
        let (service, name) = self.options.failpoint.clone().unwrap();
        wait::until(&format!("failpoint {name}"), WAIT_LIMIT, || async {
            let mut services = self.services.lock().unwrap();
            match services.get_mut(&service).unwrap().try_wait().unwrap() {
                Some(_) => Ok(()),
                None => Err(format!("{service} is still running")),
            }
        })
        .await;
        assert!(self.file("failpoint-hit").exists(), "{service} ended somewhere else:\n{}", tail(&self.log(&service)));
        self.start_service(&service);
    }

    /// Waits until the API is ready and every node has loaded all its models or found them on disk.
    pub async fn wait_until_ready(&self) {
        wait::until("the API to be ready", WAIT_LIMIT, || async {
            self.client.ready().await.map_err(|e| format!("{e}; {}", tail(&self.log("scheduler"))))
        })
        .await;
        wait::until("all nodes and their models", WAIT_LIMIT, || async {
            let nodes = self.client.nodes().await.map_err(|e| e.to_string())?;
            if nodes.len() < if self.options.second_node { 2 } else { 1 } {
                return Err(format!("{} nodes; {}", nodes.len(), tail(&self.log("node"))));
            }
            let settled = |residency: &Residency| matches!(residency, Residency::Resident | Residency::Available);
            let unready = |n: &&NodeView| {
                !n.alive || n.ledger.models.is_empty() || n.ledger.models.iter().any(|m| !settled(&m.residency))
            };
            nodes.iter().find(unready).map_or(Ok(()), |node| Err(format!("{node:?}")))
        })
        .await;
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

    /// Waits until the scheduler has swept the task's lease, that is, taken it from its runner.
    pub async fn wait_until_lease_swept(&self, task: TaskKey) {
        wait::until("the lease to be swept", WAIT_LIMIT, || async {
            let detail = self.client.task(task).await.map_err(|e| e.to_string())?;
            if detail.runner.is_none() { Ok(()) } else { Err(format!("{:?} holds it", detail.runner)) }
        })
        .await;
    }

    /// Waits until a job of the task was lost with its node.
    pub async fn wait_until_job_lost(&self, task: TaskKey) {
        wait::until("a lost job", WAIT_LIMIT, || async {
            let detail = self.client.task(task).await.map_err(|e| e.to_string())?;
            if detail.jobs.iter().any(|j| j.losses > 0) { Ok(()) } else { Err(format!("{:?}", detail.jobs)) }
        })
        .await;
    }

    /// The task's id as a key for the client.
    pub fn key(&self, detail: &TaskDetail) -> TaskKey {
        TaskKey::Id(detail.summary.id)
    }

    /// Waits until the task is in a terminal state or waits for a human.
    pub async fn wait_until_resting(&self, task: TaskKey) -> TaskDetail {
        wait::until("the task to rest", WAIT_LIMIT, || async {
            let detail = self.client.task(task).await.map_err(|e| e.to_string())?;
            if detail.summary.state.is_resting() { Ok(detail) } else { Err(self.diagnostics(&detail)) }
        })
        .await
    }

    /// Waits until the task is in the given state.
    pub async fn wait_for_state(&self, task: TaskKey, state: TaskState) -> TaskDetail {
        wait::until(&format!("the task to be {state}"), WAIT_LIMIT, || async {
            let detail = self.client.task(task).await.map_err(|e| e.to_string())?;
            if detail.summary.state == state { Ok(detail) } else { Err(self.diagnostics(&detail)) }
        })
        .await
    }

    fn diagnostics(&self, detail: &TaskDetail) -> String {
        let logs: Vec<String> = self.services().map(|s| format!("--- {s}\n{}", tail(&self.log(s)))).collect();
        format!("{:?} {:?}\njobs {:#?}\n{}", detail.summary, detail.reason, detail.jobs, logs.join("\n"))
    }

    /// Waits until a job of the task runs on a node.
    pub async fn wait_until_generating(&self, task: TaskKey) {
        wait::until("a running job", WAIT_LIMIT, || async {
            let detail = self.client.task(task).await.map_err(|e| e.to_string())?;
            let running = detail.jobs.iter().any(|j| j.state == JobState::Running);
            if running { Ok(()) } else { Err(self.diagnostics(&detail)) }
        })
        .await;
    }

    /// Waits until a job of the task is queued.
    pub async fn wait_until_queued(&self, task: TaskKey) {
        wait::until("a queued job", WAIT_LIMIT, || async {
            let detail = self.client.task(task).await.map_err(|e| e.to_string())?;
            let queued = detail.jobs.iter().any(|j| j.state == JobState::Queued);
            if queued { Ok(()) } else { Err(self.diagnostics(&detail)) }
        })
        .await;
    }

    /// Waits until no node runs a job and no model runs a sequence.
    pub async fn wait_until_nodes_idle(&self) {
        wait::until("idle nodes", WAIT_LIMIT, || async {
            let nodes = self.client.nodes().await.map_err(|e| e.to_string())?;
            let running: u32 = nodes.iter().flat_map(|n| &n.ledger.models).map(|m| m.running).sum();
            if running == 0 && nodes.iter().all(|n| n.running == 0) { Ok(()) } else { Err(format!("{nodes:?}")) }
        })
        .await;
    }

    /// Stops all services in order, and asserts that each exits with success and that none panicked, except at a
    /// failpoint that the test configured.
    pub async fn finish(self) {
        let mut services = std::mem::take(&mut *self.services.lock().unwrap());
        for service in ["runner", "second_node", "node", "scheduler"] {
            let Some(mut child) = services.remove(service) else { continue };
            signal::send(child.id(), libc::SIGTERM);
            let status = wait::until(&format!("{service} to stop"), Duration::from_secs(20), || {
                let done = child.try_wait().unwrap();
                async move { done.ok_or_else(|| "still running".to_owned()) }
            })
            .await;
            assert!(status.success(), "{service} ended with {status}:\n{}", tail(&self.log(service)));
        }
        for service in self.services() {
            let text = std::fs::read_to_string(self.log(service)).unwrap_or_default();
            // The panic's message is on the line after its location.
            let messages = text.lines().skip(1).chain([""]);
            let armed = |message: &str| message.starts_with("a panic at the armed failpoint");
            let panics = text.lines().zip(messages).filter(|(l, m)| l.contains("panicked at") && !armed(m)).count();
            assert_eq!(panics, 0, "{service} panicked:\n{}", tail(&self.log(service)));
        }
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

/// Makes the kernel kill the child when the thread that started it ends, so that it also ends when the test run is
/// aborted.
pub fn kill_with_parent(command: &mut Command) {
    // SAFETY: prctl is async-signal-safe and touches nothing of the parent.
    #[allow(unsafe_code)]
    unsafe {
        command.pre_exec(|| {
            #[cfg(target_os = "linux")]
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            Ok(())
        });
    }
}

/// Limits the child's address space: beyond it, allocations fail as on a machine without free memory.
fn limit_address_space(command: &mut Command, bytes: u64) {
    // SAFETY: setrlimit is async-signal-safe and touches nothing of the parent.
    #[allow(unsafe_code)]
    unsafe {
        command.pre_exec(move || {
            let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
            match libc::setrlimit(libc::RLIMIT_AS, &limit) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        });
    }
}

/// Returns a loopback address with a port that is currently free.
pub fn free_address() -> SocketAddr {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// The last 25 lines of a file.
pub fn tail(path: &Path) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(25)..].join("\n")
}

/// Path of the model folder in which the small model is kept between test runs.
pub fn model_dir() -> PathBuf {
    crate::postgres::user_paths().models()
}
