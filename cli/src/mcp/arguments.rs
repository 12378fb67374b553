//! Arguments of the tools. Their doc comments are the descriptions in the tools' schemas.

use cfq_proto::ids::{QuestionId, TaskKey};
use cfq_proto::label::Label;
use cfq_proto::task::{AgentBindings, CodeExample, Priority, TaskSpec, TaskState};
use cfq_proto::task_ref::TaskRef;
use rmcp::model::JsonObject;
use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::answer::Answer;
use super::error::ToolError;

/// Reads the arguments of a call. The error names the argument and what is allowed.
pub fn parse<T: DeserializeOwned>(arguments: Option<JsonObject>) -> Result<T, ToolError> {
    serde_path_to_error::deserialize(Value::Object(arguments.unwrap_or_default())).map_err(|error| {
        let path = error.path().to_string();
        let text = in_plain_words(&error.into_inner().to_string());
        if path == "." { ToolError(text) } else { ToolError::argument(&path, text) }
    })
}

/// The message of serde without the names of Rust's types.
fn in_plain_words(message: &str) -> String {
    let mut text = message.to_owned();
    for (rust, plain) in [
        ("expected f64", "expected a number"),
        ("expected f32", "expected a number"),
        ("expected u32", "expected a whole number of 0 or more"),
        ("expected u64", "expected a whole number of 0 or more"),
        ("expected i64", "expected a whole number"),
        ("expected a sequence", "expected a list"),
        ("expected a map", "expected an object"),
        ("invalid type: sequence", "invalid type: a list"),
        ("invalid type: map", "invalid type: an object"),
    ] {
        text = text.replace(rust, plain);
    }
    match text.split_once("expected struct ") {
        Some((before, _)) => format!("{before}expected an object"),
        None => text,
    }
}

/// A task for Alpha and Beta.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DelegatedTask {
    /// What to do. The agents see this text, a map of the repository, the context files, committed files that this text
    /// names by their paths, and the constraints, and nothing of your conversation: name files, functions and the
    /// expected behaviour.
    pub description: String,
    /// Programming language of the result, for example `python`.
    #[serde(default)]
    pub language: String,
    /// Paths of the files that the agents must see, relative to the repository's root.
    #[serde(default)]
    pub context_files: Vec<String>,
    /// Requirements on the result.
    #[serde(default)]
    pub constraints: Vec<String>,
    /// Examples that the result should follow.
    #[serde(default)]
    pub examples: Vec<CodeExample>,
    /// Folder of the git repository to work on. Default: the repository of the folder in which the MCP server was
    /// started. Over HTTP there is no default: it is an absolute path on the server's machine. Only committed files are
    /// seen.
    #[serde(default)]
    pub repo: Option<String>,
    /// Commit, branch or tag to start from; over HTTP, a full commit id. Default: HEAD.
    #[serde(default)]
    pub base: Option<String>,
    /// Models of the agents. Default: those of the server's configuration.
    #[serde(default)]
    pub agents: AgentBindings,
    /// P0 (highest) to P3. Default: P2.
    #[serde(default)]
    pub priority: Priority,
    /// Session ids or numbers of the tasks that must be merged, accepted or reviewed before this one starts.
    #[serde(default)]
    #[schemars(with = "Vec<String>")]
    pub depends_on: Vec<TaskRef>,
    /// Maximum working time in minutes, without waits for a model or a human. Default: 30.
    #[serde(default)]
    pub timeout_minutes: Option<f64>,
    /// Labels, by which tasks can be listed.
    #[serde(default)]
    pub labels: Vec<Label>,
    /// Any text that is unique for this task. A repeated call with the same key and task returns the same session and
    /// starts nothing.
    #[serde(default)]
    pub idempotency_key: Option<String>,
}

/// Arguments of `execute_task_spec`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ExecuteTaskSpec {
    /// The task.
    pub spec: DelegatedTask,
    /// Maximum number of reviews before you are asked how to continue. Default: 5.
    #[serde(default)]
    pub max_iterations: Option<u32>,
    /// Review score, out of 100, that the result must reach. Default: 85.
    #[serde(default)]
    pub quality_threshold: Option<f64>,
}

/// Arguments of `submit_task`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SubmitTask {
    /// The task, with the fields of a task file.
    #[schemars(schema_with = "task_schema")]
    pub task: JsonObject,
    /// Any text that is unique for this task. A repeated call with the same key and task returns the same session and
    /// starts nothing.
    #[serde(default)]
    pub idempotency_key: Option<String>,
}

/// The schema of a task file: only the description is required.
fn task_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
    let mut schema = TaskSpec::json_schema(generator);
    schema.insert("required".to_owned(), serde_json::json!(["description"]));
    schema
}

/// Arguments of the tools that need only a session.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OptionalSession {
    /// Session id of `execute_task_spec`. Default: all sessions.
    #[serde(default)]
    #[schemars(with = "Option<String>")]
    pub session_id: Option<SessionId>,
}

/// Session id: the id or number of a task.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(try_from = "String")]
pub struct SessionId(pub TaskKey);

impl TryFrom<String> for SessionId {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        let error =
            || format!("{text:?} is not a session: use the session_id of execute_task_spec, or a number as in t42");
        text.parse().map(Self).map_err(|_| error())
    }
}

/// How much `get_progress_summary` returns.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
pub enum Verbosity {
    /// States, counts, the result and the next step.
    Minimal,
    /// Also the last review and the scores of all iterations.
    #[default]
    Standard,
    /// Also all reviews and model calls.
    Detailed,
}

/// Arguments of `get_progress_summary`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GetProgressSummary {
    /// Session id of `execute_task_spec`.
    #[schemars(with = "String")]
    pub session_id: SessionId,
    /// How much to return. Default: standard.
    #[serde(default)]
    pub verbosity: Verbosity,
    /// Time to wait for a change before the reply, in seconds; 0 to 45. The reply comes earlier if something changed, or
    /// if nothing will change without you. Default: 0.
    #[serde(default)]
    #[schemars(range(min = 0, max = 45))]
    pub wait_s: f64,
    /// `last_event` of the reply before: only later events count as a change. Default: those after this call.
    #[serde(default)]
    pub after_event: Option<i64>,
}

/// Arguments of `get_artifact`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GetArtifact {
    /// Session id of `execute_task_spec`.
    #[schemars(with = "String")]
    pub session_id: SessionId,
    /// Number of the iteration, from 1. Default: the best one.
    #[serde(default)]
    pub iteration: Option<u32>,
    /// Position in the diff, in bytes, at which the reply continues: `next_offset` of the reply before. Default: 0.
    #[serde(default)]
    pub offset: usize,
    /// Maximum size of the part of the diff that is returned, in bytes; 1,000 to 200,000. Default: 30,000.
    #[serde(default)]
    #[schemars(range(min = 1000, max = 200_000))]
    pub max_bytes: Option<usize>,
}

/// Arguments of `final_handoff_archive`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FinalHandoffArchive {
    /// Session id of `execute_task_spec`.
    #[schemars(with = "String")]
    pub session_id: SessionId,
    /// Whether the archive contains all events of the task. Default: true.
    #[serde(default = "yes")]
    pub include_audit: bool,
    /// Absolute path of the folder in which the archive is written. Default: a folder of cfq's cache. Not available
    /// over HTTP, where the reply has a URL instead.
    #[serde(default)]
    pub folder: Option<String>,
}

fn yes() -> bool {
    true
}

/// Arguments of `list_tasks`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ListTasks {
    /// States of the listed tasks. Default: all.
    #[serde(default)]
    pub states: Vec<TaskState>,
    /// Labels that each listed task has.
    #[serde(default)]
    pub labels: Vec<Label>,
    /// Maximum number of tasks; 1 to 100. Default: 20.
    #[serde(default)]
    #[schemars(range(min = 1, max = 100))]
    pub limit: Option<u32>,
    /// `next` of the reply before, to list the tasks after it.
    #[serde(default)]
    pub after: Option<String>,
}

/// Arguments of `list_questions`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ListQuestions {
    /// Maximum number of questions; 1 to 50. Default: 20.
    #[serde(default)]
    #[schemars(range(min = 1, max = 50))]
    pub limit: Option<u32>,
    /// `next` of the reply before, to list the questions after it.
    #[serde(default)]
    pub after: Option<String>,
}

/// Arguments of `cancel_task`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CancelTask {
    /// Session id of `execute_task_spec`.
    #[schemars(with = "String")]
    pub session_id: SessionId,
    /// Reason to record with the task.
    #[serde(default)]
    pub reason: String,
}

/// Arguments of `acknowledge_failure`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AcknowledgeFailure {
    /// Session id of the failed task.
    #[schemars(with = "String")]
    pub session_id: SessionId,
}

/// Arguments of `resolve_escalation`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ResolveEscalation {
    /// Session id of `execute_task_spec`.
    #[schemars(with = "String")]
    pub session_id: SessionId,
    /// The decision; one of the question's `available_actions`.
    pub action: Answer,
    /// `question_id` of the question that this answers. With it, a repeated call takes effect once. Default: the open
    /// question.
    #[serde(default)]
    pub question_id: Option<QuestionId>,
}

/// Arguments of `answer_question`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AnswerQuestion {
    /// `session_id` of the question.
    #[schemars(with = "String")]
    pub session_id: SessionId,
    /// `question_id` of the question that this answers. A repeated call takes effect once.
    pub question_id: QuestionId,
    /// The decision; one of the question's `available_actions`.
    pub action: Answer,
}

/// The argument's value if it lies in the range, or the default.
pub fn in_range<T: PartialOrd + Copy + std::fmt::Display>(
    argument: &str,
    value: Option<T>,
    (min, max): (T, T),
    default: T,
) -> Result<T, ToolError> {
    match value.unwrap_or(default) {
        value if value >= min && value <= max => Ok(value),
        value => Err(ToolError::argument(argument, format!("is {value}; it must be {min} to {max}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error<T: DeserializeOwned + std::fmt::Debug>(arguments: Value) -> String {
        let Value::Object(arguments) = arguments else { panic!("not an object") };
        parse::<T>(Some(arguments)).unwrap_err().0
    }

    #[test]
    fn error_names_the_argument_and_what_is_allowed() {
        let spec = |key: &str, value: Value| {
            let mut spec = serde_json::json!({ "description": "x" });
            spec[key] = value;
            error::<ExecuteTaskSpec>(serde_json::json!({ "spec": spec }))
        };
        assert_eq!(
            spec("priority", "high".into()),
            "spec.priority: unknown variant `high`, expected one of `P0`, `P1`, `P2`, `P3`"
        );
        assert_eq!(
            spec("timeout_minutes", "ten".into()),
            "spec.timeout_minutes: invalid type: string \"ten\", expected a number"
        );
        assert_eq!(
            spec("context_files", "a.py".into()),
            "spec.context_files: invalid type: string \"a.py\", expected a list"
        );
        assert!(
            spec("contextFiles", Value::Null).contains("unknown field `contextFiles`, expected one of `description`")
        );
        assert_eq!(error::<ExecuteTaskSpec>(serde_json::json!({})), "missing field `spec`");
        assert_eq!(
            error::<ExecuteTaskSpec>(serde_json::json!({ "spec": "write a parser" })),
            "spec: invalid type: string \"write a parser\", expected an object"
        );
        assert_eq!(
            error::<CancelTask>(serde_json::json!({ "session_id": "first" })),
            "session_id: \"first\" is not a session: use the session_id of execute_task_spec, or a number as in t42"
        );
        assert_eq!(
            error::<ListTasks>(serde_json::json!({ "states": ["done"] })),
            "states[0]: unknown variant `done`, expected one of `queued`, `blocked`, `ready`, `running`, \
             `waiting_on_human`, `paused`, `escalated`, `merged`, `accepted`, `reviewed`, `failed`, `cancelled`"
        );
    }
}
