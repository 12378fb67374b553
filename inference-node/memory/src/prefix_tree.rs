//! The prefix cache: an index of the KV blocks with known contents, as a tree of prefixes.
//!
//! The key of a block is everything that its keys and values depend on: the salt and all tokens up to the end of the
//! block. Each node of the tree is one block, a child of the prefix that precedes it. Equal prefixes of different
//! sequences are therefore the same path, which is found by comparing tokens, without hash collisions. Ids of prefixes
//! are never reused, so a stale id finds nothing.

use std::collections::HashMap;

/// Identifies one block of a pool, by its index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub(crate) u32);

impl BlockId {
    /// Index of the block in its pool.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Identifies a prefix whose last block has known contents, or the empty prefix. Ids are never reused, so a stale id
/// finds nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PrefixId(u64);

impl PrefixId {
    /// The empty prefix. Sequences with different salts share no blocks.
    pub fn empty(salt: u8) -> Self {
        Self(u64::from(salt))
    }
}

/// First id of a non-empty prefix. Smaller ids are empty prefixes: the id is the salt.
const FIRST_PREFIX_ID: u64 = 256;

/// Everything that the contents of a block depend on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockKey {
    /// Salt of the sequence, see [`PrefixId::empty`].
    pub salt: u8,
    /// All tokens from the start of the sequence to the end of the block. The last block is whole unless a finished
    /// sequence ended in it.
    pub tokens: Vec<u32>,
}

#[derive(Debug, Clone)]
struct KnownBlock {
    parent: PrefixId,
    prefix: PrefixId,
    /// Tokens of this block alone; fewer than the block size only at the end of a finished sequence.
    tokens: Vec<u32>,
}

/// The known blocks of one pool.
#[derive(Debug, Clone)]
pub(crate) struct PrefixTree {
    /// Contents of each block, by the block's index; `None` if they are not known.
    known: Vec<Option<KnownBlock>>,
    children: HashMap<PrefixId, Vec<BlockId>>,
    /// The last block of each prefix.
    last_blocks: HashMap<PrefixId, BlockId>,
    next_id: u64,
}

impl PrefixTree {
    /// Creates the tree of a pool of `blocks` blocks with unknown contents.
    pub(crate) fn new(blocks: usize) -> Self {
        Self {
            known: vec![None; blocks],
            children: HashMap::new(),
            last_blocks: HashMap::new(),
            next_id: FIRST_PREFIX_ID,
        }
    }

    /// Whether the contents of `block` are known.
    pub(crate) fn contains(&self, block: BlockId) -> bool {
        self.known[block.index()].is_some()
    }

    /// The prefix that ends with `block`; `None` if the block's contents are not known.
    pub(crate) fn prefix(&self, block: BlockId) -> Option<PrefixId> {
        self.known[block.index()].as_ref().map(|known| known.prefix)
    }

    /// Everything that the contents of `block` depend on; `None` if the contents of the block, or of an earlier block
    /// in its prefix, are not known.
    pub(crate) fn key(&self, block: BlockId) -> Option<BlockKey> {
        let mut known = self.known[block.index()].as_ref()?;
        let mut chunks = vec![&known.tokens];
        while known.parent.0 >= FIRST_PREFIX_ID {
            known = self.known[self.last_blocks.get(&known.parent)?.index()].as_ref()?;
            chunks.push(&known.tokens);
        }
        let salt = u8::try_from(known.parent.0).ok()?;
        Some(BlockKey { salt, tokens: chunks.into_iter().rev().flatten().copied().collect() })
    }

    /// The block that holds exactly `tokens` after `parent`.
    pub(crate) fn child(&self, parent: PrefixId, tokens: &[u32]) -> Option<BlockId> {
        let matches = |block: &&BlockId| self.known[block.index()].as_ref().is_some_and(|known| known.tokens == tokens);
        self.children.get(&parent)?.iter().find(matches).copied()
    }

    /// Finds the block after `parent` that shares the most leading positions with `tokens`. Returns it and the number
    /// of shared positions; `None` if no block shares any.
    pub(crate) fn longest_partial(&self, parent: PrefixId, tokens: &[u32]) -> Option<(BlockId, usize)> {
        let shared = |block: &BlockId| {
            let known = self.known[block.index()].as_ref()?;
            Some((known.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count(), *block))
        };
        let (count, block) = self.children.get(&parent)?.iter().filter_map(shared).max()?;
        (count > 0).then_some((block, count))
    }

    /// Records that `block` holds `tokens` after `parent`; earlier known contents are replaced. Returns the prefix that
    /// ends with the block.
    pub(crate) fn insert(&mut self, block: BlockId, parent: PrefixId, tokens: &[u32]) -> PrefixId {
        self.remove(block);
        let prefix = PrefixId(self.next_id);
        self.next_id += 1;
        self.known[block.index()] = Some(KnownBlock { parent, prefix, tokens: tokens.to_vec() });
        self.children.entry(parent).or_default().push(block);
        self.last_blocks.insert(prefix, block);
        prefix
    }

    /// Removes `block` from the tree if its contents are known.
    pub(crate) fn remove(&mut self, block: BlockId) {
        let Some(known) = self.known[block.index()].take() else { return };
        self.last_blocks.remove(&known.prefix);
        if let Some(siblings) = self.children.get_mut(&known.parent) {
            siblings.retain(|sibling| *sibling != block);
            if siblings.is_empty() {
                self.children.remove(&known.parent);
            }
        }
    }
}
