//! `cfq agents`

use cfq_proto::client::Client;
use cfq_proto::http::{AgentPatch, AgentPatchReply, AgentView};
use cfq_proto::model::ModelId;

use crate::args::AgentsCommand;
use crate::exit::{self, Code};
use crate::output::{self, Line, Output, View};

pub async fn run(client: &Client, out: Output, command: AgentsCommand) -> anyhow::Result<Code> {
    match command {
        AgentsCommand::Ls => {
            out.print_lines(&client.agents().await?, |list| render(&list.agents))?;
        }
        AgentsCommand::Set { agent, model } => {
            let patch = AgentPatch { model: Some(Some(model)), ..AgentPatch::default() };
            out.print(&client.change_agent(agent, &patch).await?, describe)?;
        }
        AgentsCommand::Reset { agent } => {
            let patch = AgentPatch { model: Some(None), ..AgentPatch::default() };
            out.print(&client.change_agent(agent, &patch).await?, describe)?;
        }
        AgentsCommand::Instruct { agent, text, clear } => {
            let instructions = match text {
                Some(text) if text == "-" => Some(
                    std::io::read_to_string(std::io::stdin())
                        .map_err(|error| exit::usage(format!("standard input is no text: {error}")))?,
                ),
                text => text.filter(|_| !clear),
            };
            if instructions.as_ref().is_some_and(|text| text.trim().is_empty()) {
                return Err(exit::usage(format!(
                    "there is no text; to remove the instructions: cfq agents instruct {agent} --clear"
                )));
            }
            let patch = AgentPatch { instructions: Some(instructions), ..AgentPatch::default() };
            out.print(&client.change_agent(agent, &patch).await?, |reply| match &reply.agent.instructions {
                Some(_) => format!("{agent} gets these instructions from its next call on"),
                None => format!("{agent} has no instructions now"),
            })?;
        }
    }
    Ok(Code::Done)
}

fn name(model: Option<&ModelId>) -> &str {
    model.map_or("no model", ModelId::as_str)
}

pub(super) fn render(agents: &[AgentView]) -> Vec<Line> {
    let mut view = View::default();
    for agent in agents {
        let fallback = agent.fallback.as_ref().map(|model| format!("  fallback {model}")).unwrap_or_default();
        view.push(format!("{:<5}  {}{fallback}", agent.agent.as_str(), name(agent.model.as_ref())));
        if agent.model != agent.configured_model {
            let configured = name(agent.configured_model.as_ref());
            view.push(format!("       (cfq.toml: {configured}; `cfq agents reset {}` returns to it)", agent.agent));
        }
        for line in agent.instructions.iter().flat_map(|text| text.trim().lines()) {
            view.push(format!("       {line}"));
        }
    }
    view.lines
}

fn describe(reply: &AgentPatchReply) -> String {
    let AgentPatchReply { agent, previous_model, node, moved_calls, running_calls } = reply;
    let (agent, model) = (agent.agent, name(agent.model.as_ref()));
    if name(previous_model.as_ref()) == model {
        return format!("{agent} uses {model} already");
    }
    let moved = match moved_calls {
        0 => String::new(),
        _ => format!("\n{} that waited uses it too", output::count(*moved_calls as usize, "call")),
    };
    let running = match running_calls {
        0 => String::new(),
        _ => format!(
            "\n{} still running, with {}",
            output::count(*running_calls as usize, "call"),
            name(previous_model.as_ref())
        ),
    };
    let on = node.as_ref().map(|node| format!(", on {node}")).unwrap_or_default();
    format!("{agent} uses {model} from now on{on}{moved}{running}")
}
