//! Model calls. Requests one usable answer and handles what can delay or prevent it: waits for placement, retries by
//! the scheduler, prompts that exceed the context, replies that cannot be parsed, models that cannot answer, and the end
//! of the working time.

use std::time::{Duration, Instant};

use cfq_convergence::decided_ranges;
use cfq_proto::early_stop::EarlyStop;
use cfq_proto::ids::JobId;
use cfq_proto::job::{ChatMessage, Completion, JobFailure, JobRequest, JobState, JobView, OutputFormat, Prompt};
use cfq_proto::loop_step::EscalationReason;
use cfq_proto::model::ModelId;
use cfq_proto::prefix;
use cfq_proto::task::Agent;
use tokio::task::JoinHandle;

use super::port::{PrefillPredictor, Stopped, TaskPort};
use super::task_driver::{ActionError, TaskDriver};
use crate::pipeline::{Budget, UnreadableReview, early_stops, max_tokens, previous_as_reply, sampling};

/// Maximum number of repeated requests after an answer that cannot be parsed (L11).
const MAX_REPEATED_REQUESTS: u32 = 2;
/// Maximum number of times that a prompt is shortened because it exceeds the model's context.
const MAX_PROMPT_SHRINKS: u32 = 3;

/// A parsed answer.
pub(super) struct Answer<T> {
    pub value: T,
    pub completion: Completion,
    pub job: JobId,
    pub model: ModelId,
    /// Working time of all calls that were needed, in ms.
    pub spent_ms: u64,
}

/// Tokio task that renders a prompt, on a blocking thread because it reads files.
pub(super) type PromptTask = JoinHandle<Result<Vec<ChatMessage>, ActionError>>;

/// Outcome of one job.
enum JobOutcome {
    Done(Completion),
    Failed(JobFailure),
    /// The job ended without a result, in most cases as a dead letter. The string is the reason.
    NoResult(String),
    /// The job was cancelled, but not by this runner.
    Cancelled,
    /// The working time is used up.
    TimedOut,
}

/// One call of a model. `n` is its index among the calls of the step.
struct Call<'m> {
    agent: Agent,
    n: i16,
    model: &'m ModelId,
    has_fallback: bool,
}

/// Why a model gave no answer, and what that means for the task if there is no fallback.
#[derive(Debug, PartialEq)]
enum CallFailure {
    /// The task fails.
    FailsTask(String),
    /// The task waits for a human.
    Escalates(String),
}

impl CallFailure {
    fn reason(&self) -> &str {
        match self {
            Self::FailsTask(reason) | Self::Escalates(reason) => reason,
        }
    }

    /// This failure, of the fallback, together with the one of the model before. A human decides if a human could help
    /// with one of them.
    fn after(self, before: Option<Self>) -> Self {
        let Some(before) = before else { return self };
        let reason = format!("{}; before that, {}", self.reason(), before.reason());
        match (self, before) {
            (Self::FailsTask(_), Self::FailsTask(_)) => Self::FailsTask(reason),
            (Self::FailsTask(_) | Self::Escalates(_), _) => Self::Escalates(reason),
        }
    }
}

impl<P: TaskPort> TaskDriver<P> {
    /// Calls the model of `agent` until `parse` accepts an answer; if the model cannot answer, its fallback. Returns
    /// `None` if a decision was committed instead. `prompt` renders the prompt within the budget of one try; the second
    /// argument of `parse` is true on the last try. A repeated step requests jobs with the same
    /// keys, so that none runs twice.
    pub(super) async fn request_answer<T>(
        &mut self,
        agent: Agent,
        format: OutputFormat,
        prompt: impl Fn(Budget) -> PromptTask,
        parse: impl Fn(&Completion, bool) -> Result<T, UnreadableReview>,
    ) -> Result<Option<Answer<T>>, ActionError> {
        let binding = self.spec.agents.of(agent).clone();
        let Some(mut model) = self.bound_model(agent) else {
            let reason = format!(
                "the task has no model for {agent}: choose one with `cfq resolve {} --action switch_llm \
                 --agent {agent} --model MODEL`",
                self.number
            );
            self.commit_escalation(EscalationReason::AgentError, reason, 0).await?;
            return Ok(None);
        };
        let predictor = if agent == Agent::Alpha { self.prefill_predictor().await? } else { None };
        let reply_tokens = max_tokens(agent, &binding);
        let mut budget = match self.history.facts.review_depth {
            Some(_) => Budget::first_of_change(reply_tokens),
            None => Budget::first(reply_tokens),
        };
        let mut fallback = binding.fallback.clone().filter(|fallback| *fallback != model);
        let mut first_failure = None;
        // The primary model's last answer, if it could not be parsed completely.
        let mut unparsed = None;
        let (mut repeats, mut shrinks, mut spent_ms) = (0, 0, 0);
        for n in 0.. {
            let messages = prompt(budget).await??;
            let iteration = self.history.current_iteration();
            let mut sampling = sampling(agent, &binding, self.task, iteration, n, budget.reply_tokens);
            if agent == Agent::Alpha {
                sampling.previous = previous_as_reply(&self.spec, &self.history);
            }
            // Only the first request (`n` = 0) may end early; repeated requests ask for the complete review.
            if agent == Agent::Beta && n == 0 {
                sampling.early_stop = self.early_stops();
            }
            let prompt = Prompt { messages, sampling, format: format.clone(), ..Prompt::default() };
            let call = Call { agent, n, model: &model, has_fallback: fallback.is_some() };
            let (view, outcome) = self.run_job(call, prompt, spent_ms, predictor.as_ref()).await?;
            spent_ms += view.running_ms;
            // A dead letter of the fallback that was requeued is the first job of its step.
            if fallback.as_ref() == Some(&view.model) {
                fallback = None;
                model.clone_from(&view.model);
            }
            let is_last_try = repeats == MAX_REPEATED_REQUESTS && fallback.is_none();
            let failure = match outcome {
                JobOutcome::Done(completion) => match parse(&completion, is_last_try) {
                    Ok(value) => {
                        return Ok(Some(Answer { value, completion, job: view.id, model: view.model, spent_ms }));
                    }
                    Err(reason) if repeats < MAX_REPEATED_REQUESTS => {
                        let task = self.number;
                        tracing::info!(%task, %agent, %reason, "cannot parse an answer, requesting another");
                        repeats += 1;
                        continue;
                    }
                    Err(reason) => {
                        unparsed.get_or_insert((completion, view.id, view.model));
                        let tries = MAX_REPEATED_REQUESTS + 1;
                        CallFailure::Escalates(format!(
                            "{agent}'s answer could not be parsed in {tries} tries: {reason}"
                        ))
                    }
                },
                // Without the map, nothing else may have to be shortened. The other prompts of the task have none either,
                // so that they still begin alike.
                JobOutcome::Failed(JobFailure::TooLong { have, .. })
                    if budget.map && matches!(self.map, Some(Some(_))) =>
                {
                    tracing::info!(task = %self.number, %agent, have, "the prompt exceeds the context, leaving out the map");
                    self.map = Some(None);
                    budget.map = false;
                    continue;
                }
                JobOutcome::Failed(JobFailure::TooLong { have, .. }) if shrinks < MAX_PROMPT_SHRINKS => {
                    tracing::info!(task = %self.number, %agent, have, "the prompt exceeds the context, shortening it");
                    shrinks += 1;
                    budget = budget.shrunk(have);
                    continue;
                }
                JobOutcome::Failed(failure @ (JobFailure::Unavailable { .. } | JobFailure::Engine { .. })) => {
                    CallFailure::FailsTask(format!("{model} did not answer {agent}: {failure}"))
                }
                JobOutcome::Failed(failure @ (JobFailure::TooLong { .. } | JobFailure::Rejected { .. })) => {
                    CallFailure::Escalates(format!("{model} cannot answer {agent}: {failure}"))
                }
                JobOutcome::NoResult(reason) => CallFailure::Escalates(format!("{agent}'s job on {model} {reason}")),
                JobOutcome::Cancelled => {
                    let reason = format!("{agent}'s job on {model} was cancelled");
                    self.commit_escalation(EscalationReason::AgentError, reason, spent_ms).await?;
                    return Ok(None);
                }
                JobOutcome::TimedOut => {
                    self.port.cancel_job(view.id).await?;
                    let reason = "the working time was used up during a model call".to_owned();
                    self.commit_escalation(EscalationReason::TimeoutExceeded, reason, spent_ms).await?;
                    return Ok(None);
                }
            };
            if let Some(other) = fallback.take() {
                let task = self.number;
                tracing::warn!(%task, %agent, fallback = %other, reason = failure.reason(), "calling the fallback model");
                first_failure = Some(failure);
                model = other;
                budget = Budget::first(max_tokens(agent, &binding));
                (repeats, shrinks) = (0, 0);
                continue;
            }
            // Now nothing else is left, so the usable part of an answer is taken.
            if let Some((completion, job, model)) = unparsed
                && let Ok(value) = parse(&completion, true)
            {
                return Ok(Some(Answer { value, completion, job, model, spent_ms }));
            }
            match failure.after(first_failure) {
                CallFailure::FailsTask(reason) => self.commit_failure(reason, spent_ms).await?,
                CallFailure::Escalates(reason) => {
                    self.commit_escalation(EscalationReason::AgentError, reason, spent_ms).await?;
                }
            }
            return Ok(None);
        }
        Ok(None)
    }

    /// Conditions under which the review of the last iteration may end early.
    pub(super) fn early_stops(&self) -> Vec<EarlyStop> {
        if self.history.facts.review_depth.is_some() {
            // The user wants the complete review.
            return Vec::new();
        }
        early_stops(&decided_ranges(&self.limits, &self.history))
    }

    /// Submits one job and waits until it ends or the working time is used up. The prompt is sent once; afterwards the
    /// job is polled by its id, at a cost that does not depend on the prompt's length. Meanwhile `predictor` follows
    /// the generated text.
    async fn run_job(
        &self,
        call: Call<'_>,
        prompt: Prompt,
        spent_ms: u64,
        predictor: Option<&PrefillPredictor>,
    ) -> Result<(JobView, JobOutcome), Stopped> {
        let Call { agent, n, model, has_fallback } = call;
        let request = JobRequest {
            role: agent,
            n,
            model: model.clone(),
            has_fallback,
            prompt_bytes: prompt.messages.iter().map(|m| m.content.len() as u64).sum(),
            prefix: prefix::of_prompt(model.as_str(), &prompt),
            max_tokens: prompt.sampling.max_tokens,
            prompt: self.port.send_prompt(prompt).await?,
        };
        let before = self.history.active_ms.saturating_sub(self.history.window_active_ms) + spent_ms;
        let mut view = self.port.submit_job(self.history.next_seq, request).await?;
        let mut queued_since = None;
        let _follow_guard = predictor.map(|p| self.port.follow_job(view.id, p.clone()));
        loop {
            // While a model generates, polling is all that the runner does, so an answered poll counts as progress.
            self.port.record_progress();
            if let Some(outcome) = self.outcome(&view, before).await? {
                return Ok((view, outcome));
            }
            if view.state == JobState::Queued {
                let since: Instant = *queued_since.get_or_insert_with(Instant::now);
                if since.elapsed() >= self.timing.slot_wait() {
                    return Err(Stopped::WaitingForPlacement { job: view.id });
                }
            } else {
                queued_since = None;
            }
            let worked = before + view.running_ms;
            if worked >= self.limits.timeout_ms {
                return Ok((view, JobOutcome::TimedOut));
            }
            let left = Duration::from_millis(self.limits.timeout_ms - worked).max(Duration::from_millis(10));
            self.port.wait_for_change(self.timing.poll().min(left)).await;
            view = self.port.get_job(view.id).await?;
        }
    }

    /// Returns the outcome of a job, or `None` while it is queued or running.
    /// `before_ms` is the working time before the job.
    async fn outcome(&self, view: &JobView, before_ms: u64) -> Result<Option<JobOutcome>, Stopped> {
        Ok(match view.state {
            JobState::Queued | JobState::Placed | JobState::Running => None,
            JobState::Done => Some(match &view.completion {
                Some(payload) => JobOutcome::Done(self.port.load_completion(payload.clone()).await?),
                None => JobOutcome::NoResult("ended without a result".to_owned()),
            }),
            JobState::Failed => Some(match &view.failure {
                Some(failure) => JobOutcome::Failed(failure.clone()),
                None => JobOutcome::NoResult("failed without a reason".to_owned()),
            }),
            JobState::Dead => {
                let reason = view.failure.as_ref().map_or_else(|| "no reason recorded".to_owned(), ToString::to_string);
                Some(JobOutcome::NoResult(format!("was given up after {} attempts: {reason}", view.attempt)))
            }
            // If the working time is used up, this runner cancelled the job before it crashed; otherwise it was
            // cancelled from outside.
            JobState::Cancelled => Some(if before_ms + view.running_ms >= self.limits.timeout_ms {
                JobOutcome::TimedOut
            } else {
                JobOutcome::Cancelled
            }),
        })
    }
}
