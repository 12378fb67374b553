//! When a loop ends (L2, L3): the figures a declaration and a task give.

use serde::{Deserialize, Serialize};

/// The figures of the dual-agent loop unless the task says otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Score out of 100 at which the loop is done.
    pub threshold: f64,
    /// At most this many iterations in one window.
    pub max_iterations: u32,
    /// Working time of one window in milliseconds.
    pub timeout_ms: u64,
    /// A best score raised by less than this is no improvement, in points out of 100.
    pub min_gain: f64,
    /// So many reviewed iterations in a row without improvement are stagnation.
    pub stagnation_after: u32,
    /// A review may end once it is certain what is decided.
    #[serde(default)]
    pub early_stop: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            threshold: 85.0,
            max_iterations: 5,
            timeout_ms: 30 * 60 * 1000,
            min_gain: 2.0,
            stagnation_after: 2,
            early_stop: false,
        }
    }
}
