//! `cfq cancel TASK`

use cfq_proto::client::Client;
use cfq_proto::ids::TaskKey;

use crate::exit::Code;
use crate::output::Output;

pub async fn run(client: &Client, out: Output, task: TaskKey, reason: &str) -> anyhow::Result<Code> {
    let reply = client.cancel(task, reason).await?;
    out.print(&reply, |r| format!("{} is {}", r.number, r.state))?;
    Ok(Code::Done)
}
