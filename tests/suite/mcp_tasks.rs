//! The tasks extension of MCP: a client that declares it gets a handle of the work that a tool starts.

use cfq_proto::task::TaskState;
use cfq_tests::cluster::{Cluster, WAIT_LIMIT};
use cfq_tests::mcp_client::{McpClient, STATELESS};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Gate, Reply, file};
use cfq_tests::wait;
use serde_json::{Value, json};

use crate::mcp::{ADD, add, score};

/// Code of the error for invalid parameters.
const INVALID_PARAMS: i64 = -32602;
/// Code of the error for a capability that the client did not declare.
const MISSING_CAPABILITY: i64 = -32021;

fn with_tasks(others: &Value) -> Value {
    let mut capabilities = others.clone();
    capabilities["extensions"] = json!({ "io.modelcontextprotocol/tasks": {} });
    capabilities
}

/// Delegates a task whose loop has one iteration, and returns the handle of the work.
async fn delegate(mcp: &mut McpClient) -> Value {
    let spec = json!({ "description": "Add add.py with a function add." });
    let arguments = json!({ "spec": spec, "max_iterations": 1 });
    let reply = mcp.request("tools/call", json!({ "name": "execute_task_spec", "arguments": arguments })).await;
    let result = &reply["result"];
    assert_eq!(result["resultType"], json!("task"), "{reply}");
    assert!(result["pollIntervalMs"].is_u64() && result["createdAt"].is_string(), "{reply}");
    result["taskId"].clone()
}

async fn get(mcp: &mut McpClient, task: &Value) -> Value {
    let reply = mcp.request("tasks/get", json!({ "taskId": task })).await;
    assert_eq!(reply["result"]["resultType"], json!("complete"), "{reply}");
    reply["result"].clone()
}

/// Asks for the state until it is `status`.
async fn wait_for(mcp: &mut McpClient, task: &Value, status: &str) -> Value {
    let began = std::time::Instant::now();
    loop {
        let state = get(mcp, task).await;
        if state["status"] == json!(status) {
            return state;
        }
        assert_eq!(state["status"], json!("working"), "{state}");
        assert!(began.elapsed() < WAIT_LIMIT, "{state}");
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
}

async fn answer(mcp: &mut McpClient, task: &Value, question: &str, response: Value) -> Value {
    mcp.request("tasks/update", json!({ "taskId": task, "inputResponses": { question: response } })).await
}

#[tokio::test(flavor = "multi_thread")]
async fn work_asks_its_question_as_a_form_and_ends_with_its_result() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![Reply::Text(file("add.py", &format!("{ADD}\n"))), add()]);
    cluster.models.script("beta", vec![score(50), score(95)]);
    let repo = UserRepo::with_uncommitted_changes();
    let mut mcp = McpClient::start(&cluster, &repo.path(), STATELESS).await;
    mcp.capabilities = with_tasks(&json!({ "elicitation": {} }));
    let task = delegate(&mut mcp).await;
    let asked = wait_for(&mut mcp, &task, "input_required").await;
    let (question, request) = asked["inputRequests"].as_object().unwrap().iter().next().unwrap();
    assert_eq!(request["method"], json!("elicitation/create"));
    let form = &request["params"];
    assert!(form["message"].as_str().unwrap().starts_with("t1 needs a decision"), "{form}");
    let actions = form["requestedSchema"]["properties"]["action"]["enum"].as_array().unwrap();
    assert!(actions.contains(&json!("accept_best_effort")), "{form}");
    // A user who does not want to decide leaves the question open.
    for action in ["decline", "cancel"] {
        let left = answer(&mut mcp, &task, question, json!({ "action": action })).await;
        assert!(left["result"].is_object(), "{left}");
        assert_eq!(get(&mut mcp, &task).await["status"], json!("input_required"));
    }
    for (content, words) in [
        (json!({ "action": "explode" }), "action: unknown variant"),
        (json!({ "action": "retry_with_constraints" }), "needs at least one text"),
        (json!({}), "missing field `action`"),
    ] {
        let wrong = answer(&mut mcp, &task, question, json!({ "action": "accept", "content": content })).await;
        assert_eq!(wrong["error"]["code"], json!(INVALID_PARAMS), "{wrong}");
        assert!(wrong["error"]["message"].as_str().unwrap().contains(words), "{wrong}");
    }
    let unknown = answer(&mut mcp, &task, "q1", json!({ "action": "decline" })).await;
    assert!(unknown["error"]["message"].as_str().unwrap().contains("is no key of inputRequests"), "{unknown}");
    let content = json!({ "action": "retry_with_constraints", "constraint": "add two numbers", "model": "" });
    for _ in 0..2 {
        // A repeated answer takes effect once.
        let accepted =
            answer(&mut mcp, &task, question, json!({ "action": "accept", "content": content.clone() })).await;
        assert!(accepted["result"].is_object(), "{accepted}");
    }
    let done = wait_for(&mut mcp, &task, "completed").await;
    let result = &done["result"];
    assert_eq!(result["isError"], json!(false), "{done}");
    let content = mcp.content("execute_task_spec", &json!({ "result": result }));
    assert_eq!((&content["state"], &content["session_id"]), (&json!("merged"), &task), "{content}");
    assert!(content["outcome"]["result"]["branch"].as_str().unwrap().starts_with("cfq/t1-"), "{content}");
    assert!(cluster.models.prompts("alpha")[1].contains("add two numbers"));
    // The handle is the session id of the other tools.
    mcp.call("get_artifact", json!({ "session_id": task })).await;
    let again = mcp.request("tasks/cancel", json!({ "taskId": task })).await;
    assert!(again["result"].is_object(), "work that has ended stays as it is: {again}");
    assert_eq!(get(&mut mcp, &task).await["status"], json!("completed"));
    // Another client, over HTTP, reads the same work.
    let mut over_http = McpClient::start_http(&cluster, STATELESS).await;
    over_http.capabilities = with_tasks(&json!({}));
    assert_eq!(get(&mut over_http, &task).await["result"]["structuredContent"]["state"], json!("merged"));
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn work_is_cancelled_and_clients_without_the_extension_or_forms_get_what_they_can_use() {
    let cluster = Cluster::start().await;
    let gate = Gate::closed();
    let text = file("add.py", ADD);
    let (first, rest) = text.split_at(20);
    let gated = Reply::Gated(first.to_owned(), rest.to_owned(), gate.clone());
    cluster.models.script("alpha", vec![gated, add()]);
    cluster.models.script("beta", vec![score(50)]);
    let repo = UserRepo::with_uncommitted_changes();
    let mut mcp = McpClient::start(&cluster, &repo.path(), STATELESS).await;
    // Without the extension: the plain result, and no tasks/get.
    mcp.capabilities = json!({ "elicitation": {} });
    let refused = mcp.request("tasks/get", json!({ "taskId": "t1" })).await;
    assert_eq!(refused["error"]["code"], json!(MISSING_CAPABILITY), "{refused}");
    mcp.capabilities = with_tasks(&json!({}));
    let unknown = mcp.request("tasks/get", json!({ "taskId": "00000000-0000-7000-8000-000000000000" })).await;
    assert_eq!(unknown["error"]["code"], json!(INVALID_PARAMS), "{unknown}");
    let malformed = mcp.request("tasks/get", json!({ "taskId": "what" })).await;
    assert!(malformed["error"]["message"].as_str().unwrap().starts_with("taskId: "), "{malformed}");
    let task = delegate(&mut mcp).await;
    wait::until("Alpha's call runs", WAIT_LIMIT, || async {
        let calls = cluster.models.prompts("alpha").len();
        if calls == 1 { Ok(()) } else { Err(format!("{calls} calls")) }
    })
    .await;
    assert!(mcp.request("tasks/cancel", json!({ "taskId": task })).await["result"].is_object());
    assert_eq!(get(&mut mcp, &task).await["status"], json!("cancelled"));
    gate.open();
    // Without forms, the model of the client gets the question with the other tools.
    let second = delegate(&mut mcp).await;
    cluster.wait_for_state("t2".parse().unwrap(), TaskState::Escalated).await;
    let waiting = get(&mut mcp, &second).await;
    assert_eq!(waiting["status"], json!("working"));
    assert!(waiting["statusMessage"].as_str().unwrap().contains("call resolve_escalation"), "{waiting}");
    let fail = json!({ "session_id": second, "action": { "type": "fail", "reason": "not needed" } });
    mcp.call("resolve_escalation", fail).await;
    let failed = wait_for(&mut mcp, &second, "completed").await;
    assert_eq!(failed["result"]["isError"], json!(true), "{failed}");
    assert_eq!(failed["result"]["structuredContent"]["state"], json!("failed"), "{failed}");
    cluster.finish().await;
}
