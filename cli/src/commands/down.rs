//! `cfq down`: stops the `cfq up` or `cfq join` that holds this data folder, and waits until it has exited.

use std::time::{Duration, Instant};

use cfq_deploy::{DataLock, Paths};
use cfq_link::child::Signal;
use schemars::JsonSchema;
use serde::Serialize;

use crate::exit::{self, Code};
use crate::output::Output;

/// Longest wait for the exit: each process may take its drain time; usually all exit within a second.
const STOP_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Serialize, JsonSchema)]
pub struct Down {
    stopped: bool,
}

pub async fn run(out: Output, paths: &Paths) -> anyhow::Result<Code> {
    let holder = DataLock::holder(paths).map_err(|error| {
        exit::usage(format!(
            "cannot read {}: {}; run this as the owner of the folder",
            error.path.display(),
            error.source
        ))
    })?;
    let Some(holder) = holder else {
        out.print(&Down { stopped: false }, |_| format!("cfq is not running on {}", paths.data.display()))?;
        return Ok(Code::Done);
    };
    holder.process.signal(Signal::Terminate).map_err(|error| {
        exit::usage(format!(
            "cannot stop process {} ({error}): run this as the user who started it",
            holder.process.pid
        ))
    })?;
    let start = Instant::now();
    while holder.process.is_alive() {
        if start.elapsed() > STOP_TIMEOUT {
            return Err(exit::failed(format!(
                "`{}` (process {}) does not stop; see `cfq logs --process up`, or run `kill -9 {}`: the next start cleans up",
                holder.command, holder.process.pid, holder.process.pid
            )));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    out.print(&Down { stopped: true }, |_| "stopped".to_owned())?;
    Ok(Code::Done)
}
