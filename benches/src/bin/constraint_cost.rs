//! Cost of constrained decoding: the time spent on the constraint as a share of the decode time, and the time per token
//! relative to unconstrained decoding in the same run. Measured for a critic's review, for schemas of other shapes, and
//! for a regular expression of two thousand characters.
//!
//!     cargo run --release -p cfq-benches --bin constraint_cost -- FILE.gguf --threads 2
#![allow(clippy::print_stdout)]

use anyhow::bail;
use cfq_benches::engine::{file_from_arguments, finish, load, median_f64, prompt};
use cfq_engine::LocalEngine;
use cfq_proto::job::{OutputFormat, Sampling, Usage};
use cfq_proto::review::ReviewFeedback;
use serde_json::{Value, json};

const SEEDS: u64 = 7;
const MAX_TOKENS: u32 = 160;
const TASK: &str = "Review this function and report as JSON.\n\ndef is_even(n):\n    return n % 2 == 0\n";

fn main() -> anyhow::Result<()> {
    let engine = load(&file_from_arguments()?, 1)?;
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(bench(&engine))
}

async fn bench(engine: &LocalEngine) -> anyhow::Result<()> {
    let mut worst: f64 = 0.0;
    for (name, format) in formats() {
        let (mut shares, mut slowdowns, mut sampled, mut forced) = (Vec::new(), Vec::new(), 0, 0);
        for seed in 0..SEEDS {
            let ask = |format| {
                let sampling = Sampling {
                    max_tokens: MAX_TOKENS,
                    temperature: 0.7,
                    seed,
                    prompt_lookup: false,
                    ..Sampling::default()
                };
                prompt(TASK.to_owned(), sampling, format)
            };
            let free = finish(engine, ask(OutputFormat::Text)).await?.usage;
            let constrained = finish(engine, ask(format.clone())).await?.usage;
            let steps = constrained.output_tokens - constrained.forced_tokens;
            if steps < 8 {
                continue;
            }
            sampled += steps;
            forced += constrained.forced_tokens;
            let decode_ms = (constrained.total_ms - constrained.first_token_ms).max(1);
            shares.push(constrained.constraint_ms as f64 / decode_ms as f64);
            slowdowns.push(step_ms(&constrained) / step_ms(&free));
        }
        let (share, slowdown) = (median_f64(&mut shares), median_f64(&mut slowdowns));
        worst = worst.max(share);
        println!(
            "{name}: {:.1} percent of decode time; time per sampled token {slowdown:.2} times unconstrained; \
             {sampled} sampled, {forced} forced",
            share * 100.0
        );
    }
    if worst > 0.1 {
        bail!("the constraint took more than a tenth of the decode time");
    }
    Ok(())
}

/// Decode time per sampled token (forced tokens excluded), in ms.
fn step_ms(usage: &Usage) -> f64 {
    (usage.total_ms - usage.first_token_ms) as f64 / f64::from((usage.output_tokens - usage.forced_tokens).max(1))
}

fn formats() -> Vec<(&'static str, OutputFormat)> {
    let json = |schema: Value| OutputFormat::JsonSchema { schema };
    let texts =
        json!({ "type": "array", "minItems": 3, "maxItems": 6, "items": { "type": "string", "maxLength": 80 } });
    let choice = json!({ "enum": ["keep it", "change the name", "change the body", "remove it"] });
    let tree = json!({
        "type": "object", "required": ["name", "kind", "children"], "additionalProperties": false,
        "properties": {
            "name": { "type": "string", "pattern": "^[a-z_]{3,20}$" },
            "kind": choice,
            "children": { "type": "array", "maxItems": 3, "items": {
                "type": "object", "required": ["line", "why"], "additionalProperties": false,
                "properties": { "line": { "type": "integer", "minimum": 1, "maximum": 500 }, "why": texts },
            } },
        },
    });
    // Regular expression with fixed words in a fixed order, each followed by free text.
    let long: String = (0..80).map(|n| format!("item_{n}: [a-z ]{{1,20}}\\n")).collect();
    vec![
        ("a critic's report", json(schemars::schema_for!(ReviewFeedback).to_value())),
        ("an array of texts", json(texts.clone())),
        ("a tree with choices and patterns", json(tree)),
        ("a regular expression of 2,000 characters", OutputFormat::Regex { pattern: long }),
    ]
}
