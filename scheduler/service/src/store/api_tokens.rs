//! Named API tokens. The row of a revoked or expired token is kept for at least 90 days, so that its tasks can still be
//! attributed to it.

use std::time::Duration;

use cfq_proto::http::{ApiTokenLimits, ApiTokenRequest, ApiTokenRole, ApiTokenView};
use cfq_proto::ids::{ApiTokenId, ApiTokenName, TaskId};

use super::columns::{AsJson, parse};
use super::error::Doing;
use super::{Store, StoreError};

/// Maximum number of valid tokens. All are read when the known ones are older than a second.
pub const MAX_TOKENS: i64 = 200;

/// SHA-256 of a token. Tokens are random, so a hash without salt is enough.
pub type TokenHash = [u8; 32];

/// A valid token, with what the check of a request needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredToken {
    pub id: ApiTokenId,
    pub hash: TokenHash,
    pub name: ApiTokenName,
    pub role: ApiTokenRole,
    pub limits: ApiTokenLimits,
    /// Time for which it is still valid; `None`: until it is revoked.
    pub valid_for: Option<Duration>,
}

/// Result of adding a token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenAdded {
    Done(ApiTokenView),
    NameTaken,
    TooMany,
}

/// Result of replacing a token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenReplaced {
    Done(ApiTokenView),
    /// The token expires later than it may.
    ExpiresLater,
    Unknown,
}

struct ViewRow {
    name: String,
    role: String,
    limits: serde_json::Value,
    created_at: i64,
    expires_at: Option<i64>,
    last_used_at: Option<i64>,
    created_by: String,
}

impl ViewRow {
    fn view(self) -> Result<ApiTokenView, StoreError> {
        Ok(ApiTokenView {
            role: parse("role of a token", &self.role)?,
            limits: limits(&self.name, self.limits)?,
            name: parse("token name", &self.name)?,
            created_at: self.created_at,
            expires_at: self.expires_at,
            last_used_at: self.last_used_at,
            created_by: self.created_by,
        })
    }
}

struct CheckRow {
    id: uuid::Uuid,
    name: String,
    token_hash: Vec<u8>,
    role: String,
    limits: serde_json::Value,
    valid_for_s: Option<f64>,
}

/// The limits of a token. Those of a later version may not be ignored, so the token cannot be used.
fn limits(name: &str, stored: serde_json::Value) -> Result<ApiTokenLimits, StoreError> {
    serde_json::from_value(stored).map_err(|_| unreadable("limits of a token", name))
}

fn unreadable(what: &'static str, name: &str) -> StoreError {
    StoreError::Unreadable { what, text: name.to_owned() }
}

impl Store {
    /// Stores a token. `created_by` is the author, for users.
    pub async fn add_token(
        &self,
        hash: TokenHash,
        new: &ApiTokenRequest,
        created_by: &str,
    ) -> Result<TokenAdded, StoreError> {
        // An expired token leaves its name to the next one.
        sqlx::query!(
            r#"update api_tokens set revoked_at = expires_at where revoked_at is null and expires_at <= now()"#
        )
        .execute(&self.pool)
        .await
        .doing("revoking expired tokens")?;
        sqlx::query!("delete from api_tokens where revoked_at < now() - interval '90 days'")
            .execute(&self.pool)
            .await
            .doing("deleting revoked tokens")?;
        let added = sqlx::query!(
            r#"insert into api_tokens (id, name, token_hash, role, limits, expires_at, created_by)
               select $1, $2, $3, $4, $5, now() + $6::float8 * interval '1 second', $8
               where (select count(*) from api_tokens where revoked_at is null) < $7
               on conflict do nothing
               returning extract(epoch from created_at)::bigint as "created_at!",
                         extract(epoch from expires_at)::bigint as expires_at"#,
            ApiTokenId::fresh().0,
            new.name.as_str(),
            &hash[..],
            new.role.as_str(),
            AsJson(&new.limits) as _,
            new.ttl_seconds.map(f64::from),
            MAX_TOKENS,
            created_by
        )
        .fetch_optional(&self.pool)
        .await
        .doing("writing a token")?;
        if let Some(row) = added {
            return Ok(TokenAdded::Done(ApiTokenView {
                name: new.name.clone(),
                role: new.role,
                created_at: row.created_at,
                expires_at: row.expires_at,
                last_used_at: None,
                created_by: created_by.to_owned(),
                limits: new.limits.clone(),
            }));
        }
        let is_taken = sqlx::query_scalar!(
            r#"select exists (select from api_tokens where name = $1 and revoked_at is null) as "taken!""#,
            new.name.as_str()
        )
        .fetch_one(&self.pool)
        .await
        .doing("finding a token")?;
        Ok(if is_taken { TokenAdded::NameTaken } else { TokenAdded::TooMany })
    }

    /// The valid tokens, for users. Without those that this version cannot read.
    pub async fn tokens(&self) -> Result<Vec<ApiTokenView>, StoreError> {
        let rows = sqlx::query_as!(
            ViewRow,
            r#"select name, role, limits, extract(epoch from created_at)::bigint as "created_at!",
                      extract(epoch from expires_at)::bigint as expires_at,
                      extract(epoch from last_used_at)::bigint as last_used_at, created_by
               from api_tokens where revoked_at is null and coalesce(expires_at > now(), true) order by name"#
        )
        .fetch_all(&self.pool)
        .await
        .doing("reading the tokens")?;
        let unlisted = |error: &StoreError| tracing::warn!(%error, "a token is not listed");
        Ok(rows.into_iter().filter_map(|row| row.view().inspect_err(unlisted).ok()).collect())
    }

    /// The valid tokens, for the check of requests.
    pub async fn stored_tokens(&self) -> Result<Vec<StoredToken>, StoreError> {
        let rows = sqlx::query_as!(
            CheckRow,
            r#"select id, name, token_hash, role, limits, extract(epoch from expires_at - now())::float8 as valid_for_s
               from api_tokens where revoked_at is null and coalesce(expires_at > now(), true)"#
        )
        .fetch_all(&self.pool)
        .await
        .doing("reading the tokens")?;
        let read = |row: CheckRow| -> Result<StoredToken, StoreError> {
            let hash = row.token_hash.as_slice().try_into().map_err(|_| unreadable("hash of a token", &row.name))?;
            Ok(StoredToken {
                id: ApiTokenId(row.id),
                hash,
                name: parse("token name", &row.name)?,
                role: parse("role of a token", &row.role)?,
                limits: limits(&row.name, row.limits)?,
                valid_for: row.valid_for_s.map(|s| Duration::try_from_secs_f64(s).unwrap_or_default()),
            })
        };
        // At debug level, because the tokens are read every second.
        let refused = |error: &StoreError| tracing::debug!(%error, "a token is refused");
        Ok(rows.into_iter().filter_map(|row| read(row).inspect_err(refused).ok()).collect())
    }

    /// Replaces a valid token by another one, which keeps its name, tasks, role, limits and expiry. With `within`, only a token
    /// that expires in this time is replaced.
    pub async fn replace_token(
        &self,
        name: &ApiTokenName,
        hash: TokenHash,
        within: Option<Duration>,
    ) -> Result<TokenReplaced, StoreError> {
        let replaced = sqlx::query_as!(
            ViewRow,
            r#"update api_tokens set token_hash = $2, last_used_at = null
               where name = $1 and revoked_at is null and coalesce(expires_at > now(), true)
                 and ($3::float8 is null or expires_at <= now() + $3 * interval '1 second')
               returning name, role, limits, extract(epoch from created_at)::bigint as "created_at!",
                         extract(epoch from expires_at)::bigint as expires_at,
                         extract(epoch from last_used_at)::bigint as last_used_at, created_by"#,
            name.as_str(),
            &hash[..],
            within.map(|time| time.as_secs_f64())
        )
        .fetch_optional(&self.pool)
        .await
        .doing("replacing a token")?;
        match replaced {
            Some(row) => Ok(TokenReplaced::Done(row.view()?)),
            None if within.is_some() && self.tokens().await?.iter().any(|token| token.name == *name) => {
                Ok(TokenReplaced::ExpiresLater)
            }
            None => Ok(TokenReplaced::Unknown),
        }
    }

    /// Revokes a token; false if there is no valid one with this name.
    pub async fn revoke_token(&self, name: &ApiTokenName) -> Result<bool, StoreError> {
        let revoked = sqlx::query!(
            r#"update api_tokens set revoked_at = now()
               where name = $1 and revoked_at is null and coalesce(expires_at > now(), true)"#,
            name.as_str()
        )
        .execute(&self.pool)
        .await
        .doing("revoking a token")?;
        Ok(revoked.rows_affected() == 1)
    }

    /// Records that a token was used just now.
    pub async fn record_token_use(&self, token: ApiTokenId) -> Result<(), StoreError> {
        sqlx::query!("update api_tokens set last_used_at = now() where id = $1", token.0)
            .execute(&self.pool)
            .await
            .doing("recording the use of a token")?;
        Ok(())
    }

    /// Those of the tasks that were submitted with the token.
    pub async fn tasks_of_token(&self, token: ApiTokenId, tasks: &[TaskId]) -> Result<Vec<TaskId>, StoreError> {
        let ids: Vec<uuid::Uuid> = tasks.iter().map(|task| task.0).collect();
        let own = sqlx::query_scalar!("select id from tasks where id = any($1) and api_token = $2", &ids, token.0)
            .fetch_all(&self.pool)
            .await
            .doing("finding the tasks of a token")?;
        Ok(own.into_iter().map(TaskId).collect())
    }
}
