//! A decoder-only transformer on the CPU, built from its [`Architecture`] and run on ragged batches.
//!
//! One forward pass takes any mix of prefill chunks and single decode tokens, each at its own position of its own
//! sequence. Rows are computed independently: neither the rest of the batch nor the chunking of a prompt changes a bit
//! of a row's result, as long as the kernels for different numbers of rows sum in the same order. With
//! `batch_invariant`, only such kernels are used.

use candle_core::{Device, Result, Tensor};
use cfq_memory::{CpuKernels, ModelShape};

use crate::backend::cpu::attention::{AttentionInput, AttentionParams, attend};
use crate::backend::cpu::elementwise::{self, add, columns, rms_norm, rms_norm_in_place};
use crate::backend::cpu::feed_forward::FeedForward;
use crate::backend::cpu::linear::{Linear, forward_shared};
use crate::backend::cpu::weights::WeightReader;
use crate::backend::forward::{BatchEntry, ForwardFailure, ForwardModel};
use crate::backend::ragged_batch::{RopeAngles, kv_shape, original_context, rope_angles, scored_rows};
use crate::kv::{HostBlocks, KvPool, KvShape};
use crate::model::architecture::Architecture;
use crate::model::file::ModelFile;
use crate::model::rope::rotate;
use crate::model::tensors::TensorRole;

/// Query, key and value projections: one matrix or three, as the file stores them.
enum Projections {
    Separate([Linear; 3]),
    Fused(Linear),
}

struct Layer {
    attention_norm: Vec<f32>,
    projections: Projections,
    /// Weights of the norms that are applied to every query head and to every key head; `None` if the model has no such
    /// norms.
    head_norms: Option<[Vec<f32>; 2]>,
    output: Linear,
    post_attention_norm: Option<Vec<f32>>,
    feed_forward_norm: Vec<f32>,
    feed_forward: FeedForward,
    post_feed_forward_norm: Option<Vec<f32>>,
}

/// A model with its weights in host memory.
pub struct CpuModel {
    architecture: Architecture,
    embedding: Linear,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    /// Output matrix; `None` if tied to the embedding.
    output: Option<Linear>,
}

impl CpuModel {
    /// Reads and converts the weights.
    pub fn load(file: &ModelFile, architecture: Architecture, kernels: CpuKernels) -> Result<Self> {
        let mut weights = WeightReader::open(file, &architecture, kernels)?;
        let layers = (0..architecture.shape.layers)
            .map(|l| Layer::load(&mut weights, &architecture, l))
            .collect::<Result<_>>()?;
        let embedding = weights.read_linear(TensorRole::Embedding, None, 0)?;
        let output = if architecture.tied { None } else { Some(weights.read_linear(TensorRole::Output, None, 0)?) };
        let norm = to_vec(&weights.read_norm(TensorRole::OutputNorm, 0)?)?;
        Ok(Self { embedding, layers, norm, output, architecture })
    }

    /// Shape of the model's KV pool.
    pub fn kv_shape(&self) -> KvShape {
        kv_shape(&self.architecture)
    }

    /// Actual size of all matrices in memory, in bytes.
    pub fn stored_bytes(&self) -> usize {
        self.linears().map(Linear::stored_bytes).sum()
    }

    /// Whether all matrices are computed in F32: results are then batch-invariant.
    pub fn is_f32(&self) -> bool {
        self.linears().all(Linear::is_f32)
    }

    fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.layers.iter().flat_map(Layer::linears).chain([&self.embedding]).chain(&self.output)
    }

    /// Computes the attention of every batch entry over its own sequence. The result is (all new tokens, heads x head
    /// dim).
    fn attend(
        &self,
        layer: usize,
        pool: &mut KvPool,
        batch: &[BatchEntry<'_>],
        x: &[f32],
        angles: &RopeAngles,
        batch_invariant: bool,
    ) -> Result<Vec<f32>> {
        let a = &self.architecture;
        let s = &a.shape;
        let (heads, kv_heads, head_dim) = (s.heads as usize, s.kv_heads as usize, s.head_dim as usize);
        let (query_row, key_row) = (heads * head_dim, kv_heads * head_dim);
        let [mut q, mut k, v] = self.layers[layer].project(x, query_row, key_row, batch_invariant)?;
        for (values, width, which) in [(&mut q, query_row, 0), (&mut k, key_row, 1)] {
            elementwise::parallel_rows(values, width, |first, rows| {
                for (at, row) in (first..).zip(rows.chunks_exact_mut(width)) {
                    if let Some(norms) = &self.layers[layer].head_norms {
                        rms_norm_in_place(row, &norms[which], a.epsilon);
                    }
                    let own = at * angles.pairs..(at + 1) * angles.pairs;
                    rotate(row, head_dim, a.rope_layout, &angles.cos[own.clone()], &angles.sin[own]);
                }
            });
        }
        let mut from = 0;
        for entry in batch {
            let new = entry.tokens.len();
            let keys = from * key_row..(from + new) * key_row;
            if !pool.write(entry.kv, layer, &k[keys.clone()], &v[keys]) {
                candle_core::bail!("a sequence has no KV blocks for {new} more tokens")
            }
            from += new;
        }
        let mut from = 0;
        let inputs: Vec<AttentionInput<'_>> = batch
            .iter()
            .map(|entry| {
                let new = entry.tokens.len();
                let queries = &q[from * query_row..(from + new) * query_row];
                from += new;
                let params = AttentionParams {
                    heads,
                    kv_heads,
                    head_dim,
                    past: entry.kv.len(),
                    new,
                    scale: a.attention_scale,
                    softcap: a.attention_softcap,
                    window: a.layers[layer].window,
                };
                AttentionInput { queries, kv: pool.view(entry.kv, layer), params }
            })
            .collect();
        Ok(attend(&inputs))
    }
}

impl ForwardModel for CpuModel {
    type Memory = HostBlocks;

    /// Classifies every error as a failure of this pass alone: running out of host memory, which would affect all
    /// sequences, ends the process instead of returning an error.
    fn failure(&self, _: &candle_core::Error) -> ForwardFailure {
        ForwardFailure::Pass
    }

    fn shape(&self) -> &ModelShape {
        &self.architecture.shape
    }

    fn original_context(&self) -> Option<u64> {
        original_context(&self.architecture)
    }

    fn forward(&self, pool: &mut KvPool, batch: &[BatchEntry<'_>], batch_invariant: bool) -> Result<Option<Tensor>> {
        let a = &self.architecture;
        let ids: Vec<u32> = batch.iter().flat_map(|entry| entry.tokens.iter().copied()).collect();
        let angles: Vec<RopeAngles> = (0..a.ropes.len()).map(|rope| rope_angles(a, batch, rope)).collect();
        let mut x = self.embedding.embedding_rows(&ids)?;
        if a.embedding_scale != 1.0 {
            x.iter_mut().for_each(|value| *value *= a.embedding_scale);
        }
        for (at, layer) in self.layers.iter().enumerate() {
            let normed = rms_norm(&x, &layer.attention_norm, a.epsilon);
            let mixed = self.attend(at, pool, batch, &normed, &angles[a.layers[at].rope], batch_invariant)?;
            let mut out = layer.output.forward(&mixed, batch_invariant)?;
            if let Some(norm) = &layer.post_attention_norm {
                rms_norm_in_place(&mut out, norm, a.epsilon);
            }
            add(&mut x, &out);
            let normed = rms_norm(&x, &layer.feed_forward_norm, a.epsilon);
            let mut out = layer.feed_forward.forward(&normed, a, batch_invariant)?;
            if let Some(norm) = &layer.post_feed_forward_norm {
                rms_norm_in_place(&mut out, norm, a.epsilon);
            }
            add(&mut x, &out);
        }
        let hidden = a.shape.hidden as usize;
        let mut scored = Vec::new();
        for rows in scored_rows(batch) {
            scored.extend_from_slice(&x[rows.start * hidden..rows.end * hidden]);
        }
        if scored.is_empty() {
            return Ok(None);
        }
        rms_norm_in_place(&mut scored, &self.norm, a.epsilon);
        let mut scores = self.output.as_ref().unwrap_or(&self.embedding).forward(&scored, batch_invariant)?;
        if let Some(cap) = a.logit_softcap {
            elementwise::softcap(&mut scores, cap);
        }
        let rows = scored.len() / hidden;
        Tensor::from_vec(scores, (rows, a.shape.vocabulary as usize), &Device::Cpu).map(Some)
    }
}

/// Elements of a tensor as a flat F32 vector.
fn to_vec(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.flatten_all()?.to_vec1()
}

impl Layer {
    fn load(weights: &mut WeightReader<'_>, a: &Architecture, layer: u64) -> Result<Self> {
        let projections = if a.fused {
            Projections::Fused(weights.read_linear(TensorRole::QueryKeyValue, None, layer)?)
        } else {
            Projections::Separate([
                weights.read_linear(TensorRole::Query, Some(TensorRole::QueryBias), layer)?,
                weights.read_linear(TensorRole::Key, Some(TensorRole::KeyBias), layer)?,
                weights.read_linear(TensorRole::Value, Some(TensorRole::ValueBias), layer)?,
            ])
        };
        let feed_forward = FeedForward::load(weights, a, layer)?;
        let mut norm = |role: TensorRole| weights.read_norm(role, layer).and_then(|norm| to_vec(&norm));
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
            output: weights.read_linear(TensorRole::AttentionOutput, Some(TensorRole::AttentionOutputBias), layer)?,
            post_attention_norm,
            feed_forward_norm,
            feed_forward,
            post_feed_forward_norm,
        })
    }

    fn linears(&self) -> Vec<&Linear> {
        let mut all = vec![&self.output];
        all.extend(self.feed_forward.linears());
        match &self.projections {
            Projections::Separate(three) => all.extend(three),
            Projections::Fused(one) => all.push(one),
        }
        all
    }

    /// Computes the queries, keys and values of every row.
    fn project(&self, x: &[f32], query_row: usize, key_row: usize, batch_invariant: bool) -> Result<[Vec<f32>; 3]> {
        match &self.projections {
            Projections::Separate([query, key, value]) => forward_shared([query, key, value], x, batch_invariant),
            Projections::Fused(one) => {
                let all = one.forward(x, batch_invariant)?;
                let part = |from, width| columns(&all, query_row + 2 * key_row, from, width);
                Ok([part(0, query_row), part(query_row, key_row), part(query_row + key_row, key_row)])
            }
        }
    }
}
