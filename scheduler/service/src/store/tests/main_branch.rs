use cfq_proto::loop_step::Decision;
use cfq_proto::messages::{MainGet, MainReply, MainState};
use cfq_proto::pr::PrState;

use super::super::payload;
use super::loops::{decided, reviewed_in};
use super::*;

/// Number of the step that follows those of [`approved`].
const NEXT_SEQ: i32 = 9;

/// A task whose pull request is approved.
async fn approved(env: &TestEnv, boot: BootId) -> TaskFence {
    let fence = reviewed_in(env, boot, None).await;
    committed(env, fence, 4, decided(1, Decision::Converged, Some(1))).await;
    let open = Step::PrOpened { head: "c1".into(), base: "b0".into(), branch: "w".into() };
    committed(env, fence, 5, open).await;
    let moves = [PrState::QcApproved, PrState::PendingCoordinator, PrState::Approved];
    for (seq, to) in (6..).zip(moves) {
        committed(env, fence, seq, Step::PrMoved { to, reason: "fine".into() }).await;
    }
    fence
}

fn main_get(fence: TaskFence, repository: &str, after: Option<&str>) -> MainGet {
    MainGet { fence, repository: repository.into(), base: "b0".into(), after: after.map(str::to_owned) }
}

async fn main_branch(env: &TestEnv, fence: TaskFence, after: Option<&str>) -> Option<MainState> {
    let request = main_get(fence, REPOSITORY, after);
    match env.store.main_branch(&runner(), &request).await.unwrap() {
        MainReply::Main { state } => {
            let mut connection = env.store.pool.acquire().await.unwrap();
            Some(payload::load(&mut connection, state).await.unwrap())
        }
        MainReply::NoMerge => None,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn merge_planned_on_an_earlier_commit_is_refused_and_may_be_planned_again() {
    let env = TestEnv::new().await;
    let boot = env.join_runner().await;
    let (one, two) = (approved(&env, boot).await, approved(&env, boot).await);
    assert_eq!(main_branch(&env, one, None).await, None);
    committed(&env, one, NEXT_SEQ, merge_intent("b0", "m1")).await;
    committed(&env, two, NEXT_SEQ, merge_intent("b0", "m2")).await;
    let foreign = step(&env, one, NEXT_SEQ + 1, Step::Merged { commit: "m2".into() }).await;
    assert!(matches!(foreign, StepReply::Illegal { .. }), "{foreign:?}");
    let merged = |commit: &str| Step::Merged { commit: commit.into() };
    committed(&env, one, NEXT_SEQ + 1, merged("m1")).await;
    committed(&env, one, NEXT_SEQ + 1, merged("m1")).await;
    assert_eq!(step(&env, two, NEXT_SEQ + 1, merged("m2")).await, StepReply::MainMoved);
    committed(&env, two, NEXT_SEQ + 1, merge_intent("m1", "m3")).await;
    committed(&env, two, NEXT_SEQ + 2, merged("m3")).await;
    assert_eq!(
        env.store.count("select merges from repositories where path = '/home/me/project' and main = 'm3'").await,
        2
    );
}

#[tokio::test]
async fn recorded_merges_are_read_from_the_commit_that_a_mirror_has() {
    let env = TestEnv::new().await;
    let boot = env.join_runner().await;
    let mut old = "b0".to_owned();
    for n in 1..=3 {
        let task = approved(&env, boot).await;
        let new = format!("m{n}");
        committed(&env, task, NEXT_SEQ, merge_intent(&old, &new)).await;
        committed(&env, task, NEXT_SEQ + 1, Step::Merged { commit: new.clone() }).await;
        old = new;
    }
    let task = approved(&env, boot).await;
    let news = |state: &MainState| state.merges.iter().map(|merge| merge.new.clone()).collect::<Vec<_>>();
    let all = main_branch(&env, task, None).await.unwrap();
    assert_eq!(
        (all.commit.as_str(), all.has_base, news(&all)),
        ("m3", true, vec!["m1".into(), "m2".into(), "m3".into()])
    );
    let first = &all.merges[0];
    assert_eq!((first.old.as_str(), first.base.as_str(), first.message.as_str()), ("b0", "b0", "Merge m1\n"));
    assert_eq!(first.artifacts.iter().map(|a| a.commit.as_deref()).collect::<Vec<_>>(), [Some("c1")]);
    assert!(first.artifacts[0].diff.is_empty());
    let rest = main_branch(&env, task, Some("m2")).await.unwrap();
    assert_eq!((rest.knows_after, news(&rest)), (true, vec!["m3".to_owned()]));
    assert!(main_branch(&env, task, Some("m3")).await.unwrap().merges.is_empty());
    let unknown = main_branch(&env, task, Some("x")).await.unwrap();
    assert!(!unknown.knows_after && unknown.merges.is_empty());
    let stale = main_get(TaskFence { attempt: 9, ..task }, REPOSITORY, None);
    assert_eq!(env.store.main_branch(&runner(), &stale).await.unwrap(), MainReply::Stale);
}

#[tokio::test]
async fn runner_reads_and_moves_only_the_main_branch_of_its_tasks_repository() {
    let env = TestEnv::new().await;
    let boot = env.join_runner().await;
    let other = approved(&env, boot).await;
    sqlx::query("insert into repositories (path, main, merges) values ('/other', 'm1', 1)")
        .execute(&env.store.pool)
        .await
        .unwrap();
    for path in ["/other", "/home/me/project/..", "home/me/project", ""] {
        let reply = env.store.main_branch(&runner(), &main_get(other, path, None)).await.unwrap();
        assert!(matches!(reply, MainReply::Refused { .. }), "{path}: {reply:?}");
    }
    let Step::MergeIntent { old, new, commit_time, message, .. } = merge_intent("m1", "m2") else { unreachable!() };
    let intent = Step::MergeIntent { old, new, commit_time, repository: "/other".into(), message, ran: vec![] };
    committed(&env, other, NEXT_SEQ, intent).await;
    let moved = step(&env, other, NEXT_SEQ + 1, Step::Merged { commit: "m2".into() }).await;
    assert!(matches!(moved, StepReply::Illegal { .. }), "{moved:?}");
    assert_eq!(env.store.count("select merges from repositories where path = '/other' and main = 'm1'").await, 1);
}

#[tokio::test]
async fn merges_of_deleted_tasks_are_read_in_their_order() {
    let env = TestEnv::new().await;
    let boot = env.join_runner().await;
    let mut old = "b0".to_owned();
    for n in 1..=4 {
        let task = approved(&env, boot).await;
        let new = format!("m{n}");
        committed(&env, task, NEXT_SEQ, merge_intent(&old, &new)).await;
        committed(&env, task, NEXT_SEQ + 1, Step::Merged { commit: new.clone() }).await;
        let ended = if n == 2 { "now()" } else { "now() - interval '1 day'" };
        env.store.raw(&format!("update tasks set ended_at = {ended} where id = '{}'", task.task)).await;
        old = new;
    }
    let task = approved(&env, boot).await;
    let before = main_branch(&env, task, None).await.unwrap();
    assert_eq!(before.merges.len(), 4);
    let (now, hour) = (env.store.clock_ms().await.unwrap() as f64 / 1000.0, 3600.0);
    assert_eq!(env.store.delete_expired_tasks(now - hour).await.unwrap().unwrap().tasks, 3);
    assert_eq!(main_branch(&env, task, None).await.unwrap(), before);
    let rest = main_branch(&env, task, Some("m3")).await.unwrap();
    assert_eq!((rest.knows_after, rest.merges), (true, before.merges[3..].to_vec()));
    assert_eq!(env.store.delete_expired_tasks(now + hour).await.unwrap().unwrap().tasks, 1);
    assert_eq!(main_branch(&env, task, None).await.unwrap(), before, "has_base too");
}
