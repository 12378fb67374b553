//! Arguments that select tasks.

use std::path::PathBuf;

use cfq_proto::http::{ListPosition, TaskSort};
use cfq_proto::ids::TaskKey;
use cfq_proto::label::Label;
use cfq_proto::task::{Priority, TaskState};
use clap::Args;

/// Arguments of `cfq ls`.
#[derive(Debug, Args)]
pub struct LsArgs {
    /// List only tasks in this state, for example running, escalated or merged; several are separated by commas
    #[arg(long, value_delimiter = ',')]
    pub state: Vec<TaskState>,
    /// List only tasks of this priority, P0 to P3; several are separated by commas
    #[arg(long, value_delimiter = ',')]
    pub priority: Vec<Priority>,
    /// List only tasks with this label; can be repeated, tasks with all labels are listed
    #[arg(long, value_delimiter = ',')]
    pub label: Vec<Label>,
    /// List only tasks of the repository that contains this folder, for example ~/shop
    #[arg(long, value_name = "DIR")]
    pub repo: Option<PathBuf>,
    /// List only tasks submitted since this time, for example 2h or 7d (ago), 2026-12-01T06:30:00Z or "2026-12-01
    /// 06:30"
    #[arg(long, value_name = "TIME", value_parser = crate::local_time::parse_past)]
    pub since: Option<jiff::Timestamp>,
    /// Order of the list: newest, oldest, or priority (the oldest of each priority first) [default: those that need a
    /// human, then the newest]
    #[arg(long)]
    pub sort: Option<TaskSort>,
    /// Maximum number of tasks, for example 200 [default: 50, and those that need a human]
    #[arg(long, allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub limit: Option<u32>,
    /// Continue a list after this position, which the list before names, for example P1.t42
    #[arg(long, value_name = "POSITION")]
    pub after: Option<ListPosition>,
    /// Refresh the list every two seconds; needs a terminal
    #[arg(short, long)]
    pub watch: bool,
    /// Print only the numbers of the tasks, one per line, for other commands
    #[arg(short, long, conflicts_with = "watch")]
    pub quiet: bool,
}

/// Tasks that a command changes.
#[derive(Debug, Args)]
pub struct SelectArgs {
    /// Task numbers such as t42, or task ids
    #[arg(value_name = "TASK", required_unless_present_any = ["state", "label", "all"],
          conflicts_with_all = ["state", "label", "all"])]
    pub tasks: Vec<TaskKey>,
    /// Select the tasks in this state, for example ready, paused or failed
    #[arg(long, conflicts_with = "all")]
    pub state: Option<TaskState>,
    /// Select the tasks with this label, such as nightly, to which the command applies; can be repeated, for tasks with
    /// all labels
    #[arg(long, value_delimiter = ',')]
    pub label: Vec<Label>,
    /// Select all tasks to which the command applies
    #[arg(long)]
    pub all: bool,
    /// Print what would be changed, and change nothing
    #[arg(long)]
    pub dry_run: bool,
}
