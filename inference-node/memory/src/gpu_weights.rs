//! Layout of a weight matrix in GPU memory.
//!
//! candle's CUDA kernels take the file's blocks unchanged, except those of Q8_1 and Q8_K: these formats, which ggml
//! uses only for intermediate results, have no kernel and become Q8_0. Unquantized matrices keep the precision of their
//! file. No matrix is held twice on the GPU; temporary buffers of a load are in host memory.

use crate::weights::{Matrix, MatrixLayout, WeightFormat};

/// Layout of `matrix` on a GPU. Without half-precision matrix multiplication (`halves` is false), F16 and BF16 matrices
/// are held as F32. `None` if the sizes overflow or do not fill whole blocks.
pub fn gpu_layout(matrix: Matrix, halves: bool) -> Option<MatrixLayout> {
    let Matrix { format, rows, cols } = matrix;
    format.bytes(cols)?;
    let target = match format {
        WeightFormat::F16 | WeightFormat::Bf16 if !halves => WeightFormat::F32,
        WeightFormat::Q8_1 | WeightFormat::Q8K => WeightFormat::Q8_0,
        WeightFormat::F32
        | WeightFormat::F16
        | WeightFormat::Bf16
        | WeightFormat::Q4_0
        | WeightFormat::Q4_1
        | WeightFormat::Q5_0
        | WeightFormat::Q5_1
        | WeightFormat::Q8_0
        | WeightFormat::Q2K
        | WeightFormat::Q3K
        | WeightFormat::Q4K
        | WeightFormat::Q5K
        | WeightFormat::Q6K => format,
    };
    Some(MatrixLayout { format: target, tiled: false, stored: rows.checked_mul(target.bytes(cols)?)?, transient: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(format: WeightFormat, halves: bool) -> (WeightFormat, u64) {
        let layout = gpu_layout(Matrix { format, rows: 3, cols: 256 }, halves).unwrap();
        assert_eq!((layout.tiled, layout.transient), (false, 0));
        (layout.format, layout.stored)
    }

    #[test]
    fn gpu_holds_the_format_of_the_file_if_it_has_a_kernel() {
        assert_eq!(layout(WeightFormat::Q4K, true), (WeightFormat::Q4K, 3 * 144));
        assert_eq!(layout(WeightFormat::Q5_1, true), (WeightFormat::Q5_1, 3 * 8 * 24));
        assert_eq!(layout(WeightFormat::Q8K, true), (WeightFormat::Q8_0, 3 * 8 * 34));
        assert_eq!(layout(WeightFormat::Bf16, true), (WeightFormat::Bf16, 3 * 512));
        assert_eq!(layout(WeightFormat::Bf16, false), (WeightFormat::F32, 3 * 1024));
        assert_eq!(gpu_layout(Matrix { format: WeightFormat::Q4K, rows: 1, cols: 100 }, true), None);
    }
}
