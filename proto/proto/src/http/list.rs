//! Types for lists of tasks.

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::TaskSummary;
use crate::ids::{IdError, TaskNumber};
use crate::label::Label;
use crate::task::{Priority, TaskState};

/// Order of a list of tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TaskSort {
    /// The newest first.
    #[default]
    Newest,
    /// The oldest first.
    Oldest,
    /// By priority, and the oldest of each priority first.
    Priority,
}

impl fmt::Display for TaskSort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Newest => "newest",
            Self::Oldest => "oldest",
            Self::Priority => "priority",
        })
    }
}

impl FromStr for TaskSort {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        match text {
            "newest" => Ok(Self::Newest),
            "oldest" => Ok(Self::Oldest),
            "priority" => Ok(Self::Priority),
            _ => Err(IdError { kind: "sort", text: text.to_owned(), expected: "newest, oldest or priority" }),
        }
    }
}

/// Position in a list of tasks: the last task of the page before. Its text is `PRIORITY.NUMBER`, as in `P2.t42`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListPosition {
    /// Priority of the task.
    pub priority: Priority,
    /// Number of the task.
    pub number: TaskNumber,
}

impl fmt::Display for ListPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.priority, self.number)
    }
}

impl FromStr for ListPosition {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        let parsed = text.split_once('.').and_then(|(priority, number)| {
            Some(Self { priority: priority.parse().ok()?, number: number.parse().ok()? })
        });
        let expected = "the position that the page before names, as in P2.t42";
        parsed.ok_or(IdError { kind: "position", text: text.to_owned(), expected })
    }
}

/// Query of `GET /tasks`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TaskQuery {
    /// States of the listed tasks; empty: all.
    pub states: Vec<TaskState>,
    /// Priorities of the listed tasks; empty: all.
    pub priorities: Vec<Priority>,
    /// Labels that each listed task has.
    pub labels: Vec<Label>,
    /// Path of the repository of each listed task; `None`: all repositories.
    pub repo: Option<String>,
    /// Time in seconds since 1970 before which no listed task was submitted.
    pub since: Option<i64>,
    /// Order of the list.
    pub sort: TaskSort,
    /// Position after which the list continues.
    pub after: Option<ListPosition>,
    /// Maximum number of tasks.
    pub limit: u32,
}

impl fmt::Display for TaskQuery {
    /// Writes the query string of the request.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |items: Vec<String>| items.join(",");
        write!(f, "limit={}&sort={}", self.limit, self.sort)?;
        if !self.states.is_empty() {
            write!(f, "&state={}", list(self.states.iter().map(ToString::to_string).collect()))?;
        }
        if !self.priorities.is_empty() {
            write!(f, "&priority={}", list(self.priorities.iter().map(ToString::to_string).collect()))?;
        }
        if !self.labels.is_empty() {
            write!(f, "&label={}", list(self.labels.iter().map(ToString::to_string).collect()))?;
        }
        if let Some(repo) = &self.repo {
            write!(f, "&repo={}", query_value(repo))?;
        }
        if let Some(since) = self.since {
            write!(f, "&since={since}")?;
        }
        self.after.map_or(Ok(()), |after| write!(f, "&after={after}"))
    }
}

/// A text as a value in a query string; RFC 3986, section 2.1.
pub(crate) fn query_value(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                encoded.push(char::from(byte))
            }
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}

/// Reply to `GET /tasks`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TaskList {
    /// Tasks, in the order of the request; the newest first by default.
    pub tasks: Vec<TaskSummary>,
    /// The value of `after` that lists the tasks after these; `None` if there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
    /// Number of tasks after these; counted up to 100.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub more: u32,
}

fn is_zero(count: &u32) -> bool {
    *count == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn position_and_query_have_the_documented_text() {
        let after = ListPosition { priority: Priority::P1, number: TaskNumber(42) };
        assert_eq!(after.to_string().parse::<ListPosition>().unwrap(), after);
        for bad in ["", "t42", "P9.t42", "P1.t0", "P1."] {
            assert!(bad.parse::<ListPosition>().is_err(), "{bad:?}");
        }
        let states = vec![TaskState::Ready, TaskState::Paused];
        let labels = vec!["nightly".parse().unwrap(), "team=web".parse().unwrap()];
        let query = TaskQuery {
            states,
            priorities: vec![Priority::P0],
            labels,
            repo: Some("/home/a b/ü&c".into()),
            since: Some(1_700_000_000),
            after: Some(after),
            limit: 7,
            sort: TaskSort::Newest,
        };
        let text = "limit=7&sort=newest&state=ready,paused&priority=P0&label=nightly,team=web\
                    &repo=/home/a%20b/%C3%BC%26c&since=1700000000&after=P1.t42";
        assert_eq!(query.to_string(), text);
    }
}
