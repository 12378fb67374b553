//! Tests that load invalid model files on a running node: truncated in every part, damaged in the header and its
//! tables, of an unknown architecture, larger than any memory. Each is rejected with its reason, the node keeps
//! running, and its other models keep serving.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use cfq_proto::node::Residency;
use cfq_proto::task::TaskState;
use cfq_tests::cluster::{Cluster, Options, TOKEN};
use cfq_tests::gguf::{self, Layout};
use cfq_tests::repo::UserRepo;
use cfq_tests::small_model::{self, SMALL_MODEL, rejection};
use cfq_tests::{binary, nats};

struct InvalidFile {
    name: String,
    path: PathBuf,
    /// Text that the error message must contain.
    error: &'static str,
}

fn write_file(folder: &Path, name: &str, bytes: &[u8], error: &'static str) -> InvalidFile {
    let path = folder.join(format!("{}.gguf", name.replace(' ', "-")));
    std::fs::write(&path, bytes).unwrap();
    InvalidFile { name: name.to_owned(), path, error }
}

/// A copy of the valid file `whole`, in which the bytes at offset `at` are replaced with `bytes`.
fn patched(folder: &Path, whole: &[u8], name: &str, error: &'static str, at: usize, bytes: &[u8]) -> InvalidFile {
    let mut all = whole.to_vec();
    all[at..at + bytes.len()].copy_from_slice(bytes);
    write_file(folder, name, &all, error)
}

/// Truncated copies of the file, one that ends in each of its parts.
fn truncated_files(folder: &Path, whole: &[u8], layout: &Layout) -> Vec<InvalidFile> {
    let first = &layout.tensors[0];
    let error = "cut off or corrupt";
    [
        ("nothing", 0, "not a GGUF file"),
        ("half the magic", 2, "not a GGUF file"),
        ("in the counts", 12, error),
        ("in a value", layout.pairs.start + 20, error),
        ("in the vocabulary", (layout.pairs.start + layout.pairs.end) / 2, error),
        ("before the tensors", layout.pairs.end, error),
        ("in a tensor's entry", first.offset_at + 3, error),
        ("after the header", layout.end, error),
        ("in the weights", whole.len() / 2, error),
        ("before the last weights", whole.len() - 4096, error),
    ]
    .into_iter()
    .map(|(name, length, error)| write_file(folder, &format!("cut {name}"), &whole[..length], error))
    .collect()
}

/// Copies of the file, each with one wrong value in the header.
fn damaged_files(folder: &Path, whole: &[u8], layout: &Layout) -> Vec<InvalidFile> {
    let change =
        |name: &str, error: &'static str, at: usize, bytes: &[u8]| patched(folder, whole, name, error, at, bytes);
    let corrupt = "cut off or corrupt";
    let last = layout.tensors.iter().find(|t| t.name.ends_with("ffn_down.weight")).unwrap();
    let architecture = gguf::value_of(whole, layout, "general.architecture") + 8;
    let blocks = gguf::value_of(whole, layout, "llama.block_count");
    vec![
        change("magic", "not a GGUF file", 0, b"GGML"),
        change("version", "version 2 or 3", 4, &9u32.to_le_bytes()),
        change("tensor count", corrupt, 8, &u64::MAX.to_le_bytes()),
        change("pair count", corrupt, 16, &(1u64 << 40).to_le_bytes()),
        change("length of a key", corrupt, layout.pairs.start, &(1u64 << 50).to_le_bytes()),
        change("offset beyond the end", corrupt, last.offset_at, &(1u64 << 45).to_le_bytes()),
        change("offset that overflows", corrupt, last.offset_at, &u64::MAX.to_le_bytes()),
        change("dimension that overflows", "impossible dimensions", last.dims_at, &u64::MAX.to_le_bytes()),
        change("dimension of another shape", "expected [", last.dims_at, &32u64.to_le_bytes()),
        change("kind of a tensor", "format number 77", last.offset_at - 4, &77u32.to_le_bytes()),
        change("architecture", "klama", architecture, b"klama"),
        change("more blocks than there are", "missing", blocks, &4000u32.to_le_bytes()),
        change("no blocks", "block_count", blocks, &0u32.to_le_bytes()),
    ]
}

/// A sparse file with a valid header and hundreds of gigabytes of weights, with plausible dimensions.
fn giant_file(folder: &Path, whole: &[u8], layout: &Layout) -> InvalidFile {
    let mut header = whole[..layout.end].to_vec();
    let mut multiply = |key: &str, times: u32| {
        let at = gguf::value_of(whole, layout, key);
        let value = u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
        header[at..at + 4].copy_from_slice(&(value * times).to_le_bytes());
        u64::from(value)
    };
    let hidden = multiply("llama.embedding_length", 16);
    let feed_forward = multiply("llama.feed_forward_length", 512);
    let heads = multiply("llama.attention.head_count", 16);
    let keys = multiply("llama.attention.head_count_kv", 16) * hidden / heads;
    let mut offset = 0u64;
    for tensor in &layout.tensors {
        let mut dims = tensor.dims.clone();
        for (at, dim) in dims.iter_mut().enumerate() {
            if *dim == hidden || *dim == keys {
                *dim *= 16;
            } else if *dim == feed_forward {
                *dim *= 512;
            }
            let to = tensor.dims_at + 8 * at;
            header[to..to + 8].copy_from_slice(&dim.to_le_bytes());
        }
        header[tensor.offset_at..tensor.offset_at + 8].copy_from_slice(&offset.to_le_bytes());
        // Space is computed for F32, the largest format; unused space does no harm.
        offset += (dims.iter().product::<u64>() * 4).next_multiple_of(32);
    }
    let path = folder.join("giant.gguf");
    std::fs::write(&path, &header).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len((layout.end as u64).next_multiple_of(32) + offset).unwrap();
    InvalidFile { name: "larger than any memory".to_owned(), path, error: "does not fit" }
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_model_files_are_rejected_and_the_node_keeps_serving() {
    let home = tempfile::tempdir().unwrap();
    nats::make_traversable(home.path());
    let folder = home.path().to_owned();
    let files = tokio::task::spawn_blocking(move || {
        let whole = std::fs::read(small_model::file()).unwrap();
        let layout = gguf::layout(&whole);
        let mut files = truncated_files(&folder, &whole, &layout);
        files.extend(damaged_files(&folder, &whole, &layout));
        files.push(giant_file(&folder, &whole, &layout));
        files.push(write_file(&folder, "a page of a web site", b"<!DOCTYPE html><html></html>", "not a GGUF file"));
        files
    });
    let files = files.await.unwrap();
    let models = vec![SMALL_MODEL.parse().unwrap()];
    let mut options = Options { models, alpha: SMALL_MODEL.into(), ..Options::default() };
    options.timing.job_step_timeout_ms = 60_000;
    let cluster = Cluster::start_with(options).await;
    let boot = cluster.client.nodes().await.unwrap()[0].boot;
    for file in &files {
        let mut command = Command::new(tokio::task::block_in_place(binary::cfq));
        command.args(["models", "load", &format!("path:{}", file.path.display())]).stdin(Stdio::null());
        command.env("CFQ_DATA", home.path().join("data")).env("CFQ_CONFIG", home.path().join("config"));
        command.env("CFQ_URL", cluster.client.url()).env("CFQ_TOKEN", TOKEN);
        let output = tokio::task::block_in_place(|| command.output().unwrap());
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{}: {stderr}", file.name);
        let named = stderr.contains(file.path.to_str().unwrap());
        assert!(named && stderr.contains(file.error), "{}: {stderr}", file.name);
        assert!(!stderr.contains("failed inside the engine"), "{}: {stderr}", file.name);
    }
    let node = cluster.client.nodes().await.unwrap().remove(0);
    assert_eq!(node.boot, boot, "the node was not restarted");
    let unusable = node.ledger.models.iter().filter(|m| matches!(m.residency, Residency::Unusable { .. })).count();
    assert_eq!(unusable, files.len());
    cluster.models.script("beta", vec![rejection()]);
    let repo = UserRepo::with_uncommitted_changes();
    let mut spec = cluster.spec(&repo);
    spec.max_iterations = Some(1);
    spec.agents.alpha.max_tokens = Some(60);
    let task = cluster.submit(&spec).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Escalated, "{}", detail.reason);
    assert_eq!(detail.iterations[0].model, SMALL_MODEL);
    cluster.finish().await;
}
