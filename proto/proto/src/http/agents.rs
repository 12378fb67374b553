//! The settings of the agents, which can be changed while cfq runs.

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

use crate::ids::NodeId;
use crate::model::ModelId;
use crate::task::Agent;

/// Maximum length of an agent's instructions, in bytes.
pub const MAX_INSTRUCTIONS_BYTES: usize = 8 << 10;

/// The settings of all agents.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AgentList {
    /// One entry for each agent.
    pub agents: Vec<AgentView>,
}

/// The settings of an agent, for tasks that have none of their own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AgentView {
    /// The agent.
    pub agent: Agent,
    /// The model that it uses now.
    pub model: Option<ModelId>,
    /// The model of the configuration.
    pub configured_model: Option<ModelId>,
    /// The model that is called if the agent's model cannot answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallback: Option<ModelId>,
    /// Instructions that are added to its prompts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instructions: Option<String>,
}

/// Body of `PATCH /agents/AGENT`. Absent fields do not change.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AgentPatch {
    /// The model that the agent uses from now on; `null` for the one of the configuration.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    #[schemars(with = "Option<ModelId>")]
    pub model: Option<Option<ModelId>>,
    /// Instructions that are added to its prompts; `null` for none.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    #[schemars(with = "Option<String>")]
    pub instructions: Option<Option<String>>,
}

/// Reads a field that is present, so that `null` differs from an absent field.
fn present<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Option<Option<T>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

/// Reply to [`AgentPatch`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AgentPatchReply {
    /// The settings after the change.
    #[serde(flatten)]
    pub agent: AgentView,
    /// The model that it used before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous_model: Option<ModelId>,
    /// Node that can use the model; absent if the model was not changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeId>,
    /// Number of calls that waited for the model before, and wait for the new one now.
    pub moved_calls: u64,
    /// Number of calls that run. They finish with their model; if they fail, the next attempt uses the new one.
    pub running_calls: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_removes_and_absent_keeps() {
        for (text, model, instructions) in [
            ("{}", None, None),
            (r#"{"model":null}"#, Some(None), None),
            (r#"{"instructions":"x"}"#, None, Some(Some("x".to_owned()))),
        ] {
            let patch: AgentPatch = serde_json::from_str(text).unwrap();
            assert_eq!(patch, AgentPatch { model, instructions });
            assert_eq!(serde_json::to_string(&patch).unwrap(), text);
        }
    }
}
