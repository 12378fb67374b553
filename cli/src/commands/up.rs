//! `cfq up`: everything on this machine, in the foreground; with `-d` in the background.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use cfq_deploy::{Options, Paths, Talk, files, stack};
use cfq_link::stop::Signals;
use serde::Serialize;

use crate::args::UpArgs;
use crate::commands::models::take;
use crate::config::{self, Config};
use crate::connect;
use crate::exit::{self, Code};
use crate::machine::{self, Machine};
use crate::output::Output;

/// What shells show for a program that Ctrl-C ended.
const INTERRUPTED: i32 = 130;

#[derive(Serialize)]
struct Up {
    url: String,
    data: String,
}

pub async fn run(
    out: Output,
    paths: &Paths,
    config: Config,
    args: UpArgs,
    file: Option<&Path>,
) -> anyhow::Result<Code> {
    let bind = args.bind.unwrap_or(config.server.bind);
    let talk = if out.json { Talk::Silent } else { Talk::Stderr };
    if args.detach {
        return detach(out, paths, config, args, file, talk).await;
    }
    let start = Instant::now();
    let engines = config::engines(&config.engines, &args.engines);
    // Before gigabytes are fetched for nothing.
    machine::check_holder(paths)?;
    // Listened for before anybody is told that it runs: whoever stops it then stops it in order.
    let mut told = Signals::listen().context("cannot listen for signals")?;
    let Some(config) = take::settle(out, paths, config, args.unbound, &mut told).await else { interrupted(out) };
    let mut machine = tokio::select! {
        biased;
        machine = Machine::start(paths, &config, engines, bind, talk) => machine?,
        _ = told.next() => interrupted(out),
    };
    let up = Up { url: machine.client.url().to_owned(), data: paths.data.display().to_string() };
    out.data(&up, |up| {
        format!("cfq is ready at {} after {:.1} s; data in {}", up.url, start.elapsed().as_secs_f64(), up.data)
    })?;
    out.talk("submit a task:  cfq submit \"...\" --repo DIR --watch      stop: Ctrl-C, or cfq down");
    // A terminal that closes must not take the queue with it half way; SIGTERM and Ctrl-C stop it in order.
    let mut hangup = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::hangup())?;
    {
        let tend = machine.tend();
        tokio::pin!(tend);
        loop {
            tokio::select! {
                () = &mut tend => {}
                _ = told.next() => break,
                _ = hangup.recv() => {}
            }
        }
    }
    out.talk("stopping: runner, node, scheduler, NATS, Postgres");
    machine.stop().await?;
    Ok(Code::Done)
}

fn interrupted(out: Output) -> ! {
    out.talk("stopped before it was ready; what was started ends with it, what was fetched is kept");
    // A fetch on another thread would be waited for otherwise.
    std::process::exit(INTERRUPTED);
}

/// Whatever may ask or take long (fetching) happens here, where somebody looks; then the same command without `-d`.
async fn detach(
    out: Output,
    paths: &Paths,
    config: Config,
    args: UpArgs,
    file: Option<&Path>,
    talk: Talk,
) -> anyhow::Result<Code> {
    machine::check_holder(paths)?;
    let options = Options { engines: config::engines(&config.engines, &args.engines), talk, ..Options::default() };
    stack::find(paths, &options).await?;
    let mut told = Signals::listen().context("cannot listen for signals")?;
    let Some(config) = take::settle(out, paths, config, args.unbound, &mut told).await else { interrupted(out) };

    let log_path = paths.log("up");
    if let Some(folder) = log_path.parent() {
        files::folder(folder, 0o700, None)?;
    }
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(&log_path)
        .with_context(|| format!("cannot write {}", log_path.display()))?;
    let mut command = Command::new(std::env::current_exe().context("cannot tell where the cfq binary is")?);
    command.arg("--data").arg(&paths.data);
    if let Some(file) = file {
        command.arg("--config").arg(std::path::absolute(file)?);
    }
    command.arg("up");
    // Decided once: a choice of its own could be another, and would be fetched where nobody looks.
    if let Some(model) = config.unbound_model() {
        command.arg("--unbound").arg(model.as_str());
    }
    if let Some(bind) = args.bind {
        command.arg("--bind").arg(bind.to_string());
    }
    for (flag, value) in [("--postgres-bin", &options.engines.postgres_bin), ("--nats-bin", &options.engines.nats_bin)]
    {
        if let Some(path) = value {
            command.arg(flag).arg(std::path::absolute(path)?);
        }
    }
    if let Some(choice) = args.engines.engines {
        let name = format!("{choice:?}").to_ascii_lowercase();
        command.args(["--engines", &name]);
    }
    // A process group of its own: a Ctrl-C here does not reach it.
    let mut child = command
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .process_group(0)
        .spawn()
        .context("cannot start `cfq up`")?;
    let server = connect::server_file(&paths.data);
    loop {
        if let Some(status) = child.try_wait()? {
            let tail = cfq_link::child::log_tail(&log_path, 2_000);
            let code = if status.code() == Some(2) { Code::Usage } else { Code::Failed };
            return Err(exit::Coded { code, message: format!("it did not start:\n{}", tail.trim_end()) }.into());
        }
        let ours = std::fs::read(&server)
            .ok()
            .and_then(|bytes| serde_json::from_slice::<connect::ServerFile>(&bytes).ok())
            .filter(|s| s.pid == child.id());
        if let Some(server) = ours {
            let up = Up { url: server.url, data: paths.data.display().to_string() };
            out.data(&up, |up| format!("cfq is ready at {}; data in {}", up.url, up.data))?;
            out.talk("submit a task:  cfq submit \"...\" --repo DIR --watch      stop: cfq down");
            return Ok(Code::Done);
        }
        tokio::select! {
            () = tokio::time::sleep(Duration::from_millis(25)) => {}
            _ = told.next() => {
                out.talk("it goes on starting in the background; `cfq down` stops it");
                std::process::exit(INTERRUPTED);
            }
        }
    }
}
