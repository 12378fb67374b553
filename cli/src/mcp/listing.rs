//! `list_tasks`.

use cfq_proto::http::{TaskQuery, TaskSort, TaskSummary};

use super::access::Access;
use super::arguments::{ListTasks, in_range};
use super::error::ToolError;
use super::progress::age_s;
use super::replies::{ListedTask, Tasks, TitleText};

const DEFAULT_LIMIT: u32 = 20;

/// `list_tasks`.
pub async fn list_tasks(access: &Access, arguments: ListTasks) -> Result<Tasks, ToolError> {
    let query = TaskQuery {
        states: arguments.states,
        priorities: Vec::new(),
        labels: arguments.labels,
        repo: None,
        since: None,
        sort: TaskSort::Newest,
        after: position(arguments.after.as_deref())?,
        limit: in_range("limit", arguments.limit, (1, 100), DEFAULT_LIMIT)?,
    };
    let list = access.client()?.list_tasks(&query).await?;
    Ok(Tasks { tasks: list.tasks.iter().map(listed).collect(), next: list.next, more: list.more })
}

/// The argument `after` of a list.
pub fn position(after: Option<&str>) -> Result<Option<cfq_proto::http::ListPosition>, ToolError> {
    after.map(|text| text.parse().map_err(|error| ToolError::argument("after", error))).transpose()
}

pub fn listed(task: &TaskSummary) -> ListedTask {
    ListedTask {
        session_id: task.id,
        task: task.number.to_string(),
        state: task.state,
        loop_state: task.loop_state,
        priority: task.priority,
        iteration: task.iteration,
        max_iterations: task.max_iterations,
        best_score: task.best_score,
        age_s: age_s(task.created_at),
        labels: task.labels.iter().map(ToString::to_string).collect(),
        untrusted_content: TitleText { title: task.title.clone() },
    }
}
