//! Machines that joined, and the tokens with which they do. A token works once: in one transaction it is marked as used
//! and the machine's key is stored. A repetition by the same key gets the same answer, because the first reply may be
//! lost.

use cfq_proto::http::{JoinTokenView, MachineView};
use cfq_proto::ids::NodeId;
use sqlx::PgConnection;
use uuid::Uuid;

use super::columns::{parse, pg_text};
use super::error::Doing;
use super::hints::{Hint, LeaderHint};
use super::transaction::Tx;
use super::{Store, StoreError, roll_back};

/// Maximum number of tokens that are neither used nor expired.
const MAX_OPEN_JOIN_TOKENS: i64 = 200;
/// Maximum number of machines with access.
const MAX_MACHINES: i64 = 1_000;

/// A machine that wants to join.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JoiningMachine<'a> {
    /// Id and hash of the secret of its token.
    pub token_id: Uuid,
    pub secret_hash: [u8; 32],
    /// Name that it must have.
    pub name: Option<&'a NodeId>,
    /// Its name if neither `name` nor the token names it.
    pub fallback_name: Option<&'a NodeId>,
    pub nats_key: &'a str,
    pub version: &'a str,
}

/// Why a machine could not join.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JoinRefusal {
    /// There is no such token, or its secret is another one.
    UnknownToken,
    Expired,
    /// Another machine has used the token.
    Used,
    /// The token is for a machine of this name.
    OtherName(NodeId),
    /// Neither token nor machine name the machine.
    NoName,
    /// Another machine has this name.
    NameTaken(NodeId),
    /// A node of the server itself has this name.
    NameOfServer(NodeId),
    /// The machine has joined under this name already, and the token or the request names another.
    JoinedAs(NodeId),
    /// The key belonged to a machine until its access was revoked.
    KeyRevoked,
    TooManyMachines,
}

impl Store {
    /// Whether a machine cannot join under this name, because another machine or a node of the server has it.
    pub async fn is_machine_name_taken(&self, name: &NodeId) -> Result<bool, StoreError> {
        sqlx::query_scalar!(
            r#"select exists (select from machines where name = $1 and revoked_at is null)
                   or (exists (select from nodes where id = $1)
                       and not exists (select from machines where name = $1)) as "taken!""#,
            name.as_str()
        )
        .fetch_one(&self.pool)
        .await
        .doing("finding a machine")
    }

    /// Stores a token that is valid for `ttl_seconds`, and deletes tokens that have been useless for a day. Returns the
    /// time at which it expires, in seconds since 1970; `None` if too many tokens are open.
    pub async fn add_join_token(
        &self,
        id: Uuid,
        secret_hash: [u8; 32],
        name: Option<&NodeId>,
        ttl_seconds: u32,
    ) -> Result<Option<i64>, StoreError> {
        sqlx::query!("delete from join_tokens where expires_at < now() - interval '1 day'")
            .execute(&self.pool)
            .await
            .doing("deleting join tokens")?;
        sqlx::query_scalar!(
            r#"insert into join_tokens (id, secret_hash, name, expires_at)
               select $1, $2, $3, now() + $4::float8 * interval '1 second'
               where (select count(*) from join_tokens where used_by is null and expires_at > now()) < $5
               returning extract(epoch from expires_at)::bigint as "expires_at!""#,
            id,
            &secret_hash[..],
            name.map(NodeId::as_str),
            f64::from(ttl_seconds),
            MAX_OPEN_JOIN_TOKENS
        )
        .fetch_optional(&self.pool)
        .await
        .doing("writing a join token")
    }

    /// The tokens that can still be used, those that expire first at the beginning.
    pub async fn join_tokens(&self) -> Result<Vec<JoinTokenView>, StoreError> {
        let rows = sqlx::query!(
            r#"select id, name, extract(epoch from expires_at)::bigint as "expires_at!" from join_tokens
               where used_by is null and expires_at > now() order by expires_at, id"#
        )
        .fetch_all(&self.pool)
        .await
        .doing("reading the join tokens")?;
        rows.into_iter()
            .map(|row| {
                let name = row.name.map(|name| parse("machine name", &name)).transpose()?;
                Ok(JoinTokenView { id: row.id, name, expires_at: row.expires_at })
            })
            .collect()
    }

    /// Deletes the tokens with these ids, or all, that can still be used. Returns their number.
    pub async fn remove_join_tokens(&self, ids: Option<&[Uuid]>) -> Result<u64, StoreError> {
        let removed = sqlx::query!(
            r#"delete from join_tokens
               where used_by is null and expires_at > now() and ($1::uuid[] is null or id = any($1))"#,
            ids as _
        )
        .execute(&self.pool)
        .await
        .doing("deleting join tokens")?;
        Ok(removed.rows_affected())
    }

    /// Lets a machine join. Returns its name.
    pub async fn join_machine(&self, machine: JoiningMachine<'_>) -> Result<Result<NodeId, JoinRefusal>, StoreError> {
        let mut tx = self.begin().await?;
        let token = sqlx::query!(
            r#"select secret_hash, name, expires_at <= now() as "is_expired!", used_by
               from join_tokens where id = $1 for update"#,
            machine.token_id
        )
        .fetch_optional(&mut *tx)
        .await
        .doing("finding a join token")?;
        // Both sides are hashes of random secrets, so the time of the comparison tells nothing useful.
        let Some(token) = token.filter(|token| token.secret_hash == machine.secret_hash) else {
            return roll_back(tx, Err(JoinRefusal::UnknownToken)).await;
        };
        let bound = token.name.map(|name| parse::<NodeId>("machine name", &name)).transpose()?;
        let known = machine_of_key(&mut tx, machine.nats_key).await?;
        match (token.used_by, known) {
            (Some(key), Some((name, false))) if key == machine.nats_key => return roll_back(tx, Ok(name)).await,
            (Some(_), _) => return roll_back(tx, Err(JoinRefusal::Used)).await,
            _ if token.is_expired => return roll_back(tx, Err(JoinRefusal::Expired)).await,
            (None, Some((_, true))) => return roll_back(tx, Err(JoinRefusal::KeyRevoked)).await,
            (None, Some((name, false))) => return self.join_again(tx, &machine, bound, name).await,
            (None, None) => {}
        }
        let name = match (bound, machine.name.or(machine.fallback_name)) {
            (Some(bound), _) if machine.name.is_some_and(|name| bound != *name) => {
                return roll_back(tx, Err(JoinRefusal::OtherName(bound))).await;
            }
            (Some(bound), _) => bound,
            (None, Some(wanted)) => wanted.clone(),
            (None, None) => return roll_back(tx, Err(JoinRefusal::NoName)).await,
        };
        if let Some(refusal) = insert_machine(&mut tx, &name, &machine).await? {
            return roll_back(tx, Err(refusal)).await;
        }
        mark_used(&mut tx, &machine).await?;
        tx.commit().await.doing("adding a machine")?;
        Ok(Ok(name))
    }

    /// Answers a machine that has joined already and uses another token. It keeps its name.
    async fn join_again(
        &self,
        mut tx: Tx,
        machine: &JoiningMachine<'_>,
        bound: Option<NodeId>,
        name: NodeId,
    ) -> Result<Result<NodeId, JoinRefusal>, StoreError> {
        if bound.as_ref().or(machine.name).is_some_and(|wanted| *wanted != name) {
            return roll_back(tx, Err(JoinRefusal::JoinedAs(name))).await;
        }
        mark_used(&mut tx, machine).await?;
        tx.commit().await.doing("marking a join token as used")?;
        Ok(Ok(name))
    }

    /// All machines that joined, with those whose access was revoked.
    pub async fn machines(&self) -> Result<Vec<MachineView>, StoreError> {
        let rows = sqlx::query!(
            r#"select m.name, m.nats_key, m.version,
                      extract(epoch from m.joined_at)::float8 as "joined_at!",
                      extract(epoch from m.revoked_at)::float8 as revoked_at,
                      extract(epoch from n.last_seen)::float8 as last_seen,
                      coalesce(n.last_seen between now() - $1::float8 * interval '1 millisecond'
                                               and now() + $1::float8 * interval '1 millisecond', false) as "alive!"
               from machines m left join nodes n on n.id = m.name order by m.name"#,
            self.lease_ttl_ms()
        )
        .fetch_all(&self.pool)
        .await
        .doing("reading the machines")?;
        rows.into_iter()
            .map(|row| {
                Ok(MachineView {
                    name: parse("machine name", &row.name)?,
                    nats_key: row.nats_key,
                    version: row.version,
                    joined_at: row.joined_at,
                    alive: row.alive,
                    revoked_at: row.revoked_at,
                    last_seen: row.last_seen,
                })
            })
            .collect()
    }

    /// Revokes the access of a machine, and cordons its node, so that no new work is placed there while NATS still accepts
    /// the machine's key. `None` if there is no machine of this name.
    pub async fn revoke_machine(&self, name: &NodeId) -> Result<Option<Vec<Hint>>, StoreError> {
        let mut tx = self.begin().await?;
        let revoked =
            sqlx::query!("update machines set revoked_at = coalesce(revoked_at, now()) where name = $1", name.as_str())
                .execute(&mut *tx)
                .await
                .doing("revoking a machine")?;
        if revoked.rows_affected() == 0 {
            return roll_back(tx, None).await;
        }
        sqlx::query!("update nodes set cordoned_at = coalesce(cordoned_at, now()) where id = $1", name.as_str())
            .execute(&mut *tx)
            .await
            .doing("cordoning a node")?;
        tx.commit().await.doing("revoking a machine")?;
        Ok(Some(vec![Hint::Leader(LeaderHint::Node(name.clone()))]))
    }
}

async fn mark_used(tx: &mut PgConnection, machine: &JoiningMachine<'_>) -> Result<(), StoreError> {
    sqlx::query!("update join_tokens set used_by = $2 where id = $1", machine.token_id, machine.nats_key)
        .execute(tx)
        .await
        .doing("marking a join token as used")?;
    Ok(())
}

/// Name of the machine that has or had this key, and whether the key was revoked.
async fn machine_of_key(tx: &mut PgConnection, key: &str) -> Result<Option<(NodeId, bool)>, StoreError> {
    let row = sqlx::query!(
        r#"select name, (revoked_at is not null or nats_key <> $1) as "is_revoked!"
           from machines where nats_key = $1 or $1 = any(former_keys)"#,
        key
    )
    .fetch_optional(tx)
    .await
    .doing("finding a machine")?;
    row.map(|row| Ok((parse("machine name", &row.name)?, row.is_revoked))).transpose()
}

/// Writes the machine's row; a machine whose access was revoked is replaced.
async fn insert_machine(
    tx: &mut PgConnection,
    name: &NodeId,
    machine: &JoiningMachine<'_>,
) -> Result<Option<JoinRefusal>, StoreError> {
    let counts = sqlx::query!(
        r#"select (select count(*) from machines where revoked_at is null) as "machines!",
                  exists (select from machines where name = $1) as "is_machine!",
                  exists (select from nodes where id = $1) as "is_node!""#,
        name.as_str()
    )
    .fetch_one(&mut *tx)
    .await
    .doing("counting machines")?;
    // A node without a machine is one of the server itself.
    if counts.is_node && !counts.is_machine {
        return Ok(Some(JoinRefusal::NameOfServer(name.clone())));
    }
    if counts.machines >= MAX_MACHINES {
        return Ok(Some(JoinRefusal::TooManyMachines));
    }
    let written = sqlx::query!(
        r#"insert into machines (name, nats_key, version) values ($1, $2, $3)
           on conflict (name) do update
           set former_keys = array_append(machines.former_keys, machines.nats_key), nats_key = excluded.nats_key, version = excluded.version, joined_at = now(), revoked_at = null
           where machines.revoked_at is not null"#,
        name.as_str(),
        machine.nats_key,
        pg_text(machine.version)
    )
    .execute(&mut *tx)
    .await
    .doing("writing a machine")?;
    if counts.is_node {
        sqlx::query!("update nodes set cordoned_at = null where id = $1", name.as_str())
            .execute(&mut *tx)
            .await
            .doing("ending the cordon of a node")?;
    }
    Ok((written.rows_affected() == 0).then(|| JoinRefusal::NameTaken(name.clone())))
}
