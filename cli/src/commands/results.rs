//! `cfq acknowledge` and `cfq defect`: what users say about tasks that have ended.

use cfq_proto::client::Client;
use cfq_proto::http::DefectReport;
use cfq_proto::ids::TaskKey;

use crate::args::DefectArgs;
use crate::exit::Code;
use crate::output::{self, Output};

pub async fn acknowledge(client: &Client, out: Output, tasks: Vec<TaskKey>) -> anyhow::Result<Code> {
    for task in tasks {
        let reply = client.acknowledge(task).await?;
        out.print(&reply, |reply| match reply.note.as_str() {
            "" => format!("{}: its failure is acknowledged", reply.number),
            note => format!("{}: {note}", reply.number),
        })?;
    }
    Ok(Code::Done)
}

pub async fn report_defect(client: &Client, out: Output, args: DefectArgs) -> anyhow::Result<Code> {
    let DefectArgs { task, description, severity, location, fix } = args;
    let report = DefectReport { severity, location, description, suggested_fix: fix };
    let reply = client.report_defect(task, &report).await?;
    out.print(&reply, |reply| {
        let note = if reply.created { "" } else { " (reported before)" };
        format!("{}: {}{note}", reply.number, output::count(reply.defects as usize, "reported defect"))
    })?;
    Ok(Code::Done)
}
