//! The cfq binary: the commands, their output, and the supervision of all processes for `cfq up`. The rules of tasks
//! and models are in other crates.

mod archive;
mod args;
mod bind;
mod commands;
mod config;
mod connect;
mod detach;
mod environment;
mod exit;
mod file_diffs;
mod follow_machines;
mod json_times;
mod lan;
mod live;
mod local_server;
mod local_time;
mod mcp;
mod membership;
mod node_process;
mod output;
mod plain_words;
mod repo;
mod repo_map;
mod rights;
mod server_policies;
mod supervise;

use std::process::ExitCode;

use cfq_deploy::Paths;
use cfq_proto::client::ClientError;
use cfq_proto::http::TaskAction;
use clap::{CommandFactory, Parser};
use tracing_subscriber::EnvFilter;

use args::{Cli, CliCommand, LogsArgs, McpCommand, ServeCommand, TokenCommand};
use commands::logs::Selection;
use config::Config;
use exit::{Code, ErrorDetail, ErrorOutput};
use output::Output;

fn main() -> ExitCode {
    commands::completions::answer_shell();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // clap reports help and version as errors, although they are none.
            if !error.use_stderr() {
                return if error.print().is_ok() { Code::Done.into() } else { Code::Failed.into() };
            }
            let message = plain_words::usage_error(error.render().to_string().trim_end(), &named_command());
            if std::env::args_os().any(|arg| arg == "--json") {
                report(&exit::usage(message), true);
            } else {
                output::print_stderr(&output::sanitize(&message));
            }
            return Code::Usage.into();
        }
    };
    let json = cli.json;
    // Before anything else, because these may have neither threads nor open files.
    match cli.command {
        Some(CliCommand::Serve { process: ServeCommand::Sandbox }) => {
            return match cfq_inference_node::sandbox::serve() {
                Ok(()) => Code::Done.into(),
                Err(_) => Code::Failed.into(),
            };
        }
        Some(CliCommand::Serve { process: ServeCommand::SandboxLauncher }) => return serve_sandbox_launcher(),
        Some(CliCommand::Serve { process: ServeCommand::RepositoryAccess }) => return serve_repository_access(),
        _ => {}
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            output::print_stderr(&format!("cfq: cannot start: {error}"));
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
    // At this point all work has been released; blocking threads, such as a model's, need not be awaited.
    runtime.shutdown_background();
    code.into()
}

/// The command that the arguments name, such as `cfq models pull`.
fn named_command() -> String {
    let mut command = Cli::command();
    let mut name = "cfq".to_owned();
    for arg in std::env::args_os().skip(1) {
        let Some(named) = arg.to_str().and_then(|arg| command.find_subcommand(arg)).cloned() else { continue };
        name += &format!(" {}", named.get_name());
        command = named;
    }
    name
}

fn serve_sandbox_launcher() -> ExitCode {
    #[cfg(target_os = "linux")]
    if cfq_sandbox::serve().is_ok() {
        return Code::Done.into();
    }
    Code::Failed.into()
}

fn serve_repository_access() -> ExitCode {
    start_logging("warn");
    match cfq_agent_runner::workstream::serve_repository_access() {
        Ok(()) => Code::Done.into(),
        Err(error) => {
            output::print_stderr(&format!("cfq: cannot open a repository for another process: {error}"));
            Code::Failed.into()
        }
    }
}

pub(crate) fn report(error: &anyhow::Error, json: bool) {
    let text = match error.downcast_ref::<ClientError>() {
        Some(client) => connect::describe_error(client),
        None => format!("{error:#}"),
    };
    if json {
        let code = exit::of_error(error) as u8;
        let error = ErrorOutput { error: ErrorDetail { message: text, exit_code: code } };
        output::print_stderr(&output::json(&error).unwrap_or_default());
    } else {
        output::print_message(&format!("cfq: {text}"));
    }
}

/// Starts logging to stderr. `cfq up` redirects the stderr of its processes to files; commands log errors only.
fn start_logging(default: &str) {
    let chosen = std::env::var("CFQ_LOG").ok().filter(|text| !text.is_empty() && EnvFilter::try_new(text).is_ok());
    let chosen = chosen.as_deref().unwrap_or(default);
    // rmcp logs every request over HTTP at the level `info`, and async_nats each failed attempt to connect, which the
    // commands report themselves. They are quiet unless the filter names them.
    let mut filter = chosen.to_owned();
    for (name, level) in [("rmcp", "warn"), ("async_nats::connector", "off")] {
        if !chosen.contains(name) {
            filter.push_str(&format!(",{name}={level}"));
        }
    }
    let filter = EnvFilter::new(filter);
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).init();
}

async fn run(cli: Cli) -> anyhow::Result<Code> {
    let serving = matches!(cli.command, Some(CliCommand::Serve { .. }));
    start_logging(if serving { "info" } else { "error" });
    cfq_link::outbound::install_crypto();
    let out = Output { json: cli.json };

    // Commands that need neither paths nor configuration come first, so that they work on a broken set-up.
    let is_named = cli.command.is_some();
    let command = match cli.command.unwrap_or(CliCommand::Status) {
        CliCommand::Completions { shell } => return commands::completions::run(shell),
        CliCommand::Schema(args) => return commands::schema::run(out, args),
        CliCommand::Man { folder } => return commands::man::run(out, &folder),
        CliCommand::Serve { process } => return commands::serve::run(process).await,
        CliCommand::Engine { command } => return commands::engine::run(out, command).await,
        command => command,
    };
    let mut paths = Paths::from_environment()?;
    if let Some(data) = cli.data {
        paths.data = std::path::absolute(data)?;
    }
    let file = cli.config.or_else(|| std::env::var_os("CFQ_CONFIG_FILE").filter(|f| !f.is_empty()).map(Into::into));
    let load = || Config::load(file.as_deref(), &paths.config);

    if let (CliCommand::Status, Some(membership)) = (&command, connect::only_membership(&paths.data)) {
        return commands::join::status(out, &paths, &membership).await;
    }
    match command {
        CliCommand::Up(args) => commands::up::run(out, &paths, load()?, args, file.as_deref()).await,
        CliCommand::Down => commands::down::run(out, &paths).await,
        CliCommand::Demo(args) => commands::demo::run(out, &paths, load()?, args).await,
        CliCommand::Doctor => commands::doctor::run(out, &paths, &load()?, file.as_deref()).await,
        CliCommand::Map(args) => commands::map::run(&paths, out, args).await,
        CliCommand::Checks { command } => commands::checks::run(out, &paths, &load()?, command).await,
        CliCommand::Service { command } => commands::service::run(out, &paths, &load()?, command, file.as_deref()),
        CliCommand::Backup { file: to } => commands::backup::backup(out, &paths, &load()?, &to).await,
        CliCommand::Restore { file: from, check } => {
            commands::backup::restore(out, &paths, &load()?, &from, check).await
        }
        CliCommand::Services { command } => commands::services::run(out, &paths, &load()?, command).await,
        CliCommand::Join(args) => commands::join::run(out, &paths, load()?, args, file.as_deref()).await,
        CliCommand::Token { command: TokenCommand::Path } => commands::token::path(out, &paths),
        CliCommand::Token { command: TokenCommand::Rotate { name: None } } => commands::token::rotate(out, &paths),
        CliCommand::Models { command } => commands::models::run(out, &paths, &load()?, command).await,
        CliCommand::Mcp { command: None } => commands::mcp::serve(out, &paths).await,
        CliCommand::Mcp { command: Some(McpCommand::Install { client, print }) } => {
            commands::mcp::install(out, &paths.data, client, print)
        }
        CliCommand::Logs(LogsArgs { task: None, process: Some(name), follow, tail, since, .. }) => {
            commands::logs::process(&paths.data, &name, Selection { follow, tail, since }).await
        }
        command => {
            // These commands use no settings, but a path that was typed wrong must not go unnoticed.
            if file.is_some() {
                load()?;
            }
            let done = async { run_client_command(&connect::client(&paths.data)?, &paths, out, command).await };
            if is_named { done.await } else { with_help(out, done.await) }
        }
    }
}

/// The result of `cfq` without a command, which also names the commands, for new users.
fn with_help(out: Output, done: anyhow::Result<Code>) -> anyhow::Result<Code> {
    let code = done.unwrap_or_else(|error| {
        report(&error, out.json);
        exit::of_error(&error)
    });
    out.status("`cfq --help` lists all commands");
    Ok(code)
}

/// Runs a command that sends requests to a running server.
async fn run_client_command(
    client: &cfq_proto::client::Client,
    paths: &Paths,
    out: Output,
    command: CliCommand,
) -> anyhow::Result<Code> {
    match command {
        CliCommand::Status => commands::status::run(client, out).await,
        CliCommand::Top => commands::top::run(client, out).await,
        CliCommand::Submit(args) => commands::submit::run(client, paths, out, args).await,
        CliCommand::Review(args) => commands::review::run(client, out, args).await,
        CliCommand::Acknowledge { tasks } => commands::acknowledge::run(client, out, tasks).await,
        CliCommand::Defect(args) => commands::defect::run(client, out, args).await,
        CliCommand::Ls(args) => commands::ls::run(client, out, args).await,
        CliCommand::Jobs(args) => commands::jobs::run(client, out, args).await,
        CliCommand::Explain { key } => commands::explain::run(client, out, key).await,
        CliCommand::Show(args) => commands::show::run(client, out, args).await,
        CliCommand::Watch(args) => commands::watch::command(client, out, args).await,
        CliCommand::Wait(args) => commands::wait::run(client, out, args).await,
        CliCommand::Logs(LogsArgs { task: Some(task), follow, tail, since, verbose, .. }) => {
            commands::logs::task(client, out, task, Selection { follow, tail, since }, verbose).await
        }
        CliCommand::Diff(args) => commands::diff::run(client, out, args).await,
        CliCommand::Archive { task, file, no_audit } => {
            commands::archive::run(client, out, task, file, !no_audit).await
        }
        CliCommand::Pull(args) => commands::pull::run(client, out, args.task, args.repo, args.iteration).await,
        CliCommand::Cancel { select, reason } => {
            commands::control::run(client, out, TaskAction::Cancel { reason }, select).await
        }
        CliCommand::Pause { select, reason } => {
            commands::control::run(client, out, TaskAction::Pause { reason }, select).await
        }
        CliCommand::Resume { select } => commands::control::run(client, out, TaskAction::Resume, select).await,
        CliCommand::Retry { select } => commands::control::run(client, out, TaskAction::Retry, select).await,
        CliCommand::Prioritize { priority, select } => {
            commands::control::run(client, out, TaskAction::SetPriority { priority }, select).await
        }
        CliCommand::Dead { command } => commands::dead::run(client, out, command).await,
        CliCommand::Schedule { command } => commands::schedule::run(client, out, command).await,
        CliCommand::Resolve(args) => commands::resolve::run(client, out, args).await,
        CliCommand::Pr { command } => commands::pr::run(client, out, command).await,
        CliCommand::Agents { command } => commands::agents::run(client, out, command).await,
        CliCommand::Nodes(args) => commands::nodes::run(client, out, args).await,
        CliCommand::Machines { command } => commands::machines::run(client, out, command).await,
        CliCommand::Token { command: TokenCommand::Create(args) } => commands::token::create(client, out, args).await,
        CliCommand::Token { command: TokenCommand::Rotate { name: Some(name) } } => {
            commands::token::rotate_of_client(client, out, &name).await
        }
        CliCommand::Token { command: TokenCommand::Ls } => commands::token::list(client, out).await,
        CliCommand::Token { command: TokenCommand::Rm { tokens, all } } => {
            commands::token::remove(client, out, tokens, all).await
        }
        CliCommand::Gc { dry_run, older_than } => commands::gc::run(client, out, dry_run, older_than).await,
        CliCommand::Logs(_)
        | CliCommand::Up(_)
        | CliCommand::Join(_)
        | CliCommand::Down
        | CliCommand::Demo(_)
        | CliCommand::Doctor
        | CliCommand::Map(_)
        | CliCommand::Checks { .. }
        | CliCommand::Engine { .. }
        | CliCommand::Service { .. }
        | CliCommand::Services { .. }
        | CliCommand::Backup { .. }
        | CliCommand::Restore { .. }
        | CliCommand::Token { .. }
        | CliCommand::Models { .. }
        | CliCommand::Mcp { .. }
        | CliCommand::Completions { .. }
        | CliCommand::Schema(_)
        | CliCommand::Man { .. }
        | CliCommand::Serve { .. } => Err(exit::usage("this command does not use a server")),
    }
}
