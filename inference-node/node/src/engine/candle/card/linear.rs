//! A weight matrix on a device of candle's, with its bias where it has one.
//!
//! Quantised matrices stay as the file's blocks, for candle's kernels; unquantised ones are as precise as their file. Rows in
//! and out are F32.

use std::borrow::Cow;
use std::sync::Arc;

use candle_core::quantized::{QMatMul, QStorage, QTensor};
use candle_core::{DType, Device, Module, Result, Tensor};
use cfq_memory::{Format, Placed};

use crate::engine::candle::linear::{Raw, dtype};

pub struct CardLinear {
    weight: Weight,
    bias: Option<Tensor>,
}

enum Weight {
    Blocks(Arc<QTensor>),
    /// (rows, columns)
    Plain(Tensor),
}

impl CardLinear {
    /// As [`cfq_memory::place_on_card`] says.
    pub fn new(raw: Raw, placed: &Placed, bias: Option<Tensor>, device: &Device) -> Result<Self> {
        let weight = match placed.format {
            Format::F32 | Format::F16 | Format::Bf16 => {
                let values = match raw {
                    Raw::Plain(values) => values,
                    Raw::Quantized(read) => read.dequantize(&Device::Cpu)?,
                };
                let precision = match placed.format {
                    Format::F16 => DType::F16,
                    Format::Bf16 => DType::BF16,
                    _ => DType::F32,
                };
                Weight::Plain(values.to_dtype(precision)?.to_device(device)?)
            }
            format => {
                let read = match raw {
                    Raw::Quantized(read) => read,
                    Raw::Plain(_) => candle_core::bail!("an unquantised matrix is not held as {format:?}"),
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

    /// Bytes as held.
    pub fn stored_bytes(&self) -> usize {
        match &self.weight {
            Weight::Blocks(blocks) => blocks.storage_size_in_bytes(),
            Weight::Plain(values) => values.elem_count() * values.dtype().size_in_bytes(),
        }
    }

    /// (n, columns) -> (n, rows). `exact`: one row after the other, since kernels for several sum in another order.
    pub fn forward(&self, x: &Tensor, exact: bool) -> Result<Tensor> {
        let rows = x.dim(0)?;
        let out = if exact && rows > 1 {
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
            Weight::Plain(values) if values.dtype() == DType::F32 => x.matmul(&values.t()?),
            Weight::Plain(values) => x.to_dtype(values.dtype())?.matmul(&values.t()?)?.to_dtype(DType::F32),
        }
    }

    /// Rows of the matrix as F32, for looking tokens up.
    pub fn rows(&self, ids: &Tensor) -> Result<Tensor> {
        match &self.weight {
            Weight::Blocks(blocks) => blocks.embedding(ids),
            Weight::Plain(values) => values.index_select(ids, 0)?.to_dtype(DType::F32),
        }
    }
}
