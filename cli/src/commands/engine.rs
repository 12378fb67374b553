//! `cfq engine check`

use cfq_engine::check::CheckReport;
use cfq_inference_node::check_engine;
use cfq_memory::Bytes;

use crate::args::CliEngineCommand;
use crate::exit::{self, Code};
use crate::output::{self, Line, Output, Tone, View};

pub async fn run(out: Output, command: CliEngineCommand) -> anyhow::Result<Code> {
    let CliEngineCommand::Check { device, quick } = command;
    let check = move || check_engine(device, quick, &mut |what| out.status(&format!("{what} ...")));
    let report = tokio::task::spawn_blocking(check).await?.map_err(|error| exit::failed(error.to_string()))?;
    out.print_lines(&report, render)?;
    Ok(if report.passed() { Code::Done } else { Code::Failed })
}

fn render(report: &CheckReport) -> Vec<Line> {
    let device =
        format!("{}: {}, copies memory at {} per second", report.device, report.name, Bytes(report.bandwidth as u64));
    let mut view = View::default();
    view.push_toned(Tone::Heading, device);
    let parity = report.parity.iter().map(|row| {
        let difference = row.failure.clone().unwrap_or_else(|| format!("{:.1e}", row.difference));
        let verdict = if row.passed { "ok" } else { "FAIL" };
        vec![row.model.clone(), verdict.to_owned(), format!("{:.0e}", row.allowed), difference]
    });
    view.push_blank();
    view.push_table(&["PARITY WITH THE CPU", "", "ALLOWED", "DIFFERENCE"], &parity.collect::<Vec<_>>());
    let memory = report.memory.iter().map(|row| {
        let verdict = match row.allowed_bytes {
            None => String::new(),
            Some(_) if row.failed() => "FAIL".to_owned(),
            Some(_) => "ok".to_owned(),
        };
        let allowed = row.allowed_bytes.map_or_else(String::new, |bytes| Bytes(bytes).to_string());
        vec![row.model.clone(), verdict, allowed, row.summary(), row.estimate.clone()]
    });
    view.push_blank();
    view.push_table(&["MEMORY ESTIMATE", "", "ALLOWED", "", "SUM"], &memory.collect::<Vec<_>>());
    let mut rates = Vec::new();
    for row in &report.speed {
        let (prompt, rate) = (row.prefill.prompt_tokens, row.prefill.tokens_per_second);
        rates.push(vec![row.model.clone(), format!("prompt of {prompt}"), format!("{rate:.0}"), String::new()]);
        for decode in &row.decode {
            let (rate, limit) = (decode.tokens_per_second, decode.bandwidth_limit_tokens_per_second);
            let limit = format!("{limit:.0} ({:.0} %)", 100.0 * rate / limit.max(1e-9));
            let what = format!("{} decoding", decode.sequences);
            rates.push(vec![String::new(), what, format!("{rate:.0}"), limit]);
        }
    }
    view.push_blank();
    view.push_table(&["SPEED", "", "TOKENS/S", "MEMORY-BOUND LIMIT"], &rates);
    for (heading, texts, tone) in
        [("Not run:", &report.not_run, Tone::NeedsUser), ("FAILED:", &report.failures, Tone::Bad)]
    {
        if !texts.is_empty() {
            view.push_blank();
            view.push_toned(tone, heading);
            texts.iter().for_each(|text| view.push(format!("  {text}")));
        }
    }
    view.push_blank();
    match report.failed() {
        0 => view.push_toned(Tone::Good, "All checks that ran passed."),
        failed => view.push_toned(Tone::Bad, format!("{} failed.", output::count(failed, "check"))),
    }
    view.lines
}
