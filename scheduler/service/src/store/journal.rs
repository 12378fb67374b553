//! Journals: the tokens that an attempt has generated so far. After a node is lost, the next attempt of the job resumes
//! after these tokens. If the attempt failed, the next attempt starts from the prompt instead, because the tokens may
//! have caused the failure.

use cfq_proto::ids::{JobId, NodeId};
use cfq_proto::job::GeneratedTokens;
use cfq_proto::messages::{FenceReply, Journal, MAX_JOURNAL_TOKENS, RefusedReason, UnavailableReason};
use sqlx::PgConnection;

use super::error::Doing;
use super::{Store, StoreError, roll_back};

impl Store {
    /// Appends to the journal of a running attempt. The commit is asynchronous (`synchronous_commit = off`): if a crash
    /// of Postgres loses tokens, the node sends them again.
    pub async fn append_journal(&self, node: &NodeId, request: &Journal) -> Result<FenceReply, StoreError> {
        let tokens: Result<Vec<i32>, _> = request.generated.tokens.iter().map(|token| i32::try_from(*token)).collect();
        let tokens = match tokens {
            Ok(tokens) if request.after as usize + tokens.len() <= MAX_JOURNAL_TOKENS => tokens,
            Ok(_) => {
                let reason = RefusedReason::JournalTooLong { limit: MAX_JOURNAL_TOKENS };
                return Ok(FenceReply::Refused { reason });
            }
            Err(_) => return Ok(FenceReply::Refused { reason: RefusedReason::TokenIdTooLarge }),
        };
        let mut tx = self.begin().await?;
        sqlx::query!("set local synchronous_commit = off").execute(&mut *tx).await.doing("writing a journal")?;
        // Only the first message of an attempt truncates the inherited journal, to the tokens from which the attempt
        // resumed. A later message whose tokens are already stored changes nothing.
        let kept = sqlx::query_scalar!(
            r#"update attempts a set vocabulary = $6, journal =
                   case when $4 > $9 and cardinality(a.journal) >= $4 + cardinality($5::int[]) then a.journal
                        when cardinality(a.journal) >= $4 then a.journal[1:$4] || $5::int[]
                        else a.journal end
               from jobs j
               where a.job = $1 and a.attempt = $2 and a.lease = $3
                 and j.id = a.job and j.lease = a.lease and j.state = 'running' and j.node = $7 and j.node_boot = $8
               returning cardinality(a.journal) >= $4 + cardinality($5::int[]) as "kept!""#,
            request.fence.job.0,
            request.fence.attempt,
            request.fence.lease.0,
            i32::try_from(request.after).unwrap_or(i32::MAX),
            &tokens,
            request.generated.vocabulary,
            node.as_str(),
            request.boot.0,
            i32::try_from(request.resumed).unwrap_or(i32::MAX)
        )
        .fetch_optional(&mut *tx)
        .await
        .doing("writing a journal")?;
        match kept {
            Some(true) => {}
            Some(false) => {
                let reason = UnavailableReason::JournalGap { after: request.after };
                return roll_back(tx, FenceReply::Unavailable { reason }).await;
            }
            None => return roll_back(tx, FenceReply::Stale).await,
        }
        tx.commit().await.doing("writing a journal")?;
        Ok(FenceReply::Committed)
    }
}

/// Copies the journal of the previous attempt to the new attempt, unless the previous attempt failed.
pub(super) async fn inherit(connection: &mut PgConnection, job: JobId, attempt: i32) -> Result<(), StoreError> {
    sqlx::query!(
        r#"update attempts new set journal = old.journal, vocabulary = old.vocabulary from attempts old
           where new.job = $1 and new.attempt = $2 and old.job = $1 and old.attempt = $2 - 1
             and old.outcome <> 'failed' and old.journal <> '{}'"#,
        job.0,
        attempt
    )
    .execute(connection)
    .await
    .doing("copying a journal")?;
    Ok(())
}

/// The generated tokens after which an attempt resumes; `None` if it starts from the prompt.
pub(super) async fn resume_tokens(
    connection: &mut PgConnection,
    job: JobId,
    attempt: i32,
) -> Result<Option<GeneratedTokens>, StoreError> {
    let row = sqlx::query!(
        "select vocabulary, journal from attempts where job = $1 and attempt = $2 and journal <> '{}'",
        job.0,
        attempt
    )
    .fetch_optional(connection)
    .await
    .doing("reading a journal")?;
    Ok(row.map(|row| GeneratedTokens {
        vocabulary: row.vocabulary,
        tokens: row.journal.into_iter().filter_map(|token| u32::try_from(token).ok()).collect(),
    }))
}
