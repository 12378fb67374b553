//! GGUF files with random weights, for checks that work with any weights: of parity, memory and speed.

use std::path::Path;

use candle_core::quantized::ggml_file::qtensor_from_ggml;
use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Result, Tensor};

use crate::model::tokenizer::char_to_byte;

/// The description of a GGUF file with random weights.
#[derive(Debug, Clone, Copy)]
pub struct RandomFile {
    /// Architecture name (`general.architecture`); must be one that this crate runs.
    pub family: &'static str,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the feed-forward network, or of one expert.
    pub feed_forward: usize,
    /// Number of layers.
    pub layers: usize,
    /// Experts per layer and experts per token; `None`: a dense model.
    pub experts: Option<(usize, usize)>,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key-value heads.
    pub kv_heads: usize,
    /// Dimension of one attention head.
    pub head_dim: usize,
    /// Number of tokens in the vocabulary; at least 258 (256 bytes, one merge and the end token).
    pub vocabulary: usize,
    /// Longest sequence, in tokens.
    pub context: usize,
    /// Window of the layers with sliding-window attention, in tokens.
    pub window: Option<usize>,
    /// Format of the layers' matrices.
    pub format: GgmlDType,
    /// Format of the embedding.
    pub embedding: GgmlDType,
    /// Format of the output matrix; `None`: tied to the embedding.
    pub output: Option<GgmlDType>,
    /// Maximum number of random rows per matrix; further rows repeat them.
    pub random_rows: usize,
}

/// A linear congruential generator with Knuth's MMIX constants; the same sequence on every machine.
struct Lcg(u64);

impl Lcg {
    /// Returns the next random number, uniform in [-1, 1).
    fn uniform(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

/// A matrix of random values with mean 0 and the given standard deviation. Only `random_rows` rows are random and the
/// others repeat them, so that generating a file takes no longer than writing it.
///
/// # Errors
/// If candle cannot quantize to `format`.
pub fn random_matrix(
    rows: usize,
    cols: usize,
    deviation: f32,
    format: GgmlDType,
    random_rows: usize,
    seed: u64,
) -> Result<QTensor> {
    let count = rows.min(random_rows);
    let mut random = Lcg(seed);
    // A uniform distribution over plus and minus sqrt(3) has a standard deviation of 1.
    let width = deviation * 3f32.sqrt();
    let values: Vec<f32> = (0..count * cols).map(|_| random.uniform() * width).collect();
    let drawn = QTensor::quantize(&Tensor::from_vec(values, (count, cols), &Device::Cpu)?, format)?;
    let row = drawn.storage_size_in_bytes() / count.max(1);
    let mut bytes = Vec::with_capacity(rows * row);
    while bytes.len() < rows * row {
        let data = drawn.data()?;
        bytes.extend_from_slice(&data[..data.len().min(rows * row - bytes.len())]);
    }
    qtensor_from_ggml(format, &bytes, vec![rows, cols], &Device::Cpu)
}

/// The data of `matrix` with other dimensions.
fn reshaped(matrix: &QTensor, dims: Vec<usize>) -> Result<QTensor> {
    qtensor_from_ggml(matrix.dtype(), &matrix.data()?, dims, &Device::Cpu)
}

/// A vector of random values around 1, for norms and biases.
fn random_vector(length: usize, seed: u64) -> Result<QTensor> {
    let mut random = Lcg(seed);
    let values: Vec<f32> = (0..length).map(|_| 1.0 + random.uniform() / 4.0).collect();
    QTensor::quantize(&Tensor::from_vec(values, length, &Device::Cpu)?, GgmlDType::F32)
}

impl RandomFile {
    /// Writes the file to `path`, with a tokenizer that has one token per byte.
    ///
    /// # Errors
    /// I/O errors, or that candle cannot quantize to one of the formats.
    pub fn write(&self, path: &Path) -> Result<()> {
        let tensors = self.tensors()?;
        let metadata = self.metadata();
        let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(k, v)| (k.as_str(), v)).collect();
        let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(n, t)| (n.as_str(), t)).collect();
        let mut file = std::io::BufWriter::new(std::fs::File::create(path)?);
        gguf_file::write(&mut file, &metadata, &tensors)
    }

    fn metadata(&self) -> Vec<(String, Value)> {
        let mut all: Vec<(String, Value)> = Vec::new();
        let mut put = |key: String, value: Value| all.push((key, value));
        put("general.architecture".to_owned(), Value::String(self.family.to_owned()));
        let family_key = |key: &str| format!("{}.{key}", self.family);
        for (key, value) in [
            ("block_count", self.layers),
            ("context_length", self.context),
            ("embedding_length", self.hidden),
            ("feed_forward_length", self.feed_forward),
            ("attention.head_count", self.heads),
            ("attention.head_count_kv", self.kv_heads),
            ("attention.key_length", self.head_dim),
            ("attention.value_length", self.head_dim),
            ("rope.dimension_count", self.head_dim),
        ] {
            put(family_key(key), Value::U32(value as u32));
        }
        if let Some((count, used)) = self.experts {
            put(family_key("expert_count"), Value::U32(count as u32));
            put(family_key("expert_used_count"), Value::U32(used as u32));
            put(family_key("expert_feed_forward_length"), Value::U32(self.feed_forward as u32));
        }
        if let Some(window) = self.window {
            put(family_key("attention.sliding_window"), Value::U32(window as u32));
        }
        if self.family == "gemma2" {
            put(family_key("attn_logit_softcapping"), Value::F32(50.0));
            put(family_key("final_logit_softcapping"), Value::F32(30.0));
        }
        put(family_key("attention.layer_norm_rms_epsilon"), Value::F32(1e-6));
        put(family_key("rope.freq_base"), Value::F32(10_000.0));
        // Tokens: all bytes in GPT-2's spelling, one merge, the end token, then control tokens up to the vocabulary's
        // size.
        let map = char_to_byte();
        let bytes = (0..=255u8).filter_map(|byte| map.iter().find(|(_, b)| **b == byte).map(|(c, _)| c.to_string()));
        let mut tokens: Vec<String> = bytes.chain(["!!", "<end>"].map(str::to_owned)).collect();
        let end = tokens.len() - 1;
        tokens.extend((tokens.len()..self.vocabulary).map(|id| format!("<{id}>")));
        let kind = |id: usize| if id < end { 1 } else { 3 };
        put("tokenizer.ggml.model".to_owned(), Value::String("gpt2".to_owned()));
        put("tokenizer.ggml.pre".to_owned(), Value::String("qwen2".to_owned()));
        let kinds = (0..tokens.len()).map(|id| Value::I32(kind(id))).collect();
        put("tokenizer.ggml.token_type".to_owned(), Value::Array(kinds));
        put("tokenizer.ggml.tokens".to_owned(), Value::Array(tokens.into_iter().map(Value::String).collect()));
        // At least one merge: an empty array has no element type.
        put("tokenizer.ggml.merges".to_owned(), Value::Array(vec![Value::String("! !".to_owned())]));
        put("tokenizer.ggml.eos_token_id".to_owned(), Value::U32(end as u32));
        let template = "{% for m in messages %}{{ m.content }}{% endfor %}";
        put("tokenizer.chat_template".to_owned(), Value::String(template.to_owned()));
        all
    }

    fn tensors(&self) -> Result<Vec<(String, QTensor)>> {
        let (hidden, wide) = (self.hidden, self.feed_forward);
        let (queries, keys) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let deviation = |cols: usize| 1.0 / (cols as f32).sqrt();
        let mut seed = 0;
        let mut next = || {
            seed += 1;
            seed
        };
        let matrix =
            |rows, cols, format, seed| random_matrix(rows, cols, deviation(cols), format, self.random_rows, seed);
        let embedding = random_matrix(self.vocabulary, hidden, 0.5, self.embedding, self.random_rows, next())?;
        let mut all = vec![
            ("token_embd.weight".to_owned(), embedding),
            ("output_norm.weight".to_owned(), random_vector(hidden, next())?),
        ];
        if let Some(format) = self.output {
            all.push(("output.weight".to_owned(), matrix(self.vocabulary, hidden, format, next())?));
        }
        let gemma = self.family.starts_with("gemma");
        for layer in 0..self.layers {
            let mut matrices = vec![("attn_output", hidden, queries)];
            let mut vectors = vec![("attn_norm", hidden), ("ffn_norm", hidden)];
            if self.family == "phi3" {
                matrices.push(("attn_qkv", queries + 2 * keys, hidden));
            } else {
                matrices.extend([("attn_q", queries, hidden), ("attn_k", keys, hidden), ("attn_v", keys, hidden)]);
            }
            match self.experts {
                Some((count, _)) => {
                    all.push((
                        format!("blk.{layer}.ffn_gate_inp.weight"),
                        matrix(count, hidden, GgmlDType::F32, next())?,
                    ));
                    for (name, rows, cols) in [
                        ("ffn_gate_exps", wide, hidden),
                        ("ffn_up_exps", wide, hidden),
                        ("ffn_down_exps", hidden, wide),
                    ] {
                        let stacked = matrix(count * rows, cols, self.format, next())?;
                        let tensor = reshaped(&stacked, vec![count, rows, cols])?;
                        all.push((format!("blk.{layer}.{name}.weight"), tensor));
                    }
                }
                None if self.family == "phi3" => {
                    matrices.extend([("ffn_down", hidden, wide), ("ffn_up", 2 * wide, hidden)]);
                }
                None => {
                    let gate_up = [("ffn_gate", wide, hidden), ("ffn_up", wide, hidden)];
                    matrices.extend([("ffn_down", hidden, wide)].into_iter().chain(gate_up));
                }
            }
            if gemma {
                vectors.extend([("post_attention_norm", hidden), ("post_ffw_norm", hidden)]);
            }
            if matches!(self.family, "qwen3" | "qwen3moe" | "gemma3") {
                vectors.extend([("attn_q_norm", self.head_dim), ("attn_k_norm", self.head_dim)]);
            }
            for (name, rows, cols) in matrices {
                all.push((format!("blk.{layer}.{name}.weight"), matrix(rows, cols, self.format, next())?));
            }
            for (name, length) in vectors {
                all.push((format!("blk.{layer}.{name}.weight"), random_vector(length, next())?));
            }
            if self.family == "qwen2" {
                for (name, length) in [("attn_q", queries), ("attn_k", keys), ("attn_v", keys)] {
                    all.push((format!("blk.{layer}.{name}.bias"), random_vector(length, next())?));
                }
            }
        }
        Ok(all)
    }
}
