//! The same transformer as [`crate::engine::candle::model`], from the same [`Architecture`], over tensors of a device.
//!
//! For graphics cards; on the CPU it runs too, which is how it is tested. Layers may lie on several devices, one stretch of
//! them after the other: the stream of activations moves along. Activations are F32; quantised products, keys and values
//! are what the device has kernels for.

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::ops::rms_norm;
use candle_nn::rotary_emb::{rope, rope_i};
use cfq_memory::{Matrix, Placed, Shape, place_on_card};
use std::ops::Range;

use crate::engine::candle::architecture::Architecture;
use crate::engine::candle::card::attention::{Attend, Kind};
use crate::engine::candle::card::device::is_out_of_memory;
use crate::engine::candle::card::feed_forward::FeedForward;
use crate::engine::candle::card::linear::CardLinear;
use crate::engine::candle::card::pages::CardBlocks;
use crate::engine::candle::card::pass::{Indices, Pass};
use crate::engine::candle::kv::{KvPool, KvShape};
use crate::engine::candle::linear::kernels;
use crate::engine::candle::model::{Model, Network, Rows, Trouble};
use crate::engine::candle::rope::Pairs;
use crate::engine::candle::tensors::Part;
use crate::engine::candle::weights::Weights;
use crate::models::file::{ModelFile, TensorFacts};

enum Projections {
    Apart([CardLinear; 3]),
    Fused(CardLinear),
}

struct Layer {
    attention_norm: Tensor,
    projections: Projections,
    head_norms: Option<[Tensor; 2]>,
    output: CardLinear,
    post_attention_norm: Option<Tensor>,
    feed_forward_norm: Tensor,
    feed_forward: FeedForward,
    post_feed_forward_norm: Option<Tensor>,
}

/// A stretch of layers and where they are.
#[derive(Debug, Clone)]
pub struct Stage {
    pub device: Device,
    pub layers: Range<usize>,
}

pub struct CardModel {
    architecture: Architecture,
    stages: Vec<Stage>,
    embedding: CardLinear,
    layers: Vec<Layer>,
    norm: Tensor,
    /// On the last device; `None` when tied to the embedding, which is on the first.
    output: Option<CardLinear>,
}

/// What a device needs to know of a pass.
struct OnDevice {
    indices: Indices,
    /// For each rope: cosines and sines, (rows, 1, pairs).
    angles: Vec<[Tensor; 2]>,
}

/// Whether half-precision matrices stay so on this device.
pub fn halves(device: &Device) -> bool {
    !device.is_cpu()
}

/// How a matrix of the file will be held on a card; `None` for one that is no matrix or has impossible sizes.
pub fn plan(facts: &TensorFacts, halves: bool) -> Option<Placed> {
    let [rows, cols] = facts.dims[..] else { return None };
    place_on_card(Matrix { format: facts.format?, rows, cols }, halves)
}

pub struct Loading<'a> {
    weights: Weights<'a>,
}

impl Loading<'_> {
    pub fn linear(&mut self, part: Part, bias: Option<Part>, layer: u64, device: &Device) -> Result<CardLinear> {
        let halves = halves(device);
        let (raw, placed, bias) = self.weights.matrix(part, bias, layer, |facts| plan(facts, halves))?;
        CardLinear::new(raw, &placed, bias, device)
    }

    fn norm(&mut self, part: Part, layer: u64, device: &Device) -> Result<Tensor> {
        self.weights.norm(part, layer)?.flatten_all()?.to_dtype(DType::F32)?.to_device(device)
    }
}

impl CardModel {
    /// `stages` cover all layers in order.
    pub fn load(file: &ModelFile, architecture: Architecture, stages: Vec<Stage>) -> Result<Self> {
        let (Some(first), Some(last)) = (stages.first(), stages.last()) else {
            candle_core::bail!("a model on no device")
        };
        let mut loading = Loading { weights: Weights::open(file, &architecture, kernels())? };
        let embedding = loading.linear(Part::Embedding, None, 0, &first.device)?;
        let mut layers = Vec::new();
        for stage in &stages {
            for layer in stage.layers.clone() {
                layers.push(Layer::load(&mut loading, &architecture, layer as u64, &stage.device)?);
            }
        }
        let (output, norm_at) = if architecture.tied {
            (None, &first.device)
        } else {
            (Some(loading.linear(Part::Output, None, 0, &last.device)?), &last.device)
        };
        let norm = loading.norm(Part::OutputNorm, 0, norm_at)?;
        // The copies are done, whoever uses them next.
        stages.iter().try_for_each(|stage| stage.device.synchronize())?;
        Ok(Self { architecture, stages, embedding, layers, norm, output })
    }

    pub fn kv_shape(&self) -> KvShape {
        let s = &self.architecture.shape;
        KvShape { layers: s.layers as usize, heads: s.kv_heads as usize, head_dim: s.head_dim as usize }
    }

    /// Until the devices have done all they were told. A launch returns at once: without waiting, a pass over a prompt would
    /// seem to take no time, the next ones would be made longer and longer, and a cancel would be seen behind all of them.
    fn wait(&self) -> Result<()> {
        self.stages.iter().try_for_each(|stage| stage.device.synchronize())
    }

    /// A pool of so many blocks beside the layers.
    pub fn pool(&self, blocks: usize, dtype: DType) -> Result<KvPool<CardBlocks>> {
        let devices: Vec<Device> =
            self.stages.iter().flat_map(|stage| stage.layers.clone().map(|_| stage.device.clone())).collect();
        let memory = CardBlocks::new(self.kv_shape(), blocks, dtype, &devices)?;
        self.wait()?;
        Ok(KvPool::over(memory, blocks))
    }

    /// Bytes of all matrices as stored.
    pub fn stored_bytes(&self) -> usize {
        let layers = self.layers.iter().flat_map(Layer::linears);
        layers.chain([&self.embedding]).chain(&self.output).map(CardLinear::stored_bytes).sum()
    }

    fn on_device(&self, pass: &Pass, parts: &[Rows<'_>], device: &Device) -> Result<OnDevice> {
        let a = &self.architecture;
        let mut angles = Vec::new();
        for (at, plain) in a.ropes.iter().enumerate() {
            let (mut cos, mut sin) = (Vec::new(), Vec::new());
            for part in parts {
                let long = a.long.as_ref().filter(|_| part.kv.long && at == 0);
                let rope = long.map_or(plain, |long| &long.rope);
                for position in part.kv.len()..part.kv.len() + part.tokens.len() {
                    rope.angles(position, &mut cos, &mut sin);
                }
            }
            let shape = (pass.rows(), 1, plain.frequencies.len());
            angles.push([Tensor::from_vec(cos, shape, device)?, Tensor::from_vec(sin, shape, device)?]);
        }
        let group = (a.shape.heads / a.shape.kv_heads) as usize;
        Ok(OnDevice { indices: pass.indices(group, device)?, angles })
    }

    /// Attention of every part over its own sequence: (rows, heads x head dim).
    fn attend(
        &self,
        at: usize,
        blocks: &CardBlocks,
        pass: &Pass,
        here: &OnDevice,
        x: &Tensor,
        exact: bool,
    ) -> Result<Tensor> {
        let a = &self.architecture;
        let s = &a.shape;
        let (heads, kv_heads, head_dim) = (s.heads as usize, s.kv_heads as usize, s.head_dim as usize);
        let (layer, kind) = (&self.layers[at], a.layers[at]);
        let rows = pass.rows();
        let [q, k, v] = layer.project(x, heads * head_dim, kv_heads * head_dim, exact)?;
        let turned = |values: Tensor, heads: usize, which: usize| -> Result<Tensor> {
            let mut values = values.reshape((rows, heads, head_dim))?;
            if let Some(norms) = &layer.head_norms {
                values = rms_norm(&values, &norms[which], a.epsilon)?;
            }
            let [cos, sin] = &here.angles[kind.rope];
            rotate(&values.unsqueeze(2)?, a.pairs, cos, sin)?.squeeze(2)
        };
        let (q, k) = (turned(q, heads, 0)?, turned(k, kv_heads, 1)?);
        blocks.write(at, &k.flatten_from(1)?, &v, pass, &here.indices)?;
        let kind = Kind { heads, kv_heads, head_dim, scale: a.scale, cap: a.attention_cap, window: kind.window };
        let attend = Attend { kind, pass, indices: &here.indices, exact };
        attend.over(&q, blocks.layer(at)?)?.flatten_from(1)
    }
}

impl Network for CardModel {
    type Memory = CardBlocks;

    /// A copy in host memory would be a quick way back; it is not made yet.
    fn into_kept(self) -> Option<Model> {
        None
    }

    fn shape(&self) -> &Shape {
        &self.architecture.shape
    }

    fn original(&self) -> Option<u64> {
        self.architecture.long.as_ref().map(|long| long.original as u64)
    }

    /// A driver that failed once keeps failing: only a lack of memory passes by itself.
    fn trouble(&self, error: &candle_core::Error) -> Trouble {
        match error {
            candle_core::Error::WithBacktrace { inner, .. } => self.trouble(inner),
            // Said before the card was asked, as of a token without an embedding.
            candle_core::Error::Msg(_) => Trouble::Pass,
            error if is_out_of_memory(error) => Trouble::Memory,
            _ => Trouble::Device,
        }
    }

    fn forward(&self, pool: &mut KvPool<CardBlocks>, parts: &[Rows<'_>], exact: bool) -> Result<Option<Tensor>> {
        let a = &self.architecture;
        let ids: Vec<u32> = parts.iter().flat_map(|p| p.tokens.iter().copied()).collect();
        if let Some(id) = ids.iter().find(|id| u64::from(**id) >= a.shape.vocabulary) {
            candle_core::bail!("token {id} has no embedding")
        }
        let pass = Pass::new(parts)?;
        let first = &self.stages[0].device;
        let mut x = self.embedding.rows(&Tensor::from_slice(&ids, ids.len(), first)?)?;
        if a.embedding_scale != 1.0 {
            x = (x * f64::from(a.embedding_scale))?;
        }
        for stage in &self.stages {
            x = x.to_device(&stage.device)?;
            let here = self.on_device(&pass, parts, &stage.device)?;
            for at in stage.layers.clone() {
                let layer = &self.layers[at];
                let normed = rms_norm(&x, &layer.attention_norm, a.epsilon)?;
                let mixed = self.attend(at, pool.memory(), &pass, &here, &normed, exact)?;
                let mut out = layer.output.forward(&mixed, exact)?;
                if let Some(norm) = &layer.post_attention_norm {
                    out = rms_norm(&out, norm, a.epsilon)?;
                }
                x = (x + out)?;
                let normed = rms_norm(&x, &layer.feed_forward_norm, a.epsilon)?;
                let mut out = layer.feed_forward.forward(&normed, a, exact)?;
                if let Some(norm) = &layer.post_feed_forward_norm {
                    out = rms_norm(&out, norm, a.epsilon)?;
                }
                x = (x + out)?;
            }
        }
        let mut scored = Vec::new();
        let mut end = 0;
        for part in parts {
            end += part.tokens.len();
            scored.extend((end - part.scored.min(part.tokens.len())..end).map(|row| row as u32));
        }
        if scored.is_empty() {
            self.wait()?;
            return Ok(None);
        }
        let scored = Tensor::from_slice(&scored, scored.len(), x.device())?;
        let x = rms_norm(&x.index_select(&scored, 0)?.to_device(self.norm.device())?, &self.norm, a.epsilon)?;
        let mut scores = self.output.as_ref().unwrap_or(&self.embedding).forward(&x, exact)?;
        if let Some(cap) = a.output_cap.map(f64::from) {
            scores = ((scores / cap)?.tanh()? * cap)?;
        }
        let scores = scores.to_device(&Device::Cpu)?;
        self.wait()?;
        Ok(Some(scores))
    }
}

/// Turns (rows, heads, 1, head dim); values beyond the angles' pairs stay.
fn rotate(x: &Tensor, pairs: Pairs, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let (head_dim, turning) = (x.dim(D::Minus1)?, 2 * cos.dim(D::Minus1)?);
    let turn = |x: &Tensor| match pairs {
        Pairs::Neighbours => rope_i(x, cos, sin),
        Pairs::Halves => rope(x, cos, sin),
    };
    if turning == head_dim {
        return turn(x);
    }
    let still = x.narrow(D::Minus1, turning, head_dim - turning)?;
    Tensor::cat(&[&turn(&x.narrow(D::Minus1, 0, turning)?.contiguous()?)?, &still], D::Minus1)
}

/// Columns `from..from + width`, side by side.
pub fn columns(x: &Tensor, from: usize, width: usize) -> Result<Tensor> {
    x.narrow(1, from, width)?.contiguous()
}

impl Layer {
    fn load(loading: &mut Loading<'_>, a: &Architecture, layer: u64, device: &Device) -> Result<Self> {
        let mut linear = |part: Part, bias: Option<Part>| loading.linear(part, bias, layer, device);
        let projections = if a.fused {
            Projections::Fused(linear(Part::QueryKeyValue, None)?)
        } else {
            Projections::Apart([
                linear(Part::Query, Some(Part::QueryBias))?,
                linear(Part::Key, Some(Part::KeyBias))?,
                linear(Part::Value, Some(Part::ValueBias))?,
            ])
        };
        let output = linear(Part::AttentionOutput, Some(Part::AttentionOutputBias))?;
        let feed_forward = FeedForward::load(loading, a, layer, device)?;
        let mut norm = |part: Part| loading.norm(part, layer, device);
        let head_norms = if a.head_norms { Some([norm(Part::QueryNorm)?, norm(Part::KeyNorm)?]) } else { None };
        let post_norms =
            if a.post_norms { Some((norm(Part::PostAttentionNorm)?, norm(Part::PostFeedForwardNorm)?)) } else { None };
        let (post_attention_norm, post_feed_forward_norm) = post_norms.unzip();
        let (attention_norm, feed_forward_norm) = (norm(Part::AttentionNorm)?, norm(Part::FeedForwardNorm)?);
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

    fn linears(&self) -> Vec<&CardLinear> {
        let mut all = vec![&self.output];
        all.extend(self.feed_forward.linears());
        match &self.projections {
            Projections::Apart(three) => all.extend(three),
            Projections::Fused(one) => all.push(one),
        }
        all
    }

    /// Queries, keys and values of every row.
    fn project(&self, x: &Tensor, query_row: usize, key_row: usize, exact: bool) -> Result<[Tensor; 3]> {
        match &self.projections {
            Projections::Apart([query, key, value]) => {
                Ok([query.forward(x, exact)?, key.forward(x, exact)?, value.forward(x, exact)?])
            }
            Projections::Fused(one) => {
                let all = one.forward(x, exact)?;
                let part = |from, width| columns(&all, from, width);
                Ok([part(0, query_row)?, part(query_row, key_row)?, part(query_row + key_row, key_row)?])
            }
        }
    }
}
