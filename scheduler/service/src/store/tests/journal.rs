use cfq_proto::job::{JobFailure, Written};
use cfq_proto::messages::Journal;

use super::*;

/// Of an attempt that took over `resumed` tokens.
async fn tell_after(r: &Running, fence: JobFence, resumed: u32, after: u32, tokens: &[u32]) -> FenceReply {
    let written = Written { vocabulary: -7, tokens: tokens.to_vec() };
    r.lab.store.journal(&node(), &Journal { fence, boot: r.node, resumed, after, written }).await.unwrap()
}

async fn tell(r: &Running, fence: JobFence, after: u32, tokens: &[u32]) -> FenceReply {
    tell_after(r, fence, 0, after, tokens).await
}

async fn kept(r: &Running) -> i64 {
    r.lab.store.count("select cardinality(journal)::bigint from attempts order by attempt desc limit 1").await
}

#[tokio::test]
async fn the_next_attempt_begins_with_what_the_lost_one_wrote() {
    let r = running().await;
    assert_eq!(tell(&r, r.job, 0, &[1, 2, 3]).await, FenceReply::Committed);
    assert_eq!(tell(&r, r.job, 3, &[4]).await, FenceReply::Committed);
    assert_eq!(tell(&r, r.job, 3, &[4]).await, FenceReply::Committed, "told twice");
    let gap = tell(&r, r.job, 9, &[5]).await;
    assert!(matches!(gap, FenceReply::Unavailable { .. }), "to be told from the start: {gap:?}");
    r.lab.store.raw("update jobs set lease_expires = now() - interval '1 second'").await;
    r.lab.store.sweep(r.lead).await.unwrap();
    assert_eq!(tell(&r, r.job, 4, &[5]).await, FenceReply::Stale, "the lease is lost");
    let order = place(&r.lab, r.lead, r.job.job, r.node).await;
    let expected = Written { vocabulary: -7, tokens: vec![1, 2, 3, 4] };
    assert_eq!(order.written, Some(expected.clone()));
    let again = r.lab.store.placed_order(order.fence).await.unwrap().unwrap();
    assert_eq!(again.written, Some(expected), "sent again it says the same");
    assert_eq!(tell(&r, order.fence, 4, &[5]).await, FenceReply::Stale, "not accepted yet");
    accept(&r.lab, order.fence, r.node).await;
    // The node could use only a part of it.
    assert_eq!(tell_after(&r, order.fence, 2, 2, &[8]).await, FenceReply::Committed);
    assert_eq!(kept(&r).await, 3);
    let released = Outcome::Released { reason: "draining".into() };
    report(&r.lab, order.fence, r.node, released).await;
    let order = place(&r.lab, r.lead, r.job.job, r.node).await;
    assert_eq!(order.written.unwrap().tokens, [1, 2, 8]);
}

#[tokio::test]
async fn an_attempt_that_failed_leaves_nothing_to_go_on_from() {
    let r = running().await;
    tell(&r, r.job, 0, &[1, 2, 3]).await;
    let failure = JobFailure::Engine { reason: "not a number".into() };
    report(&r.lab, r.job, r.node, Outcome::Failed { failure }).await;
    assert_eq!(place(&r.lab, r.lead, r.job.job, r.node).await.written, None);
}

#[tokio::test]
async fn a_journal_has_an_end() {
    let r = running().await;
    let reply = tell(&r, r.job, 0, &vec![1; cfq_proto::messages::JOURNAL_MOST + 1]).await;
    assert!(matches!(reply, FenceReply::Refused { .. }), "{reply:?}");
    assert!(matches!(tell(&r, r.job, 0, &[u32::MAX]).await, FenceReply::Refused { .. }));
}

#[tokio::test]
async fn a_word_that_was_overtaken_takes_nothing_back() {
    let r = running().await;
    tell(&r, r.job, 0, &[1, 2]).await;
    assert_eq!(tell(&r, r.job, 2, &[3, 4, 5]).await, FenceReply::Committed);
    assert_eq!(tell(&r, r.job, 2, &[3]).await, FenceReply::Committed, "it is there already");
    assert_eq!(kept(&r).await, 5);
    // The first word, late: told from the start again, nothing is missing.
    tell(&r, r.job, 0, &[1, 2]).await;
    assert!(matches!(tell(&r, r.job, 5, &[6]).await, FenceReply::Unavailable { .. }));
    assert_eq!(tell(&r, r.job, 0, &[1, 2, 3, 4, 5, 6]).await, FenceReply::Committed);
    assert_eq!(kept(&r).await, 6);
}
