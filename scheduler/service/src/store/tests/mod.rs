//! The promises, against a real Postgres.

mod blobs;
mod deadlines;
mod election;
mod failures;
mod feed;
mod jobs;
mod journal;
mod leases;
mod loops;
mod migrations;
mod submits;
mod taken_back;
mod waits;

use cfq_proto::blob::Carried;
use cfq_proto::ids::{ArtifactId, BootId, JobId};
use cfq_proto::job::{
    ChatMessage, ChatRole, Completion, FinishReason, JobRequest, JobState, JobView, Outcome, Prompt, Usage,
};
use cfq_proto::looping::{Artifact, ArtifactFile, Step};
use cfq_proto::messages::{
    Accept, FenceReply, Grant, JobAsk, JobFence, JobReply, JobReport, LeaseReply, StepReply, StepRequest, TaskFence,
    WorkOrder,
};
use cfq_proto::task::Agent;

use super::{Leadership, PlaceOrder, Store};
use crate::testing::{Lab, MODEL, node, runner};

impl Store {
    /// A statement that no product code makes.
    pub(crate) async fn raw(&self, sql: &str) {
        sqlx::raw_sql(sqlx::AssertSqlSafe(sql.to_owned())).execute(&self.pool).await.unwrap();
    }

    /// A transaction that has done `sql` and holds what it locked until it is dropped.
    pub(crate) async fn hold(&self, sql: &'static str) -> sqlx::Transaction<'static, sqlx::Postgres> {
        let mut transaction = self.pool.begin().await.unwrap();
        sqlx::raw_sql(sql).execute(&mut *transaction).await.unwrap();
        transaction
    }

    pub(crate) async fn count(&self, sql: &str) -> i64 {
        sqlx::query_scalar(sqlx::AssertSqlSafe(sql.to_owned())).fetch_one(&self.pool).await.unwrap()
    }
}

async fn grant(lab: &Lab, boot: BootId) -> Grant {
    match lab.store.grant(&runner(), boot).await.unwrap() {
        LeaseReply::Granted { grant: Carried::Inline(grant), .. } => grant,
        other => panic!("{other:?}"),
    }
}

fn ask(fence: TaskFence, seq: i32) -> JobAsk {
    let prompt = Prompt {
        messages: vec![ChatMessage { role: ChatRole::User, content: "hello\0".into() }],
        sampling: Default::default(),
        format: Default::default(),
    };
    let request = JobRequest {
        role: Agent::Alpha,
        n: 0,
        model: MODEL.parse().unwrap(),
        prompt: Carried::Inline(prompt),
        prompt_bytes: 6,
        prefix: vec![u64::MAX],
        max_tokens: 100,
    };
    JobAsk { fence, seq, request }
}

async fn job(lab: &Lab, fence: TaskFence) -> JobView {
    view(lab.store.ask_job(&runner(), &ask(fence, 0)).await.unwrap().0)
}

fn view(reply: JobReply) -> JobView {
    match reply {
        JobReply::Job { job } => job,
        other => panic!("{other:?}"),
    }
}

async fn place(lab: &Lab, lead: Leadership, job: JobId, boot: BootId) -> WorkOrder {
    let attempt = view_of(lab, job).await.attempt + 1;
    let order = PlaceOrder { job, attempt, node: node(), boot, reason: "cheapest".into() };
    lab.store.place(lead, &order).await.unwrap().unwrap()
}

async fn accept(lab: &Lab, fence: JobFence, boot: BootId) -> FenceReply {
    lab.store.accept(&node(), &Accept { fence, boot }).await.unwrap().0
}

async fn report(lab: &Lab, fence: JobFence, boot: BootId, outcome: Outcome) -> FenceReply {
    lab.store.report(&node(), &JobReport { fence, boot, outcome }).await.unwrap().0
}

async fn view_of(lab: &Lab, job: JobId) -> JobView {
    let mut connection = lab.store.pool.acquire().await.unwrap();
    super::jobs::view(&mut connection, job).await.unwrap()
}

async fn state_of(lab: &Lab, job: JobId) -> JobState {
    view_of(lab, job).await.state
}

fn done(text: &str) -> Outcome {
    let usage = Usage { prompt_tokens: 3, output_tokens: 5, ..Usage::default() };
    Outcome::Done {
        completion: Carried::Inline(Completion {
            text: text.into(),
            finish: FinishReason::Stop,
            usage,
            logprobs: Vec::new(),
        }),
    }
}

/// A task taken by the runner, one job of it running on the node.
struct Running {
    lab: Lab,
    lead: Leadership,
    node: BootId,
    runner: BootId,
    task: TaskFence,
    job: JobFence,
}

async fn running() -> Running {
    let lab = Lab::new().await;
    lab.submit().await;
    let (node, runner) = (lab.join_node().await, lab.join_runner().await);
    let lead = lab.lead().await;
    let task = grant(&lab, runner).await.fence;
    let job = job(&lab, task).await.id;
    let job = place(&lab, lead, job, node).await.fence;
    assert_eq!(accept(&lab, job, node).await, FenceReply::Committed);
    Running { lab, lead, node, runner, task, job }
}

async fn step(lab: &Lab, fence: TaskFence, seq: i32, step: Step) -> StepReply {
    lab.store.commit_step(&runner(), &StepRequest { fence, seq, step, active_ms: 10 }).await.unwrap().0
}

async fn committed(lab: &Lab, fence: TaskFence, seq: i32, this: Step) -> Option<i64> {
    match step(lab, fence, seq, this).await {
        StepReply::Committed { pr, .. } => pr,
        other => panic!("step {seq}: {other:?}"),
    }
}

fn started() -> Step {
    Step::Started { base: "b0".into(), branch: "worker-1/task-1".into() }
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
        files: vec![ArtifactFile { path: "a.py".into(), content: Some("x = 1\n".into()) }],
        diff: "+x = 1\n".into(),
        job: JobId::fresh(),
        model: MODEL.into(),
        prompt_tokens: 1,
        output_tokens: 2,
    }
}

fn generated(artifact: Artifact) -> Step {
    Step::Generated { artifact: Carried::Inline(artifact) }
}
