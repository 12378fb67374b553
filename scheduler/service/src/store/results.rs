//! What users say about tasks that have ended: that they know of a failure, and which defects they found in a result.

use cfq_proto::http::{DefectReport, ReportedDefect};
use cfq_proto::ids::{TaskId, TaskNumber};
use cfq_proto::task::TaskState;

use super::columns::{parse, pg_text};
use super::error::Doing;
use super::tasks::lock_task;
use super::{Store, StoreError, roll_back};

/// Maximum number of defects that can be reported for a task.
const MAX_DEFECTS: i64 = 200;

/// Result of an acknowledgement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Acknowledged {
    Done {
        number: TaskNumber,
        /// False if the failure was acknowledged before.
        is_new: bool,
    },
    /// The task has not failed.
    Refused {
        number: TaskNumber,
        state: TaskState,
    },
    Unknown,
}

/// Result of a report of a defect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reported {
    Done {
        number: TaskNumber,
        /// False if the same defect was reported before.
        is_new: bool,
        /// Number of defects of the task.
        defects: i64,
    },
    /// The task has no result that a user has.
    Refused {
        number: TaskNumber,
        state: TaskState,
    },
    /// The task has as many reported defects as one may have.
    TooMany {
        number: TaskNumber,
    },
    Unknown,
}

impl Store {
    /// Notes that a user knows of a task's failure.
    pub async fn acknowledge(&self, task: TaskId) -> Result<Acknowledged, StoreError> {
        let mut tx = self.begin().await?;
        let Some(task) = lock_task(&mut tx, task).await? else { return roll_back(tx, Acknowledged::Unknown).await };
        let (number, state) = (task.number, task.state);
        if state != TaskState::Failed {
            return roll_back(tx, Acknowledged::Refused { number, state }).await;
        }
        let new = sqlx::query!(
            "update tasks set acknowledged_at = now() where id = $1 and acknowledged_at is null",
            task.id.0
        )
        .execute(&mut *tx)
        .await
        .doing("acknowledging a failure")?;
        tx.commit().await.doing("acknowledging a failure")?;
        Ok(Acknowledged::Done { number, is_new: new.rows_affected() > 0 })
    }

    /// Records a defect of a task's result.
    pub async fn report_defect(&self, task: TaskId, defect: &DefectReport) -> Result<Reported, StoreError> {
        let mut tx = self.begin().await?;
        let Some(task) = lock_task(&mut tx, task).await? else { return roll_back(tx, Reported::Unknown).await };
        let (number, state) = (task.number, task.state);
        if !matches!(state, TaskState::Merged | TaskState::Accepted) {
            return roll_back(tx, Reported::Refused { number, state }).await;
        }
        let new = sqlx::query!(
            r#"insert into defects (id, task, severity, location, description, suggested_fix)
               values ($1, $2, $3, $4, $5, $6) on conflict (task, location, description) do nothing"#,
            TaskId::fresh().0,
            task.id.0,
            defect.severity.as_str(),
            pg_text(&defect.location),
            pg_text(&defect.description),
            defect.suggested_fix.as_deref().map(pg_text)
        )
        .execute(&mut *tx)
        .await
        .doing("recording a defect")?;
        let defects = sqlx::query_scalar!(r#"select count(*) as "count!" from defects where task = $1"#, task.id.0)
            .fetch_one(&mut *tx)
            .await
            .doing("counting defects")?;
        if defects > MAX_DEFECTS {
            return roll_back(tx, Reported::TooMany { number }).await;
        }
        tx.commit().await.doing("recording a defect")?;
        Ok(Reported::Done { number, is_new: new.rows_affected() > 0, defects })
    }

    /// The defects that were reported for a task, oldest first.
    pub(super) async fn reported_defects(&self, task: TaskId) -> Result<Vec<ReportedDefect>, StoreError> {
        let rows = sqlx::query!(
            r#"select severity, location, description, suggested_fix, extract(epoch from reported_at)::float8 as "at!"
               from defects where task = $1 order by reported_at, id"#,
            task.0
        )
        .fetch_all(&self.pool)
        .await
        .doing("reading the defects of a task")?;
        rows.into_iter()
            .map(|row| {
                let severity = parse("severity", &row.severity)?;
                let (location, description, suggested_fix) = (row.location, row.description, row.suggested_fix);
                let defect = DefectReport { severity, location, description, suggested_fix };
                Ok(ReportedDefect { defect, reported_at: row.at })
            })
            .collect()
    }

    /// Number of failed tasks whose failure nobody has acknowledged.
    pub(super) async fn count_new_failures(&self) -> Result<i64, StoreError> {
        sqlx::query_scalar!(
            r#"select count(*) as "count!" from tasks where state = 'failed' and acknowledged_at is null"#
        )
        .fetch_one(&self.pool)
        .await
        .doing("counting failed tasks")
    }
}
