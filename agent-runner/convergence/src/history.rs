//! History of a task: its committed steps, folded into the values that decisions and the runner read.
//!
//! A **window** is a run of iterations that share one budget. The first window starts with the loop, and each answer of
//! a human starts a new one, because a human who asks for a retry grants a new budget. The best artifact is kept across
//! all windows.

use cfq_proto::blob::Payload;
use cfq_proto::loop_step::{Decision, EscalationAction, LoopState, Step, StepRecord};
use cfq_proto::model::ModelId;
use cfq_proto::pr::PrState;
use cfq_proto::task::Agent;

use crate::facts::Facts;
use crate::hand_off::{HandOff, MergeIntent};
use crate::iteration::{BestIteration, Iteration};
use crate::transition::{IllegalTransition, transition};

/// Error: the recorded steps do not form a legal history.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HistoryError {
    /// The loop's rules do not allow the step at its position.
    #[error("step {seq} is not valid after the steps before it")]
    Illegal {
        /// Sequence number of the step.
        seq: i32,
        /// Reason from the transition table.
        #[source]
        source: IllegalTransition,
    },
    /// A step is missing or out of order.
    #[error("expected step {expected}, found step {found}")]
    Gap {
        /// Sequence number that the next step must have.
        expected: i32,
        /// Sequence number of the given step.
        found: i32,
    },
    /// The step's artifact is a reference to a blob instead of its content.
    #[error("the artifact of step {seq} is a blob that was not loaded")]
    NotLoaded {
        /// Sequence number of the step.
        seq: i32,
    },
    /// The step does not refer to the last artifact's iteration.
    #[error("step {seq} refers to iteration {found}, expected iteration {expected}")]
    WrongIteration {
        /// Sequence number of the step.
        seq: i32,
        /// Iteration that the step must refer to.
        expected: u32,
        /// Iteration that the step refers to.
        found: u32,
    },
}

/// Commit and branch from which the task's work starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Base {
    /// Commit of the user's repository that the work starts from.
    pub commit: String,
    /// Branch of the mirror that the work is committed to.
    pub branch: String,
}

/// State of a task, folded from its committed steps.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct History {
    /// State of the loop.
    pub state: LoopState,
    /// Facts that, with `state`, determine which next steps are legal.
    pub facts: Facts,
    /// Number of committed steps, which is the `seq` of the next one.
    pub next_seq: i32,
    /// Commit and branch from which the work starts; `None` before the loop has started.
    pub base: Option<Base>,
    /// Iterations in order; the first has the number 1.
    pub iterations: Vec<Iteration>,
    /// Index in `iterations` of the current window's first iteration.
    pub window_start: usize,
    /// Working time of the task up to the start of the current window, in ms.
    pub window_active_ms: u64,
    /// Working time of the task up to the last committed step, in ms.
    pub active_ms: u64,
    /// Time at which the last step was committed, in seconds since 1970 on the database's clock.
    pub last_at: i64,
    /// Constraints that humans added with all their answers so far.
    pub constraints: Vec<String>,
    /// The creator's model, if `switch_llm` changed it.
    pub alpha_model: Option<ModelId>,
    /// The critic's model, if `switch_llm` changed it.
    pub beta_model: Option<ModelId>,
    /// Progress of the hand-off.
    pub hand_off: HandOff,
}

impl History {
    /// Returns the history that results from all committed steps of a task, given oldest first.
    ///
    /// # Errors
    /// See [`History::push`].
    pub fn of(steps: &[StepRecord]) -> Result<Self, HistoryError> {
        let mut history = Self::default();
        for record in steps {
            history.push(record)?;
        }
        Ok(history)
    }

    /// Adds a committed step.
    ///
    /// # Errors
    /// [`HistoryError`] if the step is out of order, not legal in the current state, refers to another iteration than
    /// the current one, or carries an artifact that was not loaded. The history is then unchanged.
    pub fn push(&mut self, record: &StepRecord) -> Result<(), HistoryError> {
        let seq = record.seq;
        if seq != self.next_seq {
            return Err(HistoryError::Gap { expected: self.next_seq, found: seq });
        }
        let state =
            transition(self.state, self.facts, &record.step).map_err(|source| HistoryError::Illegal { seq, source })?;
        match &record.step {
            Step::Started { base, branch, .. } => {
                self.base = Some(Base { commit: base.clone(), branch: branch.clone() });
            }
            Step::Generated { artifact } => {
                let Payload::Inline(artifact) = artifact else { return Err(HistoryError::NotLoaded { seq }) };
                let expected = self.next_iteration();
                if artifact.iteration != expected {
                    return Err(HistoryError::WrongIteration { seq, expected, found: artifact.iteration });
                }
                self.iterations.push(Iteration {
                    artifact: artifact.clone(),
                    checked: false,
                    findings: Vec::new(),
                    ran: Vec::new(),
                    quarantine: None,
                    review: None,
                    review_passes: 0,
                    decided: None,
                });
            }
            Step::Checked { iteration, findings, quarantine, ran } => {
                let last = self.last_mut(seq, *iteration)?;
                last.checked = true;
                last.findings = findings.clone();
                last.ran = ran.clone();
                last.quarantine = *quarantine;
            }
            Step::Reviewed { iteration, review, .. } => {
                let last = self.last_mut(seq, *iteration)?;
                last.review = Some(review.clone());
                last.review_passes += 1;
            }
            // An escalation or failure before the iteration's artifact exists is recorded with no iteration.
            Step::Decided { iteration, decided } => match decided.decision {
                Decision::Converged | Decision::Revise | Decision::ReviewComplete => {
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
            Step::PrMoved { to, reason } => {
                self.hand_off.pr_state = Some(*to);
                if *to == PrState::Closed {
                    self.hand_off.closed = Some(reason.clone());
                }
            }
            Step::MergeIntent { old, new, commit_time, repository, .. } => {
                let (old, new, repository) = (old.clone(), new.clone(), repository.clone());
                let intent = MergeIntent { old, new, commit_time: *commit_time, repository };
                self.hand_off.merge_intent = Some(intent);
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

    /// Number of the iteration that begins with the creator's next reply.
    pub fn next_iteration(&self) -> u32 {
        u32::try_from(self.iterations.len()).unwrap_or(u32::MAX).saturating_add(1)
    }

    /// Number of the iteration that a decision made now refers to: the iteration in progress while the creator
    /// generates, otherwise the iteration of the last artifact.
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

    /// Last iteration.
    pub fn last(&self) -> Option<&Iteration> {
        self.iterations.last()
    }

    /// Iterations of the current window.
    pub fn window(&self) -> &[Iteration] {
        self.iterations.get(self.window_start..).unwrap_or_default()
    }

    /// Iteration with the given number, from 1.
    pub fn iteration(&self, number: u32) -> Option<&Iteration> {
        self.iterations.get(usize::try_from(number).ok()?.checked_sub(1)?)
    }

    /// Returns the iteration with the best score among those with a deliverable artifact
    /// ([`Iteration::is_deliverable`]), the earliest on ties. If none of these was reviewed, returns the last of them whose
    /// checks passed, else the last of them. `None` for a task that only reviews a change.
    pub fn best(&self) -> Option<BestIteration> {
        if self.facts.review_depth.is_some() {
            return None;
        }
        let deliverable = || self.iterations.iter().filter(|i| i.is_deliverable());
        let mut best: Option<(u32, f64)> = None;
        for (iteration, score) in deliverable().filter_map(|i| Some((i.artifact.iteration, i.score()?))) {
            if best.is_none_or(|(_, highest)| score > highest) {
                best = Some((iteration, score));
            }
        }
        match best {
            Some((iteration, score)) => Some(BestIteration { iteration, score: Some(score) }),
            None => {
                let passed = deliverable().rev().find(|i| i.quarantine.is_none());
                let best = passed.or_else(|| deliverable().next_back());
                best.map(|i| BestIteration { iteration: i.artifact.iteration, score: None })
            }
        }
    }

    /// Returns the iteration that is handed off: the best iteration if a human accepted a best effort, otherwise the
    /// last iteration. `None` if its artifact is not deliverable, or if no human accepted it and checks fail on it.
    pub fn result(&self) -> Option<&Iteration> {
        let accepted = self.facts.best_effort;
        let number = if accepted { self.best()?.iteration } else { self.last()?.artifact.iteration };
        self.iteration(number).filter(|i| i.is_deliverable() && (accepted || i.quarantine.is_none()))
    }

    /// Model that an answer of a human set for `agent`, if any.
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
    use cfq_proto::loop_step::{Artifact, Decided};
    use cfq_proto::review::{Defect, Quarantine, ReviewFeedback, Severity};
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
            windows_1252_in_diff: Vec::new(),
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

    /// Builder of step records.
    #[derive(Default)]
    pub struct Records(pub Vec<StepRecord>);

    impl Records {
        pub fn started() -> Self {
            Self::default().then(Step::Started {
                base: "base".into(),
                branch: "worker-1/task-1".into(),
                review_depth: None,
            })
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
            self.then(Step::Generated { artifact: Payload::Inline(artifact(iteration, content)) }).then(Step::Checked {
                iteration,
                findings: vec![],
                quarantine,
                ran: vec![],
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
    fn best_is_the_best_reviewed_or_else_the_last_deliverable() {
        let one = Records::started().made(1, "a", None);
        assert_eq!(one.history().best(), Some(BestIteration { iteration: 1, score: None }));
        let one = one.reviewed(1, 70.0);
        assert_eq!(one.history().best(), Some(BestIteration { iteration: 1, score: Some(70.0) }));
        let broken = Records::started().made(1, "a", Some(Quarantine::Syntax));
        assert_eq!(broken.history().best(), None);
    }

    #[test]
    fn illegal_or_misplaced_step_is_refused() {
        let mut history = Records::started().history();
        let late = StepRecord { seq: 5, step: Step::HandedOff { reason: "".into() }, active_ms: 0, at: 0 };
        assert_eq!(history.push(&late), Err(HistoryError::Gap { expected: 1, found: 5 }));
        let wrong = StepRecord { seq: 1, step: Step::HandedOff { reason: "".into() }, active_ms: 0, at: 0 };
        assert!(matches!(history.push(&wrong), Err(HistoryError::Illegal { seq: 1, .. })));
        let generated = Step::Generated { artifact: Payload::Inline(artifact(2, "x")) };
        let wrong = StepRecord { seq: 1, step: generated, active_ms: 0, at: 0 };
        assert!(matches!(history.push(&wrong), Err(HistoryError::WrongIteration { expected: 1, found: 2, .. })));
    }

    #[test]
    fn decision_refers_to_the_last_artifact_or_the_one_in_progress() {
        assert_eq!(Records::started().history().current_iteration(), 1);
        let made = Records::started().made(1, "a", None);
        assert_eq!(made.history().current_iteration(), 1);
        assert_eq!(Records::started().made(1, "a", Some(Quarantine::Dangerous)).history().current_iteration(), 1);
        let decision = Decision::Revise;
        let revise = Decided { decision, explanation: String::new(), best_iteration: None, best_score: None };
        assert_eq!(made.reviewed(1, 10.0).decided(1, revise).history().current_iteration(), 2);
    }
}
