//! `cfq pr ls` and `cfq pr show N`

use cfq_proto::client::Client;
use cfq_proto::http::PrView;

use crate::args::PrCommand;
use crate::exit::Code;
use crate::output::{self, Output};

pub async fn run(client: &Client, out: Output, command: PrCommand) -> anyhow::Result<Code> {
    match command {
        PrCommand::Ls => out.print(&client.prs().await?, |prs| list(prs))?,
        PrCommand::Show { number } => out.print(&client.pr(number).await?, show)?,
    }
    Ok(Code::Done)
}

fn list(prs: &[PrView]) -> String {
    if prs.is_empty() {
        return "no pull requests yet".to_owned();
    }
    let rows: Vec<Vec<String>> = prs
        .iter()
        .map(|pr| {
            let title = output::sanitize(&pr.title).replace('\n', " ");
            vec![pr.number.to_string(), pr.task.to_string(), pr.state.to_string(), pr.branch.clone(), title]
        })
        .collect();
    output::table(&["PR", "TASK", "STATE", "BRANCH", "TITLE"], &rows)
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
