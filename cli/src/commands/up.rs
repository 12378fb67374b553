//! `cfq up`: runs everything on this machine, in the foreground, or with `-d` in the background.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use cfq_deploy::{Paths, StackOptions, StatusOutput, account, stack};
use cfq_link::stop::Signals;
use serde::Serialize;

use crate::args::UpArgs;
use crate::commands::models::prepare;
use crate::config::{self, Config};
use crate::connect::{self, ServerFile};
use crate::exit::{self, Code};
use crate::machine::{self, ApiAddress, Machine};
use crate::output::{self, Output};

/// Exit code that shells use for a program ended by Ctrl-C.
const INTERRUPTED_CODE: i32 = 130;
/// Maximum size of the part of the log that is searched for warnings of a start, in bytes.
const MAX_LOG_BYTES: u64 = 1 << 20;

#[derive(Serialize)]
struct Up {
    url: String,
    data: String,
    /// Whether `up -d` found it running.
    already_running: bool,
}

pub async fn run(
    out: Output,
    paths: &Paths,
    config: Config,
    args: UpArgs,
    file: Option<&Path>,
) -> anyhow::Result<Code> {
    let address = ApiAddress::new(args.bind.unwrap_or(config.server.bind), args.allow_plaintext, &config)?;
    let status = if out.json { StatusOutput::Silent } else { StatusOutput::Stderr };
    if args.detach {
        if let Some(server) = machine::running_server(paths) {
            return already_running(out, paths, server, args.bind);
        }
        return detach(out, paths, config, args, file, status).await;
    }
    let start = Instant::now();
    let services = config::service_options(&config.services, &args.services)?;
    // Checked before models are fetched, which may take long.
    machine::check_data_folder_is_free(paths)?;
    // The signal handlers are installed before readiness is reported, so that from then on a signal stops everything in
    // order.
    let mut signals = Signals::listen().context("cannot listen for signals")?;
    let Some(config) = prepare::prepare_models(out, paths, config, args.default_model, &mut signals).await else {
        interrupted(out)
    };
    let mut machine = tokio::select! {
        biased;
        machine = Machine::start(paths, &config, services, address, status) => machine?,
        _ = signals.next() => interrupted(out),
    };
    let up =
        Up { url: machine.client.url().to_owned(), data: paths.data.display().to_string(), already_running: false };
    out.print(&up, |up| {
        format!("cfq is ready at {} after {:.1} s; data in {}", up.url, start.elapsed().as_secs_f64(), up.data)
    })?;
    out.status("submit a task:  cfq submit \"...\" --repo DIR --watch      stop: Ctrl-C, or cfq down");
    // SIGHUP is ignored: closing the terminal must not stop the queue. SIGTERM and Ctrl-C stop it in order.
    let mut hangup = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::hangup())?;
    {
        let supervise = machine.supervise();
        tokio::pin!(supervise);
        loop {
            tokio::select! {
                () = &mut supervise => {}
                _ = signals.next() => break,
                _ = hangup.recv() => {}
            }
        }
    }
    out.status("stopping runner, node, scheduler, NATS and Postgres");
    machine.stop().await?;
    Ok(Code::Done)
}

fn interrupted(out: Output) -> ! {
    out.status("interrupted before cfq was ready; started processes are stopped, fetched files are kept");
    // Exits directly, because returning would wait for a fetch that runs on another thread.
    std::process::exit(INTERRUPTED_CODE);
}

/// Reports the server that runs. Its settings may differ from those of this command.
fn already_running(out: Output, paths: &Paths, server: ServerFile, bind: Option<SocketAddr>) -> anyhow::Result<Code> {
    let is_other = |bind: &SocketAddr| bind.port() != 0 && server.url != format!("http://{bind}");
    if let Some(bind) = bind.filter(is_other) {
        return Err(exit::usage(format!(
            "cfq already runs at {} on this data folder, not at {bind}: stop it with `cfq down` first",
            server.url
        )));
    }
    let up = Up { url: server.url, data: paths.data.display().to_string(), already_running: true };
    out.print(&up, |up| format!("cfq is already running at {} (process {}); data in {}", up.url, server.pid, up.data))?;
    out.status("changed settings take effect after `cfq down` and `cfq up -d`");
    Ok(Code::Done)
}

/// Warnings that the background process has written to its log since it was `start` bytes long.
fn logged_warnings(log: &Path, start: u64) -> Vec<String> {
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = File::open(log)?;
        file.seek(SeekFrom::Start(start))?;
        let mut text = Vec::new();
        file.take(MAX_LOG_BYTES).read_to_end(&mut text)?;
        Ok(text)
    };
    // The log itself keeps what cannot be read here.
    let text = read().unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    text.lines().filter(|line| line.starts_with("cfq: warning:")).map(str::to_owned).collect()
}

/// Fetches missing programs and models in the foreground, where the progress is visible; then starts the same command
/// without `-d` in the background.
async fn detach(
    out: Output,
    paths: &Paths,
    config: Config,
    args: UpArgs,
    file: Option<&Path>,
    status: StatusOutput,
) -> anyhow::Result<Code> {
    machine::check_data_folder_is_free(paths)?;
    let services = config::service_options(&config.services, &args.services)?;
    let options = StackOptions { services, status, ..StackOptions::default() };
    stack::find_programs(paths, &options).await?;
    let mut signals = Signals::listen().context("cannot listen for signals")?;
    let Some(config) = prepare::prepare_models(out, paths, config, args.default_model, &mut signals).await else {
        interrupted(out)
    };

    paths.prepare(account::for_services(options.services.account.as_deref(), status)?)?;
    let log_path = paths.log("up");
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(&log_path)
        .with_context(|| format!("cannot write {}", log_path.display()))?;
    let log_start = log.metadata().map_or(0, |metadata| metadata.len());
    let mut command = Command::new(std::env::current_exe().context("cannot determine the path of the cfq binary")?);
    command.arg("--data").arg(&paths.data);
    if let Some(file) = file {
        command.arg("--config").arg(std::path::absolute(file)?);
    }
    command.arg("up");
    // The default model is chosen once, here: the background process could choose another model, and would fetch that
    // model without visible progress.
    if let Some(model) = config.default_model() {
        command.arg("--default-model").arg(model.as_str());
    }
    if let Some(bind) = args.bind {
        command.arg("--bind").arg(bind.to_string());
    }
    if args.allow_plaintext {
        command.arg("--allow-plaintext");
    }
    let services = &options.services;
    for (flag, value) in [("--postgres-bin", &services.postgres_bin), ("--nats-bin", &services.nats_bin)] {
        if let Some(path) = value {
            command.arg(flag).arg(std::path::absolute(path)?);
        }
    }
    if let Some(source) = args.services.source {
        let name = format!("{source:?}").to_ascii_lowercase();
        command.args(["--services", &name]);
    }
    // In a separate process group, so that Ctrl-C does not reach the background process.
    let mut child = command
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .process_group(0)
        .spawn()
        .context("cannot start `cfq up`")?;
    loop {
        if let Some(status) = child.try_wait()? {
            let tail = cfq_link::child::log_tail(&log_path, 2_000);
            let code = if status.code() == Some(2) { Code::Usage } else { Code::Failed };
            return Err(exit::CodedError { code, message: format!("cfq did not start:\n{}", tail.trim_end()) }.into());
        }
        let server = connect::read_server_file(&paths.data).filter(|server| server.pid == child.id());
        if let Some(server) = server {
            for warning in logged_warnings(&log_path, log_start) {
                output::print_stderr(&output::sanitize(&warning));
            }
            let up = Up { url: server.url, data: paths.data.display().to_string(), already_running: false };
            out.print(&up, |up| format!("cfq is ready at {}; data in {}", up.url, up.data))?;
            out.status("submit a task:  cfq submit \"...\" --repo DIR --watch      stop: cfq down");
            return Ok(Code::Done);
        }
        tokio::select! {
            () = tokio::time::sleep(Duration::from_millis(25)) => {}
            _ = signals.next() => {
                out.status("cfq continues to start in the background; stop it with `cfq down`");
                std::process::exit(INTERRUPTED_CODE);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_of_this_start_are_read_from_the_log() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("up.log");
        let earlier = "cfq: warning: of an earlier start\n";
        std::fs::write(&log, format!("{earlier}starting\ncfq: warning: without TLS\ncfq is ready\n")).unwrap();
        assert_eq!(logged_warnings(&log, earlier.len() as u64), ["cfq: warning: without TLS"]);
        assert_eq!(logged_warnings(&folder.path().join("none"), 0), Vec::<String>::new());
    }
}
