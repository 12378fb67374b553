//! Tests of replies that cannot be used as they are: truncated, unparsable, refused, failed.

use cfq_proto::job::JobFailure;
use cfq_proto::loop_step::{ActionKind, Decision, EscalationAction, EscalationReason, LoopState};
use cfq_proto::review::Quarantine;
use cfq_proto::task::Agent;

use super::fixture::{add, escalation, fixture, score};
use super::port::Reply;

#[tokio::test]
async fn unparsable_review_is_requested_twice_more_then_escalates() {
    let garbage = || Reply::Text("fine by me".into());
    let fixture1 = fixture();
    fixture1.script(vec![add(1)], vec![garbage(), garbage(), score(90)]);
    assert_eq!(fixture1.drive().await.unwrap().state, LoopState::Idle);
    assert_eq!(fixture1.port.0.lock().unwrap().jobs.len(), 4);
    let fixture2 = fixture();
    fixture2.script(vec![add(1)], vec![garbage()]);
    let history = fixture2.drive().await.unwrap();
    let (reason, actions, _) = escalation(&history, &fixture2.steps());
    assert_eq!(reason, EscalationReason::AgentError);
    assert!(actions.contains(&ActionKind::AcceptBestEffort), "an unreviewed artifact can still be accepted");
    fixture2.resolve(EscalationAction::AcceptBestEffort);
    assert_eq!(fixture2.drive().await.unwrap().state, LoopState::Idle);
    assert_eq!(fixture2.delivered().len(), 1);
}

#[tokio::test]
async fn truncated_review_is_requested_again_and_never_passes() {
    let truncated = || Reply::Truncated("{\"quality_score\": 92, \"defects\": [{\"severity\": \"critical\",".into());
    let fixture1 = fixture();
    fixture1.script(vec![add(1)], vec![truncated(), score(90)]);
    assert_eq!(fixture1.drive().await.unwrap().state, LoopState::Idle);
    assert_eq!(fixture1.port.0.lock().unwrap().jobs.len(), 3, "the second review is complete");
    let fixture2 = fixture();
    fixture2.script(vec![add(1), add(2)], vec![truncated(), truncated(), truncated(), score(90)]);
    let history = fixture2.drive().await.unwrap();
    let first = &history.iterations[0];
    let decision = &first.decided.as_ref().unwrap().decision;
    assert_eq!(decision, &Decision::Revise, "score 92, but the rest of the review is unknown");
    assert!(first.review.as_ref().unwrap().has_critical());
    assert_eq!((history.iterations.len(), history.state), (2, LoopState::Idle));
}

#[tokio::test]
async fn review_quoted_before_the_own_one_never_passes() {
    let own = "{\"quality_score\": 20, \"defects\": [{\"severity\": \"major\", \"description\": \"wrong\"}]}";
    let both = || Reply::Text(format!("report.json has {{\"quality_score\": 100, \"defects\": []}}.\n{own}"));
    let fixture1 = fixture();
    fixture1.script(vec![add(1), add(2)], vec![both(), Reply::Text(own.into()), score(90)]);
    let history = fixture1.drive().await.unwrap();
    let first = &history.iterations[0];
    assert_eq!(first.review.as_ref().unwrap().quality_score, 20.0, "the second request's review");
    assert_eq!(first.decided.as_ref().unwrap().decision, Decision::Revise);
    let fixture2 = fixture();
    fixture2.script(vec![add(1)], vec![both()]);
    let history = fixture2.drive().await.unwrap();
    let (reason, _, text) = escalation(&history, &fixture2.steps());
    assert_eq!(reason, EscalationReason::AgentError);
    assert!(text.contains("more than one score or review"), "{text}");
}

#[tokio::test]
async fn review_ends_early_only_if_allowed_and_decided() {
    let ended = || Reply::Text("{\"quality_score\": 93, \"defects\": [], ".into());
    let mut allowed = fixture();
    allowed.limits.early_stop = true;
    allowed.script(vec![add(1)], vec![ended()]);
    let history = allowed.drive().await.unwrap();
    assert_eq!(history.state, LoopState::Idle);
    assert_eq!(history.iterations[0].review.as_ref().unwrap().quality_score, 93.0);
    {
        let records = allowed.port.0.lock().unwrap();
        let rules: Vec<usize> = records.prompts.iter().map(|(_, prompt)| prompt.sampling.early_stop.len()).collect();
        assert_eq!(rules, [0, 1], "only the critic gets early-stop conditions");
    }
    // A score that leads to a revision does not end the review early: the creator needs the review's findings.
    let mut revises = fixture();
    revises.limits.early_stop = true;
    let low = Reply::Text("{\"quality_score\": 40, \"defects\": [], ".into());
    revises.script(vec![add(1), add(2)], vec![low, score(40), score(95)]);
    assert_eq!(revises.drive().await.unwrap().iterations.len(), 2);
    let asked: Vec<(Agent, usize)> = {
        let records = revises.port.0.lock().unwrap();
        records.prompts.iter().map(|(agent, prompt)| (*agent, prompt.sampling.early_stop.len())).collect()
    };
    assert_eq!(asked[1..3], [(Agent::Beta, 1), (Agent::Beta, 0)], "the second request is for the complete review");
    // If early stops are not allowed, a review that ended early counts as truncated.
    let usual = fixture();
    usual.script(vec![add(1)], vec![ended(), score(93)]);
    assert_eq!(usual.drive().await.unwrap().state, LoopState::Idle);
    let records = usual.port.0.lock().unwrap();
    assert!(records.prompts.len() == 3 && records.prompts.iter().all(|(_, p)| p.sampling.early_stop.is_empty()));
}

#[tokio::test]
async fn truncated_file_is_not_committed() {
    let fixture = fixture();
    // The file parses, but the rest of it is missing.
    let truncated = Reply::Truncated("add.py\n```python\ndef add(a, b):\n    return a + b\n".into());
    fixture.script(vec![truncated, add(2)], vec![score(93)]);
    let history = fixture.drive().await.unwrap();
    let first = &history.iterations[0];
    assert_eq!((first.quarantine, first.artifact.commit.as_ref()), (Some(Quarantine::Unparsable), None));
    let message = &first.findings[0].message;
    assert!(message.contains("maximum length") && message.contains("add.py"), "{first:?}");
    assert_eq!(history.state, LoopState::Idle);
    let branch = history.hand_off.delivered.unwrap().0;
    assert!(fixture.show(&branch, "add.py").contains("# try 2"));
}

#[tokio::test]
async fn prompt_that_exceeds_the_context_is_shortened() {
    let mut fixture = fixture();
    let big = "x = 1\n".repeat(4_000);
    let repository = fixture.user.repo();
    fixture.spec.base = Some(fixture.user.commit_files(&repository, &[("big.py", &big)]));
    fixture.spec.context_files = vec!["big.py".into()];
    let too_long = Reply::Failed(JobFailure::TooLong { need: 12_000, have: 2_048 });
    fixture.script(vec![too_long.clone(), too_long, add(1)], vec![score(90)]);
    assert_eq!(fixture.drive().await.unwrap().state, LoopState::Idle);
    let records = fixture.port.0.lock().unwrap();
    let sizes: Vec<usize> = records.prompts.iter().map(|(_, p)| p.messages[1].content.len()).collect();
    assert!(sizes[1] > 20_000 && sizes[2] < 6_000, "{sizes:?}");
    assert!(records.prompts[2].1.sampling.max_tokens < 700);
    let maps: Vec<bool> = records.prompts.iter().map(|(_, p)| p.messages[1].content.contains("# Map")).collect();
    assert_eq!(maps, [true, false, false, false], "the map is left out first, and from then on");
}

#[tokio::test]
async fn model_failures_fail_or_escalate_the_task() {
    let unavailable = || Reply::Failed(JobFailure::Unavailable { reason: "503".into() });
    for (alpha, beta) in [(unavailable(), score(90)), (add(1), unavailable())] {
        let fixture = fixture();
        fixture.script(vec![alpha], vec![beta]);
        assert_eq!(fixture.drive().await.unwrap().state, LoopState::Failed);
    }
    let fixture1 = fixture();
    fixture1.script(vec![Reply::Failed(JobFailure::Rejected { reason: "no such model".into() })], vec![score(90)]);
    let history = fixture1.drive().await.unwrap();
    let (reason, _, text) = escalation(&history, &fixture1.steps());
    assert_eq!(reason, EscalationReason::AgentError);
    assert!(text.contains("no such model") && text.contains("openai:x/alpha"), "{text}");
    let mut fixture2 = fixture();
    fixture2.spec.agents.beta.model = None;
    fixture2.script(vec![add(1)], vec![score(90)]);
    let history = fixture2.drive().await.unwrap();
    assert!(escalation(&history, &fixture2.steps()).2.contains("switch_llm --agent beta --model"));
    // The task continues with another model.
    let switch = EscalationAction::SwitchLlm {
        target_agent: Agent::Beta,
        suggested_model: Some("openai:x/b2".parse().unwrap()),
    };
    fixture2.script(vec![add(2)], vec![score(90)]);
    fixture2.resolve(switch);
    assert_eq!(fixture2.drive().await.unwrap().state, LoopState::Idle);
}
