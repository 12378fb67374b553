//! A linear projection on the CPU: a weight matrix in the layout of its kernel, and its bias if it has one.
//!
//! The layout is the one that the memory estimate assumes ([`cfq_memory::cpu_layout`]): tiles for our own kernels if
//! the machine and the format support them, otherwise the file's blocks for candle's kernels; unquantized matrices are
//! held as F32.

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Result, Tensor};
use cfq_memory::{CpuKernels, Matrix, MatrixLayout, WeightFormat, cpu_layout};

use crate::backend::cpu::dense::Dense;
use crate::backend::cpu::tiles::{self, QuantizedInput, TileFormat, Tiles};
use crate::model::file::TensorMeta;

/// A projection x -> x W^T + b.
pub struct Linear {
    weight: Weight,
    cols: usize,
    /// Bias, one value per weight row; `None` if the projection has none.
    bias: Option<Vec<f32>>,
}

/// A matrix as its file stores it.
pub enum StoredMatrix {
    /// A matrix of a GGUF file, in any of its formats.
    Quantized(QTensor),
    /// A matrix of a safetensors file, as F32.
    Dense(Tensor),
}

enum Weight {
    Tiles(Tiles),
    /// The file's quantized blocks, for candle's kernels.
    Blocks(QTensor),
    /// F32 values, for formats without a quantized kernel.
    Dense(Dense),
}

/// The kernels that this machine supports.
pub fn kernels() -> CpuKernels {
    CpuKernels { tiles: tiles::available() }
}

/// Format and layout in which a matrix of the file will be held; `None` if the tensor is not a matrix, or no kernel
/// supports its sizes.
pub fn plan(meta: &TensorMeta, kernels: CpuKernels) -> Option<MatrixLayout> {
    let [rows, cols] = meta.dims[..] else { return None };
    cpu_layout(Matrix { format: meta.format?, rows, cols }, kernels)
}

/// candle's type for a format.
pub fn dtype(format: WeightFormat) -> GgmlDType {
    match format {
        WeightFormat::F32 => GgmlDType::F32,
        WeightFormat::F16 => GgmlDType::F16,
        WeightFormat::Bf16 => GgmlDType::BF16,
        WeightFormat::Q4_0 => GgmlDType::Q4_0,
        WeightFormat::Q4_1 => GgmlDType::Q4_1,
        WeightFormat::Q5_0 => GgmlDType::Q5_0,
        WeightFormat::Q5_1 => GgmlDType::Q5_1,
        WeightFormat::Q8_0 => GgmlDType::Q8_0,
        WeightFormat::Q8_1 => GgmlDType::Q8_1,
        WeightFormat::Q2K => GgmlDType::Q2K,
        WeightFormat::Q3K => GgmlDType::Q3K,
        WeightFormat::Q4K => GgmlDType::Q4K,
        WeightFormat::Q5K => GgmlDType::Q5K,
        WeightFormat::Q6K => GgmlDType::Q6K,
        WeightFormat::Q8K => GgmlDType::Q8K,
    }
}

/// Tile format for a file format; `None` if it has no tile kernel. Must agree with [`WeightFormat::tile`], which the
/// memory estimate uses.
fn tile_format(format: WeightFormat) -> Option<TileFormat> {
    match format {
        WeightFormat::Q4_0 => Some(TileFormat::Q4_0),
        WeightFormat::Q4_1 => Some(TileFormat::Q4_1),
        WeightFormat::Q8_0 => Some(TileFormat::Q8_0),
        WeightFormat::Q4K => Some(TileFormat::Q4K),
        WeightFormat::Q5K => Some(TileFormat::Q5K),
        WeightFormat::Q6K => Some(TileFormat::Q6K),
        WeightFormat::F32
        | WeightFormat::F16
        | WeightFormat::Bf16
        | WeightFormat::Q5_0
        | WeightFormat::Q5_1
        | WeightFormat::Q8_1
        | WeightFormat::Q2K
        | WeightFormat::Q3K
        | WeightFormat::Q8K => None,
    }
}

impl Linear {
    /// Converts a matrix into the planned layout.
    pub fn new(stored: StoredMatrix, layout: &MatrixLayout, bias: Option<Tensor>) -> Result<Self> {
        let (weight, cols) = match stored {
            StoredMatrix::Dense(values) => {
                let (_, cols) = values.dims2()?;
                (Weight::Dense(Dense::new(&values)?), cols)
            }
            StoredMatrix::Quantized(read) => {
                let (rows, cols) = read.shape().dims2()?;
                let target = dtype(layout.format);
                let weight = if layout.format == WeightFormat::F32 {
                    Weight::Dense(Dense::new(&read.dequantize(&Device::Cpu)?)?)
                } else {
                    let blocks = if read.dtype() == target {
                        read
                    } else {
                        QTensor::quantize(&read.dequantize(&Device::Cpu)?, target)?
                    };
                    match tile_format(layout.format).filter(|_| layout.tiled) {
                        Some(format) => match Tiles::pack(format, &blocks.data()?, rows, cols) {
                            Some(tiles) => Weight::Tiles(tiles),
                            None => candle_core::bail!("a matrix of {rows} x {cols} cannot be packed into tiles"),
                        },
                        None => Weight::Blocks(blocks),
                    }
                };
                (weight, cols)
            }
        };
        let bias = bias.map(|bias| bias.flatten_all()?.to_vec1()).transpose()?;
        Ok(Self { weight, cols, bias })
    }

    /// Actual size of the matrix in memory, in bytes.
    pub fn stored_bytes(&self) -> usize {
        match &self.weight {
            Weight::Tiles(tiles) => tiles.stored_bytes(),
            Weight::Blocks(blocks) => blocks.storage_size_in_bytes(),
            Weight::Dense(dense) => dense.weights.len() * size_of::<f32>(),
        }
    }

    /// Whether the matrix is held and computed in F32, which makes every result batch-invariant.
    pub fn is_f32(&self) -> bool {
        matches!(self.weight, Weight::Dense(_))
    }

    /// Multiplies n input vectors by the weight matrix and adds the bias: (n, columns) -> (n, rows). With
    /// `batch_invariant`, the result for an input vector is bit-identical for every n.
    pub fn forward(&self, x: &[f32], batch_invariant: bool) -> Result<Vec<f32>> {
        let [out] = forward_shared([self], x, batch_invariant)?;
        Ok(out)
    }

    fn add_bias(&self, mut out: Vec<f32>) -> Vec<f32> {
        if let Some(bias) = &self.bias {
            for row in out.chunks_exact_mut(bias.len()) {
                row.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
            }
        }
        out
    }

    /// Rows `ids` of the matrix as F32, for embedding lookup.
    pub fn embedding_rows(&self, ids: &[u32]) -> Result<Vec<f32>> {
        let mut rows = Vec::with_capacity(ids.len() * self.cols);
        for id in ids {
            let at = *id as usize;
            let known = match &self.weight {
                Weight::Tiles(tiles) => tiles.row(at, &mut rows),
                Weight::Blocks(blocks) => {
                    let id = Tensor::from_slice(&[*id], 1, &Device::Cpu)?;
                    rows.extend(blocks.embedding(&id)?.flatten_all()?.to_vec1::<f32>()?);
                    true
                }
                Weight::Dense(dense) => {
                    let row = dense.weights.get(at * self.cols..(at + 1) * self.cols);
                    rows.extend_from_slice(row.unwrap_or_default());
                    row.is_some()
                }
            };
            if !known {
                candle_core::bail!("token {id} has no embedding")
            }
        }
        Ok(rows)
    }
}

/// Computes several projections of the same input; in one parallel region if all matrices are packed into tiles.
pub fn forward_shared<const N: usize>(
    linears: [&Linear; N],
    x: &[f32],
    batch_invariant: bool,
) -> Result<[Vec<f32>; N]> {
    let cols = linears[0].cols;
    if linears.iter().any(|l| l.cols != cols) || !x.len().is_multiple_of(cols.max(1)) {
        candle_core::bail!("an input of {} values does not consist of rows of {cols} columns", x.len())
    }
    let tiles: Vec<&Tiles> = linears
        .iter()
        .filter_map(|l| match &l.weight {
            Weight::Tiles(tiles) => Some(tiles),
            Weight::Blocks(_) | Weight::Dense(_) => None,
        })
        .collect();
    // The input is quantized once for all tile matrices.
    let quantized = (!tiles.is_empty()).then(|| QuantizedInput::new(x, cols));
    let mut outs: Vec<Vec<f32>> = Vec::with_capacity(N);
    if let (Ok(all), Some(input)) = (<[&Tiles; N]>::try_from(tiles), &quantized) {
        outs.extend(tiles::multiply(all, input));
    } else {
        for linear in linears {
            outs.push(match (&linear.weight, &quantized) {
                (Weight::Tiles(tiles), Some(input)) => {
                    let [out] = tiles::multiply([tiles], input);
                    out
                }
                (Weight::Tiles(_), None) => candle_core::bail!("the input of a tiled matrix was not quantized"),
                (Weight::Blocks(blocks), _) => candle_matmul(blocks, x, cols, batch_invariant)?,
                (Weight::Dense(dense), _) => dense.multiply(x),
            });
        }
    }
    let outs = linears.iter().zip(outs).map(|(linear, out)| linear.add_bias(out)).collect::<Vec<_>>();
    outs.try_into().map_err(|_| candle_core::Error::Msg("outputs and projections differ in number".to_owned()))
}

/// Multiplies n input vectors by a matrix with candle's kernels: (n, columns) -> (n, rows).
fn candle_matmul(blocks: &QTensor, x: &[f32], cols: usize, batch_invariant: bool) -> Result<Vec<f32>> {
    let n = x.len() / cols;
    let (rows, _) = blocks.shape().dims2()?;
    // A single input vector is passed twice, so that candle uses its kernel for several vectors (GEMM) and not the one
    // for a single vector (GEMV).
    let duplicate = batch_invariant && n == 1 && has_gemv_kernel(blocks.dtype());
    let x = if duplicate {
        Tensor::from_vec([x, x].concat(), (2, cols), &Device::Cpu)?
    } else {
        Tensor::from_slice(x, (n, cols), &Device::Cpu)?
    };
    let mut out = x.apply_op1_no_bwd(blocks)?.flatten_all()?.to_vec1()?;
    out.truncate(n * rows);
    Ok(out)
}

/// Whether candle sums the product with a single input vector in a different order than with several: true for its
/// K-quants.
fn has_gemv_kernel(dtype: GgmlDType) -> bool {
    match dtype {
        GgmlDType::Q2K | GgmlDType::Q3K | GgmlDType::Q4K | GgmlDType::Q5K | GgmlDType::Q6K | GgmlDType::Q8K => true,
        GgmlDType::F32
        | GgmlDType::F16
        | GgmlDType::BF16
        | GgmlDType::Q4_0
        | GgmlDType::Q4_1
        | GgmlDType::Q5_0
        | GgmlDType::Q5_1
        | GgmlDType::Q8_0
        | GgmlDType::Q8_1 => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMATS: [WeightFormat; 12] = [
        WeightFormat::F32,
        WeightFormat::F16,
        WeightFormat::Q8_0,
        WeightFormat::Q4_1,
        WeightFormat::Q4_0,
        WeightFormat::Q5_0,
        WeightFormat::Q5_1,
        WeightFormat::Q4K,
        WeightFormat::Q5K,
        WeightFormat::Q6K,
        WeightFormat::Q3K,
        WeightFormat::Q2K,
    ];

    fn numbers(count: usize, step: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * step) % 1009) as f32 / 504.0 - 1.0).collect()
    }

    /// A test matrix, its planned layout, and its dequantized values.
    fn linear(
        format: WeightFormat,
        rows: usize,
        cols: usize,
        kernels: CpuKernels,
    ) -> (Linear, MatrixLayout, Vec<Vec<f32>>) {
        let values = Tensor::from_vec(numbers(rows * cols, 7919), (rows, cols), &Device::Cpu).unwrap();
        let read = QTensor::quantize(&values, dtype(format)).unwrap();
        let values = read.dequantize(&Device::Cpu).unwrap().to_vec2().unwrap();
        let meta = TensorMeta { dims: vec![rows as u64, cols as u64], format: Some(format) };
        let layout = plan(&meta, kernels).unwrap();
        (Linear::new(StoredMatrix::Quantized(read), &layout, None).unwrap(), layout, values)
    }

    /// Every format and size, with and without tiles. Records the tile cases of `test` as skipped if this CPU has no
    /// kernel for tiles.
    fn all(test: &str) -> impl Iterator<Item = (WeightFormat, usize, usize, CpuKernels)> {
        let sizes = [(256, 512), (100, 256), (192, 576)];
        let kernels = [kernels(), CpuKernels::default()];
        if kernels[0] == kernels[1] {
            cfq_test_skip::skip(&format!("{test}/tiles"), "this CPU has no kernel for tiles");
        }
        FORMATS.into_iter().flat_map(move |format| {
            let sizes = sizes.into_iter().filter(move |(_, cols)| format.bytes(*cols).is_some());
            sizes.flat_map(move |(rows, cols)| kernels.map(|k| (format, rows, cols as usize, k)))
        })
    }

    #[test]
    fn products_are_batch_invariant() {
        let mut differing = Vec::new();
        for (format, rows, cols, kernels) in all("products_are_batch_invariant") {
            let (linear, layout, _) = linear(format, rows, cols, kernels);
            // Tiles are batch-invariant without the flag.
            let batch_invariant = !layout.tiled;
            let x = numbers(100 * cols, 31);
            let whole = linear.forward(&x, batch_invariant).unwrap();
            for count in [1, 2, 3, 4, 7, 8, 9, 16, 31, 32, 33, 64] {
                let part = &x[10 * cols..][..count * cols];
                let [a, b] = forward_shared([&linear, &linear], part, batch_invariant).unwrap();
                for part in [linear.forward(part, batch_invariant).unwrap(), a, b] {
                    if part != whole[10 * rows..][..count * rows] {
                        differing.push(format!("{format:?} {rows}x{cols} {kernels:?}: {count}"));
                    }
                }
            }
        }
        assert!(differing.is_empty(), "{differing:#?}");
    }

    #[test]
    fn product_and_size_match_the_file_and_the_plan() {
        for (format, rows, cols, kernels) in all("product_and_size_match_the_file_and_the_plan") {
            let (linear, layout, values) = linear(format, rows, cols, kernels);
            assert_eq!(linear.stored_bytes() as u64, layout.stored, "{format:?} {kernels:?}");
            let x = numbers(3 * cols, 31);
            let got = linear.forward(&x, false).unwrap();
            for (at, got) in got.iter().enumerate() {
                let pairs = || x[at / rows * cols..][..cols].iter().zip(&values[at % rows]);
                let want: f32 = pairs().map(|(x, w)| x * w).sum();
                let length =
                    |of: &dyn Fn((&f32, &f32)) -> f32| pairs().map(|pair| of(pair).powi(2)).sum::<f32>().sqrt();
                let size = length(&|(x, _)| *x) * length(&|(_, w)| *w);
                // Activations are quantized to 8 bits.
                assert!((got - want).abs() < size * 4e-3, "{format:?} {rows}x{cols} {kernels:?}: {got} is not {want}");
            }
            let rows = linear.embedding_rows(&[7, 0]).unwrap();
            for (got, want) in rows.chunks_exact(cols).zip([&values[7], &values[0]]) {
                assert!(got.iter().zip(want).all(|(got, want)| (got - want).abs() < 6e-3), "{format:?} {kernels:?}");
            }
        }
    }
}
