//! Tests of changed priorities, retries, and lists of tasks by state and priority.

use cfq_proto::http::{ListPosition, TaskSort};
use cfq_proto::ids::{ApiTokenId, TaskId, TaskNumber};
use cfq_proto::task::{Priority, TaskState};

use super::super::{Hint, LeaderHint, PriorityOutcome, RetryOutcome, TaskFilter};
use super::rows_read::{add_tasks, rows_read, single_connection};
use super::*;

#[tokio::test]
async fn priority_changes_the_keys_of_the_task_and_of_its_jobs_as_if_submitted_with_it() {
    let r = running().await;
    let mut urgent = crate::testing::new_task(None);
    urgent.spec.priority = Priority::P0;
    urgent.spec.deadline = Some(r.env.store.clock_ms().await.unwrap() / 1000 + 30);
    r.env.store.submit(&urgent).await.unwrap();
    // Both tasks have the same creation time and deadline from here on.
    r.env
        .store
        .raw("update tasks t set created_at = o.created_at, deadline = o.deadline from tasks o where o.priority = 0")
        .await;
    r.env.store.raw("update tasks set order_key = created_at where priority = 2").await;
    let done = r.env.store.set_priority(r.task.task, Priority::P0, "me", Run::Dry).await.unwrap();
    assert!(matches!(done, PriorityOutcome::Done { from: Priority::P2, .. }), "{done:?}");
    assert_eq!(
        r.env.store.count("select count(*) from tasks where priority = 2").await,
        1,
        "a dry run changes nothing"
    );
    let done = r.env.store.set_priority(r.task.task, Priority::P0, "me", Run::Commit).await.unwrap();
    let PriorityOutcome::Done { hints, .. } = done else { panic!("{done:?}") };
    assert_eq!(hints, vec![Hint::Leader(LeaderHint::Job(r.job.job))]);
    assert_eq!(r.env.store.live_jobs().await[0].priority, Priority::P0);
    let same = "select count(*) from tasks where order_key = (select order_key from tasks where number = 2)";
    assert_eq!(r.env.store.count(same).await, 2);
    let again = r.env.store.set_priority(r.task.task, Priority::P0, "me", Run::Commit).await.unwrap();
    assert!(matches!(again, PriorityOutcome::Already { .. }), "{again:?}");
    r.env.store.cancel(r.task.task, "me", Run::Commit).await.unwrap();
    let late = r.env.store.set_priority(r.task.task, Priority::P1, "me", Run::Commit).await.unwrap();
    assert!(matches!(late, PriorityOutcome::Ended { state: TaskState::Cancelled, .. }), "{late:?}");
}

#[tokio::test]
async fn retry_is_a_new_task_without_the_passed_deadline_and_is_made_once() {
    let env = TestEnv::new().await;
    let mut late = crate::testing::new_task(Some("key"));
    late.spec.deadline = Some(env.store.clock_ms().await.unwrap() / 1000 + 3600);
    env.store.submit(&late).await.unwrap();
    for state in TaskState::ALL.into_iter().filter(|s| !s.is_terminal() || *s == TaskState::Merged) {
        env.store.raw(&format!("update tasks set state = '{state}'")).await;
        let refused = env.store.retry(late.id, ApiTokenId::OWNER, Run::Commit).await.unwrap();
        assert!(matches!(refused, RetryOutcome::Refused { .. }), "{state}: {refused:?}");
    }
    env.store.raw("update tasks set state = 'failed', priority = 1, deadline = now()").await;
    env.store.raw("update tasks set spec = jsonb_set(spec::jsonb, '{deadline}', '1000')::json").await;
    let tried = env.store.retry(late.id, ApiTokenId::OWNER, Run::Dry).await.unwrap();
    assert!(matches!(tried, RetryOutcome::Done { new: None, .. }), "{tried:?}");
    assert_eq!(env.store.count("select count(*) from tasks").await, 1);
    let RetryOutcome::Done { new: Some((new, number)), .. } =
        env.store.retry(late.id, ApiTokenId::OWNER, Run::Commit).await.unwrap()
    else {
        panic!("a new task")
    };
    let retried = env.store.task_detail(new).await.unwrap().unwrap();
    assert_eq!((retried.summary.state, retried.summary.retry_of), (TaskState::Ready, Some(late.id)));
    assert_eq!((retried.spec.priority, retried.spec.deadline), (Priority::P1, None));
    assert_eq!(env.store.count("select count(*) from tasks where deadline is null").await, 1);
    assert_eq!(env.store.task_events(new, 0).await.unwrap().len(), 1);
    let again = env.store.retry(late.id, ApiTokenId::OWNER, Run::Commit).await.unwrap();
    assert_eq!(again, RetryOutcome::Already { number: TaskNumber(1), state: TaskState::Failed, by: number });
}

/// Numbers of the tasks on all pages.
async fn pages(store: &Store, filter: &TaskFilter, sort: TaskSort) -> Vec<i64> {
    let (mut numbers, mut after) = (Vec::new(), None);
    loop {
        let page = store.find_tasks(filter, sort, after, 3).await.unwrap();
        let Some((task, number)) = page.last() else { return numbers };
        let priority = store.task_detail(*task).await.unwrap().unwrap().summary.priority;
        after = Some(ListPosition { priority, number: *number });
        numbers.extend(page.iter().map(|(_, number)| number.0));
    }
}

#[tokio::test]
async fn pages_contain_each_task_once_in_the_order_of_the_list() {
    let env = TestEnv::new().await;
    for n in 1..=12 {
        env.submit().await;
        let state = if n % 3 == 0 { "paused" } else { "ready" };
        env.store.raw(&format!("update tasks set priority = {}, state = '{state}' where number = {n}", n % 2)).await;
    }
    let all = TaskFilter::default();
    assert_eq!(pages(&env.store, &all, TaskSort::Newest).await, (1..=12).rev().collect::<Vec<_>>());
    assert_eq!(pages(&env.store, &all, TaskSort::Oldest).await, (1..=12).collect::<Vec<_>>());
    let by_priority = pages(&env.store, &all, TaskSort::Priority).await;
    assert_eq!(by_priority, [2, 4, 6, 8, 10, 12, 1, 3, 5, 7, 9, 11]);
    let paused = TaskFilter { states: vec![TaskState::Paused], ..TaskFilter::default() };
    assert_eq!(pages(&env.store, &paused, TaskSort::Newest).await, [12, 9, 6, 3]);
    let urgent = TaskFilter {
        states: vec![TaskState::Paused, TaskState::Ready],
        priorities: vec![Priority::P0],
        ..TaskFilter::default()
    };
    assert_eq!(pages(&env.store, &urgent, TaskSort::Priority).await, [2, 4, 6, 8, 10, 12]);
}

#[tokio::test]
async fn list_reads_few_rows_beside_many_ended_tasks() {
    let env = TestEnv::new().await;
    add_tasks(&env, 100_000, "(array['merged', 'accepted', 'failed', 'cancelled'])[1 + n % 4]").await;
    env.submit().await;
    env.store.raw("analyze").await;
    let store = single_connection(&env);
    store.raw("select 1 from tasks limit 1").await;
    let limit = 10;
    // At most `limit` index entries of each state and priority, the row of each result, and what Postgres reads.
    let most = 44 * limit + 500;
    let middle = Some(ListPosition { priority: Priority::P3, number: TaskNumber(50_000) });
    let failed =
        TaskFilter { states: vec![TaskState::Failed], priorities: vec![Priority::P3], ..TaskFilter::default() };
    let ready = TaskFilter { states: vec![TaskState::Ready], ..TaskFilter::default() };
    for (filter, found) in [(TaskFilter::default(), 10), (failed, 10), (ready, 0)] {
        for sort in [TaskSort::Newest, TaskSort::Oldest, TaskSort::Priority] {
            let (read, page) = rows_read(&store, store.list_tasks(&filter, sort, middle, limit)).await;
            let page = page.unwrap();
            assert!(read <= most, "{sort:?}, {filter:?}: {read} rows read");
            assert!(page.len() == found || filter.states == [TaskState::Ready], "{sort:?}, {filter:?}: {page:?}");
        }
    }
}

#[tokio::test]
async fn labelled_tasks_are_listed_in_each_order_and_deleted_with_their_labels() {
    let env = TestEnv::new().await;
    for n in 1..=8 {
        let mut task = crate::testing::new_task(None);
        // Those with a predecessor are written by another statement.
        task.spec.after = (n == 7).then(|| "t1".parse().unwrap()).into_iter().collect();
        task.spec.labels = ["all", "even", "even"].map(|label| label.parse().unwrap()).to_vec();
        task.spec.labels.truncate(if n % 2 == 0 { 3 } else { 1 });
        env.store.submit(&task).await.unwrap();
        env.store.raw(&format!("update tasks set priority = {} where number = {n}", n % 3)).await;
    }
    env.submit().await;
    let labelled = |labels: &[&str]| TaskFilter {
        labels: labels.iter().map(|label| label.parse().unwrap()).collect(),
        ..TaskFilter::default()
    };
    let all = labelled(&["all"]);
    assert_eq!(pages(&env.store, &all, TaskSort::Newest).await, (1..=8).rev().collect::<Vec<_>>());
    assert_eq!(pages(&env.store, &all, TaskSort::Oldest).await, (1..=8).collect::<Vec<_>>());
    assert_eq!(pages(&env.store, &all, TaskSort::Priority).await, [3, 6, 1, 4, 7, 2, 5, 8]);
    assert_eq!(pages(&env.store, &labelled(&["even", "all", "all"]), TaskSort::Newest).await, [8, 6, 4, 2]);
    assert_eq!(pages(&env.store, &labelled(&["all", "odd"]), TaskSort::Newest).await, [0; 0]);
    let urgent = TaskFilter { priorities: vec![Priority::P0], ..all.clone() };
    assert_eq!(pages(&env.store, &urgent, TaskSort::Newest).await, [6, 3]);
    let blocked = TaskFilter { states: vec![TaskState::Blocked], ..all };
    let listed = env.store.list_tasks(&blocked, TaskSort::Oldest, None, 10).await.unwrap();
    assert_eq!((listed.len(), listed[0].number, listed[0].labels[0].as_str()), (1, TaskNumber(7), "all"));
    // Runners of earlier versions refuse fields that they do not know.
    let boot = env.join_runner().await;
    assert_eq!(grant(&env, boot).await.spec.labels, []);
    env.store.raw("delete from task_dependencies; delete from events; delete from tasks").await;
    assert_eq!(env.store.count("select count(*) from task_labels").await, 0);
}

#[tokio::test]
async fn list_of_a_label_reads_few_rows_beside_many_tasks() {
    let env = TestEnv::new().await;
    add_tasks(&env, 20_000, "'merged'").await;
    let mut task = crate::testing::new_task(None);
    task.spec.labels = vec!["rare".parse().unwrap()];
    env.store.submit(&task).await.unwrap();
    add_tasks(&env, 20_000, "'merged'").await;
    env.store.raw("insert into task_labels (task, label, number) select id, 'common', number from tasks").await;
    env.store.raw("analyze").await;
    let store = single_connection(&env);
    store.raw("select 1 from tasks limit 1").await;
    for (labels, found) in [(vec!["rare"], 1), (vec!["common"], 10), (vec!["common", "rare"], 1)] {
        let labels = labels.iter().map(|label| label.parse().unwrap()).collect();
        let filter = TaskFilter { labels, ..TaskFilter::default() };
        for sort in [TaskSort::Newest, TaskSort::Oldest] {
            let (read, page) = rows_read(&store, store.list_tasks(&filter, sort, None, 10)).await;
            assert_eq!(page.unwrap().len(), found, "{filter:?}, {sort:?}");
            // The comparison of two labels reads up to a thousand entries and rows of each.
            let most = if filter.labels.len() > 1 { 2_600 } else { 600 };
            assert!(read <= most, "{filter:?}, {sort:?}: {read} rows read");
        }
    }
}

#[tokio::test]
async fn tasks_of_a_repository_are_listed_in_each_order() {
    let env = TestEnv::new().await;
    let long = format!("/{}", "folder/".repeat(500));
    for n in 1..=8 {
        let mut task = crate::testing::new_task(None);
        task.spec.repo = if n % 2 == 0 { long.clone() } else { "/home/a/shop".into() };
        task.spec.labels = vec!["all".parse().unwrap()];
        env.store.submit(&task).await.unwrap();
        env.store.raw(&format!("update tasks set priority = {} where number = {n}", n % 3)).await;
    }
    let of = |repo: &str| TaskFilter { repo: Some(repo.to_owned()), ..TaskFilter::default() };
    let shop = of("/home/a/shop");
    assert_eq!(pages(&env.store, &shop, TaskSort::Newest).await, [7, 5, 3, 1]);
    assert_eq!(pages(&env.store, &shop, TaskSort::Oldest).await, [1, 3, 5, 7]);
    assert_eq!(pages(&env.store, &shop, TaskSort::Priority).await, [3, 1, 7, 5]);
    assert_eq!(pages(&env.store, &of(&long), TaskSort::Newest).await, [8, 6, 4, 2]);
    assert_eq!(pages(&env.store, &of("/home/a"), TaskSort::Newest).await, [0; 0]);
    let labelled = TaskFilter { labels: vec!["all".parse().unwrap()], ..shop.clone() };
    assert_eq!(pages(&env.store, &labelled, TaskSort::Newest).await, [7, 5, 3, 1]);
    env.store.raw("update tasks set state = 'merged' where number in (1, 2)").await;
    for (states, expected) in [(vec![TaskState::Ready], vec![7, 5, 3]), (vec![TaskState::Merged], vec![1])] {
        let filter = TaskFilter { states, ..shop.clone() };
        assert_eq!(pages(&env.store, &filter, TaskSort::Newest).await, expected);
        assert_eq!(
            pages(&env.store, &filter, TaskSort::Oldest).await,
            expected.iter().rev().copied().collect::<Vec<_>>()
        );
    }
}

#[tokio::test]
async fn tasks_since_a_time_are_listed() {
    let env = TestEnv::new().await;
    // The number 3 has an earlier id than 2, as if both were submitted at once.
    for seconds in [1_000, 2_001, 2_000, 3_000_u64] {
        let mut task = crate::testing::new_task(None);
        task.id = TaskId(uuid::Builder::from_unix_timestamp_millis(seconds * 1_000, &[7; 10]).into_uuid());
        task.spec.repo = "/home/a/shop".into();
        task.spec.labels = vec!["all".parse().unwrap()];
        env.store.submit(&task).await.unwrap();
    }
    for (since, expected) in
        [(0, &[4, 3, 2, 1][..]), (1_000, &[4, 3, 2, 1]), (1_001, &[4, 3, 2]), (3_000, &[4]), (3_001, &[])]
    {
        let all = TaskFilter { since: Some(since), ..TaskFilter::default() };
        let labelled = TaskFilter { labels: vec!["all".parse().unwrap()], ..all.clone() };
        let of_repository = TaskFilter { repo: Some("/home/a/shop".into()), ..all.clone() };
        for filter in [all, labelled, of_repository] {
            assert_eq!(pages(&env.store, &filter, TaskSort::Newest).await, expected, "{filter:?}");
            let oldest: Vec<i64> = expected.iter().rev().copied().collect();
            assert_eq!(pages(&env.store, &filter, TaskSort::Oldest).await, oldest, "{filter:?}");
        }
    }
}

#[tokio::test]
async fn list_of_a_repository_reads_few_rows_beside_many_tasks() {
    let env = TestEnv::new().await;
    add_tasks(&env, 20_000, "'merged'").await;
    let mut task = crate::testing::new_task(None);
    task.spec.repo = "/home/a/rare".into();
    env.store.submit(&task).await.unwrap();
    add_tasks(&env, 20_000, "'merged'").await;
    env.store.raw(r#"update tasks set spec = '{"repo": "/home/a/common"}' where title = 'many'"#).await;
    env.store.raw("analyze").await;
    let store = single_connection(&env);
    store.raw("select 1 from tasks limit 1").await;
    let common = env.store.list_tasks(&TaskFilter::default(), TaskSort::Newest, None, 1).await.unwrap()[0].repo.clone();
    let open = vec![TaskState::Escalated, TaskState::WaitingOnHuman];
    for (repo, states, found) in
        [("/home/a/rare", vec![], 1), (common.as_str(), vec![], 10), (common.as_str(), open, 0)]
    {
        let filter = TaskFilter { repo: Some(repo.to_owned()), states, ..TaskFilter::default() };
        for sort in [TaskSort::Newest, TaskSort::Oldest] {
            let (read, page) = rows_read(&store, store.list_tasks(&filter, sort, None, 10)).await;
            assert_eq!(page.unwrap().len(), found, "{filter:?}, {sort:?}");
            assert!(read <= 600, "{filter:?}, {sort:?}: {read} rows read");
        }
    }
}
