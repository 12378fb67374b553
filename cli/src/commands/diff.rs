//! `cfq diff TASK`

use std::io::IsTerminal;

use cfq_proto::client::Client;
use cfq_proto::ids::TaskKey;
use cfq_proto::visible_text::{TERMINAL_CHARACTERS, visible};

use crate::exit::{Code, usage};
use crate::output::{self, Output};

pub async fn run(client: &Client, out: Output, task: TaskKey, iteration: Option<u32>) -> anyhow::Result<Code> {
    let chain = client.artifacts(task, iteration).await?;
    let Some(artifact) = chain.artifacts.last() else {
        return Err(usage(format!("{task} has no artifact yet; follow it with `cfq watch {task}`")));
    };
    if out.json || std::io::stdout().is_terminal() {
        out.print(artifact, |artifact| for_terminal(&artifact.diff))?;
    } else {
        // Other programs, such as `git apply`, need the exact text.
        output::print_raw(&artifact.diff);
    }
    Ok(Code::Done)
}

/// The diff with visible control characters, also those at the ends of lines, which may be the only change.
fn for_terminal(diff: &str) -> String {
    visible(diff.strip_suffix('\n').unwrap_or(diff), TERMINAL_CHARACTERS).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminal_shows_changed_line_ends_and_blank_context_lines() {
        assert_eq!(for_terminal("-a\n+a\r\n+\u{202e}\n \n \n"), "-a\n+a<U+000D>\n+<U+202E>\n \n ");
    }
}
