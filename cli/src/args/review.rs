//! Arguments of `cfq review` and `cfq defect`.

use std::path::PathBuf;

use cfq_proto::ids::TaskKey;
use cfq_proto::label::Label;
use cfq_proto::model::ModelId;
use cfq_proto::review::Severity;
use cfq_proto::task::{Priority, ReviewDepth};
use clap::Args;

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  cfq review                      what the last commit changed\n  \
                        cfq review main..topic          what the branch topic changed since it left main\n  \
                        cfq review t42                  the best result of the task t42\n\n\
                        Uncommitted changes are not reviewed.")]
pub struct ReviewArgs {
    /// What to review: a commit (what that commit changed), BASE..HEAD (what HEAD changed since it left BASE), or a
    /// task such as t42. For a branch with the name of a task, write refs/heads/t42
    #[arg(value_name = "COMMIT|RANGE|TASK", default_value = "HEAD")]
    pub change: String,
    /// Result of this iteration of the task, for example 2 [default: the best]
    #[arg(long, value_name = "N")]
    pub iteration: Option<u32>,
    /// How thoroughly to review. quick: defects that must be fixed. standard: as in the loop. comprehensive: the
    /// project's checks, then correctness, security, and tests with maintainability in separate calls
    #[arg(long, value_name = "DEPTH", default_value_t = ReviewDepth::Standard)]
    pub depth: ReviewDepth,
    /// What the change should do, for example "read large files in blocks" [default: the messages of its commits, or
    /// the description of the task]
    #[arg(short = 'm', long, value_name = "TEXT")]
    pub description: Option<String>,
    /// File of the repository to show to the critic in addition, for example src/add.py; can be repeated
    #[arg(long = "context", value_name = "PATH")]
    pub context: Vec<String>,
    /// Git repository of the commits, for example ~/shop [default: the one that contains the current folder]
    #[arg(long, value_name = "DIR")]
    pub repo: Option<PathBuf>,
    /// Model of the critic (Beta), for example ollama:box/qwen3:14b [default: agents.beta.model in cfq.toml]
    #[arg(long, value_name = "MODEL")]
    pub beta: Option<ModelId>,
    /// Priority, P0 (highest) to P3
    #[arg(long)]
    pub priority: Option<Priority>,
    /// Label, such as nightly, by which commands select tasks; can be repeated
    #[arg(long, value_name = "LABEL", value_delimiter = ',')]
    pub label: Vec<Label>,
    /// Idempotency key, for example nightly-2026-12-01: a second submission with this key creates no second task
    #[arg(long, value_name = "KEY")]
    pub idempotency_key: Option<String>,
    /// Submit the review and return at once; `cfq show TASK` prints the review later
    #[arg(long)]
    pub no_wait: bool,
}

#[derive(Debug, Args)]
pub struct DefectArgs {
    /// Task number such as t42, or task id
    pub task: TaskKey,
    /// What is wrong, for example "fails for empty files"
    pub description: String,
    /// How severe it is: critical, major, minor or info
    #[arg(long, default_value = "major")]
    pub severity: Severity,
    /// Where it is, for example src/add.py:3
    #[arg(long, value_name = "PATH:LINE", default_value = "", hide_default_value = true)]
    pub location: String,
    /// How to fix it, for example "return early"
    #[arg(long, value_name = "TEXT")]
    pub fix: Option<String>,
}
