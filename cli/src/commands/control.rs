//! `cfq cancel`, `pause`, `resume`, `retry` and `prioritize`: one action on the tasks that are named or selected.

use cfq_proto::client::Client;
use cfq_proto::http::{BulkOutcome, BulkRequest, BulkResult, MAX_TASKS_PER_BULK_REQUEST, TaskAction};

use crate::args::SelectArgs;
use crate::exit::Code;
use crate::output::Output;

/// Number of tasks by what happened to them.
#[derive(Debug, Default)]
struct Counts {
    done: usize,
    unchanged: usize,
    refused: usize,
    failed: usize,
}

impl Counts {
    fn add(&mut self, outcome: BulkOutcome) {
        match outcome {
            BulkOutcome::Done | BulkOutcome::WouldChange => self.done += 1,
            BulkOutcome::Unchanged => self.unchanged += 1,
            BulkOutcome::Refused => self.refused += 1,
            BulkOutcome::Failed => self.failed += 1,
        }
    }

    fn total(&self) -> usize {
        self.done + self.unchanged + self.refused + self.failed
    }

    fn code(&self) -> Code {
        match self {
            Self { failed: 1.., .. } => Code::Unreachable,
            Self { refused: 1.., .. } => Code::Usage,
            Self { .. } => Code::Done,
        }
    }

    /// Text about more than one task; `None` if the lines of the tasks say everything.
    fn summary(&self, dry_run: bool) -> Option<String> {
        if self.total() == 0 {
            return Some("no task is selected: `cfq ls` lists the tasks".to_owned());
        }
        let verb = if dry_run { "would be changed" } else { "changed" };
        let others = [(self.unchanged, "unchanged"), (self.refused, "refused"), (self.failed, "failed")];
        let others = others.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!(", {n} {what}"));
        (self.total() > 1).then(|| format!("{} {verb}{}", self.done, others.collect::<String>()))
    }
}

pub async fn run(client: &Client, out: Output, action: TaskAction, select: SelectArgs) -> anyhow::Result<Code> {
    let mut counts = Counts::default();
    let mut request = BulkRequest {
        action,
        tasks: Vec::new(),
        state: select.state,
        labels: select.label,
        all: select.all,
        dry_run: select.dry_run,
        after: None,
    };
    if select.tasks.is_empty() {
        loop {
            let reply = client.act_on_tasks(&request).await?;
            print(out, &reply.results, &mut counts)?;
            request.after = reply.next;
            if reply.next.is_none() {
                break;
            }
        }
    } else {
        let mut rest: Vec<String> = Vec::new();
        for task in select.tasks.iter().map(ToString::to_string) {
            if !rest.contains(&task) {
                rest.push(task);
            }
        }
        while !rest.is_empty() {
            request.tasks = rest.iter().take(MAX_TASKS_PER_BULK_REQUEST).cloned().collect();
            let reply = client.act_on_tasks(&request).await?;
            print(out, &reply.results, &mut counts)?;
            rest.drain(..reply.results.len().min(rest.len()));
        }
    }
    if let Some(summary) = counts.summary(select.dry_run) {
        out.status(&summary);
    }
    Ok(counts.code())
}

/// Prints the results: those of tasks that were not changed as requested go to stderr, unless the output is JSON.
fn print(out: Output, results: &[BulkResult], counts: &mut Counts) -> anyhow::Result<()> {
    for result in results {
        counts.add(result.outcome);
        match result.outcome {
            BulkOutcome::Refused | BulkOutcome::Failed if !out.json => out.status(&format!("cfq: {}", result.message)),
            BulkOutcome::Refused
            | BulkOutcome::Failed
            | BulkOutcome::Done
            | BulkOutcome::WouldChange
            | BulkOutcome::Unchanged => {
                out.print(result, |result| result.message.clone())?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(outcomes: &[BulkOutcome]) -> Counts {
        let mut counts = Counts::default();
        outcomes.iter().for_each(|outcome| counts.add(*outcome));
        counts
    }

    #[test]
    fn exit_code_is_that_of_the_worst_result() {
        use BulkOutcome::{Done, Failed, Refused, Unchanged};
        assert_eq!(counts(&[Done, Unchanged]).code(), Code::Done);
        assert_eq!(counts(&[Done, Refused]).code(), Code::Usage);
        assert_eq!(counts(&[Refused, Failed]).code(), Code::Unreachable);
    }

    #[test]
    fn summary_counts_what_happened() {
        use BulkOutcome::{Done, Refused, Unchanged};
        assert_eq!(counts(&[Done]).summary(false), None);
        let mixed = counts(&[Done, Done, Unchanged, Refused]);
        assert_eq!(mixed.summary(false).unwrap(), "2 changed, 1 unchanged, 1 refused");
        assert_eq!(mixed.summary(true).unwrap(), "2 would be changed, 1 unchanged, 1 refused");
        assert!(counts(&[]).summary(false).unwrap().contains("cfq ls"));
    }
}
