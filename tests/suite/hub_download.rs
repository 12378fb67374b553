//! Downloads from a hub with the real protocol and injected faults: broken connections, and hubs that misbehave.
//!
//! This is one file because all tests share the pull and its report.

use std::path::Path;
use std::time::Duration;

use cfq_inference_node::models::{Hub, InstallState, ModelError, ModelFileLock, ModelStore, PullOptions, PullProgress};
use cfq_tests::hub::{Fault, HubServer, TOKEN};

const REPO: &str = "maker/tiny-GGUF";
const MODEL: &str = "hf:maker/tiny-GGUF:tiny.gguf";

/// A file of `size` bytes: the smallest header that is accepted as GGUF, followed by pseudo-random bytes (xorshift).
fn gguf(size: usize, seed: u32) -> Vec<u8> {
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend([0; 16]);
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    while bytes.len() < size {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        bytes.extend(state.to_le_bytes());
    }
    bytes.truncate(size);
    bytes
}

/// A safetensors file of `size` bytes with one tensor.
fn weights(tensor: &str, size: usize, seed: u32) -> Vec<u8> {
    let values = (size - 200) / 4;
    let header = serde_json::json!({ tensor: { "dtype": "F32", "shape": [values], "data_offsets": [0, values * 4] } })
        .to_string();
    let header = format!("{header:width$}", width = size - 8 - values * 4);
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.into_bytes());
    bytes.extend(&gguf(values * 4, seed));
    bytes
}

fn store(dir: &Path, hub: Hub) -> ModelStore {
    ModelStore { dir: dir.to_owned(), quota: None, bound: Vec::new(), hub }
}

/// Result of a pull, and the progress steps that it reported.
struct Outcome {
    result: Result<ModelFileLock, String>,
    steps: Vec<PullProgress>,
}

impl Outcome {
    #[track_caller]
    fn bytes(&self) -> Vec<u8> {
        std::fs::read(&self.result.as_ref().unwrap().path).unwrap()
    }

    #[track_caller]
    fn refused(&self, words: &[&str]) {
        let Err(error) = &self.result else { panic!("the pull succeeded") };
        for word in words {
            assert!(error.contains(word), "{word:?} is not in {error:?}");
        }
        assert!(!error.contains("Signature"), "a signed URL is a secret: {error}");
        assert!(!error.contains(TOKEN), "{error}");
    }

    /// The reasons of the retries that the pull reported.
    fn retry_reasons(&self) -> Vec<&str> {
        let mut reasons = Vec::new();
        for step in &self.steps {
            if let PullProgress::Retrying { reason, .. } = step {
                reasons.push(reason.as_str());
            }
        }
        reasons
    }
}

async fn pull_with(
    store: &ModelStore,
    model: &str,
    pull: PullOptions,
    mut on: impl FnMut(&PullProgress) + Send + 'static,
) -> Outcome {
    let (store, model) = (store.clone(), model.parse().unwrap());
    tokio::task::spawn_blocking(move || {
        let mut steps = Vec::new();
        let result = store.pull(&model, pull, &mut |step| {
            on(&step);
            steps.push(step);
        });
        Outcome { result: result.map_err(|error| chain(&error)), steps }
    })
    .await
    .unwrap()
}

async fn pull(store: &ModelStore, model: &str) -> Outcome {
    pull_with(store, model, PullOptions::default(), |_| {}).await
}

/// The messages of an error and of all its sources, as one text.
fn chain(error: &ModelError) -> String {
    let mut text = error.to_string();
    let mut next = std::error::Error::source(error);
    while let Some(cause) = next {
        text = format!("{text}: {cause}");
        next = cause.source();
    }
    text
}

#[tokio::test(flavor = "multi_thread")]
async fn pull_fetches_one_file_and_keeps_its_resolved_commit() {
    let (server, folder) = (HubServer::start().await, tempfile::tempdir().unwrap());
    let (one, two) = (gguf(300_000, 1), gguf(300_000, 2));
    let first = server.commit(REPO, &[("tiny.gguf", &one), ("other.gguf", &two), ("README.md", b"hello")]);
    server.tag(REPO, "v1", &first);
    let store = store(folder.path(), server.hub(Some(TOKEN)));
    let id = MODEL.parse().unwrap();

    let outcome = pull(&store, MODEL).await;
    assert_eq!(outcome.bytes(), one);
    assert_eq!(outcome.steps.first(), Some(&PullProgress::Started { files: 1, bytes: 300_000, have: 0 }));
    assert_eq!(outcome.steps.last(), Some(&PullProgress::Transferred { done: 300_000, total: 300_000 }));
    assert_eq!(server.bytes_sent(), 300_000, "only the requested file");
    let seen = server.requests();
    assert!(seen.iter().filter(|s| s.path.starts_with("/blob/")).all(|s| !s.authorized), "token sent to the storage");
    assert!(seen.iter().filter(|s| !s.path.starts_with("/blob/")).all(|s| s.authorized), "{seen:?}");
    let shown = store.show(&id).unwrap();
    let origin = shown.origin.clone().unwrap();
    assert_eq!((origin.commit.as_str(), origin.revision.as_str()), (first.as_str(), "main"));
    assert!(shown.in_use, "the outcome still holds the model's lock");
    drop(outcome);
    assert!(!store.show(&id).unwrap().in_use);

    // The branch moves; the model does not change, and no request is made.
    let second = server.commit(REPO, &[("tiny.gguf", &two)]);
    assert_eq!(pull(&store, MODEL).await.bytes(), one);
    assert_eq!(server.requests(), seen);
    assert_eq!(pull(&store, "hf:maker/tiny-GGUF@v1:tiny.gguf").await.bytes(), one);
    assert_eq!(server.bytes_sent(), 300_000, "the same bytes are already stored");
    let update = PullOptions { update: true, ..PullOptions::default() };
    assert_eq!(pull_with(&store, MODEL, update, |_| {}).await.bytes(), two);
    assert_eq!(store.show(&id).unwrap().origin.unwrap().commit, second);
    assert_eq!(pull(&store, "hf:maker/tiny-GGUF@v1:tiny.gguf").await.bytes(), one, "the tag did not move");
}

#[tokio::test(flavor = "multi_thread")]
async fn broken_connection_resumes_at_its_offset() {
    let (server, folder) = (HubServer::start().await, tempfile::tempdir().unwrap());
    let file = gguf(400_000, 3);
    server.commit(REPO, &[("tiny.gguf", &file)]);
    server.inject_faults(&[Fault::CutAfter(150_000), Fault::Status(403), Fault::CutAfter(100_000), Fault::Status(500)]);
    let outcome = pull(&store(folder.path(), server.hub(None)), MODEL).await;
    assert_eq!(outcome.bytes(), file);
    let ranges: Vec<u64> =
        server.ranges().iter().map(|r| r.as_deref().map_or(0, |r| r[6..r.len() - 1].parse().unwrap())).collect();
    assert_eq!(ranges.len(), 5);
    assert!(ranges.is_sorted() && ranges[0] == 0 && ranges[1] > 0 && ranges[3] > ranges[1], "{ranges:?}");
    assert!(server.bytes_sent() < 400_000 + 100_000, "{} bytes for 400,000", server.bytes_sent());
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_download_keeps_its_partial_data() {
    let (server, folder) = (HubServer::start().await, tempfile::tempdir().unwrap());
    let file = gguf(300_000, 4);
    server.commit(REPO, &[("tiny.gguf", &file)]);
    server.inject_faults(&[Fault::CutAfter(200_000)]);
    server.cut_every_connection_after(Some(10));
    let store = store(folder.path(), server.hub(None));
    pull(&store, MODEL).await.refused(&["cannot fetch hf:maker/tiny-GGUF:tiny.gguf", "the same command resumes it"]);
    let here = store.list().unwrap().remove(0);
    let InstallState::Unfinished { have } = here.state else { panic!("{here:?}") };
    assert!(have > 100_000 && here.bytes == 300_000, "{here:?}");

    server.cut_every_connection_after(None);
    let before = server.ranges().len();
    let outcome = pull(&store, MODEL).await;
    assert_eq!(outcome.bytes(), file);
    assert_eq!(outcome.steps.first(), Some(&PullProgress::Started { files: 1, bytes: 300_000, have }));
    assert_eq!(server.ranges()[before..], [Some(format!("bytes={have}-"))]);
    assert_eq!(store.list().unwrap()[0].state, InstallState::Ready);
}

#[tokio::test(flavor = "multi_thread")]
async fn checksum_mismatch_never_becomes_a_model() {
    let (server, folder) = (HubServer::start().await, tempfile::tempdir().unwrap());
    let file = gguf(300_000, 5);
    server.commit(REPO, &[("tiny.gguf", &file)]);
    let store = store(folder.path(), server.hub(None));
    server.inject_faults(&[Fault::CorruptAt(123_456)]);
    pull(&store, MODEL).await.refused(&["checksum mismatch", "discarded"]);
    assert!(store.list().unwrap().iter().all(|m| m.state == InstallState::Unfinished { have: 0 }));

    // A partial file that was corrupted on disk is detected at the end, and the file is fetched again from its start.
    server.inject_faults(&[Fault::CutAfter(200_000)]);
    server.cut_every_connection_after(Some(10));
    pull(&store, MODEL).await.refused(&["the same command resumes it"]);
    server.cut_every_connection_after(None);
    let partial = store.list().unwrap().remove(0).path;
    let half = std::fs::read_dir(partial).unwrap().flatten().find(|e| e.file_name().len() == 64).unwrap().path();
    let mut bytes = std::fs::read(&half).unwrap();
    bytes[1000] ^= 1;
    std::fs::write(&half, bytes).unwrap();
    let outcome = pull(&store, MODEL).await;
    assert_eq!(outcome.bytes(), file);
    let reasons = outcome.retry_reasons();
    assert!(reasons.iter().any(|why| why.contains("has a wrong checksum")), "{reasons:?}");
    assert_eq!(server.ranges().last(), Some(&None));

    // A complete file that is corrupted later is found by `verify` and restored at its commit, although the branch
    // moved.
    server.commit(REPO, &[("tiny.gguf", &gguf(300_000, 55))]);
    let path = outcome.result.unwrap().path;
    let mut bytes = file.clone();
    bytes[200_000] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let verify = PullOptions { verify: true, ..PullOptions::default() };
    assert_eq!(pull_with(&store, MODEL, verify, |_| {}).await.bytes(), file);
    std::fs::remove_file(&path).unwrap();
    let outcome = pull(&store, MODEL).await;
    assert_eq!(outcome.bytes(), file, "a file that was removed by hand is restored");
    assert_eq!(store.list().unwrap()[0].origin.clone().unwrap().revision, "main");
}

#[tokio::test(flavor = "multi_thread")]
async fn file_changed_between_retries_is_fetched_from_its_start() {
    let (server, folder) = (HubServer::start().await, tempfile::tempdir().unwrap());
    let (old, new) = (gguf(300_000, 6), gguf(300_000, 7));
    server.commit(REPO, &[("tiny.gguf", &old)]);
    server.inject_faults(&[Fault::CutAfter(200_000)]);
    server.cut_every_connection_after(Some(10));
    let store = store(folder.path(), server.hub(None));
    pull(&store, MODEL).await.refused(&["the same command resumes it"]);
    server.cut_every_connection_after(None);
    let commit = server.commit(REPO, &[("tiny.gguf", &new)]);
    let before = server.ranges().len();
    assert_eq!(pull(&store, MODEL).await.bytes(), new);
    assert_eq!(server.ranges()[before..], [None]);

    // The file changes under the same commit during the download: the entity tag differs.
    let next = gguf(300_000, 8);
    let freed: u64 = store.remove(&MODEL.parse().unwrap()).unwrap();
    assert!(freed >= 300_000);
    server.inject_faults(&[Fault::CutAfter(100_000)]);
    let (hub, bytes) = (server.clone(), next.clone());
    let swap = move |step: &PullProgress| {
        if matches!(step, PullProgress::Retrying { .. }) {
            hub.replace_bytes(REPO, &commit, "tiny.gguf", &bytes);
        }
    };
    let outcome = pull_with(&store, MODEL, PullOptions::default(), swap).await;
    assert_eq!(outcome.bytes(), next);
    assert!(outcome.retry_reasons().contains(&"the file changed on the hub"), "{:?}", outcome.retry_reasons());
}

#[tokio::test(flavor = "multi_thread")]
async fn stalled_connection_is_replaced() {
    let (server, folder) = (HubServer::start().await, tempfile::tempdir().unwrap());
    let file = gguf(100_000, 9);
    server.commit(REPO, &[("tiny.gguf", &file)]);
    server.inject_faults(&[Fault::Trickle(Duration::from_millis(20)), Fault::HangAfter(50_000)]);
    let outcome = pull(&store(folder.path(), server.hub(None)), MODEL).await;
    assert_eq!(outcome.bytes(), file);
    assert_eq!(outcome.retry_reasons().iter().filter(|why| why.contains("the connection stalled")).count(), 2);
    assert_eq!(server.ranges().len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn server_without_range_support_works() {
    let (server, folder) = (HubServer::start().await, tempfile::tempdir().unwrap());
    let file = gguf(300_000, 10);
    server.commit(REPO, &[("tiny.gguf", &file)]);
    server.inject_faults(&[Fault::CutAfter(100_000), Fault::IgnoreRange]);
    assert_eq!(pull(&store(folder.path(), server.hub(None)), MODEL).await.bytes(), file);
    assert_eq!(server.ranges().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn hub_errors_name_the_cause_and_the_next_step() {
    let (server, folder) = (HubServer::start().await, tempfile::tempdir().unwrap());
    let file = gguf(5_000, 11);
    server.commit(REPO, &[("tiny.gguf", &file), ("q8.gguf", &file), ("config.json", b"{}")]);
    server.commit("maker/split", &[("m-00001-of-00002.gguf", &file), ("m-00002-of-00002.gguf", &file)]);
    server.commit("maker/gated", &[("tiny.gguf", &file)]);
    server.gate("maker/gated");
    let anonymous = store(folder.path(), server.hub(None));
    let refused = async |model: &str, words: &[&str]| pull(&anonymous, model).await.refused(words);
    refused("hf:maker/none:m.gguf", &["no model repository maker/none", "HF_TOKEN"]).await;
    refused("hf:maker/tiny-GGUF@v9:tiny.gguf", &["no revision v9", "a branch, a tag or a commit"]).await;
    refused("hf:maker/tiny-GGUF:q5.gguf", &["no file q5.gguf", "q8.gguf, tiny.gguf"]).await;
    refused("hf:maker/tiny-GGUF:config.json", &["no model file", ".gguf"]).await;
    refused("hf:maker/split:m-00001-of-00002.gguf", &["one part of a split model", "an unsplit file"]).await;
    let gated = "hf:maker/gated:tiny.gguf";
    let page = format!("accept its terms at http://{}/maker/gated", server.addr);
    refused(gated, &[&page, "HF_TOKEN", "under [hub]"]).await;
    let wrong = store(folder.path(), server.hub(Some("hf_wrong")));
    pull(&wrong, gated).await.refused(&[&page, "or is wrong"]);
    let right = store(folder.path(), server.hub(Some(TOKEN)));
    assert_eq!(pull(&right, gated).await.bytes(), file);
}

#[tokio::test(flavor = "multi_thread")]
async fn retry_after_is_honoured_and_retries_are_bounded() {
    let (server, folder) = (HubServer::start().await, tempfile::tempdir().unwrap());
    let file = gguf(5_000, 12);
    server.commit(REPO, &[("tiny.gguf", &file)]);
    let store = store(folder.path(), server.hub(None));
    server.fail_descriptions(&[(429, Some(86_400))]);
    pull(&store, MODEL).await.refused(&["rate-limiting this address", "86400 s"]);
    server.fail_descriptions(&[(500, None), (502, None), (503, None)]);
    pull(&store, MODEL).await.refused(&["answered 503"]);
    server.fail_descriptions(&[(503, None), (429, Some(1))]);
    let outcome = pull(&store, MODEL).await;
    assert_eq!(outcome.bytes(), file);
    let asked = Duration::from_secs(1);
    assert!(outcome.steps.iter().any(|s| matches!(s, PullProgress::Retrying { wait, .. } if *wait == asked)));
}

#[tokio::test(flavor = "multi_thread")]
async fn safetensors_pull_fetches_only_required_files() {
    let (server, folder) = (HubServer::start().await, tempfile::tempdir().unwrap());
    let (a, b, unused) = (weights("x", 50_000, 13), weights("y", 60_000, 14), gguf(70_000, 15));
    let index = br#"{"weight_map":{"x":"model-00001-of-00002.safetensors","y":"model-00002-of-00002.safetensors"}}"#;
    let tokenizer = gguf(2_000, 16);
    server.commit(
        "maker/full",
        &[
            ("model.safetensors.index.json", index),
            ("model-00001-of-00002.safetensors", &a),
            ("model-00002-of-00002.safetensors", &b),
            ("config.json", b"{\"model_type\":\"llama\"}"),
            ("tokenizer.json", &tokenizer),
            ("pytorch_model.bin", &unused),
            ("README.md", b"words"),
        ],
    );
    // The hub's description has names only: sizes and checksums come with each file.
    server.omit_sizes("maker/full");
    let store = store(folder.path(), server.hub(None));
    let model = "hf:maker/full:model.safetensors.index.json";
    let outcome = pull(&store, model).await;
    assert_eq!(outcome.bytes(), index);
    let shown = store.show(&model.parse().unwrap()).unwrap();
    let name = |f: &cfq_inference_node::models::StoredFile| f.path.file_name().unwrap().to_str().unwrap().to_owned();
    let names: Vec<String> = shown.files.iter().map(name).collect();
    let wanted = [
        "model.safetensors.index.json",
        "config.json",
        "tokenizer.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ];
    assert_eq!(names, wanted);
    assert!(shown.files.iter().all(|f| f.checksum.is_some() && folder.path().join(&f.path).exists()));
    assert_eq!(server.bytes_sent(), 112_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_pulls_download_once() {
    let (server, folder) = (HubServer::start().await, tempfile::tempdir().unwrap());
    let file = gguf(2_000_000, 17);
    server.commit(REPO, &[("tiny.gguf", &file)]);
    let store = store(folder.path(), server.hub(None));
    let (one, two, three) = tokio::join!(pull(&store, MODEL), pull(&store, MODEL), pull(&store, MODEL));
    for outcome in [one, two, three] {
        assert_eq!(outcome.bytes(), file);
    }
    assert_eq!(server.bytes_sent(), 2_000_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn download_exceeding_disk_space_is_not_started() {
    let (server, folder) = (HubServer::start().await, tempfile::tempdir().unwrap());
    let commit = server.commit(REPO, &[("tiny.gguf", &gguf(5_000, 18))]);
    server.advertise_size(REPO, &commit, "tiny.gguf", 1 << 60);
    let store = store(folder.path(), server.hub(None));
    pull(&store, MODEL).await.refused(&["needs", "free", "cfq models rm", "model_dir"]);
    assert_eq!(server.ranges(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn quota_evicts_the_least_recently_used_unprotected_model() {
    let (server, folder) = (HubServer::start().await, tempfile::tempdir().unwrap());
    let files: Vec<Vec<u8>> = (20..25).map(|seed| gguf(100_000, seed)).collect();
    let names = ["a.gguf", "b.gguf", "c.gguf", "d.gguf", "e.gguf"];
    let list: Vec<(&str, &[u8])> = names.iter().zip(&files).map(|(n, f)| (*n, f.as_slice())).collect();
    server.commit(REPO, &list);
    let id = |name: &str| format!("hf:{REPO}:{name}").parse::<cfq_proto::model::ModelId>().unwrap();
    let mut store = store(folder.path(), server.hub(None));
    // The quota has space for three model files and their metadata.
    store.quota = Some(330_000);
    let used = |name: &str, at: i64| {
        let records = std::fs::read_dir(folder.path().join("hf").join(REPO)).unwrap().flatten();
        let path = records.map(|e| e.path()).find(|p| {
            let file = p.file_name().unwrap().to_str().unwrap();
            file.starts_with(name) && file.ends_with(".json")
        });
        let path = path.unwrap();
        let mut record: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        record["used_at"] = at.into();
        std::fs::write(&path, record.to_string()).unwrap();
    };
    for (name, at) in [("a.gguf", 10), ("b.gguf", 20), ("c.gguf", 30)] {
        drop(pull(&store, id(name).as_str()).await.result.unwrap());
        used(name, at);
    }
    store.pin(&id("a.gguf"), true).unwrap();
    let outcome = pull(&store, id("d.gguf").as_str()).await;
    let removed: Vec<String> = outcome
        .steps
        .iter()
        .filter_map(|s| if let PullProgress::Evicted { model, .. } = s { Some(model.to_string()) } else { None })
        .collect();
    assert_eq!(removed, [id("b.gguf").to_string()], "the oldest is pinned, so the next one is evicted");
    let here: Vec<_> = store.list().unwrap().into_iter().map(|m| m.model).collect();
    assert_eq!(here, [id("a.gguf"), id("c.gguf"), id("d.gguf")]);

    // One model is pinned, one configured, one in use: none of them may be evicted.
    store.bound = vec![id("c.gguf")];
    let sent = server.bytes_sent();
    pull(&store, id("e.gguf").as_str()).await.refused(&["model_quota", "pinned, bound in cfq.toml, in use"]);
    assert_eq!(server.bytes_sent(), sent);
    assert_eq!(store.list().unwrap().iter().filter(|m| m.state == InstallState::Ready).count(), 3);
    assert!(matches!(store.remove(&id("d.gguf")), Err(ModelError::InUse { .. })));
    drop(outcome);
    assert_eq!(pull(&store, id("e.gguf").as_str()).await.bytes(), files[4]);
}
