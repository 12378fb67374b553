//! Progress of a task, from its events and the text that arrives. Pure, so that the display can be tested without a
//! terminal. `now` is the time since the watch started.

use std::collections::HashMap;
use std::time::Duration;

use cfq_proto::blob::Payload;
use cfq_proto::event::{Event, EventBody, RunnerChange};
use cfq_proto::http::{JobSummary, TokensData};
use cfq_proto::ids::TaskNumber;
use cfq_proto::job::JobState;
use cfq_proto::loop_step::{Decision, EscalationAction, Step};
use cfq_proto::model::ModelId;
use cfq_proto::pr::PrState;
use cfq_proto::task::{Agent, TaskState};

use super::call::{ModelCall, Phase};
use super::status;
use crate::output;

#[derive(Debug, Default)]
pub struct TaskProgress {
    pub number: Option<TaskNumber>,
    /// The task's budget: the maximum number of iterations. If a human resolves an escalation with another model or
    /// with constraints, the task gets the same number again.
    max_iterations: u32,
    /// Number of iterations that have an artifact.
    completed: u32,
    /// Number of iterations completed before the last resolution that granted a new budget.
    completed_before_budget: u32,
    creating: bool,
    activity: Activity,
    /// The unfinished model call; it continues even if another runner takes over the task.
    call: Option<ModelCall>,
    /// Reason why the call is not placed; empty if it was not queried.
    pending_reason: String,
    /// True while the server does not respond.
    pub server_unreachable: bool,
    /// Bytes per token of each model, measured in its finished calls.
    bytes_per_token: HashMap<ModelId, f64>,
}

#[derive(Debug, Default)]
enum Activity {
    #[default]
    Connecting,
    Named(&'static str),
    /// The task may not start yet, for this reason.
    Waiting(String),
    /// What its runner reports.
    Reported(String),
    Calling,
}

impl TaskProgress {
    pub fn set_task(&mut self, number: TaskNumber, max_iterations: u32) {
        self.number = Some(number);
        self.max_iterations = max_iterations;
    }

    /// Whether the task may not start yet. Not every change of the reason is an event, so it must be queried.
    pub fn is_waiting(&self) -> bool {
        matches!(self.activity, Activity::Waiting(_))
    }

    /// Sets why the task may not start yet; `None` if it may. Returns whether this has changed.
    pub fn set_waiting(&mut self, reason: Option<&str>) -> bool {
        let was = match &self.activity {
            Activity::Waiting(was) => Some(was.as_str()),
            Activity::Connecting | Activity::Named(_) | Activity::Reported(_) | Activity::Calling => None,
        };
        if was == reason {
            return false;
        }
        self.activity = match reason {
            Some(reason) => Activity::Waiting(reason.to_owned()),
            None => Activity::Named("waiting for a runner"),
        };
        true
    }

    /// Whether a call is queued. Events report that, but not the reason, which changes too often and must be queried.
    pub fn is_queued(&self) -> bool {
        matches!((&self.activity, &self.call), (Activity::Calling, Some(ModelCall { phase: Phase::Queued, .. })))
    }

    /// Sets the reason why the task's call is queued, as stated in `jobs`, the task's jobs.
    pub fn set_pending_reason(&mut self, jobs: &[JobSummary]) {
        let queued = jobs.iter().rev().find(|job| job.state == JobState::Queued);
        self.pending_reason = queued.map(|job| output::sanitize(&job.placement)).unwrap_or_default();
    }

    pub fn on_event(&mut self, event: &Event) {
        self.pending_reason.clear();
        match &event.body {
            EventBody::TaskSubmitted => self.activity = Activity::Named("waiting for a runner"),
            EventBody::StepCommitted { step, .. } => self.on_step(step),
            EventBody::JobChanged { job, role, model, state, usage, .. } => {
                let phase = match state {
                    JobState::Queued => Phase::Queued,
                    JobState::Placed => Phase::Placed,
                    JobState::Running => Phase::Prefill,
                    JobState::Done | JobState::Failed | JobState::Dead | JobState::Cancelled => {
                        let bytes = self.call.take().map_or(0, |call| call.bytes());
                        if let Some(usage) = usage.filter(|u| u.output_tokens > 0 && bytes > 0) {
                            self.bytes_per_token.insert(model.clone(), bytes as f64 / f64::from(usage.output_tokens));
                        }
                        let created = *state == JobState::Done && *role == Agent::Alpha;
                        self.activity = Activity::Named(if created { "running checks" } else { "deciding" });
                        return;
                    }
                };
                self.call = Some(ModelCall { job: *job, role: *role, model: model.clone(), phase });
                self.activity = Activity::Calling;
            }
            EventBody::RunnerChanged { change, .. } => {
                self.activity = Activity::Named(match change {
                    RunnerChange::Granted => "preparing",
                    RunnerChange::Lost { .. } => "waiting for a runner",
                });
            }
            EventBody::TaskStateChanged { to, reason, .. } => match to {
                TaskState::Queued | TaskState::Blocked => {
                    self.set_waiting(Some(&output::sanitize(reason)));
                }
                TaskState::Ready => self.activity = Activity::Named("waiting for a runner"),
                TaskState::Paused => self.activity = Activity::Named("paused"),
                TaskState::Running
                | TaskState::WaitingOnHuman
                | TaskState::Escalated
                | TaskState::Merged
                | TaskState::Accepted
                | TaskState::Reviewed
                | TaskState::Failed
                | TaskState::Cancelled => {}
            },
            EventBody::RunnerActivity { activity, .. } => {
                self.activity = Activity::Reported(output::one_line(activity));
            }
            EventBody::PriorityChanged { .. }
            | EventBody::QuestionOpened { .. }
            | EventBody::QuestionAnswered { .. } => {}
        }
    }

    fn on_step(&mut self, step: &Step) {
        let mut set = |activity| self.activity = Activity::Named(activity);
        match step {
            Step::Started { .. } => {
                set("preparing");
                self.creating = true;
            }
            Step::Generated { artifact } => {
                set("running checks");
                self.creating = false;
                self.completed = match artifact {
                    Payload::Inline(artifact) => artifact.iteration,
                    Payload::Blob(_) => self.completed + 1,
                };
            }
            Step::Checked { .. } => set("preparing the review"),
            Step::Reviewed { .. } => set("deciding"),
            Step::Decided { decided, .. } => match decided.decision {
                Decision::Revise => {
                    set("preparing the revision");
                    self.creating = true;
                }
                Decision::Converged => set("opening the pull request"),
                Decision::ReviewComplete => set("finishing"),
                Decision::Escalate { .. } | Decision::Fail { .. } => set("stopping"),
            },
            Step::Resolved { action, .. } => match action {
                EscalationAction::SwitchLlm { .. } | EscalationAction::RetryWithConstraints { .. } => {
                    set("waiting for a runner");
                    self.creating = true;
                    self.completed_before_budget = self.completed;
                }
                EscalationAction::AcceptBestEffort => set("opening the pull request"),
                EscalationAction::Abort | EscalationAction::Fail { .. } => set("stopping"),
            },
            Step::PrOpened { .. } | Step::MergeIntent { .. } => set("merging"),
            Step::PrMoved { to, .. } => set(if *to == PrState::Merged { "delivering" } else { "merging" }),
            Step::Merged { .. } => set("delivering"),
            Step::Delivered { .. } | Step::HandedOff { .. } | Step::Cancelled { .. } => set("finishing"),
            Step::HandOffHeld { .. } => set("waiting for you"),
        }
    }

    pub fn on_tokens(&mut self, tokens: &TokensData, now: Duration) {
        // A frame may arrive before the event that reports its call as running, and after the event that reports it as
        // finished.
        let Some(call) = self.call.as_mut().filter(|call| call.job == tokens.job) else { return };
        self.activity = Activity::Calling;
        call.on_frame(tokens, now);
    }

    /// The status line, at most `width` columns wide.
    pub fn status_line(&self, now: Duration, width: usize) -> String {
        let current = self.current_iteration();
        let iteration = (current > 0).then(|| (current, self.last_iteration()));
        let (agent, model, activity) = if self.server_unreachable {
            (None, None, "server unreachable, reconnecting".to_owned())
        } else {
            match (&self.activity, &self.call) {
                (Activity::Named(activity), _) => (None, None, (*activity).to_owned()),
                (Activity::Waiting(text) | Activity::Reported(text), _) => (None, None, text.clone()),
                (Activity::Calling, Some(call)) => {
                    let ratio = self.bytes_per_token.get(&call.model).copied();
                    let activity = call.describe(&self.pending_reason, ratio, now);
                    (Some(call.role.to_string()), Some(call.model_name()), activity)
                }
                (Activity::Connecting | Activity::Calling, _) => (None, None, "connecting".to_owned()),
            }
        };
        let task = self.number.map(|n| n.to_string());
        status::fit(&status::StatusLine { task, iteration, agent, model, activity, elapsed: now }, width)
    }

    /// The iteration that is being worked on; 0 before the first.
    fn current_iteration(&self) -> u32 {
        self.completed + u32::from(self.creating)
    }

    /// The last iteration of the current budget.
    fn last_iteration(&self) -> u32 {
        self.completed_before_budget + self.max_iterations
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn event(body: serde_json::Value) -> Event {
        serde_json::from_value(json!({
            "id": 1, "task": "01890000-0000-7000-8000-000000000001", "number": 3, "task_seq": 1, "at": 0.0, "body": body,
        }))
        .unwrap()
    }

    fn step(kind: &str, rest: serde_json::Value) -> Event {
        let mut step = rest;
        step["kind"] = kind.into();
        event(json!({ "type": "step_committed", "seq": 0, "step": step, "loop_state": "generating" }))
    }

    fn id(role: &str) -> String {
        format!("01890000-0000-7000-8000-00000000000{}", if role == "alpha" { 4 } else { 5 })
    }

    fn job(role: &str, state: &str, usage: serde_json::Value) -> Event {
        event(json!({
            "type": "job_changed", "job": id(role), "role": role, "model": "openai:box/m:7b",
            "attempt": 1, "state": state, "usage": usage,
        }))
    }

    fn generated(iteration: u32) -> Event {
        let id = "01890000-0000-7000-8000-000000000003";
        let artifact = json!({
            "id": id, "iteration": iteration, "content_hash": "h", "commit": null, "parent": "p", "commit_time": 0,
            "commit_message": "", "files": [], "diff": "", "job": id, "model": "m", "prompt_tokens": 1, "output_tokens": 1,
        });
        step("generated", json!({ "artifact": { "inline": artifact } }))
    }

    fn decided(iteration: u32, decision: &str) -> Event {
        let decided =
            json!({ "decision": { "type": decision }, "explanation": "", "best_iteration": null, "best_score": null });
        step("decided", json!({ "iteration": iteration, "decided": decided }))
    }

    fn tokens(role: Agent, offset: u64, text: &str) -> TokensData {
        serde_json::from_value(json!({
            "job": id(role.as_str()), "attempt": 1, "role": role, "offset": offset, "text": text,
        }))
        .unwrap()
    }

    fn at(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    fn watched() -> TaskProgress {
        let mut progress = TaskProgress::default();
        progress.set_task(TaskNumber(3), 5);
        progress
    }

    #[test]
    fn status_line_follows_the_phases_of_a_call() {
        let mut p = watched();
        let line = |p: &TaskProgress, now| p.status_line(at(now), 100);
        assert_eq!(line(&p, 0.0), "t3  connecting  0:00");
        p.on_event(&event(json!({ "type": "task_submitted" })));
        assert_eq!(line(&p, 0.0), "t3  waiting for a runner  0:00");
        p.on_event(&step("started", json!({ "base": "b", "branch": "x" })));
        p.on_event(&job("alpha", "queued", json!(null)));
        assert_eq!(line(&p, 1.0), "t3  iteration 1 of 5  alpha (m:7b)  waiting for a node  0:01");
        p.on_event(&job("alpha", "running", json!(null)));
        assert_eq!(line(&p, 2.0), "t3  iteration 1 of 5  alpha (m:7b)  prefill  0:02");
        p.on_tokens(&tokens(Agent::Alpha, 0, "abcdefgh"), at(3.0));
        assert_eq!(line(&p, 3.1), "t3  iteration 1 of 5  alpha (m:7b)  generating ~2 tokens  0:03");
        p.on_tokens(&tokens(Agent::Alpha, 8, &"x".repeat(80)), at(4.0));
        assert_eq!(line(&p, 5.0), "t3  iteration 1 of 5  alpha (m:7b)  generating ~22 tokens, 10/s  0:05");
        // 88 bytes were 44 tokens: from here on the bytes per token of this model are known.
        p.on_event(&job("alpha", "done", json!({ "output_tokens": 44 })));
        assert_eq!(line(&p, 5.0), "t3  iteration 1 of 5  running checks  0:05");
        p.on_event(&job("beta", "running", json!(null)));
        p.on_tokens(&tokens(Agent::Beta, 0, "abcdefgh"), at(6.0));
        assert_eq!(line(&p, 6.0), "t3  iteration 1 of 5  beta (m:7b)  generating ~4 tokens  0:06");
        p.server_unreachable = true;
        assert_eq!(line(&p, 7.0), "t3  iteration 1 of 5  server unreachable, reconnecting  0:07");
    }

    #[test]
    fn iteration_is_the_current_one_and_a_resolution_grants_a_new_budget() {
        let mut p = watched();
        let iteration = |p: &TaskProgress| (p.current_iteration(), p.last_iteration());
        p.on_event(&step("started", json!({ "base": "b", "branch": "x" })));
        assert_eq!(iteration(&p), (1, 5));
        p.on_event(&generated(1));
        assert_eq!(iteration(&p), (1, 5), "it is being reviewed");
        p.on_event(&decided(1, "revise"));
        assert_eq!(iteration(&p), (2, 5));
        p.on_event(&generated(2));
        let retry = json!({ "type": "retry_with_constraints", "additional_constraints": ["c"] });
        p.on_event(&step("resolved", json!({ "action": retry, "by": "you" })));
        assert_eq!(iteration(&p), (3, 7));
    }

    #[test]
    fn second_attempt_counts_from_its_start_and_other_jobs_are_ignored() {
        let mut p = watched();
        p.on_event(&job("alpha", "running", json!(null)));
        p.on_tokens(&tokens(Agent::Alpha, 400, "abcd"), at(1.0));
        p.on_tokens(&tokens(Agent::Alpha, 0, "abcd"), at(2.0));
        assert!(p.status_line(at(2.0), 100).contains("~1 token "), "{}", p.status_line(at(2.0), 100));
        p.on_tokens(&tokens(Agent::Beta, 0, "abcdefghabcdefgh"), at(3.0));
        assert!(p.status_line(at(3.0), 100).contains("alpha"), "{}", p.status_line(at(3.0), 100));
        let granted = json!({ "type": "granted" });
        p.on_event(&event(json!({ "type": "runner_changed", "runner": "r", "attempt": 2, "change": granted })));
        assert!(p.status_line(at(3.0), 100).contains("preparing"), "{}", p.status_line(at(3.0), 100));
        p.on_tokens(&tokens(Agent::Alpha, 4, "more"), at(3.5));
        assert!(p.status_line(at(3.5), 100).contains("generating ~2 tokens"), "the call continues without its runner");
        p.on_event(&job("alpha", "done", json!(null)));
        p.on_tokens(&tokens(Agent::Alpha, 4, "late"), at(4.0));
        assert!(p.status_line(at(4.0), 100).contains("running checks"), "{}", p.status_line(at(4.0), 100));
    }
}
