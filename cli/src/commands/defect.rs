//! `cfq defect`.

use cfq_proto::client::Client;
use cfq_proto::http::DefectReport;

use crate::args::DefectArgs;
use crate::exit::Code;
use crate::output::{self, Output};

pub async fn run(client: &Client, out: Output, args: DefectArgs) -> anyhow::Result<Code> {
    let DefectArgs { task, description, severity, location, fix } = args;
    let report = DefectReport { severity, location, description, suggested_fix: fix };
    let reply = client.report_defect(task, &report).await?;
    out.print(&reply, |reply| {
        let note = if reply.created { "" } else { " (reported before)" };
        format!("{}: {}{note}", reply.number, output::count(reply.defects as usize, "reported defect"))
    })?;
    Ok(Code::Done)
}
