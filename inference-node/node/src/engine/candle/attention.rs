//! Causal attention of one sequence's new positions over all its keys and values.
//!
//! Written for two things candle's own kernel does not give: prompts of thousands of tokens at a useful rate (several
//! query rows share one pass over keys and values, and the machine's vector width is found at run time), and a fixed
//! order of every sum. A row's result depends on its query and the keys up to it alone: not on how a prompt was cut into
//! chunks, not on the batch, not on the number of threads. That is what makes a seed reproducible.
//!
//! Sums run in 16 lanes and the lanes are added pairwise at the end. Positions a row may not see get weight zero, which
//! adds exactly nothing. The softmax keeps all scores of a row instead of rescaling as it goes: they fit the cache.

use pulp::{Simd, WithSimd};

use crate::engine::candle::kv::{BLOCK, KvView};
use crate::engine::candle::team::{self, Slots};
use crate::engine::lanes::{LANES, Lanes, add_lanes, exp, multiply_add, tanh, vectorised};

/// Query rows that share a pass over keys and values: their sums stay in registers.
const ROWS: usize = 4;
/// Chunks of a head's vector summed in one walk over the blocks.
const HEAD_CHUNKS: usize = 8;
/// Multiply-adds below which threads cost more than they bring.
const WORTH_THREADS: usize = 1 << 16;

/// Sizes of one call, and what the layer's attention is like.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Positions before the new ones.
    pub past: usize,
    /// New positions, whose keys and values are in the cache already.
    pub new: usize,
    /// On every product of query and key.
    pub scale: f32,
    /// Scores are squeezed into plus and minus this.
    pub cap: Option<f32>,
    /// Positions back that are seen, the own one included.
    pub window: Option<usize>,
}

impl Sizes {
    /// The first position that the one at `position` sees.
    #[inline(always)]
    fn first_seen(&self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }
}

/// One sequence's share of a pass.
#[derive(Clone, Copy)]
pub struct Part<'a> {
    /// (new, heads, head dim).
    pub queries: &'a [f32],
    pub kv: KvView<'a>,
    pub sizes: Sizes,
}

/// All parts in one parallel region; the result is (all new positions, heads, head dim), part after part.
pub fn attend(parts: &[Part<'_>]) -> Vec<f32> {
    let mut out = vec![0.0; parts.iter().map(|part| part.queries.len()).sum()];
    let slots = Slots::new(&mut out);
    let (mut blocks, mut work, mut from) = (Vec::new(), 0, 0);
    for part in parts {
        let Sizes { heads, head_dim, past, new, .. } = part.sizes;
        for head in 0..heads {
            blocks.extend((0..new).step_by(ROWS).map(|first| (part, head, first, from)));
        }
        work += heads * new * (past + new) * head_dim * 2;
        from += part.queries.len();
    }
    let run = |blocks: &[(&Part<'_>, usize, usize, usize)]| {
        let (mut room, mut local) = (Room::default(), Vec::new());
        for &(part, head, first, from) in blocks {
            let Sizes { heads, head_dim, new, .. } = part.sizes;
            local.clear();
            local.resize(ROWS.min(new - first) * head_dim, 0.0);
            let (queries, kv, sizes) = (part.queries, part.kv, part.sizes);
            vectorised(Block { queries, kv, sizes, head, first, room: &mut room, out: &mut local });
            for (row, values) in local.chunks_exact(head_dim).enumerate() {
                let to = from + ((first + row) * heads + head) * head_dim;
                // SAFETY: each head of each position is in one block, and each block in one piece.
                #[allow(unsafe_code)]
                unsafe { slots.slice(to, head_dim) }.copy_from_slice(values);
            }
        }
    };
    if work >= WORTH_THREADS {
        let share = team::share(blocks.len());
        team::run(blocks.len().div_ceil(share), &|at| run(&blocks[at * share..((at + 1) * share).min(blocks.len())]));
    } else {
        run(&blocks);
    }
    out
}

/// Working space, used again from block to block.
#[derive(Default)]
struct Room {
    queries: Vec<Lanes>,
    /// One row's scores after the other.
    scores: Vec<f32>,
    /// The weights of all rows for each position.
    weights: Vec<[f32; ROWS]>,
}

/// Up to [`ROWS`] rows of one head, from the new position `first` on; `out` is (rows, head dim).
struct Block<'a> {
    queries: &'a [f32],
    kv: KvView<'a>,
    sizes: Sizes,
    head: usize,
    first: usize,
    room: &'a mut Room,
    out: &'a mut [f32],
}

impl WithSimd for Block<'_> {
    type Output = ();

    /// Everything below is inlined into this, and so compiled for the machine's vectors.
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match self.out.len() / self.sizes.head_dim {
            1 => self.rows::<S, 1>(simd, 1),
            rows => self.rows::<S, ROWS>(simd, rows),
        }
    }
}

impl Block<'_> {
    /// Computes `R` rows, of which the first `rows` exist; the others have queries of zeros.
    #[inline(always)]
    fn rows<S: Simd, const R: usize>(self, simd: S, rows: usize) {
        let Sizes { heads, kv_heads, head_dim, past, scale, .. } = self.sizes;
        let chunks = head_dim.div_ceil(LANES);
        let shared = self.head / (heads / kv_heads);
        // Positions anybody of these rows sees, from the start of a block of the cache on.
        let begin = self.sizes.first_seen(past + self.first) / BLOCK * BLOCK;
        let end = past + self.first + rows;
        let span = end - begin;
        let Room { queries, scores, weights } = self.room;

        queries.clear();
        queries.resize(R * chunks, [0.0; LANES]);
        for row in 0..rows {
            let at = ((self.first + row) * heads + self.head) * head_dim;
            queries[row * chunks..(row + 1) * chunks].as_flattened_mut()[..head_dim]
                .copy_from_slice(&self.queries[at..at + head_dim]);
        }

        scores.clear();
        scores.resize(R * span, 0.0);
        for from in (begin..end).step_by(BLOCK) {
            let keys: &[Lanes] = self.kv.keys(shared, from / BLOCK).as_chunks().0;
            for (position, key) in (from - begin..span).zip(keys.chunks_exact(chunks)) {
                for (row, query) in queries.chunks_exact(chunks).enumerate() {
                    let mut sums = [0.0; LANES];
                    for (q, k) in query.iter().zip(key) {
                        multiply_add(simd, q, k, &mut sums);
                    }
                    scores[row * span + position] = add_lanes(sums) * scale;
                }
            }
        }
        if let Some(cap) = self.sizes.cap {
            scores.iter_mut().for_each(|score| *score = cap * tanh(*score / cap));
        }

        let mut totals = [1.0f32; R];
        weights.clear();
        weights.resize(span, [0.0; ROWS]);
        for (row, total) in totals.iter_mut().enumerate().take(rows) {
            let position = past + self.first + row;
            let seen = self.sizes.first_seen(position) - begin..position + 1 - begin;
            let own = &mut scores[row * span..][seen.clone()];
            *total = softmax_weights(own);
            for (weights, weight) in weights[seen].iter_mut().zip(own) {
                weights[row] = *weight;
            }
        }

        let mut sums = [[[0.0; LANES]; R]; HEAD_CHUNKS];
        for chunk_from in (0..chunks).step_by(HEAD_CHUNKS) {
            let count = HEAD_CHUNKS.min(chunks - chunk_from);
            for sums in &mut sums[..count] {
                *sums = [[0.0; LANES]; R];
            }
            for from in (begin..end).step_by(BLOCK) {
                let values: &[Lanes] = self.kv.values(shared, from / BLOCK).as_chunks().0;
                let weights = &weights[from - begin..span.min(from - begin + BLOCK)];
                for (at, sums) in sums[..count].iter_mut().enumerate() {
                    // Taken out of memory that could be anybody's: only so they become vectors.
                    let mut own = *sums;
                    for (value, weights) in values.chunks_exact(chunks).zip(weights) {
                        let (value, weights) = (value[chunk_from + at], *weights);
                        for row in 0..R {
                            multiply_add(simd, &[weights[row]; LANES], &value, &mut own[row]);
                        }
                    }
                    *sums = own;
                }
            }
            for (at, sums) in sums[..count].iter().enumerate() {
                let chunk = chunk_from + at;
                let width = LANES.min(head_dim - chunk * LANES);
                for (row, (sums, total)) in sums.iter().zip(totals).enumerate().take(rows) {
                    let out = &mut self.out[row * head_dim + chunk * LANES..][..width];
                    for (out, sum) in out.iter_mut().zip(sums) {
                        *out = sum / total;
                    }
                }
            }
        }
    }
}

/// Turns scores into weights relative to the highest, and returns their sum.
#[inline(always)]
fn softmax_weights(scores: &mut [f32]) -> f32 {
    let higher = |a: f32, b: f32| if b > a { b } else { a };
    let (chunks, rest) = scores.as_chunks_mut::<LANES>();
    let mut high = [f32::NEG_INFINITY; LANES];
    for chunk in chunks.iter() {
        for lane in 0..LANES {
            high[lane] = higher(high[lane], chunk[lane]);
        }
    }
    let highest = high.iter().chain(rest.iter()).fold(f32::NEG_INFINITY, |a, b| higher(a, *b));
    let mut sums = [0.0; LANES];
    for chunk in chunks {
        for lane in 0..LANES {
            chunk[lane] = exp(chunk[lane] - highest);
            sums[lane] += chunk[lane];
        }
    }
    for (score, sum) in rest.iter_mut().zip(&mut sums) {
        *score = exp(*score - highest);
        *sum += *score;
    }
    add_lanes(sums)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::candle::kv::{KvPool, KvShape, SequenceKv};

    fn numbers(count: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..count).map(|_| next() * 3.0).collect()
    }

    const PLAIN: Sizes =
        Sizes { heads: 4, kv_heads: 2, head_dim: 64, past: 0, new: 1, scale: 0.125, cap: None, window: None };

    /// A pool with one sequence of `positions` random vectors, and the same as (position, head, head dim).
    fn cache(s: Sizes, positions: usize) -> (KvPool, SequenceKv, [Vec<f32>; 2]) {
        let shape = KvShape { layers: 1, heads: s.kv_heads, head_dim: s.head_dim };
        let mut pool = KvPool::new(shape, positions.div_ceil(BLOCK));
        let mut kv = pool.begin(&[], false, false);
        let rows = [1, 2].map(|seed| numbers(positions * s.kv_heads * s.head_dim, seed));
        assert!(pool.grow(&mut kv, positions) && pool.write(&kv, 0, &rows[0], &rows[1]));
        (pool, kv, rows)
    }

    fn alone(queries: &[f32], kv: KvView<'_>, sizes: Sizes) -> Vec<f32> {
        attend(&[Part { queries, kv, sizes }])
    }

    /// By the definition, in f64.
    fn reference(queries: &[f32], [keys, values]: &[Vec<f32>; 2], s: Sizes) -> Vec<f64> {
        let mut out = Vec::new();
        for row in 0..s.new {
            for head in 0..s.heads {
                let shared = head / (s.heads / s.kv_heads);
                let query = &queries[(row * s.heads + head) * s.head_dim..][..s.head_dim];
                let vector = |of: &[f32], at: usize| -> Vec<f64> {
                    of[(at * s.kv_heads + shared) * s.head_dim..][..s.head_dim].iter().map(|v| f64::from(*v)).collect()
                };
                let own = s.past + row;
                let seen = s.window.map_or(0, |w| (own + 1).saturating_sub(w))..=own;
                let weights: Vec<f64> = seen
                    .clone()
                    .map(|at| {
                        let dot: f64 = vector(keys, at).iter().zip(query).map(|(k, q)| k * f64::from(*q)).sum();
                        let score = dot * f64::from(s.scale);
                        s.cap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh()).exp()
                    })
                    .collect();
                let total: f64 = weights.iter().sum();
                for dim in 0..s.head_dim {
                    let sum: f64 = seen.clone().zip(&weights).map(|(at, w)| w * vector(values, at)[dim]).sum();
                    out.push(sum / total);
                }
            }
        }
        out
    }

    #[test]
    fn it_is_attention() {
        let kinds = [
            (64, None, None),
            (40, None, Some(7)),
            (2, Some(3.0), None),
            (256, Some(2.0), Some(64)),
            (80, None, Some(1)),
        ];
        for (head_dim, cap, window) in kinds {
            let sizes = Sizes { head_dim, past: 75, new: 23, cap, window, ..PLAIN };
            let (pool, kv, rows) = cache(sizes, 98);
            let queries = numbers(23 * 4 * head_dim, 3);
            let got = alone(&queries, pool.view(&kv, 0), sizes);
            let want = reference(&queries, &rows, sizes);
            assert_eq!(got.len(), want.len());
            for (got, want) in got.iter().zip(want) {
                assert!((f64::from(*got) - want).abs() < 2e-5, "{got} {want} at {head_dim} {cap:?} {window:?}");
            }
        }
    }

    #[test]
    fn cutting_a_prompt_changes_no_bit() {
        for window in [None, Some(9)] {
            let whole = Sizes { heads: 3, kv_heads: 1, new: 77, window, ..PLAIN };
            let (pool, kv, _) = cache(whole, 77);
            let queries = numbers(77 * 3 * 64, 6);
            let expected = alone(&queries, pool.view(&kv, 0), whole);
            for cut in 1..77 {
                let rest = &queries[cut * 3 * 64..];
                let got = alone(rest, pool.view(&kv, 0), Sizes { past: cut, new: 77 - cut, ..whole });
                assert_eq!(got, expected[cut * 3 * 64..], "cut at {cut}");
            }
        }
    }

    #[test]
    fn parts_do_not_see_each_other() {
        let kinds = [Sizes { past: 40, ..PLAIN }, Sizes { past: 3, new: 30, ..PLAIN }, PLAIN];
        let caches = kinds.map(|sizes| (cache(sizes, sizes.past + sizes.new), numbers(sizes.new * 4 * 64, 8)));
        let parts: Vec<Part<'_>> = kinds
            .iter()
            .zip(&caches)
            .map(|(sizes, ((pool, kv, _), queries))| Part { queries, kv: pool.view(kv, 0), sizes: *sizes })
            .collect();
        let expected: Vec<f32> = parts.iter().flat_map(|part| alone(part.queries, part.kv, part.sizes)).collect();
        assert_eq!(attend(&parts), expected);
    }
}
