//! Schedules: tasks that are submitted at the times of a cron expression.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::ids::TaskNumber;
use crate::task::TaskSpec;

/// Body of `POST /schedules`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ScheduleRequest {
    /// Name of the schedule, 1 to 63 characters of `a-z`, `A-Z`, `0-9`, `-` and `_`.
    pub name: String,
    /// Cron expression with five fields.
    pub cron: String,
    /// IANA name of the time zone of the expression, for example `Europe/Berlin`.
    pub time_zone: String,
    /// The task to submit. Without `base`, each task starts from the commit to which HEAD points when it starts.
    pub task: TaskSpec,
}

/// A schedule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ScheduleView {
    /// Name of the schedule.
    pub name: String,
    /// Cron expression with five fields.
    pub cron: String,
    /// IANA name of the time zone of the expression.
    pub time_zone: String,
    /// Short title of its tasks, made from the description.
    pub title: String,
    /// Time at which the next task is submitted, in seconds since 1970; `None` while the schedule is paused.
    pub next_at: Option<i64>,
    /// Time for which the last task was submitted, in seconds since 1970.
    pub last_at: Option<i64>,
    /// Number of the last task.
    pub last_task: Option<TaskNumber>,
    /// The task to submit, with defaults filled in.
    #[serde(rename = "spec", alias = "task")]
    pub task: TaskSpec,
}

/// Reply to `GET /schedules`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ScheduleList {
    /// All schedules, in the order of their names.
    pub schedules: Vec<ScheduleView>,
}

/// Reply to `DELETE /schedules/{name}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ScheduleRemoved {
    /// Name of the schedule.
    pub name: String,
}
