//! The tokens with which clients may use the API. The owner's token, in a file of the data folder, allows everything. Named
//! tokens are in the database; each has a role, may have limits, and can be revoked.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use cfq_proto::http::{ApiTokenLimits, ApiTokenRole};
use cfq_proto::ids::{ApiTokenId, ApiTokenName, TaskId};
use sha2::{Digest, Sha256};
use tokio::sync::Mutex as AsyncMutex;

use super::error::ApiError;
use super::error_form;
use super::token::{TokenEpoch, TokenFile};
use crate::store::{Store, StoreError, StoredToken, TokenHash, limited};

/// Beginning of every named token, by which people and secret scanners recognize it.
pub const TOKEN_PREFIX: &str = "cfqa_";
/// Age after which the known tokens are read again. A token that was revoked through another scheduler is accepted for
/// this long.
const MAX_AGE: Duration = Duration::from_secs(1);
/// Minimum time between the starts of two reads.
const MIN_READ_INTERVAL: Duration = Duration::from_millis(200);
/// Maximum time of a read. After one that failed, none is tried for `MAX_AGE`.
const READ_TIMEOUT: Duration = Duration::from_secs(1);
/// Minimum time between two records of a token's use.
const USE_RECORD_INTERVAL: Duration = Duration::from_secs(60);
/// Author that is recorded when a holder of the token in the data folder changes a task.
const OWNER_ACTOR: &str = "a client";

/// The token of a request that was valid when the request arrived.
#[derive(Debug, Clone)]
pub enum Access {
    /// The token in the data folder.
    Owner(TokenEpoch),
    /// A named token.
    Named(Arc<NamedToken>),
}

/// A named token.
#[derive(Debug)]
pub struct NamedToken {
    id: ApiTokenId,
    hash: TokenHash,
    name: ApiTokenName,
    role: ApiTokenRole,
    limits: ApiTokenLimits,
    /// When it expires, if it does.
    expires: Option<Instant>,
}

impl Access {
    /// What the token allows.
    pub fn role(&self) -> ApiTokenRole {
        match self {
            Self::Owner(_) => ApiTokenRole::Admin,
            Self::Named(token) => token.role,
        }
    }

    /// Id of the token; tasks keep it.
    pub fn token_id(&self) -> ApiTokenId {
        match self {
            Self::Owner(_) => ApiTokenId::OWNER,
            Self::Named(token) => token.id,
        }
    }

    /// The author of changes that is recorded and shown to users.
    pub fn actor(&self) -> String {
        match self {
            Self::Owner(_) => OWNER_ACTOR.to_owned(),
            Self::Named(token) => format!("the client {}", token.name),
        }
    }

    /// The author of a change, with the reason that the request gives.
    pub fn author(&self, reason: &str) -> String {
        if reason.is_empty() { self.actor() } else { format!("{}: {reason}", self.actor()) }
    }

    /// The limits of the token, with its name; `None` if it has none of its own.
    pub fn limits(&self) -> Option<(&ApiTokenName, &ApiTokenLimits)> {
        match self {
            Self::Owner(_) => None,
            Self::Named(token) => Some((&token.name, &token.limits)),
        }
    }

    /// Time for which the token is still valid; `None`: until it is revoked.
    pub fn valid_for(&self) -> Option<Duration> {
        match self {
            Self::Owner(_) => None,
            Self::Named(token) => token.expires.map(|expires| expires.saturating_duration_since(Instant::now())),
        }
    }

    /// Whether the token may change only the tasks that were submitted with it.
    pub fn is_limited_to_own_tasks(&self) -> bool {
        self.role() < ApiTokenRole::Admin
    }

    /// Whether the token allows changes of the task.
    pub async fn may_change(&self, store: &Store, task: TaskId) -> Result<bool, StoreError> {
        Ok(!self.is_limited_to_own_tasks() || !store.tasks_of_token(self.token_id(), &[task]).await?.is_empty())
    }

    /// Why the task `key` may not be changed with the token.
    pub fn not_own(&self, key: &str) -> String {
        format!(
            "{key} was submitted with another token than that of {}, which may change only tasks that were submitted with \
             it; a token of the role admin may change all",
            self.actor()
        )
    }

    /// Refuses a request that needs another role.
    pub fn require(&self, role: ApiTokenRole) -> Result<(), ApiError> {
        match self {
            Self::Named(token) if token.role < role => Err(ApiError::forbidden(format!(
                "the token {} has the role {}, and this request needs the role {role}: use a token of that role",
                token.name, token.role
            ))),
            Self::Owner(_) | Self::Named(_) => Ok(()),
        }
    }

    /// Refuses a repository on which the token's tasks may not work.
    pub fn check_repository(&self, repository: &str) -> Result<(), ApiError> {
        let Some((name, limits)) = self.limits() else { return Ok(()) };
        if limits.repositories.is_empty() || limits.repositories.iter().any(|allowed| allowed == repository) {
            return Ok(());
        }
        let message = format!("repo: tasks of the token {name} may only work on {}", limits.repositories.join(" and "));
        let mut error = ApiError::forbidden(message);
        error.set_field("repo");
        Err(error)
    }

    /// The idempotency key as it is stored. Clients with other tokens may use the same keys.
    pub fn stored_key(&self, key: String) -> String {
        match self {
            Self::Owner(_) => key,
            Self::Named(token) => format!("{}/{key}", token.id),
        }
    }
}

/// All tokens.
#[derive(Debug)]
pub struct Tokens {
    file: TokenFile,
    store: Store,
    known: Mutex<Known>,
    /// Held while the tokens are read, so that concurrent requests wait for one read.
    reading: AsyncMutex<()>,
}

/// The named tokens that the last successful read found.
#[derive(Debug, Default)]
struct Known {
    tokens: HashMap<TokenHash, Arc<NamedToken>>,
    /// Start of the last successful read; `None` if the tokens have changed since.
    read_at: Option<Instant>,
    /// End of the last read, if it failed.
    failed_at: Option<Instant>,
    /// Start of the last read.
    tried_at: Option<Instant>,
    /// Number of changes through this process. A read during which it grows is not used.
    changes: u64,
    /// When the use of each token was recorded.
    recorded: HashMap<ApiTokenId, Instant>,
}

impl Known {
    /// The token with this hash, or that there is none, if this is known; `None` if the tokens must be read first.
    fn find(&self, hash: &TokenHash, arrived: Instant) -> Option<Result<Option<Arc<NamedToken>>, ApiError>> {
        let now = Instant::now();
        let found = self.tokens.get(hash).filter(|token| token.is_valid_at(now)).cloned();
        if self.failed_at.is_some_and(|at| now.duration_since(at) < MAX_AGE) {
            // A known token stays valid, so that the metrics can be read while the database is unavailable; other requests
            // fail there anyway.
            return Some(found.map(Some).ok_or_else(unreadable));
        }
        let read_at = self.read_at?;
        let is_recent = match found {
            Some(_) => now.duration_since(read_at) < MAX_AGE,
            // It may have been created since, also through another scheduler.
            None => read_at >= arrived,
        };
        is_recent.then_some(Ok(found))
    }
}

fn unreadable() -> ApiError {
    ApiError::busy("the database is unavailable, so the token cannot be checked: retry in a moment")
}

impl Tokens {
    pub fn new(file: TokenFile, store: Store) -> Self {
        Self { file, store, known: Mutex::default(), reading: AsyncMutex::default() }
    }

    /// The access of a token; `None` if it is not valid. Fails if the token is unknown and the database cannot be
    /// read.
    pub async fn check(&self, offered: &str) -> Result<Option<Access>, ApiError> {
        if let Some(epoch) = self.file.check(offered) {
            return Ok(Some(Access::Owner(epoch)));
        }
        if !offered.starts_with(TOKEN_PREFIX) {
            return Ok(None);
        }
        let Some(token) = self.find(&hash_of(offered)).await? else { return Ok(None) };
        self.record_use(token.id);
        Ok(Some(Access::Named(token)))
    }

    /// Whether the token of an earlier request is still valid. While the database is unavailable, a token is valid that was
    /// valid before.
    pub async fn is_valid(&self, access: &Access) -> bool {
        match access {
            Access::Owner(epoch) => self.file.epoch() == *epoch,
            Access::Named(token) => self.find(&token.hash).await.is_ok_and(|found| found.is_some()),
        }
    }

    /// Reads the tokens again at the next request, because one was added.
    pub fn on_added(&self) {
        self.on_change(|_| {});
    }

    /// Refuses a token from now on, whatever happens to the database.
    pub fn on_revoked(&self, name: &ApiTokenName) {
        self.on_change(|tokens| tokens.retain(|_, token| token.name != *name));
    }

    fn on_change(&self, change: impl FnOnce(&mut HashMap<TokenHash, Arc<NamedToken>>)) {
        let mut known = self.known();
        known.changes += 1;
        known.read_at = None;
        change(&mut known.tokens);
    }

    async fn find(&self, hash: &TokenHash) -> Result<Option<Arc<NamedToken>>, ApiError> {
        let arrived = Instant::now();
        if let Some(found) = self.known().find(hash, arrived) {
            return found;
        }
        let _reading = self.reading.lock().await;
        loop {
            let (last, changes) = {
                let known = self.known();
                if let Some(found) = known.find(hash, arrived) {
                    return found;
                }
                (known.tried_at, known.changes)
            };
            // Anybody can send unknown tokens: requests that arrive meanwhile are served by the same read.
            if let Some(wait) = last.and_then(|at| MIN_READ_INTERVAL.checked_sub(at.elapsed())) {
                tokio::time::sleep(wait).await;
            }
            let began = Instant::now();
            self.known().tried_at = Some(began);
            let read = tokio::time::timeout(READ_TIMEOUT, self.store.stored_tokens()).await;
            let mut known = self.known();
            match read {
                Ok(Ok(_)) if known.changes != changes => {}
                Ok(Ok(read)) => {
                    let tokens = read.into_iter().map(|token| (token.hash, Arc::new(NamedToken::of(token, began))));
                    known.tokens = tokens.collect();
                    (known.read_at, known.failed_at) = (Some(began), None);
                }
                failed => {
                    match failed {
                        Ok(Err(error)) if !error.may_retry() => tracing::error!(%error, "cannot read the tokens"),
                        _ => tracing::warn!("cannot read the tokens, because the database is slow or unavailable"),
                    }
                    known.failed_at = Some(Instant::now());
                }
            }
        }
    }

    /// Records the use of a token, at most once per `USE_RECORD_INTERVAL`.
    fn record_use(&self, token: ApiTokenId) {
        let mut known = self.known();
        let now = Instant::now();
        if known.recorded.get(&token).is_some_and(|at| now.duration_since(*at) < USE_RECORD_INTERVAL) {
            return;
        }
        known.recorded.insert(token, now);
        drop(known);
        let store = self.store.clone();
        tokio::spawn(async move {
            if let Err(error) = limited("recording the use of a token", store.record_token_use(token)).await {
                tracing::debug!(%error, "the use of a token was not recorded");
            }
        });
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl NamedToken {
    pub fn name(&self) -> &ApiTokenName {
        &self.name
    }

    fn of(stored: StoredToken, read_at: Instant) -> Self {
        let StoredToken { id, hash, name, role, limits, valid_for } = stored;
        Self { id, hash, name, role, limits, expires: valid_for.and_then(|time| read_at.checked_add(time)) }
    }

    fn is_valid_at(&self, now: Instant) -> bool {
        self.expires.is_none_or(|expires| now < expires)
    }
}

/// Middleware of a route that refuses requests whose token has too low a role.
pub async fn require_role(role: ApiTokenRole, request: Request, next: Next) -> Response {
    let allowed = match request.extensions().get::<Access>() {
        Some(access) => access.require(role),
        // `authorize` refuses such requests, unless the path is one that needs no token.
        None => Err(ApiError::unauthorized("missing bearer token (API key)")),
    };
    match allowed {
        Ok(()) => next.run(request).await,
        Err(refusal) => error_form::response(refusal, request.uri().path()),
    }
}

/// The hash by which a token is stored.
pub fn hash_of(token: &str) -> TokenHash {
    Sha256::digest(token).into()
}

/// Random bytes for a token.
pub fn random_secret() -> Result<[u8; 32], ApiError> {
    use std::io::Read;
    let mut secret = [0; 32];
    let read = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut secret));
    read.map_err(|error| {
        tracing::error!(%error, "cannot read /dev/urandom");
        ApiError::busy("the server cannot read /dev/urandom: the cause is in its log")
    })?;
    Ok(secret)
}
