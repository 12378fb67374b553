//! Tests of the HTTP API through a client: idempotency, errors that name the invalid field, tokens, hosts and origins,
//! the event feed.

use std::time::Duration;

use cfq_proto::client::{Client, ClientError, Frame};
use cfq_proto::event::EventBody;
use cfq_proto::http::ErrorCode;
use cfq_proto::job::JobState;
use cfq_proto::task::TaskState;
use cfq_tests::cfq_process::CfqProcess;
use cfq_tests::cluster::{Cluster, TOKEN, WAIT_LIMIT};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Gate, Reply, file, review};
use cfq_tests::wait;
use futures::StreamExt;
use serde_json::{Value, json};

const ADD: &str = "def add(a, b):\n    return a + b\n";

#[tokio::test(flavor = "multi_thread")]
async fn idempotency_key_yields_one_task_and_rejects_another_body() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![Reply::Text(file("add.py", ADD))]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let spec = cluster.spec(&repo);
    let (a, b, c) = tokio::join!(
        cluster.client.submit(&spec, Some("k")),
        cluster.client.submit(&spec, Some("k")),
        cluster.client.submit(&spec, Some("k")),
    );
    let replies = [a.unwrap(), b.unwrap(), c.unwrap()];
    assert!(replies.iter().all(|r| r.id == replies[0].id));
    assert_eq!(replies.iter().filter(|r| r.created).count(), 1);
    assert_eq!(cluster.client.tasks(None, 10).await.unwrap().tasks.len(), 1);

    let mut other = spec.clone();
    other.description.push_str(" And mul.");
    let refused = cluster.client.submit(&other, Some("k")).await.unwrap_err();
    assert!(
        matches!(&refused, ClientError::Refused { status: 409, body } if body.code == ErrorCode::KeyReused),
        "{refused:?}"
    );
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_requests_are_rejected_naming_the_field() {
    let cluster = Cluster::start().await;
    let repo = UserRepo::with_uncommitted_changes();
    let good = serde_json::to_value(cluster.spec(&repo)).unwrap();
    let http = cfq_link::outbound::api_client().unwrap();
    let url = format!("{}/api/v1/tasks", cluster.client.url());
    let with = |key: &str, value: Value| {
        let mut body = good.clone();
        body[key] = value;
        body
    };
    for (body, word) in [
        (with("descriptoin", json!("x")), "descriptoin"),
        (with("description", json!("  ")), "description"),
        (with("repo", json!("relative/path")), "repo"),
        (with("threshold", json!(101)), "threshold"),
        (with("max_iterations", json!(0)), "max_iterations"),
        (with("priority", json!("P9")), "priority"),
        (with("agents", json!({ "alpha": { "model": "gpt" } })), "model"),
        (json!([]), ""),
    ] {
        let reply = http.post(&url).bearer_auth(TOKEN).json(&body).send().await.unwrap();
        assert_eq!(reply.status(), 400, "{word}");
        let error: Value = reply.json().await.unwrap();
        assert!(error.to_string().contains(word), "{word}: {error}");
    }
    let reply = http.post(&url).bearer_auth(TOKEN).body("{").send().await.unwrap();
    assert!(reply.status().is_client_error());
    assert!(cluster.client.tasks(None, 10).await.unwrap().tasks.is_empty(), "nothing was accepted");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_token_origin_or_host_is_rejected() {
    let cluster = Cluster::start().await;
    let http = cfq_link::outbound::api_client().unwrap();
    let base = cluster.client.url();
    for path in ["/api/v1/tasks", "/api/v1/nodes", "/api/v1/prs", "/api/v1/events", "/metrics"] {
        let url = format!("{base}{path}");
        let status = |request: reqwest::RequestBuilder| async { request.send().await.unwrap().status().as_u16() };
        assert_eq!(status(http.get(&url)).await, 401, "{path}");
        assert_eq!(status(http.get(&url).bearer_auth("wrong")).await, 401, "{path}");
        assert_eq!(
            status(http.get(&url).bearer_auth(TOKEN).header("Origin", "https://evil.example")).await,
            403,
            "{path}"
        );
        assert_eq!(status(http.get(&url).bearer_auth(TOKEN).header("Host", "evil.example")).await, 403, "{path}");
    }
    assert_eq!(http.get(format!("{base}/healthz")).send().await.unwrap().status(), 200);
    assert_eq!(http.get(format!("{base}/readyz")).send().await.unwrap().status(), 200);
    let missing = http.get(format!("{base}/api/v1/nothing")).bearer_auth(TOKEN).send().await.unwrap();
    assert_eq!(missing.status(), 404);
    assert!(missing.json::<Value>().await.unwrap()["error"]["message"].is_string());
    let metrics = http.get(format!("{base}/metrics")).bearer_auth(TOKEN).send().await.unwrap().text().await.unwrap();
    assert!(metrics.contains("# TYPE cfq_"), "{metrics}");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn event_feed_is_complete_across_reconnects() {
    let cluster = Cluster::start().await;
    let long = file("add.py", &format!("# {}\n{ADD}", "word ".repeat(60)));
    cluster.models.script("alpha", vec![Reply::Slow(long, Duration::from_millis(20))]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;

    // A client reads five events, disconnects, and continues after the last event it has seen.
    let mut seen = Vec::new();
    let client: Client = cluster.client.clone();
    let read = async {
        'again: loop {
            let after = seen.last().copied().unwrap_or(0);
            let Ok(frames) = client.watch(task, after).await else { continue };
            let mut frames = std::pin::pin!(frames);
            while let Some(frame) = frames.next().await {
                match frame {
                    Ok(Frame::Tokens(_)) => {}
                    Ok(Frame::Event(event)) => {
                        seen.push(event.task_seq);
                        if let cfq_proto::event::EventBody::TaskStateChanged { to, .. } = event.body
                            && to.is_settled()
                        {
                            break 'again;
                        }
                        if seen.len() == 5 {
                            continue 'again;
                        }
                    }
                    Err(_) => continue 'again,
                }
            }
        }
    };
    tokio::time::timeout(WAIT_LIMIT, read).await.expect("the end of the feed");
    let all = cluster.client.events(task, 0).await.unwrap().events;
    let expected: Vec<i64> = (1..=all.len() as i64).collect();
    assert_eq!(all.iter().map(|e| e.task_seq).collect::<Vec<_>>(), expected);
    let last = *seen.last().unwrap();
    assert_eq!(seen, (1..=last).collect::<Vec<_>>(), "each event once, in order, over two connections");
    assert_eq!(cluster.client.task(task).await.unwrap().summary.state, TaskState::Merged);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_are_streamed_to_feed_and_watch_during_generation() {
    let cluster = Cluster::start().await;
    let gate = Gate::closed();
    let reply = file("add.py", &format!("# early words\n{ADD}"));
    let (first, rest) = reply.split_at(reply.find("early words").unwrap() + "early words\n".len());
    cluster.models.script("alpha", vec![Reply::Gated(first.into(), rest.into(), gate.clone())]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let home = tempfile::tempdir().unwrap();
    let mut watch = CfqProcess::start(home.path(), &["watch", "t1"], cluster.client.url());

    let mut frames = std::pin::pin!(cluster.client.watch(task, 0).await.unwrap());
    let (mut seen, mut text) = (Vec::new(), String::new());
    let read = async {
        while !text.contains("early words") {
            match frames.next().await.expect("the feed stays open").unwrap() {
                Frame::Tokens(tokens) => text.push_str(&tokens.text),
                Frame::Event(event) => seen.push(event.body),
            }
        }
    };
    tokio::time::timeout(WAIT_LIMIT, read).await.expect("tokens before the reply is complete");
    wait::until("cfq watch to print them", WAIT_LIMIT, || async {
        let output = watch.output();
        if output.contains("early words") { Ok(()) } else { Err(output) }
    })
    .await;

    // The gate still blocks the rest of the reply, and no event has reported the end of the job.
    let calls = cluster.models.all_calls();
    assert_eq!(calls.len(), 1);
    assert_eq!((calls[0].end, calls[0].sent.as_str()), (None, first));
    let jobs = cluster.client.task(task).await.unwrap().jobs;
    assert_eq!(jobs.iter().map(|j| j.state).collect::<Vec<_>>(), [JobState::Running]);
    let over = |body: &EventBody| matches!(body, EventBody::JobChanged { state, .. } if state.is_terminal());
    assert!(!seen.is_empty() && !seen.iter().any(over), "{seen:?}");

    gate.open();
    assert_eq!(watch.wait_for_exit().await.code(), Some(0), "{}", watch.output());
    assert!(watch.output().contains("return a + b"), "{}", watch.output());
    cluster.run_oracle(task, &repo).await;
    cluster.finish().await;
}
