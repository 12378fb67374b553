//! Types for the deletion of ended tasks, and for clients whose position in a feed was deleted.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Data of a `reset` frame of an event feed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FeedReset {
    /// Why the client may have missed events.
    pub reason: FeedResetReason,
    /// The reason as text, for users.
    pub message: String,
}

/// Why a client of an event feed may have missed events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FeedResetReason {
    /// The database was restored, and the client's position belongs to the time before. All events follow.
    Restored,
    /// Events after the client's position were deleted. The kept ones follow.
    Deleted,
}

/// Body of `POST /gc`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GcRequest {
    /// Whether nothing is deleted, and the reply says what would be.
    #[serde(default)]
    pub dry_run: bool,
    /// Days after its end after which a task is deleted; the configured retention if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub older_than_days: Option<f64>,
}

/// Reply to `POST /gc`: what was deleted, or would be.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct GcReply {
    /// Tasks that ended before this time are deleted, in seconds since 1970; `None` if ended tasks are kept.
    pub ended_before: Option<f64>,
    /// Number of tasks.
    pub tasks: u64,
    /// Number of events of these tasks.
    pub events: u64,
    /// Size in bytes of the blobs (large prompts, results and files) that belong only to these tasks.
    pub blob_bytes: u64,
    /// Number of nodes without recent heartbeats.
    pub nodes: u64,
    /// Number of runners without recent heartbeats.
    pub runners: u64,
    /// False if there is more to delete: repeat the request.
    pub finished: bool,
}
