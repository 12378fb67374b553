//! The Llama architecture (with SmolLM2 and Mistral), read from GGUF and run as a ragged batch.
//!
//! One forward pass takes any mix of prefill chunks and single decode tokens, each at its own position of its own
//! sequence. Every row is computed on its own: what else is in the batch, and where a prompt was cut into chunks,
//! changes no bit of a row's result as long as the kernels for its row count agree (they do for Q8_0 and F32).

use std::io::{BufReader, Read, Seek};

use candle_core::{DType, Device, Result, Storage, Tensor};
use candle_nn::ops::{rms_norm, silu};
use candle_nn::rotary_emb::rope_i;
use cfq_memory::{Kernels, Shape, WeightSum};

use crate::engine::candle::attention::{Sizes, attend};
use crate::engine::candle::kv::SequenceKv;
use crate::engine::candle::linear::{Linear, plan, shared};
use crate::models::header::{Header, HeaderError};

/// Names of a layer's tensors after `blk.N.`: matrices, then norms.
const MATRICES: [&str; 7] = [
    "attn_q.weight",
    "attn_k.weight",
    "attn_v.weight",
    "attn_output.weight",
    "ffn_gate.weight",
    "ffn_up.weight",
    "ffn_down.weight",
];
const NORMS: [&str; 2] = ["attn_norm.weight", "ffn_norm.weight"];

/// What the header says, checked against the tensors.
#[derive(Debug, Clone)]
pub struct Facts {
    pub shape: Shape,
    rope_base: f32,
    epsilon: f32,
    /// The output matrix is the embedding's.
    tied: bool,
}

impl Facts {
    /// Refuses what this build cannot run, before anything is loaded.
    pub fn from_header(header: &Header) -> std::result::Result<Self, HeaderError> {
        let architecture = header.text("general.architecture").unwrap_or("(none)");
        if architecture != "llama" {
            return Err(header.unsupported(format!(
                "its architecture is {architecture:?}; this version runs \"llama\" (with SmolLM2 and Mistral)"
            )));
        }
        let number = |key: &str, most: u64| {
            let key = format!("llama.{key}");
            header
                .number(&key)
                .filter(|n| (1..=most).contains(n))
                .ok_or_else(|| header.unsupported(format!("{key} is missing, zero or above {most}")))
        };
        let layers = number("block_count", 1_000)?;
        let hidden = number("embedding_length", 1 << 17)?;
        let heads = number("attention.head_count", 1 << 12)?;
        let kv_heads = if header.number("llama.attention.head_count_kv").is_some() {
            number("attention.head_count_kv", heads)?
        } else {
            heads
        };
        let head_dim = match header.number("llama.attention.key_length") {
            Some(length) => length,
            None => hidden / heads,
        };
        let fits = heads.is_multiple_of(kv_heads) && head_dim > 0 && head_dim <= 1 << 10 && head_dim.is_multiple_of(2);
        if !fits || header.number("llama.rope.dimension_count").is_some_and(|d| d != head_dim) {
            return Err(
                header.unsupported(format!("{heads} heads of {head_dim}, {kv_heads} for keys, is no Llama shape"))
            );
        }
        if header.text("llama.rope.scaling.type").is_some_and(|t| t != "none") {
            return Err(header.unsupported("it stretches its context by rope scaling, which this version does not do"));
        }
        if header.number("llama.expert_count").is_some_and(|n| n > 0) {
            return Err(header.unsupported("it is a mixture of experts, which this version does not run"));
        }
        let infos = &header.content.tensor_infos;
        let vocabulary =
            infos.get("token_embd.weight").and_then(|t| t.shape.dims().first().copied()).unwrap_or(0) as u64;
        let shape = Shape {
            layers,
            heads,
            kv_heads,
            head_dim,
            hidden,
            feed_forward: number("feed_forward_length", 1 << 20)?,
            vocabulary,
            context: number("context_length", 1 << 24)?,
        };
        let facts = Self {
            shape,
            rope_base: header.real("llama.rope.freq_base").unwrap_or(10_000.0),
            epsilon: header
                .real("llama.attention.layer_norm_rms_epsilon")
                .ok_or_else(|| header.unsupported("llama.attention.layer_norm_rms_epsilon is missing"))?,
            tied: !infos.contains_key("output.weight"),
        };
        facts.check_tensors(header)?;
        Ok(facts)
    }

    /// Every tensor that is needed is there with its shape, and none is there that would be ignored.
    fn check_tensors(&self, header: &Header) -> std::result::Result<(), HeaderError> {
        let s = &self.shape;
        let (queries, keys) = (s.heads * s.head_dim, s.kv_heads * s.head_dim);
        let matrices = [
            [queries, s.hidden],
            [keys, s.hidden],
            [keys, s.hidden],
            [s.hidden, queries],
            [s.feed_forward, s.hidden],
            [s.feed_forward, s.hidden],
            [s.hidden, s.feed_forward],
        ];
        let mut expected: Vec<(String, Vec<u64>)> = vec![
            ("token_embd.weight".to_owned(), vec![s.vocabulary, s.hidden]),
            ("output_norm.weight".to_owned(), vec![s.hidden]),
        ];
        if !self.tied {
            expected.push(("output.weight".to_owned(), vec![s.vocabulary, s.hidden]));
        }
        for layer in 0..s.layers {
            expected.extend(MATRICES.iter().zip(matrices).map(|(n, dims)| (format!("blk.{layer}.{n}"), dims.to_vec())));
            expected.extend(NORMS.iter().map(|n| (format!("blk.{layer}.{n}"), vec![s.hidden])));
        }
        let infos = &header.content.tensor_infos;
        if infos.contains_key("rope_freqs.weight") {
            expected.push(("rope_freqs.weight".to_owned(), vec![s.head_dim / 2]));
        }
        for (name, dims) in &expected {
            let info = infos.get(name).ok_or_else(|| header.unsupported(format!("tensor {name} is missing")))?;
            if !info.shape.dims().iter().map(|d| *d as u64).eq(dims.iter().copied()) {
                return Err(header.unsupported(format!("tensor {name} is {:?}, expected {dims:?}", info.shape.dims())));
            }
        }
        if infos.len() != expected.len() {
            let known: std::collections::HashSet<&str> = expected.iter().map(|(n, _)| n.as_str()).collect();
            let extra = infos.keys().find(|n| !known.contains(n.as_str())).map_or("", String::as_str);
            return Err(
                header.unsupported(format!("it has a tensor {extra:?}, which this version would have to ignore"))
            );
        }
        Ok(())
    }

    /// What the weights will hold; `None` if a matrix cannot be placed.
    pub fn weights(&self, header: &Header, kernels: Kernels) -> Option<WeightSum> {
        let mut sum = WeightSum::default();
        let layers = (0..self.shape.layers).flat_map(|l| MATRICES.iter().map(move |n| format!("blk.{l}.{n}")));
        let output = (!self.tied).then(|| "output.weight".to_owned());
        for name in layers.chain(["token_embd.weight".to_owned()]).chain(output) {
            sum.add(&plan(&header.content, &name, kernels)?)?;
        }
        Some(sum)
    }
}

struct Layer {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    gate: Linear,
    up: Linear,
    down: Linear,
    attention_norm: Tensor,
    feed_forward_norm: Tensor,
}

pub struct Llama {
    facts: Facts,
    embedding: Linear,
    layers: Vec<Layer>,
    norm: Tensor,
    /// `None` when tied to the embedding.
    output: Option<Linear>,
    /// Rotations for every position of the context, each (context, head dim / 2).
    cos: Tensor,
    sin: Tensor,
}

/// One sequence's part of a forward pass.
pub struct Part<'a> {
    pub kv: &'a mut SequenceKv,
    /// Tokens at the positions after those `kv` holds.
    pub tokens: &'a [u32],
    /// Whether the scores after the last of them are wanted.
    pub scored: bool,
}

impl Llama {
    pub fn load(header: &Header, facts: Facts, kernels: Kernels) -> Result<Self> {
        let mut reader = BufReader::with_capacity(1 << 20, std::fs::File::open(&header.path)?);
        let content = &header.content;
        let layers = (0..facts.shape.layers)
            .map(|l| Layer::load(content, &mut reader, l, kernels))
            .collect::<Result<Vec<_>>>()?;
        let mut matrix = |name: &str| Linear::load(content, &mut reader, name, kernels);
        let embedding = matrix("token_embd.weight")?;
        let output = if facts.tied { None } else { Some(matrix("output.weight")?) };
        let norm = vector(content, &mut reader, "output_norm.weight")?;
        let half = facts.shape.head_dim as usize / 2;
        let mut frequencies: Vec<f32> = (0..half).map(|i| facts.rope_base.powf(-(i as f32) / half as f32)).collect();
        if content.tensor_infos.contains_key("rope_freqs.weight") {
            let factors = vector(content, &mut reader, "rope_freqs.weight")?.to_vec1::<f32>()?;
            frequencies.iter_mut().zip(factors).for_each(|(frequency, factor)| *frequency /= factor);
        }
        let positions = Tensor::arange(0u32, facts.shape.context as u32, &Device::Cpu)?.to_dtype(DType::F32)?;
        let angles = positions.unsqueeze(1)?.matmul(&Tensor::from_vec(frequencies, (1, half), &Device::Cpu)?)?;
        let (cos, sin) = (angles.cos()?, angles.sin()?);
        Ok(Self { facts, embedding, layers, norm, output, cos, sin })
    }

    pub fn shape(&self) -> &Shape {
        &self.facts.shape
    }

    /// Bytes of all matrices as stored.
    pub fn stored_bytes(&self) -> usize {
        let layers = self.layers.iter().flat_map(|l| [&l.query, &l.key, &l.value, &l.output, &l.gate, &l.up, &l.down]);
        layers.chain([&self.embedding]).chain(&self.output).map(Linear::stored_bytes).sum()
    }

    pub fn new_sequence(&self, capacity: usize) -> SequenceKv {
        let s = &self.facts.shape;
        SequenceKv::new(s.layers as usize, capacity, s.kv_heads as usize, s.head_dim as usize)
    }

    /// Scores after the last token of each scored part, in order: (scored parts, vocabulary); `None` when there are none.
    pub fn forward(&self, parts: &mut [Part<'_>]) -> Result<Option<Tensor>> {
        let s = &self.facts.shape;
        let (heads, kv_heads, head_dim) = (s.heads as usize, s.kv_heads as usize, s.head_dim as usize);
        let ids: Vec<u32> = parts.iter().flat_map(|p| p.tokens.iter().copied()).collect();
        let positions: Vec<u32> =
            parts.iter().flat_map(|p| (p.kv.len()..).take(p.tokens.len()).map(|at| at as u32)).collect();
        let n = ids.len();
        let mut x = self.embedding.rows(&Tensor::new(ids, &Device::Cpu)?)?;
        let positions = Tensor::new(positions, &Device::Cpu)?;
        let cos = self.cos.index_select(&positions, 0)?.reshape((n, 1, head_dim / 2))?;
        let sin = self.sin.index_select(&positions, 0)?.reshape((n, 1, head_dim / 2))?;
        // Each token is a batch row of its own here, so that each has its own position.
        let rotate = |t: &Tensor, heads: usize| {
            rope_i(&t.reshape((n, heads, 1, head_dim))?, &cos, &sin)?.reshape((n, heads, head_dim))
        };
        for (at, layer) in self.layers.iter().enumerate() {
            let normed = rms_norm(&x, &layer.attention_norm, self.facts.epsilon)?;
            let [q, k, v] = shared([&layer.query, &layer.key, &layer.value], &normed)?;
            let (q, k) = (rotate(&q, heads)?, rotate(&k, kv_heads)?);
            let mixed = self.attend(at, parts, &q, &k, &v)?;
            x = (x + layer.output.forward(&mixed)?)?;
            let normed = rms_norm(&x, &layer.feed_forward_norm, self.facts.epsilon)?;
            let [gate, up] = shared([&layer.gate, &layer.up], &normed)?;
            x = (x + layer.down.forward(&(silu(&gate)? * up)?)?)?;
        }
        let mut last = Vec::new();
        let mut end = 0;
        for part in parts.iter_mut() {
            end += part.tokens.len();
            part.kv.advance(part.tokens.len());
            if part.scored {
                last.push(end as u32 - 1);
            }
        }
        if last.is_empty() {
            return Ok(None);
        }
        let x = x.index_select(&Tensor::new(last, &Device::Cpu)?, 0)?;
        let x = rms_norm(&x, &self.norm, self.facts.epsilon)?;
        self.output.as_ref().unwrap_or(&self.embedding).forward(&x).map(Some)
    }
}

impl Llama {
    /// Attention of every part over its own sequence: (all tokens, heads x head dim).
    fn attend(&self, layer: usize, parts: &mut [Part<'_>], q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let s = &self.facts.shape;
        let (heads, kv_heads, head_dim) = (s.heads as usize, s.kv_heads as usize, s.head_dim as usize);
        let (query_row, key_row) = (heads * head_dim, kv_heads * head_dim);
        let mut mixed = Vec::with_capacity(parts.len());
        let (q, k, v) =
            (q.flatten_all()?.contiguous()?, k.flatten_all()?.contiguous()?, v.flatten_all()?.contiguous()?);
        with_values(&q, |q| {
            with_values(&k, |k| {
                with_values(&v, |v| {
                    let mut from = 0;
                    for part in parts.iter_mut() {
                        let new = part.tokens.len();
                        let keys = from * key_row..(from + new) * key_row;
                        if !part.kv.append(layer, &k[keys.clone()], &v[keys]) {
                            candle_core::bail!("a sequence has no room for {new} more tokens")
                        }
                        let (past, capacity) = (part.kv.len(), part.kv.capacity());
                        let sizes = Sizes { heads, kv_heads, head_dim, capacity, past, new };
                        let queries = &q[from * query_row..(from + new) * query_row];
                        let out = attend(queries, part.kv.layer(layer), sizes);
                        let out = Tensor::from_vec(out, (heads, new, head_dim), &Device::Cpu)?;
                        mixed.push(out.transpose(0, 1)?.reshape((new, query_row))?);
                        from += new;
                    }
                    Ok(())
                })
            })
        })?;
        if mixed.len() == 1 { Ok(mixed.remove(0)) } else { Tensor::cat(&mixed, 0) }
    }
}

/// The values of a contiguous F32 tensor on the CPU, where they lie.
fn with_values<T>(tensor: &Tensor, read: impl FnOnce(&[f32]) -> Result<T>) -> Result<T> {
    let (storage, layout) = tensor.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (Storage::Cpu(values), Some((from, to))) => read(&values.as_slice::<f32>()?[from..to]),
        _ => candle_core::bail!("activations are not contiguous on the CPU"),
    }
}

impl Layer {
    fn load<R: Read + Seek>(
        content: &candle_core::quantized::gguf_file::Content,
        reader: &mut R,
        layer: u64,
        kernels: Kernels,
    ) -> Result<Self> {
        let mut matrix = |at: usize| Linear::load(content, reader, &format!("blk.{layer}.{}", MATRICES[at]), kernels);
        let (query, key, value, output) = (matrix(0)?, matrix(1)?, matrix(2)?, matrix(3)?);
        let (gate, up, down) = (matrix(4)?, matrix(5)?, matrix(6)?);
        let attention_norm = vector(content, reader, &format!("blk.{layer}.{}", NORMS[0]))?;
        let feed_forward_norm = vector(content, reader, &format!("blk.{layer}.{}", NORMS[1]))?;
        Ok(Self { query, key, value, output, gate, up, down, attention_norm, feed_forward_norm })
    }
}

fn vector<R: Read + Seek>(
    content: &candle_core::quantized::gguf_file::Content,
    reader: &mut R,
    name: &str,
) -> Result<Tensor> {
    content.tensor(reader, name, &Device::Cpu)?.dequantize(&Device::Cpu)
}
