//! The memory layout of a tile.
//!
//! A tile is a sequence of steps. A step has 32 columns; in the k-quant formats it has 256, in eight blocks of 32 that
//! share a super-scale. In a block, each vector of 64 bytes holds four columns of every row (byte 4 * row + column),
//! which is the operand layout of the dot-product instructions; with 4-bit values, the low nibbles are columns 0 to 15
//! and the high nibbles columns 16 to 31. The scales of a block are one vector of 16 values, one per row.

use half::f16;

/// Number of rows of a tile.
pub const TILE_ROWS: usize = cfq_memory::TILE_ROWS as usize;
/// Number of columns of a tile block.
pub const TILE_BLOCK_COLUMNS: usize = 32;

/// Quantization format of a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TileFormat {
    /// 4 bits; scale and minimum per 32 columns, the minimum computed when packing.
    Q4_0,
    /// 4 bits; scale and minimum per 32 columns.
    Q4_1,
    /// 8 bits, stored with an offset of 128; scale per 32 columns.
    Q8_0,
    /// 4 bits; scale and minimum of 6 bits per 32 columns, with super-scales per 256.
    Q4K,
    /// 5 bits; otherwise the same as Q4_K.
    Q5K,
    /// 6 bits, stored with an offset of 32; scale of 8 bits per 16 columns, with a super-scale per 256.
    Q6K,
}

/// The formats as const parameters of the kernels; Q4_0 and Q4_1 share one.
pub mod code {
    use super::TileFormat;

    pub const Q4: u8 = 0;
    pub const Q8: u8 = 1;
    pub const Q4K: u8 = 2;
    pub const Q5K: u8 = 3;
    pub const Q6K: u8 = 4;

    /// Returns the tile format of kernel code `code`. Q4_0 and Q4_1 share a code, for which this returns Q4_1.
    pub const fn format(code: u8) -> TileFormat {
        match code {
            Q4 => TileFormat::Q4_1,
            Q8 => TileFormat::Q8_0,
            Q4K => TileFormat::Q4K,
            Q5K => TileFormat::Q5K,
            _ => TileFormat::Q6K,
        }
    }
}

/// Byte offsets of the parts of a step, for each group of formats. `Q6K_HIGH_BITS` counts from the start of a block.
pub mod offset {
    /// Offset of the scales, one f16 per row.
    pub const Q4_SCALE: usize = 0;
    pub const Q4_MIN: usize = 32;
    pub const Q4_QUANTS: usize = 64;

    pub const Q8_SCALE: usize = 0;
    pub const Q8_QUANTS: usize = 32;

    /// Offset of the super-scales, one f16 per row, shared by all blocks of the step.
    pub const K_SUPER_SCALE: usize = 0;
    pub const K_SUPER_MIN_SCALE: usize = 32;
    /// Offset of the scales, one byte per row, block after block.
    pub const K_SCALES: usize = 64;
    pub const K_MINS: usize = 192;
    pub const K_QUANTS: usize = 320;
    /// Offset of the fifth bits of the values: eight words of 64 bits per block.
    pub const K_HIGH_BITS: usize = 2368;

    /// Offset of the quants. Per block: 256 bytes of nibbles, then two vectors with the upper two bits of columns 0 to
    /// 15 and of columns 16 to 31.
    pub const Q6K_QUANTS: usize = 0;
    pub const Q6K_BLOCK_BYTES: usize = 384;
    pub const Q6K_HIGH_BITS: usize = 256;
    /// Offset of the scales, one byte per row for every 16 columns.
    pub const Q6K_SCALES: usize = 3072;
    pub const Q6K_SUPER_SCALE: usize = 3328;
}

impl TileFormat {
    /// Number of 32-column blocks in a step.
    pub const fn step_blocks(self) -> usize {
        match self {
            Self::Q4_0 | Self::Q4_1 | Self::Q8_0 => 1,
            Self::Q4K | Self::Q5K | Self::Q6K => 8,
        }
    }

    /// Size of a step, in bytes. Must agree with [`cfq_memory::WeightFormat::tile`], which the memory estimate uses.
    pub const fn step_bytes(self) -> usize {
        match self {
            Self::Q4_0 | Self::Q4_1 => 320,
            Self::Q8_0 => 544,
            Self::Q4K => 2368,
            Self::Q5K => 2880,
            Self::Q6K => 3392,
        }
    }

    /// Size of a tile of `cols` columns, in bytes; `None` if the columns do not fill whole steps.
    pub fn tile_bytes(self, cols: usize) -> Option<usize> {
        let columns = self.step_blocks() * TILE_BLOCK_COLUMNS;
        cols.is_multiple_of(columns).then_some(cols / columns)?.checked_mul(self.step_bytes())
    }
}

/// The `N` bytes at offset `at` of a step.
#[inline(always)]
pub fn take<const N: usize>(step: &[u8], at: usize) -> [u8; N] {
    step[at..at + N].as_chunks::<N>().0[0]
}

/// Unrolls `$body` for `$n` in 0..`$count`, at most 8: a loop would keep its sums in memory instead of in registers.
macro_rules! unrolled {
    ($n:ident < $count:ident, $body:block) => {
        unrolled!($n < $count, $body, 0 1 2 3 4 5 6 7)
    };
    ($n:ident < $count:ident, $body:block, $($at:literal)*) => {
        $(if $at < $count {
            let $n = $at;
            $body
        })*
    };
}
pub(super) use unrolled;

/// Calls `$function::<CODE>($argument)` with the [`code`] of `$format`: a kernel is compiled once per format.
macro_rules! for_format {
    ($format:expr, $function:ident($argument:expr)) => {{
        use $crate::backend::cpu::tiles::layout::{TileFormat, code};
        match $format {
            TileFormat::Q4_0 | TileFormat::Q4_1 => $function::<{ code::Q4 }>($argument),
            TileFormat::Q8_0 => $function::<{ code::Q8 }>($argument),
            TileFormat::Q4K => $function::<{ code::Q4K }>($argument),
            TileFormat::Q5K => $function::<{ code::Q5K }>($argument),
            TileFormat::Q6K => $function::<{ code::Q6K }>($argument),
        }
    }};
}
pub(super) use for_format;

/// Byte offset and bit shift of the low four bits of a value, within the 256 bytes that its block has for them.
pub fn nibble(row: usize, col: usize) -> (usize, u32) {
    (col % 16 / 4 * 64 + row * 4 + col % 4, if col < 16 { 0 } else { 4 })
}

/// Byte offset of an 8-bit value within the 512 bytes of its block.
pub fn byte(row: usize, col: usize) -> usize {
    col / 4 * 64 + row * 4 + col % 4
}

/// Byte offset and bit shift of the fifth bit of a value, within the 64 bytes that its block has for fifth bits.
pub fn fifth_bit(row: usize, col: usize) -> (usize, u32) {
    let bit = row * 4 + col % 4;
    (col / 4 * 8 + bit / 8, (bit % 8) as u32)
}

/// Byte offset and bit shift of the upper two bits of a 6-bit value, within the 128 bytes that its block has for them.
pub fn upper_bits(row: usize, col: usize) -> (usize, u32) {
    (col / 16 * 64 + row * 4 + col % 4, (col % 16 / 4 * 2) as u32)
}

/// One row of one block, unpacked: value = scale x (quant - zero) + min.
pub struct TileRow {
    pub quants: [u8; TILE_BLOCK_COLUMNS],
    /// Scales of columns 0 to 15 and 16 to 31.
    pub scales: [f32; 2],
    pub zero: i32,
    pub min: f32,
}

impl TileRow {
    /// Unpacks row `row` of block `block` of a step.
    pub fn read(format: TileFormat, step: &[u8], block: usize, row: usize) -> Self {
        let half = |at: usize| f16::from_le_bytes([step[at + 2 * row], step[at + 2 * row + 1]]).to_f32();
        let scale = |at: usize| step[at + block * TILE_ROWS + row];
        let four = |from: usize| {
            std::array::from_fn(|col| {
                let (byte, shift) = nibble(row, col);
                step[from + byte] >> shift & 15
            })
        };
        match format {
            TileFormat::Q4_0 | TileFormat::Q4_1 => Self {
                quants: four(offset::Q4_QUANTS),
                scales: [half(offset::Q4_SCALE); 2],
                zero: 0,
                min: half(offset::Q4_MIN),
            },
            TileFormat::Q8_0 => Self {
                quants: std::array::from_fn(|col| step[offset::Q8_QUANTS + byte(row, col)]),
                scales: [half(offset::Q8_SCALE); 2],
                zero: 128,
                min: 0.0,
            },
            TileFormat::Q4K | TileFormat::Q5K => {
                let mut quants: [u8; TILE_BLOCK_COLUMNS] = four(offset::K_QUANTS + block * 256);
                if format == TileFormat::Q5K {
                    for (col, quant) in quants.iter_mut().enumerate() {
                        let (byte, shift) = fifth_bit(row, col);
                        *quant |= (step[offset::K_HIGH_BITS + block * 64 + byte] >> shift & 1) << 4;
                    }
                }
                Self {
                    quants,
                    scales: [half(offset::K_SUPER_SCALE) * f32::from(scale(offset::K_SCALES)); 2],
                    zero: 0,
                    min: -(half(offset::K_SUPER_MIN_SCALE) * f32::from(scale(offset::K_MINS))),
                }
            }
            TileFormat::Q6K => {
                let from = offset::Q6K_QUANTS + block * offset::Q6K_BLOCK_BYTES;
                let mut quants: [u8; TILE_BLOCK_COLUMNS] = four(from);
                for (col, quant) in quants.iter_mut().enumerate() {
                    let (byte, shift) = upper_bits(row, col);
                    *quant |= (step[from + offset::Q6K_HIGH_BITS + byte] >> shift & 3) << 4;
                }
                let part = |which: usize| {
                    let scale = step[offset::Q6K_SCALES + (2 * block + which) * TILE_ROWS + row].cast_signed();
                    half(offset::Q6K_SUPER_SCALE) * f32::from(scale)
                };
                Self { quants, scales: [part(0), part(1)], zero: 32, min: 0.0 }
            }
        }
    }

    /// Dequantized value of a column.
    pub fn value(&self, col: usize) -> f32 {
        self.scales[col / 16] * (i32::from(self.quants[col]) - self.zero) as f32 + self.min
    }

    /// Dot product with an input block whose values are `scale` x `x`.
    pub fn dot(&self, x: &[i8], scale: f32) -> f32 {
        let mut sums = [0i32; 2];
        for (col, (quant, x)) in self.quants.iter().zip(x).enumerate() {
            sums[col / 16] += (i32::from(*quant) - self.zero) * i32::from(*x);
        }
        let total: i32 = x.iter().map(|x| i32::from(*x)).sum();
        let parts = sums[0] as f32 * (self.scales[0] * scale) + sums[1] as f32 * (self.scales[1] * scale);
        parts + self.min * (total as f32 * scale)
    }
}
