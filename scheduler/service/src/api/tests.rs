//! Tests of the HTTP API through its router, with a real database.

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Method, Request, StatusCode};
use cfq_proto::http::{ErrorCode, ErrorReply, SubmitReply, TaskDetail, TaskList};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tower::ServiceExt;

mod access;
mod feed_reset;
mod limits;
mod machines;
mod token_limits;

use super::*;
use crate::config::{LanConfig, SchedulerLimits};
use crate::testing::{MODEL, TestEnv, token_file};

const TOKEN: &str = "0123456789abcdef";

struct Service {
    router: Router,
    token_file: std::path::PathBuf,
    wakeup: FeedWakeup,
    metrics: Metrics,
    env: Option<TestEnv>,
    _folder: tempfile::TempDir,
    _stopper: cfq_link::stop::Stopper,
}

impl Service {
    async fn new() -> Self {
        let env = TestEnv::new().await;
        Self::over(env.store.clone(), Some(env))
    }

    fn over(store: Store, env: Option<TestEnv>) -> Self {
        Self::within(SchedulerLimits { feeds: 1, ..SchedulerLimits::default() }, store, env)
    }

    fn within(limits: SchedulerLimits, store: Store, env: Option<TestEnv>) -> Self {
        Self::reachable(None, limits, store, env)
    }

    fn reachable(join_info: Option<JoinInfo>, limits: SchedulerLimits, store: Store, env: Option<TestEnv>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let http = HttpConfig {
            bind: "127.0.0.1:0".parse().unwrap(),
            socket: None,
            socket_on_stdin: false,
            allow_plaintext: false,
            lan: join_info.as_ref().map(|info| LanConfig {
                certificate_file: "/unused".into(),
                key_file: "/unused".into(),
                authority_file: "/unused".into(),
                urls: info.urls.clone(),
                nats_port: info.nats_port,
            }),
            token_file: token_file(&folder),
            allowed_hosts: vec!["box.lan".into()],
        };
        let token = TokenFile::load(&http.token_file).unwrap();
        let mut defaults = Defaults::default();
        defaults.agents.alpha.model = Some(MODEL.parse().unwrap());
        defaults.agents.beta.model = Some(MODEL.parse().unwrap());
        let (stopper, stop) = cfq_link::stop::channel();
        let (wakeup, metrics) = (FeedWakeup::default(), Metrics::new().unwrap());
        let api = Api::new(
            store,
            Link::default(),
            wakeup.clone(),
            metrics.clone(),
            defaults,
            &http,
            token,
            &limits,
            RetentionConfig::default(),
            crate::ended_calls::channel().0,
            join_info,
            stop,
        );
        let token_file = http.token_file;
        Self {
            router: api.router(Router::new().route("/added", axum::routing::get(async || "added"))),
            token_file,
            wakeup,
            metrics,
            env,
            _folder: folder,
            _stopper: stopper,
        }
    }

    async fn send(&self, request: Request<Body>) -> (StatusCode, Vec<u8>) {
        let response = self.router.clone().oneshot(request).await.unwrap();
        let status = response.status();
        (status, to_bytes(response.into_body(), usize::MAX).await.unwrap().to_vec())
    }

    async fn get(&self, path: &str) -> (StatusCode, Vec<u8>) {
        self.send(request(Method::GET, path, &[], Body::empty())).await
    }

    async fn post(&self, path: &str, headers: &[(&str, &str)], body: &Value) -> (StatusCode, Vec<u8>) {
        self.send(request(Method::POST, path, headers, Body::from(body.to_string()))).await
    }
}

fn request(method: Method, path: &str, headers: &[(&str, &str)], body: Body) -> Request<Body> {
    let mut all = vec![("host", "127.0.0.1:7710"), ("authorization", "Bearer 0123456789abcdef")];
    all.retain(|(name, _)| !headers.iter().any(|(other, _)| other == name));
    all.extend(headers);
    let mut request = Request::builder().method(method).uri(path);
    for (name, value) in all.into_iter().filter(|(_, value)| !value.is_empty()) {
        request = request.header(name, value);
    }
    request.body(body).unwrap()
}

fn read<T: DeserializeOwned>(bytes: &[u8]) -> T {
    serde_json::from_slice(bytes).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(bytes)))
}

fn task() -> Value {
    json!({"description": "add a function", "repo": "/home/me/project"})
}

#[tokio::test]
async fn idempotency_key_creates_one_task() {
    let service = Service::new().await;
    let key = [("idempotency-key", "k1")];
    let (status, body) = service.post("/api/v1/tasks", &key, &task()).await;
    assert_eq!(status, StatusCode::CREATED);
    let first: SubmitReply = read(&body);
    assert!(first.created);
    let (status, body) = service.post("/api/v1/tasks", &key, &task()).await;
    let second: SubmitReply = read(&body);
    assert_eq!((status, second.created, second.id), (StatusCode::OK, false, first.id));
    let mut other = task();
    other["description"] = "another".into();
    let (status, body) = service.post("/api/v1/tasks", &key, &other).await;
    assert_eq!((status, read::<ErrorReply>(&body).error.code), (StatusCode::CONFLICT, ErrorCode::KeyReused));
    let (_, body) = service.get(&format!("/api/v1/tasks/{}", first.number)).await;
    let shown: TaskDetail = read(&body);
    assert_eq!(shown.spec.agents.alpha.model, Some(MODEL.parse().unwrap()));
    assert_eq!((shown.spec.threshold, shown.spec.max_iterations), (Some(85.0), Some(5)));
    let (_, body) = service.get("/api/v1/tasks?state=ready&limit=5").await;
    assert_eq!(read::<TaskList>(&body).tasks.len(), 1);
}

#[tokio::test]
async fn validation_error_names_the_field() {
    let service = Service::new().await;
    let cases: Vec<(&str, Value)> = vec![
        ("description", json!({"description": "  ", "repo": "/r"})),
        ("description", json!({"repo": "/r"})),
        ("repo", json!({"description": "x", "repo": "project"})),
        ("repo", json!({"description": "x"})),
        ("colour", json!({"description": "x", "repo": "/r", "colour": 1})),
        ("threshold", json!({"description": "x", "repo": "/r", "threshold": 101})),
        ("threshold", json!({"description": "x", "repo": "/r", "threshold": "high"})),
        ("max_iterations", json!({"description": "x", "repo": "/r", "max_iterations": 0})),
        ("max_iterations", json!({"description": "x", "repo": "/r", "max_iterations": 1001})),
        ("timeout_minutes", json!({"description": "x", "repo": "/r", "timeout_minutes": 0})),
        ("priority", json!({"description": "x", "repo": "/r", "priority": "P9"})),
        ("context_files", json!({"description": "x", "repo": "/r", "context_files": ["../../etc/passwd"]})),
        ("agents.alpha.model", json!({"description": "x", "repo": "/r", "agents": {"alpha": {"model": "gpt"}}})),
        ("agents.beta.tone", json!({"description": "x", "repo": "/r", "agents": {"beta": {"tone": "kind"}}})),
        ("agents.beta.temperature", json!({"description": "x", "repo": "/r", "agents": {"beta": {"temperature": 9}}})),
        ("base", json!({"description": "x", "repo": "/r", "base": "--upload-pack=x"})),
        ("base", json!({"description": "x", "repo": "/r", "base": "main"})),
        ("base", json!({"description": "x", "repo": "/r", "base": "1234abc"})),
        ("base", json!({"description": "x", "repo": "/r", "base": "g".repeat(40)})),
        ("description", json!({"description": "x\u{0}", "repo": "/r"})),
        ("Idempotency-Key", json!(null)),
    ];
    for (field, body) in cases {
        let long = "k".repeat(201);
        let headers = if field == "Idempotency-Key" { vec![("idempotency-key", long.as_str())] } else { vec![] };
        let (status, answer) = service.post("/api/v1/tasks", &headers, &body).await;
        let error = read::<ErrorReply>(&answer).error;
        assert_eq!((status, error.code), (StatusCode::BAD_REQUEST, ErrorCode::Invalid), "{body}: {error:?}");
        assert_eq!(error.field.as_deref(), Some(field), "{body}: {error:?}");
        assert!(error.message.contains(field), "{error:?}");
    }
    let (status, answer) = service.send(request(Method::POST, "/api/v1/tasks", &[], Body::from("{"))).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert!(read::<ErrorReply>(&answer).error.message.contains("not valid JSON"));
    let large = json!({"description": "x".repeat(2_000_000), "repo": "/r"});
    let (status, answer) = service.post("/api/v1/tasks", &[], &large).await;
    assert_eq!((status, read::<ErrorReply>(&answer).error.code), (StatusCode::PAYLOAD_TOO_LARGE, ErrorCode::TooLarge));
    assert_eq!(read::<TaskList>(&service.get("/api/v1/tasks").await.1).tasks, vec![]);
}

#[tokio::test]
async fn wrong_token_host_or_origin_is_refused() {
    let service = Service::new().await;
    let status = async |headers: &[(&str, &str)], path: &str| {
        let (status, body) = service.send(request(Method::GET, path, headers, Body::empty())).await;
        if !status.is_success() {
            let error = read::<ErrorReply>(&body).error;
            assert!(!error.message.contains(TOKEN), "{error:?}");
        }
        status
    };
    let tasks = "/api/v1/tasks";
    assert_eq!(status(&[], tasks).await, StatusCode::OK);
    assert_eq!(status(&[("authorization", "")], tasks).await, StatusCode::UNAUTHORIZED);
    assert_eq!(status(&[("authorization", "Bearer wrong")], tasks).await, StatusCode::UNAUTHORIZED);
    assert_eq!(status(&[("authorization", "")], "/metrics").await, StatusCode::UNAUTHORIZED);
    assert_eq!(status(&[("authorization", "")], "/api/v1/nothing").await, StatusCode::UNAUTHORIZED);
    assert_eq!(status(&[("authorization", "")], "/healthz").await, StatusCode::OK);
    assert_eq!(status(&[("host", "evil.example")], tasks).await, StatusCode::FORBIDDEN);
    assert_eq!(status(&[("host", "")], tasks).await, StatusCode::FORBIDDEN);
    assert_eq!(status(&[("host", "box.lan:7710")], tasks).await, StatusCode::OK);
    assert_eq!(status(&[("host", "[::1]:7710")], tasks).await, StatusCode::OK);
    assert_eq!(status(&[("origin", "https://evil.example")], tasks).await, StatusCode::FORBIDDEN);
    assert_eq!(status(&[("origin", "null")], tasks).await, StatusCode::FORBIDDEN);
    assert_eq!(status(&[("origin", "http://127.0.0.1:7710")], tasks).await, StatusCode::OK);
}

#[tokio::test]
async fn unknown_and_illegal_requests_return_an_error_message() {
    let service = Service::new().await;
    for (method, path, expected) in [
        (Method::GET, "/api/v1/tasks/t99", StatusCode::NOT_FOUND),
        (Method::GET, "/api/v1/tasks/x", StatusCode::BAD_REQUEST),
        (Method::GET, "/api/v1/tasks/t99/feed", StatusCode::NOT_FOUND),
        (Method::GET, "/api/v1/prs/7", StatusCode::NOT_FOUND),
        (Method::GET, "/api/v1/tasks?state=odd", StatusCode::BAD_REQUEST),
        (Method::GET, "/api/v2/tasks", StatusCode::NOT_FOUND),
        (Method::DELETE, "/api/v1/tasks", StatusCode::METHOD_NOT_ALLOWED),
        (Method::GET, "/readyz", StatusCode::SERVICE_UNAVAILABLE),
    ] {
        let (status, body) = service.send(request(method, path, &[], Body::empty())).await;
        assert_eq!(status, expected, "{path}");
        assert!(!read::<ErrorReply>(&body).error.message.is_empty());
    }
    let (_, body) = service.post("/api/v1/tasks", &[], &task()).await;
    let submitted: SubmitReply = read(&body);
    let resolve = json!({"action": {"type": "abort"}});
    let path = format!("/api/v1/tasks/{}/resolve", submitted.number);
    let (status, body) = service.post(&path, &[], &resolve).await;
    assert_eq!((status, read::<ErrorReply>(&body).error.code), (StatusCode::CONFLICT, ErrorCode::Conflict));
    let (status, body) = service.post(&path, &[], &json!({"action": {"type": "dance"}})).await;
    assert_eq!((status, read::<ErrorReply>(&body).error.code), (StatusCode::BAD_REQUEST, ErrorCode::Invalid));
    let name = "ftp:den/m";
    let mut unknown_source = task();
    unknown_source["agents"] = json!({"alpha": {}, "beta": {"model": name}});
    let (status, body) = service.post("/api/v1/tasks", &[], &unknown_source).await;
    let text = String::from_utf8_lossy(&body).into_owned();
    assert!(status == StatusCode::BAD_REQUEST && text.contains("agents.beta.model"), "{text}");
    let switch = json!({"action": {"type": "switch_llm", "target_agent": "alpha", "suggested_model": name}});
    let (status, body) = service.post(&path, &[], &switch).await;
    let text = String::from_utf8_lossy(&body).into_owned();
    assert!(status == StatusCode::BAD_REQUEST && text.contains("is not a model"), "{text}");
    let without_model = json!({"action": {"type": "switch_llm", "target_agent": "alpha"}});
    let (status, body) = service.post(&path, &[], &without_model).await;
    let text = String::from_utf8_lossy(&body).into_owned();
    assert!(status == StatusCode::BAD_REQUEST && text.contains("switch_llm needs another model"), "{text}");
    let cancel = format!("/api/v1/tasks/{}/cancel", submitted.number);
    for _ in 0..2 {
        assert_eq!(service.post(&cancel, &[], &json!({"reason": "no"})).await.0, StatusCode::OK);
    }
    let (status, _) = service.get("/metrics").await;
    assert_eq!(status, StatusCode::OK);
}

#[tokio::test]
async fn feed_resumes_after_last_event_id_and_excess_feed_is_refused() {
    use http_body_util::BodyExt;
    let service = Service::new().await;
    let (_, body) = service.post("/api/v1/tasks", &[], &task()).await;
    let submitted: SubmitReply = read(&body);
    service.post(&format!("/api/v1/tasks/{}/cancel", submitted.number), &[], &json!({})).await;
    let feed = format!("/api/v1/tasks/{}/feed", submitted.number);
    let open = |after: &'static str| {
        service.router.clone().oneshot(request(Method::GET, &feed, &[("last-event-id", after)], Body::empty()))
    };
    let response = open("1").await.unwrap();
    let mut stream = response.into_body();
    let frame =
        tokio::time::timeout(std::time::Duration::from_secs(5), stream.frame()).await.unwrap().unwrap().unwrap();
    let text = String::from_utf8(frame.into_data().unwrap().to_vec()).unwrap();
    assert!(text.contains("event: event\n") && text.contains("id: 2-") && text.contains("cancelled"), "{text}");
    let refused = open("0").await.unwrap();
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS, "the only permit is taken");
    assert!(refused.headers().contains_key("retry-after"));
    drop(stream);
    assert_eq!(open("x").await.unwrap().status(), StatusCode::BAD_REQUEST);
    let all = service.router.clone().oneshot(request(Method::GET, "/api/v1/events", &[], Body::empty())).await.unwrap();
    let mut stream = all.into_body();
    let frame =
        tokio::time::timeout(std::time::Duration::from_secs(5), stream.frame()).await.unwrap().unwrap().unwrap();
    let text = String::from_utf8(frame.into_data().unwrap().to_vec()).unwrap();
    assert!(text.contains("task_submitted"), "{text}");
}

#[tokio::test]
async fn tokens_are_forwarded_without_database_queries() {
    use cfq_proto::ids::{JobId, LeaseId};
    use cfq_proto::messages::{JobFence, TokenFrame};
    use http_body_util::BodyExt;
    const FRAMES: u64 = 400;
    let service = Service::new().await;
    let (_, body) = service.post("/api/v1/tasks", &[], &task()).await;
    let submitted: SubmitReply = read(&body);
    let feed = format!("/api/v1/tasks/{}/feed", submitted.number);
    let open = service.router.clone().oneshot(request(Method::GET, &feed, &[], Body::empty()));
    let mut stream = open.await.unwrap().into_body();
    let mut next = async || {
        let frame = tokio::time::timeout(std::time::Duration::from_secs(20), stream.frame()).await.unwrap();
        String::from_utf8(frame.unwrap().unwrap().into_data().unwrap().to_vec()).unwrap()
    };
    assert!(next().await.contains("task_submitted"));
    let began = std::time::Instant::now();
    let fence = JobFence { job: JobId::fresh(), attempt: 1, lease: LeaseId::fresh() };
    for offset in 0..FRAMES {
        let role = cfq_proto::job::JobRole::Alpha;
        service.wakeup.send_tokens(TokenFrame { task: submitted.id, fence, role, offset, text: "x".into() });
    }
    for offset in 0..FRAMES {
        let frame = next().await;
        assert!(frame.contains("event: tokens") && frame.contains(&format!("\"offset\":{offset},")), "{frame}");
    }
    // The feed queries the database twice at the start and then twice per second; the rest is tolerance.
    let polls = service.metrics.event_feed_polls.get();
    let allowed = 3 + 2 * began.elapsed().as_secs() + 2;
    assert!(polls <= allowed && allowed < FRAMES, "{polls} polls for {FRAMES} frames");
    // An event is still delivered by polling, without a wake-up.
    service.post(&format!("/api/v1/tasks/{}/cancel", submitted.number), &[], &json!({})).await;
    assert!(next().await.contains("cancelled"));
}

/// A feed that is opened while a job runs sends the job's text so far, and no part of it twice.
#[tokio::test]
async fn feed_opened_during_a_job_begins_with_its_text() {
    use cfq_proto::ids::{JobId, LeaseId};
    use cfq_proto::messages::{JobFence, TokenFrame};
    use http_body_util::BodyExt;
    let service = Service::new().await;
    let (_, body) = service.post("/api/v1/tasks", &[], &task()).await;
    let submitted: SubmitReply = read(&body);
    let earlier = JobFence { job: JobId::fresh(), attempt: 1, lease: LeaseId::fresh() };
    let fence = JobFence { job: JobId::fresh(), attempt: 1, lease: LeaseId::fresh() };
    let send_of = |fence, offset, text: &str| {
        let role = cfq_proto::job::JobRole::Alpha;
        service.wakeup.send_tokens(TokenFrame { task: submitted.id, fence, role, offset, text: text.into() });
    };
    let send = |offset, text: &str| send_of(fence, offset, text);
    send_of(earlier, 0, "early");
    send(0, "ab");
    send(2, "cd");
    let feed = format!("/api/v1/tasks/{}/feed", submitted.number);
    let open = async || {
        let open = service.router.clone().oneshot(request(Method::GET, &feed, &[], Body::empty()));
        open.await.unwrap().into_body()
    };
    async fn next(stream: &mut Body) -> String {
        let frame = tokio::time::timeout(std::time::Duration::from_secs(20), stream.frame()).await.unwrap();
        String::from_utf8(frame.unwrap().unwrap().into_data().unwrap().to_vec()).unwrap()
    }
    let store = &service.env.as_ref().unwrap().store;
    let (job, lease) = (fence.job, fence.lease);
    store
        .raw(&format!(
            "insert into jobs (id, task, seq, role, n, model, priority, prompt, prompt_bytes, prefix, max_tokens, state,
                               attempt, lease, lease_expires, node, node_boot, placed_at, accepted_at)
             values ('{job}', '{}', 0, 'alpha', 0, 'path:/m', 3, '{{}}', 1, '[]', 1, 'running', 1, '{lease}',
                     now(), 'n1', gen_random_uuid(), now(), now())",
            submitted.id
        ))
        .await;
    let mut stream = open().await;
    assert!(next(&mut stream).await.contains("task_submitted"));
    let text = next(&mut stream).await;
    assert!(text.contains(r#""offset":0,"text":"abcd""#), "{text}");
    send_of(earlier, 5, "late");
    send(2, "cd");
    send(3, "def");
    send(6, "g");
    for new in [r#""offset":4,"text":"ef""#, r#""offset":6,"text":"g""#] {
        let text = next(&mut stream).await;
        assert!(text.contains(new), "{text}");
    }
    let ended = "state = 'done', lease = null, lease_expires = null, node_boot = null";
    store.raw(&format!("update jobs set {ended} where id = '{job}'")).await;
    drop(stream);
    let mut later = open().await;
    assert!(next(&mut later).await.contains("task_submitted"));
    service.post(&format!("/api/v1/tasks/{}/cancel", submitted.number), &[], &json!({})).await;
    let after = next(&mut later).await;
    assert!(after.contains("cancelled"), "the job has ended: {after}");
}

#[tokio::test]
async fn past_deadline_is_refused_unless_the_key_exists() {
    let service = Service::new().await;
    let key = [("idempotency-key", "k1")];
    let mut due = task();
    due["deadline"] = 4_000_000_000_i64.into();
    assert_eq!(service.post("/api/v1/tasks", &key, &due).await.0, StatusCode::CREATED);
    service.env.as_ref().unwrap().store.raw("update tasks set deadline = now() - interval '1 hour'").await;
    let (status, body) = service.post("/api/v1/tasks", &key, &due).await;
    assert_eq!(
        (status, read::<SubmitReply>(&body).created),
        (StatusCode::OK, false),
        "the first reply may be lost, but the task exists"
    );
    due["deadline"] = 1_000_000_000.into();
    let (status, body) = service.post("/api/v1/tasks", &[], &due).await;
    let error = read::<ErrorReply>(&body).error;
    assert_eq!((status, error.field.as_deref()), (StatusCode::BAD_REQUEST, Some("deadline")), "{error:?}");
    assert_eq!(read::<TaskList>(&service.get("/api/v1/tasks").await.1).tasks.len(), 1);
}

#[tokio::test]
async fn database_outage_returns_busy_within_five_seconds() {
    let config = crate::config::DatabaseConfig {
        host: "/nonexistent".into(),
        port: 5432,
        user: "cfq".into(),
        database: "cfq".into(),
        password_file: None,
    };
    let store = Store::new(&config, Default::default(), SchedulerLimits::default()).unwrap();
    let service = Service::over(store, None);
    let began = std::time::Instant::now();
    let (status, body) = service.post("/api/v1/tasks", &[], &task()).await;
    let error = read::<ErrorReply>(&body).error;
    assert_eq!((status, error.code, error.retry_after), (StatusCode::SERVICE_UNAVAILABLE, ErrorCode::Busy, Some(2)));
    assert!(began.elapsed() < std::time::Duration::from_secs(5));
    assert_eq!(service.get("/healthz").await.0, StatusCode::OK);
}
