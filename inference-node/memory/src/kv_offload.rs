//! Index of offloaded KV blocks: a bounded cache in host memory, shared by all models, for blocks evicted from their
//! pools.
//!
//! The key of a block is everything that its contents depend on: the model, the salt, and all tokens up to the end of
//! the block. The keys form a tree that is searched by comparing tokens, so there are no hash collisions. The least
//! recently used block is evicted first. Pools offload the end of a sequence before its start, so the end is evicted
//! first here, too. When a pool reads a block back, the block is removed from this index.
//!
//! The memory of the nodes of the tree is counted, too. A node is removed as soon as no block is stored at it or below
//! it. Only the roots, one for each [`CacheNamespace`], are neither counted nor removed.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// The scope in which offloaded blocks are shared.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CacheNamespace {
    /// The model, the version of its file, and the format of its pool.
    pub model: Arc<str>,
    /// Salt of the sequences; sequences with different salts share no blocks.
    pub salt: u8,
}

/// Identifies a node of the tree; each node is a prefix that ends with a block, or, for a root, the empty prefix. Ids
/// are never reused, so a stale id finds nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct OffloadNodeId(u64);

/// Estimated memory of a node without its tokens, in bytes: the node, its table entry and its entry in the parent's
/// list of children.
const OFFLOAD_NODE_BYTES: u64 = 192;

#[derive(Debug)]
struct OffloadedBlock<C> {
    contents: C,
    bytes: u64,
    /// Time of the last use, by the index's counter.
    last_used: u64,
}

#[derive(Debug)]
struct OffloadNode<C> {
    root: OffloadNodeId,
    /// The parent node; for a root, the node itself.
    parent: OffloadNodeId,
    /// Tokens of this block alone; fewer than the block size only at the end of a finished sequence.
    tokens: Vec<u32>,
    children: Vec<OffloadNodeId>,
    block: Option<OffloadedBlock<C>>,
}

impl<C> OffloadNode<C> {
    fn bytes(&self) -> u64 {
        OFFLOAD_NODE_BYTES + 4 * self.tokens.len() as u64
    }
}

/// Offloaded blocks with contents of type `C`, limited in bytes.
#[derive(Debug)]
pub struct OffloadIndex<C> {
    block_size: usize,
    capacity: u64,
    bytes: u64,
    roots: HashMap<CacheNamespace, OffloadNodeId>,
    /// Number of tokens in the blocks stored below each root.
    tokens_by_root: HashMap<OffloadNodeId, u64>,
    nodes: HashMap<OffloadNodeId, OffloadNode<C>>,
    /// Nodes with a block, by [`OffloadedBlock::last_used`].
    lru: BTreeMap<u64, OffloadNodeId>,
    next_id: u64,
    clock: u64,
}

impl<C> OffloadIndex<C> {
    /// Creates an empty index with a limit of `capacity` bytes, for blocks of `block_size` positions.
    pub fn new(capacity: u64, block_size: usize) -> Self {
        Self {
            block_size: block_size.max(1),
            capacity,
            bytes: 0,
            roots: HashMap::new(),
            tokens_by_root: HashMap::new(),
            nodes: HashMap::new(),
            lru: BTreeMap::new(),
            next_id: 0,
            clock: 0,
        }
    }

    /// Maximum size, in bytes.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Bytes used, including those of the tree.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Number of tokens in the stored blocks of `model`.
    pub fn tokens(&self, model: &str) -> u64 {
        let own = self.roots.iter().filter(|(namespace, _)| &*namespace.model == model);
        own.filter_map(|(_, root)| self.tokens_by_root.get(root)).sum()
    }

    fn add_node(&mut self, parent: Option<OffloadNodeId>, tokens: &[u32]) -> OffloadNodeId {
        let id = OffloadNodeId(self.next_id);
        self.next_id += 1;
        let root = parent.and_then(|parent| self.nodes.get(&parent)).map_or(id, |parent| parent.root);
        let node = OffloadNode {
            root,
            parent: parent.unwrap_or(id),
            tokens: tokens.to_vec(),
            children: Vec::new(),
            block: None,
        };
        // Roots are not counted: there are few of them, and they are never removed.
        if let Some(parent) = parent.and_then(|parent| self.nodes.get_mut(&parent)) {
            parent.children.push(id);
            self.bytes += node.bytes();
        }
        self.nodes.insert(id, node);
        id
    }

    fn child(&self, parent: OffloadNodeId, tokens: &[u32]) -> Option<OffloadNodeId> {
        let matches = |id: &&OffloadNodeId| self.nodes.get(id).is_some_and(|node| node.tokens == tokens);
        self.nodes.get(&parent)?.children.iter().find(matches).copied()
    }

    /// Finds the node of the prefix `tokens`, whose length is a multiple of the block size; `None` if no block is
    /// stored at it or below it.
    pub fn lookup(&self, namespace: &CacheNamespace, tokens: &[u32]) -> Option<OffloadNodeId> {
        let root = *self.roots.get(namespace)?;
        tokens.chunks(self.block_size).try_fold(root, |id, chunk| self.child(id, chunk))
    }

    /// Marks the block at the end of `tokens` as used now. Returns false if that block is not stored.
    pub fn touch(&mut self, namespace: &CacheNamespace, tokens: &[u32]) -> bool {
        let Some(id) = self.lookup(namespace, tokens) else { return false };
        let Some(block) = self.nodes.get_mut(&id).and_then(|node| node.block.as_mut()) else { return false };
        self.clock += 1;
        self.lru.remove(&block.last_used);
        block.last_used = self.clock;
        self.lru.insert(self.clock, id);
        true
    }

    /// Stores the block at the end of `tokens`, and evicts other blocks as necessary. Returns false if the block is
    /// larger than the capacity or already stored.
    pub fn insert(&mut self, namespace: &CacheNamespace, tokens: &[u32], contents: C, bytes: u64) -> bool {
        let depth = tokens.len().div_ceil(self.block_size) as u64;
        let path = depth.saturating_mul(OFFLOAD_NODE_BYTES).saturating_add(4 * tokens.len() as u64);
        if tokens.is_empty() || bytes.saturating_add(path) > self.capacity || self.touch(namespace, tokens) {
            return false;
        }
        let root = match self.roots.get(namespace) {
            Some(root) => *root,
            None => {
                let root = self.add_node(None, &[]);
                self.roots.insert(namespace.clone(), root);
                root
            }
        };
        let mut id = root;
        for chunk in tokens.chunks(self.block_size) {
            id = match self.child(id, chunk) {
                Some(child) => child,
                None => self.add_node(Some(id), chunk),
            };
        }
        self.clock += 1;
        if let Some(node) = self.nodes.get_mut(&id) {
            node.block = Some(OffloadedBlock { contents, bytes, last_used: self.clock });
            *self.tokens_by_root.entry(root).or_default() += node.tokens.len() as u64;
        }
        self.lru.insert(self.clock, id);
        self.bytes += bytes;
        while self.bytes > self.capacity {
            let Some((_, oldest)) = self.lru.first_key_value() else { break };
            self.remove(*oldest);
        }
        true
    }

    /// Removes the block that holds `tokens` after `parent`. Returns the block's node, which is the `parent` of the
    /// next block of the sequence, and the block's contents. The returned node no longer exists if no block is stored
    /// below it.
    pub fn take(&mut self, parent: OffloadNodeId, tokens: &[u32]) -> Option<(OffloadNodeId, C)> {
        let child = self.child(parent, tokens)?;
        Some((child, self.remove(child)?))
    }

    /// Finds the block after `parent` that shares the most leading positions with `tokens`. Returns the number of
    /// shared positions and the contents; `None` if no block shares any.
    pub fn longest_match(&self, parent: OffloadNodeId, tokens: &[u32]) -> Option<(usize, &C)> {
        let shared = |child: &OffloadNodeId| {
            let node = self.nodes.get(child)?;
            let block = node.block.as_ref()?;
            Some((node.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count(), &block.contents))
        };
        let all = self.nodes.get(&parent)?.children.iter().filter_map(shared);
        all.max_by_key(|(count, _)| *count).filter(|(count, _)| *count > 0)
    }

    fn remove(&mut self, id: OffloadNodeId) -> Option<C> {
        let node = self.nodes.get_mut(&id)?;
        let block = node.block.take()?;
        if let Some(tokens) = self.tokens_by_root.get_mut(&node.root) {
            *tokens -= node.tokens.len() as u64;
        }
        self.lru.remove(&block.last_used);
        self.bytes -= block.bytes;
        self.prune(id);
        Some(block.contents)
    }

    /// Removes `id`, and then its ancestors, as long as they have neither a block nor children.
    fn prune(&mut self, mut id: OffloadNodeId) {
        while let Some(node) = self.nodes.get(&id)
            && node.block.is_none()
            && node.children.is_empty()
            && node.parent != id
        {
            let (parent, bytes) = (node.parent, node.bytes());
            self.nodes.remove(&id);
            self.bytes -= bytes;
            if let Some(parent) = self.nodes.get_mut(&parent) {
                parent.children.retain(|child| *child != id);
            }
            id = parent;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use proptest::prelude::*;

    const SIZE: usize = 2;

    fn namespace(salt: u8) -> CacheNamespace {
        CacheNamespace { model: "m".into(), salt }
    }

    #[test]
    fn blocks_are_found_from_the_start_and_taken_once() {
        let mut index = OffloadIndex::new(10_000, SIZE);
        assert!(index.insert(&namespace(0), &[1, 2, 3, 4], "second", 100));
        assert!(index.insert(&namespace(0), &[1, 2], "first", 100));
        assert!(index.insert(&namespace(0), &[1, 2, 3, 4, 5], "end", 100));
        assert!(!index.insert(&namespace(0), &[1, 2], "again", 100), "held already");
        assert_eq!((index.tokens("m"), index.tokens("n")), (5, 0));
        assert_eq!(index.lookup(&namespace(1), &[1, 2]), None, "another salt shares nothing");
        let root = index.lookup(&namespace(0), &[]).unwrap();
        assert!(index.take(root, &[1, 3]).is_none());
        let (first, contents) = index.take(root, &[1, 2]).unwrap();
        assert_eq!(contents, "first");
        assert!(index.take(root, &[1, 2]).is_none(), "taken already");
        let (second, contents) = index.take(first, &[3, 4]).unwrap();
        assert_eq!((contents, index.longest_match(second, &[5, 6])), ("second", Some((1, &"end"))));
        assert_eq!(index.longest_match(second, &[6]), None);
    }

    #[test]
    fn eviction_is_lru_and_oversized_blocks_are_refused() {
        let mut index = OffloadIndex::new(1000, SIZE);
        assert!(!index.insert(&namespace(0), &[1, 2], 0, 900), "its node is counted too");
        assert!(index.insert(&namespace(0), &[1, 2], 1, 250));
        assert!(index.insert(&namespace(0), &[3, 4], 2, 250));
        assert!(index.touch(&namespace(0), &[1, 2]));
        assert!(index.insert(&namespace(0), &[5, 6], 3, 250));
        assert!(index.lookup(&namespace(0), &[3, 4]).is_none() && index.lookup(&namespace(0), &[1, 2]).is_some());
        assert!(index.bytes() <= 1000);
    }

    #[derive(Debug, Clone)]
    enum Op {
        Insert { salt: u8, tokens: Vec<u32>, bytes: u64 },
        Touch { salt: u8, tokens: Vec<u32> },
        Take { salt: u8, tokens: Vec<u32> },
        LongestMatch { salt: u8, tokens: Vec<u32> },
    }

    fn op() -> impl Strategy<Value = Op> {
        let which = || (0u8..2, prop::collection::vec(0u32..2, 1..8));
        prop_oneof![
            5 => (which(), 0u64..600).prop_map(|((salt, tokens), bytes)| Op::Insert { salt, tokens, bytes }),
            1 => which().prop_map(|(salt, tokens)| Op::Touch { salt, tokens }),
            3 => which().prop_map(|(salt, tokens)| Op::Take { salt, tokens }),
            1 => which().prop_map(|(salt, tokens)| Op::LongestMatch { salt, tokens }),
        ]
    }

    /// Simple implementation that the index is compared with: a list, least recently used first, of (salt, all tokens,
    /// serial number as contents, bytes).
    #[derive(Default)]
    struct Reference(Vec<(u8, Vec<u32>, usize, u64)>);

    impl Reference {
        fn bytes(&self) -> u64 {
            let mut nodes = BTreeSet::new();
            for (salt, tokens, ..) in &self.0 {
                for end in (SIZE..tokens.len()).step_by(SIZE).chain([tokens.len()]) {
                    nodes.insert((*salt, tokens[..end].to_vec()));
                }
            }
            let own = |tokens: &Vec<u32>| ((tokens.len() - 1) % SIZE + 1) as u64;
            let nodes: u64 = nodes.iter().map(|(_, tokens)| OFFLOAD_NODE_BYTES + 4 * own(tokens)).sum();
            nodes + self.0.iter().map(|(.., bytes)| bytes).sum::<u64>()
        }

        fn find(&self, salt: u8, tokens: &[u32]) -> Option<usize> {
            self.0.iter().position(|(s, t, ..)| *s == salt && t == tokens)
        }
    }

    proptest! {
        /// The index stores the same blocks as a list with the same eviction rules, counts the same bytes, and never
        /// exceeds its capacity.
        #[test]
        fn index_equals_a_bounded_lru_list(capacity in 0u64..3000, ops in prop::collection::vec(op(), 1..80)) {
            let mut index = OffloadIndex::new(capacity, SIZE);
            let mut reference = Reference::default();
            for (serial, op) in ops.into_iter().enumerate() {
                match op {
                    Op::Insert { salt, tokens, bytes } => {
                        let alone = Reference(vec![(salt, tokens.clone(), serial, bytes)]);
                        let known = reference.find(salt, &tokens);
                        let fits = alone.bytes() <= capacity;
                        let inserted = index.insert(&namespace(salt), &tokens, serial, bytes);
                        prop_assert_eq!(inserted, fits && known.is_none());
                        if let (true, Some(at)) = (fits, known) {
                            let again = reference.0.remove(at);
                            reference.0.push(again);
                        } else if fits {
                            reference.0.extend(alone.0);
                            while reference.bytes() > capacity {
                                reference.0.remove(0);
                            }
                        }
                    }
                    Op::Touch { salt, tokens } => {
                        let known = reference.find(salt, &tokens);
                        prop_assert_eq!(index.touch(&namespace(salt), &tokens), known.is_some());
                        if let Some(at) = known {
                            let again = reference.0.remove(at);
                            reference.0.push(again);
                        }
                    }
                    Op::Take { salt, tokens } => {
                        let (before, block) = tokens.split_at((tokens.len() - 1) / SIZE * SIZE);
                        let taken = index.lookup(&namespace(salt), before).and_then(|node| index.take(node, block));
                        let known = reference.find(salt, &tokens).map(|at| reference.0.remove(at).2);
                        prop_assert_eq!(taken.map(|(_, contents)| contents), known);
                    }
                    Op::LongestMatch { salt, tokens } => {
                        let (before, block) = tokens.split_at((tokens.len() - 1) / SIZE * SIZE);
                        let node = index.lookup(&namespace(salt), before);
                        let found = node.and_then(|node| index.longest_match(node, block));
                        let shared = |t: &[u32]| t.iter().zip(block).take_while(|(a, b)| a == b).count();
                        let lengths = before.len() + 1..=before.len() + SIZE;
                        let after = reference
                            .0
                            .iter()
                            .filter(|(s, t, ..)| *s == salt && t.starts_with(before) && lengths.contains(&t.len()));
                        let best = after.map(|(_, t, ..)| shared(&t[before.len()..])).max().unwrap_or(0);
                        prop_assert_eq!(found.map_or(0, |(count, _)| count), best);
                    }
                }
                prop_assert_eq!(index.bytes(), reference.bytes());
                prop_assert!(index.bytes() <= capacity);
                prop_assert_eq!(index.lru.len(), reference.0.len());
                let own = |tokens: &[u32]| ((tokens.len() - 1) % SIZE + 1) as u64;
                prop_assert_eq!(index.tokens("m"), reference.0.iter().map(|(_, t, ..)| own(t)).sum::<u64>());
                prop_assert_eq!(index.tokens("n"), 0);
                for (salt, tokens, contents, _) in &reference.0 {
                    let node = index.lookup(&namespace(*salt), tokens).unwrap();
                    prop_assert_eq!(index.nodes[&node].block.as_ref().map(|block| block.contents), Some(*contents));
                }
            }
        }
    }
}
