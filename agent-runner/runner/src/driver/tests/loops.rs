//! Whole drives from a task to its branch, and the ways a loop ends.

use cfq_proto::looping::{ActionKind, EscalationAction, EscalationReason, LoopState};
use cfq_proto::pr::PrState;
use cfq_proto::task::Agent;

use super::bench::{AT_ONCE, add, bench, reason, score};
use super::port::Reply;

#[tokio::test]
async fn converges_at_once_with_one_new_branch_and_nothing_else_touched() {
    let bench = bench();
    bench.script(vec![add(1)], vec![score(93)]);
    let before = bench.user.photograph();
    let history = bench.drive().await.unwrap();
    assert_eq!(history.state, LoopState::Idle);
    assert_eq!(bench.kinds(), AT_ONCE);
    let branch = history.hand_off.delivered.clone().unwrap().0;
    assert!(branch.starts_with("cfq/t42-write-a-python-function"), "{branch}");
    assert_eq!(bench.show(&branch, "add.py"), "# try 1\ndef add(a, b):\n    return a + b\n");
    let mut after = bench.user.photograph();
    assert!(after.remove(&format!("refs/heads/{branch}")).is_some());
    assert_eq!(after, before);
    assert_eq!(history.active_ms, 20, "two calls of 10 ms");
    let worktree = bench.data.path().join("worktrees/t42-a1");
    assert!(worktree.join("add.py").exists() && worktree.join("README.md").exists());
}

#[tokio::test]
async fn feedback_reaches_the_creator_and_its_words_do_not_reach_the_critic() {
    let bench = bench();
    let Reply::Text(text) = add(1) else { panic!() };
    bench.script(vec![Reply::Text(format!("cabbage\n{text}")), add(2)], vec![score(50), score(95)]);
    bench.drive().await.unwrap();
    let records = bench.port.0.lock().unwrap();
    let of = |agent| -> Vec<&str> {
        records.prompts.iter().filter(|(a, _)| *a == agent).map(|(_, p)| p.messages[1].content.as_str()).collect()
    };
    assert!(of(Agent::Alpha)[1].contains("mend it"));
    assert!(of(Agent::Beta).iter().all(|p| !p.contains("cabbage")));
    let seeds: Vec<u64> =
        records.prompts.iter().filter(|(a, _)| *a == Agent::Alpha).map(|(_, p)| p.sampling.seed).collect();
    assert_eq!(seeds[1], seeds[0] + 1);
    // The revise call carries what it revises, for its words to be guessed from.
    let carried: Vec<(Agent, &str)> =
        records.prompts.iter().map(|(agent, prompt)| (*agent, prompt.sampling.previous.as_str())).collect();
    let revised = "```python\n# try 1\ndef add(a, b):\n    return a + b\n```";
    assert_eq!(carried, [(Agent::Alpha, ""), (Agent::Beta, ""), (Agent::Alpha, revised), (Agent::Beta, "")]);
}

#[tokio::test]
async fn the_working_time_ends_a_running_generation() {
    let mut bench = bench();
    bench.limits.timeout_ms = 2_000;
    bench.script(vec![Reply::Running(100)], vec![score(90)]);
    let history = bench.drive().await.unwrap();
    let (why, actions, _) = reason(&history, &bench.steps());
    assert_eq!(why, EscalationReason::TimeoutExceeded);
    assert!(!actions.contains(&ActionKind::AcceptBestEffort));
    assert_eq!(bench.port.0.lock().unwrap().dropped.len(), 1);
    assert_eq!(bench.port.0.lock().unwrap().asked, 1, "the prompt is sent once, however often it is looked at");
    assert!(history.active_ms >= 2_000);
    // A human's answer grants a fresh budget.
    bench.script(vec![add(1)], vec![score(90)]);
    bench.resolve(EscalationAction::RetryWithConstraints { additional_constraints: vec!["be quick".into()] });
    assert_eq!(bench.drive().await.unwrap().state, LoopState::Idle);
}

#[tokio::test]
async fn dangerous_code_never_gets_near_the_result() {
    let bench = bench();
    let bad = Reply::Text("add.py\n```python\nimport os\ndef add(a, b):\n    os.system(\"rm -rf /\")\n```".into());
    bench.script(vec![add(1), bad], vec![score(50)]);
    let history = bench.drive().await.unwrap();
    assert_eq!(reason(&history, &bench.steps()).0, EscalationReason::DangerousOutputDetected);
    bench.script(vec![add(3)], vec![score(90)]);
    bench.resolve(EscalationAction::RetryWithConstraints { additional_constraints: vec![] });
    let history = bench.drive().await.unwrap();
    let result = history.result().unwrap();
    assert_eq!(
        Some(&result.artifact.parent),
        history.iterations[0].artifact.commit.as_ref(),
        "around the quarantined one"
    );
    assert_eq!(bench.delivered().len(), 1);
}

#[tokio::test]
async fn the_best_is_delivered_when_a_human_accepts() {
    let bench = bench();
    bench.script((1..=5).map(add).collect(), vec![score(20), score(40), score(60), score(80), score(70)]);
    let history = bench.drive().await.unwrap();
    assert_eq!(reason(&history, &bench.steps()).0, EscalationReason::MaxIterationsReached);
    bench.resolve(EscalationAction::AcceptBestEffort);
    let history = bench.drive().await.unwrap();
    let branch = history.hand_off.delivered.unwrap().0;
    assert!(bench.show(&branch, "add.py").contains("# try 4"));
    assert_eq!(history.hand_off.pr_state, Some(PrState::Merged));
}
