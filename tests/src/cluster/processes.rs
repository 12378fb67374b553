//! Processes of a test cluster: start, stop, and injected faults.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use super::{Cluster, WAIT_LIMIT, tail};
use crate::mount_namespace::MountNamespace;
use crate::nats_proxy::{Lost, NatsProxy};
use crate::{binary, signal, wait};

impl Cluster {
    /// Starts a service's process, which appends to the service's log.
    pub fn start_service(&self, service: &str) {
        self.start_service_with(service, Command::new(binary::cfq()));
    }

    /// Starts a service's process inside a mount namespace.
    pub fn start_service_in(&self, namespace: &MountNamespace, service: &str) {
        self.start_service_with(service, namespace.command(&binary::cfq()));
    }

    fn start_service_with(&self, service: &str, mut command: Command) {
        let log = std::fs::OpenOptions::new().create(true).append(true).open(self.log(service)).unwrap();
        command
            .args(["serve", service.trim_start_matches("second_").trim_start_matches("copied_")])
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

    /// Starts a second process with the id of `service`, from a copy of its configuration, its credentials and, for a
    /// runner, its data folder. Returns the name of the new service.
    pub fn start_copy(&self, service: &str) -> String {
        let copy = format!("copied_{service}");
        let text = std::fs::read_to_string(self.file(&format!("{service}.toml"))).unwrap();
        let mut config: toml::Table = toml::from_str(&text).unwrap();
        let (seed, copied_seed) = (self.nats.config(service).seed_file.unwrap(), self.file(&format!("{copy}.seed")));
        std::fs::copy(seed, &copied_seed).unwrap();
        config["nats"]["seed_file"] = copied_seed.to_str().unwrap().into();
        if let Some(folder) = config.get_mut("data_dir") {
            *folder = self.file(&format!("{copy}-data")).to_str().unwrap().into();
        }
        std::fs::write(self.file(&format!("{copy}.toml")), toml::to_string(&config).unwrap()).unwrap();
        self.start_service(&copy);
        copy
    }

    /// Runs another process with the configuration of `service` until it exits.
    pub async fn run_again(&self, service: &str) -> std::process::Output {
        let mut command = tokio::process::Command::new(tokio::task::block_in_place(binary::cfq));
        command.args(["serve", service]).arg(self.file(&format!("{service}.toml"))).kill_on_drop(true);
        tokio::time::timeout(WAIT_LIMIT, command.output()).await.expect("the process exits").unwrap()
    }

    /// Kills a service and starts it again behind a proxy for NATS that loses the given message.
    pub async fn restart_behind_proxy(&self, service: &str, lost: Lost) -> NatsProxy {
        let proxy = NatsProxy::start(&self.nats.config(service).url, lost).await;
        let path = self.file(&format!("{service}.toml"));
        let mut config: toml::Table = toml::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        config["nats"]["url"] = proxy.url.as_str().into();
        std::fs::write(path, toml::to_string(&config).unwrap()).unwrap();
        self.kill9(service);
        self.start_service(service);
        self.wait_until_ready().await;
        proxy
    }

    /// Waits until a service's process has ended by itself, and returns its exit status.
    pub async fn wait_until_exited(&self, service: &str) -> std::process::ExitStatus {
        wait::until(&format!("{service} to exit"), WAIT_LIMIT, || async {
            let exited = self.services.lock().unwrap().get_mut(service).unwrap().try_wait().unwrap();
            exited.ok_or_else(|| tail(&self.log(service)))
        })
        .await;
        let mut child = self.services.lock().unwrap().remove(service).unwrap();
        child.wait().unwrap()
    }

    /// Sends SIGKILL to a service's process and waits until the process has ended.
    pub fn kill9(&self, service: &str) {
        let mut services = self.services.lock().unwrap();
        let mut child = services.remove(service).unwrap_or_else(|| panic!("{service} is not running"));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Sends SIGTERM to a service's process, waits until it has ended, and returns its exit status.
    pub async fn stop(&self, service: &str) -> std::process::ExitStatus {
        let child = self.services.lock().unwrap().remove(service);
        let mut child = child.unwrap_or_else(|| panic!("{service} is not running"));
        signal::send(child.id(), libc::SIGTERM);
        wait::until(&format!("{service} to stop"), Duration::from_secs(20), || {
            let done = child.try_wait().unwrap();
            async move { done.ok_or_else(|| "still running".to_owned()) }
        })
        .await
    }

    /// Returns whether a service's process has ended by itself.
    pub fn has_exited(&self, service: &str) -> bool {
        let mut services = self.services.lock().unwrap();
        services.get_mut(service).is_some_and(|child| child.try_wait().unwrap().is_some())
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
        let hit = self.file("failpoint-hit").exists();
        assert!(hit, "{service} did not end at the failpoint:\n{}", tail(&self.log(&service)));
        self.start_service(&service);
    }

    /// Stops all services in order, and asserts that each exits with success and that none panicked, except at a
    /// failpoint that the test configured.
    pub async fn finish(self) {
        for service in [
            "copied_runner",
            "second_runner",
            "runner",
            "second_node",
            "copied_node",
            "node",
            "second_scheduler",
            "scheduler",
        ] {
            if !self.services.lock().unwrap().contains_key(service) {
                continue;
            }
            let status = self.stop(service).await;
            assert!(status.success(), "{service} ended with {status}:\n{}", tail(&self.log(service)));
        }
        self.assert_no_panics();
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

/// Limits the child's address space to `bytes`; allocations above the limit fail, as on a machine without free memory.
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

/// Returns a loopback address with a port that is currently free, and that this process has not returned before: the
/// server of another test may not have bound it yet, and the two tests would use one server.
pub fn free_address() -> SocketAddr {
    static RETURNED: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());
    loop {
        let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        if RETURNED.lock().unwrap().insert(address.port()) {
            return address;
        }
    }
}
