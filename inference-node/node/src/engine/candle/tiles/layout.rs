//! Where a value lies within a tile.
//!
//! A tile is a sequence of steps: 32 columns, or 256 in the K formats, whose blocks of 32 share a scale. Of a block, each
//! vector of 64 bytes holds four columns of every row (byte 4 * row + column), as the dot-product instructions want it;
//! where values have four bits, the low halves are columns 0 to 15 and the high ones 16 to 31. Scales are one vector of
//! 16 rows each.

use half::f16;

/// Rows of a tile.
pub const ROWS: usize = 16;
/// Columns of a block.
pub const BLOCK: usize = 32;

/// How values are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Q4_0 and Q4_1: 4 bits, scale and minimum for 32 columns.
    Four0,
    Four1,
    /// Q8_0: 8 bits plus 128, scale for 32 columns.
    Eight,
    /// Q4_K and Q5_K: 4 or 5 bits; scale and minimum for 32 columns of 6 bits each, in units for 256.
    FourK,
    FiveK,
    /// Q6_K: 6 bits plus 32, scale for 16 columns of 8 bits, in a unit for 256.
    SixK,
}

/// The kinds as parameters of the kernels' functions.
pub mod code {
    use super::Kind;

    pub const FOUR: u8 = 0;
    pub const EIGHT: u8 = 1;
    pub const FOUR_K: u8 = 2;
    pub const FIVE_K: u8 = 3;
    pub const SIX_K: u8 = 4;

    pub const fn kind(code: u8) -> Kind {
        match code {
            FOUR => Kind::Four1,
            EIGHT => Kind::Eight,
            FOUR_K => Kind::FourK,
            FIVE_K => Kind::FiveK,
            _ => Kind::SixK,
        }
    }
}

/// Offsets within a step.
pub mod at {
    /// f16 a row each.
    pub const FOUR_SCALE: usize = 0;
    pub const FOUR_MIN: usize = 32;
    pub const FOUR_QUANTS: usize = 64;

    pub const EIGHT_SCALE: usize = 0;
    pub const EIGHT_QUANTS: usize = 32;

    /// f16 a row each, for all blocks.
    pub const K_UNIT: usize = 0;
    pub const K_MIN_UNIT: usize = 32;
    /// A byte a row, block after block.
    pub const K_SCALES: usize = 64;
    pub const K_MINS: usize = 192;
    pub const K_QUANTS: usize = 320;
    /// One bit a value: eight words of 64 bits a block.
    pub const K_FIFTH: usize = 2368;

    /// Of each block 256 bytes of low halves, then two vectors with two bits each of columns 0 to 15 and 16 to 31.
    pub const SIX_QUANTS: usize = 0;
    pub const SIX_BLOCK: usize = 384;
    pub const SIX_HIGH: usize = 256;
    /// A byte a row, for 16 columns after the other.
    pub const SIX_SCALES: usize = 3072;
    pub const SIX_UNIT: usize = 3328;
}

impl Kind {
    /// Blocks of 32 columns in a step.
    pub const fn step_blocks(self) -> usize {
        match self {
            Self::Four0 | Self::Four1 | Self::Eight => 1,
            Self::FourK | Self::FiveK | Self::SixK => 8,
        }
    }

    /// [`cfq_memory`]'s ledger counts with the same numbers.
    pub const fn step_bytes(self) -> usize {
        match self {
            Self::Four0 | Self::Four1 => 320,
            Self::Eight => 544,
            Self::FourK => 2368,
            Self::FiveK => 2880,
            Self::SixK => 3392,
        }
    }

    /// Bytes of a tile of `cols` columns; `None` where they fill no whole steps.
    pub fn tile_bytes(self, cols: usize) -> Option<usize> {
        let columns = self.step_blocks() * BLOCK;
        cols.is_multiple_of(columns).then_some(cols / columns)?.checked_mul(self.step_bytes())
    }
}

/// `N` bytes of a step from `at` on.
#[inline(always)]
pub fn take<const N: usize>(step: &[u8], at: usize) -> [u8; N] {
    step[at..at + N].as_chunks::<N>().0[0]
}

/// `$body` for each `$n` of 0..`$count`, at most 8, one after the other: a loop would keep its sums in memory.
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

/// Byte and shift of a column's low four bits within its block's 256 bytes.
pub fn nibble(row: usize, col: usize) -> (usize, u32) {
    (col % 16 / 4 * 64 + row * 4 + col % 4, if col < 16 { 0 } else { 4 })
}

/// Byte of a column of eight bits within its block's 512 bytes.
pub fn byte(row: usize, col: usize) -> usize {
    col / 4 * 64 + row * 4 + col % 4
}

/// Byte and shift of a column's fifth bit within its block's 64 bytes.
pub fn fifth(row: usize, col: usize) -> (usize, u32) {
    let bit = row * 4 + col % 4;
    (col / 4 * 8 + bit / 8, (bit % 8) as u32)
}

/// Byte and shift of a column's upper two bits of six within its block's 128 bytes.
pub fn upper(row: usize, col: usize) -> (usize, u32) {
    (col / 16 * 64 + row * 4 + col % 4, (col % 16 / 4 * 2) as u32)
}

/// One row of one block: value = scale x (quant - offset) + min.
pub struct Row {
    pub quants: [u8; BLOCK],
    /// Of columns 0 to 15 and 16 to 31.
    pub scales: [f32; 2],
    pub offset: i32,
    pub min: f32,
}

impl Row {
    pub fn read(kind: Kind, step: &[u8], block: usize, row: usize) -> Self {
        let half = |at: usize| f16::from_le_bytes([step[at + 2 * row], step[at + 2 * row + 1]]).to_f32();
        let scale = |at: usize| step[at + block * ROWS + row];
        let four = |from: usize| {
            std::array::from_fn(|col| {
                let (byte, shift) = nibble(row, col);
                step[from + byte] >> shift & 15
            })
        };
        match kind {
            Kind::Four0 | Kind::Four1 => Self {
                quants: four(at::FOUR_QUANTS),
                scales: [half(at::FOUR_SCALE); 2],
                offset: 0,
                min: half(at::FOUR_MIN),
            },
            Kind::Eight => Self {
                quants: std::array::from_fn(|col| step[at::EIGHT_QUANTS + byte(row, col)]),
                scales: [half(at::EIGHT_SCALE); 2],
                offset: 128,
                min: 0.0,
            },
            Kind::FourK | Kind::FiveK => {
                let mut quants: [u8; BLOCK] = four(at::K_QUANTS + block * 256);
                if kind == Kind::FiveK {
                    for (col, quant) in quants.iter_mut().enumerate() {
                        let (byte, shift) = fifth(row, col);
                        *quant |= (step[at::K_FIFTH + block * 64 + byte] >> shift & 1) << 4;
                    }
                }
                Self {
                    quants,
                    scales: [half(at::K_UNIT) * f32::from(scale(at::K_SCALES)); 2],
                    offset: 0,
                    min: -(half(at::K_MIN_UNIT) * f32::from(scale(at::K_MINS))),
                }
            }
            Kind::SixK => {
                let from = at::SIX_QUANTS + block * at::SIX_BLOCK;
                let mut quants: [u8; BLOCK] = four(from);
                for (col, quant) in quants.iter_mut().enumerate() {
                    let (byte, shift) = upper(row, col);
                    *quant |= (step[from + at::SIX_HIGH + byte] >> shift & 3) << 4;
                }
                let part = |which: usize| {
                    let scale = step[at::SIX_SCALES + (2 * block + which) * ROWS + row].cast_signed();
                    half(at::SIX_UNIT) * f32::from(scale)
                };
                Self { quants, scales: [part(0), part(1)], offset: 32, min: 0.0 }
            }
        }
    }

    pub fn value(&self, col: usize) -> f32 {
        self.scales[col / 16] * (i32::from(self.quants[col]) - self.offset) as f32 + self.min
    }

    /// With a block of an input whose values are `scale` times `x`.
    pub fn dot(&self, x: &[i8], scale: f32) -> f32 {
        let mut sums = [0i32; 2];
        for (col, (quant, x)) in self.quants.iter().zip(x).enumerate() {
            sums[col / 16] += (i32::from(*quant) - self.offset) * i32::from(*x);
        }
        let total: i32 = x.iter().map(|x| i32::from(*x)).sum();
        let parts = sums[0] as f32 * (self.scales[0] * scale) + sums[1] as f32 * (self.scales[1] * scale);
        parts + self.min * (total as f32 * scale)
    }
}
