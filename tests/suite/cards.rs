//! Graphics cards as NVML tells of them, by a library of make-believe cards with the true interface: what people, the
//! scheduler and the metrics page see of them, and what becomes of a node that loses one.

use std::path::Path;
use std::process::{Command, Stdio};

use cfq_inference_node::models::{Hub, HubConfig, Store, Took};
use cfq_proto::http::NodeView;
use cfq_proto::node::{Device, DeviceKind};
use cfq_tests::binary;
use cfq_tests::cards::{Cards, Other, rtx_3060, rtx_3090, rtx_4090};
use cfq_tests::cluster::{Cluster, Options, PATIENCE, TOKEN};
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
fn says(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "{word:?} is not in\n{text}");
    }
}

#[test]
fn the_doctor_tells_of_every_card_who_else_is_on_it_and_what_is_wrong() {
    let home = tempfile::tempdir().unwrap();
    let other = Other::start();
    let pid = other.id();
    let used = format!("used = {GIB}\ncompute = {pid} {GIB}\ngraphics = {pid} {}\n", GIB / 2);
    let Some(cards) = Cards::new(home.path(), &(rtx_3060() + &used)) else { return };
    let doctor = || cfq(home.path(), &["doctor"], &cards.environment());
    let text = doctor();
    let process = format!("also in use by sleep {pid} (1.0 GiB)");
    says(&text, &["ok    cuda:0", "RTX 3060, 12.0 GiB, 1.2 GiB held by others, 45 °C, 32 of 170 W", &process]);
    says(&text, &["NVIDIA driver 580.95.05", "this build runs models on the CPU"]);

    // Two unlike cards, of which one is too hot and the other tells little, as laptops' do.
    let hot = rtx_3090() + "throttle = 72\n";
    let bare = "[card]\nname = NVIDIA GeForce RTX 4090\ntotal = 25769803776\nfails = power 3\nfails = compute 4\n";
    cards.change_to(&format!("{hot}{bare}"));
    let text = doctor();
    says(&text, &["warn  cuda:0", "throttled: temperature, stopped by the hardware", "look at its cooling"]);
    says(&text, &["ok    cuda:1", "RTX 4090, 24.0 GiB\n"]);

    // One falls off the bus between two questions; the other is told of.
    cards.change_to(&format!("{}{}fails = temperature 15\n", rtx_4090(), rtx_3060()));
    let text = doctor();
    says(&text, &["ok    cuda:0", "RTX 4090", "warn  cuda:1", "is lost", "Xid"]);
    assert!(!text.contains("RTX 3060"), "{text}");

    cards.change_to("");
    says(&doctor(), &["an NVIDIA driver but no card"]);
    cards.change_to(&format!("init = 18\n{}", rtx_3060()));
    says(&doctor(), &["warn  driver", "of another version than the driver in the kernel", "restart the machine"]);
    cards.change_to("init = 9\n");
    says(&doctor(), &["its driver is not loaded", "modprobe nvidia"]);
    cards.change_to("init = 999\n");
    says(&doctor(), &["does not answer", "models run on the CPU"]);
}

/// Lines of the scenario for a 3060 that has so many bytes free.
fn with_free(free: u64) -> String {
    format!("{}used = {}\n", rtx_3060(), 12 * GIB - GIB / 4 - free)
}

/// The sum is the one a load is laid out by: a card that a guess from the CPU's would have called large enough is none.
#[test]
fn fit_tells_what_each_card_would_hold_and_what_they_would_together() {
    let home = tempfile::tempdir().unwrap();
    let Some(cards) = Cards::new(home.path(), &(with_free(600 << 20) + &rtx_3090())) else { return };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../inference-node/node/tests/fixtures/models/llama");
    let model = format!("path:{}", folder.display());
    let fit = || cfq(home.path(), &["models", "fit", &model], &cards.environment());
    let places = || {
        let text = cfq(home.path(), &["--json", "models", "fit", &model], &cards.environment());
        serde_json::from_str::<serde_json::Value>(&text).unwrap()["places"].as_array().unwrap().clone()
    };
    let found = places();
    let ids: Vec<&str> = found.iter().map(|place| place["device"].as_str().unwrap()).collect();
    assert_eq!(ids, ["cpu", "cuda:0", "cuda:1", "cuda:0,cuda:1"]);
    assert_eq!(found.iter().map(|place| place["used"] == true).collect::<Vec<_>>(), [true, false, false, false]);
    let fits = |place: &serde_json::Value| {
        let lengths = place["lengths"].as_array().unwrap();
        lengths.iter().map(|length| length["fits"].as_bool().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!((fits(&found[1]), fits(&found[2]), fits(&found[3])), (vec![false], vec![true], vec![true]));
    let term = |name: &str| found[2]["terms"][name].as_u64().unwrap();
    let longest = &found[2]["lengths"][0];
    let sum = term("weights") + term("tables") + term("scratch") + term("reserve") + 512 * term("kv_per_token");
    assert_eq!((longest["tokens"].as_u64(), longest["total"].as_u64()), (Some(512), Some(sum)), "{found:?}");
    assert_eq!(term("reserve"), 768 << 20);
    // One is enough for it.
    assert_eq!(found[3]["shares"].as_array().unwrap().len(), 1);
    let words = fit();
    says(
        &words,
        &["RTX 3060): 600.0 MiB available; this build runs models on the CPU", "600.0 MiB are available: weights"],
    );
    says(&words, &["+ reserve 768.0 MiB =", "cuda:0,cuda:1 ("]);

    // Neither holds it alone.
    cards.change_to(&with_free(sum - 8192).repeat(2));
    let found = places();
    assert_eq!([1, 2, 3].map(|at| fits(&found[at])), [vec![false], vec![false], vec![true]], "{found:?}");
    let layers: Vec<_> = found[3]["shares"].as_array().unwrap().iter().map(|part| part["layers"].as_u64()).collect();
    assert_eq!(layers, [Some(1), Some(1)]);
    says(&fit(), &["cuda:0: layers 0 to 0, ", "cuda:1: layers 1 to 1, "]);

    cards.change_to(&with_free(600 << 20).repeat(2));
    says(&fit(), &["needs ", "on every card", "the cards have 600.0 MiB and 600.0 MiB"]);
}

#[test]
fn what_loads_took_of_a_card_counts_for_it_in_whichever_slot_it_is() {
    let home = tempfile::tempdir().unwrap();
    let Some(cards) = Cards::new(home.path(), &(rtx_3090() + &rtx_3060())) else { return };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../inference-node/node/tests/fixtures/models/llama");
    let model = format!("path:{}", folder.display());
    let hub = Hub::new(&HubConfig::default(), |_| None);
    let store = Store { dir: home.path().join("cache/models"), quota: None, bound: Vec::new(), hub };
    let took = Took { predicted: 1000, took: 1250 };
    // The second is as it was kept before cards were known by their UUIDs.
    let kept = ["GPU-3090", "cuda:1"].map(|card| (card.to_owned(), took));
    store.load_ends(&model.parse().unwrap(), &kept).unwrap();
    let mut env = cards.environment();
    env.push(("CFQ_CACHE".to_owned(), home.path().join("cache").to_str().unwrap().to_owned()));
    let corrected = || {
        let text = cfq(home.path(), &["--json", "models", "fit", &model], &env);
        let found = serde_json::from_str::<serde_json::Value>(&text).unwrap();
        ["cuda:0", "cuda:1"].map(|id| {
            let place = found["places"].as_array().unwrap().iter().find(|place| place["device"] == id).unwrap();
            let term = |name: &str| place["terms"][name].as_u64().unwrap();
            (place["name"].as_str().unwrap().contains("3090"), term("correction") * 4 == term("weights"))
        })
    };
    assert_eq!(corrected(), [(true, true), (false, false)]);
    cards.change_to(&(rtx_3060() + &rtx_3090()));
    assert_eq!(corrected(), [(false, false), (true, true)]);
}

fn cards_of(node: &NodeView) -> Vec<&Device> {
    node.devices.iter().filter(|d| d.kind == DeviceKind::Cuda).collect()
}

async fn nodes_until(cluster: &Cluster, what: &str, is: impl Fn(&[&Device]) -> bool) -> NodeView {
    wait::until(what, PATIENCE, || async {
        let node = cluster.client.nodes().await.map_err(|e| e.to_string())?.remove(0);
        if is(&cards_of(&node)) { Ok(node) } else { Err(format!("{:?}", node.devices)) }
    })
    .await
}

async fn metrics(cluster: &Cluster) -> String {
    let http = cfq_link::outbound::api_client().unwrap();
    let url = format!("{}/metrics", cluster.client.url());
    http.get(url).bearer_auth(TOKEN).send().await.unwrap().text().await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_loses_a_card_says_so_and_works_on_with_the_rest() {
    let home = tempfile::tempdir().unwrap();
    cfq_tests::nats::open_to_all(home.path());
    let other = Other::start();
    let on_first = format!("used = {}\ncompute = self {}\ncompute = {} {GIB}\n", 3 * GIB, 2 * GIB, other.id());
    let both = format!("{}{on_first}{}", rtx_3090(), rtx_4090());
    let Some(cards) = Cards::new(home.path(), &both) else { return };
    let cluster = Cluster::with(Options { node_environment: cards.environment(), ..Options::default() }).await;
    let node = nodes_until(&cluster, "both cards", |cards| cards.len() == 2).await;
    let first = cards_of(&node)[0];
    assert_eq!((first.id.as_str(), first.uuid.as_deref()), ("cuda:0", Some("GPU-3090")));
    assert_eq!((first.compute_capability.as_deref(), first.temperature_c), (Some("8.6"), Some(45)));
    assert_eq!((first.power_mw, first.power_limit_mw), (Some(110_000), Some(350_000)));
    assert_eq!(first.memory_total, 24 * GIB);
    assert_eq!(first.memory_others, GIB + GIB / 4, "what this node holds is not others', what the driver keeps is");
    let processes: Vec<_> = first.processes.iter().map(|p| (p.own, p.memory, p.name.as_deref())).collect();
    assert_eq!(processes, [(true, Some(2 * GIB), Some("cfq")), (false, Some(GIB), Some("sleep"))]);
    let page = metrics(&cluster).await;
    says(
        &page,
        &[
            "cfq_device_temperature_celsius{device=\"cuda:0\",node=\"n1\"} 45",
            "cfq_device_power_watts{device=\"cuda:1\",node=\"n1\"} 60",
            "cfq_device_throttled{device=\"cuda:1\",node=\"n1\"} 0",
        ],
    );

    // The second falls off the bus; the first is hotter now, so it is still looked at.
    let hotter = rtx_3090().replace("temperature = 45", "temperature = 88") + "throttle = 32\n";
    cards.change_to(&format!("{hotter}{}fails = all 15\n", rtx_4090()));
    let node = nodes_until(
        &cluster,
        "the first card alone",
        |cards| matches!(cards, [one] if one.id == "cuda:0" && one.temperature_c == Some(88)),
    )
    .await;
    assert_eq!(cards_of(&node)[0].throttled, ["temperature"]);
    says(&std::fs::read_to_string(cluster.log("node")).unwrap(), &["cuda:1 is lost", "dmesg"]);
    let page = metrics(&cluster).await;
    assert!(page.contains("device=\"cuda:0\"") && !page.contains("device=\"cuda:1\""), "{page}");
    let env = [("CFQ_URL".to_owned(), cluster.client.url().to_owned()), ("CFQ_TOKEN".to_owned(), TOKEN.to_owned())];
    says(&cfq(home.path(), &["nodes"], &env), &["cuda:0", "88 °C", "throttled: temperature"]);
    cluster.models.script("alpha", vec![Reply::Text(file("add.py", "def add(a, b):\n    return a + b\n"))]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    cluster.rests(task).await;
    cluster.oracle(task, &repo).await;

    // The whole driver goes, and comes back with both.
    cards.change_to("init = 15\n");
    nodes_until(&cluster, "no card", |cards| cards.is_empty()).await;
    cards.change_to(&both);
    nodes_until(&cluster, "both cards again", |cards| cards.len() == 2).await;
    says(&std::fs::read_to_string(cluster.log("node")).unwrap(), &["driver answers again", "cuda:1 answers again"]);
    cluster.finish().await;
}
