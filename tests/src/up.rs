//! `cfq up` as a person starts it, with a folder, a configuration and scripted models of its own.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::Duration;

use cfq_proto::client::Client;

use crate::cluster::{PATIENCE, die_with_parent, free_address, tail};
use crate::scripted::ModelServer;
use crate::{binary, nats, signal, wait};

pub struct Home {
    pub dir: tempfile::TempDir,
    pub models: ModelServer,
}

impl Home {
    pub async fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("cfq-up-").tempdir().unwrap();
        nats::open_to_all(dir.path());
        let models = ModelServer::start().await;
        let text = format!(
            "[agents.alpha]\nmodel = \"openai:s/alpha\"\n[agents.beta]\nmodel = \"openai:s/beta\"\n[endpoints.s]\n\
             url = \"{}\"\nmax_sequences = 2\n[timing]\nlease_ttl_ms = 1500\nlease_margin_ms = 300\nbeat_ms = 400\n\
             sweep_ms = 200\npoll_ms = 200\n",
            models.url()
        );
        std::fs::write(dir.path().join("cfq.toml"), text).unwrap();
        Self { dir, models }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// cfq on the data folder `data`, by itself or through a program that runs others.
    pub fn cfq(&self, through: Option<Command>, data: &Path, args: &[&str]) -> Command {
        let mut command = through.unwrap_or_else(|| Command::new(binary::cfq()));
        command.arg("--config").arg(self.path("cfq.toml")).arg("--data").arg(data).args(args);
        command.env_remove("CFQ_URL").env_remove("CFQ_TOKEN").stdin(Stdio::null());
        command
    }

    /// `cfq up` that is expected to say why it cannot.
    pub fn up_fails(&self, through: Option<Command>, data: &Path, env: &[(&str, &Path)]) -> Output {
        let mut command = self.cfq(through, data, &["up", "--bind", "127.0.0.1:0"]);
        command.envs(env.iter().copied());
        tokio::task::block_in_place(|| command.output().unwrap())
    }
}

/// A running `cfq up`. Dropped, it is killed.
pub struct Up {
    child: Child,
    data: PathBuf,
    log: PathBuf,
}

impl Up {
    /// `seen` is the data folder as this process finds it.
    pub fn start(home: &Home, through: Option<Command>, data: &Path, seen: PathBuf) -> Self {
        let log = home.path("up.log");
        let file = std::fs::OpenOptions::new().create(true).append(true).open(&log).unwrap();
        let mut command = home.cfq(through, data, &["up", "--bind", &free_address().to_string()]);
        command.stdout(file.try_clone().unwrap()).stderr(file).process_group(0);
        die_with_parent(&mut command);
        Self { child: command.spawn().unwrap(), data: seen, log }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Once it accepts tasks.
    pub async fn client(&self) -> Client {
        wait::until("cfq up to be ready", PATIENCE, || async {
            let text = std::fs::read_to_string(self.data.join("run/server.json"))
                .map_err(|e| format!("{e}: {}", tail(&self.log)))?;
            let server: serde_json::Value = serde_json::from_str(&text).map_err(|e| e.to_string())?;
            if server["pid"] != self.child.id() {
                return Err(format!("another's: {server}"));
            }
            let token = std::fs::read_to_string(self.data.join("keys/api.token")).map_err(|e| e.to_string())?;
            let http = cfq_link::outbound::api_client().unwrap();
            let client = Client::new(http, server["url"].as_str().unwrap(), token.trim());
            client.ready().await.map_err(|e| e.to_string())?;
            Ok(client)
        })
        .await
    }

    /// The end of every log, for the message of a failed test.
    pub fn story(&self) -> String {
        let mut story = tail(&self.log);
        for entry in std::fs::read_dir(self.data.join("log")).unwrap().flatten() {
            story.push_str(&format!("\n--- {}\n{}", entry.path().display(), tail(&entry.path())));
        }
        story
    }

    /// SIGTERM, in good order, and nothing of it panicked.
    pub async fn stop(self) -> ExitStatus {
        let data = self.data.clone();
        let status = self.ends().await;
        for entry in std::fs::read_dir(data.join("log")).unwrap().flatten() {
            let text = std::fs::read_to_string(entry.path()).unwrap();
            assert!(!text.contains("panicked at"), "{}:\n{}", entry.path().display(), tail(&entry.path()));
        }
        status
    }

    /// The same, where a panic belongs to the story.
    pub async fn ends(mut self) -> ExitStatus {
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
