//! `GET /prs`: internal pull requests, which exist only in cfq and not on a forge.

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use cfq_proto::http::{PrFilter, PrList, PrView};
use cfq_proto::label::Label;
use cfq_proto::pr::PrState;
use schemars::JsonSchema;
use serde::Deserialize;

use super::Api;
use super::error::ApiError;
use super::validate::check_label_count;

/// Number of pull requests in a page if the request names none.
const DEFAULT_PAGE_PRS: u32 = 50;
/// Maximum number of pull requests in a page.
const MAX_PAGE_PRS: u32 = 1_000;

/// Number up to which the pull requests after a page are counted.
const MAX_COUNTED_PRS: i64 = 100;
/// The last second of the year 9999, in seconds since 1970.
const MAX_SECONDS: i64 = 253_402_300_799;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PrsQuery {
    /// States, separated by commas.
    state: Option<String>,
    /// Labels that the task must have, separated by commas.
    label: Option<String>,
    /// Absolute path of a repository.
    repo: Option<String>,
    /// Time before which no listed pull request was opened, in seconds since 1970.
    since: Option<i64>,
    /// `newest` (default) or `oldest`.
    sort: Option<String>,
    /// `next` of the page before.
    after: Option<String>,
    /// Number of pull requests, at most 1000; 50 by default.
    limit: Option<u32>,
}

pub async fn list(
    State(api): State<Api>,
    query: Result<Query<PrsQuery>, QueryRejection>,
) -> Result<Json<PrList>, ApiError> {
    let Query(query) = query.map_err(|e| ApiError::malformed(format!("cannot read the query: {}", e.body_text())))?;
    let states = query.state.iter().flat_map(|text| text.split(',')).map(str::parse::<PrState>);
    let states: Vec<PrState> =
        states.collect::<Result<_, _>>().map_err(|e| ApiError::invalid("state", format!("state: {e}")))?;
    if query.since.is_some_and(|since| !(0..=MAX_SECONDS).contains(&since)) {
        return Err(ApiError::invalid("since", "since: must be a time in seconds since 1970"));
    }
    let after = query.after.as_deref().map(|text| parse_number("after", text)).transpose()?;
    let limit = query.limit.unwrap_or(DEFAULT_PAGE_PRS).clamp(1, MAX_PAGE_PRS);
    let labels = query.label.iter().flat_map(|text| text.split(',')).map(str::parse::<Label>);
    let labels: Vec<Label> =
        labels.collect::<Result<_, _>>().map_err(|e| ApiError::invalid("label", format!("label: {e}")))?;
    check_label_count(&labels)?;
    let oldest_first = match query.sort.as_deref() {
        None | Some("newest") => false,
        Some("oldest") => true,
        Some(other) => {
            return Err(ApiError::invalid("sort", format!("sort: {other:?} must be newest or oldest")));
        }
    };
    let filter = PrFilter { states, labels, oldest_first, repo: query.repo, since: query.since, after, limit };
    let prs = api.store.prs(&filter, i64::from(limit)).await?;
    let last = prs.last().map(|pr| pr.number).filter(|_| prs.len() == limit as usize);
    let more = match last {
        Some(_) => api.store.find_prs(&PrFilter { after: last, ..filter }, MAX_COUNTED_PRS).await?.len(),
        None => 0,
    };
    Ok(Json(PrList { prs, next: last.filter(|_| more > 0), more: more as u32 }))
}

pub async fn show(State(api): State<Api>, Path(number): Path<String>) -> Result<Json<PrView>, ApiError> {
    let wanted = parse_number("number", &number)?;
    let missing = || ApiError::not_found(format!("there is no pull request {wanted}: `cfq pr ls` lists them"));
    api.store.pr(wanted).await?.map(Json).ok_or_else(missing)
}

fn parse_number(field: &str, text: &str) -> Result<i64, ApiError> {
    let not_a_number =
        |_| ApiError::invalid(field, format!("{field}: {text:?} is not a pull request number; `cfq pr ls` lists them"));
    text.parse().map_err(not_a_number).and_then(|number| match number {
        0.. => Ok(number),
        _ => Err(ApiError::invalid(field, format!("{field}: {number} is not a pull request number"))),
    })
}
