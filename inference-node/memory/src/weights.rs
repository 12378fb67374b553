//! Layout of each weight matrix in host memory, and its size.
//!
//! If the engine has its own vector kernels for this CPU, matrices are held only in the layout of these kernels (tiles
//! of 16 rows). Formats without tiles become Q8_0 first, which loses almost no precision: 8 bits represent every number
//! of a 5-bit block with an error of at most half a percent of the block's range. On other CPUs candle's kernels take
//! the file's blocks unchanged, except for the formats that candle has no fast kernel for. Both the load and the memory
//! estimate use this layout, so they cannot disagree.

/// Number format of a tensor, as ggml defines it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum WeightFormat {
    /// 32-bit floating point.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// 4 bits, one scale per 32 weights.
    Q4_0,
    /// 4 bits, one scale and one minimum per 32 weights.
    Q4_1,
    /// 5 bits, one scale per 32 weights.
    Q5_0,
    /// 5 bits, one scale and one minimum per 32 weights.
    Q5_1,
    /// 8 bits, one scale per 32 weights.
    Q8_0,
    /// 8 bits, one scale and one sum per 32 weights.
    Q8_1,
    /// 2 bits, blocks of 256 weights (k-quant).
    Q2K,
    /// 3 bits, blocks of 256 weights (k-quant).
    Q3K,
    /// 4 bits, blocks of 256 weights (k-quant).
    Q4K,
    /// 5 bits, blocks of 256 weights (k-quant).
    Q5K,
    /// 6 bits, blocks of 256 weights (k-quant).
    Q6K,
    /// 8 bits, blocks of 256 weights (k-quant).
    Q8K,
}

impl WeightFormat {
    /// Number of weights in a block, and its size in bytes, from ggml-common.h.
    pub fn block(self) -> (u64, u64) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::Q4_0 => (32, 18),
            Self::Q4_1 => (32, 20),
            Self::Q5_0 => (32, 22),
            Self::Q5_1 => (32, 24),
            Self::Q8_0 => (32, 34),
            Self::Q8_1 => (32, 36),
            Self::Q2K => (256, 84),
            Self::Q3K => (256, 110),
            Self::Q4K => (256, 144),
            Self::Q5K => (256, 176),
            Self::Q6K => (256, 210),
            Self::Q8K => (256, 292),
        }
    }

    /// Number of columns in one step of a tile, and the step's size in bytes; `None` for formats without tiles. A tile
    /// has 16 rows and is stored in steps of adjacent columns; the engine's tiles/layout.rs defines the layout of a
    /// step.
    pub fn tile(self) -> Option<(u64, u64)> {
        match self {
            Self::Q4_0 | Self::Q4_1 => Some((32, 320)),
            Self::Q8_0 => Some((32, 544)),
            Self::Q4K => Some((256, 2368)),
            Self::Q5K => Some((256, 2880)),
            Self::Q6K => Some((256, 3392)),
            Self::F32
            | Self::F16
            | Self::Bf16
            | Self::Q5_0
            | Self::Q5_1
            | Self::Q8_1
            | Self::Q2K
            | Self::Q3K
            | Self::Q8K => None,
        }
    }

    /// Size of `values` weights, in bytes; `None` if they do not fill whole blocks or the product overflows.
    pub fn bytes(self, values: u64) -> Option<u64> {
        let (per_block, size) = self.block();
        values.is_multiple_of(per_block).then_some(values / per_block)?.checked_mul(size)
    }
}

/// Kernels that this CPU can run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CpuKernels {
    /// Whether the CPU is x86 with AVX2, so that it can run the engine's own kernels; these kernels require tiles.
    pub tiles: bool,
}

/// Number of rows in a tile of a weight matrix.
pub const TILE_ROWS: u64 = 16;

/// A weight matrix as its file stores it: one row per output, one column per input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Matrix {
    /// Format in the file.
    pub format: WeightFormat,
    /// Number of rows (outputs).
    pub rows: u64,
    /// Number of columns (inputs).
    pub cols: u64,
}

/// Layout of a weight matrix in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatrixLayout {
    /// Format in memory.
    pub format: WeightFormat,
    /// Whether the matrix is held in tiles, see [`WeightFormat::tile`].
    pub tiled: bool,
    /// Size in memory, in bytes.
    pub stored: u64,
    /// Additional memory during the load, in bytes.
    pub transient: u64,
}

/// Layout of `matrix` in host memory. `None` if the sizes overflow or do not fill whole blocks.
pub fn cpu_layout(matrix: Matrix, kernels: CpuKernels) -> Option<MatrixLayout> {
    let Matrix { format, rows, cols } = matrix;
    let read = rows.checked_mul(format.bytes(cols)?)?;
    let target = match format {
        WeightFormat::Q4_1 if kernels.tiles => format,
        WeightFormat::Q4_1 | WeightFormat::Q5_0 | WeightFormat::Q5_1 | WeightFormat::Q8_1 => WeightFormat::Q8_0,
        // Half-precision matrices have no kernel of their own on the CPU: they are held and multiplied as F32.
        WeightFormat::F16 | WeightFormat::Bf16 => WeightFormat::F32,
        WeightFormat::F32
        | WeightFormat::Q4_0
        | WeightFormat::Q8_0
        | WeightFormat::Q2K
        | WeightFormat::Q3K
        | WeightFormat::Q4K
        | WeightFormat::Q5K
        | WeightFormat::Q6K
        | WeightFormat::Q8K => format,
    };
    let blocks = rows.checked_mul(target.bytes(cols)?)?;
    let tile = target.tile().filter(|_| kernels.tiles);
    let stored = match tile {
        Some((columns, bytes)) => rows.div_ceil(TILE_ROWS).checked_mul(cols / columns)?.checked_mul(bytes)?,
        None => blocks,
    };
    // The bytes read from the file stay in memory until they are converted to tiles or blocks. A conversion to another
    // format, or to F32, needs all weights as F32 temporarily. The blocks that are converted to tiles afterwards are
    // not larger than the F32 weights, so they do not raise the peak.
    let converted = target != format || target == WeightFormat::F32;
    let values = if converted { rows.checked_mul(cols)?.checked_mul(4)? } else { 0 };
    Some(MatrixLayout { format: target, tiled: tile.is_some(), stored, transient: read.checked_add(values)? })
}

/// Memory of all matrices of a model, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WeightSum {
    /// Size in memory, in bytes.
    pub stored: u64,
    /// Additional memory during the load, in bytes: that of the matrix that needs the most, since matrices are loaded
    /// one after another.
    pub transient: u64,
}

impl WeightSum {
    /// Adds a matrix. `None` if the sum overflows.
    pub fn add(&mut self, matrix: &MatrixLayout) -> Option<()> {
        self.stored = self.stored.checked_add(matrix.stored)?;
        self.transient = self.transient.max(matrix.transient);
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TILES: CpuKernels = CpuKernels { tiles: true };

    #[test]
    fn tiles_take_little_more_than_the_file() {
        for (format, max) in
            [(WeightFormat::Q4K, 1.03), (WeightFormat::Q5K, 1.03), (WeightFormat::Q6K, 1.02), (WeightFormat::Q4_1, 1.0)]
        {
            let matrix = Matrix { format, rows: 4096, cols: 4096 };
            let layout = cpu_layout(matrix, TILES).unwrap();
            let file = 4096 * format.bytes(4096).unwrap();
            assert!(layout.tiled && layout.format == format && layout.transient == file);
            assert!(layout.stored >= file && layout.stored as f64 <= file as f64 * max, "{format:?}: {layout:?}");
            assert!(!cpu_layout(matrix, CpuKernels::default()).unwrap().tiled);
        }
    }

    #[test]
    fn last_tile_is_padded_to_16_rows() {
        let layout = cpu_layout(Matrix { format: WeightFormat::Q4_1, rows: 17, cols: 64 }, TILES).unwrap();
        assert_eq!(layout.stored, 2 * 2 * 320);
    }

    #[test]
    fn formats_without_fast_kernel_become_q8_0() {
        let matrix = Matrix { format: WeightFormat::Q5_1, rows: 192, cols: 576 };
        let layout = cpu_layout(matrix, TILES).unwrap();
        assert_eq!((layout.format, layout.stored), (WeightFormat::Q8_0, 192 * 576 / 32 * 34));
        let plain = cpu_layout(Matrix { format: WeightFormat::Q4_1, ..matrix }, CpuKernels::default()).unwrap();
        assert_eq!((plain.format, plain.tiled, plain.stored), (WeightFormat::Q8_0, false, layout.stored));
    }

    #[test]
    fn row_of_partial_blocks_has_no_layout() {
        assert_eq!(cpu_layout(Matrix { format: WeightFormat::Q4K, rows: 1, cols: 100 }, TILES), None);
    }

    #[test]
    fn conversion_needs_the_values_as_f32() {
        let values = 64 * 256 * 4;
        let unconverted = [WeightFormat::Q8_0, WeightFormat::Q4_1, WeightFormat::Q2K].map(|format| (format, true, 0));
        let converted = [WeightFormat::Q5_1, WeightFormat::F16, WeightFormat::F32].map(|format| (format, true, values));
        for (format, tiles, values_bytes) in unconverted
            .into_iter()
            .chain(converted)
            .chain([(WeightFormat::Q8_0, false, 0), (WeightFormat::Q4_1, false, values)])
        {
            let layout = cpu_layout(Matrix { format, rows: 64, cols: 256 }, CpuKernels { tiles }).unwrap();
            assert_eq!(layout.transient, 64 * format.bytes(256).unwrap() + values_bytes, "{format:?}");
        }
    }

    proptest! {
        #[test]
        fn absurd_sizes_never_wrap(rows in any::<u64>(), cols in any::<u64>()) {
            for format in [WeightFormat::F32, WeightFormat::Q4_1, WeightFormat::Q6K, WeightFormat::F16] {
                if let Some(layout) = cpu_layout(Matrix { format, rows, cols }, TILES) {
                    prop_assert!(u128::from(layout.stored) >= u128::from(rows) * u128::from(cols) / 2);
                }
            }
        }
    }
}
