//! `cfq resolve TASK --action ...`

use cfq_proto::client::Client;
use cfq_proto::loop_step::EscalationAction;

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
    Ok(match args.action {
        ActionArg::SwitchLlm => {
            EscalationAction::SwitchLlm { target_agent: args.agent, suggested_model: args.model.clone() }
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
