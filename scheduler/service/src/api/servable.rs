//! Checks whether the cluster can serve a task's models.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use cfq_proto::http::NodeView;
use cfq_proto::model::ModelId;
use cfq_proto::task::{Agent, AgentBindings};
use tokio::sync::Mutex;

use super::error::ApiError;
use crate::store::{Store, StoreError};

/// All registered nodes; `None` if a row cannot be read, which must prevent no submission.
pub async fn registered_nodes(store: &Store) -> Result<Option<Vec<NodeView>>, StoreError> {
    match store.node_views().await {
        Ok(nodes) => Ok(Some(nodes)),
        Err(error) if error.may_retry() => Err(error),
        Err(error) => {
            tracing::error!(%error, "cannot read the nodes; models of tasks are not checked");
            Ok(None)
        }
    }
}

/// Maximum age of a reading of the nodes that calls of API clients use.
const MAX_NODES_AGE: Duration = Duration::from_secs(1);

/// Last reading of the registered nodes. Requests that wait for a reading at the same time share one.
#[derive(Debug, Default)]
pub struct SharedNodes(Mutex<Option<(Instant, Vec<NodeView>)>>);

impl SharedNodes {
    /// All registered nodes, as they were read at most [`MAX_NODES_AGE`] ago.
    pub async fn recent(&self, store: &Store) -> Result<Vec<NodeView>, StoreError> {
        let mut shared = self.0.lock().await;
        if let Some((read_at, nodes)) = &*shared
            && read_at.elapsed() <= MAX_NODES_AGE
        {
            return Ok(nodes.clone());
        }
        let read_at = Instant::now();
        let nodes = registered_nodes(store).await?.unwrap_or_default();
        *shared = Some((read_at, nodes.clone()));
        Ok(nodes)
    }

    /// Checks the models of both agents as [`check_models`] does, against nodes that were read after this call began.
    pub async fn check_models(
        &self,
        store: &Store,
        agents: &AgentBindings,
        defaults: &AgentBindings,
    ) -> Result<Result<Vec<String>, ApiError>, StoreError> {
        let asked_at = Instant::now();
        let mut shared = self.0.lock().await;
        if let Some((read_at, nodes)) = &*shared
            && *read_at >= asked_at
        {
            return Ok(check_models(agents, nodes, defaults));
        }
        let read_at = Instant::now();
        let Some(nodes) = registered_nodes(store).await? else { return Ok(Ok(Vec::new())) };
        let checked = check_models(agents, &nodes, defaults);
        *shared = Some((read_at, nodes));
        Ok(checked)
    }
}

/// Checks the models of both agents against the registered nodes and the endpoints and commands of `defaults`, the agents' settings
/// in the scheduler's configuration. A model behind an endpoint that none of them knows is refused, unless no node is
/// alive: then a node that starts later may know the endpoint. Returns a warning for each model that no live node lists.
pub fn check_models(
    agents: &AgentBindings,
    nodes: &[NodeView],
    defaults: &AgentBindings,
) -> Result<Vec<String>, ApiError> {
    let mut warnings = Vec::new();
    for agent in [Agent::Alpha, Agent::Beta] {
        let binding = agents.of(agent);
        let named = [("model", &binding.model), ("fallback", &binding.fallback)];
        for (field, model) in named.into_iter().filter_map(|(field, model)| Some((field, model.as_ref()?))) {
            if let Some(warning) = check_model(&format!("agents.{agent}.{field}"), model, nodes, defaults)?
                && !warnings.contains(&warning)
            {
                warnings.push(warning);
            }
        }
    }
    Ok(warnings)
}

/// Checks one model; `field` is the field of the request that names the model.
pub fn check_model(
    field: &str,
    model: &ModelId,
    nodes: &[NodeView],
    defaults: &AgentBindings,
) -> Result<Option<String>, ApiError> {
    let listed_by = |node: &NodeView| node.ledger.models.iter().any(|state| state.model == *model);
    if nodes.iter().any(|node| node.alive && listed_by(node)) {
        return Ok(None);
    }
    if !nodes.iter().any(|node| node.alive) {
        return Ok(Some(format!("no node is running, so the task waits for one that serves {model}")));
    }
    if let Some(endpoint) = model.endpoint() {
        let known = known(nodes, defaults, ModelId::endpoint);
        if !known.contains(&endpoint) {
            let known = listed(&known);
            return Err(ApiError::invalid(
                field,
                format!(
                    "{field}: {model}: no node has an endpoint {endpoint}; known endpoints: {known}. Correct the name, \
                     or add [endpoints.{endpoint}] and a model behind it to cfq.toml and restart cfq"
                ),
            ));
        }
    }
    if let Some(command) = model.command() {
        let known = known(nodes, defaults, ModelId::command);
        if !known.contains(&command) {
            return Err(ApiError::invalid(
                field,
                format!(
                    "{field}: {model}: no node has a command {command}; known commands: {}. Correct the name, or add the \
                     model to an agent or to models under [node] in cfq.toml and restart cfq",
                    listed(&known)
                ),
            ));
        }
    }
    Ok(Some(format!("no running node lists {model}, so the task waits for one that serves it: see `cfq nodes`")))
}

/// Endpoints or commands, as `name` selects them, of the models that any node lists, alive or not, and of the models in
/// `defaults`.
fn known(nodes: &[NodeView], defaults: &AgentBindings, name: impl Fn(&ModelId) -> Option<String>) -> BTreeSet<String> {
    let listed = nodes.iter().flat_map(|node| &node.ledger.models).map(|state| &state.model);
    let configured = defaults.models();
    listed.chain(configured).filter_map(name).collect()
}

fn listed(names: &BTreeSet<String>) -> String {
    match names.is_empty() {
        true => "none".to_owned(),
        false => Vec::from_iter(names.iter().map(String::as_str)).join(", "),
    }
}

#[cfg(test)]
mod tests {
    use cfq_proto::task::AgentBinding;

    use super::*;
    use crate::testing;

    fn node(name: &str, alive: bool, model: &str) -> NodeView {
        testing::node_view(name, alive, Some(model))
    }

    fn agents(alpha: &str, beta: &str) -> AgentBindings {
        let binding = |model: &str| AgentBinding { model: model.parse().ok(), ..AgentBinding::default() };
        AgentBindings { alpha: binding(alpha), beta: binding(beta) }
    }

    #[test]
    fn only_an_unknown_endpoint_is_refused_and_only_while_a_node_is_alive() {
        let nodes = [node("a", true, "openai:box/m"), node("b", false, "openai:den/m")];
        let defaults = agents("openai:lab/m", "path:/m.gguf");
        let check = |alpha: &str, nodes: &[NodeView]| check_models(&agents(alpha, "openai:box/m"), nodes, &defaults);

        assert_eq!(check("openai:box/m", &nodes).unwrap(), Vec::<String>::new());
        for waits in ["openai:box/other", "openai:den/m", "openai:lab/m", "path:/other.gguf"] {
            let warnings = check(waits, &nodes).unwrap();
            assert!(warnings.len() == 1 && warnings[0].contains(waits), "{waits}: {warnings:?}");
        }
        let refused = format!("{:?}", check("openai:typo/m", &nodes).unwrap_err());
        for word in ["agents.alpha.model", "typo", "box, den, lab", "[endpoints.typo]"] {
            assert!(refused.contains(word), "{word} is not in {refused}");
        }
        for offline in [&nodes[1..], &[]] {
            let warnings = check("openai:typo/m", offline).unwrap();
            assert!(warnings.len() == 2 && warnings[0].contains("no node is running"), "{warnings:?}");
        }
    }
}
