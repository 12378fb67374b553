//! `cfq jobs`

use cfq_proto::client::Client;
use cfq_proto::http::{JobFilter, JobList, JobListItem};
use cfq_proto::job::JobState;

use crate::exit::Code;
use crate::output::{self, Output};

pub async fn run(client: &Client, out: Output, filter: &JobFilter) -> anyhow::Result<Code> {
    let list = client.jobs(filter).await?;
    out.print(&list, render)?;
    if let Some(next) = list.next {
        out.status(&format!("there are more jobs: add `--after {next}`, or a larger --limit"));
    }
    Ok(Code::Done)
}

fn render(list: &JobList) -> String {
    if list.jobs.is_empty() {
        return "no jobs match; `cfq ls` lists the tasks that make them, and calls of API clients are listed while they run".to_owned();
    }
    let rows: Vec<Vec<String>> = list.jobs.iter().map(row).collect();
    let header = ["JOB", "TASK", "ROLE", "STATE", "ATTEMPT", "NODE", "WAITED", "RAN", "TOKENS", "MODEL", "REASON"];
    output::table(&header, &rows)
}

fn row(job: &JobListItem) -> Vec<String> {
    let tokens = match (job.prompt_tokens, job.output_tokens) {
        (Some(prompt), Some(output)) => format!("{prompt}+{output}"),
        _ => "-".to_owned(),
    };
    let reason = match (&job.failure, job.state) {
        (_, JobState::Queued) => job.reason.clone(),
        (Some(failure), JobState::Failed | JobState::Dead) => failure.to_string(),
        (_, _) => String::new(),
    };
    vec![
        job.id.to_string(),
        job.task.to_string(),
        job.role.to_string(),
        job.state.to_string(),
        job.attempt.to_string(),
        job.node.as_ref().map_or_else(|| "-".to_owned(), ToString::to_string),
        output::duration(job.waiting_ms),
        if job.running_ms > 0 { output::duration(job.running_ms) } else { "-".to_owned() },
        tokens,
        job.model.to_string(),
        output::sanitize(&reason).replace('\n', " "),
    ]
}
