//! Tests that a hostile model file ends with an error of its own: the process, its memory and its threads are unharmed.

use std::path::{Path, PathBuf};
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use cfq_engine::{AdmitError, Engine, EngineLimits, JobFailure, LocalEngine, ModelFile};
use serde_json::{Value, json};

use crate::fixtures::folder;
use crate::smollm::{finish, user_prompt};

/// How long a test waits for work that must end.
const PATIENCE: Duration = Duration::from_secs(60);

/// A copy of a fixture model whose JSON file `name` is changed by `change`.
fn changed(name: &str, change: impl FnOnce(&mut Value)) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(folder("llama")).unwrap() {
        let from = entry.unwrap().path();
        std::fs::copy(&from, copy.path().join(from.file_name().unwrap())).unwrap();
    }
    let path = copy.path().join(name);
    let mut json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut json);
    std::fs::write(&path, json.to_string()).unwrap();
    copy
}

fn with_template(template: &str) -> tempfile::TempDir {
    changed("tokenizer_config.json", |config| config["chat_template"] = json!(template))
}

fn load(path: &Path) -> Result<LocalEngine, String> {
    let limits = EngineLimits { memory_bytes: 1 << 30, max_sequences: 2 };
    LocalEngine::builder("path:hostile".parse().unwrap(), path).limits(limits).load().map_err(|e| e.to_string())
}

#[test]
fn template_that_exhausts_memory_or_time_is_refused_at_load() {
    let nested = "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}";
    let long = "{% set ns = namespace(x='a' * 1000) %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}";
    let text = "{% set text = 'ab\n' * 1000000 %}";
    let templates = [
        long.to_owned(),
        "{{ 'a' | indent(4000000000000) }}{{ 'a\nb' | indent(4000000000000) }}".to_owned(),
        format!("{text}{{{{ text | indent(1000000) }}}}"),
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}".to_owned(),
        format!("{text}{{{{ text.replace('', text) }}}}"),
        format!("{text}{{{{ text | replace('a', text) }}}}"),
        format!("{text}{{% set list = [text] * 100000 %}}{{{{ ''.join(list) }}}}"),
        format!("{text}{{% set list = [text] * 100000 %}}{{{{ list | join('') }}}}"),
        format!("{nested}{{{{ ns.x }}}}"),
        format!("{nested}{{{{ ns.x | tojson }}}}"),
        format!("{nested}{{{{ ns.x | string | length }}}}"),
        format!("{nested}{{{{ ns.x | join('') }}}}"),
        format!("{nested}{{% set text %}}{{{{ ns.x }}}}{{% endset %}}"),
        "{% macro again(n) %}{{ again(n) }}{{ again(n) }}{% endmacro %}{{ again(1) }}".to_owned(),
        "{% for c in 'ab' * 50000000 %}{{ c }}{% endfor %}".to_owned(),
    ];
    let mut accepted = Vec::new();
    for template in templates {
        let copy = with_template(&template);
        match load(copy.path()).map(LocalEngine::unload) {
            Ok(()) => accepted.push(template),
            Err(error) => assert!(error.contains("more time or memory"), "{template:?}: {error}"),
        }
    }
    // Errors that do not mention the limits: too deep a recursion, too long a padding. Such a model rejects the prompts.
    assert!(
        accepted.iter().all(|t| t.contains("macro") || t.contains("format(1)") || t.contains("indent(4000")),
        "{accepted:?}"
    );
}

#[tokio::test]
async fn template_that_fails_for_a_prompt_rejects_the_prompt_only() {
    let template = "{% set ns = namespace(x=messages[0].content) %}{% if ns.x != 'x' %}{% for i in range(60) %}\
                    {% set ns.x = ns.x ~ ns.x %}{% endfor %}{% endif %}{{ ns.x }}";
    let copy = with_template(template);
    let engine = load(copy.path()).unwrap();
    let error = engine.admit(user_prompt("hello")).await.unwrap_err();
    assert!(
        matches!(&error, AdmitError::Failed(JobFailure::Rejected { reason }) if reason.contains("more time or memory")),
        "{error}"
    );
    finish(engine.admit(user_prompt("x")).await.unwrap().start()).await.0.unwrap();
}

/// A list that is nested as deep as the fuel allows is dropped recursively.
#[tokio::test]
async fn deeply_nested_list_does_not_overflow_the_stack() {
    let deep = "{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% for j in range(10) %}\
                {% set ns.x = [ns.x] %}{% endfor %}{% endfor %}x";
    let copy = with_template(deep);
    let _ = load(copy.path());
}

/// The pre-tokenizer's expression takes hours for the prompt.
fn slow_model() -> tempfile::TempDir {
    changed("tokenizer.json", |tokenizer| {
        tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"] = json!({ "Regex": r"(?=[^\x00]*\x00)|[\s\S]" });
    })
}

#[test]
fn cancelled_preparation_leaves_no_thread_behind() {
    let copy = slow_model();
    let engine = load(copy.path()).unwrap();
    let (done, finished) = sync_channel(1);
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let prompt = user_prompt(&"a".repeat(1 << 20));
        let admitted = runtime
            .block_on(async { tokio::time::timeout(Duration::from_millis(200), engine.admit(prompt)).await.is_ok() });
        // Waits for the thread that prepares the prompt.
        drop(runtime);
        let _ = done.send(admitted);
    });
    assert_eq!(finished.recv_timeout(PATIENCE), Ok(false), "the preparation is cancelled and its thread ends");
}

#[test]
fn special_files_are_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("model.gguf");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let config = folder.path().join("config.json");
    assert!(std::process::Command::new("mkfifo").arg(&config).status().unwrap().success());
    let socket = folder.path().join("socket.gguf");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let refused: [(PathBuf, &str); 4] = [
        (fifo, "a FIFO"),
        (folder.path().to_owned(), "a FIFO"),
        (socket, "a socket"),
        (PathBuf::from("/dev/zero"), "a device"),
    ];
    for (path, kind) in refused {
        let (done, read) = sync_channel(1);
        let named = path.clone();
        std::thread::spawn(move || done.send(ModelFile::read(&named).map(drop).map_err(|e| e.to_string())));
        let error = read.recv_timeout(PATIENCE).expect("it does not wait for the file").unwrap_err();
        assert!(error.contains(kind) && error.contains("regular file"), "{}: {error}", path.display());
    }
}
