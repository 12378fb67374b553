//! Which block of a KV pool holds what: references, sharing of common beginnings, eviction.
//!
//! A pool is cut into blocks of a fixed number of positions; a sequence is a list of them. Blocks whose tokens are known
//! form a tree by what precedes them, so a new sequence takes references to the longest beginning anybody computed
//! before it, whether that sequence still runs or not. A block nobody references is kept until its room is wanted, the
//! least recently used first, and a beginning is never evicted before what continues it: released together, the end of
//! a sequence counts as older than its start.
//!
//! Nothing here touches keys or values: the holder of the memory copies when it is told to.

use std::collections::{BTreeMap, HashMap};

/// Names one block of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(u32);

impl BlockId {
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A known beginning: everything up to and with one whole block. Never used twice, so a stale one finds nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Prefix(u64);

impl Prefix {
    /// The empty beginning. Sequences with another `salt` share nothing.
    pub fn empty(salt: u8) -> Self {
        Self(u64::from(salt))
    }
}

/// Serials from here on are blocks; below are salts.
const FIRST_SERIAL: u64 = 256;

/// What was found of a sequence. All blocks in it are referenced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Whole blocks from the start.
    pub blocks: Vec<BlockId>,
    /// What they amount to.
    pub prefix: Prefix,
    /// A block whose first positions also match: copy them and release it.
    pub tail: Option<(BlockId, usize)>,
}

/// Everything that the content of a block depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Beginning {
    pub salt: u8,
    /// From the start to the end of the block, which is a whole one unless a finished sequence ended in it.
    pub tokens: Vec<u32>,
}

#[derive(Debug, Clone)]
struct Kept {
    parent: Prefix,
    prefix: Prefix,
    /// Fewer than a block only at the end of a finished sequence.
    tokens: Vec<u32>,
}

#[derive(Debug, Clone, Default)]
struct Slot {
    references: u32,
    kept: Option<Kept>,
    /// When it was last released, while nobody references it.
    used: u64,
}

#[derive(Debug, Clone)]
pub struct BlockTable {
    positions: usize,
    slots: Vec<Slot>,
    free: Vec<BlockId>,
    /// Kept without a reference, by when they were last used.
    idle: BTreeMap<u64, BlockId>,
    children: HashMap<Prefix, Vec<BlockId>>,
    /// The block at the end of each known beginning.
    ends: HashMap<Prefix, BlockId>,
    serial: u64,
    clock: u64,
}

impl BlockTable {
    /// A pool of `blocks` blocks of `positions` positions each.
    pub fn new(blocks: usize, positions: usize) -> Self {
        let count = u32::try_from(blocks).unwrap_or(u32::MAX);
        Self {
            positions: positions.max(1),
            slots: vec![Slot::default(); count as usize],
            // The lowest first.
            free: (0..count).rev().map(BlockId).collect(),
            idle: BTreeMap::new(),
            children: HashMap::new(),
            ends: HashMap::new(),
            serial: FIRST_SERIAL,
            clock: 0,
        }
    }

    /// Positions of one block.
    pub fn positions(&self) -> usize {
        self.positions
    }

    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// Blocks that [`Self::allocate`] could give now.
    pub fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// Blocks kept for their contents alone.
    pub fn idle(&self) -> usize {
        self.idle.len()
    }

    /// Blocks that hold something, referenced or not.
    pub fn filled(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// The block whose content the next [`Self::allocate`] gives up.
    pub fn next_evicted(&self) -> Option<BlockId> {
        if self.free.is_empty() { self.idle.first_key_value().map(|(_, block)| *block) } else { None }
    }

    /// Blocks kept for their contents alone, the next to be evicted first.
    pub fn kept(&self) -> impl Iterator<Item = BlockId> {
        self.idle.values().copied()
    }

    /// What the content of `block` depends on; `None` if it is not known, or something before it no more.
    pub fn beginning(&self, block: BlockId) -> Option<Beginning> {
        let mut kept = self.slots[block.index()].kept.as_ref()?;
        let mut chunks = vec![&kept.tokens];
        while kept.parent.0 >= FIRST_SERIAL {
            kept = self.slots[self.ends.get(&kept.parent)?.index()].kept.as_ref()?;
            chunks.push(&kept.tokens);
        }
        let salt = u8::try_from(kept.parent.0).ok()?;
        Some(Beginning { salt, tokens: chunks.into_iter().rev().flatten().copied().collect() })
    }

    /// The longest known beginning of `tokens`, of which at most the first `most` are looked at.
    pub fn find(&mut self, salt: u8, tokens: &[u32], most: usize) -> Found {
        let mut prefix = Prefix::empty(salt);
        let mut blocks = Vec::new();
        let mut rest = &tokens[..tokens.len().min(most)];
        while rest.len() >= self.positions {
            let (chunk, after) = rest.split_at(self.positions);
            let Some(block) = self.child(prefix, chunk) else { break };
            self.refer(block);
            prefix = self.slots[block.index()].kept.as_ref().map_or(prefix, |k| k.prefix);
            blocks.push(block);
            rest = after;
        }
        let shared = |block: &BlockId| {
            let kept = self.slots[block.index()].kept.as_ref()?;
            Some((kept.tokens.iter().zip(rest).take_while(|(a, b)| a == b).count(), *block))
        };
        let best = self.children.get(&prefix).and_then(|all| all.iter().filter_map(shared).max());
        let tail = best.filter(|(count, _)| *count > 0).map(|(count, block)| (block, count));
        if let Some((block, _)) = tail {
            self.refer(block);
        }
        Found { blocks, prefix, tail }
    }

    fn child(&self, parent: Prefix, tokens: &[u32]) -> Option<BlockId> {
        let is = |block: &&BlockId| self.slots[block.index()].kept.as_ref().is_some_and(|k| k.tokens == tokens);
        self.children.get(&parent)?.iter().find(is).copied()
    }

    fn refer(&mut self, block: BlockId) {
        let slot = &mut self.slots[block.index()];
        if slot.references == 0 {
            self.idle.remove(&slot.used);
        }
        slot.references += 1;
    }

    /// A block with one reference, whose contents mean nothing yet. `None`: all are referenced.
    pub fn allocate(&mut self) -> Option<BlockId> {
        let block = match self.free.pop() {
            Some(block) => block,
            None => {
                let (_, block) = self.idle.pop_first()?;
                self.forget(block);
                block
            }
        };
        self.slots[block.index()].references = 1;
        Some(block)
    }

    fn forget(&mut self, block: BlockId) {
        let Some(kept) = self.slots[block.index()].kept.take() else { return };
        self.ends.remove(&kept.prefix);
        if let Some(siblings) = self.children.get_mut(&kept.parent) {
            siblings.retain(|b| *b != block);
            if siblings.is_empty() {
                self.children.remove(&kept.parent);
            }
        }
    }

    /// Says that the referenced `block` holds `tokens` after `parent`. Returns the beginning they make, and the block to
    /// use from now on: another one where somebody already keeps the same, and the reference moves to it.
    pub fn keep(&mut self, block: BlockId, parent: Prefix, tokens: &[u32]) -> (Prefix, BlockId) {
        if let Some(same) = self.child(parent, tokens)
            && let Some(prefix) = self.slots[same.index()].kept.as_ref().map(|k| k.prefix)
        {
            if same != block {
                self.refer(same);
                self.release(&[block]);
            }
            return (prefix, same);
        }
        self.forget(block);
        let prefix = Prefix(self.serial);
        self.serial += 1;
        self.slots[block.index()].kept = Some(Kept { parent, prefix, tokens: tokens.to_vec() });
        self.children.entry(parent).or_default().push(block);
        self.ends.insert(prefix, block);
        (prefix, block)
    }

    /// Gives one reference to each back; `blocks` are in the order of their positions.
    pub fn release(&mut self, blocks: &[BlockId]) {
        for block in blocks.iter().rev() {
            let slot = &mut self.slots[block.index()];
            slot.references = slot.references.saturating_sub(1);
            if slot.references > 0 {
                continue;
            }
            if slot.kept.is_some() {
                self.clock += 1;
                slot.used = self.clock;
                self.idle.insert(self.clock, *block);
            } else {
                self.free.push(*block);
            }
        }
    }

    /// Gives one reference to each back and forgets what only this holder vouched for.
    pub fn discard(&mut self, blocks: &[BlockId]) {
        for block in blocks {
            if self.slots[block.index()].references == 1 {
                self.forget(*block);
            }
        }
        self.release(blocks);
    }

    /// Forgets the contents of every block nobody references.
    pub fn clear(&mut self) {
        while let Some((_, block)) = self.idle.pop_first() {
            self.forget(block);
            self.free.push(block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Computes `tokens` as an engine would; returns its blocks and what was found of it.
    fn compute(table: &mut BlockTable, tokens: &[u32]) -> (Vec<BlockId>, usize) {
        let found = table.find(0, tokens, tokens.len());
        let known = found.blocks.len() * table.positions() + found.tail.map_or(0, |(_, count)| count);
        let (mut blocks, mut prefix) = (found.blocks, found.prefix);
        for chunk in tokens.chunks(table.positions()).skip(blocks.len()) {
            let block = table.allocate().unwrap();
            let (next, block) = table.keep(block, prefix, chunk);
            prefix = next;
            blocks.push(block);
        }
        if let Some((tail, _)) = found.tail {
            table.release(&[tail]);
        }
        (blocks, known)
    }

    #[test]
    fn a_beginning_is_shared_while_it_runs_and_after() {
        let mut table = BlockTable::new(8, 4);
        let (first, _) = compute(&mut table, &[1, 2, 3, 4, 5, 6]);
        let (second, known) = compute(&mut table, &[1, 2, 3, 4, 5, 9, 9, 9, 9]);
        assert_eq!((known, second[0]), (5, first[0]), "one whole block is the same, one position is copied");
        assert_eq!(table.available(), 8 - 4);
        table.release(&first);
        table.release(&second);
        assert_eq!((table.available(), table.idle()), (8, 4));
        let (_, known) = compute(&mut table, &[1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(known, 6);
        let other = table.find(1, &[1, 2, 3, 4], 4);
        assert_eq!((other.blocks.len(), other.tail), (0, None), "another salt shares nothing");
    }

    #[test]
    fn the_least_recently_used_goes_first_and_ends_before_beginnings() {
        let mut table = BlockTable::new(4, 2);
        let (old, _) = compute(&mut table, &[1, 1, 2, 2]);
        table.release(&old);
        let (new, _) = compute(&mut table, &[3, 3, 4, 4]);
        table.release(&new);
        let said = table.beginning(old[1]);
        assert_eq!(said, Some(Beginning { salt: 0, tokens: vec![1, 1, 2, 2] }));
        assert_eq!((table.next_evicted(), table.filled()), (Some(old[1]), 4));
        assert_eq!(table.kept().collect::<Vec<_>>(), [old[1], old[0], new[1], new[0]]);
        let taken = table.allocate().unwrap();
        assert_eq!((taken, table.beginning(taken)), (old[1], None));
        assert_eq!(table.find(0, &[1, 1, 2, 2], 4).blocks, old[..1]);
        assert_eq!(table.find(0, &[3, 3, 4, 4], 4).blocks, new);
    }

    #[test]
    fn two_that_compute_the_same_at_once_end_with_one_block() {
        let mut table = BlockTable::new(4, 2);
        let (a, b) = (table.allocate().unwrap(), table.allocate().unwrap());
        let root = Prefix::empty(0);
        let (prefix, kept) = table.keep(a, root, &[1, 2]);
        assert_eq!(kept, a);
        assert_eq!(table.keep(b, root, &[1, 2]), (prefix, a));
        assert_eq!(table.available(), 3);
        table.release(&[a]);
        assert_eq!((table.available(), table.idle()), (3, 0), "the other still holds it");
    }

    #[test]
    fn what_is_discarded_is_found_no_more_but_where_others_share_it() {
        let mut table = BlockTable::new(4, 2);
        let (first, _) = compute(&mut table, &[1, 1, 2, 2]);
        let (second, _) = compute(&mut table, &[1, 1, 3, 3]);
        table.discard(&second);
        assert_eq!(table.find(0, &[1, 1, 3, 3], 4).blocks, first[..1]);
        table.release(&first[..1]);
        table.discard(&first);
        let found = table.find(0, &[1, 1, 2, 2], 4);
        assert_eq!((found.blocks.len(), found.tail, table.available()), (0, None, 4));
    }

    #[derive(Debug, Clone)]
    enum Op {
        Begin { salt: u8, tokens: Vec<u32> },
        Grow { which: usize, token: u32 },
        Finish { which: usize },
        Clear,
    }

    fn op() -> impl Strategy<Value = Op> {
        let token = 0u32..3;
        prop_oneof![
            4 => (0u8..2, prop::collection::vec(token.clone(), 1..14)).prop_map(|(salt, tokens)| Op::Begin { salt, tokens }),
            6 => (any::<usize>(), token).prop_map(|(which, token)| Op::Grow { which, token }),
            3 => any::<usize>().prop_map(|which| Op::Finish { which }),
            1 => Just(Op::Clear),
        ]
    }

    /// A sequence as an engine holds it; `contents` says what each block of the pool was filled with.
    struct Running {
        salt: u8,
        tokens: Vec<u32>,
        blocks: Vec<BlockId>,
        whole: usize,
        prefix: Prefix,
    }

    type Contents = Vec<Vec<u32>>;

    impl Running {
        /// Fills positions from `from` on; false when the pool is full.
        fn fill(&mut self, table: &mut BlockTable, contents: &mut Contents, from: usize) -> bool {
            let size = table.positions();
            for at in from..self.tokens.len() {
                if at / size == self.blocks.len() {
                    let Some(block) = table.allocate() else {
                        self.tokens.truncate(at);
                        return false;
                    };
                    contents[block.index()].clear();
                    self.blocks.push(block);
                }
                let block = self.blocks[at / size];
                contents[block.index()].truncate(at % size);
                contents[block.index()].push(self.tokens[at]);
                if (at + 1) % size == 0 {
                    let chunk = &self.tokens[at + 1 - size..=at];
                    let (prefix, block) = table.keep(block, self.prefix, chunk);
                    (self.prefix, self.blocks[at / size]) = (prefix, block);
                    self.whole += 1;
                }
            }
            true
        }

        fn check(&self, size: usize, contents: &Contents) {
            for (at, chunk) in self.tokens.chunks(size).enumerate() {
                assert_eq!(&contents[self.blocks[at].index()][..chunk.len()], chunk, "somebody wrote into it");
            }
        }
    }

    proptest! {
        /// Whatever happens, a sequence's blocks hold its own tokens, nothing is lost, and a full pool says so.
        #[test]
        fn blocks_hold_what_their_sequences_think(ops in prop::collection::vec(op(), 1..80)) {
            const SIZE: usize = 4;
            let mut table = BlockTable::new(7, SIZE);
            let mut contents: Contents = vec![Vec::new(); 7];
            let mut running: Vec<Running> = Vec::new();
            for op in ops {
                match op {
                    Op::Begin { salt, tokens } => {
                        let most = tokens.len() - 1;
                        let found = table.find(salt, &tokens, most);
                        let whole = found.blocks.len();
                        let mut known = whole * SIZE;
                        prop_assert!(known <= most);
                        let mut new = Running { salt, tokens, blocks: found.blocks, whole, prefix: found.prefix };
                        if let Some((tail, count)) = found.tail {
                            if let Some(block) = table.allocate() {
                                contents[block.index()] = contents[tail.index()][..count].to_vec();
                                new.blocks.push(block);
                                known += count;
                            }
                            table.release(&[tail]);
                        }
                        new.fill(&mut table, &mut contents, known);
                        running.push(new);
                    }
                    Op::Grow { which, token } if !running.is_empty() => {
                        let at = which % running.len();
                        let from = running[at].tokens.len();
                        running[at].tokens.push(token);
                        running[at].fill(&mut table, &mut contents, from);
                    }
                    Op::Finish { which } if !running.is_empty() => {
                        let mut done = running.swap_remove(which % running.len());
                        let rest = &done.tokens[done.whole * SIZE..];
                        if let (false, Some(last)) = (rest.is_empty(), done.blocks.get(done.whole).copied()) {
                            done.blocks[done.whole] = table.keep(last, done.prefix, rest).1;
                        }
                        table.release(&done.blocks);
                    }
                    Op::Clear => table.clear(),
                    Op::Grow { .. } | Op::Finish { .. } => {}
                }
                for block in table.kept().collect::<Vec<_>>() {
                    // Whoever keeps its content elsewhere is told the truth about it.
                    let beginning = table.beginning(block).unwrap();
                    let own = beginning.tokens.len().next_multiple_of(SIZE) - SIZE;
                    prop_assert!(contents[block.index()].starts_with(&beginning.tokens[own..]));
                    let found = table.find(beginning.salt, &beginning.tokens, beginning.tokens.len());
                    let last = found.blocks.last().copied().filter(|_| found.blocks.len() * SIZE > own);
                    prop_assert!(last.or(found.tail.map(|(tail, _)| tail)).is_some());
                    table.release(&found.tail.map(|(tail, _)| tail).into_iter().collect::<Vec<_>>());
                    table.release(&found.blocks);
                }
                for sequence in &running {
                    sequence.check(SIZE, &contents);
                    // What it finds of itself is what it holds.
                    let found = table.find(sequence.salt, &sequence.tokens, sequence.tokens.len());
                    for (at, block) in found.blocks.iter().enumerate() {
                        prop_assert_eq!(&contents[block.index()], &sequence.tokens[at * SIZE..][..SIZE]);
                    }
                    if let Some((tail, count)) = found.tail {
                        let from = found.blocks.len() * SIZE;
                        prop_assert_eq!(&contents[tail.index()][..count], &sequence.tokens[from..from + count]);
                        table.release(&[tail]);
                    }
                    table.release(&found.blocks);
                }
                let mut held: Vec<BlockId> = running.iter().flat_map(|s| s.blocks.iter().copied()).collect();
                held.sort_unstable();
                held.dedup();
                prop_assert_eq!(table.available() + held.len(), 7, "every block is held or available");
            }
        }
    }
}
