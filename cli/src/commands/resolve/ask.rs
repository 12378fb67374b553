//! Asks for the answer to a question on a terminal.

use cfq_proto::http::EscalationView;
use cfq_proto::loop_step::{ActionKind, EscalationAction};
use cfq_proto::model::ModelId;
use cfq_proto::task::Agent;

/// The answer that the user types; `None` if the user types none. `read` prints a prompt and returns the line that is
/// typed, `None` at the end of the input.
pub fn ask(
    escalation: &EscalationView,
    read: &mut impl FnMut(&str) -> std::io::Result<Option<String>>,
) -> std::io::Result<Option<EscalationAction>> {
    let actions = &escalation.available_actions;
    let mut menu: Vec<String> =
        (1..).zip(actions).map(|(n, action)| format!("  {n}  {:22}  {}", action.as_str(), meaning(*action))).collect();
    menu.push(format!("answer (1 to {}, Enter to leave the question open): ", actions.len()));
    let mut prompt = menu.join("\n");
    let action = loop {
        let Some(line) = read(&prompt)?.filter(|line| !line.is_empty()) else { return Ok(None) };
        let number = line.parse().ok().and_then(|n: usize| n.checked_sub(1));
        let named = actions.iter().find(|action| action.as_str() == line);
        if let Some(action) = number.and_then(|n| actions.get(n)).or(named) {
            break *action;
        }
        prompt = format!(
            "{line:?} is not an answer; enter a number from 1 to {}, or Enter to leave the question open: ",
            actions.len()
        );
    };
    Ok(match action {
        ActionKind::SwitchLlm => {
            let mut prompt = "agent (alpha or beta, Enter for alpha): ".to_owned();
            let target_agent = loop {
                let Some(line) = read(&prompt)? else { return Ok(None) };
                match line.parse() {
                    Ok(agent) => break agent,
                    Err(_) if line.is_empty() => break Agent::Alpha,
                    Err(_) => prompt = format!("{line:?} is not an agent; alpha or beta (Ctrl-C ends): "),
                }
            };
            let mut prompt = "model, as `cfq nodes` prints it: ".to_owned();
            let model = loop {
                let Some(line) = read(&prompt)?.filter(|line| !line.is_empty()) else { return Ok(None) };
                match line.parse::<ModelId>() {
                    Ok(model) => break model,
                    Err(error) => prompt = format!("{error}\nmodel (Enter to leave the question open): "),
                }
            };
            Some(EscalationAction::SwitchLlm { target_agent, suggested_model: Some(model) })
        }
        ActionKind::RetryWithConstraints => {
            let mut additional_constraints = Vec::new();
            let mut prompt = "requirement: ";
            while let Some(line) = read(prompt)?.filter(|line| !line.is_empty()) {
                additional_constraints.push(line);
                prompt = "another one (Enter for none): ";
            }
            let is_given = !additional_constraints.is_empty();
            is_given.then_some(EscalationAction::RetryWithConstraints { additional_constraints })
        }
        ActionKind::AcceptBestEffort => Some(EscalationAction::AcceptBestEffort),
        ActionKind::Abort => Some(EscalationAction::Abort),
        ActionKind::Fail => {
            let reason = read("reason (Enter for none): ")?.filter(|line| !line.is_empty());
            Some(EscalationAction::Fail { reason })
        }
    })
}

/// What an action does, in a few words.
pub fn meaning(action: ActionKind) -> &'static str {
    match action {
        ActionKind::SwitchLlm => "continue with another model",
        ActionKind::RetryWithConstraints => "continue with additional requirements",
        ActionKind::AcceptBestEffort => "accept the best result as it is",
        ActionKind::Abort => "end the task as cancelled",
        ActionKind::Fail => "end the task as failed",
    }
}

#[cfg(test)]
mod tests {
    use cfq_proto::ids::QuestionId;
    use cfq_proto::loop_step::EscalationReason;

    use super::*;

    fn answer(lines: &[&str]) -> (Option<EscalationAction>, usize) {
        let escalation = EscalationView {
            question: QuestionId::fresh(),
            reason: EscalationReason::MaxIterationsReached,
            explanation: String::new(),
            available_actions: vec![
                ActionKind::SwitchLlm,
                ActionKind::RetryWithConstraints,
                ActionKind::AcceptBestEffort,
                ActionKind::Fail,
            ],
            final_critique: None,
            recommendation: String::new(),
        };
        let mut lines = lines.iter();
        let mut prompts = 0;
        let mut read = |prompt: &str| {
            assert!(prompt.ends_with(": "), "{prompt:?}");
            prompts += 1;
            Ok(lines.next().map(|line| (*line).to_owned()))
        };
        let answer = ask(&escalation, &mut read).unwrap();
        (answer, prompts)
    }

    #[test]
    fn answers_are_numbers_or_names_with_what_they_need() {
        assert_eq!(answer(&["3"]), (Some(EscalationAction::AcceptBestEffort), 1));
        assert_eq!(answer(&["9", "yes", "accept_best_effort"]), (Some(EscalationAction::AcceptBestEffort), 3));
        let constraints =
            EscalationAction::RetryWithConstraints { additional_constraints: vec!["a".into(), "b".into()] };
        assert_eq!(answer(&["2", "a", "b", ""]).0, Some(constraints));
        let model = "openai:box/m".parse().unwrap();
        let switch = EscalationAction::SwitchLlm { target_agent: Agent::Beta, suggested_model: Some(model) };
        assert_eq!(answer(&["1", "gamma", "beta", "m", "openai:box/m"]), (Some(switch), 5));
        assert_eq!(answer(&["4", ""]).0, Some(EscalationAction::Fail { reason: None }));
    }

    #[test]
    fn enter_and_the_end_of_the_input_answer_nothing() {
        for lines in [&[""][..], &[], &["7"], &["2", ""], &["1", ""], &["1", "beta", ""], &["1"]] {
            assert_eq!(answer(lines).0, None, "{lines:?}");
        }
    }
}
