//! Arguments of `cfq agents`.

use cfq_proto::model::ModelId;
use cfq_proto::task::Agent;
use clap::Subcommand;

#[derive(Debug, Subcommand)]
pub enum AgentsCommand {
    /// List the agents, their models and instructions
    Ls,
    /// Change the model of an agent while cfq runs, for all tasks that name no model
    Set {
        /// alpha or beta
        agent: Agent,
        /// Id of the model, such as ollama:box/qwen2.5-coder:7b
        model: ModelId,
    },
    /// Add instructions to the prompts of an agent, for all tasks that have none of their own
    Instruct {
        /// alpha or beta
        agent: Agent,
        /// The instructions; `-` reads them from standard input
        #[arg(required_unless_present = "clear")]
        text: Option<String>,
        /// Remove the instructions
        #[arg(long, conflicts_with = "text")]
        clear: bool,
    },
    /// Return to the model of cfq.toml
    Reset {
        /// alpha or beta
        agent: Agent,
    },
}
