//! Pause and resume of tasks.
//!
//! A task that waits for a model call is paused at once, because the call can go on later: its job is queued again and
//! keeps what it generated. A runner that executes anything else completes its step first, so that no work is lost.
//! Resume computes the task's state from what is true then; it does not restore the state before the pause.

use cfq_proto::task::TaskState;

/// What the decision about a pause depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PauseFacts {
    /// State of the task.
    pub state: TaskState,
    /// Whether a job of the task is queued, placed or running: the task then waits for this model call.
    pub waits_for_job: bool,
    /// Whether an earlier pause takes effect after the running step.
    pub is_requested: bool,
}

/// Decision about a pause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PauseDecision {
    /// The task is paused now.
    Now,
    /// The task is paused after the step that its runner executes.
    AfterStep,
    /// The task is paused, or will be paused after the running step or after a human's answer.
    Already,
    /// A task in this state cannot be paused: it has ended, or waits for a human's decision.
    Refused,
}

/// Decides what a request to pause the task does.
pub fn pause(facts: PauseFacts) -> PauseDecision {
    match facts.state {
        TaskState::Queued | TaskState::Blocked | TaskState::Ready | TaskState::WaitingOnHuman => PauseDecision::Now,
        TaskState::Running if facts.waits_for_job => PauseDecision::Now,
        TaskState::Running if facts.is_requested => PauseDecision::Already,
        TaskState::Running => PauseDecision::AfterStep,
        TaskState::Paused => PauseDecision::Already,
        TaskState::Escalated if facts.is_requested => PauseDecision::Already,
        TaskState::Escalated
        | TaskState::Merged
        | TaskState::Accepted
        | TaskState::Reviewed
        | TaskState::Failed
        | TaskState::Cancelled => PauseDecision::Refused,
    }
}

/// Whether a requested pause takes effect when a step leaves the task in this state. A task that ended or waits for a
/// human is not paused: no runner works on it. See [`keeps_requested_pause`].
pub fn pauses_after_step(state: TaskState) -> bool {
    match state {
        TaskState::Running | TaskState::Ready => true,
        TaskState::Queued
        | TaskState::Blocked
        | TaskState::WaitingOnHuman
        | TaskState::Paused
        | TaskState::Escalated
        | TaskState::Merged
        | TaskState::Accepted
        | TaskState::Reviewed
        | TaskState::Failed
        | TaskState::Cancelled => false,
    }
}

/// Whether a requested pause stays requested in this state. It takes effect after the human's decision, if the task then
/// continues.
pub fn keeps_requested_pause(state: TaskState) -> bool {
    match state {
        TaskState::Escalated | TaskState::WaitingOnHuman => true,
        TaskState::Queued
        | TaskState::Blocked
        | TaskState::Ready
        | TaskState::Running
        | TaskState::Paused
        | TaskState::Merged
        | TaskState::Accepted
        | TaskState::Reviewed
        | TaskState::Failed
        | TaskState::Cancelled => false,
    }
}

/// What the decision about a resume depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResumeFacts {
    /// State of the task.
    pub state: TaskState,
    /// Whether a pause takes effect after the running step, or after a human's decision.
    pub is_requested: bool,
    /// Whether the task has a question that a human has not answered.
    pub has_open_question: bool,
    /// Whether a predecessor has not ended as merged or accepted.
    pub has_open_predecessors: bool,
    /// Whether the time at which the task may start is in the future.
    pub is_before_start: bool,
}

/// Decision about a resume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResumeDecision {
    /// The task enters this state.
    To(TaskState),
    /// The pause that was requested does not take effect.
    Withdraw,
    /// The task is not paused.
    NotPaused,
}

/// Decides what a request to resume the task does.
pub fn resume(facts: ResumeFacts) -> ResumeDecision {
    match facts.state {
        TaskState::Paused => ResumeDecision::To(if facts.has_open_question {
            TaskState::WaitingOnHuman
        } else if facts.is_before_start {
            TaskState::Queued
        } else if facts.has_open_predecessors {
            TaskState::Blocked
        } else {
            TaskState::Ready
        }),
        TaskState::Running | TaskState::Escalated | TaskState::WaitingOnHuman if facts.is_requested => {
            ResumeDecision::Withdraw
        }
        TaskState::Queued
        | TaskState::Blocked
        | TaskState::Ready
        | TaskState::Running
        | TaskState::WaitingOnHuman
        | TaskState::Escalated
        | TaskState::Merged
        | TaskState::Accepted
        | TaskState::Reviewed
        | TaskState::Failed
        | TaskState::Cancelled => ResumeDecision::NotPaused,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task_transition_allowed;

    fn all_resume_facts() -> impl Iterator<Item = ResumeFacts> {
        TaskState::ALL.into_iter().flat_map(|state| {
            (0..16u32).map(move |bits| ResumeFacts {
                state,
                is_requested: bits & 1 != 0,
                has_open_question: bits & 2 != 0,
                has_open_predecessors: bits & 4 != 0,
                is_before_start: bits & 8 != 0,
            })
        })
    }

    #[test]
    fn every_decision_is_a_legal_transition() {
        for state in TaskState::ALL {
            for (waits_for_job, is_requested) in [(false, false), (false, true), (true, false), (true, true)] {
                let decision = pause(PauseFacts { state, waits_for_job, is_requested });
                let allowed = task_transition_allowed(state, TaskState::Paused);
                let expected = allowed || state == TaskState::Paused || state == TaskState::Escalated && is_requested;
                assert_eq!(decision != PauseDecision::Refused, expected, "{state}: {decision:?}");
                assert!(decision != PauseDecision::Now || allowed, "{state}");
                assert!(decision != PauseDecision::AfterStep || state == TaskState::Running, "{state}");
            }
            assert!(!pauses_after_step(state) || task_transition_allowed(state, TaskState::Paused), "{state}");
        }
        for facts in all_resume_facts() {
            match resume(facts) {
                ResumeDecision::To(to) => assert!(task_transition_allowed(facts.state, to), "{facts:?}: {to}"),
                ResumeDecision::Withdraw => {
                    assert!(facts.state == TaskState::Running || keeps_requested_pause(facts.state), "{facts:?}");
                }
                ResumeDecision::NotPaused => assert_ne!(facts.state, TaskState::Paused, "{facts:?}"),
            }
        }
    }

    #[test]
    fn running_task_is_paused_at_once_only_while_it_waits_for_a_model_call() {
        let facts = PauseFacts { state: TaskState::Running, waits_for_job: true, is_requested: false };
        assert_eq!(pause(facts), PauseDecision::Now);
        assert_eq!(pause(PauseFacts { is_requested: true, ..facts }), PauseDecision::Now);
        let in_step = PauseFacts { waits_for_job: false, ..facts };
        assert_eq!(pause(in_step), PauseDecision::AfterStep);
        assert_eq!(pause(PauseFacts { is_requested: true, ..in_step }), PauseDecision::Already);
    }

    #[test]
    fn resume_computes_the_state_from_what_is_true_now() {
        let facts = ResumeFacts {
            state: TaskState::Paused,
            is_requested: false,
            has_open_question: false,
            has_open_predecessors: false,
            is_before_start: false,
        };
        assert_eq!(resume(facts), ResumeDecision::To(TaskState::Ready));
        let blocked = ResumeFacts { has_open_predecessors: true, ..facts };
        assert_eq!(resume(blocked), ResumeDecision::To(TaskState::Blocked));
        let before_start = ResumeFacts { is_before_start: true, ..blocked };
        assert_eq!(resume(before_start), ResumeDecision::To(TaskState::Queued));
        let asked = ResumeFacts { has_open_question: true, ..before_start };
        assert_eq!(resume(asked), ResumeDecision::To(TaskState::WaitingOnHuman));
    }
}
