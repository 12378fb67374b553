//! `cfq ls`

use std::fmt::Display;
use std::path::{Path, PathBuf};

use cfq_link::clock;
use cfq_proto::client::{Client, ClientError};
use cfq_proto::http::{TaskList, TaskQuery, TaskSort, TaskSummary};
use cfq_proto::label::Label;
use cfq_proto::task::TaskState;

use crate::args::LsArgs;
use crate::commands::refresh;
use crate::exit::{self, Code};
use crate::output::{self, Column, Line, Output, Tone};

/// Number up to which the server counts what is after a page.
const MAX_COUNTED: u32 = 100;
/// Width of a note that even a narrow terminal shows if it has the column.
const MIN_NOTE_COLUMNS: usize = 30;
/// Maximum width of a note on a terminal.
const MAX_NOTE_COLUMNS: usize = 60;
/// Number of tasks in a list if the user names none.
const DEFAULT_LIMIT: u32 = 50;
/// States of tasks that wait for a decision of the user.
pub const NEEDS_USER: [TaskState; 2] = [TaskState::Escalated, TaskState::WaitingOnHuman];

pub async fn run(client: &Client, out: Output, args: LsArgs) -> anyhow::Result<Code> {
    if args.quiet && out.json {
        return Err(exit::usage("--quiet prints numbers, and --json objects: use one of them"));
    }
    let query = query(&args)?;
    // A list in the default order begins with the tasks that need the user; one with an order or a size does not.
    let needs_user_first = args.sort.is_none() && args.limit.is_none() && args.after.is_none();
    if args.watch {
        return refresh::run(out, async || {
            let list = fetch(client, &query, needs_user_first).await?;
            let mut lines = render(&list, &query, clock::unix_seconds(), output::terminal_columns());
            lines.extend(next_page(&list, &query).iter().flat_map(|next| output::plain_lines(next)));
            Ok(lines)
        })
        .await;
    }
    // JSON has the plain order.
    let list = fetch(client, &query, needs_user_first && !out.json).await?;
    check_filters(&list, &query)?;
    if args.quiet {
        list.tasks.iter().for_each(|task| output::print_line(&task.number.to_string()));
    } else {
        let columns = output::terminal_columns();
        out.print_lines(&list, |list| render(list, &query, clock::unix_seconds(), columns))?;
    }
    if let Some(next) = next_page(&list, &query) {
        out.status(&next);
    }
    Ok(Code::Done)
}

/// Refuses a list of a server of an earlier version, which ignores what it does not know.
pub fn check_filters(list: &TaskList, query: &TaskQuery) -> anyhow::Result<()> {
    let has_all_labels = |task: &TaskSummary| query.labels.iter().all(|label| task.labels.contains(label));
    let in_repository = |task: &TaskSummary| query.repo.as_ref().is_none_or(|repo| task.repo == *repo);
    match list.tasks.iter().all(|task| has_all_labels(task) && in_repository(task)) {
        true => Ok(()),
        false => Err(exit::failed(
            "the server is older than this command and does not know --label or --repo: update the server",
        )),
    }
}

fn query(args: &LsArgs) -> anyhow::Result<TaskQuery> {
    let LsArgs { state, priority, label, repo, since, sort, limit, after, watch: _, quiet: _ } = args;
    Ok(TaskQuery {
        states: state.clone(),
        priorities: priority.clone(),
        labels: label.clone(),
        repo: repo.as_deref().map(repository).transpose()?.map(|repo| repo.to_string_lossy().into_owned()),
        since: since.map(jiff::Timestamp::as_second),
        sort: sort.unwrap_or_default(),
        after: *after,
        limit: limit.unwrap_or(DEFAULT_LIMIT),
    })
}

/// The repository that contains this folder; the folder itself if it is not on this machine or in no repository.
pub fn repository(dir: &Path) -> anyhow::Result<PathBuf> {
    let dir = dir.canonicalize().or_else(|_| std::path::absolute(dir))?;
    Ok(dir.ancestors().find(|folder| folder.join(".git").exists()).unwrap_or(&dir).to_path_buf())
}

async fn fetch(client: &Client, query: &TaskQuery, needs_user_first: bool) -> Result<TaskList, ClientError> {
    let mut list = client.list_tasks(query).await?;
    if !needs_user_first || !query.states.is_empty() {
        return Ok(list);
    }
    let first = TaskQuery { states: NEEDS_USER.to_vec(), ..query.clone() };
    let mut tasks = client.list_tasks(&first).await?.tasks;
    let needs_user: Vec<_> = tasks.iter().map(|task| task.id).collect();
    tasks.extend(list.tasks.into_iter().filter(|task| !needs_user.contains(&task.id)));
    list.tasks = tasks;
    Ok(list)
}

const TASK_COLUMNS: [Column; 11] = [
    Column { name: "TASK", expendable: 0 },
    Column { name: "STATE", expendable: 0 },
    Column { name: "LOOP", expendable: 8 },
    Column { name: "ITER", expendable: 5 },
    Column { name: "BEST", expendable: 3 },
    Column { name: "PRIO", expendable: 6 },
    Column { name: "AGE", expendable: 2 },
    Column { name: "REPO", expendable: 4 },
    Column { name: "LABELS", expendable: 7 },
    // Before the title, which may be cut.
    Column { name: "NOTE", expendable: 1 },
    Column { name: "TITLE", expendable: 0 },
];

/// The list as a table. `now` is the time in seconds since 1970.
fn render(list: &TaskList, query: &TaskQuery, now: i64, terminal: Option<usize>) -> Vec<Line> {
    if list.tasks.is_empty() {
        let is_whole = *query == TaskQuery { sort: query.sort, limit: query.limit, ..TaskQuery::default() };
        let text = if is_whole { "no tasks; submit one with `cfq submit \"...\"`" } else { "no such tasks" };
        return output::plain_lines(text);
    }
    let all_rows: Vec<Vec<String>> = list.tasks.iter().map(|task| row(task, now, terminal)).collect();
    // A column without any value is left out.
    let is_used = |n: &usize| {
        !matches!(TASK_COLUMNS[*n].name, "LABELS" | "NOTE") || all_rows.iter().any(|row| !row[*n].is_empty())
    };
    let used: Vec<usize> = (0..TASK_COLUMNS.len()).filter(is_used).collect();
    let columns: Vec<Column> = used.iter().map(|n| TASK_COLUMNS[*n]).collect();
    let rows: Vec<Vec<String>> = all_rows.iter().map(|row| used.iter().map(|n| row[*n].clone()).collect()).collect();
    let tones = [Tone::Heading].into_iter().chain(list.tasks.iter().map(|task| tone(task.state)));
    output::rows(output::fitted_table(&columns, &rows, terminal), tones)
}

pub fn tone(state: TaskState) -> Tone {
    match state {
        TaskState::Escalated | TaskState::WaitingOnHuman => Tone::NeedsUser,
        TaskState::Failed => Tone::Bad,
        TaskState::Merged | TaskState::Accepted | TaskState::Reviewed => Tone::Good,
        TaskState::Cancelled => Tone::Faint,
        TaskState::Queued | TaskState::Blocked | TaskState::Ready | TaskState::Running | TaskState::Paused => {
            Tone::Plain
        }
    }
}

/// Text with the number of tasks that are left and the command that lists them; `None` if none is left.
fn next_page(list: &TaskList, query: &TaskQuery) -> Option<String> {
    let next = list.next.as_ref()?;
    let mut command =
        "cfq ls".to_owned() + &filter_flags(&query.states, &query.labels, query.repo.as_deref(), query.since);
    for priority in &query.priorities {
        command += &format!(" --priority {priority}");
    }
    if query.sort != TaskSort::default() {
        command += &format!(" --sort {}", query.sort);
    }
    let next = format!("{command} --limit {} --after {next}", query.limit);
    Some(page_text("tasks", query.after.is_none().then_some(query.limit), list.more, &next))
}

/// The flags of these filters, each with a space before it.
pub fn filter_flags<S: Display>(states: &[S], labels: &[Label], repo: Option<&str>, since: Option<i64>) -> String {
    let mut flags = String::new();
    for state in states {
        flags += &format!(" --state {state}");
    }
    for label in labels {
        flags += &format!(" --label {label}");
    }
    if let Some(repo) = repo {
        flags += &format!(" --repo {}", output::shell_word(repo));
    }
    if let Some(since) = since.and_then(|since| jiff::Timestamp::from_second(since).ok()) {
        flags += &format!(" --since {since}");
    }
    flags
}

/// Text after a page: how many there are, and the command for the next ones. `first` is the length of a first page; the
/// number before a later one is not known. `more` is counted up to a limit.
pub fn page_text(what: &str, first: Option<u32>, more: u32, next: &str) -> String {
    match (first, more >= MAX_COUNTED) {
        (Some(first), false) => format!("{first} of {} {what}, next: {next}", first + more),
        (Some(first), true) => format!("{first} of at least {} {what}, next: {next}", first + more),
        (None, false) => format!("{more} more, next: {next}"),
        (None, true) => format!("at least {more} more, next: {next}"),
    }
}

/// The last iteration that the task may have. A human who continues it grants the same number again.
pub fn last_iteration(task: &TaskSummary) -> u32 {
    task.max_iterations.max(1) * task.iteration.div_ceil(task.max_iterations.max(1)).max(1)
}

/// The cells of a task. On a terminal, a long note leaves room for the title.
fn row(task: &TaskSummary, now: i64, terminal: Option<usize>) -> Vec<String> {
    let repo = Path::new(&task.repo).file_name().map(|name| output::one_line(&name.to_string_lossy()));
    let mut note = note(task).unwrap_or_default();
    if let Some(columns) = terminal {
        let limit = (columns / 3).clamp(MIN_NOTE_COLUMNS, MAX_NOTE_COLUMNS);
        note = console::truncate_str(&note, limit, "…").into_owned();
    }
    vec![
        task.number.to_string(),
        task.state.to_string(),
        task.loop_state.to_string(),
        format!("{}/{}", task.iteration, last_iteration(task)),
        task.best_score.map_or_else(|| "-".to_owned(), |s| format!("{s:.0}/{:.0}", task.threshold)),
        task.priority.to_string(),
        output::age(now - task.created_at as i64),
        repo.unwrap_or_else(|| "-".to_owned()),
        output::list(&task.labels),
        note,
        output::one_line(&task.title),
    ]
}

/// Why the task may not start yet, needs a human, is paused or failed; that others wait for it, and that its failure is
/// acknowledged.
fn note(task: &TaskSummary) -> Option<String> {
    let bottleneck = task.is_bottleneck.then(|| "bottleneck: several tasks wait for it".to_owned());
    let acknowledged = task.is_acknowledged.then(|| "acknowledged".to_owned());
    let reason = task.waiting_reason.as_ref().or(task.reason.as_ref()).map(|reason| output::one_line(reason));
    let notes: Vec<String> = [bottleneck, acknowledged, reason].into_iter().flatten().collect();
    (!notes.is_empty()).then(|| notes.join("; "))
}

#[cfg(test)]
mod tests {
    use cfq_proto::ids::{TaskId, TaskNumber};
    use cfq_proto::loop_step::LoopState;
    use cfq_proto::task::Priority;

    use super::*;

    fn task(number: i64, state: TaskState) -> TaskSummary {
        TaskSummary {
            id: TaskId::fresh(),
            number: TaskNumber(number),
            state,
            loop_state: LoopState::Idle,
            title: "a\tlong\ntitle".into(),
            repo: "/home/a/shop".into(),
            base: None,
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
            reason: None,
            is_bottleneck: false,
            is_acknowledged: false,
        }
    }

    #[test]
    fn granted_iterations_are_counted() {
        let mut task = task(7, TaskState::Running);
        let last = |iteration, max_iterations, task: &mut TaskSummary| {
            (task.iteration, task.max_iterations) = (iteration, max_iterations);
            last_iteration(task)
        };
        assert_eq!([last(0, 2, &mut task), last(2, 2, &mut task), last(4, 2, &mut task)], [2, 2, 4]);
        assert_eq!([last(3, 2, &mut task), last(5, 5, &mut task)], [4, 5]);
    }

    fn shown(tasks: &[TaskSummary]) -> String {
        let list = TaskList { tasks: tasks.to_vec(), next: None, more: 0 };
        output::paint(&render(&list, &TaskQuery::default(), 1_300, None), None, false)
    }

    #[test]
    fn note_is_before_the_title() {
        let mut task = task(7, TaskState::Ready);
        assert_eq!(
            shown(std::slice::from_ref(&task)),
            "TASK  STATE  LOOP  ITER  BEST  PRIO  AGE    REPO  TITLE\n\
             t7    ready  idle  0/5   -     P1    5 min  shop  a long title"
        );
        task.waiting_reason = Some("waits for t3".into());
        let text = shown(&[task]);
        assert!(text.ends_with("5 min  shop  waits for t3  a long title"), "{text}");
    }

    #[test]
    fn list_fits_the_terminal() {
        let mut failed = task(12, TaskState::Failed);
        failed.title = "Write a function that reads a large file without keeping it in memory".into();
        failed.best_score = Some(70.0);
        failed.reason = Some("the model answered with an error: the context is too short".into());
        let mut escalated = task(13, TaskState::Escalated);
        escalated.reason = Some("no progress in the last 2 iterations".into());
        let tasks = [escalated, failed, task(7, TaskState::Merged), task(6, TaskState::Cancelled)];
        let list = TaskList { tasks: tasks.to_vec(), next: None, more: 0 };
        let view = |terminal| render(&list, &TaskQuery::default(), 1_300, terminal);
        insta::assert_snapshot!("view_ls", output::at_widths(view));
    }

    #[test]
    fn next_command_keeps_the_filters() {
        let states = vec![TaskState::Ready];
        let mut query = TaskQuery { states, priorities: vec![Priority::P0], limit: 2, ..TaskQuery::default() };
        let mut list = TaskList { tasks: vec![], next: Some("P0.t4".into()), more: 3 };
        let next = "2 of 5 tasks, next: cfq ls --state ready --priority P0 --limit 2 --after P0.t4";
        assert_eq!(next_page(&list, &query).unwrap(), next);
        (query.sort, query.after) = (TaskSort::Priority, Some("P0.t2".parse().unwrap()));
        (query.repo, query.since) = (Some("/home/a b".into()), Some(1_700_000_000));
        list.more = 100;
        let text = next_page(&list, &query).unwrap();
        let filters = "--repo '/home/a b' --since 2023-11-14T22:13:20Z --priority P0 --sort priority";
        assert!(text.starts_with("at least 100 more") && text.contains(filters), "{text}");
        list.next = None;
        assert_eq!(next_page(&list, &query), None);
    }
}
