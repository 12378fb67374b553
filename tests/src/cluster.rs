//! A whole cfq: scheduler, node and runner as processes of the real binary, each with a log of its own, over a NATS server of
//! this cluster's own and a fresh database. Leases and waits run about ten times as fast as shipped.

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

/// Long enough for a loaded two-core machine; a healthy run needs a fraction.
pub const PATIENCE: Duration = Duration::from_secs(90);

pub const TOKEN: &str = "test-token-0123456789";

/// What a test may want otherwise.
#[derive(Clone)]
pub struct Options {
    /// Serve these besides the scripted ones.
    pub models: Vec<ModelId>,
    pub alpha: String,
    pub beta: String,
    pub timing: Timing,
    /// Where models lie; the folder of this machine if absent.
    pub model_dir: Option<PathBuf>,
    pub hub: HubConfig,
    /// (service, failpoint): the service aborts there, once.
    pub failpoint: Option<(String, String)>,
    /// Bytes that the node's models may take.
    pub memory_limit: Option<u64>,
    pub parked_weights: u64,
    pub critic_warm_up: bool,
    /// Bytes of a card in another program for which the node makes way.
    pub yield_at: Option<u64>,
    /// What the node's process finds in its environment besides.
    pub node_environment: Vec<(String, String)>,
    /// A Postgres server of its own, which the test may hurt.
    pub own_postgres: bool,
    /// A second node, `n2`, that serves what `n1` does: the service "neighbour".
    pub neighbour: bool,
}

impl Default for Options {
    fn default() -> Self {
        let mut timing = Timing::default().faster(10);
        timing.request_ms = 2_000;
        // A scripted model that is down is given up soon.
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
            parked_weights: cfq_inference_node::default_parked_weights(),
            critic_warm_up: true,
            yield_at: None,
            node_environment: Vec::new(),
            own_postgres: false,
            neighbour: false,
        }
    }
}

pub struct Cluster {
    pub client: Client,
    pub models: ModelServer,
    pub nats: nats::Server,
    pub database: Database,
    // Dropped after the servers that work in it.
    pub dir: tempfile::TempDir,
    pub options: Options,
    bind: SocketAddr,
    services: Mutex<BTreeMap<String, Child>>,
    /// Bytes of address space that the node gets at its next start.
    address_space: Mutex<Option<u64>>,
}

pub const SERVICES: [&str; 3] = ["scheduler", "node", "runner"];

/// Runs the program to its end as a user of `cluster` would, with folders of its own below `home`.
pub fn cfq(cluster: &Cluster, home: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(tokio::task::block_in_place(binary::cfq));
    command.args(args).current_dir(home).stdin(Stdio::null());
    command.env("CFQ_DATA", home.join("data")).env("CFQ_CONFIG", home.join("config"));
    command.env("CFQ_URL", cluster.client.url()).env("CFQ_TOKEN", TOKEN);
    tokio::task::block_in_place(|| command.output().unwrap())
}

impl Cluster {
    pub async fn start() -> Self {
        Self::with(Options::default()).await
    }

    pub async fn with(options: Options) -> Self {
        let dir = tempfile::Builder::new().prefix("cfq-test-").tempdir().unwrap();
        nats::open_to_all(dir.path());
        let models = ModelServer::start().await;
        for name in ["alpha", "alpha2", "beta"] {
            models.script(name, vec![]);
        }
        let nodes = ["n1", "n2"].map(|name| NodeId::new(name).unwrap());
        let runner = RunnerId::new("r1").unwrap();
        let nats = nats::Server::start(dir.path(), &nodes, &runner).await;
        let database = match options.own_postgres {
            true => Database::with_a_server_of_its_own(dir.path()).await,
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
        cluster.is_ready().await;
        cluster
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn services(&self) -> impl Iterator<Item = &'static str> {
        SERVICES.into_iter().chain(self.options.neighbour.then_some("neighbour"))
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
            limits: cfq_scheduler::Limits::default(),
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
            device: cfq_inference_node::engine::candle::DeviceChoice::Cpu,
            parked_kv: None,
            parked_kv_as: Default::default(),
            parked_weights: self.options.parked_weights,
            critic_warm_up: self.options.critic_warm_up,
            yield_at: self.options.yield_at,
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
        let neighbour =
            cfq_inference_node::Config { node: nodes[1].clone(), nats: self.nats.config("neighbour"), ..node };
        write("neighbour.toml", toml::to_string(&neighbour).unwrap());
        write("runner.toml", toml::to_string(&runner).unwrap());
    }

    pub fn start_service(&self, service: &str) {
        let log = std::fs::OpenOptions::new().create(true).append(true).open(self.log(service)).unwrap();
        let mut command = Command::new(binary::cfq());
        command
            .args(["serve", if service == "neighbour" { "node" } else { service }])
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
        die_with_parent(&mut command);
        let child = command.spawn().unwrap();
        let old = self.services.lock().unwrap().insert(service.to_owned(), child);
        drop(old);
    }

    pub fn log(&self, service: &str) -> PathBuf {
        self.file(&format!("{service}.log"))
    }

    /// SIGKILL, and gone when this returns.
    pub fn kill9(&self, service: &str) {
        let mut services = self.services.lock().unwrap();
        let mut child = services.remove(service).unwrap_or_else(|| panic!("{service} is not running"));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Of the node, from its next start on.
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

    /// True once the armed failpoint was reached; the aborted process is then started again.
    pub async fn failpoint_hit(&self) {
        let (service, name) = self.options.failpoint.clone().unwrap();
        wait::until(&format!("failpoint {name}"), PATIENCE, || async {
            let mut services = self.services.lock().unwrap();
            match services.get_mut(&service).unwrap().try_wait().unwrap() {
                Some(_) => Ok(()),
                None => Err(format!("{service} still runs")),
            }
        })
        .await;
        assert!(self.file("failpoint-hit").exists(), "{service} died elsewhere:\n{}", tail(&self.log(&service)));
        self.start_service(&service);
    }

    pub async fn is_ready(&self) {
        wait::until("an API that is ready", PATIENCE, || async {
            self.client.ready().await.map_err(|e| format!("{e}; {}", tail(&self.log("scheduler"))))
        })
        .await;
        wait::until("all nodes with all their models", PATIENCE, || async {
            let nodes = self.client.nodes().await.map_err(|e| e.to_string())?;
            if nodes.len() < if self.options.neighbour { 2 } else { 1 } {
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

    pub fn model(&self, name: &str) -> ModelId {
        format!("openai:scripted/{name}").parse().unwrap()
    }

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

    /// With a key, through whatever trouble the server is in.
    pub async fn submit_again(&self, spec: &TaskSpec, key: &str) -> cfq_proto::http::SubmitReply {
        wait::until("a submit", PATIENCE, || async {
            self.client.submit(spec, Some(key)).await.map_err(|e| e.to_string())
        })
        .await
    }

    /// Waits until the task's lease was taken from its runner.
    pub async fn lease_swept(&self, task: TaskKey) {
        wait::until("the lease to be swept", PATIENCE, || async {
            let detail = self.client.task(task).await.map_err(|e| e.to_string())?;
            if detail.runner.is_none() { Ok(()) } else { Err(format!("{:?} holds it", detail.runner)) }
        })
        .await;
    }

    /// Waits until a job of the task was lost with its node.
    pub async fn job_lost(&self, task: TaskKey) {
        wait::until("a lost job", PATIENCE, || async {
            let detail = self.client.task(task).await.map_err(|e| e.to_string())?;
            if detail.jobs.iter().any(|j| j.losses > 0) { Ok(()) } else { Err(format!("{:?}", detail.jobs)) }
        })
        .await;
    }

    pub fn key(&self, detail: &TaskDetail) -> TaskKey {
        TaskKey::Id(detail.summary.id)
    }

    /// Waits until nothing happens to the task any more by itself.
    pub async fn rests(&self, task: TaskKey) -> TaskDetail {
        wait::until("the task to rest", PATIENCE, || async {
            let detail = self.client.task(task).await.map_err(|e| e.to_string())?;
            if detail.summary.state.is_resting() { Ok(detail) } else { Err(self.story(&detail)) }
        })
        .await
    }

    pub async fn becomes(&self, task: TaskKey, state: TaskState) -> TaskDetail {
        wait::until(&format!("the task to be {state}"), PATIENCE, || async {
            let detail = self.client.task(task).await.map_err(|e| e.to_string())?;
            if detail.summary.state == state { Ok(detail) } else { Err(self.story(&detail)) }
        })
        .await
    }

    fn story(&self, detail: &TaskDetail) -> String {
        let logs: Vec<String> = self.services().map(|s| format!("--- {s}\n{}", tail(&self.log(s)))).collect();
        format!("{:?} {:?}\njobs {:#?}\n{}", detail.summary, detail.reason, detail.jobs, logs.join("\n"))
    }

    /// Waits until a job of the task runs on a node.
    pub async fn generates(&self, task: TaskKey) {
        wait::until("a running job", PATIENCE, || async {
            let detail = self.client.task(task).await.map_err(|e| e.to_string())?;
            let running = detail.jobs.iter().any(|j| j.state == JobState::Running);
            if running { Ok(()) } else { Err(self.story(&detail)) }
        })
        .await;
    }

    /// Waits until a job of the task has not found a model.
    pub async fn waits_for_a_model(&self, task: TaskKey) {
        wait::until("a job that waits", PATIENCE, || async {
            let detail = self.client.task(task).await.map_err(|e| e.to_string())?;
            let waits = detail.jobs.iter().any(|j| j.state == JobState::Queued);
            if waits { Ok(()) } else { Err(self.story(&detail)) }
        })
        .await;
    }

    pub async fn node_is_idle(&self) {
        wait::until("an idle node", PATIENCE, || async {
            let nodes = self.client.nodes().await.map_err(|e| e.to_string())?;
            let running: u32 = nodes.iter().flat_map(|n| &n.ledger.models).map(|m| m.running).sum();
            if running == 0 && nodes.iter().all(|n| n.running == 0) { Ok(()) } else { Err(format!("{nodes:?}")) }
        })
        .await;
    }

    /// Stops everything in order and checks that nothing crashed that was not killed.
    pub async fn finish(self) {
        let mut services = std::mem::take(&mut *self.services.lock().unwrap());
        for service in ["runner", "neighbour", "node", "scheduler"] {
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
            let said = text.lines().skip(1).chain([""]);
            let meant = |said: &str| said.starts_with("a panic at the armed failpoint");
            let panics = text.lines().zip(said).filter(|(l, said)| l.contains("panicked at") && !meant(said)).count();
            assert_eq!(panics, 0, "{service} panicked:\n{}", tail(&self.log(service)));
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // A failed test leaves by panic: nothing of it may stay behind.
        let mut services = std::mem::take(&mut *self.services.lock().unwrap_or_else(|e| e.into_inner()));
        for child in services.values_mut() {
            drop(child.kill());
            drop(child.wait());
        }
    }
}

/// The child gets SIGKILL when the thread that started it ends, and so when the test run is aborted.
pub fn die_with_parent(command: &mut Command) {
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

/// More than this cannot be mapped: allocations fail as on a machine whose memory is used up.
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

pub fn free_address() -> SocketAddr {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

pub fn tail(path: &Path) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(25)..].join("\n")
}

/// Where the small model is kept between runs.
pub fn model_dir() -> PathBuf {
    crate::postgres::engine_paths().models()
}
