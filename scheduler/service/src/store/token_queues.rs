//! The ready tasks of each API token, and which of them is granted next. The core decides
//! (`cfq_scheduler_core::next_api_token`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cfq_proto::ids::{ApiTokenId, TaskId, TaskNumber};
use cfq_proto::task::Priority;
use cfq_scheduler_core::{
    ApiTokenHead, ApiTokenQueue, ApiTokenShare, OtherApiToken, ReadyTask, TaskOrder, grants_before, next_api_token,
};
use sqlx::{PgConnection, PgPool};
use tokio::sync::{Mutex, MutexGuard};
use uuid::Uuid;

use super::StoreError;
use super::error::Doing;

/// A ready task, locked.
pub(super) struct PickedTask {
    pub id: Uuid,
    pub number: i64,
    pub attempt: i32,
    /// Time of its submission, in seconds since 1970.
    pub created_at: i64,
}

/// The turns of the requests to this process while tokens with ready tasks have limits.
#[derive(Debug, Clone, Default)]
pub(super) struct LimitedGrants(Arc<LimitedGrantsState>);

#[derive(Debug, Default)]
struct LimitedGrantsState {
    has_limits: AtomicBool,
    turn: Mutex<()>,
}

impl LimitedGrants {
    /// Waits for the turn of a request; `None` if no token had a limit at the last request.
    pub async fn turn(&self) -> Option<MutexGuard<'_, ()>> {
        match self.0.has_limits.load(Ordering::Relaxed) {
            true => Some(self.0.turn.lock().await),
            false => None,
        }
    }

    /// Records whether a token with ready tasks has a limit.
    pub fn set(&self, has_limits: bool) {
        self.0.has_limits.store(has_limits, Ordering::Relaxed);
    }
}

/// What a request does if another one holds the lock of the token that is next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OnLocked {
    /// Returns [`Pick::Locked`].
    Return,
    /// Chooses another token.
    Skip,
}

/// The first ready task of a token.
struct FirstTask {
    token: ApiTokenId,
    task: Uuid,
    head: ApiTokenHead,
}

/// Which task a request gets.
pub(super) enum Pick {
    Task {
        task: PickedTask,
        /// The latest grant of the tokens with ready tasks, in µs since 1970.
        last_granted_us: Option<i64>,
        /// Whether one of these tokens has a limit.
        has_limits: bool,
    },
    /// No ready task may run.
    None,
    /// Another request holds the lock of the token that is next.
    Locked,
}

/// Locks the ready task that is granted next, leaving out the tasks in `skipped`.
pub(super) async fn pick_ready_task(
    connection: &mut PgConnection,
    mut skipped: Vec<Uuid>,
    on_locked: OnLocked,
) -> Result<Pick, StoreError> {
    // Number of locked tasks of each token. Other requests are usually about to get them.
    let mut locked_by_token: BTreeMap<ApiTokenId, u32> = BTreeMap::new();
    let (mut counted, mut excluded) = (BTreeSet::new(), BTreeSet::new());
    loop {
        let mut heads = first_tasks(connection, &skipped).await?;
        heads.retain(|first| !excluded.contains(&first.token));
        for FirstTask { token, head, .. } in &mut heads {
            let locked = locked_by_token.get(token).copied().unwrap_or(0);
            head.share.running = head.share.running.saturating_add(locked);
        }
        let Some(next) = next_api_token(heads.iter().map(|first| first.head)) else {
            return Ok(if excluded.is_empty() { Pick::None } else { Pick::Locked });
        };
        let last_granted_us = heads.iter().filter_map(|first| first.head.share.last_granted_us).max();
        let has_limits = heads.iter().any(|first| first.head.share.limit.is_some());
        let FirstTask { token, task, head } = heads.swap_remove(next);
        if head.share.limit.is_some() && !counted.contains(&token) {
            // The tasks are counted again once no other request can grant one of this token. No transaction waits for the
            // lock, so none can hold up requests that do not need it.
            match (lock_token(connection, token).await?, on_locked) {
                (true, _) => counted.insert(token),
                (false, OnLocked::Skip) => excluded.insert(token),
                (false, OnLocked::Return) => return Ok(Pick::Locked),
            };
            continue;
        }
        let picked = sqlx::query_as!(
            PickedTask,
            r#"select id, number, attempt, extract(epoch from created_at)::bigint as "created_at!"
               from tasks where id = $1 and state = 'ready' and waits_for is null for update skip locked"#,
            task
        )
        .fetch_optional(&mut *connection)
        .await
        .doing("picking a ready task")?;
        if let Some(task) = picked {
            return Ok(Pick::Task { task, last_granted_us, has_limits });
        }
        skipped.push(task);
        // No other request grants a task of a counted token: something else has locked this one.
        if !counted.contains(&token) {
            *locked_by_token.entry(token).or_insert(0) += 1;
        }
    }
}

/// Locks the grants of a token's tasks until the transaction ends; false if another request has the lock.
async fn lock_token(connection: &mut PgConnection, token: ApiTokenId) -> Result<bool, StoreError> {
    let key = format!("grants of token {token}");
    sqlx::query_scalar!(r#"select pg_try_advisory_xact_lock(hashtextextended($1, 0)) as "locked!""#, key)
        .fetch_one(connection)
        .await
        .doing("locking a token")
}

async fn first_tasks(connection: &mut PgConnection, skipped: &[Uuid]) -> Result<Vec<FirstTask>, StoreError> {
    let rows = sqlx::query!(
        r#"select share.api_token as "api_token!", share.running as "running!", share.running_limit, share.last_granted_us,
                  first.id as "id!", first.number as "number!",
                  (extract(epoch from first.order_key) * 1000000)::bigint as "key_us!"
           from token_shares as share,
                lateral (select id, number, order_key from tasks
                         where state = 'ready' and waits_for is null and api_token = share.api_token
                           and id <> all($1)
                         order by order_key, number limit 1) as first"#,
        skipped
    )
    .fetch_all(connection)
    .await
    .doing("finding the first ready tasks")?;
    let first = rows.into_iter().map(|row| FirstTask {
        token: ApiTokenId(row.api_token),
        task: row.id,
        head: ApiTokenHead {
            share: share(row.running, row.running_limit, row.last_granted_us),
            order: order(row.key_us, row.number),
        },
    });
    Ok(first.collect())
}

/// The first `depth` ready tasks of each token that has one of P0, and the first `others` of each other token, leaving out the
/// tasks in `skipped`.
pub(super) async fn token_queues(
    pool: &PgPool,
    skipped: &[Uuid],
    depth: i64,
    others: i64,
) -> Result<Vec<ApiTokenQueue>, StoreError> {
    let rows = sqlx::query!(
        r#"select share.api_token as "api_token!", share.running as "running!", share.running_limit, share.last_granted_us,
                  first.id as "id!", first.number as "number!", first.priority as "priority!",
                  (extract(epoch from first.order_key) * 1000000)::bigint as "key_us!"
           from token_shares as share,
                lateral (select id, number, priority, order_key from tasks
                         where state = 'ready' and waits_for is null and api_token = share.api_token
                           and id <> all($1)
                         order by order_key, number
                         limit case when exists (select from tasks urgent
                                                 where urgent.state = 'ready' and urgent.waits_for is null
                                                   and urgent.priority = 0 and urgent.api_token = share.api_token)
                               then $2::bigint else $3::bigint end) as first
           order by share.api_token, first.order_key, first.number"#,
        skipped,
        depth,
        others
    )
    .fetch_all(pool)
    .await
    .doing("finding the first ready tasks")?;
    let mut queues: Vec<ApiTokenQueue> = Vec::new();
    for row in rows {
        let token = ApiTokenId(row.api_token);
        let task =
            ReadyTask { id: TaskId(row.id), priority: priority(row.priority)?, order: order(row.key_us, row.number) };
        match queues.last_mut().filter(|queue| queue.token == token) {
            Some(queue) => queue.ready.push_back(task),
            None => {
                let share = share(row.running, row.running_limit, row.last_granted_us);
                queues.push(ApiTokenQueue { token, share, ready: [task].into() });
            }
        }
    }
    Ok(queues)
}

/// How many tasks get a slot before a ready task, and the share of its token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct QueuePlace {
    pub before: u64,
    pub share: ApiTokenShare,
}

/// The place of a ready task; `None` if it is not ready. Counts at most `limit` tasks of a token.
pub(super) async fn queue_place(pool: &PgPool, task: TaskId, limit: i64) -> Result<Option<QueuePlace>, StoreError> {
    let own = sqlx::query!(
        r#"select own.api_token, first.number as "number!",
                  (extract(epoch from first.order_key) * 1000000)::bigint as "key_us!",
                  share.running as "running!", share.running_limit, share.last_granted_us,
                  (select count(*) from (
                       select from tasks other
                       where other.state = 'ready' and other.waits_for is null and other.api_token = own.api_token
                         and (other.order_key, other.number) < (own.order_key, own.number) limit $2) as earlier) as "before!"
           from tasks own join token_shares as share on share.api_token = own.api_token,
                lateral (select number, order_key from tasks
                         where state = 'ready' and waits_for is null and api_token = own.api_token
                         order by order_key, number limit 1) as first
           where own.id = $1 and own.state = 'ready' and own.waits_for is null"#,
        task.0,
        limit
    )
    .fetch_optional(pool)
    .await
    .doing("counting the ready tasks before a task")?;
    let Some(own) = own else { return Ok(None) };
    let own_share = share(own.running, own.running_limit, own.last_granted_us);
    // Another token gets no more slots before this one's task than this one will have.
    let level = own.running.saturating_add(own.before).saturating_add(1);
    let others = sqlx::query!(
        r#"select share.running as "running!", share.running_limit, share.last_granted_us, first.number as "number!",
                  (extract(epoch from first.order_key) * 1000000)::bigint as "key_us!",
                  (select count(*) from (
                       select from tasks
                       where state = 'ready' and waits_for is null and api_token = share.api_token limit $2) as ready) as "ready!"
           from token_shares as share,
                lateral (select number, order_key from tasks
                         where state = 'ready' and waits_for is null and api_token = share.api_token
                         order by order_key, number limit 1) as first
           where share.api_token <> $1"#,
        own.api_token,
        level.min(limit)
    )
    .fetch_all(pool)
    .await
    .doing("counting the ready tasks before a task")?;
    let others: Vec<OtherApiToken> = others
        .into_iter()
        .map(|row| OtherApiToken {
            head: ApiTokenHead {
                share: share(row.running, row.running_limit, row.last_granted_us),
                order: order(row.key_us, row.number),
            },
            ready: count(row.ready),
        })
        .collect();
    let head = ApiTokenHead { share: own_share, order: order(own.key_us, own.number) };
    Ok(Some(QueuePlace { before: grants_before(head, count(own.before), &others), share: own_share }))
}

fn share(running: i64, limit: Option<i64>, last_granted_us: Option<i64>) -> ApiTokenShare {
    let number = |n: i64| u32::try_from(n).unwrap_or(if n < 0 { 0 } else { u32::MAX });
    ApiTokenShare { running: number(running), limit: limit.map(number), last_granted_us }
}

/// The position of a task with this order key, in µs since 1970.
pub(super) fn order(key_us: i64, number: i64) -> TaskOrder {
    TaskOrder { key_us, number: TaskNumber(number) }
}

/// A stored priority.
pub(super) fn priority(stored: i16) -> Result<Priority, StoreError> {
    Priority::try_from(stored).map_err(|_| StoreError::Unreadable { what: "priority", text: stored.to_string() })
}

fn count(n: i64) -> u64 {
    u64::try_from(n).unwrap_or(0)
}
