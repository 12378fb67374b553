//! `cfq engine check`

use cfq_inference_node::engine::candle::Bytes;
use cfq_inference_node::engine::candle::check::{CheckOptions, CheckReport, check};

use crate::args::EngineCommand;
use crate::exit::{self, Code};
use crate::output::{self, Output, table};

pub async fn run(out: Output, command: EngineCommand) -> anyhow::Result<Code> {
    let EngineCommand::Check { device, quick } = command;
    let options = CheckOptions { device, quick };
    let checked = tokio::task::spawn_blocking(move || check(options, &mut |what| out.talk(&format!("{what} ..."))));
    let report = checked.await?.map_err(|error| exit::failed(error.to_string()))?;
    out.data(&report, render)?;
    Ok(if report.passed() { Code::Done } else { Code::Failed })
}

fn render(report: &CheckReport) -> String {
    let name = output::plain(&report.name);
    let device = format!("{}: {name}, copies {} a second", report.device, Bytes(report.bandwidth as u64));
    let mut parts = vec![device];
    let parity = report.parity.iter().map(|row| {
        let said = row.failure.clone().unwrap_or_else(|| format!("{:.1e}", row.apart));
        let verdict = if row.passed { "ok" } else { "FAIL" };
        vec![row.model.clone(), verdict.to_owned(), format!("{:.0e}", row.allowed), said]
    });
    parts.push(table(&["SCORES AND TEXTS", "", "ALLOWED", "APART"], &parity.collect::<Vec<_>>()));
    let ledger = report.ledger.iter().map(|row| {
        let verdict = match row.allowed {
            None => String::new(),
            Some(_) if row.failed() => "FAIL".to_owned(),
            Some(_) => "ok".to_owned(),
        };
        let allowed = row.allowed.map_or_else(String::new, |bytes| Bytes(bytes).to_string());
        vec![row.model.clone(), verdict, allowed, row.words(), row.sum.clone()]
    });
    parts.push(table(&["LEDGER", "", "ALLOWED", "", "SUM"], &ledger.collect::<Vec<_>>()));
    let mut rates = Vec::new();
    for row in &report.speed {
        let (prompt, rate) = (row.prefill.prompt, row.prefill.tokens_per_second);
        rates.push(vec![row.model.clone(), format!("prompt of {prompt}"), format!("{rate:.0}"), String::new()]);
        for decode in &row.decode {
            let (rate, floor) = (decode.tokens_per_second, decode.floor_tokens_per_second);
            let beside = format!("{floor:.0} ({:.0} %)", 100.0 * rate / floor.max(1e-9));
            let what = format!("{} decoding", decode.sequences);
            rates.push(vec![String::new(), what, format!("{rate:.0}"), beside]);
        }
    }
    parts.push(table(&["SPEED", "", "TOKENS/S", "IF MEMORY WERE ALL"], &rates));
    if !report.not_run.is_empty() {
        let left_out: Vec<String> = report.not_run.iter().map(|what| format!("  {what}")).collect();
        parts.push(format!("Not run:\n{}", left_out.join("\n")));
    }
    if !report.failures.is_empty() {
        let failures: Vec<String> = report.failures.iter().map(|what| format!("  {}", output::plain(what))).collect();
        parts.push(format!("FAILED:\n{}", failures.join("\n")));
    }
    parts.push(match report.failed() {
        0 => "Everything that was run passed.".to_owned(),
        failed => format!("{} failed.", output::count(failed, "check")),
    });
    parts.join("\n\n")
}
