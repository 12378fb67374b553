//! Tests of speculative prefill: every sequence takes precedence over it, and the expected call finds the prefilled
//! keys and values.

use super::*;
use crate::batch::speculative_prefill::{ChunkSlot, PrefillChunk};

fn expected(tokens: &[u32]) -> SpeculativePrompt {
    SpeculativePrompt { tokens: tokens.to_vec(), long_context: false, batch_invariant: false }
}

/// Returns the 120 known tokens of an expected prompt, and the whole prompt, which is five tokens longer.
fn prompt(rig: &Rig) -> (Vec<u32>, Vec<u32>) {
    let known = rig.cases.last().unwrap().ids[..120].to_vec();
    let whole = [&known[..], &[3, 1, 4, 1, 5]].concat();
    (known, whole)
}

/// Completion of the whole prompt without speculative prefill.
async fn cold(family: &str) -> Completion {
    let mut rig = Rig::new(family, 64);
    let (_, whole) = prompt(&rig);
    let reader = rig.submit(whole, 20, false);
    rig.batcher.drain_commands();
    rig.run_until_idle();
    end(reader).await
}

#[tokio::test]
async fn call_finds_its_prefilled_prompt_and_writes_the_same_text() {
    for family in ["llama", "gemma3"] {
        let mut rig = Rig::new(family, 64);
        let (known, whole) = prompt(&rig);
        // 1,000 rows per second: each chunk is one block.
        rig.batcher.stats.record_prefill(BatchWork::new(1000, 0), Duration::from_secs(1));
        let mut chunks = 1;
        while rig.batcher.prefill_speculatively(&expected(&known)) == PrefillProgress::More {
            chunks += 1;
            assert_eq!(rig.batcher.pool.available(), 64, "no block is referenced between chunks");
        }
        assert_eq!((chunks, rig.batcher.pool.tokens()), (3, 96), "{family}");
        assert_eq!((rig.admission.free(), rig.admission.running()), (1 << 20, 0));
        let reader = rig.submit(whole, 20, false);
        rig.batcher.drain_commands();
        rig.run_until_idle();
        let (warm, cold) = (end(reader).await, cold(family).await);
        assert_eq!((warm.usage.cached_tokens, cold.usage.cached_tokens), (96, 0));
        assert_eq!((warm.usage.prompt_tokens, warm.usage.output_tokens), (125, cold.usage.output_tokens));
        assert_eq!(warm.text, cold.text, "{family}");
    }
}

#[tokio::test]
async fn chunk_delays_an_arriving_sequence_by_at_most_one_block() {
    let mut rig = Rig::new("llama", 64);
    let (known, whole) = prompt(&rig);
    // 400 rows per second: a chunk is one block, while a pass of a sequence's prompt has 100 rows.
    rig.batcher.stats.record_prefill(BatchWork::new(400, 0), Duration::from_secs(1));
    assert_eq!(rig.batcher.prefill_speculatively(&expected(&known)), PrefillProgress::More);
    assert_eq!(cached_tokens(&mut rig, &known), 32);
    // Another call arrives, then a request for another chunk: the chunk is computed neither before the call nor between
    // its passes.
    let other = rig.cases[0].ids.clone();
    let reader = rig.submit(other.clone(), 20, false);
    let (chunk, mut result) = PrefillChunk::new(Arc::new(expected(&known)), ChunkSlot::default().take().unwrap());
    rig.commands.send(EngineCommand::PrefillChunk(chunk)).unwrap();
    rig.batcher.drain_commands();
    assert_eq!(result.try_recv(), Ok(PrefillProgress::Busy));
    let mut passes = 0;
    while !rig.batcher.is_idle() {
        let (chunk, mut result) = PrefillChunk::new(Arc::new(expected(&known)), ChunkSlot::default().take().unwrap());
        rig.commands.send(EngineCommand::PrefillChunk(chunk)).unwrap();
        rig.batcher.drain_commands();
        assert_eq!(result.try_recv(), Ok(PrefillProgress::Busy));
        assert!(rig.batcher.step().is_ok());
        passes += 1;
    }
    assert_eq!(end(reader).await.usage.output_tokens, 20);
    let mut alone = Rig::new("llama", 64);
    alone.batcher.stats.record_prefill(BatchWork::new(400, 0), Duration::from_secs(1));
    let reader = alone.submit(other, 20, false);
    alone.batcher.drain_commands();
    alone.run_until_idle();
    drop(end(reader).await);
    assert_eq!(passes, alone.batcher.steps, "as many passes as without chunks");
    // The expected call uses the chunk that was computed.
    let reader = rig.submit(whole, 20, false);
    rig.batcher.drain_commands();
    rig.run_until_idle();
    let done = end(reader).await;
    assert_eq!((done.usage.cached_tokens, done.text), (32, cold("llama").await.text));
    // If the model needs more time for a block than a pass may take, a chunk has as many rows as such a pass.
    let mut slow = Rig::new("llama", 64);
    slow.batcher.stats.record_prefill(BatchWork::new(100, 0), Duration::from_secs(1));
    for len in [25, 50] {
        assert_eq!(slow.batcher.prefill_speculatively(&expected(&known)), PrefillProgress::More);
        assert_eq!(cached_tokens(&mut slow, &known), len);
    }
}

/// Number of tokens of the prompt in the prefix cache.
fn cached_tokens(rig: &mut Rig, prompt: &[u32]) -> usize {
    let kv = rig.batcher.pool.begin(prompt, false, false);
    let len = kv.len();
    rig.batcher.pool.end(kv, prompt);
    len
}

#[tokio::test]
async fn wrong_or_oversized_speculative_prefill_has_no_effect_on_calls() {
    let mut rig = Rig::new("llama", 6);
    let (known, whole) = prompt(&rig);
    let wrong: Vec<u32> = known.iter().map(|token| token ^ 1).collect();
    while rig.batcher.prefill_speculatively(&expected(&wrong)) == PrefillProgress::More {}
    assert_eq!((rig.batcher.pool.available(), rig.batcher.pool.tokens()), (6, 96));
    while rig.batcher.prefill_speculatively(&expected(&[&wrong[..], &wrong, &wrong].concat())) == PrefillProgress::More
    {
    }
    assert_eq!((rig.batcher.pool.available(), rig.batcher.pool.tokens()), (6, 192), "until the pool is full");
    let reader = rig.submit(whole, 20, false);
    rig.batcher.drain_commands();
    rig.run_until_idle();
    let done = end(reader).await;
    assert_eq!((done.usage.cached_tokens, done.text), (0, cold("llama").await.text));
    // A dropped engine ends although a chunk is queued.
    let (chunk, mut result) = PrefillChunk::new(Arc::new(expected(&known)), ChunkSlot::default().take().unwrap());
    rig.commands.send(EngineCommand::PrefillChunk(chunk)).unwrap();
    let Rig { mut batcher, commands, .. } = rig;
    drop(commands);
    assert!(!batcher.drain_commands());
    assert!(result.try_recv().is_ok());
}
