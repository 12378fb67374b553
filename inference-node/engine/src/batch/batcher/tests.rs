//! Tests that run the batcher step by step on the test's own thread, with the small models of tests/fixtures/models.

mod failures;
mod speculative_prefill;

use std::path::Path;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

use cfq_proto::job::{Completion, OutputFormat, Sampling};

use super::*;
use crate::backend::cpu::linear::kernels;
use crate::backend::cpu::model::CpuModel;
use crate::batch::prompt_lookup::PromptLookup;
use crate::batch::resume::SequenceInit;
use crate::generation::{Generation, GenerationEvent};
use crate::model::architecture::Architecture;
use crate::model::file::ModelFile;
use crate::sampling::grammar::Grammars;
use crate::sampling::text::TextStream;

#[derive(serde::Deserialize)]
struct Case {
    ids: Vec<u32>,
    logits: Vec<f32>,
    greedy: Vec<u32>,
}

/// A batcher without a thread, and the parts of an engine that the tests need.
struct Rig<M: ForwardModel = CpuModel> {
    batcher: Batcher<M>,
    commands: SyncSender<EngineCommand>,
    admission: Arc<Admission>,
    cases: Vec<Case>,
}

/// Cost of a pass in which a row costs almost nothing compared with the pass itself, so that every draft pays off.
fn cheap_rows(_: &EngineStats, _: usize) -> PassCost {
    PassCost { fixed: 1.0, per_row: 0.01 }
}

impl Rig {
    fn new(family: &str, blocks: usize) -> Self {
        Self::with_model(family, |file| {
            let model = CpuModel::load(file, Architecture::read(file).unwrap(), kernels()).unwrap();
            let pool = KvPool::new(model.kv_shape(), blocks);
            (model, pool)
        })
    }
}

impl<M: ForwardModel> Rig<M> {
    fn with_model(family: &str, load: impl FnOnce(&ModelFile) -> (M, KvPool<M::Memory>)) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(family);
        let file = ModelFile::read(&folder).unwrap();
        let (model, pool) = load(&file);
        let vocabulary = Arc::new(Vocabulary::read(&file).unwrap());
        let admission = Admission::new(1 << 20, 100, Arc::default());
        let stats = EngineStats::new(1.0, Arc::default());
        let (commands, receiver) = sync_channel(100);
        let batcher = Batcher::new(model, pool, vocabulary, receiver, admission.clone(), stats, cheap_rows);
        let cases = serde_json::from_str(&std::fs::read_to_string(folder.join("expected.json")).unwrap()).unwrap();
        Self { batcher, commands, admission, cases }
    }

    fn request(&self, prompt: Vec<u32>, max_tokens: usize, lookup: bool) -> (SequenceRequest, Generation) {
        self.revision_request(prompt, Vec::new(), max_tokens, lookup)
    }

    fn revision_request(
        &self,
        prompt: Vec<u32>,
        previous: Vec<u32>,
        max_tokens: usize,
        lookup: bool,
    ) -> (SequenceRequest, Generation) {
        let (outbox, reader) = Generation::channel();
        let max_len = prompt.len() + max_tokens;
        let sampling = Sampling { prompt_lookup: lookup, ..Sampling::default() };
        let permit = self.admission.reserve(1).ok().unwrap();
        let stream = TextStream::new(&sampling.stop);
        let init =
            SequenceInit { prompt_len: prompt.len(), tokens: prompt, grammar: None, stream, text: String::new() };
        let lookup = PromptLookup::new(previous, init.prompt_len);
        let request = SequenceRequest { init, lookup, sampling, max_len, long_context: false, permit, outbox };
        (request, reader)
    }

    fn submit(&self, prompt: Vec<u32>, max_tokens: usize, lookup: bool) -> Generation {
        let (request, reader) = self.request(prompt, max_tokens, lookup);
        self.commands.send(EngineCommand::Sequence(Box::new(request))).unwrap();
        reader
    }

    /// Runs steps until no sequence is left.
    fn run_until_idle(&mut self) {
        while !self.batcher.is_idle() {
            self.batcher.drain_commands();
            assert!(self.batcher.step().is_ok());
        }
    }
}

async fn end(mut reader: Generation) -> Completion {
    loop {
        if let GenerationEvent::Done(result) = reader.next().await {
            return result.unwrap();
        }
    }
}

#[tokio::test]
async fn accepted_draft_tokens_save_passes() {
    for family in ["qwen2", "gemma3"] {
        for at in 0..3 {
            let mut texts = Vec::new();
            let mut passes = Vec::new();
            for lookup in [false, true] {
                let mut rig = Rig::new(family, 64);
                let (prompt, max_tokens) = (rig.cases[at].ids.clone(), rig.cases[at].greedy.len());
                let reader = rig.submit(prompt, max_tokens, lookup);
                rig.batcher.drain_commands();
                rig.run_until_idle();
                let done = end(reader).await;
                let context = format!("{family} {at} lookup {lookup}: {:?}", done.usage);
                assert_eq!(done.usage.output_tokens as usize, max_tokens, "{context}");
                assert_eq!(done.usage.drafted_tokens > 0, lookup, "{context}");
                assert!(done.usage.accepted_tokens <= done.usage.drafted_tokens, "{context}");
                // An accepted draft token needs no pass of its own, and the first token is sampled in the pass of the
                // prompt.
                assert!(
                    rig.batcher.steps <= u64::from(done.usage.output_tokens - done.usage.accepted_tokens) + 1,
                    "{context}, {} passes",
                    rig.batcher.steps
                );
                assert!(!lookup || done.usage.accepted_tokens >= 8, "the text repeats itself: {context}");
                texts.push(done.text);
                passes.push(rig.batcher.steps);
            }
            assert_eq!(texts[0], texts[1], "{family} {at}");
            assert!(passes[1] + 8 <= passes[0], "{family} {at}: {passes:?}");
        }
    }
}

/// Output format: a list of ten items of two kinds, with long field names that the grammar forces.
fn items() -> OutputFormat {
    let item = serde_json::json!({
        "type": "object", "required": ["the kind of item", "how many of them"], "additionalProperties": false,
        "properties": {
            "the kind of item": { "enum": ["apples and pears", "bread"] },
            "how many of them": { "type": "string", "pattern": "^[ab]{12}$" },
        },
    });
    let schema = serde_json::json!({ "type": "array", "minItems": 10, "maxItems": 10, "items": item });
    OutputFormat::JsonSchema { schema }
}

#[tokio::test]
async fn forced_tokens_take_no_pass_with_and_without_drafts() {
    let mut texts = Vec::new();
    for (lookup, jump_forward) in [(false, false), (false, true), (true, true)] {
        let mut rig = Rig::new("llama", 64);
        let (mut request, reader) = rig.request(rig.cases[0].ids.clone(), 1200, lookup);
        request.sampling.jump_forward = jump_forward;
        request.init.grammar = Grammars::new(rig.batcher.vocabulary.clone()).compile(&items()).unwrap();
        rig.commands.send(EngineCommand::Sequence(Box::new(request))).unwrap();
        rig.batcher.drain_commands();
        rig.run_until_idle();
        let done = end(reader).await;
        let usage = done.usage;
        let context = format!("lookup {lookup}, jump {jump_forward}: {usage:?}, {} passes", rig.batcher.steps);
        let parsed: Vec<serde_json::Value> = serde_json::from_str(&done.text).unwrap();
        assert_eq!(parsed.len(), 10, "{context}");
        // Every pass except those of the prompt samples at least one token.
        let sampled = u64::from(usage.output_tokens - usage.forced_tokens);
        assert!(sampled > 0 && rig.batcher.steps <= sampled + 1, "{context}");
        assert_eq!(usage.forced_tokens > 100, jump_forward, "{context}");
        assert!(!lookup || usage.accepted_tokens > 0, "the items repeat themselves: {context}");
        if jump_forward {
            texts.push(done.text);
        }
    }
    assert_eq!(texts[0], texts[1]);
}

#[tokio::test]
async fn logprobs_are_reported_for_each_token_and_change_no_text() {
    let mut texts = Vec::new();
    for wanted in [None, Some(3)] {
        let mut rig = Rig::new("llama", 64);
        let (mut request, reader) = rig.request(rig.cases[1].ids.clone(), 12, true);
        request.sampling.logprobs = wanted;
        rig.commands.send(EngineCommand::Sequence(Box::new(request))).unwrap();
        rig.batcher.drain_commands();
        rig.run_until_idle();
        let done = end(reader).await;
        assert_eq!(done.logprobs.len(), if wanted.is_some() { 12 } else { 0 });
        for token in &done.logprobs {
            // Sampling is greedy, so the sampled token is the most likely one.
            assert_eq!(token.top_logprobs.len(), 3);
            assert_eq!(token.own, token.top_logprobs[0]);
            assert!(token.top_logprobs.is_sorted_by(|a, b| a.logprob >= b.logprob), "{token:?}");
        }
        // Compared with the reference's logits after the prompt.
        if let Some(first) = done.logprobs.first() {
            let scores = &rig.cases[1].logits;
            let sum: f64 = scores.iter().map(|s| f64::from(*s).exp()).sum();
            let best = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let expected = f64::from(best) - sum.ln();
            assert!((f64::from(first.own.logprob) - expected).abs() < 1e-3, "{} {expected}", first.own.logprob);
        }
        texts.push(done.text);
    }
    assert_eq!(texts[0], texts[1]);
}

#[tokio::test]
async fn cancelled_sequence_leaves_before_the_next_pass() {
    for (decoding, reading) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut rig = Rig::new("llama", 64);
        let long = rig.cases.last().unwrap().ids.clone();
        let mut reader = rig.submit(long, 200, false);
        let neighbour = rig.submit(rig.cases[0].ids.clone(), 40, false);
        rig.batcher.drain_commands();
        let reached =
            |rig: &Rig| if decoding { rig.batcher.running[0].uncomputed().len() == 1 } else { rig.batcher.steps == 1 };
        while !reached(&rig) {
            assert!(rig.batcher.step().is_ok());
        }
        assert_eq!(rig.batcher.running[0].uncomputed().len() == 1, decoding, "in the intended phase");
        if reading {
            assert!(matches!(reader.next().await, GenerationEvent::Step { .. }));
        }
        let computed = rig.batcher.running[0].kv.len();
        assert!(computed > 0);
        reader.cancel();
        assert!(rig.batcher.step().is_ok());
        assert_eq!(rig.batcher.running.len(), 1, "only the neighbour is left");
        rig.run_until_idle();
        let ended = loop {
            if let GenerationEvent::Done(result) = reader.next().await {
                break result;
            }
        };
        assert_eq!(ended, Err(crate::generation::GenerationError::Cancelled));
        assert_eq!(end(neighbour).await.usage.output_tokens, 40);
    }
}

#[tokio::test]
async fn fully_forced_text_is_complete_without_a_decoding_pass() {
    let mut rig = Rig::new("llama", 64);
    let (mut request, reader) = rig.request(rig.cases[0].ids.clone(), 400, true);
    let format = OutputFormat::JsonSchema { schema: serde_json::json!({ "const": "nothing else is possible" }) };
    request.init.grammar = Grammars::new(rig.batcher.vocabulary.clone()).compile(&format).unwrap();
    rig.batcher.enqueue(request);
    rig.run_until_idle();
    let done = end(reader).await;
    assert_eq!(done.text, "\"nothing else is possible\"");
    assert!(done.usage.forced_tokens > 1 && rig.batcher.steps <= 2, "{:?}, {} passes", done.usage, rig.batcher.steps);
}

#[tokio::test]
async fn previous_revision_outside_the_prompt_is_drafted_from() {
    for family in ["llama", "qwen2", "gemma3"] {
        let mut accepted = Vec::new();
        let mut texts = Vec::new();
        for known in [false, true] {
            let mut rig = Rig::new(family, 64);
            let (prompt, written) = (rig.cases[0].ids.clone(), rig.cases[0].greedy.clone());
            // The previous revision ends with tokens that the output does not contain.
            let previous = if known { [&written[..], &[7, 8, 9]].concat() } else { Vec::new() };
            let (request, reader) = rig.revision_request(prompt.clone(), previous, written.len(), true);
            rig.commands.send(EngineCommand::Sequence(Box::new(request))).unwrap();
            rig.batcher.drain_commands();
            rig.run_until_idle();
            let done = end(reader).await;
            assert_eq!(done.usage.prompt_tokens as usize, prompt.len(), "the previous revision is not in the prompt");
            assert_eq!(done.usage.output_tokens as usize, written.len());
            accepted.push(done.usage.accepted_tokens);
            texts.push(done.text);
        }
        assert_eq!(texts[0], texts[1], "{family}");
        assert!(accepted[1] >= 48 && accepted[1] > accepted[0] + 8, "{family}: {accepted:?} of 64");
    }
}

#[tokio::test]
async fn duration_of_a_pass_does_not_depend_on_the_number_of_prompts() {
    let mut rig = Rig::new("llama", 400);
    // One sequence decodes; then 60 prompts arrive at once, and the model computes 400 rows per second.
    let decoding = rig.submit(rig.cases[0].ids.clone(), 40, false);
    rig.batcher.drain_commands();
    while rig.batcher.running[0].uncomputed().len() > 1 {
        assert!(rig.batcher.step().is_ok());
    }
    let ids = rig.cases.last().unwrap().ids.clone();
    let readers: Vec<Generation> = (0..60u32).map(|n| rig.submit([&[n][..], &ids[..120]].concat(), 2, false)).collect();
    rig.batcher.drain_commands();
    rig.batcher.stats = EngineStats::new(1.0, Arc::default());
    rig.batcher.stats.record_prefill(BatchWork::new(400, 0), Duration::from_secs(1));
    let plan = rig.batcher.plan();
    let rows: Vec<usize> = plan.iter().map(|s| s.tokens.len()).collect();
    assert_eq!(rows.len(), 61);
    assert!(rows.iter().sum::<usize>() <= 100, "a quarter of a second: {rows:?}");
    assert_eq!(rows[0], 1, "the decoding sequence is in the pass");
    rig.run_until_idle();
    for reader in readers {
        assert_eq!(end(reader).await.usage.output_tokens, 2);
    }
    assert_eq!(end(decoding).await.usage.output_tokens, 40);
}

#[tokio::test]
async fn preempted_sequences_resume_only_if_all_their_blocks_fit() {
    let mut rig = Rig::new("llama", 12);
    let running = rig.submit(rig.cases[0].ids.clone(), 40, false);
    rig.batcher.drain_commands();
    // Each of the three waiting sequences fits beside the running one, but not all three together.
    let long = rig.cases.last().unwrap().ids.clone();
    let mut readers = Vec::new();
    for n in 0..3u32 {
        let (request, reader) = rig.request([&[n][..], &long[..120]].concat(), 10, false);
        rig.batcher.preempted.push_back(Sequence::new(request, u64::from(n) + 1));
        readers.push(reader);
    }
    rig.batcher.resume_preempted();
    let missing: usize = rig.batcher.running.iter().map(Running::missing_blocks).sum();
    assert!(missing <= rig.batcher.pool.available(), "{missing} of {}", rig.batcher.pool.available());
    assert_eq!((rig.batcher.running.len(), rig.batcher.preempted.len()), (3, 1), "two fit, the third does not");
    rig.run_until_idle();
    assert_eq!(rig.batcher.stats.snapshot().preemptions, 0, "no resumed sequence was preempted again");
    for reader in readers {
        assert_eq!(end(reader).await.usage.output_tokens, 10);
    }
    end(running).await;
}
