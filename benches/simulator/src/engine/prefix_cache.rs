//! Prefix cache of one node: a KV pool per loaded model, and a host tier that receives the blocks that leave the pools.

use std::collections::{BTreeMap, HashMap};

/// Least recently used set of blocks.
#[derive(Debug, Clone, Default)]
pub struct Lru {
    last_use: HashMap<u64, u64>,
    by_last_use: BTreeMap<u64, u64>,
    next_use: u64,
}

impl Lru {
    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.last_use.len()
    }

    /// Whether there are no blocks.
    pub fn is_empty(&self) -> bool {
        self.last_use.is_empty()
    }

    /// Whether the block is in the set.
    pub fn contains(&self, block: u64) -> bool {
        self.last_use.contains_key(&block)
    }

    /// Adds the block, or makes it the most recently used one.
    pub fn touch(&mut self, block: u64) {
        if let Some(before) = self.last_use.insert(block, self.next_use) {
            self.by_last_use.remove(&before);
        }
        self.by_last_use.insert(self.next_use, block);
        self.next_use += 1;
    }

    /// Removes the block; returns whether it was in the set.
    pub fn remove(&mut self, block: u64) -> bool {
        let last_use = self.last_use.remove(&block);
        last_use.is_some_and(|at| self.by_last_use.remove(&at).is_some())
    }

    /// Removes and returns the least recently used block.
    pub fn pop_oldest(&mut self) -> Option<u64> {
        let (_, block) = self.by_last_use.pop_first()?;
        self.last_use.remove(&block);
        Some(block)
    }

    /// The blocks from the least to the most recently used one.
    pub fn oldest_first(&self) -> impl Iterator<Item = u64> + '_ {
        self.by_last_use.values().copied()
    }
}

/// KV pool of one loaded model. Blocks of running sequences are pinned; the others are evicted, the least recently used
/// one first.
#[derive(Debug, Clone, Default)]
struct Pool {
    pins: HashMap<u64, u32>,
    unpinned: Lru,
    /// Blocks that the replies of running sequences may fill.
    reply_blocks: u64,
}

impl Pool {
    fn contains(&self, block: u64) -> bool {
        self.pins.contains_key(&block) || self.unpinned.contains(block)
    }

    fn blocks(&self) -> u64 {
        (self.pins.len() + self.unpinned.len()) as u64
    }
}

/// The tiers in which a prompt's leading blocks were found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CachedBlocks {
    /// Blocks in the KV pool.
    pub device: u64,
    /// Blocks in host memory, which are copied into the pool.
    pub host: u64,
}

/// Prefix cache of one node.
#[derive(Debug, Clone)]
pub struct PrefixCache {
    pools: Vec<Pool>,
    pool_blocks: u64,
    host: Lru,
    host_models: HashMap<u64, usize>,
    /// Number of blocks of each model in the host tier.
    host_counts: Vec<u64>,
    host_blocks: u64,
}

impl PrefixCache {
    /// An empty cache with a pool of `pool_blocks` for each model, and a host tier for all of them.
    pub fn new(models: usize, pool_blocks: u64, host_blocks: u64) -> Self {
        Self {
            pools: vec![Pool::default(); models],
            pool_blocks,
            host: Lru::default(),
            host_models: HashMap::new(),
            host_counts: vec![0; models],
            host_blocks,
        }
    }

    /// Pins the prompt of a sequence that starts, and the blocks of its reply. Returns the blocks found in the cache.
    pub fn start(&mut self, model: usize, chain: &[u64], reply_blocks: u64) -> CachedBlocks {
        let mut found = CachedBlocks::default();
        for block in chain {
            if self.pools[model].contains(*block) {
                found.device += 1;
            } else if self.host.contains(*block) {
                found.host += 1;
            } else {
                break;
            }
        }
        let pool = &mut self.pools[model];
        pool.reply_blocks += reply_blocks;
        for block in chain {
            pool.unpinned.remove(*block);
            *pool.pins.entry(*block).or_default() += 1;
            if self.host.remove(*block) {
                self.host_models.remove(block);
                self.host_counts[model] -= 1;
            }
        }
        self.evict(model);
        found
    }

    /// Unpins the prompt of a sequence that has ended.
    pub fn end(&mut self, model: usize, chain: &[u64], reply_blocks: u64) {
        let pool = &mut self.pools[model];
        pool.reply_blocks = pool.reply_blocks.saturating_sub(reply_blocks);
        // The end of a prompt is evicted before its beginning, which more prompts share.
        for block in chain.iter().rev() {
            if let Some(pins) = pool.pins.get_mut(block) {
                *pins -= 1;
                if *pins == 0 {
                    pool.pins.remove(block);
                    pool.unpinned.touch(*block);
                }
            }
        }
        self.evict(model);
    }

    /// Moves the blocks of a model that is unloaded to the host tier.
    pub fn unload(&mut self, model: usize) {
        let blocks: Vec<u64> = self.pools[model].unpinned.oldest_first().collect();
        self.pools[model] = Pool::default();
        blocks.into_iter().for_each(|block| self.offload(model, block));
    }

    /// Number of blocks in the pool of the model, and of its blocks in host memory.
    pub fn tiers(&self, model: usize) -> CachedBlocks {
        CachedBlocks { device: self.pools[model].blocks(), host: self.host_counts[model] }
    }

    fn evict(&mut self, model: usize) {
        let pool = &mut self.pools[model];
        let mut evicted = Vec::new();
        while pool.blocks() + pool.reply_blocks > self.pool_blocks {
            let Some(block) = pool.unpinned.pop_oldest() else { break };
            evicted.push(block);
        }
        evicted.into_iter().for_each(|block| self.offload(model, block));
    }

    fn offload(&mut self, model: usize, block: u64) {
        if self.host_blocks == 0 {
            return;
        }
        self.host.touch(block);
        if self.host_models.insert(block, model).is_none() {
            self.host_counts[model] += 1;
        }
        while self.host.len() as u64 > self.host_blocks {
            if let Some(of) = self.host.pop_oldest().and_then(|oldest| self.host_models.remove(&oldest)) {
                self.host_counts[of] -= 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn least_recently_used_blocks_leave_the_pool_for_the_host_tier() {
        let mut cache = PrefixCache::new(2, 4, 3);
        let found = |device, host| CachedBlocks { device, host };
        assert_eq!(cache.start(0, &[1, 2, 3], 1), found(0, 0));
        cache.end(0, &[1, 2, 3], 1);
        assert_eq!(cache.start(0, &[1, 2, 4], 1), found(2, 0), "the reply needs a block, so 3 is evicted");
        cache.end(0, &[1, 2, 4], 1);
        assert_eq!(cache.start(0, &[1, 2, 3], 0), found(2, 1));
        cache.end(0, &[1, 2, 3], 0);
        cache.unload(0);
        assert_eq!(cache.tiers(0), found(0, 3), "the host tier has three blocks");
        assert_eq!(cache.start(0, &[1, 2, 3], 0), found(0, 3));
        assert_eq!(cache.start(1, &[1], 0), found(0, 0), "of another model");
    }

    #[test]
    fn pinned_blocks_are_not_evicted() {
        let mut cache = PrefixCache::new(1, 4, 0);
        cache.start(0, &[1, 2], 0);
        cache.start(0, &[3, 4], 0);
        cache.end(0, &[3, 4], 0);
        cache.start(0, &[5, 6], 0);
        assert_eq!(cache.start(0, &[1, 2], 0).device, 2);
        assert_eq!(cache.tiers(0).device, 4);
    }
}
