//! The `attempts` table: one row per attempt of a job. A repeated or late report of an outcome is checked against the
//! row of its attempt. When a job becomes a dead letter, its failure lists the outcomes in these rows.

use cfq_proto::http::AttemptView;
use cfq_proto::ids::{IdError, JobId};
use cfq_proto::messages::JobFence;
use sqlx::PgConnection;

use super::columns::{parse, pg_text};
use super::error::Doing;
use super::{Store, StoreError};

/// Maximum number of attempts that a view of a job lists: the newest.
const MAX_ATTEMPTS_IN_VIEW: i64 = 50;

impl Store {
    /// The newest attempts at a job, oldest first.
    pub(super) async fn attempt_views(&self, job: JobId) -> Result<Vec<AttemptView>, StoreError> {
        let rows = sqlx::query!(
            r#"select attempt, node, placement, outcome, detail, suspicion,
                      first_token_at is not null as "has_first_token!",
                      extract(epoch from placed_at)::float8 as "placed_at!",
                      extract(epoch from accepted_at)::float8 as accepted_at,
                      extract(epoch from ended_at)::float8 as ended_at
               from attempts where job = $1 order by attempt desc limit $2"#,
            job.0,
            MAX_ATTEMPTS_IN_VIEW
        )
        .fetch_all(&self.pool)
        .await
        .doing("reading a job's attempts")?;
        let views = rows.into_iter().rev().map(|row| {
            Ok(AttemptView {
                attempt: row.attempt,
                node: parse("node", &row.node)?,
                placement: row.placement,
                outcome: row.outcome,
                detail: row.detail,
                suspicion: row.suspicion,
                has_first_token: row.has_first_token,
                placed_at: row.placed_at,
                accepted_at: row.accepted_at,
                ended_at: row.ended_at,
            })
        });
        views.collect()
    }
}

/// How an attempt ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AttemptOutcome {
    /// Its node completed the job.
    Done,
    /// Its node reported a failure.
    Failed,
    /// Its node released it, or ended for a reason that is not counted, such as a restart of its machine.
    Released,
    /// Its node refused the job.
    Refused,
    /// The placement ended before the node accepted it.
    Unplaced,
    /// The node had accepted it; its lease expired, or the node was restarted.
    Lost,
    /// The job was cancelled.
    Cancelled,
}

impl AttemptOutcome {
    const ALL: [Self; 7] =
        [Self::Done, Self::Failed, Self::Released, Self::Refused, Self::Unplaced, Self::Lost, Self::Cancelled];

    /// Returns the outcome's name in SQL.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Released => "released",
            Self::Refused => "refused",
            Self::Unplaced => "unplaced",
            Self::Lost => "lost",
            Self::Cancelled => "cancelled",
        }
    }
}

impl std::str::FromStr for AttemptOutcome {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        Self::ALL.into_iter().find(|outcome| outcome.as_str() == text).ok_or(IdError {
            kind: "outcome of an attempt",
            text: text.to_owned(),
            expected: "done, failed, released, refused, unplaced, lost or cancelled",
        })
    }
}

/// Records the outcome of a job's latest attempt, unless that attempt has already ended.
pub(super) async fn end_current(
    connection: &mut PgConnection,
    job: JobId,
    outcome: AttemptOutcome,
    detail: &str,
) -> Result<(), StoreError> {
    sqlx::query!(
        r#"update attempts set outcome = $2, detail = $3, ended_at = now()
           where job = $1 and attempt = (select attempt from jobs where id = $1) and outcome is null"#,
        job.0,
        outcome.as_str(),
        pg_text(detail)
    )
    .execute(connection)
    .await
    .doing("ending an attempt")?;
    Ok(())
}

/// The outcome of an attempt; `None` if it does not exist or has not ended.
pub(super) async fn outcome(
    connection: &mut PgConnection,
    fence: &JobFence,
) -> Result<Option<AttemptOutcome>, StoreError> {
    let found = sqlx::query_scalar!(
        "select outcome from attempts where job = $1 and attempt = $2 and lease = $3",
        fence.job.0,
        fence.attempt,
        fence.lease.0
    )
    .fetch_optional(connection)
    .await
    .doing("finding an attempt")?;
    found.flatten().map(|outcome| parse("outcome of an attempt", &outcome)).transpose()
}

/// Maximum number of attempts that the failure of a dead letter lists.
const MAX_LISTED_ATTEMPTS: i64 = 20;

/// The latest attempts of a job as text, oldest first, for the failure of a job that becomes a dead letter: the node,
/// the outcome with its reason, and the time (UTC). Refused attempts are left out, because they say nothing about the
/// job.
pub(super) async fn history(connection: &mut PgConnection, job: JobId) -> Result<String, StoreError> {
    let mut rows = sqlx::query!(
        r#"select attempt, node, coalesce(outcome, 'live') as "outcome!", detail,
                  to_char(coalesce(ended_at, now()) at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS') as "ended!",
                  count(*) over () as "count!"
           from attempts where job = $1 and outcome is distinct from 'refused' order by attempt desc limit $2"#,
        job.0,
        MAX_LISTED_ATTEMPTS
    )
    .fetch_all(connection)
    .await
    .doing("reading a job's attempts")?;
    rows.reverse();
    let omitted = rows.first().map_or(0, |r| r.count - MAX_LISTED_ATTEMPTS);
    let omitted = (omitted > 0).then(|| format!("{omitted} earlier attempts"));
    let lines = rows
        .iter()
        .map(|r| format!("attempt {} on {}: {} ({}) at {} UTC", r.attempt, r.node, r.outcome, r.detail, r.ended));
    Ok(omitted.into_iter().chain(lines).collect::<Vec<_>>().join("; "))
}
