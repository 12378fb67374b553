//! A scheduler in memory, with models that answer at once, for benchmarks of the runner.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cfq_agent_runner::driver::{FollowGuard, MainQuery, PrefillPredictor, Stopped, TaskPort};
use cfq_proto::blob::Payload;
use cfq_proto::ids::{JobId, TaskId};
use cfq_proto::job::{Completion, FinishReason, JobRequest, JobState, JobView, Prompt, Usage};
use cfq_proto::loop_step::{Artifact, Step};
use cfq_proto::messages::MainState;
use cfq_proto::task::{Agent, Priority};

const REVIEW: &str = r#"{"quality_score": 93, "defects": [], "suggestions": [], "required_changes": []}"#;

/// The records of all tasks of a benchmark: the commit of the main branch.
#[derive(Debug, Default)]
pub struct Records(Mutex<Option<String>>);

/// The scheduler, as one task sees it.
#[derive(Debug)]
pub struct MemoryPort {
    task: TaskId,
    records: Arc<Records>,
    /// Reply of the creator.
    reply: String,
    /// Old commit of the last merge intent.
    old: Mutex<Option<String>>,
    at: Mutex<i64>,
}

impl MemoryPort {
    /// A task whose creator replies `reply`.
    pub fn new(task: TaskId, records: Arc<Records>, reply: String) -> Self {
        Self { task, records, reply, old: Mutex::default(), at: Mutex::new(1_700_000_000) }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl TaskPort for MemoryPort {
    async fn commit_step(&self, _seq: i32, step: Step, _active_ms: u64) -> Result<i64, Stopped> {
        if let Step::MergeIntent { old, .. } = step {
            *lock(&self.old) = Some(old);
        }
        let mut at = lock(&self.at);
        *at += 1;
        Ok(*at)
    }

    async fn commit_merge(&self, seq: i32, step: Step, active_ms: u64) -> Result<Option<i64>, Stopped> {
        if let Step::Merged { commit } = &step {
            let mut main = lock(&self.records.0);
            if main.is_some() && *main != *lock(&self.old) {
                return Ok(None);
            }
            *main = Some(commit.clone());
        }
        self.commit_step(seq, step, active_ms).await.map(Some)
    }

    async fn main_branch(&self, query: MainQuery) -> Result<Option<MainState>, Stopped> {
        let main = lock(&self.records.0).clone();
        let knows_after = query.after == main;
        Ok(main.map(|commit| MainState { commit, has_base: true, knows_after, merges: vec![] }))
    }

    async fn submit_job(&self, seq: i32, request: JobRequest) -> Result<JobView, Stopped> {
        let text = if request.role == Agent::Alpha { self.reply.clone() } else { REVIEW.to_owned() };
        let usage = Usage { prompt_tokens: 5, output_tokens: 7, ..Usage::default() };
        let completion = Completion { text, finish: FinishReason::Stop, usage, logprobs: Vec::new() };
        Ok(JobView {
            id: JobId::fresh(),
            task: self.task,
            seq,
            role: request.role,
            n: request.n,
            state: JobState::Done,
            attempt: 1,
            model: request.model,
            node: None,
            priority: Priority::P2,
            running_ms: 1,
            completion: Some(Payload::Inline(completion)),
            failure: None,
        })
    }

    async fn get_job(&self, _job: JobId) -> Result<JobView, Stopped> {
        // Jobs are done when they are submitted.
        Err(Stopped::LeaseLost)
    }

    fn follow_job(&self, _job: JobId, _predictor: PrefillPredictor) -> FollowGuard {
        FollowGuard::new(tokio::spawn(async {}).abort_handle())
    }

    async fn cancel_job(&self, _job: JobId) -> Result<(), Stopped> {
        Ok(())
    }

    async fn wait_for_change(&self, _at_most: Duration) {}

    async fn send_artifact(&self, artifact: Artifact) -> Result<Payload<Artifact>, Stopped> {
        Ok(Payload::Inline(artifact))
    }

    async fn send_prompt(&self, prompt: Prompt) -> Result<Payload<Prompt>, Stopped> {
        Ok(Payload::Inline(prompt))
    }

    async fn load_completion(&self, payload: Payload<Completion>) -> Result<Completion, Stopped> {
        payload.inline().map_err(|_| Stopped::LeaseLost)
    }

    async fn wait_for_lease(&self) -> Result<(), Stopped> {
        Ok(())
    }

    async fn report_activity(&self, _seq: i32, _activity: String) {}

    fn record_progress(&self) {}
}
