//! Tests of the order in which tasks of several API tokens are granted.

use std::collections::{BTreeMap, BTreeSet};

use cfq_proto::http::{ApiTokenLimits, ApiTokenRequest, ApiTokenRole, TaskWait};
use cfq_proto::ids::{ApiTokenId, TaskId};

use super::super::TokenAdded;
use super::rows_read::{rows_read, single_connection};
use super::*;
use crate::testing::new_task;

/// Stores a token with this maximum of running tasks.
async fn token(env: &TestEnv, name: &str, running_tasks: Option<u32>) -> ApiTokenId {
    let new = ApiTokenRequest {
        name: name.parse().unwrap(),
        role: ApiTokenRole::Submit,
        ttl_seconds: None,
        limits: ApiTokenLimits { running_tasks, ..ApiTokenLimits::default() },
    };
    let mut hash = [0; 32];
    hash[..name.len()].copy_from_slice(name.as_bytes());
    assert!(matches!(env.store.add_token(hash, &new, "test").await.unwrap(), TokenAdded::Done(_)));
    let tokens = env.store.stored_tokens().await.unwrap();
    tokens.into_iter().find(|token| token.hash == hash).unwrap().id
}

async fn submit(env: &TestEnv, token: ApiTokenId) -> TaskId {
    let mut task = new_task(None);
    task.token = token;
    env.store.submit(&task).await.unwrap();
    task.id
}

async fn before(env: &TestEnv, task: TaskId) -> (u64, Option<u32>) {
    match env.store.explanation(task, None).await.unwrap().unwrap().task.waits_for {
        Some(TaskWait::RunnerSlot { before, running_tasks_limit, .. }) => (before, running_tasks_limit),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn token_with_many_tasks_delays_another_by_one_slot() {
    let env = TestEnv::new().await;
    let boot = env.join_runner().await;
    let (busy, late) = (token(&env, "busy", None).await, token(&env, "late", None).await);
    let mut of_busy = Vec::new();
    for _ in 0..5 {
        of_busy.push(submit(&env, busy).await);
    }
    assert_eq!(grant(&env, boot).await.fence.task, of_busy[0]);
    let of_owner = submit(&env, ApiTokenId::OWNER).await;
    let of_late = [submit(&env, late).await, submit(&env, late).await];
    let expected = [of_owner, of_late[0], of_busy[1], of_late[1], of_busy[2], of_busy[3], of_busy[4]];
    for (n, task) in expected.iter().enumerate() {
        assert_eq!(before(&env, *task).await, (n as u64, None), "task {n}");
    }
    for (n, task) in expected.into_iter().enumerate() {
        assert_eq!(grant(&env, boot).await.fence.task, task, "grant {n}");
    }
}

/// With one slot, no token has a running task when it becomes free.
#[tokio::test]
async fn tokens_take_turns_at_a_single_slot() {
    let env = TestEnv::new().await;
    let boot = env.join_runner().await;
    let (busy, late) = (token(&env, "busy", None).await, token(&env, "late", None).await);
    let mut of_busy = Vec::new();
    for _ in 0..4 {
        of_busy.push(submit(&env, busy).await);
    }
    let of_late = [submit(&env, late).await, submit(&env, late).await];
    for task in [of_busy[0], of_late[0], of_busy[1], of_late[1], of_busy[2], of_busy[3]] {
        assert_eq!(before(&env, task).await.0, 0);
        assert_eq!(grant(&env, boot).await.fence.task, task);
        env.store.cancel(task, "test", Run::Commit).await.unwrap();
    }
}

/// The clock was an hour ahead when two tokens got their last slots.
#[tokio::test]
async fn tokens_take_turns_after_the_clock_was_set_back() {
    let env = TestEnv::new().await;
    let boot = env.join_runner().await;
    let (a, b) = (token(&env, "a", None).await, token(&env, "b", None).await);
    for _ in 0..5 {
        submit(&env, a).await;
    }
    let of_b = [submit(&env, b).await, submit(&env, b).await];
    for _ in 0..2 {
        let task = grant(&env, boot).await.fence.task;
        env.store.cancel(task, "test", Run::Commit).await.unwrap();
        env.store.raw(&format!("update tasks set granted_at = now() + interval '1 hour' where id = '{task}'")).await;
    }
    let mut turns = Vec::new();
    for _ in 0..2 {
        let task = grant(&env, boot).await.fence.task;
        turns.push(of_b.contains(&task));
        env.store.cancel(task, "test", Run::Commit).await.unwrap();
    }
    turns.sort_unstable();
    assert_eq!(turns, [false, true]);
}

/// A submission that refers to a ready task locks its row; this is no grant.
#[tokio::test]
async fn locked_task_takes_no_place_in_the_limit() {
    let env = TestEnv::new().await;
    let boot = env.join_runner().await;
    let narrow = token(&env, "narrow", Some(1)).await;
    submit(&env, narrow).await;
    let second = submit(&env, narrow).await;
    let _lock = env.store.hold("select from tasks where number = 1 for share").await;
    assert_eq!(grant(&env, boot).await.fence.task, second);
}

#[tokio::test]
async fn limit_of_running_tasks_holds_with_concurrent_requests() {
    let env = TestEnv::new().await;
    let boot = env.join_runner().await;
    let (narrow, wide) = (token(&env, "narrow", Some(2)).await, token(&env, "wide", Some(3)).await);
    let mut of_narrow = BTreeSet::new();
    for _ in 0..6 {
        of_narrow.insert(submit(&env, narrow).await);
        submit(&env, wide).await;
    }
    let requests = (0..12).map(|_| grant_reply(&env, boot));
    let mut granted: Vec<TaskId> = Vec::new();
    for reply in futures::future::join_all(requests).await {
        if let LeaseReply::Granted { grant: Payload::Inline(grant), .. } = reply {
            granted.push(grant.fence.task);
        }
    }
    // A request that finds both tokens locked for long gets nothing and asks again.
    while let LeaseReply::Granted { grant: Payload::Inline(grant), .. } = grant_reply(&env, boot).await {
        granted.push(grant.fence.task);
    }
    let of_narrow_granted = granted.iter().filter(|task| of_narrow.contains(task)).count();
    assert_eq!((of_narrow_granted, granted.len()), (2, 5));
    let waiting = of_narrow.iter().find(|task| !granted.contains(task)).unwrap();
    assert_eq!(before(&env, *waiting).await.1, Some(2));

    // Each task of the token that ends makes room for one.
    let ended = granted.iter().find(|task| of_narrow.contains(task)).unwrap();
    env.store.cancel(*ended, "test", Run::Commit).await.unwrap();
    let LeaseReply::Granted { grant: Payload::Inline(next), .. } = grant_reply(&env, boot).await else {
        panic!("a grant")
    };
    assert!(of_narrow.contains(&next.fence.task));
    assert!(matches!(grant_reply(&env, boot).await, LeaseReply::None));
}

#[tokio::test]
async fn concurrent_requests_share_the_slots_equally() {
    let env = TestEnv::new().await;
    let boot = env.join_runner().await;
    let mut owner: BTreeMap<TaskId, ApiTokenId> = BTreeMap::new();
    for name in ["a", "b", "c"] {
        let token = token(&env, name, None).await;
        for _ in 0..8 {
            owner.insert(submit(&env, token).await, token);
        }
    }
    let mut running: BTreeMap<ApiTokenId, i32> = BTreeMap::new();
    for _ in 0..3 {
        for reply in futures::future::join_all((0..4).map(|_| grant_reply(&env, boot))).await {
            let LeaseReply::Granted { grant: Payload::Inline(grant), .. } = reply else { panic!("{reply:?}") };
            *running.entry(owner[&grant.fence.task]).or_default() += 1;
        }
    }
    // Requests at the same time may count a task of another one or not.
    let counts: Vec<i32> = running.into_values().collect();
    assert!(counts.len() == 3 && counts.iter().all(|count| (2..=6).contains(count)), "{counts:?}");
}

#[tokio::test]
async fn grant_among_many_tokens_reads_few_rows() {
    let env = TestEnv::new().await;
    let boot = env.join_runner().await;
    // 100 tokens with 300 ready tasks each; tasks of revoked tokens, whose rows are gone, are granted too.
    env.store
        .raw(
            "insert into tasks (id, body_hash, spec, title, priority, state, threshold, max_iterations, api_token)
             select gen_random_uuid(), 'h', '{\"description\": \"x\", \"repo\": \"/r\"}', 'many', 2, 'ready', 85, 5,
                    ('00000000-0000-4000-8000-' || lpad((n % 100)::text, 12, '0'))::uuid
             from generate_series(1, 30000) as n;
             insert into tasks (id, body_hash, spec, title, priority, state, threshold, max_iterations, api_token, granted_at)
             select gen_random_uuid(), 'h', '{}', 'earlier', 2, case when n % 100 = 0 then 'running' else 'merged' end, 85, 5,
                    ('00000000-0000-4000-8000-' || lpad((n % 99)::text, 12, '0'))::uuid, now() - n * interval '1 second'
             from generate_series(1, 20000) as n;
             analyze",
        )
        .await;
    let store = single_connection(&env);
    store.raw("select 1 from tasks limit 1").await;
    let (read, reply) = rows_read(&store, store.grant(&runner(), &LeaseRequest { boot, request: None })).await;
    assert!(matches!(reply.unwrap(), LeaseReply::Granted { .. }));
    assert!(read <= 1_500, "{read} rows read");
}
