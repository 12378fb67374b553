//! Tiles by AVX2: a vector is four columns of eight rows, so a tile is gone through in two halves.
//!
//! Without VNNI, products of 8 by 8 bits are added in pairs of 16 bits first. Those are large enough for weights of up to
//! 6 bits; weights of 8 bits are multiplied by their magnitude, their sign goes to the other side.
#![allow(unsafe_code)]

use std::arch::x86_64::*;
use std::mem::transmute;

use crate::engine::candle::tiles::Range;
use crate::engine::candle::tiles::layout::code::{EIGHT, FIVE_K, FOUR, FOUR_K, SIX_K, kind};
use crate::engine::candle::tiles::layout::{Kind, ROWS, at, take, unrolled};

/// Input rows whose blocks stay in the cache while a piece's tiles pass by.
const PASS: usize = 64;
/// Rows of half a tile.
const HALF: usize = 8;

/// Panics where the machine has no such instructions, or the tiles are not those of the input's columns.
pub fn range(kind: Kind, range: &Range<'_>) {
    let has = std::arch::is_x86_feature_detected!("avx2")
        && std::arch::is_x86_feature_detected!("fma")
        && std::arch::is_x86_feature_detected!("f16c");
    let fits = kind.tile_bytes(range.x.cols()) == Some(range.tile_bytes);
    assert!(has && fits, "tiles of {} bytes for {} columns", range.tile_bytes, range.x.cols());
    // SAFETY: the instructions are there, and each tile has the bytes that these columns take.
    unsafe {
        match kind {
            Kind::Four0 | Kind::Four1 => tiles::<FOUR>(range),
            Kind::Eight => tiles::<EIGHT>(range),
            Kind::FourK => tiles::<FOUR_K>(range),
            Kind::FiveK => tiles::<FIVE_K>(range),
            Kind::SixK => tiles::<SIX_K>(range),
        }
    }
}

/// A block's values, four columns a vector; its scales; and its minima, or the scales of its last 16 columns: of the first
/// or the second eight rows. `$step` is a step of kind `K`, `$part` is one of its blocks, `$half` 0 or 1. A macro,
/// since a function would pass ten vectors through memory.
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
            FOUR => at::FOUR_QUANTS,
            EIGHT => at::EIGHT_QUANTS,
            FOUR_K | FIVE_K => at::K_QUANTS + $part * 256,
            _ => at::SIX_QUANTS + $part * at::SIX_BLOCK,
        };
        if $k == EIGHT {
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
        if $k == FIVE_K {
            // Byte i of a vector takes bit i of four bytes: each is brought to eight bytes, and its own bit kept.
            let spread = _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
            let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64.cast_signed());
            for (j, weights) in weights.iter_mut().enumerate() {
                let bits = i32::from_le_bytes(take($step, at::K_FIFTH + $part * 64 + j * 8 + $half * 4));
                let own = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(bits), spread), bit);
                let set = _mm256_cmpeq_epi8(own, bit);
                *weights = _mm256_or_si256(*weights, _mm256_and_si256(set, _mm256_set1_epi8(16)));
            }
        }
        if $k == SIX_K {
            let mask = _mm256_set1_epi8(0x30);
            for which in 0..2 {
                let upper = vector!(quants + at::SIX_HIGH + which * 64);
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
                _mm256_cvtepi32_ps($cvt(_mm_set_epi64x(0, i64::from_le_bytes(take($step, $at + $half * HALF)))))
            };
        }
        let (scales, other) = match $k {
            FOUR => (half!(at::FOUR_SCALE), half!(at::FOUR_MIN)),
            EIGHT => (half!(at::EIGHT_SCALE), _mm256_setzero_ps()),
            FOUR_K | FIVE_K => {
                let scales = bytes!(_mm256_cvtepu8_epi32, at::K_SCALES + $part * ROWS);
                let mins = bytes!(_mm256_cvtepu8_epi32, at::K_MINS + $part * ROWS);
                let mins = _mm256_mul_ps(half!(at::K_MIN_UNIT), mins);
                (_mm256_mul_ps(half!(at::K_UNIT), scales), _mm256_sub_ps(_mm256_setzero_ps(), mins))
            }
            _ => {
                let unit = half!(at::SIX_UNIT);
                let first = bytes!(_mm256_cvtepi8_epi32, at::SIX_SCALES + 2 * $part * ROWS);
                let second = bytes!(_mm256_cvtepi8_epi32, at::SIX_SCALES + (2 * $part + 1) * ROWS);
                (_mm256_mul_ps(unit, first), _mm256_mul_ps(unit, second))
            }
        };
        (weights, scales, other)
    }};
}

/// # Safety
/// As in [`range`]: AVX2, FMA and F16C, and tiles of `x`'s columns in kind `K`.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tiles<const K: u8>(range: &Range<'_>) {
    let rows = range.x.rows();
    for pass in (0..rows).step_by(PASS) {
        let end = (pass + PASS).min(rows);
        for (tile, column) in range.tiles.chunks_exact(range.tile_bytes).zip(range.columns.clone().step_by(ROWS)) {
            let mut row = pass;
            while row < end {
                // SAFETY: as promised to this function; rows up to `end` exist.
                row += unsafe {
                    match end - row {
                        4.. => some_rows::<K, 4>(range, tile, column, row),
                        2.. => some_rows::<K, 2>(range, tile, column, row),
                        _ => some_rows::<K, 1>(range, tile, column, row),
                    }
                };
            }
        }
    }
}

/// `N` rows of the input, from `row` on, with one tile. Returns `N`.
///
/// # Safety
/// As for [`tiles`], and the rows exist.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn some_rows<const K: u8, const N: usize>(range: &Range<'_>, tile: &[u8], column: usize, row: usize) -> usize {
    let kind = const { kind(K) };
    let inputs: [_; N] = std::array::from_fn(|n| range.x.row(row + n));
    for half in 0..2 {
        let mut totals = [_mm256_setzero_ps(); N];
        let mut block = 0;
        for step in tile.chunks_exact(kind.step_bytes()) {
            for part in 0..kind.step_blocks() {
                // SAFETY: arrays of bytes become vectors of their size.
                let (weights, scales, other) = unsafe { unpack!(K, step, part, half) };
                unrolled!(n < N, {
                    let (words, meta) = (&inputs[n].0[block], &inputs[n].1[block]);
                    let scale = _mm256_set1_ps(meta.scale);
                    if K == SIX_K {
                        let mut sums = [_mm256_set1_epi32(meta.six[0]), _mm256_set1_epi32(meta.six[1])];
                        for j in 0..4 {
                            sums[0] = add::<K>(sums[0], weights[j], words[j]);
                            sums[1] = add::<K>(sums[1], weights[j + 4], words[j + 4]);
                        }
                        let sums = [_mm256_cvtepi32_ps(sums[0]), _mm256_cvtepi32_ps(sums[1])];
                        totals[n] = _mm256_fmadd_ps(sums[0], _mm256_mul_ps(scales, scale), totals[n]);
                        totals[n] = _mm256_fmadd_ps(sums[1], _mm256_mul_ps(other, scale), totals[n]);
                    } else {
                        let mut sum = _mm256_setzero_si256();
                        for j in 0..8 {
                            sum = add::<K>(sum, weights[j], words[j]);
                        }
                        totals[n] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(scales, scale), totals[n]);
                        if K != EIGHT {
                            totals[n] = _mm256_fmadd_ps(other, _mm256_set1_ps(meta.sum), totals[n]);
                        }
                    }
                });
                block += 1;
            }
        }
        let from = column + half * HALF;
        let width = HALF.min(range.columns.end.saturating_sub(from));
        if width == 0 {
            break;
        }
        for (n, total) in totals.into_iter().enumerate() {
            let mut values = [0.0; HALF];
            // SAFETY: eight values.
            unsafe { _mm256_storeu_ps(values.as_mut_ptr(), total) };
            // SAFETY: this piece alone writes these columns.
            let out = unsafe { range.out.slice((row + n) * range.width + from, width) };
            out.copy_from_slice(&values[..width]);
        }
    }
    N
}

/// Adds the products of four columns with the four values of `word`, a row a lane.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn add<const K: u8>(sum: __m256i, weights: __m256i, word: i32) -> __m256i {
    let x = _mm256_set1_epi32(word);
    let pairs = if K == EIGHT {
        // From plus 128 back to signed.
        let signed = _mm256_xor_si256(weights, _mm256_set1_epi8(-128));
        _mm256_maddubs_epi16(_mm256_abs_epi8(signed), _mm256_sign_epi8(x, signed))
    } else {
        _mm256_maddubs_epi16(weights, x)
    };
    _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
}
