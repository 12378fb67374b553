//! `cfq dead ls`, `cfq dead show KEY` and `cfq dead requeue KEY...`

use cfq_proto::client::{Client, ClientError};
use cfq_proto::http::{AttemptView, DeadLetterDetail, DeadLetterList};
use cfq_proto::ids::TaskKey;

use crate::args::DeadCommand;
use crate::exit::{self, Code};
use crate::output::{self, Line, Output, Tone, View};

pub async fn run(client: &Client, out: Output, command: DeadCommand) -> anyhow::Result<Code> {
    match command {
        DeadCommand::Ls { limit, after } => {
            let list = client.dead_letters(after, limit).await?;
            out.print_lines(&list, |list| render_list(list, output::terminal_columns()))?;
            if let Some(next) = list.next {
                out.status(&format!("more dead letters: cfq dead ls --after {next}"));
            }
        }
        DeadCommand::Show { key } => {
            let detail = client.dead_letter(key).await?;
            out.print_lines(&detail, render)?;
        }
        DeadCommand::Requeue { keys } => {
            return requeue(client, out, &keys).await;
        }
    }
    Ok(Code::Done)
}

/// Requeues each of the dead letters. A refusal stops no other one; the exit code is that of the worst result.
async fn requeue(client: &Client, out: Output, keys: &[TaskKey]) -> anyhow::Result<Code> {
    let mut code = Code::Done;
    for (n, key) in keys.iter().enumerate() {
        match client.requeue_dead_letter(*key).await {
            Ok(reply) => out.print(&reply, |r| format!("job {} is queued, {} is {}", r.job, r.number, r.state))?,
            Err(refused @ ClientError::Refused { .. }) if keys.len() > 1 => {
                let error = anyhow::Error::from(refused);
                code = worst(code, exit::of_error(&error));
                crate::report(&error, out.json);
            }
            Err(error) => {
                if let Some(rest) = keys.get(n + 1..).filter(|rest| !rest.is_empty()) {
                    out.status(&format!("not requeued: {}, {}", key, output::list(rest)));
                }
                return Err(error.into());
            }
        }
    }
    Ok(code)
}

/// The code of an unreachable server comes before those of refusals.
fn worst(one: Code, other: Code) -> Code {
    if one as u8 > other as u8 { one } else { other }
}

pub(super) fn render_list(list: &DeadLetterList, terminal: Option<usize>) -> Vec<Line> {
    if list.dead_letters.is_empty() {
        return output::plain_lines("no dead letters");
    }
    let row = |dead: &cfq_proto::http::DeadLetter| {
        vec![
            dead.number.to_string(),
            dead.task_state.to_string(),
            dead.role.to_string(),
            dead.attempts.to_string(),
            dead.losses.to_string(),
            dead.unaccepted.to_string(),
            dead.failures.to_string(),
            dead.job.to_string(),
            dead.model.to_string(),
        ]
    };
    let rows: Vec<Vec<String>> = list.dead_letters.iter().map(row).collect();
    let columns = [
        ("TASK", 0),
        ("STATE", 1),
        ("ROLE", 0),
        ("ATTEMPTS", 2),
        ("LOST", 4),
        ("UNACCEPTED", 6),
        ("FAILED", 5),
        ("JOB", 3),
        ("MODEL", 0),
    ];
    output::list_lines(&columns, &rows, rows.iter().map(|_| Tone::Plain), terminal)
}

pub(super) fn render(detail: &DeadLetterDetail) -> Vec<Line> {
    let dead = &detail.summary;
    let mut view = View::default();
    view.push_toned(Tone::Heading, format!("job {}", dead.job));
    view.push(format!("  task        {}, {}", dead.number, dead.task_state));
    view.push(format!("  call        {} on {}", dead.role, dead.model));
    view.push(format!(
        "  attempts    {}: {} lost, {} not accepted, {} failed",
        dead.attempts, dead.losses, dead.unaccepted, dead.failures
    ));
    for attempt in &detail.attempts {
        view.push(attempt_line(attempt));
    }
    view.push_command("  requeue it  ", &format!("cfq dead requeue {}", dead.number), None);
    view.lines
}

fn attempt_line(attempt: &AttemptView) -> String {
    let mut line = format!("  attempt {} on {}", attempt.attempt, attempt.node);
    let start = attempt.accepted_at.map_or(", not accepted", |_| match attempt.has_first_token {
        true => ", generated text",
        false => ", accepted",
    });
    line += start;
    if let Some(ended) = attempt.ended_at {
        let start = attempt.accepted_at.unwrap_or(attempt.placed_at);
        let after = output::duration(((ended - start).max(0.0) * 1000.0) as u64);
        line += &format!(", {} after {after}", attempt.outcome.as_deref().unwrap_or("ended"));
    }
    if !attempt.detail.is_empty() {
        line += &format!(": {}", output::sanitize(&attempt.detail));
    }
    if let Some(suspicion) = &attempt.suspicion {
        line += &format!(" (the job is suspected: {suspicion})");
    }
    line
}
