//! A prompt that is expected stands aside for whatever is real, and is found by the call it was for.

use super::*;
use crate::engine::Ahead;
use crate::engine::candle::ahead::Piece;

fn expected(tokens: &[u32]) -> Ahead {
    Ahead { tokens: tokens.to_vec(), long: false, exact: false }
}

/// 120 tokens of a prompt, and five more.
fn prompt(rig: &Rig) -> (Vec<u32>, Vec<u32>) {
    let known = rig.cases.last().unwrap().ids[..120].to_vec();
    let whole = [&known[..], &[3, 1, 4, 1, 5]].concat();
    (known, whole)
}

async fn cold(family: &str) -> Completion {
    let mut rig = Rig::new(family, 64);
    let (_, whole) = prompt(&rig);
    let reader = rig.ask(whole, 20, false);
    rig.batcher.take_up();
    rig.finish();
    end(reader).await
}

#[tokio::test]
async fn a_call_finds_what_was_computed_ahead_of_it_and_writes_the_same() {
    for family in ["llama", "gemma3"] {
        let mut rig = Rig::new(family, 64);
        let (known, whole) = prompt(&rig);
        // A second's 1,000 rows: pieces of a block each.
        rig.batcher.figures.prefilled(Load::of(1000, 0), Duration::from_secs(1));
        let mut pieces = 1;
        while rig.batcher.ahead(&expected(&known)) == Warmed::Further {
            pieces += 1;
            assert_eq!(rig.batcher.pool.available(), 64, "nothing is held between pieces");
        }
        assert_eq!((pieces, rig.batcher.pool.tokens()), (3, 96), "{family}");
        assert_eq!((rig.room.free(), rig.room.running()), (1 << 20, 0));
        let reader = rig.ask(whole, 20, false);
        rig.batcher.take_up();
        rig.finish();
        let (warm, cold) = (end(reader).await, cold(family).await);
        assert_eq!((warm.usage.cached_tokens, cold.usage.cached_tokens), (96, 0));
        assert_eq!((warm.usage.prompt_tokens, warm.usage.output_tokens), (125, cold.usage.output_tokens));
        assert_eq!(warm.text, cold.text, "{family}");
    }
}

#[tokio::test]
async fn a_piece_is_short_and_no_pass_of_a_real_sequence_waits_for_more_than_one() {
    let mut rig = Rig::new("llama", 64);
    let (known, whole) = prompt(&rig);
    // 400 rows a second: a piece is a block, a pass for a prompt would have 100 of them.
    rig.batcher.figures.prefilled(Load::of(400, 0), Duration::from_secs(1));
    assert_eq!(rig.batcher.ahead(&expected(&known)), Warmed::Further);
    assert_eq!(computed(&mut rig, &known), 32);
    // Another call comes, then a further piece: it is not computed, not now and not beside any of the call's passes.
    let other = rig.cases[0].ids.clone();
    let reader = rig.ask(other.clone(), 20, false);
    let (piece, mut answered) = Piece::new(Arc::new(expected(&known)));
    rig.jobs.send(Order::Piece(piece)).unwrap();
    rig.batcher.take_up();
    assert_eq!(answered.try_recv(), Ok(Warmed::Busy));
    let mut passes = 0;
    while !rig.batcher.is_idle() {
        let (piece, mut answered) = Piece::new(Arc::new(expected(&known)));
        rig.jobs.send(Order::Piece(piece)).unwrap();
        rig.batcher.take_up();
        assert_eq!(answered.try_recv(), Ok(Warmed::Busy));
        assert!(rig.batcher.step().is_ok());
        passes += 1;
    }
    assert_eq!(end(reader).await.usage.output_tokens, 20);
    let mut alone = Rig::new("llama", 64);
    alone.batcher.figures.prefilled(Load::of(400, 0), Duration::from_secs(1));
    let reader = alone.ask(other, 20, false);
    alone.batcher.take_up();
    alone.finish();
    drop(end(reader).await);
    assert_eq!(passes, alone.batcher.steps, "not a pass more than without");
    // The expected call itself needs no more of it: what was computed is its own already.
    let reader = rig.ask(whole, 20, false);
    rig.batcher.take_up();
    rig.finish();
    let done = end(reader).await;
    assert_eq!((done.usage.cached_tokens, done.text), (32, cold("llama").await.text));
    // On a model that takes longer for a block than a pass may take, a piece is what a pass may have.
    let mut slow = Rig::new("llama", 64);
    slow.batcher.figures.prefilled(Load::of(100, 0), Duration::from_secs(1));
    for len in [25, 50] {
        assert_eq!(slow.batcher.ahead(&expected(&known)), Warmed::Further);
        assert_eq!(computed(&mut slow, &known), len);
    }
}

/// How much of a prompt is there.
fn computed(rig: &mut Rig, prompt: &[u32]) -> usize {
    let kv = rig.batcher.pool.begin(prompt, false, false);
    let len = kv.len();
    rig.batcher.pool.end(kv, prompt);
    len
}

#[tokio::test]
async fn what_was_guessed_wrong_or_has_no_room_is_as_if_it_had_not_been() {
    let mut rig = Rig::new("llama", 6);
    let (known, whole) = prompt(&rig);
    let wrong: Vec<u32> = known.iter().map(|token| token ^ 1).collect();
    while rig.batcher.ahead(&expected(&wrong)) == Warmed::Further {}
    assert_eq!((rig.batcher.pool.available(), rig.batcher.pool.tokens()), (6, 96));
    while rig.batcher.ahead(&expected(&[&wrong[..], &wrong, &wrong].concat())) == Warmed::Further {}
    assert_eq!((rig.batcher.pool.available(), rig.batcher.pool.tokens()), (6, 192), "as far as it goes");
    let reader = rig.ask(whole, 20, false);
    rig.batcher.take_up();
    rig.finish();
    let done = end(reader).await;
    assert_eq!((done.usage.cached_tokens, done.text), (0, cold("llama").await.text));
    // An engine without anybody left ends, whatever is still wished for.
    let (piece, mut answered) = Piece::new(Arc::new(expected(&known)));
    rig.jobs.send(Order::Piece(piece)).unwrap();
    let Rig { mut batcher, jobs, .. } = rig;
    drop(jobs);
    assert!(!batcher.take_up());
    assert!(answered.try_recv().is_ok());
}
