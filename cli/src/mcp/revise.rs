//! `revise_code` and `inject_alternative_pattern`: a task that needs a decision continues with what the caller found, or
//! with another way to write the code.

use cfq_proto::http::TaskDetail;
use cfq_proto::ids::QuestionId;
use cfq_proto::loop_step::EscalationAction;
use cfq_proto::review::Severity;
use cfq_proto::task::TaskState;
use schemars::JsonSchema;
use serde::Deserialize;

use super::access::Access;
use super::arguments::SessionId;
use super::error::ToolError;
use super::questions;
use super::replies::Changed;

/// Arguments of `revise_code`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ReviseCode {
    /// Session id of `execute_task_spec`. The last artifact of the task is revised.
    #[schemars(with = "String")]
    pub artifact_id: SessionId,
    /// What is wrong with the artifact.
    pub feedback: Feedback,
    /// `question_id` of the question that this answers. With it, a repeated call takes effect once. Default: the open
    /// question.
    #[serde(default)]
    pub question_id: Option<QuestionId>,
}

/// A review by the caller.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Feedback {
    /// Changes that the next artifact must have.
    #[serde(default)]
    pub required_changes: Vec<String>,
    /// Defects of the artifact. Those that are critical or major must be fixed.
    #[serde(default)]
    pub defects: Vec<FoundDefect>,
    /// Improvements that are not required.
    #[serde(default)]
    pub suggestions: Vec<String>,
}

/// A defect that the caller found.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FoundDefect {
    /// How severe it is. Default: major.
    #[serde(default = "major")]
    pub severity: Severity,
    /// Where it is, as path:line.
    #[serde(default)]
    pub location: Option<String>,
    /// What is wrong.
    pub description: String,
    /// How to fix it.
    #[serde(default)]
    pub suggested_fix: Option<String>,
}

fn major() -> Severity {
    Severity::Major
}

/// Arguments of `inject_alternative_pattern`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct InjectAlternativePattern {
    /// Session id of `execute_task_spec`.
    #[schemars(with = "String")]
    pub session_id: SessionId,
    /// The other way to write the code.
    pub pattern: CodePattern,
    /// Why the code written so far does not work, and where the pattern applies.
    pub context: String,
    /// `question_id` of the question that this answers. With it, a repeated call takes effect once. Default: the open
    /// question.
    #[serde(default)]
    pub question_id: Option<QuestionId>,
}

/// A way to write code.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CodePattern {
    /// Its name, or what it does.
    #[serde(default)]
    pub name: Option<String>,
    /// Code that shows it.
    pub code: String,
}

/// `revise_code`.
pub async fn revise(access: &Access, arguments: ReviseCode) -> Result<Changed, ToolError> {
    let constraints = arguments.feedback.constraints()?;
    retry(access, arguments.artifact_id, arguments.question_id, constraints).await
}

/// `inject_alternative_pattern`.
pub async fn inject(access: &Access, arguments: InjectAlternativePattern) -> Result<Changed, ToolError> {
    let InjectAlternativePattern { session_id, pattern, context, question_id } = arguments;
    if pattern.code.trim().is_empty() {
        return Err(ToolError::argument("pattern.code", "is empty: show the other way as code"));
    }
    let name = pattern.name.map(|name| format!(" ({})", name.trim())).unwrap_or_default();
    let code = pattern.code.trim_end();
    let fence = if code.contains("```") { "`````" } else { "```" };
    let constraint = format!("{} Use this pattern{name} instead:\n{fence}\n{code}\n{fence}", sentence(&context));
    retry(access, session_id, question_id, vec![constraint.trim_start().to_owned()]).await
}

/// Answers the task's question with additional constraints.
async fn retry(
    access: &Access,
    session: SessionId,
    question: Option<QuestionId>,
    additional_constraints: Vec<String>,
) -> Result<Changed, ToolError> {
    let question = match question {
        Some(question) => question,
        None => {
            let task = access.client()?.task(session.0).await?;
            task.escalation.as_ref().ok_or_else(|| no_question(&task))?.question
        }
    };
    let action = EscalationAction::RetryWithConstraints { additional_constraints };
    questions::send(access, session.0, Some(question), action).await
}

/// Why a task without a question is not revised, and what to do instead.
fn no_question(task: &TaskDetail) -> ToolError {
    let (number, state) = (task.summary.number, task.summary.state);
    let next = match state {
        TaskState::Merged | TaskState::Accepted => {
            "has ended. To change its result, call execute_task_spec with its branch as base"
        }
        TaskState::Reviewed => "only reviewed a change. Call execute_task_spec with what must change",
        TaskState::Failed | TaskState::Cancelled => "has ended. Call execute_task_spec for a new task",
        TaskState::Queued
        | TaskState::Blocked
        | TaskState::Ready
        | TaskState::Running
        | TaskState::WaitingOnHuman
        | TaskState::Paused
        | TaskState::Escalated => {
            "is still being worked on, and Beta's reviews are applied by themselves. Call get_progress_summary until \
             needs_decision is true"
        }
    };
    ToolError(format!("{number} is {state}: it {next}"))
}

impl Feedback {
    /// The feedback as requirements on the next artifact.
    fn constraints(self) -> Result<Vec<String>, ToolError> {
        let mut constraints: Vec<String> = self.required_changes;
        let mut optional = self.suggestions;
        for defect in self.defects {
            let (severity, text) = (defect.severity, defect.into_text());
            match severity {
                Severity::Critical | Severity::Major => constraints.push(text),
                Severity::Minor | Severity::Info => optional.push(text),
            }
        }
        constraints.extend(optional.into_iter().map(|text| format!("If it is simple: {text}")));
        constraints.retain(|text| !text.trim().is_empty());
        if constraints.is_empty() {
            return Err(ToolError::argument("feedback", "is empty: name required_changes, defects or suggestions"));
        }
        Ok(constraints)
    }
}

impl FoundDefect {
    fn into_text(self) -> String {
        let place =
            self.location.filter(|place| !place.is_empty()).map(|place| format!("{place}: ")).unwrap_or_default();
        let fix = self.suggested_fix.map(|fix| format!(" {}", fix.trim())).unwrap_or_default();
        format!("Fix {place}{}{fix}", sentence(&self.description))
    }
}

/// The text with a full stop at its end, if it is not empty.
fn sentence(text: &str) -> String {
    match text.trim() {
        "" => String::new(),
        text if text.ends_with(['.', '!', '?', ':']) => text.to_owned(),
        text => format!("{text}."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn feedback_becomes_requirements() {
        let feedback: Feedback = serde_json::from_value(serde_json::json!({
            "required_changes": ["return the sum"],
            "defects": [
                { "severity": "critical", "location": "add.py:2", "description": "subtracts", "suggested_fix": "Add." },
                { "description": "no type hints" },
                { "severity": "minor", "description": "long line" },
            ],
            "suggestions": ["add a docstring"],
        }))
        .unwrap();
        let expected = [
            "return the sum",
            "Fix add.py:2: subtracts. Add.",
            "Fix no type hints.",
            "If it is simple: add a docstring",
            "If it is simple: Fix long line.",
        ];
        assert_eq!(feedback.constraints().unwrap(), expected);
        let empty = serde_json::from_value::<Feedback>(serde_json::json!({})).unwrap();
        assert!(empty.constraints().unwrap_err().0.starts_with("feedback: is empty"));
    }
}
