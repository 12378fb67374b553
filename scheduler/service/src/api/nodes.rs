//! `/nodes`: all registered nodes, alive or not; `/nodes/{name}/cordon`, `/nodes/{name}/uncordon`: whether a node gets new
//! work.

use axum::Json;
use axum::extract::{Path, State};
use cfq_proto::http::{NodeList, NodeView};
use cfq_proto::ids::NodeId;

use super::Api;
use super::error::ApiError;

pub async fn list(State(api): State<Api>) -> Result<Json<NodeList>, ApiError> {
    Ok(Json(NodeList { nodes: api.store.node_views().await? }))
}

pub async fn cordon(State(api): State<Api>, Path(name): Path<String>) -> Result<Json<NodeView>, ApiError> {
    set_cordon(&api, &name, true).await
}

pub async fn uncordon(State(api): State<Api>, Path(name): Path<String>) -> Result<Json<NodeView>, ApiError> {
    set_cordon(&api, &name, false).await
}

async fn set_cordon(api: &Api, name: &str, cordoned: bool) -> Result<Json<NodeView>, ApiError> {
    let unknown = || ApiError::not_found(format!("there is no node {name:?}; list them with `cfq nodes`"));
    let node = NodeId::new(name).map_err(|_| unknown())?;
    let hints = api.store.set_cordon(&node, cordoned).await?.ok_or_else(unknown)?;
    api.link.send_hints(hints).await;
    tracing::info!(%node, cordoned, "changed whether a node gets new work");
    let view = api.store.node_views().await?.into_iter().find(|view| view.id == node).ok_or_else(unknown)?;
    if view.cordoned && !cordoned {
        let message =
            format!("the access of {node} was revoked: it gets work again when it has joined with a new token");
        return Err(ApiError::conflict(message));
    }
    Ok(Json(view))
}
