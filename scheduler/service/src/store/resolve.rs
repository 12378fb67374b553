//! Answers of users to an escalation (L7) or a held hand-off. An answer is accepted only while the task waits for one,
//! and only with an action that the question offers; `AcceptBestEffort` is refused if the best result is quarantined.
//! The answer is stored as a step of the loop, so the next runner of the task replays it.

use cfq_proto::ids::{TaskId, TaskNumber};
use cfq_proto::loop_step::{ActionKind, EscalationAction, Step};
use cfq_proto::task::TaskState;
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
    /// No result can be accepted, because every result is quarantined.
    NothingAcceptable {
        number: TaskNumber,
    },
    /// The answer cannot be written as the next step of the loop.
    Refused {
        number: TaskNumber,
        rejection: StepRejection,
    },
    /// There is no such task.
    Unknown,
}

impl Store {
    /// Answers the open question of a task. `by` names the author, for users.
    pub async fn resolve(&self, task: TaskId, action: &EscalationAction, by: &str) -> Result<Resolution, StoreError> {
        let mut tx = self.begin().await?;
        let Some(task) = lock_task(&mut tx, task).await? else { return roll_back(tx, Resolution::Unknown).await };
        let number = task.number;
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
            let acceptable = sqlx::query_scalar!(
                r#"select true as "yes!" from tasks t join iterations i on i.task = t.id and i.iteration = t.best_iteration
                   where t.id = $1 and i.quarantine is null and i.commit is not null"#,
                task.id.0
            )
            .fetch_optional(&mut *tx)
            .await
            .doing("finding the best iteration")?;
            if acceptable.is_none() {
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
