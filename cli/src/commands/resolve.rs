//! `cfq resolve TASK --action ...`

mod ask;

use std::io::IsTerminal;
use std::time::Duration;

use cfq_proto::client::{Client, ClientError};
use cfq_proto::http::{EscalationView, ResolveRequest, StateReply, TaskDetail};
use cfq_proto::ids::{TaskKey, TaskNumber};
use cfq_proto::loop_step::EscalationAction;
use cfq_proto::task::{Agent, TaskState};
use clap::ValueEnum;

use crate::args::{ActionArg, ResolveArgs};
use crate::commands::{show, watch};
use crate::connect;
use crate::exit::{self, Code};
use crate::output::{self, Line, Output, Tone, View};

/// Pauses before an answer without a response is sent again, in seconds.
const REPEAT_AFTER_S: [u64; 6] = [1, 1, 2, 4, 8, 16];

pub async fn run(client: &Client, out: Output, args: ResolveArgs) -> anyhow::Result<Code> {
    let (action, question) = match args.action {
        Some(wanted) => {
            let action = action(wanted, &args)?;
            (action, client.task(args.task).await?.escalation.map(|escalation| escalation.question))
        }
        None => {
            let detail = client.task(args.task).await?;
            print_answers(&detail, out)?;
            let Some(escalation) = detail.escalation.filter(|_| can_ask(out)) else { return Ok(Code::Done) };
            // The answer is for the question that the user has read.
            let question = escalation.question;
            let asked = tokio::task::spawn_blocking(move || ask::ask(&escalation, &mut read_line)).await?;
            match asked.map_err(|error| exit::failed(format!("cannot read from this terminal: {error}")))? {
                Some(action) => (action, Some(question)),
                None => {
                    out.status("the question stays open");
                    return Ok(Code::Done);
                }
            }
        }
    };
    // Read before resolving, so that watching starts with the events that the action causes.
    let seen = client.events(args.task, 0).await?.events.last().map_or(0, |e| e.task_seq);
    let reply = send(client, args.task, ResolveRequest { action, question }).await?;
    out.print(&reply, |r| match r.note.as_str() {
        "" => format!("{} is {}", r.number, r.state),
        note => format!("{} is {}, {note}", r.number, r.state),
    })?;
    let continues = !reply.state.is_settled() && !args.watch;
    if continues {
        out.status(&format!("follow it: cfq watch {}", reply.number));
    }
    if args.watch {
        watch::run(client, out, args.task, seen, watch::WatchOptions::default()).await
    } else {
        Ok(Code::Done)
    }
}

/// Whether to ask for the answer: stdin and stdout are terminals, and the output is not JSON.
fn can_ask(out: Output) -> bool {
    !out.json && std::io::stdin().is_terminal() && std::io::stdout().is_terminal()
}

/// Prints a prompt and reads a line; `None` at the end of the input.
fn read_line(prompt: &str) -> std::io::Result<Option<String>> {
    output::print_raw(&output::sanitize(prompt));
    let mut line = String::new();
    let read = std::io::stdin().read_line(&mut line)?;
    Ok((read > 0).then(|| line.trim().to_owned()))
}

/// Sends the answer, and repeats it while the server does not say whether it was recorded. An answer that names its
/// question takes effect once.
async fn send(client: &Client, task: TaskKey, request: ResolveRequest) -> anyhow::Result<StateReply> {
    let mut pauses = REPEAT_AFTER_S.into_iter();
    loop {
        let error = match client.resolve(task, request.clone()).await {
            Err(error @ (ClientError::Unreachable { .. } | ClientError::Refused { status: 503, .. })) => error,
            result => return Ok(result?),
        };
        match pauses.next() {
            Some(pause) if request.question.is_some() => tokio::time::sleep(Duration::from_secs(pause)).await,
            _ => {
                return Err(exit::unreachable(format!(
                    "{}. The answer may have been recorded: run `cfq show {task}` before you answer again",
                    connect::describe_error(&error)
                )));
            }
        }
    }
}

/// Prints the open question and the commands that answer it.
fn print_answers(detail: &TaskDetail, out: Output) -> anyhow::Result<Code> {
    let (number, state) = (detail.summary.number, detail.summary.state);
    let Some(escalation) = &detail.escalation else {
        let resume =
            if state == TaskState::Paused { format!("; `cfq resume {number}` continues it") } else { String::new() };
        return Err(exit::usage(format!("{number} is {state}: it has no question to answer{resume}")));
    };
    // A terminal asks instead.
    let with_commands = !can_ask(out);
    let has_result = !detail.iterations.is_empty();
    out.print_lines(escalation, |escalation| question(escalation, (number, state), has_result, with_commands))?;
    Ok(Code::Done)
}

pub(super) fn question(
    escalation: &EscalationView,
    (number, state): (TaskNumber, TaskState),
    has_result: bool,
    with_commands: bool,
) -> Vec<Line> {
    let mut view = View::default();
    view.push_toned(Tone::Heading, format!("{number} is {state}"));
    if state == TaskState::Paused {
        view.push(format!("  paused: an answer is possible after `cfq resume {number}`"));
    }
    show::push_escalation_lines(escalation, number.to_string(), with_commands, &mut view);
    if has_result {
        view.push(format!("  `cfq diff {number}` prints the best result, `cfq show {number}` the reviews"));
    }
    view.lines
}

fn action(wanted: ActionArg, args: &ResolveArgs) -> anyhow::Result<EscalationAction> {
    check_flags(wanted, args)?;
    Ok(match wanted {
        ActionArg::SwitchLlm => {
            if args.model.is_none() {
                return Err(exit::usage(format!(
                    "switch_llm needs --model MODEL (`cfq nodes` lists models), which may be the same model, if the cause of its \
                     failures is gone; `cfq dead requeue {task}` repeats failed calls",
                    task = args.task
                )));
            }
            let target_agent = args.agent.unwrap_or(Agent::Alpha);
            EscalationAction::SwitchLlm { target_agent, suggested_model: args.model.clone() }
        }
        ActionArg::RetryWithConstraints => {
            if args.constraint.iter().all(|text| text.trim().is_empty()) {
                return Err(exit::usage(
                    "retry_with_constraints needs at least one --constraint TEXT, which is not empty",
                ));
            }
            EscalationAction::RetryWithConstraints { additional_constraints: args.constraint.clone() }
        }
        ActionArg::AcceptBestEffort => EscalationAction::AcceptBestEffort,
        ActionArg::Abort => EscalationAction::Abort,
        ActionArg::Fail => EscalationAction::Fail { reason: args.reason.clone() },
    })
}

/// Refuses flags that the action does not use.
fn check_flags(wanted: ActionArg, args: &ResolveArgs) -> anyhow::Result<()> {
    let flags = [
        ("--agent", args.agent.is_some(), ActionArg::SwitchLlm),
        ("--model", args.model.is_some(), ActionArg::SwitchLlm),
        ("--constraint", !args.constraint.is_empty(), ActionArg::RetryWithConstraints),
        ("--reason", args.reason.is_some(), ActionArg::Fail),
    ];
    let name = |action: ActionArg| action.to_possible_value().map(|value| value.get_name().to_owned());
    match flags.into_iter().find(|(_, is_given, action)| *is_given && *action != wanted) {
        None => Ok(()),
        Some((flag, _, action)) => Err(exit::usage(format!(
            "{flag} can be used only with --action {}, not with {}",
            name(action).unwrap_or_default(),
            name(wanted).unwrap_or_default()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, CliCommand};

    fn action_of(flags: &[&str]) -> Result<EscalationAction, String> {
        let cli = Cli::try_parse_from(["cfq", "resolve", "t4", "--action"].iter().chain(flags)).unwrap();
        let Some(CliCommand::Resolve(args)) = cli.command else { panic!("{flags:?}") };
        action(args.action.unwrap(), &args).map_err(|error| error.to_string())
    }

    #[test]
    fn another_model_must_be_named() {
        let error = action_of(&["switch_llm"]).unwrap_err();
        assert!(error.contains("needs --model MODEL") && error.contains("cfq dead requeue t4"), "{error}");
        let switch = EscalationAction::SwitchLlm {
            target_agent: Agent::Alpha,
            suggested_model: Some("openai:box/qwen".parse().unwrap()),
        };
        assert_eq!(action_of(&["switch_llm", "--model", "openai:box/qwen"]), Ok(switch));
    }

    #[test]
    fn flag_of_another_action_is_refused() {
        for (flags, words) in [
            (
                ["abort", "--model", "openai:box/qwen"],
                "--model can be used only with --action switch_llm, not with abort",
            ),
            (["abort", "--agent", "beta"], "--agent can be used only with --action switch_llm"),
            (["fail", "--constraint", "x"], "--constraint can be used only with --action retry_with_constraints"),
            (["abort", "--reason", "x"], "--reason can be used only with --action fail"),
        ] {
            let error = action_of(&flags).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
