//! Reading a model's tensors, one after the other, out of whichever container they are in.

use std::fs::File;
use std::io::BufReader;

use candle_core::quantized::gguf_file::TensorInfo;
use candle_core::{Device, Result, Tensor};
use cfq_memory::{Kernels, Placed};

use crate::engine::candle::architecture::Architecture;
use crate::engine::candle::linear::{Linear, Raw, plan};
use crate::engine::candle::tensors::Part;
use crate::models::file::{ModelFile, TensorFacts};

pub struct Weights<'a> {
    file: &'a ModelFile,
    architecture: &'a Architecture,
    kernels: Kernels,
    /// Of a GGUF file.
    reader: Option<BufReader<File>>,
}

impl<'a> Weights<'a> {
    pub fn open(file: &'a ModelFile, architecture: &'a Architecture, kernels: Kernels) -> Result<Self> {
        let reader = match file {
            ModelFile::Gguf(header) => Some(BufReader::with_capacity(1 << 20, File::open(&header.path)?)),
            ModelFile::Folder(_) => None,
        };
        Ok(Self { file, architecture, kernels, reader })
    }

    fn raw(&mut self, name: &str) -> Result<Raw> {
        match (self.file, &mut self.reader) {
            (ModelFile::Gguf(header), Some(reader)) => {
                header.content.tensor(reader, name, &Device::Cpu).map(Raw::Quantized)
            }
            (ModelFile::Folder(folder), _) => folder.tensor(name).map(Raw::Plain),
            (ModelFile::Gguf(_), None) => candle_core::bail!("the model's file is not open"),
        }
    }

    /// A matrix of the file, or an expert's part of the tensor that holds it.
    fn stored(&mut self, part: Part, layer: u64, facts: &TensorFacts) -> Result<Raw> {
        let name = self.architecture.tensor(self.file, part, layer);
        let (ModelFile::Gguf(header), Some(reader), Some(expert)) = (self.file, &mut self.reader, part.expert()) else {
            return self.raw(&name);
        };
        let Some(all) = header.content.tensor_infos.get(&name) else { candle_core::bail!("tensor {name} is missing") };
        let dims: Vec<usize> = facts.dims.iter().map(|d| *d as usize).collect();
        let shape = candle_core::Shape::from_dims(&dims);
        let bytes = shape.elem_count() / all.ggml_dtype.block_size() * all.ggml_dtype.type_size();
        let offset = all.offset + u64::from(expert) * bytes as u64;
        let own = TensorInfo { ggml_dtype: all.ggml_dtype, shape, offset };
        own.read(reader, header.content.tensor_data_offset, &Device::Cpu).map(Raw::Quantized)
    }

    /// A matrix, with its bias if the file has one.
    pub fn linear(&mut self, part: Part, bias: Option<Part>, layer: u64) -> Result<Linear> {
        let kernels = self.kernels;
        let (raw, placed, bias) = self.matrix(part, bias, layer, |facts| plan(facts, kernels))?;
        Linear::new(raw, &placed, bias)
    }

    /// The same as it was read, with how `place` wants it held.
    pub fn matrix(
        &mut self,
        part: Part,
        bias: Option<Part>,
        layer: u64,
        place: impl Fn(&TensorFacts) -> Option<Placed>,
    ) -> Result<(Raw, Placed, Option<Tensor>)> {
        let name = self.architecture.tensor(self.file, part, layer);
        let facts = self.architecture.facts(self.file, part, layer);
        let placed = facts.and_then(|facts| Some((place(&facts)?, facts)));
        let Some((placed, facts)) = placed else { candle_core::bail!("{name} is not a matrix") };
        let bias = bias.and_then(|part| {
            let name = self.architecture.tensor(self.file, part, layer);
            self.file.tensor(&name).map(|_| self.vector(&name))
        });
        let bias = bias.transpose()?;
        Ok((self.stored(part, layer, &facts)?, placed, bias))
    }

    fn vector(&mut self, name: &str) -> Result<Tensor> {
        match self.raw(name)? {
            Raw::Quantized(read) => read.dequantize(&Device::Cpu),
            Raw::Plain(values) => Ok(values),
        }
    }

    /// A norm's weights, as they are multiplied with.
    pub fn norm(&mut self, part: Part, layer: u64) -> Result<Tensor> {
        let name = self.architecture.tensor(self.file, part, layer);
        let weights = self.vector(&name)?;
        match self.architecture.norm_offset {
            0.0 => Ok(weights),
            offset => weights + f64::from(offset),
        }
    }
}
