//! `cfq pr ls` and `cfq pr show N`

use cfq_link::clock;
use cfq_proto::client::Client;
use cfq_proto::http::{PrFilter, PrList, PrView};
use cfq_proto::pr::PrState;

use crate::args::PrCommand;
use crate::commands::refresh;
use crate::exit::Code;
use crate::output::{self, Column, Line, Output, Tone};

pub async fn run(client: &Client, out: Output, command: PrCommand) -> anyhow::Result<Code> {
    match command {
        PrCommand::Ls(args) => {
            let watch = args.watch;
            let filter = PrFilter::from(args);
            if watch {
                return refresh::run(out, async || Ok(lines(&client.prs(&filter).await?, &filter))).await;
            }
            let list = client.prs(&filter).await?;
            out.print_lines(&list, |list| lines(list, &filter))?;
            if let Some(next) = list.next {
                out.status(&format!("there are more: add `--after {next}`, or a larger --limit"));
            }
        }
        PrCommand::Show { number } => out.print(&client.pr(number).await?, show)?,
    }
    Ok(Code::Done)
}

const PR_COLUMNS: [Column; 6] = [
    Column { name: "PR", expendable: 0 },
    Column { name: "TASK", expendable: 0 },
    Column { name: "STATE", expendable: 0 },
    Column { name: "AGE", expendable: 1 },
    Column { name: "BRANCH", expendable: 2 },
    Column { name: "TITLE", expendable: 0 },
];

fn lines(list: &PrList, filter: &PrFilter) -> Vec<Line> {
    render(list, filter, clock::unix_seconds(), output::terminal_columns())
}

fn render(list: &PrList, filter: &PrFilter, now: i64, terminal: Option<usize>) -> Vec<Line> {
    if list.prs.is_empty() {
        let is_whole = filter.states.is_empty() && filter.after.is_none();
        return output::plain_lines(if is_whole { "no pull requests yet" } else { "no such pull requests" });
    }
    let row = |pr: &PrView| {
        let title = output::one_line(&pr.title);
        let age = pr.history.first().map_or_else(|| "-".to_owned(), |opened| output::age(now - opened.at as i64));
        vec![pr.number.to_string(), pr.task.to_string(), pr.state.to_string(), age, pr.branch.clone(), title]
    };
    let rows: Vec<Vec<String>> = list.prs.iter().map(row).collect();
    let tone = |pr: &PrView| match pr.state {
        PrState::Merged => Tone::Good,
        PrState::QcRejected => Tone::Bad,
        PrState::Closed => Tone::Faint,
        PrState::PendingQc | PrState::QcApproved | PrState::PendingCoordinator | PrState::Approved => Tone::Plain,
    };
    let tones = [Tone::Heading].into_iter().chain(list.prs.iter().map(tone));
    let lines = output::fitted_table(&PR_COLUMNS, &rows, terminal).into_iter().zip(tones);
    lines.map(|(text, tone)| Line { text, tone }).collect()
}

fn show(pr: &PrView) -> String {
    let mut lines = vec![
        format!("PR {} of {}: {}", pr.number, pr.task, output::sanitize(&pr.title)),
        format!("  {}  {} on {}", pr.state, pr.branch, pr.base),
        format!("  head {}", pr.head),
    ];
    if let Some(commit) = &pr.merge_commit {
        lines.push(format!("  merged as {commit}"));
    }
    if !pr.merge_checks.is_empty() {
        lines.push(format!("  merge checks: {}", output::check_runs(&pr.merge_checks)));
    }
    lines.extend(
        pr.history
            .iter()
            .map(|m| format!("    {:20} {}", m.to.as_str(), output::indent_rest(&output::sanitize(&m.reason)))),
    );
    lines.push(format!("  view the changes: cfq diff {}", pr.task));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_fits_the_terminal() {
        let pr = |number: i64, state: &str| {
            serde_json::json!({
                "number": number, "task": number, "title": "Write a function that reads a large file", "state": state,
                "branch": format!("worker-1/task-{number}"), "head": "4e8350d395c1", "base": "fec99d4c62e2",
                "merge_commit": null, "history": [{ "to": "pending_qc", "reason": "opened", "at": 1_000.0 }],
            })
        };
        let prs = [pr(12, "pending_qc"), pr(9, "merged"), pr(8, "qc_rejected")];
        let list: PrList = serde_json::from_value(serde_json::json!({ "prs": prs })).unwrap();
        let lines = |columns| render(&list, &PrFilter::default(), 1_300, columns);
        for columns in [40, 80, 120] {
            insta::assert_snapshot!(
                format!("prs_{columns}"),
                output::paint(&lines(Some(columns)), Some(columns), false)
            );
        }
        insta::assert_snapshot!("prs_pipe", output::paint(&lines(None), None, false));
        let coloured = output::paint(&lines(Some(80)), Some(80), true);
        insta::assert_snapshot!("prs_80_coloured", coloured.replace('\u{1b}', "ESC"));
    }
}
