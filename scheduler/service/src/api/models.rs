//! Models loaded and let go by hand: the node is asked, and what it says is the answer.

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
use super::submit::read;
use super::validate::body;

type Body = Result<Bytes, BytesRejection>;

pub async fn load(State(api): State<Api>, bytes: Body) -> Result<Json<ModelAnswer>, ApiError> {
    ask(&api, bytes, |model| NodeCommand::Load { model }).await
}

pub async fn unload(State(api): State<Api>, bytes: Body) -> Result<Json<ModelAnswer>, ApiError> {
    ask(&api, bytes, |model| NodeCommand::Unload { model }).await
}

async fn ask(
    api: &Api,
    bytes: Body,
    command: impl FnOnce(ModelId) -> NodeCommand,
) -> Result<Json<ModelAnswer>, ApiError> {
    let asked: ModelRequest = body(&read(bytes)?)?;
    let (node, boot) = meant(&asked, &api.store.node_views().await?)?;
    let session = api.link.get().ok_or_else(|| ApiError::busy("not connected to NATS; ask again in a moment"))?;
    let model = asked.model;
    let answer = session.request::<_, ModelReply>(&subject::node_command(&node), &command(model.clone())).await;
    match answer {
        Ok(reply) => Ok(Json(ModelAnswer { node, boot, model, reply })),
        Err(LinkError::Message { .. }) => Err(ApiError::conflict(format!(
            "{node} does not understand this: the cfq there is of another version; install the same on both"
        ))),
        Err(error) => {
            tracing::debug!(%node, %error, "no answer to a command");
            Err(ApiError::busy(format!("{node} does not answer; `cfq nodes` shows whether it is alive")))
        }
    }
}

/// The node that was named, or the only one that can be meant.
fn meant(asked: &ModelRequest, nodes: &[NodeView]) -> Result<(NodeId, BootId), ApiError> {
    if let Some(named) = &asked.node {
        let Some(node) = nodes.iter().find(|node| node.id == *named) else {
            let known: Vec<&str> = nodes.iter().map(|node| node.id.as_str()).collect();
            let known = if known.is_empty() { "none has joined".to_owned() } else { known.join(", ") };
            return Err(ApiError::invalid("node", format!("there is no node {named}; there are: {known}")));
        };
        return match node.alive {
            true => Ok((node.id.clone(), node.boot)),
            false => Err(ApiError::busy(format!("{named} is away; `cfq nodes` shows when it was last seen"))),
        };
    }
    let alive: Vec<&NodeView> = nodes.iter().filter(|node| node.alive).collect();
    let lists = |node: &&&NodeView| node.ledger.models.iter().any(|state| state.model == asked.model);
    let having: Vec<&&NodeView> = alive.iter().filter(lists).collect();
    match (having.as_slice(), alive.as_slice()) {
        ([one], _) => Ok((one.id.clone(), one.boot)),
        ([], [one]) => Ok((one.id.clone(), one.boot)),
        (_, []) => Err(ApiError::busy("no node is up")),
        (having, alive) => {
            let names = |nodes: Vec<&str>| nodes.join(", ");
            let message = if having.is_empty() {
                let alive = names(alive.iter().map(|node| node.id.as_str()).collect());
                format!("no node serves {} yet; say which one shall: {alive}", asked.model)
            } else {
                let having = names(having.iter().map(|node| node.id.as_str()).collect());
                format!("several nodes serve {}; say which one is meant: {having}", asked.model)
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
        let hello = testing::node_hello(BootId::fresh());
        let mut ledger = hello.ledger;
        match model {
            Some(model) => ledger.models[0].model = model.parse().unwrap(),
            None => ledger.models.clear(),
        }
        NodeView {
            id: NodeId::new(name).unwrap(),
            boot: hello.boot,
            version: hello.version,
            alive,
            devices: hello.devices,
            ledger,
            last_seen: 0.0,
            running: 0,
        }
    }

    #[test]
    fn a_node_is_named_only_where_several_can_be_meant() {
        let ask = |node: Option<&str>| ModelRequest {
            model: "path:/m.gguf".parse().unwrap(),
            node: node.map(|name| NodeId::new(name).unwrap()),
        };
        let (has, lacks) = (view("a", true, Some("path:/m.gguf")), view("b", true, None));
        let (also, away) = (view("c", true, Some("path:/m.gguf")), view("d", false, Some("path:/m.gguf")));
        let of = |node: Option<&str>, nodes: &[NodeView]| meant(&ask(node), nodes).map(|(id, _)| id.to_string());
        assert_eq!(of(None, &[has.clone(), lacks.clone(), away.clone()]).unwrap(), "a");
        assert_eq!(of(None, std::slice::from_ref(&lacks)).unwrap(), "b");
        assert_eq!(of(Some("b"), &[has.clone(), lacks.clone()]).unwrap(), "b");
        for (node, nodes) in [
            (None, vec![has.clone(), also]),
            (None, vec![lacks, view("e", true, None)]),
            (None, vec![away.clone()]),
            (Some("d"), vec![away]),
            (Some("x"), vec![has]),
        ] {
            assert!(of(node, &nodes).is_err(), "{node:?}");
        }
    }
}
