//! What a runner reports that it does.

use cfq_proto::messages::{ActivityReport, FenceReply, JobCancel};
use cfq_proto::task::Priority;

use super::super::transaction::Run;
use super::*;

#[tokio::test]
async fn activity_lasts_until_the_next_step() {
    let env = TestEnv::new().await;
    env.submit().await;
    let boot = env.join_runner().await;
    let fence = grant(&env, boot).await.fence;
    committed(&env, fence, 0, started()).await;
    let record = async |seq, fence, text: &str| {
        let report = ActivityReport { fence, seq, activity: text.to_owned() };
        env.store.record_activity(&runner(), &report).await.unwrap()
    };
    let shown = async || env.store.task_detail(fence.task).await.unwrap().unwrap().activity.map(|now| now.text);
    let events = async || env.store.task_events(fence.task, 0).await.unwrap().len();
    assert_eq!(shown().await, None);
    assert_eq!(record(1, fence, "running the check `a`").await, FenceReply::Committed);
    assert_eq!(shown().await.as_deref(), Some("running the check `a`"));
    // A repeated report is no second event, and another priority ends nothing.
    let before = events().await;
    env.store.set_priority(fence.task, Priority::P0, "me", Run::Commit).await.unwrap();
    assert_eq!(record(1, fence, "running the check `a`").await, FenceReply::Committed);
    assert_eq!((events().await, shown().await.as_deref()), (before + 1, Some("running the check `a`")));
    // Reports of another holder, and of a step that is committed, change nothing.
    let other = TaskFence { lease: LeaseId::fresh(), ..fence };
    assert_eq!(record(1, other, "running the check `b`").await, FenceReply::Stale);
    committed(&env, fence, 1, generated(artifact(1))).await;
    assert_eq!(shown().await, None);
    assert_eq!(record(1, fence, "running the check `b`").await, FenceReply::Stale);
    assert_eq!(shown().await, None);
    let request = JobSubmit { seq: 2, ..submit_job(fence, 2) };
    let called = view(env.store.submit_job(&runner(), &request).await.unwrap().0);
    assert_eq!(record(2, fence, "installing").await, FenceReply::Stale, "a model call has begun");
    let cancel = JobCancel { fence, job: called.id };
    env.store.cancel_job(&runner(), &cancel).await.unwrap();
    let long = "é".repeat(500);
    assert_eq!(record(2, fence, &long).await, FenceReply::Committed);
    assert_eq!(shown().await.map(|text| text.len()), Some(400));
}
