//! Latency and rate of calls through cfq's OpenAI-compatible API, where each call is committed to Postgres, placed and
//! executed by a node. The baselines, measured in alternation in the same run, are the same calls to the model server
//! itself and through a bare proxy that passes them on. The model server answers at once, so that only the way to it and
//! back is measured.
//!
//!     cargo run --release -p cfq-benches --bin gateway -- target/release/cfq [NAME=URL ...]
//!
//! Each NAME=URL is another gateway in front of the model server, for comparison; the server listens on the address in
//! CFQ_BENCH_BACKEND (127.0.0.1:7990).
#![allow(clippy::print_stdout)]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use axum::routing::{get, post};
use axum::{Json, Router};
use cfq_benches::{median, percentile};
use serde_json::{Value, json};

const ROUNDS: usize = 5;
/// Calls one after the other in a round.
const CALLS: usize = 40;
/// Calls at the same time, in the measurement of the rate.
const CONCURRENT: usize = 16;
/// Calls in a round of that measurement.
const CONCURRENT_CALLS: usize = 320;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1);
    let cfq = std::path::absolute(args.next().context("first argument: the cfq binary")?)?;
    let backend = std::env::var("CFQ_BENCH_BACKEND").unwrap_or_else(|_| "127.0.0.1:7990".to_owned());
    let server =
        serve(&backend, Router::new().route("/v1/models", get(models)).route("/v1/chat/completions", post(chat)));
    let server = server.await?;
    let http = cfq_link::outbound::api_client()?;
    let proxy = Router::new().route("/v1/chat/completions", post(pass_on)).with_state((http.clone(), server.clone()));
    let proxy = serve("127.0.0.1:0", proxy).await?;
    let cluster = Cluster::start(&cfq, &server)?;
    let mut targets = vec![
        Target::new("model server (baseline)", &server, "m", None),
        Target::new("bare proxy (baseline)", &proxy, "m", None),
        Target::new("cfq", &cluster.url, "openai:bench/m", Some(&cluster.key)),
    ];
    for other in args {
        let (name, url) = other.split_once('=').context("further arguments: NAME=URL")?;
        targets.push(Target::new(name, url, "m", None));
    }
    for target in &targets {
        target.wait_until_it_answers(&http).await?;
    }
    for _ in 0..ROUNDS {
        for target in &mut targets {
            target.measure(&http).await?;
        }
    }
    println!("medians of {ROUNDS} rounds");
    let proxy =
        (median(&mut targets[1].p50).as_secs_f64(), median(&mut targets[1].p99).as_secs_f64(), targets[1].rate());
    for target in &mut targets {
        let (p50, p99, rate) = (median(&mut target.p50), median(&mut target.p99), target.rate());
        let ms = |time: Duration| time.as_secs_f64() * 1000.0;
        println!(
            "{:24} p50 {:7.2} ms   p99 {:7.2} ms   {CONCURRENT} at once: {rate:7.1} per second   (proxy: {:.2}, {:.2}, {:.2} times)",
            target.name,
            ms(p50),
            ms(p99),
            p50.as_secs_f64() / proxy.0,
            p99.as_secs_f64() / proxy.1,
            rate / proxy.2,
        );
    }
    Ok(())
}

async fn serve(address: &str, router: Router) -> anyhow::Result<String> {
    let listener = tokio::net::TcpListener::bind(address).await.with_context(|| format!("listening on {address}"))?;
    let url = format!("http://{}", listener.local_addr()?);
    tokio::spawn(async move { axum::serve(listener, router).await });
    Ok(url)
}

async fn models() -> Json<Value> {
    Json(json!({ "object": "list", "data": [{ "id": "m", "object": "model" }] }))
}

/// The model server's answer, at once: whole or as a stream, as the request asks for.
async fn chat(Json(request): Json<Value>) -> impl IntoResponse {
    let usage = json!({ "prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10 });
    let head = json!({ "id": "chatcmpl-1", "created": 0, "model": "m" });
    let body = |object: &str, choice: Value| {
        let mut body = head.clone();
        (body["object"], body["choices"]) = (json!(object), json!([choice]));
        body
    };
    if request["stream"] != json!(true) {
        let message = json!({ "role": "assistant", "content": "ok" });
        let mut whole = body("chat.completion", json!({ "index": 0, "message": message, "finish_reason": "stop" }));
        whole["usage"] = usage;
        return ([(CONTENT_TYPE, "application/json")], whole.to_string());
    }
    let delta = json!({ "role": "assistant", "content": "ok" });
    let mut last = body("chat.completion.chunk", json!({ "index": 0, "delta": {}, "finish_reason": "stop" }));
    last["usage"] = usage;
    let first = body("chat.completion.chunk", json!({ "index": 0, "delta": delta, "finish_reason": null }));
    ([(CONTENT_TYPE, "text/event-stream")], format!("data: {first}\n\ndata: {last}\n\ndata: [DONE]\n\n"))
}

async fn pass_on(State((http, server)): State<(reqwest::Client, String)>, body: Bytes) -> impl IntoResponse {
    let request =
        http.post(format!("{server}/v1/chat/completions")).header(CONTENT_TYPE, "application/json").body(body);
    match request.send().await {
        Ok(response) => {
            let kind = response.headers().get(CONTENT_TYPE).cloned();
            let mut reply = Body::from_stream(response.bytes_stream()).into_response();
            if let Some(kind) = kind {
                reply.headers_mut().insert(CONTENT_TYPE, kind);
            }
            reply
        }
        Err(_) => axum::http::StatusCode::BAD_GATEWAY.into_response(),
    }
}

/// A cluster in a temporary folder; it is stopped on drop.
struct Cluster {
    cfq: std::path::PathBuf,
    folder: tempfile::TempDir,
    url: String,
    key: String,
}

impl Cluster {
    fn start(cfq: &Path, server: &str) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        // If run as root, cfq starts Postgres and NATS as another user, which must be able to traverse this folder.
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o711))?;
        let config = format!(
            "[endpoints.bench]\nurl = \"{server}/v1\"\nmax_sequences = 64\n\n\
             [agents.alpha]\nmodel = \"openai:bench/m\"\n\n[agents.beta]\nmodel = \"openai:bench/m\"\n"
        );
        std::fs::write(folder.path().join("cfq.toml"), config)?;
        let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let url = format!("http://127.0.0.1:{port}");
        let mut cluster = Self { cfq: cfq.to_owned(), folder, url, key: String::new() };
        cluster.run(&["up", "-d", "--bind", &format!("127.0.0.1:{port}")])?;
        cluster.key = std::fs::read_to_string(cluster.folder.path().join("data/keys/api.token"))?.trim().to_owned();
        Ok(cluster)
    }

    fn run(&self, args: &[&str]) -> anyhow::Result<()> {
        let mut command = Command::new(&self.cfq);
        command.arg("--data").arg(self.folder.path().join("data"));
        command.arg("--config").arg(self.folder.path().join("cfq.toml")).args(args);
        let status = command.stdout(Stdio::null()).stdin(Stdio::null()).status()?;
        ensure!(status.success(), "{command:?} ended with {status}");
        Ok(())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Err(error) = self.run(&["down"]) {
            println!("{error}");
        }
    }
}

/// One way to the model.
struct Target {
    name: String,
    url: String,
    model: &'static str,
    key: Option<String>,
    p50: Vec<Duration>,
    p99: Vec<Duration>,
    rates: Vec<f64>,
}

impl Target {
    fn new(name: &str, url: &str, model: &'static str, key: Option<&str>) -> Self {
        let (name, url, key) = (name.to_owned(), format!("{url}/v1/chat/completions"), key.map(str::to_owned));
        Self { name, url, model, key, p50: Vec::new(), p99: Vec::new(), rates: Vec::new() }
    }

    fn request(&self, http: &reqwest::Client) -> reqwest::RequestBuilder {
        let messages = json!([{ "role": "user", "content": "Say ok." }]);
        let request = http.post(&self.url).json(&json!({ "model": self.model, "messages": messages, "max_tokens": 5 }));
        match &self.key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }

    async fn call(request: reqwest::RequestBuilder) -> anyhow::Result<Duration> {
        let began = Instant::now();
        let reply: Value = request.send().await?.error_for_status()?.json().await?;
        ensure!(reply["choices"][0]["message"]["content"] == "ok", "{reply}");
        Ok(began.elapsed())
    }

    async fn wait_until_it_answers(&self, http: &reqwest::Client) -> anyhow::Result<()> {
        let began = Instant::now();
        loop {
            match Self::call(self.request(http)).await {
                Ok(_) => return Ok(()),
                Err(error) if began.elapsed() > Duration::from_secs(60) => return Err(error.context(self.name.clone())),
                Err(_) => tokio::time::sleep(Duration::from_millis(200)).await,
            }
        }
    }

    async fn measure(&mut self, http: &reqwest::Client) -> anyhow::Result<()> {
        let mut times = Vec::with_capacity(CALLS);
        for _ in 0..CALLS {
            times.push(Self::call(self.request(http)).await?);
        }
        self.p50.push(median(&mut times));
        self.p99.push(percentile(&mut times, 99));
        let began = Instant::now();
        let clients = (0..CONCURRENT).map(|_| {
            let requests: Vec<_> = (0..CONCURRENT_CALLS / CONCURRENT).map(|_| self.request(http)).collect();
            tokio::spawn(async move {
                for request in requests {
                    Self::call(request).await?;
                }
                anyhow::Ok(())
            })
        });
        for client in clients.collect::<Vec<_>>() {
            client.await??;
        }
        self.rates.push(CONCURRENT_CALLS as f64 / began.elapsed().as_secs_f64());
        Ok(())
    }

    /// The median rate, per second.
    fn rate(&self) -> f64 {
        let mut rates = self.rates.clone();
        rates.sort_by(f64::total_cmp);
        rates[rates.len() / 2]
    }
}
