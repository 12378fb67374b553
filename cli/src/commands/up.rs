//! `cfq up`: runs everything on this machine, in the foreground, or with `-d` in the background.

use std::io::IsTerminal;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use cfq_deploy::doctor::{Check, CheckStatus};
use cfq_deploy::{Paths, StackOptions, StatusOutput, account, stack};
use cfq_link::stop::Signals;
use cfq_proto::client::Client;
use schemars::JsonSchema;
use serde::Serialize;
use tokio::task::JoinHandle;

use crate::args::UpArgs;
use crate::commands::doctor::{commands, endpoints};
use crate::commands::models::prepare;
use crate::commands::token::{self, DEFAULT_JOIN_TTL};
use crate::config::{self, Config};
use crate::connect::{self, ServerFile};
use crate::detach::{self, Started};
use crate::exit::{self, Code};
use crate::lan::Lan;
use crate::local_server::{self, ApiAddress, LocalServer};
use crate::output::Output;

/// Maximum time that a start waits for the answers of model servers.
const MODEL_CHECK_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Serialize, JsonSchema)]
pub struct Up {
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
    let args = UpArgs { lan: args.lan || (config.server.lan && !args.allow_plaintext), ..args };
    let address = match args.lan {
        true => ApiAddress::of_lan(Lan::new(args.bind, &config.server))?,
        false => ApiAddress::new(args.bind.unwrap_or(config.server.bind), args.allow_plaintext, &config)?,
    };
    let status = if out.json { StatusOutput::Silent } else { StatusOutput::Stderr };
    if args.detach {
        if let Some(server) = local_server::running_server(paths) {
            return already_running(out, paths, server, &args);
        }
        return detach(out, paths, config, args, file, status).await;
    }
    let start = Instant::now();
    let services = config::service_options(&config.services, &args.services)?;
    // Checked before models are fetched, which may take long.
    local_server::check_data_folder_is_free(paths)?;
    // The signal handlers are installed before readiness is reported, so that from then on a signal stops everything in
    // order.
    let mut signals = Signals::listen().context("cannot listen for signals")?;
    let Some(config) = prepare::prepare_models(out, paths, config, args.default_model, &mut signals).await else {
        interrupted(out)
    };
    let model_sources = check_model_sources(&config);
    let mut server = tokio::select! {
        biased;
        started = LocalServer::start(paths, &config, services, address, status) => started?,
        _ = signals.next() => interrupted(out),
    };
    let up = Up { url: server.client.url().to_owned(), data: paths.data.display().to_string(), already_running: false };
    out.print(&up, |up| {
        format!("cfq is ready at {} after {:.1} s; data in {}", up.url, start.elapsed().as_secs_f64(), up.data)
    })?;
    print_model_source_problems(out, model_sources).await;
    // A log, of the background process or of a service manager, must not contain a token.
    let join = args.lan && std::io::stderr().is_terminal();
    print_next_steps(out, &server.client, args.lan, join, "Ctrl-C, or cfq down").await;
    // SIGHUP is ignored: closing the terminal must not stop the queue. SIGTERM and Ctrl-C stop it in order.
    let mut hangup = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::hangup())?;
    {
        let supervise = server.supervise();
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
    server.stop().await?;
    Ok(Code::Done)
}

/// Asks the configured model servers and programs while cfq starts.
fn check_model_sources(config: &Config) -> JoinHandle<Vec<Check>> {
    let config = config.clone();
    tokio::spawn(async move {
        let (mut checks, programs) = tokio::join!(endpoints::check(&config), commands::check(&config));
        checks.extend(programs);
        checks
    })
}

/// Prints what is wrong with the configured model servers and programs. One that does not answer in time is left to `cfq status`.
async fn print_model_source_problems(out: Output, checks: JoinHandle<Vec<Check>>) {
    let Ok(Ok(checks)) = tokio::time::timeout(MODEL_CHECK_TIMEOUT, checks).await else { return };
    for Check { name, what, next_step, .. } in checks.into_iter().filter(|check| check.status != CheckStatus::Ok) {
        let step = next_step.map(|step| format!("\n  -> {step}")).unwrap_or_default();
        out.status(&format!("warning: {name} {what}{step}"));
    }
}

fn interrupted(out: Output) -> ! {
    out.status("interrupted before cfq was ready; started processes are stopped, fetched files are kept");
    // Exits directly, because returning would wait for a fetch that runs on another thread.
    std::process::exit(Code::Interrupted as i32);
}

/// Reports the server that runs. Its settings may differ from those of this command.
fn already_running(out: Output, paths: &Paths, server: ServerFile, args: &UpArgs) -> anyhow::Result<Code> {
    let bind = args.bind;
    if args.lan && !server.lan {
        return Err(exit::usage(format!(
            "cfq already runs at {} on this data folder, without --lan: stop it with `cfq down` first",
            server.url
        )));
    }
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
    local_server::check_data_folder_is_free(paths)?;
    let services = config::service_options(&config.services, &args.services)?;
    let options = StackOptions { services, status, ..StackOptions::default() };
    stack::find_programs(paths, &options).await?;
    let mut signals = Signals::listen().context("cannot listen for signals")?;
    let Some(config) = prepare::prepare_models(out, paths, config, args.default_model, &mut signals).await else {
        interrupted(out)
    };

    paths.prepare(account::for_services(options.services.account.as_deref(), status)?)?;
    let model_sources = check_model_sources(&config);
    let mut command = detach::own_command(paths, file)?;
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
    if args.lan {
        command.arg("--lan");
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
    let is_ready = |pid| connect::read_server_file(&paths.data).filter(|server| server.pid == pid);
    match detach::start(paths, "up", command)?.wait(&mut signals, is_ready).await? {
        Started::Ready(server) => {
            let up = Up { url: server.url, data: paths.data.display().to_string(), already_running: false };
            out.print(&up, |up| format!("cfq is ready at {}; data in {}", up.url, up.data))?;
            print_model_source_problems(out, model_sources).await;
            let client = connect::local_client(&paths.data, &up.url)?;
            print_next_steps(out, &client, args.lan, args.lan, "cfq down").await;
            Ok(Code::Done)
        }
        Started::Interrupted => {
            out.status("cfq continues to start in the background; stop it with `cfq down`");
            std::process::exit(Code::Interrupted as i32);
        }
    }
}

/// Prints how to submit a task and how to stop; with `lan`, how a machine joins; with `join`, the whole command for that.
async fn print_next_steps(out: Output, client: &Client, lan: bool, join: bool, stop: &str) {
    out.status(&format!("submit a task:  cfq submit \"...\" --repo DIR --watch      stop: {stop}"));
    if lan && !join {
        out.status("add a machine:  `cfq token create` prints the command to run there");
    }
    if !join {
        return;
    }
    match token::new_join_command(client, None, DEFAULT_JOIN_TTL).await {
        Ok(join) => out.status(&format!(
            "add a machine:  run this there within {} minutes (for further ones: cfq token create)\n  {}",
            DEFAULT_JOIN_TTL.as_secs() / 60,
            join.command
        )),
        Err(error) => out.status(&format!("cannot create a join token ({error:#}): try `cfq token create`")),
    }
}
