//! Recommendation for the human who answers an escalation (L6): one sentence per reason.

use cfq_proto::loop_step::EscalationReason;

/// Recommended answer to an escalation. `best_score` is the score of the artifact that may be accepted, if there is
/// one; both scores are 0 to 100.
pub fn recommendation(reason: EscalationReason, best_score: Option<f64>, threshold: f64) -> String {
    let near = best_score.is_some_and(|score| score >= threshold - 10.0);
    let best = match best_score {
        Some(score) => format!("The best result scored {score:.0} of 100; the threshold is {threshold:.0}."),
        None => "There is no reviewed result.".to_owned(),
    };
    let advice = match reason {
        EscalationReason::MaxIterationsReached if near => {
            "It is close: inspect it and accept it, or retry with the missing points as constraints."
        }
        EscalationReason::MaxIterationsReached => "Retry with narrower constraints, or switch to a stronger model.",
        EscalationReason::StagnationDetected if near => {
            "Revisions do not raise the score: accept the result, or retry with the missing points as constraints."
        }
        EscalationReason::StagnationDetected => {
            "Revisions do not raise the score: switch the creator's model, or retry with more precise constraints."
        }
        EscalationReason::OscillationDetected => {
            "The creator repeats an earlier result: switch its model, or retry with the missing constraint."
        }
        EscalationReason::TimeoutExceeded => {
            "The time limit is reached: accept the result so far, or retry with a smaller task or a faster model."
        }
        EscalationReason::DangerousOutputDetected => {
            "Read the quarantined change first; then retry with a constraint that rules it out, or abort."
        }
        EscalationReason::AgentError => "A model did not give a usable reply: switch that model, or retry.",
        EscalationReason::WorkflowError => {
            "The workflow failed: read the reason, then retry, or accept the result as its own branch."
        }
        EscalationReason::Hallucination | EscalationReason::Fabrication => {
            "The review refers to things that do not exist: switch the critic's model, or retry."
        }
        EscalationReason::ScopeDrift => "The result exceeds the task's scope: retry with the scope as a constraint.",
        EscalationReason::SameCounts => {
            "The findings no longer change: inspect the result and accept it, or retry with constraints."
        }
        EscalationReason::BelowEscalateThreshold => {
            "The result is far below the threshold: retry with more precise constraints, or switch the model."
        }
    };
    format!("{best} {advice}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recommendation_names_the_scores_and_the_next_step() {
        let near = recommendation(EscalationReason::StagnationDetected, Some(80.0), 85.0);
        assert!(near.contains("80 of 100") && near.contains("85") && near.contains("accept"), "{near}");
        let far = recommendation(EscalationReason::StagnationDetected, Some(20.0), 85.0);
        assert!(far.contains("switch"), "{far}");
        assert!(recommendation(EscalationReason::AgentError, None, 85.0).contains("no reviewed result"));
    }
}
