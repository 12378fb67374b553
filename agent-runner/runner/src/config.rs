//! The runner's configuration, written by `cfq up` and read by `cfq serve runner`.

use std::path::PathBuf;

use cfq_link::NatsConfig;
use cfq_proto::ids::RunnerId;
use cfq_proto::timing::Timing;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    pub runner: RunnerId,
    /// Mirrors and worktrees; nobody else's.
    pub data_dir: PathBuf,
    /// Tasks driven at once.
    #[serde(default = "two")]
    pub concurrency: usize,
    pub nats: NatsConfig,
    #[serde(default)]
    pub timing: Timing,
}

fn two() -> usize {
    2
}
