//! `cfq acknowledge`.

use cfq_proto::client::Client;
use cfq_proto::ids::TaskKey;

use crate::exit::Code;
use crate::output::Output;

pub async fn run(client: &Client, out: Output, tasks: Vec<TaskKey>) -> anyhow::Result<Code> {
    for task in tasks {
        let reply = client.acknowledge(task).await?;
        out.print(&reply, |reply| match reply.note.as_str() {
            "" => format!("{}: its failure is acknowledged", reply.number),
            note => format!("{}: {note}", reply.number),
        })?;
    }
    Ok(Code::Done)
}
