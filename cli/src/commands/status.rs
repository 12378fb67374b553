//! `cfq status`: whether everything runs, what waits, and what needs the user.

use std::collections::BTreeMap;

use cfq_proto::client::Client;
use cfq_proto::http::{ClusterStatus, NodeView, TaskQuery, TaskSort, TaskSummary};
use cfq_proto::job::JobState;
use cfq_proto::model::ModelId;
use cfq_proto::node::Residency;
use cfq_proto::task::TaskState;

use crate::commands::ls::NEEDS_USER;
use crate::exit::Code;
use crate::output::{self, Line, Output, Tone, View};

/// Maximum number of tasks that are listed.
const MAX_LISTED_TASKS: u32 = 5;
/// Maximum number of models that are listed with the reason why they cannot be used.
const MAX_LISTED_MODELS: usize = 5;

/// Age of a model call from which its wait needs an explanation, in s.
const LONG_WAIT_S: f64 = 60.0;

pub async fn run(client: &Client, out: Output) -> anyhow::Result<Code> {
    let status = client.status().await?;
    let states = NEEDS_USER.to_vec();
    let query = TaskQuery { states, sort: TaskSort::Oldest, limit: MAX_LISTED_TASKS, ..TaskQuery::default() };
    let nodes = client.nodes().await?;
    let listed = if out.json { Vec::new() } else { client.list_tasks(&query).await?.tasks };
    out.print_lines(&status, |status| render(status, &listed, &nodes, output::terminal_columns()))?;
    let can_work = status.not_ready.is_none() && !Models::of(&nodes).are_unusable();
    Ok(if can_work { Code::Done } else { Code::Unreachable })
}

pub(super) fn render(
    status: &ClusterStatus,
    needs_user: &[TaskSummary],
    node_views: &[NodeView],
    terminal: Option<usize>,
) -> Vec<Line> {
    let models = Models::of(node_views);
    let mut view = View::default();
    let can_work = status.not_ready.is_none() && !models.are_unusable();
    let unusable = if status.not_ready.is_none() && !can_work { ", but no model can be used" } else { "" };
    view.push_toned(if can_work { Tone::Heading } else { Tone::Bad }, format!("{}{unusable}", headline(status)));
    view.push(format!("tasks    {}", tasks(status)));
    let waiting = status.tasks_in(&NEEDS_USER);
    for task in needs_user {
        let title = output::one_line(&task.title);
        view.push_toned(Tone::NeedsUser, format!("         {}  {}  {title}", task.number, task.state));
    }
    let left = waiting.saturating_sub(needs_user.len() as u64);
    if left > 0 {
        let command = "cfq ls --state escalated,waiting_on_human --sort oldest";
        view.push_command(&format!("         {left} more: "), command, terminal);
    }
    if status.unacknowledged_failures > 0 {
        view.push_toned(
            Tone::Bad,
            format!(
                "         {} failed: `cfq ls --state failed`, then `cfq retry TASK` or `cfq acknowledge TASK`",
                status.unacknowledged_failures
            ),
        );
    }
    view.push(format!("calls    {}", calls(status)));
    view.push(format!("nodes    {}", nodes(status, node_views)));
    models.describe(&mut view);
    view.push(format!("runners  {} alive", status.runners_alive));
    view.push_command("next     ", &next_command(status, needs_user, &models), terminal);
    view.lines
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
        text += &format!(", {} given up (`cfq dead ls`)", status.jobs_in(JobState::Dead));
    }
    if let Some(oldest) = &status.oldest_queued_job {
        let reason = output::one_line(&oldest.reason);
        text += &format!("; the oldest one, of {}: {reason}", oldest.task);
    }
    text
}

fn nodes(status: &ClusterStatus, nodes: &[NodeView]) -> String {
    if status.nodes_alive == 0 && status.nodes_unreachable.is_empty() {
        return "none have registered yet: `cfq logs --process node`".to_owned();
    }
    let mut text = format!("{} alive", status.nodes_alive);
    let mut alive = nodes.iter().filter(|node| node.alive).peekable();
    if alive.peek().is_some() && alive.all(|node| node.cordoned) {
        text += ", all cordoned, so no call starts: `cfq machines uncordon NAME`";
    }
    if !status.nodes_unreachable.is_empty() {
        text += &format!(", unreachable: {}", output::list(&status.nodes_unreachable));
    }
    text
}

/// The models of the nodes that are alive.
#[derive(Default)]
struct Models<'n> {
    /// Number of models that at least one node can use, or load.
    usable: usize,
    /// Number of models that are only being loaded.
    loading: usize,
    /// Models that no node can use, each with a node and its reason.
    unusable: Vec<(&'n ModelId, &'n NodeView, &'n str)>,
}

impl<'n> Models<'n> {
    fn of(nodes: &'n [NodeView]) -> Self {
        let mut states: BTreeMap<&ModelId, Vec<(&NodeView, &Residency)>> = BTreeMap::new();
        for node in nodes.iter().filter(|node| node.alive) {
            for state in &node.ledger.models {
                states.entry(&state.model).or_default().push((node, &state.residency));
            }
        }
        let mut models = Self::default();
        for (model, states) in states {
            let has = |is: fn(&Residency) -> bool| states.iter().any(|(_, residency)| is(residency));
            if has(|residency| matches!(residency, Residency::Resident | Residency::Available)) {
                models.usable += 1;
            } else if has(|residency| matches!(residency, Residency::Loading)) {
                models.loading += 1;
            } else {
                models.unusable.extend(states.iter().find_map(|(node, residency)| match residency {
                    Residency::Unusable { reason } => Some((model, *node, reason.as_str())),
                    Residency::Resident | Residency::Available | Residency::Loading => None,
                }));
            }
        }
        models
    }

    /// Whether nodes have models, and none can be used: then no task can be executed.
    fn are_unusable(&self) -> bool {
        self.usable + self.loading == 0 && !self.unusable.is_empty()
    }

    /// Adds nothing if no node has a model.
    fn describe(&self, view: &mut View) {
        let counts = [(self.usable, "usable"), (self.loading, "loading"), (self.unusable.len(), "unusable")];
        let counts: Vec<String> =
            counts.into_iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n} {what}")).collect();
        if counts.is_empty() {
            return;
        }
        view.push(format!("models   {}", counts.join(", ")));
        for (model, node, reason) in self.unusable.iter().take(MAX_LISTED_MODELS) {
            let reason = output::one_line(reason);
            view.push_toned(Tone::Bad, format!("         {model} on {}: {reason}", node.id));
        }
        if self.unusable.len() > MAX_LISTED_MODELS {
            view.push(format!("         {} more: cfq nodes", self.unusable.len() - MAX_LISTED_MODELS));
        }
    }
}

/// The command that helps the user most.
fn next_command(status: &ClusterStatus, needs_user: &[TaskSummary], models: &Models<'_>) -> String {
    if status.not_ready.is_some() {
        return "cfq doctor".to_owned();
    }
    if models.are_unusable() {
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
            unacknowledged_failures: 0,
            jobs: BTreeMap::new(),
            oldest_queued_job: None,
            nodes_alive: 1,
            nodes_unreachable: vec![],
            runners_alive: 1,
        }
    }

    fn shown(status: &ClusterStatus, nodes: &[NodeView]) -> String {
        output::paint(&render(status, &[], nodes, None), None, false)
    }

    #[test]
    fn idle_cluster_says_how_to_submit() {
        let expected = "cfq 1.2.3 is ready, up for 2 h\ntasks    none open\ncalls    0 running, 0 waiting\n\
                        nodes    1 alive\nrunners  1 alive\nnext     cfq submit \"...\"";
        assert_eq!(shown(&idle(), &[]), expected);
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
        let text = shown(&status, &[]);
        for words in [
            "is not ready, up for 2 h: no scheduler is the leader yet",
            "2 running, 9 need you",
            "2 running, 3 waiting, 1 given up (`cfq dead ls`); the oldest one, of t4: no node serves path:/m",
            "1 alive, unreachable: n3",
            "9 more: cfq ls --state escalated,waiting_on_human",
            "next     cfq doctor",
        ] {
            assert!(text.contains(words), "{words:?} is not in {text}");
        }
        let ready = ClusterStatus { not_ready: None, ..status };
        assert_eq!(next_command(&ready, &[], &Models::default()), "cfq explain t4");
    }

    #[test]
    fn models_that_no_node_can_use_and_cordoned_nodes_are_named() {
        let node = |name: &str, alive: bool, cordoned: bool, models: &[(&str, &str)]| -> NodeView {
            let models: Vec<serde_json::Value> = models
                .iter()
                .map(|(model, residency)| {
                    let residency = match *residency {
                        "resident" | "loading" => serde_json::json!({ "type": residency }),
                        reason => serde_json::json!({ "type": "unusable", "reason": reason }),
                    };
                    serde_json::json!({
                        "model": model, "residency": residency, "device": "cpu", "need_bytes": 0, "context_tokens": 1,
                        "kv_tokens_free": 0, "running": 0, "max_sequences": 1, "prefill_rate": 0.0, "decode_rate": 0.0,
                        "load_rate": 0.0, "tokens_per_byte": 0.3
                    })
                })
                .collect();
            serde_json::from_value(serde_json::json!({
                "id": name, "boot": "01a21f19-f8e0-7063-a870-c70afc904ba5", "version": "1", "alive": alive,
                "cordoned": cordoned, "devices": [], "last_seen": 0.0, "running": 0,
                "ledger": { "version": 1, "models": models, "free_bytes": 0, "draining": false }
            }))
            .unwrap()
        };
        let nodes = [
            node(
                "a",
                true,
                true,
                &[("path:/m", "resident"), ("ollama:box/q", "cannot\nreach it"), ("path:/l", "loading")],
            ),
            node("b", false, false, &[("ollama:box/q", "resident")]),
        ];
        let text = shown(&idle(), &nodes);
        for words in [
            "models   1 usable, 1 loading, 1 unusable\n         ollama:box/q on a: cannot reach it\nrunners",
            "1 alive, all cordoned, so no call starts: `cfq machines uncordon NAME`",
            "next     cfq submit",
        ] {
            assert!(text.contains(words), "{words:?} is not in {text}");
        }
        let all_fail = [node("a", true, false, &[("ollama:box/q", "down")])];
        assert!(shown(&idle(), &all_fail).starts_with("cfq 1.2.3 is ready, up for 2 h, but no model can be used\n"));
        assert!(shown(&idle(), &all_fail).ends_with("next     cfq doctor"));
    }
}
