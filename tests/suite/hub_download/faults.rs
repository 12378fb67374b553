//! Tests of downloads with injected faults: broken and stalled connections, wrong bytes, and error replies.

use std::time::Duration;

use cfq_inference_node::models::{InstallState, PullOptions, PullProgress};
use cfq_tests::hub::{Fault, HubServer, TOKEN};

use super::{MODEL, REPO, gguf, pull, pull_with, store};

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
    let InstallState::Unfinished { fetched_bytes: have } = here.state else { panic!("{here:?}") };
    assert!(have > 100_000 && here.bytes == 300_000, "{here:?}");

    server.cut_every_connection_after(None);
    let before = server.ranges().len();
    let outcome = pull(&store, MODEL).await;
    assert_eq!(outcome.bytes(), file);
    assert_eq!(outcome.steps.first(), Some(&PullProgress::Started { files: 1, bytes: 300_000, have }));
    assert_eq!(server.ranges()[before..], [Some(format!("bytes={have}-"))]);
    assert_eq!(store.list().unwrap()[0].state, InstallState::Complete);
}

#[tokio::test(flavor = "multi_thread")]
async fn checksum_mismatch_never_becomes_a_model() {
    let (server, folder) = (HubServer::start().await, tempfile::tempdir().unwrap());
    let file = gguf(300_000, 5);
    server.commit(REPO, &[("tiny.gguf", &file)]);
    let store = store(folder.path(), server.hub(None));
    server.inject_faults(&[Fault::CorruptAt(123_456)]);
    pull(&store, MODEL).await.refused(&["checksum mismatch", "discarded"]);
    assert!(store.list().unwrap().iter().all(|m| m.state == InstallState::Unfinished { fetched_bytes: 0 }));

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
    refused("hf:maker/tiny-GGUF:config.json", &["is not a model file", ".gguf"]).await;
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
