//! The models that clients can name: those of the live nodes, and `alpha` and `beta` for the models of the agents in the
//! configuration.

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use cfq_proto::http::NodeView;
use cfq_proto::model::ModelId;
use cfq_proto::node::{ModelState, Residency};
use cfq_proto::task::{Agent, AgentBindings};
use serde_json::{Value, json};

use super::error::OpenAiError;
use crate::api::Api;

/// Maximum number of models that an error names.
const MAX_NAMED_MODELS: usize = 10;

/// `GET /v1/models`.
pub async fn list(State(api): State<Api>) -> Result<Json<Value>, OpenAiError> {
    let served = Served::read(&api).await?;
    let data: Vec<Value> = served.names().map(|(name, model)| served.entry(&name, model)).collect();
    Ok(Json(json!({ "object": "list", "data": data })))
}

/// `GET /v1/models/{model}`.
pub async fn show(
    State(api): State<Api>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, OpenAiError> {
    let Path(name) = name.map_err(|_| OpenAiError::invalid("model", "model: the path is not valid UTF-8"))?;
    let served = Served::read(&api).await?;
    let model = served.find(&name)?;
    Ok(Json(served.entry(&name, &model)))
}

/// The model that a request names.
pub async fn resolve(api: &Api, name: &str) -> Result<ModelId, OpenAiError> {
    let served = Served::read(api).await?;
    let model = served.find(name)?;
    match served.models.get(&model).and_then(|states| unusable_everywhere(states)) {
        Some(reason) => Err(OpenAiError::unavailable(format!("no node can serve {name}: {reason}"))),
        None => Ok(model),
    }
}

/// The models of the live nodes, and the agents' models.
struct Served {
    has_nodes: bool,
    models: BTreeMap<ModelId, Vec<ModelState>>,
    agents: AgentBindings,
}

impl Served {
    async fn read(api: &Api) -> Result<Self, OpenAiError> {
        let nodes = api.nodes.recent(&api.store).await?;
        Ok(Self::of(&nodes, api.agents.current()))
    }

    fn of(nodes: &[NodeView], agents: AgentBindings) -> Self {
        let mut models: BTreeMap<ModelId, Vec<ModelState>> = BTreeMap::new();
        for state in nodes.iter().filter(|node| node.alive).flat_map(|node| &node.ledger.models) {
            models.entry(state.model.clone()).or_default().push(state.clone());
        }
        Self { has_nodes: nodes.iter().any(|node| node.alive), models, agents }
    }

    /// The model that has this name.
    fn find(&self, name: &str) -> Result<ModelId, OpenAiError> {
        let model = match name.parse::<Agent>() {
            Ok(agent) => self.agents.of(agent).model.clone(),
            Err(_) => name.parse::<ModelId>().ok(),
        };
        if !self.has_nodes {
            return Err(OpenAiError::unavailable("no node is running, so no model can be called: see `cfq nodes`"));
        }
        match model.filter(|model| self.models.contains_key(model)) {
            Some(model) => Ok(model),
            None => Err(self.unknown(name)),
        }
    }

    fn unknown(&self, name: &str) -> OpenAiError {
        let names: Vec<String> = self.names().map(|(name, _)| name).take(MAX_NAMED_MODELS).collect();
        let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        let name = OpenAiError::quoted(name);
        let message = format!("no running node serves the model {name}; models: {names}. GET /v1/models lists all");
        let mut error = OpenAiError::new(StatusCode::NOT_FOUND, message).with_code("model_not_found");
        error.set_param("model");
        error
    }

    /// All names, each with its model.
    fn names(&self) -> impl Iterator<Item = (String, &ModelId)> {
        let agents = [Agent::Alpha, Agent::Beta].into_iter().filter_map(|agent| {
            let model = self.agents.of(agent).model.as_ref().filter(|model| self.models.contains_key(*model))?;
            Some((agent.to_string(), model))
        });
        agents.chain(self.models.keys().map(|model| (model.to_string(), model)))
    }

    /// The longest context of the nodes' models, in tokens; `None` if it is not known.
    fn context_tokens(&self, model: &ModelId) -> Option<u32> {
        if !model.is_file() {
            // Nodes assume a context for models behind servers and programs.
            return None;
        }
        let states = self.models.get(model).into_iter().flatten();
        states.map(|state| state.context_tokens).max().filter(|tokens| *tokens > 0)
    }

    fn entry(&self, name: &str, model: &ModelId) -> Value {
        let states = self.models.get(model).map(Vec::as_slice).unwrap_or_default();
        let context = self.context_tokens(model);
        json!({
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "cfq",
            "root": model,
            "max_model_len": context,
            "loaded": states.iter().any(|state| state.residency == Residency::Resident),
        })
    }
}

/// Why no node can serve a model; `None` if one can, or may be able to.
fn unusable_everywhere(states: &[ModelState]) -> Option<String> {
    let mut reasons = Vec::new();
    for state in states {
        match &state.residency {
            Residency::Unusable { reason } => reasons.push(reason.as_str()),
            Residency::Resident | Residency::Available | Residency::Loading => return None,
        }
    }
    reasons.dedup();
    Some(reasons.join("; "))
}

#[cfg(test)]
mod tests {
    use cfq_proto::task::AgentBinding;

    use super::*;
    use crate::testing::node_view;

    #[test]
    fn model_is_named_by_its_id_or_by_the_agent_that_uses_it() {
        let binding = |model: &str| AgentBinding { model: model.parse().ok(), ..AgentBinding::default() };
        let agents = AgentBindings { alpha: binding("openai:box/m"), beta: binding("openai:box/gone") };
        let nodes = [node_view("a", true, Some("openai:box/m")), node_view("b", false, Some("openai:box/gone"))];
        let served = Served::of(&nodes, agents.clone());
        let model: ModelId = "openai:box/m".parse().unwrap();
        assert_eq!(served.find("openai:box/m").unwrap(), model);
        assert_eq!(served.find("alpha").unwrap(), model);
        assert_eq!(served.names().map(|(name, _)| name).collect::<Vec<_>>(), ["alpha", "openai:box/m"]);
        for unknown in ["beta", "openai:box/gone", "gpt-4o", ""] {
            let error = served.find(unknown).unwrap_err().to_json()["error"].clone();
            assert_eq!((&error["code"], &error["param"]), (&json!("model_not_found"), &json!("model")), "{unknown}");
            assert!(error["message"].as_str().unwrap().contains("models: alpha, openai:box/m"), "{error}");
        }
        let offline = Served::of(&nodes[1..], agents).find("alpha").unwrap_err();
        assert_eq!(offline.to_json()["error"]["type"], "server_error");
    }
}
