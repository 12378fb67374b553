//! What people ask: lists, one task with all its rows, artifacts, pull requests, nodes, gauges.

use std::collections::BTreeMap;

use cfq_proto::http::{ArtifactChain, EscalationView, IterationView, JobSummary, NodeView, PrMove, PrView, TaskDetail, TaskSummary};
use cfq_proto::ids::{ArtifactId, BootId, JobId, QuestionId, TaskId, TaskNumber};
use cfq_proto::job::{JobFailure, Usage};
use cfq_proto::looping::{ActionKind, Artifact, Decided, EscalationReason, Step};
use cfq_proto::node::{Device, Ledger};
use cfq_proto::review::{Finding, Quarantine, ReviewFeedback};
use cfq_proto::task::{Priority, TaskSpec, TaskState};
use sqlx::types::Json;

use super::error::{Doing, read};
use super::{Store, StoreError};

/// Figures for the metrics page.
#[derive(Debug, Clone, Default)]
pub struct Gauges {
    pub tasks: BTreeMap<String, i64>,
    pub jobs: BTreeMap<String, i64>,
    /// Node and seconds since its last beat.
    pub nodes: Vec<(String, f64)>,
    pub oldest_queued_job_s: f64,
    pub dead_job_tuples: i64,
    pub open_questions: i64,
}

struct SummaryRow {
    id: uuid::Uuid,
    number: i64,
    state: String,
    loop_state: String,
    title: String,
    priority: i16,
    iteration: i32,
    max_iterations: i32,
    best_score: Option<f64>,
    threshold: f64,
    created_at: f64,
    updated_at: f64,
    retry_of: Option<uuid::Uuid>,
}

impl SummaryRow {
    fn summary(self) -> Result<TaskSummary, StoreError> {
        Ok(TaskSummary {
            id: TaskId(self.id),
            number: TaskNumber(self.number),
            state: read("task state", &self.state)?,
            loop_state: read("loop state", &self.loop_state)?,
            title: self.title,
            priority: Priority::try_from(self.priority)
                .map_err(|_| StoreError::Unreadable { what: "priority", text: self.priority.to_string() })?,
            iteration: unsigned(self.iteration),
            max_iterations: unsigned(self.max_iterations),
            best_score: self.best_score,
            threshold: self.threshold,
            created_at: self.created_at,
            updated_at: self.updated_at,
            retry_of: self.retry_of.map(TaskId),
        })
    }
}

fn unsigned(n: i32) -> u32 {
    u32::try_from(n).unwrap_or(0)
}

impl Store {
    /// Newest first.
    pub async fn list_tasks(&self, state: Option<TaskState>, limit: i64) -> Result<Vec<TaskSummary>, StoreError> {
        let rows = sqlx::query_as!(
            SummaryRow,
            r#"select id, number, state, loop_state, title, priority, iteration, max_iterations, best_score, threshold,
                      extract(epoch from created_at)::float8 as "created_at!",
                      extract(epoch from updated_at)::float8 as "updated_at!", retry_of
               from tasks where $1::text is null or state = $1 order by number desc limit $2"#,
            state.map(|s| s.as_str()),
            limit
        )
        .fetch_all(&self.pool)
        .await
        .doing("listing tasks")?;
        rows.into_iter().map(SummaryRow::summary).collect()
    }

    pub async fn task_detail(&self, task: TaskId) -> Result<Option<TaskDetail>, StoreError> {
        let summary = sqlx::query_as!(
            SummaryRow,
            r#"select id, number, state, loop_state, title, priority, iteration, max_iterations, best_score, threshold,
                      extract(epoch from created_at)::float8 as "created_at!",
                      extract(epoch from updated_at)::float8 as "updated_at!", retry_of
               from tasks where id = $1"#,
            task.0
        )
        .fetch_optional(&self.pool)
        .await
        .doing("reading a task")?;
        let Some(summary) = summary else { return Ok(None) };
        let row = sqlx::query!(
            r#"select spec as "spec: Json<TaskSpec>", reason, best_iteration, pr, delivered_branch, delivered_commit, runner,
                      lease is not null as "held!", attempt, active_ms
               from tasks where id = $1"#,
            task.0
        )
        .fetch_one(&self.pool)
        .await
        .doing("reading a task")?;
        let iterations = self.iterations(task).await?;
        let critique = iterations.iter().rev().find_map(|i| i.review.clone());
        Ok(Some(TaskDetail {
            summary: summary.summary()?,
            spec: row.spec.0,
            reason: row.reason,
            escalation: self.escalation(task, critique).await?,
            iterations,
            best_iteration: row.best_iteration.map(unsigned),
            pr: row.pr,
            delivered_branch: row.delivered_branch,
            delivered_commit: row.delivered_commit,
            jobs: self.jobs_of(task).await?,
            runner: row.runner.filter(|_| row.held).as_deref().map(|r| read("runner", r)).transpose()?,
            attempt: row.attempt,
            active_ms: row.active_ms.max(0) as u64,
        }))
    }

    async fn iterations(&self, task: TaskId) -> Result<Vec<IterationView>, StoreError> {
        let rows = sqlx::query!(
            r#"select i.iteration, i.artifact, i.content_hash, i.commit, i.model, i.paths as "paths: Json<Vec<String>>",
                      i.findings as "findings: Json<Vec<Finding>>", i.quarantine as "quarantine: Json<Quarantine>",
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
            why: r.text,
            available_actions: r.actions.0,
            final_critique,
            recommendation: r.recommendation,
        }))
    }

    async fn jobs_of(&self, task: TaskId) -> Result<Vec<JobSummary>, StoreError> {
        let rows = sqlx::query!(
            r#"select id, role, model, state, attempt, node, losses, failures, failure as "failure: Json<JobFailure>",
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
                    role: read("role", &r.role)?,
                    model: read("model", &r.model)?,
                    state: read("job state", &r.state)?,
                    attempt: r.attempt,
                    node: r.node.as_deref().map(|n| read("node", n)).transpose()?,
                    losses: r.losses,
                    failures: r.failures,
                    failure: r.failure.map(|f| f.0),
                    usage: r.usage.map(|u| u.0),
                    placement: r.placement,
                })
            })
            .collect()
    }

    /// The artifact of an iteration (`None`: the best, else the last one) after those whose commits it stands on.
    pub async fn artifact_chain(&self, task: TaskId, iteration: Option<u32>) -> Result<Option<ArtifactChain>, StoreError> {
        let mut connection = self.pool.acquire().await.doing("connecting")?;
        let wanted = sqlx::query!(
            r#"select t.number, coalesce($2, t.best_iteration, t.iteration) as "iteration!",
                      (select step from steps where task = t.id and kind = 'started' order by seq limit 1)
                          as "started: Json<Step>"
               from tasks t where id = $1"#,
            task.0,
            iteration.map(|n| i32::try_from(n).unwrap_or(i32::MAX))
        )
        .fetch_optional(&mut *connection)
        .await
        .doing("finding an artifact")?;
        let Some(wanted) = wanted else { return Ok(None) };
        let rows = sqlx::query!(
            r#"select a.iteration, s.step as "step: Json<Step>" from artifacts a join steps s on s.task = a.task and s.seq = a.seq
               where a.task = $1 and a.iteration <= $2 order by a.iteration desc"#,
            task.0,
            wanted.iteration
        )
        .fetch_all(&mut *connection)
        .await
        .doing("reading artifacts")?;
        let mut chain: Vec<Artifact> = Vec::new();
        for row in rows {
            let Step::Generated { artifact } = row.step.0 else { continue };
            let artifact: Artifact = Self::carried(&mut connection, artifact).await?;
            match chain.last() {
                None if row.iteration != wanted.iteration => return Ok(None),
                None => chain.push(artifact),
                // Replies that made no commit, and commits off this line, are passed over.
                Some(child) if artifact.commit.as_deref() == Some(child.parent.as_str()) => chain.push(artifact),
                Some(_) => {}
            }
        }
        if chain.is_empty() {
            return Ok(None);
        }
        chain.reverse();
        let base = match wanted.started.map(|s| s.0) {
            Some(Step::Started { base, .. }) => base,
            _ => chain.first().map(|a| a.parent.clone()).unwrap_or_default(),
        };
        Ok(Some(ArtifactChain { number: TaskNumber(wanted.number), base, artifacts: chain }))
    }

    /// All internal pull requests, newest first, or the one of that number.
    pub async fn prs(&self, number: Option<i64>) -> Result<Vec<PrView>, StoreError> {
        let rows = sqlx::query!(
            r#"select p.number, t.number as task, p.title, p.state, p.branch, p.head, p.base, p.merge_commit
               from internal_prs p join tasks t on t.id = p.task
               where $1::bigint is null or p.number = $1 order by p.number desc limit 500"#,
            number
        )
        .fetch_all(&self.pool)
        .await
        .doing("reading pull requests")?;
        let numbers: Vec<i64> = rows.iter().map(|r| r.number).collect();
        let moves = sqlx::query!(
            r#"select pr, "to", why, extract(epoch from at)::float8 as "at!" from internal_pr_moves
               where pr = any($1) order by pr, n"#,
            &numbers
        )
        .fetch_all(&self.pool)
        .await
        .doing("reading pull requests")?;
        let mut history: BTreeMap<i64, Vec<PrMove>> = BTreeMap::new();
        for m in moves {
            let to = read("pull request state", &m.to)?;
            history.entry(m.pr).or_default().push(PrMove { to, why: m.why, at: m.at });
        }
        rows.into_iter()
            .map(|r| {
                Ok(PrView {
                    number: r.number,
                    task: TaskNumber(r.task),
                    title: r.title,
                    state: read("pull request state", &r.state)?,
                    branch: r.branch,
                    head: r.head,
                    base: r.base,
                    merge_commit: r.merge_commit,
                    history: history.remove(&r.number).unwrap_or_default(),
                })
            })
            .collect()
    }

    pub async fn node_views(&self) -> Result<Vec<NodeView>, StoreError> {
        let rows = sqlx::query!(
            r#"select n.id, n.boot, n.version, n.devices as "devices: Json<Vec<Device>>", n.ledger as "ledger: Json<Ledger>",
                      extract(epoch from n.last_seen)::float8 as "last_seen!",
                      n.last_seen + $1::float8 * interval '1 millisecond' >= now() as "alive!",
                      (select count(*) from jobs j where j.node = n.id and j.state = 'running') as "running!"
               from nodes n order by n.id"#,
            self.lease_ttl_ms()
        )
        .fetch_all(&self.pool)
        .await
        .doing("reading the nodes")?;
        rows.into_iter()
            .map(|r| {
                Ok(NodeView {
                    id: read("node", &r.id)?,
                    boot: BootId(r.boot),
                    version: r.version,
                    alive: r.alive,
                    devices: r.devices.0,
                    ledger: r.ledger.0,
                    last_seen: r.last_seen,
                    running: u32::try_from(r.running).unwrap_or(u32::MAX),
                })
            })
            .collect()
    }

    pub async fn gauges(&self) -> Result<Gauges, StoreError> {
        let mut gauges = Gauges::default();
        let tasks = sqlx::query!(r#"select state, count(*) as "count!" from tasks group by state"#)
            .fetch_all(&self.pool)
            .await
            .doing("counting tasks")?;
        gauges.tasks.extend(tasks.into_iter().map(|r| (r.state, r.count)));
        let jobs = sqlx::query!(r#"select state, count(*) as "count!" from jobs group by state"#)
            .fetch_all(&self.pool)
            .await
            .doing("counting jobs")?;
        gauges.jobs.extend(jobs.into_iter().map(|r| (r.state, r.count)));
        let nodes = sqlx::query!(r#"select id, extract(epoch from now() - last_seen)::float8 as "age!" from nodes order by id"#)
            .fetch_all(&self.pool)
            .await
            .doing("counting nodes")?;
        gauges.nodes.extend(nodes.into_iter().map(|r| (r.id, r.age)));
        let rest = sqlx::query!(
            r#"select coalesce(extract(epoch from now() - min(created_at))::float8, 0) as "oldest!",
                      coalesce((select n_dead_tup from pg_stat_user_tables where relname = 'jobs'), 0) as "dead!",
                      (select count(*) from questions where state = 'open') as "questions!"
               from jobs where state = 'queued'"#
        )
        .fetch_one(&self.pool)
        .await
        .doing("reading gauges")?;
        (gauges.oldest_queued_job_s, gauges.dead_job_tuples, gauges.open_questions) = (rest.oldest, rest.dead, rest.questions);
        Ok(gauges)
    }
}
