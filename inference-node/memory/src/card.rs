//! What a graphics card holds of a matrix.
//!
//! candle's kernels for cards take the file's blocks as they are; the two formats that only hold intermediate results
//! elsewhere have none and become Q8_0. Unquantised matrices stay as precise as their file has them. Nothing is kept twice,
//! and what a load needs beside that is the host's.

use crate::weights::{Format, Matrix, Placed};

/// How a card holds `matrix`; a device without half-precision products (`halves` false) holds those as F32. `None`: the
/// sizes overflow or do not fill whole blocks.
pub fn place_on_card(matrix: Matrix, halves: bool) -> Option<Placed> {
    let Matrix { format, rows, cols } = matrix;
    format.bytes(cols)?;
    let target = match format {
        Format::F16 | Format::Bf16 if !halves => Format::F32,
        Format::Q8_1 | Format::Q8K => Format::Q8_0,
        Format::F32
        | Format::F16
        | Format::Bf16
        | Format::Q4_0
        | Format::Q4_1
        | Format::Q5_0
        | Format::Q5_1
        | Format::Q8_0
        | Format::Q2K
        | Format::Q3K
        | Format::Q4K
        | Format::Q5K
        | Format::Q6K => format,
    };
    Some(Placed { format: target, tiled: false, stored: rows.checked_mul(target.bytes(cols)?)?, transient: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placed(format: Format, halves: bool) -> (Format, u64) {
        let placed = place_on_card(Matrix { format, rows: 3, cols: 256 }, halves).unwrap();
        assert_eq!((placed.tiled, placed.transient), (false, 0));
        (placed.format, placed.stored)
    }

    #[test]
    fn a_card_holds_what_the_file_has() {
        assert_eq!(placed(Format::Q4K, true), (Format::Q4K, 3 * 144));
        assert_eq!(placed(Format::Q5_1, true), (Format::Q5_1, 3 * 8 * 24));
        assert_eq!(placed(Format::Q8K, true), (Format::Q8_0, 3 * 8 * 34));
        assert_eq!(placed(Format::Bf16, true), (Format::Bf16, 3 * 512));
        assert_eq!(placed(Format::Bf16, false), (Format::F32, 3 * 1024));
        assert_eq!(place_on_card(Matrix { format: Format::Q4K, rows: 1, cols: 100 }, true), None);
    }
}
