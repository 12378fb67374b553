//! The batcher step by step, over the small models of tests/fixtures/models, so that nothing depends on a thread's timing.

mod trouble;

use std::path::Path;
use std::sync::mpsc::{SyncSender, sync_channel};

use cfq_proto::job::{Completion, OutputFormat, Sampling};

use super::*;
use crate::engine::candle::architecture::Architecture;
use crate::engine::candle::linear::kernels;
use crate::engine::candle::lookup::Lookup;
use crate::engine::candle::opening::Opening;
use crate::engine::grammar::Grammars;
use crate::engine::text::TextStream;
use crate::engine::{Event, Generation, generation};
use crate::models::file::ModelFile;

mod ahead;

#[derive(serde::Deserialize)]
struct Case {
    ids: Vec<u32>,
    logits: Vec<f32>,
    greedy: Vec<u32>,
}

struct Rig<N: Network = Model> {
    batcher: Batcher<N>,
    jobs: SyncSender<Order>,
    room: Arc<Room>,
    cases: Vec<Case>,
}

/// Rows that cost almost nothing beside the pass: every guess pays.
fn cheap(_: &Figures, _: usize) -> Cost {
    Cost { pass: 1.0, row: 0.01 }
}

impl Rig {
    fn new(family: &str, blocks: usize) -> Self {
        Self::over(family, |file| {
            let model = Model::load(file, Architecture::read(file).unwrap(), kernels()).unwrap();
            let pool = KvPool::new(model.kv_shape(), blocks);
            (model, pool)
        })
    }
}

impl<N: Network> Rig<N> {
    fn over(family: &str, load: impl FnOnce(&ModelFile) -> (N, KvPool<N::Memory>)) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(family);
        let file = ModelFile::read(&folder).unwrap();
        let (model, pool) = load(&file);
        let vocabulary = Arc::new(Vocabulary::read(&file).unwrap());
        let room = Room::new(1 << 20, 100, Arc::default());
        let figures = Figures::new(1.0, Arc::default());
        let (jobs, receiver) = sync_channel(100);
        let batcher = Batcher::new(model, pool, vocabulary, receiver, room.clone(), figures, cheap);
        let cases = serde_json::from_str(&std::fs::read_to_string(folder.join("expected.json")).unwrap()).unwrap();
        Self { batcher, jobs, room, cases }
    }

    fn job(&self, prompt: Vec<u32>, most: usize, lookup: bool) -> (Job, Generation) {
        self.revision(prompt, Vec::new(), most, lookup)
    }

    fn revision(&self, prompt: Vec<u32>, previous: Vec<u32>, most: usize, lookup: bool) -> (Job, Generation) {
        let (outbox, reader) = generation();
        let longest = prompt.len() + most;
        let sampling = Sampling { prompt_lookup: lookup, ..Sampling::default() };
        let held = self.room.hold(1).ok().unwrap();
        let stream = TextStream::new(&sampling.stop);
        let opening = Opening { prompt: prompt.len(), tokens: prompt, grammar: None, stream, text: String::new() };
        let lookup = Lookup::new(previous, opening.prompt);
        (Job { opening, lookup, sampling, longest, long: false, held, outbox }, reader)
    }

    fn ask(&self, prompt: Vec<u32>, most: usize, lookup: bool) -> Generation {
        let (job, reader) = self.job(prompt, most, lookup);
        self.jobs.send(Order::Sequence(Box::new(job))).unwrap();
        reader
    }

    /// Steps until nobody wants anything.
    fn finish(&mut self) {
        while !self.batcher.running.is_empty() || !self.batcher.aside.is_empty() {
            self.batcher.take_up();
            assert!(self.batcher.step().is_ok());
        }
    }
}

async fn end(mut reader: Generation) -> Completion {
    loop {
        if let Event::Done(how) = reader.next().await {
            return how.unwrap();
        }
    }
}

#[tokio::test]
async fn right_guesses_are_accepted_and_save_passes() {
    for family in ["qwen2", "gemma3"] {
        for at in 0..3 {
            let mut texts = Vec::new();
            let mut passes = Vec::new();
            for lookup in [false, true] {
                let mut rig = Rig::new(family, 64);
                let (prompt, most) = (rig.cases[at].ids.clone(), rig.cases[at].greedy.len());
                let reader = rig.ask(prompt, most, lookup);
                rig.batcher.take_up();
                rig.finish();
                let done = end(reader).await;
                let said = format!("{family} {at} lookup {lookup}: {:?}", done.usage);
                assert_eq!(done.usage.output_tokens as usize, most, "{said}");
                assert_eq!(done.usage.guessed_tokens > 0, lookup, "{said}");
                assert!(done.usage.accepted_tokens <= done.usage.guessed_tokens, "{said}");
                // An accepted guess is a token that took no pass of its own; the first came with the prompt.
                assert!(
                    rig.batcher.steps <= u64::from(done.usage.output_tokens - done.usage.accepted_tokens) + 1,
                    "{said}, {} passes",
                    rig.batcher.steps
                );
                assert!(!lookup || done.usage.accepted_tokens >= 8, "the text repeats itself: {said}");
                texts.push(done.text);
                passes.push(rig.batcher.steps);
            }
            assert_eq!(texts[0], texts[1], "{family} {at}");
            assert!(passes[1] + 8 <= passes[0], "{family} {at}: {passes:?}");
        }
    }
}

/// Ten items of two kinds, with names nobody has a choice about.
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
async fn what_leaves_no_choice_takes_no_pass_and_guesses_change_nothing_of_it() {
    let mut texts = Vec::new();
    for (lookup, jump_forward) in [(false, false), (false, true), (true, true)] {
        let mut rig = Rig::new("llama", 64);
        let (mut job, reader) = rig.job(rig.cases[0].ids.clone(), 1200, lookup);
        job.sampling.jump_forward = jump_forward;
        job.opening.grammar = Grammars::new(rig.batcher.vocabulary.clone()).of(&items()).unwrap();
        rig.jobs.send(Order::Sequence(Box::new(job))).unwrap();
        rig.batcher.take_up();
        rig.finish();
        let done = end(reader).await;
        let usage = done.usage;
        let said = format!("lookup {lookup}, jump {jump_forward}: {usage:?}, {} passes", rig.batcher.steps);
        let parsed: Vec<serde_json::Value> = serde_json::from_str(&done.text).unwrap();
        assert_eq!(parsed.len(), 10, "{said}");
        // Every pass but the prompt's writes one token by itself.
        let drawn = u64::from(usage.output_tokens - usage.forced_tokens);
        assert!(drawn > 0 && rig.batcher.steps <= drawn + 1, "{said}");
        assert_eq!(usage.forced_tokens > 100, jump_forward, "{said}");
        assert!(!lookup || usage.accepted_tokens > 0, "the items repeat themselves: {said}");
        if jump_forward {
            texts.push(done.text);
        }
    }
    assert_eq!(texts[0], texts[1]);
}

#[tokio::test]
async fn log_probabilities_are_told_of_each_token_and_change_nothing() {
    let mut texts = Vec::new();
    for wanted in [None, Some(3)] {
        let mut rig = Rig::new("llama", 64);
        let (mut job, reader) = rig.job(rig.cases[1].ids.clone(), 12, true);
        job.sampling.logprobs = wanted;
        rig.jobs.send(Order::Sequence(Box::new(job))).unwrap();
        rig.batcher.take_up();
        rig.finish();
        let done = end(reader).await;
        assert_eq!(done.logprobs.len(), if wanted.is_some() { 12 } else { 0 });
        for place in &done.logprobs {
            // Greedy: the token is the best one.
            assert_eq!(place.top_logprobs.len(), 3);
            assert_eq!(place.own, place.top_logprobs[0]);
            assert!(place.top_logprobs.is_sorted_by(|a, b| a.logprob >= b.logprob), "{place:?}");
        }
        // Against the reference's scores after the prompt.
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
async fn a_cancelled_sequence_is_computed_no_further() {
    for (decoding, reading) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut rig = Rig::new("llama", 64);
        let long = rig.cases.last().unwrap().ids.clone();
        let mut reader = rig.ask(long, 200, false);
        let neighbour = rig.ask(rig.cases[0].ids.clone(), 40, false);
        rig.batcher.take_up();
        let wanted =
            |rig: &Rig| if decoding { rig.batcher.running[0].waiting().len() == 1 } else { rig.batcher.steps == 1 };
        while !wanted(&rig) {
            assert!(rig.batcher.step().is_ok());
        }
        assert_eq!(rig.batcher.running[0].waiting().len() == 1, decoding, "in the phase that is meant");
        if reading {
            assert!(matches!(reader.next().await, Event::Step { .. }));
        }
        let computed = rig.batcher.running[0].kv.len();
        assert!(computed > 0);
        reader.cancel();
        assert!(rig.batcher.step().is_ok());
        assert_eq!(rig.batcher.running.len(), 1, "the neighbour's alone, from the next pass on");
        rig.finish();
        let ended = loop {
            if let Event::Done(how) = reader.next().await {
                break how;
            }
        };
        assert_eq!(ended, Err(crate::engine::Ended::Cancelled));
        assert_eq!(end(neighbour).await.usage.output_tokens, 40);
    }
}

#[tokio::test]
async fn a_text_without_any_choice_is_told_at_once() {
    let mut rig = Rig::new("llama", 64);
    let (mut job, reader) = rig.job(rig.cases[0].ids.clone(), 400, true);
    let format = OutputFormat::JsonSchema { schema: serde_json::json!({ "const": "nothing else is possible" }) };
    job.opening.grammar = Grammars::new(rig.batcher.vocabulary.clone()).of(&format).unwrap();
    rig.batcher.join(job);
    rig.finish();
    let done = end(reader).await;
    assert_eq!(done.text, "\"nothing else is possible\"");
    assert!(done.usage.forced_tokens > 1 && rig.batcher.steps <= 2, "{:?}, {} passes", done.usage, rig.batcher.steps);
}

#[tokio::test]
async fn the_previous_revision_is_guessed_from_though_no_prompt_holds_it() {
    for family in ["llama", "qwen2", "gemma3"] {
        let mut accepted = Vec::new();
        let mut texts = Vec::new();
        for known in [false, true] {
            let mut rig = Rig::new(family, 64);
            let (prompt, written) = (rig.cases[0].ids.clone(), rig.cases[0].greedy.clone());
            // Beside the answer, what it must not be misled by.
            let previous = if known { [&written[..], &[7, 8, 9]].concat() } else { Vec::new() };
            let (job, reader) = rig.revision(prompt.clone(), previous, written.len(), true);
            rig.jobs.send(Order::Sequence(Box::new(job))).unwrap();
            rig.batcher.take_up();
            rig.finish();
            let done = end(reader).await;
            assert_eq!(done.usage.prompt_tokens as usize, prompt.len(), "it is no prompt");
            assert_eq!(done.usage.output_tokens as usize, written.len());
            accepted.push(done.usage.accepted_tokens);
            texts.push(done.text);
        }
        assert_eq!(texts[0], texts[1], "{family}");
        assert!(accepted[1] >= 48 && accepted[1] > accepted[0] + 8, "{family}: {accepted:?} of 64");
    }
}

#[tokio::test]
async fn any_number_of_prompts_makes_no_longer_a_pass() {
    let mut rig = Rig::new("llama", 400);
    // Somebody decodes; then 60 prompts come at once, and the model computes 400 rows a second.
    let decoding = rig.ask(rig.cases[0].ids.clone(), 40, false);
    rig.batcher.take_up();
    while rig.batcher.running[0].waiting().len() > 1 {
        assert!(rig.batcher.step().is_ok());
    }
    let ids = rig.cases.last().unwrap().ids.clone();
    let readers: Vec<Generation> = (0..60u32).map(|n| rig.ask([&[n][..], &ids[..120]].concat(), 2, false)).collect();
    rig.batcher.take_up();
    rig.batcher.figures = Figures::new(1.0, Arc::default());
    rig.batcher.figures.prefilled(Load::of(400, 0), Duration::from_secs(1));
    let plan = rig.batcher.plan();
    let rows: Vec<usize> = plan.iter().map(|s| s.tokens.len()).collect();
    assert_eq!(rows.len(), 61);
    assert!(rows.iter().sum::<usize>() <= 100, "a quarter of a second: {rows:?}");
    assert_eq!(rows[0], 1, "who decodes goes on");
    rig.finish();
    for reader in readers {
        assert_eq!(end(reader).await.usage.output_tokens, 2);
    }
    assert_eq!(end(decoding).await.usage.output_tokens, 40);
}

#[tokio::test]
async fn those_brought_back_together_find_room_together() {
    let mut rig = Rig::new("llama", 12);
    let running = rig.ask(rig.cases[0].ids.clone(), 40, false);
    rig.batcher.take_up();
    // Each fits beside the running one; all three do not.
    let long = rig.cases.last().unwrap().ids.clone();
    let mut readers = Vec::new();
    for n in 0..3u32 {
        let (job, reader) = rig.job([&[n][..], &long[..120]].concat(), 10, false);
        rig.batcher.aside.push_back(Sequence::new(job, u64::from(n) + 1));
        readers.push(reader);
    }
    rig.batcher.bring_back();
    let lacking: usize = rig.batcher.running.iter().map(Running::lacks).sum();
    assert!(lacking <= rig.batcher.pool.available(), "{lacking} of {}", rig.batcher.pool.available());
    assert_eq!((rig.batcher.running.len(), rig.batcher.aside.len()), (3, 1), "two fit, the third does not");
    rig.finish();
    assert_eq!(rig.batcher.figures.read().preemptions, 0, "nobody came back to be put aside again");
    for reader in readers {
        assert_eq!(end(reader).await.usage.output_tokens, 10);
    }
    end(running).await;
}
