//! Attempts of jobs, one row each. A repeated or late report is compared with its row; the rows of a dead job are the
//! evidence of its failure.

use cfq_proto::ids::JobId;
use cfq_proto::messages::JobFence;
use sqlx::PgConnection;

use super::StoreError;
use super::columns::pg_text;
use super::error::Doing;

/// Ends the latest attempt of a job, unless it ended before.
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

/// Outcomes of a job's attempts as text, oldest first: the evidence in the failure of a dead job.
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
