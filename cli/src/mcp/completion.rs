//! Completion of arguments (`completion/complete`): numbers of tasks for `session_id`, and of iterations.

use cfq_proto::client::ClientError;
use cfq_proto::http::{TaskQuery, TaskSort};
use cfq_proto::ids::TaskKey;
use rmcp::model::{CompleteRequestParams, CompleteResult, CompletionInfo, ErrorData, Reference};

use super::access::Access;
use super::error::ToolError;
use super::{prompts, resources};
use crate::output;

/// Maximum number of tasks that are searched, the newest first.
const MAX_SEARCHED_TASKS: u32 = 1_000;

/// The values of an argument that begin with what the user has typed; an argument without known values has none.
pub async fn complete(access: &Access, request: CompleteRequestParams) -> Result<CompleteResult, ErrorData> {
    let known = match &request.r#ref {
        Reference::Prompt(prompt) => prompts::exists(&prompt.name),
        Reference::Resource(template) => resources::template_exists(&template.uri),
        _ => false,
    };
    if !known {
        let message = "ref: must name a prompt of prompts/list or a template of resources/templates/list";
        return Err(ErrorData::invalid_params(message, None));
    }
    let typed = &request.argument.value;
    let found = match request.argument.name.as_str() {
        "session_id" => newest_tasks(access, typed).await,
        "iteration" => {
            let known_arguments = request.context.and_then(|context| context.arguments).unwrap_or_default();
            match known_arguments.get("session_id").and_then(|session| session.parse().ok()) {
                Some(task) => iterations(access, task).await.map(|values| (values, false)),
                None => Ok((Vec::new(), false)),
            }
        }
        _ => Ok((Vec::new(), false)),
    };
    let failed = |message: String| ErrorData::internal_error(output::sanitize(&message), None);
    let (mut values, more) = found.map_err(|error| failed(error.0))?;
    values.retain(|value| value.starts_with(typed));
    let more = more || values.len() > CompletionInfo::MAX_VALUES;
    values.truncate(CompletionInfo::MAX_VALUES);
    Ok(CompleteResult::new(CompletionInfo::with_pagination(values, None, more).map_err(failed)?))
}

/// Numbers of tasks, the newest first, and whether there are older ones.
async fn newest_tasks(access: &Access, typed: &str) -> Result<(Vec<String>, bool), ToolError> {
    // Before a digit is typed, every task fits.
    let limit = if "t".starts_with(typed) { CompletionInfo::MAX_VALUES as u32 } else { MAX_SEARCHED_TASKS };
    let query = TaskQuery { sort: TaskSort::Newest, limit, ..TaskQuery::default() };
    let list = access.client()?.list_tasks(&query).await?;
    Ok((list.tasks.iter().map(|task| task.number.to_string()).collect(), list.next.is_some()))
}

/// Numbers of a task's iterations; none if there is no such task.
async fn iterations(access: &Access, task: TaskKey) -> Result<Vec<String>, ToolError> {
    match access.client()?.task(task).await {
        Ok(detail) => Ok(detail.iterations.iter().map(|iteration| iteration.iteration.to_string()).collect()),
        Err(ClientError::Refused { status: 404, .. }) => Ok(Vec::new()),
        Err(error) => Err(error.into()),
    }
}
