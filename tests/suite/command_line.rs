//! Tests of the binary's error messages for bad input, no server, or a wrong token. Each error states what is wrong and
//! the next step, with the documented exit code, and nothing panics.

use std::path::Path;
use std::process::{Command, Output};

use cfq_tests::binary;
use cfq_tests::cfq_process::CfqProcess;
use cfq_tests::cluster::{Cluster, TOKEN, WAIT_LIMIT};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Gate, ModelServer, Reply, file, review};
use cfq_tests::wait;

fn command(home: &Path, args: &[&str], env: &[(&str, &str)]) -> Command {
    let mut command = Command::new(binary::cfq());
    command.args(args).env_remove("CFQ_URL").env_remove("CFQ_TOKEN").current_dir(home);
    command.env("CFQ_DATA", home.join("data")).env("CFQ_CONFIG", home.join("config"));
    command.envs(env.iter().copied()).stdin(std::process::Stdio::null());
    command
}

fn cfq(home: &Path, args: &[&str], env: &[(&str, &str)]) -> Output {
    command(home, args, env).output().unwrap()
}

#[track_caller]
fn refused(output: &Output, code: i32, words: &[&str]) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{text}");
    for word in words {
        assert!(text.contains(word), "{word:?} is not in {text:?}");
    }
    assert!(!text.contains("panicked"), "{text}");
}

#[test]
fn usage_errors_name_the_next_step() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    refused(&cfq(dir, &["ls"], &[]), 5, &["no cfq server", "cfq up"]);
    refused(&cfq(dir, &["submit"], &[]), 5, &["cfq up"]);
    refused(&cfq(dir, &[], &[]), 5, &["no cfq server", "cfq up", "`cfq --help` lists all commands"]);
    refused(&cfq(dir, &["lss"], &[]), 2, &["ls"]);
    refused(&cfq(dir, &["show", "x7"], &[]), 2, &["t42"]);
    refused(&cfq(dir, &["ls", "--state", "done"], &[]), 2, &["merged"]);
    refused(&cfq(dir, &["--config", "none.toml", "up"], &[]), 2, &["none.toml", "--config"]);
    std::fs::write(dir.join("bad.toml"), "[agents.alpha]\nmodle = 1\n").unwrap();
    refused(&cfq(dir, &["--config", "bad.toml", "up"], &[]), 2, &["bad.toml", "modle"]);
    refused(&cfq(dir, &["up", "--bind", "127.0.0.1:0", "--postgres-bin", "/nowhere"], &[]), 4, &["/nowhere"]);
    let open = ["up", "--bind", "0.0.0.0:0", "--postgres-bin", "/nowhere"];
    let open_twice = [&open[..], &["--allow-plaintext"]].concat();
    let next_step = ["0.0.0.0:0", "--lan", "ssh -L", "allow_plaintext = true", "--allow-plaintext"];
    refused(&cfq(dir, &open, &[]), 2, &next_step);
    refused(&cfq(dir, &[&open[..], &["-d"]].concat(), &[]), 2, &next_step);
    refused(&cfq(dir, &open_twice, &[]), 2, &next_step);
    refused(&cfq(dir, &["up"], &[("CFQ_BIND", "[::]:0")]), 2, &["--lan"]);
    refused(
        &cfq(dir, &["up", "--lan", "--bind", "127.0.0.1:7711"], &[]),
        2,
        &["cannot both listen on port 7711", "--bind"],
    );
    refused(&cfq(dir, &["up", "--lan", "--allow-plaintext"], &[]), 2, &["cannot be used with"]);
    refused(&cfq(dir, &["join"], &[]), 2, &["has joined no server yet", "cfq up --lan"]);
    refused(&cfq(dir, &["token", "create", "--ttl", "30"], &[]), 2, &["use 30m, 2h or 2d"]);
    refused(&cfq(dir, &["token", "create", "--ttl", "3651d"], &[]), 2, &["between 1s and 3650d"]);
    refused(&cfq(dir, &["token", "rm"], &[]), 2, &["--all"]);
    std::fs::write(dir.join("open.toml"), "[server]\nallow_plaintext = true\n").unwrap();
    refused(&cfq(dir, &[&["--config", "open.toml"], &open[..]].concat(), &[]), 2, &next_step);
    refused(&cfq(dir, &[&["--config", "open.toml"], &open_twice[..]].concat(), &[]), 4, &["/nowhere"]);
    refused(&cfq(dir, &["--config", "none.toml", "ls"], &[]), 2, &["none.toml", "--config"]);
    let unknown = cfq(dir, &["--json", "lss"], &[]);
    let report: serde_json::Value = serde_json::from_slice(&unknown.stderr).unwrap();
    assert_eq!(report["error"]["exit_code"], 2, "{report}");
    for days in ["-1", "nan", "inf", "1e9", "x"] {
        let option = format!("--older-than={days}");
        refused(&cfq(dir, &["gc", "--dry-run", &option], &[]), 2, &["between 0 and 36525"]);
    }
    let away = [("CFQ_URL", "http://127.0.0.1:9"), ("CFQ_TOKEN", "x")];
    let (repo, elsewhere) = (UserRepo::with_uncommitted_changes(), tempfile::tempdir().unwrap());
    repo.open().config().unwrap().set_str("core.worktree", elsewhere.path().to_str().unwrap()).unwrap();
    let root = repo.path();
    let submit = ["submit", "Write add(a, b)", "--repo", root.to_str().unwrap()];
    refused(&cfq(dir, &submit, &away), 2, &["sets core.worktree to"]);
    refused(&cfq(dir, &["watch", "t1"], &away), 5, &["no server responds at http://127.0.0.1:9"]);
    refused(&cfq(dir, &["token", "rotate"], &away), 2, &["CFQ_URL", "the machine of that server"]);
    refused(&cfq(dir, &["ls"], &away), 5, &["127.0.0.1:9"]);
    refused(&cfq(dir, &["ls"], &[("CFQ_URL", "localhost"), ("CFQ_TOKEN", "x")]), 2, &["CFQ_URL", "http://"]);
    refused(&cfq(dir, &["pr", "show", "x"], &[]), 2, &["cfq pr ls"]);
    refused(&cfq(dir, &["models", "pull", "gpt"], &[]), 2, &["pypi:"]);
    std::fs::write(dir.join("broken.gguf"), "hello").unwrap();
    let broken = format!("path:{}", dir.join("broken.gguf").display());
    refused(&cfq(dir, &["models", "pull", &broken], &[]), 2, &["broken.gguf", "not a GGUF file"]);
    refused(&cfq(dir, &["resolve", "t1", "--action", "switch_llm"], &away), 2, &["--model MODEL", "cfq nodes"]);
    assert_eq!(cfq(dir, &["--help"], &[]).status.code(), Some(0));
    assert_eq!(cfq(dir, &["down"], &[]).status.code(), Some(0), "`cfq down` succeeds if nothing runs");
    assert_eq!(cfq(dir, &["completions", "bash"], &[]).status.code(), Some(0));
    let (pages, file) = (dir.join("share/man1"), dir.join("broken.gguf"));
    refused(&cfq(dir, &["man", file.to_str().unwrap()], &[]), 2, &["cannot write manual pages to", "broken.gguf"]);
    let written = cfq(dir, &["man", pages.to_str().unwrap()], &[]);
    assert_eq!(written.status.code(), Some(0), "{written:?}");
    let page = |name: &str| std::fs::read_to_string(pages.join(name)).unwrap();
    assert!(page("cfq.1").contains("cfq\\-submit(1)"), "{}", page("cfq.1"));
    for (name, option) in [("cfq-submit.1", "\\-\\-deadline"), ("cfq-models-pull.1", "cfq models pull")] {
        assert!(page(name).contains(option), "{}", page(name));
    }
    assert!(!pages.join("cfq-serve.1").exists(), "a hidden command");
}

#[test]
fn engine_check_passes_on_cpu_and_lists_skipped_checks() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    let output = cfq(dir, &["--json", "engine", "check", "--quick", "--device", "cpu"], &[]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{text} {}", String::from_utf8_lossy(&output.stderr));
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    let list = |name: &str| report[name].as_array().unwrap().clone();
    assert_eq!((list("parity").len(), list("speed").len()), (8 + 12 + 3 + 10, 1), "{report}");
    assert_eq!((list("memory").len(), list("failures").len()), (1, 0), "{report}");
    for row in list("parity") {
        let (difference, allowed) = (row["difference"].as_f64().unwrap(), row["allowed"].as_f64().unwrap());
        assert!(row["passed"] == true && difference <= allowed, "{row}");
    }
    for row in &list("speed")[0]["decode"].as_array().unwrap()[..] {
        assert!(row["tokens_per_second"].as_f64().unwrap() > 0.0, "{row}");
    }
    let not_run = list("not_run").iter().map(|what| what.to_string()).collect::<String>();
    for what in ["1.5 B", "anything on a GPU", "safetensors", "RoPE scaling"] {
        assert!(not_run.contains(what), "{what} is not in {not_run}");
    }
    refused(&cfq(dir, &["engine", "check", "--device", "gpu"], &[]), 2, &["cuda:N"]);
    refused(&cfq(dir, &["engine", "check", "--quick", "--device", "cuda:99"], &[]), 4, &["cuda:99"]);
}

#[test]
fn models_fit_works_without_a_server() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../inference-node/engine/tests/fixtures/models");
    for file in [fixtures.join("phi3"), fixtures.join("phi3/model.gguf")] {
        let model = format!("path:{}", file.display());
        let output = cfq(dir, &["--json", "models", "fit", &model], &[]);
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let term = |name: &str| report["terms"][name].as_u64().unwrap();
        let cpu = &report["devices"][0];
        let longest = cpu["lengths"].as_array().unwrap().last().unwrap();
        assert_eq!((&longest["tokens"], &longest["fits"]), (&report["context_tokens"], &true.into()), "{report}");
        let running = 512 * term("kv_bytes_per_token") + term("scratch_bytes");
        let fixed = term("weight_bytes") + term("table_bytes") + term("reserve_bytes");
        let sum = fixed + running.max(term("loading_bytes"));
        assert_eq!(longest["total_bytes"].as_u64(), Some(sum), "{report}");
        let words = cfq(dir, &["models", "fit", &model], &[]).stdout;
        let words = String::from_utf8_lossy(&words).into_owned();
        for part in ["weights", "tables", "KV", "per token", "reserve", "CONTEXT"] {
            assert!(words.contains(part), "{words}");
        }
    }
    std::fs::write(dir.join("notes.gguf"), "hello").unwrap();
    refused(&cfq(dir, &["models", "fit", "path:notes.gguf"], &[]), 2, &["notes.gguf", "not a GGUF file"]);
    refused(&cfq(dir, &["models", "fit", "hf:o/r:f.gguf"], &[]), 2, &["cfq models pull hf:o/r:f.gguf"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_says_whether_model_servers_can_be_used() {
    let models = ModelServer::start().await;
    for name in ["alpha", "beta"] {
        models.script(name, vec![]);
    }
    let home = tempfile::tempdir().unwrap();
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let doctor = |config: &str| {
        std::fs::write(home.path().join("cfq.toml"), config).unwrap();
        tokio::task::block_in_place(|| cfq(home.path(), &["--config", "cfq.toml", "doctor"], &[]))
    };
    let says = |beta: &str, expected: &[&str]| {
        let output = doctor(&format!(
            "[agents.alpha]\nmodel = \"openai:box/alpha\"\n[agents.beta]\nmodel = \"{beta}\"\n\
             [endpoints.box]\nurl = \"{}\"\n[endpoints.away]\nurl = \"http://{closed}/v1\"\n",
            models.url()
        ));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        for words in expected {
            assert!(text.contains(words), "{words:?} is not in {text}");
        }
    };
    says(
        "openai:box/betta",
        &[
            "box: answers, but does not list betta",
            "did you mean beta?",
            &format!("away: cannot reach http://{closed}/v1: "),
            "start that server, or correct `url` under [endpoints.away]",
        ],
    );
    models.greet_as_ollama();
    says(
        "ollama:box/betta",
        &[
            "box: is Ollama, whose OpenAI-compatible API silently truncates long prompts",
            "replace openai:box/alpha by ollama:box/alpha",
            "box: answers, but does not list betta",
            "cfq models pull ollama:box/betta",
        ],
    );
    let wrong = doctor("[endpoints.box]\nurl = \"localhost:11434\"\n");
    refused(&wrong, 2, &["cfq.toml: endpoint box: \"localhost:11434\" is not an http or https URL, such as"]);
}

#[test]
fn port_in_use_is_detected_before_start() {
    let home = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let bind = taken.local_addr().unwrap().to_string();
    refused(&cfq(home.path(), &["up", "--bind", &bind], &[]), 2, &[&bind, "--bind"]);
    assert!(!home.path().join("data/postgres").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn task_from_submit_to_pull_through_the_binary() {
    let cluster = Cluster::start().await;
    let gate = Gate::closed();
    let reply = file("add.py", "def add(a, b):\n    return a + b");
    let (first, rest) = reply.split_at(reply.find("return").unwrap());
    cluster.models.script("alpha", vec![Reply::Gated(first.into(), rest.into(), gate.clone())]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let path = repo.path();
    let home = tempfile::tempdir().unwrap();
    let url = cluster.client.url().to_owned();
    let run = |args: &[&str]| {
        let env = [("CFQ_URL", url.as_str()), ("CFQ_TOKEN", TOKEN)];
        tokio::task::block_in_place(|| cfq(home.path(), args, &env))
    };
    let run_with_stdin = |args: &[&str], bytes: &[u8]| {
        let stdin = home.path().join("stdin");
        std::fs::write(&stdin, bytes).unwrap();
        let mut command = command(home.path(), args, &[("CFQ_URL", url.as_str()), ("CFQ_TOKEN", TOKEN)]);
        command.stdin(std::fs::File::open(stdin).unwrap());
        tokio::task::block_in_place(|| command.output().unwrap())
    };
    let out = |output: &Output| String::from_utf8_lossy(&output.stdout).into_owned();

    let repo_arg = path.to_str().unwrap();
    let submit = ["submit", "Write add(a, b) in add.py", "--language", "python", "--repo", repo_arg, "--watch"];
    let mut submit = CfqProcess::start(home.path(), &submit, &url);
    // Generated text is shown to those who watch while it is generated.
    wait::until("the watch to print generated text", WAIT_LIMIT, || async {
        let text = submit.output();
        if text.contains("def add") { Ok(()) } else { Err(text) }
    })
    .await;
    gate.open();
    assert!(submit.wait_for_exit().await.success(), "{}", submit.output());
    let text = submit.output();
    assert!(
        text.contains("t1 accepted") && text.contains("def add") && text.contains("delivered as branch cfq/t1-"),
        "{text}"
    );

    assert!(out(&run(&["ls"])).contains("merged"));
    assert!(out(&run(&[])).contains("is ready, up for"), "without a command, the status");
    assert!(out(&run(&["show", "t1"])).contains("review  95/100"));
    assert!(out(&run(&["diff", "t1"])).contains("+def add(a, b):"));
    assert!(out(&run(&["logs", "t1"])).contains("converged"));
    assert!(out(&run(&["pr", "ls"])).contains("merged"));
    assert!(out(&run(&["pr", "show", "1"])).contains("cfq diff t1"));
    assert!(out(&run(&["nodes"])).contains("resident"));
    let json: serde_json::Value = serde_json::from_str(&out(&run(&["--json", "show", "t1"]))).unwrap();
    assert_eq!(json["summary"]["state"], "merged");
    let pulled: serde_json::Value = serde_json::from_str(&out(&run(&["--json", "pull", "t1"]))).unwrap();
    assert_eq!(pulled["branch"], json["delivered_branch"], "the same commit needs no second branch");

    refused(&run(&["show", "t99"]), 2, &["t99"]);
    refused(&run(&["resolve", "t1", "--action", "abort"]), 2, &["merged"]);
    let nowhere = run(&["submit", "x", "--repo", "/nowhere/at/all"]);
    refused(&nowhere, 2, &["/nowhere/at/all", "--repo"]);
    let plain = home.path().to_str().unwrap();
    refused(&run(&["submit", "x", "--repo", plain]), 2, &["not in a git repository"]);
    std::fs::write(home.path().join("t.yaml"), "description: x\nthresold: 3\n").unwrap();
    refused(&run(&["submit", "-f", "t.yaml", "--repo", repo_arg]), 2, &["thresold"]);
    std::fs::write(home.path().join("t.yaml"), "description: x\nagents: {alpha: {seed: many}}\n").unwrap();
    refused(&run(&["submit", "-f", "t.yaml", "--repo", repo_arg]), 2, &["t.yaml", "agents.alpha.seed"]);
    std::fs::write(home.path().join("t.yaml"), "description: [x\n").unwrap();
    refused(&run(&["submit", "-f", "t.yaml", "--repo", repo_arg]), 2, &["t.yaml", "line 1"]);
    refused(&run(&["submit", "-f", "none.yaml", "--repo", repo_arg]), 2, &["none.yaml"]);
    refused(&run(&["submit", "--repo", repo_arg]), 2, &["empty", "cfq submit"]);
    refused(&run_with_stdin(&["submit", "--repo", repo_arg], b"\xff\x00"), 2, &["not UTF-8", "--context"]);
    refused(&run_with_stdin(&["submit", "-f", "-"], b"thresold: 3"), 2, &["standard input", "thresold"]);
    // A relative repository starts from the folder of the file, not from the current one.
    std::fs::create_dir(home.path().join("tasks")).unwrap();
    let wrong_deadline = "description: x\nrepo: none\ndeadline: yesterday\n";
    std::fs::write(home.path().join("tasks/t.yaml"), wrong_deadline).unwrap();
    refused(&run(&["submit", "-f", "tasks/t.yaml"]), 2, &["tasks/t.yaml: deadline", "\"in 2h 30m\""]);
    std::os::unix::fs::symlink(&path, home.path().join("linked")).unwrap();
    std::fs::write(home.path().join("tasks/t.yaml"), "description: x\nrepo: ../linked\n").unwrap();
    assert_eq!(run(&["submit", "-f", "tasks/t.yaml", "--at", "in 3 days"]).status.code(), Some(0));
    let from_stdin = format!("description: later\nrepo: {repo_arg}\nrun_at: in 3 days\ndeadline: in 4 days\n");
    let accepted = run_with_stdin(&["submit", "-f", "-"], from_stdin.as_bytes());
    assert_eq!(accepted.status.code(), Some(0), "{accepted:?}");
    let cancelled = run(&["cancel", "--all"]);
    assert_eq!(cancelled.status.code(), Some(0), "{cancelled:?}");
    refused(&run(&["submit", "x", "--repo", repo_arg, "--context", "none.py"]), 2, &["none.py", "commit"]);
    let typo = run(&["submit", "x", "--repo", repo_arg, "--alpha", "openai:typo/x"]);
    refused(&typo, 2, &["agents.alpha.model", "no node has an endpoint typo", "known endpoints: scripted"]);
    let mut full = command(home.path(), &["ls"], &[("CFQ_URL", url.as_str()), ("CFQ_TOKEN", TOKEN)]);
    full.stdout(std::fs::File::options().write(true).open("/dev/full").unwrap());
    refused(&tokio::task::block_in_place(|| full.output().unwrap()), 4, &["cannot write the output"]);
    let env = [("CFQ_URL", url.as_str()), ("CFQ_TOKEN", "wrong")];
    let wrong = tokio::task::block_in_place(|| cfq(home.path(), &["ls"], &env));
    refused(&wrong, 2, &["token"]);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn undelivered_result_exits_with_3_and_names_the_next_command() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![Reply::Text(file("add.py", "def add(a, b):\n    return a + b"))]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    repo.branch("cfq");
    let home = tempfile::tempdir().unwrap();
    let url = cluster.client.url().to_owned();
    let run = |args: &[&str]| {
        let env = [("CFQ_URL", url.as_str()), ("CFQ_TOKEN", TOKEN)];
        tokio::task::block_in_place(|| cfq(home.path(), args, &env))
    };
    let out = |output: &Output| String::from_utf8_lossy(&output.stdout).into_owned();
    let path = repo.path();

    let submitted =
        run(&["submit", "Write add(a, b)", "--language", "python", "--repo", path.to_str().unwrap(), "--watch"]);
    assert_eq!(submitted.status.code(), Some(3), "{submitted:?}");
    let text = out(&submitted);
    assert!(text.contains("t1 is waiting_on_human") && text.contains("`cfq pull t1`"), "{text}");
    let shown = out(&run(&["show", "t1"]));
    for words in ["waiting_on_human", "needs a human", "cfq pull t1", "cfq pr show 1", "--action accept_best_effort"] {
        assert!(shown.contains(words), "{words:?} is not in {shown}");
    }

    let answers = run(&["resolve", "t1"]);
    assert_eq!(answers.status.code(), Some(0), "{answers:?}");
    for words in ["t1 is waiting_on_human", "needs a human", "    cfq resolve t1 --action accept_best_effort"] {
        assert!(out(&answers).contains(words), "{words:?} is not in {answers:?}");
    }

    // A pull into the same repository reports the task's reason; a pull into a clone succeeds.
    refused(&run(&["pull", "t1"]), 2, &["git branch -m cfq"]);
    let clone = home.path().join("clone");
    git2::build::RepoBuilder::new().clone(path.to_str().unwrap(), &clone).unwrap();
    let pulled = run(&["pull", "t1", "--repo", clone.to_str().unwrap()]);
    assert_eq!(pulled.status.code(), Some(0), "{pulled:?}");
    assert!(
        String::from_utf8_lossy(&pulled.stderr).contains("cfq resolve t1 --action accept_best_effort"),
        "{pulled:?}"
    );
    // The lines of git name the clone.
    for line in ["view it:  git -C ", "merge it: git -C "] {
        assert!(out(&pulled).contains(&format!("{line}{} ", clone.display())), "{pulled:?}");
    }

    let ended = run(&["resolve", "t1", "--action", "accept_best_effort", "--watch"]);
    assert_eq!(ended.status.code(), Some(0), "{ended:?}");
    assert!(out(&ended).contains("t1 is accepted: accepted without delivery (cannot create the branch"), "{ended:?}");
    assert!(!out(&run(&["ls"])).contains("merged"), "an undelivered result is not listed as merged");
    cluster.finish().await;
}

/// Git refuses the repositories of other users; every command that reads one says why, and which line helps.
#[tokio::test(flavor = "multi_thread")]
async fn repository_of_another_user_is_named() {
    // SAFETY: a plain system call without arguments.
    #[allow(unsafe_code)]
    if unsafe { libc::geteuid() } != 0 {
        return cfq_test_skip::skip("repository_of_another_user_is_named", "only root can give files away");
    }
    let cluster = Cluster::start().await;
    let repo = UserRepo::with_uncommitted_changes();
    let path = repo.path();
    let mut open = vec![path.clone()];
    while let Some(entry) = open.pop() {
        std::os::unix::fs::chown(&entry, Some(4_000_001), None).unwrap();
        if entry.is_dir() {
            open.extend(std::fs::read_dir(&entry).unwrap().map(|entry| entry.unwrap().path()));
        }
    }
    let home = tempfile::tempdir().unwrap();
    let repo = path.to_str().unwrap();
    let line = format!("git config --global --add safe.directory {repo}");
    for args in [
        &["submit", "x", "--repo", repo][..],
        &["submit", "x", "--repo", repo, "--dry-run"],
        &["review", "HEAD", "--repo", repo],
        &["map", "--repo", repo],
        &["checks", "show", "--repo", repo],
    ] {
        let env = [("CFQ_URL", cluster.client.url()), ("CFQ_TOKEN", TOKEN), ("HOME", home.path().to_str().unwrap())];
        let output = tokio::task::block_in_place(|| cfq(home.path(), args, &env));
        refused(&output, 2, &["belongs to another user", &line]);
    }
    assert!(cluster.client.tasks(None, 10).await.unwrap().tasks.is_empty());
    cluster.finish().await;
}
