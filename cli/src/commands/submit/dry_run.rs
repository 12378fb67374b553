//! `cfq submit --dry-run`: shows the task, the nodes that could run it, and its first prompt, and submits nothing.

use std::path::{Path, PathBuf};

use cfq_agent_runner::ServerPolicies;
use cfq_agent_runner::driver::first_prompt;
use cfq_agent_runner::pipeline::{MAX_MAP_TIME, map_request};
use cfq_agent_runner::workstream::{Mirror, RepoMapReply, RepositoryAccess, StopCondition};
use cfq_deploy::Paths;
use cfq_proto::client::Client;
use cfq_proto::http::NodeView;
use cfq_proto::ids::NodeId;
use cfq_proto::job::{ChatMessage, ChatRole};
use cfq_proto::model::ModelId;
use cfq_proto::node::Residency;
use cfq_proto::task::{Agent, TaskSpec};
use cfq_repo_map::RepoMap;
use schemars::JsonSchema;
use serde::Serialize;

use crate::exit::{self, Code};
use crate::local_time;
use crate::output::{self, Line, Output, Tone, View};
use crate::{repo, repo_map, server_policies};

/// Assumed bytes per token, for the length of the prompt: typical for English and code.
const BYTES_PER_TOKEN: usize = 4;

#[derive(Serialize, JsonSchema)]
pub struct DryRun {
    /// The task with all defaults.
    spec: TaskSpec,
    warnings: Vec<String>,
    models: Vec<AgentNodes>,
    prompt: Vec<ChatMessage>,
}

/// The nodes on which the calls of an agent could run now.
#[derive(Serialize, JsonSchema)]
pub struct AgentNodes {
    agent: Agent,
    model: Option<ModelId>,
    nodes: Vec<Candidate>,
    /// Nodes that have the model and cannot use it.
    unusable: Vec<UnusableModel>,
}

#[derive(Serialize, JsonSchema)]
pub struct UnusableModel {
    node: NodeId,
    reason: String,
}

#[derive(Serialize, JsonSchema)]
pub struct Candidate {
    node: NodeId,
    /// `loaded`, `can be loaded`, or `is being loaded`.
    model: &'static str,
    running: u32,
}

pub async fn run(client: &Client, paths: &Paths, out: Output, specs: Vec<TaskSpec>) -> anyhow::Result<Code> {
    let several = specs.len() > 1;
    for (n, mut spec) in specs.into_iter().enumerate() {
        // Names of tasks in the same file, which the server does not know yet.
        if several {
            spec.after.clear();
        }
        let shown = try_task(client, paths, out, spec).await?;
        out.print_lines(&shown, |shown| [output::blank_line(n > 0), render(shown)].concat())?;
    }
    out.status("nothing was submitted");
    Ok(Code::Done)
}

async fn try_task(client: &Client, paths: &Paths, out: Output, spec: TaskSpec) -> anyhow::Result<DryRun> {
    // The server checks the task as when it is submitted.
    let checked = client.check_task(&spec).await?;
    let nodes = client.nodes().await?;
    let mut task = checked.task;
    let settings = client.agents().await?;
    for agent in Agent::ALL {
        let instructions =
            settings.agents.iter().find(|view| view.agent == agent).and_then(|view| view.instructions.clone());
        let own = &mut task.agents.of_mut(agent).instructions;
        *own = own.take().or(instructions);
    }
    let models =
        Agent::ALL.into_iter().map(|agent| candidates(agent, task.agents.of(agent).model.clone(), &nodes)).collect();
    let prompt = prompt(paths, out, task.clone()).await?;
    Ok(DryRun { spec: task, warnings: checked.warnings, models, prompt })
}

fn candidates(agent: Agent, model: Option<ModelId>, nodes: &[NodeView]) -> AgentNodes {
    let candidate = |node: &NodeView| {
        let state = node.ledger.models.iter().find(|state| Some(&state.model) == model.as_ref())?;
        let model = match state.residency {
            Residency::Resident => "loaded",
            Residency::Available => "can be loaded",
            Residency::Loading => "is being loaded",
            Residency::Unusable { .. } => return None,
        };
        Some(Candidate { node: node.id.clone(), model, running: node.running })
    };
    let usable = nodes.iter().filter(|node| node.alive && !node.cordoned && !node.ledger.draining);
    let reason = |node: &NodeView| {
        let state = node.ledger.models.iter().find(|state| Some(&state.model) == model.as_ref())?;
        let Residency::Unusable { reason } = &state.residency else { return None };
        Some(UnusableModel { node: node.id.clone(), reason: reason.clone() })
    };
    let unusable = nodes.iter().filter(|node| node.alive).filter_map(reason).collect();
    AgentNodes { agent, nodes: usable.filter_map(candidate).collect(), unusable, model }
}

/// The first prompt, from a copy of the base commit.
async fn prompt(paths: &Paths, out: Output, task: TaskSpec) -> anyhow::Result<Vec<ChatMessage>> {
    let data_dir = paths.cache.join("dry-runs").join(std::process::id().to_string());
    let access = repo::access()?;
    let (copy, cache) = (data_dir.clone(), paths.cache.clone());
    let (data, policies_folder) = (paths.data.clone(), paths.server_policies_folder());
    let read = move || {
        let base = task.base.clone().unwrap_or_default();
        let mirror =
            Mirror::open(&data_dir, Path::new(&task.repo)).map_err(|error| exit::failed(error.with_causes()))?;
        let (stop, _cancel) = StopCondition::after(repo::MAX_ACCESS);
        access.fetch(&mirror, &data_dir, &base, &stop).map_err(|error| exit::failed(error.with_causes()))?;
        let map = repository_map(&access, &cache, &task, &base)?;
        if map.is_none() && task.review.is_none() {
            out.status("the prompt has no map of the repository, because it cannot be made in time");
        }
        let policies = server_policies::read(&data, &policies_folder).unwrap_or_else(|| {
            out.status("the prompt lacks the server policies, because CFQ_URL names another server");
            ServerPolicies::default()
        });
        policies.problems.iter().for_each(|problem| out.status(problem));
        first_prompt(&task, &mirror, &base, map.as_ref(), &policies).map_err(|error| exit::failed(error.to_string()))
    };
    let prompt = tokio::task::spawn_blocking(read).await?;
    // The copy is only for this prompt.
    drop(std::fs::remove_dir_all(&copy));
    prompt
}

/// The map that the prompt shows. `None` for a review, or if the map cannot be made in time; then the prompts of the
/// runner have none either.
fn repository_map(
    access: &RepositoryAccess,
    cache: &Path,
    task: &TaskSpec,
    base: &str,
) -> anyhow::Result<Option<RepoMap>> {
    if task.review.is_some() {
        return Ok(None);
    }
    let repository = PathBuf::from(&task.repo);
    let request = map_request(task, (repository, base), repo_map::symbols_folder(cache)?, MAX_MAP_TIME);
    let (stop, _cancel) = repo_map::stop_after(MAX_MAP_TIME);
    match access.repo_map(request, &stop) {
        Ok(RepoMapReply::Map { map, .. }) => Ok(Some(map)),
        Ok(RepoMapReply::Unfinished { .. } | RepoMapReply::Refused { .. }) | Err(_) => Ok(None),
    }
}

fn render(dry_run: &DryRun) -> Vec<Line> {
    let DryRun { spec: task, warnings, models, prompt } = dry_run;
    let title = task.description.trim().lines().next().unwrap_or_default();
    let base = task.base.as_deref().unwrap_or_default();
    let mut view = View::default();
    view.push_toned(Tone::Heading, format!("task        {title}"));
    view.push(format!("repository  {}, from commit {}", task.repo, base.get(..12).unwrap_or(base)));
    let mut limits = vec![format!("priority {}", task.priority)];
    limits.extend(task.threshold.map(|threshold| format!("threshold {threshold:.0}")));
    limits.extend(task.max_iterations.map(|n| format!("at most {}", output::count(n as usize, "iteration"))));
    limits.extend(task.run_at.map(|at| format!("starts at {}", local_time::describe(at))));
    limits.extend(task.deadline.map(|at| format!("ends at {}", local_time::describe(at))));
    if !task.labels.is_empty() {
        limits.push(format!("labels {}", output::list(&task.labels)));
    }
    view.push(format!("settings    {}", limits.join(", ")));
    for AgentNodes { agent, model, nodes, unusable } in models {
        let Some(model) = model else { continue };
        let nodes: Vec<String> = nodes
            .iter()
            .map(|candidate| {
                let calls = output::count(candidate.running as usize, "running call");
                format!("{} ({}, {calls})", candidate.node, candidate.model)
            })
            .collect();
        let nodes = if nodes.is_empty() { "no node can run it now".to_owned() } else { nodes.join(", ") };
        view.push(format!("{:11} {model} on: {nodes}", agent.to_string()));
        let reasons = unusable.iter().map(|unusable| (&unusable.node, output::one_line(&unusable.reason)));
        for (node, reason) in reasons {
            view.push_toned(Tone::Bad, format!("            {node} cannot use it: {reason}"));
        }
    }
    for warning in warnings {
        view.push_toned(Tone::NeedsUser, format!("warning     {warning}"));
    }
    let bytes: usize = prompt.iter().map(|message| message.content.len()).sum();
    view.push(format!("prompt      {bytes} bytes, about {} tokens; alpha gets:", bytes.div_ceil(BYTES_PER_TOKEN)));
    for message in prompt {
        let role = match message.role {
            ChatRole::System => "system",
            ChatRole::User => "user",
            ChatRole::Assistant => "assistant",
        };
        view.push_blank();
        view.push_toned(Tone::Faint, format!("--- {role}"));
        view.push_verbatim(message.content.trim_end());
    }
    view.lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompt_and_nodes_fit_the_terminal() {
        let message = |role, content: &str| ChatMessage { role, content: content.into() };
        let dry_run = DryRun {
            spec: serde_json::from_value(serde_json::json!({
                "description": "Write a function that reads a large file without keeping it in memory",
                "repo": "/home/anna/projects/shop", "base": "b".repeat(40),
            }))
            .unwrap(),
            warnings: vec!["2 uncommitted changes in /home/anna/projects/shop are not a part of the task".into()],
            models: vec![
                AgentNodes {
                    agent: Agent::Alpha,
                    model: Some("ollama:den/llama3.1:8b".parse().unwrap()),
                    nodes: vec![Candidate { node: "den".parse().unwrap(), model: "can be loaded", running: 1 }],
                    unusable: vec![],
                },
                AgentNodes {
                    agent: Agent::Beta,
                    model: Some("ollama:den/qwen3:14b".parse().unwrap()),
                    nodes: vec![],
                    unusable: vec![UnusableModel {
                        node: "attic".parse().unwrap(),
                        reason: "cannot reach http://192.168.1.7:11434: connection refused".into(),
                    }],
                },
            ],
            prompt: vec![
                message(ChatRole::System, "You write code for the task that the user describes."),
                message(ChatRole::User, "Write a function.\n\n    def read(path): ...\n"),
            ],
        };
        insta::assert_snapshot!("view_submit", output::at_widths(|_| render(&dry_run)));
    }
}
