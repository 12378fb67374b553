//! The tasks extension of MCP (`io.modelcontextprotocol/tasks`, SEP-2663): a client that declares it gets a handle of
//! the work from a tool that starts work, and asks for its state and its result with `tasks/get`. The handle is the
//! session id, so all other tools accept it. A question of the work is an elicitation, if the client can show one.

use cfq_proto::client::{Client, ClientError};
use cfq_proto::http::{EscalationView, ResolveRequest, TaskDetail};
use cfq_proto::ids::{QuestionId, TaskKey};
use cfq_proto::loop_step::ActionKind;
use cfq_proto::task::TaskState;
use cfq_proto::visible_text::{TERMINAL_CHARACTERS, visible};
use rmcp::model::{
    CallToolResponse, CallToolResult, CancelTaskParams, ClientCapabilities, CreateTaskResult, DetailedTask,
    ElicitRequest, ElicitRequestParams, ElicitResult, ElicitationAction, ElicitationSchema, ErrorData, GetTaskParams,
    GetTaskResult, InputRequest, JsonObject, Task, TaskPayload, TaskStatus, UpdateTaskParams,
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::access::Access;
use super::answer::Answer;
use super::arguments::{SessionId, Verbosity};
use super::error::ToolError;
use super::progress;
use super::repeat::until_answered;
use super::replies::Accepted;
use super::tool::visible_json;
use crate::commands::watch::waits_for_user;

/// Suggested interval of a client's requests for the state of its work.
const POLL_INTERVAL_MS: u64 = 5_000;

/// What a client declared that matters here.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Declared {
    /// The tasks extension.
    pub tasks: bool,
    /// Questions to its user, as forms.
    pub forms: bool,
}

impl From<Option<ClientCapabilities>> for Declared {
    fn from(capabilities: Option<ClientCapabilities>) -> Self {
        let Some(capabilities) = capabilities else { return Self::default() };
        let tasks = capabilities.supports_tasks();
        // An empty capability is one for forms.
        let forms = capabilities.elicitation.is_some_and(|modes| modes.form.is_some() || modes.url.is_none());
        Self { tasks, forms }
    }
}

/// The handle of work that a tool has started with this result. A client that declares the extension accepts the plain
/// result, too: it gets that if the state of the work cannot be read.
pub async fn handle(access: &Access, result: CallToolResult, declared: Declared) -> CallToolResponse {
    let session = result.structured_content.as_ref().and_then(|content| content["session_id"].as_str());
    let Some(session) = session.and_then(|session| session.parse::<TaskKey>().ok()) else { return result.into() };
    match read(access, session, declared).await {
        Ok(detailed) => CreateTaskResult::new(detailed.task).into(),
        Err(_) => result.into(),
    }
}

/// `tasks/get`.
pub async fn get(access: &Access, params: GetTaskParams, declared: Declared) -> Result<GetTaskResult, ErrorData> {
    let task = key(&params.task_id)?;
    read(access, task, declared).await.map(GetTaskResult::new)
}

/// `tasks/cancel`. Work that has ended stays as it is.
pub async fn cancel(access: &Access, params: CancelTaskParams) -> Result<(), ErrorData> {
    let task = key(&params.task_id)?;
    let client = access.client().map_err(|error| internal(&error))?;
    match until_answered(|| client.cancel(task, "the MCP client cancelled it")).await {
        Ok(_) | Err(ClientError::Refused { status: 409, .. }) => Ok(()),
        Err(error) => Err(refused(error)),
    }
}

/// `tasks/update`: the answers of the client's user. A question that is declined or cancelled stays open.
pub async fn update(access: &Access, params: UpdateTaskParams) -> Result<(), ErrorData> {
    let task = key(&params.task_id)?;
    let client = access.client().map_err(|error| internal(&error))?;
    for (name, response) in params.input_responses {
        let question: QuestionId = name
            .parse()
            .map_err(|_| invalid(format!("inputResponses: {name:?} is no key of inputRequests of this task")))?;
        let response: ElicitResult = serde_json::from_value(response)
            .map_err(|error| invalid(format!("inputResponses.{name}: is not the result of an elicitation: {error}")))?;
        if response.action != ElicitationAction::Accept {
            continue;
        }
        let form: Form = serde_json::from_value(response.content.unwrap_or_default())
            .map_err(|error| invalid(format!("inputResponses.{name}.content: {error}")))?;
        let action = form.into_answer().and_then(Answer::into_action).map_err(|error| invalid(error.0))?;
        let request = ResolveRequest { action, question: Some(question) };
        until_answered(|| client.resolve(task, request.clone())).await.map_err(refused)?;
    }
    Ok(())
}

async fn read(access: &Access, task: TaskKey, declared: Declared) -> Result<DetailedTask, ErrorData> {
    let client = access.client().map_err(|error| internal(&error))?;
    let detail = client.task(task).await.map_err(refused)?;
    let payload = payload(&client, &detail, declared).await.map_err(|error| internal(&error))?;
    let summary = &detail.summary;
    let described = Task::new(
        summary.id.to_string(),
        TaskStatus::Working,
        rfc3339(summary.created_at),
        rfc3339(summary.updated_at),
    )
    .with_status_message(message(&detail))
    .with_poll_interval_ms(POLL_INTERVAL_MS);
    Ok(DetailedTask::new(described, payload))
}

async fn payload(client: &Client, detail: &TaskDetail, declared: Declared) -> Result<TaskPayload, ToolError> {
    let is_error = match detail.summary.state {
        TaskState::Merged | TaskState::Accepted | TaskState::Reviewed => false,
        // Not the failure of the call: what the work left behind is in the result.
        TaskState::Failed => true,
        TaskState::Cancelled => return Ok(TaskPayload::Cancelled),
        TaskState::Queued
        | TaskState::Blocked
        | TaskState::Ready
        | TaskState::Running
        | TaskState::WaitingOnHuman
        | TaskState::Paused
        | TaskState::Escalated => {
            let question = detail.escalation.as_ref().filter(|_| declared.forms);
            return Ok(match question {
                Some(question) => TaskPayload::InputRequired {
                    input_requests: [(question.question.to_string(), form(detail, question)?)].into(),
                },
                None => TaskPayload::Working,
            });
        }
    };
    let outcome = progress::now(client, TaskKey::Id(detail.summary.id), Verbosity::Standard).await?;
    let Value::Object(outcome) = visible_json(&outcome)? else {
        return Err(ToolError("the state of the task is no JSON object".to_owned()));
    };
    let content = visible_json(&Accepted::ended(detail, outcome))?;
    let mut result = CallToolResult::structured(content);
    result.is_error = Some(is_error);
    match serde_json::to_value(&result) {
        Ok(Value::Object(result)) => Ok(TaskPayload::Completed { result }),
        Ok(_) | Err(_) => Err(ToolError("the result of the task cannot be written".to_owned())),
    }
}

/// One line about the state, without texts of models.
fn message(detail: &TaskDetail) -> String {
    let summary = &detail.summary;
    let mut text = format!("{} is {}", summary.number, summary.state);
    if summary.state == TaskState::Running && summary.iteration > 0 && detail.spec.review.is_none() {
        text += &format!(", iteration {} of at most {}", summary.iteration, summary.max_iterations);
    }
    match summary.state {
        TaskState::Escalated | TaskState::WaitingOnHuman => {
            text += ": it needs a decision; call resolve_escalation, or ask the user";
        }
        TaskState::Paused => text += " by a user",
        TaskState::Blocked if waits_for_user(detail) => text += ": a task before it failed or was cancelled",
        _ => {}
    }
    text
}

/// The question as a form.
fn form(detail: &TaskDetail, question: &EscalationView) -> Result<InputRequest, ToolError> {
    let actions: Vec<&str> = question.available_actions.iter().map(|action| action.as_str()).collect();
    let mut properties = json!({
        "action": { "type": "string", "enum": actions, "description": "How the task continues or ends" },
    });
    for (action, name, description) in [
        (ActionKind::SwitchLlm, "model", "With switch_llm: id of the new model of Alpha"),
        (ActionKind::RetryWithConstraints, "constraint", "With retry_with_constraints: an additional requirement"),
    ] {
        if question.available_actions.contains(&action) {
            properties[name] = json!({ "type": "string", "description": description });
        }
    }
    let schema = json!({ "type": "object", "properties": properties, "required": ["action"] });
    let schema: JsonObject = serde_json::from_value(schema).map_err(|error| ToolError(error.to_string()))?;
    let requested_schema =
        ElicitationSchema::from_json_schema(schema).map_err(|error| ToolError(format!("cannot ask: {error}")))?;
    let text = format!(
        "{} needs a decision ({}): {}\n{}",
        detail.summary.number, question.reason, question.explanation, question.recommendation
    );
    let message = visible(&text, TERMINAL_CHARACTERS).into_owned();
    let params = ElicitRequestParams::FormElicitationParams { meta: None, message, requested_schema };
    Ok(InputRequest::Elicitation(ElicitRequest::new(params)))
}

/// A form that a user filled in. Texts that the chosen action does not need are ignored.
#[derive(Debug, Deserialize)]
struct Form {
    action: Value,
    #[serde(default)]
    model: String,
    #[serde(default)]
    constraint: String,
}

impl Form {
    fn into_answer(self) -> Result<Answer, ToolError> {
        let mut answer = json!({ "type": self.action });
        match self.action.as_str() {
            Some("switch_llm") if !self.model.is_empty() => answer["suggested_model"] = self.model.into(),
            Some("retry_with_constraints") if !self.constraint.is_empty() => {
                answer["additional_constraints"] = json!([self.constraint]);
            }
            _ => {}
        }
        serde_json::from_value(answer).map_err(|error| ToolError::argument("action", error))
    }
}

fn rfc3339(seconds: f64) -> String {
    let time = jiff::Timestamp::from_millisecond((seconds * 1000.0) as i64).unwrap_or_default();
    time.to_string()
}

fn key(task_id: &str) -> Result<TaskKey, ErrorData> {
    SessionId::try_from(task_id.to_owned())
        .map(|session| session.0)
        .map_err(|error| invalid(format!("taskId: {error}")))
}

fn invalid(message: String) -> ErrorData {
    ErrorData::invalid_params(message, None)
}

/// The error of a request to the scheduler: that of the client's parameters, or of the server.
fn refused(error: ClientError) -> ErrorData {
    let is_of_parameters = matches!(error, ClientError::Refused { status: 400 | 403 | 404 | 409, .. });
    let error = ToolError::from(error);
    if is_of_parameters { invalid(error.0) } else { internal(&error) }
}

fn internal(error: &ToolError) -> ErrorData {
    ErrorData::internal_error(error.0.clone(), None)
}
