//! A client of `cfq mcp` and of `/mcp`: it writes the messages of the protocol itself, so that a test sees what any
//! client would see.

use std::collections::VecDeque;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::binary;
use crate::cluster::{Cluster, TOKEN, kill_with_parent};

/// The newest revision; its requests carry their context, without a handshake.
pub const STATELESS: &str = "2026-07-28";
/// Revisions that begin with `initialize`.
pub const WITH_HANDSHAKE: [&str; 4] = ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"];

/// Maximum wait for one line; calls wait for 45 s at most, and the machine may be loaded.
const LINE_LIMIT: Duration = Duration::from_secs(120);

/// What a client accepts as the response to a POST.
pub const ACCEPT: &str = "application/json, text/event-stream";

/// How the client reaches the server.
enum Connection {
    /// A running `cfq mcp`, killed on drop.
    Program { child: Box<Child>, stdin: ChildStdin, lines: Lines<BufReader<ChildStdout>>, _cache: tempfile::TempDir },
    /// The URL of `/mcp`, and the messages that were received and not read yet.
    Http { http: reqwest::Client, url: String, received: VecDeque<Value> },
}

/// A client of one MCP server.
pub struct McpClient {
    connection: Connection,
    version: String,
    last_id: u64,
    /// Notifications of the server, in order.
    pub notifications: Vec<Value>,
    /// The definitions of the tools.
    pub tools: Vec<Value>,
    /// What the client declares in each request without a handshake.
    pub capabilities: Value,
}

/// A call that is answered later.
pub struct Pending(u64);

impl McpClient {
    /// Starts `cfq mcp` in `dir` as a client of `cluster`, and begins a session with this revision of the protocol.
    pub async fn start(cluster: &Cluster, dir: &Path, version: &str) -> Self {
        let url = [("CFQ_URL", cluster.client.url().to_owned()), ("CFQ_TOKEN", TOKEN.to_owned())];
        Self::start_with(dir, version, &url).await
    }

    /// Starts `cfq mcp` in `dir` with these environment variables.
    pub async fn start_with(dir: &Path, version: &str, environment: &[(&str, String)]) -> Self {
        let mut command = std::process::Command::new(tokio::task::block_in_place(binary::cfq));
        command.arg("mcp").current_dir(dir).stdin(Stdio::piped()).stdout(Stdio::piped());
        command.env_remove("CFQ_URL").env_remove("CFQ_TOKEN");
        command.env("CFQ_DATA", dir.join("no-data")).env("CFQ_CONFIG", dir.join("config"));
        // Not the cache of the user who runs the tests.
        let cache = tempfile::tempdir().unwrap();
        command.env("CFQ_CACHE", cache.path());
        command.envs(environment.iter().map(|(name, value)| (name, value)));
        kill_with_parent(&mut command);
        let mut child = Command::from(command).kill_on_drop(true).spawn().unwrap();
        let stdin = child.stdin.take().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self::over(Connection::Program { child: Box::new(child), stdin, lines, _cache: cache }, version).await
    }

    /// Begins to use `/mcp` of the cluster's scheduler with this revision of the protocol.
    pub async fn start_http(cluster: &Cluster, version: &str) -> Self {
        let http = cfq_link::outbound::api_client().unwrap();
        let url = format!("{}/mcp", cluster.client.url());
        Self::over(Connection::Http { http, url, received: VecDeque::new() }, version).await
    }

    async fn over(connection: Connection, version: &str) -> Self {
        let (notifications, tools) = (Vec::new(), Vec::new());
        let version = version.to_owned();
        let capabilities = json!({});
        let mut client = Self { connection, version, last_id: 0, notifications, tools, capabilities };
        client.begin().await;
        let list = client.request("tools/list", json!({})).await;
        client.tools = list["result"]["tools"].as_array().unwrap_or_else(|| panic!("{list}")).clone();
        client
    }

    async fn begin(&mut self) {
        if self.version == STATELESS {
            let found = self.request("server/discover", json!({})).await;
            let versions = found["result"]["supportedVersions"].as_array().unwrap_or_else(|| panic!("{found}"));
            assert!(versions.contains(&json!(STATELESS)), "{found}");
            return;
        }
        let params = json!({
            "protocolVersion": self.version,
            "capabilities": {},
            "clientInfo": { "name": "cfq-tests", "version": "1" },
        });
        let begun = self.request("initialize", params).await;
        assert_eq!(begun["result"]["protocolVersion"], json!(self.version), "{begun}");
        assert!(begun["result"]["instructions"].as_str().is_some_and(|text| text.contains("untrusted_content")));
        self.write(&json!({ "jsonrpc": "2.0", "method": "notifications/initialized" })).await;
    }

    /// Sends a request and returns the response.
    pub async fn request(&mut self, method: &str, params: Value) -> Value {
        let pending = self.send(method, params).await;
        self.response(pending).await
    }

    /// Sends a request without waiting for the response.
    pub async fn send(&mut self, method: &str, mut params: Value) -> Pending {
        self.last_id += 1;
        if self.version == STATELESS {
            let meta = &mut params["_meta"];
            meta["io.modelcontextprotocol/protocolVersion"] = json!(STATELESS);
            meta["io.modelcontextprotocol/clientInfo"] = json!({ "name": "cfq-tests", "version": "1" });
            meta["io.modelcontextprotocol/clientCapabilities"] = self.capabilities.clone();
        }
        let request = json!({ "jsonrpc": "2.0", "id": self.last_id, "method": method, "params": params });
        self.write(&request).await;
        Pending(self.last_id)
    }

    /// Reads until the response of a request, and keeps the notifications before it.
    pub async fn response(&mut self, pending: Pending) -> Value {
        loop {
            let message = self.message().await;
            match message.get("id") {
                Some(id) if id == pending.0 => return message,
                Some(_) => {}
                None => self.notifications.push(message),
            }
        }
    }

    /// Reads the next message, which is a notification.
    pub async fn notification(&mut self) -> Value {
        let message = self.message().await;
        assert!(message.get("id").is_none(), "{message}");
        message
    }

    async fn message(&mut self) -> Value {
        let lines = match &mut self.connection {
            Connection::Program { lines, .. } => lines,
            Connection::Http { received, .. } => return received.pop_front().expect("a response to the request"),
        };
        let line = tokio::time::timeout(LINE_LIMIT, lines.next_line()).await.expect("a line of cfq mcp");
        let line = line.unwrap().expect("cfq mcp ended");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
    }

    /// Calls a tool that succeeds, and returns its structured content, which fits the tool's schema.
    pub async fn call(&mut self, tool: &str, arguments: Value) -> Value {
        let response = self.request("tools/call", json!({ "name": tool, "arguments": arguments })).await;
        self.content(tool, &response)
    }

    /// The structured content of a successful call.
    pub fn content(&self, tool: &str, response: &Value) -> Value {
        let result = &response["result"];
        assert_eq!(result["isError"], json!(false), "{tool}: {response}");
        let content = result["structuredContent"].clone();
        let text: Value = serde_json::from_str(result["content"][0]["text"].as_str().unwrap()).unwrap();
        assert_eq!(text, content, "{tool}: the text is the same as the structured content");
        let definition = self.tools.iter().find(|definition| definition["name"] == tool).unwrap();
        check(&content, &definition["outputSchema"], tool);
        content
    }

    /// Calls a tool that fails, and returns the message that the caller's model reads.
    pub async fn call_error(&mut self, tool: &str, arguments: Value) -> String {
        let response = self.request("tools/call", json!({ "name": tool, "arguments": arguments })).await;
        assert_eq!(response["result"]["isError"], json!(true), "{tool}: {response}");
        response["result"]["content"][0]["text"].as_str().unwrap().to_owned()
    }

    /// Closes the server's stdin and waits until it ends.
    pub async fn close(self) -> std::process::ExitStatus {
        let Connection::Program { mut child, stdin, .. } = self.connection else { panic!("no program was started") };
        drop(stdin);
        tokio::time::timeout(LINE_LIMIT, child.wait()).await.expect("cfq mcp to end").unwrap()
    }

    async fn write(&mut self, message: &Value) {
        match &mut self.connection {
            Connection::Program { stdin, .. } => stdin.write_all(format!("{message}\n").as_bytes()).await.unwrap(),
            Connection::Http { http, url, received } => {
                let response = post(http, url, &self.version, message).send().await.unwrap();
                let status = response.status();
                let stream = response.headers().get("content-type").is_some_and(|kind| kind == "text/event-stream");
                let text = response.text().await.unwrap();
                assert!(status.is_success(), "{status}: {text}");
                let messages =
                    text.lines().filter_map(|line| if stream { line.strip_prefix("data: ") } else { Some(line) });
                received.extend(messages.map(|text| serde_json::from_str(text).unwrap_or_else(|_| panic!("{text:?}"))));
            }
        }
    }
}

/// A POST of one message to `/mcp`, with the token of test clusters.
pub fn post(http: &reqwest::Client, url: &str, version: &str, message: &Value) -> reqwest::RequestBuilder {
    let mut request = http.post(url).bearer_auth(TOKEN).header("Accept", ACCEPT).json(message);
    if message["method"] != "initialize" {
        request = request.header("MCP-Protocol-Version", version);
    }
    if version == STATELESS {
        request = request.header("Mcp-Method", message["method"].as_str().unwrap());
        let named = ["name", "uri", "taskId"].iter().find_map(|name| message["params"][name].as_str());
        if let Some(name) = named {
            request = request.header("Mcp-Name", name);
        }
    }
    request
}

/// Panics unless `value` fits the schema, of which it reads the keywords that cfq uses. A property that the schema does
/// not name does not fit.
fn check(value: &Value, schema: &Value, path: &str) {
    if let Some(values) = schema["enum"].as_array() {
        assert!(values.contains(value), "{path}: {value} is none of {values:?}");
    }
    match schema["type"].as_str() {
        Some("object") => {
            let fields = value.as_object().unwrap_or_else(|| panic!("{path}: {value} is no object"));
            for name in schema["required"].as_array().into_iter().flatten() {
                assert!(fields.contains_key(name.as_str().unwrap()), "{path}: {name} is missing in {value}");
            }
            for (name, field) in fields {
                let property = match schema["properties"].get(name) {
                    Some(property) => property,
                    // Any content.
                    None if schema["additionalProperties"] == true => continue,
                    None => &schema["additionalProperties"],
                };
                assert!(property.is_object(), "{path}: the schema has no {name}");
                check(field, property, &format!("{path}.{name}"));
            }
        }
        Some("array") => {
            for item in value.as_array().unwrap_or_else(|| panic!("{path}: {value} is no array")) {
                check(item, &schema["items"], path);
            }
        }
        Some("string") => assert!(value.is_string(), "{path}: {value}"),
        Some("integer") => assert!(value.is_i64() || value.is_u64(), "{path}: {value}"),
        Some("number") => assert!(value.is_number(), "{path}: {value}"),
        Some("boolean") => assert!(value.is_boolean(), "{path}: {value}"),
        other => panic!("{path}: unknown type {other:?} in {schema}"),
    }
}
