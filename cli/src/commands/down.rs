//! `cfq down`: asks the `cfq up` that holds this data folder to stop, and waits until it has.

use std::time::{Duration, Instant};

use cfq_deploy::{DataLock, Paths};
use cfq_link::child::Signal;
use serde::Serialize;

use crate::exit::{self, Code};
use crate::output::Output;

/// Each part may take its drain time; together they rarely need a second.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Serialize)]
struct Down {
    stopped: bool,
}

pub async fn run(out: Output, paths: &Paths) -> anyhow::Result<Code> {
    let Some(holder) = DataLock::holder(paths) else {
        out.data(&Down { stopped: false }, |_| format!("nothing runs for {}", paths.data.display()))?;
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
        if start.elapsed() > PATIENCE {
            return Err(exit::failed(format!(
                "process {} does not stop; `cfq logs --process up` may tell why, `kill -9 {}` ends it and the next `cfq up` cleans up",
                holder.process.pid, holder.process.pid
            )));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    out.data(&Down { stopped: true }, |_| "stopped".to_owned())?;
    Ok(Code::Done)
}
