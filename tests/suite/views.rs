//! Tests of what the commands show: lists on terminals of several widths, with and without colours, and in a pipe;
//! diffs; events that are followed; and questions that are answered on a terminal.

mod selections;

use std::path::Path;
use std::process::{Command, Output, Stdio};

use cfq_proto::ids::TaskKey;
use cfq_proto::task::TaskState;
use cfq_tests::binary;
use cfq_tests::cluster::{Cluster, TOKEN, WAIT_LIMIT};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Gate, Reply, file, review};
use cfq_tests::terminal::Terminal;
use serde_json::Value;

fn command(cluster: &Cluster, args: &[&str]) -> Command {
    let mut command = Command::new(tokio::task::block_in_place(binary::cfq));
    command.args(args).env("CFQ_URL", cluster.client.url()).env("CFQ_TOKEN", TOKEN).env_remove("CFQ_LOG");
    command.env_remove("NO_COLOR").env_remove("CLICOLOR").env_remove("CLICOLOR_FORCE").env("PAGER", "cat");
    command.env_remove("CFQ_PAGER").stdin(Stdio::null());
    command
}

fn run(cluster: &Cluster, args: &[&str]) -> Output {
    tokio::task::block_in_place(|| command(cluster, args).output().unwrap())
}

#[track_caller]
fn text(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// The raw output of a command on a terminal of this width.
async fn on_terminal(command: Command, columns: u16) -> (String, Vec<String>) {
    let terminal = Terminal::run(command, columns);
    let bytes = terminal.output();
    let (code, rows) = terminal.wait_for_exit(WAIT_LIMIT).await;
    assert_eq!(code, Some(0), "{}", rows.join("\n"));
    let bytes = bytes.lock().unwrap().clone();
    (String::from_utf8(bytes).unwrap(), rows)
}

/// A cluster with a task that is merged after two iterations, and one that needs a human.
async fn with_two_tasks() -> (Cluster, UserRepo) {
    let cluster = Cluster::start().await;
    let first = file("add.py", "def add(a, b):\n    return a - b\n");
    let second = file("add.py", "def add(a, b):\n    return a + b\n");
    cluster.models.script("alpha", vec![Reply::Text(first), Reply::Text(second)]);
    let defects = [("critical", "it subtracts"), ("minor", "no documentation")];
    cluster.models.script("beta", vec![Reply::Text(review(40, &defects)), Reply::Text(review(95, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let merged = cluster.submit(&cluster.spec(&repo)).await;
    assert_eq!(cluster.wait_until_settled(merged).await.summary.state, TaskState::Merged);
    cluster.models.script("beta", vec![Reply::Text(review(40, &defects))]);
    let mut spec = cluster.spec(&repo);
    spec.description = "Write a function that adds, with a title that is longer than a narrow terminal".into();
    spec.max_iterations = Some(1);
    let escalated = cluster.submit(&spec).await;
    assert_eq!(cluster.wait_until_settled(escalated).await.summary.state, TaskState::Escalated);
    (cluster, repo)
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_fit_terminals_and_are_whole_in_pipes() {
    let (cluster, repo) = with_two_tasks().await;
    for list in [&["ls"][..], &["jobs"], &["pr", "ls"]] {
        let piped = text(&run(&cluster, list));
        assert!(!piped.contains('\u{1b}'), "{piped:?}");
        for columns in [40, 80, 120] {
            let (bytes, rows) = on_terminal(command(&cluster, list), columns).await;
            // Each line has one row: as many rows as lines in the pipe.
            assert_eq!(rows.len(), piped.lines().count(), "{list:?} {columns}: {}", rows.join("\n"));
            assert!(bytes.contains("\u{1b}[1m"), "{bytes:?}");
            let mut plain = command(&cluster, list);
            plain.env("NO_COLOR", "1");
            assert!(!on_terminal(plain, columns).await.0.contains("\u{1b}[1m"), "{list:?}");
        }
    }
    let listed = text(&run(&cluster, &["ls"]));
    let rows: Vec<&str> = listed.lines().collect();
    assert!(rows[1].starts_with("t2 ") && rows[1].contains("escalated") && rows[1].contains("longer than a narrow"));
    // The newest task does not need a human; the older one comes first.
    cluster.models.script("alpha", vec![Reply::Hang]);
    let third = cluster.submit(&cluster.spec(&repo)).await;
    let ordered = text(&run(&cluster, &["ls"]));
    let tasks: Vec<&str> = ordered.lines().skip(1).map(|row| row.split(' ').next().unwrap()).collect();
    assert_eq!(tasks, ["t2", "t3", "t1"]);
    let json: Value = serde_json::from_str(&text(&run(&cluster, &["--json", "ls", "--limit", "2"]))).unwrap();
    assert_eq!((json["tasks"][0]["number"].as_i64(), json["tasks"].as_array().unwrap().len()), (Some(3), 2));
    let paged = run(&cluster, &["ls", "--limit", "1"]);
    assert!(String::from_utf8_lossy(&paged.stderr).contains("1 of 3 tasks, next: cfq ls --limit 1 --after "));

    // By repository and time.
    let folder = repo.path().join("folder");
    std::fs::create_dir(&folder).unwrap();
    let here = text(&run(&cluster, &["ls", "--repo", folder.to_str().unwrap(), "--since", "1h"]));
    assert_eq!(here.lines().count(), 4, "{here}");
    let elsewhere = tempfile::tempdir().unwrap();
    assert_eq!(text(&run(&cluster, &["ls", "--repo", elsewhere.path().to_str().unwrap()])), "no such tasks\n");
    assert_eq!(text(&run(&cluster, &["ls", "--since", "2100-01-01T00:00:00Z"])), "no such tasks\n");
    cluster.client.cancel(third, "").await.unwrap();

    // A list that is printed again shows the change.
    let mut terminal = Terminal::run(command(&cluster, &["ls", "-w"]), 80);
    terminal.wait_for_text("t3    cancelled", WAIT_LIMIT).await;
    cluster.models.script("alpha", vec![Reply::Hang]);
    cluster.submit(&cluster.spec(&repo)).await;
    terminal.wait_for_text("t4    ", WAIT_LIMIT).await;
    terminal.send_keys(b"\x03");
    assert_eq!(terminal.wait_for_exit(WAIT_LIMIT).await.0, Some(130));
    for (list, key) in
        [(&["nodes"][..], "nodes"), (&["pr", "ls"], "prs"), (&["jobs"], "jobs"), (&["machines", "ls"], "machines")]
    {
        let json: Value = serde_json::from_str(&text(&run(&cluster, &[&["--json"], list].concat()))).unwrap();
        assert!(!json[key].as_array().unwrap().is_empty(), "{list:?}: {json}");
    }
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn diffs_are_coloured_counted_and_compared() {
    let (cluster, _repo) = with_two_tasks().await;
    let diff = |args: &[&str]| text(&run(&cluster, &[&["diff", "t1"], args].concat()));
    assert_eq!(diff(&["--name-only"]), "add.py\n");
    assert_eq!(diff(&["--stat"]), " add.py | 2 ++\n 1 file changed, 2 insertions(+)\n");
    let between = diff(&["--from", "1", "--iteration", "2"]);
    assert!(between.contains("-    return a - b\n+    return a + b\n"), "{between}");
    assert!(between.starts_with("diff --git a/add.py b/add.py\n--- a/add.py\n+++ b/add.py\n@@"), "{between}");
    assert_eq!(diff(&["--from", "2"]), "");
    let json: Value = serde_json::from_str(&text(&run(&cluster, &["--json", "diff", "t1", "--stat"]))).unwrap();
    assert_eq!(json["files"][0], serde_json::json!({ "path": "add.py", "added": 2, "removed": 0 }));
    let (coloured, _) = on_terminal(command(&cluster, &["diff", "t1"]), 80).await;
    assert!(coloured.contains("\u{1b}[32m+def add(a, b):\u{1b}[0m"), "{coloured:?}");
    assert!(diff(&["--color", "always"]).contains("\u{1b}[32m+def"));
    let (plain, _) = on_terminal(command(&cluster, &["diff", "t1", "--color", "never"]), 80).await;
    assert!(!plain.contains('\u{1b}'), "{plain:?}");
    // A pager gets the whole text.
    let mut paged = command(&cluster, &["diff", "t1"]);
    paged.env("PAGER", "sed 's/^/paged: /'");
    let (_, rows) = on_terminal(paged, 80).await;
    assert!(rows.iter().all(|row| row.starts_with("paged: ")), "{}", rows.join("\n"));
    let mut missing = command(&cluster, &["diff", "t1"]);
    missing.env("CFQ_PAGER", "/nowhere/pager");
    let (_, rows) = on_terminal(missing, 80).await;
    let all = rows.join("\n");
    assert!(all.contains("--no-pager") && all.contains("+def add(a, b):"), "{all}");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn watch_and_logs_have_short_and_verbose_output() {
    let (cluster, repo) = with_two_tasks().await;
    let watched = text(&run(&cluster, &["watch", "t1"]));
    let short = [
        "t1 alpha runs on n1 (openai:scripted/alpha)\n",
        "t1 reviewed: 40/100, 2 defects\n",
        "t1 is merged: delivered as branch cfq/t1-",
    ];
    for words in short {
        assert!(watched.contains(words), "{words:?} is not in {watched}");
    }
    assert!(!watched.contains("pull request") && !watched.contains("prefill"), "{watched}");
    let verbose = text(&run(&cluster, &["watch", "t1", "-v"]));
    assert!(verbose.contains("opened an internal pull request") && verbose.contains("prefill"), "{verbose}");
    assert_eq!(text(&run(&cluster, &["logs", "t1"])).lines().count(), watched.lines().count());
    let last = text(&run(&cluster, &["logs", "t1", "-n", "2"]));
    assert!(last.lines().count() == 2 && last.contains("t1 is merged"), "{last}");
    let events = text(&run(&cluster, &["--json", "logs", "t1", "--since", "1h"]));
    assert!(events.lines().all(|line| serde_json::from_str::<Value>(line).unwrap()["body"]["type"].is_string()));
    let shown = text(&run(&cluster, &["show", "t1", "t2"]));
    assert!(shown.contains("  scores      40 ▄  95 █\n") && shown.contains("\nt2  escalated"), "{shown}");
    let several = run(&cluster, &["watch", "t1", "t2"]);
    assert_eq!(several.status.code(), Some(3), "t2 needs a human: {several:?}");

    // The critic's reply is shown as lines while it is written, and in JSON on request.
    let gate = Gate::closed();
    let code = Reply::Text(file("add.py", "def add(a, b):\n    return a + b\n"));
    cluster.models.script("alpha", vec![code]);
    let report = review(90, &[("minor", "no documentation")]);
    let cut = report.find("\"suggestions\"").unwrap();
    let (before, after) = report.split_at(cut);
    cluster.models.script("beta", vec![Reply::Gated(before.to_owned(), after.to_owned(), gate.clone())]);
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let newest = Terminal::run(command(&cluster, &["watch"]), 100);
    newest.wait_for_text("minor     add.py:1: no documentation", WAIT_LIMIT).await;
    let raw = Terminal::run(command(&cluster, &["watch", "t3", "--raw"]), 100);
    raw.wait_for_text("\"severity\":\"minor\"", WAIT_LIMIT).await;
    let followed = Terminal::run(command(&cluster, &["logs", "-f", "t3"]), 100);
    followed.wait_for_text("t3 beta runs on n1", WAIT_LIMIT).await;
    gate.open();
    for terminal in [newest, raw, followed] {
        let (code, rows) = terminal.wait_for_exit(WAIT_LIMIT).await;
        let all = rows.join("\n");
        assert!(code == Some(0) && all.contains("t3 is merged"), "{all}");
    }
    cluster.wait_until_settled(task).await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn question_is_answered_on_a_terminal() {
    let (cluster, _repo) = with_two_tasks().await;
    let mut terminal = Terminal::run(command(&cluster, &["resolve", "t2"]), 100);
    terminal.wait_for_text("Enter to leave the question open", WAIT_LIMIT).await;
    terminal.send_keys(b"\r");
    let (code, rows) = terminal.wait_for_exit(WAIT_LIMIT).await;
    assert!(code == Some(0) && rows.join("\n").contains("the question stays open"), "{}", rows.join("\n"));
    let mut terminal = Terminal::run(command(&cluster, &["resolve", "t2"]), 100);
    terminal.wait_for_text("accept_best_effort", WAIT_LIMIT).await;
    terminal.send_keys(b"sure\r");
    terminal.wait_for_text("\"sure\" is not an answer", WAIT_LIMIT).await;
    terminal.send_keys(b"accept_best_effort\r");
    let (code, rows) = terminal.wait_for_exit(WAIT_LIMIT).await;
    assert_eq!(code, Some(0), "{}", rows.join("\n"));
    let key = TaskKey::Number("t2".parse().unwrap());
    assert_eq!(cluster.wait_until_settled(key).await.summary.state, TaskState::Accepted);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn submit_warns_and_dry_run_submits_nothing() {
    let (cluster, repo) = with_two_tasks().await;
    let path = repo.path();
    let path = path.to_str().unwrap();
    let count = async || cluster.client.tasks(None, 100).await.unwrap().tasks.len();
    let dry_run = run(&cluster, &["submit", "Write mul(a, b)", "--repo", path, "--context", "*.py", "--dry-run"]);
    let shown = text(&dry_run);
    let map = "# Map of the repository before the change";
    for words in ["openai:scripted/alpha on: n1 (loaded", "Write mul(a, b)", "def sub(a, b):", "--- user", map] {
        assert!(shown.contains(words), "{words:?} is not in {shown}");
    }
    assert!(String::from_utf8_lossy(&dry_run.stderr).contains("nothing was submitted"), "{dry_run:?}");
    assert_eq!(count().await, 2);
    let list = tempfile::tempdir().unwrap();
    let list = list.path().join("context.txt");
    std::fs::write(&list, "math.py\n\n*.md\n").unwrap();
    let context = format!("@{}", list.display());
    let submitted = run(&cluster, &["submit", "Write mul(a, b)", "--repo", path, "--context", &context]);
    let warnings = String::from_utf8_lossy(&submitted.stderr).into_owned();
    // A modified file, a staged one and an untracked one.
    assert!(warnings.contains("warning: 3 uncommitted changes are not part of the task"), "{warnings}");
    assert!(
        warnings.contains("note: t1, t2 start from the same commit; if results change the same lines"),
        "{warnings}"
    );
    let detail = cluster.client.task(TaskKey::Number("t3".parse().unwrap())).await.unwrap();
    assert_eq!(detail.spec.context_files, ["math.py", "README.md"]);
    // Several documents of one file are several tasks.
    let tasks = Path::new(path).join("tasks.yaml");
    std::fs::write(&tasks, "description: one\n---\ndescription: two\nlanguage: rust\n---\n").unwrap();
    let batch = run(&cluster, &["submit", "-f", tasks.to_str().unwrap(), "--repo", path]);
    assert_eq!(text(&batch), "t4 accepted\nt5 accepted\n");
    assert_eq!(cluster.client.task(TaskKey::Number("t5".parse().unwrap())).await.unwrap().spec.language, "rust");
    // The repository of a task file is relative to the file.
    let folder = Path::new(path).join("tasks");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("task.yaml"), "description: three\nrepo: ..\n").unwrap();
    let relative = run(&cluster, &["submit", "-f", folder.join("task.yaml").to_str().unwrap()]);
    assert_eq!(text(&relative), "t6 accepted\n");
    assert_eq!(cluster.client.task(TaskKey::Number("t6".parse().unwrap())).await.unwrap().spec.repo, path);
    cluster.finish().await;
}

/// Before the size of a model is known, nothing is shown as transferred.
#[tokio::test(flavor = "multi_thread")]
async fn fetch_without_a_connection_shows_no_full_bar() {
    let home = tempfile::tempdir().unwrap();
    let mut pull = Command::new(tokio::task::block_in_place(binary::cfq));
    pull.args(["models", "pull", "hf:org/model:m.gguf"]).env("CFQ_DATA", home.path().join("data"));
    pull.env("CFQ_CONFIG", home.path()).env("CFQ_CACHE", home.path()).env("HOME", home.path()).env_remove("HF_HOME");
    pull.env("HF_ENDPOINT", format!("http://{}", cfq_tests::cluster::free_address())).env_remove("CFQ_LOG");
    let mut terminal = Terminal::run(pull, 80);
    let bytes = terminal.output();
    terminal.wait_for_text("retrying", WAIT_LIMIT).await;
    terminal.send_keys(b"\x03");
    terminal.wait_for_exit(WAIT_LIMIT).await;
    let text = String::from_utf8_lossy(&bytes.lock().unwrap()).into_owned();
    assert!(!text.contains('█'), "{text:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn completions_list_tasks_nodes_and_models() {
    let (cluster, _repo) = with_two_tasks().await;
    let script = text(&run(&cluster, &["completions", "bash"]));
    assert!(script.contains("CFQ_COMPLETE"), "{script}");
    // As the script does it.
    let complete = |words: &[&str]| {
        let mut command = command(&cluster, &[&["--", "cfq"], words].concat());
        command.env("CFQ_COMPLETE", "bash").env("_CLAP_COMPLETE_INDEX", words.len().to_string());
        command.env("_CLAP_IFS", "\n").env("_CLAP_COMPLETE_COMP_TYPE", "9").env("_CLAP_COMPLETE_SPACE", "true");
        text(&tokio::task::block_in_place(|| command.output().unwrap()))
    };
    let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(words(&complete(&["show", "t"])), ["t2", "t1"]);
    assert_eq!(words(&complete(&["ls", "--state", "es"])), ["escalated"]);
    assert_eq!(words(&complete(&["jobs", "--node", ""])), ["n1"]);
    assert!(complete(&["agents", "set", "alpha", "openai"]).contains("openai:scripted/alpha2"));
    assert_eq!(words(&complete(&["pr", "sh"])), ["show"]);
    assert_eq!(words(&complete(&["schema", "prs"])), ["prs"]);
    // The server of another data folder is not this one: nothing is proposed.
    let elsewhere = tempfile::tempdir().unwrap();
    let with_data = |data: &str| {
        let mut command = command(&cluster, &["--", "cfq", "--data", data, "show", "t"]);
        command.env_remove("CFQ_URL").env("CFQ_COMPLETE", "bash").env("_CLAP_COMPLETE_INDEX", "4");
        command.env("_CLAP_IFS", "\n").env("_CLAP_COMPLETE_COMP_TYPE", "9").env("_CLAP_COMPLETE_SPACE", "true");
        text(&tokio::task::block_in_place(|| command.output().unwrap()))
    };
    assert_eq!(with_data(elsewhere.path().to_str().unwrap()), "");
    cluster.finish().await;
}
