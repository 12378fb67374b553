//! One call: starts the program, and reads its reply.

use std::io;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use cfq_engine::Outbox;
use cfq_proto::job::{Completion, FinishReason, JobFailure, OutputFormat, Prompt, PromptForm};

use super::client::CommandClient;
use super::coding_agent::{CodingAgent, StdoutFormat};
use super::input::ProgramInput;
use super::invocation::Invocation;
use super::output::{MAX_TEXT_BYTES, OutputReader, failure, gemini_error};
use super::process::{End, Program};
use crate::error_text::with_causes;
use crate::proxy::context_limit::ContextLimit;
use crate::proxy::peer::Peer;
use crate::proxy::reply::Reply;

/// Interval at which a call reports a step while its program runs: programs write nothing while the model thinks.
const STEP_INTERVAL: Duration = Duration::from_secs(5);
/// Minimum length of a value of a variable that is masked in messages, in bytes.
const MIN_SECRET_BYTES: usize = 8;
/// Maximum size of the whole output, in bytes.
const MAX_OUTPUT_BYTES: usize = 64 << 20;
/// Exit code of Gemini CLI if nobody is logged in (<https://geminicli.com/docs/cli/headless>).
const GEMINI_NOT_LOGGED_IN: i32 = 41;

/// Runs one chat completion; the text is sent to `outbox` as it arrives.
pub(super) async fn complete(
    client: &CommandClient,
    model: Option<&str>,
    prompt: &Prompt,
    outbox: &Outbox,
    started: Instant,
) -> Result<Completion, JobFailure> {
    if prompt.form == PromptForm::Text {
        let reason = "programs answer conversations only; send messages, or use a model that continues texts";
        return Err(JobFailure::Rejected { reason: reason.to_owned() });
    }
    if let OutputFormat::Regex { .. } | OutputFormat::Grammar { .. } = prompt.format {
        let reason = "programs do not support output by regular expression or grammar; use a model that runs in-process, \
                      or a JSON schema";
        return Err(JobFailure::Rejected { reason: reason.to_owned() });
    }
    let path = client.program().map_err(|reason| JobFailure::Unavailable { reason })?;
    let not_started = |error: io::Error| {
        let hint = match error.kind() {
            io::ErrorKind::PermissionDenied => {
                "; the account of the node may not execute it or enter a folder above it"
            }
            _ => "",
        };
        JobFailure::Unavailable { reason: format!("cannot start {}: {}{hint}", path.display(), with_causes(&error)) }
    };
    let invocation = Invocation::prepare(client, path.clone(), model, ProgramInput::of(prompt)).map_err(not_started)?;
    let mut program = Program::start(invocation).map_err(not_started)?;
    let context = ContextLimit::of(prompt, client.context_tokens);
    let names = client.config.environment_names(&client.name);
    let values: Vec<String> = names.filter_map(|name| std::env::var(name).ok()).collect();
    let secrets = values.iter().map(String::as_str).filter(|value| value.len() >= MIN_SECRET_BYTES).collect();
    let peer = &Peer { name: client.name.clone(), secrets, context: Some(context) };
    let mut reply = Reply::new((peer, outbox, started), &prompt.sampling.stop, false, MAX_TEXT_BYTES);
    let form = client.config.output(&client.name);
    let mut reader = OutputReader::new(form);
    let deadline = tokio::time::sleep(client.config.timeout());
    let mut deadline = std::pin::pin!(deadline);
    let mut steps = tokio::time::interval(STEP_INTERVAL);
    let mut received = 0usize;
    loop {
        tokio::select! {
            read = program.read() => match read.map_err(|error| peer.invalid_reply(&error.to_string()))? {
                Some(bytes) => {
                    received += bytes.len();
                    if received > MAX_OUTPUT_BYTES {
                        return Err(peer.invalid_reply(&format!("it wrote {received} bytes without an end")));
                    }
                    reader.push(&bytes, &mut reply)?;
                    if reply.is_stopped() {
                        return reply.into_completion();
                    }
                    if form != StdoutFormat::Text && reply.finish().is_some() {
                        // The agent may still store its state.
                        program.end().await;
                        return reply.into_completion();
                    }
                }
                None => break,
            },
            _ = steps.tick() => outbox.report_step(""),
            () = &mut deadline => {
                let seconds = client.config.timeout().as_secs();
                return Err(JobFailure::Unavailable { reason: format!("{} did not end within {seconds} s", client.name) });
            }
        }
    }
    reader.finish(&mut reply)?;
    let end = program.end().await;
    if reply.finish().is_some() {
        return reply.into_completion();
    }
    if form == StdoutFormat::Text && end.status.is_some_and(|status| status.success()) && reply.has_text() {
        reply.set_usage(context.estimate(reply.text_bytes()));
        reply.set_finish(FinishReason::Stop);
        return reply.into_completion();
    }
    Err(ended_early(client, &end, &reply))
}

/// The failure of a program that ended without a complete reply.
fn ended_early(client: &CommandClient, end: &End, reply: &Reply<'_>) -> JobFailure {
    let status =
        end.status.map_or_else(|| "it closed its output and did not end".to_owned(), |status| status.to_string());
    let what = match (end.status.is_some_and(|status| status.success()), reply.has_text()) {
        (true, false) => "it wrote no reply".to_owned(),
        (true, true) => "its reply has no end".to_owned(),
        (false, _) => status,
    };
    let stated = gemini_error(&end.errors).filter(|_| client.config.output(&client.name) == StdoutFormat::Gemini);
    let message = match (stated, end.last_error()) {
        (Some(message), _) => message,
        (None, "") => what,
        (None, last_error) => format!("{what}: {last_error}"),
    };
    match failure(&message, None, reply) {
        JobFailure::Unavailable { reason } if is_not_logged_in(client, end.status) => JobFailure::Rejected { reason },
        failure => failure,
    }
}

fn is_not_logged_in(client: &CommandClient, status: Option<ExitStatus>) -> bool {
    client.config.agent(&client.name) == Some(CodingAgent::Gemini)
        && status.and_then(|status| status.code()) == Some(GEMINI_NOT_LOGGED_IN)
}
