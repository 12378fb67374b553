//! A scheduler that is a list of steps, and models that are a script. It can be cut off before or after any step.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cfq_convergence::{History, transition};
use cfq_proto::blob::Carried;
use cfq_proto::ids::{JobId, TaskId};
use cfq_proto::job::{Completion, FinishReason, JobFailure, JobRequest, JobState, JobView, Prompt, Usage};
use cfq_proto::looping::{Artifact, Step, StepRecord};
use cfq_proto::task::{Agent, Priority};

use crate::driver::{Following, Foresee, Stopped, TaskPort};

#[derive(Clone)]
pub(super) enum Reply {
    Text(String),
    /// As much of it as fitted.
    Cut(String),
    Failed(JobFailure),
    /// Never ends; each look at it finds so many milliseconds more.
    Running(u64),
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Cut {
    Before(usize),
    After(usize),
}

#[derive(Default)]
pub(super) struct Records {
    pub(super) steps: Vec<StepRecord>,
    pub(super) jobs: BTreeMap<(i32, Agent, i16), JobView>,
    pub(super) replies: BTreeMap<Agent, Vec<Reply>>,
    pub(super) prompts: Vec<(Agent, Prompt)>,
    /// What would read along, one for each call that is followed.
    pub(super) foresee: Vec<Foresee>,
    pub(super) dropped: Vec<JobId>,
    /// Requests with a prompt in them.
    pub(super) asked: usize,
    pub(super) cut: Option<Cut>,
    pub(super) task: Option<TaskId>,
}

#[derive(Clone, Default)]
pub(super) struct Port(pub(super) Arc<Mutex<Records>>);

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

    fn follow(&self, _job: JobId, foresee: Foresee) -> Following {
        self.0.lock().unwrap().foresee.push(foresee);
        Following::new(tokio::spawn(async {}).abort_handle())
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
    Carried::Inline(Completion { text, finish, usage, logprobs: Vec::new() })
}
