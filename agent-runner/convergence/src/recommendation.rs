//! What to tell whoever has to answer an escalation (L6): one sentence per reason, from the figures.

use cfq_proto::looping::EscalationReason;

/// `best_score` of the artifact that may be accepted, if there is one.
pub fn recommendation(reason: EscalationReason, best_score: Option<f64>, threshold: f64) -> String {
    let near = best_score.is_some_and(|score| score >= threshold - 10.0);
    let best = match best_score {
        Some(score) => format!("The best result scored {score:.0} of {threshold:.0}."),
        None => "There is no reviewed result.".to_owned(),
    };
    let advice = match reason {
        EscalationReason::MaxIterationsReached if near => {
            "It is near: look at it and accept it, or retry with what is missing as constraints."
        }
        EscalationReason::MaxIterationsReached => "Retry with narrower constraints, or switch to a stronger model.",
        EscalationReason::StagnationDetected if near => {
            "Revising does not raise it further: look at it and accept it, or name what is missing."
        }
        EscalationReason::StagnationDetected => {
            "Revising does not raise it: switch the creator's model, or say more exactly what is wanted."
        }
        EscalationReason::OscillationDetected => {
            "The creator repeats itself: switch its model, or add the constraint it does not see."
        }
        EscalationReason::TimeoutExceeded => {
            "Its time is used up: accept what is there, or retry with a smaller task or a faster model."
        }
        EscalationReason::DangerousOutputDetected => {
            "Read the quarantined change before anything else; retry with a constraint that rules it out, or abort."
        }
        EscalationReason::AgentError => "A model could not do its part: switch that model, or retry.",
        EscalationReason::WorkflowError => {
            "The result could not be put together with what is there: look at the reason, then retry or accept it as its own branch."
        }
        EscalationReason::Hallucination | EscalationReason::Fabrication => {
            "The report names what does not exist: switch the critic's model, or retry."
        }
        EscalationReason::ScopeDrift => "The work left its scope: retry with the scope as a constraint.",
        EscalationReason::SameCounts => {
            "The findings do not change any more: look at them and accept, or retry with constraints."
        }
        EscalationReason::BelowEscalateThreshold => {
            "The result is far from what is wanted: say more exactly what it should be, or switch the model."
        }
    };
    format!("{best} {advice}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_says_the_figures_and_the_next_step() {
        let near = recommendation(EscalationReason::StagnationDetected, Some(80.0), 85.0);
        assert!(near.contains("80 of 85") && near.contains("accept"), "{near}");
        let far = recommendation(EscalationReason::StagnationDetected, Some(20.0), 85.0);
        assert!(far.contains("switch"), "{far}");
        assert!(recommendation(EscalationReason::AgentError, None, 85.0).contains("no reviewed result"));
    }
}
