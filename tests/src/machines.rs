//! Machines for a test: network namespaces, each with an address of its own on one bridge, and processes that see only
//! their namespace and its host name. A further namespace holds the bridge, and the scripted models that all machines
//! reach. Needs root and the program `ip`.

use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;

use cfq_test_skip::skip;

use crate::binary;
use crate::scripted::ModelServer;

/// Beginning of the names of all namespaces; the id of the test process follows.
const PREFIX: &str = "cfqt";

/// A network of machines; dropping it removes the namespaces.
pub struct Network {
    prefix: String,
    names: Vec<&'static str>,
    pub models: ModelServer,
    /// Ends the thread of the models when it is dropped.
    _models_thread: tokio::sync::oneshot::Sender<()>,
}

impl Network {
    /// Creates a machine for each name. If this is not possible here, reports `test` as skipped and returns `None`.
    pub fn new(test: &str, names: &[&'static str]) -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        remove_stale();
        let prefix = format!("{PREFIX}{}-{}-", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let namespaces = Namespaces { prefix: &prefix, names };
        if let Err(reason) = namespaces.create() {
            namespaces.delete();
            skip(test, &reason);
            return None;
        }
        let (models_thread, stopped) = tokio::sync::oneshot::channel();
        let models = models_in(&namespaces.path("lan"), address(0), stopped);
        Some(Self { prefix, names: names.to_vec(), models, _models_thread: models_thread })
    }

    /// Address of a machine.
    pub fn address(&self, name: &str) -> IpAddr {
        let index = self.names.iter().position(|other| *other == name).unwrap();
        address(index + 1)
    }

    /// A command that runs cfq on a machine.
    pub fn cfq(&self, name: &str) -> Command {
        let mut command = self.command(name, "unshare");
        command.args(["--uts", "sh", "-c", "hostname \"$0\" && exec \"$@\"", name]).arg(binary::cfq());
        command
    }

    /// A command on a machine.
    pub fn command(&self, name: &str, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.namespace(name), program]).stdin(Stdio::null());
        command
    }

    /// Gives the machine another address instead of its own, and returns it.
    pub fn move_to_another_address(&self, name: &str) -> IpAddr {
        let (from, to) = (self.address(name), address(100));
        let namespace = self.namespace(name);
        run(&["-n", &namespace, "address", "delete", &format!("{from}/24"), "dev", "eth0"]);
        run(&["-n", &namespace, "address", "add", &format!("{to}/24"), "dev", "eth0"]);
        to
    }

    /// Cuts the machine off from all others, in both directions.
    pub fn cut(&self, name: &str) {
        self.set_link(name, "down");
    }

    /// Ends [`Self::cut`].
    pub fn connect(&self, name: &str) {
        self.set_link(name, "up");
    }

    fn set_link(&self, name: &str, state: &str) {
        run(&["-n", &self.namespace("lan"), "link", "set", &format!("p-{name}"), state]);
    }

    /// Drops what the machine `from` sends to the machine `to`, but not what it receives.
    pub fn cut_one_way(&self, from: &str, to: &str) {
        self.blackhole("add", from, to);
    }

    /// Ends [`Self::cut_one_way`].
    pub fn connect_one_way(&self, from: &str, to: &str) {
        self.blackhole("del", from, to);
    }

    fn blackhole(&self, action: &str, from: &str, to: &str) {
        run(&["-n", &self.namespace(from), "route", action, "blackhole", &self.address(to).to_string()]);
    }

    fn namespace(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        Namespaces { prefix: &self.prefix, names: &self.names }.delete();
    }
}

struct Namespaces<'a> {
    prefix: &'a str,
    names: &'a [&'static str],
}

impl Namespaces<'_> {
    fn path(&self, name: &str) -> String {
        format!("/run/netns/{}{name}", self.prefix)
    }

    fn create(&self) -> Result<(), String> {
        let lan = format!("{}lan", self.prefix);
        ip(&["netns", "add", &lan])?;
        ip(&["-n", &lan, "link", "set", "lo", "up"])?;
        ip(&["-n", &lan, "link", "add", "bridge", "type", "bridge"])?;
        ip(&["-n", &lan, "address", "add", &format!("{}/24", address(0)), "dev", "bridge"])?;
        ip(&["-n", &lan, "link", "set", "bridge", "up"])?;
        for (index, name) in self.names.iter().enumerate() {
            let (namespace, port) = (format!("{}{name}", self.prefix), format!("p-{name}"));
            ip(&["netns", "add", &namespace])?;
            ip(&["-n", &lan, "link", "add", &port, "type", "veth", "peer", "name", "eth0", "netns", &namespace])?;
            ip(&["-n", &lan, "link", "set", &port, "master", "bridge", "up"])?;
            ip(&["-n", &namespace, "address", "add", &format!("{}/24", address(index + 1)), "dev", "eth0"])?;
            ip(&["-n", &namespace, "link", "set", "lo", "up"])?;
            ip(&["-n", &namespace, "link", "set", "eth0", "up"])?;
        }
        Ok(())
    }

    fn delete(&self) {
        for name in self.names.iter().chain(&["lan"]) {
            // The namespace may have failed to be created.
            drop(ip(&["netns", "delete", &format!("{}{name}", self.prefix)]));
        }
    }
}

/// Removes the namespaces of test processes that were killed.
fn remove_stale() {
    for entry in std::fs::read_dir("/run/netns").into_iter().flatten().flatten() {
        let name = entry.file_name().into_string().unwrap_or_default();
        let process = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next());
        if process.is_some_and(|id| !std::path::Path::new("/proc").join(id).exists()) {
            drop(ip(&["netns", "delete", &name]));
        }
    }
}

fn address(index: usize) -> IpAddr {
    Ipv4Addr::new(10, 77, 0, u8::try_from(index + 1).unwrap()).into()
}

/// Starts scripted models in a network namespace, which they serve until `stopped` ends.
fn models_in(namespace: &str, address: IpAddr, stopped: tokio::sync::oneshot::Receiver<()>) -> ModelServer {
    let namespace = std::fs::File::open(namespace).unwrap();
    let (ready, started) = mpsc::sync_channel(1);
    std::thread::spawn(move || {
        // Only this thread enters the namespace, and sockets belong to the namespace of the thread that creates them.
        // SAFETY: a system call whose only argument is an open file.
        #[allow(unsafe_code)]
        let entered = unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) };
        assert_eq!(entered, 0, "{}", std::io::Error::last_os_error());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            ready.send(ModelServer::start_at(address).await).unwrap();
            // An error means that the sender was dropped, which ends the models too.
            drop(stopped.await);
        });
    });
    started.recv().unwrap()
}

#[track_caller]
fn run(args: &[&str]) {
    ip(args).unwrap();
}

fn ip(args: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(args).output().map_err(|error| format!("cannot run ip: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("ip {}: {}", args.join(" "), String::from_utf8_lossy(&output.stderr)))
}
