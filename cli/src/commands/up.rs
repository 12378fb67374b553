//! `cfq up`: runs everything on this machine, in the foreground, or with `-d` in the background.

use std::fs::OpenOptions;
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
use crate::connect;
use crate::exit::{self, Code};
use crate::machine::{self, ApiAddress, Machine};
use crate::output::Output;

/// Exit code that shells use for a program ended by Ctrl-C.
const INTERRUPTED_CODE: i32 = 130;

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
    let address = ApiAddress::new(args.bind.unwrap_or(config.server.bind), args.allow_plaintext, &config)?;
    let status = if out.json { StatusOutput::Silent } else { StatusOutput::Stderr };
    if args.detach {
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
    let up = Up { url: machine.client.url().to_owned(), data: paths.data.display().to_string() };
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
    let server = connect::server_file(&paths.data);
    loop {
        if let Some(status) = child.try_wait()? {
            let tail = cfq_link::child::log_tail(&log_path, 2_000);
            let code = if status.code() == Some(2) { Code::Usage } else { Code::Failed };
            return Err(exit::CodedError { code, message: format!("cfq did not start:\n{}", tail.trim_end()) }.into());
        }
        let started = std::fs::read(&server)
            .ok()
            .and_then(|bytes| serde_json::from_slice::<connect::ServerFile>(&bytes).ok())
            .filter(|s| s.pid == child.id());
        if let Some(server) = started {
            let up = Up { url: server.url, data: paths.data.display().to_string() };
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
