//! Maps of repositories, and their policies: `cfq map`, `get_repo_map` and `read_org_policies`.

use std::path::Path;
use std::process::Output;

use cfq_engine::{ModelFile, Vocabulary};
use cfq_tests::binary;
use cfq_tests::cluster::Cluster;
use cfq_tests::mcp_client::{McpClient, STATELESS};
use cfq_tests::repo::UserRepo;
use cfq_tests::small_model;
use serde_json::{Value, json};

const QUEUE: &str = "class Queue:\n    def put_item(self, item):\n        pass\n";
const MAIN: &str = "from queue import Queue\n\ndef main():\n    Queue().put_item(1)\n";

fn repository() -> UserRepo {
    let repo = UserRepo::with_uncommitted_changes();
    repo.commit(&[("src/queue.py", QUEUE), ("src/main.py", MAIN), ("tests/test_main.py", "def test_main(): pass\n")]);
    repo
}

fn map(dir: &Path, cache: &Path, arguments: &[&str]) -> Output {
    let mut command = std::process::Command::new(binary::cfq());
    command.arg("map").args(arguments).current_dir(dir).env("CFQ_CACHE", cache);
    command.env("CFQ_DATA", cache.join("data")).env("CFQ_CONFIG", cache.join("config"));
    command.output().unwrap()
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// The client of a `cfq mcp` without a server.
async fn client(dir: &Path, cache: &Path) -> McpClient {
    McpClient::start_with(dir, STATELESS, &[("CFQ_CACHE", cache.to_string_lossy().into_owned())]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn tool_and_command_map_the_committed_files() {
    let (repo, cache) = (repository(), tempfile::tempdir().unwrap());
    let mut mcp = client(&repo.path(), cache.path()).await;
    let reply = mcp.call("get_repo_map", json!({})).await;
    let expected = "\
src/
  main.py
    3: def main():
  queue.py
    1: class Queue:
      2: def put_item(self, item):
README.md
math.py
  1: def sub(a, b):
staged.txt
";
    assert_eq!(reply["untrusted_content"]["map"], json!(expected), "neither untracked files nor tests");
    assert_eq!((&reply["parts"], &reply["tests_left_out"]), (&json!(1), &json!(1)), "{reply}");
    assert_eq!(reply["commit"].as_str(), Some(repo.open().head().unwrap().target().unwrap().to_string().as_str()));
    let mapped = tokio::task::block_in_place(|| map(&repo.path().join("src"), cache.path(), &[]));
    assert_eq!(text(&mapped), expected, "from any folder of the repository");

    let near = mcp.call("get_repo_map", json!({ "focus": ["src/main.py"], "include_tests": true, "depth": 2 })).await;
    assert!(near["untrusted_content"]["map"].as_str().unwrap().contains("test_main"), "{near}");
    let before = mcp.call("get_repo_map", json!({ "base": "HEAD~1" })).await;
    assert!(!before["untrusted_content"]["map"].as_str().unwrap().contains("queue.py"), "{before}");
    for (arguments, words) in [
        (json!({ "max_tokens": 100 }), "max_tokens: is 100; it must be 256 to 256000"),
        (json!({ "part": 2 }), "there is no part 2; the map has 1"),
        (json!({ "depth": 0 }), "depth: is 0"),
        (json!({ "focus": ["nothing"] }), "the focus \"nothing\" is no file, folder or definition"),
        (json!({ "path": "src" }), "path: \"src\" is not an absolute path"),
        (json!({ "path": cache.path() }), "is not in a git repository"),
        (json!({ "base": "nowhere" }), "nowhere"),
    ] {
        let error = mcp.call_error("get_repo_map", arguments.clone()).await;
        assert!(error.contains(words), "{arguments}: {error}");
    }
    let refused = tokio::task::block_in_place(|| map(cache.path(), cache.path(), &[]));
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    assert!(mcp.close().await.success());
}

/// The symbols of a file are parsed once, for all worktrees; a cache that cannot be used is an error with a way out.
#[test]
fn worktrees_share_the_cache_and_an_edit_changes_the_map() {
    let (repo, cache) = (repository(), tempfile::tempdir().unwrap());
    let first = text(&map(&repo.path(), cache.path(), &["--tests"]));
    let worktree = cache.path().join("worktree");
    repo.open().worktree("second", &worktree, None).unwrap();
    assert_eq!(text(&map(&worktree, cache.path(), &["--tests"])), first);
    assert_eq!(std::fs::read_dir(cache.path().join("symbols")).unwrap().count(), 1);
    repo.commit(&[("src/queue.py", &QUEUE.replace("put_item", "add_item"))]);
    assert_eq!(text(&map(&repo.path(), cache.path(), &["--tests"])), first.replace("put_item", "add_item"));

    let file = cache.path().join("file");
    std::fs::write(&file, "").unwrap();
    let refused = map(&repo.path(), &file, &[]);
    let error = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && error.contains("CFQ_CACHE"), "{error}");
    let json = map(&repo.path(), cache.path(), &["--json"]);
    let json: Value = serde_json::from_str(&text(&json)).unwrap();
    assert_eq!((&json["parts"], &json["definitions"]), (&json!(1), &json!(4)), "{json}");
}

/// Sources of this workspace, which are larger than the maps, and a real tokenizer.
#[test]
fn map_keeps_its_budget_and_its_bytes() {
    let (repo, cache) = (UserRepo::with_uncommitted_changes(), tempfile::tempdir().unwrap());
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut sources = Vec::new();
    for folder in ["proto", "scheduler", "agent-runner"] {
        collect(workspace, &workspace.join(folder), &mut sources);
    }
    let files: Vec<(&str, &str)> = sources.iter().map(|(path, text)| (path.as_str(), text.as_str())).collect();
    assert!(files.len() > 300, "{}", files.len());
    repo.commit(&files);
    let vocabulary = Vocabulary::read(&ModelFile::read(&small_model::file()).unwrap()).unwrap();
    for tokens in [256, 1000, 4000, 16_000, 64_000] {
        let limit = format!("--tokens={tokens}");
        let first = text(&map(&repo.path(), cache.path(), &[&limit]));
        let length = vocabulary.encode(&first).unwrap().len();
        assert!(length <= tokens && length > tokens / 4, "{length} of {tokens} tokens");
        assert_eq!(text(&map(&repo.path(), cache.path(), &[&limit])), first);
    }
    let fresh = tempfile::tempdir().unwrap();
    let (with_cache, without) = (map(&repo.path(), cache.path(), &[]), map(&repo.path(), fresh.path(), &[]));
    assert_eq!(text(&with_cache), text(&without));
}

fn collect(workspace: &Path, folder: &Path, sources: &mut Vec<(String, String)>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.ends_with("target") {
            collect(workspace, &path, sources);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let relative = path.strip_prefix(workspace).unwrap().to_string_lossy().into_owned();
            sources.push((relative, std::fs::read_to_string(&path).unwrap()));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn policies_are_read_by_the_client_and_given_to_the_agents() {
    use cfq_tests::scripted::{Reply, file, review};
    let cluster = Cluster::start().await;
    let (repo, cache) = (repository(), tempfile::tempdir().unwrap());
    let mut mcp = client(&repo.path(), cache.path()).await;
    let default = mcp.call("read_org_policies", json!({ "policy_type": "security" })).await;
    assert!(default["default_policy"].as_str().unwrap().contains("Injection"), "{default}");
    assert_eq!(default["untrusted_content"]["policies"], json!([]), "{default}");
    repo.commit(&[(".cfq/policies/security.md", "No eval.\n"), (".cfq/policies/names.md", "Full words.\n")]);
    let own = mcp.call("read_org_policies", json!({ "policy_type": "security" })).await;
    assert!(own.get("default_policy").is_none(), "{own}");
    let policies = json!([{ "path": ".cfq/policies/security.md", "policy_type": "security", "text": "No eval.\n" }]);
    assert_eq!(own["untrusted_content"]["policies"], policies);
    let custom = mcp.call("read_org_policies", json!({ "policy_type": "custom" })).await;
    assert_eq!(custom["untrusted_content"]["policies"][0]["text"], json!("Full words.\n"));
    let all = mcp.call("read_org_policies", json!({})).await;
    assert_eq!(all["untrusted_content"]["policies"].as_array().map(Vec::len), Some(2), "{all}");
    for folder in [cluster.server_policies_folder(), repo.path().join("config/policies")] {
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("security.md"), "No secrets.\n").unwrap();
    }
    let both = mcp.call("read_org_policies", json!({})).await;
    let first = json!({ "path": "server policies/security.md", "policy_type": "security", "text": "No secrets.\n" });
    assert_eq!(both["untrusted_content"]["policies"][0], first, "{both}");
    assert_eq!(both["untrusted_content"]["policies"].as_array().map(Vec::len), Some(3), "{both}");
    let error = mcp.call_error("read_org_policies", json!({ "policy_type": "naming" })).await;
    assert!(error.contains("expected one of `style`, `security`, `custom`"), "{error}");

    cluster.models.script("alpha", vec![Reply::Text(file("add.py", "def add(a, b):\n    return a + b\n"))]);
    cluster.models.script("beta", vec![Reply::Text(review(93, &[]))]);
    let task = cluster.submit(&cluster.spec(&repo)).await;
    cluster.wait_until_settled(task).await;
    for model in ["alpha", "beta"] {
        let prompt = &cluster.models.prompts(model)[0];
        for rule in ["No secrets.", "No eval.", "Full words."] {
            assert!(prompt.contains(rule), "{model}: {prompt}");
        }
        // The prompt is JSON.
        let map = r"    1: class Queue:\n      2: def put_item(self, item):\n";
        assert!(
            prompt.contains("# Map of the repository before the change") && prompt.contains(map),
            "{model}: {prompt}"
        );
    }
    // Over HTTP the files of the caller's machine cannot be reached.
    let mut http = McpClient::start_http(&cluster, STATELESS).await;
    assert!(http.tools.iter().all(|tool| tool["name"] != json!("get_repo_map")));
    let unknown = http.request("tools/call", json!({ "name": "get_repo_map", "arguments": {} })).await;
    assert!(unknown["error"]["message"].as_str().unwrap().contains("there is no tool"), "{unknown}");
    cluster.finish().await;
}
