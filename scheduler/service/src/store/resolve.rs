//! Answers of users to an escalation (L7) or a held hand-off. An answer is recorded only while the task waits for one,
//! and only with an action that the question offers; `AcceptBestEffort` is refused if the best result cannot be accepted.
//! The answer is stored as a step of the loop, so the next runner of the task replays it.

use cfq_proto::ids::{QuestionId, TaskId, TaskNumber};
use cfq_proto::loop_step::{ActionKind, EscalationAction, Step};
use cfq_proto::review::Quarantine;
use cfq_proto::task::TaskState;
use sqlx::PgConnection;
use sqlx::types::Json;

use super::error::Doing;
use super::hints::Hint;
use super::step_rejection::StepRejection;
use super::tasks::lock_task;
use super::{Store, StoreError, pause, roll_back, steps};

/// Result of an answer.
#[derive(Debug, Clone, PartialEq)]
pub enum Resolution {
    Done {
        number: TaskNumber,
        state: TaskState,
        hints: Vec<Hint>,
    },
    /// The task does not wait for an answer.
    NotWaiting {
        number: TaskNumber,
        state: TaskState,
    },
    /// The question does not offer this action.
    NotOffered {
        number: TaskNumber,
        offered: Vec<ActionKind>,
    },
    /// No result can be accepted.
    NothingAcceptable {
        number: TaskNumber,
    },
    /// The answer cannot be written as the next step of the loop.
    Refused {
        number: TaskNumber,
        rejection: StepRejection,
    },
    /// The question that the answer names has got this answer before.
    AlreadyDone {
        number: TaskNumber,
        state: TaskState,
    },
    /// The answer names a question of the task that is not open any more, or that the task never asked.
    NotOpen {
        number: TaskNumber,
        ended: Option<EndedQuestion>,
    },
    /// There is no such task.
    Unknown,
}

/// A question that is not open any more.
#[derive(Debug, Clone, PartialEq)]
pub struct EndedQuestion {
    /// The recorded answer; `None` if the task was cancelled instead.
    pub answer: Option<EscalationAction>,
    /// Author of the answer or of the cancellation.
    pub by: String,
}

impl Store {
    /// Returns whether this answer to the question of the task is recorded.
    pub async fn is_answered(
        &self,
        task: TaskId,
        question: QuestionId,
        action: &EscalationAction,
    ) -> Result<bool, StoreError> {
        let mut connection = self.pool.acquire().await.doing("reading a question")?;
        let state = question_state(&mut connection, task, question).await?;
        Ok(matches!(state, QuestionState::Ended(ended) if ended.answer.as_ref() == Some(action)))
    }

    /// Answers a question of a task: `question`, or whichever is open. `by` names the author, for users. An answer that
    /// `question` has already got is not recorded again.
    pub async fn resolve(
        &self,
        task: TaskId,
        question: Option<QuestionId>,
        action: &EscalationAction,
        by: &str,
    ) -> Result<Resolution, StoreError> {
        let mut tx = self.begin().await?;
        let Some(task) = lock_task(&mut tx, task).await? else { return roll_back(tx, Resolution::Unknown).await };
        let number = task.number;
        if let Some(question) = question {
            let resolution = match question_state(&mut tx, task.id, question).await? {
                QuestionState::Open => None,
                QuestionState::Ended(ended) if ended.answer.as_ref() == Some(action) => {
                    Some(Resolution::AlreadyDone { number, state: task.state })
                }
                QuestionState::Ended(ended) => Some(Resolution::NotOpen { number, ended: Some(ended) }),
                QuestionState::Unknown => Some(Resolution::NotOpen { number, ended: None }),
            };
            if let Some(resolution) = resolution {
                return roll_back(tx, resolution).await;
            }
        }
        if !matches!(task.state, TaskState::Escalated | TaskState::WaitingOnHuman) {
            return roll_back(tx, Resolution::NotWaiting { number, state: task.state }).await;
        }
        let offered = sqlx::query_scalar!(
            r#"select actions as "actions: Json<Vec<ActionKind>>" from questions where task = $1 and state = 'open'"#,
            task.id.0
        )
        .fetch_optional(&mut *tx)
        .await
        .doing("finding a question")?
        .map(|a| a.0)
        .unwrap_or_default();
        if !offered.contains(&action.kind()) {
            return roll_back(tx, Resolution::NotOffered { number, offered }).await;
        }
        if *action == EscalationAction::AcceptBestEffort {
            let best = sqlx::query_scalar!(
                r#"select i.quarantine as "quarantine: Json<Quarantine>"
                   from tasks t join iterations i on i.task = t.id and i.iteration = t.best_iteration
                   where t.id = $1 and i.commit is not null and i.checked"#,
                task.id.0
            )
            .fetch_optional(&mut *tx)
            .await
            .doing("finding the best iteration")?;
            let is_acceptable = best.is_some_and(|quarantine| quarantine.is_none_or(|q| q.0.permits_acceptance()));
            if !is_acceptable {
                return roll_back(tx, Resolution::NothingAcceptable { number }).await;
            }
        }
        let step = Step::Resolved { action: action.clone(), by: by.to_owned() };
        let written = match steps::write(&mut tx, &task, None, &step, task.active_ms.max(0) as u64).await? {
            Ok(written) => written,
            Err(rejection) => return roll_back(tx, Resolution::Refused { number, rejection }).await,
        };
        let mut hints = written.hints;
        let state = pause::pause_if_requested(&mut tx, &task, written.to, &mut hints).await?;
        cfq_link::failpoint::hit("scheduler.resolve.before_commit");
        tx.commit().await.doing("answering an escalation")?;
        cfq_link::failpoint::hit("scheduler.resolve.after_commit");
        Ok(Resolution::Done { number, state, hints })
    }
}

enum QuestionState {
    Open,
    Ended(EndedQuestion),
    /// The task has no such question.
    Unknown,
}

async fn question_state(
    connection: &mut PgConnection,
    task: TaskId,
    question: QuestionId,
) -> Result<QuestionState, StoreError> {
    let row = sqlx::query!(
        r#"select state = 'open' as "is_open!", answer as "answer: Json<EscalationAction>",
                  coalesce(answered_by, '') as "by!"
           from questions where id = $1 and task = $2"#,
        question.0,
        task.0
    )
    .fetch_optional(connection)
    .await
    .doing("reading a question")?;
    Ok(match row {
        None => QuestionState::Unknown,
        Some(row) if row.is_open => QuestionState::Open,
        Some(row) => QuestionState::Ended(EndedQuestion { answer: row.answer.map(|answer| answer.0), by: row.by }),
    })
}
