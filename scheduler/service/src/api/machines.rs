//! `/join-tokens`, `/join` and `/machines`: tokens with which machines join, joining, and revoking the access of a
//! machine. `POST /join` needs no API token, because a machine has none yet; the join token is checked instead.

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{Extension, Path, State};
use axum::http::StatusCode;
use cfq_proto::http::{
    JoinReply, JoinRequest, JoinTokenList, JoinTokenRemoval, JoinTokenReply, JoinTokenRequest, JoinTokensRemoved,
    MachineList, MachineView,
};
use cfq_proto::ids::NodeId;
use cfq_proto::join_token::{Fingerprint, JoinToken, JoinTokenError};
use cfq_proto::model::ModelId;
use cfq_proto::timing::Timing;
use nkeys::KeyPair;
use uuid::Uuid;

use super::Api;
use super::access::{Access, random_secret};
use super::error::ApiError;
use super::submit::read_body;
use super::tokens::check_expiry;
use super::validate::parse_body;
use crate::store::{JoinRefusal, JoiningMachine};
use crate::version;

/// Path of the request that needs no API token.
pub const JOIN_PATH: &str = "/api/v1/join";
/// Longest validity of a join token, in seconds: a week.
const MAX_TTL_SECONDS: u32 = 7 * 24 * 3600;
/// Maximum length of a machine's version, in bytes.
const MAX_VERSION_BYTES: usize = 64;
/// Maximum number of requests to join that are processed at the same time. Anybody in the network can send them, and each
/// needs a connection to the database.
pub const MAX_CONCURRENT_JOINS: usize = 4;
/// Maximum size of the body of `POST /join`, in bytes.
pub const MAX_JOIN_BYTES: usize = 4096;

/// The reply's values for a machine that joins, and the URLs at which other machines reach this server.
#[derive(Debug, Clone)]
pub struct JoinInfo {
    pub authority: Fingerprint,
    pub urls: Vec<String>,
    pub nats_port: u16,
    pub models: Vec<ModelId>,
    pub timing: Timing,
}

fn join_info(api: &Api) -> Result<Arc<JoinInfo>, ApiError> {
    api.join_info.clone().ok_or_else(|| {
        ApiError::conflict(
            "this server is reachable on its own machine only: to let a machine join, stop it with `cfq down` and start it \
             with `cfq up --lan`; a token for a client needs a role, for example --role submit",
        )
    })
}

pub async fn create_token(
    State(api): State<Api>,
    Extension(access): Extension<Access>,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<(StatusCode, Json<JoinTokenReply>), ApiError> {
    let info = join_info(&api)?;
    let JoinTokenRequest { name, ttl_seconds } = parse_body(&read_body(&api, bytes)?)?;
    if !(1..=MAX_TTL_SECONDS).contains(&ttl_seconds) {
        let message = format!("ttl_seconds: must be between 1 and {MAX_TTL_SECONDS} (a week)");
        return Err(ApiError::invalid("ttl_seconds", message));
    }
    check_expiry(&access, Some(ttl_seconds))?;
    if let Some(name) = &name
        && api.store.is_machine_name_taken(name).await?
    {
        let message = format!(
            "name: {name} is the name of a machine or of the server: choose another, or revoke the machine first; if it \
             is to join again, leave out the name"
        );
        return Err(ApiError::invalid("name", message));
    }
    let token = JoinToken::new(Uuid::now_v7(), random_secret()?, info.authority);
    let added = api.store.add_join_token(token.id, token.secret_hash(), name.as_ref(), ttl_seconds).await?;
    let Some(expires_at) = added else {
        let message = "too many unused join tokens: revoke some with `cfq token rm`, or wait until some have expired";
        return Err(ApiError::conflict(message));
    };
    let reply = JoinTokenReply { token: token.to_string(), name, expires_at, urls: info.urls.clone() };
    Ok((StatusCode::CREATED, Json(reply)))
}

pub async fn join(State(api): State<Api>, bytes: Result<Bytes, BytesRejection>) -> Result<Json<JoinReply>, ApiError> {
    let info = join_info(&api)?;
    let bytes = bytes.map_err(|_| ApiError::too_large(format!("the request exceeds {MAX_JOIN_BYTES} bytes")))?;
    let request: JoinRequest = parse_body(&bytes)?;
    let token: JoinToken =
        request.token.parse().map_err(|error: JoinTokenError| ApiError::invalid("token", error.to_string()))?;
    if !is_public_user_key(&request.nats_key) {
        return Err(ApiError::invalid("nats_key", "nats_key: must be the public nkey of a user"));
    }
    if request.version.len() > MAX_VERSION_BYTES {
        return Err(ApiError::invalid("version", format!("version: at most {MAX_VERSION_BYTES} bytes")));
    }
    if let Some(reason) = version::refusal(&request.version) {
        return Err(ApiError::invalid("version", format!("this machine cannot join: {reason}")));
    }
    let Ok(_permit) = api.joins.try_acquire() else {
        return Err(ApiError::busy("too many machines join at the same time: try again in a moment"));
    };
    let machine = JoiningMachine {
        token_id: token.id,
        secret_hash: token.secret_hash(),
        name: request.name.as_ref(),
        fallback_name: request.fallback_name.as_ref(),
        nats_key: &request.nats_key,
        version: &request.version,
    };
    match api.store.join_machine(machine).await? {
        Ok(name) => {
            tracing::info!(machine = %name, token = %token.id, version = request.version, "a machine joined");
            let JoinInfo { nats_port, models, timing, .. } = (*info).clone();
            Ok(Json(JoinReply { name, nats_port, models, timing }))
        }
        Err(JoinRefusal::UnknownToken) => {
            // Anybody in the network can cause this message.
            tracing::debug!(token = %token.id, "a machine wants to join with an unknown token");
            Err(refused(JoinRefusal::UnknownToken))
        }
        Err(refusal) => {
            tracing::warn!(token = %token.id, ?refusal, "refused a machine that wants to join");
            Err(refused(refusal))
        }
    }
}

/// Whether the text is the public nkey of a user. NATS does not start with anything else in its configuration.
fn is_public_user_key(key: &str) -> bool {
    key.starts_with('U') && KeyPair::from_public_key(key).is_ok_and(|pair| pair.public_key() == key)
}

fn refused(refusal: JoinRefusal) -> ApiError {
    const NEW_TOKEN: &str = "create a new one on the server with `cfq token create`";
    let forbidden = |reason: &str| ApiError::forbidden(format!("{reason}: {NEW_TOKEN}"));
    match refusal {
        JoinRefusal::UnknownToken => forbidden("this server does not know the join token"),
        JoinRefusal::Expired => forbidden("the join token has expired"),
        JoinRefusal::Used => forbidden("the join token was already used, and each works once"),
        JoinRefusal::OtherName(name) => {
            let message = format!("name: the join token is for a machine named {name}: leave out --name");
            ApiError::invalid("name", message)
        }
        JoinRefusal::NoName => ApiError::invalid("name", "name: choose a name for this machine with --name"),
        JoinRefusal::NameTaken(name) => {
            let mut error = ApiError::conflict(format!(
                "the name {name} is taken: choose another with --name, or revoke that machine on the server with \
                 `cfq machines revoke {name}` if it is gone"
            ));
            error.set_field("name");
            error
        }
        JoinRefusal::JoinedAs(name) => {
            let message = format!(
                "name: this machine has joined as {name} already, and `cfq join` without arguments starts it; to rename it, \
                 revoke it on the server with `cfq machines revoke {name}` first"
            );
            ApiError::invalid("name", message)
        }
        JoinRefusal::KeyRevoked => {
            ApiError::invalid("nats_key", "nats_key: the access of this key was revoked: create another key")
        }
        JoinRefusal::NameOfServer(name) => {
            let message = format!("name: {name} is a node of the server itself: choose another name with --name");
            ApiError::invalid("name", message)
        }
        JoinRefusal::TooManyMachines => ApiError::conflict(
            "too many machines have joined: revoke one that is not needed on the server with `cfq machines revoke`",
        ),
    }
}

pub async fn tokens(State(api): State<Api>) -> Result<Json<JoinTokenList>, ApiError> {
    Ok(Json(JoinTokenList { tokens: api.store.join_tokens().await? }))
}

pub async fn remove_tokens(
    State(api): State<Api>,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<Json<JoinTokensRemoved>, ApiError> {
    let JoinTokenRemoval { ids } = parse_body(&read_body(&api, bytes)?)?;
    let removed = api.store.remove_join_tokens(ids.as_deref()).await?;
    tracing::info!(removed, "revoked join tokens");
    Ok(Json(JoinTokensRemoved { removed }))
}

pub async fn list(State(api): State<Api>) -> Result<Json<MachineList>, ApiError> {
    Ok(Json(MachineList { machines: api.store.machines().await? }))
}

pub async fn revoke(State(api): State<Api>, Path(name): Path<String>) -> Result<Json<MachineView>, ApiError> {
    let unknown = || ApiError::not_found(format!("no machine {name:?} has joined; list them with `cfq machines ls`"));
    let machine = NodeId::new(name.clone()).map_err(|_| unknown())?;
    let hints = api.store.revoke_machine(&machine).await?.ok_or_else(unknown)?;
    api.link.send_hints(hints).await;
    tracing::info!(%machine, "revoked the access of a machine");
    api.store.machines().await?.into_iter().find(|view| view.name == machine).map(Json).ok_or_else(unknown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_public_user_key_is_accepted() {
        let key = "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4";
        assert!(is_public_user_key(key));
        for wrong in ["", "U", &key[1..], &key.replacen('U', "S", 1), &format!("{}\"", &key[..55]), &key.to_lowercase()]
        {
            assert!(!is_public_user_key(wrong), "{wrong}");
        }
    }
}
