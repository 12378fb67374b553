//! One row for each try of a job: what a repeated or late report is compared with, and the evidence of a dead job.

use cfq_proto::ids::JobId;
use cfq_proto::messages::JobFence;
use sqlx::PgConnection;

use super::StoreError;
use super::error::{Doing, plain};

/// Ends the newest attempt of a job, if it lives.
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
        plain(detail)
    )
    .execute(connection)
    .await
    .doing("ending an attempt")?;
    Ok(())
}

/// How an attempt ended, if it was made and has.
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

/// The ends of a job's attempts in words, oldest first: what makes a dead job's failure evidence.
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
