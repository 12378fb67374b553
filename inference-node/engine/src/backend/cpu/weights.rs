//! Reading a model's tensors one by one from a GGUF file or a safetensors folder.

use std::fs::File;
use std::io::BufReader;

use candle_core::quantized::gguf_file::TensorInfo;
use candle_core::{Device, Result, Tensor};
use cfq_memory::{CpuKernels, MatrixLayout};

use crate::backend::cpu::linear::{Linear, StoredMatrix, plan};
use crate::model::architecture::Architecture;
use crate::model::file::{ModelFile, TensorMeta};
use crate::model::tensors::TensorRole;

/// Reads the tensors of a model file.
pub struct WeightReader<'a> {
    file: &'a ModelFile,
    architecture: &'a Architecture,
    kernels: CpuKernels,
    /// The open GGUF file; `None` for a folder.
    reader: Option<BufReader<File>>,
}

impl<'a> WeightReader<'a> {
    /// Opens `file` to read its tensors. `kernels` determines the layout of the matrices.
    pub fn open(file: &'a ModelFile, architecture: &'a Architecture, kernels: CpuKernels) -> Result<Self> {
        let reader = match file {
            ModelFile::Gguf(header) => Some(BufReader::with_capacity(1 << 20, File::open(&header.path)?)),
            ModelFile::Folder(_) => None,
        };
        Ok(Self { file, architecture, kernels, reader })
    }

    fn read_tensor(&mut self, name: &str) -> Result<StoredMatrix> {
        match (self.file, &mut self.reader) {
            (ModelFile::Gguf(header), Some(reader)) => {
                header.content.tensor(reader, name, &Device::Cpu).map(StoredMatrix::Quantized)
            }
            (ModelFile::Folder(folder), _) => folder.tensor(name).map(StoredMatrix::Dense),
            (ModelFile::Gguf(_), None) => candle_core::bail!("the model's file is not open"),
        }
    }

    /// Reads a matrix of the file; for an expert in a GGUF file, its part of the tensor that holds all experts.
    fn read_stored(&mut self, role: TensorRole, layer: u64, meta: &TensorMeta) -> Result<StoredMatrix> {
        let name = self.architecture.tensor_name(self.file, role, layer);
        let (ModelFile::Gguf(header), Some(reader), Some(expert)) = (self.file, &mut self.reader, role.expert()) else {
            return self.read_tensor(&name);
        };
        let Some(all) = header.content.tensor_infos.get(&name) else { candle_core::bail!("tensor {name} is missing") };
        let dims: Vec<usize> = meta.dims.iter().map(|d| *d as usize).collect();
        let shape = candle_core::Shape::from_dims(&dims);
        let bytes = shape.elem_count() / all.ggml_dtype.block_size() * all.ggml_dtype.type_size();
        let offset = all.offset + u64::from(expert) * bytes as u64;
        let own = TensorInfo { ggml_dtype: all.ggml_dtype, shape, offset };
        own.read(reader, header.content.tensor_data_offset, &Device::Cpu).map(StoredMatrix::Quantized)
    }

    /// Reads a projection for the CPU forward pass, with its bias if the file has one.
    pub fn read_linear(&mut self, role: TensorRole, bias: Option<TensorRole>, layer: u64) -> Result<Linear> {
        let kernels = self.kernels;
        let (stored, layout, bias) = self.read_matrix(role, bias, layer, |meta| plan(meta, kernels))?;
        Linear::new(stored, &layout, bias)
    }

    /// Reads a matrix as stored. Also returns the layout that `plan` chooses for it, and its bias if the file has one.
    pub fn read_matrix(
        &mut self,
        role: TensorRole,
        bias: Option<TensorRole>,
        layer: u64,
        plan: impl Fn(&TensorMeta) -> Option<MatrixLayout>,
    ) -> Result<(StoredMatrix, MatrixLayout, Option<Tensor>)> {
        let name = self.architecture.tensor_name(self.file, role, layer);
        let meta = self.architecture.tensor_meta(self.file, role, layer);
        let planned = meta.and_then(|meta| Some((plan(&meta)?, meta)));
        let Some((layout, meta)) = planned else {
            candle_core::bail!("tensor {name} is missing, or is not a matrix of a supported size")
        };
        let bias = bias.and_then(|role| {
            let name = self.architecture.tensor_name(self.file, role, layer);
            self.file.tensor(&name).map(|_| self.read_vector(&name))
        });
        let bias = bias.transpose()?;
        Ok((self.read_stored(role, layer, &meta)?, layout, bias))
    }

    fn read_vector(&mut self, name: &str) -> Result<Tensor> {
        match self.read_tensor(name)? {
            StoredMatrix::Quantized(read) => read.dequantize(&Device::Cpu),
            StoredMatrix::Dense(values) => Ok(values),
        }
    }

    /// Reads a norm's weights and adds the architecture's offset.
    pub fn read_norm(&mut self, role: TensorRole, layer: u64) -> Result<Tensor> {
        let name = self.architecture.tensor_name(self.file, role, layer);
        let weights = self.read_vector(&name)?;
        match self.architecture.norm_offset {
            0.0 => Ok(weights),
            offset => weights + f64::from(offset),
        }
    }
}
