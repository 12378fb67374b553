//! How long a client of `cfq mcp` waits for what it delegates: until a task is accepted, until Alpha generates, until Beta
//! begins after Alpha has ended, for the state of a task, and for a change of an agent's model. Everything is real but the
//! models, which answer at once and are loaded. The baseline, measured in the same run, is one HTTP request to the
//! scheduler that needs no database.
//!
//!     cargo run -p cfq-tests --bin delegation_times -- --tasks 30
//!
//! Exits with 1 if the 95th percentile of a time is above its limit.
#![allow(clippy::print_stdout)]

use std::time::Instant;

use anyhow::{Context, bail, ensure};
use cfq_proto::event::{Event, EventBody};
use cfq_proto::ids::TaskKey;
use cfq_proto::job::{JobRole, JobState};
use cfq_proto::task::TaskState;
use cfq_proto::timing::Timing;
use cfq_tests::cluster::{Cluster, Options};
use cfq_tests::mcp_client::{McpClient, STATELESS};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};
use serde_json::json;

/// One measured time: its name, its limit in ms, and the values in ms.
struct Measured {
    name: &'static str,
    limit_ms: f64,
    values: Vec<f64>,
}

impl Measured {
    fn new(name: &'static str, limit_ms: f64) -> Self {
        Self { name, limit_ms, values: Vec::new() }
    }

    /// Median and 95th percentile.
    fn quantiles(&mut self) -> (f64, f64) {
        self.values.sort_by(f64::total_cmp);
        let at = |part: f64| self.values[((self.values.len() - 1) as f64 * part).round() as usize];
        (at(0.5), at(0.95))
    }
}

fn ms_since(began: Instant) -> f64 {
    began.elapsed().as_secs_f64() * 1000.0
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut tasks = 30;
    let mut given = std::env::args().skip(1);
    while let Some(name) = given.next() {
        let value = given.next().with_context(|| format!("{name} requires a value"))?;
        match name.as_str() {
            "--tasks" => tasks = value.parse()?,
            other => bail!("unknown argument {other}"),
        }
    }
    ensure!(tasks > 0, "--tasks must be at least 1");
    // The product's intervals, not those of tests.
    let cluster = Cluster::start_with(Options { timing: Timing::default(), ..Options::default() }).await;
    let repo = UserRepo::with_uncommitted_changes();
    let mut mcp = McpClient::start(&cluster, &repo.path(), STATELESS).await;
    let http = cfq_link::outbound::api_client()?;
    let health = format!("{}/healthz", cluster.client.url());
    let mut baseline = Measured::new("GET /healthz, the baseline", f64::INFINITY);
    let mut accepted = Measured::new("task accepted (US-001)", 500.0);
    let mut generating = Measured::new("Alpha's call runs, after acceptance (US-001)", 2_000.0);
    let mut polled = Measured::new("state of a task (US-001: every 5 s)", 5_000.0);
    let mut reviewing = Measured::new("Beta's call runs, after Alpha's has ended (US-002)", 1_000.0);
    let mut swapped = Measured::new("model of an agent changed (US-004)", 5_000.0);
    // The first task copies the repository and is not counted.
    for n in 0..=tasks {
        cluster.models.script("alpha", vec![Reply::Text(file(&format!("f{n}.py"), &format!("x = {n}\n")))]);
        for critic in ["beta", "beta2"] {
            cluster.models.script(critic, vec![Reply::Text(review(95, &[]))]);
        }
        let spec = json!({ "spec": { "description": format!("Write f{n}.py."), "language": "python" } });
        let began = Instant::now();
        let session = mcp.call("execute_task_spec", spec).await["session_id"].clone();
        let accepted_ms = ms_since(began);
        let began = Instant::now();
        mcp.call("get_progress_summary", json!({ "session_id": session })).await;
        let polled_ms = ms_since(began);
        let task: TaskKey = session.as_str().context("a session id")?.parse()?;
        let detail = cluster.wait_until_settled(task).await;
        ensure!(detail.summary.state == TaskState::Merged, "task {n} is {}: {}", detail.summary.state, detail.reason);
        let events = cluster.client.events(task, 0).await?.events;
        let began = Instant::now();
        ensure!(http.get(&health).send().await?.status().is_success(), "{health} does not answer");
        let baseline_ms = ms_since(began);
        let model = if n % 2 == 0 { "openai:scripted/beta2" } else { "openai:scripted/beta" };
        let began = Instant::now();
        mcp.call("configure_endpoint", json!({ "agent": "beta", "provider": { "model": model } })).await;
        let swapped_ms = ms_since(began);
        if n == 0 {
            continue;
        }
        let submitted = at(&events, |body| matches!(body, EventBody::TaskSubmitted))?;
        accepted.values.push(accepted_ms);
        generating.values.push(job_at(&events, JobRole::Alpha, JobState::Running)? - submitted);
        polled.values.push(polled_ms);
        let ended = job_at(&events, JobRole::Alpha, JobState::Done)?;
        reviewing.values.push(job_at(&events, JobRole::Beta, JobState::Running)? - ended);
        swapped.values.push(swapped_ms);
        baseline.values.push(baseline_ms);
    }
    drop(mcp);
    cluster.finish().await;
    let (yardstick, _) = baseline.quantiles();
    println!("{tasks} tasks; ratios are to {}, {yardstick:.2} ms at the median", baseline.name);
    let mut late = Vec::new();
    for measured in [&mut accepted, &mut generating, &mut polled, &mut reviewing, &mut swapped] {
        let (median, p95) = measured.quantiles();
        let (name, limit_ms) = (measured.name, measured.limit_ms);
        println!(
            "{name}: median {median:.1} ms (ratio {:.1}), 95 %: {p95:.1} ms, limit {limit_ms} ms",
            median / yardstick
        );
        if p95 > limit_ms {
            late.push(format!("{name}: {p95:.1} ms is above {limit_ms} ms"));
        }
    }
    ensure!(late.is_empty(), "{}", late.join("; "));
    Ok(())
}

/// Time of the first event of this kind, in ms.
fn at(events: &[Event], is_meant: impl Fn(&EventBody) -> bool) -> anyhow::Result<f64> {
    let event = events.iter().find(|event| is_meant(&event.body)).context("an event is missing")?;
    Ok(event.at * 1000.0)
}

/// Time at which the first call of this role entered this state, in ms.
fn job_at(events: &[Event], of: JobRole, to: JobState) -> anyhow::Result<f64> {
    at(events, |body| matches!(body, EventBody::JobChanged { role, state, .. } if *role == of && *state == to))
}
