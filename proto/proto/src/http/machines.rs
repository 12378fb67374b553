//! Machines that join the cluster, and the tokens with which they do.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::ids::NodeId;
use crate::model::ModelId;
use crate::timing::Timing;

/// Body of `POST /join-tokens`: creates a token with which one machine can join.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct JoinTokenRequest {
    /// Name that the machine must join under. If absent, the machine chooses its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<NodeId>,
    /// Seconds for which the token is valid.
    pub ttl_seconds: u32,
}

/// Reply to [`JoinTokenRequest`]. The token is not stored and cannot be read again.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct JoinTokenReply {
    /// The token, as a [`JoinToken`](crate::join_token::JoinToken).
    pub token: String,
    /// Name that the machine must join under, if the token names one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<NodeId>,
    /// Time at which the token becomes invalid, in seconds since 1970.
    pub expires_at: i64,
    /// URLs at which other machines reach the server, the most likely one first.
    pub urls: Vec<String>,
}

impl std::fmt::Debug for JoinTokenReply {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JoinTokenReply").field("expires_at", &self.expires_at).finish_non_exhaustive()
    }
}

/// A join token that can still be used. The token itself is not stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct JoinTokenView {
    /// Id of the token.
    pub id: Uuid,
    /// Name that the machine must join under, if the token names one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<NodeId>,
    /// Time at which the token becomes invalid, in seconds since 1970.
    pub expires_at: i64,
}

/// Reply to `GET /join-tokens`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct JoinTokenList {
    /// The join tokens that can still be used.
    pub tokens: Vec<JoinTokenView>,
}

/// Reply to `GET /machines`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MachineList {
    /// The machines that joined, with those whose access was revoked.
    pub machines: Vec<MachineView>,
}

/// Body of `POST /join-tokens/remove`: revokes tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct JoinTokenRemoval {
    /// Ids of the tokens. If absent, all tokens are revoked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ids: Option<Vec<Uuid>>,
}

/// Reply to [`JoinTokenRemoval`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct JoinTokensRemoved {
    /// Number of tokens that could be used before.
    pub removed: u64,
}

/// Body of `POST /join`, which needs no API token: the join token is in the body. A repetition with the same key gets the
/// same reply.
#[derive(Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct JoinRequest {
    /// The join token.
    pub token: String,
    /// Name that the machine must have; another name in the token is an error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<NodeId>,
    /// Name of the machine if neither `name` nor the token names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallback_name: Option<NodeId>,
    /// Public NATS key of the machine, whose private key never leaves it.
    pub nats_key: String,
    /// cfq version of the machine.
    pub version: String,
}

impl std::fmt::Debug for JoinRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JoinRequest").field("nats_key", &self.nats_key).finish_non_exhaustive()
    }
}

/// Reply to [`JoinRequest`]: what the machine needs to run a node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct JoinReply {
    /// Name of the machine's node.
    pub name: NodeId,
    /// Port of NATS, on the host of this API.
    pub nats_port: u16,
    /// Default models of the agents, which the machine should serve if it can.
    pub models: Vec<ModelId>,
    /// Timeouts and intervals of the cluster. Keys that only a newer version knows are left out.
    #[serde(deserialize_with = "crate::timing::known_keys")]
    pub timing: Timing,
}

/// A machine that joined.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MachineView {
    /// Name of the machine and of its node.
    pub name: NodeId,
    /// Public NATS key of the machine.
    pub nats_key: String,
    /// cfq version with which it joined.
    pub version: String,
    /// Time at which it joined, in seconds since 1970.
    pub joined_at: f64,
    /// Time at which its access was revoked, in seconds since 1970; absent if it has access.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked_at: Option<f64>,
    /// True if its node's heartbeats arrive.
    pub alive: bool,
    /// Time of the last heartbeat of its node, in seconds since 1970; absent if the node has never registered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_seen: Option<f64>,
}
