//! What a run is at, from its events and the text that arrives: pure, so that what a person sees can be tested without a
//! terminal. `now` is the time since the watch began.

use std::collections::HashMap;
use std::time::Duration;

use cfq_proto::blob::Carried;
use cfq_proto::event::{Event, EventBody};
use cfq_proto::http::{JobSummary, TokensData};
use cfq_proto::ids::TaskNumber;
use cfq_proto::job::JobState;
use cfq_proto::looping::{Decision, EscalationAction, Step};
use cfq_proto::model::ModelId;
use cfq_proto::pr::PrState;
use cfq_proto::task::Agent;

use super::call::{Call, Phase};
use super::status;
use crate::output;

#[derive(Debug, Default)]
pub struct Progress {
    pub number: Option<TaskNumber>,
    /// Of one budget; an answered escalation gives another one.
    max_iterations: u32,
    /// Iterations whose artifact is there.
    made: u32,
    /// Of those, made before the last answer that gave a fresh budget.
    spent: u32,
    creating: bool,
    doing: Doing,
    /// The last call that is not over: another runner may take the task while it goes on.
    call: Option<Call>,
    /// Why the call is not placed, if it was asked.
    waits: String,
    /// Nothing is heard from the server.
    pub away: bool,
    /// As the finished calls of each model showed it.
    bytes_a_token: HashMap<ModelId, f64>,
}

#[derive(Debug, Default)]
enum Doing {
    #[default]
    Joining,
    Named(&'static str),
    Calling,
}

impl Progress {
    pub fn of(&mut self, number: TaskNumber, max_iterations: u32) {
        self.number = Some(number);
        self.max_iterations = max_iterations;
    }

    /// Events say when a call waits, not why: that changes too often, and is asked for.
    pub fn is_waiting(&self) -> bool {
        matches!((&self.doing, &self.call), (Doing::Calling, Some(Call { phase: Phase::Queued, .. })))
    }

    pub fn explain(&mut self, jobs: &[JobSummary]) {
        let queued = jobs.iter().rev().find(|job| job.state == JobState::Queued);
        self.waits = queued.map(|job| output::plain(&job.placement)).unwrap_or_default();
    }

    pub fn event(&mut self, event: &Event) {
        self.waits.clear();
        match &event.body {
            EventBody::TaskSubmitted => self.doing = Doing::Named("waiting for a runner"),
            EventBody::StepCommitted { step, .. } => self.step(step),
            EventBody::JobChanged { job, role, model, state, usage, .. } => {
                let phase = match state {
                    JobState::Queued => Phase::Queued,
                    JobState::Placed => Phase::Placed,
                    JobState::Running => Phase::Prefill,
                    JobState::Done | JobState::Failed | JobState::Dead | JobState::Cancelled => {
                        let bytes = self.call.take().map_or(0, |call| call.bytes());
                        if let Some(usage) = usage.filter(|u| u.output_tokens > 0 && bytes > 0) {
                            self.bytes_a_token.insert(model.clone(), bytes as f64 / f64::from(usage.output_tokens));
                        }
                        let made = *state == JobState::Done && *role == Agent::Alpha;
                        self.doing = Doing::Named(if made { "checks" } else { "deciding" });
                        return;
                    }
                };
                self.call = Some(Call { job: *job, role: *role, model: model.clone(), phase });
                self.doing = Doing::Calling;
            }
            EventBody::RunnerChanged { what, .. } if what.starts_with("lost") => {
                self.doing = Doing::Named("waiting for a runner");
            }
            EventBody::RunnerChanged { .. } => self.doing = Doing::Named("preparing"),
            EventBody::TaskStateChanged { .. }
            | EventBody::QuestionOpened { .. }
            | EventBody::QuestionAnswered { .. } => {}
        }
    }

    fn step(&mut self, step: &Step) {
        let mut at = |what| self.doing = Doing::Named(what);
        match step {
            Step::Started { .. } => {
                at("preparing");
                self.creating = true;
            }
            Step::Generated { artifact } => {
                at("checks");
                self.creating = false;
                self.made = match artifact {
                    Carried::Inline(artifact) => artifact.iteration,
                    Carried::Blob(_) => self.made + 1,
                };
            }
            Step::Checked { .. } => at("preparing the review"),
            Step::Reviewed { .. } => at("deciding"),
            Step::Decided { decided, .. } => match decided.decision {
                Decision::Revise => {
                    at("preparing the revision");
                    self.creating = true;
                }
                Decision::Converged => at("opening the pull request"),
                Decision::Escalate { .. } | Decision::Fail { .. } => at("stopping"),
            },
            Step::Resolved { action, .. } => match action {
                EscalationAction::SwitchLlm { .. } | EscalationAction::RetryWithConstraints { .. } => {
                    at("waiting for a runner");
                    self.creating = true;
                    self.spent = self.made;
                }
                EscalationAction::AcceptBestEffort => at("opening the pull request"),
                EscalationAction::Abort | EscalationAction::Fail { .. } => at("stopping"),
            },
            Step::PrOpened { .. } | Step::MergeIntent { .. } => at("merging"),
            Step::PrMoved { to, .. } => at(if *to == PrState::Merged { "delivering" } else { "merging" }),
            Step::Merged { .. } => at("delivering"),
            Step::Delivered { .. } | Step::HandedOff { .. } | Step::Cancelled { .. } => at("finishing"),
            Step::HandOffHeld { .. } => at("waiting for you"),
        }
    }

    pub fn tokens(&mut self, tokens: &TokensData, now: Duration) {
        // A frame may come before the event that says its call runs, and after the one that says it is over.
        let Some(call) = self.call.as_mut().filter(|call| call.job == tokens.job) else { return };
        self.doing = Doing::Calling;
        call.frame(tokens, now);
    }

    /// One line of at most `width` columns.
    pub fn line(&self, now: Duration, width: usize) -> String {
        let now_at = self.made + u32::from(self.creating);
        let iteration = (now_at > 0).then(|| (now_at, self.spent + self.max_iterations));
        let (who, model, what) = if self.away {
            (None, None, "the server is away, trying again".to_owned())
        } else {
            match (&self.doing, &self.call) {
                (Doing::Named(what), _) => (None, None, (*what).to_owned()),
                (Doing::Calling, Some(call)) => {
                    let ratio = self.bytes_a_token.get(&call.model).copied();
                    (Some(call.role.to_string()), Some(call.name()), call.words(&self.waits, ratio, now))
                }
                (Doing::Joining | Doing::Calling, _) => (None, None, "joining".to_owned()),
            }
        };
        let task = self.number.map(|n| n.to_string());
        status::fit(&status::Parts { task, iteration, who, model, what, elapsed: now }, width)
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
            json!({ "decision": { "type": decision }, "why": "", "best_iteration": null, "best_score": null });
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

    fn watched() -> Progress {
        let mut progress = Progress::default();
        progress.of(TaskNumber(3), 5);
        progress
    }

    #[test]
    fn a_call_goes_through_its_phases() {
        let mut p = watched();
        let line = |p: &Progress, now| p.line(at(now), 100);
        assert_eq!(line(&p, 0.0), "t3  joining  0:00");
        p.event(&event(json!({ "type": "task_submitted" })));
        assert_eq!(line(&p, 0.0), "t3  waiting for a runner  0:00");
        p.event(&step("started", json!({ "base": "b", "branch": "x" })));
        p.event(&job("alpha", "queued", json!(null)));
        assert_eq!(line(&p, 1.0), "t3  iteration 1 of 5  alpha (m:7b)  waiting for a node  0:01");
        p.event(&job("alpha", "running", json!(null)));
        assert_eq!(line(&p, 2.0), "t3  iteration 1 of 5  alpha (m:7b)  prefill  0:02");
        p.tokens(&tokens(Agent::Alpha, 0, "abcdefgh"), at(3.0));
        assert_eq!(line(&p, 3.1), "t3  iteration 1 of 5  alpha (m:7b)  generating ~2 tokens  0:03");
        p.tokens(&tokens(Agent::Alpha, 8, &"x".repeat(80)), at(4.0));
        assert_eq!(line(&p, 5.0), "t3  iteration 1 of 5  alpha (m:7b)  generating ~22 tokens, 10/s  0:05");
        // 88 bytes were 44 tokens: from here on this model's ratio is known.
        p.event(&job("alpha", "done", json!({ "output_tokens": 44 })));
        assert_eq!(line(&p, 5.0), "t3  iteration 1 of 5  checks  0:05");
        p.event(&job("beta", "running", json!(null)));
        p.tokens(&tokens(Agent::Beta, 0, "abcdefgh"), at(6.0));
        assert_eq!(line(&p, 6.0), "t3  iteration 1 of 5  beta (m:7b)  generating ~4 tokens  0:06");
        p.away = true;
        assert_eq!(line(&p, 7.0), "t3  iteration 1 of 5  the server is away, trying again  0:07");
    }

    #[test]
    fn the_iteration_is_the_one_being_worked_on_and_an_answer_gives_a_fresh_budget() {
        let mut p = watched();
        let iteration = |p: &Progress| (p.made + u32::from(p.creating), p.spent + p.max_iterations);
        p.event(&step("started", json!({ "base": "b", "branch": "x" })));
        assert_eq!(iteration(&p), (1, 5));
        p.event(&generated(1));
        assert_eq!(iteration(&p), (1, 5), "it is being reviewed");
        p.event(&decided(1, "revise"));
        assert_eq!(iteration(&p), (2, 5));
        p.event(&generated(2));
        let retry = json!({ "type": "retry_with_constraints", "additional_constraints": ["c"] });
        p.event(&step("resolved", json!({ "action": retry, "by": "you" })));
        assert_eq!(iteration(&p), (3, 7));
    }

    #[test]
    fn a_second_attempt_counts_from_its_own_start_and_strays_are_ignored() {
        let mut p = watched();
        p.event(&job("alpha", "running", json!(null)));
        p.tokens(&tokens(Agent::Alpha, 400, "abcd"), at(1.0));
        p.tokens(&tokens(Agent::Alpha, 0, "abcd"), at(2.0));
        assert!(p.line(at(2.0), 100).contains("~1 token "), "{}", p.line(at(2.0), 100));
        p.tokens(&tokens(Agent::Beta, 0, "abcdefghabcdefgh"), at(3.0));
        assert!(p.line(at(3.0), 100).contains("alpha"), "{}", p.line(at(3.0), 100));
        let taken = json!({ "type": "runner_changed", "runner": "r", "attempt": 2, "what": "took the task" });
        p.event(&event(taken));
        assert!(p.line(at(3.0), 100).contains("preparing"), "{}", p.line(at(3.0), 100));
        p.tokens(&tokens(Agent::Alpha, 4, "more"), at(3.5));
        assert!(p.line(at(3.5), 100).contains("generating ~2 tokens"), "the call outlives its runner");
        p.event(&job("alpha", "done", json!(null)));
        p.tokens(&tokens(Agent::Alpha, 4, "late"), at(4.0));
        assert!(p.line(at(4.0), 100).contains("checks"), "{}", p.line(at(4.0), 100));
    }
}
