//! The runner's configuration, written by `cfq up` and read by `cfq serve runner`.

use std::path::PathBuf;

use cfq_link::NatsConfig;
use cfq_proto::ids::RunnerId;
use cfq_proto::timing::Timing;
use serde::{Deserialize, Serialize};

use crate::checks::ProjectChecksConfig;

/// Number of tasks that a runner drives concurrently unless its configuration says otherwise.
pub const DEFAULT_CONCURRENCY: usize = 5;

/// Configuration of one runner process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Id under which the runner registers.
    pub runner: RunnerId,
    /// Folder of mirrors and worktrees, used by this runner only.
    pub data_dir: PathBuf,
    /// Number of tasks driven concurrently.
    #[serde(default = "default_concurrency")]
    pub concurrency: usize,
    /// Address and credentials of NATS.
    pub nats: NatsConfig,
    /// Intervals and timeouts shared by all services.
    #[serde(default)]
    pub timing: Timing,
    /// Folder of the server policies; it need not exist.
    #[serde(default)]
    pub server_policies_folder: Option<PathBuf>,
    /// What the checks of projects may use.
    #[serde(default)]
    pub checks: ProjectChecksConfig,
}

fn default_concurrency() -> usize {
    DEFAULT_CONCURRENCY
}
