//! Tiles by AVX-512 with VNNI: a vector is four columns of all sixteen rows.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use crate::engine::candle::tiles::Range;
use crate::engine::candle::tiles::layout::{BLOCK, Kind, ROWS, at};

/// Input rows whose blocks stay in the cache while a piece's tiles pass by.
const PASS: usize = 64;

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

// The kinds once more, as parameters of functions.
const FOUR: u8 = 0;
const EIGHT: u8 = 1;
const FOUR_K: u8 = 2;
const FIVE_K: u8 = 3;
const SIX_K: u8 = 4;

const fn kind(of: u8) -> Kind {
    match of {
        FOUR => Kind::Four1,
        EIGHT => Kind::Eight,
        FOUR_K => Kind::FourK,
        FIVE_K => Kind::FiveK,
        _ => Kind::SixK,
    }
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
    let cols = range.x.cols();
    let blocks = cols / BLOCK;
    let (quants, meta) = range.x.rows_from(row);
    assert!(quants.len() >= N * cols && meta.len() >= N * blocks && tile.len() == range.tile_bytes);
    let (quants, meta) = (quants.as_ptr(), meta.as_ptr());
    let mut totals = [_mm512_setzero_ps(); N];
    let mut block = 0;
    for step in tile.chunks_exact(kind.step_bytes()) {
        for part in 0..kind.step_blocks() {
            // SAFETY: `step` is a whole step and `part` one of its blocks.
            let (weights, scales, other) = unsafe { unpack::<K>(step, part) };
            for (n, total) in totals.iter_mut().enumerate() {
                // SAFETY: the assertion above: row `n` has `cols` values and `blocks` blocks, and the tile's steps have
                // as many blocks as those columns.
                unsafe {
                    let x = quants.add(n * cols + block * BLOCK).cast::<i32>();
                    let meta = &*meta.add(n * blocks + block);
                    let four = |j: usize| _mm512_set1_epi32(x.add(j).read_unaligned());
                    let scale = _mm512_set1_ps(meta.scale);
                    if K == SIX_K {
                        let mut sums = meta.six.map(|start| _mm512_set1_epi32(start));
                        for j in 0..4 {
                            sums[0] = _mm512_dpbusd_epi32(sums[0], weights[j], four(j));
                            sums[1] = _mm512_dpbusd_epi32(sums[1], weights[j + 4], four(j + 4));
                        }
                        let sums = sums.map(|sum| _mm512_cvtepi32_ps(sum));
                        *total = _mm512_fmadd_ps(sums[0], _mm512_mul_ps(scales, scale), *total);
                        *total = _mm512_fmadd_ps(sums[1], _mm512_mul_ps(other, scale), *total);
                    } else {
                        let start = if K == EIGHT { meta.eight } else { 0 };
                        let mut sum = _mm512_set1_epi32(start);
                        for (j, weights) in weights.iter().enumerate() {
                            sum = _mm512_dpbusd_epi32(sum, *weights, four(j));
                        }
                        *total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(scales, scale), *total);
                        if K != EIGHT {
                            *total = _mm512_fmadd_ps(other, _mm512_set1_ps(meta.sum), *total);
                        }
                    }
                }
            }
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

/// A block's values, four columns a vector; its scales; and its minima, or the scales of its last 16 columns.
///
/// # Safety
/// `step` is a step of kind `K` and `part` less than its blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn unpack<const K: u8>(step: &[u8], part: usize) -> ([__m512i; 8], __m512, __m512) {
    let kind = const { kind(K) };
    debug_assert!(step.len() == kind.step_bytes() && part < kind.step_blocks());
    let step = step.as_ptr();
    // SAFETY: all offsets are inside a step by [`at`]'s table.
    unsafe {
        let vector = |at: usize| _mm512_loadu_si512(step.add(at).cast());
        let half = |at: usize| _mm512_cvtph_ps(_mm256_loadu_si256(step.add(at).cast()));
        let four = |from: usize| {
            let low = _mm512_set1_epi8(15);
            let mut weights = [_mm512_setzero_si512(); 8];
            for j in 0..4 {
                let both = vector(from + j * 64);
                weights[j] = _mm512_and_si512(both, low);
                weights[j + 4] = _mm512_and_si512(_mm512_srli_epi16::<4>(both), low);
            }
            weights
        };
        match K {
            FOUR => (four(at::FOUR_QUANTS), half(at::FOUR_SCALE), half(at::FOUR_MIN)),
            EIGHT => {
                let mut weights = [_mm512_setzero_si512(); 8];
                for (j, weights) in weights.iter_mut().enumerate() {
                    *weights = vector(at::EIGHT_QUANTS + j * 64);
                }
                (weights, half(at::EIGHT_SCALE), _mm512_setzero_ps())
            }
            FOUR_K | FIVE_K => {
                let mut weights = four(at::K_QUANTS + part * 256);
                if K == FIVE_K {
                    let sixteen = _mm512_set1_epi8(16);
                    for (j, weights) in weights.iter_mut().enumerate() {
                        let bits = step.add(at::K_FIFTH + part * 64 + j * 8).cast::<u64>().read_unaligned();
                        *weights = _mm512_mask_add_epi8(*weights, bits, *weights, sixteen);
                    }
                }
                let bytes = |from: usize| {
                    let bytes = _mm_loadu_si128(step.add(from + part * ROWS).cast());
                    _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes))
                };
                let scales = _mm512_mul_ps(half(at::K_UNIT), bytes(at::K_SCALES));
                let mins = _mm512_mul_ps(half(at::K_MIN_UNIT), bytes(at::K_MINS));
                (weights, scales, _mm512_sub_ps(_mm512_setzero_ps(), mins))
            }
            _ => {
                let from = at::SIX_QUANTS + part * at::SIX_BLOCK;
                let mut weights = four(from);
                let mask = _mm512_set1_epi8(0x30);
                for which in 0..2 {
                    let upper = vector(from + at::SIX_HIGH + which * 64);
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
                let scales = |which: usize| {
                    let bytes = _mm_loadu_si128(step.add(at::SIX_SCALES + (2 * part + which) * ROWS).cast());
                    _mm512_mul_ps(half(at::SIX_UNIT), _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)))
                };
                (weights, scales(0), scales(1))
            }
        }
    }
}
