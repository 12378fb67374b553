//! Draws a snapshot. Narrow terminals leave out columns; every text of a model, a user or a node is sanitized.

use cfq_proto::http::{JobListItem, NodeView, TaskSummary};
use cfq_proto::job::JobState;
use cfq_proto::node::{Device, ModelState, Residency};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style, Stylize};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Paragraph, Row, Table, Wrap};

use super::Snapshot;
use crate::commands::nodes;
use crate::commands::status;
use crate::output;

/// Width from which all columns are shown.
const WIDE_COLUMNS: u16 = 70;

/// Draws the whole view. `error` says why the snapshot is not the newest one.
pub fn draw(frame: &mut Frame<'_>, snapshot: &Snapshot, error: Option<&str>) {
    let is_wide = frame.area().width >= WIDE_COLUMNS;
    let nodes = node_rows(&snapshot.nodes, is_wide);
    let head = head_lines(snapshot, error);
    let head_height = head.iter().map(|line| wrapped_rows(line.width(), frame.area().width)).sum();
    let node_height = u16::try_from(nodes.len() + 1).unwrap_or(u16::MAX).min(frame.area().height / 3);
    let [head_area, _, node_area, _, task_area, _, call_area, foot_area] = Layout::vertical([
        Constraint::Length(head_height),
        Constraint::Length(1),
        Constraint::Length(node_height),
        Constraint::Length(1),
        Constraint::Fill(1),
        Constraint::Length(1),
        Constraint::Fill(1),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    frame.render_widget(Paragraph::new(Text::from(head)).wrap(Wrap { trim: false }), head_area);
    frame.render_widget(node_table(nodes, is_wide), node_area);
    frame.render_widget(task_table(&snapshot.tasks, is_wide), task_area);
    frame.render_widget(call_table(&snapshot.calls, is_wide), call_area);
    frame.render_widget(Line::from("q quits; cfq explain TASK says why a task waits").dim(), foot_area);
}

/// Number of rows that text of this width needs, with room for words that do not fit into the end of a row.
fn wrapped_rows(text: usize, width: u16) -> u16 {
    let (text, width) = (u16::try_from(text).unwrap_or(u16::MAX), width.max(10));
    if text <= width { 1 } else { text.div_ceil(width - width / 5) }
}

fn head_lines(snapshot: &Snapshot, error: Option<&str>) -> Vec<Line<'static>> {
    let mut lines = vec![match error {
        Some(error) => Line::from(one_line(error)).bold(),
        None => Line::from(status::headline(&snapshot.status)).bold(),
    }];
    lines.push(Line::from(format!("tasks  {}", status::tasks(&snapshot.status))));
    lines.push(Line::from(format!("calls  {}", status::calls(&snapshot.status))));
    lines
}

/// A device or a model of a node.
struct NodeRow {
    cells: Vec<String>,
    is_alive: bool,
}

fn node_rows(nodes: &[NodeView], is_wide: bool) -> Vec<NodeRow> {
    let mut rows = Vec::new();
    for node in nodes {
        let mut name = node.id.to_string();
        let state = Some(nodes::state(node)).filter(|state| *state != "alive");
        let state = state.map(|state| {
            let mut cells = vec![String::new(); if is_wide { 2 } else { 1 }];
            cells.push(state.to_owned());
            cells
        });
        let devices = node.devices.iter().map(|device| device_cells(device, used_memory(node, device), is_wide));
        let models = node.ledger.models.iter().map(|model| model_cells(model, is_wide));
        let shown = if node.alive { usize::MAX } else { 1 };
        for cells in state.into_iter().chain(devices).chain(models).take(shown) {
            let cells = std::iter::once(std::mem::take(&mut name)).chain(cells).collect();
            rows.push(NodeRow { cells, is_alive: node.alive });
        }
    }
    rows
}

/// Memory of the device that other processes and loaded models use.
fn used_memory(node: &NodeView, device: &Device) -> u64 {
    let is_loaded = |model: &&ModelState| matches!(model.residency, Residency::Resident | Residency::Loading);
    let models = node.ledger.models.iter().filter(is_loaded).filter(|model| model.device == device.id);
    device.memory_others.saturating_add(models.map(|model| model.need_bytes).sum())
}

fn device_cells(device: &Device, used: u64, is_wide: bool) -> Vec<String> {
    let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
    let memory = format!("{:.1} of {:.1} GiB", gib(used), gib(device.memory_total));
    let name = one_line(&device.name);
    if is_wide { vec![device.id.clone(), name, memory, String::new()] } else { vec![device.id.clone(), memory] }
}

fn model_cells(model: &ModelState, is_wide: bool) -> Vec<String> {
    let state = match &model.residency {
        Residency::Resident => format!("{} of {} running", model.running, model.max_sequences),
        Residency::Available if model.running > 0 => "unloading".to_owned(),
        Residency::Available => "on disk".to_owned(),
        Residency::Loading => "loading".to_owned(),
        Residency::Unusable { reason } => format!("unusable: {}", one_line(reason)),
    };
    let rate = if model.decode_rate > 0.0 { format!("{:.0} tokens/s", model.decode_rate) } else { String::new() };
    let (device, name) = (one_line(&model.device), one_line(model.model.as_str()));
    if is_wide { vec![device, name, state, rate] } else { vec![name, state] }
}

fn node_table(rows: Vec<NodeRow>, is_wide: bool) -> Table<'static> {
    let longest_name = rows.iter().filter_map(|row| row.cells.first()).map(|name| name.chars().count()).max();
    let name_width = Constraint::Length(u16::try_from(longest_name.unwrap_or(0)).unwrap_or(u16::MAX).clamp(4, 16));
    let rows = rows.into_iter().map(|row| {
        let style = if row.is_alive { Style::new() } else { Style::new().add_modifier(Modifier::DIM) };
        Row::new(row.cells).style(style)
    });
    let (header, widths): (&[&str], Vec<Constraint>) = if is_wide {
        (
            &["NODE", "DEVICE", "NAME", "MEMORY, CALLS", "RATE"],
            [name_width, Constraint::Max(8), Constraint::Fill(1), Constraint::Fill(1), Constraint::Max(13)].into(),
        )
    } else {
        (&["NODE", "NAME", "MEMORY, CALLS"], [name_width, Constraint::Fill(1), Constraint::Max(16)].into())
    };
    table(rows, header, widths)
}

fn task_table(tasks: &[TaskSummary], is_wide: bool) -> Table<'static> {
    let rows = tasks.iter().map(|task| {
        let (number, state, title) = (task.number.to_string(), task.state.to_string(), one_line(&task.title));
        Row::new(if is_wide {
            let iterations = format!("{}/{}", task.iteration, task.max_iterations);
            vec![number, state, task.loop_state.to_string(), iterations, task.priority.to_string(), title]
        } else {
            vec![number, state, title]
        })
    });
    let (header, widths): (&[&str], Vec<Constraint>) = if is_wide {
        (
            &["TASK", "STATE", "LOOP", "ITER", "PRIO", "TITLE"],
            [8, 8, 10, 5, 4].map(Constraint::Length).into_iter().chain([Constraint::Fill(1)]).collect(),
        )
    } else {
        (&["TASK", "STATE", "TITLE"], [Constraint::Length(6), Constraint::Length(8), Constraint::Fill(1)].into())
    };
    table(rows, header, widths)
}

fn call_table(calls: &[JobListItem], is_wide: bool) -> Table<'static> {
    let rows = calls.iter().map(|call| {
        let (place, time_ms) = match &call.node {
            Some(node) if call.state == JobState::Running => (format!("on {node}"), call.running_ms),
            Some(_) | None => (one_line(&call.reason), call.waiting_ms),
        };
        let (task, role, time) = (call.task.to_string(), call.role.to_string(), output::duration(time_ms));
        let model = one_line(call.model.as_str());
        Row::new(if is_wide { vec![task, role, time, place, model] } else { vec![task, role, time, place] })
    });
    let narrow = [8, 6, 8].map(Constraint::Length).into_iter();
    let (header, widths): (&[&str], Vec<Constraint>) = if is_wide {
        (
            &["CALL OF", "ROLE", "TIME", "PLACE", "MODEL"],
            narrow.chain([Constraint::Fill(2), Constraint::Fill(3)]).collect(),
        )
    } else {
        (&["CALL OF", "ROLE", "TIME", "PLACE"], narrow.chain([Constraint::Fill(1)]).collect())
    };
    table(rows, header, widths)
}

fn table(rows: impl Iterator<Item = Row<'static>>, header: &[&str], widths: Vec<Constraint>) -> Table<'static> {
    let header = Row::new(header.iter().map(ToString::to_string)).style(Style::new().bold());
    Table::new(rows, widths).header(header).column_spacing(2)
}

/// One line of text from outside.
fn one_line(text: &str) -> String {
    output::sanitize(text).replace(['\n', '\t'], " ")
}

#[cfg(test)]
mod tests {
    use cfq_proto::http::ClusterStatus;
    use cfq_proto::ids::TaskNumber;
    use cfq_proto::task::TaskState;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use serde_json::json;

    use super::*;

    fn snapshot() -> Snapshot {
        let status: ClusterStatus = serde_json::from_value(json!({
            "version": "1.2.3", "uptime_s": 300.0, "tasks": { "running": 1, "ready": 1, "escalated": 2 },
            "jobs": { "running": 1, "queued": 1 }, "nodes_alive": 1, "nodes_unreachable": ["n2"],
            "runners_alive": 1,
            "oldest_queued_job": { "task": 8, "age_s": 4.0, "reason": "waits for free capacity on a node" }
        }))
        .unwrap();
        let node = |id: &str, alive: bool| {
            let model = json!({
                "model": "path:/models/qwen.gguf", "residency": { "type": "resident" }, "device": "cuda:0",
                "need_bytes": 5_368_709_120u64, "context_tokens": 4096, "kv_tokens_free": 1, "running": 1, "max_sequences": 8,
                "prefill_rate": 1.0, "decode_rate": 33.3, "load_rate": 1.0, "tokens_per_byte": 0.3
            });
            let device = json!({
                "id": "cuda:0", "kind": "cuda", "name": "RTX 4070\u{1b}[2J", "memory_total": 12_884_901_888u64,
                "memory_others": 1_073_741_824u64
            });
            let models = if alive { vec![model] } else { vec![] };
            serde_json::from_value::<NodeView>(json!({
                "id": id, "boot": uuid::Uuid::nil(), "version": "1.2.3", "alive": alive, "devices": [device],
                "ledger": { "version": 1, "models": models, "draining": false }, "last_seen": 0.0, "running": 1
            }))
            .unwrap()
        };
        let task = |number: i64, state: TaskState| {
            serde_json::from_value::<TaskSummary>(json!({
                "id": uuid::Uuid::nil(), "number": number, "state": state, "loop_state": "reviewing",
                "title": "add a function\nto the parser", "priority": "P2", "iteration": 2, "max_iterations": 5,
                "best_score": 70.0, "threshold": 85.0, "created_at": 0.0, "updated_at": 0.0, "retry_of": null
            }))
            .unwrap()
        };
        let call = |number, state: JobState, node: Option<&str>, reason: &str| JobListItem {
            id: cfq_proto::ids::JobId(uuid::Uuid::nil()),
            task: TaskNumber(number),
            role: cfq_proto::job::JobRole::Beta,
            model: "path:/models/qwen.gguf".parse().unwrap(),
            priority: cfq_proto::task::Priority::P2,
            state,
            attempt: 1,
            node: node.map(|node| node.parse().unwrap()),
            created_at: 0.0,
            waiting_ms: 4_000,
            running_ms: 75_000,
            prompt_tokens: None,
            output_tokens: None,
            reason: reason.to_owned(),
            failure: None,
        };
        Snapshot {
            status,
            nodes: vec![node("n1", true), node("n2", false)],
            tasks: vec![task(7, TaskState::Running), task(8, TaskState::Ready)],
            calls: vec![
                call(7, JobState::Running, Some("n1"), ""),
                call(8, JobState::Queued, None, "waits for free capacity on a node"),
            ],
        }
    }

    fn drawn(width: u16, error: Option<&str>) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, 22)).unwrap();
        terminal.draw(|frame| draw(frame, &snapshot(), error)).unwrap();
        let buffer = terminal.backend().buffer();
        let row = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
        (0..22).map(row).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn view_fits_into_each_width() {
        insta::assert_snapshot!("top_40", drawn(40, None));
        insta::assert_snapshot!("top_80", drawn(80, None));
        insta::assert_snapshot!("top_120", drawn(120, None));
    }

    #[test]
    fn error_replaces_the_headline() {
        let text = drawn(80, Some("no server responds\u{1b}[2J"));
        assert!(text.starts_with("no server responds<U+001B>[2J"), "{text}");
    }
}
