//! API tokens of clients. The token in the data folder of the server is not one of them: it has no name, and allows
//! everything.

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::ids::{ApiTokenName, IdError};

/// What an API token allows. Each role includes the ones before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ApiTokenRole {
    /// Read the metrics.
    Metrics,
    /// Read everything: tasks with their texts and results, the queue, nodes, models.
    Read,
    /// Submit tasks, control these tasks, and call models.
    Submit,
    /// Everything, also on tasks of others: nodes, models, agents, schedules, machines, tokens.
    Admin,
}

impl ApiTokenRole {
    /// All roles, those that allow less first.
    pub const ALL: [Self; 4] = [Self::Metrics, Self::Read, Self::Submit, Self::Admin];

    /// Name of the role.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Metrics => "metrics",
            Self::Read => "read",
            Self::Submit => "submit",
            Self::Admin => "admin",
        }
    }
}

impl fmt::Display for ApiTokenRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for ApiTokenRole {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        let expected = "metrics, read, submit or admin";
        let role = Self::ALL.into_iter().find(|role| role.as_str() == text);
        role.ok_or_else(|| IdError { kind: "role of a token", text: text.to_owned(), expected })
    }
}

/// Limits of a token of the role [`ApiTokenRole::Submit`]. The limits of the server hold in addition.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ApiTokenLimits {
    /// Maximum number of tasks that have not ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub open_tasks: Option<u32>,
    /// Maximum number of tasks that hold a runner slot at the same time; further ones wait. A task holds none while its model
    /// call waits for a node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running_tasks: Option<u32>,
    /// Maximum number of open calls of the OpenAI-compatible API.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calls: Option<u32>,
    /// The repositories on which tasks may work, as absolute paths without symbolic links; empty: all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub repositories: Vec<String>,
}

/// Body of `POST /tokens`: creates an API token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ApiTokenRequest {
    /// Name of the token; no other valid token may have it.
    pub name: ApiTokenName,
    /// What the token allows.
    pub role: ApiTokenRole,
    /// Seconds for which the token is valid. If absent, it is valid until it is revoked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<u32>,
    /// Limits of the token.
    #[serde(default)]
    pub limits: ApiTokenLimits,
}

/// Reply to [`ApiTokenRequest`]. The token is not stored and cannot be read again.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ApiTokenReply {
    /// The token, for the header `Authorization: Bearer`.
    pub token: String,
    /// What the list of tokens has of it.
    #[serde(flatten)]
    pub view: ApiTokenView,
}

impl fmt::Debug for ApiTokenReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiTokenReply").field("view", &self.view).finish_non_exhaustive()
    }
}

/// An API token that is valid. The token itself is not stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ApiTokenView {
    /// Name of the token.
    pub name: ApiTokenName,
    /// What the token allows.
    pub role: ApiTokenRole,
    /// Time at which the token was created, in seconds since 1970.
    pub created_at: i64,
    /// Time at which the token becomes invalid, in seconds since 1970; absent: only when it is revoked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<i64>,
    /// Time of the last request with the token, in seconds since 1970, up to a minute too early.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_used_at: Option<i64>,
    /// Who created it.
    #[serde(default)]
    pub created_by: String,
    /// Limits of the token.
    #[serde(default)]
    pub limits: ApiTokenLimits,
}

/// Reply to `GET /tokens`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ApiTokenList {
    /// The valid API tokens, in the order of their names.
    pub tokens: Vec<ApiTokenView>,
}

/// Reply to `DELETE /tokens/{name}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ApiTokenRevoked {
    /// Name of the token that is no longer valid.
    pub name: ApiTokenName,
}
