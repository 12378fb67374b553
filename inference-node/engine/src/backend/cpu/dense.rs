//! Batch-invariant GEMM with F32 matrices: every sum has a fixed order.
//!
//! A general GEMM chooses its blocking by the number of rows, so a row's last bits depend on the rest of the batch.
//! Here each output value is one dot product, summed in 16 lanes that are added pairwise at the end, whatever the
//! batch: F32 models thus give the same text in every batch. Two input rows and two weight rows are processed together,
//! so that each is read half as often.

use candle_core::{Result, Tensor};
use pulp::{Simd, WithSimd};

use crate::backend::cpu::simd::{LANES, add_lanes, multiply_add, vectorized};
use crate::backend::cpu::thread_pool::{self, DisjointSlice};

/// Number of weight rows in one chunk of work for the thread pool.
const CHUNK_ROWS: usize = 32;
/// Number of multiply-adds below which one thread is faster than the pool.
const MIN_PARALLEL_MULTIPLY_ADDS: usize = 1 << 19;

/// An F32 weight matrix.
pub struct Dense {
    /// Elements in row-major order, (rows, columns).
    pub weights: Vec<f32>,
    pub rows: usize,
    pub cols: usize,
}

impl Dense {
    /// Creates a matrix from a (rows, columns) tensor.
    pub fn new(values: &Tensor) -> Result<Self> {
        let (rows, cols) = values.dims2()?;
        Ok(Self { weights: values.flatten_all()?.to_vec1()?, rows, cols })
    }

    /// Multiplies n input vectors by the matrix: (n, columns) -> (n, rows).
    pub fn multiply(&self, x: &[f32]) -> Vec<f32> {
        let n = x.len() / self.cols.max(1);
        assert!(
            x.len() == n * self.cols && self.weights.len() == self.rows * self.cols,
            "{} values are not rows of {} columns, or {} weights are not {} such rows",
            x.len(),
            self.cols,
            self.weights.len(),
            self.rows
        );
        let mut out = vec![0.0; n * self.rows];
        let slots = DisjointSlice::new(&mut out);
        let chunk = |at: usize| {
            let begin = at * CHUNK_ROWS;
            let width = CHUNK_ROWS.min(self.rows - begin);
            let weights = &self.weights[begin * self.cols..][..width * self.cols];
            let mut out = vec![0.0; n * width];
            vectorized(DenseChunk { x, weights, cols: self.cols, out: &mut out });
            for (row, values) in out.chunks_exact(width).enumerate() {
                // SAFETY: only this chunk writes these columns.
                #[allow(unsafe_code)]
                unsafe { slots.slice(row * self.rows + begin, width) }.copy_from_slice(values);
            }
        };
        let chunks = self.rows.div_ceil(CHUNK_ROWS);
        if n * self.weights.len() >= MIN_PARALLEL_MULTIPLY_ADDS {
            thread_pool::run(chunks, &chunk);
        } else {
            (0..chunks).for_each(chunk);
        }
        out
    }
}

/// Product of some rows of the matrix with all input vectors; `out` is (input vectors, rows of the chunk).
struct DenseChunk<'a> {
    x: &'a [f32],
    weights: &'a [f32],
    cols: usize,
    out: &'a mut [f32],
}

impl WithSimd for DenseChunk<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (cols, width) = (self.cols, self.weights.len() / self.cols);
        let row = |values: &[f32], at: usize, count: usize| {
            at.min(count - 1) * cols..at.min(count - 1) * cols + values.len().min(cols)
        };
        let n = self.x.len() / cols;
        for i in (0..n).step_by(2) {
            let x = [&self.x[row(self.x, i, n)], &self.x[row(self.x, i + 1, n)]];
            for j in (0..width).step_by(2) {
                let w = [&self.weights[row(self.weights, j, width)], &self.weights[row(self.weights, j + 1, width)]];
                let sums = dots(simd, x, w);
                for (a, sums) in sums.iter().enumerate().take(n - i) {
                    for (b, sum) in sums.iter().enumerate().take(width - j) {
                        self.out[(i + a) * width + j + b] = *sum;
                    }
                }
            }
        }
    }
}

/// The four dot products of two input vectors with two weight rows.
#[inline(always)]
fn dots<S: Simd>(simd: S, x: [&[f32]; 2], w: [&[f32]; 2]) -> [[f32; 2]; 2] {
    let mut sums = [[[0.0; LANES]; 2]; 2];
    let (x0, x0_rest) = x[0].as_chunks::<LANES>();
    let (x1, x1_rest) = x[1].as_chunks::<LANES>();
    let (w0, w0_rest) = w[0].as_chunks::<LANES>();
    let (w1, w1_rest) = w[1].as_chunks::<LANES>();
    for (((x0, x1), w0), w1) in x0.iter().zip(x1).zip(w0).zip(w1) {
        multiply_add(simd, x0, w0, &mut sums[0][0]);
        multiply_add(simd, x0, w1, &mut sums[0][1]);
        multiply_add(simd, x1, w0, &mut sums[1][0]);
        multiply_add(simd, x1, w1, &mut sums[1][1]);
    }
    for (a, x) in [x0_rest, x1_rest].into_iter().enumerate() {
        for (b, w) in [w0_rest, w1_rest].into_iter().enumerate() {
            for (sum, (x, w)) in sums[a][b].iter_mut().zip(x.iter().zip(w)) {
                *sum = x.mul_add(*w, *sum);
            }
        }
    }
    sums.map(|row| row.map(add_lanes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize, step: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * step) % 101) as f32 / 50.0 - 1.0).collect()
    }

    #[test]
    fn product_is_correct_and_batch_invariant() {
        for (n, rows, cols) in [(1, 1, 1), (3, 33, 50), (5, 70, 64), (1, 31, 16)] {
            let dense = Dense { weights: numbers(rows * cols, 37), rows, cols };
            let x = numbers(n * cols, 13);
            let got = dense.multiply(&x);
            for (row, got) in x.chunks_exact(cols).zip(got.chunks_exact(rows)) {
                for (weights, got) in dense.weights.chunks_exact(cols).zip(got) {
                    let want: f64 = row.iter().zip(weights).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                    assert!((f64::from(*got) - want).abs() < 1e-4, "{got} {want}");
                }
                assert_eq!(dense.multiply(row), got, "alone");
            }
        }
    }
}
