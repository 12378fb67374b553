use cfq_proto::job::{GeneratedTokens, JobFailure};
use cfq_proto::messages::Journal;

use super::*;

/// Appends to the journal of an attempt that resumed after `resumed` tokens.
async fn append_resumed(r: &Running, fence: JobFence, resumed: u32, after: u32, tokens: &[u32]) -> FenceReply {
    let generated = GeneratedTokens { vocabulary: -7, tokens: tokens.to_vec() };
    r.env.store.append_journal(&node(), &Journal { fence, boot: r.node, resumed, after, generated }).await.unwrap()
}

async fn append(r: &Running, fence: JobFence, after: u32, tokens: &[u32]) -> FenceReply {
    append_resumed(r, fence, 0, after, tokens).await
}

/// Number of tokens in the latest attempt's journal.
async fn kept(r: &Running) -> i64 {
    r.env.store.count("select cardinality(journal)::bigint from attempts order by attempt desc limit 1").await
}

#[tokio::test]
async fn next_attempt_resumes_with_the_tokens_of_the_lost_one() {
    let r = running().await;
    assert_eq!(append(&r, r.job, 0, &[1, 2, 3]).await, FenceReply::Committed);
    assert_eq!(append(&r, r.job, 3, &[4]).await, FenceReply::Committed);
    assert_eq!(append(&r, r.job, 3, &[4]).await, FenceReply::Committed, "repeated");
    let gap = append(&r, r.job, 9, &[5]).await;
    assert!(matches!(gap, FenceReply::Unavailable { .. }), "has to be sent from the start: {gap:?}");
    r.env.store.raw("update jobs set lease_expires = now() - interval '1 second'").await;
    r.env.store.sweep_now(r.leadership).await.unwrap();
    assert_eq!(append(&r, r.job, 4, &[5]).await, FenceReply::Stale, "the lease is lost");
    let order = place(&r.env, r.leadership, r.job.job, r.node).await;
    let expected = GeneratedTokens { vocabulary: -7, tokens: vec![1, 2, 3, 4] };
    assert_eq!(order.generated, Some(expected.clone()));
    let again = r.env.store.placed_order(order.fence).await.unwrap().unwrap();
    assert_eq!(again.generated, Some(expected), "a repeated work order is the same");
    assert_eq!(append(&r, order.fence, 4, &[5]).await, FenceReply::Stale, "not accepted yet");
    accept(&r.env, order.fence, r.node).await;
    // The node resumes after only the first two of these tokens, so its first message truncates the journal.
    assert_eq!(append_resumed(&r, order.fence, 2, 2, &[8]).await, FenceReply::Committed);
    assert_eq!(kept(&r).await, 3);
    let released = Outcome::Released { reason: ReleaseReason::Drained };
    report(&r.env, order.fence, r.node, released).await;
    let order = place(&r.env, r.leadership, r.job.job, r.node).await;
    assert_eq!(order.generated.unwrap().tokens, [1, 2, 8]);
}

#[tokio::test]
async fn failed_attempt_leaves_no_journal_to_resume() {
    let r = running().await;
    append(&r, r.job, 0, &[1, 2, 3]).await;
    let failure = JobFailure::Engine { reason: "not a number".into() };
    report(&r.env, r.job, r.node, Outcome::Failed { failure }).await;
    assert_eq!(place(&r.env, r.leadership, r.job.job, r.node).await.generated, None);
}

#[tokio::test]
async fn journal_length_and_token_ids_are_limited() {
    let r = running().await;
    let reply = append(&r, r.job, 0, &vec![1; cfq_proto::messages::MAX_JOURNAL_TOKENS + 1]).await;
    assert!(matches!(reply, FenceReply::Refused { .. }), "{reply:?}");
    assert!(matches!(append(&r, r.job, 0, &[u32::MAX]).await, FenceReply::Refused { .. }));
}

#[tokio::test]
async fn late_journal_message_removes_no_tokens() {
    let r = running().await;
    append(&r, r.job, 0, &[1, 2]).await;
    assert_eq!(append(&r, r.job, 2, &[3, 4, 5]).await, FenceReply::Committed);
    assert_eq!(append(&r, r.job, 2, &[3]).await, FenceReply::Committed, "stored already");
    assert_eq!(kept(&r).await, 5);
    // The first message arrives again, late, and truncates the journal. The journal is complete again once the node has
    // resent all tokens from the start.
    append(&r, r.job, 0, &[1, 2]).await;
    assert!(matches!(append(&r, r.job, 5, &[6]).await, FenceReply::Unavailable { .. }));
    assert_eq!(append(&r, r.job, 0, &[1, 2, 3, 4, 5, 6]).await, FenceReply::Committed);
    assert_eq!(kept(&r).await, 6);
}
