//! Random arguments of every tool: each call is answered, the server continues, and the error is text for the caller.

use cfq_tests::cluster::Cluster;
use cfq_tests::mcp_client::{McpClient, STATELESS};
use cfq_tests::repo::UserRepo;
use serde_json::{Value, json};

/// Calls of each tool on each transport.
const CALLS: usize = 60;

/// A reproducible source of choices (xorshift).
struct Choices(u64);

impl Choices {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n as u64) as usize
    }

    /// A value of any type and size.
    fn value(&mut self, depth: usize) -> Value {
        match self.below(if depth > 0 { 17 } else { 14 }) {
            0 => Value::Null,
            1 => json!(true),
            2 => json!(-1),
            3 => json!(0),
            4 => json!(u64::MAX),
            5 => json!(1e308),
            6 => json!(""),
            7 => json!("t1"),
            8 => json!("00000000-0000-7000-8000-000000000000"),
            9 => json!("../../etc/passwd"),
            10 => json!("--upload-pack=sh"),
            11 => json!("a\u{0}\u{1b}[31m\u{202e}\n"),
            12 => json!("x".repeat(20_000)),
            13 => json!("P1"),
            14 => json!((0..self.below(4)).map(|_| self.value(depth - 1)).collect::<Vec<_>>()),
            _ => {
                let fields = ["type", "description", "repo", "priority", "suggested_model", "x", "agents", "labels"];
                let chosen =
                    (0..self.below(4)).map(|_| (fields[self.below(fields.len())].to_owned(), self.value(depth - 1)));
                Value::Object(chosen.collect())
            }
        }
    }

    /// Arguments with properties of the schema, of which many have the type that the schema names.
    fn arguments(&mut self, schema: &Value) -> Value {
        let mut arguments = serde_json::Map::new();
        for (name, property) in schema["properties"].as_object().into_iter().flatten() {
            // A wait would only take time.
            if name != "wait_s" && self.below(3) > 0 {
                let value = if self.below(2) == 0 { self.fitting(property) } else { self.value(3) };
                arguments.insert(name.clone(), value);
            }
        }
        if self.below(10) == 0 {
            arguments.insert("unknown".to_owned(), self.value(1));
        }
        Value::Object(arguments)
    }

    /// A value of the schema's type.
    fn fitting(&mut self, schema: &Value) -> Value {
        if let Some(values) = schema["enum"].as_array() {
            return values[self.below(values.len())].clone();
        }
        match schema["type"].as_str() {
            Some("object") => self.arguments(schema),
            Some("array") => json!((0..self.below(3)).map(|_| self.fitting(&schema["items"])).collect::<Vec<_>>()),
            Some("integer" | "number") => json!(self.below(100)),
            Some("boolean") => json!(self.below(2) == 0),
            _ => {
                let texts = ["t1", "t999", "/", "", "main", "a b", "\u{feff}x"];
                json!(texts[self.below(texts.len())])
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_call_with_random_arguments_is_answered() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![]);
    let repo = UserRepo::with_uncommitted_changes();
    let folder = tempfile::tempdir().unwrap();
    let program = McpClient::start(&cluster, &repo.path(), STATELESS).await;
    let over_http = McpClient::start_http(&cluster, "2025-11-25").await;
    for (seed, mut mcp) in [(0x9e37_79b9_7f4a_7c15, program), (0xd1b5_4a32_d192_ed03, over_http)] {
        let mut choices = Choices(seed);
        for tool in mcp.tools.clone() {
            let name = tool["name"].as_str().unwrap();
            for _ in 0..CALLS {
                let mut arguments = choices.arguments(&tool["inputSchema"]);
                if arguments.get("folder").is_some_and(Value::is_string) {
                    arguments["folder"] = json!(folder.path());
                }
                let response = mcp.request("tools/call", json!({ "name": name, "arguments": arguments })).await;
                let result = &response["result"];
                let text = result["content"][0]["text"].as_str();
                assert!(text.is_some_and(|text| !text.is_empty()), "{name} {arguments}: {response}");
                assert!(!text.is_some_and(|text| text.contains("panicked")), "{name} {arguments}: {response}");
                assert!(
                    !text.is_some_and(|text| text.contains(['\u{1b}', '\u{202e}'])),
                    "{name} {arguments}: {response}"
                );
            }
        }
        let error = mcp.call_error("cancel_task", json!({})).await;
        assert!(error.contains("session_id"), "{error}");
    }
    for task in cluster.client.list_tasks(&cfq_proto::http::TaskQuery::default()).await.unwrap().tasks {
        let cancelled = cluster.client.cancel(cfq_proto::ids::TaskKey::Id(task.id), "").await;
        assert!(cancelled.is_ok() || task.state.is_terminal(), "{cancelled:?}");
    }
    cluster.finish().await;
}
