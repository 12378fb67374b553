//! A weight matrix as the kernels want it.
//!
//! Loaded by the ledger's plan ([`cfq_memory::place`]): formats without a fast kernel are requantised to Q8_0, and rows
//! that do not reach the vector tiles' 256 columns are padded with zeros, as their input then is. Measured on SmolLM2
//! (rows of 576, shipped as Q4_1), see the crate's tests for the rates.

use std::io::{Read, Seek};
use std::sync::Arc;

use candle_core::quantized::gguf_file::Content;
use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{Device, Module, Result, Tensor};
use cfq_memory::{Format, Kernels, Matrix, Placed, place};

use crate::models::header::format_of;

/// Rows of input above which projections are run one by one; candle's fused kernel is made for few.
const FUSED_BELOW: usize = 32;

pub struct Linear {
    weight: Weight,
    /// Columns of the model's matrix.
    cols: usize,
    /// Columns as held, with padding.
    held: usize,
}

enum Weight {
    Quantized(Arc<QTensor>),
    /// Formats without a kernel of their own, as F32.
    Plain(QMatMul),
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

/// Where a matrix of the file will be; `None` for one that is no matrix or has impossible sizes.
pub fn plan(content: &Content, name: &str, kernels: Kernels) -> Option<Placed> {
    let info = content.tensor_infos.get(name)?;
    let [rows, cols] = info.shape.dims() else { return None };
    place(Matrix { format: format_of(info.ggml_dtype)?, rows: *rows as u64, cols: *cols as u64 }, kernels)
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
    pub fn load<R: Read + Seek>(content: &Content, reader: &mut R, name: &str, kernels: Kernels) -> Result<Self> {
        let Some(placed) = plan(content, name, kernels) else { candle_core::bail!("{name} is not a matrix") };
        let read = content.tensor(reader, name, &Device::Cpu)?;
        let (_, cols) = read.shape().dims2()?;
        let held = placed.cols as usize;
        let target = dtype(placed.format);
        let weight = if placed.format == Format::F32 {
            Weight::Plain(QMatMul::Tensor(read.dequantize(&Device::Cpu)?))
        } else if read.dtype() == target && held == cols {
            Weight::Quantized(Arc::new(read))
        } else {
            let values = read.dequantize(&Device::Cpu)?;
            drop(read);
            let values = if held == cols { values } else { values.pad_with_zeros(1, 0, held - cols)? };
            Weight::Quantized(Arc::new(QTensor::quantize(&values, target)?))
        };
        Ok(Self { weight, cols, held })
    }

    /// Bytes as stored, without the kernels' own copies.
    pub fn stored_bytes(&self) -> usize {
        match &self.weight {
            Weight::Quantized(weight) => weight.storage_size_in_bytes(),
            Weight::Plain(QMatMul::Tensor(t) | QMatMul::TensorF16(t)) => t.elem_count() * t.dtype().size_in_bytes(),
            Weight::Plain(QMatMul::QTensor(weight)) => weight.storage_size_in_bytes(),
        }
    }

    fn widen(&self, x: &Tensor) -> Result<Tensor> {
        if self.held == self.cols { Ok(x.clone()) } else { x.pad_with_zeros(1, 0, self.held - self.cols) }
    }

    fn apply(&self, widened: &Tensor) -> Result<Tensor> {
        match &self.weight {
            Weight::Quantized(weight) => widened.apply_op1_no_bwd(weight.as_ref()),
            Weight::Plain(weight) => weight.forward(widened),
        }
    }

    /// (n, columns) -> (n, rows).
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.apply(&self.widen(x)?)
    }

    /// Rows of the matrix as F32, for looking tokens up.
    pub fn rows(&self, ids: &Tensor) -> Result<Tensor> {
        match &self.weight {
            Weight::Quantized(weight) => {
                let rows = weight.embedding(ids)?;
                if self.held == self.cols { Ok(rows) } else { rows.narrow(1, 0, self.cols)?.contiguous() }
            }
            Weight::Plain(weight) => weight.embedding(ids),
        }
    }
}

/// Several projections of the same input, in one parallel region where the kernels can.
pub fn shared<const N: usize>(linears: [&Linear; N], x: &Tensor) -> Result<[Tensor; N]> {
    let first = linears[0];
    let widened = first.widen(x)?;
    if x.dim(0)? < FUSED_BELOW {
        let quantized: Vec<&QTensor> = linears
            .iter()
            .filter_map(|l| match &l.weight {
                Weight::Quantized(weight) if l.held == first.held => Some(weight.as_ref()),
                Weight::Quantized(_) | Weight::Plain(_) => None,
            })
            .collect();
        if quantized.len() == N
            && let Some(outputs) = QTensor::gemv_fused_shared_lhs(&quantized, &widened)?
            && let Ok(outputs) = outputs.try_into()
        {
            return Ok(outputs);
        }
    }
    let mut outputs = Vec::with_capacity(N);
    for linear in linears {
        outputs.push(if linear.held == first.held { linear.apply(&widened)? } else { linear.forward(x)? });
    }
    outputs.try_into().map_err(|_| candle_core::Error::Msg("one output a projection".to_owned()))
}
