//! Reference counts, sharing and eviction of the blocks of a KV pool.
//!
//! A pool is divided into blocks of a fixed number of positions; a sequence is a list of them. Blocks whose tokens are
//! known are in the prefix cache ([`PrefixTree`]): a new sequence takes references to the longest prefix that was
//! computed before, whether or not the sequence that computed it still runs. A block without references stays cached
//! until its memory is needed; the least recently used block is evicted first. A prefix is never evicted before its
//! continuations: of the blocks of one sequence, the last is evicted first.
//!
//! This module does not access keys and values; the owner of their memory copies them.

use std::collections::BTreeMap;

use crate::prefix_tree::{BlockId, BlockKey, PrefixId, PrefixTree};

/// The cached prefix of a sequence. The caller holds a reference to each of its blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefixMatch {
    /// Whole blocks from the start of the sequence.
    pub blocks: Vec<BlockId>,
    /// Id of the prefix that ends with the last of `blocks`.
    pub prefix: PrefixId,
    /// A further block that matches only in its first positions, and the number of these positions. The caller copies
    /// them and releases the block.
    pub partial: Option<(BlockId, usize)>,
}

#[derive(Debug, Clone, Default)]
struct BlockState {
    references: u32,
    /// Time of the last release, by the table's counter; only meaningful while there are no references.
    last_used: u64,
}

/// The blocks of one KV pool.
#[derive(Debug, Clone)]
pub struct BlockTable {
    block_size: usize,
    states: Vec<BlockState>,
    cache: PrefixTree,
    /// Indices of the blocks without contents.
    free: Vec<BlockId>,
    /// Cached blocks without references, by [`BlockState::last_used`].
    lru: BTreeMap<u64, BlockId>,
    clock: u64,
}

impl BlockTable {
    /// Creates the table of a pool of `blocks` blocks with `block_size` positions each.
    pub fn new(blocks: usize, block_size: usize) -> Self {
        let count = u32::try_from(blocks).unwrap_or(u32::MAX);
        Self {
            block_size: block_size.max(1),
            states: vec![BlockState::default(); count as usize],
            cache: PrefixTree::new(count as usize),
            // In descending order: blocks are popped from the end, so the lowest index is allocated first.
            free: (0..count).rev().map(BlockId).collect(),
            lru: BTreeMap::new(),
            clock: 0,
        }
    }

    /// Number of positions in a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Number of blocks that [`Self::allocate`] could return now.
    pub fn available(&self) -> usize {
        self.free.len() + self.lru.len()
    }

    /// Number of blocks with contents, referenced or not.
    pub fn occupied(&self) -> usize {
        self.states.len() - self.free.len()
    }

    /// The block whose contents the next [`Self::allocate`] evicts; `None` while there are free blocks.
    pub fn next_eviction(&self) -> Option<BlockId> {
        if self.free.is_empty() { self.lru.first_key_value().map(|(_, block)| *block) } else { None }
    }

    /// Cached blocks without references, in the order in which they will be evicted.
    pub fn evictable(&self) -> impl Iterator<Item = BlockId> {
        self.lru.values().copied()
    }

    /// Everything that the contents of `block` depend on; `None` if they are unknown, or those of an earlier block of
    /// its prefix are no longer known.
    pub fn block_key(&self, block: BlockId) -> Option<BlockKey> {
        self.cache.key(block)
    }

    /// Finds the longest cached prefix of the first `max_tokens` of `tokens`, and takes a reference to each of its
    /// blocks.
    pub fn find_prefix(&mut self, salt: u8, tokens: &[u32], max_tokens: usize) -> PrefixMatch {
        let mut prefix = PrefixId::empty(salt);
        let mut blocks = Vec::new();
        let mut rest = &tokens[..tokens.len().min(max_tokens)];
        while rest.len() >= self.block_size {
            let (chunk, after) = rest.split_at(self.block_size);
            let Some(block) = self.cache.child(prefix, chunk) else { break };
            self.add_reference(block);
            prefix = self.cache.prefix(block).unwrap_or(prefix);
            blocks.push(block);
            rest = after;
        }
        let partial = self.cache.longest_partial(prefix, rest);
        if let Some((block, _)) = partial {
            self.add_reference(block);
        }
        PrefixMatch { blocks, prefix, partial }
    }

    fn add_reference(&mut self, block: BlockId) {
        let state = &mut self.states[block.index()];
        if state.references == 0 {
            self.lru.remove(&state.last_used);
        }
        state.references += 1;
    }

    /// Allocates a block, evicting one if necessary. It has one reference and undefined contents. `None` if all blocks
    /// are referenced.
    pub fn allocate(&mut self) -> Option<BlockId> {
        let block = match self.free.pop() {
            Some(block) => block,
            None => {
                let (_, block) = self.lru.pop_first()?;
                self.cache.remove(block);
                block
            }
        };
        self.states[block.index()].references = 1;
        Some(block)
    }

    /// Adds a referenced block to the prefix cache: `block` holds `tokens` after `parent`. Returns the prefix that ends
    /// with the block, and the block to use from now on: if another block with the same contents is already cached, the
    /// reference is moved to that block.
    pub fn cache_block(&mut self, block: BlockId, parent: PrefixId, tokens: &[u32]) -> (PrefixId, BlockId) {
        if let Some(cached) = self.cache.child(parent, tokens)
            && let Some(prefix) = self.cache.prefix(cached)
        {
            if cached != block {
                self.add_reference(cached);
                self.release(&[block]);
            }
            return (prefix, cached);
        }
        (self.cache.insert(block, parent, tokens), block)
    }

    /// Drops one reference to each of `blocks`, which are in the order of their positions.
    pub fn release(&mut self, blocks: &[BlockId]) {
        for block in blocks.iter().rev() {
            let state = &mut self.states[block.index()];
            state.references = state.references.saturating_sub(1);
            if state.references > 0 {
                continue;
            }
            if self.cache.contains(*block) {
                self.clock += 1;
                state.last_used = self.clock;
                self.lru.insert(self.clock, *block);
            } else {
                self.free.push(*block);
            }
        }
    }

    /// Drops one reference to each of `blocks`, and removes those that have no other reference from the prefix cache,
    /// because their contents may be wrong.
    pub fn discard(&mut self, blocks: &[BlockId]) {
        for block in blocks {
            if self.states[block.index()].references == 1 {
                self.cache.remove(*block);
            }
        }
        self.release(blocks);
    }

    /// Evicts every block without references.
    pub fn evict_all(&mut self) {
        while let Some((_, block)) = self.lru.pop_first() {
            self.cache.remove(block);
            self.free.push(block);
        }
    }
}

#[cfg(test)]
mod tests;
