//! The transformer of [`crate::backend::cpu::model`] on candle tensors, from the same [`Architecture`].
//!
//! It is meant for GPUs and also runs on candle's CPU device, where it is tested. Layers may be split over several
//! devices, in consecutive stages between which the activations are copied. Activations are F32; keys, values and the
//! operands of quantized products have the formats that the device has kernels for.

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::ops::rms_norm;
use candle_nn::rotary_emb::{rope, rope_i};
use cfq_memory::ModelShape;
use std::ops::Range;

use crate::backend::cuda::attention::PagedAttention;
use crate::backend::cuda::device::is_out_of_memory;
use crate::backend::cuda::feed_forward::FeedForward;
use crate::backend::cuda::linear::CudaLinear;
use crate::backend::cuda::paged_kv::PagedKv;
use crate::backend::cuda::pass::{AttentionShape, Pass, PassIndices};
use crate::backend::cuda::weights::{CudaWeightReader, columns};
use crate::backend::forward::{BatchEntry, ForwardFailure, ForwardModel};
use crate::backend::ragged_batch::{RopeAngles, kv_shape, original_context, rope_angles, scored_rows};
use crate::kv::{KvPool, KvShape};
use crate::model::architecture::Architecture;
use crate::model::file::ModelFile;
use crate::model::rope::RopeLayout;
use crate::model::tensors::TensorRole;

/// Query, key and value projections: one matrix or three, as the file stores them.
enum Projections {
    Separate([CudaLinear; 3]),
    Fused(CudaLinear),
}

struct Layer {
    attention_norm: Tensor,
    projections: Projections,
    head_norms: Option<[Tensor; 2]>,
    output: CudaLinear,
    post_attention_norm: Option<Tensor>,
    feed_forward_norm: Tensor,
    feed_forward: FeedForward,
    post_feed_forward_norm: Option<Tensor>,
}

/// Consecutive layers on one device.
#[derive(Debug, Clone)]
pub struct Stage {
    pub device: Device,
    pub layers: Range<usize>,
}

/// A model with its weights on one or several devices.
pub struct CudaModel {
    architecture: Architecture,
    stages: Vec<Stage>,
    embedding: CudaLinear,
    layers: Vec<Layer>,
    norm: Tensor,
    /// Output matrix, on the last device; `None` if tied to the embedding, which is on the first device.
    output: Option<CudaLinear>,
}

/// Tensors of a pass on one device.
struct PassTensors {
    indices: PassIndices,
    /// Cosines and sines of each RoPE, (rows, 1, pairs).
    angles: Vec<[Tensor; 2]>,
}

impl CudaModel {
    /// Loads the weights. `stages` must cover all layers in order.
    pub fn load(file: &ModelFile, architecture: Architecture, stages: Vec<Stage>) -> Result<Self> {
        let (Some(first), Some(last)) = (stages.first(), stages.last()) else {
            candle_core::bail!("no device was given for the model's layers")
        };
        let mut reader = CudaWeightReader::open(file, &architecture)?;
        let embedding = reader.read_linear(TensorRole::Embedding, None, 0, &first.device)?;
        let mut layers = Vec::new();
        for stage in &stages {
            for layer in stage.layers.clone() {
                layers.push(Layer::load(&mut reader, &architecture, layer as u64, &stage.device)?);
            }
        }
        let (output, norm_at) = if architecture.tied {
            (None, &first.device)
        } else {
            (Some(reader.read_linear(TensorRole::Output, None, 0, &last.device)?), &last.device)
        };
        let norm = reader.read_norm(TensorRole::OutputNorm, 0, norm_at)?;
        // Copies are asynchronous, and the next user may be another thread.
        stages.iter().try_for_each(|stage| stage.device.synchronize())?;
        Ok(Self { architecture, stages, embedding, layers, norm, output })
    }

    fn kv_shape(&self) -> KvShape {
        kv_shape(&self.architecture)
    }

    /// Waits until the devices have finished all launched work. Launches are asynchronous: without this, a pass would
    /// seem to take no time, the latency model would make the next passes longer and longer, and a cancellation would
    /// be noticed only after all launched passes.
    fn synchronize(&self) -> Result<()> {
        self.stages.iter().try_for_each(|stage| stage.device.synchronize())
    }

    /// Creates a KV pool of `blocks` blocks; the pages of each layer are on the layer's device.
    pub fn pool(&self, blocks: usize, dtype: DType) -> Result<KvPool<PagedKv>> {
        let devices: Vec<Device> =
            self.stages.iter().flat_map(|stage| stage.layers.clone().map(|_| stage.device.clone())).collect();
        let memory = PagedKv::new(self.kv_shape(), blocks, dtype, &devices)?;
        self.synchronize()?;
        Ok(KvPool::with_memory(memory, blocks))
    }

    /// Actual size of all matrices in memory, in bytes.
    pub fn stored_bytes(&self) -> usize {
        let layers = self.layers.iter().flat_map(Layer::linears);
        layers.chain([&self.embedding]).chain(&self.output).map(CudaLinear::stored_bytes).sum()
    }

    fn pass_tensors(&self, pass: &Pass, batch: &[BatchEntry<'_>], device: &Device) -> Result<PassTensors> {
        let a = &self.architecture;
        let mut angles = Vec::new();
        for rope in 0..a.ropes.len() {
            let RopeAngles { cos, sin, pairs } = rope_angles(a, batch, rope);
            let shape = (pass.rows(), 1, pairs);
            angles.push([Tensor::from_vec(cos, shape, device)?, Tensor::from_vec(sin, shape, device)?]);
        }
        let group = (a.shape.heads / a.shape.kv_heads) as usize;
        Ok(PassTensors { indices: pass.indices(group, device)?, angles })
    }

    /// Computes the attention of every batch entry over its own sequence. The result is (rows, heads x head dim).
    fn attend(
        &self,
        at: usize,
        pages: &PagedKv,
        pass: &Pass,
        tensors: &PassTensors,
        x: &Tensor,
        batch_invariant: bool,
    ) -> Result<Tensor> {
        let a = &self.architecture;
        let s = &a.shape;
        let (heads, kv_heads, head_dim) = (s.heads as usize, s.kv_heads as usize, s.head_dim as usize);
        let (layer, attention) = (&self.layers[at], a.layers[at]);
        let rows = pass.rows();
        let [q, k, v] = layer.project(x, heads * head_dim, kv_heads * head_dim, batch_invariant)?;
        let rotated = |values: Tensor, heads: usize, which: usize| -> Result<Tensor> {
            let mut values = values.reshape((rows, heads, head_dim))?;
            if let Some(norms) = &layer.head_norms {
                values = rms_norm(&values, &norms[which], a.epsilon)?;
            }
            let [cos, sin] = &tensors.angles[attention.rope];
            rotate(&values.unsqueeze(2)?, a.rope_layout, cos, sin)?.squeeze(2)
        };
        let (q, k) = (rotated(q, heads, 0)?, rotated(k, kv_heads, 1)?);
        pages.write(at, &k.flatten_from(1)?, &v, pass, &tensors.indices)?;
        let shape = AttentionShape {
            heads,
            kv_heads,
            head_dim,
            scale: a.attention_scale,
            softcap: a.attention_softcap,
            window: attention.window,
        };
        let attention = PagedAttention { shape, pass, indices: &tensors.indices, batch_invariant };
        attention.apply(&q, pages.layer(at)?)?.flatten_from(1)
    }
}

impl ForwardModel for CudaModel {
    type Memory = PagedKv;

    fn shape(&self) -> &ModelShape {
        &self.architecture.shape
    }

    fn original_context(&self) -> Option<u64> {
        original_context(&self.architecture)
    }

    /// Classifies an error. Any driver error other than out-of-memory is a failure of the device, because the CUDA
    /// context is unusable after it.
    fn failure(&self, error: &candle_core::Error) -> ForwardFailure {
        match error {
            candle_core::Error::WithBacktrace { inner, .. } => self.failure(inner),
            // Errors found before any launch, for example a token without an embedding.
            candle_core::Error::Msg(_) => ForwardFailure::Pass,
            error if is_out_of_memory(error) => ForwardFailure::Memory,
            _ => ForwardFailure::Device,
        }
    }

    fn forward(
        &self,
        pool: &mut KvPool<PagedKv>,
        batch: &[BatchEntry<'_>],
        batch_invariant: bool,
    ) -> Result<Option<Tensor>> {
        let a = &self.architecture;
        let ids: Vec<u32> = batch.iter().flat_map(|entry| entry.tokens.iter().copied()).collect();
        if let Some(id) = ids.iter().find(|id| u64::from(**id) >= a.shape.vocabulary) {
            candle_core::bail!("token {id} has no embedding")
        }
        let pass = Pass::new(batch)?;
        let first = &self.stages[0].device;
        let mut x = self.embedding.embedding_rows(&Tensor::from_slice(&ids, ids.len(), first)?)?;
        if a.embedding_scale != 1.0 {
            x = (x * f64::from(a.embedding_scale))?;
        }
        for stage in &self.stages {
            x = x.to_device(&stage.device)?;
            let tensors = self.pass_tensors(&pass, batch, &stage.device)?;
            for at in stage.layers.clone() {
                let layer = &self.layers[at];
                let normed = rms_norm(&x, &layer.attention_norm, a.epsilon)?;
                let mixed = self.attend(at, pool.memory(), &pass, &tensors, &normed, batch_invariant)?;
                let mut out = layer.output.forward(&mixed, batch_invariant)?;
                if let Some(norm) = &layer.post_attention_norm {
                    out = rms_norm(&out, norm, a.epsilon)?;
                }
                x = (x + out)?;
                let normed = rms_norm(&x, &layer.feed_forward_norm, a.epsilon)?;
                let mut out = layer.feed_forward.forward(&normed, a, batch_invariant)?;
                if let Some(norm) = &layer.post_feed_forward_norm {
                    out = rms_norm(&out, norm, a.epsilon)?;
                }
                x = (x + out)?;
            }
        }
        let scored: Vec<u32> = scored_rows(batch).flatten().map(|row| row as u32).collect();
        if scored.is_empty() {
            self.synchronize()?;
            return Ok(None);
        }
        let scored = Tensor::from_slice(&scored, scored.len(), x.device())?;
        let x = rms_norm(&x.index_select(&scored, 0)?.to_device(self.norm.device())?, &self.norm, a.epsilon)?;
        let mut scores = self.output.as_ref().unwrap_or(&self.embedding).forward(&x, batch_invariant)?;
        if let Some(cap) = a.logit_softcap.map(f64::from) {
            scores = ((scores / cap)?.tanh()? * cap)?;
        }
        let scores = scores.to_device(&Device::Cpu)?;
        self.synchronize()?;
        Ok(Some(scores))
    }
}

/// Applies RoPE to (rows, heads, 1, head dim); values beyond the rotated pairs stay unchanged.
fn rotate(x: &Tensor, layout: RopeLayout, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let (head_dim, rotary_dim) = (x.dim(D::Minus1)?, 2 * cos.dim(D::Minus1)?);
    let rotate = |x: &Tensor| match layout {
        RopeLayout::Interleaved => rope_i(x, cos, sin),
        RopeLayout::HalfSplit => rope(x, cos, sin),
    };
    if rotary_dim == head_dim {
        return rotate(x);
    }
    let rest = x.narrow(D::Minus1, rotary_dim, head_dim - rotary_dim)?;
    Tensor::cat(&[&rotate(&x.narrow(D::Minus1, 0, rotary_dim)?.contiguous()?)?, &rest], D::Minus1)
}

impl Layer {
    fn load(reader: &mut CudaWeightReader<'_>, a: &Architecture, layer: u64, device: &Device) -> Result<Self> {
        let mut linear = |role: TensorRole, bias: Option<TensorRole>| reader.read_linear(role, bias, layer, device);
        let projections = if a.fused {
            Projections::Fused(linear(TensorRole::QueryKeyValue, None)?)
        } else {
            Projections::Separate([
                linear(TensorRole::Query, Some(TensorRole::QueryBias))?,
                linear(TensorRole::Key, Some(TensorRole::KeyBias))?,
                linear(TensorRole::Value, Some(TensorRole::ValueBias))?,
            ])
        };
        let output = linear(TensorRole::AttentionOutput, Some(TensorRole::AttentionOutputBias))?;
        let feed_forward = FeedForward::load(reader, a, layer, device)?;
        let mut norm = |role: TensorRole| reader.read_norm(role, layer, device);
        let head_norms =
            if a.head_norms { Some([norm(TensorRole::QueryNorm)?, norm(TensorRole::KeyNorm)?]) } else { None };
        let post_norms = if a.post_norms {
            Some((norm(TensorRole::PostAttentionNorm)?, norm(TensorRole::PostFeedForwardNorm)?))
        } else {
            None
        };
        let (post_attention_norm, post_feed_forward_norm) = post_norms.unzip();
        let attention_norm = norm(TensorRole::AttentionNorm)?;
        let feed_forward_norm = norm(TensorRole::FeedForwardNorm)?;
        Ok(Self {
            attention_norm,
            projections,
            head_norms,
            output,
            post_attention_norm,
            feed_forward_norm,
            feed_forward,
            post_feed_forward_norm,
        })
    }

    fn linears(&self) -> Vec<&CudaLinear> {
        let mut all = vec![&self.output];
        all.extend(self.feed_forward.linears());
        match &self.projections {
            Projections::Separate(three) => all.extend(three),
            Projections::Fused(one) => all.push(one),
        }
        all
    }

    /// Computes the queries, keys and values of every row.
    fn project(&self, x: &Tensor, query_row: usize, key_row: usize, batch_invariant: bool) -> Result<[Tensor; 3]> {
        match &self.projections {
            Projections::Separate([query, key, value]) => Ok([
                query.forward(x, batch_invariant)?,
                key.forward(x, batch_invariant)?,
                value.forward(x, batch_invariant)?,
            ]),
            Projections::Fused(one) => {
                let all = one.forward(x, batch_invariant)?;
                let part = |from, width| columns(&all, from, width);
                Ok([part(0, query_row)?, part(query_row, key_row)?, part(query_row + key_row, key_row)?])
            }
        }
    }
}
