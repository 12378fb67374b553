//! `cfq jobs`

use cfq_proto::client::Client;
use cfq_proto::http::{JobFilter, JobList, JobListItem};
use cfq_proto::job::JobState;

use crate::args::JobsArgs;
use crate::commands::refresh;
use crate::exit::Code;
use crate::output::{self, Column, Line, Output, Tone};

pub async fn run(client: &Client, out: Output, args: JobsArgs) -> anyhow::Result<Code> {
    let watch = args.watch;
    let filter = JobFilter::from(args);
    if watch {
        return refresh::run(out, async || Ok(render(&client.jobs(&filter).await?, output::terminal_columns()))).await;
    }
    let list = client.jobs(&filter).await?;
    out.print_lines(&list, |list| render(list, output::terminal_columns()))?;
    if let Some(next) = list.next {
        out.status(&format!("there are more jobs: add `--after {next}`, or a larger --limit"));
    }
    Ok(Code::Done)
}

const JOB_COLUMNS: [Column; 11] = [
    Column { name: "JOB", expendable: 7 },
    Column { name: "TASK", expendable: 0 },
    Column { name: "ROLE", expendable: 0 },
    Column { name: "STATE", expendable: 0 },
    Column { name: "ATTEMPT", expendable: 6 },
    Column { name: "NODE", expendable: 3 },
    Column { name: "WAITED", expendable: 1 },
    Column { name: "RAN", expendable: 2 },
    Column { name: "TOKENS", expendable: 5 },
    Column { name: "MODEL", expendable: 4 },
    Column { name: "REASON", expendable: 0 },
];

fn render(list: &JobList, terminal: Option<usize>) -> Vec<Line> {
    if list.jobs.is_empty() {
        return output::plain_lines(
            "no jobs match; `cfq ls` lists the tasks that make them, and calls of API clients are listed while they run",
        );
    }
    let mut rows: Vec<Vec<String>> = list.jobs.iter().map(row).collect();
    let mut columns = JOB_COLUMNS.to_vec();
    // The last column, if no call has a reason.
    if rows.iter().all(|row| row.last().is_none_or(String::is_empty)) {
        columns.pop();
        rows.iter_mut().for_each(|row| drop(row.pop()));
    }
    let tone = |job: &JobListItem| match job.state {
        JobState::Failed | JobState::Dead => Tone::Bad,
        JobState::Cancelled => Tone::Faint,
        JobState::Queued | JobState::Placed | JobState::Running | JobState::Done => Tone::Plain,
    };
    let tones = [Tone::Heading].into_iter().chain(list.jobs.iter().map(tone));
    output::rows(output::fitted_table(&columns, &rows, terminal), tones)
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
        output::one_line(&reason),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_fits_the_terminal() {
        let job = |state: &str, node: Option<&str>, reason: &str| {
            serde_json::json!({
                "job": "01a21f19-f8e0-7063-a870-c70afc904ba5", "number": 7, "role": "alpha", "model": "openai:box/qwen2.5-coder:14b",
                "priority": "P1", "state": state, "attempt": 1, "node": node, "created_at": 0.0, "waiting_ms": 12_500,
                "running_ms": if node.is_some() { 61_000 } else { 0 }, "prompt_tokens": null, "output_tokens": null,
                "reason": reason,
            })
        };
        let jobs = [
            job("running", Some("den"), ""),
            job("queued", None, "waits for free capacity on a node"),
            job("dead", Some("attic"), ""),
        ];
        let list: JobList = serde_json::from_value(serde_json::json!({ "jobs": jobs })).unwrap();
        insta::assert_snapshot!("view_jobs", output::at_widths(|terminal| render(&list, terminal)));
    }
}
