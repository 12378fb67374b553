//! Where each weight matrix ends up, and what it costs there.
//!
//! Some stored formats have no fast kernel on the CPU (Q4_1, Q5_0, Q5_1, Q8_1): they are requantised to Q8_0 at load,
//! which loses nothing that matters (8 bits hold every value of a 5-bit block to half a percent of its range). The
//! vector kernels work on tiles of 16 rows by 256 columns and keep a repacked copy of the matrix beside the stored one;
//! Q8_0 rows that are no multiple of 256 are padded with zeros to reach them. The engine loads by this plan and the
//! ledger counts by it, so the two cannot disagree.

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

    /// Bytes of `values` values; `None` when they do not fill whole blocks or the product overflows.
    pub fn bytes(self, values: u64) -> Option<u64> {
        let (per_block, size) = self.block();
        values.is_multiple_of(per_block).then_some(values / per_block)?.checked_mul(size)
    }
}

/// What the CPU's kernels can do; decides on padding and on repacked copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Kernels {
    /// Vector tiles for Q4_K and Q6_K (x86 with AVX2).
    pub k_tiles: bool,
    /// Vector tiles for Q8_0 (x86 with a VNNI extension).
    pub q8_tiles: bool,
    /// Matrix tiles for Q4_K prompts (x86 with AMX).
    pub amx: bool,
}

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
    /// With padding.
    pub cols: u64,
    pub stored: u64,
    pub repacked: u64,
    /// Bytes needed beside `stored` only while it is loaded.
    pub transient: u64,
}

const TILE_ROWS: u64 = 16;
const TILE_COLS: u64 = 256;

/// How `matrix` is held. `None`: the sizes overflow or do not fill whole blocks.
pub fn place(matrix: Matrix, kernels: Kernels) -> Option<Placed> {
    let Matrix { format, rows, cols } = matrix;
    let read = rows.checked_mul(format.bytes(cols)?)?;
    let target = match format {
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
    let tiled_rows = rows.is_multiple_of(TILE_ROWS);
    let held_cols =
        if target == Format::Q8_0 && kernels.q8_tiles && tiled_rows { cols.next_multiple_of(TILE_COLS) } else { cols };
    let stored = rows.checked_mul(target.bytes(held_cols)?)?;
    let blocks = rows.checked_mul(held_cols)? / TILE_COLS;
    let tiled = tiled_rows && held_cols.is_multiple_of(TILE_COLS);
    // Bytes per 256 weights: values and the tile's own scales.
    let per_block = match target {
        Format::Q4K if tiled && kernels.k_tiles => 192 + if kernels.amx { 320 } else { 0 },
        Format::Q6K if tiled && kernels.k_tiles => 320,
        Format::Q8_0 if tiled && kernels.q8_tiles => 272,
        Format::Q4K | Format::Q6K | Format::Q8_0 => 0,
        Format::F32 | Format::F16 | Format::Bf16 => 0,
        Format::Q4_0 | Format::Q4_1 | Format::Q5_0 | Format::Q5_1 | Format::Q8_1 => 0,
        Format::Q2K | Format::Q3K | Format::Q5K | Format::Q8K => 0,
    };
    // A value as F32, before and after padding.
    let (plain, padded) = (rows.checked_mul(cols)?.checked_mul(4)?, rows.checked_mul(held_cols)?.checked_mul(4)?);
    let transient = if target == Format::F32 {
        // As read and as F32, while the engine's own copy is made.
        read.checked_add(plain)?
    } else if held_cols != cols {
        plain.checked_add(padded)?
    } else if target != format {
        read.max(plain)
    } else {
        // The bytes of the file, copied into blocks.
        read
    };
    Some(Placed { format: target, cols: held_cols, stored, repacked: blocks.checked_mul(per_block)?, transient })
}

/// The sum over a model's matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WeightSum {
    pub stored: u64,
    pub repacked: u64,
    /// The largest single one: matrices are loaded one after the other.
    pub transient: u64,
}

impl WeightSum {
    /// `None`: the sum overflows.
    pub fn add(&mut self, placed: &Placed) -> Option<()> {
        self.stored = self.stored.checked_add(placed.stored)?;
        self.repacked = self.repacked.checked_add(placed.repacked)?;
        self.transient = self.transient.max(placed.transient);
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const VNNI: Kernels = Kernels { k_tiles: true, q8_tiles: true, amx: false };

    #[test]
    fn formats_without_a_fast_kernel_become_padded_q8_0() {
        let placed = place(Matrix { format: Format::Q4_1, rows: 192, cols: 576 }, VNNI).unwrap();
        assert_eq!((placed.format, placed.cols), (Format::Q8_0, 768));
        assert_eq!(placed.stored, 192 * 768 / 32 * 34);
        assert_eq!(placed.repacked, placed.stored);
        let plain = place(Matrix { format: Format::Q4_1, rows: 192, cols: 576 }, Kernels::default()).unwrap();
        assert_eq!((plain.format, plain.cols, plain.repacked), (Format::Q8_0, 576, 0));
    }

    #[test]
    fn k_quants_stay_and_their_tiles_are_counted() {
        let placed = place(Matrix { format: Format::Q4K, rows: 4096, cols: 4096 }, VNNI).unwrap();
        let blocks = 4096 * 4096 / 256;
        assert_eq!((placed.format, placed.stored, placed.repacked), (Format::Q4K, blocks * 144, blocks * 192));
        let amx = Kernels { amx: true, ..VNNI };
        let placed = place(Matrix { format: Format::Q4K, rows: 4096, cols: 4096 }, amx).unwrap();
        assert_eq!(placed.repacked, blocks * (192 + 320));
    }

    #[test]
    fn a_row_of_broken_blocks_has_no_size() {
        assert_eq!(place(Matrix { format: Format::Q4K, rows: 1, cols: 100 }, VNNI), None);
    }

    proptest! {
        #[test]
        fn absurd_sizes_never_wrap(rows in any::<u64>(), cols in any::<u64>()) {
            for format in [Format::F32, Format::Q4_1, Format::Q6K, Format::F16] {
                if let Some(placed) = place(Matrix { format, rows, cols }, VNNI) {
                    prop_assert!(u128::from(placed.stored) >= u128::from(rows) * u128::from(cols) / 2);
                }
            }
        }
    }
}
