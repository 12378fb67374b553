//! Property test of the KV pool and the host KV cache together: several models' pools over one cache, driven at random
//! and checked after every step against the set of prefixes that were ever computed.

use std::collections::HashSet;
use std::sync::Arc;

use cfq_memory::BlockId;
use proptest::prelude::*;

use crate::kv::pool::BATCH_INVARIANT_SALT;
use crate::kv::{HostKvCache, KV_BLOCK_TOKENS, KvOffload, KvOffloadFormat, KvPool, KvShape, SequenceKv};

const SHAPE: KvShape = KvShape { layers: 1, heads: 2, head_dim: 2 };
const BLOCKS: usize = 7;
/// Number of tokens in a phrase. Prompts are made of phrases, so that they share prefixes and diverge inside blocks.
const PHRASE_TOKENS: usize = 20;

#[derive(Debug, Clone)]
enum Op {
    Begin {
        model: usize,
        long_context: bool,
        batch_invariant: bool,
        phrases: Vec<u32>,
    },
    Grow {
        which: usize,
        phrase: u32,
    },
    Finish {
        which: usize,
    },
    /// Ends a sequence without caching its blocks, as an engine does if the computed values may be wrong.
    Discard {
        which: usize,
    },
    Unload {
        model: usize,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let begin = (0usize..2, prop::bool::weighted(0.1), prop::bool::weighted(0.3), prop::collection::vec(0u32..2, 1..8));
    prop_oneof![
        5 => begin.prop_map(|(model, long_context, batch_invariant, phrases)| {
            Op::Begin { model, long_context, batch_invariant, phrases }
        }),
        3 => (any::<usize>(), 0u32..2).prop_map(|(which, phrase)| Op::Grow { which, phrase }),
        5 => any::<usize>().prop_map(|which| Op::Finish { which }),
        1 => any::<usize>().prop_map(|which| Op::Discard { which }),
        1 => (0usize..2).prop_map(|model| Op::Unload { model }),
    ]
}

fn phrase(which: u32) -> impl Iterator<Item = u32> {
    (0..PHRASE_TOKENS as u32).map(move |i| which * 100 + i)
}

/// A number that stands in for keys and values: it depends on everything that they depend on, and is exact in F16.
fn value(model: usize, salt: u8, prefix: &[u32]) -> f32 {
    let mixed = |hash: u64, word: u64| (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23);
    let hash = prefix.iter().fold(mixed(model as u64, u64::from(salt)), |hash, t| mixed(hash, u64::from(*t)));
    (hash % 2048) as f32
}

struct Running {
    model: usize,
    salt: u8,
    tokens: Vec<u32>,
    kv: SequenceKv,
}

impl Running {
    /// Computes the tokens that are not cached. Returns false if the pool is full.
    fn compute(&mut self, pool: &mut KvPool) -> bool {
        let new = self.tokens.len() - self.kv.len();
        if !pool.grow(&mut self.kv, new) {
            return false;
        }
        let own = |at: usize| value(self.model, self.salt, &self.tokens[..=at]);
        let keys: Vec<f32> = (self.kv.len()..self.tokens.len()).flat_map(|at| [own(at), 0.0, own(at), 1.0]).collect();
        let values: Vec<f32> = keys.iter().map(|key| -key).collect();
        assert!(pool.write(&self.kv, 0, &keys, &values));
        pool.advance(&mut self.kv, &self.tokens, new);
        true
    }

    fn check(&self, pool: &KvPool) {
        let view = pool.view(&self.kv, 0);
        for at in 0..self.kv.len() {
            let (block, from) = (at / KV_BLOCK_TOKENS, at % KV_BLOCK_TOKENS * SHAPE.stride());
            let own = value(self.model, self.salt, &self.tokens[..=at]);
            assert_eq!(view.keys(1, block)[from..from + 2], [own, 1.0], "position {at}");
            assert_eq!(view.values(0, block)[from..from + 2], [-own, 0.0], "position {at}");
        }
    }
}

struct World {
    cache: Arc<HostKvCache>,
    pools: Vec<KvPool>,
    running: Vec<Running>,
    /// Prefixes of whole blocks that were computed and not discarded, as (model, salt, tokens).
    computed: HashSet<(usize, u8, Vec<u32>)>,
}

impl World {
    fn pool(cache: &Arc<HostKvCache>, model: usize) -> KvPool {
        let offload = KvOffload::new(cache.clone(), &model.to_string(), model == 0);
        KvPool::new(SHAPE, BLOCKS).with_offload(Some(offload))
    }

    fn new(capacity: u64) -> Self {
        let cache = HostKvCache::new(capacity, KvOffloadFormat::F16).unwrap();
        let pools = (0..2).map(|model| Self::pool(&cache, model)).collect();
        Self { cache, pools, running: Vec::new(), computed: HashSet::new() }
    }

    /// Begins a sequence. Returns the number of its cached tokens, and the minimum number that must be cached if
    /// nothing was evicted from the host KV cache.
    fn begin(&mut self, model: usize, long_context: bool, batch_invariant: bool, tokens: Vec<u32>) -> (usize, usize) {
        let salt = u8::from(long_context) | (u8::from(batch_invariant) * BATCH_INVARIANT_SALT);
        let whole = (0..tokens.len() / KV_BLOCK_TOKENS + 1).rev().map(|blocks| blocks * KV_BLOCK_TOKENS);
        let expected = whole.filter(|len| *len < tokens.len());
        let expected = expected.into_iter().find(|len| self.computed.contains(&(model, salt, tokens[..*len].to_vec())));
        let available = self.pools[model].available() * KV_BLOCK_TOKENS;
        let kv = self.pools[model].begin(&tokens, long_context, batch_invariant);
        let cached = kv.len();
        assert!(cached < tokens.len());
        let mut new = Running { model, salt, tokens, kv };
        new.check(&self.pools[model]);
        if new.compute(&mut self.pools[model]) {
            self.record(&new);
            self.running.push(new);
        } else {
            // The pool is full, so the sequence ends as if it were preempted.
            new.tokens.truncate(new.kv.len());
            self.pools[model].end(new.kv, &new.tokens);
        }
        (cached, expected.unwrap_or(0).min(available))
    }

    fn record(&mut self, running: &Running) {
        for blocks in 1..=running.tokens.len() / KV_BLOCK_TOKENS {
            self.computed.insert((running.model, running.salt, running.tokens[..blocks * KV_BLOCK_TOKENS].to_vec()));
        }
    }

    fn finish(&mut self, at: usize) {
        let Running { model, tokens, kv, .. } = self.running.swap_remove(at);
        self.pools[model].end(kv, &tokens);
    }

    fn check(&self, capacity: u64) {
        self.running.iter().for_each(|running| running.check(&self.pools[running.model]));
        assert!(self.cache.bytes() <= capacity);
        for model in 0..2 {
            let own = self.running.iter().filter(|r| r.model == model);
            let referenced: HashSet<BlockId> = own.flat_map(|r| r.kv.block_table().iter().copied()).collect();
            let available = self.pools[model].available();
            assert_eq!(available + referenced.len(), BLOCKS, "every block is referenced or available");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Under any order of eviction, offload, reload, discard and unload, a sequence finds its own keys and values or
    /// none, no block is lost while the host KV cache has space for it, and no tier exceeds its capacity.
    #[test]
    fn sequences_find_only_their_own_keys_and_values(
        large in any::<bool>(),
        small in 1u64..12_000,
        ops in prop::collection::vec(op(), 1..60),
    ) {
        let capacity = if large { 1 << 26 } else { small };
        let mut world = World::new(capacity);
        for op in ops {
            match op {
                Op::Begin { model, long_context, batch_invariant, phrases } => {
                    let tokens: Vec<u32> = phrases.into_iter().flat_map(phrase).collect();
                    let (cached, expected) = world.begin(model, long_context, batch_invariant, tokens);
                    if large {
                        prop_assert!(cached >= expected, "{cached} of {expected} are cached");
                    }
                }
                Op::Grow { which, phrase: next } if !world.running.is_empty() => {
                    let at = which % world.running.len();
                    let running = &mut world.running[at];
                    running.tokens.extend(phrase(next));
                    if running.compute(&mut world.pools[running.model]) {
                        let running = world.running.swap_remove(at);
                        world.record(&running);
                        world.running.push(running);
                    } else {
                        running.tokens.truncate(running.kv.len());
                        world.finish(at);
                    }
                }
                Op::Finish { which } if !world.running.is_empty() => world.finish(which % world.running.len()),
                // Nothing is discarded with the large cache, for which the test asserts that nothing is lost.
                Op::Discard { which } if !world.running.is_empty() && !large => {
                    let Running { model, kv, .. } = world.running.swap_remove(which % world.running.len());
                    world.pools[model].discard(kv);
                }
                Op::Unload { model } => {
                    while let Some(at) = world.running.iter().position(|r| r.model == model) {
                        world.finish(at);
                    }
                    world.pools[model].offload_all();
                    world.pools[model] = World::pool(&world.cache, model);
                }
                Op::Grow { .. } | Op::Finish { .. } | Op::Discard { .. } => {}
            }
            world.check(capacity);
        }
    }
}
