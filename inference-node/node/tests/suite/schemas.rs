//! Two hundred schemas nobody chose, over prompts nobody chose: what is written parses and is valid. The model is a random one,
//! so that it is the constraint alone that makes the text right.

use std::path::Path;
use std::sync::Arc;

use cfq_inference_node::engine::candle::{CandleEngine, Limits};
use cfq_inference_node::engine::{Admitted, Engine, Generation};
use cfq_proto::early::Enough;
use cfq_proto::job::{FinishReason, OutputFormat, Prompt, Sampling};
use serde_json::{Value, json};

use crate::smollm::{answer, ask, finish};

const SCHEMAS: u64 = 200;
const AT_ONCE: usize = 8;

/// SplitMix64: the same schemas in every run.
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

    fn of<T: Clone>(&mut self, all: &[T]) -> T {
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
            let least = random.below(200) as i64 - 100;
            json!({ "type": "integer", "minimum": least, "maximum": least + random.below(1000) as i64 })
        }
        2 => json!({ "type": "string", "maxLength": random.below(12) }),
        3 => {
            let some: Vec<&str> = (0..=random.below(3)).map(|_| random.of(&WORDS)).collect();
            json!({ "enum": some })
        }
        4 => json!({ "type": "string", "pattern": random.of(&["^[a-z]{2,5}$", "^[0-9]{3}-[AB]$"]) }),
        5 => {
            let least = random.below(3);
            let items = schema(random, depth - 1);
            json!({ "type": "array", "items": items, "minItems": least, "maxItems": least + random.below(3) })
        }
        6 => json!({ "anyOf": [schema(random, depth - 1), { "type": "null" }] }),
        _ => object(random, depth - 1),
    }
}

fn object(random: &mut Random, depth: u32) -> Value {
    let mut properties = serde_json::Map::new();
    for _ in 0..=random.below(4) {
        properties.insert(random.of(&NAMES).to_owned(), schema(random, depth));
    }
    let required: Vec<&String> = properties.keys().filter(|_| random.below(2) == 0).collect();
    json!({ "type": "object", "required": required, "properties": properties, "additionalProperties": false })
}

/// Why `value` is not what `schema` says.
fn fault(schema: &Value, value: &Value) -> Option<String> {
    let no = |why: &str| Some(format!("{value} is not {why}: {schema}"));
    if let Some(any) = schema.get("anyOf").and_then(Value::as_array) {
        let none = any.iter().all(|one| fault(one, value).is_some());
        return if none { no("any of these") } else { None };
    }
    if let Some(some) = schema.get("enum").and_then(Value::as_array) {
        return if some.contains(value) { None } else { no("one of these") };
    }
    let number = |key: &str| schema.get(key).and_then(Value::as_i64);
    match schema["type"].as_str().unwrap() {
        "null" if value.is_null() => None,
        "boolean" if value.is_boolean() => None,
        "integer" => {
            let inside = value.as_i64().is_some_and(|n| number("minimum") <= Some(n) && Some(n) <= number("maximum"));
            if inside { None } else { no("in this range") }
        }
        "string" => {
            let Some(text) = value.as_str() else { return no("a string") };
            let digits = |s: &str| s.len() == 3 && s.bytes().all(|b| b.is_ascii_digit());
            let right = match schema.get("pattern").and_then(Value::as_str) {
                Some("^[a-z]{2,5}$") => (2..=5).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_lowercase()),
                Some(_) => text.split_once('-').is_some_and(|(n, end)| digits(n) && ["A", "B"].contains(&end)),
                None => number("maxLength").is_none_or(|most| text.chars().count() as i64 <= most),
            };
            if right { None } else { no("such a string") }
        }
        "array" => {
            let Some(items) = value.as_array() else { return no("an array") };
            let count = Some(items.len() as i64);
            if count < number("minItems") || count > number("maxItems") {
                return no("so long");
            }
            items.iter().find_map(|item| fault(&schema["items"], item))
        }
        "object" => {
            let Some(fields) = value.as_object() else { return no("an object") };
            let known = schema["properties"].as_object().unwrap();
            if schema["required"].as_array().unwrap().iter().any(|name| !fields.contains_key(name.as_str().unwrap())) {
                return no("complete");
            }
            fields.iter().find_map(|(name, field)| match known.get(name) {
                Some(schema) => fault(schema, field),
                None => no("without strangers"),
            })
        }
        kind => no(kind),
    }
}

#[tokio::test]
async fn two_hundred_random_schemas_hold() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models/llama/model.gguf");
    let limits = Limits { memory: 1 << 30, max_sequences: AT_ONCE as u32 };
    let engine = CandleEngine::load("path:fixture".parse().unwrap(), &model, limits, Arc::default()).unwrap();
    let mut random = Random(7);
    let asked: Vec<(Value, Prompt)> = (0..SCHEMAS)
        .map(|seed| {
            let schema = object(&mut random, 3);
            let words: Vec<&str> = (0..random.below(9)).map(|_| random.of(&WORDS)).collect();
            let sampling = Sampling { temperature: 1.0, seed, max_tokens: 900, ..Sampling::default() };
            let format = OutputFormat::JsonSchema { schema: schema.clone() };
            (schema, Prompt { sampling, format, ..ask(&format!("Write JSON. {}", words.join(" "))) })
        })
        .collect();
    let distinct: std::collections::BTreeSet<String> = asked.iter().map(|(schema, _)| schema.to_string()).collect();
    assert!(distinct.len() > 150, "{}", distinct.len());
    let mut written = 0;
    for some in asked.chunks(AT_ONCE) {
        let mut admitted = Vec::new();
        for (_, prompt) in some {
            admitted.push(engine.admit(prompt.clone()).await.unwrap());
        }
        let running: Vec<Generation> = admitted.into_iter().map(Admitted::start).collect();
        for (generation, (schema, _)) in running.into_iter().zip(some) {
            let done = finish(generation).await.0.unwrap();
            assert_eq!(done.finish, FinishReason::Stop, "{schema}\n{}", done.text);
            let value: Value = serde_json::from_str(&done.text).unwrap_or_else(|e| panic!("{e}: {}", done.text));
            assert_eq!(fault(schema, &value), None);
            written += done.usage.output_tokens;
        }
    }
    assert!(written > 2_000, "{written} tokens");
}

#[tokio::test]
async fn an_answer_ends_where_it_has_said_enough() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models/llama/model.gguf");
    let limits = Limits { memory: 1 << 30, max_sequences: 1 };
    let engine = CandleEngine::load("path:fixture".parse().unwrap(), &model, limits, Arc::default()).unwrap();
    let schema = json!({ "type": "object", "required": ["score", "list", "rest"], "additionalProperties": false, "properties": {
        "score": { "type": "integer", "minimum": 0, "maximum": 100 },
        "list": { "type": "array", "items": { "enum": ["x", "yy"] }, "minItems": 1, "maxItems": 3 },
        "rest": { "type": "string", "minLength": 60, "maxLength": 80 },
    } });
    for seed in 0..6 {
        let mut texts = Vec::new();
        for known in ["", "list", "score"] {
            let rule =
                Enough { number: "score".into(), from: 0.0, below: 101.0, known: known.into(), without: String::new() };
            let enough = if known.is_empty() { Vec::new() } else { vec![rule.clone()] };
            let sampling = Sampling { temperature: 1.0, seed, max_tokens: 400, enough, ..Sampling::default() };
            let format = OutputFormat::JsonSchema { schema: schema.clone() };
            let done = answer(&engine, Prompt { sampling, format, ..ask("Write JSON.") }).await;
            assert_eq!(done.finish, FinishReason::Stop);
            if !known.is_empty() {
                let fields = rule.of(&done.text).unwrap();
                assert!(fields.contains_key(known) && !fields.contains_key("rest"), "{}", done.text);
            }
            texts.push((done.text, done.usage.output_tokens));
        }
        assert!(texts[0].0.starts_with(&texts[1].0) && texts[1].0.starts_with(&texts[2].0), "{texts:?}");
        assert!(texts[2].1 < texts[1].1 && texts[1].1 + 20 < texts[0].1, "{texts:?}");
    }
}

#[test]
fn the_judge_finds_faults() {
    let schema = json!({ "type": "object", "required": ["n"], "additionalProperties": false, "properties": {
        "n": { "type": "integer", "minimum": 1, "maximum": 3 },
        "s": { "type": "string", "pattern": "^[0-9]{3}-[AB]$" },
        "l": { "type": "array", "items": { "enum": ["x"] }, "minItems": 1, "maxItems": 2 },
    } });
    assert_eq!(fault(&schema, &json!({ "n": 2, "s": "123-A", "l": ["x"] })), None);
    for wrong in [
        json!({}),
        json!({ "n": 4 }),
        json!({ "n": "2" }),
        json!({ "n": 2, "s": "12-A" }),
        json!({ "n": 2, "l": [] }),
        json!({ "n": 2, "l": ["y"] }),
        json!({ "n": 2, "z": 1 }),
        json!([]),
    ] {
        assert!(fault(&schema, &wrong).is_some(), "{wrong}");
    }
}
