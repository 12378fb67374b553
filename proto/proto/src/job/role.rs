//! Origin of a model call.

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::ids::IdError;
use crate::task::Agent;

/// Origin of a model call: an agent of a task, or a client of the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum JobRole {
    /// The creator of a task.
    Alpha,
    /// The critic of a task.
    Beta,
    /// A client of the OpenAI-compatible API.
    Client,
}

impl JobRole {
    /// Returns the role's name in JSON and SQL.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Alpha => "alpha",
            Self::Beta => "beta",
            Self::Client => "client",
        }
    }
}

impl From<Agent> for JobRole {
    fn from(agent: Agent) -> Self {
        match agent {
            Agent::Alpha => Self::Alpha,
            Agent::Beta => Self::Beta,
        }
    }
}

impl PartialEq<Agent> for JobRole {
    fn eq(&self, agent: &Agent) -> bool {
        *self == Self::from(*agent)
    }
}

impl fmt::Display for JobRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for JobRole {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        [Self::Alpha, Self::Beta, Self::Client].into_iter().find(|role| role.as_str() == text).ok_or(IdError {
            kind: "role",
            text: text.to_owned(),
            expected: "alpha, beta or client",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_is_the_same_in_json_and_sql() {
        for role in [JobRole::Alpha, JobRole::Beta, JobRole::Client] {
            assert_eq!(serde_json::to_value(role).unwrap(), role.as_str());
            assert_eq!(role.as_str().parse(), Ok(role));
        }
        for agent in [Agent::Alpha, Agent::Beta] {
            assert_eq!((JobRole::from(agent).as_str(), JobRole::from(agent) == agent), (agent.as_str(), true));
        }
    }
}
