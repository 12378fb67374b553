//! Test of the requests that control one task.

use cfq_proto::client::ClientError;
use cfq_proto::http::{ErrorCode, StateReply};
use cfq_proto::task::Priority;

use super::*;

/// The error code and message of a refused request.
fn refusal(reply: Result<StateReply, ClientError>) -> (ErrorCode, String) {
    match reply {
        Err(ClientError::Refused { body, .. }) => (body.code, body.message),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_for_one_task_reply_with_its_state_or_why_they_are_refused() {
    let cluster = Cluster::start().await;
    let repo = UserRepo::with_uncommitted_changes();
    cluster.stop("runner").await;
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let client = &cluster.client;
    for refused in [client.pause(task, &"x".repeat(2_001)).await, client.cancel(task, &"x".repeat(2_001)).await] {
        let (code, message) = refusal(refused);
        assert!(code == ErrorCode::Invalid && message.contains("2000 bytes"), "{message}");
    }
    for _ in 0..2 {
        let paused = client.pause(task, "a break").await.unwrap();
        assert_eq!((paused.state, paused.note.as_str()), (TaskState::Paused, ""));
    }
    assert_eq!(client.task(task).await.unwrap().reason, "paused by a client: a break");
    let raised = client.set_priority(task, Priority::P0).await.unwrap();
    assert_eq!(raised.state, TaskState::Paused);
    assert_eq!(client.task(task).await.unwrap().summary.priority, Priority::P0);
    assert_eq!(client.resume(task).await.unwrap().state, TaskState::Ready);
    let (code, message) = refusal(client.resume(task).await);
    assert_eq!(code, ErrorCode::Conflict);
    assert!(message.contains("only a paused task"), "{message}");
    assert_eq!(client.cancel(task, "").await.unwrap().state, TaskState::Cancelled);
    for late in [client.pause(task, "").await, client.set_priority(task, Priority::P1).await] {
        let (code, message) = refusal(late);
        assert_eq!(code, ErrorCode::Conflict);
        assert!(message.contains("t1 is"), "{message}");
    }
    let unknown = "t99".parse().unwrap();
    for missing in [client.pause(unknown, "").await, client.resume(unknown).await] {
        assert_eq!(refusal(missing).0, ErrorCode::NotFound);
    }
    cluster.finish().await;
}
