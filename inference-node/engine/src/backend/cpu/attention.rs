//! Causal attention of a sequence's new positions over all its keys and values.
//!
//! It provides two properties that candle's kernel lacks: prompts of thousands of tokens run at a useful rate (several
//! query rows share one pass over keys and values, and the vector width is detected at run time), and every sum has a
//! fixed order. A row's result depends only on its query and the keys up to its position: not on how the prompt was
//! split into chunks, not on the batch, not on the number of threads. This makes sampling with a seed reproducible.
//!
//! Sums run in 16 lanes, and the lanes are added pairwise at the end. Masked positions get weight zero, which adds
//! exactly zero. The softmax keeps all scores of a row instead of rescaling online: they fit the cache.

use pulp::{Simd, WithSimd};

use crate::backend::cpu::simd::{LANES, Lanes, add_lanes, exp, multiply_add, tanh, vectorized};
use crate::backend::cpu::thread_pool::{self, DisjointSlice};
use crate::kv::{KV_BLOCK_TOKENS, KvView};

/// Number of query rows that share one pass over keys and values; few enough that their sums stay in registers.
const QUERY_ROWS: usize = 4;
/// Number of [`LANES`]-wide vectors of a head that are summed in one pass over the KV blocks.
const HEAD_CHUNKS: usize = 8;
/// Number of multiply-adds below which one thread is faster than the pool.
const MIN_PARALLEL_MULTIPLY_ADDS: usize = 1 << 16;

/// Parameters of a layer's attention over one sequence.
#[derive(Debug, Clone, Copy)]
pub struct AttentionParams {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Number of the sequence's positions that earlier passes computed.
    pub past: usize,
    /// Number of positions that this pass computes; their keys and values are already in the cache.
    pub new: usize,
    /// Factor applied to every query-key product.
    pub scale: f32,
    /// Soft cap of the scores: score becomes cap x tanh(score / cap).
    pub softcap: Option<f32>,
    /// Sliding window: number of positions a row attends to, its own included.
    pub window: Option<usize>,
}

impl AttentionParams {
    /// First position that the row at `position` attends to.
    #[inline(always)]
    fn first_attended(&self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }
}

/// Queries and cached keys and values of one sequence.
#[derive(Clone, Copy)]
pub struct AttentionInput<'a> {
    /// Query vectors of the new positions, (new, heads, head dim).
    pub queries: &'a [f32],
    pub kv: KvView<'a>,
    pub params: AttentionParams,
}

/// Computes the attention of all sequences in one parallel region. The result is (all new positions, heads, head dim),
/// one sequence after the other. Panics if the number of queries does not match the parameters.
pub fn attend(inputs: &[AttentionInput<'_>]) -> Vec<f32> {
    let mut out = vec![0.0; inputs.iter().map(|input| input.queries.len()).sum()];
    let slots = DisjointSlice::new(&mut out);
    let (mut blocks, mut work, mut from) = (Vec::new(), 0, 0);
    for input in inputs {
        let AttentionParams { heads, kv_heads, head_dim, past, new, .. } = input.params;
        let queries = input.queries.len();
        // The parts of `out` are disjoint only under these conditions.
        assert!(
            head_dim > 0 && kv_heads > 0 && heads.is_multiple_of(kv_heads) && queries == new * heads * head_dim,
            "{queries} values are not the queries of {new} positions, {heads} heads ({kv_heads} of keys), {head_dim} each"
        );
        for head in 0..heads {
            blocks.extend((0..new).step_by(QUERY_ROWS).map(|first| (input, head, first, from)));
        }
        work += heads * new * (past + new) * head_dim * 2;
        from += queries;
    }
    let run = |blocks: &[(&AttentionInput<'_>, usize, usize, usize)]| {
        let (mut scratch, mut local) = (Scratch::default(), Vec::new());
        for &(input, head, first, from) in blocks {
            let AttentionParams { heads, head_dim, new, .. } = input.params;
            local.clear();
            local.resize(QUERY_ROWS.min(new - first) * head_dim, 0.0);
            let (queries, kv, params) = (input.queries, input.kv, input.params);
            vectorized(QueryBlock { queries, kv, params, head, first, scratch: &mut scratch, out: &mut local });
            for (row, values) in local.chunks_exact(head_dim).enumerate() {
                let to = from + ((first + row) * heads + head) * head_dim;
                // SAFETY: each head of each position is in one query block, and each block in one chunk; the sequences'
                // parts do not overlap, since each has as many values as its queries (asserted above).
                #[allow(unsafe_code)]
                unsafe { slots.slice(to, head_dim) }.copy_from_slice(values);
            }
        }
    };
    if work >= MIN_PARALLEL_MULTIPLY_ADDS {
        let size = thread_pool::chunk_size(blocks.len());
        thread_pool::run(blocks.len().div_ceil(size), &|at| {
            run(&blocks[at * size..((at + 1) * size).min(blocks.len())]);
        });
    } else {
        run(&blocks);
    }
    out
}

/// Scratch memory, reused from query block to query block.
#[derive(Default)]
struct Scratch {
    queries: Vec<Lanes>,
    /// Attention scores, (rows, positions).
    scores: Vec<f32>,
    /// Softmax weights, (positions, rows).
    weights: Vec<[f32; QUERY_ROWS]>,
}

/// Attention of up to [`QUERY_ROWS`] query rows of one head. `first` is the index of the first row among the new
/// positions; `out` is (rows, head dim).
struct QueryBlock<'a> {
    queries: &'a [f32],
    kv: KvView<'a>,
    params: AttentionParams,
    head: usize,
    first: usize,
    scratch: &'a mut Scratch,
    out: &'a mut [f32],
}

impl WithSimd for QueryBlock<'_> {
    type Output = ();

    /// Computes the attention of the block. All functions that it calls are inlined into it, and are thus compiled for
    /// the machine's vector width.
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match self.out.len() / self.params.head_dim {
            1 => self.attend_rows::<S, 1>(simd, 1),
            rows => self.attend_rows::<S, QUERY_ROWS>(simd, rows),
        }
    }
}

impl QueryBlock<'_> {
    /// Computes the attention of `R` rows. Only the first `rows` of them are rows of the block; the rest is padding,
    /// with queries of zero.
    #[inline(always)]
    fn attend_rows<S: Simd, const R: usize>(self, simd: S, rows: usize) {
        let AttentionParams { heads, kv_heads, head_dim, past, scale, .. } = self.params;
        let chunks = head_dim.div_ceil(LANES);
        let kv_head = self.head / (heads / kv_heads);
        // `begin..end` covers all positions that any of these rows attends to; `begin` is rounded down to the start of
        // a KV block.
        let begin = self.params.first_attended(past + self.first) / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS;
        let end = past + self.first + rows;
        let span = end - begin;
        let Scratch { queries, scores, weights } = self.scratch;

        queries.clear();
        queries.resize(R * chunks, [0.0; LANES]);
        for row in 0..rows {
            let at = ((self.first + row) * heads + self.head) * head_dim;
            queries[row * chunks..(row + 1) * chunks].as_flattened_mut()[..head_dim]
                .copy_from_slice(&self.queries[at..at + head_dim]);
        }

        scores.clear();
        scores.resize(R * span, 0.0);
        for from in (begin..end).step_by(KV_BLOCK_TOKENS) {
            let keys: &[Lanes] = self.kv.keys(kv_head, from / KV_BLOCK_TOKENS).as_chunks().0;
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
        if let Some(cap) = self.params.softcap {
            scores.iter_mut().for_each(|score| *score = cap * tanh(*score / cap));
        }

        let mut totals = [1.0f32; R];
        weights.clear();
        weights.resize(span, [0.0; QUERY_ROWS]);
        for (row, total) in totals.iter_mut().enumerate().take(rows) {
            let position = past + self.first + row;
            let attended = self.params.first_attended(position) - begin..position + 1 - begin;
            let own = &mut scores[row * span..][attended.clone()];
            *total = softmax_weights(own);
            for (weights, weight) in weights[attended].iter_mut().zip(own) {
                weights[row] = *weight;
            }
        }

        let mut sums = [[[0.0; LANES]; R]; HEAD_CHUNKS];
        for chunk_from in (0..chunks).step_by(HEAD_CHUNKS) {
            let count = HEAD_CHUNKS.min(chunks - chunk_from);
            for sums in &mut sums[..count] {
                *sums = [[0.0; LANES]; R];
            }
            for from in (begin..end).step_by(KV_BLOCK_TOKENS) {
                let values: &[Lanes] = self.kv.values(kv_head, from / KV_BLOCK_TOKENS).as_chunks().0;
                let weights = &weights[from - begin..span.min(from - begin + KV_BLOCK_TOKENS)];
                for (at, sums) in sums[..count].iter_mut().enumerate() {
                    // A local copy, which cannot alias other data: otherwise the compiler does not keep the sums in
                    // vector registers.
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

/// Turns scores into unnormalized softmax weights, relative to the highest score; returns their sum.
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
    use crate::kv::{KvPool, KvShape, SequenceKv};

    fn numbers(count: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..count).map(|_| next() * 3.0).collect()
    }

    const DECODE: AttentionParams = AttentionParams {
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        past: 0,
        new: 1,
        scale: 0.125,
        softcap: None,
        window: None,
    };

    /// A pool with one sequence of `positions` random keys and values; also returns the keys and the values, each as
    /// (position, head, head dim).
    fn cache(s: AttentionParams, positions: usize) -> (KvPool, SequenceKv, [Vec<f32>; 2]) {
        let shape = KvShape { layers: 1, heads: s.kv_heads, head_dim: s.head_dim };
        let mut pool = KvPool::new(shape, positions.div_ceil(KV_BLOCK_TOKENS));
        let mut kv = pool.begin(&[], false, false);
        let rows = [1, 2].map(|seed| numbers(positions * s.kv_heads * s.head_dim, seed));
        assert!(pool.grow(&mut kv, positions) && pool.write(&kv, 0, &rows[0], &rows[1]));
        (pool, kv, rows)
    }

    fn attend_one(queries: &[f32], kv: KvView<'_>, params: AttentionParams) -> Vec<f32> {
        attend(&[AttentionInput { queries, kv, params }])
    }

    /// Reference implementation of attention, in f64.
    fn reference(queries: &[f32], [keys, values]: &[Vec<f32>; 2], s: AttentionParams) -> Vec<f64> {
        let mut out = Vec::new();
        for row in 0..s.new {
            for head in 0..s.heads {
                let kv_head = head / (s.heads / s.kv_heads);
                let query = &queries[(row * s.heads + head) * s.head_dim..][..s.head_dim];
                let vector = |of: &[f32], at: usize| -> Vec<f64> {
                    of[(at * s.kv_heads + kv_head) * s.head_dim..][..s.head_dim].iter().map(|v| f64::from(*v)).collect()
                };
                let own = s.past + row;
                let attended = s.window.map_or(0, |w| (own + 1).saturating_sub(w))..=own;
                let weights: Vec<f64> = attended
                    .clone()
                    .map(|at| {
                        let dot: f64 = vector(keys, at).iter().zip(query).map(|(k, q)| k * f64::from(*q)).sum();
                        let score = dot * f64::from(s.scale);
                        s.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh()).exp()
                    })
                    .collect();
                let total: f64 = weights.iter().sum();
                for dim in 0..s.head_dim {
                    let sum: f64 = attended.clone().zip(&weights).map(|(at, w)| w * vector(values, at)[dim]).sum();
                    out.push(sum / total);
                }
            }
        }
        out
    }

    #[test]
    fn attention_matches_its_definition() {
        let cases = [
            (64, None, None),
            (40, None, Some(7)),
            (2, Some(3.0), None),
            (256, Some(2.0), Some(64)),
            (80, None, Some(1)),
        ];
        for (head_dim, softcap, window) in cases {
            let params = AttentionParams { head_dim, past: 75, new: 23, softcap, window, ..DECODE };
            let (pool, kv, rows) = cache(params, 98);
            let queries = numbers(23 * 4 * head_dim, 3);
            let got = attend_one(&queries, pool.view(&kv, 0), params);
            let want = reference(&queries, &rows, params);
            assert_eq!(got.len(), want.len());
            for (got, want) in got.iter().zip(want) {
                assert!((f64::from(*got) - want).abs() < 2e-5, "{got} {want} at {head_dim} {softcap:?} {window:?}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "128 values are not the queries of 1 positions, 4 heads (2 of keys), 64 each")]
    fn queries_that_do_not_match_the_parameters_are_refused() {
        let (pool, kv, _) = cache(DECODE, 1);
        attend_one(&numbers(2 * 64, 3), pool.view(&kv, 0), DECODE);
    }

    #[test]
    fn chunking_a_prompt_changes_no_bit() {
        for window in [None, Some(9)] {
            let whole = AttentionParams { heads: 3, kv_heads: 1, new: 77, window, ..DECODE };
            let (pool, kv, _) = cache(whole, 77);
            let queries = numbers(77 * 3 * 64, 6);
            let expected = attend_one(&queries, pool.view(&kv, 0), whole);
            for cut in 1..77 {
                let rest = &queries[cut * 3 * 64..];
                let got = attend_one(rest, pool.view(&kv, 0), AttentionParams { past: cut, new: 77 - cut, ..whole });
                assert_eq!(got, expected[cut * 3 * 64..], "split at {cut}");
            }
        }
    }

    #[test]
    fn sequences_of_a_batch_are_independent() {
        let cases = [AttentionParams { past: 40, ..DECODE }, AttentionParams { past: 3, new: 30, ..DECODE }, DECODE];
        let caches = cases.map(|params| (cache(params, params.past + params.new), numbers(params.new * 4 * 64, 8)));
        let inputs: Vec<AttentionInput<'_>> = cases
            .iter()
            .zip(&caches)
            .map(|(params, ((pool, kv, _), queries))| AttentionInput { queries, kv: pool.view(kv, 0), params: *params })
            .collect();
        let expected: Vec<f32> =
            inputs.iter().flat_map(|input| attend_one(input.queries, input.kv, input.params)).collect();
        assert_eq!(attend(&inputs), expected);
    }
}
