//! A server that other machines join, and requests to it.

use std::path::PathBuf;
use std::process::Output;

use cfq_proto::client::Client;
use cfq_proto::http::{JobSummary, MachineView};
use cfq_proto::ids::TaskKey;
use cfq_proto::job::JobState;
use cfq_proto::task::{Agent, TaskSpec, TaskState};
use cfq_tests::cfq_up::{Home, Up};
use cfq_tests::cluster::{WAIT_LIMIT, free_address};
use cfq_tests::machines::Network;
use cfq_tests::repo::UserRepo;
use cfq_tests::wait;

/// A server that other machines can reach.
pub struct Server {
    pub home: Home,
    pub up: Up,
    pub client: Client,
}

impl Server {
    /// On loopback, with ports of its own.
    pub async fn on_loopback() -> Self {
        let home = Home::new().await;
        append_config(&home, &format!("[server]\nnats_port = {}\n", free_address().port()));
        let bind = free_address().to_string();
        let up = Up::start_with(
            &home,
            None,
            &home.path("data"),
            home.path("data"),
            "up.log",
            &["up", "--lan", "--bind", &bind],
        );
        let client = up.local_client().await;
        Self { home, up, client }
    }

    /// On a machine of a network, with the default ports.
    pub async fn on_machine(network: &Network, name: &str) -> Self {
        let home = Home::with_models(network.models.clone());
        append_config(&home, "");
        let data = home.path("data");
        let up = Up::start_with(&home, Some(network.cfq(name)), &data, data.clone(), "up.log", &["up", "--lan"]);
        let client = up.local_client().await;
        Self { home, up, client }
    }

    /// Arguments of the command that `cfq token create` prints.
    pub async fn new_command(&self, name: Option<&str>) -> Vec<String> {
        let mut args = vec!["token", "create"];
        args.extend(name.iter().flat_map(|name| ["--name", name]));
        let output = self.run_server_command(&args);
        assert!(output.status.success(), "{output:?}");
        let line = String::from_utf8(output.stdout).unwrap();
        line.trim().strip_prefix("cfq ").unwrap().split(' ').map(str::to_owned).collect()
    }

    pub fn machine_data(&self, name: &str) -> PathBuf {
        self.home.path(name)
    }

    /// Starts `cfq join` with these arguments for the machine `name`.
    pub fn start_machine(&self, network: Option<&Network>, name: &str, args: &[String]) -> Up {
        let data = self.machine_data(name);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let through = network.map(|network| network.cfq(name));
        Up::start_with(&self.home, through, &data, data.clone(), &format!("{name}.log"), &args)
    }

    pub fn run_machine(&self, network: Option<&Network>, name: &str, args: &[String]) -> Output {
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let through = network.map(|network| network.cfq(name));
        let mut command = self.home.cfq(through, &self.machine_data(name), &args);
        tokio::task::block_in_place(|| command.output().unwrap())
    }

    pub async fn machine(&self, name: &str) -> Option<MachineView> {
        let machines = self.client.machines().await.unwrap();
        machines.into_iter().find(|machine| machine.name.as_str() == name)
    }

    pub async fn wait_until_alive(&self, nodes: usize) {
        wait::until("all nodes to be alive", WAIT_LIMIT, || async {
            let all = self.client.nodes().await.map_err(|e| e.to_string())?;
            let alive = all.iter().filter(|node| node.alive && !node.ledger.models.is_empty()).count();
            if alive == nodes { Ok(()) } else { Err(format!("{alive} of {nodes}: {all:?}")) }
        })
        .await;
    }

    pub async fn submit(&self, repo: &UserRepo) -> TaskKey {
        let spec: TaskSpec = serde_json::from_value(serde_json::json!({
            "description": "Write a Python function add(a, b) in add.py that returns the sum of two numbers.",
            "language": "python",
            "repo": repo.path(),
            "base": repo.fingerprint().commit,
        }))
        .unwrap();
        TaskKey::Id(self.client.submit(&spec, None).await.unwrap().id)
    }

    /// The creator's job of each task.
    pub async fn creator_jobs(&self, tasks: &[TaskKey]) -> Vec<JobSummary> {
        let mut jobs = Vec::new();
        for task in tasks {
            let detail = self.client.task(*task).await.unwrap();
            jobs.extend(detail.jobs.into_iter().filter(|job| job.role == Agent::Alpha));
        }
        jobs
    }

    /// Waits until the creator's jobs of all tasks run, and returns them.
    pub async fn wait_until_running(&self, tasks: &[TaskKey]) -> Vec<JobSummary> {
        wait::until("all tasks to generate", WAIT_LIMIT, || async {
            let jobs = self.creator_jobs(tasks).await;
            let running = jobs.iter().filter(|job| job.state == JobState::Running).count();
            if running == tasks.len() { Ok(jobs) } else { Err(format!("{jobs:?}")) }
        })
        .await
    }

    /// Runs a task whose calls only this machine can take.
    pub async fn run_one_task_on(&self, machine: &str) {
        self.cordon_others(machine, true).await;
        let repo = UserRepo::with_uncommitted_changes();
        let task = self.submit(&repo).await;
        self.wait_until_merged(&[task]).await;
        self.cordon_others(machine, false).await;
    }

    /// Cordons all machines but this one, or ends this.
    pub async fn cordon_others(&self, machine: &str, cordon: bool) {
        for node in self.client.nodes().await.unwrap() {
            if node.id.as_str() != machine {
                self.client.cordon_node(&node.id, cordon).await.unwrap();
            }
        }
    }

    /// Waits until all tasks are merged.
    pub async fn wait_until_merged(&self, tasks: &[TaskKey]) {
        for task in tasks {
            wait::until("a task to be merged", WAIT_LIMIT, || async {
                let detail = self.client.task(*task).await.map_err(|e| e.to_string())?;
                match detail.summary.state {
                    TaskState::Merged => Ok(()),
                    state => Err(format!("{state}: {} {:?}", detail.reason, detail.jobs)),
                }
            })
            .await;
        }
    }

    pub fn run_server_command(&self, args: &[&str]) -> Output {
        let mut command = self.home.cfq(None, &self.home.path("data"), args);
        tokio::task::block_in_place(|| command.output().unwrap())
    }

    /// Name of the server's own node.
    pub async fn own_name(&self) -> String {
        self.client.nodes().await.unwrap()[0].id.to_string()
    }

    /// Port of NATS, from its configuration.
    pub fn nats_port(&self) -> String {
        std::fs::read_to_string(self.home.path("data/nats/port")).unwrap()
    }
}

fn append_config(home: &Home, text: &str) {
    let path = home.path("cfq.toml");
    let config = std::fs::read_to_string(&path).unwrap();
    std::fs::write(path, format!("{config}{text}[runner]\nconcurrency = 6\n")).unwrap();
}
