//! `GET /prs`: internal pull requests, which exist only in cfq and not on a forge.

use axum::Json;
use axum::extract::{Path, State};
use cfq_proto::http::PrView;

use super::Api;
use super::error::ApiError;

pub async fn list(State(api): State<Api>) -> Result<Json<Vec<PrView>>, ApiError> {
    Ok(Json(api.store.prs(None).await?))
}

pub async fn show(State(api): State<Api>, Path(number): Path<String>) -> Result<Json<PrView>, ApiError> {
    let wanted: i64 = number.parse().map_err(|_| {
        ApiError::invalid("number", format!("number: {number:?} is not a pull request number; `cfq pr ls` lists them"))
    })?;
    let missing = || ApiError::not_found(format!("there is no pull request {wanted}: `cfq pr ls` lists them"));
    api.store.prs(Some(wanted)).await?.pop().map(Json).ok_or_else(missing)
}
