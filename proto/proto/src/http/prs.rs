//! Types for internal pull requests.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::is_zero;
use crate::ids::TaskNumber;
use crate::label::Label;
use crate::pr::PrState;
use crate::review::CheckRun;

/// An internal pull request: merges a task's result into cfq's own mirror of the repository; it is not on a forge.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(from = "PrWire")]
pub struct PrView {
    /// Number of the pull request.
    #[serde(rename = "pr")]
    pub number: i64,
    /// Number of the task whose result it merges.
    #[serde(rename = "number")]
    pub task: TaskNumber,
    /// Title of the pull request.
    pub title: String,
    /// State of the pull request.
    pub state: PrState,
    /// Branch to merge.
    pub branch: String,
    /// Commit at the head of the branch.
    pub head: String,
    /// Commit the branch is based on.
    pub base: String,
    /// Merge commit, once the pull request is merged.
    pub merge_commit: Option<String>,
    /// The project's checks that ran on the merge, once it is carried out; none if its files were checked before.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub merge_checks: Vec<CheckRun>,
    /// All state changes of the pull request, in order.
    pub history: Vec<PrMove>,
}

/// A pull request as a server sends it: that of an earlier version calls its own number `number`, and that of the task
/// `task`.
#[derive(Deserialize, JsonSchema)]
struct PrWire {
    pr: Option<i64>,
    number: i64,
    task: Option<TaskNumber>,
    title: String,
    state: PrState,
    branch: String,
    head: String,
    base: String,
    merge_commit: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    merge_checks: Vec<CheckRun>,
    history: Vec<PrMove>,
}

impl From<PrWire> for PrView {
    fn from(wire: PrWire) -> Self {
        let (number, task) = match (wire.pr, wire.task) {
            (Some(pr), _) => (pr, TaskNumber(wire.number)),
            (None, task) => (wire.number, task.unwrap_or(TaskNumber(0))),
        };
        let PrWire { title, state, branch, head, base, merge_commit, merge_checks, history, .. } = wire;
        Self { number, task, title, state, branch, head, base, merge_commit, merge_checks, history }
    }
}

/// Which pull requests `GET /prs` returns.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PrFilter {
    /// States of the listed pull requests; empty: all.
    pub states: Vec<PrState>,
    /// Labels that the task of each listed pull request has.
    pub labels: Vec<Label>,
    /// Whether the oldest come first.
    pub oldest_first: bool,
    /// Path of the repository of each listed pull request; `None`: all repositories.
    pub repo: Option<String>,
    /// Time in seconds since 1970 before which no listed pull request was opened.
    pub since: Option<i64>,
    /// Only pull requests that come after this one in the list: [`PrList::next`] of the page before.
    pub after: Option<i64>,
    /// Maximum number of pull requests in the reply.
    pub limit: u32,
}

/// Reply to `GET /prs`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PrList {
    /// Pull requests, newest first, unless the request names another order.
    pub prs: Vec<PrView>,
    /// Number of the last pull request of this page, if there are more: the next page begins after it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<i64>,
    /// Number of pull requests after this page, counted up to 100.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub more: u32,
}

/// One state change of a pull request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PrMove {
    /// State after the change.
    pub to: PrState,
    /// Reason for the change, as text.
    #[serde(alias = "why")]
    pub reason: String,
    /// Time of the change, in seconds since 1970.
    pub at: f64,
}
