//! `/tokens`: creating, listing, replacing and revoking named API tokens.

use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{Extension, Path, State};
use axum::http::StatusCode;
use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use cfq_proto::http::{ApiTokenLimits, ApiTokenList, ApiTokenReply, ApiTokenRequest, ApiTokenRevoked, ApiTokenRole};
use cfq_proto::ids::ApiTokenName;

use super::Api;
use super::access::{Access, TOKEN_PREFIX, hash_of, random_secret};
use super::error::ApiError;
use super::submit::read_body;
use super::validate::parse_body;
use crate::store::{MAX_TOKENS, TokenAdded, TokenReplaced};

/// Longest validity of a token that expires, in seconds: ten years.
const MAX_TTL_SECONDS: u32 = 10 * 365 * 24 * 3600;
/// Maximum of a limit.
const MAX_LIMIT: u32 = 1_000_000;
/// Maximum number of repositories that a token names.
const MAX_REPOSITORIES: usize = 100;
/// Maximum length of a repository's path, in bytes.
const MAX_PATH_BYTES: usize = 4096;

pub async fn create(
    State(api): State<Api>,
    Extension(access): Extension<Access>,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<(StatusCode, Json<ApiTokenReply>), ApiError> {
    let request: ApiTokenRequest = parse_body(&read_body(&api, bytes)?)?;
    if request.ttl_seconds.is_some_and(|ttl| !(1..=MAX_TTL_SECONDS).contains(&ttl)) {
        let message = format!("ttl_seconds: must be between 1 and {MAX_TTL_SECONDS} (ten years)");
        return Err(ApiError::invalid("ttl_seconds", message));
    }
    check_expiry(&access, request.ttl_seconds)?;
    check_limits(request.role, &request.limits)?;
    let token = new_token()?;
    match api.store.add_token(hash_of(&token), &request, &access.actor()).await? {
        TokenAdded::Done(view) => {
            api.guard.tokens().on_added();
            tracing::info!(token = %view.name, role = %view.role, by = access.actor(), "created an API token");
            Ok((StatusCode::CREATED, Json(ApiTokenReply { token, view })))
        }
        TokenAdded::NameTaken => {
            let name = &request.name;
            let mut error = ApiError::conflict(format!(
                "name: there is a token {name} already: choose another name, replace the token with `cfq token rotate \
                 {name}`, or revoke it with `cfq token rm {name}`"
            ));
            error.set_field("name");
            Err(error)
        }
        TokenAdded::TooMany => Err(ApiError::conflict(format!(
            "there are {MAX_TOKENS} tokens, which is the limit: revoke some with `cfq token rm NAME`"
        ))),
    }
}

fn new_token() -> Result<String, ApiError> {
    Ok(format!("{TOKEN_PREFIX}{}", BASE64_URL_SAFE_NO_PAD.encode(random_secret()?)))
}

/// Refuses a new token that would expire later than that of the request.
pub(super) fn check_expiry(access: &Access, ttl_seconds: Option<u32>) -> Result<(), ApiError> {
    let Some(valid_for) = access.valid_for() else { return Ok(()) };
    if ttl_seconds.is_some_and(|ttl| Duration::from_secs(u64::from(ttl)) <= valid_for) {
        return Ok(());
    }
    let message = format!(
        "ttl_seconds: at most {}, because the token of the request is not valid for longer",
        valid_for.as_secs()
    );
    Err(ApiError::invalid("ttl_seconds", message))
}

fn check_limits(role: ApiTokenRole, limits: &ApiTokenLimits) -> Result<(), ApiError> {
    let ApiTokenLimits { open_tasks, running_tasks, calls, repositories } = limits;
    let numbers = [("open_tasks", open_tasks), ("running_tasks", running_tasks), ("calls", calls)];
    if role != ApiTokenRole::Submit && (!repositories.is_empty() || numbers.iter().any(|(_, limit)| limit.is_some())) {
        let message = "limits: only tokens of the role submit have limits: leave them out, or choose that role";
        return Err(ApiError::invalid("limits", message));
    }
    for (name, limit) in numbers {
        if limit.is_some_and(|limit| !(1..=MAX_LIMIT).contains(&limit)) {
            let message = format!("limits.{name}: must be between 1 and {MAX_LIMIT}");
            return Err(ApiError::invalid(format!("limits.{name}"), message));
        }
    }
    let is_path = |path: &String| path.starts_with('/') && path.len() <= MAX_PATH_BYTES && !path.contains('\0');
    if repositories.len() > MAX_REPOSITORIES || !repositories.iter().all(is_path) {
        let message = format!("limits.repositories: must be at most {MAX_REPOSITORIES} absolute paths");
        return Err(ApiError::invalid("limits.repositories", message));
    }
    Ok(())
}

pub async fn list(State(api): State<Api>) -> Result<Json<ApiTokenList>, ApiError> {
    Ok(Json(ApiTokenList { tokens: api.store.tokens().await? }))
}

pub async fn rotate(
    State(api): State<Api>,
    Extension(access): Extension<Access>,
    Path(name): Path<String>,
) -> Result<Json<ApiTokenReply>, ApiError> {
    let name = ApiTokenName::new(name.clone()).map_err(|_| unknown(&name))?;
    let token = new_token()?;
    let replaced = api.store.replace_token(&name, hash_of(&token), access.valid_for()).await?;
    let view = match replaced {
        TokenReplaced::Done(view) => view,
        TokenReplaced::ExpiresLater => {
            let message = format!("{name} expires later than the token of the request, which may not replace it");
            return Err(ApiError::forbidden(message));
        }
        TokenReplaced::Unknown => return Err(unknown(name.as_str())),
    };
    api.guard.tokens().on_revoked(&name);
    tracing::info!(token = %name, by = access.actor(), "replaced an API token");
    Ok(Json(ApiTokenReply { token, view }))
}

pub async fn revoke(
    State(api): State<Api>,
    Extension(access): Extension<Access>,
    Path(name): Path<String>,
) -> Result<Json<ApiTokenRevoked>, ApiError> {
    let name = ApiTokenName::new(name.clone()).map_err(|_| unknown(&name))?;
    if !api.store.revoke_token(&name).await? {
        return Err(unknown(name.as_str()));
    }
    api.guard.tokens().on_revoked(&name);
    tracing::info!(token = %name, by = access.actor(), "revoked an API token");
    Ok(Json(ApiTokenRevoked { name }))
}

fn unknown(name: &str) -> ApiError {
    ApiError::not_found(format!("there is no token {name:?}; list them with `cfq token ls`"))
}
