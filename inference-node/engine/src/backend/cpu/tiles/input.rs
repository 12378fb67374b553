//! Activations quantized to 8 bits, in blocks of 32 with a scale each.

use pulp::{Simd, WithSimd};

use crate::backend::cpu::simd::{ROUND_TO_INTEGER, vectorized};
use crate::backend::cpu::thread_pool::{self, DisjointSlice};
use crate::backend::cpu::tiles::layout::TILE_BLOCK_COLUMNS;

/// Minimum number of rows for which quantization runs on all threads.
const MIN_PARALLEL_ROWS: usize = 8;

/// Scale and precomputed sums of a block of activations.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct BlockMeta {
    /// Scale of the quants: value = scale x quant.
    pub scale: f32,
    /// Sum of the dequantized values.
    pub sum: f32,
    /// -128 x the sum of the quants: initial value of a dot product with Q8_0 weights, which tiles store with an offset
    /// of 128.
    pub q8_correction: i32,
    /// -32 x the sum of the first 16 quants, and -32 x the sum of the last 16: initial values of dot products with Q6_K
    /// weights, which tiles store with an offset of 32.
    pub q6_corrections: [i32; 2],
}

/// The quants of a block, four per word with the first in the lowest bits, as the kernels need them.
pub type BlockWords = [i32; TILE_BLOCK_COLUMNS / 4];

/// Quantized rows of activations.
pub struct QuantizedInput {
    quants: Vec<BlockWords>,
    meta: Vec<BlockMeta>,
    rows: usize,
    cols: usize,
}

impl QuantizedInput {
    /// Quantizes `values`: (rows, `cols`), with `cols` a multiple of 32.
    pub fn new(values: &[f32], cols: usize) -> Self {
        assert!(
            cols > 0 && cols.is_multiple_of(TILE_BLOCK_COLUMNS) && values.len().is_multiple_of(cols),
            "the values are not rows of {cols} columns, or these are not whole blocks"
        );
        let rows = values.len() / cols;
        let mut quants = vec![[0; TILE_BLOCK_COLUMNS / 4]; values.len() / TILE_BLOCK_COLUMNS];
        let mut meta = vec![BlockMeta::default(); values.len() / TILE_BLOCK_COLUMNS];
        if rows < MIN_PARALLEL_ROWS {
            vectorized(Quantize { values, quants: &mut quants, meta: &mut meta });
        } else {
            let size = thread_pool::chunk_size(rows) * cols;
            let (quants, meta) = (DisjointSlice::new(&mut quants), DisjointSlice::new(&mut meta));
            thread_pool::run(values.len().div_ceil(size), &|chunk| {
                let values = &values[chunk * size..][..size.min(values.len() - chunk * size)];
                // SAFETY: chunks do not overlap: they begin `size` values apart, which are whole rows.
                #[allow(unsafe_code)]
                let (quants, meta) = unsafe {
                    let blocks = (chunk * size / TILE_BLOCK_COLUMNS, values.len() / TILE_BLOCK_COLUMNS);
                    (quants.slice(blocks.0, blocks.1), meta.slice(blocks.0, blocks.1))
                };
                vectorized(Quantize { values, quants, meta });
            });
        }
        Self { quants, meta, rows, cols }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Quants and metadata of the blocks of a row.
    pub fn row(&self, row: usize) -> (&[BlockWords], &[BlockMeta]) {
        let blocks = self.cols / TILE_BLOCK_COLUMNS;
        (&self.quants[row * blocks..][..blocks], &self.meta[row * blocks..][..blocks])
    }

    /// The quantized activations converted back to F32.
    #[cfg(test)]
    pub fn dequantized(&self) -> Vec<f32> {
        let blocks = self.quants.iter().zip(&self.meta);
        blocks.flat_map(|(words, meta)| quants(words).map(|q| f32::from(q) * meta.scale)).collect()
    }
}

/// Unpacks the quants of a block.
pub fn quants(words: &BlockWords) -> [i8; TILE_BLOCK_COLUMNS] {
    std::array::from_fn(|at| (words[at / 4] >> (at % 4 * 8)) as i8)
}

/// Work for [`vectorized`]: quantizes whole blocks.
struct Quantize<'a> {
    values: &'a [f32],
    quants: &'a mut [BlockWords],
    meta: &'a mut [BlockMeta],
}

impl WithSimd for Quantize<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let blocks = self.values.as_chunks::<TILE_BLOCK_COLUMNS>().0.iter().zip(self.quants);
        for ((values, words), meta) in blocks.zip(self.meta) {
            *meta = quantize_block(values, words);
        }
    }
}

#[inline(always)]
fn quantize_block(values: &[f32; TILE_BLOCK_COLUMNS], words: &mut BlockWords) -> BlockMeta {
    // As integers, the bit patterns of absolute values have the same order as the values. NaN is the largest, so it
    // propagates into the scale.
    let mut largest = 0u32;
    for value in values {
        largest = largest.max(value.to_bits() & 0x7fff_ffff);
    }
    let largest = f32::from_bits(largest);
    let scale = largest / 127.0;
    let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
    let mut quants = [0i8; TILE_BLOCK_COLUMNS];
    for (value, quant) in values.iter().zip(&mut quants) {
        *quant = (value * inverse + ROUND_TO_INTEGER).to_bits() as i8;
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
    BlockMeta {
        scale,
        sum: total as f32 * scale,
        q8_correction: -128 * total,
        q6_corrections: sums.map(|sum| -32 * sum),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantization_error_is_at_most_half_a_step() {
        let values: Vec<f32> = (0..640).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.01 * (1 + i / 32) as f32).collect();
        for rows in [1, 2, 20] {
            let input = QuantizedInput::new(&values, 640 / rows);
            for (block, (got, want)) in
                input.dequantized().chunks(TILE_BLOCK_COLUMNS).zip(values.chunks(TILE_BLOCK_COLUMNS)).enumerate()
            {
                let meta = input.meta[block];
                for (got, want) in got.iter().zip(want) {
                    assert!((got - want).abs() <= meta.scale * 0.5001, "{got} {want}");
                }
                let sum: f32 = got.iter().sum();
                assert!((sum - meta.sum).abs() < 1e-4);
                assert_eq!(meta.q8_correction, 4 * (meta.q6_corrections[0] + meta.q6_corrections[1]));
            }
        }
        assert_eq!(QuantizedInput::new(&[0.0; 32], 32).dequantized(), [0.0; 32]);
    }
}
