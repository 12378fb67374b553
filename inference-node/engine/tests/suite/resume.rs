//! Tests that a generation that resumes after the tokens of an earlier attempt gives the same result as an
//! uninterrupted one.

use cfq_engine::{AdmitError, Engine, EngineLimits, GenerationEvent, LocalEngine, estimate_memory};
use cfq_proto::early_stop::EarlyStop;
use cfq_proto::job::{Completion, GeneratedTokens, JobFailure, OutputFormat, Prompt, Sampling};

use crate::smollm::{self, engine, finish, user_prompt};

fn seeded(question: &str, max_tokens: u32) -> Prompt {
    let sampling = Sampling { temperature: 0.8, seed: 11, max_tokens, deterministic: true, ..Sampling::default() };
    Prompt { sampling, ..user_prompt(question) }
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

/// Runs a generation without interruption; returns the answer and its tokens.
async fn uninterrupted(prompt: Prompt) -> (Completion, Vec<u32>) {
    let mut generation = engine().admit(prompt).await.unwrap().start();
    let mut all = Vec::new();
    loop {
        match generation.next().await {
            GenerationEvent::Step { tokens, .. } => all.extend(tokens),
            GenerationEvent::Done(result) => return (result.unwrap(), all),
        }
    }
}

#[tokio::test]
async fn text_resumes_at_any_token_also_in_constrained_output() {
    let vocabulary = engine().vocabulary().fingerprint();
    let mut stopped = seeded("Tell me a story about a fox.", 60);
    stopped.sampling.stop = vec!["fox".to_owned()];
    for prompt in [seeded("Tell me a story about a lighthouse.", 40), stopped, constrained()] {
        let (expected, tokens) = uninterrupted(prompt.clone()).await;
        assert_eq!(tokens.len() as u32, expected.usage.output_tokens);
        // Another engine, whose prefix cache holds nothing of this sequence.
        let other = smollm::load(2);
        let positions = [1, 2, tokens.len() / 3, tokens.len() / 2, tokens.len() - 1, tokens.len()];
        for position in positions.into_iter().filter(|p| *p <= tokens.len()) {
            let generated = GeneratedTokens { vocabulary, tokens: tokens[..position].to_vec() };
            let admitted = other.admit_resumed(prompt.clone(), generated).await.unwrap();
            assert_eq!(admitted.resumed() as usize, position.saturating_sub(1));
            let (result, streamed) = finish(admitted.start()).await;
            let ended = result.unwrap();
            assert_eq!((&ended.text, ended.finish), (&expected.text, expected.finish), "after {position} tokens");
            assert_eq!(streamed, ended.text, "the reader receives the whole text");
            assert_eq!(ended.usage.resumed_tokens as usize, position.saturating_sub(1));
            assert_eq!(ended.usage.output_tokens, expected.usage.output_tokens);
            assert_eq!(ended.usage.prompt_tokens, expected.usage.prompt_tokens);
            assert!(ended.usage.cached_tokens <= ended.usage.prompt_tokens, "{:?}", ended.usage);
        }
    }
}

/// A text resumes after each of its steps, also with forced runs (tokens that the grammar forces), log probabilities
/// and early stops. A node's journal of delivered tokens can end only between two steps: a forced run is delivered in
/// one step, so the journal never ends inside a run.
#[tokio::test]
async fn text_with_forced_runs_resumes_wherever_a_journal_can_end() {
    let vocabulary = engine().vocabulary().fingerprint();
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
    let early_stop = EarlyStop {
        number: "quality_score".into(),
        from: 0.0,
        below: 100.0,
        known: "defects".into(),
        without: String::new(),
    };
    let other = smollm::load(2);
    let mut stopped_early = 0;
    for (schema, early_stop, logprobs) in
        [(report.clone(), vec![], None), (report, vec![early_stop], None), (nested, vec![], Some(2))]
    {
        let mut prompt = Prompt { format: OutputFormat::JsonSchema { schema }, ..seeded("Say it as JSON.", 60) };
        (prompt.sampling.jump_forward, prompt.sampling.early_stop, prompt.sampling.logprobs) =
            (true, early_stop, logprobs);
        let mut generation = engine().admit(prompt.clone()).await.unwrap().start();
        let (mut tokens, mut positions) = (Vec::new(), Vec::new());
        let expected = loop {
            match generation.next().await {
                GenerationEvent::Step { tokens: new, .. } => {
                    tokens.extend(new);
                    positions.push(tokens.len());
                }
                GenerationEvent::Done(result) => break result.unwrap(),
            }
        };
        assert!(expected.usage.forced_tokens > 3, "{:?}", expected.usage);
        stopped_early += usize::from(serde_json::from_str::<serde_json::Value>(&expected.text).is_err());
        positions.dedup();
        for position in positions {
            let generated = GeneratedTokens { vocabulary, tokens: tokens[..position].to_vec() };
            let admitted = other.admit_resumed(prompt.clone(), generated).await.unwrap();
            let resumed = admitted.resumed();
            let (result, streamed) = finish(admitted.start()).await;
            let ended = result.unwrap();
            let context = format!("{:?} after {position} of {} tokens", prompt.format, tokens.len());
            assert_eq!((&ended.text, ended.finish), (&expected.text, expected.finish), "{context}");
            assert_eq!((resumed as usize, &streamed), (position.saturating_sub(1), &ended.text), "{context}");
            if logprobs.is_some() {
                assert_eq!(ended.logprobs.len() + resumed as usize, tokens.len(), "{context}");
                assert_eq!(ended.logprobs, expected.logprobs[resumed as usize..], "{context}");
            }
        }
    }
    assert_eq!(stopped_early, 1, "the one with an early-stop rule");
}

/// Error message of an attempt that cannot resume after `generated`.
async fn refusal(engine: &LocalEngine, prompt: &Prompt, generated: GeneratedTokens) -> String {
    match engine.admit_resumed(prompt.clone(), generated).await {
        Err(AdmitError::Failed(failure @ JobFailure::Engine { .. })) => failure.to_string(),
        Err(other) => panic!("{other:?}"),
        Ok(admitted) => panic!("resumed after {} tokens", admitted.resumed()),
    }
}

#[tokio::test]
async fn delivered_tokens_that_do_not_fit_fail_the_attempt() {
    let vocabulary = engine().vocabulary().fingerprint();
    let prompt = constrained();
    let (_, tokens) = uninterrupted(prompt.clone()).await;
    let (_, story) = uninterrupted(seeded("Tell me a story about a lighthouse.", 40)).await;
    let end = engine().vocabulary().eos();
    let conflicts = [
        (vocabulary.wrapping_add(1), tokens.clone(), "another vocabulary"),
        (vocabulary.wrapping_add(1), tokens[..1].to_vec(), "another vocabulary"),
        (vocabulary, story, "do not match"),
        (vocabulary, vec![u32::MAX, 1], "do not match"),
        (vocabulary, vec![end, tokens[0], tokens[1]], "do not match"),
    ];
    for (vocabulary, tokens, why) in conflicts {
        let count = tokens.len();
        let message = refusal(&engine(), &prompt, GeneratedTokens { vocabulary, tokens }).await;
        assert!(
            message.contains(why) && message.starts_with(&format!("cannot resume after the {count} tokens")),
            "{message}"
        );
    }
    let long = GeneratedTokens { vocabulary, tokens: vec![tokens[0]; 500] };
    let short = Prompt { sampling: Sampling { max_tokens: 5, ..Sampling::default() }, ..user_prompt("Hi") };
    let message = refusal(&engine(), &short, long).await;
    assert!(message.contains("more than the request allows"), "{message}");
}

#[tokio::test]
async fn delivered_tokens_beyond_the_pool_fail_but_the_prompt_alone_runs() {
    let vocabulary = engine().vocabulary().fingerprint();
    // The smallest pool: 2,048 tokens.
    let limits = EngineLimits { memory_bytes: smallest_memory(), max_sequences: 1 };
    let small = LocalEngine::builder(smollm::id(), &smollm::file()).limits(limits).load().unwrap();
    let pool_tokens = small.state().kv_tokens_free as usize;
    let prompt = Prompt { sampling: Sampling { max_tokens: 4096, ..Sampling::default() }, ..user_prompt("Hi") };
    let story = uninterrupted(seeded("Tell me a story about a lighthouse.", 40)).await.1;
    let word = *story.iter().find(|t| !engine().vocabulary().token_bytes(**t).is_empty()).unwrap();
    let generated = GeneratedTokens { vocabulary, tokens: vec![word; pool_tokens] };
    let message = refusal(&small, &prompt, generated).await;
    assert!(message.contains("too small for the prompt together with them"), "{message}");
    assert_eq!(small.admit(prompt).await.unwrap().resumed(), 0);
}

/// The least memory into which the model fits, in bytes, to within 1 MiB.
fn smallest_memory() -> u64 {
    let fits =
        |memory| estimate_memory(&smollm::file(), EngineLimits { memory_bytes: memory, max_sequences: 1 }, 0).is_ok();
    let (mut too_little, mut enough) = (0u64, 4 << 30);
    while enough - too_little > 1 << 20 {
        let middle = (too_little + enough) / 2;
        if fits(middle) { enough = middle } else { too_little = middle }
    }
    enough
}
