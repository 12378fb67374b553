//! The ledger's arithmetic against what a process really holds.
//!
//! A child process loads the model alone, so that nothing else is in its memory, and says how it grew.

use cfq_inference_node::engine::candle::{Limits, LoadError, need};

use crate::smollm::{self, answer, ask};

fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

/// Run by the test below in a process of its own.
#[tokio::test]
#[ignore = "the child of the_need_is_what_a_process_holds"]
async fn child() {
    let file = smollm::file();
    drop(file);
    let before = resident();
    let engine = smollm::load(1);
    assert_eq!(engine.need().weights, engine.weights());
    let loaded = resident() - before;
    let mut prompt = ask(&"All work and no play makes Jack a dull boy. ".repeat(100));
    prompt.sampling.max_tokens = 8;
    let tokens = u64::from(answer(&engine, prompt).await.usage.prompt_tokens);
    let worked = resident() - before;
    println!("MEASURED {loaded} {worked} {tokens}");
}

#[test]
fn the_need_is_what_a_process_holds() {
    let limits = Limits { memory: 4 << 30, max_sequences: 1 };
    let need = need(&smollm::file(), limits).unwrap();
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["memory::child", "--exact", "--ignored", "--nocapture"])
        .env("CFQ_CACHE", smollm::models_dir().parent().unwrap())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let line = said.lines().find_map(|l| l.split_once("MEASURED ")).unwrap_or_else(|| panic!("{said}")).1;
    let numbers: Vec<u64> = line.split_whitespace().map(|n| n.parse().unwrap()).collect();
    let [loaded, worked, tokens] = numbers[..] else { panic!("{line}") };
    let weights = need.weights;
    assert!(loaded < need.total() - need.kv(), "loading took {loaded}, predicted {need}");
    assert!(loaded > weights * 9 / 10, "the prediction is far too high: {loaded} of {need}");
    // Pages that loading used and gave back may serve the KV, so only the upper bound is certain.
    assert!(
        worked < need.total() - need.kv() + tokens * need.kv_per_token,
        "{worked} for {tokens} tokens, predicted {need}"
    );
}

#[test]
fn a_model_without_room_is_refused_with_the_arithmetic() {
    let limits = Limits { memory: 256 << 20, max_sequences: 1 };
    let refused = need(&smollm::file(), limits).unwrap_err();
    let LoadError::DoesNotFit { source, .. } = &refused else { panic!("{refused}") };
    assert!(source.need.total() > source.have);
    let said = refused.to_string();
    for part in ["KV 2048 tokens x 45.0 KiB", "256.0 MiB are available", "memory_limit"] {
        assert!(said.contains(part), "{said}");
    }
}
