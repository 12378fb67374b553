//! The limits of one task: the declaration's, where the task does not say otherwise.

use cfq_convergence::Limits;
use cfq_proto::task::TaskSpec;
use cfq_transformer::Declaration;

/// Declarations score out of 10, tasks and the dual-agent interface out of 100.
const SCALE: f64 = 10.0;
const MINUTE_MS: f64 = 60_000.0;

pub fn limits(spec: &TaskSpec, declaration: &Declaration) -> Limits {
    let guards = &declaration.guards;
    let minutes = spec.timeout_minutes.or(guards.timeout_minutes.as_ref().map(|m| m.value));
    let defaults = Limits::default();
    Limits {
        threshold: spec.threshold.unwrap_or(declaration.quality.thresholds.pass.value * SCALE),
        max_iterations: spec.max_iterations.unwrap_or(declaration.methodology.iteration.max_cycles.value).max(1),
        // A float that is too large for the integer becomes the largest one: no limit.
        timeout_ms: minutes.map_or(u64::MAX, |m| (m * MINUTE_MS) as u64),
        min_gain: guards.stagnation.as_ref().map_or(defaults.min_gain, |s| s.min_gain.value * SCALE),
        early_stop: declaration.methodology.early_stop,
        stagnation_after: guards.stagnation.as_ref().map_or(defaults.stagnation_after, |s| s.cycles.value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_declarations_figures_are_the_defaults_and_the_task_overrules() {
        let declaration = cfq_transformer::dual_agent().unwrap();
        let spec = |json: serde_json::Value| -> TaskSpec {
            let mut whole = serde_json::json!({ "description": "d", "repo": "/r" });
            whole.as_object_mut().unwrap().extend(json.as_object().unwrap().clone());
            serde_json::from_value(whole).unwrap()
        };
        assert_eq!(limits(&spec(serde_json::json!({})), &declaration), Limits::default());
        let own = limits(
            &spec(serde_json::json!({ "threshold": 70.0, "max_iterations": 2, "timeout_minutes": 0.5 })),
            &declaration,
        );
        assert_eq!((own.threshold, own.max_iterations, own.timeout_ms), (70.0, 2, 30_000));
    }
}
