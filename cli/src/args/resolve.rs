//! Arguments of `cfq resolve`.

use cfq_proto::ids::TaskKey;
use cfq_proto::model::ModelId;
use cfq_proto::task::Agent;
use clap::{Args, ValueEnum};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum ActionArg {
    /// Change an agent's model and continue
    SwitchLlm,
    /// Continue with additional requirements
    RetryWithConstraints,
    /// Accept the best result, or a result that could not be handed off, as it is
    AcceptBestEffort,
    /// End the task as cancelled
    Abort,
    /// End the task as failed
    Fail,
}

#[derive(Debug, Args)]
pub struct ResolveArgs {
    /// Task number such as t42, or task id
    pub task: TaskKey,
    /// Action that answers the task; without it, the possible answers are printed, and a terminal asks for one
    #[arg(long, value_enum)]
    pub action: Option<ActionArg>,
    /// Agent whose model changes (with switch_llm) [default: alpha]
    #[arg(long, requires = "action")]
    pub agent: Option<Agent>,
    /// New model of that agent (with switch_llm)
    #[arg(long, requires = "action")]
    pub model: Option<ModelId>,
    /// Additional requirement (with retry_with_constraints); can be repeated
    #[arg(long = "constraint", value_name = "TEXT", requires = "action")]
    pub constraint: Vec<String>,
    /// Reason to record with the task, for example "not needed" (with fail)
    #[arg(long, requires = "action")]
    pub reason: Option<String>,
    /// Follow the task until it finishes or waits for a human
    #[arg(short, long)]
    pub watch: bool,
}
