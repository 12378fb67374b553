//! The `attempts` table: one row per attempt of a job. A repeated or late report of an outcome is checked against the
//! row of its attempt. When a job becomes a dead letter, its failure lists the outcomes in these rows.

use cfq_proto::ids::JobId;
use cfq_proto::messages::JobFence;
use sqlx::PgConnection;

use super::StoreError;
use super::columns::pg_text;
use super::error::Doing;

/// Records the outcome of a job's latest attempt, unless that attempt has already ended.
pub(super) async fn end_current(
    connection: &mut PgConnection,
    job: JobId,
    outcome: &str,
    detail: &str,
) -> Result<(), StoreError> {
    sqlx::query!(
        r#"update attempts set outcome = $2, detail = $3, ended_at = now()
           where job = $1 and attempt = (select attempt from jobs where id = $1) and outcome is null"#,
        job.0,
        outcome,
        pg_text(detail)
    )
    .execute(connection)
    .await
    .doing("ending an attempt")?;
    Ok(())
}

/// The outcome of an attempt; `None` if it does not exist or has not ended.
pub(super) async fn outcome(connection: &mut PgConnection, fence: &JobFence) -> Result<Option<String>, StoreError> {
    let found = sqlx::query_scalar!(
        "select outcome from attempts where job = $1 and attempt = $2 and lease = $3",
        fence.job.0,
        fence.attempt,
        fence.lease.0
    )
    .fetch_optional(connection)
    .await
    .doing("finding an attempt")?;
    Ok(found.flatten())
}

/// Outcomes of a job's attempts as text, oldest first, for the failure of a job that becomes a dead letter.
pub(super) async fn history(connection: &mut PgConnection, job: JobId) -> Result<String, StoreError> {
    let rows = sqlx::query!(
        r#"select attempt, node, coalesce(outcome, 'live') as "outcome!", detail from attempts where job = $1 order by attempt"#,
        job.0
    )
    .fetch_all(connection)
    .await
    .doing("reading a job's attempts")?;
    let lines: Vec<String> =
        rows.iter().map(|r| format!("attempt {} on {}: {} ({})", r.attempt, r.node, r.outcome, r.detail)).collect();
    Ok(lines.join("; "))
}
