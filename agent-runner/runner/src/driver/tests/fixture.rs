//! Test fixture: a real repository, a task on it, and the fake port with its scheduler and models.

use std::collections::BTreeMap;
use std::sync::Arc;

use cfq_convergence::{History, LoopLimits, task_state_after};
use cfq_proto::ids::{TaskId, TaskNumber};
use cfq_proto::loop_step::{ActionKind, Decision, EscalationAction, EscalationReason, LoopState, Step, StepRecord};
use cfq_proto::task::{Agent, TaskSpec, TaskState};
use cfq_proto::timing::Timing;
use cfq_sandbox::SandboxLauncher;

use super::port::{FakePort, Reply};
use crate::checks::{CheckRunner, ProjectChecksConfig};
use crate::driver::{Assignment, Stopped, TaskDriver};
use crate::workstream::testing::UserRepo;
use crate::workstream::{RepositoryAccess, branch_name};

pub(super) struct Fixture {
    pub(super) user: UserRepo,
    pub(super) data: tempfile::TempDir,
    pub(super) port: FakePort,
    pub(super) number: TaskNumber,
    pub(super) task: TaskId,
    pub(super) spec: TaskSpec,
    pub(super) limits: LoopLimits,
}

pub(super) fn fixture() -> Fixture {
    let user = UserRepo::new(&[("README.md", "# sample\n")]);
    user.make_dirty();
    let spec = serde_json::from_value(serde_json::json!({
        "description": "Write a Python function add(a, b) in add.py that returns the sum.",
        "language": "python", "repo": user.path(), "base": user.base,
        "agents": { "alpha": { "model": "openai:x/alpha" }, "beta": { "model": "openai:x/beta" } },
    }));
    let task = TaskId::fresh();
    let port = FakePort::default();
    port.0.lock().unwrap().task = Some(task);
    Fixture {
        user,
        data: tempfile::tempdir().unwrap(),
        port,
        number: TaskNumber(42),
        task,
        spec: spec.unwrap(),
        limits: LoopLimits::default(),
    }
}

pub(super) fn add(n: u32) -> Reply {
    Reply::Text(format!("Here.\n\nadd.py\n```python\n# try {n}\ndef add(a, b):\n    return a + b\n```\n"))
}

pub(super) fn score(n: u32) -> Reply {
    Reply::Text(format!(
        "{{\"quality_score\": {n}, \"defects\": [], \"suggestions\": [], \"required_changes\": [\"fix it\"]}}"
    ))
}

impl Fixture {
    pub(super) fn script(&self, alpha: Vec<Reply>, beta: Vec<Reply>) {
        let mut records = self.port.0.lock().unwrap();
        records.replies = BTreeMap::from([(Agent::Alpha, alpha), (Agent::Beta, beta)]);
    }

    /// Runs the driver once more from the committed steps.
    pub(super) async fn drive(&self) -> Result<History, Stopped> {
        let timing =
            Timing { backoff_base_ms: 1, backoff_cap_ms: 2, retry_ceiling_ms: 5, ..Timing::default().faster(100) };
        self.drive_with(timing).await
    }

    pub(super) async fn drive_with(&self, timing: Timing) -> Result<History, Stopped> {
        let steps = self.steps();
        let assignment = Assignment {
            task: self.task,
            number: self.number,
            attempt: 1,
            spec: Arc::new(self.spec.clone()),
            limits: self.limits,
            history: History::of(&steps).unwrap(),
            worker: 1,
            reviewed: Vec::new(),
        };
        let repositories = RepositoryAccess::in_process();
        let data_dir = self.data.path().to_owned();
        let launcher = SandboxLauncher::of_this_program(Vec::<String>::new());
        let checks = CheckRunner::new(launcher, ProjectChecksConfig::default(), &data_dir);
        let policies = Arc::default();
        TaskDriver::new(self.port.clone(), assignment, data_dir, repositories, checks, policies, timing).run().await
    }

    pub(super) fn steps(&self) -> Vec<StepRecord> {
        self.port.0.lock().unwrap().steps.clone()
    }

    pub(super) fn kinds(&self) -> Vec<&'static str> {
        self.steps().iter().map(|r| r.step.kind()).collect()
    }

    pub(super) fn resolve(&self, action: EscalationAction) {
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

    /// Returns the reason why the hand-off is held, and the actions offered to the human.
    pub(super) fn held(&self) -> (String, Vec<ActionKind>) {
        match self.steps().pop().unwrap().step {
            Step::HandOffHeld { reason, available_actions } => (reason, available_actions),
            other => panic!("{other:?}"),
        }
    }

    /// Returns the task's state after the last step.
    pub(super) fn task_state(&self) -> TaskState {
        let steps = self.steps();
        let (last, before) = steps.split_last().unwrap();
        task_state_after(History::of(before).unwrap().facts, &last.step)
    }

    pub(super) fn delivered(&self) -> Vec<String> {
        let repository = self.user.repo();
        let branches = repository.branches(Some(git2::BranchType::Local)).unwrap();
        branches.map(|b| b.unwrap().0.name().unwrap().unwrap().to_owned()).filter(|n| n.starts_with("cfq/")).collect()
    }

    /// Name of the task's delivery branch, without `cfq/`.
    pub(super) fn branch_file(&self) -> String {
        branch_name(self.number, &self.spec.description).trim_start_matches("cfq/").to_owned()
    }

    pub(super) fn show(&self, branch: &str, path: &str) -> String {
        let repository = self.user.repo();
        let tree = repository.find_branch(branch, git2::BranchType::Local).unwrap().get().peel_to_tree().unwrap();
        let blob = repository.find_blob(tree.get_path(path.as_ref()).unwrap().id()).unwrap();
        String::from_utf8(blob.content().to_vec()).unwrap()
    }
}

/// Returns the escalation's reason, the actions offered to the human, and the escalation's text.
pub(super) fn escalation(history: &History, steps: &[StepRecord]) -> (EscalationReason, Vec<ActionKind>, String) {
    assert_eq!(history.state, LoopState::Escalated);
    match &steps.last().unwrap().step {
        Step::Decided { decided, .. } => match &decided.decision {
            Decision::Escalate { reason, available_actions } => {
                (*reason, available_actions.clone(), decided.explanation.clone())
            }
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    }
}

/// Kinds of the steps of a task that converges in its first iteration.
pub(super) const STEPS_OF_FIRST_TRY: [&str; 13] = [
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
