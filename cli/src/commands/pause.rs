//! `cfq pause TASK...` and `cfq resume TASK...`

use cfq_proto::client::{Client, ClientError};
use cfq_proto::http::StateReply;
use cfq_proto::ids::TaskKey;

use crate::exit::Code;
use crate::output::Output;

pub async fn pause(client: &Client, out: Output, tasks: &[TaskKey], reason: &str) -> anyhow::Result<Code> {
    for task in tasks {
        print(out, client.pause(*task, reason).await)?;
    }
    Ok(Code::Done)
}

pub async fn resume(client: &Client, out: Output, tasks: &[TaskKey]) -> anyhow::Result<Code> {
    for task in tasks {
        print(out, client.resume(*task).await)?;
    }
    Ok(Code::Done)
}

fn print(out: Output, reply: Result<StateReply, ClientError>) -> anyhow::Result<()> {
    out.print(&reply?, |r| match r.note.is_empty() {
        true => format!("{} is {}", r.number, r.state),
        false => format!("{} is {}: {}", r.number, r.state, r.note),
    })
}
