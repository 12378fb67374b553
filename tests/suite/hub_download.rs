//! Tests of downloads from a hub with the real protocol: which files are fetched, and which installed models are
//! evicted for them.

use std::path::Path;

use cfq_inference_node::models::{Hub, InstallState, ModelError, ModelFileLock, ModelStore, PullOptions, PullProgress};
use cfq_tests::hub::{HubServer, TOKEN};

mod faults;

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
    assert_eq!(store.list().unwrap().iter().filter(|m| m.state == InstallState::Complete).count(), 3);
    assert!(matches!(store.remove(&id("d.gguf")), Err(ModelError::InUse { .. })));
    drop(outcome);
    assert_eq!(pull(&store, id("e.gguf").as_str()).await.bytes(), files[4]);
}
