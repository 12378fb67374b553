//! Tests of the loader thread, and of the ledger that the registry publishes.

use cfq_proto::node::Residency;

use super::*;

#[test]
fn loader_thread_ends_with_its_node_and_drops_its_models() {
    let TestLoader { loader, registry, _folder } = loader(1 << 40, None, 10);
    let (config, commands) = (loader.config.clone(), loader.commands);
    let watched = Arc::downgrade(&registry);
    drop((loader.registry, loader.engines));
    let thread = {
        let registry = registry.clone();
        std::thread::spawn(move || run(&registry, &config, commands))
    };
    registry.close();
    thread.join().unwrap().unwrap();
    assert!(matches!(registry.load(&id("llama"), || Ok(())), ModelReply::Refused { .. }));
    drop(registry);
    assert!(watched.upgrade().is_none(), "it is not held any more");
}

/// A request wakes the thread, and a delayed unload is retried.
#[test]
fn loader_thread_is_woken_by_requests() {
    let TestLoader { loader, registry, _folder } = loader(1 << 40, None, 10);
    let (config, commands) = (loader.config.clone(), loader.commands);
    drop((loader.registry, loader.engines));
    let thread = {
        let registry = registry.clone();
        std::thread::spawn(move || run(&registry, &config, commands))
    };
    let until = |is: fn(Option<ModelStatus>) -> bool| {
        let started = Instant::now();
        while !is(registry.status(&id("llama"))) {
            assert!(started.elapsed() < Duration::from_secs(60), "{:?}", registry.ledger());
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    assert!(matches!(registry.load(&id("llama"), || Ok(())), ModelReply::Loading { .. }));
    until(|status| matches!(status, Some(ModelStatus::Resident(_))));
    let Some(ModelStatus::Resident(held)) = registry.status(&id("llama")) else { panic!("it was resident") };
    assert!(matches!(registry.unload(&id("llama")), ModelReply::Unloading { .. }));
    until(|status| matches!(status, Some(ModelStatus::Unloading(_))));
    // Another thread that holds the engine delays the unload.
    drop(held);
    until(|status| matches!(status, Some(ModelStatus::OnDisk(_))));
    registry.close();
    thread.join().unwrap().unwrap();
}

fn config(models: &[&str], dir: &Path) -> Config {
    serde_json::from_value(serde_json::json!({
        "node": "den", "nats": { "url": "nats://127.0.0.1:1" }, "model_dir": dir, "models": models,
    }))
    .unwrap()
}

/// Why the model at this position of the ledger is unusable. Asserts that the ledger contains the reason as text.
fn unusable_reason(registry: &ModelRegistry, at: usize) -> UnusableReason {
    let state = registry.ledger().models.remove(at);
    match registry.status(&state.model) {
        Some(ModelStatus::Unusable(reason)) => {
            assert_eq!(state.residency, Residency::Unusable { reason: reason.to_string() });
            reason
        }
        _ => panic!("{state:?}"),
    }
}

#[test]
fn unusable_models_report_their_reason() {
    let folder = tempfile::tempdir().unwrap();
    let broken = folder.path().join("broken.gguf");
    std::fs::write(&broken, b"GGUF\x03\0\0\0").unwrap();
    let path = format!("path:{}", broken.display());
    let config = config(&["ollama:den/q", "openai:box/m", &path, "command:llm"], folder.path());
    let (registry, commands) = ModelRegistry::new(&config, Arc::default());
    let ledger = registry.ledger();
    assert_eq!(ledger.version, 1);
    assert_eq!(registry.ledger().version, 1, "nothing changed");
    let not_configured = |endpoint: &str| UnusableReason::EndpointNotConfigured { endpoint: endpoint.to_owned() };
    let UnusableReason::ProxyInvalid { detail } = unusable_reason(&registry, 0) else { panic!("{ledger:?}") };
    assert!(detail.contains("command llm is not configured: add [commands.llm]"), "{detail}");
    assert_eq!(unusable_reason(&registry, 1), not_configured("den"));
    assert_eq!(unusable_reason(&registry, 2), not_configured("box"));
    assert_eq!(ledger.models[3].residency, Residency::Loading);
    Loader::new(&registry, &config, commands).load_pending();
    let ledger = registry.ledger();
    assert!(ledger.version > 1 && ledger.free_bytes > 0);
    let UnusableReason::Unreadable { detail, .. } = unusable_reason(&registry, 3) else { panic!("{ledger:?}") };
    assert!(detail.contains("cut off or corrupt"), "{detail}");
    registry.drain();
    assert!(registry.ledger().draining && registry.ledger().version == ledger.version + 1);
}

#[test]
fn model_of_an_unreachable_hub_names_the_command_that_fetches_it() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(&["hf:a/b:c.gguf"], folder.path());
    config.hub.endpoint = Some("http://127.0.0.1:9".to_owned());
    config.hub.retry.max_attempts = 1;
    let (registry, commands) = ModelRegistry::new(&config, Arc::default());
    assert_eq!(registry.ledger().models[0].residency, Residency::Loading);
    Loader::new(&registry, &config, commands).load_pending();
    let reason = unusable_reason(&registry, 0);
    assert!(matches!(&reason, UnusableReason::FetchFailed { .. }), "{reason}");
    assert!(reason.to_string().contains("`cfq models pull hf:a/b:c.gguf`"), "{reason}");
}
