//! Tests of single scenarios, and a property test that simulates the contents that the owner of the memory would write.

use proptest::prelude::*;

use super::*;

/// Allocates and caches the blocks of a sequence as an engine does. Returns the blocks, and the number of positions
/// that were cached before.
fn compute(table: &mut BlockTable, tokens: &[u32]) -> (Vec<BlockId>, usize) {
    let found = table.find_prefix(0, tokens, tokens.len());
    let cached = found.blocks.len() * table.block_size() + found.partial.map_or(0, |(_, count)| count);
    let (mut blocks, mut prefix) = (found.blocks, found.prefix);
    for chunk in tokens.chunks(table.block_size()).skip(blocks.len()) {
        let block = table.allocate().unwrap();
        let (next, block) = table.cache_block(block, prefix, chunk);
        prefix = next;
        blocks.push(block);
    }
    if let Some((partial, _)) = found.partial {
        table.release(&[partial]);
    }
    (blocks, cached)
}

#[test]
fn prefix_is_shared_during_and_after_its_sequence() {
    let mut table = BlockTable::new(8, 4);
    let (first, _) = compute(&mut table, &[1, 2, 3, 4, 5, 6]);
    let (second, cached) = compute(&mut table, &[1, 2, 3, 4, 5, 9, 9, 9, 9]);
    assert_eq!((cached, second[0]), (5, first[0]), "one whole block is shared, one position is copied");
    assert_eq!(table.available(), 8 - 4);
    table.release(&first);
    table.release(&second);
    assert_eq!((table.available(), table.evictable().count()), (8, 4));
    let (_, cached) = compute(&mut table, &[1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(cached, 6);
    let other = table.find_prefix(1, &[1, 2, 3, 4], 4);
    assert_eq!((other.blocks.len(), other.partial), (0, None), "another salt shares nothing");
}

#[test]
fn eviction_is_lru_and_takes_the_end_of_a_sequence_first() {
    let mut table = BlockTable::new(4, 2);
    let (old, _) = compute(&mut table, &[1, 1, 2, 2]);
    table.release(&old);
    let (new, _) = compute(&mut table, &[3, 3, 4, 4]);
    table.release(&new);
    let key = table.block_key(old[1]);
    assert_eq!(key, Some(BlockKey { salt: 0, tokens: vec![1, 1, 2, 2] }));
    assert_eq!((table.next_eviction(), table.occupied()), (Some(old[1]), 4));
    assert_eq!(table.evictable().collect::<Vec<_>>(), [old[1], old[0], new[1], new[0]]);
    let evicted = table.allocate().unwrap();
    assert_eq!((evicted, table.block_key(evicted)), (old[1], None));
    assert_eq!(table.find_prefix(0, &[1, 1, 2, 2], 4).blocks, old[..1]);
    assert_eq!(table.find_prefix(0, &[3, 3, 4, 4], 4).blocks, new);
}

#[test]
fn equal_blocks_computed_concurrently_become_one() {
    let mut table = BlockTable::new(4, 2);
    let (a, b) = (table.allocate().unwrap(), table.allocate().unwrap());
    let root = PrefixId::empty(0);
    let (prefix, cached) = table.cache_block(a, root, &[1, 2]);
    assert_eq!(cached, a);
    assert_eq!(table.cache_block(b, root, &[1, 2]), (prefix, a));
    assert_eq!(table.available(), 3);
    table.release(&[a]);
    assert_eq!((table.available(), table.evictable().count()), (3, 0), "the other reference remains");
}

#[test]
fn discarded_blocks_are_not_found_unless_shared() {
    let mut table = BlockTable::new(4, 2);
    let (first, _) = compute(&mut table, &[1, 1, 2, 2]);
    let (second, _) = compute(&mut table, &[1, 1, 3, 3]);
    table.discard(&second);
    assert_eq!(table.find_prefix(0, &[1, 1, 3, 3], 4).blocks, first[..1]);
    table.release(&first[..1]);
    table.discard(&first);
    let found = table.find_prefix(0, &[1, 1, 2, 2], 4);
    assert_eq!((found.blocks.len(), found.partial, table.available()), (0, None, 4));
}

#[derive(Debug, Clone)]
enum Op {
    Start { salt: u8, tokens: Vec<u32> },
    Grow { which: usize, token: u32 },
    Finish { which: usize },
    Clear,
}

fn op() -> impl Strategy<Value = Op> {
    let token = 0u32..3;
    let start = (0u8..2, prop::collection::vec(token.clone(), 1..14));
    prop_oneof![
        4 => start.prop_map(|(salt, tokens)| Op::Start { salt, tokens }),
        6 => (any::<usize>(), token).prop_map(|(which, token)| Op::Grow { which, token }),
        3 => any::<usize>().prop_map(|which| Op::Finish { which }),
        1 => Just(Op::Clear),
    ]
}

/// A sequence as an engine holds it.
struct Running {
    salt: u8,
    tokens: Vec<u32>,
    blocks: Vec<BlockId>,
    whole: usize,
    prefix: PrefixId,
}

/// The tokens that each block of the pool was filled with.
type Contents = Vec<Vec<u32>>;

impl Running {
    /// Fills the positions from `from` to the end of the sequence. Returns false if the pool is full.
    fn fill(&mut self, table: &mut BlockTable, contents: &mut Contents, from: usize) -> bool {
        let size = table.block_size();
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
                let (prefix, block) = table.cache_block(block, self.prefix, chunk);
                (self.prefix, self.blocks[at / size]) = (prefix, block);
                self.whole += 1;
            }
        }
        true
    }

    fn check(&self, size: usize, contents: &Contents) {
        for (at, chunk) in self.tokens.chunks(size).enumerate() {
            assert_eq!(&contents[self.blocks[at].index()][..chunk.len()], chunk, "another sequence overwrote a block");
        }
    }
}

proptest! {
    /// After any operations a sequence's blocks hold its own tokens, no block is lost, and a full pool is reported.
    #[test]
    fn blocks_hold_the_tokens_of_their_sequences(ops in prop::collection::vec(op(), 1..80)) {
        const SIZE: usize = 4;
        let mut table = BlockTable::new(7, SIZE);
        let mut contents: Contents = vec![Vec::new(); 7];
        let mut running: Vec<Running> = Vec::new();
        for op in ops {
            match op {
                Op::Start { salt, tokens } => {
                    let max_tokens = tokens.len() - 1;
                    let found = table.find_prefix(salt, &tokens, max_tokens);
                    let whole = found.blocks.len();
                    let mut cached = whole * SIZE;
                    prop_assert!(cached <= max_tokens);
                    let mut new = Running { salt, tokens, blocks: found.blocks, whole, prefix: found.prefix };
                    if let Some((partial, count)) = found.partial {
                        if let Some(block) = table.allocate() {
                            contents[block.index()] = contents[partial.index()][..count].to_vec();
                            new.blocks.push(block);
                            cached += count;
                        }
                        table.release(&[partial]);
                    }
                    new.fill(&mut table, &mut contents, cached);
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
                        done.blocks[done.whole] = table.cache_block(last, done.prefix, rest).1;
                    }
                    table.release(&done.blocks);
                }
                Op::Clear => table.evict_all(),
                Op::Grow { .. } | Op::Finish { .. } => {}
            }
            for block in table.evictable().collect::<Vec<_>>() {
                // KV offload stores the contents under this key.
                let key = table.block_key(block).unwrap();
                let own = key.tokens.len().next_multiple_of(SIZE) - SIZE;
                prop_assert!(contents[block.index()].starts_with(&key.tokens[own..]));
                let found = table.find_prefix(key.salt, &key.tokens, key.tokens.len());
                let last = found.blocks.last().copied().filter(|_| found.blocks.len() * SIZE > own);
                prop_assert!(last.or(found.partial.map(|(partial, _)| partial)).is_some());
                table.release(&found.partial.map(|(partial, _)| partial).into_iter().collect::<Vec<_>>());
                table.release(&found.blocks);
            }
            for sequence in &running {
                sequence.check(SIZE, &contents);
                // The prefix found for a running sequence has its tokens.
                let found = table.find_prefix(sequence.salt, &sequence.tokens, sequence.tokens.len());
                for (at, block) in found.blocks.iter().enumerate() {
                    prop_assert_eq!(&contents[block.index()], &sequence.tokens[at * SIZE..][..SIZE]);
                }
                if let Some((partial, count)) = found.partial {
                    let from = found.blocks.len() * SIZE;
                    prop_assert_eq!(&contents[partial.index()][..count], &sequence.tokens[from..from + count]);
                    table.release(&[partial]);
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
