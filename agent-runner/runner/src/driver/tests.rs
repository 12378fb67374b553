//! Whole drives against real repositories, with a scheduler that is a list of steps and models that are a script. A drive
//! may be cut off before or after any step, as by a kill, and a new one goes on from what was committed.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cfq_convergence::{History, Limits, task_state_after, transition};
use cfq_proto::blob::Carried;
use cfq_proto::ids::{JobId, TaskId, TaskNumber};
use cfq_proto::job::{Completion, FinishReason, JobFailure, JobRequest, JobState, JobView, Prompt, Usage};
use cfq_proto::looping::{
    ActionKind, Artifact, Decision, EscalationAction, EscalationReason, LoopState, Step, StepRecord,
};
use cfq_proto::pr::PrState;
use cfq_proto::review::Quarantine;
use cfq_proto::task::{Agent, Priority, TaskSpec, TaskState};
use cfq_proto::timing::Timing;

use super::{Assignment, Drive, Stopped, TaskPort};
use crate::workstream::testing::UserRepo;

#[derive(Clone)]
enum Reply {
    Text(String),
    /// As much of it as fitted.
    Cut(String),
    Failed(JobFailure),
    /// Never ends; each look at it finds so many milliseconds more.
    Running(u64),
}

#[derive(Clone, Copy, PartialEq)]
enum Cut {
    Before(usize),
    After(usize),
}

#[derive(Default)]
struct Records {
    steps: Vec<StepRecord>,
    jobs: BTreeMap<(i32, Agent, i16), JobView>,
    replies: BTreeMap<Agent, Vec<Reply>>,
    prompts: Vec<(Agent, Prompt)>,
    dropped: Vec<JobId>,
    /// Requests with a prompt in them.
    asked: usize,
    cut: Option<Cut>,
    task: Option<TaskId>,
}

#[derive(Clone, Default)]
struct Port(Arc<Mutex<Records>>);

impl TaskPort for Port {
    async fn commit(&self, seq: i32, step: Step, active_ms: u64) -> Result<i64, Stopped> {
        let mut records = self.0.lock().unwrap();
        let index = records.steps.len();
        assert_eq!(seq as usize, index);
        if records.cut == Some(Cut::Before(index)) {
            return Err(Stopped::Lost);
        }
        let history = History::of(&records.steps).unwrap();
        transition(history.state, history.facts, &step).map_err(|e| Stopped::Refused { reason: e.to_string() })?;
        // A clock that runs: times of steps differ.
        let at = 1_700_000_000 + i64::from(seq);
        records.steps.push(StepRecord { seq, step, active_ms, at });
        if records.cut == Some(Cut::After(index)) {
            return Err(Stopped::Lost);
        }
        Ok(at)
    }

    async fn job(&self, seq: i32, request: JobRequest) -> Result<JobView, Stopped> {
        let mut records = self.0.lock().unwrap();
        let key = (seq, request.role, request.n);
        records.asked += 1;
        if let Some(view) = records.jobs.get(&key) {
            return Ok(view.clone());
        }
        let Carried::Inline(prompt) = request.prompt.clone() else { panic!("small prompts are inline") };
        records.prompts.push((request.role, prompt));
        let replies = records.replies.get_mut(&request.role).expect("a script");
        let reply = if replies.len() > 1 { replies.remove(0) } else { replies[0].clone() };
        let mut view = JobView {
            id: JobId::fresh(),
            task: records.task.unwrap(),
            seq,
            role: request.role,
            n: request.n,
            state: JobState::Done,
            attempt: 1,
            model: request.model,
            node: None,
            priority: Priority::P2,
            running_ms: 10,
            completion: None,
            failure: None,
        };
        match reply {
            Reply::Text(text) => view.completion = Some(completion(text, FinishReason::Stop)),
            Reply::Cut(text) => view.completion = Some(completion(text, FinishReason::Length)),
            Reply::Failed(failure) => {
                view.state = JobState::Failed;
                view.failure = Some(failure);
            }
            Reply::Running(ms) => {
                view.state = JobState::Running;
                view.running_ms = ms;
            }
        }
        records.jobs.insert(key, view.clone());
        Ok(view)
    }

    async fn look(&self, job: JobId) -> Result<JobView, Stopped> {
        let mut records = self.0.lock().unwrap();
        let view = records.jobs.values_mut().find(|view| view.id == job).expect("a job that was made");
        if view.state == JobState::Running {
            view.running_ms += 400;
        }
        Ok(view.clone())
    }

    async fn drop_job(&self, job: JobId) -> Result<(), Stopped> {
        self.0.lock().unwrap().dropped.push(job);
        Ok(())
    }

    async fn changed(&self, _at_most: Duration) {
        tokio::task::yield_now().await;
    }

    async fn send_artifact(&self, artifact: Artifact) -> Result<Carried<Artifact>, Stopped> {
        Ok(Carried::Inline(artifact))
    }

    async fn send_prompt(&self, prompt: Prompt) -> Result<Carried<Prompt>, Stopped> {
        Ok(Carried::Inline(prompt))
    }

    async fn completion(&self, carried: Carried<Completion>) -> Result<Completion, Stopped> {
        carried.inline().map_err(|_| panic!("small results are inline"))
    }

    async fn live(&self) -> Result<(), Stopped> {
        Ok(())
    }

    fn progressed(&self) {}
}

fn completion(text: String, finish: FinishReason) -> Carried<Completion> {
    let usage = Usage { prompt_tokens: 5, output_tokens: 7, ..Usage::default() };
    Carried::Inline(Completion { text, finish, usage })
}

struct Bench {
    user: UserRepo,
    data: tempfile::TempDir,
    port: Port,
    number: TaskNumber,
    task: TaskId,
    spec: TaskSpec,
    limits: Limits,
}

fn bench() -> Bench {
    let user = UserRepo::new(&[("README.md", "# sample\n")]);
    user.make_dirty();
    let spec = serde_json::from_value(serde_json::json!({
        "description": "Write a Python function add(a, b) in add.py that returns the sum.",
        "language": "python", "repo": user.path(), "base": user.base,
        "agents": { "alpha": { "model": "openai:x/alpha" }, "beta": { "model": "openai:x/beta" } },
    }));
    let task = TaskId::fresh();
    let port = Port::default();
    port.0.lock().unwrap().task = Some(task);
    Bench {
        user,
        data: tempfile::tempdir().unwrap(),
        port,
        number: TaskNumber(42),
        task,
        spec: spec.unwrap(),
        limits: Limits::default(),
    }
}

fn add(n: u32) -> Reply {
    Reply::Text(format!("Here.\n\nadd.py\n```python\n# try {n}\ndef add(a, b):\n    return a + b\n```\n"))
}

fn score(n: u32) -> Reply {
    Reply::Text(format!(
        "{{\"quality_score\": {n}, \"defects\": [], \"suggestions\": [], \"required_changes\": [\"mend it\"]}}"
    ))
}

impl Bench {
    fn script(&self, alpha: Vec<Reply>, beta: Vec<Reply>) {
        let mut records = self.port.0.lock().unwrap();
        records.replies = BTreeMap::from([(Agent::Alpha, alpha), (Agent::Beta, beta)]);
    }

    /// One more attempt at the task.
    async fn drive(&self) -> Result<History, Stopped> {
        let steps = self.steps();
        let assignment = Assignment {
            task: self.task,
            number: self.number,
            attempt: 1,
            spec: Arc::new(self.spec.clone()),
            limits: self.limits,
            history: History::of(&steps).unwrap(),
            worker: 1,
        };
        let timing =
            Timing { backoff_base_ms: 1, backoff_cap_ms: 2, retry_ceiling_ms: 5, ..Timing::default().faster(100) };
        Drive::new(self.port.clone(), assignment, self.data.path().to_owned(), timing).run().await
    }

    fn steps(&self) -> Vec<StepRecord> {
        self.port.0.lock().unwrap().steps.clone()
    }

    fn kinds(&self) -> Vec<&'static str> {
        self.steps().iter().map(|r| r.step.kind()).collect()
    }

    fn resolve(&self, action: EscalationAction) {
        let mut records = self.port.0.lock().unwrap();
        let seq = records.steps.len() as i32;
        let active_ms = records.steps.last().unwrap().active_ms;
        records.steps.push(StepRecord {
            seq,
            step: Step::Resolved { action, by: "me".into() },
            active_ms,
            at: 1_700_000_100,
        });
    }

    /// Why the hand-off is held, and what may be answered.
    fn held(&self) -> (String, Vec<ActionKind>) {
        match self.steps().pop().unwrap().step {
            Step::HandOffHeld { why, available_actions } => (why, available_actions),
            other => panic!("{other:?}"),
        }
    }

    /// What the last step made of the task.
    fn ends_as(&self) -> TaskState {
        let steps = self.steps();
        let (last, before) = steps.split_last().unwrap();
        task_state_after(History::of(before).unwrap().facts, &last.step)
    }

    fn delivered(&self) -> Vec<String> {
        let repository = self.user.repo();
        let branches = repository.branches(Some(git2::BranchType::Local)).unwrap();
        branches.map(|b| b.unwrap().0.name().unwrap().unwrap().to_owned()).filter(|n| n.starts_with("cfq/")).collect()
    }

    fn show(&self, branch: &str, path: &str) -> String {
        let repository = self.user.repo();
        let tree = repository.find_branch(branch, git2::BranchType::Local).unwrap().get().peel_to_tree().unwrap();
        let blob = repository.find_blob(tree.get_path(path.as_ref()).unwrap().id()).unwrap();
        String::from_utf8(blob.content().to_vec()).unwrap()
    }
}

fn reason(history: &History, steps: &[StepRecord]) -> (EscalationReason, Vec<ActionKind>, String) {
    assert_eq!(history.state, LoopState::Escalated);
    match &steps.last().unwrap().step {
        Step::Decided { decided, .. } => match &decided.decision {
            Decision::Escalate { reason, available_actions } => {
                (*reason, available_actions.clone(), decided.why.clone())
            }
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    }
}

const AT_ONCE: [&str; 13] = [
    "started",
    "generated",
    "checked",
    "reviewed",
    "decided",
    "pr_opened",
    "pr_moved",
    "pr_moved",
    "pr_moved",
    "merge_intent",
    "merged",
    "delivered",
    "handed_off",
];

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
async fn cut_off_at_every_step_it_ends_the_same() {
    let uncut = bench();
    let (alpha, beta) = (vec![add(1), add(2)], vec![score(50), score(95)]);
    uncut.script(alpha.clone(), beta.clone());
    uncut.drive().await.unwrap();
    let expected = uncut.kinds();
    let commits = |bench: &Bench| -> Vec<String> {
        let history = History::of(&bench.steps()).unwrap();
        history.iterations.iter().map(|i| i.artifact.commit.clone().unwrap()).collect()
    };
    for index in 0..expected.len() {
        for cut in [Cut::Before(index), Cut::After(index)] {
            let bench = bench();
            bench.script(alpha.clone(), beta.clone());
            bench.port.0.lock().unwrap().cut = Some(cut);
            assert_eq!(bench.drive().await, Err(Stopped::Lost));
            bench.port.0.lock().unwrap().cut = None;
            // The next attempt may be on another machine: its mirror is empty.
            std::fs::remove_dir_all(bench.data.path().join("mirrors")).ok();
            bench.drive().await.unwrap();
            assert_eq!(bench.kinds(), expected, "cut at {index}");
            assert_eq!(commits(&bench).len(), 2);
            assert_eq!(bench.delivered().len(), 1, "cut at {index}");
            assert_eq!(bench.port.0.lock().unwrap().jobs.len(), 4, "every job was asked for once");
        }
    }
}

#[tokio::test]
async fn a_step_made_again_gives_the_same_commit() {
    let bench = bench();
    bench.script(vec![add(1)], vec![score(93)]);
    bench.port.0.lock().unwrap().cut = Some(Cut::Before(2));
    assert_eq!(bench.drive().await, Err(Stopped::Lost));
    let commit = |bench: &Bench| History::of(&bench.steps()).unwrap().iterations[0].artifact.commit.clone();
    let first = commit(&bench);
    bench.port.0.lock().unwrap().steps.truncate(1);
    assert_eq!(bench.drive().await, Err(Stopped::Lost));
    assert_eq!(commit(&bench), first);
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

#[tokio::test]
async fn a_result_that_conflicts_with_earlier_cfq_work_is_delivered_and_waits_for_a_human() {
    let mut bench = bench();
    bench.script(vec![add(1)], vec![score(93)]);
    bench.drive().await.unwrap();
    // Another task from the same base makes another add.py.
    bench.number = TaskNumber(43);
    bench.port.0.lock().unwrap().steps.clear();
    bench.port.0.lock().unwrap().jobs.clear();
    bench.script(vec![add(2)], vec![score(93)]);
    let history = bench.drive().await.unwrap();
    assert_eq!((history.state, history.hand_off.pr_state), (LoopState::Converged, Some(PrState::Closed)));
    let branch = history.hand_off.delivered.unwrap().0;
    assert!(bench.show(&branch, "add.py").contains("# try 2"));
    assert_eq!(bench.delivered().len(), 2);
    let (why, actions) = bench.held();
    assert!(why.contains("add.py") && why.contains(&branch), "{why}");
    assert_eq!(actions, [ActionKind::AcceptBestEffort, ActionKind::Abort]);
    // The decision is the one the records alone lead to.
    let steps = bench.steps();
    let at = steps.iter().position(|record| matches!(record.step, Step::Decided { .. })).unwrap();
    let Step::Decided { decided, .. } = &steps[at].step else { panic!("a decision") };
    let before = History::of(&steps[..at]).unwrap();
    assert_eq!(&cfq_convergence::decide(&Limits::default(), &before).unwrap(), decided);
    // A runner that finds it waiting leaves it alone; an answer ends it.
    assert_eq!(bench.drive().await.unwrap().next_seq, steps.len() as i32);
    bench.resolve(EscalationAction::AcceptBestEffort);
    let history = bench.drive().await.unwrap();
    assert_eq!((history.state, bench.ends_as()), (LoopState::Idle, TaskState::Accepted));
    assert_eq!(bench.delivered().len(), 2);
}

#[tokio::test]
async fn a_repository_that_cannot_be_used_is_said() {
    let mut bench1 = bench();
    bench1.spec.repo = "/nonexistent/repository".into();
    bench1.script(vec![add(1)], vec![score(93)]);
    let history = bench1.drive().await.unwrap();
    assert_eq!(history.state, LoopState::Failed, "no answer to an escalation could mend it");
    let steps = bench1.steps();
    let Step::Decided { decided, .. } = &steps.last().unwrap().step else { panic!("a decision") };
    assert!(decided.why.contains("/nonexistent/repository"), "{}", decided.why);
    let mut bench2 = bench();
    let empty = bench2.user.folder.path().join("empty");
    git2::Repository::init(&empty).unwrap();
    bench2.spec.repo = empty.to_str().unwrap().to_owned();
    bench2.spec.base = None;
    let history = bench2.drive().await.unwrap();
    assert_eq!(history.state, LoopState::Failed);
    let steps = bench2.steps();
    let Step::Decided { decided, .. } = &steps.last().unwrap().step else { panic!("a decision") };
    assert!(decided.why.contains("no commits yet"), "{}", decided.why);
}

/// Converged and merged, and the branch is still to be made.
async fn before_delivery() -> Bench {
    let bench = bench();
    bench.script(vec![add(1)], vec![score(93)]);
    let delivering = AT_ONCE.iter().position(|k| *k == "delivered").unwrap();
    bench.port.0.lock().unwrap().cut = Some(Cut::After(delivering - 1));
    assert_eq!(bench.drive().await, Err(Stopped::Lost));
    bench.port.0.lock().unwrap().cut = None;
    bench
}

#[tokio::test]
async fn a_repository_that_went_away_is_told_and_its_return_ends_the_task_as_merged() {
    let bench = before_delivery().await;
    let moved: PathBuf = bench.user.folder.path().join("moved");
    std::fs::rename(bench.user.path(), &moved).unwrap();
    let history = bench.drive().await.unwrap();
    assert!(history.facts.held && !history.hand_off.done && history.hand_off.delivered.is_none());
    let (why, actions) = bench.held();
    assert!(why.contains(bench.user.path().to_str().unwrap()), "{why}");
    assert_eq!(actions, [ActionKind::AcceptBestEffort], "merged in the mirror, it cannot be aborted");
    std::fs::rename(&moved, bench.user.path()).unwrap();
    bench.resolve(EscalationAction::AcceptBestEffort);
    assert!(bench.drive().await.unwrap().hand_off.delivered.is_some());
    assert_eq!((bench.ends_as(), bench.delivered().len()), (TaskState::Merged, 1));
}

#[tokio::test]
async fn a_repository_that_stays_away_does_not_keep_the_task_from_ending_as_accepted() {
    let bench = before_delivery().await;
    std::fs::rename(bench.user.path(), bench.user.folder.path().join("moved")).unwrap();
    bench.drive().await.unwrap();
    bench.resolve(EscalationAction::AcceptBestEffort);
    let history = bench.drive().await.unwrap();
    assert!(history.hand_off.done && history.hand_off.delivered.is_none());
    assert_eq!(bench.ends_as(), TaskState::Accepted, "nothing was delivered, so it is not merged");
    let Some(Step::HandedOff { why }) = bench.steps().last().map(|r| r.step.clone()) else { panic!("handed off") };
    assert!(why.contains("cfq pull t42"), "{why}");
}

#[tokio::test]
async fn a_merge_that_cannot_be_looked_at_asks_a_human_instead_of_trying_for_ever() {
    let bench = bench();
    bench.script(vec![add(1)], vec![score(93)]);
    let merging = AT_ONCE.iter().position(|k| *k == "merge_intent").unwrap();
    bench.port.0.lock().unwrap().cut = Some(Cut::Before(merging));
    assert_eq!(bench.drive().await, Err(Stopped::Lost));
    bench.port.0.lock().unwrap().cut = None;
    // Mirror and repository are both gone: nothing is left to merge.
    std::fs::remove_dir_all(bench.data.path().join("mirrors")).unwrap();
    std::fs::rename(bench.user.path(), bench.user.folder.path().join("moved")).unwrap();
    assert!(bench.drive().await.unwrap().facts.held);
    assert_eq!(bench.held().1, [ActionKind::AcceptBestEffort, ActionKind::Abort]);
}
