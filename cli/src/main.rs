//! The one binary: commands, what people see, and the supervision of the parts for `cfq up`. It has no rules of its own.

mod args;
mod commands;
mod config;
mod connect;
mod exit;
mod live;
mod machine;
mod output;
mod repo;
mod supervise;

use std::process::ExitCode;

use cfq_deploy::Paths;
use cfq_proto::client::ClientError;
use clap::Parser;
use tracing_subscriber::EnvFilter;

use args::{Cli, Command};
use config::Config;
use exit::Code;
use output::Output;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are answers, not errors.
            let code = if error.use_stderr() { Code::Usage } else { Code::Done };
            if error.print().is_err() {
                return Code::Failed.into();
            }
            return code.into();
        }
    };
    let json = cli.json;
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            output::talk(&format!("cfq: cannot start: {error}"));
            return Code::Failed.into();
        }
    };
    let code = match runtime.block_on(run(cli)) {
        Ok(code) => code,
        Err(error) => {
            report(&error, json);
            exit::of_error(&error)
        }
    };
    // Services end here with their work handed over; what is still blocking (a model's thread) need not be waited for.
    runtime.shutdown_background();
    code.into()
}

fn report(error: &anyhow::Error, json: bool) {
    let text = match error.downcast_ref::<ClientError>() {
        Some(client) => connect::explain(client),
        None => format!("{error:#}"),
    };
    if json {
        let code = exit::of_error(error) as u8;
        output::talk(&serde_json::json!({ "error": { "message": text, "exit_code": code } }).to_string());
    } else {
        output::talk(&format!("cfq: {}", output::plain(&text)));
    }
}

/// Services log to stderr, which `cfq up` points at a file; commands only say what went wrong.
fn start_logging(default: &str) {
    let filter = EnvFilter::try_from_env("CFQ_LOG").unwrap_or_else(|_| EnvFilter::new(default));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).init();
}

async fn run(cli: Cli) -> anyhow::Result<Code> {
    let service = matches!(cli.command, Command::Serve { .. });
    start_logging(if service { "info" } else { "error" });
    cfq_link::outbound::install_crypto();
    let out = Output { json: cli.json };

    // What needs neither paths nor configuration comes first, so that it works on a broken set-up.
    let command = match cli.command {
        Command::Completions { shell } => return commands::completions::run(shell),
        Command::Serve { service } => return commands::serve::run(service).await,
        Command::Engine { command } => return commands::engine::run(out, command).await,
        command => command,
    };
    let mut paths = Paths::from_environment()?;
    if let Some(data) = cli.data {
        paths.data = std::path::absolute(data)?;
    }
    let file = cli.config.or_else(|| std::env::var_os("CFQ_CONFIG_FILE").filter(|f| !f.is_empty()).map(Into::into));
    let load = || Config::load(file.as_deref(), &paths.config);

    match command {
        Command::Up(args) => commands::up::run(out, &paths, load()?, args, file.as_deref()).await,
        Command::Down => commands::down::run(out, &paths).await,
        Command::Demo(args) => commands::demo::run(out, &paths, load()?, args).await,
        Command::Doctor => commands::doctor::run(out, &paths, &load()?).await,
        Command::Engines { command } => commands::engines::run(out, &paths, &load()?, command).await,
        Command::Models { command } => commands::models::run(out, &paths, &load()?, command).await,
        Command::Logs { task: None, process: Some(name) } => commands::logs::process(&paths.data, &name),
        command => ask(&connect::client(&paths.data)?, out, command).await,
    }
}

/// The commands that talk to a running server.
async fn ask(client: &cfq_proto::client::Client, out: Output, command: Command) -> anyhow::Result<Code> {
    match command {
        Command::Submit(args) => commands::submit::run(client, out, args).await,
        Command::Ls { state, limit } => commands::ls::run(client, out, state, limit).await,
        Command::Show { task } => commands::show::run(client, out, task).await,
        Command::Watch { task, no_tokens } => commands::watch::run(client, out, task, 0, !no_tokens).await,
        Command::Logs { task: Some(task), .. } => commands::logs::task(client, out, task).await,
        Command::Diff { task, iteration } => commands::diff::run(client, out, task, iteration).await,
        Command::Pull { task, repo, iteration } => commands::pull::run(client, out, task, repo, iteration).await,
        Command::Cancel { task, reason } => commands::cancel::run(client, out, task, &reason).await,
        Command::Resolve(args) => commands::resolve::run(client, out, args).await,
        Command::Pr { command } => commands::pr::run(client, out, command).await,
        Command::Nodes => commands::nodes::run(client, out).await,
        Command::Logs { task: None, .. }
        | Command::Up(_)
        | Command::Down
        | Command::Demo(_)
        | Command::Doctor
        | Command::Engine { .. }
        | Command::Engines { .. }
        | Command::Models { .. }
        | Command::Completions { .. }
        | Command::Serve { .. } => Err(exit::usage("this command does not talk to a server")),
    }
}
