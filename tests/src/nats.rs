//! A dedicated NATS server for one test cluster, with the keys and permissions that cfq generates.

use std::path::Path;
use std::sync::Mutex;

use cfq_deploy::nats::{Nats, NatsAddress, NatsOptions};
use cfq_deploy::services::ServiceKind;
use cfq_deploy::{Paths, StatusOutput, account};
use cfq_link::NatsConfig;
use cfq_link::child::{Process, Signal};
use cfq_proto::ids::{NodeId, RunnerId};
use cfq_proto::subject::Identity;

use crate::postgres::{find_service, user_paths};

/// A running NATS server, killed on drop.
pub struct Server {
    nats: Nats,
    store: std::path::PathBuf,
    process: Mutex<Process>,
    address: NatsAddress,
    nodes: [NodeId; 2],
    runners: [RunnerId; 2],
}

impl Server {
    pub async fn start(dir: &Path, nodes: &[NodeId; 2], runners: &[RunnerId; 2]) -> Self {
        let account = account::for_services(None, StatusOutput::Silent).unwrap();
        let paths = Paths { data: dir.join("nats-data"), ..user_paths() };
        make_traversable(dir);
        paths.prepare(account).unwrap();
        let program = find_service(ServiceKind::Nats).await;
        let mut identities = vec![Identity::Scheduler];
        identities.extend(runners.iter().cloned().map(Identity::Runner));
        identities.extend(nodes.iter().cloned().map(Identity::Node));
        let options = NatsOptions { identities, port: None, store_bytes: 256 << 20, lan: None };
        let mut nats = Nats::prepare(&paths, &program, account, options).unwrap();
        let process = Mutex::new(nats.start().await.unwrap());
        let address = nats.address();
        let (nodes, runners) = (nodes.clone(), runners.clone());
        Self { store: paths.nats().join("store"), nats, process, address, nodes, runners }
    }

    /// Connection settings of a service's identity.
    pub fn config(&self, service: &str) -> NatsConfig {
        let identity = match service {
            "scheduler" => Identity::Scheduler,
            "node" => Identity::Node(self.nodes[0].clone()),
            "second_node" => Identity::Node(self.nodes[1].clone()),
            "runner" => Identity::Runner(self.runners[0].clone()),
            "second_runner" => Identity::Runner(self.runners[1].clone()),
            other => panic!("unknown service {other}"),
        };
        self.address.config(&identity)
    }

    pub fn pid(&self) -> u32 {
        self.process.lock().unwrap().pid()
    }

    /// Sends SIGKILL to the server and waits until it has ended.
    pub async fn kill9(&self) {
        let process = self.process.lock().unwrap().clone();
        process.signal(Signal::Kill).unwrap();
        process.ended().await;
    }

    /// Stops the server as cfq does.
    pub async fn stop(&self) {
        let process = self.process.lock().unwrap().clone();
        Nats::stop(&process).await.unwrap();
    }

    /// Starts the stopped server again on the same port.
    pub async fn restart(&self) {
        let again = self.nats.restart().await.unwrap();
        *self.process.lock().unwrap() = again;
    }

    /// Kills the server, removes everything it stored, and starts it again on the same port.
    pub async fn restart_wiped(&self) {
        self.kill9().await;
        for entry in std::fs::read_dir(&self.store).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { std::fs::remove_dir_all(path).unwrap() } else { std::fs::remove_file(path).unwrap() }
        }
        self.restart().await;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.process.lock().unwrap_or_else(|e| e.into_inner()).signal(Signal::Kill));
    }
}

/// Lets every user traverse the folder, because a cfq that runs as root starts Postgres and NATS as another user.
pub fn make_traversable(dir: &Path) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o711)).unwrap();
}
