//! `cfq ls`

use cfq_proto::client::Client;
use cfq_proto::http::{TaskList, TaskSummary};
use cfq_proto::task::TaskState;

use crate::exit::Code;
use crate::output::{self, Output};

pub async fn run(client: &Client, out: Output, state: Option<TaskState>, limit: u32) -> anyhow::Result<Code> {
    let list = client.tasks(state, limit).await?;
    out.print(&list, render)?;
    Ok(Code::Done)
}

fn render(list: &TaskList) -> String {
    if list.tasks.is_empty() {
        return "no tasks; submit one with `cfq submit \"...\"`".to_owned();
    }
    let rows: Vec<Vec<String>> = list.tasks.iter().map(row).collect();
    output::table(&["TASK", "STATE", "LOOP", "ITER", "BEST", "PRIO", "TITLE"], &rows)
}

fn row(task: &TaskSummary) -> Vec<String> {
    vec![
        task.number.to_string(),
        task.state.to_string(),
        task.loop_state.to_string(),
        format!("{}/{}", task.iteration, task.max_iterations),
        task.best_score.map_or_else(|| "-".to_owned(), |s| format!("{s:.0}/{:.0}", task.threshold)),
        task.priority.to_string(),
        output::sanitize(&task.title).replace('\n', " "),
    ]
}
