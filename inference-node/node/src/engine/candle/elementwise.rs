//! What lies between the matrix products: norms, gates, sums. In place where it can be, and on all threads where a prompt
//! makes it worth while. Sums run in a fixed order, so that a row's result is its own.

use pulp::{Simd, WithSimd};

use crate::engine::candle::team;
use crate::engine::lanes::{LANES, add_lanes, exp, tanh, vectorised};

/// Values below which threads cost more than they bring.
const WORTH_THREADS: usize = 1 << 15;

/// Calls `work` with runs of whole rows of `width` values and the number of the first, on all threads if worth while.
pub fn rows(values: &mut [f32], width: usize, work: impl Fn(usize, &mut [f32]) + Sync) {
    if values.len() < WORTH_THREADS {
        work(0, values);
    } else {
        let share = team::share(values.len() / width);
        team::chunks(values, share * width, |at, chunk| work(at * share, chunk));
    }
}

/// Root-mean-square norm of each row of `weights.len()` values, in place.
pub fn normalise(values: &mut [f32], weights: &[f32], epsilon: f32) {
    rows(values, weights.len(), |_, values| vectorised(Norm { values, weights, epsilon }));
}

/// The same into a new vector.
pub fn normalised(values: &[f32], weights: &[f32], epsilon: f32) -> Vec<f32> {
    let mut out = values.to_vec();
    normalise(&mut out, weights, epsilon);
    out
}

/// Columns `from..from + width` of rows that are `row` long.
pub fn columns(all: &[f32], row: usize, from: usize, width: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(all.len() / row * width);
    all.chunks_exact(row).for_each(|row| out.extend_from_slice(&row[from..from + width]));
    out
}

pub fn add(to: &mut [f32], values: &[f32]) {
    to.iter_mut().zip(values).for_each(|(to, value)| *to += value);
}

/// `gate` becomes `up` times its activation, SiLU or (the tanh form of) GELU.
pub fn activate(gate: &mut [f32], up: &[f32], width: usize, gelu: bool) {
    rows(gate, width, |first, gate| {
        let up = &up[first * width..][..gate.len()];
        vectorised(Activate { gate, up, gelu });
    });
}

/// `values` become cap x tanh(value / cap).
pub fn squeeze(values: &mut [f32], cap: f32) {
    values.iter_mut().for_each(|value| *value = cap * tanh(*value / cap));
}

struct Norm<'a> {
    values: &'a mut [f32],
    weights: &'a [f32],
    epsilon: f32,
}

impl WithSimd for Norm<'_> {
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

struct Activate<'a> {
    gate: &'a mut [f32],
    up: &'a [f32],
    gelu: bool,
}

impl WithSimd for Activate<'_> {
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

/// x / (1 + e^-x)
#[inline(always)]
fn silu(x: f32) -> f32 {
    let t = exp(-x.abs());
    x * (if x < 0.0 { t } else { 1.0 }) / (1.0 + t)
}

/// x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
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
    fn a_norm_is_by_the_root_of_the_mean_square() {
        for (count, width) in [(3, 50), (1, 16), (70, 576)] {
            let (values, weights) = (numbers(count * width), numbers(width));
            let got = normalised(&values, &weights, 1e-5);
            for (row, got) in values.chunks_exact(width).zip(got.chunks_exact(width)) {
                let mean = row.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / width as f64;
                for ((value, weight), got) in row.iter().zip(&weights).zip(got) {
                    let want = f64::from(*value) / (mean + 1e-5).sqrt() * f64::from(*weight);
                    assert!((f64::from(*got) - want).abs() <= want.abs() * 1e-6, "{got} is not {want}");
                }
                assert_eq!(normalised(row, &weights, 1e-5), got, "alone");
            }
        }
    }

    #[test]
    fn activations_are_what_they_are_called() {
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
        squeeze(&mut values, 2.0);
        assert!((values[0] - 2.0 * 0.5f32.tanh()).abs() < 1e-6 && values[1] == -2.0);
    }
}
