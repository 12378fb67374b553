//! The committed steps of a task, folded into what a decision and the runner read.
//!
//! A **window** is the stretch of iterations that shares one budget: it starts with the loop and anew with each answer
//! of a human, because somebody who says "try again" grants a fresh try. The best artifact is kept over all windows.

use cfq_proto::blob::Carried;
use cfq_proto::looping::{Artifact, Decided, Decision, EscalationAction, LoopState, Step, StepRecord};
use cfq_proto::model::ModelId;
use cfq_proto::pr::PrState;
use cfq_proto::review::{Finding, Quarantine, ReviewFeedback};
use cfq_proto::task::Agent;

use crate::facts::Facts;
use crate::transition::{IllegalTransition, transition};

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HistoryError {
    #[error("step {seq} does not follow from those before it")]
    Illegal {
        seq: i32,
        #[source]
        source: IllegalTransition,
    },
    #[error("step {found} stands where step {expected} belongs")]
    Gap { expected: i32, found: i32 },
    #[error("the artifact of step {seq} is a blob that was not loaded")]
    NotLoaded { seq: i32 },
    #[error("step {seq} is about iteration {found}, the last artifact is of iteration {expected}")]
    WrongIteration { seq: i32, expected: u32, found: u32 },
}

/// Where the workstream stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Base {
    pub commit: String,
    pub branch: String,
}

/// One artifact with all that was said about it.
#[derive(Debug, Clone, PartialEq)]
pub struct Iteration {
    pub artifact: Artifact,
    pub checked: bool,
    pub findings: Vec<Finding>,
    pub quarantine: Option<Quarantine>,
    pub review: Option<ReviewFeedback>,
    pub decided: Option<Decided>,
}

impl Iteration {
    /// May be returned, accepted, merged: it is files, was checked, and nothing was found.
    pub fn is_presentable(&self) -> bool {
        self.checked && self.quarantine.is_none() && self.artifact.commit.is_some()
    }

    /// The critic's score, clamped to 0..=100; what is not a number counts as 0.
    pub fn score(&self) -> Option<f64> {
        self.review.as_ref().map(|r| if r.quality_score.is_nan() { 0.0 } else { r.quality_score.clamp(0.0, 100.0) })
    }
}

/// The artifact to return on any ending (L6).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Best {
    pub iteration: u32,
    /// `None` where nothing presentable was reviewed.
    pub score: Option<f64>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MergeIntent {
    pub old: String,
    pub new: String,
    pub commit_time: i64,
}

/// How far the way from converged to handed off has gone.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HandOff {
    /// The head the pull request was opened with.
    pub pr_head: Option<String>,
    pub pr_state: Option<PrState>,
    pub intent: Option<MergeIntent>,
    pub merged: Option<String>,
    /// Why the pull request was closed unmerged.
    pub closed: Option<String>,
    /// Branch and commit in the user's repository.
    pub delivered: Option<(String, String)>,
    pub done: bool,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub struct History {
    pub state: LoopState,
    pub facts: Facts,
    /// Count of committed steps: the `seq` of the next one.
    pub next_seq: i32,
    pub base: Option<Base>,
    /// In order; the first has the number 1.
    pub iterations: Vec<Iteration>,
    /// Index into `iterations` of the first one of the running window.
    pub window_start: usize,
    /// Working time when the window started, in milliseconds.
    pub window_active_ms: u64,
    /// Working time up to the last committed step, in milliseconds.
    pub active_ms: u64,
    /// When the last step was committed, seconds since 1970.
    pub last_at: i64,
    /// Of all answers so far.
    pub constraints: Vec<String>,
    /// What `switch_llm` changed.
    pub alpha_model: Option<ModelId>,
    pub beta_model: Option<ModelId>,
    pub hand_off: HandOff,
}

impl History {
    pub fn of(steps: &[StepRecord]) -> Result<Self, HistoryError> {
        let mut history = Self::default();
        for record in steps {
            history.push(record)?;
        }
        Ok(history)
    }

    /// Adds a committed step; refuses one that the loop's rules do not allow there.
    pub fn push(&mut self, record: &StepRecord) -> Result<(), HistoryError> {
        let seq = record.seq;
        if seq != self.next_seq {
            return Err(HistoryError::Gap { expected: self.next_seq, found: seq });
        }
        let state =
            transition(self.state, self.facts, &record.step).map_err(|source| HistoryError::Illegal { seq, source })?;
        match &record.step {
            Step::Started { base, branch } => {
                self.base = Some(Base { commit: base.clone(), branch: branch.clone() });
            }
            Step::Generated { artifact } => {
                let Carried::Inline(artifact) = artifact else { return Err(HistoryError::NotLoaded { seq }) };
                let expected = self.next_iteration();
                if artifact.iteration != expected {
                    return Err(HistoryError::WrongIteration { seq, expected, found: artifact.iteration });
                }
                self.iterations.push(Iteration {
                    artifact: artifact.clone(),
                    checked: false,
                    findings: Vec::new(),
                    quarantine: None,
                    review: None,
                    decided: None,
                });
            }
            Step::Checked { iteration, findings, quarantine } => {
                let last = self.last_mut(seq, *iteration)?;
                last.checked = true;
                last.findings = findings.clone();
                last.quarantine = *quarantine;
            }
            Step::Reviewed { iteration, review, .. } => self.last_mut(seq, *iteration)?.review = Some(review.clone()),
            // An escalation or failure before the iteration's artifact is about no artifact.
            Step::Decided { iteration, decided } => match decided.decision {
                Decision::Converged | Decision::Revise => {
                    self.last_mut(seq, *iteration)?.decided = Some(decided.clone())
                }
                Decision::Escalate { .. } | Decision::Fail { .. } => {
                    if let Ok(last) = self.last_mut(seq, *iteration) {
                        last.decided = Some(decided.clone());
                    }
                }
            },
            Step::Resolved { action, .. } => self.resolve(action, record.active_ms),
            Step::PrOpened { head, .. } => {
                self.hand_off.pr_head = Some(head.clone());
                self.hand_off.pr_state = Some(PrState::PendingQc);
            }
            Step::PrMoved { to, why } => {
                self.hand_off.pr_state = Some(*to);
                if *to == PrState::Closed {
                    self.hand_off.closed = Some(why.clone());
                }
            }
            Step::MergeIntent { old, new, commit_time } => {
                let intent = MergeIntent { old: old.clone(), new: new.clone(), commit_time: *commit_time };
                self.hand_off.intent = Some(intent);
            }
            Step::Merged { commit } => {
                self.hand_off.merged = Some(commit.clone());
                self.hand_off.pr_state = Some(PrState::Merged);
            }
            Step::Delivered { branch, commit } => self.hand_off.delivered = Some((branch.clone(), commit.clone())),
            Step::HandedOff { .. } => self.hand_off.done = true,
            Step::HandOffHeld { .. } | Step::Cancelled { .. } => {}
        }
        self.facts = self.facts.after(&record.step);
        self.state = state;
        self.next_seq = seq + 1;
        self.active_ms = record.active_ms;
        self.last_at = record.at;
        Ok(())
    }

    /// The number of the iteration a creator's next reply makes.
    pub fn next_iteration(&self) -> u32 {
        u32::try_from(self.iterations.len()).unwrap_or(u32::MAX).saturating_add(1)
    }

    /// The number a decision made now is about: of the last artifact once the creator is done with it, else of the one
    /// that is being made.
    pub fn current_iteration(&self) -> u32 {
        match self.state {
            LoopState::Idle | LoopState::Generating | LoopState::Revising
                if !self.facts.unchecked && !self.facts.dangerous =>
            {
                self.next_iteration()
            }
            _ => self.next_iteration().saturating_sub(1).max(1),
        }
    }

    pub fn last(&self) -> Option<&Iteration> {
        self.iterations.last()
    }

    /// Iterations that share the running budget.
    pub fn window(&self) -> &[Iteration] {
        self.iterations.get(self.window_start..).unwrap_or_default()
    }

    pub fn iteration(&self, number: u32) -> Option<&Iteration> {
        self.iterations.get(usize::try_from(number).ok()?.checked_sub(1)?)
    }

    /// The best score among presentable artifacts, the earlier one of equals; if none was reviewed, the last
    /// presentable one.
    pub fn best(&self) -> Option<Best> {
        let presentable = || self.iterations.iter().filter(|i| i.is_presentable());
        let mut best: Option<(u32, f64)> = None;
        for (iteration, score) in presentable().filter_map(|i| Some((i.artifact.iteration, i.score()?))) {
            if best.is_none_or(|(_, highest)| score > highest) {
                best = Some((iteration, score));
            }
        }
        match best {
            Some((iteration, score)) => Some(Best { iteration, score: Some(score) }),
            None => presentable().next_back().map(|i| Best { iteration: i.artifact.iteration, score: None }),
        }
    }

    /// The artifact that is handed off: after best effort the best one, else the one that converged.
    pub fn result(&self) -> Option<&Iteration> {
        let number = if self.facts.best_effort { self.best()?.iteration } else { self.last()?.artifact.iteration };
        self.iteration(number).filter(|i| i.is_presentable())
    }

    /// What a human's answers changed about a role's model.
    pub fn switched_model(&self, agent: Agent) -> Option<&ModelId> {
        match agent {
            Agent::Alpha => self.alpha_model.as_ref(),
            Agent::Beta => self.beta_model.as_ref(),
        }
    }

    fn resolve(&mut self, action: &EscalationAction, active_ms: u64) {
        self.window_start = self.iterations.len();
        self.window_active_ms = active_ms;
        match action {
            EscalationAction::SwitchLlm { target_agent, suggested_model } => {
                if let Some(model) = suggested_model {
                    match target_agent {
                        Agent::Alpha => self.alpha_model = Some(model.clone()),
                        Agent::Beta => self.beta_model = Some(model.clone()),
                    }
                }
            }
            EscalationAction::RetryWithConstraints { additional_constraints } => {
                self.constraints.extend(additional_constraints.iter().cloned());
            }
            EscalationAction::AcceptBestEffort | EscalationAction::Abort | EscalationAction::Fail { .. } => {}
        }
    }

    fn last_mut(&mut self, seq: i32, iteration: u32) -> Result<&mut Iteration, HistoryError> {
        let expected = self.next_iteration() - 1;
        match self.iterations.last_mut() {
            Some(last) if last.artifact.iteration == iteration => Ok(last),
            _ => Err(HistoryError::WrongIteration { seq, expected, found: iteration }),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use cfq_proto::ids::{ArtifactId, JobId};
    use cfq_proto::review::{Defect, Severity};
    use uuid::Uuid;

    pub fn artifact(iteration: u32, content: &str) -> Artifact {
        Artifact {
            id: ArtifactId(Uuid::nil()),
            iteration,
            content_hash: content.to_owned(),
            commit: Some(format!("c{iteration}")),
            parent: "base".into(),
            commit_time: 0,
            commit_message: String::new(),
            files: vec![],
            diff: String::new(),
            job: JobId(Uuid::nil()),
            model: "m".into(),
            prompt_tokens: 0,
            output_tokens: 0,
        }
    }

    pub fn review(score: f64, critical: bool) -> ReviewFeedback {
        let severity = if critical { Severity::Critical } else { Severity::Minor };
        let defect = Defect {
            severity,
            category: "correctness".into(),
            location: "a.py:1".into(),
            description: "d".into(),
            suggested_fix: None,
        };
        ReviewFeedback { quality_score: score, defects: vec![defect], suggestions: vec![], required_changes: vec![] }
    }

    /// Builds records step by step.
    #[derive(Default)]
    pub struct Records(pub Vec<StepRecord>);

    impl Records {
        pub fn started() -> Self {
            Self::default().then(Step::Started { base: "base".into(), branch: "worker-1/task-1".into() })
        }

        pub fn then(self, step: Step) -> Self {
            self.then_at(step, 0)
        }

        pub fn then_at(mut self, step: Step, active_ms: u64) -> Self {
            let seq = i32::try_from(self.0.len()).unwrap();
            self.0.push(StepRecord { seq, step, active_ms, at: 0 });
            self
        }

        pub fn made(self, iteration: u32, content: &str, quarantine: Option<Quarantine>) -> Self {
            self.then(Step::Generated { artifact: Carried::Inline(artifact(iteration, content)) }).then(Step::Checked {
                iteration,
                findings: vec![],
                quarantine,
            })
        }

        pub fn reviewed(self, iteration: u32, score: f64) -> Self {
            self.then(Step::Reviewed {
                iteration,
                review: review(score, false),
                job: JobId(Uuid::nil()),
                model: "b".into(),
            })
        }

        pub fn decided(self, iteration: u32, decided: Decided) -> Self {
            self.then(Step::Decided { iteration, decided })
        }

        pub fn history(&self) -> History {
            History::of(&self.0).unwrap()
        }
    }

    #[test]
    fn the_best_is_the_best_reviewed_one_or_else_the_last_presentable() {
        let one = Records::started().made(1, "a", None);
        assert_eq!(one.history().best(), Some(Best { iteration: 1, score: None }));
        let one = one.reviewed(1, 70.0);
        assert_eq!(one.history().best(), Some(Best { iteration: 1, score: Some(70.0) }));
        let broken = Records::started().made(1, "a", Some(Quarantine::Syntax));
        assert_eq!(broken.history().best(), None);
    }

    #[test]
    fn a_step_that_does_not_follow_is_refused() {
        let mut history = Records::started().history();
        let late = StepRecord { seq: 5, step: Step::HandedOff { why: String::new() }, active_ms: 0, at: 0 };
        assert_eq!(history.push(&late), Err(HistoryError::Gap { expected: 1, found: 5 }));
        let wrong = StepRecord { seq: 1, step: Step::HandedOff { why: String::new() }, active_ms: 0, at: 0 };
        assert!(matches!(history.push(&wrong), Err(HistoryError::Illegal { seq: 1, .. })));
        let generated = Step::Generated { artifact: Carried::Inline(artifact(2, "x")) };
        let wrong = StepRecord { seq: 1, step: generated, active_ms: 0, at: 0 };
        assert!(matches!(history.push(&wrong), Err(HistoryError::WrongIteration { expected: 1, found: 2, .. })));
    }

    #[test]
    fn a_decision_is_about_the_artifact_that_is_there_or_the_one_being_made() {
        assert_eq!(Records::started().history().current_iteration(), 1);
        let made = Records::started().made(1, "a", None);
        assert_eq!(made.history().current_iteration(), 1);
        assert_eq!(Records::started().made(1, "a", Some(Quarantine::Dangerous)).history().current_iteration(), 1);
        let revise = Decided { decision: Decision::Revise, why: String::new(), best_iteration: None, best_score: None };
        assert_eq!(made.reviewed(1, 10.0).decided(1, revise).history().current_iteration(), 2);
    }
}
