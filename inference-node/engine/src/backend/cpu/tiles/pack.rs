//! Packing the blocks of a GGUF file into tiles.
//!
//! The layouts of the blocks are those of llama.cpp's ggml-common.h.

use crate::backend::cpu::thread_pool;
use crate::backend::cpu::tiles::layout::{
    TILE_BLOCK_COLUMNS, TILE_ROWS, TileFormat, byte, fifth_bit, nibble, offset, upper_bits,
};
use half::f16;

/// Size of a block in the file, in bytes. Such a block has as many columns as a step of a tile.
const fn block_bytes(format: TileFormat) -> usize {
    match format {
        TileFormat::Q4_0 => 18,
        TileFormat::Q4_1 => 20,
        TileFormat::Q8_0 => 34,
        TileFormat::Q4K => 144,
        TileFormat::Q5K => 176,
        TileFormat::Q6K => 210,
    }
}

/// Packs `blocks` into `tiles`, which must be zeroed. Returns `None` if `blocks` are not a matrix of `rows` x `cols`.
pub fn pack(format: TileFormat, blocks: &[u8], rows: usize, cols: usize, tiles: &mut [u8]) -> Option<()> {
    let row_bytes = cols / (format.step_blocks() * TILE_BLOCK_COLUMNS) * block_bytes(format);
    if rows.checked_mul(row_bytes)? != blocks.len() || row_bytes == 0 {
        return None;
    }
    thread_pool::for_each_chunk(tiles, format.tile_bytes(cols)?, |tile, bytes| {
        for (row, source) in blocks.chunks_exact(row_bytes).skip(tile * TILE_ROWS).take(TILE_ROWS).enumerate() {
            let steps = bytes.chunks_exact_mut(format.step_bytes());
            for (step, block) in steps.zip(source.chunks_exact(block_bytes(format))) {
                pack_block(format, block, step, row);
            }
        }
    });
    Some(())
}

/// Writes a block of the file into row `row` of a step.
fn pack_block(format: TileFormat, block: &[u8], step: &mut [u8], row: usize) {
    match format {
        TileFormat::Q4_0 => {
            // Q4_0: value = scale x (quant - 8), so the minimum is -8 x scale.
            let scale = f16::from_le_bytes([block[0], block[1]]);
            let min = f16::from_f32(-8.0 * scale.to_f32());
            write_half(step, offset::Q4_SCALE, row, scale.to_le_bytes());
            write_half(step, offset::Q4_MIN, row, min.to_le_bytes());
            write_nibbles(&mut step[offset::Q4_QUANTS..], row, |col| block_nibble(&block[2..], col));
        }
        TileFormat::Q4_1 => {
            write_half(step, offset::Q4_SCALE, row, [block[0], block[1]]);
            write_half(step, offset::Q4_MIN, row, [block[2], block[3]]);
            write_nibbles(&mut step[offset::Q4_QUANTS..], row, |col| block_nibble(&block[4..], col));
        }
        TileFormat::Q8_0 => {
            write_half(step, offset::Q8_SCALE, row, [block[0], block[1]]);
            for (col, quant) in block[2..].iter().enumerate() {
                step[offset::Q8_QUANTS + byte(row, col)] = quant ^ 0x80;
            }
        }
        TileFormat::Q4K | TileFormat::Q5K => {
            write_half(step, offset::K_SUPER_SCALE, row, [block[0], block[1]]);
            write_half(step, offset::K_SUPER_MIN_SCALE, row, [block[2], block[3]]);
            let (scales, rest) = block[4..].split_at(12);
            let (high, low) = if format == TileFormat::Q5K { rest.split_at(32) } else { (&rest[..0], rest) };
            for part in 0..8 {
                let (scale, min) = scale_and_min(scales, part);
                step[offset::K_SCALES + part * TILE_ROWS + row] = scale;
                step[offset::K_MINS + part * TILE_ROWS + row] = min;
                // Two blocks share 32 bytes: the low nibbles belong to the first.
                let source = &low[part / 2 * 32..][..32];
                let shift = part % 2 * 4;
                write_nibbles(&mut step[offset::K_QUANTS + part * 256..], row, |col| source[col] >> shift & 15);
                for (col, high) in high.iter().enumerate() {
                    let (byte, shift) = fifth_bit(row, col);
                    step[offset::K_HIGH_BITS + part * 64 + byte] |= (high >> part & 1) << shift;
                }
            }
        }
        TileFormat::Q6K => {
            let (low, rest) = block.split_at(128);
            let (high, rest) = rest.split_at(64);
            let (scales, unit) = rest.split_at(16);
            write_half(step, offset::Q6K_SUPER_SCALE, row, [unit[0], unit[1]]);
            for (part, scale) in scales.iter().enumerate() {
                step[offset::Q6K_SCALES + part * TILE_ROWS + row] = *scale;
            }
            for part in 0..8 {
                // Each half of 128 columns has 64 bytes of nibbles, whose low and high nibbles are 64 columns each, and
                // 32 bytes of upper bits, two bits per column.
                let (half, quarter) = (part / 4, part % 4);
                let low = &low[half * 64 + quarter % 2 * 32..][..32];
                let high = &high[half * 32..][..32];
                let to = &mut step[offset::Q6K_QUANTS + part * offset::Q6K_BLOCK_BYTES..];
                write_nibbles(to, row, |col| low[col] >> (quarter / 2 * 4) & 15);
                for (col, high) in high.iter().enumerate() {
                    let (byte, shift) = upper_bits(row, col);
                    to[offset::Q6K_HIGH_BITS + byte] |= (high >> (2 * quarter) & 3) << shift;
                }
            }
        }
    }
}

fn write_half(step: &mut [u8], from: usize, row: usize, bytes: [u8; 2]) {
    step[from + 2 * row..][..2].copy_from_slice(&bytes);
}

fn write_nibbles(to: &mut [u8], row: usize, quant: impl Fn(usize) -> u8) {
    for col in 0..TILE_BLOCK_COLUMNS {
        let (byte, shift) = nibble(row, col);
        to[byte] |= quant(col) << shift;
    }
}

/// The 4-bit value of column `col`. `bytes` are 16 bytes with 32 columns: 0 to 15 in the low nibbles, 16 to 31 in the
/// high nibbles.
fn block_nibble(bytes: &[u8], col: usize) -> u8 {
    bytes[col % 16] >> (col / 16 * 4) & 15
}

/// Scale and minimum of block `at`. `bytes` are 12 bytes with the scales and minima of eight blocks, six bits each
/// (get_scale_min_k4 in ggml).
fn scale_and_min(bytes: &[u8], at: usize) -> (u8, u8) {
    if at < 4 {
        (bytes[at] & 63, bytes[at + 4] & 63)
    } else {
        let (low, upper) = (bytes[at + 4], |from: usize| bytes[from] >> 6 << 4);
        (low & 15 | upper(at - 4), low >> 4 | upper(at))
    }
}
