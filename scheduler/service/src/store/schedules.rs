//! Schedules, and the tasks that they submit. A firing is one leader transaction: it locks the schedule, inserts the task
//! with the instant for which it was due, and stores the next instant. So an instant fires once, whichever scheduler leads
//! and wherever it is killed. Instants that passed while no scheduler led fire once, together.

use cfq_proto::http::ScheduleView;
use cfq_proto::ids::{ApiTokenId, TaskId, TaskNumber};
use cfq_proto::task::TaskSpec;
use cfq_scheduler_core::{CronExpression, StartState};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use sqlx::PgConnection;
use sqlx::types::Json;
use uuid::Uuid;

use super::agent_settings::parse_agents;
use super::batch::{Firing, insert_task};
use super::columns::AsJson;
use super::error::Doing;
use super::hints::Hint;
use super::leader::{Leadership, lock_leader_row};
use super::submit::{NewTask, agent_names};
use super::time_limit::limited;
use super::{Store, StoreError, roll_back};

/// Maximum number of schedules that one sweep fires; the next one continues.
const MAX_FIRINGS_PER_SWEEP: i64 = 50;

/// A validated schedule.
#[derive(Debug, Clone)]
pub struct NewSchedule {
    pub name: String,
    pub cron: CronExpression,
    pub time_zone: String,
    pub zone: TimeZone,
    /// The task to submit; its id and key are not used.
    pub task: NewTask,
}

struct ScheduleRow {
    name: String,
    cron: String,
    time_zone: String,
    title: String,
    next_at: Option<i64>,
    last_at: Option<i64>,
    last_task: Option<i64>,
    spec: Json<TaskSpec>,
}

impl From<ScheduleRow> for ScheduleView {
    fn from(row: ScheduleRow) -> Self {
        Self {
            name: row.name,
            cron: row.cron,
            time_zone: row.time_zone,
            title: row.title,
            next_at: row.next_at,
            last_at: row.last_at,
            last_task: row.last_task.map(TaskNumber),
            task: row.spec.0,
        }
    }
}

impl Store {
    /// Adds a schedule; false if its name is taken.
    pub async fn add_schedule(&self, new: &NewSchedule) -> Result<bool, StoreError> {
        let now = timestamp(self.clock_ms().await? / 1000)?;
        let next_s = new.cron.next_after(now, &new.zone).map(Timestamp::as_second);
        let added = sqlx::query!(
            r#"insert into schedules (id, name, cron, time_zone, spec, title, threshold, max_iterations, body_hash, next_at,
                                      agents_without_model)
               values ($1, $2, $3, $4, $5, $6, $7, $8, $9, to_timestamp($10::float8), $11)
               on conflict (name) do nothing"#,
            Uuid::now_v7(),
            &new.name,
            new.cron.to_string(),
            &new.time_zone,
            AsJson(&new.task.spec) as _,
            &new.task.title,
            new.task.threshold,
            i32::try_from(new.task.max_iterations).unwrap_or(i32::MAX),
            &new.task.body_hash,
            next_s.map(|s| s as f64),
            &agent_names(&new.task.agents_without_model) as &[&str]
        )
        .execute(&self.pool)
        .await
        .doing("writing a schedule")?;
        Ok(added.rows_affected() == 1)
    }

    /// Number of all schedules.
    pub async fn count_schedules(&self) -> Result<i64, StoreError> {
        sqlx::query_scalar!(r#"select count(*) as "count!" from schedules"#)
            .fetch_one(&self.pool)
            .await
            .doing("counting schedules")
    }

    /// All schedules, or the one with this name, in the order of their names.
    pub async fn schedules(&self, name: Option<&str>) -> Result<Vec<ScheduleView>, StoreError> {
        let rows = sqlx::query_as!(
            ScheduleRow,
            r#"select name, cron, time_zone, title, extract(epoch from next_at)::bigint as next_at,
                      extract(epoch from last_at)::bigint as last_at, last_task, spec as "spec: _"
               from schedules where $1::text is null or name = $1 order by name"#,
            name
        )
        .fetch_all(&self.pool)
        .await
        .doing("listing schedules")?;
        Ok(rows.into_iter().map(ScheduleView::from).collect())
    }

    /// A new task of the schedule with this name, as a firing creates it; `None` if there is no such schedule.
    pub async fn task_of_schedule(&self, name: &str, key: Option<String>) -> Result<Option<NewTask>, StoreError> {
        let mut connection = self.pool.acquire().await.doing("connecting")?;
        let task = new_task(&mut connection, name).await?;
        Ok(task.map(|task| NewTask { key, ..task }))
    }

    /// Removes a schedule; false if there is none with this name.
    pub async fn remove_schedule(&self, name: &str) -> Result<bool, StoreError> {
        let removed = sqlx::query!("delete from schedules where name = $1", name)
            .execute(&self.pool)
            .await
            .doing("removing a schedule")?;
        Ok(removed.rows_affected() == 1)
    }

    /// Pauses a schedule; false if there is none with this name.
    pub async fn pause_schedule(&self, name: &str) -> Result<bool, StoreError> {
        let paused = sqlx::query!("update schedules set next_at = null where name = $1", name)
            .execute(&self.pool)
            .await
            .doing("pausing a schedule")?;
        Ok(paused.rows_affected() == 1)
    }

    /// Continues a paused schedule with its first instant from now on; false if there is none with this name.
    pub async fn resume_schedule(&self, name: &str) -> Result<bool, StoreError> {
        let Some(view) = self.schedules(Some(name)).await?.pop() else { return Ok(false) };
        let now = timestamp(self.clock_ms().await? / 1000)?;
        let next_s = next_second(&view.cron, &view.time_zone, now)?;
        // A schedule that is not paused keeps its instant, which may be due just now.
        sqlx::query!(
            "update schedules set next_at = to_timestamp($2::float8) where name = $1 and next_at is null",
            name,
            next_s.map(|s| s as f64)
        )
        .execute(&self.pool)
        .await
        .doing("continuing a schedule")?;
        Ok(true)
    }

    /// Submits the tasks of the schedules that are due, unless the limit on open tasks is reached: then they stay due.
    pub async fn fire_schedules(&self, leadership: Leadership) -> Result<Vec<Hint>, StoreError> {
        let found = sqlx::query_scalar!(
            "select id from schedules where next_at <= now() and id <> all($1) order by next_at limit $2",
            &self.shared.row_backoff.rows(),
            MAX_FIRINGS_PER_SWEEP
        )
        .fetch_all(&self.pool);
        let due = limited("finding due schedules", async { found.await.doing("finding due schedules") }).await?;
        if due.is_empty() {
            return Ok(vec![]);
        }
        let open = limited("counting open tasks", self.count_open_tasks()).await?;
        let room = i64::from(self.limits.open_tasks).saturating_sub(open).max(0);
        if room < due.len() as i64 {
            tracing::warn!(open, "schedules are due, but the limit on open tasks is reached");
        }
        let mut hints = Vec::new();
        for schedule in due.into_iter().take(usize::try_from(room).unwrap_or(usize::MAX)) {
            let fired = limited("firing a schedule", self.fire(leadership, schedule)).await;
            hints.extend(self.skip_faulty_row("schedule", schedule, fired)?);
        }
        Ok(hints)
    }

    async fn fire(&self, leadership: Leadership, schedule: Uuid) -> Result<Vec<Hint>, StoreError> {
        let mut tx = self.begin().await?;
        lock_leader_row(&mut tx, leadership).await?;
        let due = sqlx::query!(
            r#"select name, cron, time_zone, extract(epoch from next_at)::bigint as "scheduled_s!", floor(extract(epoch from now()))::bigint as "now_s!"
               from schedules where id = $1 and next_at <= now() for update"#,
            schedule
        )
        .fetch_optional(&mut *tx)
        .await
        .doing("firing a schedule")?;
        let Some(due) = due else { return roll_back(tx, vec![]).await };
        // From the scheduled instant, or from now if further instants have passed: they fire together.
        let after = timestamp(due.scheduled_s.max(due.now_s))?;
        let next_s = next_second(&due.cron, &due.time_zone, after)?;
        let Some(task) = new_task(&mut tx, &due.name).await? else { return roll_back(tx, vec![]).await };
        let firing = Firing { schedule, scheduled_s: due.scheduled_s };
        let number = insert_task(&mut tx, &task, &StartState::Ready, None, Some(firing)).await?;
        sqlx::query!(
            r#"update schedules set next_at = to_timestamp($2::float8), last_at = next_at,
                      last_task = coalesce($3, last_task)
               where id = $1"#,
            schedule,
            next_s.map(|s| s as f64),
            number.map(|number| number.0)
        )
        .execute(&mut *tx)
        .await
        .doing("firing a schedule")?;
        tx.report(task.id);
        cfq_link::failpoint::hit("scheduler.schedule.before_commit");
        tx.commit().await.doing("firing a schedule")?;
        cfq_link::failpoint::hit("scheduler.schedule.after_commit");
        match number {
            Some(number) => {
                tracing::info!(schedule = due.name, task = %number, "schedule fired");
                Ok(vec![Hint::TaskReady])
            }
            None => {
                tracing::warn!(schedule = due.name, scheduled_s = due.scheduled_s, "this instant has a task already");
                Ok(vec![])
            }
        }
    }
}

/// A new task of the schedule with this name, without an idempotency key; `None` if there is no such schedule.
async fn new_task(connection: &mut PgConnection, name: &str) -> Result<Option<NewTask>, StoreError> {
    let row = sqlx::query!(
        r#"select spec as "spec: Json<TaskSpec>", title, threshold, max_iterations, body_hash, agents_without_model
           from schedules where name = $1"#,
        name
    )
    .fetch_optional(connection)
    .await
    .doing("reading a schedule")?;
    let Some(row) = row else { return Ok(None) };
    Ok(Some(NewTask {
        id: TaskId::fresh(),
        // Only administrators change schedules.
        token: ApiTokenId::OWNER,
        spec: row.spec.0,
        agents_without_model: parse_agents(&row.agents_without_model)?,
        title: row.title,
        threshold: row.threshold,
        max_iterations: u32::try_from(row.max_iterations).unwrap_or(1),
        key: None,
        body_hash: row.body_hash,
    }))
}

fn timestamp(second: i64) -> Result<Timestamp, StoreError> {
    Timestamp::from_second(second).map_err(|_| StoreError::Unreadable { what: "time", text: second.to_string() })
}

/// The first instant of a stored schedule after `after`, in seconds since 1970.
fn next_second(cron: &str, time_zone: &str, after: Timestamp) -> Result<Option<i64>, StoreError> {
    let cron: CronExpression = super::columns::parse("cron expression", cron)?;
    let zone = TimeZone::get(time_zone)
        .map_err(|_| StoreError::Unreadable { what: "time zone", text: time_zone.to_owned() })?;
    Ok(cron.next_after(after, &zone).map(Timestamp::as_second))
}
