//! Resources and prompts of the MCP server.

use cfq_tests::cluster::Cluster;
use cfq_tests::mcp_client::{McpClient, STATELESS};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};
use serde_json::json;

#[tokio::test(flavor = "multi_thread")]
async fn tasks_and_the_repository_are_resources() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![Reply::Text(file("add.py", "def add(a, b):\n    return a + b\n"))]);
    cluster.models.script("beta", vec![Reply::Text(review(93, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    cluster.wait_until_settled(task).await;
    let program = McpClient::start(&cluster, &repo.path(), "2025-11-25").await;
    let over_http = McpClient::start_http(&cluster, STATELESS).await;
    for (mut mcp, of_repository) in [(program, 2), (over_http, 0)] {
        let listed = mcp.request("resources/list", json!({})).await;
        let uri = listed["result"]["resources"][0]["uri"].as_str().unwrap_or_else(|| panic!("{listed}")).to_owned();
        assert_eq!(listed["result"]["resources"].as_array().map(Vec::len), Some(1 + of_repository), "{listed}");
        let templates = mcp.request("resources/templates/list", json!({})).await;
        assert_eq!(templates["result"]["resourceTemplates"].as_array().unwrap().len(), 3, "{templates}");
        for (path, words) in [
            ("", "\"state\":\"merged\""),
            ("/artifacts/1", "+def add(a, b):"),
            ("/artifacts/best", "Artifact of t"),
            ("/reviews/1", "{\"untrusted_content\":"),
        ] {
            let read = mcp.request("resources/read", json!({ "uri": format!("{uri}{path}") })).await;
            let text = read["result"]["contents"][0]["text"].as_str();
            assert!(text.is_some_and(|text| text.contains(words)), "{path}: {read}");
        }
        for path in ["/artifacts/9", "/reviews/9", "/x"] {
            let read = mcp.request("resources/read", json!({ "uri": format!("{uri}{path}") })).await;
            assert!(read["error"]["message"].as_str().is_some_and(|text| text.contains(path)), "{read}");
        }
        for (uri, words) in [("cfq://repo-map", "def sub(a, b):"), ("cfq://policies", "default_policy")] {
            let read = mcp.request("resources/read", json!({ "uri": uri })).await;
            let text = read["result"]["contents"][0]["text"].as_str();
            assert_eq!(text.is_some_and(|text| text.contains(words)), of_repository > 0, "{uri}: {read}");
        }
        let prompts = mcp.request("prompts/list", json!({})).await;
        assert_eq!(prompts["result"]["prompts"][0]["name"], json!("delegate"), "{prompts}");
        let prompt = mcp.request("prompts/get", json!({ "name": "follow", "arguments": { "session_id": "t1" } })).await;
        let text = prompt["result"]["messages"][0]["content"]["text"].as_str();
        assert!(text.is_some_and(|text| text.contains("the cfq task t1 with")), "{prompt}");
        let missing = mcp.request("prompts/get", json!({ "name": "follow" })).await;
        assert!(missing["error"]["message"].as_str().is_some_and(|text| text.starts_with("session_id")), "{missing}");
        let follow = json!({ "type": "ref/prompt", "name": "follow" });
        let artifact = json!({ "type": "ref/resource", "uri": "cfq://tasks/{session_id}/artifacts/{iteration}" });
        let number = json!({ "arguments": { "session_id": "t1" } });
        for (reference, argument, typed, earlier, values) in [
            (&follow, "session_id", "t", json!({}), json!(["t1"])),
            (&follow, "session_id", "t2", json!({}), json!([])),
            (&follow, "other", "", json!({}), json!([])),
            (&artifact, "iteration", "", number, json!(["1"])),
            (&artifact, "iteration", "", json!({}), json!([])),
            (&artifact, "iteration", "", json!({ "arguments": { "session_id": "t999" } }), json!([])),
        ] {
            let argument = json!({ "name": argument, "value": typed });
            let request = json!({ "ref": reference, "argument": argument, "context": earlier });
            let completed = mcp.request("completion/complete", request.clone()).await;
            assert_eq!(completed["result"]["completion"]["values"], values, "{request}: {completed}");
        }
        let unknown = json!({ "ref": { "type": "ref/prompt", "name": "x" }, "argument": { "name": "y", "value": "" } });
        let unknown = mcp.request("completion/complete", unknown).await;
        assert!(unknown["error"]["message"].as_str().is_some_and(|text| text.starts_with("ref:")), "{unknown}");
    }
    cluster.finish().await;
}
