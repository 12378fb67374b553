//! Builder of histories for tests, step by step.

use cfq_convergence::{History, LoopLimits, decide};
use cfq_proto::blob::Payload;
use cfq_proto::ids::{ArtifactId, JobId};
use cfq_proto::loop_step::{Artifact, EscalationAction, Step, StepRecord};
use cfq_proto::pr::PrState;
use cfq_proto::review::{Quarantine, ReviewFeedback};

pub struct Steps(pub Vec<StepRecord>);

pub fn artifact(iteration: u32, content: &str) -> Payload<Artifact> {
    Payload::Inline(Artifact {
        id: ArtifactId::fresh(),
        iteration,
        content_hash: content.to_owned(),
        commit: Some(format!("c{iteration}")),
        parent: "base".into(),
        commit_time: 0,
        commit_message: String::new(),
        files: vec![],
        diff: String::new(),
        windows_1252_in_diff: Vec::new(),
        job: JobId::fresh(),
        model: "m".into(),
        prompt_tokens: 0,
        output_tokens: 0,
    })
}

impl Steps {
    pub fn started() -> Self {
        Self(vec![]).then(Step::Started { base: "base".into(), branch: "worker-1/task-1".into(), review_depth: None })
    }

    pub fn history(&self) -> History {
        History::of(&self.0).unwrap()
    }

    pub fn then(self, step: Step) -> Self {
        let active_ms = self.0.last().map_or(0, |r| r.active_ms);
        self.then_at(step, active_ms)
    }

    pub fn then_at(mut self, step: Step, active_ms: u64) -> Self {
        let seq = i32::try_from(self.0.len()).unwrap();
        self.0.push(StepRecord { seq, step, active_ms, at: 0 });
        self
    }

    pub fn made(self, iteration: u32, content: &str, quarantine: Option<Quarantine>) -> Self {
        self.then(Step::Generated { artifact: artifact(iteration, content) }).then(Step::Checked {
            iteration,
            findings: vec![],
            quarantine,
            ran: vec![],
        })
    }

    pub fn reviewed(self, iteration: u32, score: f64) -> Self {
        let active_ms = self.0.last().map_or(0, |r| r.active_ms);
        self.reviewed_at(iteration, score, active_ms)
    }

    pub fn reviewed_at(self, iteration: u32, score: f64, active_ms: u64) -> Self {
        let review =
            ReviewFeedback { quality_score: score, defects: vec![], suggestions: vec![], required_changes: vec![] };
        self.then_at(Step::Reviewed { iteration, review, job: JobId::fresh(), model: "b".into() }, active_ms)
    }

    /// Adds the decision that the convergence rules make for the history so far.
    pub fn decided(self) -> Self {
        let history = self.history();
        let decided = decide(&LoopLimits::default(), &history).unwrap();
        self.then(Step::Decided { iteration: history.current_iteration(), decided })
    }

    pub fn resolved(self, action: EscalationAction) -> Self {
        self.then(Step::Resolved { action, by: "me".into() })
    }

    pub fn approved(self) -> Self {
        let moved = |to| Step::PrMoved { to, reason: "".into() };
        self.then(Step::PrOpened { head: "h".into(), base: "base".into(), branch: "worker-1/task-1".into() })
            .then(moved(PrState::QcApproved))
            .then(moved(PrState::PendingCoordinator))
            .then(moved(PrState::Approved))
    }

    pub fn handed_off(self) -> Self {
        self.approved()
            .then(Step::MergeIntent {
                old: "o".into(),
                new: "n".into(),
                commit_time: 0,
                repository: "/r".into(),
                message: "Merge".into(),
                ran: vec![],
            })
            .then(Step::Merged { commit: "n".into() })
            .then(Step::Delivered { branch: "cfq/t1".into(), commit: "c".into() })
            .then(Step::HandedOff { reason: "".into() })
    }
}
