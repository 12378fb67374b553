//! Quantised matrices in an order of our own, and their product with rows of activations.
//!
//! A tile is 16 rows; the lanes of a vector are its rows, so sums need no adding up across lanes and every weight that is
//! loaded serves all rows of the batch. The values keep the file's precision: Q4_K, Q5_K and Q6_K carry their blocks'
//! scales as they are, Q4_0 and Q4_1 become one form, Q8_0 another. Nothing but the tiles is kept in memory.
//!
//! Activations are rounded to 8 bits in blocks of 32, see [`input`]. Within a block all sums are whole numbers; blocks are
//! added in their order. So a row's result does not depend on the batch, the threads or the kernel by a single bit,
//! except that kernels may differ in whether a product is rounded before it is added.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod input;
mod layout;
mod pack;

pub use input::Input;
pub use layout::Kind;

use crate::engine::candle::team::{self, Slots};
use layout::{ROWS, Row};

/// Tiles begin at a multiple of this many bytes: a vector then never straddles two cache lines.
const LINE: usize = 64;

/// A matrix of `rows` outputs and `cols` inputs.
pub struct Tiles {
    kind: Kind,
    rows: usize,
    cols: usize,
    bytes: Vec<u8>,
    /// Of the first tile in `bytes`.
    start: usize,
}

/// Which kernel this machine runs; `None`: it has none of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Level {
    Avx512,
    Avx2,
}

#[cfg(target_arch = "x86_64")]
fn level() -> Option<Level> {
    use std::arch::is_x86_feature_detected as has;
    if has!("avx512f") && has!("avx512bw") && has!("avx512vnni") {
        Some(Level::Avx512)
    } else if has!("avx2") && has!("fma") && has!("f16c") {
        Some(Level::Avx2)
    } else {
        None
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn level() -> Option<Level> {
    None
}

/// Whether this machine has a kernel for tiles.
pub fn available() -> bool {
    level().is_some()
}

impl Tiles {
    /// From the blocks of a GGUF file, row by row. `None`: they are not `rows` x `cols` of a format that has tiles.
    pub fn pack(kind: Kind, blocks: &[u8], rows: usize, cols: usize) -> Option<Self> {
        let length = kind.tile_bytes(cols)?.checked_mul(rows.div_ceil(ROWS))?;
        let mut bytes = vec![0; length + LINE];
        let start = bytes.as_ptr().align_offset(LINE).min(LINE);
        pack::pack(kind, blocks, rows, cols, &mut bytes[start..start + length])?;
        Some(Self { kind, rows, cols, bytes, start })
    }

    /// Bytes of the tiles.
    pub fn stored_bytes(&self) -> usize {
        self.bytes.len() - LINE
    }

    fn tiles(&self) -> usize {
        self.rows.div_ceil(ROWS)
    }

    fn tile(&self, at: usize) -> &[u8] {
        let length = self.stored_bytes() / self.tiles().max(1);
        &self.bytes[self.start + at * length..][..length]
    }

    /// Appends row `at` as F32. False where there is no such row.
    pub fn row(&self, at: usize, to: &mut Vec<f32>) -> bool {
        if at >= self.rows {
            return false;
        }
        for step in self.tile(at / ROWS).chunks_exact(self.kind.step_bytes()) {
            for block in 0..self.kind.step_blocks() {
                let row = Row::read(self.kind, step, block, at % ROWS);
                to.extend((0..row.quants.len()).map(|col| row.value(col)));
            }
        }
        true
    }
}

/// The products of several matrices with the same input, in one parallel region; each (n, rows).
pub fn multiply<const N: usize>(matrices: [&Tiles; N], x: &Input) -> [Vec<f32>; N] {
    let mut outs = matrices.map(|m| vec![0.0f32; x.rows() * m.rows]);
    let slots = outs.each_mut().map(|out| Slots::new(out));
    let total: usize = matrices.iter().map(|m| m.tiles()).sum();
    let share = team::share(total);
    team::run(total.div_ceil(share), &|piece| {
        let (mut begin, mut end) = (piece * share, ((piece + 1) * share).min(total));
        for (matrix, out) in matrices.iter().zip(&slots) {
            let own = begin.min(matrix.tiles())..end.min(matrix.tiles());
            if !own.is_empty() {
                matrix.range(own, x, out);
            }
            begin = begin.saturating_sub(matrix.tiles());
            end = end.saturating_sub(matrix.tiles());
        }
    });
    outs
}

/// Some tiles of a matrix with all rows of an input.
struct Range<'a> {
    tiles: &'a [u8],
    tile_bytes: usize,
    x: &'a Input,
    /// (input rows, `width`).
    out: &'a Slots<f32>,
    width: usize,
    /// First column of the output that is written, and the one after the last.
    columns: std::ops::Range<usize>,
}

impl Tiles {
    fn range(&self, tiles: std::ops::Range<usize>, x: &Input, out: &Slots<f32>) {
        assert_eq!(x.cols(), self.cols, "columns of the input");
        let tile_bytes = self.stored_bytes() / self.tiles().max(1);
        let range = Range {
            tiles: &self.bytes[self.start + tiles.start * tile_bytes..self.start + tiles.end * tile_bytes],
            tile_bytes,
            x,
            out,
            width: self.rows,
            columns: tiles.start * ROWS..(tiles.end * ROWS).min(self.rows),
        };
        match level() {
            #[cfg(target_arch = "x86_64")]
            Some(Level::Avx512) => avx512::range(self.kind, &range),
            #[cfg(target_arch = "x86_64")]
            Some(Level::Avx2) => avx2::range(self.kind, &range),
            _ => scalar(self.kind, &range),
        }
    }
}

/// As the vector kernels do it, one value after the other: what they are tested against.
fn scalar(kind: Kind, range: &Range<'_>) {
    for (tile, from) in range.tiles.chunks_exact(range.tile_bytes).zip(range.columns.clone().step_by(ROWS)) {
        for column in from..(from + ROWS).min(range.columns.end) {
            for row in 0..range.x.rows() {
                let mut sum = 0.0;
                let (words, meta) = range.x.row(row);
                for (at, step) in tile.chunks_exact(kind.step_bytes()).enumerate() {
                    for block in 0..kind.step_blocks() {
                        let weights = Row::read(kind, step, block, column - from);
                        let at = at * kind.step_blocks() + block;
                        sum += weights.dot(&input::quants(&words[at]), meta[at].scale);
                    }
                }
                // SAFETY: this piece alone writes these columns.
                #[allow(unsafe_code)]
                unsafe {
                    range.out.slice(row * range.width + column, 1)[0] = sum;
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

    const KINDS: [(GgmlDType, Kind); 6] = [
        (GgmlDType::Q4_0, Kind::Four0),
        (GgmlDType::Q4_1, Kind::Four1),
        (GgmlDType::Q8_0, Kind::Eight),
        (GgmlDType::Q4K, Kind::FourK),
        (GgmlDType::Q5K, Kind::FiveK),
        (GgmlDType::Q6K, Kind::SixK),
    ];

    fn numbers(count: usize, mut seed: u64) -> Vec<f32> {
        (0..count)
            .map(|_| {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (seed >> 40) as f32 / (1 << 23) as f32 - 1.0
            })
            .collect()
    }

    fn matrix(dtype: GgmlDType, kind: Kind, rows: usize, cols: usize) -> (QTensor, Tiles) {
        let values = Tensor::from_vec(numbers(rows * cols, (rows * cols) as u64), (rows, cols), &Device::Cpu).unwrap();
        let stored = QTensor::quantize(&values, dtype).unwrap();
        let tiles = Tiles::pack(kind, &stored.data().unwrap(), rows, cols).unwrap();
        (stored, tiles)
    }

    /// Sizes with half a tile, one column block, many of them.
    fn sizes(kind: Kind) -> [(usize, usize); 4] {
        let least = 32 * kind.step_blocks();
        [(1, least), (16, least * 3), (41, least * 2), (64, least * 5)]
    }

    #[test]
    fn tiles_hold_what_the_file_holds() {
        for (dtype, kind) in KINDS {
            for (rows, cols) in sizes(kind) {
                let (stored, tiles) = matrix(dtype, kind, rows, cols);
                let expected = stored.dequantize(&Device::Cpu).unwrap().to_vec2::<f32>().unwrap();
                for (at, expected) in expected.iter().enumerate() {
                    let mut got = Vec::new();
                    assert!(tiles.row(at, &mut got));
                    for (got, expected) in got.iter().zip(expected) {
                        assert!((got - expected).abs() <= expected.abs() * 1e-6, "{kind:?}: {got} is not {expected}");
                    }
                    assert_eq!(got.len(), expected.len());
                }
                assert!(!tiles.row(rows, &mut Vec::new()));
            }
        }
    }

    type Kernel = fn(Kind, &Range<'_>);

    fn kernels() -> Vec<(&'static str, Kernel)> {
        let mut all: Vec<(&'static str, Kernel)> = vec![("scalar", scalar)];
        #[cfg(target_arch = "x86_64")]
        {
            let level = level();
            if level.is_some() {
                all.push(("avx2", avx2::range));
            }
            if level == Some(Level::Avx512) {
                all.push(("avx512", avx512::range));
            }
        }
        all
    }

    fn product(kernel: Kernel, tiles: &Tiles, x: &Input) -> Vec<f32> {
        let mut out = vec![f32::NAN; x.rows() * tiles.rows];
        let tile_bytes = tiles.tile(0).len();
        let slots = Slots::new(&mut out);
        let bytes = &tiles.bytes[tiles.start..][..tiles.stored_bytes()];
        let (width, columns) = (tiles.rows, 0..tiles.rows);
        kernel(tiles.kind, &Range { tiles: bytes, tile_bytes, x, out: &slots, width, columns });
        out
    }

    #[test]
    fn every_kernel_computes_the_product_and_company_changes_no_bit() {
        for (dtype, kind) in KINDS {
            for (rows, cols) in sizes(kind) {
                let (stored, tiles) = matrix(dtype, kind, rows, cols);
                let weights = stored.dequantize(&Device::Cpu).unwrap().to_vec2::<f32>().unwrap();
                let values = numbers(19 * cols, 5);
                let x = Input::new(&values, cols);
                let (rounded, mut largest) = (x.values(), 0f64);
                for (name, kernel) in kernels() {
                    let got = product(kernel, &tiles, &x);
                    for (at, got) in got.iter().enumerate() {
                        let (row, column) = (at / rows, at % rows);
                        let pairs = rounded[row * cols..][..cols].iter().zip(&weights[column]);
                        let products = pairs.map(|(x, w)| f64::from(*x) * f64::from(*w));
                        let (want, size) = products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()));
                        let off = (f64::from(*got) - want).abs() / size;
                        assert!(off < 2e-6, "{name} {kind:?} {rows}x{cols} at {row}, {column}: {got} is not {want}");
                        largest = largest.max(want.abs());
                    }
                    for count in [1, 2, 3, 5, 7, 8, 9, 12, 16] {
                        let part = Input::new(&values[cols..][..count * cols], cols);
                        let part = product(kernel, &tiles, &part);
                        assert_eq!(
                            part,
                            got[rows..][..count * rows],
                            "{name} {kind:?} {rows}x{cols}: {count} together"
                        );
                    }
                }
                assert!(largest > 0.0);
            }
        }
    }

    #[test]
    fn several_matrices_share_an_input() {
        let (_, a) = matrix(GgmlDType::Q6K, Kind::SixK, 100, 256);
        let (_, b) = matrix(GgmlDType::Q4_1, Kind::Four1, 33, 256);
        let x = Input::new(&numbers(3 * 256, 9), 256);
        let [first, second] = multiply([&a, &b], &x);
        assert_eq!([first], multiply([&a], &x));
        assert_eq!([second], multiply([&b], &x));
    }

    #[test]
    fn what_is_no_number_does_not_get_lost() {
        let (_, tiles) = matrix(GgmlDType::Q8_0, Kind::Eight, 16, 64);
        for bad in [f32::NAN, f32::INFINITY] {
            let mut values = numbers(64, 1);
            values[40] = bad;
            let [out] = multiply([&tiles], &Input::new(&values, 64));
            assert!(out.iter().all(|v| v.is_nan()), "{bad}: {out:?}");
        }
    }

    #[test]
    fn blocks_that_do_not_fit_the_sizes_are_refused() {
        assert!(Tiles::pack(Kind::FourK, &[0; 144], 1, 100).is_none());
        assert!(Tiles::pack(Kind::FourK, &[0; 143], 1, 256).is_none());
        assert!(Tiles::pack(Kind::Eight, &[0; 34], usize::MAX, 32).is_none());
    }
}
