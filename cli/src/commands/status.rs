//! `cfq status`: whether everything runs, what waits, and what needs the user.

use cfq_proto::client::Client;
use cfq_proto::http::{ClusterStatus, TaskQuery, TaskSort, TaskSummary};
use cfq_proto::job::JobState;
use cfq_proto::task::TaskState;

use crate::exit::Code;
use crate::output::{self, Output};

/// States of tasks that wait for a decision of the user.
const NEEDS_USER: [TaskState; 2] = [TaskState::Escalated, TaskState::WaitingOnHuman];
/// Maximum number of tasks that are listed.
const MAX_LISTED_TASKS: u32 = 5;

/// Age of a model call from which its wait needs an explanation, in s.
const LONG_WAIT_S: f64 = 60.0;

pub async fn run(client: &Client, out: Output) -> anyhow::Result<Code> {
    let status = client.status().await?;
    let states = NEEDS_USER.to_vec();
    let query = TaskQuery { states, sort: TaskSort::Oldest, limit: MAX_LISTED_TASKS, ..TaskQuery::default() };
    let listed = if out.json { Vec::new() } else { client.list_tasks(&query).await?.tasks };
    out.print(&status, |status| render(status, &listed))?;
    Ok(if status.not_ready.is_none() { Code::Done } else { Code::Unreachable })
}

fn render(status: &ClusterStatus, needs_user: &[TaskSummary]) -> String {
    let mut lines = vec![
        headline(status),
        format!("tasks    {}", tasks(status)),
        format!("calls    {}", calls(status)),
        format!("nodes    {}", nodes(status)),
        format!("runners  {} alive", status.runners_alive),
    ];
    let waiting = status.tasks_in(&NEEDS_USER);
    for task in needs_user {
        let title = output::sanitize(&task.title).replace('\n', " ");
        lines.push(format!("         {}  {}  {title}", task.number, task.state));
    }
    let left = waiting.saturating_sub(needs_user.len() as u64);
    if left > 0 {
        lines.push(format!("         {left} more: cfq ls --state escalated,waiting_on_human --sort oldest"));
    }
    lines.push(format!("next     {}", next_command(status, needs_user)));
    lines.join("\n")
}

/// Version, uptime, and why the cluster does not work, if it does not.
pub fn headline(status: &ClusterStatus) -> String {
    let uptime = uptime(status.uptime_s);
    match &status.not_ready {
        None => format!("cfq {} is ready, up for {uptime}", status.version),
        Some(reason) => format!("cfq {} is not ready, up for {uptime}: {reason}", status.version),
    }
}

/// A time for display: `12 s`, `3 min`, `5 h`, `9 days`.
fn uptime(seconds: f64) -> String {
    let seconds = seconds.max(0.0) as u64;
    match seconds {
        0..=119 => format!("{seconds} s"),
        120..=7_199 => format!("{} min", seconds / 60),
        7_200..=172_799 => format!("{} h", seconds / 3_600),
        _ => format!("{} days", seconds / 86_400),
    }
}

/// Number of tasks by what they do: `2 running, 1 ready, 3 need you`.
pub fn tasks(status: &ClusterStatus) -> String {
    use TaskState::{Blocked, Paused, Queued, Ready, Running};
    let states = [Running, Ready, Queued, Blocked, Paused];
    let mut parts: Vec<String> = states
        .into_iter()
        .map(|state| (status.tasks_in(&[state]), state))
        .filter(|(n, _)| *n > 0)
        .map(|(n, state)| format!("{n} {state}"))
        .collect();
    match status.tasks_in(&NEEDS_USER) {
        0 => {}
        1 => parts.push("1 needs you".to_owned()),
        n => parts.push(format!("{n} need you")),
    }
    if parts.is_empty() { "none open".to_owned() } else { parts.join(", ") }
}

/// Number of model calls by state, and why the oldest one waits.
pub fn calls(status: &ClusterStatus) -> String {
    let running = status.jobs_in(JobState::Running) + status.jobs_in(JobState::Placed);
    let mut text = format!("{running} running, {} waiting", status.jobs_in(JobState::Queued));
    if status.jobs_in(JobState::Dead) > 0 {
        text += &format!(", {} given up (cfq dead ls)", status.jobs_in(JobState::Dead));
    }
    if let Some(oldest) = &status.oldest_queued_job {
        let reason = output::sanitize(&oldest.reason).replace('\n', " ");
        text += &format!("; the oldest one, of {}: {reason}", oldest.task);
    }
    text
}

fn nodes(status: &ClusterStatus) -> String {
    if status.nodes_alive == 0 && status.nodes_unreachable.is_empty() {
        return "none have registered yet: cfq logs --process node".to_owned();
    }
    let mut text = format!("{} alive", status.nodes_alive);
    if !status.nodes_unreachable.is_empty() {
        text += &format!(", unreachable: {}", output::list(&status.nodes_unreachable));
    }
    text
}

/// The command that helps the user most.
fn next_command(status: &ClusterStatus, needs_user: &[TaskSummary]) -> String {
    if status.not_ready.is_some() {
        return "cfq doctor".to_owned();
    }
    if let Some(task) = needs_user.first() {
        return format!("cfq show {}", task.number);
    }
    if let Some(oldest) = status.oldest_queued_job.as_ref().filter(|job| job.age_s > LONG_WAIT_S) {
        return format!("cfq explain {}", oldest.task);
    }
    if status.tasks.is_empty() { "cfq submit \"...\"".to_owned() } else { "cfq ls".to_owned() }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use cfq_proto::http::QueuedJob;
    use cfq_proto::ids::TaskNumber;

    use super::*;

    fn idle() -> ClusterStatus {
        ClusterStatus {
            version: "1.2.3".into(),
            uptime_s: 7_300.0,
            not_ready: None,
            tasks: BTreeMap::new(),
            jobs: BTreeMap::new(),
            oldest_queued_job: None,
            nodes_alive: 1,
            nodes_unreachable: vec![],
            runners_alive: 1,
        }
    }

    #[test]
    fn idle_cluster_says_how_to_submit() {
        let expected = "cfq 1.2.3 is ready, up for 2 h\ntasks    none open\ncalls    0 running, 0 waiting\n\
                        nodes    1 alive\nrunners  1 alive\nnext     cfq submit \"...\"";
        assert_eq!(render(&idle(), &[]), expected);
    }

    #[test]
    fn what_waits_and_what_needs_the_user_is_named() {
        let oldest = QueuedJob { task: TaskNumber(4), age_s: 75.0, reason: "no node serves path:/m".into() };
        let status = ClusterStatus {
            not_ready: Some("no scheduler is the leader yet".into()),
            tasks: [(TaskState::Running, 2), (TaskState::Escalated, 1), (TaskState::WaitingOnHuman, 8)].into(),
            jobs: [(JobState::Placed, 1), (JobState::Running, 1), (JobState::Queued, 3), (JobState::Dead, 1)].into(),
            oldest_queued_job: Some(oldest),
            nodes_unreachable: vec!["n3".parse().unwrap()],
            ..idle()
        };
        let text = render(&status, &[]);
        for words in [
            "is not ready, up for 2 h: no scheduler is the leader yet",
            "2 running, 9 need you",
            "2 running, 3 waiting, 1 given up (cfq dead ls); the oldest one, of t4: no node serves path:/m",
            "1 alive, unreachable: n3",
            "9 more: cfq ls --state escalated,waiting_on_human",
            "next     cfq doctor",
        ] {
            assert!(text.contains(words), "{words:?} is not in {text}");
        }
        let ready = ClusterStatus { not_ready: None, ..status };
        assert_eq!(next_command(&ready, &[]), "cfq explain t4");
    }
}
