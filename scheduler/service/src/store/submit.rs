//! Submission of a task. The submission is acknowledged after the task's row and first event are committed. Submissions
//! with the same idempotency key create only one task.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cfq_proto::event::EventBody;
use cfq_proto::ids::{ApiTokenId, TaskId, TaskKey, TaskNumber};
use cfq_proto::label::Label;
use cfq_proto::task::{Agent, AgentBinding, AgentBindings, TaskSpec, TaskState};
use tokio::sync::oneshot;

use super::columns::{AsJson, parse};
use super::error::Doing;
use super::transaction::Committed;
use super::{Store, StoreError, limited};

/// A validated task with every default filled in.
#[derive(Debug, Clone)]
pub struct NewTask {
    pub id: TaskId,
    /// Token of the client's request.
    pub token: ApiTokenId,
    pub spec: TaskSpec,
    /// The agents whose model is that of the configuration, because the client named none.
    pub agents_without_model: Vec<Agent>,
    pub title: String,
    pub threshold: f64,
    pub max_iterations: u32,
    /// Idempotency key of the submission, if the client sent one.
    pub key: Option<String>,
    /// Hash of the client's request body: the same key with another body is an error.
    pub body_hash: String,
}

impl NewTask {
    /// The agents of the task with the models that it gets if it is granted now, where `current` are the settings of new
    /// tasks.
    pub fn agents(&self, current: &AgentBindings) -> AgentBindings {
        let mut agents = self.spec.agents.clone();
        for agent in &self.agents_without_model {
            agents.of_mut(*agent).model.clone_from(&current.of(*agent).model);
        }
        if self.spec.review.is_some() {
            // The creator is not called.
            agents.alpha = AgentBinding::default();
        }
        agents
    }

    /// Whether the task may have to wait before it is ready. Such a task is written by a transaction of its own.
    fn may_wait(&self) -> bool {
        !self.spec.after.is_empty() || self.spec.retry_of.is_some() || self.spec.run_at.is_some()
    }
}

/// Result of a submission.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Submitted {
    Created {
        id: TaskId,
        number: TaskNumber,
        state: TaskState,
        /// Why the task cannot start without a user, if a predecessor has failed.
        warning: Option<String>,
    },
    /// An earlier submission with the same idempotency key created this task.
    Existing { id: TaskId, number: TaskNumber, state: TaskState },
    /// An earlier submission with the same idempotency key had another request body.
    KeyReused { number: TaskNumber },
    /// The deadline of the new task has passed already; nothing was written.
    TooLate,
    /// The task refers to a task that does not exist; nothing was written.
    UnknownTask {
        /// The field that refers to it.
        field: &'static str,
        key: TaskKey,
    },
    /// The task retries a task for which its predecessor `number` waits; nothing was written.
    RetryCycle { number: TaskNumber },
    /// The task retries a task that has neither failed nor been cancelled; nothing was written.
    NotRetriable { number: TaskNumber, state: TaskState },
}

/// Maximum number of submissions that one statement writes.
const MAX_SUBMITS_PER_STATEMENT: usize = 100;

/// A submission that waits to be written, and the channel for its result.
type Waiting = (NewTask, oneshot::Sender<Result<Submitted, StoreError>>);

/// Submissions that wait to be written. Those that arrive while one statement runs are written by the next one
/// together, so many clients need fewer commits, and a single client waits for nothing.
#[derive(Debug, Clone, Default)]
pub(super) struct SubmitQueue(Arc<Mutex<SubmitQueueState>>);

#[derive(Debug, Default)]
struct SubmitQueueState {
    waiting: VecDeque<Waiting>,
    is_writing: bool,
}

impl SubmitQueue {
    /// Adds a submission. True if the caller has to start a writer.
    fn push(&self, waiting: Waiting) -> bool {
        let mut state = self.state();
        state.waiting.push_back(waiting);
        !std::mem::replace(&mut state.is_writing, true)
    }

    /// Takes the next submissions to write. If there are none, the writer has to end.
    fn take(&self) -> Option<Vec<Waiting>> {
        let mut state = self.state();
        if state.waiting.is_empty() {
            state.is_writing = false;
            return None;
        }
        let count = state.waiting.len().min(MAX_SUBMITS_PER_STATEMENT);
        Some(state.waiting.drain(..count).collect())
    }

    fn state(&self) -> MutexGuard<'_, SubmitQueueState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Allows another writer after this one has ended, also if it panicked.
struct WriterGuard<'a>(&'a SubmitQueue);

impl Drop for WriterGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.state().is_writing = false;
        }
    }
}

impl Store {
    /// Creates a task, or finds the task that an earlier submission with the same idempotency key created. The task is
    /// written even if the caller stops waiting.
    pub async fn submit(&self, new: &NewTask) -> Result<Submitted, StoreError> {
        if new.may_wait() {
            // The result of a batch is never empty.
            let results = self.submit_batch(std::slice::from_ref(new)).await?;
            return results.into_iter().next().ok_or(StoreError::TooSlow { doing: "writing a task" });
        }
        let (reply, result) = oneshot::channel();
        if self.submits.push((new.clone(), reply)) {
            tokio::spawn(self.clone().write_submits());
        }
        // The sender is dropped only if the writer panicked.
        result.await.unwrap_or(Err(StoreError::TooSlow { doing: "writing a task" }))
    }

    async fn write_submits(self) {
        let _writer = WriterGuard(&self.submits);
        while let Some(waiting) = self.submits.take() {
            let (tasks, replies): (Vec<NewTask>, Vec<_>) = waiting.into_iter().unzip();
            let results = self.write_tasks(&tasks).await;
            for (result, reply) in results.into_iter().zip(replies) {
                // A caller that stopped waiting needs no reply.
                drop(reply.send(result));
            }
        }
    }

    /// Writes these tasks with one statement. If Postgres refuses it, each task is written by its own statement, so that
    /// a faulty one fails alone.
    async fn write_tasks(&self, tasks: &[NewTask]) -> Vec<Result<Submitted, StoreError>> {
        let mut results = Vec::with_capacity(tasks.len());
        // Without a limit, a connection whose other end vanished would stop all later submits.
        match limited("writing a task", self.insert_tasks(tasks)).await {
            Ok(created) => {
                for task in tasks {
                    results.push(match created.get(&task.id) {
                        Some(number) => Ok(Submitted::Created {
                            id: task.id,
                            number: *number,
                            state: TaskState::Ready,
                            warning: None,
                        }),
                        None => limited("finding the task of an idempotency key", self.find_by_key(task)).await,
                    });
                }
            }
            Err(error) if tasks.len() > 1 && error.is_row_local() && !error.may_retry() => {
                for task in tasks {
                    results.extend(Box::pin(self.write_tasks(std::slice::from_ref(task))).await);
                }
            }
            Err(error) => {
                results.extend(tasks.iter().skip(1).map(|_| Err(StoreError::TooSlow { doing: "writing a task" })));
                results.push(Err(error));
            }
        }
        results
    }

    /// Inserts the tasks and their first events. Returns the numbers of the tasks that did not exist.
    async fn insert_tasks(&self, tasks: &[NewTask]) -> Result<BTreeMap<TaskId, TaskNumber>, StoreError> {
        let column = Columns::of(tasks)?;
        cfq_link::failpoint::hit("scheduler.submit.before_commit");
        // Rows are locked in the order of their keys, so that two schedulers do not deadlock.
        let created = sqlx::query!(
            r#"with new as (
                   select *, to_timestamp(deadline_s::float8) as deadline, now() + priority * interval '10 minutes' as key
                   from unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::text[], $6::smallint[], $7::bigint[],
                               $8::float8[], $9::integer[], $13::text[], $14::uuid[]) with ordinality
                        as new (id, idempotency_key, body_hash, spec, title, priority, deadline_s, threshold,
                                max_iterations, agents_without_model, api_token, n)
               ), created as (
                   insert into tasks (id, idempotency_key, body_hash, spec, title, priority, deadline, state, threshold,
                                      max_iterations, agents_without_model, api_token, next_event, order_key)
                   select id, idempotency_key, body_hash, spec::json, title, priority, deadline, 'ready', threshold,
                          max_iterations, string_to_array(agents_without_model, ','), api_token, 1,
                          greatest(key - interval '10 minutes', least(key, deadline - interval '10 minutes'))
                   from new where coalesce(deadline > now(), true) order by idempotency_key nulls first, n
                   on conflict (idempotency_key) do nothing returning id, number
               ), written as (
                   insert into events (task, number, task_seq, body) select id, number, 1, $10::json from created
               ), labelled as (
                   insert into task_labels (task, number, label)
                   select distinct created.id, created.number, l.label
                   from created join unnest($11::uuid[], $12::text[]) as l (task, label) on l.task = created.id
               )
               select id as "id!", number as "number!" from created"#,
            &column.ids,
            &column.keys as &[Option<&str>],
            &column.body_hashes as &[&str],
            &column.specs,
            &column.titles as &[&str],
            &column.priorities,
            &column.deadlines as &[Option<i64>],
            &column.thresholds,
            &column.max_iterations,
            AsJson(&EventBody::TaskSubmitted) as _,
            &column.labelled,
            &column.labels as &[&str],
            &column.agents_without_model,
            &column.tokens
        )
        .fetch_all(&self.pool)
        .await
        .doing("writing a task")?;
        cfq_link::failpoint::hit("scheduler.submit.after_commit");
        let created: BTreeMap<_, _> = created.into_iter().map(|r| (TaskId(r.id), TaskNumber(r.number))).collect();
        created.keys().for_each(|task| self.shared.committed.send(Committed::Task(*task)));
        Ok(created)
    }

    /// Finds the task that an earlier submission with the idempotency key of `new` created. [`Submitted::TooLate`] if
    /// there is none. Writes nothing.
    pub async fn find_by_key(&self, new: &NewTask) -> Result<Submitted, StoreError> {
        let row = sqlx::query!(
            "select id, number, state, body_hash from tasks where idempotency_key = $1",
            new.key.as_deref()
        )
        .fetch_optional(&self.pool)
        .await
        .doing("finding the task of an idempotency key")?;
        // No row means that the key has no task yet and that the deadline of the new task has passed. An existing task
        // is returned even after its deadline.
        let Some(row) = row else { return Ok(Submitted::TooLate) };
        let number = TaskNumber(row.number);
        if row.body_hash != new.body_hash {
            return Ok(Submitted::KeyReused { number });
        }
        Ok(Submitted::Existing { id: TaskId(row.id), number, state: parse("task state", &row.state)? })
    }
}

/// Names of agents, as the column `agents_without_model` has them.
pub(super) fn agent_names(agents: &[Agent]) -> Vec<&'static str> {
    agents.iter().map(|agent| agent.as_str()).collect()
}

/// New tasks, as one array for each column of the table.
#[derive(Default)]
struct Columns<'a> {
    ids: Vec<uuid::Uuid>,
    keys: Vec<Option<&'a str>>,
    body_hashes: Vec<&'a str>,
    specs: Vec<String>,
    titles: Vec<&'a str>,
    priorities: Vec<i16>,
    deadlines: Vec<Option<i64>>,
    thresholds: Vec<f64>,
    max_iterations: Vec<i32>,
    /// The names, separated by commas: an array of arrays would have rows of one length.
    agents_without_model: Vec<String>,
    tokens: Vec<uuid::Uuid>,
    /// One entry for each label of each task: the task, and the label.
    labelled: Vec<uuid::Uuid>,
    labels: Vec<&'a str>,
}

impl<'a> Columns<'a> {
    fn of(tasks: &'a [NewTask]) -> Result<Self, StoreError> {
        let mut columns = Self::default();
        for task in tasks {
            let spec = serde_json::to_string(&task.spec)
                .map_err(|error| StoreError::Unreadable { what: "task specification", text: error.to_string() })?;
            columns.ids.push(task.id.0);
            columns.keys.push(task.key.as_deref());
            columns.body_hashes.push(&task.body_hash);
            columns.specs.push(spec);
            columns.titles.push(&task.title);
            columns.priorities.push(task.spec.priority.as_i16());
            columns.deadlines.push(task.spec.deadline);
            columns.thresholds.push(task.threshold);
            columns.max_iterations.push(i32::try_from(task.max_iterations).unwrap_or(i32::MAX));
            columns.agents_without_model.push(agent_names(&task.agents_without_model).join(","));
            columns.tokens.push(task.token.0);
            columns.labelled.extend(task.spec.labels.iter().map(|_| task.id.0));
            columns.labels.extend(task.spec.labels.iter().map(Label::as_str));
        }
        Ok(columns)
    }
}
