//! A decoder-only transformer, as its [`Architecture`] describes it, run as a ragged batch.
//!
//! One forward pass takes any mix of prefill chunks and single decode tokens, each at its own position of its own
//! sequence. Every row is computed on its own: what else is in the batch, and where a prompt was cut into chunks,
//! changes no bit of a row's result where the kernels for its row count agree; asked to be exact, it uses only such.

use candle_core::{Device, Result, Tensor};
use cfq_memory::{Kernels, Shape};

use crate::engine::candle::architecture::Architecture;
use crate::engine::candle::attention::{self, Sizes};
use crate::engine::candle::elementwise::{self, add, columns, normalise, normalised};
use crate::engine::candle::feed_forward::FeedForward;
use crate::engine::candle::kv::{BlockMemory, HostBlocks, KvPool, KvShape, SequenceKv};
use crate::engine::candle::linear::{Linear, shared};
use crate::engine::candle::rope::rotate;
use crate::engine::candle::tensors::Part;
use crate::engine::candle::weights::Weights;
use crate::models::file::ModelFile;

/// Queries, keys and values.
enum Projections {
    Apart([Linear; 3]),
    Fused(Linear),
}

struct Layer {
    attention_norm: Vec<f32>,
    projections: Projections,
    /// Of queries and keys, a head each.
    head_norms: Option<[Vec<f32>; 2]>,
    output: Linear,
    post_attention_norm: Option<Vec<f32>>,
    feed_forward_norm: Vec<f32>,
    feed_forward: FeedForward,
    post_feed_forward_norm: Option<Vec<f32>>,
}

pub struct Model {
    architecture: Architecture,
    embedding: Linear,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    /// `None` when tied to the embedding.
    output: Option<Linear>,
}

/// One sequence's part of a forward pass.
pub struct Rows<'a> {
    /// With room for `tokens`, see [`KvPool::grow`].
    pub kv: &'a SequenceKv,
    /// Tokens at the positions after those `kv` holds.
    pub tokens: &'a [u32],
    /// After how many of them, counted from the last, the scores are wanted.
    pub scored: usize,
}

/// A loaded model, whatever it computes on.
pub trait Network {
    /// Where its keys and values are.
    type Memory: BlockMemory;

    /// Whether a sequence can be gone back on: another begins where it left off, and guesses that were wrong are forgotten.
    /// Without, one sequence runs at a time, from its first token on.
    const REWINDS: bool = true;

    fn shape(&self) -> &Shape;

    /// Longest sequence that is not rotated as a long one, where the model tells them apart.
    fn original(&self) -> Option<u64>;

    /// Scores after the scored tokens of all parts, in order: (scored tokens, vocabulary); `None` when there are none.
    /// Keys and values of the new positions are written, not counted: see [`KvPool::advance`]. `exact`: no bit of a row
    /// depends on the others, also with kernels that are faster otherwise. When it returns, all of it is done: the time it
    /// took is what the next passes are planned by.
    fn forward(&self, pool: &mut KvPool<Self::Memory>, parts: &[Rows<'_>], exact: bool) -> Result<Option<Tensor>>;

    /// What it means that [`Self::forward`] failed so.
    fn trouble(&self, error: &candle_core::Error) -> Trouble;

    /// What can be kept of it in host memory without an engine.
    fn into_kept(self) -> Option<Model>;
}

/// What a failed pass leaves behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    /// Nothing: its sequences cannot be computed, others can.
    Pass,
    /// There was no memory for it; what was computed before is whole.
    Memory,
    /// Nothing on the device can be relied on.
    Device,
}

/// Cosines and sines of a batch's rows for one rotation.
struct Angles {
    cos: Vec<f32>,
    sin: Vec<f32>,
    /// Values a row.
    pairs: usize,
}

impl Model {
    pub fn load(file: &ModelFile, architecture: Architecture, kernels: Kernels) -> Result<Self> {
        let mut weights = Weights::open(file, &architecture, kernels)?;
        let layers = (0..architecture.shape.layers)
            .map(|l| Layer::load(&mut weights, &architecture, l))
            .collect::<Result<_>>()?;
        let embedding = weights.linear(Part::Embedding, None, 0)?;
        let output = if architecture.tied { None } else { Some(weights.linear(Part::Output, None, 0)?) };
        let norm = values(&weights.norm(Part::OutputNorm, 0)?)?;
        Ok(Self { embedding, layers, norm, output, architecture })
    }

    pub fn kv_shape(&self) -> KvShape {
        let s = &self.architecture.shape;
        KvShape { layers: s.layers as usize, heads: s.kv_heads as usize, head_dim: s.head_dim as usize }
    }

    /// Bytes of all matrices as stored.
    pub fn stored_bytes(&self) -> usize {
        self.linears().map(Linear::stored_bytes).sum()
    }

    /// All of it is computed in F32: bit for bit the same whatever else is in a pass.
    pub fn is_plain(&self) -> bool {
        self.linears().all(Linear::is_plain)
    }

    fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.layers.iter().flat_map(Layer::linears).chain([&self.embedding]).chain(&self.output)
    }

    fn angles(&self, parts: &[Rows<'_>], rope: usize) -> Angles {
        let plain = &self.architecture.ropes[rope];
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for part in parts {
            let long = self.architecture.long.as_ref().filter(|_| part.kv.long && rope == 0);
            let rope = long.map_or(plain, |long| &long.rope);
            for position in part.kv.len()..part.kv.len() + part.tokens.len() {
                rope.angles(position, &mut cos, &mut sin);
            }
        }
        Angles { cos, sin, pairs: plain.frequencies.len() }
    }

    /// Attention of every part over its own sequence: (all tokens, heads x head dim).
    fn attend(
        &self,
        layer: usize,
        pool: &mut KvPool,
        parts: &[Rows<'_>],
        x: &[f32],
        angles: &Angles,
        exact: bool,
    ) -> Result<Vec<f32>> {
        let a = &self.architecture;
        let s = &a.shape;
        let (heads, kv_heads, head_dim) = (s.heads as usize, s.kv_heads as usize, s.head_dim as usize);
        let (query_row, key_row) = (heads * head_dim, kv_heads * head_dim);
        let [mut q, mut k, v] = self.layers[layer].project(x, query_row, key_row, exact)?;
        for (values, width, which) in [(&mut q, query_row, 0), (&mut k, key_row, 1)] {
            elementwise::rows(values, width, |first, rows| {
                for (at, row) in (first..).zip(rows.chunks_exact_mut(width)) {
                    if let Some(norms) = &self.layers[layer].head_norms {
                        normalise(row, &norms[which], a.epsilon);
                    }
                    let own = at * angles.pairs..(at + 1) * angles.pairs;
                    rotate(row, head_dim, a.pairs, &angles.cos[own.clone()], &angles.sin[own]);
                }
            });
        }
        let mut from = 0;
        for part in parts {
            let new = part.tokens.len();
            let keys = from * key_row..(from + new) * key_row;
            if !pool.write(part.kv, layer, &k[keys.clone()], &v[keys]) {
                candle_core::bail!("a sequence has no room for {new} more tokens")
            }
            from += new;
        }
        let mut from = 0;
        let shares: Vec<attention::Part<'_>> = parts
            .iter()
            .map(|part| {
                let new = part.tokens.len();
                let queries = &q[from * query_row..(from + new) * query_row];
                from += new;
                let sizes = Sizes {
                    heads,
                    kv_heads,
                    head_dim,
                    past: part.kv.len(),
                    new,
                    scale: a.scale,
                    cap: a.attention_cap,
                    window: a.layers[layer].window,
                };
                attention::Part { queries, kv: pool.view(part.kv, layer), sizes }
            })
            .collect();
        Ok(attention::attend(&shares))
    }
}

impl Network for Model {
    type Memory = HostBlocks;

    fn into_kept(self) -> Option<Model> {
        Some(self)
    }

    /// Host memory that is not to be had ends the process.
    fn trouble(&self, _: &candle_core::Error) -> Trouble {
        Trouble::Pass
    }

    fn shape(&self) -> &Shape {
        &self.architecture.shape
    }

    fn original(&self) -> Option<u64> {
        self.architecture.long.as_ref().map(|long| long.original as u64)
    }

    fn forward(&self, pool: &mut KvPool, parts: &[Rows<'_>], exact: bool) -> Result<Option<Tensor>> {
        let a = &self.architecture;
        let ids: Vec<u32> = parts.iter().flat_map(|p| p.tokens.iter().copied()).collect();
        let angles: Vec<Angles> = (0..a.ropes.len()).map(|rope| self.angles(parts, rope)).collect();
        let mut x = self.embedding.rows(&ids)?;
        if a.embedding_scale != 1.0 {
            x.iter_mut().for_each(|value| *value *= a.embedding_scale);
        }
        for (at, layer) in self.layers.iter().enumerate() {
            let normed = normalised(&x, &layer.attention_norm, a.epsilon);
            let mixed = self.attend(at, pool, parts, &normed, &angles[a.layers[at].rope], exact)?;
            let mut out = layer.output.forward(&mixed, exact)?;
            if let Some(norm) = &layer.post_attention_norm {
                normalise(&mut out, norm, a.epsilon);
            }
            add(&mut x, &out);
            let normed = normalised(&x, &layer.feed_forward_norm, a.epsilon);
            let mut out = layer.feed_forward.forward(&normed, a, exact)?;
            if let Some(norm) = &layer.post_feed_forward_norm {
                normalise(&mut out, norm, a.epsilon);
            }
            add(&mut x, &out);
        }
        let hidden = a.shape.hidden as usize;
        let mut scored = Vec::new();
        let mut end = 0;
        for part in parts {
            end += part.tokens.len();
            scored.extend_from_slice(&x[(end - part.scored.min(part.tokens.len())) * hidden..end * hidden]);
        }
        if scored.is_empty() {
            return Ok(None);
        }
        normalise(&mut scored, &self.norm, a.epsilon);
        let mut scores = self.output.as_ref().unwrap_or(&self.embedding).forward(&scored, exact)?;
        if let Some(cap) = a.output_cap {
            elementwise::squeeze(&mut scores, cap);
        }
        let rows = scored.len() / hidden;
        Tensor::from_vec(scores, (rows, a.shape.vocabulary as usize), &Device::Cpu).map(Some)
    }
}

/// The values of a vector of the file.
fn values(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.flatten_all()?.to_vec1()
}

impl Layer {
    fn load(weights: &mut Weights<'_>, a: &Architecture, layer: u64) -> Result<Self> {
        let projections = if a.fused {
            Projections::Fused(weights.linear(Part::QueryKeyValue, None, layer)?)
        } else {
            Projections::Apart([
                weights.linear(Part::Query, Some(Part::QueryBias), layer)?,
                weights.linear(Part::Key, Some(Part::KeyBias), layer)?,
                weights.linear(Part::Value, Some(Part::ValueBias), layer)?,
            ])
        };
        let feed_forward = FeedForward::load(weights, a, layer)?;
        let mut norm = |part: Part| weights.norm(part, layer).and_then(|norm| values(&norm));
        let head_norms = if a.head_norms { Some([norm(Part::QueryNorm)?, norm(Part::KeyNorm)?]) } else { None };
        let post_norms =
            if a.post_norms { Some((norm(Part::PostAttentionNorm)?, norm(Part::PostFeedForwardNorm)?)) } else { None };
        let (post_attention_norm, post_feed_forward_norm) = post_norms.unzip();
        let (attention_norm, feed_forward_norm) = (norm(Part::AttentionNorm)?, norm(Part::FeedForwardNorm)?);
        Ok(Self {
            attention_norm,
            projections,
            head_norms,
            output: weights.linear(Part::AttentionOutput, Some(Part::AttentionOutputBias), layer)?,
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
            Projections::Apart(three) => all.extend(three),
            Projections::Fused(one) => all.push(one),
        }
        all
    }

    /// Queries, keys and values of every row.
    fn project(&self, x: &[f32], query_row: usize, key_row: usize, exact: bool) -> Result<[Vec<f32>; 3]> {
        match &self.projections {
            Projections::Apart([query, key, value]) => shared([query, key, value], x, exact),
            Projections::Fused(one) => {
                let all = one.forward(x, exact)?;
                let part = |from, width| columns(&all, query_row + 2 * key_row, from, width);
                Ok([part(0, query_row), part(query_row, key_row), part(query_row + key_row, key_row)])
            }
        }
    }
}
