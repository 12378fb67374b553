//! What a runner does for a task, as an event for users.

use cfq_proto::event::EventBody;
use cfq_proto::http::ActivityView;
use cfq_proto::ids::{RunnerId, TaskId};
use cfq_proto::messages::{ActivityReport, FenceReply};
use sqlx::types::Json;

use super::columns::pg_text;
use super::error::Doing;
use super::events::append;
use super::tasks::lock_task;
use super::{Store, StoreError, roll_back};

/// Maximum length of the text of an activity, in bytes.
const MAX_ACTIVITY_BYTES: usize = 400;

impl Store {
    /// Appends what the runner does to the task's events. A repeated report is the same event.
    pub async fn record_activity(&self, runner: &RunnerId, report: &ActivityReport) -> Result<FenceReply, StoreError> {
        let mut tx = self.begin().await?;
        let task = lock_task(&mut tx, report.fence.task).await?;
        let Some(task) = task.filter(|task| task.is_held_by(runner, &report.fence)) else {
            return roll_back(tx, FenceReply::Stale).await;
        };
        let text = pg_text(&report.activity);
        let activity = text[..text.floor_char_boundary(MAX_ACTIVITY_BYTES)].to_owned();
        let body = EventBody::RunnerActivity { runner: runner.to_string(), activity };
        let last = sqlx::query_scalar!(
            r#"select body as "body: Json<EventBody>" from events where task = $1 order by task_seq desc limit 1"#,
            task.id.0
        )
        .fetch_optional(&mut *tx)
        .await
        .doing("reading the last event of a task")?;
        if last.is_some_and(|last| last.0 == body) {
            return roll_back(tx, FenceReply::Committed).await;
        }
        append(&mut tx, task.id, &body).await?;
        tx.commit().await.doing("recording an activity")?;
        Ok(FenceReply::Committed)
    }

    /// What the runner does for a task that it holds: its last event, if that says so.
    pub(super) async fn activity(&self, task: TaskId) -> Result<Option<ActivityView>, StoreError> {
        let last = sqlx::query!(
            r#"select body as "body: Json<EventBody>", (extract(epoch from now() - at) * 1000)::bigint as "elapsed_ms!"
               from events where task = $1 order by task_seq desc limit 1"#,
            task.0
        )
        .fetch_optional(&self.pool)
        .await
        .doing("reading the last event of a task")?;
        Ok(last.and_then(|last| match last.body.0 {
            EventBody::RunnerActivity { activity, .. } => {
                Some(ActivityView { activity, elapsed_ms: last.elapsed_ms.max(0) as u64 })
            }
            _ => None,
        }))
    }
}
