//! `/mcp`: the same tools over HTTP, behind the checks of the API.

use std::time::{Duration, Instant};

use cfq_proto::blob::BlobHash;
use cfq_tests::cluster::{Cluster, TOKEN};
use cfq_tests::mcp_client::{ACCEPT, McpClient, STATELESS, WITH_HANDSHAKE, post};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Gate, Reply, file, review};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

const ADD: &str = "def add(a, b):\n    return a + b\n";

fn delegated(repo: &UserRepo, key: &str) -> Value {
    json!({ "spec": { "description": "Add add.py with a function add.", "repo": repo.path(), "idempotency_key": key } })
}

async fn follow(mcp: &mut McpClient, session: &Value) -> Value {
    let mut arguments = json!({ "session_id": session, "wait_s": 45 });
    loop {
        let progress = mcp.call("get_progress_summary", arguments.clone()).await;
        if progress["ended"] == json!(true) || progress["needs_decision"] == json!(true) {
            return progress;
        }
        arguments["after_event"] = progress["last_event"].clone();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn task_is_delegated_over_http_in_every_revision_of_the_protocol() {
    let cluster = Cluster::start().await;
    let http = cfq_link::outbound::api_client().unwrap();
    for version in WITH_HANDSHAKE.into_iter().chain([STATELESS]) {
        cluster.models.script("alpha", vec![Reply::Text(file("add.py", ADD))]);
        cluster.models.script("beta", vec![Reply::Text(review(93, &[]))]);
        let repo = UserRepo::with_uncommitted_changes();
        let mut mcp = McpClient::start_http(&cluster, version).await;
        let accepted = mcp.call("execute_task_spec", delegated(&repo, version)).await;
        let repeated = mcp.call("execute_task_spec", delegated(&repo, version)).await;
        assert_eq!((&accepted["created"], &repeated["created"]), (&json!(true), &json!(false)));
        let session = accepted["session_id"].clone();
        assert_eq!(repeated["session_id"], session);
        let merged = follow(&mut mcp, &session).await;
        assert_eq!(merged["state"], json!("merged"), "{version}: {merged}");

        // The archive is a download, because the server's folders are not the caller's.
        let archive = mcp.call("final_handoff_archive", json!({ "session_id": session })).await;
        let url = archive["url"].as_str().unwrap();
        assert!(archive.get("file").is_none(), "{archive}");
        let refused = http.get(url).send().await.unwrap();
        assert_eq!(refused.status(), StatusCode::UNAUTHORIZED);
        for wrong in ["/mcp/archives/t99", "/mcp/archives/x", "/mcp/archives/t1?audit=perhaps"] {
            let refused = http.get(format!("{}{wrong}", cluster.client.url())).bearer_auth(TOKEN).send().await.unwrap();
            let reply: Value = refused.json().await.unwrap();
            assert!(reply["error"]["message"].is_string(), "{wrong}: {reply}");
        }
        let downloaded = http.get(url).bearer_auth(TOKEN).send().await.unwrap();
        assert_eq!(downloaded.headers()["content-type"], "application/zstd");
        let bytes = downloaded.bytes().await.unwrap();
        assert_eq!(archive["sha256"].as_str(), Some(BlobHash::of(&bytes).as_str()));
        let mut unpacked = tar::Archive::new(zstd::Decoder::new(bytes.as_ref()).unwrap());
        assert_eq!(
            unpacked.entries().unwrap().count(),
            archive["untrusted_content"]["files"].as_array().unwrap().len() + 1
        );
    }
    let log = std::fs::read_to_string(cluster.log("scheduler")).unwrap();
    assert!(log.contains("became leader") && !log.contains("rmcp"), "one line for each request: {log}");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn call_over_http_reaches_no_folder_of_the_server() {
    let cluster = Cluster::start().await;
    let repo = UserRepo::with_uncommitted_changes();
    let mut mcp = McpClient::start_http(&cluster, STATELESS).await;
    let folder = tempfile::tempdir().unwrap();
    let task = cluster.submit(&cluster.spec(&repo)).await.to_string();
    for (tool, arguments, words) in [
        ("execute_task_spec", json!({ "spec": { "description": "x" } }), "repo: is missing"),
        ("execute_task_spec", json!({ "spec": { "description": "x", "repo": "src" } }), "repo: \"src\" is not"),
        ("submit_task", json!({ "task": { "description": "x", "repo": "~/src" } }), "repo: \"~/src\" is not"),
        ("final_handoff_archive", json!({ "session_id": task, "folder": folder.path() }), "folder: is not available"),
    ] {
        let error = mcp.call_error(tool, arguments.clone()).await;
        assert!(error.contains(words), "{tool} {arguments}: {error}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    mcp.call("cancel_task", json!({ "session_id": task })).await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn request_from_a_web_page_or_without_the_token_is_refused() {
    let cluster = Cluster::start().await;
    let http = cfq_link::outbound::api_client().unwrap();
    let url = format!("{}/mcp", cluster.client.url());
    let list = json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {} });
    let request = || http.post(&url).header("Accept", ACCEPT).json(&list);
    let status = async |request: reqwest::RequestBuilder| request.send().await.unwrap().status();

    let without = request().send().await.unwrap();
    assert_eq!(without.status(), StatusCode::UNAUTHORIZED);
    assert_eq!(without.headers()["www-authenticate"], "Bearer");
    assert_eq!(status(request().bearer_auth("another-token-0123456789")).await, StatusCode::UNAUTHORIZED);
    assert_eq!(
        status(request().bearer_auth(TOKEN).header("Origin", "https://example.org")).await,
        StatusCode::FORBIDDEN
    );
    // The Host of a page whose name was pointed to this address, which makes the request one of the same origin.
    let rebound = request().bearer_auth(TOKEN).header("Host", "example.org").header("Origin", "http://example.org");
    assert_eq!(status(rebound).await, StatusCode::FORBIDDEN);
    let get = http.request(Method::GET, &url).bearer_auth(TOKEN).header("Accept", ACCEPT);
    assert_eq!(status(get).await, StatusCode::METHOD_NOT_ALLOWED);
    let long = json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": { "x": "x".repeat(64 << 20) } });
    let long = post(&http, &url, "2025-11-25", &long).send().await;
    assert!(!long.is_ok_and(|response| response.status() != StatusCode::PAYLOAD_TOO_LARGE));
    assert_eq!(status(request().bearer_auth(TOKEN)).await, StatusCode::OK);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wait_over_http_ends_with_its_client_or_server_and_the_work_continues() {
    let cluster = Cluster::start().await;
    let gate = Gate::closed();
    let reply = file("add.py", ADD);
    let (first, rest) = reply.split_at(10);
    cluster.models.script("alpha", vec![Reply::Gated(first.to_owned(), rest.to_owned(), gate.clone())]);
    cluster.models.script("beta", vec![Reply::Text(review(93, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let mut mcp = McpClient::start_http(&cluster, "2025-11-25").await;
    let session = mcp.call("execute_task_spec", delegated(&repo, "k")).await["session_id"].clone();
    cluster.wait_until_generating(session.as_str().unwrap().parse().unwrap()).await;
    let seen = mcp.call("get_progress_summary", json!({ "session_id": session })).await["last_event"].clone();

    let arguments = json!({ "session_id": session, "wait_s": 45, "after_event": seen });
    let params = json!({ "name": "get_progress_summary", "arguments": arguments, "_meta": { "progressToken": "p" } });
    let call = json!({ "jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params });
    let (http, url) = (cfq_link::outbound::api_client().unwrap(), format!("{}/mcp", cluster.client.url()));
    let hung_up = post(&http, &url, "2025-11-25", &call).timeout(Duration::from_secs(2)).send().await;
    assert!(hung_up.is_err_and(|error| error.is_timeout()));

    let waiting = tokio::spawn(post(&http, &url, "2025-11-25", &call).send());
    // A notification shows that the wait has begun.
    let response = tokio::time::timeout(Duration::from_secs(40), waiting).await.unwrap().unwrap().unwrap();
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    let began = Instant::now();
    assert!(cluster.stop("scheduler").await.success());
    let text = response.text().await.unwrap_or_default();
    assert!(!text.contains("\"result\""), "{text}");
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());

    cluster.start_service("scheduler");
    cluster.wait_until_ready().await;
    gate.open();
    let mut mcp = McpClient::start_http(&cluster, STATELESS).await;
    assert_eq!(follow(&mut mcp, &session).await["state"], json!("merged"));
    assert_eq!(cluster.models.call_count("alpha"), 1);
    cluster.finish().await;
}
