//! What an attempt has written so far. Once a node is lost, the next attempt at its job begins with that instead of with
//! nothing, unless the attempt itself failed: then its words may be the reason.

use cfq_proto::ids::{JobId, NodeId};
use cfq_proto::job::Written;
use cfq_proto::messages::{FenceReply, JOURNAL_MOST, Journal};
use sqlx::PgConnection;

use super::error::Doing;
use super::{Store, StoreError, nothing};

impl Store {
    /// Adds to the journal of a running attempt. Not waited for on disk: what a crash of Postgres takes is written again.
    pub async fn journal(&self, node: &NodeId, ask: &Journal) -> Result<FenceReply, StoreError> {
        let tokens: Result<Vec<i32>, _> = ask.written.tokens.iter().map(|token| i32::try_from(*token)).collect();
        let tokens = match tokens {
            Ok(tokens) if ask.after as usize + tokens.len() <= JOURNAL_MOST => tokens,
            Ok(_) => return Ok(FenceReply::Refused { reason: format!("a journal has at most {JOURNAL_MOST} tokens") }),
            Err(_) => return Ok(FenceReply::Refused { reason: "a token's number is too large".to_owned() }),
        };
        let mut tx = self.begin().await?;
        sqlx::query!("set local synchronous_commit = off").execute(&mut *tx).await.doing("keeping a journal")?;
        // Only the first word of an attempt shortens what an earlier one left: one that was overtaken changes nothing.
        let kept = sqlx::query_scalar!(
            r#"update attempts a set vocabulary = $6, journal =
                   case when $4 > $9 and cardinality(a.journal) >= $4 + cardinality($5::int[]) then a.journal
                        when cardinality(a.journal) >= $4 then a.journal[1:$4] || $5::int[]
                        else a.journal end
               from jobs j
               where a.job = $1 and a.attempt = $2 and a.lease = $3
                 and j.id = a.job and j.lease = a.lease and j.state = 'running' and j.node = $7 and j.node_boot = $8
               returning cardinality(a.journal) >= $4 + cardinality($5::int[]) as "kept!""#,
            ask.fence.job.0,
            ask.fence.attempt,
            ask.fence.lease.0,
            i32::try_from(ask.after).unwrap_or(i32::MAX),
            &tokens,
            ask.written.vocabulary,
            node.as_str(),
            ask.boot.0,
            i32::try_from(ask.resumed).unwrap_or(i32::MAX)
        )
        .fetch_optional(&mut *tx)
        .await
        .doing("keeping a journal")?;
        match kept {
            Some(true) => {}
            Some(false) => {
                let reason = format!("the journal has fewer than {} tokens", ask.after);
                return nothing(tx, FenceReply::Unavailable { reason }).await;
            }
            None => return nothing(tx, FenceReply::Stale).await,
        }
        tx.commit().await.doing("keeping a journal")?;
        Ok(FenceReply::Committed)
    }
}

/// Gives a new attempt the journal of the one before it.
pub(super) async fn pass_on(connection: &mut PgConnection, job: JobId, attempt: i32) -> Result<(), StoreError> {
    sqlx::query!(
        r#"update attempts new set journal = old.journal, vocabulary = old.vocabulary from attempts old
           where new.job = $1 and new.attempt = $2 and old.job = $1 and old.attempt = $2 - 1
             and old.outcome <> 'failed' and old.journal <> '{}'"#,
        job.0,
        attempt
    )
    .execute(connection)
    .await
    .doing("passing a journal on")?;
    Ok(())
}

/// What an attempt begins with.
pub(super) async fn begun_with(
    connection: &mut PgConnection,
    job: JobId,
    attempt: i32,
) -> Result<Option<Written>, StoreError> {
    let row = sqlx::query!(
        "select vocabulary, journal from attempts where job = $1 and attempt = $2 and journal <> '{}'",
        job.0,
        attempt
    )
    .fetch_optional(connection)
    .await
    .doing("reading a journal")?;
    Ok(row.map(|row| Written {
        vocabulary: row.vocabulary,
        tokens: row.journal.into_iter().filter_map(|token| u32::try_from(token).ok()).collect(),
    }))
}
