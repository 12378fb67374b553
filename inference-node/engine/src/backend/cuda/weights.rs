//! Reading a model's tensors onto GPUs, and the format each matrix has there.

use candle_core::{DType, Device, Result, Tensor};
use cfq_memory::{Matrix, MatrixLayout, gpu_layout};

use crate::backend::cpu::linear::kernels;
use crate::backend::cpu::weights::WeightReader;
use crate::backend::cuda::linear::CudaLinear;
use crate::model::architecture::Architecture;
use crate::model::file::{ModelFile, TensorMeta};
use crate::model::tensors::TensorRole;

/// Whether F16 and BF16 matrices keep their precision on this device; candle's CPU device computes them as F32.
pub fn supports_half(device: &Device) -> bool {
    !device.is_cpu()
}

/// Format in which a matrix of the file will be held on a GPU; `None` if the tensor is not a matrix, or no kernel
/// supports its sizes.
pub fn plan(meta: &TensorMeta, halves: bool) -> Option<MatrixLayout> {
    let [rows, cols] = meta.dims[..] else { return None };
    gpu_layout(Matrix { format: meta.format?, rows, cols }, halves)
}

/// Reads a model file's tensors onto devices.
pub struct CudaWeightReader<'a> {
    reader: WeightReader<'a>,
}

impl<'a> CudaWeightReader<'a> {
    /// Opens `file` to read its tensors.
    pub fn open(file: &'a ModelFile, architecture: &'a Architecture) -> Result<Self> {
        Ok(Self { reader: WeightReader::open(file, architecture, kernels())? })
    }

    /// Reads a projection onto `device`, with its bias if the file has one.
    pub fn read_linear(
        &mut self,
        role: TensorRole,
        bias: Option<TensorRole>,
        layer: u64,
        device: &Device,
    ) -> Result<CudaLinear> {
        let halves = supports_half(device);
        let (stored, layout, bias) = self.reader.read_matrix(role, bias, layer, |meta| plan(meta, halves))?;
        CudaLinear::new(stored, &layout, bias, device)
    }

    /// Reads a norm's weights onto `device`, as F32.
    pub fn read_norm(&mut self, role: TensorRole, layer: u64, device: &Device) -> Result<Tensor> {
        self.reader.read_norm(role, layer)?.flatten_all()?.to_dtype(DType::F32)?.to_device(device)
    }
}

/// Copies the columns `from..from + width` into a contiguous tensor.
pub fn columns(x: &Tensor, from: usize, width: usize) -> Result<Tensor> {
    x.narrow(1, from, width)?.contiguous()
}
