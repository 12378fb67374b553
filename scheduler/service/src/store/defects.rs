//! Defects that users found in the results of tasks after the hand-off.

use cfq_proto::http::{DefectReport, MAX_REPORTED_DEFECTS, ReportedDefect};
use cfq_proto::ids::{TaskId, TaskNumber};
use cfq_proto::task::TaskState;

use super::columns::{parse, pg_text};
use super::error::Doing;
use super::tasks::lock_task;
use super::{Store, StoreError, roll_back};

/// Result of a report of a defect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DefectOutcome {
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
    /// Records a defect of a task's result.
    pub async fn report_defect(&self, task: TaskId, defect: &DefectReport) -> Result<DefectOutcome, StoreError> {
        let mut tx = self.begin().await?;
        let Some(task) = lock_task(&mut tx, task).await? else { return roll_back(tx, DefectOutcome::Unknown).await };
        let (number, state) = (task.number, task.state);
        if !matches!(state, TaskState::Merged | TaskState::Accepted) {
            return roll_back(tx, DefectOutcome::Refused { number, state }).await;
        }
        let new = sqlx::query!(
            r#"insert into reported_defects (id, task, severity, location, description, suggested_fix)
               values ($1, $2, $3, $4, $5, $6) on conflict (task, md5(location), md5(description)) do nothing"#,
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
        let defects =
            sqlx::query_scalar!(r#"select count(*) as "count!" from reported_defects where task = $1"#, task.id.0)
                .fetch_one(&mut *tx)
                .await
                .doing("counting defects")?;
        if defects > MAX_REPORTED_DEFECTS {
            return roll_back(tx, DefectOutcome::TooMany { number }).await;
        }
        tx.commit().await.doing("recording a defect")?;
        Ok(DefectOutcome::Done { number, is_new: new.rows_affected() > 0, defects })
    }

    /// The defects that were reported for a task, oldest first.
    pub(super) async fn reported_defects(&self, task: TaskId) -> Result<Vec<ReportedDefect>, StoreError> {
        let rows = sqlx::query!(
            r#"select severity, location, description, suggested_fix, extract(epoch from reported_at)::float8 as "at!"
               from reported_defects where task = $1 order by reported_at, id"#,
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
}
