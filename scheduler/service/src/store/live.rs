//! Reads the jobs that have not ended, for the planner.

use std::collections::{BTreeMap, HashMap};

use cfq_proto::ids::{BootId, JobId, LeaseId, NodeId, TaskId};
use cfq_proto::job::{JobFailure, JobState};
use cfq_proto::task::Priority;
use cfq_scheduler_core as core;
use sqlx::types::Json;

use super::columns::parse;
use super::error::Doing;
use super::{Store, StoreError};

/// Selects [`LiveRow`]s by a condition.
macro_rules! live_rows {
    ($which:literal, $($argument:expr),*) => {
        sqlx::query_as!(
            LiveRow,
            r#"select id, task, role, model, priority,
                (extract(epoch from deadline) * 1000)::bigint as deadline_ms,
                (select (extract(epoch from greatest(tasks.created_at, tasks.run_at)) * 1000)::bigint from tasks where tasks.id = jobs.task) as "created_ms!", prompt_bytes, prefix as "prefix: _", max_tokens,
                counted_tokens, refused_by as "refused_by: _", node_failures as "node_failures: _",
                (extract(epoch from first_failure_at) * 1000)::bigint as first_failure_ms, no_node_ms, has_fallback, losses, unaccepted, suspicions,
                failure as "failure: _", attempt, state, node, node_boot, lease,
                (extract(epoch from placed_at) * 1000)::bigint as placed_ms,
                (extract(epoch from preparing_at) * 1000)::bigint as preparing_ms,
                (extract(epoch from accepted_at) * 1000)::bigint as accepted_ms,
                (extract(epoch from updated_at) * 1000)::bigint as "changed_ms!", xmin::text as "version!",
                exists (select from tasks where tasks.id = jobs.task and tasks.state = 'paused') as "is_paused!"
            from jobs where "# + $which,
            $($argument),*
        )
    };
}

/// Version of a row. It differs after each write of the row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowVersion(String);

/// Row of a job, for the planner.
#[derive(Debug, Clone, PartialEq)]
pub struct LiveJob {
    pub id: JobId,
    /// The job; `None` if it has ended, or if its task is paused.
    pub job: Option<core::Job>,
    /// Time of the last change, in ms since 1970.
    pub changed_ms: i64,
    pub version: RowVersion,
}

impl Store {
    /// Versions of the rows of all jobs that have not ended, without those of paused tasks and the rows that are skipped
    /// for now.
    pub async fn live_job_versions(&self) -> Result<HashMap<JobId, RowVersion>, StoreError> {
        let rows = sqlx::query!(
            r#"select id, xmin::text as "version!" from jobs
               where state in ('queued', 'placed', 'running') and id <> all($1)
                 and task not in (select id from tasks where state = 'paused')"#,
            &self.shared.row_backoff.rows()
        )
        .fetch_all(&self.pool)
        .await
        .doing("finding the live jobs")?;
        Ok(rows.into_iter().map(|r| (JobId(r.id), RowVersion(r.version))).collect())
    }

    /// The rows of these jobs. Rows that cannot be read are skipped for a while.
    pub async fn live_jobs_of(&self, jobs: &[JobId]) -> Result<Vec<LiveJob>, StoreError> {
        match self.live_jobs_at_once(jobs).await {
            Err(error) if error.is_row_local() && !error.may_retry() => self.live_jobs_one_by_one(jobs).await,
            result => result,
        }
    }

    async fn live_jobs_at_once(&self, jobs: &[JobId]) -> Result<Vec<LiveJob>, StoreError> {
        let ids: Vec<uuid::Uuid> = jobs.iter().map(|job| job.0).collect();
        let rows = live_rows!("id = any($1)", &ids).fetch_all(&self.pool).await.doing("reading the live jobs")?;
        rows.into_iter().map(LiveRow::into_live_job).collect()
    }

    async fn live_jobs_one_by_one(&self, jobs: &[JobId]) -> Result<Vec<LiveJob>, StoreError> {
        let mut rows = Vec::new();
        for job in jobs {
            match self.live_job(*job).await {
                Ok(row) => rows.extend(row),
                Err(error) if error.is_row_local() && !error.may_retry() => {
                    self.shared.row_backoff.defer("job", job.0, &error)
                }
                Err(error) => return Err(error),
            }
        }
        Ok(rows)
    }

    /// Reads one job's row; `None` if there is no such job.
    pub async fn live_job(&self, job: JobId) -> Result<Option<LiveJob>, StoreError> {
        let row = live_rows!("id = $1", job.0).fetch_optional(&self.pool).await.doing("reading a job")?;
        row.map(LiveRow::into_live_job).transpose()
    }
}

struct LiveRow {
    id: uuid::Uuid,
    task: uuid::Uuid,
    role: String,
    model: String,
    priority: i16,
    deadline_ms: Option<i64>,
    created_ms: i64,
    prompt_bytes: i64,
    prefix: Json<Vec<u64>>,
    max_tokens: i64,
    counted_tokens: Option<i64>,
    refused_by: Json<BTreeMap<NodeId, String>>,
    node_failures: Json<core::NodeFailures>,
    first_failure_ms: Option<i64>,
    no_node_ms: i64,
    has_fallback: bool,
    losses: i32,
    unaccepted: i32,
    suspicions: i32,
    failure: Option<Json<JobFailure>>,
    attempt: i32,
    state: String,
    node: Option<String>,
    node_boot: Option<uuid::Uuid>,
    lease: Option<uuid::Uuid>,
    placed_ms: Option<i64>,
    preparing_ms: Option<i64>,
    accepted_ms: Option<i64>,
    changed_ms: i64,
    version: String,
    is_paused: bool,
}

impl LiveRow {
    fn into_live_job(mut self) -> Result<LiveJob, StoreError> {
        let (id, changed_ms, version) = (JobId(self.id), self.changed_ms, std::mem::take(&mut self.version));
        Ok(LiveJob { id, job: self.into_core()?, changed_ms, version: RowVersion(version) })
    }

    /// The job as the planner's type; `None` if the job has ended or its task is paused.
    fn into_core(self) -> Result<Option<core::Job>, StoreError> {
        if self.is_paused {
            return Ok(None);
        }
        let state: JobState = parse("job state", &self.state)?;
        let unreadable = || StoreError::Unreadable { what: "placed job", text: self.id.to_string() };
        let holder = || match (&self.node, self.node_boot, self.lease) {
            (Some(node), Some(boot), Some(lease)) => Ok((parse("node", node)?, BootId(boot), LeaseId(lease))),
            _ => Err(unreadable()),
        };
        let phase = match state {
            JobState::Queued => core::JobPhase::Queued,
            JobState::Placed => {
                let (node, boot, lease) = holder()?;
                let placed_ms = self.placed_ms.ok_or_else(unreadable)?;
                core::JobPhase::Placed { node, boot, lease, placed_ms, preparing_ms: self.preparing_ms }
            }
            JobState::Running => {
                let (node, boot, _) = holder()?;
                core::JobPhase::Running { node, boot, accepted_ms: self.accepted_ms.ok_or_else(unreadable)? }
            }
            JobState::Done | JobState::Failed | JobState::Dead | JobState::Cancelled => return Ok(None),
        };
        let priority = Priority::try_from(self.priority)
            .map_err(|_| StoreError::Unreadable { what: "priority", text: self.priority.to_string() })?;
        let job = core::Job {
            id: JobId(self.id),
            task: TaskId(self.task),
            role: parse("role", &self.role)?,
            model: parse("model", &self.model)?,
            priority,
            deadline_ms: self.deadline_ms,
            created_ms: self.created_ms,
            prompt_bytes: self.prompt_bytes.max(0) as u64,
            prefix: self.prefix.0,
            max_tokens: u32::try_from(self.max_tokens).unwrap_or(u32::MAX),
            counted_tokens: self.counted_tokens.map(|n| n.max(0) as u64),
            refused_by: self.refused_by.0,
            node_failures: self.node_failures.0,
            first_failure_ms: self.first_failure_ms,
            no_node_ms: self.no_node_ms.max(0) as u64,
            has_fallback: self.has_fallback,
            losses: self.losses.max(0) as u32,
            unaccepted: self.unaccepted.max(0) as u32,
            suspicions: self.suspicions.max(0) as u32,
            last_failure: self.failure.map(|f| f.0),
            attempt: self.attempt,
            phase,
        };
        Ok(Some(job))
    }
}
