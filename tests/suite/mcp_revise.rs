//! An editor's AI that continues a task with its own review or with another pattern.

use cfq_tests::cluster::Cluster;
use cfq_tests::mcp_client::{McpClient, STATELESS};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file};
use serde_json::json;

use crate::mcp::{ADD, add, follow, score};

/// The editor's AI reviews the artifact of a task that needs a decision, and then shows another pattern.
#[tokio::test(flavor = "multi_thread")]
async fn task_continues_with_the_review_and_the_pattern_of_the_client() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![add(), Reply::Text(file("add.py", &format!("{ADD}\n"))), add()]);
    cluster.models.script("beta", vec![score(50), score(60), score(95)]);
    let repo = UserRepo::with_uncommitted_changes();
    let mut mcp = McpClient::start(&cluster, &repo.path(), STATELESS).await;
    let delegated = json!({ "spec": { "description": "Add add.py with a function add." }, "max_iterations": 1 });
    let session = mcp.call("execute_task_spec", delegated).await["session_id"].clone();
    assert_eq!(follow(&mut mcp, &session).await["needs_decision"], json!(true));
    let empty = mcp.call_error("revise_code", json!({ "artifact_id": session, "feedback": {} })).await;
    assert!(empty.contains("feedback: is empty"), "{empty}");
    let feedback = json!({ "defects": [{ "location": "add.py:1", "description": "no type hints" }] });
    let question = mcp.call("list_questions", json!({})).await["questions"][0]["question_id"].clone();
    let revise = json!({ "artifact_id": session, "feedback": feedback, "question_id": question });
    mcp.call("revise_code", revise.clone()).await;
    let second = follow(&mut mcp, &session).await;
    assert_eq!(second["needs_decision"], json!(true));
    // A repeated call answers the first question again, not the second one.
    mcp.call("revise_code", revise).await;
    let after = mcp.call("get_progress_summary", json!({ "session_id": session })).await;
    assert_eq!(after["question"], second["question"]);
    assert!(cluster.models.prompts("alpha")[1].contains("- Fix add.py:1: no type hints."));
    let pattern = json!({ "name": "builtin", "code": "return sum((a, b))" });
    let arguments = json!({ "session_id": session, "pattern": pattern, "context": "It fails for lists" });
    mcp.call("inject_alternative_pattern", arguments.clone()).await;
    assert_eq!(follow(&mut mcp, &session).await["state"], json!("merged"));
    let prompt = &cluster.models.prompts("alpha")[2];
    let shown = "- It fails for lists. Use this pattern (builtin) instead:\\n```\\nreturn sum((a, b))\\n```";
    assert!(prompt.contains(shown) && prompt.contains("no type hints"), "{prompt}");
    let ended = mcp.call_error("inject_alternative_pattern", arguments).await;
    assert!(ended.contains("is merged: it has ended") && ended.contains("execute_task_spec"), "{ended}");
    cluster.finish().await;
}
