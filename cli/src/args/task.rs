//! Arguments that describe a task, of `cfq submit` and `cfq schedule add`.

use std::path::PathBuf;

use cfq_proto::ids::TaskKey;
use cfq_proto::label::Label;
use cfq_proto::model::ModelId;
use cfq_proto::task::Priority;
use clap::{Args, Subcommand};

#[derive(Debug, Args)]
pub struct TaskArgs {
    /// Description of the task; read from standard input if absent or `-`
    pub text: Option<String>,
    /// Task file in YAML, or `-` for standard input; flags override its fields, --context, --constraint, --label and
    /// --after add to them
    #[arg(short, long, value_name = "FILE", conflicts_with = "text")]
    pub file: Option<PathBuf>,
    /// Git repository to work on, for example ~/shop [default: the one that contains the current folder]
    #[arg(long, value_name = "DIR")]
    pub repo: Option<PathBuf>,
    /// Commit, branch or tag to start from, for example main [default: HEAD]
    #[arg(long)]
    pub base: Option<String>,
    /// Programming language of the result, for example python
    #[arg(long)]
    pub language: Option<String>,
    /// File of the repository to show to the models, for example src/add.py, or a pattern such as 'src/*.py'; @FILE
    /// reads paths from FILE, one per line; can be repeated
    #[arg(long = "context", value_name = "PATH")]
    pub context: Vec<String>,
    /// Requirement on the result, for example "no new dependencies"; can be repeated
    #[arg(long = "constraint", value_name = "TEXT")]
    pub constraint: Vec<String>,
    /// Model of the creator (Alpha), for example ollama:box/qwen2.5-coder:14b [default: agents.alpha.model in cfq.toml]
    #[arg(long)]
    pub alpha: Option<ModelId>,
    /// Model of the critic (Beta), for example ollama:box/qwen3:14b [default: agents.beta.model in cfq.toml]
    #[arg(long)]
    pub beta: Option<ModelId>,
    /// Review score, out of 100, that the result must reach, for example 90
    #[arg(long, allow_negative_numbers = true)]
    pub threshold: Option<f64>,
    /// Maximum number of iterations, for example 3
    #[arg(long, allow_negative_numbers = true)]
    pub max_iterations: Option<u32>,
    /// Maximum working time in minutes, for example 30: the time since the first generated token, without waits for a
    /// node or a human
    #[arg(long, allow_negative_numbers = true)]
    pub timeout_minutes: Option<f64>,
    /// Priority, P0 (highest) to P3
    #[arg(long)]
    pub priority: Option<Priority>,
    /// Label, such as nightly or team=web, by which commands select tasks; can be repeated
    #[arg(long, value_name = "LABEL", value_delimiter = ',')]
    pub label: Vec<Label>,
    /// Sampling seed of both agents, for example 7
    #[arg(long)]
    pub seed: Option<u64>,
}

#[derive(Debug, Args)]
pub struct SubmitArgs {
    #[command(flatten)]
    pub task: TaskArgs,
    /// Task that must be merged, accepted or reviewed before this one starts: a number such as t42, or an id; can be
    /// repeated
    #[arg(long = "after", value_name = "TASK")]
    pub after: Vec<TaskKey>,
    /// Earliest start, for example 2026-12-01T06:30:00Z, "2026-12-01 06:30" (local time), "2026-12-01 06:30
    /// Europe/Berlin" or "in 2h 30m"
    #[arg(long = "at", value_name = "TIME", value_parser = crate::local_time::parse)]
    pub run_at: Option<jiff::Timestamp>,
    /// Time after which no model is called, for example "in 6h", or in another form of --at
    #[arg(long, value_name = "TIME", value_parser = crate::local_time::parse)]
    pub deadline: Option<jiff::Timestamp>,
    /// Idempotency key, for example nightly-2026-12-01: a second submission with this key creates no second task
    #[arg(long, value_name = "KEY")]
    pub idempotency_key: Option<String>,
    /// Write the description in the editor of VISUAL or EDITOR [default: vi]
    #[arg(short, long, conflicts_with = "file")]
    pub edit: bool,
    /// Follow the task until it finishes or waits for a human
    #[arg(short, long)]
    pub watch: bool,
    /// Check the task, show its first prompt and the nodes that could run it, and submit nothing
    #[arg(long, conflicts_with_all = ["watch", "idempotency_key"])]
    pub dry_run: bool,
}

#[derive(Debug, Subcommand)]
pub enum ScheduleCommand {
    /// Add a schedule
    Add(ScheduleAddArgs),
    /// List schedules
    Ls,
    /// Remove a schedule; its tasks stay
    Rm {
        /// Name of the schedule, as printed by `cfq schedule ls`
        name: String,
    },
    /// Submit the task of a schedule now; its next time stays the same
    Run {
        /// Name of the schedule, as printed by `cfq schedule ls`
        name: String,
    },
    /// Pause a schedule: it submits no tasks until it is resumed
    Pause {
        /// Name of the schedule, as printed by `cfq schedule ls`
        name: String,
    },
    /// Continue a paused schedule with its next time; times that passed meanwhile are left out
    Resume {
        /// Name of the schedule, as printed by `cfq schedule ls`
        name: String,
    },
}

#[derive(Debug, Args)]
pub struct ScheduleAddArgs {
    /// Name of the schedule, for example nightly: letters, digits, - and _
    pub name: String,
    /// Times in the form of crontab: minute, hour, day of the month, month, day of the week, for example "30 6 * * 1-5"
    #[arg(long, value_name = "EXPRESSION")]
    pub cron: String,
    /// Time zone of these times, for example Europe/Berlin [default: this machine's]
    #[arg(long)]
    pub zone: Option<String>,
    #[command(flatten)]
    pub task: TaskArgs,
}
