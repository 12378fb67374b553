//! The rows of a task in Postgres, read without cfq's types: column names and JSON are those stored in the database.

use serde_json::Value;
use sqlx::PgConnection;

/// A row of `attempts`.
#[derive(Debug)]
pub struct AttemptRow {
    pub attempt: i32,
    pub accepted: bool,
    pub outcome: Option<String>,
    pub lease: String,
    pub boot: String,
}

/// A row of `jobs`, with its attempts.
#[derive(Debug)]
pub struct JobRow {
    pub id: String,
    pub model: String,
    pub state: String,
    pub attempt: i32,
    pub losses: i32,
    pub failures: i32,
    pub messages: Value,
    pub completion: Option<Value>,
    pub attempts: Vec<AttemptRow>,
}

/// A row of `steps`.
#[derive(Debug)]
pub struct StepRow {
    pub seq: i32,
    pub kind: String,
}

/// A row of `events`.
#[derive(Debug)]
pub struct EventRow {
    pub seq: i64,
    pub body: Value,
}

impl EventRow {
    /// Whether the event reports that the job `id` entered this state.
    pub fn is_job(&self, id: &str, state: &str) -> bool {
        self.body["type"] == "job_changed" && self.body["job"] == id && self.body["state"] == state
    }

    /// Whether the event reports that the task entered this state.
    pub fn is_task(&self, state: &str) -> bool {
        self.body["type"] == "task_state_changed" && self.body["to"] == state
    }
}

/// A row of `iterations`.
#[derive(Debug)]
pub struct IterationRow {
    /// Commit of the artifact; `None` if it has none.
    pub commit: Option<String>,
    /// Whether it is not quarantined. Only such commits become ancestors of later ones.
    pub passed: bool,
}

/// All rows of one task.
#[derive(Debug)]
pub struct TaskRows {
    pub number: i64,
    pub state: String,
    pub base: String,
    /// Name and commit of the delivered branch, if there is one.
    pub delivered: Option<(String, String)>,
    pub jobs: Vec<JobRow>,
    pub steps: Vec<StepRow>,
    /// The iterations, in order.
    pub iterations: Vec<IterationRow>,
    pub reviews: i64,
    /// State and merge commit of each internal pull request.
    pub prs: Vec<(String, Option<String>)>,
    pub events: Vec<EventRow>,
}

impl JobRow {
    /// Name of the job's model on the model server.
    pub fn model_name(&self) -> &str {
        self.model.rsplit('/').next().unwrap()
    }

    pub fn is_scripted(&self) -> bool {
        self.model.starts_with("openai:scripted/")
    }

    /// Reads the jobs of all tasks.
    pub async fn all(connection: &mut PgConnection) -> Vec<Self> {
        Self::select(connection, None).await
    }

    async fn select(connection: &mut PgConnection, task: Option<&str>) -> Vec<Self> {
        type Row = (String, String, String, i32, i32, i32, String, Option<String>);
        let rows: Vec<Row> = sqlx::query_as(
            "select id::text, model, state, attempt, losses, failures, prompt::text, completion::text from jobs
             where $1::text is null or task = $1::uuid order by created_at, id",
        )
        .bind(task)
        .fetch_all(&mut *connection)
        .await
        .unwrap();
        let mut jobs = Vec::new();
        for (id, model, state, attempt, losses, failures, prompt, completion) in rows {
            let prompt: Value = serde_json::from_str(&prompt).unwrap();
            let messages = prompt["inline"]["messages"].clone();
            assert!(messages.is_array(), "tests keep prompts small: {prompt}");
            let completion = completion.map(|c| serde_json::from_str(&c).unwrap());
            let attempts = AttemptRow::of(connection, &id).await;
            jobs.push(Self { id, model, state, attempt, losses, failures, messages, completion, attempts });
        }
        jobs
    }
}

impl AttemptRow {
    async fn of(connection: &mut PgConnection, job: &str) -> Vec<Self> {
        let rows: Vec<(i32, bool, Option<String>, String, String)> = sqlx::query_as(
            "select attempt, accepted_at is not null, outcome, lease::text, node_boot::text from attempts
             where job = $1::uuid order by attempt",
        )
        .bind(job)
        .fetch_all(connection)
        .await
        .unwrap();
        rows.into_iter()
            .map(|(attempt, accepted, outcome, lease, boot)| Self { attempt, accepted, outcome, lease, boot })
            .collect()
    }
}

impl TaskRows {
    /// Reads the rows of the task with this id.
    pub async fn of(connection: &mut PgConnection, task: &str) -> Self {
        type Row = (i64, String, String, Option<String>, Option<String>);
        let (number, state, base, branch, commit): Row = sqlx::query_as(
            "select number, state, spec->>'base', delivered_branch, delivered_commit from tasks where id = $1::uuid",
        )
        .bind(task)
        .fetch_one(&mut *connection)
        .await
        .unwrap();
        let jobs = JobRow::select(connection, Some(task)).await;
        let steps: Vec<(i32, String)> =
            sqlx::query_as("select seq, kind from steps where task = $1::uuid order by seq")
                .bind(task)
                .fetch_all(&mut *connection)
                .await
                .unwrap();
        let iterations: Vec<(Option<String>, bool)> = sqlx::query_as(
            "select commit, quarantine is null from iterations where task = $1::uuid order by iteration",
        )
        .bind(task)
        .fetch_all(&mut *connection)
        .await
        .unwrap();
        let (reviews,): (i64,) = sqlx::query_as("select count(*) from reviews where task = $1::uuid")
            .bind(task)
            .fetch_one(&mut *connection)
            .await
            .unwrap();
        let prs = sqlx::query_as("select state, merge_commit from internal_prs where task = $1::uuid")
            .bind(task)
            .fetch_all(&mut *connection)
            .await
            .unwrap();
        let events: Vec<(i64, String)> =
            sqlx::query_as("select task_seq, body::text from events where task = $1::uuid order by task_seq")
                .bind(task)
                .fetch_all(&mut *connection)
                .await
                .unwrap();
        Self {
            number,
            state,
            base,
            delivered: branch.zip(commit),
            jobs,
            steps: steps.into_iter().map(|(seq, kind)| StepRow { seq, kind }).collect(),
            iterations: iterations.into_iter().map(|(commit, passed)| IterationRow { commit, passed }).collect(),
            reviews,
            prs,
            events: events
                .into_iter()
                .map(|(seq, body)| EventRow { seq, body: serde_json::from_str(&body).unwrap() })
                .collect(),
        }
    }
}
