//! Compares the memory estimate with the resident memory of a process.
//!
//! A child process loads only the model, so that nothing else is in its memory, and prints how much its resident memory
//! grew.

use cfq_engine::{EngineLimits, LoadError, estimate_memory};

use crate::smollm::{self, answer, user_prompt};

fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

/// The child process: loads the model, answers one prompt and prints the growth of its resident memory. The test below
/// runs it.
#[tokio::test]
#[ignore = "the child process of resident_memory_stays_within_the_estimate"]
async fn measuring_child_process() {
    let file = smollm::file();
    drop(file);
    let before = resident();
    let engine = smollm::load(1);
    assert_eq!(engine.estimate().weights, engine.weight_bytes());
    let loaded = resident() - before;
    let mut prompt = user_prompt(&"All work and no play makes Jack a dull boy. ".repeat(100));
    prompt.sampling.max_tokens = 8;
    let tokens = u64::from(answer(&engine, prompt).await.usage.prompt_tokens);
    let used = resident() - before;
    println!("MEASURED {loaded} {used} {tokens}");
}

#[test]
fn resident_memory_stays_within_the_estimate() {
    let limits = EngineLimits { memory_bytes: 4 << 30, max_sequences: 1 };
    let predicted = estimate_memory(&smollm::file(), limits, 0).unwrap();
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["memory_estimate::measuring_child_process", "--exact", "--ignored", "--nocapture"])
        .env("CFQ_CACHE", smollm::models_dir().parent().unwrap())
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    let line = stdout.lines().find_map(|l| l.split_once("MEASURED ")).unwrap_or_else(|| panic!("{stdout}")).1;
    let numbers: Vec<u64> = line.split_whitespace().map(|n| n.parse().unwrap()).collect();
    let [loaded, used, tokens] = numbers[..] else { panic!("{line}") };
    let weights = predicted.weights;
    assert!(loaded < predicted.total() - predicted.kv_bytes(), "loading took {loaded}, predicted {predicted}");
    assert!(loaded > weights * 9 / 10, "the prediction is far too high: {loaded} of {predicted}");
    // Pages that the load allocated and freed may serve the KV pool, so only the upper bound is certain.
    assert!(
        used < predicted.total() - predicted.kv_bytes() + tokens * predicted.kv_per_token,
        "{used} for {tokens} tokens, predicted {predicted}"
    );
}

#[test]
fn model_that_does_not_fit_is_refused_with_the_terms_of_the_estimate() {
    let limits = EngineLimits { memory_bytes: 256 << 20, max_sequences: 1 };
    let refused = estimate_memory(&smollm::file(), limits, 0).unwrap_err();
    let LoadError::DoesNotFit { source, .. } = &refused else { panic!("{refused}") };
    assert!(source.estimate.total() > source.available);
    let message = refused.to_string();
    for part in ["KV 2048 tokens x 45.0 KiB", "256.0 MiB are available", "memory_limit"] {
        assert!(message.contains(part), "{message}");
    }
}
