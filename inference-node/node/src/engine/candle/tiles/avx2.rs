//! Tiles by AVX2: a vector is four columns of eight rows, so a tile is gone through in two halves.
//!
//! Without VNNI, products of 8 by 8 bits are added in pairs of 16 bits first. Those are large enough for weights of up to
//! 6 bits; weights of 8 bits are multiplied by their magnitude, their sign goes to the other side.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use crate::engine::candle::tiles::Range;
use crate::engine::candle::tiles::layout::{BLOCK, Kind, ROWS, at};

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
    let cols = range.x.cols();
    let blocks = cols / BLOCK;
    let (quants, meta) = range.x.rows_from(row);
    assert!(quants.len() >= N * cols && meta.len() >= N * blocks && tile.len() == range.tile_bytes);
    let (quants, meta) = (quants.as_ptr(), meta.as_ptr());
    for half in 0..2 {
        let mut totals = [_mm256_setzero_ps(); N];
        let mut block = 0;
        for step in tile.chunks_exact(kind.step_bytes()) {
            for part in 0..kind.step_blocks() {
                // SAFETY: `step` is a whole step, `part` one of its blocks, `half` one of two.
                let (weights, scales, other) = unsafe { unpack::<K>(step, part, half) };
                for (n, total) in totals.iter_mut().enumerate() {
                    // SAFETY: the assertion above: row `n` has `cols` values and `blocks` blocks, and the tile's steps
                    // have as many blocks as those columns.
                    unsafe {
                        let x = quants.add(n * cols + block * BLOCK).cast::<i32>();
                        let meta = &*meta.add(n * blocks + block);
                        let scale = _mm256_set1_ps(meta.scale);
                        let add = |sum: __m256i, weights: __m256i, j: usize| {
                            let x = _mm256_set1_epi32(x.add(j).read_unaligned());
                            let pairs = if K == EIGHT {
                                // From plus 128 back to signed.
                                let signed = _mm256_xor_si256(weights, _mm256_set1_epi8(-128));
                                _mm256_maddubs_epi16(_mm256_abs_epi8(signed), _mm256_sign_epi8(x, signed))
                            } else {
                                _mm256_maddubs_epi16(weights, x)
                            };
                            _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
                        };
                        if K == SIX_K {
                            let mut sums = meta.six.map(|start| _mm256_set1_epi32(start));
                            for j in 0..4 {
                                sums[0] = add(sums[0], weights[j], j);
                                sums[1] = add(sums[1], weights[j + 4], j + 4);
                            }
                            let sums = sums.map(|sum| _mm256_cvtepi32_ps(sum));
                            *total = _mm256_fmadd_ps(sums[0], _mm256_mul_ps(scales, scale), *total);
                            *total = _mm256_fmadd_ps(sums[1], _mm256_mul_ps(other, scale), *total);
                        } else {
                            let mut sum = _mm256_setzero_si256();
                            for (j, weights) in weights.iter().enumerate() {
                                sum = add(sum, *weights, j);
                            }
                            *total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(scales, scale), *total);
                            if K != EIGHT {
                                *total = _mm256_fmadd_ps(other, _mm256_set1_ps(meta.sum), *total);
                            }
                        }
                    }
                }
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

/// A block's values, four columns a vector; its scales; and its minima, or the scales of its last 16 columns: of the first
/// or the second eight rows.
///
/// # Safety
/// `step` is a step of kind `K`, `part` less than its blocks, `half` 0 or 1.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack<const K: u8>(step: &[u8], part: usize, half: usize) -> ([__m256i; 8], __m256, __m256) {
    let kind = const { kind(K) };
    debug_assert!(step.len() == kind.step_bytes() && part < kind.step_blocks() && half < 2);
    let step = step.as_ptr();
    // SAFETY: all offsets are inside a step by [`at`]'s table; the second half of a vector is within it.
    unsafe {
        let vector = |at: usize| _mm256_loadu_si256(step.add(at + half * 32).cast());
        let float = |at: usize| _mm256_cvtph_ps(_mm_loadu_si128(step.add(at + half * 16).cast()));
        let bytes = |at: usize| _mm_loadl_epi64(step.add(at + half * HALF).cast());
        let four = |from: usize| {
            let low = _mm256_set1_epi8(15);
            let mut weights = [_mm256_setzero_si256(); 8];
            for j in 0..4 {
                let both = vector(from + j * 64);
                weights[j] = _mm256_and_si256(both, low);
                weights[j + 4] = _mm256_and_si256(_mm256_srli_epi16::<4>(both), low);
            }
            weights
        };
        match K {
            FOUR => (four(at::FOUR_QUANTS), float(at::FOUR_SCALE), float(at::FOUR_MIN)),
            EIGHT => {
                let mut weights = [_mm256_setzero_si256(); 8];
                for (j, weights) in weights.iter_mut().enumerate() {
                    *weights = vector(at::EIGHT_QUANTS + j * 64);
                }
                (weights, float(at::EIGHT_SCALE), _mm256_setzero_ps())
            }
            FOUR_K | FIVE_K => {
                let mut weights = four(at::K_QUANTS + part * 256);
                if K == FIVE_K {
                    // Byte i of a vector takes bit i of four bytes: each is brought to eight bytes, and its own bit kept.
                    let spread =
                        _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
                    let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64.cast_signed());
                    for (j, weights) in weights.iter_mut().enumerate() {
                        let bits = step.add(at::K_FIFTH + part * 64 + j * 8 + half * 4).cast::<i32>().read_unaligned();
                        let own = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(bits), spread), bit);
                        let set = _mm256_cmpeq_epi8(own, bit);
                        *weights = _mm256_or_si256(*weights, _mm256_and_si256(set, _mm256_set1_epi8(16)));
                    }
                }
                let six = |at: usize| _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes(at + part * ROWS)));
                let scales = _mm256_mul_ps(float(at::K_UNIT), six(at::K_SCALES));
                let mins = _mm256_mul_ps(float(at::K_MIN_UNIT), six(at::K_MINS));
                (weights, scales, _mm256_sub_ps(_mm256_setzero_ps(), mins))
            }
            _ => {
                let from = at::SIX_QUANTS + part * at::SIX_BLOCK;
                let mut weights = four(from);
                let mask = _mm256_set1_epi8(0x30);
                for which in 0..2 {
                    let upper = vector(from + at::SIX_HIGH + which * 64);
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
                let scales = |which: usize| {
                    let eight = bytes(at::SIX_SCALES + (2 * part + which) * ROWS);
                    _mm256_mul_ps(float(at::SIX_UNIT), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight)))
                };
                (weights, scales(0), scales(1))
            }
        }
    }
}
