//! What keeping to a schema costs: the time spent on the constraint as a share of the time of decoding, and beside it the same
//! model writing freely in the same run. For a critic's report, for schemas of other shapes, and for a regular expression of
//! a thousand characters.
//!
//!     cargo run --release -p cfq-benches --bin constraint_cost -- FILE.gguf --threads 2
#![allow(clippy::print_stdout)]

use anyhow::bail;
use cfq_benches::engine::{file_of_arguments, finish, load, middle, prompt};
use cfq_inference_node::engine::candle::CandleEngine;
use cfq_proto::job::{OutputFormat, Sampling, Usage};
use cfq_proto::review::ReviewFeedback;
use serde_json::{Value, json};

const SEEDS: u64 = 7;
const MOST: u32 = 160;
const TASK: &str = "Review this function and report as JSON.\n\ndef is_even(n):\n    return n % 2 == 0\n";

fn main() -> anyhow::Result<()> {
    let engine = load(&file_of_arguments()?, 1)?;
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(bench(&engine))
}

async fn bench(engine: &CandleEngine) -> anyhow::Result<()> {
    let mut worst: f64 = 0.0;
    for (name, format) in formats() {
        let (mut shares, mut beside, mut drawn, mut forced) = (Vec::new(), Vec::new(), 0, 0);
        for seed in 0..SEEDS {
            let ask = |format| {
                let sampling =
                    Sampling { max_tokens: MOST, temperature: 0.7, seed, prompt_lookup: false, ..Sampling::default() };
                prompt(TASK.to_owned(), sampling, format)
            };
            let free = finish(engine, ask(OutputFormat::Text)).await?.usage;
            let held = finish(engine, ask(format.clone())).await?.usage;
            let steps = held.output_tokens - held.forced_tokens;
            if steps < 8 {
                continue;
            }
            drawn += steps;
            forced += held.forced_tokens;
            let decoding = (held.total_ms - held.first_token_ms).max(1);
            shares.push(held.constraint_ms as f64 / decoding as f64);
            beside.push(step_ms(&held) / step_ms(&free));
        }
        let (share, beside) = (middle(&mut shares), middle(&mut beside));
        worst = worst.max(share);
        println!(
            "{name}: {:.1} percent of decoding; a drawn token takes {beside:.2} times a free one's time; {drawn} drawn, {forced} forced",
            share * 100.0
        );
    }
    if worst > 0.1 {
        bail!("more than a tenth of the time of decoding");
    }
    Ok(())
}

/// Milliseconds for each token that was drawn.
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
    // Words in a fixed order with a free remark after each.
    let long: String = (0..80).map(|n| format!("item_{n}: [a-z ]{{1,20}}\\n")).collect();
    vec![
        ("a critic's report", json(schemars::schema_for!(ReviewFeedback).to_value())),
        ("an array of texts", json(texts.clone())),
        ("a tree with choices and patterns", json(tree)),
        ("a regular expression of 2,000 characters", OutputFormat::Regex { pattern: long }),
    ]
}
