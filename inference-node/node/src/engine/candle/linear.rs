//! A weight matrix as the kernels want it, with its bias where it has one.
//!
//! Loaded by the ledger's plan ([`cfq_memory::place`]): formats without a fast kernel are requantised to Q8_0, and rows
//! that do not reach the vector tiles' 256 columns are padded with zeros, as their input then is. Measured on SmolLM2
//! (rows of 576, shipped as Q4_1), see the crate's tests for the rates.

use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Result, Tensor};
use cfq_memory::{Format, Kernels, Matrix, Placed, place};

use crate::engine::candle::dense::Dense;
use crate::models::file::TensorFacts;

/// Rows of input above which projections are run one by one; candle's fused kernel is made for few.
const FUSED_BELOW: usize = 32;

pub struct Linear {
    weight: Weight,
    /// Columns of the model's matrix.
    cols: usize,
    /// Columns as held, with padding.
    held: usize,
    /// One value a row.
    bias: Option<Tensor>,
}

/// A matrix as its file stores it.
pub enum Raw {
    Quantized(QTensor),
    /// F32.
    Plain(Tensor),
}

enum Weight {
    Quantized(Arc<QTensor>),
    /// Formats without a kernel of their own, as F32.
    Plain(Dense),
}

/// What this machine's kernels can do, as candle decides it.
pub fn kernels() -> Kernels {
    #[cfg(target_arch = "x86_64")]
    {
        let avx2 = std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma");
        let avx512 =
            std::arch::is_x86_feature_detected!("avx512f") && std::arch::is_x86_feature_detected!("avx512vnni");
        let vnni = avx512 || (std::arch::is_x86_feature_detected!("avxvnni") && avx2);
        // AMX cannot be asked for on a stable compiler; /proc says what the kernel offers.
        let amx = avx512 && std::fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| text.contains(" amx_int8"));
        Kernels { k_tiles: avx2 || avx512, q8_tiles: vnni, amx }
    }
    #[cfg(not(target_arch = "x86_64"))]
    Kernels::default()
}

/// How a matrix of the file will be held; `None` for one that is no matrix or has impossible sizes.
pub fn plan(facts: &TensorFacts, kernels: Kernels) -> Option<Placed> {
    let [rows, cols] = facts.dims[..] else { return None };
    place(Matrix { format: facts.format?, rows, cols }, kernels)
}

fn dtype(format: Format) -> GgmlDType {
    match format {
        Format::F32 => GgmlDType::F32,
        Format::F16 => GgmlDType::F16,
        Format::Bf16 => GgmlDType::BF16,
        Format::Q4_0 => GgmlDType::Q4_0,
        Format::Q4_1 => GgmlDType::Q4_1,
        Format::Q5_0 => GgmlDType::Q5_0,
        Format::Q5_1 => GgmlDType::Q5_1,
        Format::Q8_0 => GgmlDType::Q8_0,
        Format::Q8_1 => GgmlDType::Q8_1,
        Format::Q2K => GgmlDType::Q2K,
        Format::Q3K => GgmlDType::Q3K,
        Format::Q4K => GgmlDType::Q4K,
        Format::Q5K => GgmlDType::Q5K,
        Format::Q6K => GgmlDType::Q6K,
        Format::Q8K => GgmlDType::Q8K,
    }
}

impl Linear {
    pub fn new(raw: Raw, placed: &Placed, bias: Option<Tensor>) -> Result<Self> {
        let held = placed.cols as usize;
        let target = dtype(placed.format);
        let (weight, cols) = match raw {
            Raw::Plain(values) => {
                let (_, cols) = values.dims2()?;
                (Weight::Plain(Dense::new(&values)?), cols)
            }
            Raw::Quantized(read) => {
                let (_, cols) = read.shape().dims2()?;
                let weight = if placed.format == Format::F32 {
                    Weight::Plain(Dense::new(&read.dequantize(&Device::Cpu)?)?)
                } else if read.dtype() == target && held == cols {
                    Weight::Quantized(Arc::new(read))
                } else {
                    let values = read.dequantize(&Device::Cpu)?;
                    drop(read);
                    let values = if held == cols { values } else { values.pad_with_zeros(1, 0, held - cols)? };
                    Weight::Quantized(Arc::new(QTensor::quantize(&values, target)?))
                };
                (weight, cols)
            }
        };
        // Unquantised rows are never padded.
        let held = if matches!(weight, Weight::Plain(_)) { cols } else { held };
        Ok(Self { weight, cols, held, bias })
    }

    /// Bytes as stored, without the kernels' own copies.
    pub fn stored_bytes(&self) -> usize {
        match &self.weight {
            Weight::Quantized(weight) => weight.storage_size_in_bytes(),
            Weight::Plain(dense) => dense.weights.len() * size_of::<f32>(),
        }
    }

    fn widen(&self, x: &Tensor) -> Result<Tensor> {
        if self.held == self.cols { Ok(x.clone()) } else { x.pad_with_zeros(1, 0, self.held - self.cols) }
    }

    fn apply(&self, widened: &Tensor, exact: bool) -> Result<Tensor> {
        let product = match &self.weight {
            Weight::Quantized(weight) if exact && widened.dim(0)? == 1 && has_kernel_for_one(weight.dtype()) => {
                Tensor::cat(&[widened, widened], 0)?.apply_op1_no_bwd(weight.as_ref())?.narrow(0, 0, 1)
            }
            Weight::Quantized(weight) => widened.apply_op1_no_bwd(weight.as_ref()),
            Weight::Plain(weight) => weight.forward(widened),
        }?;
        self.biased(product)
    }

    fn biased(&self, product: Tensor) -> Result<Tensor> {
        match &self.bias {
            Some(bias) => product.broadcast_add(bias),
            None => Ok(product),
        }
    }

    /// (n, columns) -> (n, rows). `exact`: no bit of a row depends on how many there are.
    pub fn forward(&self, x: &Tensor, exact: bool) -> Result<Tensor> {
        self.apply(&self.widen(x)?, exact)
    }

    /// Rows of the matrix as F32, for looking tokens up.
    pub fn rows(&self, ids: &Tensor) -> Result<Tensor> {
        match &self.weight {
            Weight::Quantized(weight) => {
                let rows = weight.embedding(ids)?;
                if self.held == self.cols { Ok(rows) } else { rows.narrow(1, 0, self.cols)?.contiguous() }
            }
            Weight::Plain(dense) => {
                let ids = ids.to_vec1::<u32>()?;
                let mut rows = Vec::with_capacity(ids.len() * self.cols);
                for id in &ids {
                    let from = *id as usize * self.cols;
                    match dense.weights.get(from..from + self.cols) {
                        Some(row) => rows.extend_from_slice(row),
                        None => candle_core::bail!("token {id} has no embedding"),
                    }
                }
                Tensor::from_vec(rows, (ids.len(), self.cols), &Device::Cpu)
            }
        }
    }
}

/// Formats whose product with a single row is computed in another order than with several; candle's K-quants.
fn has_kernel_for_one(dtype: GgmlDType) -> bool {
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

/// Several projections of the same input, in one parallel region where the kernels can.
pub fn shared<const N: usize>(linears: [&Linear; N], x: &Tensor, exact: bool) -> Result<[Tensor; N]> {
    let first = linears[0];
    let widened = first.widen(x)?;
    if x.dim(0)? < FUSED_BELOW && !exact {
        let quantized: Vec<&QTensor> = linears
            .iter()
            .filter_map(|l| match &l.weight {
                Weight::Quantized(weight) if l.held == first.held => Some(weight.as_ref()),
                Weight::Quantized(_) | Weight::Plain(_) => None,
            })
            .collect();
        if quantized.len() == N
            && let Some(outputs) = QTensor::gemv_fused_shared_lhs(&quantized, &widened)?
            && outputs.len() == N
        {
            let outputs: Result<Vec<Tensor>> = linears.iter().zip(outputs).map(|(l, out)| l.biased(out)).collect();
            return array(outputs?);
        }
    }
    let mut outputs = Vec::with_capacity(N);
    for linear in linears {
        outputs.push(if linear.held == first.held {
            linear.apply(&widened, exact)?
        } else {
            linear.forward(x, exact)?
        });
    }
    array(outputs)
}

fn array<const N: usize>(outputs: Vec<Tensor>) -> Result<[Tensor; N]> {
    outputs.try_into().map_err(|_| candle_core::Error::Msg("one output a projection".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize, step: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * step) % 1009) as f32 / 504.0 - 1.0).collect()
    }

    fn linear(format: Format, rows: usize, cols: usize) -> Linear {
        let values = Tensor::from_vec(numbers(rows * cols, 7919), (rows, cols), &Device::Cpu).unwrap();
        let read = QTensor::quantize(&values, dtype(format)).unwrap();
        let facts = TensorFacts { dims: vec![rows as u64, cols as u64], format: Some(format) };
        Linear::new(Raw::Quantized(read), &plan(&facts, kernels()).unwrap(), None).unwrap()
    }

    #[test]
    fn company_changes_no_bit_of_a_row() {
        let mut differing = Vec::new();
        for format in [
            Format::F32,
            Format::Q8_0,
            Format::Q4_1,
            Format::Q4_0,
            Format::Q4K,
            Format::Q5K,
            Format::Q6K,
            Format::Q3K,
            Format::Q2K,
        ] {
            for (rows, cols) in [(256, 512), (100, 256), (192, 576)] {
                if format.bytes(cols).is_none() {
                    continue;
                }
                let linear = linear(format, rows, cols as usize);
                let x = Tensor::from_vec(numbers(100 * cols as usize, 31), (100, cols as usize), &Device::Cpu).unwrap();
                let whole = linear.forward(&x, true).unwrap().to_vec2::<f32>().unwrap();
                for count in [1, 2, 3, 4, 7, 8, 9, 16, 31, 32, 33, 64] {
                    let part = x.narrow(0, 10, count).unwrap().contiguous().unwrap();
                    let [a, b] = shared([&linear, &linear], &part, true).unwrap();
                    for part in [linear.forward(&part, true).unwrap(), a, b] {
                        if part.to_vec2::<f32>().unwrap() != whole[10..10 + count] {
                            differing.push(format!("{format:?} {rows}x{cols}: {count}"));
                        }
                    }
                }
            }
        }
        assert!(differing.is_empty(), "{differing:#?}");
    }
}
