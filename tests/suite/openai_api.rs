//! The OpenAI-compatible API: a model call of any client of that protocol is a job of the queue.

use std::time::Duration;

use cfq_link::Session;
use cfq_proto::http::JobFilter;
use cfq_proto::ids::{LeaseId, NodeId, TaskId};
use cfq_proto::job::{JobRole, JobState};
use cfq_proto::messages::{JobFence, TokenFrame};
use cfq_proto::subject::{self, Identity};
use cfq_proto::timing::Timing;
use cfq_tests::cluster::{Cluster, Options, TOKEN, WAIT_LIMIT, cfq};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{End, Gate, Reply};
use cfq_tests::small_model::SMALL_MODEL;
use cfq_tests::wait;
use reqwest::{RequestBuilder, Response, StatusCode};
use serde_json::{Value, json};

const ALPHA: &str = "openai:scripted/alpha";

fn post(cluster: &Cluster, body: &Value) -> RequestBuilder {
    let http = cfq_link::outbound::api_client().unwrap();
    http.post(format!("{}/v1/chat/completions", cluster.client.url())).bearer_auth(TOKEN).json(body)
}

fn chat(model: &str, text: &str, more: Value) -> Value {
    let mut body = json!({ "model": model, "messages": [{ "role": "user", "content": text }] });
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

async fn whole(cluster: &Cluster, body: &Value) -> Value {
    let response = post(cluster, body).send().await.unwrap();
    let status = response.status();
    let reply: Value = response.json().await.unwrap();
    assert_eq!(status, StatusCode::OK, "{reply}");
    reply
}

/// The error of a request that fails, with its status.
async fn error(request: RequestBuilder) -> (StatusCode, Value) {
    let response = request.send().await.unwrap();
    let status = response.status();
    let mut reply: Value = response.json().await.unwrap();
    let error = reply["error"].take();
    for (field, is_text) in [("message", true), ("type", true), ("param", false), ("code", false)] {
        let value = error.get(field).unwrap_or_else(|| panic!("{error} has no {field}"));
        assert!(value.is_string() || (!is_text && value.is_null()), "{field} of {error}");
    }
    (status, error)
}

/// A stream of events that is read step by step.
struct Events {
    response: Response,
    received: String,
}

impl Events {
    async fn begin(cluster: &Cluster, body: &Value) -> Self {
        let response = post(cluster, body).send().await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        Self { response, received: String::new() }
    }

    /// Data of the next event; `None` at the end of the stream.
    async fn next(&mut self) -> Option<String> {
        loop {
            if let Some((event, rest)) = self.received.split_once("\n\n") {
                let data = event.strip_prefix("data: ").map(str::to_owned);
                self.received = rest.to_owned();
                match data {
                    Some(data) => return Some(data),
                    None => continue,
                }
            }
            let chunk = tokio::time::timeout(WAIT_LIMIT, self.response.chunk()).await.expect("a chunk").unwrap()?;
            self.received.push_str(std::str::from_utf8(&chunk).unwrap());
        }
    }

    /// Reads until exactly this text has been received.
    async fn until_text(&mut self, wanted: &str) {
        let mut text = String::new();
        while text != wanted {
            assert!(wanted.starts_with(&text), "{text:?}");
            let chunk: Value = serde_json::from_str(&self.next().await.expect("more text")).unwrap();
            text.push_str(chunk["choices"][0]["delta"]["content"].as_str().unwrap_or_default());
        }
    }

    /// The text of the rest of the stream, the reason of its end, the usage, and whether `[DONE]` was received.
    async fn rest(mut self) -> (String, Value, Value, bool) {
        let (mut text, mut finish, mut usage) = (String::new(), Value::Null, Value::Null);
        while let Some(data) = self.next().await {
            if data == "[DONE]" {
                assert_eq!(self.next().await, None);
                return (text, finish, usage, true);
            }
            let chunk: Value = serde_json::from_str(&data).unwrap();
            assert!(chunk.get("error").is_none(), "{chunk}");
            assert_eq!(chunk["object"], "chat.completion.chunk");
            if let Some(choice) = chunk["choices"].get(0) {
                text.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
                finish = choice["finish_reason"].clone();
            } else {
                usage = chunk["usage"].clone();
            }
        }
        (text, finish, usage, false)
    }
}

/// Waits until nothing of any call is left in the database.
async fn wait_until_no_call_is_left(cluster: &Cluster) {
    wait::until("the calls to be deleted", WAIT_LIMIT, || async {
        let mut connection = cluster.database.connect().await;
        let left: i64 = sqlx::query_scalar(
            "select (select count(*) from tasks where state = 'call') + (select count(*) from jobs where role = 'client')
                + (select count(*) from blobs)",
        )
        .fetch_one(&mut connection)
        .await
        .unwrap();
        if left == 0 { Ok(()) } else { Err(format!("{left} rows")) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn client_gets_the_text_of_the_model_whole_or_as_a_stream() {
    let cluster = Cluster::start().await;
    let answer = "Grüße: an answer of several chunks.";
    cluster.models.script("alpha", vec![Reply::Text(answer.into()), Reply::Truncated(answer.into())]);

    let parameters = json!({ "temperature": 0.5, "seed": 7, "max_tokens": 50, "top_p": 0.9, "stop": ["never"] });
    let reply = whole(&cluster, &chat(ALPHA, "Hello", parameters)).await;
    assert_eq!((&reply["object"], &reply["model"]), (&json!("chat.completion"), &json!(ALPHA)));
    let message = json!({ "role": "assistant", "content": answer, "refusal": null, "annotations": [] });
    assert_eq!(reply["choices"][0]["message"], message);
    assert_eq!(reply["choices"][0]["finish_reason"], "stop");
    let usage = &reply["usage"];
    assert_eq!(
        usage["total_tokens"].as_u64(),
        Some(usage["prompt_tokens"].as_u64().unwrap() + usage["completion_tokens"].as_u64().unwrap())
    );
    let sent = cluster.models.requests().pop().unwrap();
    assert_eq!(sent["messages"], json!([{ "role": "user", "content": "Hello" }]));
    assert_eq!((&sent["seed"], &sent["max_tokens"], &sent["temperature"]), (&json!(7), &json!(50), &json!(0.5)));

    // The same call as a stream, with the model's other name.
    let options = json!({ "stream": true, "stream_options": { "include_usage": true } });
    let events = Events::begin(&cluster, &chat("alpha", "Hello", options)).await;
    assert!(events.response.headers().contains_key("x-cfq-job"));
    let (text, finish, streamed_usage, done) = events.rest().await;
    assert_eq!((text.as_str(), finish, done), (answer, json!("stop"), true));
    assert_eq!(streamed_usage["completion_tokens"], usage["completion_tokens"]);

    let cut = Events::begin(&cluster, &chat(ALPHA, "More", json!({ "stream": true }))).await;
    assert_eq!(cut.rest().await, (answer.to_owned(), json!("length"), Value::Null, true));
    wait_until_no_call_is_left(&cluster).await;
    cluster.finish().await;
}

/// A node may send token frames of any attempt, but without the lease of the running one they reach no client. Without the
/// check, the frame of a later attempt would replace the model's text.
#[tokio::test(flavor = "multi_thread")]
async fn forged_token_frames_do_not_reach_the_client() {
    let cluster = Cluster::start().await;
    let gate = Gate::closed();
    cluster.models.script("alpha", vec![Reply::Gated(String::new(), "the answer".into(), gate.clone())]);
    let events = Events::begin(&cluster, &chat(ALPHA, "x", json!({ "stream": true }))).await;
    let job = wait::until("the call to run", WAIT_LIMIT, || async {
        let jobs = cluster.client.jobs(&JobFilter { limit: 1, ..JobFilter::default() }).await.unwrap().jobs;
        jobs.first().filter(|job| job.state == JobState::Running).map(|job| job.id).ok_or_else(|| format!("{jobs:?}"))
    })
    .await;
    let mut connection = cluster.database.connect().await;
    let task: String = sqlx::query_scalar("select task::text from jobs where id::text = $1")
        .bind(job.to_string())
        .fetch_one(&mut connection)
        .await
        .unwrap();
    let task: TaskId = task.parse().unwrap();
    let hostile = Identity::Node(NodeId::new("n2").unwrap());
    let hostile = Session::connect(&cluster.nats.config("second_node"), hostile, &Timing::default()).await.unwrap();
    let subject = subject::tokens(&NodeId::new("n2").unwrap(), job);
    for attempt in [1, 2, i32::MAX] {
        let fence = JobFence { job, attempt, lease: LeaseId::fresh() };
        let (role, text) = (JobRole::Client, "forged".to_owned());
        let frame = TokenFrame { task, fence, role, offset: 0, text };
        hostile.publish(&subject, &frame).await.unwrap();
    }
    hostile.flush().await.unwrap();
    gate.open();
    let (text, ..) = events.rest().await;
    assert_eq!(text, "the answer");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn call_is_a_job_but_no_task_and_ends_with_its_client() {
    let cluster = Cluster::start().await;
    let gate = Gate::closed();
    cluster.models.script("alpha", vec![Reply::Gated("first".into(), "rest".into(), gate)]);
    let mut events = Events::begin(&cluster, &chat(ALPHA, "x", json!({ "stream": true }))).await;
    events.until_text("first").await;

    let jobs = cluster.client.jobs(&JobFilter::default()).await.unwrap().jobs;
    assert_eq!(jobs.len(), 1, "{jobs:?}");
    assert_eq!(
        (jobs[0].role, jobs[0].state, jobs[0].task.to_string()),
        (JobRole::Client, JobState::Running, "c1".into())
    );
    let repo = UserRepo::with_uncommitted_changes();
    let home = tempfile::tempdir().unwrap();
    let output = cfq(&cluster, home.path(), &["jobs"]);
    let listed = String::from_utf8(output.stdout).unwrap();
    assert!(listed.contains("c1") && listed.contains("client"), "{listed}");
    let explained = cfq(&cluster, home.path(), &["explain", &jobs[0].id.to_string()]);
    assert!(explained.status.success(), "{explained:?}");
    let no_tasks = String::from_utf8(cfq(&cluster, home.path(), &["ls"]).stdout).unwrap();
    assert!(!no_tasks.contains("c1"), "{no_tasks}");
    assert!(cluster.client.status().await.unwrap().tasks.is_empty());
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let number = cluster.client.task(task).await.unwrap().summary.number;
    assert_eq!(number.to_string(), "t1", "the call took no number");
    cluster.client.cancel(task, "").await.unwrap();

    // The clients hang up, one during a stream and one before any text: the model stops, and nothing is left.
    drop(events);
    cluster.models.script("beta", vec![Reply::Hang]);
    let waiting = post(&cluster, &chat("openai:scripted/beta", "y", json!({}))).timeout(Duration::from_secs(3));
    assert!(waiting.send().await.is_err_and(|error| error.is_timeout()));
    // A user ends a call whose client waits.
    let waiting = tokio::spawn(error(post(&cluster, &chat("openai:scripted/beta", "z", json!({})))));
    let call = wait::until("a call", WAIT_LIMIT, || async {
        let jobs = cluster.client.jobs(&JobFilter::default()).await.unwrap().jobs;
        let running = jobs.iter().find(|job| job.state == JobState::Running && job.task.to_string() == "c3");
        running.map(|job| job.task.to_string()).ok_or(format!("{jobs:?}"))
    })
    .await;
    for command in ["explain", "cancel"] {
        let output = cfq(&cluster, home.path(), &[command, &call]);
        assert!(output.status.success(), "{command}: {output:?}");
    }
    assert_eq!(waiting.await.unwrap().0, StatusCode::CONFLICT);
    let refused = cfq(&cluster, home.path(), &["show", &call]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("calls of API clients"), "{refused:?}");
    wait::until("the model server to see the end", WAIT_LIMIT, || async {
        let calls = cluster.models.all_calls();
        let ended = |text: &str| {
            calls.iter().any(|call| call.messages[0]["content"] == text && call.end == Some(End::Disconnected))
        };
        if ended("x") && ended("y") && ended("z") { Ok(()) } else { Err(format!("{calls:?}")) }
    })
    .await;
    wait_until_no_call_is_left(&cluster).await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn model_calls_functions_of_the_client() {
    let cluster = Cluster::start().await;
    let call = "Let me look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Bonn\"}}\n</tool_call>";
    cluster.models.script("alpha", vec![Reply::Text(call.into()), Reply::Text("It is warm.".into())]);
    let parameters = json!({ "type": "object", "properties": { "city": { "type": "string" } } });
    let tools = json!([{ "type": "function", "function": { "name": "weather", "parameters": parameters } }]);
    let mut body = chat(ALPHA, "Is it warm in Bonn?", json!({ "tools": tools }));
    let reply = whole(&cluster, &body).await;
    let choice = &reply["choices"][0];
    assert_eq!(
        (&choice["finish_reason"], &choice["message"]["content"]),
        (&json!("tool_calls"), &json!("Let me look."))
    );
    let made = choice["message"]["tool_calls"].clone();
    assert_eq!(made[0]["function"], json!({ "name": "weather", "arguments": "{\"city\":\"Bonn\"}" }));

    // A stream shows the text, but no part of the notation of the call.
    body["stream"] = json!(true);
    let mut events = Events::begin(&cluster, &body).await;
    let (mut text, mut streamed) = (String::new(), Value::Null);
    while let Some(data) = events.next().await.filter(|data| data != "[DONE]") {
        let chunk: Value = serde_json::from_str(&data).unwrap();
        let choice = &chunk["choices"][0];
        text.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
        if choice["delta"]["tool_calls"].is_array() {
            streamed = choice["delta"]["tool_calls"][0].clone();
        }
        if !choice["finish_reason"].is_null() {
            assert_eq!(choice["finish_reason"], "tool_calls");
        }
    }
    assert_eq!((text.as_str(), &streamed["index"]), ("Let me look.", &json!(0)));
    assert_eq!(streamed["function"], made[0]["function"]);

    // The client answers with the result.
    body["stream"] = json!(false);
    let messages = body["messages"].as_array_mut().unwrap();
    messages.push(json!({ "role": "assistant", "content": "Let me look.", "tool_calls": made }));
    messages.push(json!({ "role": "tool", "tool_call_id": made[0]["id"], "content": "25 degrees" }));
    let answer = whole(&cluster, &body).await;
    assert_eq!(answer["choices"][0]["message"]["content"], "It is warm.");
    let sent = cluster.models.requests().pop().unwrap();
    let roles: Vec<&str> = sent["messages"].as_array().unwrap().iter().map(|m| m["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["system", "user", "assistant", "user"]);
    assert!(sent["messages"][0]["content"].as_str().unwrap().contains("\"name\":\"weather\""), "{sent}");
    assert!(sent["messages"][3]["content"].as_str().unwrap().contains("25 degrees"), "{sent}");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn refusal_has_the_form_of_the_protocol_and_says_what_to_do() {
    let cluster = Cluster::start().await;
    let refused = "the prompt is not nice";
    cluster.models.script("alpha", vec![Reply::Status(400, refused.into())]);
    let http = cfq_link::outbound::api_client().unwrap();
    let url = |path: &str| format!("{}{path}", cluster.client.url());
    let bearer = |request: RequestBuilder| request.bearer_auth(TOKEN);

    let refusals = [
        (post(&cluster, &chat("gpt-4o", "x", json!({}))), 404, "GET /v1/models lists all"),
        (post(&cluster, &chat(ALPHA, "x", json!({ "n": 3 }))), 400, "send one request for each choice"),
        (post(&cluster, &chat(ALPHA, "x", json!({ "temperature": "hot" }))), 400, "temperature"),
        (post(&cluster, &json!({ "model": ALPHA })), 400, "messages"),
        (post(&cluster, &chat(ALPHA, "x", json!({}))), 400, refused),
        (post(&cluster, &chat(ALPHA, "x", json!({ "stream": true }))), 400, refused),
        (bearer(http.post(url("/v1/chat/completions")).body("{")), 400, "not valid JSON"),
        (post(&cluster, &json!([])), 400, "a JSON object"),
        (post(&cluster, &chat(ALPHA, "x", json!({ "stop": 7 }))), 400, "stop: must be text or a list of texts"),
        (bearer(http.post(url("/v1/embeddings")).json(&json!({}))), 404, "embeddings are not supported"),
        (bearer(http.post(url("/v1/completions")).json(&json!({ "model": ALPHA }))), 400, "prompt"),
        (bearer(http.post(url("/v1/v1/chat/completions")).json(&json!({}))), 404, "only once"),
        (bearer(http.post(url("/chat/completions")).json(&json!({}))), 404, "must end with /v1"),
        (bearer(http.get(url("/v1/models/%ff"))), 400, "model"),
        (bearer(http.get(url("/v1"))), 404, "unknown path /v1"),
        (bearer(http.get(url("/v1/models/gpt-4o"))), 404, "gpt-4o"),
        (bearer(http.get(url("/v1/other"))), 404, "unknown path /v1/other"),
        (bearer(http.get(url("/v1/chat/completions"))), 405, "does not support GET"),
        (http.get(url("/v1/models")), 401, "missing bearer token"),
        (http.get(url("/v1/models")).bearer_auth("wrong-token-0123456789"), 401, "wrong bearer token"),
        (bearer(http.get(url("/v1/models"))).header("Origin", "http://example.org"), 403, "example.org"),
    ];
    for (request, status, words) in refusals {
        let shown = format!("{request:?}");
        let (got, error) = error(request).await;
        assert_eq!(got.as_u16(), status, "{shown}: {error}");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(words) && !message.contains("expected u") && !message.contains("f32"), "{error}");
    }
    let listed: Value = bearer(http.get(url("/v1/models"))).send().await.unwrap().json().await.unwrap();
    let names: Vec<&str> =
        listed["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!(names[..2], ["alpha", "beta"]);
    assert!(names.contains(&ALPHA), "{names:?}");
    let one: Value = bearer(http.get(url(&format!("/v1/models/{ALPHA}")))).send().await.unwrap().json().await.unwrap();
    assert_eq!((&one["id"], &one["object"]), (&json!(ALPHA), &json!("model")));
    wait_until_no_call_is_left(&cluster).await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stream_continues_when_the_node_is_killed() {
    let cluster = Cluster::start().await;
    let gate = Gate::closed();
    cluster.models.script("alpha", vec![Reply::Gated("The beginning, ".into(), "and the end.".into(), gate.clone())]);
    let mut events = Events::begin(&cluster, &chat(ALPHA, "x", json!({ "stream": true }))).await;
    events.until_text("The beginning, ").await;
    cluster.kill9("node");
    cluster.start_service("node");
    gate.open();
    assert_eq!(events.rest().await, ("and the end.".to_owned(), json!("stop"), Value::Null, true));
    assert_eq!(cluster.models.call_count("alpha"), 2, "the call was made again");
    wait_until_no_call_is_left(&cluster).await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn call_of_a_killed_scheduler_ends_and_leaves_nothing() {
    let cluster = Cluster::start().await;
    let gate = Gate::closed();
    cluster.models.script("alpha", vec![Reply::Gated("first".into(), "rest".into(), gate)]);
    let mut events = Events::begin(&cluster, &chat(ALPHA, "x", json!({ "stream": true }))).await;
    events.until_text("first").await;
    cluster.kill9("scheduler");
    let ended = tokio::time::timeout(WAIT_LIMIT, events.response.chunk()).await.unwrap();
    assert!(!matches!(ended, Ok(Some(_))), "the connection ended: {ended:?}");
    cluster.start_service("scheduler");
    wait_until_no_call_is_left(&cluster).await;
    wait::until("the model server to see the end", WAIT_LIMIT, || async {
        let calls = cluster.models.all_calls();
        if calls[0].end == Some(End::Disconnected) { Ok(()) } else { Err(format!("{calls:?}")) }
    })
    .await;
    assert_eq!(cluster.models.call_count("alpha"), 1, "nothing was generated for a client that has gone");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stopping_scheduler_tells_its_clients_and_a_long_call_is_not_ended_early() {
    let mut options = Options::default();
    // A call outlives this time several times below.
    options.timing.lease_ttl_ms = 1_000;
    (options.timing.lease_margin_ms, options.timing.heartbeat_ms) = (200, 200);
    let cluster = Cluster::start_with(options).await;
    let slow = "x".repeat(80);
    cluster.models.script("alpha", vec![Reply::Slow(slow.clone(), Duration::from_millis(800)), Reply::Hang]);
    let reply = whole(&cluster, &chat(ALPHA, "slow", json!({}))).await;
    assert_eq!(reply["choices"][0]["message"]["content"], json!(slow));

    let waiting = tokio::spawn(error(post(&cluster, &chat(ALPHA, "hangs", json!({})))));
    wait::until("a call", WAIT_LIMIT, || async {
        if cluster.models.all_calls().len() == 2 { Ok(()) } else { Err(String::new()) }
    })
    .await;
    assert!(cluster.stop("scheduler").await.success());
    let (status, error) = waiting.await.unwrap();
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{error}");
    // The stopped scheduler has deleted the call; no other one has run.
    wait_until_no_call_is_left(&cluster).await;
    cluster.start_service("scheduler");
    cluster.wait_until_ready().await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn small_model_answers_with_schema_seed_and_log_probabilities() {
    // On a busy machine, a large constraint takes longer than the time for acceptance of the other tests.
    let timing = Timing { job_step_timeout_ms: 60_000, retry_ceiling_ms: 120_000, ..Timing::default() };
    let options = Options { models: vec![SMALL_MODEL.parse().unwrap()], timing, ..Options::default() };
    let cluster = Cluster::start_with(options).await;
    let schema = json!({
        "type": "object", "properties": { "answer": { "type": "string", "maxLength": 20 }, "sure": { "type": "boolean" } },
        "required": ["answer", "sure"], "additionalProperties": false,
    });
    let format =
        json!({ "type": "json_schema", "json_schema": { "name": "answer", "strict": true, "schema": schema } });
    let body = chat(SMALL_MODEL, "Is water wet?", json!({ "response_format": format, "seed": 3, "max_tokens": 80 }));
    let reply = whole(&cluster, &body).await;
    let content = reply["choices"][0]["message"]["content"].as_str().unwrap();
    let answer: Value = serde_json::from_str(content).unwrap_or_else(|error| panic!("{error}: {content:?}"));
    assert!(answer["answer"].is_string() && answer["sure"].is_boolean(), "{answer}");

    let more = json!({ "seed": 5, "temperature": 0.8, "max_tokens": 12, "logprobs": true, "top_logprobs": 2 });
    let first = whole(&cluster, &chat(SMALL_MODEL, "Write a poem.", more.clone())).await;
    let second = whole(&cluster, &chat(SMALL_MODEL, "Write a poem.", more)).await;
    assert_eq!(first["choices"][0], second["choices"][0], "the seed decides");
    let tokens = first["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(tokens.len() as u64, first["usage"]["completion_tokens"].as_u64().unwrap());
    assert!(tokens.iter().all(|token| token["top_logprobs"].as_array().unwrap().len() == 2), "{tokens:?}");

    let streamed = json!({ "seed": 5, "temperature": 0.8, "max_tokens": 12, "stream": true });
    let events = Events::begin(&cluster, &chat(SMALL_MODEL, "Write a poem.", streamed)).await;
    let (text, finish, _, done) = events.rest().await;
    assert_eq!((json!(text), finish, done), (first["choices"][0]["message"]["content"].clone(), json!("length"), true));

    // A model of this size does not choose functions well, but it has to call one if that is required.
    let city = json!({ "type": "string", "enum": ["Bonn", "Rome"] });
    let parameters = json!({
        "type": "object", "properties": { "city": city }, "required": ["city"], "additionalProperties": false,
    });
    let tools = json!([{ "type": "function", "function": { "name": "weather", "parameters": parameters } }]);
    let required = json!({ "tools": tools, "tool_choice": "required", "max_tokens": 60 });
    let called = whole(&cluster, &chat(SMALL_MODEL, "Is it warm in Bonn?", required)).await;
    assert_eq!(called["choices"][0]["finish_reason"], "tool_calls", "{called}");
    let arguments = called["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"].as_str().unwrap();
    let arguments: Value = serde_json::from_str(arguments).unwrap();
    assert!(["Bonn", "Rome"].contains(&arguments["city"].as_str().unwrap()), "{arguments}");

    // A constraint that cannot be evaluated fails its own call only, at once.
    for (constraint, param) in [
        (json!({ "grammar": "start: \"a\" start" }), "structured_outputs"),
        (json!({ "grammar": format!("start: \"{}\" (", "a".repeat(900_000)) }), "structured_outputs"),
        (json!({ "json": { "$ref": "#" } }), "structured_outputs"),
        (json!({ "regex": "a{1000000}" }), "structured_outputs"),
        (json!({ "regex": "(" }), "structured_outputs"),
    ] {
        let shown: String = constraint.to_string().chars().take(60).collect();
        let body = chat(SMALL_MODEL, "Hello", json!({ "structured_outputs": constraint, "max_tokens": 8 }));
        let (status, refusal) = error(post(&cluster, &body)).await;
        assert_eq!((status, refusal["param"].as_str()), (StatusCode::BAD_REQUEST, Some(param)), "{shown}: {refusal}");
        assert!(refusal["message"].as_str().unwrap().len() < 600, "{shown}: {refusal}");
    }
    let choice = json!({ "structured_outputs": { "choice": ["yes.", "no!"] }, "max_tokens": 8 });
    let chosen = whole(&cluster, &chat(SMALL_MODEL, "Is water wet?", choice)).await;
    assert!(["yes.", "no!"].contains(&chosen["choices"][0]["message"]["content"].as_str().unwrap()), "{chosen}");
    let unlimited = whole(&cluster, &chat(SMALL_MODEL, "Say hi.", json!({ "stop": ["i"] }))).await;
    assert!(unlimited["usage"]["completion_tokens"].as_u64().unwrap() <= 2_048, "{unlimited}");

    let long = "word ".repeat(20_000);
    let (status, too_long) = error(post(&cluster, &chat(SMALL_MODEL, &long, json!({})))).await;
    assert_eq!((status, &too_long["code"]), (StatusCode::BAD_REQUEST, &json!("context_length_exceeded")), "{too_long}");
    wait_until_no_call_is_left(&cluster).await;
    cluster.finish().await;
}
