//! `/agents`: the settings of the agents, which can be changed while cfq runs.

use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{Extension, Path, State};
use cfq_proto::http::{AgentList, AgentPatch, AgentPatchReply, AgentView, NodeView};
use cfq_proto::ids::NodeId;
use cfq_proto::messages::{ModelReply, NodeCommand};
use cfq_proto::model::ModelId;
use cfq_proto::node::Residency;
use cfq_proto::subject;
use cfq_proto::task::{Agent, AgentBindings};
use futures::StreamExt;
use futures::stream::FuturesUnordered;

use super::Api;
use super::access::Access;
use super::error::ApiError;
use super::submit::read_body;
use super::validate::{check_instructions, parse_body};
use crate::store::{AgentOverrides, Store, StoreError};

/// Interval at which a scheduler reads what was set through another one.
const REFRESH_INTERVAL: Duration = Duration::from_secs(2);
/// Time in which a node must confirm that it can use the new model.
const CONFIRMATION_TIMEOUT: Duration = Duration::from_secs(4);
/// Interval at which the nodes' reports are read meanwhile.
const CONFIRMATION_INTERVAL: Duration = Duration::from_millis(100);

/// The settings of the agents: those of the configuration, and what users set.
#[derive(Debug)]
pub struct AgentSettings {
    configured: AgentBindings,
    overrides: RwLock<AgentOverrides>,
}

impl AgentSettings {
    /// The settings of the configuration.
    pub fn new(configured: AgentBindings) -> Self {
        Self { configured, overrides: RwLock::default() }
    }

    /// The settings that new tasks get.
    pub fn current(&self) -> AgentBindings {
        let mut current = self.configured.clone();
        for (agent, set) in self.overrides.read().unwrap_or_else(PoisonError::into_inner).iter() {
            let binding = current.of_mut(*agent);
            binding.model = set.model.clone().or(binding.model.take());
            binding.instructions.clone_from(&set.instructions);
        }
        current
    }

    fn view(&self, agent: Agent) -> AgentView {
        let current = self.current();
        let binding = current.of(agent);
        AgentView {
            agent,
            model: binding.model.clone(),
            configured_model: self.configured.of(agent).model.clone(),
            fallback: binding.fallback.clone(),
            instructions: binding.instructions.clone(),
        }
    }

    /// Reads what users set.
    pub async fn refresh(&self, store: &Store) -> Result<(), StoreError> {
        let overrides = store.agent_overrides().await?;
        *self.overrides.write().unwrap_or_else(PoisonError::into_inner) = overrides;
        Ok(())
    }

    /// Follows changes that are made through other schedulers, in an endless loop.
    pub async fn follow(&self, store: &Store) {
        loop {
            if let Err(error) = self.refresh(store).await {
                tracing::debug!(%error, "the settings of the agents are not read");
            }
            tokio::time::sleep(REFRESH_INTERVAL).await;
        }
    }
}

pub async fn list(State(api): State<Api>) -> Result<Json<AgentList>, ApiError> {
    api.agents.refresh(&api.store).await?;
    Ok(Json(AgentList { agents: Agent::ALL.map(|agent| api.agents.view(agent)).to_vec() }))
}

pub async fn change(
    State(api): State<Api>,
    Extension(access): Extension<Access>,
    Path(agent): Path<String>,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<Json<AgentPatchReply>, ApiError> {
    let agent: Agent =
        agent.parse().map_err(|_| ApiError::not_found(format!("there is no agent {agent}: use alpha or beta")))?;
    let AgentPatch { model, instructions } = parse_body(&read_body(&api, bytes)?)?;
    if let Some(Some(text)) = &instructions {
        check_instructions("instructions", text)?;
    }
    api.agents.refresh(&api.store).await?;
    let previous_model = api.agents.view(agent).model;
    let (mut node, mut moved_calls, mut running_calls) = (None, 0, 0);
    if let Some(model) = model {
        let Some(wanted) = model.clone().or_else(|| api.agents.configured.of(agent).model.clone()) else {
            let message = format!("model: the configuration has no model for {agent}: name one");
            return Err(ApiError::invalid("model", message));
        };
        node = Some(confirm(&api, &wanted).await?);
        // An agent with the model of the configuration follows later changes of the configuration.
        let set = model.filter(|model| api.agents.configured.of(agent).model.as_ref() != Some(model));
        let change = api.store.set_agent_model(agent, set.as_ref(), &access.actor()).await?;
        (moved_calls, running_calls) = (change.moved_calls as u64, change.running_calls as u64);
        tracing::info!(%agent, model = %wanted, moved_calls, "changed the model of an agent");
        api.link.send_hints(change.hints).await;
    }
    if let Some(instructions) = instructions {
        let instructions = instructions.filter(|text| !text.trim().is_empty());
        api.store.set_agent_instructions(agent, instructions.as_deref(), &access.actor()).await?;
        tracing::info!(%agent, "changed the instructions of an agent");
    }
    api.agents.refresh(&api.store).await?;
    Ok(Json(AgentPatchReply { agent: api.agents.view(agent), previous_model, node, moved_calls, running_calls }))
}

/// Waits until a node can use the model. Asks the nodes that do not list it to do so.
async fn confirm(api: &Api, model: &ModelId) -> Result<NodeId, ApiError> {
    let nodes = api.store.node_views().await?;
    if nodes.iter().all(|node| !node.alive) {
        return Err(ApiError::busy("no node is running, so nothing was changed: see `cfq nodes`"));
    }
    if let Some(node) = usable_on(model, &nodes) {
        return Ok(node);
    }
    let session = api.link.get().ok_or_else(|| ApiError::busy("not connected to NATS: retry in a moment"))?;
    let load = NodeCommand::Load { model: model.clone() };
    let mut requests: FuturesUnordered<_> = nodes
        .iter()
        .filter(|node| node.alive)
        .map(|node| async {
            let address = subject::node_command(&node.id);
            match session.request::<_, ModelReply>(&address, &load).await {
                Ok(ModelReply::Refused { reason }) => Some(format!("{}: {reason}", node.id)),
                Ok(_) => None,
                Err(error) => Some(format!("{}: {error}", node.id)),
            }
        })
        .collect();
    let (asked, mut reasons) = (requests.len(), Vec::new());
    let deadline = tokio::time::sleep(CONFIRMATION_TIMEOUT);
    let mut deadline = std::pin::pin!(deadline);
    let mut interval = tokio::time::interval(CONFIRMATION_INTERVAL);
    // Until one node can use it, or all have refused it.
    while reasons.len() < asked {
        tokio::select! {
            Some(refused) = requests.next() => reasons.extend(refused),
            _ = interval.tick() => {
                if let Some(node) = usable_on(model, &api.store.node_views().await?) {
                    return Ok(node);
                }
            }
            () = &mut deadline => break,
        }
    }
    let nodes = api.store.node_views().await?;
    if let Some(node) = usable_on(model, &nodes) {
        return Ok(node);
    }
    for reason in nodes.iter().filter(|node| node.alive).filter_map(|node| unusable_on(model, node)) {
        if !reasons.contains(&reason) {
            reasons.push(reason);
        }
    }
    let reasons = match reasons.is_empty() {
        true => "no node confirmed it in time: see `cfq nodes`".to_owned(),
        false => reasons.join("; "),
    };
    Err(ApiError::conflict(format!("no node can use {model}, so nothing was changed: {reasons}")))
}

/// A node that can use the model now, or has its files.
fn usable_on(model: &ModelId, nodes: &[NodeView]) -> Option<NodeId> {
    let is_usable = |residency: &Residency| match residency {
        Residency::Resident | Residency::Available => true,
        // A server is asked; a file is read.
        Residency::Loading => model.is_file(),
        Residency::Unusable { .. } => false,
    };
    let usable = nodes.iter().filter(|node| node.alive && !node.cordoned);
    let lists = |node: &&NodeView| node.ledger.models.iter().any(|m| m.model == *model && is_usable(&m.residency));
    usable.filter(lists).map(|node| node.id.clone()).next()
}

fn unusable_on(model: &ModelId, node: &NodeView) -> Option<String> {
    node.ledger.models.iter().filter(|state| state.model == *model).find_map(|state| match &state.residency {
        Residency::Unusable { reason } => Some(format!("{}: {reason}", node.id)),
        Residency::Resident | Residency::Available | Residency::Loading => None,
    })
}
