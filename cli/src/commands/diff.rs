//! `cfq diff TASK`

use cfq_proto::client::Client;
use cfq_proto::ids::TaskKey;

use crate::exit::{Code, usage};
use crate::output::{self, Output};

pub async fn run(client: &Client, out: Output, task: TaskKey, iteration: Option<u32>) -> anyhow::Result<Code> {
    let chain = client.artifacts(task, iteration).await?;
    let Some(artifact) = chain.artifacts.last() else {
        return Err(usage(format!("{task} has no artifact yet; follow it with `cfq watch {task}`")));
    };
    out.print(artifact, |a| output::sanitize(a.diff.trim_end()))?;
    Ok(Code::Done)
}
