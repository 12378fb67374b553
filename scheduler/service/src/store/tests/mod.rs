//! Tests of the store's guarantees against a real Postgres.

mod activity;
mod agent_settings;
mod blobs;
mod calls;
mod clock_jumps;
mod control;
mod dead_letters;
mod deadlines;
mod dependencies;
mod election;
mod failures;
mod feed;
mod job_list;
mod jobs;
mod journal;
mod leases;
mod liveness;
mod loops;
mod lost_attempts;
mod machines;
mod main_branch;
mod migrations;
mod pause;
mod preemption;
mod prs;
mod reclaim;
mod retention;
mod rows_read;
mod schedules;
mod submits;
mod token_queues;
mod waits;

use cfq_proto::blob::Payload;
use cfq_proto::ids::{ArtifactId, BootId, JobId, LeaseId};
use cfq_proto::job::{
    ChatMessage, ChatRole, Completion, FinishReason, JobRequest, JobState, JobView, Outcome, Prompt, ReleaseReason,
    Usage,
};
use cfq_proto::loop_step::{Artifact, ArtifactFile, Step};
use cfq_proto::messages::{
    Accept, FenceReply, Grant, JobFence, JobReply, JobResult, JobSubmit, LeaseReply, LeaseRequest, StepReply,
    StepRequest, TaskFence, WorkOrder,
};
use cfq_proto::task::Agent;

use super::{BlobLease, Leadership, PlaceOrder, Run, Store};
use crate::testing::{MODEL, TestEnv, node, runner};

impl Store {
    /// Executes SQL statements that only tests use, without the time limit of statements.
    pub(crate) async fn raw(&self, sql: &str) {
        let mut connection = self.pool.acquire().await.unwrap();
        sqlx::raw_sql("set statement_timeout = 0").execute(&mut *connection).await.unwrap();
        sqlx::raw_sql(sqlx::AssertSqlSafe(sql.to_owned())).execute(&mut *connection).await.unwrap();
        sqlx::raw_sql("reset statement_timeout").execute(&mut *connection).await.unwrap();
    }

    /// A transaction that has executed `sql`; it holds its locks until it is dropped.
    pub(crate) async fn hold(&self, sql: &'static str) -> sqlx::Transaction<'static, sqlx::Postgres> {
        let mut transaction = self.pool.begin().await.unwrap();
        sqlx::raw_sql("set local idle_in_transaction_session_timeout = 0").execute(&mut *transaction).await.unwrap();
        sqlx::raw_sql(sql).execute(&mut *transaction).await.unwrap();
        transaction
    }

    /// Ends the leases that are expired now.
    pub(crate) async fn sweep_now(
        &self,
        leadership: Leadership,
    ) -> Result<(Vec<super::Hint>, usize, usize), super::StoreError> {
        let now_ms = self.clock_ms().await?;
        self.sweep(leadership, now_ms, &super::UnwrittenHolders::default()).await
    }

    /// Rows of all jobs that have not ended, as the planner reads them.
    pub(crate) async fn live_jobs(&self) -> Vec<cfq_scheduler_core::Job> {
        let ids: Vec<JobId> = self.live_job_versions().await.unwrap().into_keys().collect();
        self.live_jobs_of(&ids).await.unwrap().into_iter().filter_map(|row| row.job).collect()
    }

    /// Events of all tasks after `cursor`, each with its position.
    pub(crate) async fn all_events(
        &self,
        cursor: super::FeedCursor,
    ) -> Result<Vec<(super::FeedCursor, cfq_proto::event::Event)>, super::StoreError> {
        Ok(self.feed_page(cursor).await?.events)
    }

    /// The single `bigint` that a query returns.
    pub(crate) async fn count(&self, sql: &str) -> i64 {
        sqlx::query_scalar(sqlx::AssertSqlSafe(sql.to_owned())).fetch_one(&self.pool).await.unwrap()
    }
}

async fn grant_reply(env: &TestEnv, boot: BootId) -> LeaseReply {
    env.store.grant(&runner(), &LeaseRequest { boot, request: None }).await.unwrap()
}

async fn grant(env: &TestEnv, boot: BootId) -> Grant {
    match grant_reply(env, boot).await {
        LeaseReply::Granted { grant: Payload::Inline(grant), .. } => grant,
        other => panic!("{other:?}"),
    }
}

fn submit_job(fence: TaskFence, seq: i32) -> JobSubmit {
    let prompt = Prompt {
        messages: vec![ChatMessage { role: ChatRole::User, content: "hello\0".into() }],
        sampling: Default::default(),
        format: Default::default(),
        ..Prompt::default()
    };
    let request = JobRequest {
        role: Agent::Alpha,
        n: 0,
        model: MODEL.parse().unwrap(),
        prompt: Payload::Inline(prompt),
        prompt_bytes: 6,
        prefix: vec![u64::MAX],
        max_tokens: 100,
        has_fallback: false,
    };
    JobSubmit { fence, seq, request }
}

async fn job(env: &TestEnv, fence: TaskFence) -> JobView {
    view(env.store.submit_job(&runner(), &submit_job(fence, 0)).await.unwrap().0)
}

fn of_runner(lease: LeaseId) -> BlobLease {
    BlobLease::Runner(runner(), lease)
}

fn of_node(lease: LeaseId) -> BlobLease {
    BlobLease::Node(node(), lease)
}

fn view(reply: JobReply) -> JobView {
    match reply {
        JobReply::Job { job } => job,
        other => panic!("{other:?}"),
    }
}

async fn place(env: &TestEnv, leadership: Leadership, job: JobId, boot: BootId) -> WorkOrder {
    let attempt = view_of(env, job).await.attempt + 1;
    let order = PlaceOrder { job, attempt, node: node(), boot, reason: "cheapest".into() };
    env.store.place(leadership, &order).await.unwrap().unwrap()
}

async fn accept(env: &TestEnv, fence: JobFence, boot: BootId) -> FenceReply {
    env.store.accept(&node(), &Accept { fence, boot }).await.unwrap().0
}

async fn report(env: &TestEnv, fence: JobFence, boot: BootId, outcome: Outcome) -> FenceReply {
    env.store.record_result(&node(), &JobResult { fence, boot, outcome }).await.unwrap().reply
}

async fn view_of(env: &TestEnv, job: JobId) -> JobView {
    let mut connection = env.store.pool.acquire().await.unwrap();
    super::jobs::view(&mut connection, job).await.unwrap()
}

async fn state_of(env: &TestEnv, job: JobId) -> JobState {
    view_of(env, job).await.state
}

fn done(text: &str) -> Outcome {
    let usage = Usage { prompt_tokens: 3, output_tokens: 5, ..Usage::default() };
    Outcome::Done {
        completion: Payload::Inline(Completion {
            text: text.into(),
            finish: FinishReason::Stop,
            usage,
            logprobs: Vec::new(),
        }),
    }
}

/// A task granted to the runner, with one job running on the node.
struct Running {
    env: TestEnv,
    leadership: Leadership,
    node: BootId,
    runner: BootId,
    task: TaskFence,
    job: JobFence,
}

async fn running() -> Running {
    let env = TestEnv::new().await;
    env.submit().await;
    let (node, runner) = (env.join_node().await, env.join_runner().await);
    let leadership = env.acquire_leadership().await;
    let task = grant(&env, runner).await.fence;
    let job = job(&env, task).await.id;
    let job = place(&env, leadership, job, node).await.fence;
    assert_eq!(accept(&env, job, node).await, FenceReply::Committed);
    Running { env, leadership, node, runner, task, job }
}

async fn step(env: &TestEnv, fence: TaskFence, seq: i32, step: Step) -> StepReply {
    env.store.commit_step(&runner(), &StepRequest { fence, seq, step, active_ms: 10 }).await.unwrap().0
}

/// Commits a step and returns the number of the pull request that it opened.
async fn committed(env: &TestEnv, fence: TaskFence, seq: i32, this: Step) -> Option<i64> {
    match step(env, fence, seq, this).await {
        StepReply::Committed { pr, .. } => pr,
        other => panic!("step {seq}: {other:?}"),
    }
}

fn started() -> Step {
    Step::Started { base: "b0".into(), branch: "worker-1/task-1".into(), review_depth: None }
}

fn artifact(iteration: u32) -> Artifact {
    Artifact {
        id: ArtifactId::fresh(),
        iteration,
        content_hash: format!("h{iteration}"),
        commit: Some(format!("c{iteration}")),
        parent: if iteration == 1 { "b0".into() } else { format!("c{}", iteration - 1) },
        commit_time: 1,
        commit_message: "m\0".into(),
        files: vec![ArtifactFile::text("a.py", "x = 1\n")],
        diff: "+x = 1\n".into(),
        windows_1252_in_diff: Vec::new(),
        job: JobId::fresh(),
        model: MODEL.into(),
        prompt_tokens: 1,
        output_tokens: 2,
    }
}

/// Repository of the tasks in these tests.
const REPOSITORY: &str = "/home/me/project";

fn merge_intent(old: &str, new: &str) -> Step {
    let (old, new, repository, message) = (old.into(), new.into(), REPOSITORY.into(), format!("Merge {new}\n"));
    Step::MergeIntent { old, new, commit_time: 1, repository, message, ran: vec![] }
}

fn generated(artifact: Artifact) -> Step {
    Step::Generated { artifact: Payload::Inline(artifact) }
}
