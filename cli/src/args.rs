//! Definition of the command line. The parser, the help texts and the shell completions are derived from it.

mod agents;
mod jobs;
mod machines;
mod map;
mod resolve;
mod review;
mod select;
mod subcommands;
mod task;

use std::net::SocketAddr;
use std::path::PathBuf;

use cfq_proto::ids::TaskKey;
use cfq_proto::model::ModelId;
use cfq_proto::task::Priority;
use clap::{Args, Parser, Subcommand, ValueEnum};

/// Maximum of an option in days: a century.
const MAX_DAYS: f64 = 36_525.0;

pub use agents::AgentsCommand;
pub use jobs::JobsArgs;
pub use machines::{JoinArgs, MachinesCommand, ServiceCommand, ServiceInstallArgs};
pub use map::MapArgs;
pub use resolve::{ActionArg, ResolveArgs};
pub use review::{DefectArgs, ReviewArgs};
pub use select::{LsArgs, SelectArgs};
pub use subcommands::{
    ChecksCommand, CliEngineCommand, CommitArgs, DeadCommand, McpCommand, ModelsCommand, PrCommand, ServeCommand,
    ServicesCommand, TokenCommand,
};
pub use task::{ScheduleAddArgs, ScheduleCommand, SubmitArgs, TaskArgs};

#[derive(Debug, Parser)]
#[command(name = "cfq", version, about = "Job queue for language-model work on machines you own", max_term_width = 100)]
#[command(
    after_help = "Exit codes: 0 done, 2 usage error, 3 needs a human, 4 failed, 5 server unreachable, 6 timed out, 130 \
                  interrupted"
)]
pub struct Cli {
    /// Print results as JSON, one value per line
    #[arg(long, global = true)]
    pub json: bool,
    /// Data folder [default: CFQ_DATA, else the XDG data folder; /var/lib/cfq as root]
    #[arg(long, global = true, value_name = "DIR")]
    pub data: Option<PathBuf>,
    /// Configuration file [default: CFQ_CONFIG_FILE, else cfq.toml in the configuration folder]
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Without a command: the status, as `cfq status` prints it
    #[command(subcommand)]
    pub command: Option<CliCommand>,
}

#[derive(Debug, Subcommand)]
pub enum CliCommand {
    /// Start everything on this machine: Postgres, NATS, scheduler, node, runner
    Up(UpArgs),
    /// Join the server on another machine, and run models for it
    Join(JoinArgs),
    /// Stop what `cfq up` or `cfq join` started
    Down,
    /// Start everything, run one example task, stop everything, and print where the result is
    Demo(DemoArgs),
    /// Show whether everything runs, what waits, and which tasks need you
    #[command(alias = "ps")]
    Status,
    /// Show nodes, tasks and model calls live, in a terminal
    Top,
    /// Submit a task
    Submit(SubmitArgs),
    /// Let Beta review commits, or the result of a task
    Review(ReviewArgs),
    /// List tasks
    Ls(LsArgs),
    /// Show a task with its iterations, reviews and decisions
    Show {
        /// Task number such as t42, or task id
        task: TaskKey,
    },
    /// List model calls, newest first
    Jobs(JobsArgs),
    /// Explain why a task or a model call waits, or where it runs
    Explain {
        /// Task number such as t42, task id, or job id as printed by `cfq jobs`
        #[arg(value_name = "TASK|JOB")]
        key: TaskKey,
    },
    /// Follow a task's events and generated text until the task finishes or waits for a human
    Watch {
        /// Task number such as t42, or task id
        task: TaskKey,
        /// Do not print the generated text
        #[arg(long)]
        no_tokens: bool,
    },
    /// Wait until tasks have ended or need a human; for scripts
    Wait {
        /// Task numbers such as t42, or task ids
        #[arg(value_name = "TASK", required = true)]
        tasks: Vec<TaskKey>,
        /// Maximum wait, for example 90s, 10m or 2h [default: none]
        #[arg(long, value_name = "TIME", value_parser = crate::local_time::parse_duration)]
        timeout: Option<std::time::Duration>,
    },
    /// Print the events of a task, or the log of a process
    Logs {
        /// Task number such as t42, or task id
        #[arg(required_unless_present = "process")]
        task: Option<TaskKey>,
        /// Process whose log is printed: scheduler, node, runner, postgres, nats, up or join
        #[arg(long, conflicts_with = "task")]
        process: Option<String>,
    },
    /// Print a task's changes against its base commit
    Diff {
        /// Task number such as t42, or task id
        task: TaskKey,
        /// Iteration to print [default: the best]
        #[arg(long)]
        iteration: Option<u32>,
    },
    /// Create a branch with a task's best result in a repository
    Pull {
        /// Task number such as t42, or task id
        task: TaskKey,
        /// Repository in which the branch is created [default: the task's]
        #[arg(long, value_name = "DIR")]
        repo: Option<PathBuf>,
        /// Iteration to take [default: the best]
        #[arg(long)]
        iteration: Option<u32>,
    },
    /// Print a map of a repository: its folders, files and definitions, the most important ones first
    Map(MapArgs),
    /// Write a task's specification, results, reviews and events to one file
    Archive {
        /// Task number such as t42, or task id
        task: TaskKey,
        /// File to write [default: TASK.tar.zst in the current folder]
        #[arg(short, long, value_name = "FILE")]
        file: Option<PathBuf>,
        /// Leave out the events
        #[arg(long)]
        no_audit: bool,
    },
    /// Cancel tasks
    Cancel {
        #[command(flatten)]
        select: SelectArgs,
        /// Reason to record with the tasks
        #[arg(long, default_value = "")]
        reason: String,
    },
    /// Pause tasks: no model is called and no step is executed for them until `cfq resume`
    Pause {
        #[command(flatten)]
        select: SelectArgs,
        /// Reason to record with the tasks
        #[arg(long, default_value = "")]
        reason: String,
    },
    /// Resume paused tasks
    Resume {
        #[command(flatten)]
        select: SelectArgs,
    },
    /// Submit failed or cancelled tasks again, each as a new task
    Retry {
        #[command(flatten)]
        select: SelectArgs,
    },
    /// Acknowledge the failures of tasks, so that `cfq status` no longer counts them
    #[command(alias = "ack")]
    Acknowledge {
        /// Task numbers such as t42, or task ids
        #[arg(value_name = "TASK", required = true)]
        tasks: Vec<TaskKey>,
    },
    /// Report a defect that you found in the result of a task
    Defect(DefectArgs),
    /// Change the priority of tasks
    Prioritize {
        /// New priority, P0 (highest) to P3
        priority: Priority,
        #[command(flatten)]
        select: SelectArgs,
    },
    /// List, show and requeue dead letters: model calls that are not retried any more
    #[command(arg_required_else_help = true)]
    Dead {
        #[command(subcommand)]
        command: DeadCommand,
    },
    /// Submit a task again and again, at the times of a cron expression
    #[command(arg_required_else_help = true)]
    Schedule {
        #[command(subcommand)]
        command: ScheduleCommand,
    },
    /// Answer a task that needs a human: decide how it continues or ends
    Resolve(ResolveArgs),
    /// List and show cfq's internal pull requests, which exist only in cfq and not on a site such as GitHub
    #[command(arg_required_else_help = true)]
    Pr {
        #[command(subcommand)]
        command: PrCommand,
    },
    /// List the agents, and change their models and instructions while cfq runs
    #[command(arg_required_else_help = true)]
    Agents {
        #[command(subcommand)]
        command: AgentsCommand,
    },
    /// List nodes with their devices and models
    Nodes,
    /// Manage the machines that run models for this server
    #[command(arg_required_else_help = true)]
    Machines {
        #[command(subcommand)]
        command: MachinesCommand,
    },
    /// Delete ended tasks, and nodes without heartbeats, that are older than the retention
    Gc {
        /// Print what would be deleted, and delete nothing
        #[arg(long)]
        dry_run: bool,
        /// Delete tasks that ended more than DAYS ago [default: ended_tasks_days under [retention]]
        #[arg(long, value_name = "DAYS", value_parser = days)]
        older_than: Option<f64>,
    },
    /// Manage the models of this machine
    #[command(arg_required_else_help = true)]
    Models {
        #[command(subcommand)]
        command: ModelsCommand,
    },
    /// Start cfq with this machine, as a service of systemd
    #[command(arg_required_else_help = true)]
    Service {
        #[command(subcommand)]
        command: ServiceCommand,
    },
    /// Show or fetch the Postgres and NATS programs that cfq runs
    #[command(alias = "engines", arg_required_else_help = true)]
    Services {
        #[command(subcommand)]
        command: ServicesCommand,
    },
    /// Manage the API token of this machine's server, and create tokens with which machines join
    #[command(arg_required_else_help = true)]
    Token {
        #[command(subcommand)]
        command: TokenCommand,
    },
    /// Check the built-in inference engine
    #[command(arg_required_else_help = true)]
    Engine {
        #[command(subcommand)]
        command: CliEngineCommand,
    },
    /// Check this machine and print the next step for each problem
    Doctor,
    /// Declare, show and try the checks that cfq runs on each result of a project, such as its tests
    #[command(arg_required_else_help = true)]
    Checks {
        #[command(subcommand)]
        command: ChecksCommand,
    },
    /// Serve an editor's AI that delegates work to cfq, over MCP on stdin and stdout
    Mcp {
        #[command(subcommand)]
        command: Option<McpCommand>,
    },
    /// Print a shell completion script
    Completions {
        /// Shell that will run the script
        shell: clap_complete::Shell,
    },
    /// Write manual pages, one for each command
    Man {
        /// Folder to write to, such as ~/.local/share/man/man1; it is created if it does not exist
        folder: PathBuf,
    },
    /// Run the scheduler, the node or the runner; `cfq up` starts all three
    #[command(hide = true)]
    Serve {
        #[command(subcommand)]
        process: ServeCommand,
    },
}

#[derive(Debug, Args)]
pub struct UpArgs {
    /// Run in the background; the command returns once everything is ready
    #[arg(short, long)]
    pub detach: bool,
    /// Address of the HTTP API [default: server.bind in cfq.toml, else 127.0.0.1:7710]
    #[arg(long, env = "CFQ_BIND", value_name = "ADDR:PORT")]
    pub bind: Option<SocketAddr>,
    /// Let other machines reach this one, with TLS, and print the command with which they join
    #[arg(long, conflicts_with = "allow_plaintext")]
    pub lan: bool,
    /// Serve plain HTTP on an address other than loopback; also needs server.allow_plaintext in cfq.toml
    #[arg(long)]
    pub allow_plaintext: bool,
    #[command(flatten)]
    pub services: ServiceArgs,
    /// Default model for agents that have none configured (internal: `cfq up -d` passes its choice to the background
    /// process)
    #[arg(long, value_name = "MODEL", hide = true)]
    pub default_model: Option<ModelId>,
}

#[derive(Debug, Clone, Args)]
pub struct ServiceArgs {
    /// Postgres and NATS programs to run: installed ones (found), fetched ones (fetched), or installed ones where they
    /// exist and fetched ones otherwise (auto) [default: services.source in cfq.toml, else auto]
    // CFQ_ENGINES, the variable's name in cfq 0.1, is read in `config::service_options`.
    #[arg(long = "services", alias = "engines", value_enum, value_name = "SOURCE", env = "CFQ_SERVICES")]
    pub source: Option<SourceArg>,
    /// Folder of the Postgres programs to run, initdb and postgres
    #[arg(long, value_name = "DIR", env = "CFQ_POSTGRES_BIN")]
    pub postgres_bin: Option<PathBuf>,
    /// Path of the nats-server program to run
    #[arg(long, value_name = "FILE", env = "CFQ_NATS_BIN")]
    pub nats_bin: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SourceArg {
    Auto,
    Found,
    Fetched,
}

impl From<SourceArg> for cfq_deploy::ServiceSource {
    fn from(source: SourceArg) -> Self {
        match source {
            SourceArg::Auto => Self::Auto,
            SourceArg::Found => Self::Found,
            SourceArg::Fetched => Self::Fetched,
        }
    }
}

#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Model of both agents [default: the configured models, else a small model]
    #[arg(long)]
    pub model: Option<ModelId>,
    /// Sampling seed of the example task
    #[arg(long, default_value_t = 7)]
    pub seed: u64,
    /// Print only the result
    #[arg(long)]
    pub quiet: bool,
    #[command(flatten)]
    pub services: ServiceArgs,
}

/// Parses a number of days.
fn days(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(days) if (0.0..=MAX_DAYS).contains(&days) => Ok(days),
        Ok(_) | Err(_) => Err(format!("must be a number of days between 0 and {MAX_DAYS}, for example 7 or 0.5")),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(args: &[&str]) -> Cli {
        Cli::try_parse_from(args).unwrap_or_else(|error| panic!("{args:?}: {error}"))
    }

    #[test]
    fn clap_accepts_the_definition_of_the_command_line() {
        Cli::command().debug_assert();
    }

    #[test]
    fn engines_is_a_hidden_alias_of_services() {
        for name in ["services", "engines"] {
            let Some(CliCommand::Services { command }) = parse(&["cfq", name, "ls"]).command else { panic!("{name}") };
            assert!(matches!(command, ServicesCommand::Ls), "{name}");
        }
        for flag in ["--services", "--engines"] {
            let Some(CliCommand::Up(args)) = parse(&["cfq", "up", flag, "found"]).command else { panic!("{flag}") };
            assert_eq!(args.services.source, Some(SourceArg::Found), "{flag}");
        }
        for mut help in [Cli::command(), Cli::command().find_subcommand("up").cloned().unwrap()] {
            let text = help.render_long_help().to_string();
            assert!(text.contains("services") && !text.contains("engines"), "{text}");
        }
    }
}
