//! How each weight matrix is held, and what it costs.
//!
//! Where the engine has vector kernels of its own, matrices are held in their order, tiles of 16 rows, and nowhere else;
//! formats without tiles of their own become Q8_0 first, which loses nothing that matters (8 bits hold every value of a
//! 5-bit block to half a percent of its range). On other machines candle's kernels take the file's blocks as they are, but
//! for those formats that it has no fast kernel for. The engine loads by this plan and the ledger counts by it, so the two
//! cannot disagree.

/// A tensor format of the GGUF family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Format {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q8_1,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    Q8K,
}

impl Format {
    /// (values, bytes) of one block, from ggml-common.h.
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

    /// (columns, bytes) of one step of a tile of 16 rows; `None` for formats without tiles. The engine's layout.rs says what
    /// is in them.
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

    /// Bytes of `values` values; `None` when they do not fill whole blocks or the product overflows.
    pub fn bytes(self, values: u64) -> Option<u64> {
        let (per_block, size) = self.block();
        values.is_multiple_of(per_block).then_some(values / per_block)?.checked_mul(size)
    }
}

/// What the CPU's kernels can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Kernels {
    /// The engine's own, which want tiles (x86 with AVX2).
    pub tiles: bool,
}

/// Rows of a tile.
const TILE_ROWS: u64 = 16;

/// A matrix as the file stores it: `rows` outputs of `cols` inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Matrix {
    pub format: Format,
    pub rows: u64,
    pub cols: u64,
}

/// A matrix as the engine holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placed {
    pub format: Format,
    /// In tiles, see [`Format::tile`].
    pub tiled: bool,
    pub stored: u64,
    /// Bytes needed beside `stored` only while it is loaded.
    pub transient: u64,
}

/// How `matrix` is held. `None`: the sizes overflow or do not fill whole blocks.
pub fn place(matrix: Matrix, kernels: Kernels) -> Option<Placed> {
    let Matrix { format, rows, cols } = matrix;
    let read = rows.checked_mul(format.bytes(cols)?)?;
    let target = match format {
        Format::Q4_1 if kernels.tiles => format,
        Format::Q4_1 | Format::Q5_0 | Format::Q5_1 | Format::Q8_1 => Format::Q8_0,
        // Half-precision matrices have no kernel of their own here: they are held, and multiplied, as F32.
        Format::F16 | Format::Bf16 => Format::F32,
        Format::F32
        | Format::Q4_0
        | Format::Q8_0
        | Format::Q2K
        | Format::Q3K
        | Format::Q4K
        | Format::Q5K
        | Format::Q6K
        | Format::Q8K => format,
    };
    let blocks = rows.checked_mul(target.bytes(cols)?)?;
    let tile = target.tile().filter(|_| kernels.tiles);
    let stored = match tile {
        Some((columns, bytes)) => rows.div_ceil(TILE_ROWS).checked_mul(cols / columns)?.checked_mul(bytes)?,
        None => blocks,
    };
    // What was read stays until there are tiles or blocks of it. On the way to another format, and to plain values, lie
    // the values as F32; the blocks made of them are no more than that when the tiles come.
    let between = if target == format && target != Format::F32 { 0 } else { rows.checked_mul(cols)?.checked_mul(4)? };
    Some(Placed { format: target, tiled: tile.is_some(), stored, transient: read.checked_add(between)? })
}

/// The sum over a model's matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WeightSum {
    pub stored: u64,
    /// The largest single one: matrices are loaded one after the other.
    pub transient: u64,
}

impl WeightSum {
    /// `None`: the sum overflows.
    pub fn add(&mut self, placed: &Placed) -> Option<()> {
        self.stored = self.stored.checked_add(placed.stored)?;
        self.transient = self.transient.max(placed.transient);
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TILES: Kernels = Kernels { tiles: true };

    #[test]
    fn tiles_take_little_more_than_the_file_and_nothing_is_kept_twice() {
        for (format, most) in [(Format::Q4K, 1.03), (Format::Q5K, 1.03), (Format::Q6K, 1.02), (Format::Q4_1, 1.0)] {
            let matrix = Matrix { format, rows: 4096, cols: 4096 };
            let placed = place(matrix, TILES).unwrap();
            let file = 4096 * format.bytes(4096).unwrap();
            assert!(placed.tiled && placed.format == format && placed.transient == file);
            assert!(placed.stored >= file && placed.stored as f64 <= file as f64 * most, "{format:?}: {placed:?}");
            assert!(!place(matrix, Kernels::default()).unwrap().tiled);
        }
    }

    #[test]
    fn a_last_tile_is_whole() {
        let placed = place(Matrix { format: Format::Q4_1, rows: 17, cols: 64 }, TILES).unwrap();
        assert_eq!(placed.stored, 2 * 2 * 320);
    }

    #[test]
    fn formats_without_a_fast_kernel_become_q8_0() {
        let matrix = Matrix { format: Format::Q5_1, rows: 192, cols: 576 };
        let placed = place(matrix, TILES).unwrap();
        assert_eq!((placed.format, placed.stored), (Format::Q8_0, 192 * 576 / 32 * 34));
        let plain = place(Matrix { format: Format::Q4_1, ..matrix }, Kernels::default()).unwrap();
        assert_eq!((plain.format, plain.tiled, plain.stored), (Format::Q8_0, false, placed.stored));
    }

    #[test]
    fn a_row_of_broken_blocks_has_no_size() {
        assert_eq!(place(Matrix { format: Format::Q4K, rows: 1, cols: 100 }, TILES), None);
    }

    #[test]
    fn the_values_as_f32_lie_between_two_formats() {
        let values = 64 * 256 * 4;
        for (format, tiles, between) in [(Format::Q8_0, true, 0), (Format::Q4_1, true, 0), (Format::Q2K, true, 0)]
            .into_iter()
            .chain([(Format::Q5_1, true, values), (Format::F16, true, values), (Format::F32, true, values)])
            .chain([(Format::Q8_0, false, 0), (Format::Q4_1, false, values)])
        {
            let placed = place(Matrix { format, rows: 64, cols: 256 }, Kernels { tiles }).unwrap();
            assert_eq!(placed.transient, 64 * format.bytes(256).unwrap() + between, "{format:?}");
        }
    }

    proptest! {
        #[test]
        fn absurd_sizes_never_wrap(rows in any::<u64>(), cols in any::<u64>()) {
            for format in [Format::F32, Format::Q4_1, Format::Q6K, Format::F16] {
                if let Some(placed) = place(Matrix { format, rows, cols }, TILES) {
                    prop_assert!(u128::from(placed.stored) >= u128::from(rows) * u128::from(cols) / 2);
                }
            }
        }
    }
}
