//! Keys and values of one sequence, and what is kept of finished ones.
//!
//! A sequence's room is allocated at once for all it may become, but the pages behind it are only taken as it grows.
//! What a finished sequence computed is kept as long as the pool has room nobody reserved: the next prompt of the same
//! conversation usually begins with the same tokens, and copying them is far cheaper than computing them again.

use candle_core::{DType, Device, Result, Tensor};

/// Fewer shared tokens than this are computed again rather than copied.
const WORTH_COPYING: usize = 16;

pub struct SequenceKv {
    /// Per layer keys and values, each (capacity, KV heads, head dim).
    layers: Vec<(Tensor, Tensor)>,
    /// Positions filled.
    len: usize,
}

impl SequenceKv {
    pub fn new(layers: usize, capacity: usize, kv_heads: usize, head_dim: usize) -> Result<Self> {
        let room = || Tensor::zeros((capacity, kv_heads, head_dim), DType::F32, &Device::Cpu);
        let layers = (0..layers).map(|_| Ok((room()?, room()?))).collect::<Result<_>>()?;
        Ok(Self { layers, len: 0 })
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Writes keys and values of new positions of one layer, each (new, KV heads, head dim), and returns all of them so
    /// far as (1, positions, KV heads, head dim). `advance` makes the positions count.
    pub fn append(&self, layer: usize, keys: &Tensor, values: &Tensor) -> Result<(Tensor, Tensor)> {
        let (all_keys, all_values) = &self.layers[layer];
        all_keys.slice_set(&keys.contiguous()?, 0, self.len)?;
        all_values.slice_set(&values.contiguous()?, 0, self.len)?;
        let end = self.len + keys.dim(0)?;
        Ok((all_keys.narrow(0, 0, end)?.unsqueeze(0)?, all_values.narrow(0, 0, end)?.unsqueeze(0)?))
    }

    pub fn advance(&mut self, positions: usize) {
        self.len += positions;
    }

    fn copy_prefix(&mut self, from: &Self, positions: usize) -> Result<()> {
        for ((keys, values), (old_keys, old_values)) in self.layers.iter().zip(&from.layers) {
            keys.slice_set(&old_keys.narrow(0, 0, positions)?, 0, 0)?;
            values.slice_set(&old_values.narrow(0, 0, positions)?, 0, 0)?;
        }
        self.len = positions;
        Ok(())
    }
}

struct Kept {
    tokens: Vec<u32>,
    kv: SequenceKv,
}

/// Finished sequences, least recently used first.
#[derive(Default)]
pub struct PrefixCache {
    kept: Vec<Kept>,
}

impl PrefixCache {
    fn held(&self) -> u64 {
        self.kept.iter().map(|k| k.tokens.len() as u64).sum()
    }

    /// Forgets the least recently used until at most `tokens` are held.
    pub fn shrink_to(&mut self, tokens: u64) {
        let mut held = self.held();
        let mut drop = 0;
        while held > tokens && drop < self.kept.len() {
            held -= self.kept[drop].tokens.len() as u64;
            drop += 1;
        }
        self.kept.drain(..drop);
    }

    pub fn clear(&mut self) {
        self.kept.clear();
    }

    /// Keeps what a sequence computed; `tokens` are those its KV covers. Replaces what it begins with.
    pub fn keep(&mut self, mut tokens: Vec<u32>, kv: SequenceKv) {
        tokens.truncate(kv.len());
        if tokens.len() < WORTH_COPYING || self.kept.iter().any(|k| k.tokens.starts_with(&tokens)) {
            return;
        }
        self.kept.retain(|k| !tokens.starts_with(&k.tokens));
        self.kept.push(Kept { tokens, kv });
    }

    /// Fills `kv` with the longest kept beginning of `prompt`, all but its last token at most. Returns the positions.
    pub fn fill(&mut self, prompt: &[u32], kv: &mut SequenceKv) -> Result<usize> {
        let most = prompt.len().saturating_sub(1);
        let shared = |k: &Kept| k.tokens.iter().zip(&prompt[..most]).take_while(|(a, b)| a == b).count();
        let best = self.kept.iter().enumerate().map(|(at, k)| (shared(k), at)).max();
        let Some((positions, at)) = best.filter(|(positions, _)| *positions >= WORTH_COPYING) else {
            return Ok(0);
        };
        let used = self.kept.remove(at);
        kv.copy_prefix(&used.kv, positions)?;
        self.kept.push(used);
        Ok(positions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequence(tokens: &[u32]) -> SequenceKv {
        let mut kv = SequenceKv::new(1, 64, 1, 2).unwrap();
        let values: Vec<f32> = tokens.iter().flat_map(|t| [*t as f32, -(*t as f32)]).collect();
        let new = Tensor::from_vec(values, (tokens.len(), 1, 2), &Device::Cpu).unwrap();
        kv.append(0, &new, &new).unwrap();
        kv.advance(tokens.len());
        kv
    }

    #[test]
    fn the_longest_beginning_is_copied_and_one_token_is_left_to_compute() {
        let old: Vec<u32> = (0..40).collect();
        let mut cache = PrefixCache::default();
        cache.keep(old[..20].to_vec(), sequence(&old[..20]));
        cache.keep(old.clone(), sequence(&old));
        assert_eq!(cache.held(), 40, "the shorter one is a beginning of the longer");
        let mut prompt = old[..30].to_vec();
        prompt.push(99);
        let mut kv = SequenceKv::new(1, 64, 1, 2).unwrap();
        assert_eq!(cache.fill(&prompt, &mut kv).unwrap(), 30);
        let new = Tensor::zeros((1, 1, 2), DType::F32, &Device::Cpu).unwrap();
        let (keys, _) = kv.append(0, &new, &new).unwrap();
        assert_eq!(keys.flatten_all().unwrap().to_vec1::<f32>().unwrap()[58..], [29.0, -29.0, 0.0, 0.0]);
        let mut kv = SequenceKv::new(1, 64, 1, 2).unwrap();
        assert_eq!(cache.fill(&old, &mut kv).unwrap(), 39);
        assert_eq!(cache.fill(&[7; 30], &mut SequenceKv::new(1, 64, 1, 2).unwrap()).unwrap(), 0);
    }

    #[test]
    fn the_least_recently_used_goes_first() {
        let mut cache = PrefixCache::default();
        for first in [100, 200, 300] {
            let tokens: Vec<u32> = (first..first + 20).collect();
            cache.keep(tokens.clone(), sequence(&tokens));
        }
        let prompt: Vec<u32> = (100..121).collect();
        cache.fill(&prompt, &mut SequenceKv::new(1, 64, 1, 2).unwrap()).unwrap();
        cache.shrink_to(30);
        assert_eq!(cache.kept.len(), 1);
        assert_eq!(cache.kept[0].tokens[0], 100);
    }
}
