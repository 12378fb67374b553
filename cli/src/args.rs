//! Definition of the command line. The parser, the help texts and the shell completions are derived from it.

mod agents;
mod examples;
mod jobs;
mod machines;
mod map;
mod resolve;
mod review;
mod select;
mod subcommands;
mod task;
mod token;
mod up;
mod view;

use std::path::PathBuf;

use cfq_proto::ids::TaskKey;
use cfq_proto::task::Priority;
use clap::{Parser, Subcommand};

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
    ChecksCommand, CliEngineCommand, CommitArgs, DeadCommand, McpCommand, ModelSort, ModelStateArg, ModelsCommand,
    ModelsLsArgs, ServeCommand, ServicesCommand,
};
pub use task::{ScheduleAddArgs, ScheduleCommand, SubmitArgs, TaskArgs};
pub use token::{TokenCommand, TokenCreateArgs};
#[cfg(test)]
use up::SourceArg;
pub use up::{DemoArgs, ServiceArgs, UpArgs};
#[cfg(test)]
pub use view::NodeStateArg;
pub use view::{
    DiffArgs, LogsArgs, NodeSort, NodesArgs, PrCommand, PrLsArgs, PrSort, PullArgs, SchemaArgs, ShowArgs, WaitArgs,
    WatchArgs,
};

#[derive(Debug, Parser)]
#[command(name = "cfq", version, about = "Job queue for language-model work on machines you own", max_term_width = 100)]
#[command(after_help = examples::CFQ)]
pub struct Cli {
    /// Print results as JSON, one value per line
    #[arg(long, global = true)]
    pub json: bool,
    /// Data folder, for example ~/cfq [default: CFQ_DATA, else the XDG data folder; /var/lib/cfq as root]
    #[arg(long, global = true, value_name = "DIR")]
    pub data: Option<PathBuf>,
    /// Configuration file, for example ./cfq.toml [default: CFQ_CONFIG_FILE, else cfq.toml in ~/.config/cfq; in /etc/cfq as
    /// root]
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
    #[command(after_help = examples::JOIN)]
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
    #[command(after_help = examples::SUBMIT)]
    Submit(SubmitArgs),
    /// Let Beta review commits, or the result of a task
    #[command(after_help = examples::REVIEW)]
    Review(ReviewArgs),
    /// List tasks
    #[command(after_help = examples::LS)]
    Ls(LsArgs),
    /// Show tasks with their iterations, reviews and decisions
    #[command(after_help = examples::SHOW)]
    Show(ShowArgs),
    /// List model calls, newest first
    #[command(after_help = examples::JOBS)]
    Jobs(JobsArgs),
    /// Explain why a task or a model call waits, or where it runs
    #[command(after_help = examples::EXPLAIN)]
    Explain {
        /// Task number such as t42, task id, or job id as printed by `cfq jobs`
        #[arg(value_name = "TASK|JOB")]
        key: TaskKey,
    },
    /// Follow a task's events and generated text until the task finishes or waits for a human
    #[command(after_help = examples::WATCH)]
    Watch(WatchArgs),
    /// Wait until tasks have ended or need a human; for scripts
    #[command(after_help = examples::WAIT)]
    Wait(WaitArgs),
    /// Print the events of a task, or the log of a process
    #[command(after_help = examples::LOGS)]
    Logs(LogsArgs),
    /// Print a task's changes against its base commit, or between two iterations
    #[command(after_help = examples::DIFF)]
    Diff(DiffArgs),
    /// Create a branch with a task's best result in a repository
    #[command(after_help = examples::PULL)]
    Pull(PullArgs),
    /// Print a map of a repository: its folders, files and definitions, the most important ones first
    Map(MapArgs),
    /// Write a task's specification, results, reviews and events to one file
    Archive {
        /// Task number such as t42, or task id
        task: TaskKey,
        /// File to write, for example ~/t42.tar.zst [default: TASK.tar.zst in the current folder]
        #[arg(short, long, value_name = "FILE")]
        file: Option<PathBuf>,
        /// Leave out the events
        #[arg(long)]
        no_audit: bool,
    },
    /// Cancel tasks
    #[command(after_help = examples::CANCEL)]
    Cancel {
        #[command(flatten)]
        select: SelectArgs,
        /// Reason to record with the tasks, for example "not needed"
        #[arg(long, default_value = "", hide_default_value = true)]
        reason: String,
    },
    /// Pause tasks: no model is called and no step is executed for them until `cfq resume`
    Pause {
        #[command(flatten)]
        select: SelectArgs,
        /// Reason to record with the tasks, for example "not needed"
        #[arg(long, default_value = "", hide_default_value = true)]
        reason: String,
    },
    /// Resume paused tasks
    Resume {
        #[command(flatten)]
        select: SelectArgs,
    },
    /// Submit failed or cancelled tasks again, each as a new task
    #[command(after_help = examples::RETRY)]
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
    #[command(after_help = examples::PRIORITIZE)]
    Prioritize {
        /// New priority, P0 (highest) to P3
        priority: Priority,
        #[command(flatten)]
        select: SelectArgs,
    },
    /// List, show and requeue dead letters: model calls that are not retried any more
    #[command(arg_required_else_help = true, after_help = examples::DEAD)]
    Dead {
        #[command(subcommand)]
        command: DeadCommand,
    },
    /// Submit a task again and again, at the times of a cron expression
    #[command(arg_required_else_help = true, after_help = examples::SCHEDULE)]
    Schedule {
        #[command(subcommand)]
        command: ScheduleCommand,
    },
    /// Answer a task that needs a human: decide how it continues or ends
    #[command(after_help = examples::RESOLVE)]
    Resolve(ResolveArgs),
    /// List and show cfq's internal pull requests, which exist only in cfq and not on a site such as GitHub
    #[command(arg_required_else_help = true, after_help = examples::PR)]
    Pr {
        #[command(subcommand)]
        command: PrCommand,
    },
    /// List the agents, and change their models and instructions while cfq runs
    #[command(arg_required_else_help = true, after_help = examples::AGENTS)]
    Agents {
        #[command(subcommand)]
        command: AgentsCommand,
    },
    /// List nodes with their devices and models
    #[command(after_help = examples::NODES)]
    Nodes(NodesArgs),
    /// Manage the machines that run models for this server
    #[command(arg_required_else_help = true, after_help = examples::MACHINES)]
    Machines {
        #[command(subcommand)]
        command: MachinesCommand,
    },
    /// Delete ended tasks, and nodes without heartbeats, that are older than the retention
    Gc {
        /// Print what would be deleted, and delete nothing
        #[arg(long)]
        dry_run: bool,
        /// Delete tasks that ended more than DAYS ago, for example 30 [default: ended_tasks_days under [retention]]
        #[arg(long, value_name = "DAYS", allow_negative_numbers = true, value_parser = days)]
        older_than: Option<f64>,
    },
    /// Manage the models of this machine
    #[command(arg_required_else_help = true, after_help = examples::MODELS)]
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
    /// Write the database and the keys of this machine's server to a file; the server may run
    #[command(after_help = examples::BACKUP)]
    Backup {
        /// New file, for example cfq-monday.tar.zst
        file: PathBuf,
    },
    /// Restore a backup into a new data folder
    #[command(after_help = examples::RESTORE)]
    Restore {
        /// File that `cfq backup` wrote, for example cfq-monday.tar.zst
        file: PathBuf,
        /// Only check that the backup can be restored, in a temporary folder
        #[arg(long)]
        check: bool,
    },
    /// Show or fetch the Postgres and NATS programs that cfq runs
    #[command(alias = "engines", arg_required_else_help = true)]
    Services {
        #[command(subcommand)]
        command: ServicesCommand,
    },
    /// Manage the tokens with which clients use the server, and machines join it
    #[command(arg_required_else_help = true, after_help = examples::TOKEN)]
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
    #[command(arg_required_else_help = true, after_help = examples::CHECKS)]
    Checks {
        #[command(subcommand)]
        command: ChecksCommand,
    },
    /// Serve an editor's AI that delegates work to cfq, over MCP on stdin and stdout
    Mcp {
        #[command(subcommand)]
        command: Option<McpCommand>,
    },
    /// Print the JSON schema of the output of a command with --json
    #[command(after_help = examples::SCHEMA)]
    Schema(SchemaArgs),
    /// Print a shell completion script
    #[command(after_help = examples::COMPLETIONS)]
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
    fn every_command_and_flag_has_help_and_examples_are_valid() {
        fn check(command: &clap::Command, path: &str, missing: &mut Vec<String>) {
            let examples = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
                assert!(arg.get_help().is_some(), "{path}: {} has no help", arg.get_id());
                // The form of a value is shown by an example, or the values are listed; `-` is standard input.
                let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
                assert!(!help.ends_with("for example"), "{path}: {help}");
                let is_described = ["for example", "such as", "as printed by", "alpha or beta", "P0", "`-`"]
                    .iter()
                    .any(|words| help.contains(words));
                let is_used = arg.get_long().is_some_and(|flag| examples.contains(&format!("--{flag} ")));
                let takes_value = arg.get_action().takes_values()
                    && arg.get_possible_values().is_empty()
                    && arg.get_default_values().iter().all(|value| value.is_empty());
                if takes_value && !is_described && !is_used {
                    missing.push(format!("{path}: {} {help}", arg.get_id()));
                }
            }
            for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set()) {
                assert!(inner.get_about().is_some(), "{path} {} has no help", inner.get_name());
                check(inner, &format!("{path} {}", inner.get_name()), missing);
            }
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            for line in help.lines().filter_map(|line| line.strip_prefix("  cfq ")) {
                // The example ends before its explanation, a pipe, or the next command.
                let end = [line.find("   "), line.find(" | "), line.find(" && "), line.find(" > ")];
                let example = &line[..end.into_iter().flatten().min().unwrap_or(line.len())];
                let words = std::iter::once("cfq".to_owned()).chain(words(example));
                if let Err(error) = Cli::try_parse_from(words) {
                    panic!("cfq {example}: {error}");
                }
            }
        }
        /// The words of a line of a shell, without escapes.
        fn words(line: &str) -> Vec<String> {
            let (mut words, mut word, mut quote) = (Vec::new(), String::new(), None);
            for c in line.chars().chain([' ']) {
                match (c, quote) {
                    ('"' | '\'', None) => quote = Some(c),
                    (c, Some(open)) if c == open => quote = None,
                    (' ', None) if word.is_empty() => {}
                    (' ', None) => words.push(std::mem::take(&mut word)),
                    (c, _) => word.push(c),
                }
            }
            words
        }
        let mut command = Cli::command();
        command.build();
        let mut missing = Vec::new();
        check(&command, "cfq", &mut missing);
        assert!(missing.is_empty(), "without an example:\n{}", missing.join("\n"));
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
