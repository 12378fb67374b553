//! One answer of a model, through everything that may come between: the wait for placement, retries of the scheduler, a
//! context that is too small, a reply that cannot be read, and the end of the working time.

use std::time::{Duration, Instant};

use cfq_convergence::certain;
use cfq_proto::early::Enough;
use cfq_proto::ids::JobId;
use cfq_proto::job::{ChatMessage, Completion, JobFailure, JobRequest, JobState, JobView, OutputFormat, Prompt};
use cfq_proto::looping::EscalationReason;
use cfq_proto::model::ModelId;
use cfq_proto::prefix;
use cfq_proto::task::Agent;
use tokio::task::JoinHandle;

use super::drive::{Drive, Problem};
use super::port::{Foresee, Stopped, TaskPort};
use crate::pipeline::{Budget, enough, max_tokens, previous, sampling};

/// Unreadable answers are asked for again this often (L11) ...
const REPEATS: u32 = 2;
/// ... and prompts that are too long are made shorter this often.
const SHRINKS: u32 = 3;

/// An answer that could be read.
pub(super) struct Answer<T> {
    pub value: T,
    pub completion: Completion,
    pub job: JobId,
    pub model: ModelId,
    /// Working time of all calls it took, in milliseconds.
    pub spent_ms: u64,
}

/// A prompt that is being written on a thread of its own, since it reads files.
pub(super) type Written = JoinHandle<Result<Vec<ChatMessage>, Problem>>;

enum Ending {
    Done(Completion),
    Failed(JobFailure),
    /// In words: parked, or cancelled by somebody.
    Unusable(String),
    TimeIsUp,
}

impl<P: TaskPort> Drive<P> {
    /// Asks `agent` until `read` accepts an answer; it is told when there is no further try. `None`: a decision was committed
    /// instead. `prompt` gets the budget of each try; everything it depends on is recorded, so that a repeated step asks for
    /// the same jobs.
    pub(super) async fn answer<T>(
        &mut self,
        agent: Agent,
        format: OutputFormat,
        prompt: impl Fn(Budget) -> Written,
        read: impl Fn(&Completion, bool) -> Result<T, String>,
    ) -> Result<Option<Answer<T>>, Problem> {
        let binding = self.spec.agents.of(agent).clone();
        let Some(model) = self.model_of(agent) else {
            let why =
                format!("no model is bound to {agent}: switch to one, or set [agents.{agent}] in the configuration");
            self.give_up(EscalationReason::AgentError, why, 0).await?;
            return Ok(None);
        };
        let foresee = if agent == Agent::Alpha { self.foresee().await? } else { None };
        let mut budget = Budget::first(max_tokens(agent, &binding));
        let (mut repeats, mut shrinks, mut spent_ms) = (0, 0, 0);
        for n in 0.. {
            let messages = prompt(budget).await??;
            let iteration = self.history.current_iteration();
            let mut sampling = sampling(agent, &binding, self.task, iteration, n, budget.reply_tokens);
            if agent == Agent::Alpha {
                sampling.previous = previous(&self.spec, &self.history);
            }
            // Asked again, a report is wanted whole.
            if agent == Agent::Beta && n == 0 {
                sampling.enough = self.settled();
            }
            let prompt = Prompt { messages, sampling, format: format.clone() };
            let (view, ending) = self.call((agent, n), &model, prompt, spent_ms, foresee.as_ref()).await?;
            spent_ms += view.running_ms;
            let problem = match ending {
                Ending::Done(completion) => match read(&completion, repeats == REPEATS) {
                    Ok(value) => {
                        return Ok(Some(Answer { value, completion, job: view.id, model: view.model, spent_ms }));
                    }
                    Err(why) if repeats < REPEATS => {
                        tracing::info!(task = %self.number, %agent, why, "an answer could not be read, asking again");
                        repeats += 1;
                        continue;
                    }
                    Err(why) => format!("{agent}'s answer could not be read in {} tries: {why}", REPEATS + 1),
                },
                Ending::Failed(JobFailure::TooLong { have, .. }) if shrinks < SHRINKS => {
                    tracing::info!(task = %self.number, %agent, have, "a prompt is too long, making it shorter");
                    shrinks += 1;
                    budget = budget.shrunk(have);
                    continue;
                }
                Ending::Failed(failure @ (JobFailure::Unavailable { .. } | JobFailure::Engine { .. })) => {
                    self.fail(format!("{model} did not answer {agent}: {failure}"), spent_ms).await?;
                    return Ok(None);
                }
                Ending::Failed(failure @ (JobFailure::TooLong { .. } | JobFailure::Rejected { .. })) => {
                    format!("{model} cannot answer {agent}: {failure}")
                }
                Ending::Unusable(why) => format!("{agent}'s job on {model} {why}"),
                Ending::TimeIsUp => {
                    self.port.drop_job(view.id).await?;
                    let why = "the working time was used up during a model call".to_owned();
                    self.give_up(EscalationReason::TimeoutExceeded, why, spent_ms).await?;
                    return Ok(None);
                }
            };
            self.give_up(EscalationReason::AgentError, problem, spent_ms).await?;
            return Ok(None);
        }
        Ok(None)
    }

    /// What a review need only say for the decision to be certain.
    pub(super) fn settled(&self) -> Vec<Enough> {
        enough(&certain(&self.limits, &self.history))
    }

    /// Asks for one job and waits until it is over or its time is. The prompt goes once; afterwards the job is asked for by
    /// its id, which costs the same however long it is. What is written meanwhile is what `foresee` looks at.
    async fn call(
        &self,
        (agent, n): (Agent, i16),
        model: &ModelId,
        prompt: Prompt,
        spent_ms: u64,
        foresee: Option<&Foresee>,
    ) -> Result<(JobView, Ending), Stopped> {
        let request = JobRequest {
            role: agent,
            n,
            model: model.clone(),
            prompt_bytes: prompt.messages.iter().map(|m| m.content.len() as u64).sum(),
            prefix: prefix::chain(model.as_str(), &prompt.messages),
            max_tokens: prompt.sampling.max_tokens,
            prompt: self.port.send_prompt(prompt).await?,
        };
        let before = self.history.active_ms.saturating_sub(self.history.window_active_ms) + spent_ms;
        let mut view = self.port.job(self.history.next_seq, request).await?;
        let mut queued_since = None;
        let _following = foresee.map(|f| self.port.follow(view.id, f.clone()));
        loop {
            // Asking and being answered is what this runner's part of a generation is.
            self.port.progressed();
            if let Some(ending) = self.ending(&view).await? {
                return Ok((view, ending));
            }
            if view.state == JobState::Queued {
                let since: Instant = *queued_since.get_or_insert_with(Instant::now);
                if since.elapsed() >= self.timing.slot_wait() {
                    return Err(Stopped::Waits { job: view.id });
                }
            } else {
                queued_since = None;
            }
            let worked = before + view.running_ms;
            if worked >= self.limits.timeout_ms {
                return Ok((view, Ending::TimeIsUp));
            }
            let left = Duration::from_millis(self.limits.timeout_ms - worked).max(Duration::from_millis(10));
            self.port.changed(self.timing.poll().min(left)).await;
            view = self.port.look(view.id).await?;
        }
    }

    async fn ending(&self, view: &JobView) -> Result<Option<Ending>, Stopped> {
        Ok(match view.state {
            JobState::Queued | JobState::Placed | JobState::Running => None,
            JobState::Done => Some(match &view.completion {
                Some(carried) => Ending::Done(self.port.completion(carried.clone()).await?),
                None => Ending::Unusable("is done without a result".to_owned()),
            }),
            JobState::Failed => Some(match &view.failure {
                Some(failure) => Ending::Failed(failure.clone()),
                None => Ending::Unusable("failed without saying why".to_owned()),
            }),
            JobState::Dead => {
                let why = view.failure.as_ref().map_or_else(|| "without saying why".to_owned(), ToString::to_string);
                Some(Ending::Unusable(format!("was parked after {} attempts: {why}", view.attempt)))
            }
            // Ours, from before a crash, where the time was up; else somebody's.
            JobState::Cancelled => {
                let before = self.history.active_ms.saturating_sub(self.history.window_active_ms);
                Some(if before + view.running_ms >= self.limits.timeout_ms {
                    Ending::TimeIsUp
                } else {
                    Ending::Unusable("was cancelled".to_owned())
                })
            }
        })
    }
}
