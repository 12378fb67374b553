//! Arguments of the commands that only show something, and of `cfq pull`.

use std::path::PathBuf;

use cfq_proto::ids::{NodeId, TaskKey};
use cfq_proto::label::Label;
use cfq_proto::model::ModelId;
use cfq_proto::pr::PrState;
use clap::{Args, Subcommand, ValueEnum};
use jiff::Timestamp;

#[derive(Debug, Args)]
pub struct ShowArgs {
    /// Task numbers such as t42, or task ids
    #[arg(value_name = "TASK", required = true)]
    pub tasks: Vec<TaskKey>,
    /// Also print token counts and times of the model calls, and why each one was placed on its node
    #[arg(short, long)]
    pub verbose: bool,
}

#[derive(Debug, Args)]
pub struct WatchArgs {
    /// Task numbers such as t42, or task ids; several tasks are followed without the generated text [default: the
    /// newest task that has not ended, else the newest]
    #[arg(value_name = "TASK")]
    pub tasks: Vec<TaskKey>,
    /// Do not print the generated text
    #[arg(long)]
    pub no_tokens: bool,
    /// Print the critic's replies as they are, in JSON, and not as one line for each defect
    #[arg(long, conflicts_with = "no_tokens")]
    pub raw: bool,
    /// Also print the steps of the hand-off, and why each call was placed on its node
    #[arg(short, long)]
    pub verbose: bool,
}

#[derive(Debug, Args)]
pub struct LogsArgs {
    /// Task number such as t42, or task id
    #[arg(required_unless_present = "process")]
    pub task: Option<TaskKey>,
    /// Process whose log is printed: scheduler, node, runner, postgres, nats, up or join
    #[arg(long, conflicts_with = "task")]
    pub process: Option<String>,
    /// Print new lines as they are written; for a task, until it ends or needs a human
    #[arg(short, long)]
    pub follow: bool,
    /// Print only the last N lines, for example 20
    #[arg(short = 'n', long, value_name = "N", allow_negative_numbers = true)]
    pub tail: Option<usize>,
    /// Print only lines since this time, for example 10m (ago), 2026-12-01T06:30:00Z or "2026-12-01 06:30"
    #[arg(long, value_name = "TIME", value_parser = crate::local_time::parse_past)]
    pub since: Option<Timestamp>,
    /// Also print the steps of a task's hand-off, and why each call was placed on its node
    #[arg(short, long, conflicts_with = "process")]
    pub verbose: bool,
}

#[derive(Debug, Args)]
pub struct DiffArgs {
    /// Task number such as t42, or task id
    pub task: TaskKey,
    /// Print only the changes of these files and folders, for example src/add.py
    #[arg(value_name = "PATH")]
    pub paths: Vec<String>,
    /// Iteration to print, for example 2 [default: the best]
    #[arg(long, value_name = "N")]
    pub iteration: Option<u32>,
    /// Print the difference from the result of iteration N, and not from the base commit
    #[arg(long, value_name = "N")]
    pub from: Option<u32>,
    /// Print the changed files with the number of changed lines
    #[arg(long)]
    pub stat: bool,
    /// Print only the paths of the changed files
    #[arg(long, conflicts_with = "stat")]
    pub name_only: bool,
    /// When to use colours [default: auto, on a terminal unless NO_COLOR is set or CLICOLOR is 0]
    #[arg(long, value_name = "WHEN", value_enum)]
    pub color: Option<ColorArg>,
    /// Print directly, and not through the pager of CFQ_PAGER or PAGER [default: less]
    #[arg(long)]
    pub no_pager: bool,
}

/// When to use colours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ColorArg {
    Auto,
    Always,
    Never,
}

impl ColorArg {
    /// Whether to use colours; `automatic` is the decision for a terminal.
    pub fn colors(self, automatic: bool) -> bool {
        match self {
            Self::Auto => automatic,
            Self::Always => true,
            Self::Never => false,
        }
    }
}

#[derive(Debug, Subcommand)]
pub enum PrCommand {
    /// List pull requests, the newest first
    Ls(PrLsArgs),
    /// Show a pull request with its history
    Show {
        /// Number of the pull request, for example 7
        #[arg(value_parser = super::subcommands::pr_number)]
        number: i64,
    },
}

/// Order of a list of pull requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PrSort {
    Newest,
    Oldest,
}

#[derive(Debug, Args)]
pub struct PrLsArgs {
    /// List only pull requests in this state, for example merged; several are separated by commas
    #[arg(long, value_name = "PR_STATE", value_delimiter = ',')]
    pub state: Vec<PrState>,
    /// List only pull requests of tasks with this label, such as nightly; can be repeated, for tasks with all labels
    #[arg(long, value_delimiter = ',')]
    pub label: Vec<Label>,
    /// Order of the list
    #[arg(long, value_enum, default_value_t = PrSort::Newest)]
    pub sort: PrSort,
    /// List only pull requests of tasks of the repository that contains this folder, for example ~/shop
    #[arg(long, value_name = "DIR")]
    pub repo: Option<PathBuf>,
    /// List only pull requests opened since this time, for example 2h or 7d (ago), 2026-12-01T06:30:00Z or
    /// "2026-12-01 06:30"
    #[arg(long, value_name = "TIME", value_parser = crate::local_time::parse_past)]
    pub since: Option<Timestamp>,
    /// Maximum number of pull requests
    #[arg(long, default_value_t = 50, allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub limit: u32,
    /// Continue a list after this pull request, for example 7
    #[arg(long, value_name = "NUMBER", value_parser = super::subcommands::pr_number)]
    pub after: Option<i64>,
    /// Refresh the list every two seconds; needs a terminal
    #[arg(short, long)]
    pub watch: bool,
}

#[derive(Debug, Args)]
pub struct WaitArgs {
    /// Task numbers such as t42, or task ids
    #[arg(value_name = "TASK", required_unless_present = "label", conflicts_with = "label")]
    pub tasks: Vec<TaskKey>,
    /// Wait for the tasks with this label, such as nightly, that have not ended; failed ones that are not acknowledged count,
    /// too; can be repeated, for tasks with all labels
    #[arg(long, value_delimiter = ',')]
    pub label: Vec<Label>,
    /// End the wait with the first task that failed, was cancelled, or needs a human
    #[arg(long)]
    pub fail_fast: bool,
    /// Maximum wait, for example 90s, 10m or 2h [default: none]
    #[arg(long, value_name = "TIME", value_parser = crate::local_time::parse_duration)]
    pub timeout: Option<std::time::Duration>,
}

/// Arguments of `cfq nodes`.
#[derive(Debug, Default, Args)]
pub struct NodesArgs {
    /// Names of nodes, such as gpu1 [default: all]
    #[arg(value_name = "NODE")]
    pub nodes: Vec<NodeId>,
    /// List only nodes in this state, for example unreachable; several are separated by commas
    #[arg(long, value_enum, value_delimiter = ',')]
    pub state: Vec<NodeStateArg>,
    /// List only nodes that have this model, for example hf:Qwen/Qwen3-8B-GGUF:Qwen3-8B-Q4_K_M.gguf
    #[arg(long)]
    pub model: Option<ModelId>,
    /// Order of the list: name, or running (those with the most running jobs first) [default: those that are
    /// unreachable or get no work, then by name]
    #[arg(long, value_enum)]
    pub sort: Option<NodeSort>,
    /// Maximum number of nodes, for example 20 [default: all]
    #[arg(long, allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..))]
    pub limit: Option<u32>,
    /// Refresh the list every two seconds; needs a terminal
    #[arg(short, long)]
    pub watch: bool,
}

/// A state of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum NodeStateArg {
    Alive,
    Cordoned,
    Draining,
    Unreachable,
}

impl NodeStateArg {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Alive => "alive",
            Self::Cordoned => "cordoned",
            Self::Draining => "draining",
            Self::Unreachable => "unreachable",
        }
    }
}

/// Order of a list of nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum NodeSort {
    Name,
    Running,
}

/// Arguments of `cfq schema`.
#[derive(Debug, Args)]
pub struct SchemaArgs {
    /// Name of the output, for example ls or show [default: list the names]
    pub name: Option<String>,
}

/// Arguments of `cfq pull`.
#[derive(Debug, Args)]
pub struct PullArgs {
    /// Task number such as t42, or task id
    pub task: TaskKey,
    /// Repository in which the branch is created [default: the task's]
    #[arg(long, value_name = "DIR")]
    pub repo: Option<PathBuf>,
    /// Iteration to take [default: the best]
    #[arg(long, value_name = "N")]
    pub iteration: Option<u32>,
}
