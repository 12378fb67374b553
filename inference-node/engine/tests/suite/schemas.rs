//! Tests that constrained output for 200 random schemas and random prompts parses and conforms to the schema. The
//! model's weights are random, so only the constraint can make the text conform.

use std::path::Path;

use cfq_engine::{Admitted, Engine, EngineLimits, Generation, LocalEngine};
use cfq_proto::early_stop::EarlyStop;
use cfq_proto::job::{FinishReason, OutputFormat, Prompt, Sampling};
use serde_json::{Value, json};

use crate::smollm::{answer, finish, user_prompt};

const SCHEMAS: u64 = 200;
/// Number of sequences in one batch.
const BATCH: usize = 8;

/// SplitMix64 (Steele, Lea and Flood, 2014): the same schemas in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    fn choose<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize].clone()
    }
}

const NAMES: [&str; 8] = ["name", "kind", "items", "a b", "größe", "x", "quality_score", "quote\"d"];
const WORDS: [&str; 6] = ["red", "green and blue", "", "ü", "back\\slash", "line\nbreak"];

fn schema(random: &mut Random, depth: u32) -> Value {
    let kinds = if depth == 0 { 5 } else { 8 };
    match random.below(kinds) {
        0 => json!({ "type": "boolean" }),
        1 => {
            let min = random.below(200) as i64 - 100;
            json!({ "type": "integer", "minimum": min, "maximum": min + random.below(1000) as i64 })
        }
        2 => json!({ "type": "string", "maxLength": random.below(12) }),
        3 => {
            let values: Vec<&str> = (0..=random.below(3)).map(|_| random.choose(&WORDS)).collect();
            json!({ "enum": values })
        }
        4 => json!({ "type": "string", "pattern": random.choose(&["^[a-z]{2,5}$", "^[0-9]{3}-[AB]$"]) }),
        5 => {
            let min = random.below(3);
            let items = schema(random, depth - 1);
            json!({ "type": "array", "items": items, "minItems": min, "maxItems": min + random.below(3) })
        }
        6 => json!({ "anyOf": [schema(random, depth - 1), { "type": "null" }] }),
        _ => object(random, depth - 1),
    }
}

fn object(random: &mut Random, depth: u32) -> Value {
    let mut properties = serde_json::Map::new();
    for _ in 0..=random.below(4) {
        properties.insert(random.choose(&NAMES).to_owned(), schema(random, depth));
    }
    let required: Vec<&String> = properties.keys().filter(|_| random.below(2) == 0).collect();
    json!({ "type": "object", "required": required, "properties": properties, "additionalProperties": false })
}

/// Why `value` does not conform to `schema`; `None` if it does.
fn violation(schema: &Value, value: &Value) -> Option<String> {
    let not = |expected: &str| Some(format!("{value} is not {expected}: {schema}"));
    if let Some(alternatives) = schema.get("anyOf").and_then(Value::as_array) {
        let none = alternatives.iter().all(|one| violation(one, value).is_some());
        return if none { not("any of these") } else { None };
    }
    if let Some(values) = schema.get("enum").and_then(Value::as_array) {
        return if values.contains(value) { None } else { not("one of these") };
    }
    let number = |key: &str| schema.get(key).and_then(Value::as_i64);
    match schema["type"].as_str().unwrap() {
        "null" if value.is_null() => None,
        "boolean" if value.is_boolean() => None,
        "integer" => {
            let inside = value.as_i64().is_some_and(|n| number("minimum") <= Some(n) && Some(n) <= number("maximum"));
            if inside { None } else { not("in this range") }
        }
        "string" => {
            let Some(text) = value.as_str() else { return not("a string") };
            let digits = |s: &str| s.len() == 3 && s.bytes().all(|b| b.is_ascii_digit());
            let conforms = match schema.get("pattern").and_then(Value::as_str) {
                Some("^[a-z]{2,5}$") => (2..=5).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_lowercase()),
                Some(_) => text.split_once('-').is_some_and(|(n, end)| digits(n) && ["A", "B"].contains(&end)),
                None => number("maxLength").is_none_or(|max| text.chars().count() as i64 <= max),
            };
            if conforms { None } else { not("such a string") }
        }
        "array" => {
            let Some(items) = value.as_array() else { return not("an array") };
            let count = Some(items.len() as i64);
            if count < number("minItems") || count > number("maxItems") {
                return not("of this length");
            }
            items.iter().find_map(|item| violation(&schema["items"], item))
        }
        "object" => {
            let Some(fields) = value.as_object() else { return not("an object") };
            let known = schema["properties"].as_object().unwrap();
            if schema["required"].as_array().unwrap().iter().any(|name| !fields.contains_key(name.as_str().unwrap())) {
                return not("complete");
            }
            fields.iter().find_map(|(name, field)| match known.get(name) {
                Some(schema) => violation(schema, field),
                None => not("without additional properties"),
            })
        }
        kind => not(kind),
    }
}

#[tokio::test]
async fn output_conforms_to_200_random_schemas() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models/llama/model.gguf");
    let limits = EngineLimits { memory_bytes: 1 << 30, max_sequences: BATCH as u32 };
    let engine = LocalEngine::builder("path:fixture".parse().unwrap(), &model).limits(limits).load().unwrap();
    let mut random = Random(7);
    let prompts: Vec<(Value, Prompt)> = (0..SCHEMAS)
        .map(|seed| {
            let schema = object(&mut random, 3);
            let words: Vec<&str> = (0..random.below(9)).map(|_| random.choose(&WORDS)).collect();
            let sampling = Sampling { temperature: 1.0, seed, max_tokens: 900, ..Sampling::default() };
            let format = OutputFormat::JsonSchema { schema: schema.clone() };
            (schema, Prompt { sampling, format, ..user_prompt(&format!("Write JSON. {}", words.join(" "))) })
        })
        .collect();
    let distinct: std::collections::BTreeSet<String> = prompts.iter().map(|(schema, _)| schema.to_string()).collect();
    assert!(distinct.len() > 150, "{}", distinct.len());
    let mut output_tokens = 0;
    for batch in prompts.chunks(BATCH) {
        let mut admitted = Vec::new();
        for (_, prompt) in batch {
            admitted.push(engine.admit(prompt.clone()).await.unwrap());
        }
        let running: Vec<Generation> = admitted.into_iter().map(Admitted::start).collect();
        for (generation, (schema, _)) in running.into_iter().zip(batch) {
            let done = finish(generation).await.0.unwrap();
            assert_eq!(done.finish, FinishReason::Stop, "{schema}\n{}", done.text);
            let value: Value = serde_json::from_str(&done.text).unwrap_or_else(|e| panic!("{e}: {}", done.text));
            assert_eq!(violation(schema, &value), None);
            output_tokens += done.usage.output_tokens;
        }
    }
    assert!(output_tokens > 2_000, "{output_tokens} tokens");
}

#[tokio::test]
async fn early_stop_ends_the_answer_once_the_field_is_known() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models/llama/model.gguf");
    let limits = EngineLimits { memory_bytes: 1 << 30, max_sequences: 1 };
    let engine = LocalEngine::builder("path:fixture".parse().unwrap(), &model).limits(limits).load().unwrap();
    let schema = json!({ "type": "object", "required": ["score", "list", "rest"], "additionalProperties": false, "properties": {
        "score": { "type": "integer", "minimum": 0, "maximum": 100 },
        "list": { "type": "array", "items": { "enum": ["x", "yy"] }, "minItems": 1, "maxItems": 3 },
        "rest": { "type": "string", "minLength": 60, "maxLength": 80 },
    } });
    for seed in 0..6 {
        let mut texts = Vec::new();
        for known in ["", "list", "score"] {
            let rule = EarlyStop {
                number: "score".into(),
                from: 0.0,
                below: 101.0,
                known: known.into(),
                without: String::new(),
            };
            let early_stop = if known.is_empty() { Vec::new() } else { vec![rule.clone()] };
            let sampling = Sampling { temperature: 1.0, seed, max_tokens: 400, early_stop, ..Sampling::default() };
            let format = OutputFormat::JsonSchema { schema: schema.clone() };
            let done = answer(&engine, Prompt { sampling, format, ..user_prompt("Write JSON.") }).await;
            assert_eq!(done.finish, FinishReason::Stop);
            if !known.is_empty() {
                let fields = rule.met_by(&done.text).unwrap();
                assert!(fields.contains_key(known) && !fields.contains_key("rest"), "{}", done.text);
            }
            texts.push((done.text, done.usage.output_tokens));
        }
        assert!(texts[0].0.starts_with(&texts[1].0) && texts[1].0.starts_with(&texts[2].0), "{texts:?}");
        assert!(texts[2].1 < texts[1].1 && texts[1].1 + 20 < texts[0].1, "{texts:?}");
    }
}

#[test]
fn violation_of_every_schema_keyword_is_reported() {
    let schema = json!({ "type": "object", "required": ["n"], "additionalProperties": false, "properties": {
        "n": { "type": "integer", "minimum": 1, "maximum": 3 },
        "s": { "type": "string", "pattern": "^[0-9]{3}-[AB]$" },
        "l": { "type": "array", "items": { "enum": ["x"] }, "minItems": 1, "maxItems": 2 },
    } });
    assert_eq!(violation(&schema, &json!({ "n": 2, "s": "123-A", "l": ["x"] })), None);
    for invalid in [
        json!({}),
        json!({ "n": 4 }),
        json!({ "n": "2" }),
        json!({ "n": 2, "s": "12-A" }),
        json!({ "n": 2, "l": [] }),
        json!({ "n": 2, "l": ["y"] }),
        json!({ "n": 2, "z": 1 }),
        json!([]),
    ] {
        assert!(violation(&schema, &invalid).is_some(), "{invalid}");
    }
}
