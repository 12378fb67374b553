//! `POST /models/load` and `/models/unload`: the command is sent to a node, and the node's reply is returned.

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use cfq_link::LinkError;
use cfq_proto::http::{ModelAnswer, ModelRequest, NodeView};
use cfq_proto::ids::{BootId, NodeId};
use cfq_proto::messages::{ModelReply, NodeCommand};
use cfq_proto::model::ModelId;
use cfq_proto::subject;

use super::Api;
use super::error::ApiError;
use super::submit::read_body;
use super::validate::parse_body;

type Body = Result<Bytes, BytesRejection>;

pub async fn load(State(api): State<Api>, bytes: Body) -> Result<Json<ModelAnswer>, ApiError> {
    send_command(&api, bytes, |model| NodeCommand::Load { model }).await
}

pub async fn unload(State(api): State<Api>, bytes: Body) -> Result<Json<ModelAnswer>, ApiError> {
    send_command(&api, bytes, |model| NodeCommand::Unload { model }).await
}

async fn send_command(
    api: &Api,
    bytes: Body,
    command: impl FnOnce(ModelId) -> NodeCommand,
) -> Result<Json<ModelAnswer>, ApiError> {
    let request: ModelRequest = parse_body(&read_body(api, bytes)?)?;
    let (node, boot) = select_node(&request, &api.store.node_views().await?)?;
    let session = api.link.get().ok_or_else(|| ApiError::busy("not connected to NATS: retry in a moment"))?;
    let model = request.model;
    let answer = session.request::<_, ModelReply>(&subject::node_command(&node), &command(model.clone())).await;
    match answer {
        Ok(reply) => Ok(Json(ModelAnswer { node, boot, model, reply })),
        Err(LinkError::Message { .. }) => Err(ApiError::conflict(format!(
            "node {node} cannot read the command, because its cfq is of another version: install the scheduler's \
             version there"
        ))),
        Err(error) => {
            tracing::debug!(%node, %error, "node did not reply to a command");
            Err(ApiError::busy(format!("node {node} does not answer: `cfq nodes` shows whether it is alive")))
        }
    }
}

/// Selects the node for the command: the node that the request names; without a name, the only live node that serves
/// the model; if no node serves it, the only live node.
fn select_node(request: &ModelRequest, nodes: &[NodeView]) -> Result<(NodeId, BootId), ApiError> {
    if let Some(named) = &request.node {
        let Some(node) = nodes.iter().find(|node| node.id == *named) else {
            let known: Vec<&str> = nodes.iter().map(|node| node.id.as_str()).collect();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            return Err(ApiError::invalid("node", format!("node: there is no node {named}; known nodes: {known}")));
        };
        return match node.alive {
            true => Ok((node.id.clone(), node.boot)),
            false => Err(ApiError::busy(format!("node {named} is not alive: `cfq nodes` shows when it was last seen"))),
        };
    }
    let alive: Vec<&NodeView> = nodes.iter().filter(|node| node.alive).collect();
    let serves = |node: &&&NodeView| node.ledger.models.iter().any(|state| state.model == request.model);
    let serving: Vec<&&NodeView> = alive.iter().filter(serves).collect();
    match (serving.as_slice(), alive.as_slice()) {
        ([one], _) => Ok((one.id.clone(), one.boot)),
        ([], [one]) => Ok((one.id.clone(), one.boot)),
        (_, []) => Err(ApiError::busy("no node is alive: start one, or check `cfq nodes`")),
        (serving, alive) => {
            let names = |nodes: Vec<&str>| nodes.join(", ");
            let message = if serving.is_empty() {
                let alive = names(alive.iter().map(|node| node.id.as_str()).collect());
                format!("node: no node serves {} yet; name one of: {alive}", request.model)
            } else {
                let serving = names(serving.iter().map(|node| node.id.as_str()).collect());
                format!("node: several nodes serve {}; name one of: {serving}", request.model)
            };
            Err(ApiError::invalid("node", message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    fn view(name: &str, alive: bool, model: Option<&str>) -> NodeView {
        testing::node_view(name, alive, model)
    }

    #[test]
    fn node_must_be_named_only_if_ambiguous() {
        let request = |node: Option<&str>| ModelRequest {
            model: "path:/m.gguf".parse().unwrap(),
            node: node.map(|name| NodeId::new(name).unwrap()),
        };
        let (has, lacks) = (view("a", true, Some("path:/m.gguf")), view("b", true, None));
        let (also, away) = (view("c", true, Some("path:/m.gguf")), view("d", false, Some("path:/m.gguf")));
        let selected =
            |node: Option<&str>, nodes: &[NodeView]| select_node(&request(node), nodes).map(|(id, _)| id.to_string());
        assert_eq!(selected(None, &[has.clone(), lacks.clone(), away.clone()]).unwrap(), "a");
        assert_eq!(selected(None, std::slice::from_ref(&lacks)).unwrap(), "b");
        assert_eq!(selected(Some("b"), &[has.clone(), lacks.clone()]).unwrap(), "b");
        for (node, nodes) in [
            (None, vec![has.clone(), also]),
            (None, vec![lacks, view("e", true, None)]),
            (None, vec![away.clone()]),
            (Some("d"), vec![away]),
            (Some("x"), vec![has]),
        ] {
            assert!(selected(node, &nodes).is_err(), "{node:?}");
        }
    }
}
