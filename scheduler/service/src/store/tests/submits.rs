use cfq_proto::ids::TaskKey;
use cfq_proto::task::TaskState;

use super::super::Submitted;
use crate::testing::{TestEnv, new_task};

async fn list(env: &TestEnv, state: TaskState) -> Result<Vec<cfq_proto::http::TaskSummary>, super::super::StoreError> {
    let filter = super::super::TaskFilter { states: vec![state], ..super::super::TaskFilter::default() };
    env.store.list_tasks(&filter, Default::default(), None, 10).await
}

#[tokio::test]
async fn idempotency_key_creates_one_task_under_concurrent_submits() {
    let env = TestEnv::new().await;
    let tasks: Vec<_> = (0..8).map(|_| new_task(Some("k"))).collect();
    let answers = futures::future::join_all(tasks.iter().map(|t| env.store.submit(t))).await;
    let mut ids = std::collections::BTreeSet::new();
    let mut created = 0;
    for answer in answers {
        match answer.unwrap() {
            Submitted::Created { id, .. } => {
                created += 1;
                ids.insert(id);
            }
            Submitted::Existing { id, state, .. } => {
                assert_eq!(state, TaskState::Ready);
                ids.insert(id);
            }
            other => panic!("the body is the same: {other:?}"),
        }
    }
    assert_eq!((created, ids.len()), (1, 1));
    let mut other = new_task(Some("k"));
    other.body_hash = "another".into();
    assert!(matches!(env.store.submit(&other).await.unwrap(), Submitted::KeyReused { .. }));
    assert_eq!(env.store.count("select count(*) from events").await, 1);
}

#[tokio::test]
async fn task_is_found_by_number_and_id_and_listed() {
    let env = TestEnv::new().await;
    let (id, number) = env.submit().await;
    assert_eq!(env.store.find_task(TaskKey::Id(id)).await.unwrap(), Some(id));
    assert_eq!(env.store.find_task(TaskKey::Number(number)).await.unwrap(), Some(id));
    let listed = list(&env, TaskState::Ready).await.unwrap();
    assert_eq!(listed.iter().map(|t| t.id).collect::<Vec<_>>(), vec![id]);
    assert!(list(&env, TaskState::Failed).await.unwrap().is_empty());
    let detail = env.store.task_detail(id).await.unwrap().unwrap();
    assert_eq!(detail.spec, crate::testing::spec());
}

#[tokio::test]
async fn concurrent_submits_are_written_together_and_a_faulty_one_fails_alone() {
    let env = TestEnv::new().await;
    let mut tasks: Vec<_> = (0..32).map(|_| new_task(None)).collect();
    // Postgres cannot store this character.
    tasks[7].title = "a\0b".into();
    let results = futures::future::join_all(tasks.iter().map(|task| env.store.submit(task))).await;
    for (n, result) in results.iter().enumerate() {
        assert_eq!(matches!(result, Ok(Submitted::Created { .. })), n != 7, "{n}: {result:?}");
    }
    let good: Vec<_> = (0..32).map(|_| new_task(None)).collect();
    let before = env.store.count("select count(distinct xid::text) from events").await;
    futures::future::join_all(good.iter().map(|task| env.store.submit(task))).await;
    let transactions = env.store.count("select count(distinct xid::text) from events").await - before;
    assert!(transactions <= 4, "32 submits made {transactions} transactions");
    assert_eq!(env.store.count("select count(*) from events").await, 63);
    assert_eq!(env.store.count("select count(*) from tasks where next_event = 1").await, 63);
}

#[tokio::test]
async fn deadline_brings_a_task_forward_by_at_most_one_class() {
    use cfq_proto::task::Priority;
    let env = TestEnv::new().await;
    let now_s = env.store.clock_ms().await.unwrap() / 1000;
    let minutes = async |priority, deadline_in_minutes: Option<i64>| {
        let mut task = new_task(None);
        task.spec.priority = priority;
        task.spec.deadline = deadline_in_minutes.map(|m| now_s + m * 60);
        env.store.submit(&task).await.unwrap();
        let key = "select round(extract(epoch from order_key - created_at) / 60)::bigint from tasks where id = ";
        env.store.count(&format!("{key}'{}'", task.id)).await
    };
    assert_eq!(minutes(Priority::P0, None).await, 0);
    assert_eq!(minutes(Priority::P3, None).await, 30);
    assert_eq!(minutes(Priority::P2, Some(120)).await, 20);
    assert_eq!(minutes(Priority::P2, Some(25)).await, 15);
    assert_eq!(minutes(Priority::P2, Some(3)).await, 10);
}
