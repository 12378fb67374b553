//! A linear projection on a candle device: a weight matrix, and its bias if it has one.
//!
//! Quantized matrices keep the file's blocks, for candle's kernels; unquantized ones keep the precision of their file.
//! Inputs and outputs are F32.

use std::borrow::Cow;
use std::sync::Arc;

use candle_core::quantized::{QMatMul, QStorage, QTensor};
use candle_core::{DType, Device, Module, Result, Tensor};
use cfq_memory::{MatrixLayout, WeightFormat};

use crate::backend::cpu::linear::{StoredMatrix, dtype};

/// A projection x -> x W^T + b.
pub struct CudaLinear {
    weight: Weight,
    bias: Option<Tensor>,
}

enum Weight {
    Blocks(Arc<QTensor>),
    /// Unquantized matrix, (rows, columns).
    Dense(Tensor),
}

impl CudaLinear {
    /// Converts a matrix into the layout of [`cfq_memory::gpu_layout`].
    pub fn new(stored: StoredMatrix, layout: &MatrixLayout, bias: Option<Tensor>, device: &Device) -> Result<Self> {
        let weight = match layout.format {
            WeightFormat::F32 | WeightFormat::F16 | WeightFormat::Bf16 => {
                let values = match stored {
                    StoredMatrix::Dense(values) => values,
                    StoredMatrix::Quantized(read) => read.dequantize(&Device::Cpu)?,
                };
                let precision = match layout.format {
                    WeightFormat::F16 => DType::F16,
                    WeightFormat::Bf16 => DType::BF16,
                    _ => DType::F32,
                };
                Weight::Dense(values.to_dtype(precision)?.to_device(device)?)
            }
            format => {
                let read = match stored {
                    StoredMatrix::Quantized(read) => read,
                    StoredMatrix::Dense(_) => candle_core::bail!("an unquantized matrix cannot be held as {format:?}"),
                };
                let target = dtype(format);
                let blocks = if read.dtype() == target {
                    read
                } else {
                    QTensor::quantize(&read.dequantize(&Device::Cpu)?, target)?
                };
                let storage = QStorage::from_data(Cow::Borrowed(&blocks.data()?), device, target)?;
                Weight::Blocks(Arc::new(QTensor::new(storage, blocks.shape().clone())?))
            }
        };
        let bias = bias.map(|bias| bias.flatten_all()?.to_device(device)).transpose()?;
        Ok(Self { weight, bias })
    }

    /// Actual size of the matrix in memory, in bytes.
    pub fn stored_bytes(&self) -> usize {
        match &self.weight {
            Weight::Blocks(blocks) => blocks.storage_size_in_bytes(),
            Weight::Dense(values) => values.elem_count() * values.dtype().size_in_bytes(),
        }
    }

    /// Multiplies n input vectors by the weight matrix and adds the bias: (n, columns) -> (n, rows). With
    /// `batch_invariant`, each input vector is multiplied separately, because kernels for several vectors sum in a
    /// different order.
    pub fn forward(&self, x: &Tensor, batch_invariant: bool) -> Result<Tensor> {
        let rows = x.dim(0)?;
        let out = if batch_invariant && rows > 1 {
            let each: Vec<Tensor> = (0..rows).map(|row| self.product(&x.narrow(0, row, 1)?)).collect::<Result<_>>()?;
            Tensor::cat(&each, 0)?
        } else {
            self.product(x)?
        };
        match &self.bias {
            Some(bias) => out.broadcast_add(bias),
            None => Ok(out),
        }
    }

    fn product(&self, x: &Tensor) -> Result<Tensor> {
        match &self.weight {
            Weight::Blocks(blocks) => QMatMul::QTensor(blocks.clone()).forward(x),
            Weight::Dense(values) if values.dtype() == DType::F32 => x.matmul(&values.t()?),
            Weight::Dense(values) => x.to_dtype(values.dtype())?.matmul(&values.t()?)?.to_dtype(DType::F32),
        }
    }

    /// Rows `ids` of the matrix as F32, for embedding lookup.
    pub fn embedding_rows(&self, ids: &Tensor) -> Result<Tensor> {
        match &self.weight {
            Weight::Blocks(blocks) => blocks.embedding(ids),
            Weight::Dense(values) => values.index_select(ids, 0)?.to_dtype(DType::F32),
        }
    }
}
