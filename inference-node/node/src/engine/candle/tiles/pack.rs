//! From a GGUF file's blocks to tiles.
//!
//! The blocks' layouts are those of llama.cpp's ggml-common.h.

use crate::engine::candle::team;
use crate::engine::candle::tiles::layout::{BLOCK, Kind, ROWS, at, byte, fifth, nibble, upper};
use half::f16;

/// Bytes of one of the file's blocks, which holds as many columns as a step.
const fn block_bytes(kind: Kind) -> usize {
    match kind {
        Kind::Four0 => 18,
        Kind::Four1 => 20,
        Kind::Eight => 34,
        Kind::FourK => 144,
        Kind::FiveK => 176,
        Kind::SixK => 210,
    }
}

/// Fills `tiles`, which are zeros. `None`: `blocks` are not `rows` x `cols`.
pub fn pack(kind: Kind, blocks: &[u8], rows: usize, cols: usize, tiles: &mut [u8]) -> Option<()> {
    let row_bytes = cols / (kind.step_blocks() * BLOCK) * block_bytes(kind);
    if rows.checked_mul(row_bytes)? != blocks.len() || row_bytes == 0 {
        return None;
    }
    team::chunks(tiles, kind.tile_bytes(cols)?, |tile, bytes| {
        for (row, source) in blocks.chunks_exact(row_bytes).skip(tile * ROWS).take(ROWS).enumerate() {
            let steps = bytes.chunks_exact_mut(kind.step_bytes());
            for (step, block) in steps.zip(source.chunks_exact(block_bytes(kind))) {
                put(kind, block, step, row);
            }
        }
    });
    Some(())
}

fn put(kind: Kind, block: &[u8], step: &mut [u8], row: usize) {
    match kind {
        Kind::Four0 => {
            // Values are scale x (quant - 8).
            let scale = f16::from_le_bytes([block[0], block[1]]);
            let min = f16::from_f32(-8.0 * scale.to_f32());
            put_half(step, at::FOUR_SCALE, row, scale.to_le_bytes());
            put_half(step, at::FOUR_MIN, row, min.to_le_bytes());
            put_nibbles(&mut step[at::FOUR_QUANTS..], row, |col| halves(&block[2..], col));
        }
        Kind::Four1 => {
            put_half(step, at::FOUR_SCALE, row, [block[0], block[1]]);
            put_half(step, at::FOUR_MIN, row, [block[2], block[3]]);
            put_nibbles(&mut step[at::FOUR_QUANTS..], row, |col| halves(&block[4..], col));
        }
        Kind::Eight => {
            put_half(step, at::EIGHT_SCALE, row, [block[0], block[1]]);
            for (col, quant) in block[2..].iter().enumerate() {
                step[at::EIGHT_QUANTS + byte(row, col)] = quant ^ 0x80;
            }
        }
        Kind::FourK | Kind::FiveK => {
            put_half(step, at::K_UNIT, row, [block[0], block[1]]);
            put_half(step, at::K_MIN_UNIT, row, [block[2], block[3]]);
            let (scales, rest) = block[4..].split_at(12);
            let (high, low) = if kind == Kind::FiveK { rest.split_at(32) } else { (&rest[..0], rest) };
            for part in 0..8 {
                let (scale, min) = six_bits(scales, part);
                step[at::K_SCALES + part * ROWS + row] = scale;
                step[at::K_MINS + part * ROWS + row] = min;
                // Two parts share 32 bytes: the low halves are the first one's.
                let source = &low[part / 2 * 32..][..32];
                let shift = part % 2 * 4;
                put_nibbles(&mut step[at::K_QUANTS + part * 256..], row, |col| source[col] >> shift & 15);
                for (col, high) in high.iter().enumerate() {
                    let (byte, shift) = fifth(row, col);
                    step[at::K_FIFTH + part * 64 + byte] |= (high >> part & 1) << shift;
                }
            }
        }
        Kind::SixK => {
            let (low, rest) = block.split_at(128);
            let (high, rest) = rest.split_at(64);
            let (scales, unit) = rest.split_at(16);
            put_half(step, at::SIX_UNIT, row, [unit[0], unit[1]]);
            for (part, scale) in scales.iter().enumerate() {
                step[at::SIX_SCALES + part * ROWS + row] = *scale;
            }
            for part in 0..8 {
                // Each half of 128 columns: 64 bytes of low bits, whose low and high halves are 64 columns each, and 32
                // bytes of upper bits, of which every 32 columns have two.
                let (half, quarter) = (part / 4, part % 4);
                let low = &low[half * 64 + quarter % 2 * 32..][..32];
                let high = &high[half * 32..][..32];
                let to = &mut step[at::SIX_QUANTS + part * at::SIX_BLOCK..];
                put_nibbles(to, row, |col| low[col] >> (quarter / 2 * 4) & 15);
                for (col, high) in high.iter().enumerate() {
                    let (byte, shift) = upper(row, col);
                    to[at::SIX_HIGH + byte] |= (high >> (2 * quarter) & 3) << shift;
                }
            }
        }
    }
}

fn put_half(step: &mut [u8], from: usize, row: usize, bytes: [u8; 2]) {
    step[from + 2 * row..][..2].copy_from_slice(&bytes);
}

fn put_nibbles(to: &mut [u8], row: usize, quant: impl Fn(usize) -> u8) {
    for col in 0..BLOCK {
        let (byte, shift) = nibble(row, col);
        to[byte] |= quant(col) << shift;
    }
}

/// Column `col` of 32 in 16 bytes: the low halves come first.
fn halves(bytes: &[u8], col: usize) -> u8 {
    bytes[col % 16] >> (col / 16 * 4) & 15
}

/// Scale and minimum of part `at` of eight, six bits each, in 12 bytes.
fn six_bits(bytes: &[u8], at: usize) -> (u8, u8) {
    if at < 4 {
        (bytes[at] & 63, bytes[at + 4] & 63)
    } else {
        let (low, upper) = (bytes[at + 4], |from: usize| bytes[from] >> 6 << 4);
        (low & 15 | upper(at - 4), low >> 4 | upper(at))
    }
}
