//! A generation that goes on from what an earlier attempt wrote ends as if nothing had been.

use std::sync::Arc;

use cfq_inference_node::engine::candle::{CandleEngine, Limits, need};
use cfq_inference_node::engine::{Engine, Event, Refused};
use cfq_proto::early::Enough;
use cfq_proto::job::{Completion, JobFailure, OutputFormat, Prompt, Sampling, Written};

use crate::smollm::{self, ask, engine, finish};

fn seeded(question: &str, max_tokens: u32) -> Prompt {
    let sampling = Sampling { temperature: 0.8, seed: 11, max_tokens, deterministic: true, ..Sampling::default() };
    Prompt { sampling, ..ask(question) }
}

fn constrained() -> Prompt {
    let schema = serde_json::json!({
        "type": "object", "required": ["name", "colours"], "additionalProperties": false,
        "properties": {
            "name": { "type": "string", "maxLength": 40 },
            "colours": { "type": "array", "minItems": 3, "maxItems": 3, "items": { "enum": ["red", "green", "blue"] } },
        },
    });
    Prompt { format: OutputFormat::JsonSchema { schema }, ..seeded("Describe a bird as JSON.", 80) }
}

/// The whole answer and its tokens.
async fn whole(prompt: Prompt) -> (Completion, Vec<u32>) {
    let mut generation = engine().admit(prompt).await.unwrap().start();
    let mut written = Vec::new();
    loop {
        match generation.next().await {
            Event::Step { tokens, .. } => written.extend(tokens),
            Event::Done(how) => return (how.unwrap(), written),
        }
    }
}

#[tokio::test]
async fn any_place_is_good_to_go_on_from_also_in_constrained_output() {
    let name = engine().vocabulary().name();
    let mut stopped = seeded("Tell me a story about a fox.", 60);
    stopped.sampling.stop = vec!["fox".to_owned()];
    for prompt in [seeded("Tell me a story about a lighthouse.", 40), stopped, constrained()] {
        let (expected, tokens) = whole(prompt.clone()).await;
        assert_eq!(tokens.len() as u32, expected.usage.output_tokens);
        // A node that has nothing of it in its cache.
        let other = smollm::load(2);
        let places = [1, 2, tokens.len() / 3, tokens.len() / 2, tokens.len() - 1, tokens.len()];
        for place in places.into_iter().filter(|p| *p <= tokens.len()) {
            let written = Written { vocabulary: name, tokens: tokens[..place].to_vec() };
            let admitted = other.admit_after(prompt.clone(), written).await.unwrap();
            assert_eq!(admitted.resumed() as usize, place.saturating_sub(1));
            let (how, streamed) = finish(admitted.start()).await;
            let ended = how.unwrap();
            assert_eq!((&ended.text, ended.finish), (&expected.text, expected.finish), "after {place} tokens");
            assert_eq!(streamed, ended.text, "a reader sees the whole text");
            assert_eq!(ended.usage.resumed_tokens as usize, place.saturating_sub(1));
            assert_eq!(ended.usage.output_tokens, expected.usage.output_tokens);
            assert_eq!(ended.usage.prompt_tokens, expected.usage.prompt_tokens);
            assert!(ended.usage.cached_tokens <= ended.usage.prompt_tokens, "{:?}", ended.usage);
        }
    }
}

/// Runs that the schema leaves no choice about, log probabilities and an end before the end: whatever a journal may hold is
/// gone on from, and runs are told whole, so its places are between them.
#[tokio::test]
async fn forced_runs_are_gone_on_from_at_every_place_a_journal_can_end() {
    let name = engine().vocabulary().name();
    let report = serde_json::json!({
        "type": "object", "required": ["quality_score", "defects", "suggestions"], "additionalProperties": false,
        "properties": {
            "quality_score": { "type": "integer", "minimum": 10, "maximum": 99 },
            "defects": { "type": "array", "maxItems": 1, "items": {
                "type": "object", "required": ["severity", "description"], "additionalProperties": false,
                "properties": { "severity": { "enum": ["critical", "major"] }, "description": { "type": "string", "maxLength": 12 } },
            } },
            "suggestions": { "type": "array", "minItems": 1, "maxItems": 1, "items": { "type": "string", "maxLength": 12 } },
        },
    });
    let nested = serde_json::json!({
        "type": "object", "required": ["a_long_field_name"], "additionalProperties": false,
        "properties": { "a_long_field_name": { "type": "object", "required": ["kind", "count"], "additionalProperties": false,
            "properties": { "kind": { "enum": ["lighthouse", "lightship"] }, "count": { "type": "integer", "minimum": 0, "maximum": 99 } } } },
    });
    let enough = Enough {
        number: "quality_score".into(),
        from: 0.0,
        below: 100.0,
        known: "defects".into(),
        without: String::new(),
    };
    let other = smollm::load(2);
    let mut ended_early = 0;
    for (schema, enough, logprobs) in
        [(report.clone(), vec![], None), (report, vec![enough], None), (nested, vec![], Some(2))]
    {
        let mut prompt = Prompt { format: OutputFormat::JsonSchema { schema }, ..seeded("Say it as JSON.", 60) };
        (prompt.sampling.jump_forward, prompt.sampling.enough, prompt.sampling.logprobs) = (true, enough, logprobs);
        let mut generation = engine().admit(prompt.clone()).await.unwrap().start();
        let (mut tokens, mut places) = (Vec::new(), Vec::new());
        let expected = loop {
            match generation.next().await {
                Event::Step { tokens: told, .. } => {
                    tokens.extend(told);
                    places.push(tokens.len());
                }
                Event::Done(how) => break how.unwrap(),
            }
        };
        assert!(expected.usage.forced_tokens > 3, "{:?}", expected.usage);
        ended_early += usize::from(serde_json::from_str::<serde_json::Value>(&expected.text).is_err());
        places.dedup();
        for place in places {
            let written = Written { vocabulary: name, tokens: tokens[..place].to_vec() };
            let admitted = other.admit_after(prompt.clone(), written).await.unwrap();
            let resumed = admitted.resumed();
            let (how, streamed) = finish(admitted.start()).await;
            let ended = how.unwrap();
            let said = format!("{:?} after {place} of {} tokens", prompt.format, tokens.len());
            assert_eq!((&ended.text, ended.finish), (&expected.text, expected.finish), "{said}");
            assert_eq!((resumed as usize, &streamed), (place.saturating_sub(1), &ended.text), "{said}");
            if logprobs.is_some() {
                let told = ended.logprobs.len();
                assert_eq!(told + resumed as usize, tokens.len(), "{said}");
                assert_eq!(ended.logprobs, expected.logprobs[resumed as usize..], "{said}");
            }
        }
    }
    assert_eq!(ended_early, 1, "the one that was told what is enough");
}

/// How an attempt ends whose journal the engine cannot go on from.
async fn refusal(engine: &CandleEngine, prompt: &Prompt, written: Written) -> String {
    match engine.admit_after(prompt.clone(), written).await {
        Err(Refused::Failed(failure @ JobFailure::Engine { .. })) => failure.to_string(),
        Err(other) => panic!("{other:?}"),
        Ok(admitted) => panic!("goes on after {} tokens", admitted.resumed()),
    }
}

#[tokio::test]
async fn what_was_delivered_and_does_not_fit_is_an_error_and_no_other_text() {
    let name = engine().vocabulary().name();
    let prompt = constrained();
    let (_, tokens) = whole(prompt.clone()).await;
    let (_, story) = whole(seeded("Tell me a story about a lighthouse.", 40)).await;
    let end = engine().vocabulary().eos();
    let strange = [
        (name.wrapping_add(1), tokens.clone(), "another vocabulary"),
        (name.wrapping_add(1), tokens[..1].to_vec(), "another vocabulary"),
        (name, story, "do not fit"),
        (name, vec![u32::MAX, 1], "do not fit"),
        (name, vec![end, tokens[0], tokens[1]], "do not fit"),
    ];
    for (vocabulary, tokens, why) in strange {
        let count = tokens.len();
        let said = refusal(&engine(), &prompt, Written { vocabulary, tokens }).await;
        assert!(said.contains(why) && said.starts_with(&format!("{count} tokens")), "{said}");
    }
    let long = Written { vocabulary: name, tokens: vec![tokens[0]; 500] };
    let short = Prompt { sampling: Sampling { max_tokens: 5, ..Sampling::default() }, ..ask("Hi") };
    let said = refusal(&engine(), &short, long).await;
    assert!(said.contains("more than were asked for"), "{said}");
}

#[tokio::test]
async fn what_was_written_where_there_was_more_room_is_an_error_and_the_prompt_alone_is_served() {
    let name = engine().vocabulary().name();
    // The smallest pool there is: 2,048 tokens.
    let limits = Limits { memory: smallest(), max_sequences: 1 };
    let small = CandleEngine::load(smollm::id(), &smollm::file(), limits, Arc::default()).unwrap();
    let room = small.state().kv_tokens_free as usize;
    let prompt = Prompt { sampling: Sampling { max_tokens: 4096, ..Sampling::default() }, ..ask("Hi") };
    let story = whole(seeded("Tell me a story about a lighthouse.", 40)).await.1;
    let word = *story.iter().find(|t| !engine().vocabulary().bytes_of(**t).is_empty()).unwrap();
    let written = Written { vocabulary: name, tokens: vec![word; room] };
    let said = refusal(&small, &prompt, written).await;
    assert!(said.contains("no room for them beside the prompt"), "{said}");
    assert_eq!(small.admit(prompt).await.unwrap().resumed(), 0);
}

/// Memory that fits the model with a pool of its least size.
fn smallest() -> u64 {
    let fits = |memory| need(&smollm::file(), Limits { memory, max_sequences: 1 }).is_ok();
    let (mut short, mut enough) = (0u64, 4 << 30);
    while enough - short > 1 << 20 {
        let middle = (short + enough) / 2;
        if fits(middle) { enough = middle } else { short = middle }
    }
    enough
}
