//! The tile kernel for AVX2: a vector holds four columns of eight rows, so a tile is processed in two halves.
//!
//! Without VNNI, pairs of 8-bit products are first added as 16-bit integers. These do not overflow for weights of up to
//! 6 bits. For 8-bit weights, the kernel multiplies by the magnitude of the weight and applies its sign to the
//! activation.
#![allow(unsafe_code)]

use std::arch::x86_64::*;
use std::mem::transmute;

use crate::backend::cpu::tiles::layout::code::{self, Q4, Q4K, Q5K, Q6K, Q8};
use crate::backend::cpu::tiles::layout::{TILE_ROWS, TileFormat, for_format, offset, take, unrolled};
use crate::backend::cpu::tiles::{CACHED_ROWS, TileGemm};

/// Number of rows in half a tile.
const HALF_ROWS: usize = 8;

/// Computes the product of tiles and input rows. Panics if the CPU lacks the instructions, or the tiles do not fit the
/// input's columns.
pub fn multiply(format: TileFormat, gemm: &TileGemm<'_>) {
    let has = std::arch::is_x86_feature_detected!("avx2")
        && std::arch::is_x86_feature_detected!("fma")
        && std::arch::is_x86_feature_detected!("f16c");
    assert!(
        has && gemm.fits(format),
        "this CPU lacks AVX2, FMA or F16C, or tiles of {} bytes do not have {} columns",
        gemm.tile_bytes,
        gemm.x.cols()
    );
    // SAFETY: the CPU has the instructions, and each tile has the bytes that these columns take.
    unsafe { for_format!(format, multiply_format(gemm)) }
}

/// Unpacks a block for the first or second eight rows: its values, four columns per vector; its scales; and its minima.
/// (A Q6_K block has no minima but two scales per row: those of columns 0 to 15 and, in place of the minima, those of
/// columns 16 to 31.) `$step` is a step of format `K`, `$part` one of its blocks, `$half` 0 or 1. It is a macro because
/// a function would pass ten vectors through memory.
macro_rules! unpack {
    ($k:ident, $step:ident, $part:ident, $half:ident) => {{
        macro_rules! vector {
            ($at:expr) => {
                transmute::<[u8; 32], __m256i>(take($step, $at + $half * 32))
            };
        }
        macro_rules! half {
            ($at:expr) => {
                _mm256_cvtph_ps(transmute::<[u8; 16], __m128i>(take($step, $at + $half * 16)))
            };
        }
        let mut weights = [_mm256_setzero_si256(); 8];
        let quants = match $k {
            Q4 => offset::Q4_QUANTS,
            Q8 => offset::Q8_QUANTS,
            Q4K | Q5K => offset::K_QUANTS + $part * 256,
            _ => offset::Q6K_QUANTS + $part * offset::Q6K_BLOCK_BYTES,
        };
        if $k == Q8 {
            for (j, weights) in weights.iter_mut().enumerate() {
                *weights = vector!(quants + j * 64);
            }
        } else {
            let low = _mm256_set1_epi8(15);
            for j in 0..4 {
                let both = vector!(quants + j * 64);
                weights[j] = _mm256_and_si256(both, low);
                weights[j + 4] = _mm256_and_si256(_mm256_srli_epi16::<4>(both), low);
            }
        }
        if $k == Q5K {
            // Byte i of the vector gets bit i of the 32 bits: each of the four bytes is broadcast to eight bytes, and
            // each of these is masked to its bit.
            let spread = _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
            let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64.cast_signed());
            for (j, weights) in weights.iter_mut().enumerate() {
                let bits = i32::from_le_bytes(take($step, offset::K_HIGH_BITS + $part * 64 + j * 8 + $half * 4));
                let own = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(bits), spread), bit);
                let set = _mm256_cmpeq_epi8(own, bit);
                *weights = _mm256_or_si256(*weights, _mm256_and_si256(set, _mm256_set1_epi8(16)));
            }
        }
        if $k == Q6K {
            let mask = _mm256_set1_epi8(0x30);
            for which in 0..2 {
                let upper = vector!(quants + offset::Q6K_HIGH_BITS + which * 64);
                let shifted = [
                    _mm256_slli_epi16::<4>(upper),
                    _mm256_slli_epi16::<2>(upper),
                    upper,
                    _mm256_srli_epi16::<2>(upper),
                ];
                for (j, shifted) in shifted.into_iter().enumerate() {
                    let weights = &mut weights[which * 4 + j];
                    *weights = _mm256_or_si256(*weights, _mm256_and_si256(shifted, mask));
                }
            }
        }
        macro_rules! bytes {
            ($cvt:ident, $at:expr) => {
                _mm256_cvtepi32_ps($cvt(_mm_set_epi64x(0, i64::from_le_bytes(take($step, $at + $half * HALF_ROWS)))))
            };
        }
        let (scales, mins_or_scales) = match $k {
            Q4 => (half!(offset::Q4_SCALE), half!(offset::Q4_MIN)),
            Q8 => (half!(offset::Q8_SCALE), _mm256_setzero_ps()),
            Q4K | Q5K => {
                let scales = bytes!(_mm256_cvtepu8_epi32, offset::K_SCALES + $part * TILE_ROWS);
                let mins = bytes!(_mm256_cvtepu8_epi32, offset::K_MINS + $part * TILE_ROWS);
                let mins = _mm256_mul_ps(half!(offset::K_SUPER_MIN_SCALE), mins);
                (_mm256_mul_ps(half!(offset::K_SUPER_SCALE), scales), _mm256_sub_ps(_mm256_setzero_ps(), mins))
            }
            _ => {
                let unit = half!(offset::Q6K_SUPER_SCALE);
                let first = bytes!(_mm256_cvtepi8_epi32, offset::Q6K_SCALES + 2 * $part * TILE_ROWS);
                let second = bytes!(_mm256_cvtepi8_epi32, offset::Q6K_SCALES + (2 * $part + 1) * TILE_ROWS);
                (_mm256_mul_ps(unit, first), _mm256_mul_ps(unit, second))
            }
        };
        (weights, scales, mins_or_scales)
    }};
}

/// Multiplies all tiles by all input rows.
///
/// # Safety
/// The CPU has AVX2, FMA and F16C, and the tiles have format `K` and as many columns as the input.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn multiply_format<const K: u8>(gemm: &TileGemm<'_>) {
    let rows = gemm.x.rows();
    for pass in (0..rows).step_by(CACHED_ROWS) {
        let end = (pass + CACHED_ROWS).min(rows);
        for (tile, column) in gemm.tiles.chunks_exact(gemm.tile_bytes).zip(gemm.columns.clone().step_by(TILE_ROWS)) {
            let mut row = pass;
            while row < end {
                // SAFETY: the contract of this function; rows up to `end` exist.
                row += unsafe {
                    match end - row {
                        4.. => multiply_rows::<K, 4>(gemm, tile, column, row),
                        2.. => multiply_rows::<K, 2>(gemm, tile, column, row),
                        _ => multiply_rows::<K, 1>(gemm, tile, column, row),
                    }
                };
            }
        }
    }
}

/// Multiplies one tile by `N` input rows, starting at `row`. Returns `N`.
///
/// # Safety
/// The conditions of [`multiply_format`] hold, and the rows exist.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn multiply_rows<const K: u8, const N: usize>(
    gemm: &TileGemm<'_>,
    tile: &[u8],
    column: usize,
    row: usize,
) -> usize {
    let format = const { code::format(K) };
    let inputs: [_; N] = std::array::from_fn(|n| gemm.x.row(row + n));
    for half in 0..2 {
        let mut totals = [_mm256_setzero_ps(); N];
        let mut block = 0;
        for step in tile.chunks_exact(format.step_bytes()) {
            for part in 0..format.step_blocks() {
                // SAFETY: byte arrays are transmuted to vectors of their size.
                let (weights, scales, mins_or_scales) = unsafe { unpack!(K, step, part, half) };
                unrolled!(n < N, {
                    let (words, meta) = (&inputs[n].0[block], &inputs[n].1[block]);
                    let scale = _mm256_set1_ps(meta.scale);
                    if K == Q6K {
                        let [first, second] = meta.q6_corrections;
                        let mut sums = [_mm256_set1_epi32(first), _mm256_set1_epi32(second)];
                        for j in 0..4 {
                            sums[0] = add::<K>(sums[0], weights[j], words[j]);
                            sums[1] = add::<K>(sums[1], weights[j + 4], words[j + 4]);
                        }
                        let sums = [_mm256_cvtepi32_ps(sums[0]), _mm256_cvtepi32_ps(sums[1])];
                        totals[n] = _mm256_fmadd_ps(sums[0], _mm256_mul_ps(scales, scale), totals[n]);
                        totals[n] = _mm256_fmadd_ps(sums[1], _mm256_mul_ps(mins_or_scales, scale), totals[n]);
                    } else {
                        let mut sum = _mm256_setzero_si256();
                        for j in 0..8 {
                            sum = add::<K>(sum, weights[j], words[j]);
                        }
                        totals[n] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(scales, scale), totals[n]);
                        if K != Q8 {
                            totals[n] = _mm256_fmadd_ps(mins_or_scales, _mm256_set1_ps(meta.sum), totals[n]);
                        }
                    }
                });
                block += 1;
            }
        }
        let from = column + half * HALF_ROWS;
        let width = HALF_ROWS.min(gemm.columns.end.saturating_sub(from));
        if width == 0 {
            break;
        }
        for (n, total) in totals.into_iter().enumerate() {
            let mut values = [0.0; HALF_ROWS];
            // SAFETY: `values` holds eight f32.
            unsafe { _mm256_storeu_ps(values.as_mut_ptr(), total) };
            // SAFETY: only this chunk writes these columns.
            let out = unsafe { gemm.out.slice((row + n) * gemm.width + from, width) };
            out.copy_from_slice(&values[..width]);
        }
    }
    N
}

/// Adds the dot products of four columns with the four values of `word`; each lane is a row.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn add<const K: u8>(sum: __m256i, weights: __m256i, word: i32) -> __m256i {
    let x = _mm256_set1_epi32(word);
    let pairs = if K == Q8 {
        // Removes the offset of 128.
        let signed = _mm256_xor_si256(weights, _mm256_set1_epi8(-128));
        _mm256_maddubs_epi16(_mm256_abs_epi8(signed), _mm256_sign_epi8(x, signed))
    } else {
        _mm256_maddubs_epi16(weights, x)
    };
    _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
}
