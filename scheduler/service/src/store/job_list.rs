//! The list of model calls, newest first. Ids of jobs are ordered by the time of their creation, so a page continues
//! after the id of the last job of the page before. Each combination of conditions has its own statement, so that
//! Postgres reads a page through an index on the condition and the id.

use cfq_proto::http::{JobFilter, JobListItem};
use cfq_proto::ids::{JobId, TaskId, TaskNumber};
use cfq_proto::job::{JobFailure, JobState, Usage};
use cfq_proto::task::Priority;
use sqlx::types::Json;
use sqlx::{Postgres, QueryBuilder};

use super::columns::parse;
use super::error::Doing;
use super::{Store, StoreError};

/// Text for a queued job whose reason is not recorded, because it only waits for capacity.
pub(super) const WAITS_FOR_CAPACITY: &str = "waits for free capacity on a node";

/// Selects [`ListRow`]s. Times are in ms. The time of the acceptance is that of the last attempt, because the job's own
/// column is cleared when an attempt ends.
const SELECT: &str = "
    select j.id, t.number, j.role, j.model, j.priority, j.state, j.attempt, j.node, j.placement, j.usage, j.failure,
           extract(epoch from j.created_at)::float8 as created_at,
           (extract(epoch from coalesce(a.accepted_at, j.end_at) - j.created_at) * 1000)::bigint as waiting_ms,
           coalesce(extract(epoch from coalesce(a.ended_at, clock_timestamp()) - a.accepted_at) * 1000, 0)::bigint as running_ms
    from (select *, case when state in ('queued', 'placed', 'running') then clock_timestamp() else updated_at end as end_at
          from (";

/// The end of the statement, after the conditions and the limit.
const JOIN: &str = ") as found) j
    join tasks t on t.id = j.task
    left join attempts a on a.job = j.id and a.attempt = j.attempt and j.state <> 'queued'
    order by j.id desc";

#[derive(sqlx::FromRow)]
struct ListRow {
    id: uuid::Uuid,
    number: i64,
    role: String,
    model: String,
    priority: i16,
    state: String,
    attempt: i32,
    node: Option<String>,
    placement: String,
    usage: Option<Json<Usage>>,
    failure: Option<Json<JobFailure>>,
    created_at: f64,
    waiting_ms: i64,
    running_ms: i64,
}

impl Store {
    /// At most `limit` jobs that match the filter, newest first. `task` is the task that the filter names.
    pub async fn list_jobs(
        &self,
        filter: &JobFilter,
        task: Option<TaskId>,
        limit: i64,
    ) -> Result<Vec<JobListItem>, StoreError> {
        let mut query = statement(filter, task, limit);
        let rows = query.build_query_as::<ListRow>().fetch_all(&self.pool).await.doing("listing jobs")?;
        rows.into_iter().map(ListRow::item).collect()
    }
}

/// The statement for this combination of conditions.
fn statement(filter: &JobFilter, task: Option<TaskId>, limit: i64) -> QueryBuilder<Postgres> {
    let mut query = QueryBuilder::<Postgres>::new(SELECT);
    let mut states: Vec<Option<JobState>> = Vec::new();
    for state in filter.states.iter().copied().map(Some) {
        if !states.contains(&state) {
            states.push(state);
        }
    }
    if states.is_empty() {
        states.push(None);
    }
    // Each state has its own part, so that Postgres reads the newest jobs of each one through its index.
    for (n, state) in states.iter().enumerate() {
        if n > 0 {
            query.push(" union all ");
        }
        push_part(&mut query, filter, task, *state, limit);
    }
    if states.len() > 1 {
        query.push(" order by id desc limit ").push_bind(limit);
    }
    query.push(JOIN);
    query
}

/// Selects the newest jobs in this state, or in all states.
fn push_part(
    query: &mut QueryBuilder<Postgres>,
    filter: &JobFilter,
    task: Option<TaskId>,
    state: Option<JobState>,
    limit: i64,
) {
    query.push("(select * from jobs where true");
    if let Some(task) = task {
        query.push(" and task = ").push_bind(task.0);
    }
    if let Some(state) = state {
        query.push(" and state = ").push_bind(state.as_str());
    }
    if let Some(node) = &filter.node {
        query.push(" and node = ").push_bind(node.as_str().to_owned());
    }
    if let Some(model) = &filter.model {
        query.push(" and model = ").push_bind(model.as_str().to_owned());
    }
    if let Some(JobId(after)) = filter.after {
        query.push(" and id < ").push_bind(after);
    }
    query.push(" order by id desc limit ").push_bind(limit).push(")");
}

impl ListRow {
    fn item(self) -> Result<JobListItem, StoreError> {
        let state: JobState = parse("job state", &self.state)?;
        let reason = match state {
            JobState::Queued if self.placement.is_empty() => WAITS_FOR_CAPACITY.to_owned(),
            JobState::Queued => self.placement,
            JobState::Placed
            | JobState::Running
            | JobState::Done
            | JobState::Failed
            | JobState::Dead
            | JobState::Cancelled => String::new(),
        };
        let usage = self.usage.map(|usage| usage.0);
        Ok(JobListItem {
            id: JobId(self.id),
            task: TaskNumber(self.number),
            role: parse("role", &self.role)?,
            model: parse("model", &self.model)?,
            priority: Priority::try_from(self.priority)
                .map_err(|_| StoreError::Unreadable { what: "priority", text: self.priority.to_string() })?,
            state,
            attempt: self.attempt,
            node: self.node.as_deref().map(|node| parse("node", node)).transpose()?,
            created_at: self.created_at,
            waiting_ms: u64::try_from(self.waiting_ms).unwrap_or(0),
            running_ms: u64::try_from(self.running_ms).unwrap_or(0),
            prompt_tokens: usage.map(|usage| usage.prompt_tokens),
            output_tokens: usage.map(|usage| usage.output_tokens),
            reason,
            failure: self.failure.map(|failure| failure.0),
        })
    }
}
