//! Both tiers against the simplest account of what was ever computed: several models' pools over one arena, driven at random,
//! looked at after every step.

use std::collections::HashSet;

use proptest::prelude::*;

use super::*;

const SHAPE: KvShape = KvShape { layers: 1, heads: 2, head_dim: 2 };
const BLOCKS: usize = 7;
/// Tokens that come together, so that beginnings are shared and part in the middle of blocks.
const PHRASE: usize = 20;

#[derive(Debug, Clone)]
enum Op {
    Begin {
        model: usize,
        long: bool,
        exact: bool,
        phrases: Vec<u32>,
    },
    Grow {
        which: usize,
        phrase: u32,
    },
    Finish {
        which: usize,
    },
    /// What was computed is not to be trusted.
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
        5 => begin.prop_map(|(model, long, exact, phrases)| Op::Begin { model, long, exact, phrases }),
        3 => (any::<usize>(), 0u32..2).prop_map(|(which, phrase)| Op::Grow { which, phrase }),
        5 => any::<usize>().prop_map(|which| Op::Finish { which }),
        1 => any::<usize>().prop_map(|which| Op::Discard { which }),
        1 => (0usize..2).prop_map(|model| Op::Unload { model }),
    ]
}

fn phrase(which: u32) -> impl Iterator<Item = u32> {
    (0..PHRASE as u32).map(move |i| which * 100 + i)
}

/// Stands for keys and values: depends on all that theirs do, and survives F16.
fn value(model: usize, salt: u8, beginning: &[u32]) -> f32 {
    let mixed = |hash: u64, word: u64| (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23);
    let hash = beginning.iter().fold(mixed(model as u64, u64::from(salt)), |hash, t| mixed(hash, u64::from(*t)));
    (hash % 2048) as f32
}

struct Running {
    model: usize,
    salt: u8,
    tokens: Vec<u32>,
    kv: SequenceKv,
}

impl Running {
    /// Computes what is not there. False where the pool is full.
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
            let (block, from) = (at / BLOCK, at % BLOCK * SHAPE.stride());
            let own = value(self.model, self.salt, &self.tokens[..=at]);
            assert_eq!(view.keys(1, block)[from..from + 2], [own, 1.0], "position {at}");
            assert_eq!(view.values(0, block)[from..from + 2], [-own, 0.0], "position {at}");
        }
    }
}

struct World {
    arena: std::sync::Arc<Arena>,
    pools: Vec<KvPool>,
    running: Vec<Running>,
    /// Beginnings of whole blocks that were computed and trusted: model, salt, tokens.
    computed: HashSet<(usize, u8, Vec<u32>)>,
}

impl World {
    fn pool(arena: &std::sync::Arc<Arena>, model: usize) -> KvPool {
        let parking = Parking::new(arena.clone(), &model.to_string(), model == 0);
        KvPool::new(SHAPE, BLOCKS).parked_in(Some(parking))
    }

    fn new(capacity: u64) -> Self {
        let arena = Arena::new(capacity, ParkedAs::F16).unwrap();
        let pools = (0..2).map(|model| Self::pool(&arena, model)).collect();
        Self { arena, pools, running: Vec::new(), computed: HashSet::new() }
    }

    /// Returns how much was there and how much could have been.
    fn begin(&mut self, model: usize, long: bool, exact: bool, tokens: Vec<u32>) -> (usize, usize) {
        let salt = u8::from(long) | (u8::from(exact) * EXACT);
        let whole = (0..tokens.len() / BLOCK + 1).rev().map(|blocks| blocks * BLOCK);
        let could = whole.filter(|len| *len < tokens.len());
        let could = could.into_iter().find(|len| self.computed.contains(&(model, salt, tokens[..*len].to_vec())));
        let available = self.pools[model].available() * BLOCK;
        let kv = self.pools[model].begin(&tokens, long, exact);
        let cached = kv.len();
        assert!(cached < tokens.len());
        let mut new = Running { model, salt, tokens, kv };
        new.check(&self.pools[model]);
        if new.compute(&mut self.pools[model]) {
            self.note(&new);
            self.running.push(new);
        } else {
            // Put aside: it will be asked for again.
            new.tokens.truncate(new.kv.len());
            self.pools[model].end(new.kv, &new.tokens);
        }
        (cached, could.unwrap_or(0).min(available))
    }

    fn note(&mut self, running: &Running) {
        for blocks in 1..=running.tokens.len() / BLOCK {
            self.computed.insert((running.model, running.salt, running.tokens[..blocks * BLOCK].to_vec()));
        }
    }

    fn finish(&mut self, at: usize) {
        let Running { model, tokens, kv, .. } = self.running.swap_remove(at);
        self.pools[model].end(kv, &tokens);
    }

    fn check(&self, capacity: u64) {
        self.running.iter().for_each(|running| running.check(&self.pools[running.model]));
        assert!(self.arena.bytes() <= capacity);
        for model in 0..2 {
            let own = self.running.iter().filter(|r| r.model == model);
            let held: HashSet<BlockId> = own.flat_map(|r| r.kv.blocks.iter().copied()).collect();
            assert_eq!(self.pools[model].available() + held.len(), BLOCKS, "every block is held or available");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Whatever is evicted, parked, brought back, discarded or unloaded: a sequence finds its own keys and values or none,
    /// nothing gets lost while there is room for it, and no tier holds more than it may.
    #[test]
    fn both_tiers_tell_the_truth(
        roomy in any::<bool>(),
        small in 1u64..12_000,
        ops in prop::collection::vec(op(), 1..60),
    ) {
        let capacity = if roomy { 1 << 26 } else { small };
        let mut world = World::new(capacity);
        for op in ops {
            match op {
                Op::Begin { model, long, exact, phrases } => {
                    let tokens: Vec<u32> = phrases.into_iter().flat_map(phrase).collect();
                    let (cached, could) = world.begin(model, long, exact, tokens);
                    if roomy {
                        prop_assert!(cached >= could, "{cached} of {could} were there");
                    }
                }
                Op::Grow { which, phrase: next } if !world.running.is_empty() => {
                    let at = which % world.running.len();
                    let running = &mut world.running[at];
                    running.tokens.extend(phrase(next));
                    if running.compute(&mut world.pools[running.model]) {
                        let running = world.running.swap_remove(at);
                        world.note(&running);
                        world.running.push(running);
                    } else {
                        running.tokens.truncate(running.kv.len());
                        world.finish(at);
                    }
                }
                Op::Finish { which } if !world.running.is_empty() => world.finish(which % world.running.len()),
                // Where nothing may get lost nothing is thrown away either.
                Op::Discard { which } if !world.running.is_empty() && !roomy => {
                    let Running { model, kv, .. } = world.running.swap_remove(which % world.running.len());
                    world.pools[model].discard(kv);
                }
                Op::Unload { model } => {
                    while let Some(at) = world.running.iter().position(|r| r.model == model) {
                        world.finish(at);
                    }
                    world.pools[model].park_all();
                    world.pools[model] = World::pool(&world.arena, model);
                }
                Op::Grow { .. } | Op::Finish { .. } | Op::Discard { .. } => {}
            }
            world.check(capacity);
        }
    }
}
