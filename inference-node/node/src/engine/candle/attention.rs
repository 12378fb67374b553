//! Causal attention of one sequence's new positions over all its keys and values.
//!
//! Written for two things candle's own kernel does not give: prompts of thousands of tokens at a useful rate (several
//! query rows share one pass over keys and values, and the machine's vector width is found at run time), and a fixed
//! order of every sum. A row's result depends on its query and the keys up to it alone: not on how a prompt was cut into
//! chunks, not on the batch, not on the number of threads. That is what makes a seed reproducible.
//!
//! Sums run in 16 lanes and the lanes are added pairwise at the end. Positions after a row's own get weight zero, which
//! adds exactly nothing. The softmax keeps all scores of a row instead of rescaling as it goes: they fit the cache.

use pulp::Arch;
use rayon::prelude::*;

use crate::engine::candle::kv::LayerKv;

const LANES: usize = 16;
/// Query rows that share a pass over keys and values: their sums stay in registers.
const ROWS: usize = 4;
/// Multiply-adds below which threads cost more than they bring.
const WORTH_THREADS: usize = 1 << 20;

/// Sizes of one call.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Positions each head of the cache has room for.
    pub capacity: usize,
    /// Positions before the new ones.
    pub past: usize,
    /// New positions, whose keys and values are in the cache already.
    pub new: usize,
}

/// `queries` is (new, heads, head dim); the result is (heads, new, head dim).
pub fn attend(queries: &[f32], kv: &LayerKv, sizes: Sizes) -> Vec<f32> {
    let Sizes { heads, head_dim, past, new, .. } = sizes;
    let mut out = vec![0.0; heads * new * head_dim];
    let arch = Arch::new();
    let blocks = out.chunks_mut(new * head_dim).enumerate().flat_map(|(head, out)| {
        out.chunks_mut(ROWS * head_dim).enumerate().map(move |(block, out)| (head, block * ROWS, out))
    });
    let room = || vec![0.0; ROWS * (past + new)];
    let run = |scores: &mut Vec<f32>, (head, first, out): (usize, usize, &mut [f32])| {
        arch.dispatch(
            #[inline(always)]
            || match out.len() / head_dim {
                1 => block::<1>(queries, kv, sizes, head, first, scores, out),
                2 => block::<2>(queries, kv, sizes, head, first, scores, out),
                3 => block::<3>(queries, kv, sizes, head, first, scores, out),
                _ => block::<ROWS>(queries, kv, sizes, head, first, scores, out),
            },
        );
    };
    let work = heads * new * (past + new) * head_dim * 2;
    if work >= WORTH_THREADS && rayon::current_num_threads() > 1 {
        blocks.collect::<Vec<_>>().into_par_iter().for_each_init(room, run);
    } else {
        let mut scores = room();
        blocks.for_each(|block| run(&mut scores, block));
    }
    out
}

/// `R` rows of one head, from the new position `first` on; `out` is (R, head dim).
#[inline(always)]
fn block<const R: usize>(
    queries: &[f32],
    kv: &LayerKv,
    sizes: Sizes,
    head: usize,
    first: usize,
    scores: &mut [f32],
    out: &mut [f32],
) {
    let Sizes { heads, kv_heads, head_dim, capacity, past, .. } = sizes;
    let end = past + first + R;
    let shared = head / (heads / kv_heads) * capacity * head_dim;
    let keys = &kv.keys[shared..shared + end * head_dim];
    let values = &kv.values[shared..shared + end * head_dim];
    let query: [&[f32]; R] = std::array::from_fn(|row| {
        let at = ((first + row) * heads + head) * head_dim;
        &queries[at..at + head_dim]
    });
    let scale = 1.0 / (head_dim as f32).sqrt();
    let scores = &mut scores[..R * end];
    for (position, key) in keys.chunks_exact(head_dim).enumerate() {
        let mut sums = [[0.0f32; LANES]; R];
        let whole = head_dim / LANES * LANES;
        for at in (0..whole).step_by(LANES) {
            for row in 0..R {
                for lane in 0..LANES {
                    sums[row][lane] += query[row][at + lane] * key[at + lane];
                }
            }
        }
        for row in 0..R {
            for at in whole..head_dim {
                sums[row][at - whole] += query[row][at] * key[at];
            }
            scores[row * end + position] = add_lanes(sums[row]) * scale;
        }
    }
    let mut totals = [0.0f32; R];
    for row in 0..R {
        let (own, later) = scores[row * end..(row + 1) * end].split_at_mut(past + first + row + 1);
        totals[row] = softmax_weights(own);
        later.fill(0.0);
    }
    for at in (0..head_dim).step_by(LANES) {
        let width = LANES.min(head_dim - at);
        let mut sums = [[0.0f32; LANES]; R];
        for (position, value) in values.chunks_exact(head_dim).enumerate() {
            let mut lanes = [0.0f32; LANES];
            lanes[..width].copy_from_slice(&value[at..at + width]);
            for row in 0..R {
                let weight = scores[row * end + position];
                for lane in 0..LANES {
                    sums[row][lane] += weight * lanes[lane];
                }
            }
        }
        for row in 0..R {
            for lane in 0..width {
                out[row * head_dim + at + lane] = sums[row][lane] / totals[row];
            }
        }
    }
}

/// Turns scores into weights relative to the highest, and returns their sum.
#[inline(always)]
fn softmax_weights(scores: &mut [f32]) -> f32 {
    let mut high = [f32::NEG_INFINITY; LANES];
    let mut chunks = scores.chunks_exact(LANES);
    for chunk in &mut chunks {
        for lane in 0..LANES {
            high[lane] = if chunk[lane] > high[lane] { chunk[lane] } else { high[lane] };
        }
    }
    let rest = chunks.remainder().iter().chain(&high);
    let highest = rest.fold(f32::NEG_INFINITY, |a, b| if *b > a { *b } else { a });
    let mut sums = [0.0f32; LANES];
    let mut chunks = scores.chunks_exact_mut(LANES);
    for chunk in &mut chunks {
        for lane in 0..LANES {
            chunk[lane] = exp(chunk[lane] - highest);
            sums[lane] += chunk[lane];
        }
    }
    for (score, sum) in chunks.into_remainder().iter_mut().zip(&mut sums) {
        *score = exp(*score - highest);
        *sum += *score;
    }
    add_lanes(sums)
}

#[inline(always)]
fn add_lanes(lanes: [f32; LANES]) -> f32 {
    let mut lanes = lanes;
    let mut width = LANES / 2;
    while width > 0 {
        for at in 0..width {
            lanes[at] += lanes[at + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// e^x for x <= 0 to about two units in the last place; a library call a lane would undo the vectors.
///
/// x = n ln 2 + r with |r| <= ln 2 / 2: 2^n is put into the exponent, e^r is the polynomial of Cephes' expf.
#[inline(always)]
fn exp(x: f32) -> f32 {
    // Below this the result is not a normal number any more.
    let x = if x > -87.0 { x } else { -87.0 };
    // Adding 1.5 x 2^23 rounds to a whole number and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * 0.693_359_4 + n * 2.121_944_4e-4;
    let mut p = 1.987_569_1e-4f32;
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_6e-1, 0.5] {
        p = p * r + c;
    }
    let power = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23;
    (p * r * r + r + 1.0) * f32::from_bits(power)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_exp() {
        for i in 0..100_000 {
            let x = -87.0 * i as f32 / 100_000.0;
            let (got, want) = (f64::from(exp(x)), f64::from(x).exp());
            assert!((got - want).abs() <= want * 3e-7, "e^{x} is {want}, not {got}");
        }
        assert_eq!(exp(0.0), 1.0);
    }

    fn numbers(count: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..count).map(|_| next() * 3.0).collect()
    }

    /// By the definition, in f64.
    fn reference(queries: &[f32], kv: &LayerKv, s: Sizes) -> Vec<f64> {
        let mut out = Vec::new();
        for head in 0..s.heads {
            let base = head / (s.heads / s.kv_heads) * s.capacity;
            for row in 0..s.new {
                let query = &queries[(row * s.heads + head) * s.head_dim..][..s.head_dim];
                let vector = |of: &[f32], at: usize| -> Vec<f64> {
                    of[(base + at) * s.head_dim..][..s.head_dim].iter().map(|v| f64::from(*v)).collect()
                };
                let weights: Vec<f64> = (0..=s.past + row)
                    .map(|at| {
                        let dot: f64 = vector(&kv.keys, at).iter().zip(query).map(|(k, q)| k * f64::from(*q)).sum();
                        (dot / (s.head_dim as f64).sqrt()).exp()
                    })
                    .collect();
                let total: f64 = weights.iter().sum();
                for dim in 0..s.head_dim {
                    let sum: f64 = weights.iter().enumerate().map(|(at, w)| w * vector(&kv.values, at)[dim]).sum();
                    out.push(sum / total);
                }
            }
        }
        out
    }

    #[test]
    fn it_is_attention() {
        for head_dim in [64, 40, 2] {
            let sizes = Sizes { heads: 4, kv_heads: 2, head_dim, capacity: 50, past: 11, new: 23 };
            let cache = 2 * 50 * head_dim;
            let kv = LayerKv { keys: numbers(cache, 1), values: numbers(cache, 2) };
            let queries = numbers(23 * 4 * head_dim, 3);
            let got = attend(&queries, &kv, sizes);
            let want = reference(&queries, &kv, sizes);
            assert_eq!(got.len(), want.len());
            for (got, want) in got.iter().zip(want) {
                assert!((f64::from(*got) - want).abs() < 2e-5, "{got} {want}");
            }
        }
    }

    #[test]
    fn cutting_a_prompt_changes_no_bit() {
        let whole = Sizes { heads: 3, kv_heads: 1, head_dim: 64, capacity: 64, past: 0, new: 37 };
        let kv = LayerKv { keys: numbers(64 * 64, 4), values: numbers(64 * 64, 5) };
        let queries = numbers(37 * 3 * 64, 6);
        let expected = attend(&queries, &kv, whole);
        for cut in 1..37 {
            let rest = &queries[cut * 3 * 64..];
            let got = attend(rest, &kv, Sizes { past: cut, new: 37 - cut, ..whole });
            for head in 0..3 {
                let (got, want) = (
                    &got[head * (37 - cut) * 64..(head + 1) * (37 - cut) * 64],
                    &expected[(head * 37 + cut) * 64..(head + 1) * 37 * 64],
                );
                assert_eq!(got, want, "cut at {cut}");
            }
        }
    }
}
