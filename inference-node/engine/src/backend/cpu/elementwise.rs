//! The operations between matrix products: norms, gated activations, sums, soft caps.
//!
//! They run in place where possible, and on all threads if a prompt is long enough. Sums have a fixed order, so a row's
//! result does not depend on the batch.

use pulp::{Simd, WithSimd};

use crate::backend::cpu::simd::{LANES, add_lanes, exp, tanh, vectorized};
use crate::backend::cpu::thread_pool;

/// Number of values below which one thread is faster than the pool.
const MIN_PARALLEL_VALUES: usize = 1 << 15;

/// Splits `values` into groups of consecutive rows of `width` values, and calls `work` with the index of each group's
/// first row and the group's values. Runs on all threads if there are enough values.
pub fn parallel_rows(values: &mut [f32], width: usize, work: impl Fn(usize, &mut [f32]) + Sync) {
    if values.len() < MIN_PARALLEL_VALUES {
        work(0, values);
    } else {
        let size = thread_pool::chunk_size(values.len() / width);
        thread_pool::for_each_chunk(values, size * width, |at, chunk| work(at * size, chunk));
    }
}

/// RMS norm of each row of `weights.len()` values, in place: Zhang and Sennrich, <https://arxiv.org/abs/1910.07467>.
pub fn rms_norm_in_place(values: &mut [f32], weights: &[f32], epsilon: f32) {
    parallel_rows(values, weights.len(), |_, values| vectorized(RmsNorm { values, weights, epsilon }));
}

/// RMS norm of each row of `weights.len()` values, into a new vector.
pub fn rms_norm(values: &[f32], weights: &[f32], epsilon: f32) -> Vec<f32> {
    let mut out = values.to_vec();
    rms_norm_in_place(&mut out, weights, epsilon);
    out
}

/// Copies the columns `from..from + width` of a matrix whose rows have `row` values.
pub fn columns(all: &[f32], row: usize, from: usize, width: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(all.len() / row * width);
    all.chunks_exact(row).for_each(|row| out.extend_from_slice(&row[from..from + width]));
    out
}

/// Adds `values` to `to`, element by element.
pub fn add(to: &mut [f32], values: &[f32]) {
    to.iter_mut().zip(values).for_each(|(to, value)| *to += value);
}

/// Gated activation, in place: `gate` becomes activation(`gate`) x `up`, with SiLU or the tanh approximation of GELU.
pub fn activate(gate: &mut [f32], up: &[f32], width: usize, gelu: bool) {
    parallel_rows(gate, width, |first, gate| {
        let up = &up[first * width..][..gate.len()];
        vectorized(GatedActivation { gate, up, gelu });
    });
}

/// Soft cap, in place: a value becomes cap x tanh(value / cap).
pub fn softcap(values: &mut [f32], cap: f32) {
    values.iter_mut().for_each(|value| *value = cap * tanh(*value / cap));
}

struct RmsNorm<'a> {
    values: &'a mut [f32],
    weights: &'a [f32],
    epsilon: f32,
}

impl WithSimd for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        for row in self.values.chunks_exact_mut(self.weights.len()) {
            let mut sums = [0.0; LANES];
            let (chunks, rest) = row.as_chunks::<LANES>();
            for chunk in chunks {
                for lane in 0..LANES {
                    sums[lane] += chunk[lane] * chunk[lane];
                }
            }
            for (sum, value) in sums.iter_mut().zip(rest) {
                *sum += value * value;
            }
            let factor = 1.0 / (add_lanes(sums) / self.weights.len() as f32 + self.epsilon).sqrt();
            for (value, weight) in row.iter_mut().zip(self.weights) {
                *value = *value * factor * weight;
            }
        }
    }
}

struct GatedActivation<'a> {
    gate: &'a mut [f32],
    up: &'a [f32],
    gelu: bool,
}

impl WithSimd for GatedActivation<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let pairs = self.gate.iter_mut().zip(self.up);
        if self.gelu {
            pairs.for_each(|(gate, up)| *gate = gelu(*gate) * up);
        } else {
            pairs.for_each(|(gate, up)| *gate = silu(*gate) * up);
        }
    }
}

/// SiLU: x / (1 + e^-x).
#[inline(always)]
fn silu(x: f32) -> f32 {
    let t = exp(-x.abs());
    x * (if x < 0.0 { t } else { 1.0 }) / (1.0 + t)
}

/// Tanh approximation of GELU: x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))). Hendrycks and Gimpel,
/// <https://arxiv.org/abs/1606.08415>.
#[inline(always)]
fn gelu(x: f32) -> f32 {
    const FACTOR: f32 = 0.797_884_6;
    0.5 * x * (1.0 + tanh(FACTOR * x * (1.0 + 0.044_715 * x * x)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 7919) % 1009) as f32 / 50.0 - 10.0).collect()
    }

    #[test]
    fn rms_norm_matches_its_definition() {
        for (count, width) in [(3, 50), (1, 16), (70, 576)] {
            let (values, weights) = (numbers(count * width), numbers(width));
            let got = rms_norm(&values, &weights, 1e-5);
            for (row, got) in values.chunks_exact(width).zip(got.chunks_exact(width)) {
                let mean = row.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / width as f64;
                for ((value, weight), got) in row.iter().zip(&weights).zip(got) {
                    let want = f64::from(*value) / (mean + 1e-5).sqrt() * f64::from(*weight);
                    assert!((f64::from(*got) - want).abs() <= want.abs() * 1e-6, "{got} is not {want}");
                }
                assert_eq!(rms_norm(row, &weights, 1e-5), got, "alone");
            }
        }
    }

    #[test]
    fn activations_match_their_definitions() {
        let (gate, up) = (numbers(40_000), numbers(40_000));
        for gelu in [false, true] {
            let mut got = gate.clone();
            activate(&mut got, &up, 400, gelu);
            for ((x, up), got) in gate.iter().zip(&up).zip(got) {
                let (x, up) = (f64::from(*x), f64::from(*up));
                let want = up
                    * if gelu {
                        let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
                        0.5 * x * (1.0 + inner.tanh())
                    } else {
                        x / (1.0 + (-x).exp())
                    };
                assert!((f64::from(got) - want).abs() < 2e-5, "{x}: {got} is not {want}");
            }
        }
        let mut values = [1.0, -40.0];
        softcap(&mut values, 2.0);
        assert!((values[0] - 2.0 * 0.5f32.tanh()).abs() < 1e-6 && values[1] == -2.0);
    }
}
