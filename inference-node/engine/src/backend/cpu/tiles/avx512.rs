//! The tile kernel for AVX-512 with VNNI: a vector holds four columns of all sixteen rows.
#![allow(unsafe_code)]

use std::arch::x86_64::*;
use std::mem::transmute;

use crate::backend::cpu::tiles::layout::code::{self, Q4, Q4K, Q5K, Q6K, Q8};
use crate::backend::cpu::tiles::layout::{TILE_ROWS, TileFormat, for_format, offset, take, unrolled};
use crate::backend::cpu::tiles::{CACHED_ROWS, TileGemm};

/// Software prefetch distance, in bytes. With several input rows, the computation on each cache line takes too long for
/// the hardware prefetcher.
const PREFETCH_BYTES: usize = 4096;

/// Computes the product of tiles and input rows. Panics if the CPU lacks the instructions, or the tiles do not fit the
/// input's columns.
pub fn multiply(format: TileFormat, gemm: &TileGemm<'_>) {
    let has = std::arch::is_x86_feature_detected!("avx512f")
        && std::arch::is_x86_feature_detected!("avx512bw")
        && std::arch::is_x86_feature_detected!("avx512vnni");
    assert!(
        has && gemm.fits(format),
        "this CPU lacks AVX-512 F, BW or VNNI, or tiles of {} bytes do not have {} columns",
        gemm.tile_bytes,
        gemm.x.cols()
    );
    // SAFETY: the CPU has the instructions, and each tile has the bytes that these columns take.
    unsafe { for_format!(format, multiply_format(gemm)) }
}

/// Unpacks a block: its values, four columns per vector; its scales; and its minima. (A Q6_K block has no minima but
/// two scales per row: those of columns 0 to 15 and, in place of the minima, those of columns 16 to 31.) `$step` is a
/// step of format `K` and `$part` one of its blocks. It is a macro because a function would pass ten vectors through
/// memory.
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
            let low = _mm512_set1_epi8(15);
            for j in 0..4 {
                let both = vector!(quants + j * 64);
                weights[j] = _mm512_and_si512(both, low);
                weights[j + 4] = _mm512_and_si512(_mm512_srli_epi16::<4>(both), low);
            }
        }
        if $k == Q5K {
            let sixteen = _mm512_set1_epi8(16);
            for (j, weights) in weights.iter_mut().enumerate() {
                let bits = u64::from_le_bytes(take($step, offset::K_HIGH_BITS + $part * 64 + j * 8));
                *weights = _mm512_mask_add_epi8(*weights, bits, *weights, sixteen);
            }
        }
        if $k == Q6K {
            let mask = _mm512_set1_epi8(0x30);
            for which in 0..2 {
                let upper = vector!(quants + offset::Q6K_HIGH_BITS + which * 64);
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
        let (scales, mins_or_scales) = match $k {
            Q4 => (half!(offset::Q4_SCALE), half!(offset::Q4_MIN)),
            Q8 => (half!(offset::Q8_SCALE), _mm512_setzero_ps()),
            Q4K | Q5K => {
                let scales = bytes!(_mm512_cvtepu8_epi32, offset::K_SCALES + $part * TILE_ROWS);
                let mins = bytes!(_mm512_cvtepu8_epi32, offset::K_MINS + $part * TILE_ROWS);
                let mins = _mm512_mul_ps(half!(offset::K_SUPER_MIN_SCALE), mins);
                (_mm512_mul_ps(half!(offset::K_SUPER_SCALE), scales), _mm512_sub_ps(_mm512_setzero_ps(), mins))
            }
            _ => {
                let unit = half!(offset::Q6K_SUPER_SCALE);
                let first = bytes!(_mm512_cvtepi8_epi32, offset::Q6K_SCALES + 2 * $part * TILE_ROWS);
                let second = bytes!(_mm512_cvtepi8_epi32, offset::Q6K_SCALES + (2 * $part + 1) * TILE_ROWS);
                (_mm512_mul_ps(unit, first), _mm512_mul_ps(unit, second))
            }
        };
        (weights, scales, mins_or_scales)
    }};
}

/// Multiplies all tiles by all input rows.
///
/// # Safety
/// The CPU has AVX-512 F, BW and VNNI, and the tiles have format `K` and as many columns as the input.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
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
                        8.. => multiply_rows::<K, 8>(gemm, tile, column, row),
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
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn multiply_rows<const K: u8, const N: usize>(
    gemm: &TileGemm<'_>,
    tile: &[u8],
    column: usize,
    row: usize,
) -> usize {
    let format = const { code::format(K) };
    let inputs: [_; N] = std::array::from_fn(|n| gemm.x.row(row + n));
    let mut totals = [_mm512_setzero_ps(); N];
    let mut block = 0;
    for step in tile.chunks_exact(format.step_bytes()) {
        for part in 0..format.step_blocks() {
            let block_bytes = format.step_bytes() / format.step_blocks();
            for line in (0..block_bytes).step_by(64) {
                // A hint, valid for any address; the next tile follows this one in memory.
                let ahead = PREFETCH_BYTES + part * block_bytes + line;
                _mm_prefetch::<_MM_HINT_T0>(step.as_ptr().wrapping_add(ahead).cast());
            }
            // SAFETY: byte arrays are transmuted to vectors of their size.
            let (weights, scales, mins_or_scales) = unsafe { unpack!(K, step, part) };
            unrolled!(n < N, {
                let (words, meta) = (&inputs[n].0[block], &inputs[n].1[block]);
                let scale = _mm512_set1_ps(meta.scale);
                if K == Q6K {
                    let [first, second] = meta.q6_corrections;
                    let mut sums = [_mm512_set1_epi32(first), _mm512_set1_epi32(second)];
                    for j in 0..4 {
                        sums[0] = _mm512_dpbusd_epi32(sums[0], weights[j], _mm512_set1_epi32(words[j]));
                        sums[1] = _mm512_dpbusd_epi32(sums[1], weights[j + 4], _mm512_set1_epi32(words[j + 4]));
                    }
                    let sums = [_mm512_cvtepi32_ps(sums[0]), _mm512_cvtepi32_ps(sums[1])];
                    totals[n] = _mm512_fmadd_ps(sums[0], _mm512_mul_ps(scales, scale), totals[n]);
                    totals[n] = _mm512_fmadd_ps(sums[1], _mm512_mul_ps(mins_or_scales, scale), totals[n]);
                } else {
                    let mut sum = _mm512_set1_epi32(if K == Q8 { meta.q8_correction } else { 0 });
                    for j in 0..8 {
                        sum = _mm512_dpbusd_epi32(sum, weights[j], _mm512_set1_epi32(words[j]));
                    }
                    totals[n] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(scales, scale), totals[n]);
                    if K != Q8 {
                        totals[n] = _mm512_fmadd_ps(mins_or_scales, _mm512_set1_ps(meta.sum), totals[n]);
                    }
                }
            });
            block += 1;
        }
    }
    let width = TILE_ROWS.min(gemm.columns.end - column);
    for (n, total) in totals.into_iter().enumerate() {
        // SAFETY: only this chunk writes these columns.
        let out = unsafe { gemm.out.slice((row + n) * gemm.width + column, width) };
        let mask = (((1u32 << width) - 1) & 0xffff) as __mmask16;
        // SAFETY: the mask excludes the lanes beyond `out`.
        unsafe { _mm512_mask_storeu_ps(out.as_mut_ptr(), mask, total) };
    }
    N
}
