use cfq_proto::ids::TaskKey;
use cfq_proto::task::TaskState;

use super::super::Submitted;
use crate::testing::{TestEnv, new_task};

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
            Submitted::KeyReused { .. } | Submitted::TooLate => panic!("the body is the same"),
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
    let listed = env.store.list_tasks(Some(TaskState::Ready), 10).await.unwrap();
    assert_eq!(listed.iter().map(|t| t.id).collect::<Vec<_>>(), vec![id]);
    assert!(env.store.list_tasks(Some(TaskState::Failed), 10).await.unwrap().is_empty());
    let detail = env.store.task_detail(id).await.unwrap().unwrap();
    assert_eq!(detail.spec, crate::testing::spec());
}
