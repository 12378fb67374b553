//! Rate of durable submits: `POST /api/v1/tasks` of a scheduler with its own Postgres and NATS, over 1 and 16 HTTP
//! connections. The baseline, measured in alternation in the same run, is the rate of single-row inserts, each in its
//! own transaction, over as many database connections. A reply and a finished insert both mean a commit on disk.
//!
//!     cargo run -p cfq-benches --bin submit_throughput [-- --at-least RATIO]
#![allow(clippy::print_stdout)]

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use cfq_benches::require_ratio;
use cfq_deploy::postgres::PostgresAddress;
use cfq_deploy::{Paths, Stack, StackOptions};
use cfq_proto::client::Client;
use cfq_proto::http::SubmitRequest;
use cfq_proto::subject::Identity;
use cfq_scheduler::{Config, DatabaseConfig, Defaults, HttpConfig, SchedulerLimits};
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions, PgConnection};
use tokio::task::JoinSet;

const CONNECTIONS: [usize; 2] = [1, 16];
/// Rounds of each measurement; the median is reported.
const ROUNDS: usize = 5;
const ROUND_TIME: Duration = Duration::from_secs(2);
/// Maximum wait for the scheduler to become ready.
const START_LIMIT: Duration = Duration::from_secs(30);
const TOKEN: &str = "0123456789abcdef";

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let at_least = at_least()?;
    let folder = tempfile::tempdir()?;
    make_enterable(folder.path())?;
    let cache = Paths::from_environment()?.cache;
    let paths = Paths { data: folder.path().join("data"), cache, config: folder.path().join("config") };
    let stack = Stack::start(&paths, StackOptions::default()).await?;
    let postgres = stack.addresses().postgres.clone();
    let config = config(&postgres, stack.addresses().nats.config(&Identity::Scheduler), folder.path())?;
    let url = format!("http://{}", config.http.bind);
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let scheduler =
        tokio::spawn(cfq_scheduler::run(config, |_| axum::Router::new(), async move { drop(stopped.await) }));
    wait_until_ready(&client(&url)?).await?;
    let mut ratios = Vec::new();
    for connections in CONNECTIONS {
        let (mut bare, mut submits, mut pairs) = (vec![], vec![], vec![]);
        for _ in 0..ROUNDS {
            let inserts = insert_rate(&postgres, connections).await?;
            let accepted = submit_rate(&url, connections).await?;
            bare.push(inserts);
            submits.push(accepted);
            pairs.push(accepted / inserts);
        }
        let ratio = median(&mut pairs);
        println!(
            "{connections:3} connections: {:6.0} submits/s, {:6.0} single-row commits/s, ratio {ratio:.2}",
            median(&mut submits),
            median(&mut bare)
        );
        ratios.push((if connections == 1 { "1 connection" } else { "16 connections" }, ratio));
    }
    drop(stop);
    scheduler.await??;
    stack.stop().await?;
    require_ratio(&ratios, at_least)
}

fn at_least() -> anyhow::Result<Option<f64>> {
    let mut args = std::env::args().skip(1);
    match args.next().as_deref() {
        None => Ok(None),
        Some("--at-least") => Ok(Some(args.next().context("--at-least needs a ratio")?.parse()?)),
        Some(other) => anyhow::bail!("unknown argument {other}: only --at-least RATIO is known"),
    }
}

/// Postgres may run as another user, who must be able to enter the folder.
fn make_enterable(folder: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o711))
}

fn config(postgres: &PostgresAddress, nats: cfq_link::NatsConfig, folder: &Path) -> anyhow::Result<Config> {
    use std::os::unix::fs::PermissionsExt;
    let token_file = folder.join("token");
    std::fs::write(&token_file, TOKEN)?;
    std::fs::set_permissions(&token_file, std::fs::Permissions::from_mode(0o600))?;
    let free_port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let mut defaults = Defaults::default();
    defaults.agents.alpha.model = Some("openai:bench/model".parse()?);
    defaults.agents.beta.model = Some("openai:bench/model".parse()?);
    Ok(Config {
        database: DatabaseConfig {
            host: postgres.host.to_string_lossy().into_owned(),
            port: postgres.port,
            user: postgres.user.clone(),
            database: postgres.database.clone(),
            password_file: Some(postgres.password_file.clone()),
        },
        nats,
        http: HttpConfig {
            bind: free_port,
            socket: None,
            socket_on_stdin: false,
            allow_plaintext: false,
            lan: None,
            token_file,
            allowed_hosts: vec![],
        },
        defaults,
        limits: SchedulerLimits { open_tasks: u32::MAX, ..SchedulerLimits::default() },
        retention: Default::default(),
        timing: Default::default(),
    })
}

fn client(url: &str) -> anyhow::Result<Client> {
    Ok(Client::new(cfq_link::outbound::api_client()?, url, TOKEN))
}

async fn wait_until_ready(client: &Client) -> anyhow::Result<()> {
    let start = Instant::now();
    while let Err(error) = client.check_ready().await {
        ensure!(start.elapsed() < START_LIMIT, "the scheduler is not ready: {error}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

/// Submits per second.
async fn submit_rate(url: &str, connections: usize) -> anyhow::Result<f64> {
    let request: SubmitRequest = serde_json::from_value(serde_json::json!({
        "description": "bench: do nothing", "repo": "/bench", "priority": "P3",
    }))?;
    let mut workers = JoinSet::new();
    for _ in 0..connections {
        let (client, request) = (client(url)?, request.clone());
        // The connection is opened before the measurement.
        client.check_ready().await?;
        workers.spawn(async move {
            let start = Instant::now();
            let mut done = 0u32;
            while start.elapsed() < ROUND_TIME {
                client.submit(&request, None).await?;
                done += 1;
            }
            Ok(f64::from(done) / start.elapsed().as_secs_f64())
        });
    }
    sum(workers).await
}

/// Single-row inserts per second.
async fn insert_rate(postgres: &PostgresAddress, connections: usize) -> anyhow::Result<f64> {
    let mut admin = connect(postgres).await?;
    sqlx::raw_sql(
        "create table if not exists bench_rows (id bigint generated always as identity primary key, body text)",
    )
    .execute(&mut admin)
    .await?;
    let mut workers = JoinSet::new();
    for _ in 0..connections {
        let mut connection = connect(postgres).await?;
        workers.spawn(async move {
            let start = Instant::now();
            let mut done = 0u32;
            while start.elapsed() < ROUND_TIME {
                sqlx::query("insert into bench_rows (body) values ($1)")
                    .bind("bench: do nothing")
                    .execute(&mut connection)
                    .await?;
                done += 1;
            }
            Ok(f64::from(done) / start.elapsed().as_secs_f64())
        });
    }
    sum(workers).await
}

async fn connect(postgres: &PostgresAddress) -> anyhow::Result<PgConnection> {
    let password = std::fs::read_to_string(&postgres.password_file)?;
    let options = PgConnectOptions::new_without_pgpass()
        .socket(&postgres.host)
        .port(postgres.port)
        .username(&postgres.user)
        .password(password.trim())
        .database(&postgres.database);
    Ok(options.connect().await?)
}

async fn sum(mut workers: JoinSet<anyhow::Result<f64>>) -> anyhow::Result<f64> {
    let mut total = 0.0;
    while let Some(rate) = workers.join_next().await {
        total += rate??;
    }
    Ok(total)
}

fn median(rates: &mut [f64]) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates.get(rates.len() / 2).copied().unwrap_or_default()
}
