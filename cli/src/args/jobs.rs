//! Arguments of `cfq jobs`.

use cfq_proto::http::JobFilter;
use cfq_proto::ids::{JobId, NodeId, TaskKey};
use cfq_proto::job::JobState;
use cfq_proto::model::ModelId;
use clap::Args;

#[derive(Debug, Args)]
pub struct JobsArgs {
    /// List only calls of this task: a number such as t42, or an id
    #[arg(long)]
    pub task: Option<TaskKey>,
    /// List only calls in this state: queued, placed, running, done, failed, dead or cancelled; several are separated
    /// by commas
    #[arg(long, value_delimiter = ',')]
    pub state: Vec<JobState>,
    /// List only calls whose current or last attempt is on this node
    #[arg(long)]
    pub node: Option<NodeId>,
    /// List only calls of this model, for example ollama:box/qwen3:8b
    #[arg(long)]
    pub model: Option<ModelId>,
    /// Continue a list after this job, which the list before names, for example 01a21f19-f8e0-7063-a870-c70afc904ba5
    #[arg(long, value_name = "JOB")]
    pub after: Option<JobId>,
    /// Maximum number of calls
    #[arg(long, default_value_t = 50, allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub limit: u32,
    /// Refresh the list every two seconds; needs a terminal
    #[arg(short, long)]
    pub watch: bool,
}

impl From<JobsArgs> for JobFilter {
    fn from(args: JobsArgs) -> Self {
        let JobsArgs { task, state, node, model, after, limit, watch: _ } = args;
        Self { task, states: state, node, model, after, limit }
    }
}
