//! `configure_endpoint` and `set_system_prompts`: the model and the instructions of an agent are changed while cfq runs.

use cfq_proto::http::AgentPatch;
use cfq_proto::model::ModelId;
use cfq_proto::task::Agent;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::access::Access;
use super::error::ToolError;

/// Arguments of `configure_endpoint`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ConfigureEndpoint {
    /// The agent.
    pub agent: Agent,
    /// Where its replies come from.
    pub provider: Provider,
}

/// A model that the nodes can use. Addresses and keys of servers are only in the user's configuration.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Provider {
    /// Id of the model, such as ollama:box/qwen2.5-coder:7b, openai:box/MODEL, command:claude or hf:ORG/REPO:FILE.
    /// `get_project_status` lists models. Without it, the agent returns to the model of the configuration.
    #[serde(default)]
    pub model: Option<ModelId>,
}

/// Reply to `configure_endpoint`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ConfiguredEndpoint {
    /// The agent.
    pub agent: Agent,
    /// The model that it uses now, for all tasks that name no model.
    pub model: ModelId,
    /// The model that it used before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub previous_model: Option<ModelId>,
    /// Node that confirmed that it can use the model.
    pub node: String,
    /// Number of calls that waited for the model before, and wait for the new one now.
    pub moved_calls: u64,
    /// Number of calls that run, and finish with the model before.
    pub running_calls: u64,
}

/// `configure_endpoint`.
pub async fn configure(access: &Access, arguments: ConfigureEndpoint) -> Result<ConfiguredEndpoint, ToolError> {
    let ConfigureEndpoint { agent, provider } = arguments;
    let patch = AgentPatch { model: Some(provider.model), ..AgentPatch::default() };
    let reply = access.client()?.change_agent(agent, &patch).await?;
    let (Some(model), Some(node)) = (reply.agent.model, reply.node) else {
        return Err(ToolError("the scheduler changed no model; it may be of an earlier version".to_owned()));
    };
    Ok(ConfiguredEndpoint {
        agent,
        model,
        previous_model: reply.previous_model,
        node: node.to_string(),
        moved_calls: reply.moved_calls,
        running_calls: reply.running_calls,
    })
}

/// Arguments of `set_system_prompts`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SetSystemPrompts {
    /// The agent.
    pub agent: Agent,
    /// What is added to its prompts.
    pub prompts: SystemPrompts,
}

/// Texts for an agent.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SystemPrompts {
    /// Instructions for all tasks that have none of their own, at most 8192 bytes: rules of style, what to look at in
    /// reviews. An empty text removes them. The form of replies and the limits of the loop cannot be changed.
    pub instructions: String,
}

/// Reply to `set_system_prompts`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct SystemPromptsSet {
    /// The agent.
    pub agent: Agent,
    /// The instructions that it gets from its next call on; absent if there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instructions: Option<String>,
}

/// `set_system_prompts`.
pub async fn set_prompts(access: &Access, arguments: SetSystemPrompts) -> Result<SystemPromptsSet, ToolError> {
    let SetSystemPrompts { agent, prompts } = arguments;
    let patch = AgentPatch { instructions: Some(Some(prompts.instructions)), ..AgentPatch::default() };
    let reply = access.client()?.change_agent(agent, &patch).await?;
    Ok(SystemPromptsSet { agent, instructions: reply.agent.instructions })
}
