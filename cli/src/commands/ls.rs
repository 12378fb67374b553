//! `cfq ls`

use cfq_link::clock;
use cfq_proto::client::Client;
use cfq_proto::http::{TaskList, TaskQuery, TaskSort, TaskSummary};

use crate::args::LsArgs;
use crate::exit::{self, Code};
use crate::output::{self, Output};

/// Number up to which the server counts the tasks after a page.
const MAX_COUNTED_TASKS: u32 = 100;

pub async fn run(client: &Client, out: Output, args: LsArgs) -> anyhow::Result<Code> {
    let LsArgs { state, priority, label, sort, limit, after } = args;
    let query = TaskQuery { states: state, priorities: priority, labels: label, sort, after, limit };
    let list = client.list_tasks(&query).await?;
    // A server of an earlier version ignores the labels.
    if list.tasks.iter().any(|task| query.labels.iter().any(|label| !task.labels.contains(label))) {
        return Err(exit::failed("the server is older than this command and does not know --label: update the server"));
    }
    out.print(&list, |list| output::fit_to_terminal(&render(list, &query, clock::unix_seconds())))?;
    if let Some(next) = next_page(&list, &query) {
        out.status(&next);
    }
    Ok(Code::Done)
}

/// The list as a table. `now` is the time in seconds since 1970.
fn render(list: &TaskList, query: &TaskQuery, now: i64) -> String {
    if list.tasks.is_empty() {
        let is_whole = *query == TaskQuery { sort: query.sort, limit: query.limit, ..TaskQuery::default() };
        let text = if is_whole { "no tasks; submit one with `cfq submit \"...\"`" } else { "no such tasks" };
        return text.to_owned();
    }
    let has_notes = list.tasks.iter().any(|task| note(task).is_some());
    let rows: Vec<Vec<String>> = list.tasks.iter().map(|task| row(task, has_notes, now)).collect();
    let mut header = vec!["TASK", "STATE", "LOOP", "ITER", "BEST", "PRIO", "AGE"];
    // Before the title, which may be cut.
    header.extend(has_notes.then_some("NOTE"));
    header.push("TITLE");
    output::table(&header, &rows)
}

/// Text with the number of tasks that are left and the command that lists them; `None` if none is left.
fn next_page(list: &TaskList, query: &TaskQuery) -> Option<String> {
    let next = list.next.as_ref()?;
    let mut command = "cfq ls".to_owned();
    for state in &query.states {
        command += &format!(" --state {state}");
    }
    for priority in &query.priorities {
        command += &format!(" --priority {priority}");
    }
    for label in &query.labels {
        command += &format!(" --label {label}");
    }
    if query.sort != TaskSort::default() {
        command += &format!(" --sort {}", query.sort);
    }
    let more = if list.more >= MAX_COUNTED_TASKS { format!("at least {}", list.more) } else { list.more.to_string() };
    Some(format!("{more} more, next: {command} --limit {} --after {next}", query.limit))
}

fn row(task: &TaskSummary, has_note: bool, now: i64) -> Vec<String> {
    let mut row = vec![
        task.number.to_string(),
        task.state.to_string(),
        task.loop_state.to_string(),
        format!("{}/{}", task.iteration, task.max_iterations),
        task.best_score.map_or_else(|| "-".to_owned(), |s| format!("{s:.0}/{:.0}", task.threshold)),
        task.priority.to_string(),
        output::age(now - task.created_at as i64),
    ];
    row.extend(has_note.then(|| note(task).unwrap_or_default()));
    row.push(one_line(&task.title));
    row
}

fn one_line(text: &str) -> String {
    output::sanitize(text).replace(['\n', '\t'], " ")
}

/// Why the task may not start yet, that others wait for it, that its failure is acknowledged, and its labels.
fn note(task: &TaskSummary) -> Option<String> {
    let bottleneck = task.is_bottleneck.then(|| "bottleneck: several tasks wait for it".to_owned());
    let acknowledged = task.is_acknowledged.then(|| "acknowledged".to_owned());
    let reason = task.waiting_reason.as_ref().map(|reason| one_line(reason));
    let labels = (!task.labels.is_empty()).then(|| format!("labels: {}", output::list(&task.labels)));
    let notes: Vec<String> = [bottleneck, acknowledged, reason, labels].into_iter().flatten().collect();
    (!notes.is_empty()).then(|| notes.join("; "))
}

#[cfg(test)]
mod tests {
    use cfq_proto::ids::{TaskId, TaskNumber};
    use cfq_proto::loop_step::LoopState;
    use cfq_proto::task::{Priority, TaskState};

    use super::*;

    #[test]
    fn note_is_before_the_title() {
        let mut task = TaskSummary {
            id: TaskId::fresh(),
            number: TaskNumber(7),
            state: TaskState::Ready,
            loop_state: LoopState::Idle,
            title: "a\tlong\ntitle".into(),
            priority: Priority::P1,
            iteration: 0,
            max_iterations: 5,
            best_score: None,
            threshold: 85.0,
            created_at: 1_000.0,
            updated_at: 1_000.0,
            labels: vec![],
            retry_of: None,
            waiting_reason: None,
            is_bottleneck: false,
            is_acknowledged: false,
        };
        let shown = |task: &TaskSummary| {
            let list = TaskList { tasks: vec![task.clone()], next: None, more: 0 };
            render(&list, &TaskQuery::default(), 1_300)
        };
        assert_eq!(
            shown(&task),
            "TASK  STATE  LOOP  ITER  BEST  PRIO  AGE    TITLE\nt7    ready  idle  0/5   -     P1    5 min  a long title"
        );
        task.waiting_reason = Some("waits for t3".into());
        assert!(shown(&task).ends_with("5 min  waits for t3  a long title"), "{}", shown(&task));
    }

    #[test]
    fn next_command_keeps_the_filters() {
        let states = vec![TaskState::Ready];
        let mut query = TaskQuery { states, priorities: vec![Priority::P0], limit: 2, ..TaskQuery::default() };
        let mut list = TaskList { tasks: vec![], next: Some("P0.t4".into()), more: 3 };
        let next = "3 more, next: cfq ls --state ready --priority P0 --limit 2 --after P0.t4";
        assert_eq!(next_page(&list, &query).unwrap(), next);
        query.sort = TaskSort::Priority;
        list.more = 100;
        let text = next_page(&list, &query).unwrap();
        assert!(text.starts_with("at least 100 more") && text.contains("--sort priority"), "{text}");
        list.next = None;
        assert_eq!(next_page(&list, &query), None);
    }
}
