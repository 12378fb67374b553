//! A `cfq up` started as a user would start it, with a separate folder and configuration, and scripted models.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::Duration;

use cfq_proto::client::Client;

use crate::cluster::{WAIT_LIMIT, free_address, kill_with_parent, tail};
use crate::scripted::ModelServer;
use crate::{binary, nats, signal, wait};

/// A temporary folder with a `cfq.toml` that configures scripted models for both agents.
pub struct Home {
    pub dir: tempfile::TempDir,
    pub models: ModelServer,
}

impl Home {
    pub async fn new() -> Self {
        Self::with_models(ModelServer::start().await)
    }

    pub fn with_models(models: ModelServer) -> Self {
        let dir = tempfile::Builder::new().prefix("cfq-up-").tempdir().unwrap();
        nats::make_traversable(dir.path());
        let text = format!(
            "[agents.alpha]\nmodel = \"openai:s/alpha\"\n[agents.beta]\nmodel = \"openai:s/beta\"\n[endpoints.s]\n\
             url = \"{}\"\nmax_sequences = 2\n[timing]\nlease_ttl_ms = 1500\nlease_margin_ms = 300\n\
             heartbeat_ms = 400\nsweep_ms = 200\npoll_ms = 200\n",
            models.url()
        );
        std::fs::write(dir.path().join("cfq.toml"), text).unwrap();
        Self { dir, models }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Creates a `cfq` command for the data folder `data`. `through` is a command that runs cfq (such as `nsenter`), or
    /// a cfq command with additional environment variables.
    pub fn cfq(&self, through: Option<Command>, data: &Path, args: &[&str]) -> Command {
        let mut command = through.unwrap_or_else(|| Command::new(binary::cfq()));
        command.arg("--config").arg(self.path("cfq.toml")).arg("--data").arg(data).args(args);
        command.env_remove("CFQ_URL").env_remove("CFQ_TOKEN").stdin(Stdio::null());
        command
    }

    /// Runs a `cfq up` that is expected to fail; returns when it has exited.
    pub fn run_failing_up(&self, through: Option<Command>, data: &Path, env: &[(&str, &Path)]) -> Output {
        let mut command = self.cfq(through, data, &["up", "--bind", "127.0.0.1:0"]);
        command.envs(env.iter().copied());
        tokio::task::block_in_place(|| command.output().unwrap())
    }
}

/// A running `cfq up`, killed on drop.
pub struct Up {
    child: Child,
    data: PathBuf,
    log: PathBuf,
}

impl Up {
    /// Starts `cfq up` on the data folder `data`. `seen` is the path by which this process reaches the same folder.
    pub fn start(home: &Home, through: Option<Command>, data: &Path, seen: PathBuf) -> Self {
        Self::start_with(home, through, data, seen, "up.log", &["up", "--bind", &free_address().to_string()])
    }

    /// Starts a cfq with these arguments, which is stopped like `cfq up`. Its output is appended to the file `log`.
    pub fn start_with(
        home: &Home,
        through: Option<Command>,
        data: &Path,
        seen: PathBuf,
        log: &str,
        args: &[&str],
    ) -> Self {
        let log = home.path(log);
        let file = std::fs::OpenOptions::new().create(true).append(true).open(&log).unwrap();
        let mut command = home.cfq(through, data, args);
        command.stdout(file.try_clone().unwrap()).stderr(file).process_group(0);
        kill_with_parent(&mut command);
        Self { child: command.spawn().unwrap(), data: seen, log }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the server accepts tasks, and returns a client for it.
    pub async fn client(&self) -> Client {
        wait::until("cfq up to be ready", WAIT_LIMIT, || async {
            let text = std::fs::read_to_string(self.data.join("run/server.json"))
                .map_err(|e| format!("{e}: {}", tail(&self.log)))?;
            let server: serde_json::Value = serde_json::from_str(&text).map_err(|e| e.to_string())?;
            if server["pid"] != self.child.id() {
                return Err(format!("run/server.json is of another process: {server}"));
            }
            let token = std::fs::read_to_string(self.data.join("keys/api.token")).map_err(|e| e.to_string())?;
            let http = cfq_link::outbound::api_client().unwrap();
            let client = Client::new(http, server["url"].as_str().unwrap(), token.trim());
            client.check_ready().await.map_err(|e| e.to_string())?;
            Ok(client)
        })
        .await
    }

    /// Everything that it has printed.
    pub fn output(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    /// A client of the server over its Unix socket.
    pub async fn local_client(&self) -> Client {
        let socket = self.data.join("run/api.sock");
        wait::until("cfq up to be ready", WAIT_LIMIT, || async {
            let server = self.data.join("run/server.json");
            std::fs::metadata(&server).map_err(|e| format!("{e}: {}", tail(&self.log)))?;
            let short = cfq_link::unix_socket::short_path(&socket).map_err(|e| e.to_string())?;
            let http = cfq_link::outbound::local_api_client(&short).map_err(|e| e.to_string())?;
            Ok(Client::with_token_file(http, "http://127.0.0.1", &self.data.join("keys/api.token")))
        })
        .await
    }

    /// Waits until it has exited, and returns its exit code.
    pub async fn exit_code(&mut self) -> Option<i32> {
        let status = wait::until("cfq to exit", WAIT_LIMIT, || {
            let done = self.child.try_wait().unwrap();
            async move { done.ok_or_else(|| "still running".to_owned()) }
        });
        status.await.code()
    }

    /// The last lines of every log, for the failure message of a test.
    pub fn diagnostics(&self) -> String {
        let mut text = tail(&self.log);
        for entry in std::fs::read_dir(self.data.join("log")).unwrap().flatten() {
            text.push_str(&format!("\n--- {}\n{}", entry.path().display(), tail(&entry.path())));
        }
        text
    }

    /// Stops `cfq up` with SIGTERM and asserts that none of its processes panicked.
    pub async fn stop(self) -> ExitStatus {
        let data = self.data.clone();
        let status = self.terminate().await;
        for entry in std::fs::read_dir(data.join("log")).unwrap().flatten() {
            let text = std::fs::read_to_string(entry.path()).unwrap();
            assert!(!text.contains("panicked at"), "{}:\n{}", entry.path().display(), tail(&entry.path()));
        }
        status
    }

    /// Stops `cfq up` with SIGTERM without checking for panics, for tests in which a panic is expected.
    pub async fn terminate(mut self) -> ExitStatus {
        signal::send(self.child.id(), libc::SIGTERM);
        wait::until("cfq up to stop", Duration::from_secs(60), || {
            let done = self.child.try_wait().unwrap();
            async move { done.ok_or_else(|| "still running".to_owned()) }
        })
        .await
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
