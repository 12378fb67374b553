//! Tests with fake GPUs, reported by a fake NVML library with the real binary interface. They cover the values that
//! users, the scheduler and the metrics page see, and a node that loses a GPU.

use std::path::Path;
use std::process::{Command, Stdio};

use cfq_inference_node::models::{Hub, HubConfig, MeasuredLoad, ModelStore};
use cfq_proto::http::NodeView;
use cfq_proto::node::{Device, DeviceKind};
use cfq_tests::binary;
use cfq_tests::cluster::{Cluster, Options, TOKEN, WAIT_LIMIT};
use cfq_tests::fake_gpus::{FakeGpus, rtx_3060, rtx_3090, rtx_4090};
use cfq_tests::foreign_process::ForeignProcess;
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};
use cfq_tests::wait;

const GIB: u64 = 1 << 30;

fn cfq(home: &Path, args: &[&str], env: &[(String, String)]) -> String {
    let mut command = Command::new(binary::cfq());
    command.args(args).current_dir(home).env("CFQ_DATA", home.join("data")).env("CFQ_CONFIG", home.join("config"));
    command.envs(env.iter().map(|(k, v)| (k, v))).stdin(Stdio::null());
    let output = command.output().unwrap();
    String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap()
}

#[track_caller]
fn assert_contains(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "{word:?} is not in\n{text}");
    }
}

#[test]
fn doctor_reports_gpus_their_processes_and_faults() {
    let home = tempfile::tempdir().unwrap();
    let other = ForeignProcess::start();
    let pid = other.pid();
    let used = format!("used = {GIB}\ncompute = {pid} {GIB}\ngraphics = {pid} {}\n", GIB / 2);
    let busy = rtx_3060() + &used;
    let Some(gpus) = FakeGpus::install("doctor_reports_gpus_their_processes_and_faults", home.path(), &busy) else {
        return;
    };
    let doctor = || cfq(home.path(), &["doctor"], &gpus.environment());
    let text = doctor();
    let process = format!("also in use by sleep {pid} (1.0 GiB)");
    let first = "RTX 3060, 12.0 GiB, 1.2 GiB held by others, 45 °C, 32 of 170 W";
    assert_contains(&text, &["ok    cuda:0", first, &process]);
    assert_contains(&text, &["NVIDIA driver 580.95.05", "this build runs models on the CPU"]);

    // Two different GPUs: one is too hot, the other does not support queries for power and processes, like some laptop
    // GPUs.
    let hot = rtx_3090() + "throttle = 72\n";
    let bare = "[gpu]\nname = NVIDIA GeForce RTX 4090\ntotal = 25769803776\nfails = power 3\nfails = compute 4\n";
    gpus.set_scenario(&format!("{hot}{bare}"));
    let text = doctor();
    assert_contains(&text, &["warn  cuda:0", "throttled: temperature (hardware slowdown)", "check its cooling"]);
    assert_contains(&text, &["ok    cuda:1", "RTX 4090, 24.0 GiB\n"]);

    // One GPU is lost between two queries; the other is still reported.
    gpus.set_scenario(&format!("{}{}fails = temperature 15\n", rtx_4090(), rtx_3060()));
    let text = doctor();
    assert_contains(&text, &["ok    cuda:0", "RTX 4090", "warn  cuda:1", "is lost", "Xid"]);
    assert!(!text.contains("RTX 3060"), "{text}");

    gpus.set_scenario("");
    assert_contains(&doctor(), &["an NVIDIA driver but no GPU"]);
    gpus.set_scenario(&format!("init = 18\n{}", rtx_3060()));
    let mismatch = "of another version than the driver in the kernel";
    assert_contains(&doctor(), &["warn  driver", mismatch, "restart the machine"]);
    gpus.set_scenario("init = 9\n");
    assert_contains(&doctor(), &["its driver is not loaded", "modprobe nvidia"]);
    gpus.set_scenario("init = 999\n");
    assert_contains(&doctor(), &["does not answer", "models run on the CPU"]);
}

/// Scenario lines of an RTX 3060 with this many bytes free.
fn with_free(free: u64) -> String {
    format!("{}used = {}\n", rtx_3060(), 12 * GIB - GIB / 4 - free)
}

/// Tests that `models fit` uses the memory estimate for GPUs, as the loader does: the model does not fit on the GPU,
/// although it would fit by the estimate for the CPU.
#[test]
fn fit_reports_each_gpu_and_all_gpus_together() {
    let home = tempfile::tempdir().unwrap();
    let one_small = with_free(600 << 20) + &rtx_3090();
    let Some(gpus) = FakeGpus::install("fit_reports_each_gpu_and_all_gpus_together", home.path(), &one_small) else {
        return;
    };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../inference-node/engine/tests/fixtures/models/llama");
    let model = format!("path:{}", folder.display());
    let fit = || cfq(home.path(), &["models", "fit", &model], &gpus.environment());
    let devices = || {
        let text = cfq(home.path(), &["--json", "models", "fit", &model], &gpus.environment());
        serde_json::from_str::<serde_json::Value>(&text).unwrap()["devices"].as_array().unwrap().clone()
    };
    let found = devices();
    let ids: Vec<&str> = found.iter().map(|place| place["device"].as_str().unwrap()).collect();
    assert_eq!(ids, ["cpu", "cuda:0", "cuda:1", "cuda:0,cuda:1"]);
    assert_eq!(found.iter().map(|place| place["usable"] == true).collect::<Vec<_>>(), [true, false, false, false]);
    let fits = |place: &serde_json::Value| {
        let lengths = place["lengths"].as_array().unwrap();
        lengths.iter().map(|length| length["fits"].as_bool().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!((fits(&found[1]), fits(&found[2]), fits(&found[3])), (vec![false], vec![true], vec![true]));
    let term = |name: &str| found[2]["terms"][name].as_u64().unwrap();
    let longest = &found[2]["lengths"][0];
    let fixed = ["weight_bytes", "table_bytes", "scratch_bytes", "reserve_bytes"].map(term);
    let sum = fixed.iter().sum::<u64>() + 512 * term("kv_bytes_per_token");
    assert_eq!((longest["tokens"].as_u64(), longest["total_bytes"].as_u64()), (Some(512), Some(sum)), "{found:?}");
    assert_eq!(term("reserve_bytes"), 768 << 20);
    // One GPU is enough for the model.
    assert_eq!(found[3]["shares"].as_array().unwrap().len(), 1);
    let words = fit();
    assert_contains(
        &words,
        &["RTX 3060): 600.0 MiB available; this build runs models on the CPU", "600.0 MiB are available: weights"],
    );
    assert_contains(&words, &["+ reserve 768.0 MiB =", "cuda:0,cuda:1 ("]);

    // Neither GPU fits the model alone.
    gpus.set_scenario(&with_free(sum - 8192).repeat(2));
    let found = devices();
    assert_eq!([1, 2, 3].map(|at| fits(&found[at])), [vec![false], vec![false], vec![true]], "{found:?}");
    let layers: Vec<_> = found[3]["shares"].as_array().unwrap().iter().map(|part| part["layers"].as_u64()).collect();
    assert_eq!(layers, [Some(1), Some(1)]);
    assert_contains(&fit(), &["cuda:0: layers 0 to 0, ", "cuda:1: layers 1 to 1, "]);

    gpus.set_scenario(&with_free(600 << 20).repeat(2));
    assert_contains(&fit(), &["needs ", "on each GPU", "the GPUs have 600.0 MiB and 600.0 MiB"]);
}

#[test]
fn measured_load_memory_follows_the_gpu_uuid() {
    let home = tempfile::tempdir().unwrap();
    let both = rtx_3090() + &rtx_3060();
    let Some(gpus) = FakeGpus::install("measured_load_memory_follows_the_gpu_uuid", home.path(), &both) else { return };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../inference-node/engine/tests/fixtures/models/llama");
    let model = format!("path:{}", folder.display());
    let hub = Hub::new(&HubConfig::default(), |_| None);
    let store = ModelStore { dir: home.path().join("cache/models"), quota: None, bound: Vec::new(), hub };
    let took = MeasuredLoad { predicted: 1000, measured: 1250 };
    // The second key is in the old format, an index: earlier versions did not identify GPUs by UUID.
    let kept = ["GPU-3090", "cuda:1"].map(|key| (key.to_owned(), took));
    store.record_load_end(&model.parse().unwrap(), &kept).unwrap();
    let mut env = gpus.environment();
    env.push(("CFQ_CACHE".to_owned(), home.path().join("cache").to_str().unwrap().to_owned()));
    let corrected = || {
        let text = cfq(home.path(), &["--json", "models", "fit", &model], &env);
        let found = serde_json::from_str::<serde_json::Value>(&text).unwrap();
        ["cuda:0", "cuda:1"].map(|id| {
            let place = found["devices"].as_array().unwrap().iter().find(|place| place["device"] == id).unwrap();
            let term = |name: &str| place["terms"][name].as_u64().unwrap();
            (place["name"].as_str().unwrap().contains("3090"), term("overhead_bytes") * 4 == term("weight_bytes"))
        })
    };
    assert_eq!(corrected(), [(true, true), (false, false)]);
    gpus.set_scenario(&(rtx_3060() + &rtx_3090()));
    assert_eq!(corrected(), [(false, false), (true, true)]);
}

fn gpus_of(node: &NodeView) -> Vec<&Device> {
    node.devices.iter().filter(|d| d.kind == DeviceKind::Cuda).collect()
}

async fn nodes_until(cluster: &Cluster, what: &str, is: impl Fn(&[&Device]) -> bool) -> NodeView {
    wait::until(what, WAIT_LIMIT, || async {
        let node = cluster.client.nodes().await.map_err(|e| e.to_string())?.remove(0);
        if is(&gpus_of(&node)) { Ok(node) } else { Err(format!("{:?}", node.devices)) }
    })
    .await
}

async fn metrics(cluster: &Cluster) -> String {
    let http = cfq_link::outbound::api_client().unwrap();
    let url = format!("{}/metrics", cluster.client.url());
    http.get(url).bearer_auth(TOKEN).send().await.unwrap().text().await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn node_reports_a_lost_gpu_and_keeps_working() {
    let home = tempfile::tempdir().unwrap();
    cfq_tests::nats::make_traversable(home.path());
    let other = ForeignProcess::start();
    let on_first = format!("used = {}\ncompute = self {}\ncompute = {} {GIB}\n", 3 * GIB, 2 * GIB, other.pid());
    let both = format!("{}{on_first}{}", rtx_3090(), rtx_4090());
    let Some(gpus) = FakeGpus::install("node_reports_a_lost_gpu_and_keeps_working", home.path(), &both) else { return };
    let cluster = Cluster::start_with(Options { node_environment: gpus.environment(), ..Options::default() }).await;
    let node = nodes_until(&cluster, "both GPUs", |gpus| gpus.len() == 2).await;
    let first = gpus_of(&node)[0];
    assert_eq!((first.id.as_str(), first.uuid.as_deref()), ("cuda:0", Some("GPU-3090")));
    assert_eq!((first.compute_capability.as_deref(), first.temperature_c), (Some("8.6"), Some(45)));
    assert_eq!((first.power_mw, first.power_limit_mw), (Some(110_000), Some(350_000)));
    assert_eq!(first.memory_total, 24 * GIB);
    assert_eq!(first.memory_others, GIB + GIB / 4, "used by other programs and the driver");
    let processes: Vec<_> = first.processes.iter().map(|p| (p.own, p.memory, p.name.as_deref())).collect();
    assert_eq!(processes, [(true, Some(2 * GIB), Some("cfq")), (false, Some(GIB), Some("sleep"))]);
    let page = metrics(&cluster).await;
    assert_contains(
        &page,
        &[
            "cfq_device_temperature_celsius{device=\"cuda:0\",node=\"n1\"} 45",
            "cfq_device_power_watts{device=\"cuda:1\",node=\"n1\"} 60",
            "cfq_device_throttled{device=\"cuda:1\",node=\"n1\"} 0",
        ],
    );

    // The second GPU is lost; the first reports a higher temperature, which shows that it is still queried.
    let hotter = rtx_3090().replace("temperature = 45", "temperature = 88") + "throttle = 32\n";
    gpus.set_scenario(&format!("{hotter}{}fails = all 15\n", rtx_4090()));
    let node = nodes_until(
        &cluster,
        "the first GPU alone",
        |gpus| matches!(gpus, [one] if one.id == "cuda:0" && one.temperature_c == Some(88)),
    )
    .await;
    assert_eq!(gpus_of(&node)[0].throttled, ["temperature"]);
    assert_contains(&std::fs::read_to_string(cluster.log("node")).unwrap(), &["cuda:1: the GPU is lost", "dmesg"]);
    let page = metrics(&cluster).await;
    assert!(page.contains("device=\"cuda:0\"") && !page.contains("device=\"cuda:1\""), "{page}");
    let env = [("CFQ_URL".to_owned(), cluster.client.url().to_owned()), ("CFQ_TOKEN".to_owned(), TOKEN.to_owned())];
    assert_contains(&cfq(home.path(), &["nodes"], &env), &["cuda:0", "88 °C", "throttled: temperature"]);
    cluster.models.script("alpha", vec![Reply::Text(file("add.py", "def add(a, b):\n    return a + b\n"))]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    cluster.wait_until_settled(task).await;
    cluster.run_oracle(task, &repo).await;

    // The driver stops answering, and later answers again with both GPUs.
    gpus.set_scenario("init = 15\n");
    nodes_until(&cluster, "no GPU", |gpus| gpus.is_empty()).await;
    gpus.set_scenario(&both);
    nodes_until(&cluster, "both GPUs again", |gpus| gpus.len() == 2).await;
    let log = std::fs::read_to_string(cluster.log("node")).unwrap();
    assert_contains(&log, &["driver answers again", "cuda:1 answers again"]);
    cluster.finish().await;
}
