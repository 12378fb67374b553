//! Replies that cannot be used as they are: cut off, unreadable, refused, failed.

use cfq_proto::job::JobFailure;
use cfq_proto::looping::{ActionKind, Decision, EscalationAction, EscalationReason, LoopState};
use cfq_proto::review::Quarantine;
use cfq_proto::task::Agent;

use super::bench::{add, bench, reason, score};
use super::port::Reply;

#[tokio::test]
async fn an_unreadable_report_is_asked_for_twice_more_then_escalates() {
    let garbage = || Reply::Text("fine by me".into());
    let bench1 = bench();
    bench1.script(vec![add(1)], vec![garbage(), garbage(), score(90)]);
    assert_eq!(bench1.drive().await.unwrap().state, LoopState::Idle);
    assert_eq!(bench1.port.0.lock().unwrap().jobs.len(), 4);
    let bench2 = bench();
    bench2.script(vec![add(1)], vec![garbage()]);
    let history = bench2.drive().await.unwrap();
    let (why, actions, _) = reason(&history, &bench2.steps());
    assert_eq!(why, EscalationReason::AgentError);
    assert!(actions.contains(&ActionKind::AcceptBestEffort), "the artifact is good, only unreviewed");
    bench2.resolve(EscalationAction::AcceptBestEffort);
    assert_eq!(bench2.drive().await.unwrap().state, LoopState::Idle);
    assert_eq!(bench2.delivered().len(), 1);
}

#[tokio::test]
async fn a_report_that_was_cut_off_is_asked_for_again_and_never_passes() {
    let cut = || Reply::Cut("{\"quality_score\": 92, \"defects\": [{\"severity\": \"critical\",".into());
    let bench1 = bench();
    bench1.script(vec![add(1)], vec![cut(), score(90)]);
    assert_eq!(bench1.drive().await.unwrap().state, LoopState::Idle);
    assert_eq!(bench1.port.0.lock().unwrap().jobs.len(), 3, "asked again, and whole the second time");
    let bench2 = bench();
    bench2.script(vec![add(1), add(2)], vec![cut(), cut(), cut(), score(90)]);
    let history = bench2.drive().await.unwrap();
    let first = &history.iterations[0];
    assert_eq!(first.decided.as_ref().unwrap().decision, Decision::Revise, "92, but nobody knows what was cut");
    assert!(first.review.as_ref().unwrap().has_critical());
    assert_eq!((history.iterations.len(), history.state), (2, LoopState::Idle));
}

#[tokio::test]
async fn a_report_may_end_where_the_decision_is_certain_if_that_is_allowed() {
    let ended = || Reply::Text("{\"quality_score\": 93, \"defects\": [], ".into());
    let mut allowed = bench();
    allowed.limits.early_stop = true;
    allowed.script(vec![add(1)], vec![ended()]);
    let history = allowed.drive().await.unwrap();
    assert_eq!(history.state, LoopState::Idle);
    assert_eq!(history.iterations[0].review.as_ref().unwrap().quality_score, 93.0);
    {
        let records = allowed.port.0.lock().unwrap();
        let rules: Vec<usize> = records.prompts.iter().map(|(_, prompt)| prompt.sampling.enough.len()).collect();
        assert_eq!(rules, [0, 1], "the critic is told what is enough");
    }
    // A score that sends the work back is not enough: what must be mended is wanted.
    let mut revises = bench();
    revises.limits.early_stop = true;
    let low = Reply::Text("{\"quality_score\": 40, \"defects\": [], ".into());
    revises.script(vec![add(1), add(2)], vec![low, score(40), score(95)]);
    assert_eq!(revises.drive().await.unwrap().iterations.len(), 2);
    let asked: Vec<(Agent, usize)> = {
        let records = revises.port.0.lock().unwrap();
        records.prompts.iter().map(|(agent, prompt)| (*agent, prompt.sampling.enough.len())).collect()
    };
    assert_eq!(asked[1..3], [(Agent::Beta, 1), (Agent::Beta, 0)], "asked again, and for all of it");
    // Not allowed, it is a report that was cut off.
    let usual = bench();
    usual.script(vec![add(1)], vec![ended(), score(93)]);
    assert_eq!(usual.drive().await.unwrap().state, LoopState::Idle);
    let records = usual.port.0.lock().unwrap();
    assert!(records.prompts.len() == 3 && records.prompts.iter().all(|(_, p)| p.sampling.enough.is_empty()));
}

#[tokio::test]
async fn a_file_that_was_cut_off_is_not_committed() {
    let bench = bench();
    // It parses, and half of it is missing.
    let cut = Reply::Cut("add.py\n```python\ndef add(a, b):\n    return a + b\n".into());
    bench.script(vec![cut, add(2)], vec![score(93)]);
    let history = bench.drive().await.unwrap();
    let first = &history.iterations[0];
    assert_eq!((first.quarantine, first.artifact.commit.as_ref()), (Some(Quarantine::Unparsable), None));
    assert!(first.findings[0].message.contains("cut") && first.findings[0].message.contains("add.py"), "{first:?}");
    assert_eq!(history.state, LoopState::Idle);
    let branch = history.hand_off.delivered.unwrap().0;
    assert!(bench.show(&branch, "add.py").contains("# try 2"));
}

#[tokio::test]
async fn a_prompt_that_is_too_long_is_made_shorter() {
    let mut bench = bench();
    let big = "x = 1\n".repeat(4_000);
    let repository = bench.user.repo();
    bench.spec.base = Some(bench.user.commit_files(&repository, &[("big.py", &big)]));
    bench.spec.context_files = vec!["big.py".into()];
    let too_long = Reply::Failed(JobFailure::TooLong { need: 12_000, have: 2_048 });
    bench.script(vec![too_long, add(1)], vec![score(90)]);
    assert_eq!(bench.drive().await.unwrap().state, LoopState::Idle);
    let records = bench.port.0.lock().unwrap();
    let sizes: Vec<usize> = records.prompts.iter().map(|(_, p)| p.messages[1].content.len()).collect();
    assert!(sizes[0] > 20_000 && sizes[1] < 6_000, "{sizes:?}");
    assert!(records.prompts[1].1.sampling.max_tokens < 700);
}

#[tokio::test]
async fn failures_of_models() {
    let unavailable = || Reply::Failed(JobFailure::Unavailable { reason: "503".into() });
    for (alpha, beta) in [(unavailable(), score(90)), (add(1), unavailable())] {
        let bench = bench();
        bench.script(vec![alpha], vec![beta]);
        assert_eq!(bench.drive().await.unwrap().state, LoopState::Failed);
    }
    let bench1 = bench();
    bench1.script(vec![Reply::Failed(JobFailure::Rejected { reason: "no such model".into() })], vec![score(90)]);
    let history = bench1.drive().await.unwrap();
    let (why, _, text) = reason(&history, &bench1.steps());
    assert_eq!(why, EscalationReason::AgentError);
    assert!(text.contains("no such model") && text.contains("openai:x/alpha"), "{text}");
    let mut bench2 = bench();
    bench2.spec.agents.beta.model = None;
    bench2.script(vec![add(1)], vec![score(90)]);
    let history = bench2.drive().await.unwrap();
    assert!(reason(&history, &bench2.steps()).2.contains("[agents.beta]"));
    // Another model takes over.
    let switch = EscalationAction::SwitchLlm {
        target_agent: Agent::Beta,
        suggested_model: Some("openai:x/b2".parse().unwrap()),
    };
    bench2.script(vec![add(2)], vec![score(90)]);
    bench2.resolve(switch);
    assert_eq!(bench2.drive().await.unwrap().state, LoopState::Idle);
}
