//! `cfq pr ls` and `cfq pr show N`

use cfq_link::clock;
use cfq_proto::client::Client;
use cfq_proto::http::{PrFilter, PrList, PrView};
use cfq_proto::pr::PrState;

use crate::args::{PrCommand, PrLsArgs, PrSort};
use crate::commands::{ls, refresh, show};
use crate::exit::Code;
use crate::output::{self, Column, Line, Output, Tone, View};

pub async fn run(client: &Client, out: Output, command: PrCommand) -> anyhow::Result<Code> {
    match command {
        PrCommand::Ls(args) => {
            let PrLsArgs { state, label, sort, repo, since, limit, after, watch } = args;
            let repo = repo.as_deref().map(ls::repository).transpose()?;
            let filter = PrFilter {
                states: state,
                labels: label,
                oldest_first: sort == PrSort::Oldest,
                repo: repo.map(|repo| repo.to_string_lossy().into_owned()),
                since: since.map(jiff::Timestamp::as_second),
                after,
                limit,
            };
            if watch {
                return refresh::run(out, async || Ok(lines(&client.prs(&filter).await?, &filter))).await;
            }
            let list = client.prs(&filter).await?;
            out.print_lines(&list, |list| lines(list, &filter))?;
            if let Some(next) = next_page(&list, &filter) {
                out.status(&next);
            }
        }
        PrCommand::Show { number } => out.print_lines(&client.pr(number).await?, show)?,
    }
    Ok(Code::Done)
}

/// Text with the number of pull requests that are left and the command that lists them; `None` if none is left.
fn next_page(list: &PrList, filter: &PrFilter) -> Option<String> {
    let flags = ls::filter_flags(&filter.states, &filter.labels, filter.repo.as_deref(), filter.since);
    let sort = if filter.oldest_first { " --sort oldest" } else { "" };
    let next = format!("cfq pr ls{flags}{sort} --limit {} --after {}", filter.limit, list.next?);
    Some(ls::page_text("pull requests", filter.after.is_none().then_some(filter.limit), list.more, &next))
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
        let is_whole = *filter == PrFilter { limit: filter.limit, ..PrFilter::default() };
        return output::plain_lines(if is_whole { "no pull requests yet" } else { "no such pull requests" });
    }
    let row = |pr: &PrView| {
        let title = output::one_line(&pr.title);
        let age = pr.history.first().map_or_else(|| "-".to_owned(), |opened| output::age(now - opened.at as i64));
        vec![pr.number.to_string(), pr.task.to_string(), pr.state.to_string(), age, pr.branch.clone(), title]
    };
    let rows: Vec<Vec<String>> = list.prs.iter().map(row).collect();
    let tones = [Tone::Heading].into_iter().chain(list.prs.iter().map(|pr| tone(pr.state)));
    output::rows(output::fitted_table(&PR_COLUMNS, &rows, terminal), tones)
}

fn tone(state: PrState) -> Tone {
    match state {
        PrState::Merged => Tone::Good,
        PrState::QcRejected => Tone::Bad,
        PrState::Closed => Tone::Faint,
        PrState::PendingQc | PrState::QcApproved | PrState::PendingCoordinator | PrState::Approved => Tone::Plain,
    }
}

pub(super) fn show(pr: &PrView) -> Vec<Line> {
    let mut view = View::default();
    view.push_toned(Tone::Heading, format!("PR {} of {}: {}", pr.number, pr.task, output::one_line(&pr.title)));
    view.push_toned(tone(pr.state), format!("  {}  {} on {}", pr.state, pr.branch, show::short(&pr.base)));
    view.push(format!("  head {}", show::short(&pr.head)));
    if let Some(commit) = &pr.merge_commit {
        view.push(format!("  merged as {}", show::short(commit)));
    }
    if !pr.merge_checks.is_empty() {
        view.push(format!("  merge checks: {}", output::check_runs(&pr.merge_checks)));
    }
    for moved in &pr.history {
        view.push(format!("    {:20} {}", moved.to.as_str(), moved.reason));
    }
    view.push_command("  view the changes: ", &format!("cfq diff {}", pr.task), None);
    view.lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_fits_the_terminal() {
        let pr = |number: i64, state: &str| {
            serde_json::json!({
                "pr": number, "number": number, "title": "Write a function that reads a large file", "state": state,
                "branch": format!("worker-1/task-{number}"), "head": "4e8350d395c1", "base": "fec99d4c62e2",
                "merge_commit": null, "history": [{ "to": "pending_qc", "reason": "opened", "at": 1_000.0 }],
            })
        };
        let prs = [pr(12, "pending_qc"), pr(9, "merged"), pr(8, "qc_rejected")];
        let list: PrList = serde_json::from_value(serde_json::json!({ "prs": prs })).unwrap();
        let lines = |columns| render(&list, &PrFilter::default(), 1_300, columns);
        insta::assert_snapshot!("view_pr_ls", output::at_widths(lines));
        let page = PrList { next: Some(8), more: 54, ..list };
        let mut filter =
            PrFilter { states: vec![PrState::Merged], oldest_first: true, limit: 50, ..PrFilter::default() };
        let next = "50 of 104 pull requests, next: cfq pr ls --state merged --sort oldest --limit 50 --after 8";
        assert_eq!(next_page(&page, &filter).unwrap(), next);
        filter.after = Some(3);
        assert!(next_page(&page, &filter).unwrap().starts_with("54 more, next: cfq pr ls"));
    }
}
