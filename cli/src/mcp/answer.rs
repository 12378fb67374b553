//! The argument `action` of `resolve_escalation` and `answer_question`.

use cfq_proto::loop_step::EscalationAction;
use cfq_proto::model::ModelId;
use cfq_proto::task::Agent;
use schemars::JsonSchema;
use serde::Deserialize;

use super::error::ToolError;

/// How an escalated task continues or ends.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Answer {
    /// `switch_llm` continues with another model, `retry_with_constraints` continues with additional requirements,
    /// `accept_best_effort` takes the best result, `abort` cancels the task, `fail` fails it.
    #[serde(rename = "type")]
    pub kind: AnswerKind,
    /// Agent whose model is replaced, only with `switch_llm`. Default: alpha.
    #[serde(default)]
    pub target_agent: Option<Agent>,
    /// New model, required with `switch_llm`; `get_project_status` lists the models.
    #[serde(default)]
    pub suggested_model: Option<ModelId>,
    /// Additional requirements, at least one, only with `retry_with_constraints`.
    #[serde(default)]
    pub additional_constraints: Vec<String>,
    /// Why the task fails, only with `fail`.
    #[serde(default)]
    pub reason: Option<String>,
}

/// Kind of an [`Answer`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
// The description of the field lists the variants.
pub enum AnswerKind {
    SwitchLlm,
    RetryWithConstraints,
    AcceptBestEffort,
    Abort,
    Fail,
}

impl Answer {
    /// The answer as the API expects it. Arguments of other kinds are refused: the caller meant something else.
    pub fn into_action(self) -> Result<EscalationAction, ToolError> {
        let given = [
            ("action.target_agent", self.target_agent.is_some(), AnswerKind::SwitchLlm, "switch_llm"),
            ("action.suggested_model", self.suggested_model.is_some(), AnswerKind::SwitchLlm, "switch_llm"),
            (
                "action.additional_constraints",
                !self.additional_constraints.is_empty(),
                AnswerKind::RetryWithConstraints,
                "retry_with_constraints",
            ),
            ("action.reason", self.reason.is_some(), AnswerKind::Fail, "fail"),
        ];
        if let Some((name, _, _, owner)) = given.iter().find(|(_, given, kind, _)| *given && *kind != self.kind) {
            return Err(ToolError::argument(name, format!("is only for the type {owner}")));
        }
        Ok(match self.kind {
            AnswerKind::SwitchLlm if self.suggested_model.is_none() => {
                let message = "is required with switch_llm; get_project_status lists the models";
                return Err(ToolError::argument("action.suggested_model", message));
            }
            AnswerKind::SwitchLlm => EscalationAction::SwitchLlm {
                target_agent: self.target_agent.unwrap_or(Agent::Alpha),
                suggested_model: self.suggested_model,
            },
            AnswerKind::RetryWithConstraints if self.additional_constraints.is_empty() => {
                let message = "needs at least one text with retry_with_constraints";
                return Err(ToolError::argument("action.additional_constraints", message));
            }
            AnswerKind::RetryWithConstraints => {
                EscalationAction::RetryWithConstraints { additional_constraints: self.additional_constraints }
            }
            AnswerKind::AcceptBestEffort => EscalationAction::AcceptBestEffort,
            AnswerKind::Abort => EscalationAction::Abort,
            AnswerKind::Fail => EscalationAction::Fail { reason: self.reason },
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn answer_needs_the_arguments_of_its_type_and_no_others() {
        let answer = |value: Value| serde_json::from_value::<Answer>(value).unwrap().into_action().map_err(|e| e.0);
        assert_eq!(answer(serde_json::json!({ "type": "abort" })), Ok(EscalationAction::Abort));
        let model = "openai:box/qwen";
        assert_eq!(
            answer(serde_json::json!({ "type": "switch_llm", "suggested_model": model })),
            Ok(EscalationAction::SwitchLlm {
                target_agent: Agent::Alpha,
                suggested_model: Some(model.parse().unwrap())
            })
        );
        for (value, words) in [
            (serde_json::json!({ "type": "switch_llm" }), "action.suggested_model: is required with switch_llm"),
            (
                serde_json::json!({ "type": "abort", "suggested_model": model }),
                "action.suggested_model: is only for the type switch_llm",
            ),
            (
                serde_json::json!({ "type": "retry_with_constraints" }),
                "action.additional_constraints: needs at least one text",
            ),
            (
                serde_json::json!({ "type": "accept_best_effort", "reason": "x" }),
                "action.reason: is only for the type fail",
            ),
        ] {
            let error = answer(value).unwrap_err();
            assert!(error.starts_with(words), "{error}");
        }
    }
}
