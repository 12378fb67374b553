//! Keys and values in blocks, shared where sequences begin alike.
//!
//! [`cfq_memory::BlockTable`] knows which block holds what; here is what a pool does with that, whatever memory the blocks
//! are in ([`BlockMemory`]; in this process [`HostBlocks`]). Whole blocks are shared; of a block that matches in part, the
//! matching positions are copied, which is far cheaper than computing them again. What is evicted can be parked in a
//! second tier ([`Parking`]) and comes back from there when a sequence begins with it.

mod host;
mod memory;
mod parking;

use cfq_memory::{BlockId, BlockTable, Prefix};

pub use crate::engine::candle::kv::host::{HostBlocks, KvView};
pub use crate::engine::candle::kv::memory::{BlockMemory, Values};
pub use crate::engine::candle::kv::parking::{Arena, ParkedAs, Parking};
use crate::engine::lanes::LANES;

/// Positions of a block: small enough to share most of a conversation's beginning, large enough that walking blocks
/// costs the attention nothing.
pub const BLOCK: usize = 32;
/// Fewer matching positions than this are computed again rather than copied.
const WORTH_COPYING: usize = 4;
/// Of a salt: sequences whose bits matter.
const EXACT: u8 = 2;

/// Sizes that all blocks of a pool have in common.
#[derive(Debug, Clone, Copy)]
pub struct KvShape {
    pub layers: usize,
    pub heads: usize,
    pub head_dim: usize,
}

impl KvShape {
    /// Values of one head's vector, padded to whole lanes.
    pub fn stride(&self) -> usize {
        self.head_dim.next_multiple_of(LANES)
    }

    /// Values of one block.
    fn values(&self) -> usize {
        2 * self.layers * self.heads * BLOCK * self.stride()
    }
}

/// One sequence's list of blocks.
#[derive(Debug)]
pub struct SequenceKv {
    blocks: Vec<BlockId>,
    /// Of those, whole ones that the table knows, and what they amount to.
    known: usize,
    prefix: Prefix,
    /// Positions filled.
    len: usize,
    /// Rotated for long sequences.
    pub long: bool,
}

impl SequenceKv {
    pub fn len(&self) -> usize {
        self.len
    }

    /// Blocks it holds.
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// One that seems to be `len` tokens long, with room for `new`, over the blocks of this one again and again: for
    /// measuring. It holds nothing, what is computed for it is written over this one, and neither is to be used for more.
    pub fn mirrored(&self, len: usize, new: usize) -> Self {
        let blocks = self.blocks.iter().copied().cycle().take((len + new).div_ceil(BLOCK)).collect();
        Self { len, blocks, known: 0, prefix: self.prefix, long: self.long }
    }

    /// Which, in the order of its positions.
    pub fn table(&self) -> &[BlockId] {
        &self.blocks
    }
}

/// The pool of one model, whose blocks are in `M`.
pub struct KvPool<M = HostBlocks> {
    table: BlockTable,
    memory: M,
    parking: Option<Parking>,
    /// A sequence may begin where another left off.
    shares: bool,
}

impl KvPool {
    /// A pool in this process's memory.
    pub fn new(shape: KvShape, blocks: usize) -> Self {
        Self::over(HostBlocks::new(shape, blocks), blocks)
    }
}

impl<M: BlockMemory> KvPool<M> {
    pub fn over(memory: M, blocks: usize) -> Self {
        Self { table: BlockTable::new(blocks, BLOCK), memory, parking: None, shares: true }
    }

    /// The same pool, which parks what it evicts.
    pub fn parked_in(self, parking: Option<Parking>) -> Self {
        Self { parking, ..self }
    }

    /// The same pool, in which every sequence begins at its first token.
    pub fn unshared(self) -> Self {
        Self { shares: false, ..self }
    }

    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Begins a sequence with the longest known beginning of `tokens`, all but the last of them at most. An `exact` one
    /// shares only with its like: what others computed may differ in the last bits.
    pub fn begin(&mut self, tokens: &[u32], long: bool, exact: bool) -> SequenceKv {
        let salt = u8::from(long) | (u8::from(exact) * EXACT);
        let known = if self.shares { tokens.len().saturating_sub(1) } else { 0 };
        let tokens = &tokens[..known];
        let found = self.table.find(salt, tokens, tokens.len());
        let known = found.blocks.len();
        let mut sequence = SequenceKv { len: known * BLOCK, blocks: found.blocks, known, prefix: found.prefix, long };
        let parked = self.parking.clone().and_then(|parking| {
            let place = parking.at(salt, &tokens[..sequence.len])?;
            Some((parking, place))
        });
        let mut tail = found.tail;
        if let Some((parking, mut place)) = parked {
            while let Some(chunk) = tokens.get(sequence.len..sequence.len + BLOCK)
                && parking.holds(place, chunk)
            {
                // A whole block is more than part of one, whose room may be what it needs.
                self.give_back(tail.take());
                let Some((next, values)) = (self.table.available() > 0).then(|| parking.take(place, chunk)).flatten()
                else {
                    break;
                };
                if !self.fill(&mut sequence, BLOCK, |memory, block| memory.put_back(block, &values)) {
                    break;
                }
                self.make_known(&mut sequence, chunk);
                place = next;
            }
            let least = tail.map_or(WORTH_COPYING, |(_, count)| WORTH_COPYING.max(count + 1));
            if let Some((count, values)) = parking.partly(place, &tokens[sequence.len..], least)
                && self.fill(&mut sequence, count, |memory, block| memory.put_back(block, &values))
            {
                self.give_back(tail.take());
            }
        }
        if let Some((block, count)) = tail.filter(|(_, count)| *count >= WORTH_COPYING) {
            self.fill(&mut sequence, count, |memory, to| memory.copy(block, to, count));
        }
        self.give_back(tail);
        sequence
    }

    fn give_back(&mut self, tail: Option<(BlockId, usize)>) {
        if let Some((block, _)) = tail {
            self.table.release(&[block]);
        }
    }

    /// A further block of the sequence, whose first `positions` `fill` writes.
    fn fill(
        &mut self,
        sequence: &mut SequenceKv,
        positions: usize,
        fill: impl FnOnce(&mut M, BlockId) -> candle_core::Result<()>,
    ) -> bool {
        let Some(block) = self.allocate() else { return false };
        match fill(&mut self.memory, block) {
            Ok(()) => {
                sequence.blocks.push(block);
                sequence.len += positions;
                true
            }
            Err(error) => {
                tracing::warn!(%error, "known keys and values cannot be copied; they are computed again");
                self.table.discard(&[block]);
                false
            }
        }
    }

    /// Takes a block; what was in it is parked.
    fn allocate(&mut self) -> Option<BlockId> {
        if let Some(evicted) = self.table.next_evicted() {
            self.park(evicted);
        }
        let block = self.table.allocate()?;
        self.memory.prepare(block);
        Some(block)
    }

    fn park(&self, block: BlockId) {
        if let Some(parking) = &self.parking
            && let Some(beginning) = self.table.beginning(block)
        {
            parking.park(&beginning, beginning.salt & EXACT > 0, || self.memory.take_out(block));
        }
    }

    /// Parks everything that no sequence uses, for the day when this model is loaded again.
    pub fn park_all(&mut self) {
        for block in self.table.kept() {
            self.park(block);
        }
        self.table.clear();
    }

    /// Makes room for `new` more positions. False, with what was got kept, when the pool has no block left.
    pub fn grow(&mut self, sequence: &mut SequenceKv, new: usize) -> bool {
        while sequence.blocks.len() * BLOCK < sequence.len + new {
            let Some(block) = self.allocate() else { return false };
            sequence.blocks.push(block);
        }
        true
    }

    /// Counts `new` written positions; `tokens` are all of the sequence's. Whole blocks become known to others.
    pub fn advance(&mut self, sequence: &mut SequenceKv, tokens: &[u32], new: usize) {
        sequence.len += new;
        while (sequence.known + 1) * BLOCK <= sequence.len {
            let at = sequence.known;
            self.make_known(sequence, &tokens[at * BLOCK..(at + 1) * BLOCK]);
        }
    }

    /// The next whole block of the sequence holds `tokens`.
    fn make_known(&mut self, sequence: &mut SequenceKv, tokens: &[u32]) {
        let at = sequence.known;
        let (prefix, block) = self.table.keep(sequence.blocks[at], sequence.prefix, tokens);
        (sequence.prefix, sequence.blocks[at]) = (prefix, block);
        sequence.known += 1;
    }

    /// Ends a sequence. What it computed stays known as long as nobody needs the room; `tokens` are what it covers.
    pub fn end(&mut self, mut sequence: SequenceKv, tokens: &[u32]) {
        if !self.shares {
            return self.discard(sequence);
        }
        let (from, to) = (sequence.known * BLOCK, sequence.len.min(tokens.len()));
        if let Some(last) = sequence.blocks.get(sequence.known).copied().filter(|_| from < to) {
            sequence.blocks[sequence.known] = self.table.keep(last, sequence.prefix, &tokens[from..to]).1;
        }
        self.table.release(&sequence.blocks);
    }

    /// Ends a sequence whose keys and values are not to be trusted.
    pub fn discard(&mut self, sequence: SequenceKv) {
        self.table.discard(&sequence.blocks);
    }

    /// Forgets everything that no sequence uses.
    pub fn clear(&mut self) {
        self.table.clear();
    }

    /// Blocks a sequence could get now.
    pub fn available(&self) -> usize {
        self.table.available()
    }

    /// Positions of the blocks that hold something.
    pub fn tokens(&self) -> u64 {
        (self.table.filled() * BLOCK) as u64
    }
}

#[cfg(test)]
mod tiers;

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: KvShape = KvShape { layers: 2, heads: 2, head_dim: 2 };

    /// Computes the rest of a sequence; key vectors of head h at token t are (t, h), values (-t, h).
    fn compute(pool: &mut KvPool, tokens: &[u32]) -> (SequenceKv, usize) {
        let mut kv = pool.begin(tokens, false, false);
        let cached = kv.len();
        let rest = &tokens[cached..];
        assert!(pool.grow(&mut kv, rest.len()));
        let rows =
            |sign: f32| rest.iter().flat_map(|t| [sign * *t as f32, 0.0, sign * *t as f32, 1.0]).collect::<Vec<_>>();
        for layer in 0..2 {
            assert!(pool.write(&kv, layer, &rows(1.0), &rows(-1.0)));
        }
        pool.advance(&mut kv, tokens, rest.len());
        (kv, cached)
    }

    fn key(pool: &KvPool, kv: &SequenceKv, head: usize, position: usize) -> [f32; 2] {
        let keys = pool.view(kv, 1).keys(head, position / BLOCK);
        let at = position % BLOCK * LANES;
        [keys[at], keys[at + 1]]
    }

    #[test]
    fn the_longest_beginning_is_taken_and_one_token_is_left_to_compute() {
        let mut pool = KvPool::new(SHAPE, 16);
        let old: Vec<u32> = (0..80).collect();
        let (first, _) = compute(&mut pool, &old);
        let mut prompt = old[..70].to_vec();
        prompt.extend([900, 901]);
        let (second, cached) = compute(&mut pool, &prompt);
        assert_eq!(cached, 64, "running: its last block is its own");
        pool.end(second, &prompt);
        pool.end(first, &old);
        let (third, cached) = compute(&mut pool, &old);
        assert_eq!(cached, 79, "finished: the part of its last block is copied");
        for position in 0..80 {
            assert_eq!(key(&pool, &third, 1, position), [position as f32, 1.0]);
        }
        let (fourth, cached) = compute(&mut pool, &prompt);
        assert_eq!((cached, key(&pool, &fourth, 0, 71)), (71, [901.0, 0.0]));
    }

    #[test]
    fn what_is_taken_out_of_a_block_can_be_put_into_another() {
        let mut pool = KvPool::new(SHAPE, 4);
        let (kv, _) = compute(&mut pool, &(0..32).collect::<Vec<_>>());
        let values = pool.memory.take_out(kv.blocks[0]).unwrap();
        let mut other = pool.begin(&[], false, false);
        assert!(pool.grow(&mut other, BLOCK));
        pool.memory.put_back(other.blocks[0], &values).unwrap();
        assert_eq!(key(&pool, &other, 1, 31), [31.0, 1.0]);
        for strange in [memory::Values::F32(vec![0.0; 3]), memory::Values::Half(vec![0; SHAPE.values()])] {
            assert!(pool.memory.put_back(other.blocks[0], &strange).is_err());
        }
    }

    #[test]
    fn what_is_evicted_comes_back_and_is_parked_no_more() {
        let arena = Arena::new(1 << 20, ParkedAs::F16).unwrap();
        let parking = Parking::new(arena.clone(), "m", true);
        let mut pool = KvPool::new(SHAPE, 4).parked_in(Some(parking.clone()));
        let alpha: Vec<u32> = (0..110).collect();
        let (kv, _) = compute(&mut pool, &alpha);
        pool.end(kv, &alpha);
        let beta: Vec<u32> = (200..310).collect();
        let (kv, _) = compute(&mut pool, &beta);
        assert_eq!((parking.tokens(), pool.tokens()), (110, 128));
        pool.end(kv, &beta);
        let (kv, cached) = compute(&mut pool, &alpha);
        assert_eq!(cached, 109, "three blocks and all but one of what the fourth held");
        assert_eq!(key(&pool, &kv, 1, 100), [100.0, 1.0]);
        // Beta's are there instead, and of alpha's what only a part was taken of.
        assert_eq!(parking.tokens(), 110 + 14);
        pool.end(kv, &alpha);
        pool.park_all();
        assert_eq!((parking.tokens(), pool.tokens()), (220, 0));
        let mut reloaded = KvPool::new(SHAPE, 8).parked_in(Some(parking.clone()));
        assert_eq!(compute(&mut reloaded, &beta).1, 109);
        let mut other = KvPool::new(SHAPE, 8).parked_in(Some(Parking::new(arena, "n", true)));
        assert_eq!(compute(&mut other, &alpha).1, 0, "another model's are not for it");
        assert_eq!(other.begin(&alpha, false, true).len(), 0);
        assert_eq!(reloaded.begin(&alpha, false, true).len(), 0, "nor others' for one that must be exact");
    }

    /// A device that lost its mind.
    struct Broken;

    impl BlockMemory for Broken {
        fn prepare(&mut self, _: BlockId) {}

        fn copy(&mut self, _: BlockId, _: BlockId, _: usize) -> candle_core::Result<()> {
            candle_core::bail!("no copies today")
        }

        fn take_out(&self, _: BlockId) -> candle_core::Result<memory::Values> {
            Ok(memory::Values::Half(vec![1; 10]))
        }

        fn put_back(&mut self, _: BlockId, _: &memory::Values) -> candle_core::Result<()> {
            candle_core::bail!("nor this")
        }
    }

    #[test]
    fn memory_that_fails_costs_computing_again_and_no_block() {
        let parking = Parking::new(Arena::new(1 << 20, ParkedAs::F16).unwrap(), "m", false);
        let mut pool = KvPool::over(Broken, 4).parked_in(Some(parking.clone()));
        let tokens: Vec<u32> = (0..100).collect();
        for round in 0..3 {
            let mut kv = pool.begin(&tokens, false, false);
            let new = tokens.len() - kv.len();
            assert!(pool.grow(&mut kv, new), "round {round}");
            pool.advance(&mut kv, &tokens, new);
            pool.end(kv, &tokens);
            assert_eq!(pool.available(), 4);
            if round == 1 {
                pool.park_all();
                assert_eq!(parking.tokens(), 100);
            }
        }
    }

    #[test]
    fn a_full_pool_gives_no_more_and_evicts_what_nobody_uses() {
        let mut pool = KvPool::new(SHAPE, 2);
        let (mut kv, _) = compute(&mut pool, &[1; 33]);
        assert!(!pool.grow(&mut kv, 32));
        assert!(!pool.write(&kv, 0, &[0.0; 4 * 40], &[0.0; 4 * 40]));
        pool.end(kv, &[1; 33]);
        assert_eq!(pool.available(), 2);
        let (kv, cached) = compute(&mut pool, &[2; 64]);
        assert_eq!((cached, pool.available()), (0, 0));
        pool.discard(kv);
    }
}
