//! The KV pool of one model: allocation, the prefix cache, eviction, and the exchange with the offload tier.

use cfq_memory::{BlockId, BlockTable};

use crate::kv::{BlockMemory, HostBlocks, KV_BLOCK_TOKENS, KvOffload, KvShape, SequenceKv};

/// Minimum number of matching positions of a partial block that are copied; fewer are computed instead.
const MIN_COPIED_POSITIONS: usize = 4;
/// Bit of a salt that marks batch-invariant sequences. Bit 0 marks sequences with the long-context frequencies.
pub(super) const BATCH_INVARIANT_SALT: u8 = 2;

/// The KV pool of one model, whose blocks are stored in `B`.
pub struct KvPool<B = HostBlocks> {
    table: BlockTable,
    pub(super) memory: B,
    offload: Option<KvOffload>,
    /// Whether sequences share prefixes.
    prefix_cache: bool,
}

impl KvPool {
    /// Creates a pool of `blocks` blocks in host memory.
    pub fn new(shape: KvShape, blocks: usize) -> Self {
        Self::with_memory(HostBlocks::new(shape, blocks), blocks)
    }
}

impl<B: BlockMemory> KvPool<B> {
    /// Creates a pool of `blocks` blocks, which are stored in `memory`.
    pub fn with_memory(memory: B, blocks: usize) -> Self {
        Self { table: BlockTable::new(blocks, KV_BLOCK_TOKENS), memory, offload: None, prefix_cache: true }
    }

    /// Sets the cache to which evicted blocks are offloaded; `None` disables offload.
    pub fn with_offload(self, offload: Option<KvOffload>) -> Self {
        Self { offload, ..self }
    }

    /// Disables the prefix cache, so that every sequence is computed from its first token.
    pub fn without_prefix_cache(self) -> Self {
        Self { prefix_cache: false, ..self }
    }

    /// The storage of the blocks.
    pub fn memory(&self) -> &B {
        &self.memory
    }

    /// Begins a sequence with the longest cached prefix of `tokens`, excluding the last token, whose scores are needed.
    /// A `batch_invariant` sequence shares blocks only with other such sequences, because other sequences may be
    /// computed by faster kernels, whose results may differ in the last bits.
    pub fn begin(&mut self, tokens: &[u32], long_context: bool, batch_invariant: bool) -> SequenceKv {
        let salt = u8::from(long_context) | (u8::from(batch_invariant) * BATCH_INVARIANT_SALT);
        let searched = if self.prefix_cache { tokens.len().saturating_sub(1) } else { 0 };
        let tokens = &tokens[..searched];
        let found = self.table.find_prefix(salt, tokens, tokens.len());
        let cached = found.blocks.len();
        let mut sequence = SequenceKv {
            len: cached * KV_BLOCK_TOKENS,
            blocks: found.blocks,
            cached,
            prefix: found.prefix,
            long_context,
        };
        let offloaded = self.offload.clone().and_then(|offload| {
            let node = offload.node_of(salt, &tokens[..sequence.len])?;
            Some((offload, node))
        });
        let mut partial = found.partial;
        if let Some((offload, mut node)) = offloaded {
            while let Some(chunk) = tokens.get(sequence.len..sequence.len + KV_BLOCK_TOKENS)
                && offload.contains(node, chunk)
            {
                // A whole block replaces the partial match. The partial block is released first, since it may be the
                // one that has to be evicted for the whole block.
                self.release_partial(partial.take());
                let Some((next, values)) = (self.table.available() > 0).then(|| offload.take(node, chunk)).flatten()
                else {
                    break;
                };
                if !self
                    .append_block(&mut sequence, KV_BLOCK_TOKENS, |memory, block| memory.write_block(block, &values))
                {
                    break;
                }
                self.cache_block(&mut sequence, chunk);
                node = next;
            }
            let min = partial.map_or(MIN_COPIED_POSITIONS, |(_, count)| MIN_COPIED_POSITIONS.max(count + 1));
            if let Some((count, values)) = offload.partial_match(node, &tokens[sequence.len..], min)
                && self.append_block(&mut sequence, count, |memory, block| memory.write_block(block, &values))
            {
                self.release_partial(partial.take());
            }
        }
        if let Some((block, count)) = partial.filter(|(_, count)| *count >= MIN_COPIED_POSITIONS) {
            self.append_block(&mut sequence, count, |memory, to| memory.copy(block, to, count));
        }
        self.release_partial(partial);
        sequence
    }

    /// Releases the reference that [`BlockTable::find_prefix`] has taken to a partially matching block.
    fn release_partial(&mut self, partial: Option<(BlockId, usize)>) {
        if let Some((block, _)) = partial {
            self.table.release(&[block]);
        }
    }

    /// Allocates the next block of the sequence; `fill` writes its first `positions` positions. Returns false, with the
    /// sequence unchanged, if there is no block or `fill` fails.
    fn append_block(
        &mut self,
        sequence: &mut SequenceKv,
        positions: usize,
        fill: impl FnOnce(&mut B, BlockId) -> candle_core::Result<()>,
    ) -> bool {
        let Some(block) = self.allocate() else { return false };
        match fill(&mut self.memory, block) {
            Ok(()) => {
                sequence.blocks.push(block);
                sequence.len += positions;
                true
            }
            Err(error) => {
                tracing::warn!(%error, "cannot copy cached keys and values; they are computed again");
                self.table.discard(&[block]);
                false
            }
        }
    }

    /// Allocates a block. If another block has to be evicted, it is offloaded first.
    fn allocate(&mut self) -> Option<BlockId> {
        if let Some(evicted) = self.table.next_eviction() {
            self.offload(evicted);
        }
        let block = self.table.allocate()?;
        self.memory.prepare(block);
        Some(block)
    }

    fn offload(&self, block: BlockId) {
        if let Some(offload) = &self.offload
            && let Some(key) = self.table.block_key(block)
        {
            let batch_invariant = key.salt & BATCH_INVARIANT_SALT > 0;
            offload.store(&key, batch_invariant, || self.memory.read_block(block));
        }
    }

    /// Offloads and evicts all blocks that no sequence uses, so that the pool of the next load of this model can read
    /// them back.
    pub fn offload_all(&mut self) {
        for block in self.table.evictable() {
            self.offload(block);
        }
        self.table.evict_all();
    }

    /// Allocates blocks for `new` more positions. Returns false if no block is left; blocks allocated before that are
    /// kept.
    pub fn grow(&mut self, sequence: &mut SequenceKv, new: usize) -> bool {
        while sequence.blocks.len() * KV_BLOCK_TOKENS < sequence.len + new {
            let Some(block) = self.allocate() else { return false };
            sequence.blocks.push(block);
        }
        true
    }

    /// Counts `new` positions, whose keys and values were written, as filled. `tokens` are all tokens of the sequence.
    /// Blocks that are now full are added to the prefix cache.
    pub fn advance(&mut self, sequence: &mut SequenceKv, tokens: &[u32], new: usize) {
        sequence.len += new;
        while (sequence.cached + 1) * KV_BLOCK_TOKENS <= sequence.len {
            let at = sequence.cached;
            self.cache_block(sequence, &tokens[at * KV_BLOCK_TOKENS..(at + 1) * KV_BLOCK_TOKENS]);
        }
    }

    /// Adds the next whole block of the sequence, which holds `tokens`, to the prefix cache.
    fn cache_block(&mut self, sequence: &mut SequenceKv, tokens: &[u32]) {
        let at = sequence.cached;
        let (prefix, block) = self.table.cache_block(sequence.blocks[at], sequence.prefix, tokens);
        (sequence.prefix, sequence.blocks[at]) = (prefix, block);
        sequence.cached += 1;
    }

    /// Ends a sequence and releases its blocks, which stay in the prefix cache until they are evicted. `tokens` are the
    /// tokens of the sequence.
    pub fn end(&mut self, mut sequence: SequenceKv, tokens: &[u32]) {
        if !self.prefix_cache {
            return self.discard(sequence);
        }
        let (from, to) = (sequence.cached * KV_BLOCK_TOKENS, sequence.len.min(tokens.len()));
        if let Some(last) = sequence.blocks.get(sequence.cached).copied().filter(|_| from < to) {
            sequence.blocks[sequence.cached] = self.table.cache_block(last, sequence.prefix, &tokens[from..to]).1;
        }
        self.table.release(&sequence.blocks);
    }

    /// Ends a sequence whose keys and values may be wrong, and does not cache its blocks.
    pub fn discard(&mut self, sequence: SequenceKv) {
        self.table.discard(&sequence.blocks);
    }

    /// Evicts all blocks that no sequence uses, without offloading them.
    pub fn clear(&mut self) {
        self.table.evict_all();
    }

    /// Number of blocks that can be allocated now, evictable ones included.
    pub fn available(&self) -> usize {
        self.table.available()
    }

    /// Number of positions in all blocks with contents, cached blocks included.
    pub fn tokens(&self) -> u64 {
        (self.table.occupied() * KV_BLOCK_TOKENS) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::simd::LANES;
    use crate::kv::{BlockValues, HostKvCache, KvOffloadFormat};

    const SHAPE: KvShape = KvShape { layers: 2, heads: 2, head_dim: 2 };

    /// Begins the sequence of `tokens` and computes the part of it that is not cached; returns the sequence and the
    /// number of cached tokens. The key vector of head h at token t is (t, h), its value vector (-t, h).
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
        let keys = pool.view(kv, 1).keys(head, position / KV_BLOCK_TOKENS);
        let at = position % KV_BLOCK_TOKENS * LANES;
        [keys[at], keys[at + 1]]
    }

    #[test]
    fn longest_cached_prefix_is_used_and_one_token_is_left_to_compute() {
        let mut pool = KvPool::new(SHAPE, 16);
        let old: Vec<u32> = (0..80).collect();
        let (first, _) = compute(&mut pool, &old);
        let mut prompt = old[..70].to_vec();
        prompt.extend([900, 901]);
        let (second, cached) = compute(&mut pool, &prompt);
        assert_eq!(cached, 64, "the running sequence's last block is not shared");
        pool.end(second, &prompt);
        pool.end(first, &old);
        let (third, cached) = compute(&mut pool, &old);
        assert_eq!(cached, 79, "the finished sequence's last block is copied in part");
        for position in 0..80 {
            assert_eq!(key(&pool, &third, 1, position), [position as f32, 1.0]);
        }
        let (fourth, cached) = compute(&mut pool, &prompt);
        assert_eq!((cached, key(&pool, &fourth, 0, 71)), (71, [901.0, 0.0]));
    }

    #[test]
    fn values_of_a_block_can_be_written_into_another() {
        let mut pool = KvPool::new(SHAPE, 4);
        let (kv, _) = compute(&mut pool, &(0..32).collect::<Vec<_>>());
        let values = pool.memory.read_block(kv.block_table()[0]).unwrap();
        let mut other = pool.begin(&[], false, false);
        assert!(pool.grow(&mut other, KV_BLOCK_TOKENS));
        let target = other.block_table()[0];
        pool.memory.write_block(target, &values).unwrap();
        assert_eq!(key(&pool, &other, 1, 31), [31.0, 1.0]);
        for foreign in [BlockValues::F32(vec![0.0; 3]), BlockValues::Half(vec![0; SHAPE.values()])] {
            assert!(pool.memory.write_block(target, &foreign).is_err());
        }
    }

    #[test]
    fn evicted_blocks_return_from_the_host_kv_cache() {
        let cache = HostKvCache::new(1 << 20, KvOffloadFormat::F16).unwrap();
        let offload = KvOffload::new(cache.clone(), "m", true);
        let mut pool = KvPool::new(SHAPE, 4).with_offload(Some(offload.clone()));
        let alpha: Vec<u32> = (0..110).collect();
        let (kv, _) = compute(&mut pool, &alpha);
        pool.end(kv, &alpha);
        let beta: Vec<u32> = (200..310).collect();
        let (kv, _) = compute(&mut pool, &beta);
        assert_eq!((offload.tokens(), pool.tokens()), (110, 128));
        pool.end(kv, &beta);
        let (kv, cached) = compute(&mut pool, &alpha);
        assert_eq!(cached, 109, "three blocks, and all but one position of the fourth");
        assert_eq!(key(&pool, &kv, 1, 100), [100.0, 1.0]);
        // Blocks of `beta` were evicted for `alpha`. The last block of `alpha` was only copied in part, so it stays
        // offloaded.
        assert_eq!(offload.tokens(), 110 + 14);
        pool.end(kv, &alpha);
        pool.offload_all();
        assert_eq!((offload.tokens(), pool.tokens()), (220, 0));
        let mut reloaded = KvPool::new(SHAPE, 8).with_offload(Some(offload.clone()));
        assert_eq!(compute(&mut reloaded, &beta).1, 109);
        let mut other = KvPool::new(SHAPE, 8).with_offload(Some(KvOffload::new(cache, "n", true)));
        assert_eq!(compute(&mut other, &alpha).1, 0, "another model shares nothing");
        assert_eq!(other.begin(&alpha, false, true).len(), 0);
        assert_eq!(reloaded.begin(&alpha, false, true).len(), 0, "nor does a batch-invariant sequence");
    }

    /// Block storage whose writes fail.
    struct FailingMemory;

    impl BlockMemory for FailingMemory {
        fn prepare(&mut self, _: BlockId) {}

        fn copy(&mut self, _: BlockId, _: BlockId, _: usize) -> candle_core::Result<()> {
            candle_core::bail!("copy failed")
        }

        fn read_block(&self, _: BlockId) -> candle_core::Result<BlockValues> {
            Ok(BlockValues::Half(vec![1; 10]))
        }

        fn write_block(&mut self, _: BlockId, _: &BlockValues) -> candle_core::Result<()> {
            candle_core::bail!("write failed")
        }
    }

    #[test]
    fn failed_copies_are_computed_again_and_leak_no_block() {
        let offload = KvOffload::new(HostKvCache::new(1 << 20, KvOffloadFormat::F16).unwrap(), "m", false);
        let mut pool = KvPool::with_memory(FailingMemory, 4).with_offload(Some(offload.clone()));
        let tokens: Vec<u32> = (0..100).collect();
        for round in 0..3 {
            let mut kv = pool.begin(&tokens, false, false);
            let new = tokens.len() - kv.len();
            assert!(pool.grow(&mut kv, new), "round {round}");
            pool.advance(&mut kv, &tokens, new);
            pool.end(kv, &tokens);
            assert_eq!(pool.available(), 4);
            if round == 1 {
                pool.offload_all();
                assert_eq!(offload.tokens(), 100);
            }
        }
    }

    #[test]
    fn full_pool_refuses_growth_and_evicts_unused_blocks() {
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
