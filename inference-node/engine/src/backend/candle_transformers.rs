//! Model families that run in candle-transformers: on the CPU, one sequence at a time.
//!
//! A candle-transformers model holds the keys and values of one sequence internally and cannot rewind them. So there is
//! no prefix cache, no speculation and no batching, and each token copies the whole cache: these families run, but
//! slowly. A family is added only when its logits and its text match those of transformers (see tests/fixtures).
//! Settings in config.json that candle-transformers would ignore are refused.

use std::cell::RefCell;
use std::collections::HashMap;

use candle_core::{DType, Device, Result, Tensor, bail};
use candle_nn::VarBuilder;
use candle_transformers::models::{olmo2, starcoder2};
use cfq_memory::{BlockId, ModelShape};
use serde_json::Value;

use crate::backend::forward::{BatchEntry, ForwardFailure, ForwardModel};
use crate::kv::{BlockMemory, BlockValues, KV_BLOCK_TOKENS, KvPool};
use crate::model::file::ModelFile;
use crate::model::gguf::HeaderError;
use crate::model::safetensors::ModelFolder;
use crate::model::unsupported_config;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CandleFamily {
    StarCoder2,
    Olmo2,
}

/// Configuration of a model that runs in candle-transformers, from config.json.
#[derive(Debug, Clone)]
pub struct CandleTransformersConfig {
    family: CandleFamily,
    /// config.json in the form that candle-transformers expects: with the limited context and a top-level rope_theta.
    config: Value,
    /// Sizes of the model; the context is limited to the sliding window.
    pub shape: ModelShape,
}

impl CandleTransformersConfig {
    /// Reads and checks the configuration; `None` if the model is of another family.
    ///
    /// # Errors
    /// If a size is missing or inconsistent, or candle-transformers would ignore a setting.
    pub fn read(file: &ModelFile) -> std::result::Result<Option<Self>, HeaderError> {
        let ModelFile::Folder(folder) = file else { return Ok(None) };
        let family = match file.architecture() {
            "starcoder2" => CandleFamily::StarCoder2,
            "olmo2" => CandleFamily::Olmo2,
            _ => return Ok(None),
        };
        let number = |key: &str, max: u64| {
            let number = file.config(key).and_then(Value::as_u64).filter(|n| (1..=max).contains(n));
            number.ok_or_else(|| folder.unsupported(format!("{key} is missing, zero or above {max}")))
        };
        let (hidden, heads) = (number("hidden_size", 1 << 17)?, number("num_attention_heads", 1 << 12)?);
        let (kv_heads, head_dim) = (number("num_key_value_heads", heads)?, hidden / heads);
        let divisible = hidden.is_multiple_of(heads) && heads.is_multiple_of(kv_heads) && head_dim.is_multiple_of(2);
        if !divisible || head_dim == 0 || head_dim > 1 << 10 {
            let what = format!("{heads} heads with {kv_heads} KV heads are not valid for a hidden size of {hidden}");
            return Err(folder.unsupported(what));
        }
        // candle-transformers ignores the sliding window, so the context is limited to it.
        let window = file.config("sliding_window").and_then(Value::as_u64).unwrap_or(u64::MAX);
        let vocabulary = number("vocab_size", 1 << 24)?;
        if file.tensor("model.embed_tokens.weight").is_none_or(|embedding| embedding.dims != [vocabulary, hidden]) {
            return Err(folder.unsupported(format!("it has no embedding matrix of {vocabulary} x {hidden}")));
        }
        let shape = ModelShape {
            layers: number("num_hidden_layers", 1_000)?,
            heads,
            kv_heads,
            head_dim,
            hidden,
            feed_forward: number("intermediate_size", 1 << 20)?,
            vocabulary,
            context: number("max_position_embeddings", 1 << 24)?.min(window.max(1)),
        };
        check_config(family, file, folder)?;
        let mut config = folder.config.clone();
        let context = Value::from(shape.context);
        for (key, value) in [("max_position_embeddings", context), ("rope_theta", rope_theta(file))] {
            config[key] = value;
        }
        Ok(Some(Self { family, config, shape }))
    }

    /// Upper bound of the activations of a forward pass over `rows` tokens, in bytes. It includes what a layer of
    /// candle-transformers holds temporarily: the keys and values repeated for every query head, and three copies of
    /// the attention scores.
    pub fn activation_bytes(&self, rows: u64) -> u64 {
        let s = &self.shape;
        let product = |factors: &[u64]| factors.iter().fold(4u64, |all, factor| all.saturating_mul(*factor));
        let repeated = product(&[2, 2, s.heads, s.head_dim, s.context]);
        let scores = product(&[3, s.heads, rows, s.context]);
        s.activations(rows, 1).saturating_add(repeated).saturating_add(scores)
    }

    /// Size of the RoPE tables of all positions, in bytes, including the temporary values while the tables are
    /// computed.
    pub fn rope_table_bytes(&self) -> u64 {
        [4, 4, self.shape.context, self.shape.head_dim].into_iter().fold(1, u64::saturating_mul)
    }
}

/// Refuses settings that candle-transformers would ignore.
fn check_config(family: CandleFamily, file: &ModelFile, folder: &ModelFolder) -> std::result::Result<(), HeaderError> {
    unsupported_config::check_common(file)?;
    for key in ["rope_scaling", "rope_parameters"] {
        for (name, value) in file.config(key).and_then(Value::as_object).into_iter().flatten() {
            let known = match name.as_str() {
                "rope_theta" => value.is_number(),
                "rope_type" | "type" => value == "default",
                _ => false,
            };
            if !known {
                let what = format!("{key}.{name} is {value}, which is not supported for this architecture");
                return Err(folder.unsupported(what));
            }
        }
    }
    let tied = file.config("tie_word_embeddings").and_then(Value::as_bool);
    match family {
        CandleFamily::StarCoder2 if tied == Some(false) => {
            let what = "its output matrix is not tied to its embedding, which is not supported for this architecture";
            Err(folder.unsupported(what))
        }
        CandleFamily::Olmo2 if file.config("clip_qkv").is_some() => {
            Err(folder.unsupported("clip_qkv is not supported for this architecture"))
        }
        CandleFamily::StarCoder2 | CandleFamily::Olmo2 => Ok(()),
    }
}

fn rope_theta(file: &ModelFile) -> Value {
    let named = file.config("rope_theta").or_else(|| file.config("rope_parameters.rope_theta"));
    named.cloned().unwrap_or_else(|| Value::from(10_000.0))
}

enum Forward {
    StarCoder2(starcoder2::Model),
    Olmo2(olmo2::Model),
}

/// A loaded model that runs in candle-transformers.
pub struct CandleModel {
    state: RefCell<CandleState>,
    shape: ModelShape,
    bytes: usize,
}

struct CandleState {
    forward: Forward,
    /// Number of tokens whose keys and values the model holds.
    computed: usize,
}

impl CandleModel {
    /// Loads the weights, converted to F32.
    ///
    /// # Errors
    /// candle's error.
    pub fn load(file: &ModelFile, config: &CandleTransformersConfig) -> Result<Self> {
        let ModelFile::Folder(folder) = file else { bail!("the model is not a folder of safetensors files") };
        let names = folder.tensors.keys().cloned();
        let tensors: HashMap<String, Tensor> =
            names.map(|name| folder.tensor(&name).map(|tensor| (name, tensor))).collect::<Result<_>>()?;
        let bytes = tensors.values().map(|tensor| tensor.elem_count() * DType::F32.size_in_bytes()).sum();
        let weights = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
        let json = config.config.clone();
        let forward = match config.family {
            CandleFamily::StarCoder2 => Forward::StarCoder2(starcoder2::Model::new(&parse(json)?, weights)?),
            CandleFamily::Olmo2 => Forward::Olmo2(olmo2::Model::new(&parse(json)?, weights)?),
        };
        Ok(Self { state: RefCell::new(CandleState { forward, computed: 0 }), shape: config.shape, bytes })
    }

    /// Actual size of the loaded weights in bytes (not the estimate).
    pub fn stored_bytes(&self) -> usize {
        self.bytes
    }

    /// Creates a KV pool that only counts positions; the keys and values are inside the model.
    pub fn pool(&self, tokens: u64) -> KvPool<ModelOwnedKv> {
        KvPool::with_memory(ModelOwnedKv, tokens as usize / KV_BLOCK_TOKENS).without_prefix_cache()
    }
}

fn parse<T: serde::de::DeserializeOwned>(config: Value) -> Result<T> {
    serde_json::from_value(config).map_err(|error| candle_core::Error::wrap(error).context("config.json"))
}

impl CandleState {
    fn compute(&mut self, tokens: &[u32], past: usize) -> Result<Tensor> {
        if past == 0 {
            match &mut self.forward {
                Forward::StarCoder2(model) => model.clear_kv_cache(),
                Forward::Olmo2(model) => model.clear_kv_cache(),
            }
        } else if past != self.computed {
            bail!("the sequence has {past} computed tokens, but the model's KV cache holds {}", self.computed)
        }
        // Reset first: if the pass fails, the model's keys and values are undefined.
        self.computed = 0;
        let input = Tensor::new(tokens, &Device::Cpu)?.unsqueeze(0)?;
        let scores = match &mut self.forward {
            Forward::StarCoder2(model) => model.forward(&input, past)?,
            Forward::Olmo2(model) => model.forward(&input, past)?,
        };
        self.computed = past + tokens.len();
        scores.flatten_to(1)
    }
}

impl ForwardModel for CandleModel {
    type Memory = ModelOwnedKv;

    const REWINDS: bool = false;

    fn failure(&self, _: &candle_core::Error) -> ForwardFailure {
        ForwardFailure::Pass
    }

    fn shape(&self) -> &ModelShape {
        &self.shape
    }

    fn original_context(&self) -> Option<u64> {
        None
    }

    fn forward(&self, _: &mut KvPool<ModelOwnedKv>, batch: &[BatchEntry<'_>], _: bool) -> Result<Option<Tensor>> {
        let [entry] = batch else { bail!("a batch has {} sequences, but this model runs one at a time", batch.len()) };
        let scores = self.state.borrow_mut().compute(entry.tokens, entry.kv.len())?;
        match entry.scored {
            0 => Ok(None),
            1 => Ok(Some(scores)),
            more => bail!("the logits of {more} tokens are needed, but a pass of this model returns those of one"),
        }
    }
}

/// Placeholder for KV memory: the keys and values are inside the model, where they cannot be accessed.
pub struct ModelOwnedKv;

impl BlockMemory for ModelOwnedKv {
    fn prepare(&mut self, _: BlockId) {}

    fn copy(&mut self, _: BlockId, _: BlockId, _: usize) -> Result<()> {
        bail!("this backend cannot copy KV blocks: the candle model manages its own KV cache")
    }

    fn read_block(&self, _: BlockId) -> Result<BlockValues> {
        bail!("this backend cannot read KV blocks: the candle model manages its own KV cache")
    }

    fn write_block(&mut self, _: BlockId, _: &BlockValues) -> Result<()> {
        bail!("this backend cannot write KV blocks: the candle model manages its own KV cache")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{CANDLE_TRANSFORMERS_FAMILIES, folder};
    use crate::parity::Case;

    fn load(family: &str) -> (CandleModel, Vec<Case>) {
        let folder = folder(family);
        let file = ModelFile::read(&folder).unwrap();
        let model = CandleModel::load(&file, &CandleTransformersConfig::read(&file).unwrap().unwrap()).unwrap();
        let expected = std::fs::read_to_string(folder.join("expected.json")).unwrap();
        (model, serde_json::from_str(&expected).unwrap())
    }

    #[test]
    fn logits_and_text_match_transformers_for_any_chunking() {
        for family in CANDLE_TRANSFORMERS_FAMILIES {
            let (model, cases) = load(family);
            let mut pool = model.pool(512);
            for (case, chunk) in cases.iter().flat_map(|case| [(case, usize::MAX), (case, 7)]) {
                let mut tokens = case.ids.clone();
                let mut kv = pool.begin(&tokens, false, false);
                assert_eq!(kv.len(), 0, "nothing is shared");
                for at in 0..case.greedy.len() {
                    let mut scores = None;
                    while kv.len() < tokens.len() {
                        let take = (tokens.len() - kv.len()).min(chunk);
                        assert!(pool.grow(&mut kv, take));
                        let rows = BatchEntry { kv: &kv, tokens: &tokens[kv.len()..][..take], scored: 1 };
                        scores = model.forward(&mut pool, &[rows], false).unwrap();
                        pool.advance(&mut kv, &tokens, take);
                    }
                    let scores = scores.unwrap().to_vec2::<f32>().unwrap().remove(0);
                    if at == 0 {
                        let differences = scores.iter().zip(&case.logits).map(|(a, b)| (a - b).abs());
                        let difference = differences.fold(0.0, f32::max);
                        assert!(difference < 1e-3, "{family} {:?}: {difference}", case.text);
                    }
                    let best = scores.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0 as u32;
                    assert_eq!(best, case.greedy[at], "{family} {:?} token {at} in chunks of {chunk}", case.text);
                    tokens.push(best);
                }
                pool.end(kv, &tokens);
            }
        }
    }

    #[test]
    fn resuming_a_sequence_after_another_one_is_refused() {
        let (model, cases) = load("olmo2");
        let mut pool = model.pool(512);
        let compute = |kv: &_, tokens: &[u32], pool: &mut _| {
            model.forward(pool, &[BatchEntry { kv, tokens, scored: 1 }], false).map(|_| ()).map_err(|e| e.to_string())
        };
        let ids = &cases[2].ids[..20];
        let (mut first, mut second) = (pool.begin(ids, false, false), pool.begin(ids, false, false));
        assert!(pool.grow(&mut first, 20) && pool.grow(&mut second, 20));
        compute(&first, ids, &mut pool).unwrap();
        pool.advance(&mut first, ids, 20);
        compute(&second, &ids[..5], &mut pool).unwrap();
        let error = compute(&first, &ids[..1], &mut pool).unwrap_err();
        assert!(error.contains("the sequence has 20 computed tokens, but the model's KV cache holds 5"), "{error}");
    }

    #[test]
    fn unsupported_settings_are_refused() {
        let read = |family: &str, key: &str, value: Value| {
            let work = tempfile::tempdir().unwrap();
            for entry in std::fs::read_dir(folder(family)).unwrap().flatten() {
                std::fs::copy(entry.path(), work.path().join(entry.file_name())).unwrap();
            }
            let path = work.path().join("config.json");
            let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
            config[key] = value;
            std::fs::write(&path, config.to_string()).unwrap();
            let file = ModelFile::read(work.path()).unwrap();
            let config = CandleTransformersConfig::read(&file);
            config.map(|config| config.unwrap().shape.context).map_err(|error| error.to_string())
        };
        assert_eq!(read("starcoder2", "sliding_window", 100.into()), Ok(100), "limited to the window");
        assert_eq!(read("starcoder2", "sliding_window", Value::Null), Ok(512));
        let yarn = serde_json::json!({ "rope_type": "yarn", "factor": 4.0 });
        for (family, key, value, word) in [
            ("starcoder2", "tie_word_embeddings", false.into(), "output matrix"),
            ("olmo2", "clip_qkv", 8.0.into(), "clip_qkv"),
            ("olmo2", "rope_parameters", yarn, "yarn"),
            ("olmo2", "rope_scaling", serde_json::json!({ "factor": 4.0 }), "factor"),
            ("olmo2", "quantization_config", serde_json::json!({ "quant_method": "awq" }), "awq"),
            ("starcoder2", "is_encoder_decoder", true.into(), "is_encoder_decoder"),
            ("olmo2", "num_attention_heads", 6.into(), "6 heads with 2 KV heads are not valid"),
            ("olmo2", "num_key_value_heads", 0.into(), "num_key_value_heads"),
            ("olmo2", "num_key_value_heads", 3.into(), "with 3 KV heads are not valid"),
            ("olmo2", "num_hidden_layers", 1_000_000_000_000u64.into(), "num_hidden_layers"),
            ("olmo2", "hidden_size", 0.into(), "hidden_size"),
            ("olmo2", "hidden_size", 128.into(), "embedding"),
            ("olmo2", "max_position_embeddings", u64::MAX.into(), "max_position_embeddings"),
            ("olmo2", "vocab_size", Value::Null, "vocab_size"),
        ] {
            let error = read(family, key, value).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
    }
}
