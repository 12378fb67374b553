//! Layout of a weight matrix in GPU memory.
//!
//! candle's CUDA kernels take the file's blocks unchanged; Q8_1 and Q8_K, which elsewhere hold only intermediate
//! results, have no kernel and become Q8_0. Unquantized matrices keep the precision of their file. No matrix is held
//! twice on the GPU; temporary buffers of a load are in host memory.

use crate::weights::{Format, Matrix, MatrixLayout};

/// Layout of `matrix` on a GPU. Without half-precision products (`halves` is false) F16 and BF16 matrices are held as
/// F32. `None` if the sizes overflow or do not fill whole blocks.
pub fn gpu_layout(matrix: Matrix, halves: bool) -> Option<MatrixLayout> {
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
    Some(MatrixLayout { format: target, tiled: false, stored: rows.checked_mul(target.bytes(cols)?)?, transient: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(format: Format, halves: bool) -> (Format, u64) {
        let layout = gpu_layout(Matrix { format, rows: 3, cols: 256 }, halves).unwrap();
        assert_eq!((layout.tiled, layout.transient), (false, 0));
        (layout.format, layout.stored)
    }

    #[test]
    fn gpu_holds_the_format_of_the_file_if_it_has_a_kernel() {
        assert_eq!(layout(Format::Q4K, true), (Format::Q4K, 3 * 144));
        assert_eq!(layout(Format::Q5_1, true), (Format::Q5_1, 3 * 8 * 24));
        assert_eq!(layout(Format::Q8K, true), (Format::Q8_0, 3 * 8 * 34));
        assert_eq!(layout(Format::Bf16, true), (Format::Bf16, 3 * 512));
        assert_eq!(layout(Format::Bf16, false), (Format::F32, 3 * 1024));
        assert_eq!(gpu_layout(Matrix { format: Format::Q4K, rows: 1, cols: 100 }, true), None);
    }
}
