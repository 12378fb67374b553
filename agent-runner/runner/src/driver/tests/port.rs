//! Fake scheduler, which only keeps a list of steps, with scripted models. It can interrupt the driver before or after
//! any step.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cfq_convergence::{History, MergeIntent, transition};
use cfq_proto::blob::Payload;
use cfq_proto::ids::{JobId, TaskId};
use cfq_proto::job::{Completion, FinishReason, JobFailure, JobRequest, JobState, JobView, Prompt, Usage};
use cfq_proto::loop_step::{Artifact, Step, StepRecord};
use cfq_proto::messages::{MainState, RecordedMerge};
use cfq_proto::task::{Agent, Priority};

use crate::driver::{DriveError, FollowGuard, MainQuery, PrefillPredictor, Stopped, TaskPort};

#[derive(Clone)]
pub(super) enum Reply {
    Text(String),
    /// A reply that reached its maximum length.
    Truncated(String),
    Failed(JobFailure),
    /// The job never ends. Its running time starts at this value, in ms, and each poll adds 400 ms.
    Running(u64),
}

/// Point at which the driver is interrupted: before or after the step with this index is committed.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Interrupt {
    Before(usize),
    After(usize),
}

#[derive(Default)]
pub(super) struct Records {
    pub(super) steps: Vec<StepRecord>,
    pub(super) jobs: BTreeMap<(i32, Agent, i16), JobView>,
    pub(super) replies: BTreeMap<Agent, Vec<Reply>>,
    pub(super) prompts: Vec<(Agent, Prompt)>,
    /// Prefill predictors, one for each followed job.
    pub(super) predictors: Vec<PrefillPredictor>,
    pub(super) cancelled: Vec<JobId>,
    /// Number of job submissions, including repeated ones.
    pub(super) submissions: usize,
    pub(super) interrupt: Option<Interrupt>,
    pub(super) task: Option<TaskId>,
    /// Merges into the main branch, also of earlier tasks.
    pub(super) merges: Vec<RecordedMerge>,
}

#[derive(Clone, Default)]
pub(super) struct FakePort(pub(super) Arc<Mutex<Records>>);

impl TaskPort for FakePort {
    async fn commit_step(&self, seq: i32, step: Step, active_ms: u64) -> Result<i64, Stopped> {
        let mut records = self.0.lock().unwrap();
        let index = records.steps.len();
        assert_eq!(seq as usize, index);
        if records.interrupt == Some(Interrupt::Before(index)) {
            return Err(Stopped::LeaseLost);
        }
        let history = History::of(&records.steps).unwrap();
        transition(history.state, history.facts, &step)
            .map_err(|e| Stopped::CannotDrive(DriveError::RefusedByScheduler { reason: e.to_string() }))?;
        // The clock advances, so the times of steps differ.
        let at = 1_700_000_000 + i64::from(seq);
        records.steps.push(StepRecord { seq, step, active_ms, at });
        if records.interrupt == Some(Interrupt::After(index)) {
            return Err(Stopped::LeaseLost);
        }
        Ok(at)
    }

    async fn commit_merge(&self, seq: i32, step: Step, active_ms: u64) -> Result<Option<i64>, Stopped> {
        {
            let mut records = self.0.lock().unwrap();
            let history = History::of(&records.steps).unwrap();
            let intent = history.hand_off.merge_intent.clone().unwrap();
            if records.merges.last().is_some_and(|last| last.new != intent.old) {
                return Ok(None);
            }
            if records.interrupt != Some(Interrupt::Before(records.steps.len())) {
                let chain = history.iterations.iter().map(|i| i.artifact.clone()).collect();
                let MergeIntent { old, new, commit_time, .. } = intent;
                let base = history.base.unwrap().commit;
                let message = String::new();
                records.merges.push(RecordedMerge { old, new, commit_time, message, base, artifacts: chain });
            }
        }
        self.commit_step(seq, step, active_ms).await.map(Some)
    }

    async fn main_branch(&self, query: MainQuery) -> Result<Option<MainState>, Stopped> {
        let records = self.0.lock().unwrap();
        let Some(last) = records.merges.last() else { return Ok(None) };
        let known = query.after.as_ref().map(|after| records.merges.iter().position(|merge| merge.new == *after));
        let merges = match known {
            Some(Some(at)) => records.merges[at + 1..].to_vec(),
            Some(None) => vec![],
            None => records.merges.clone(),
        };
        let has_base = records.merges.iter().any(|merge| merge.base == query.base);
        Ok(Some(MainState { commit: last.new.clone(), has_base, knows_after: known != Some(None), merges }))
    }

    async fn submit_job(&self, seq: i32, request: JobRequest) -> Result<JobView, Stopped> {
        let mut records = self.0.lock().unwrap();
        let key = (seq, request.role, request.n);
        records.submissions += 1;
        if let Some(view) = records.jobs.get(&key) {
            return Ok(view.clone());
        }
        let Payload::Inline(prompt) = request.prompt.clone() else { panic!("small prompts are inline") };
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
            Reply::Truncated(text) => view.completion = Some(completion(text, FinishReason::Length)),
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

    async fn get_job(&self, job: JobId) -> Result<JobView, Stopped> {
        let mut records = self.0.lock().unwrap();
        let view = records.jobs.values_mut().find(|view| view.id == job).expect("a submitted job");
        if view.state == JobState::Running {
            view.running_ms += 400;
        }
        Ok(view.clone())
    }

    fn follow_job(&self, _job: JobId, predictor: PrefillPredictor) -> FollowGuard {
        self.0.lock().unwrap().predictors.push(predictor);
        FollowGuard::new(tokio::spawn(async {}).abort_handle())
    }

    async fn cancel_job(&self, job: JobId) -> Result<(), Stopped> {
        self.0.lock().unwrap().cancelled.push(job);
        Ok(())
    }

    async fn wait_for_change(&self, _at_most: Duration) {
        tokio::task::yield_now().await;
    }

    async fn send_artifact(&self, artifact: Artifact) -> Result<Payload<Artifact>, Stopped> {
        Ok(Payload::Inline(artifact))
    }

    async fn send_prompt(&self, prompt: Prompt) -> Result<Payload<Prompt>, Stopped> {
        Ok(Payload::Inline(prompt))
    }

    async fn load_completion(&self, payload: Payload<Completion>) -> Result<Completion, Stopped> {
        payload.inline().map_err(|_| panic!("small results are inline"))
    }

    async fn wait_for_lease(&self) -> Result<(), Stopped> {
        Ok(())
    }

    async fn report_activity(&self, _seq: i32, _activity: String) {}

    fn record_progress(&self) {}
}

fn completion(text: String, finish: FinishReason) -> Payload<Completion> {
    let usage = Usage { prompt_tokens: 5, output_tokens: 7, ..Usage::default() };
    Payload::Inline(Completion { text, finish, usage, logprobs: Vec::new() })
}
