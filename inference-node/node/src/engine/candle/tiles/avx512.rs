//! Tiles by AVX-512 with VNNI: a vector is four columns of all sixteen rows.
#![allow(unsafe_code)]

use std::arch::x86_64::*;
use std::mem::transmute;

use crate::engine::candle::tiles::Range;
use crate::engine::candle::tiles::layout::code::{EIGHT, FIVE_K, FOUR, FOUR_K, SIX_K, kind};
use crate::engine::candle::tiles::layout::{Kind, ROWS, at, take, unrolled};

/// Input rows whose blocks stay in the cache while a piece's tiles pass by.
const PASS: usize = 64;
/// Bytes ahead that are asked for: several rows at once compute too long on each line for the hardware to run ahead of.
const AHEAD: usize = 4096;

/// Panics where the machine has no such instructions, or the tiles are not those of the input's columns.
pub fn range(kind: Kind, range: &Range<'_>) {
    let has = std::arch::is_x86_feature_detected!("avx512f")
        && std::arch::is_x86_feature_detected!("avx512bw")
        && std::arch::is_x86_feature_detected!("avx512vnni");
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

/// A block's values, four columns a vector; its scales; and its minima, or the scales of its last 16 columns. `$step` is
/// a step of kind `K` and `$part` one of its blocks. A macro, since a function would pass ten vectors through memory.
macro_rules! unpack {
    ($k:ident, $step:ident, $part:ident) => {{
        macro_rules! vector {
            ($at:expr) => {
                transmute::<[u8; 64], __m512i>(take($step, $at))
            };
        }
        macro_rules! half {
            ($at:expr) => {
                _mm512_cvtph_ps(transmute::<[u8; 32], __m256i>(take($step, $at)))
            };
        }
        let mut weights = [_mm512_setzero_si512(); 8];
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
            let low = _mm512_set1_epi8(15);
            for j in 0..4 {
                let both = vector!(quants + j * 64);
                weights[j] = _mm512_and_si512(both, low);
                weights[j + 4] = _mm512_and_si512(_mm512_srli_epi16::<4>(both), low);
            }
        }
        if $k == FIVE_K {
            let sixteen = _mm512_set1_epi8(16);
            for (j, weights) in weights.iter_mut().enumerate() {
                let bits = u64::from_le_bytes(take($step, at::K_FIFTH + $part * 64 + j * 8));
                *weights = _mm512_mask_add_epi8(*weights, bits, *weights, sixteen);
            }
        }
        if $k == SIX_K {
            let mask = _mm512_set1_epi8(0x30);
            for which in 0..2 {
                let upper = vector!(quants + at::SIX_HIGH + which * 64);
                let shifted = [
                    _mm512_slli_epi16::<4>(upper),
                    _mm512_slli_epi16::<2>(upper),
                    upper,
                    _mm512_srli_epi16::<2>(upper),
                ];
                for (j, shifted) in shifted.into_iter().enumerate() {
                    let weights = &mut weights[which * 4 + j];
                    *weights = _mm512_or_si512(*weights, _mm512_and_si512(shifted, mask));
                }
            }
        }
        macro_rules! bytes {
            ($cvt:ident, $at:expr) => {
                _mm512_cvtepi32_ps($cvt(transmute::<[u8; 16], __m128i>(take($step, $at))))
            };
        }
        let (scales, other) = match $k {
            FOUR => (half!(at::FOUR_SCALE), half!(at::FOUR_MIN)),
            EIGHT => (half!(at::EIGHT_SCALE), _mm512_setzero_ps()),
            FOUR_K | FIVE_K => {
                let scales = bytes!(_mm512_cvtepu8_epi32, at::K_SCALES + $part * ROWS);
                let mins = bytes!(_mm512_cvtepu8_epi32, at::K_MINS + $part * ROWS);
                let mins = _mm512_mul_ps(half!(at::K_MIN_UNIT), mins);
                (_mm512_mul_ps(half!(at::K_UNIT), scales), _mm512_sub_ps(_mm512_setzero_ps(), mins))
            }
            _ => {
                let unit = half!(at::SIX_UNIT);
                let first = bytes!(_mm512_cvtepi8_epi32, at::SIX_SCALES + 2 * $part * ROWS);
                let second = bytes!(_mm512_cvtepi8_epi32, at::SIX_SCALES + (2 * $part + 1) * ROWS);
                (_mm512_mul_ps(unit, first), _mm512_mul_ps(unit, second))
            }
        };
        (weights, scales, other)
    }};
}

/// # Safety
/// As in [`range`]: AVX-512 F, BW and VNNI, and tiles of `x`'s columns in kind `K`.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
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
                        8.. => some_rows::<K, 8>(range, tile, column, row),
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
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn some_rows<const K: u8, const N: usize>(range: &Range<'_>, tile: &[u8], column: usize, row: usize) -> usize {
    let kind = const { kind(K) };
    let inputs: [_; N] = std::array::from_fn(|n| range.x.row(row + n));
    let mut totals = [_mm512_setzero_ps(); N];
    let mut block = 0;
    for step in tile.chunks_exact(kind.step_bytes()) {
        for part in 0..kind.step_blocks() {
            let block_bytes = kind.step_bytes() / kind.step_blocks();
            for line in (0..block_bytes).step_by(64) {
                // A hint, whatever the address: tiles lie one behind the other.
                _mm_prefetch::<_MM_HINT_T0>(step.as_ptr().wrapping_add(AHEAD + part * block_bytes + line).cast());
            }
            // SAFETY: arrays of bytes become vectors of their size.
            let (weights, scales, other) = unsafe { unpack!(K, step, part) };
            unrolled!(n < N, {
                let (words, meta) = (&inputs[n].0[block], &inputs[n].1[block]);
                let scale = _mm512_set1_ps(meta.scale);
                if K == SIX_K {
                    let mut sums = [_mm512_set1_epi32(meta.six[0]), _mm512_set1_epi32(meta.six[1])];
                    for j in 0..4 {
                        sums[0] = _mm512_dpbusd_epi32(sums[0], weights[j], _mm512_set1_epi32(words[j]));
                        sums[1] = _mm512_dpbusd_epi32(sums[1], weights[j + 4], _mm512_set1_epi32(words[j + 4]));
                    }
                    let sums = [_mm512_cvtepi32_ps(sums[0]), _mm512_cvtepi32_ps(sums[1])];
                    totals[n] = _mm512_fmadd_ps(sums[0], _mm512_mul_ps(scales, scale), totals[n]);
                    totals[n] = _mm512_fmadd_ps(sums[1], _mm512_mul_ps(other, scale), totals[n]);
                } else {
                    let mut sum = _mm512_set1_epi32(if K == EIGHT { meta.eight } else { 0 });
                    for j in 0..8 {
                        sum = _mm512_dpbusd_epi32(sum, weights[j], _mm512_set1_epi32(words[j]));
                    }
                    totals[n] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(scales, scale), totals[n]);
                    if K != EIGHT {
                        totals[n] = _mm512_fmadd_ps(other, _mm512_set1_ps(meta.sum), totals[n]);
                    }
                }
            });
            block += 1;
        }
    }
    let width = ROWS.min(range.columns.end - column);
    for (n, total) in totals.into_iter().enumerate() {
        // SAFETY: this piece alone writes these columns.
        let out = unsafe { range.out.slice((row + n) * range.width + column, width) };
        let mask = (((1u32 << width) - 1) & 0xffff) as __mmask16;
        // SAFETY: the mask leaves out what is beyond `out`.
        unsafe { _mm512_mask_storeu_ps(out.as_mut_ptr(), mask, total) };
    }
    N
}
