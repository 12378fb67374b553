//! Views of tasks for the API: the list, and one task with all its rows.

use cfq_proto::http::{EscalationView, IterationView, JobSummary, ListPosition, TaskDetail, TaskSort, TaskSummary};
use cfq_proto::ids::{ArtifactId, JobId, QuestionId, TaskId, TaskNumber};
use cfq_proto::job::{JobFailure, Usage};
use cfq_proto::label::Label;
use cfq_proto::loop_step::{ActionKind, Decided, EscalationReason};
use cfq_proto::review::{CheckRun, Finding, Quarantine, ReviewFeedback};
use cfq_proto::task::{Priority, TaskSpec};
use sqlx::types::Json;

use super::columns::parse;
use super::error::Doing;
use super::list::TaskFilter;
use super::{Store, StoreError};

struct SummaryRow {
    id: uuid::Uuid,
    number: i64,
    state: String,
    loop_state: String,
    title: String,
    repo: String,
    base: Option<String>,
    priority: i16,
    iteration: i32,
    max_iterations: i32,
    best_score: Option<f64>,
    threshold: f64,
    created_at: f64,
    updated_at: f64,
    labels: Vec<String>,
    retry_of: Option<uuid::Uuid>,
    waiting_reason: Option<String>,
    reason: Option<String>,
    is_bottleneck: bool,
    is_acknowledged: bool,
}

impl SummaryRow {
    fn summary(self) -> Result<TaskSummary, StoreError> {
        Ok(TaskSummary {
            id: TaskId(self.id),
            number: TaskNumber(self.number),
            state: parse("task state", &self.state)?,
            loop_state: parse("loop state", &self.loop_state)?,
            title: self.title,
            repo: self.repo,
            base: self.base,
            priority: Priority::try_from(self.priority)
                .map_err(|_| StoreError::Unreadable { what: "priority", text: self.priority.to_string() })?,
            iteration: unsigned(self.iteration),
            max_iterations: unsigned(self.max_iterations),
            best_score: self.best_score,
            threshold: self.threshold,
            created_at: self.created_at,
            updated_at: self.updated_at,
            labels: self.labels.iter().map(|label| parse::<Label>("label", label)).collect::<Result<_, _>>()?,
            retry_of: self.retry_of.map(TaskId),
            waiting_reason: self.waiting_reason,
            reason: self.reason,
            is_bottleneck: self.is_bottleneck,
            is_acknowledged: self.is_acknowledged,
        })
    }
}

fn unsigned(n: i32) -> u32 {
    u32::try_from(n).unwrap_or(0)
}

impl Store {
    /// Summaries of the first `limit` tasks after `after`, in this order.
    pub async fn list_tasks(
        &self,
        filter: &TaskFilter,
        sort: TaskSort,
        after: Option<ListPosition>,
        limit: i64,
    ) -> Result<Vec<TaskSummary>, StoreError> {
        let found: Vec<uuid::Uuid> =
            self.find_tasks(filter, sort, after, limit).await?.into_iter().map(|(task, _)| task.0).collect();
        let rows = sqlx::query_as!(
            SummaryRow,
            r#"select id, number, state, loop_state, title, coalesce(spec ->> 'repo', '') as "repo!",
                      spec ->> 'base' as base, priority, iteration, max_iterations, best_score, threshold,
                      extract(epoch from created_at)::float8 as "created_at!",
                      extract(epoch from updated_at)::float8 as "updated_at!", retry_of,
                      array(select label from task_labels where task = tasks.id order by label) as "labels!",
                      case when state in ('queued', 'blocked') and reason <> '' then reason end as waiting_reason,
                      case when state in ('escalated', 'waiting_on_human', 'paused', 'failed') and reason <> ''
                           then left(split_part(reason, e'\n', 1), 300) end as reason,
                      is_bottleneck and ended_at is null as "is_bottleneck!", acknowledged_at is not null as "is_acknowledged!"
               from tasks where id = any($1) order by array_position($1, id)"#,
            &found
        )
        .fetch_all(&self.pool)
        .await
        .doing("listing tasks")?;
        rows.into_iter().map(SummaryRow::summary).collect()
    }

    /// One task with its iterations, jobs and open question; `None` if there is no such task.
    pub async fn task_detail(&self, task: TaskId) -> Result<Option<TaskDetail>, StoreError> {
        let summary = sqlx::query_as!(
            SummaryRow,
            r#"select id, number, state, loop_state, title, coalesce(spec ->> 'repo', '') as "repo!",
                      spec ->> 'base' as base, priority, iteration, max_iterations, best_score, threshold,
                      extract(epoch from created_at)::float8 as "created_at!",
                      extract(epoch from updated_at)::float8 as "updated_at!", retry_of,
                      array(select label from task_labels where task = tasks.id order by label) as "labels!",
                      case when state in ('queued', 'blocked') and reason <> '' then reason end as waiting_reason,
                      case when state in ('escalated', 'waiting_on_human', 'paused', 'failed') and reason <> ''
                           then left(split_part(reason, e'\n', 1), 300) end as reason,
                      is_bottleneck and ended_at is null as "is_bottleneck!", acknowledged_at is not null as "is_acknowledged!"
               from tasks where id = $1"#,
            task.0
        )
        .fetch_optional(&self.pool)
        .await
        .doing("reading a task")?;
        let Some(summary) = summary else { return Ok(None) };
        let row = sqlx::query!(
            // A task that waits for a pending job shows the job's reason, which changes without a write to the task's
            // row.
            r#"select spec as "spec: Json<TaskSpec>", agents_without_model,
                      coalesce((select case placement when '' then 'waits for free capacity on a node' else placement end
                                from jobs where jobs.id = tasks.waits_for and jobs.state = 'queued' and tasks.state = 'ready'),
                               reason || case when state = 'escalated' then coalesce(' (after the answer: ' || pause_requested || ')', '')
                                              else '' end) as "reason!",
                      best_iteration, pr, delivered_branch, delivered_commit, runner, lease is not null as "held!",
                      attempt, active_ms,
                      (select merge_checks from internal_prs where number = tasks.pr and merge_commit is not null)
                          as "merge_checks: Json<Vec<CheckRun>>"
               from tasks where id = $1"#,
            task.0
        )
        .fetch_one(&self.pool)
        .await
        .doing("reading a task")?;
        let summary = summary.summary()?;
        // The priority may have been changed since the task was submitted.
        let spec = match summary.state.is_terminal() {
            true => row.spec.0,
            false => self.with_agent_settings(row.spec.0, &row.agents_without_model).await?,
        };
        let spec = TaskSpec { priority: summary.priority, ..spec };
        let (predecessors, dependents) = self.linked_tasks(task).await?;
        let iterations = self.iterations(task).await?;
        let critique = iterations.iter().rev().find_map(|i| i.review.clone());
        Ok(Some(TaskDetail {
            summary,
            spec,
            reason: row.reason,
            escalation: self.escalation(task, critique).await?,
            iterations,
            best_iteration: row.best_iteration.map(unsigned),
            pr: row.pr,
            merge_checks: row.merge_checks.map_or_else(Vec::new, |checks| checks.0),
            delivered_branch: row.delivered_branch,
            delivered_commit: row.delivered_commit,
            jobs: self.jobs_of(task).await?,
            activity: if row.held { self.activity(task).await? } else { None },
            runner: row.runner.filter(|_| row.held).as_deref().map(|r| parse("runner", r)).transpose()?,
            attempt: row.attempt,
            active_ms: row.active_ms.max(0) as u64,
            predecessors,
            dependents,
            reported_defects: self.reported_defects(task).await?,
        }))
    }

    async fn iterations(&self, task: TaskId) -> Result<Vec<IterationView>, StoreError> {
        let rows = sqlx::query!(
            r#"select i.iteration, i.artifact, i.content_hash, i.commit, i.model, i.paths as "paths: Json<Vec<String>>",
                      i.findings as "findings: Json<Vec<Finding>>", i.quarantine as "quarantine: Json<Quarantine>",
                      i.checked, i.ran as "ran: Json<Vec<CheckRun>>",
                      i.decided as "decided: Json<Decided>", i.prompt_tokens, i.output_tokens,
                      r.review as "review?: Json<ReviewFeedback>", r.model as "reviewer_model?"
               from iterations i
               left join lateral (select review, model from reviews r
                                  where r.task = i.task and r.iteration = i.iteration order by r.at desc limit 1) r on true
               where i.task = $1 order by i.iteration"#,
            task.0
        )
        .fetch_all(&self.pool)
        .await
        .doing("reading a task's iterations")?;
        Ok(rows
            .into_iter()
            .map(|r| IterationView {
                iteration: unsigned(r.iteration),
                artifact: ArtifactId(r.artifact),
                commit: r.commit,
                content_hash: r.content_hash,
                model: r.model,
                paths: r.paths.0,
                findings: r.findings.0,
                quarantine: r.quarantine.map(|q| q.0),
                unchecked: !r.checked,
                ran: r.ran.0,
                review: r.review.map(|r| r.0),
                reviewer_model: r.reviewer_model,
                decided: r.decided.map(|d| d.0),
                prompt_tokens: u32::try_from(r.prompt_tokens).unwrap_or(u32::MAX),
                output_tokens: u32::try_from(r.output_tokens).unwrap_or(u32::MAX),
            })
            .collect())
    }

    async fn escalation(
        &self,
        task: TaskId,
        final_critique: Option<ReviewFeedback>,
    ) -> Result<Option<EscalationView>, StoreError> {
        let row = sqlx::query!(
            r#"select id, text, reason as "reason: Json<EscalationReason>", actions as "actions: Json<Vec<ActionKind>>",
                      recommendation
               from questions where task = $1 and state = 'open'"#,
            task.0
        )
        .fetch_optional(&self.pool)
        .await
        .doing("reading a question")?;
        Ok(row.map(|r| EscalationView {
            question: QuestionId(r.id),
            reason: r.reason.0,
            explanation: r.text,
            available_actions: r.actions.0,
            final_critique,
            recommendation: r.recommendation,
        }))
    }

    async fn jobs_of(&self, task: TaskId) -> Result<Vec<JobSummary>, StoreError> {
        let rows = sqlx::query!(
            r#"select id, role, model, state, attempt, node, losses, unaccepted, failures, failure as "failure: Json<JobFailure>",
                      usage as "usage: Json<Usage>", placement
               from jobs where task = $1 order by seq, role, n"#,
            task.0
        )
        .fetch_all(&self.pool)
        .await
        .doing("reading a task's jobs")?;
        rows.into_iter()
            .map(|r| {
                Ok(JobSummary {
                    id: JobId(r.id),
                    role: parse("role", &r.role)?,
                    model: parse("model", &r.model)?,
                    state: parse("job state", &r.state)?,
                    attempt: r.attempt,
                    node: r.node.as_deref().map(|n| parse("node", n)).transpose()?,
                    losses: r.losses,
                    unaccepted: r.unaccepted,
                    failures: r.failures,
                    failure: r.failure.map(|f| f.0),
                    usage: r.usage.map(|u| u.0),
                    placement: r.placement,
                })
            })
            .collect()
    }
}
