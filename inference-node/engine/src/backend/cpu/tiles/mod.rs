//! Quantized matrices packed into tiles, and their product with rows of activations.
//!
//! A tile holds 16 weight rows. Each row is one lane of the vectors, so sums need no horizontal additions, and each
//! weight is loaded once for all input rows. The weights keep the file's precision: Q4_K, Q5_K and Q6_K keep the scales
//! of their blocks, Q4_0 and Q4_1 share one layout, Q8_0 has another. Only the tiles are kept in memory, not the file's
//! blocks.
//!
//! Activations are quantized to 8 bits in blocks of 32, see [`input`]. Within a block all sums are integers; blocks are
//! added in order. No bit of a row's result depends on the batch, the threads or the kernel, except that kernels may
//! differ in whether a product is rounded before it is added.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod input;
mod layout;
mod pack;

pub use input::QuantizedInput;
pub use layout::TileFormat;

use crate::backend::cpu::thread_pool::{self, DisjointSlice};
use layout::{TILE_ROWS, TileRow};

/// Alignment of the tiles, in bytes, so that no vector straddles two cache lines.
const CACHE_LINE_BYTES: usize = 64;
/// Number of input rows per pass over the tiles of a chunk: few enough that they stay in the cache while the tiles are
/// streamed through it.
const CACHED_ROWS: usize = 64;

/// A weight matrix packed into tiles, with `rows` outputs and `cols` inputs.
pub struct Tiles {
    format: TileFormat,
    rows: usize,
    cols: usize,
    bytes: Vec<u8>,
    /// Offset of the first tile in `bytes`.
    start: usize,
}

/// The instruction set of a tile kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Isa {
    Avx512,
    Avx2,
}

/// The best instruction set of this machine that has a tile kernel; `None` if there is none.
#[cfg(target_arch = "x86_64")]
fn isa() -> Option<Isa> {
    use std::arch::is_x86_feature_detected as has;
    if has!("avx512f") && has!("avx512bw") && has!("avx512vnni") {
        Some(Isa::Avx512)
    } else if has!("avx2") && has!("fma") && has!("f16c") {
        Some(Isa::Avx2)
    } else {
        None
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn isa() -> Option<Isa> {
    None
}

/// Whether this machine has a tile kernel.
pub fn available() -> bool {
    isa().is_some()
}

impl Tiles {
    /// Packs the blocks of a GGUF file. `None` if they are not a matrix of `rows` x `cols`, or the columns do not fill
    /// whole steps.
    pub fn pack(format: TileFormat, blocks: &[u8], rows: usize, cols: usize) -> Option<Self> {
        let length = format.tile_bytes(cols)?.checked_mul(rows.div_ceil(TILE_ROWS))?;
        let mut bytes = vec![0; length + CACHE_LINE_BYTES];
        let start = bytes.as_ptr().align_offset(CACHE_LINE_BYTES).min(CACHE_LINE_BYTES);
        pack::pack(format, blocks, rows, cols, &mut bytes[start..start + length])?;
        Some(Self { format, rows, cols, bytes, start })
    }

    /// Actual size of the tiles in memory, in bytes, without the padding for alignment.
    pub fn stored_bytes(&self) -> usize {
        self.bytes.len() - CACHE_LINE_BYTES
    }

    fn tile_count(&self) -> usize {
        self.rows.div_ceil(TILE_ROWS)
    }

    fn tile(&self, at: usize) -> &[u8] {
        let length = self.stored_bytes() / self.tile_count().max(1);
        &self.bytes[self.start + at * length..][..length]
    }

    /// Appends row `at` of the matrix to `to`, as F32. Returns false if there is no such row.
    pub fn row(&self, at: usize, to: &mut Vec<f32>) -> bool {
        if at >= self.rows {
            return false;
        }
        for step in self.tile(at / TILE_ROWS).chunks_exact(self.format.step_bytes()) {
            for block in 0..self.format.step_blocks() {
                let row = TileRow::read(self.format, step, block, at % TILE_ROWS);
                to.extend((0..row.quants.len()).map(|col| row.value(col)));
            }
        }
        true
    }
}

/// Multiplies several matrices by the same n input rows, in one parallel region. Each result is (n, rows of the
/// matrix).
pub fn multiply<const N: usize>(matrices: [&Tiles; N], x: &QuantizedInput) -> [Vec<f32>; N] {
    let mut outs = matrices.map(|m| vec![0.0f32; x.rows() * m.rows]);
    let slots = outs.each_mut().map(|out| DisjointSlice::new(out));
    let total: usize = matrices.iter().map(|m| m.tile_count()).sum();
    let size = thread_pool::chunk_size(total);
    thread_pool::run(total.div_ceil(size), &|chunk| {
        let (mut begin, mut end) = (chunk * size, ((chunk + 1) * size).min(total));
        for (matrix, out) in matrices.iter().zip(&slots) {
            let own = begin.min(matrix.tile_count())..end.min(matrix.tile_count());
            if !own.is_empty() {
                matrix.multiply_tiles(own, x, out);
            }
            begin = begin.saturating_sub(matrix.tile_count());
            end = end.saturating_sub(matrix.tile_count());
        }
    });
    outs
}

/// The product of consecutive tiles of a matrix with all rows of an input.
struct TileGemm<'a> {
    tiles: &'a [u8],
    tile_bytes: usize,
    x: &'a QuantizedInput,
    /// Output, (input rows, `width`).
    out: &'a DisjointSlice<'a, f32>,
    width: usize,
    /// Columns of the output that are written.
    columns: std::ops::Range<usize>,
}

impl TileGemm<'_> {
    /// Whether the size of the tiles matches the number of input columns in this format.
    fn fits(&self, format: TileFormat) -> bool {
        format.tile_bytes(self.x.cols()) == Some(self.tile_bytes)
    }
}

impl Tiles {
    fn multiply_tiles(&self, tiles: std::ops::Range<usize>, x: &QuantizedInput, out: &DisjointSlice<'_, f32>) {
        assert_eq!(x.cols(), self.cols, "the input does not have as many columns as the matrix");
        let tile_bytes = self.stored_bytes() / self.tile_count().max(1);
        let gemm = TileGemm {
            tiles: &self.bytes[self.start + tiles.start * tile_bytes..self.start + tiles.end * tile_bytes],
            tile_bytes,
            x,
            out,
            width: self.rows,
            columns: tiles.start * TILE_ROWS..(tiles.end * TILE_ROWS).min(self.rows),
        };
        match isa() {
            #[cfg(target_arch = "x86_64")]
            Some(Isa::Avx512) => avx512::multiply(self.format, &gemm),
            #[cfg(target_arch = "x86_64")]
            Some(Isa::Avx2) => avx2::multiply(self.format, &gemm),
            _ => scalar(self.format, &gemm),
        }
    }
}

/// The scalar kernel: the reference for the tests of the vector kernels.
fn scalar(format: TileFormat, gemm: &TileGemm<'_>) {
    for (tile, from) in gemm.tiles.chunks_exact(gemm.tile_bytes).zip(gemm.columns.clone().step_by(TILE_ROWS)) {
        for column in from..(from + TILE_ROWS).min(gemm.columns.end) {
            for row in 0..gemm.x.rows() {
                let mut sum = 0.0;
                let (words, meta) = gemm.x.row(row);
                for (at, step) in tile.chunks_exact(format.step_bytes()).enumerate() {
                    for block in 0..format.step_blocks() {
                        let weights = TileRow::read(format, step, block, column - from);
                        let at = at * format.step_blocks() + block;
                        sum += weights.dot(&input::quants(&words[at]), meta[at].scale);
                    }
                }
                // SAFETY: only this chunk writes these columns.
                #[allow(unsafe_code)]
                unsafe {
                    gemm.out.slice(row * gemm.width + column, 1)[0] = sum;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::quantized::{GgmlDType, QTensor};
    use candle_core::{Device, Tensor};
    use cfq_test_skip::skip;

    const KINDS: [(GgmlDType, TileFormat); 6] = [
        (GgmlDType::Q4_0, TileFormat::Q4_0),
        (GgmlDType::Q4_1, TileFormat::Q4_1),
        (GgmlDType::Q8_0, TileFormat::Q8_0),
        (GgmlDType::Q4K, TileFormat::Q4K),
        (GgmlDType::Q5K, TileFormat::Q5K),
        (GgmlDType::Q6K, TileFormat::Q6K),
    ];

    fn numbers(count: usize, mut seed: u64) -> Vec<f32> {
        (0..count)
            .map(|_| {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (seed >> 40) as f32 / (1 << 23) as f32 - 1.0
            })
            .collect()
    }

    fn matrix(dtype: GgmlDType, format: TileFormat, rows: usize, cols: usize) -> (QTensor, Tiles) {
        let values = Tensor::from_vec(numbers(rows * cols, (rows * cols) as u64), (rows, cols), &Device::Cpu).unwrap();
        let stored = QTensor::quantize(&values, dtype).unwrap();
        let tiles = Tiles::pack(format, &stored.data().unwrap(), rows, cols).unwrap();
        (stored, tiles)
    }

    /// Matrix sizes (rows, columns): with a partial tile, with one step of columns, and with several steps.
    fn sizes(format: TileFormat) -> [(usize, usize); 4] {
        let least = 32 * format.step_blocks();
        [(1, least), (16, least * 3), (41, least * 2), (64, least * 5)]
    }

    #[test]
    fn tiles_hold_the_values_of_the_file() {
        for (dtype, format) in KINDS {
            for (rows, cols) in sizes(format) {
                let (stored, tiles) = matrix(dtype, format, rows, cols);
                let expected = stored.dequantize(&Device::Cpu).unwrap().to_vec2::<f32>().unwrap();
                for (at, expected) in expected.iter().enumerate() {
                    let mut got = Vec::new();
                    assert!(tiles.row(at, &mut got));
                    for (got, expected) in got.iter().zip(expected) {
                        assert!((got - expected).abs() <= expected.abs() * 1e-6, "{format:?}: {got} is not {expected}");
                    }
                    assert_eq!(got.len(), expected.len());
                }
                assert!(!tiles.row(rows, &mut Vec::new()));
            }
        }
    }

    type Kernel = fn(TileFormat, &TileGemm<'_>);

    /// The kernels that this CPU can run, with their names. Records the others as skipped in `test`.
    fn kernels(test: &str) -> Vec<(&'static str, Kernel)> {
        let mut all: Vec<(&'static str, Kernel)> = vec![("scalar", scalar)];
        #[cfg(target_arch = "x86_64")]
        {
            let isa = isa();
            match isa {
                Some(_) => all.push(("avx2", avx2::multiply)),
                None => skip(&format!("{test}/avx2"), "this CPU has no AVX2"),
            }
            match isa == Some(Isa::Avx512) {
                true => all.push(("avx512", avx512::multiply)),
                false => skip(&format!("{test}/avx512"), "this CPU has no AVX-512 with VNNI"),
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        skip(&format!("{test}/vector"), "the vector kernels are for x86-64");
        all
    }

    fn product(kernel: Kernel, tiles: &Tiles, x: &QuantizedInput) -> Vec<f32> {
        let mut out = vec![f32::NAN; x.rows() * tiles.rows];
        let tile_bytes = tiles.tile(0).len();
        let slots = DisjointSlice::new(&mut out);
        let bytes = &tiles.bytes[tiles.start..][..tiles.stored_bytes()];
        let (width, columns) = (tiles.rows, 0..tiles.rows);
        kernel(tiles.format, &TileGemm { tiles: bytes, tile_bytes, x, out: &slots, width, columns });
        out
    }

    #[test]
    fn kernels_are_correct_and_batch_invariant() {
        let kernels = kernels("kernels_are_correct_and_batch_invariant");
        for (dtype, format) in KINDS {
            for (rows, cols) in sizes(format) {
                let (stored, tiles) = matrix(dtype, format, rows, cols);
                let weights = stored.dequantize(&Device::Cpu).unwrap().to_vec2::<f32>().unwrap();
                let values = numbers(19 * cols, 5);
                let x = QuantizedInput::new(&values, cols);
                let (quantized, mut largest) = (x.dequantized(), 0f64);
                for (name, kernel) in &kernels {
                    let got = product(*kernel, &tiles, &x);
                    for (at, got) in got.iter().enumerate() {
                        let (row, column) = (at / rows, at % rows);
                        let pairs = quantized[row * cols..][..cols].iter().zip(&weights[column]);
                        let products = pairs.map(|(x, w)| f64::from(*x) * f64::from(*w));
                        let (want, size) = products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()));
                        let off = (f64::from(*got) - want).abs() / size;
                        assert!(off < 2e-6, "{name} {format:?} {rows}x{cols} at {row}, {column}: {got} is not {want}");
                        largest = largest.max(want.abs());
                    }
                    for count in [1, 2, 3, 5, 7, 8, 9, 12, 16] {
                        let part = QuantizedInput::new(&values[cols..][..count * cols], cols);
                        let part = product(*kernel, &tiles, &part);
                        assert_eq!(
                            part,
                            got[rows..][..count * rows],
                            "{name} {format:?} {rows}x{cols}: batch of {count}"
                        );
                    }
                }
                assert!(largest > 0.0);
            }
        }
    }

    #[test]
    fn several_matrices_share_an_input() {
        let (_, a) = matrix(GgmlDType::Q6K, TileFormat::Q6K, 100, 256);
        let (_, b) = matrix(GgmlDType::Q4_1, TileFormat::Q4_1, 33, 256);
        let x = QuantizedInput::new(&numbers(3 * 256, 9), 256);
        let [first, second] = multiply([&a, &b], &x);
        assert_eq!([first], multiply([&a], &x));
        assert_eq!([second], multiply([&b], &x));
    }

    #[test]
    fn nan_and_infinity_propagate() {
        let (_, tiles) = matrix(GgmlDType::Q8_0, TileFormat::Q8_0, 16, 64);
        for bad in [f32::NAN, f32::INFINITY] {
            let mut values = numbers(64, 1);
            values[40] = bad;
            let [out] = multiply([&tiles], &QuantizedInput::new(&values, 64));
            assert!(out.iter().all(|v| v.is_nan()), "{bad}: {out:?}");
        }
    }

    #[test]
    fn blocks_of_the_wrong_size_are_refused() {
        assert!(Tiles::pack(TileFormat::Q4K, &[0; 144], 1, 100).is_none());
        assert!(Tiles::pack(TileFormat::Q4K, &[0; 143], 1, 256).is_none());
        assert!(Tiles::pack(TileFormat::Q8_0, &[0; 34], usize::MAX, 32).is_none());
    }
}
