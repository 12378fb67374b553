//! `cfq resolve TASK --action ...`

use cfq_proto::client::Client;
use cfq_proto::loop_step::EscalationAction;
use cfq_proto::task::Agent;
use clap::ValueEnum;

use crate::args::{ActionArg, ResolveArgs};
use crate::commands::watch;
use crate::exit::{self, Code};
use crate::output::Output;

pub async fn run(client: &Client, out: Output, args: ResolveArgs) -> anyhow::Result<Code> {
    let action = action(&args)?;
    // Read before resolving, so that watching starts with the events that the action causes.
    let seen = client.events(args.task, 0).await?.events.last().map_or(0, |e| e.task_seq);
    let reply = client.resolve(args.task, action).await?;
    out.print(&reply, |r| match r.note.as_str() {
        "" => format!("{} is {}", r.number, r.state),
        note => format!("{} is {}, {note}", r.number, r.state),
    })?;
    if args.watch { watch::run(client, out, args.task, seen, true).await } else { Ok(Code::Done) }
}

fn action(args: &ResolveArgs) -> anyhow::Result<EscalationAction> {
    check_flags(args)?;
    Ok(match args.action {
        ActionArg::SwitchLlm => {
            if args.model.is_none() {
                return Err(exit::usage(format!(
                    "switch_llm needs --model MODEL (`cfq nodes` lists models); to call the same model again, use \
                     `cfq dead requeue {task}` after failed calls, or retry_with_constraints",
                    task = args.task
                )));
            }
            let target_agent = args.agent.unwrap_or(Agent::Alpha);
            EscalationAction::SwitchLlm { target_agent, suggested_model: args.model.clone() }
        }
        ActionArg::RetryWithConstraints => {
            if args.constraint.is_empty() {
                return Err(exit::usage("retry_with_constraints needs at least one --constraint TEXT"));
            }
            EscalationAction::RetryWithConstraints { additional_constraints: args.constraint.clone() }
        }
        ActionArg::AcceptBestEffort => EscalationAction::AcceptBestEffort,
        ActionArg::Abort => EscalationAction::Abort,
        ActionArg::Fail => EscalationAction::Fail { reason: args.reason.clone() },
    })
}

/// Refuses flags that the action does not use.
fn check_flags(args: &ResolveArgs) -> anyhow::Result<()> {
    let flags = [
        ("--agent", args.agent.is_some(), ActionArg::SwitchLlm),
        ("--model", args.model.is_some(), ActionArg::SwitchLlm),
        ("--constraint", !args.constraint.is_empty(), ActionArg::RetryWithConstraints),
        ("--reason", args.reason.is_some(), ActionArg::Fail),
    ];
    let name = |action: ActionArg| action.to_possible_value().map(|value| value.get_name().to_owned());
    match flags.into_iter().find(|(_, is_given, action)| *is_given && *action != args.action) {
        None => Ok(()),
        Some((flag, _, action)) => Err(exit::usage(format!(
            "{flag} can be used only with --action {}, not with {}",
            name(action).unwrap_or_default(),
            name(args.action).unwrap_or_default()
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
        action(&args).map_err(|error| error.to_string())
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
