//! Model files that are not what they should be, given to a node that runs: cut off at every kind of place, damaged in
//! header and tables, of an architecture nobody knows, larger than any memory. Each is refused with its reason, the node
//! lives on, and its other models serve.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use cfq_proto::node::Residency;
use cfq_proto::task::TaskState;
use cfq_tests::cluster::{Cluster, Options, TOKEN};
use cfq_tests::gguf::{self, Layout};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, review};
use cfq_tests::small::{self, SMALL};
use cfq_tests::{binary, nats};

struct Bad {
    name: String,
    path: PathBuf,
    /// What the refusal must say.
    word: &'static str,
}

fn written(folder: &Path, name: &str, bytes: &[u8], word: &'static str) -> Bad {
    let path = folder.join(format!("{}.gguf", name.replace(' ', "-")));
    std::fs::write(&path, bytes).unwrap();
    Bad { name: name.to_owned(), path, word }
}

fn changed(folder: &Path, whole: &[u8], name: &str, word: &'static str, change: impl FnOnce(&mut [u8])) -> Bad {
    let mut bytes = whole.to_vec();
    change(&mut bytes);
    written(folder, name, &bytes, word)
}

fn cut(folder: &Path, whole: &[u8], layout: &Layout) -> Vec<Bad> {
    let first = &layout.tensors[0];
    let word = "cut off or corrupt";
    [
        ("nothing", 0, "not a GGUF file"),
        ("half the magic", 2, "not a GGUF file"),
        ("in the counts", 12, word),
        ("in a value", layout.pairs.start + 20, word),
        ("in the vocabulary", (layout.pairs.start + layout.pairs.end) / 2, word),
        ("before the tensors", layout.pairs.end, word),
        ("in a tensor's entry", first.offset_at + 3, word),
        ("after the header", layout.end, word),
        ("in the weights", whole.len() / 2, word),
        ("before the last weights", whole.len() - 4096, word),
    ]
    .into_iter()
    .map(|(name, length, word)| written(folder, &format!("cut {name}"), &whole[..length], word))
    .collect()
}

fn damaged(folder: &Path, whole: &[u8], layout: &Layout) -> Vec<Bad> {
    let change = |name: &str, word: &'static str, at: usize, bytes: &[u8]| {
        changed(folder, whole, name, word, |all| all[at..at + bytes.len()].copy_from_slice(bytes))
    };
    let corrupt = "cut off or corrupt";
    let last = layout.tensors.iter().find(|t| t.name.ends_with("ffn_down.weight")).unwrap();
    let architecture = gguf::value_of(whole, layout, "general.architecture") + 8;
    let blocks = gguf::value_of(whole, layout, "llama.block_count");
    vec![
        change("magic", "not a GGUF file", 0, b"GGML"),
        change("version", "versions 2 and 3", 4, &9u32.to_le_bytes()),
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

/// A true header over a sparse file: hundreds of gigabytes of weights, of sizes that a model might have.
fn giant(folder: &Path, whole: &[u8], layout: &Layout) -> Bad {
    let mut header = whole[..layout.end].to_vec();
    let mut wider = |key: &str, times: u32| {
        let at = gguf::value_of(whole, layout, key);
        let value = u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
        header[at..at + 4].copy_from_slice(&(value * times).to_le_bytes());
        u64::from(value)
    };
    let hidden = wider("llama.embedding_length", 16);
    let feed_forward = wider("llama.feed_forward_length", 512);
    let heads = wider("llama.attention.head_count", 16);
    let keys = wider("llama.attention.head_count_kv", 16) * hidden / heads;
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
        // F32 is the widest of the kinds: too much room does no harm.
        offset += (dims.iter().product::<u64>() * 4).next_multiple_of(32);
    }
    let path = folder.join("giant.gguf");
    std::fs::write(&path, &header).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len((layout.end as u64).next_multiple_of(32) + offset).unwrap();
    Bad { name: "larger than any memory".to_owned(), path, word: "does not fit" }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_bad_file_is_refused_with_its_reason_and_the_node_serves_on() {
    let home = tempfile::tempdir().unwrap();
    nats::open_to_all(home.path());
    let folder = home.path().to_owned();
    let bad = tokio::task::spawn_blocking(move || {
        let whole = std::fs::read(small::file()).unwrap();
        let layout = gguf::layout(&whole);
        let mut bad = cut(&folder, &whole, &layout);
        bad.extend(damaged(&folder, &whole, &layout));
        bad.push(giant(&folder, &whole, &layout));
        bad.push(written(&folder, "a page of a web site", b"<!DOCTYPE html><html></html>", "not a GGUF file"));
        bad
    });
    let bad = bad.await.unwrap();
    let mut options = Options { models: vec![SMALL.parse().unwrap()], alpha: SMALL.into(), ..Options::default() };
    options.timing.job_step_ms = 60_000;
    let cluster = Cluster::with(options).await;
    let boot = cluster.client.nodes().await.unwrap()[0].boot;
    for file in &bad {
        let mut command = Command::new(tokio::task::block_in_place(binary::cfq));
        command.args(["models", "load", &format!("path:{}", file.path.display())]).stdin(Stdio::null());
        command.env("CFQ_DATA", home.path().join("data")).env("CFQ_CONFIG", home.path().join("config"));
        command.env("CFQ_URL", cluster.client.url()).env("CFQ_TOKEN", TOKEN);
        let output = tokio::task::block_in_place(|| command.output().unwrap());
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{}: {said}", file.name);
        let named = said.contains(file.path.to_str().unwrap());
        assert!(named && said.contains(file.word), "{}: {said}", file.name);
        assert!(!said.contains("failed inside the engine"), "{}: {said}", file.name);
    }
    let node = cluster.client.nodes().await.unwrap().remove(0);
    assert_eq!(node.boot, boot, "it is the same process");
    let unusable = node.ledger.models.iter().filter(|m| matches!(m.residency, Residency::Unusable { .. })).count();
    assert_eq!(unusable, bad.len());
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let mut spec = cluster.spec(&repo);
    spec.max_iterations = Some(1);
    spec.agents.alpha.max_tokens = Some(60);
    let task = cluster.submit(&spec).await;
    let detail = cluster.rests(task).await;
    assert!(matches!(detail.summary.state, TaskState::Merged | TaskState::Escalated), "{}", detail.reason);
    assert_eq!(detail.iterations[0].model, SMALL);
    cluster.finish().await;
}
