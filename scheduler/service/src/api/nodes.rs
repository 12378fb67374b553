//! `GET /nodes`: all registered nodes, alive or not.

use axum::Json;
use axum::extract::State;
use cfq_proto::http::NodeView;

use super::Api;
use super::error::ApiError;

pub async fn list(State(api): State<Api>) -> Result<Json<Vec<NodeView>>, ApiError> {
    Ok(Json(api.store.node_views().await?))
}
