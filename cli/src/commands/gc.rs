//! `cfq gc`

use cfq_proto::client::Client;
use cfq_proto::http::{GcReply, GcRequest};

use crate::exit::Code;
use crate::output::{self, Output};

pub async fn run(client: &Client, out: Output, dry_run: bool, older_than_days: Option<f64>) -> anyhow::Result<Code> {
    let request = GcRequest { dry_run, older_than_days };
    let mut total = client.gc(&request).await?;
    // Each request deletes for a few seconds.
    while !total.finished {
        let next = client.gc(&request).await?;
        total = GcReply {
            ended_before: next.ended_before,
            tasks: total.tasks + next.tasks,
            events: total.events + next.events,
            blob_bytes: total.blob_bytes + next.blob_bytes,
            nodes: total.nodes + next.nodes,
            runners: total.runners + next.runners,
            finished: next.finished,
        };
    }
    out.print_lines(&total, |total| output::plain_lines(&render(total, dry_run)))?;
    Ok(Code::Done)
}

pub(super) fn render(total: &GcReply, dry_run: bool) -> String {
    let verb = if dry_run { "would delete" } else { "deleted" };
    let nodes = format!("{verb} {} nodes and {} runners without heartbeats", total.nodes, total.runners);
    let tasks = match total.ended_before {
        None => "ended tasks are kept without a limit: ended_tasks_days is 0 under [retention]".to_owned(),
        Some(_) => format!(
            "{verb} {} ended tasks with {} events and {:.1} MB of prompts and files",
            total.tasks,
            total.events,
            total.blob_bytes as f64 / 1e6
        ),
    };
    format!("{tasks}\n{nodes}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_says_what_is_kept_and_what_a_dry_run_would_delete() {
        let mut total =
            GcReply { ended_before: Some(0.0), tasks: 3, events: 70, blob_bytes: 2_500_000, ..GcReply::default() };
        assert_eq!(
            render(&total, true),
            "would delete 3 ended tasks with 70 events and 2.5 MB of prompts and files\n\
             would delete 0 nodes and 0 runners without heartbeats"
        );
        assert!(render(&total, false).starts_with("deleted 3 ended tasks"));
        total.ended_before = None;
        assert!(render(&total, false).contains("kept without a limit"));
    }
}
