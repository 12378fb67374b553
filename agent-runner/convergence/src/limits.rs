//! Limits that end a loop (L2, L3), taken from the loop declaration (the file that configures a loop) and the task.
//! Some limits apply to each window, that is, to the iterations since the loop started or since a human last answered.

use serde::{Deserialize, Serialize};

/// Limits of one loop. The defaults are those of the dual-agent loop.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LoopLimits {
    /// Minimum score, 0 to 100, at which an iteration converges.
    pub threshold: f64,
    /// Maximum number of iterations in one window.
    pub max_iterations: u32,
    /// Maximum working time of one window, in ms.
    pub timeout_ms: u64,
    /// Smallest increase of the best score that counts as an improvement, in points out of 100.
    pub min_gain: f64,
    /// Number of consecutive reviewed iterations without improvement that count as stagnation.
    pub stagnation_after: u32,
    /// Whether a review may end as soon as the decision is certain.
    #[serde(default)]
    pub early_stop: bool,
}

impl Default for LoopLimits {
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
