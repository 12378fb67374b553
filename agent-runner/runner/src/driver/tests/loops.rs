//! Tests of complete runs, from a task to its delivered branch, and of the ways in which the review loop ends.

use cfq_proto::loop_step::{ActionKind, EscalationAction, EscalationReason, LoopState};
use cfq_proto::pr::PrState;
use cfq_proto::task::Agent;

use super::fixture::{STEPS_OF_FIRST_TRY, add, escalation, fixture, score};
use super::port::Reply;

#[tokio::test]
async fn first_iteration_converges_and_adds_only_one_branch() {
    let fixture = fixture();
    fixture.script(vec![add(1)], vec![score(93)]);
    let before = fixture.user.capture_state();
    let history = fixture.drive().await.unwrap();
    assert_eq!(history.state, LoopState::Idle);
    assert_eq!(fixture.kinds(), STEPS_OF_FIRST_TRY);
    let branch = history.hand_off.delivered.clone().unwrap().0;
    assert!(branch.starts_with("cfq/t42-write-a-python-function"), "{branch}");
    assert_eq!(fixture.show(&branch, "add.py"), "# try 1\ndef add(a, b):\n    return a + b\n");
    let mut after = fixture.user.capture_state();
    assert!(after.remove(&format!("refs/heads/{branch}")).is_some());
    assert_eq!(after, before);
    assert_eq!(history.active_ms, 20, "two calls of 10 ms");
    let worktree = fixture.data.path().join("worktrees/t42-a1");
    assert!(worktree.join("add.py").exists() && worktree.join("README.md").exists());
}

#[tokio::test]
async fn feedback_reaches_the_creator_but_its_prose_not_the_critic() {
    let fixture = fixture();
    let Reply::Text(text) = add(1) else { panic!() };
    fixture.script(vec![Reply::Text(format!("cabbage\n{text}")), add(2)], vec![score(50), score(95)]);
    fixture.drive().await.unwrap();
    let records = fixture.port.0.lock().unwrap();
    let of = |agent| -> Vec<&str> {
        records.prompts.iter().filter(|(a, _)| *a == agent).map(|(_, p)| p.messages[1].content.as_str()).collect()
    };
    assert!(of(Agent::Alpha)[1].contains("fix it"));
    assert!(of(Agent::Beta).iter().all(|p| !p.contains("cabbage")));
    let seeds: Vec<u64> =
        records.prompts.iter().filter(|(a, _)| *a == Agent::Alpha).map(|(_, p)| p.sampling.seed).collect();
    assert_eq!(seeds[1], seeds[0] + 1);
    // The model call for a revision contains the previous files, from which the node drafts tokens.
    let previous: Vec<(Agent, &str)> =
        records.prompts.iter().map(|(agent, prompt)| (*agent, prompt.sampling.previous.as_str())).collect();
    let revised = "```python\n# try 1\ndef add(a, b):\n    return a + b\n```";
    assert_eq!(previous, [(Agent::Alpha, ""), (Agent::Beta, ""), (Agent::Alpha, revised), (Agent::Beta, "")]);
}

#[tokio::test]
async fn working_time_limit_ends_a_running_generation() {
    let mut fixture = fixture();
    fixture.limits.timeout_ms = 2_000;
    fixture.script(vec![Reply::Running(100)], vec![score(90)]);
    let history = fixture.drive().await.unwrap();
    let (reason, actions, _) = escalation(&history, &fixture.steps());
    assert_eq!(reason, EscalationReason::TimeoutExceeded);
    assert!(!actions.contains(&ActionKind::AcceptBestEffort));
    assert_eq!(fixture.port.0.lock().unwrap().cancelled.len(), 1);
    assert_eq!(fixture.port.0.lock().unwrap().submissions, 1, "the prompt is sent once, however often it is polled");
    assert!(history.active_ms >= 2_000);
    // A human's answer resets the budget.
    fixture.script(vec![add(1)], vec![score(90)]);
    fixture.resolve(EscalationAction::RetryWithConstraints { additional_constraints: vec!["be quick".into()] });
    assert_eq!(fixture.drive().await.unwrap().state, LoopState::Idle);
}

#[tokio::test]
async fn dangerous_code_is_not_an_ancestor_of_the_result() {
    let fixture = fixture();
    let bad = Reply::Text("add.py\n```python\nimport os\ndef add(a, b):\n    os.system(\"rm -rf /\")\n```".into());
    fixture.script(vec![add(1), bad], vec![score(50)]);
    let history = fixture.drive().await.unwrap();
    assert_eq!(escalation(&history, &fixture.steps()).0, EscalationReason::DangerousOutputDetected);
    fixture.script(vec![add(3)], vec![score(90)]);
    fixture.resolve(EscalationAction::RetryWithConstraints { additional_constraints: vec![] });
    let history = fixture.drive().await.unwrap();
    let result = history.result().unwrap();
    assert_eq!(
        Some(&result.artifact.parent),
        history.iterations[0].artifact.commit.as_ref(),
        "the quarantined commit is not the parent of the next one"
    );
    assert_eq!(fixture.delivered().len(), 1);
}

#[tokio::test]
async fn accepting_the_best_effort_delivers_the_best_iteration() {
    let fixture = fixture();
    fixture.script((1..=5).map(add).collect(), vec![score(20), score(40), score(60), score(80), score(70)]);
    let history = fixture.drive().await.unwrap();
    assert_eq!(escalation(&history, &fixture.steps()).0, EscalationReason::MaxIterationsReached);
    fixture.resolve(EscalationAction::AcceptBestEffort);
    let history = fixture.drive().await.unwrap();
    let branch = history.hand_off.delivered.unwrap().0;
    assert!(fixture.show(&branch, "add.py").contains("# try 4"));
    assert_eq!(history.hand_off.pr_state, Some(PrState::Merged));
}
