//! Keys and values of one sequence, and what is kept of finished ones.
//!
//! A sequence's room is allocated at once for all it may become, but the pages behind it are only taken as it grows.
//! What a finished sequence computed is kept as long as the pool has room nobody reserved: the next prompt of the same
//! conversation usually begins with the same tokens, and copying them is far cheaper than computing them again.

use crate::engine::candle::attention::LANES;

/// Fewer shared tokens than this are computed again rather than copied.
const WORTH_COPYING: usize = 16;

/// Keys and values of one layer, each (KV heads, capacity, head dim padded to whole lanes): a head's positions lie side
/// by side.
pub struct LayerKv {
    pub keys: Vec<f32>,
    pub values: Vec<f32>,
}

pub struct SequenceKv {
    layers: Vec<LayerKv>,
    heads: usize,
    capacity: usize,
    head_dim: usize,
    /// Head dim padded to whole lanes.
    stride: usize,
    /// Positions filled.
    len: usize,
}

impl SequenceKv {
    pub fn new(layers: usize, capacity: usize, heads: usize, head_dim: usize) -> Self {
        let stride = head_dim.next_multiple_of(LANES);
        let room = || vec![0.0; heads * capacity * stride];
        let layers = (0..layers).map(|_| LayerKv { keys: room(), values: room() }).collect();
        Self { layers, heads, capacity, head_dim, stride, len: 0 }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Positions there is room for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    pub fn layer(&self, layer: usize) -> &LayerKv {
        &self.layers[layer]
    }

    /// Writes keys and values of new positions of one layer, each (new, KV heads, head dim). `advance` makes them count.
    /// False, and nothing written, if they do not fit.
    pub fn append(&mut self, layer: usize, keys: &[f32], values: &[f32]) -> bool {
        let row = self.heads * self.head_dim;
        let new = keys.len() / row;
        if self.len + new > self.capacity || keys.len() != values.len() {
            return false;
        }
        let layer = &mut self.layers[layer];
        for (from, to) in [(keys, &mut layer.keys), (values, &mut layer.values)] {
            for (position, row) in from.chunks_exact(row).enumerate() {
                for (head, vector) in row.chunks_exact(self.head_dim).enumerate() {
                    let at = (head * self.capacity + self.len + position) * self.stride;
                    to[at..at + self.head_dim].copy_from_slice(vector);
                }
            }
        }
        true
    }

    pub fn advance(&mut self, positions: usize) {
        self.len += positions;
    }

    fn copy_prefix(&mut self, from: &Self, positions: usize) {
        let values = positions * self.stride;
        for (to, from_layer) in self.layers.iter_mut().zip(&from.layers) {
            for (to, source) in [(&mut to.keys, &from_layer.keys), (&mut to.values, &from_layer.values)] {
                for head in 0..self.heads {
                    let (at, source_at) = (head * self.capacity * self.stride, head * from.capacity * self.stride);
                    to[at..at + values].copy_from_slice(&source[source_at..source_at + values]);
                }
            }
        }
        self.len = positions;
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
    pub fn fill(&mut self, prompt: &[u32], kv: &mut SequenceKv) -> usize {
        let most = prompt.len().saturating_sub(1).min(kv.capacity());
        let shared = |k: &Kept| k.tokens.iter().zip(&prompt[..most]).take_while(|(a, b)| a == b).count();
        let best = self.kept.iter().enumerate().map(|(at, k)| (shared(k), at)).max();
        let Some((positions, at)) = best.filter(|(positions, _)| *positions >= WORTH_COPYING) else {
            return 0;
        };
        let used = self.kept.remove(at);
        kv.copy_prefix(&used.kv, positions);
        self.kept.push(used);
        positions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn empty() -> SequenceKv {
        SequenceKv::new(1, 48, 2, 2)
    }

    /// Key vectors of head h at token t are (t, h).
    fn sequence(tokens: &[u32]) -> SequenceKv {
        let mut kv = SequenceKv::new(1, 64, 2, 2);
        let values: Vec<f32> = tokens.iter().flat_map(|t| [*t as f32, 0.0, *t as f32, 1.0]).collect();
        assert!(kv.append(0, &values, &values));
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
        let mut kv = empty();
        assert_eq!(cache.fill(&prompt, &mut kv), 30);
        let keys = &kv.layer(0).keys;
        let vector = |head: usize, position: usize| &keys[(head * 48 + position) * LANES..][..3];
        assert_eq!((vector(0, 29), vector(0, 30)), (&[29.0, 0.0, 0.0][..], &[0.0; 3][..]), "position 29, then nothing");
        assert_eq!(vector(1, 29), [29.0, 1.0, 0.0], "of the second head");
        assert_eq!(cache.fill(&old, &mut empty()), 39);
        assert_eq!(cache.fill(&[7; 30], &mut empty()), 0);
    }

    #[test]
    fn the_least_recently_used_goes_first() {
        let mut cache = PrefixCache::default();
        for first in [100, 200, 300] {
            let tokens: Vec<u32> = (first..first + 20).collect();
            cache.keep(tokens.clone(), sequence(&tokens));
        }
        let prompt: Vec<u32> = (100..121).collect();
        cache.fill(&prompt, &mut empty());
        cache.shrink_to(30);
        assert_eq!(cache.kept.len(), 1);
        assert_eq!(cache.kept[0].tokens[0], 100);
    }

    #[test]
    fn a_full_sequence_takes_no_more() {
        let mut kv = SequenceKv::new(1, 1, 1, 2);
        assert!(!kv.append(0, &[1.0; 4], &[1.0; 4]));
        assert!(kv.append(0, &[1.0; 2], &[1.0; 2]));
    }
}
