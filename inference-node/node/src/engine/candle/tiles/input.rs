//! Activations as the kernels want them: 8 bits each, in blocks of 32 with a scale.

use pulp::{Simd, WithSimd};

use crate::engine::candle::team::{self, Slots};
use crate::engine::candle::tiles::layout::BLOCK;
use crate::engine::lanes::vectorised;

/// Rows from which on rounding is shared out.
const WORTH_THREADS: usize = 8;

/// What a kernel wants to know of a block beside its values.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct Meta {
    /// A value is this times its 8 bits.
    pub scale: f32,
    /// Sum of the values.
    pub sum: f32,
    /// Minus 128 times the sum of the 8 bits: where sums begin when weights are held plus 128.
    pub eight: i32,
    /// Minus 32 times the sum of the first and the last 16.
    pub six: [i32; 2],
}

/// The 8-bit values of a block, four to a word as the kernels take them, the first in the lowest bits.
pub type Words = [i32; BLOCK / 4];

/// Rows of activations.
pub struct Input {
    quants: Vec<Words>,
    meta: Vec<Meta>,
    rows: usize,
    cols: usize,
}

impl Input {
    /// `values` is (rows, `cols`), `cols` a multiple of 32.
    pub fn new(values: &[f32], cols: usize) -> Self {
        assert!(cols > 0 && cols.is_multiple_of(BLOCK) && values.len().is_multiple_of(cols), "{cols} columns");
        let rows = values.len() / cols;
        let mut quants = vec![[0; BLOCK / 4]; values.len() / BLOCK];
        let mut meta = vec![Meta::default(); values.len() / BLOCK];
        if rows < WORTH_THREADS {
            vectorised(Round { values, quants: &mut quants, meta: &mut meta });
        } else {
            let share = team::share(rows) * cols;
            let (quants, meta) = (Slots::new(&mut quants), Slots::new(&mut meta));
            team::run(values.len().div_ceil(share), &|piece| {
                let values = &values[piece * share..][..share.min(values.len() - piece * share)];
                // SAFETY: pieces do not overlap: they begin `share` values apart, which are whole rows.
                #[allow(unsafe_code)]
                let (quants, meta) = unsafe {
                    let blocks = (piece * share / BLOCK, values.len() / BLOCK);
                    (quants.slice(blocks.0, blocks.1), meta.slice(blocks.0, blocks.1))
                };
                vectorised(Round { values, quants, meta });
            });
        }
        Self { quants, meta, rows, cols }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The blocks of a row.
    pub fn row(&self, row: usize) -> (&[Words], &[Meta]) {
        let blocks = self.cols / BLOCK;
        (&self.quants[row * blocks..][..blocks], &self.meta[row * blocks..][..blocks])
    }

    /// What the values are after rounding.
    #[cfg(test)]
    pub fn values(&self) -> Vec<f32> {
        let blocks = self.quants.iter().zip(&self.meta);
        blocks.flat_map(|(words, meta)| quants(words).map(|q| f32::from(q) * meta.scale)).collect()
    }
}

/// The values of a block one by one.
pub fn quants(words: &Words) -> [i8; BLOCK] {
    std::array::from_fn(|at| (words[at / 4] >> (at % 4 * 8)) as i8)
}

/// Rounds whole blocks.
struct Round<'a> {
    values: &'a [f32],
    quants: &'a mut [Words],
    meta: &'a mut [Meta],
}

impl WithSimd for Round<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let blocks = self.values.as_chunks::<BLOCK>().0.iter().zip(self.quants);
        for ((values, words), meta) in blocks.zip(self.meta) {
            *meta = round(values, words);
        }
    }
}

#[inline(always)]
fn round(values: &[f32; BLOCK], words: &mut Words) -> Meta {
    // As whole numbers, magnitudes order like floats, and what is no number is above all: it stays in the scale.
    let mut largest = 0u32;
    for value in values {
        largest = largest.max(value.to_bits() & 0x7fff_ffff);
    }
    let largest = f32::from_bits(largest);
    let scale = largest / 127.0;
    let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
    // Adding 1.5 x 2^23 rounds to a whole number and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let mut quants = [0i8; BLOCK];
    for (value, quant) in values.iter().zip(&mut quants) {
        *quant = (value * inverse + ROUND).to_bits() as i8;
    }
    for (word, four) in words.iter_mut().zip(quants.as_chunks::<4>().0) {
        *word = i32::from_le_bytes(four.map(i8::cast_unsigned));
    }
    let mut sums = [0i32; 2];
    for (at, sum) in sums.iter_mut().enumerate() {
        for quant in &quants[at * 16..][..16] {
            *sum += i32::from(*quant);
        }
    }
    let total = sums[0] + sums[1];
    Meta { scale, sum: total as f32 * scale, eight: -128 * total, six: sums.map(|sum| -32 * sum) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_is_off_by_half_a_unit_at_most() {
        let values: Vec<f32> = (0..640).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.01 * (1 + i / 32) as f32).collect();
        for rows in [1, 2, 20] {
            let input = Input::new(&values, 640 / rows);
            for (block, (got, want)) in input.values().chunks(BLOCK).zip(values.chunks(BLOCK)).enumerate() {
                let meta = input.meta[block];
                for (got, want) in got.iter().zip(want) {
                    assert!((got - want).abs() <= meta.scale * 0.5001, "{got} {want}");
                }
                let sum: f32 = got.iter().sum();
                assert!((sum - meta.sum).abs() < 1e-4 && meta.eight == 4 * (meta.six[0] + meta.six[1]));
            }
        }
        assert_eq!(Input::new(&[0.0; 32], 32).values(), [0.0; 32]);
    }
}
