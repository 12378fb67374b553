//! Limits of one task's review loop: the values of the loop declaration (the file that configures a loop), overridden
//! by the values in the task.

use cfq_convergence::LoopLimits;
use cfq_proto::task::TaskSpec;
use cfq_transformer::Declaration;

/// Factor from the scores in a loop declaration (out of 10) to the scores of tasks and of the dual-agent interface (out
/// of 100).
const SCORE_SCALE: f64 = 10.0;
const MS_PER_MINUTE: f64 = 60_000.0;

/// Returns the limits of a task: each value from `spec` if it has one, else from `declaration`.
pub fn loop_limits(spec: &TaskSpec, declaration: &Declaration) -> LoopLimits {
    let guards = &declaration.guards;
    let minutes = spec.timeout_minutes.or(guards.timeout_minutes.as_ref().map(|m| m.value));
    let defaults = LoopLimits::default();
    LoopLimits {
        threshold: spec.threshold.unwrap_or(declaration.quality.thresholds.pass.value * SCORE_SCALE),
        max_iterations: spec.max_iterations.unwrap_or(declaration.methodology.iteration.max_cycles.value).max(1),
        // The cast saturates: a value that is too large means no limit.
        timeout_ms: minutes.map_or(u64::MAX, |m| (m * MS_PER_MINUTE) as u64),
        min_gain: guards.stagnation.as_ref().map_or(defaults.min_gain, |s| s.min_gain.value * SCORE_SCALE),
        early_stop: declaration.methodology.early_stop,
        stagnation_after: guards.stagnation.as_ref().map_or(defaults.stagnation_after, |s| s.cycles.value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn task_overrides_the_limits_of_the_declaration() {
        let declaration = cfq_transformer::dual_agent().unwrap();
        let spec = |json: serde_json::Value| -> TaskSpec {
            let mut whole = serde_json::json!({ "description": "d", "repo": "/r" });
            whole.as_object_mut().unwrap().extend(json.as_object().unwrap().clone());
            serde_json::from_value(whole).unwrap()
        };
        assert_eq!(loop_limits(&spec(serde_json::json!({})), &declaration), LoopLimits::default());
        let own = loop_limits(
            &spec(serde_json::json!({ "threshold": 70.0, "max_iterations": 2, "timeout_minutes": 0.5 })),
            &declaration,
        );
        assert_eq!((own.threshold, own.max_iterations, own.timeout_ms), (70.0, 2, 30_000));
    }
}
