//! Tests of a pull from a hub that describes a repository with hostile sizes.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

/// Starts a hub that answers every request with the description of a repository with files of these sizes. Returns the
/// hub and the number of requests that it has received.
fn hub_with(files: &[(&str, u64)]) -> (Hub, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let siblings: Vec<serde_json::Value> = files
        .iter()
        .map(|(name, size)| serde_json::json!({ "rfilename": name, "size": size, "lfs": { "sha256": "ab".repeat(32), "size": size } }))
        .collect();
    let body = serde_json::json!({ "sha": "c0ffee".repeat(6), "siblings": siblings }).to_string();
    let seen = Arc::new(AtomicUsize::new(0));
    let count = seen.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut request = Vec::new();
            let mut chunk = [0; 4096];
            while !request.ends_with(b"\r\n\r\n") {
                match stream.read(&mut chunk).unwrap_or(0) {
                    0 => break,
                    n => request.extend_from_slice(&chunk[..n]),
                }
            }
            count.fetch_add(1, Ordering::SeqCst);
            let head = format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", body.len());
            drop(stream.write_all(format!("{head}{body}").as_bytes()));
        }
    });
    let retry = HubRetryPolicy { max_attempts: 1, ..HubRetryPolicy::default() };
    let config = HubConfig { endpoint: Some(endpoint), retry, ..HubConfig::default() };
    (Hub::new(&config, |_| None), seen)
}

/// The error of a pull of `file`.
fn refused(hub: &Hub, file: &str) -> HubError {
    let folder = tempfile::tempdir().unwrap();
    let model = format!("hf:maker/full:{file}").parse().unwrap();
    let request =
        PullRequest { model: &model, repo: "maker/full", revision: None, file, folder: folder.path(), known: &[] };
    match pull(hub, &request, &mut |_, _| panic!("disk space was requested"), &mut |_| {}) {
        Err(ModelError::HubFetch { source, .. }) => source,
        other => panic!("{other:?}"),
    }
}

#[test]
fn large_index_is_refused_before_it_is_fetched() {
    let index = "model.safetensors.index.json";
    let (hub, requests) = hub_with(&[(index, 256 << 20)]);
    let error = refused(&hub, index).to_string();
    for word in [index, "maker/full", "256.0 MiB", "64.0 MiB"] {
        assert!(error.contains(word), "{word:?} is not in {error:?}");
    }
    assert_eq!(requests.load(Ordering::SeqCst), 1, "only the description was requested");
}

#[test]
fn sizes_that_add_up_to_more_than_64_bits_are_refused() {
    let (hub, requests) = hub_with(&[("model.safetensors", u64::MAX), ("config.json", 1)]);
    let error = refused(&hub, "model.safetensors").to_string();
    assert!(error.contains("maker/full") && error.contains("size"), "{error}");
    assert_eq!(requests.load(Ordering::SeqCst), 1, "only the description was requested");
}
