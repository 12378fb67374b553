//! Families without a forward pass of our own run in candle-transformers', on the CPU, one sequence at a time.
//!
//! Its models keep the keys and values of one sequence inside themselves, and nothing can be taken back of them. So there is
//! no prefix to share, no guess to verify and nobody beside; each token copies all that was kept. It is the way to run a
//! model at all, not the way to run it well. A family is listed once its scores and its text are those of transformers (see
//! tests/fixtures); what its file says and candle-transformers would ignore is refused.

use std::cell::RefCell;
use std::collections::HashMap;

use candle_core::{DType, Device, Result, Tensor, bail};
use candle_nn::VarBuilder;
use candle_transformers::models::{olmo2, starcoder2};
use cfq_memory::{BlockId, Shape};
use serde_json::Value;

use crate::engine::candle::kv::{BLOCK, BlockMemory, KvPool, Values};
use crate::engine::candle::model::{Model, Network, Rows, Trouble};
use crate::engine::candle::settings;
use crate::models::file::ModelFile;
use crate::models::header::HeaderError;
use crate::models::safetensors::Folder;

/// As people should read them where theirs is not among those that run well.
pub const KNOWN: &str = "starcoder2 and olmo2";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Family {
    StarCoder2,
    Olmo2,
}

/// What config.json says of a model of one of these families.
#[derive(Debug, Clone)]
pub struct Other {
    family: Family,
    /// In the words of candle-transformers.
    config: Value,
    pub shape: Shape,
}

impl Other {
    /// `None`: the file is of no such family.
    pub fn of(file: &ModelFile) -> std::result::Result<Option<Self>, HeaderError> {
        let ModelFile::Folder(folder) = file else { return Ok(None) };
        let family = match file.architecture() {
            "starcoder2" => Family::StarCoder2,
            "olmo2" => Family::Olmo2,
            _ => return Ok(None),
        };
        let number = |key: &str, most: u64| {
            let number = file.config(key).and_then(Value::as_u64).filter(|n| (1..=most).contains(n));
            number.ok_or_else(|| folder.unsupported(format!("{key} is missing, zero or above {most}")))
        };
        let (hidden, heads) = (number("hidden_size", 1 << 17)?, number("num_attention_heads", 1 << 12)?);
        let (kv_heads, head_dim) = (number("num_key_value_heads", heads)?, hidden / heads);
        let divide = hidden.is_multiple_of(heads) && heads.is_multiple_of(kv_heads) && head_dim.is_multiple_of(2);
        if !divide || head_dim == 0 || head_dim > 1 << 10 {
            let what = format!("{heads} heads, {kv_heads} for keys, do not divide a width of {hidden}");
            return Err(folder.unsupported(what));
        }
        // Of longer sequences every token would see what a window should hide.
        let window = file.config("sliding_window").and_then(Value::as_u64).unwrap_or(u64::MAX);
        let vocabulary = number("vocab_size", 1 << 24)?;
        if file.tensor("model.embed_tokens.weight").is_none_or(|embedding| embedding.dims != [vocabulary, hidden]) {
            return Err(folder.unsupported(format!("it has no embedding of {vocabulary} tokens in {hidden} values")));
        }
        let shape = Shape {
            layers: number("num_hidden_layers", 1_000)?,
            heads,
            kv_heads,
            head_dim,
            hidden,
            feed_forward: number("intermediate_size", 1 << 20)?,
            vocabulary,
            context: number("max_position_embeddings", 1 << 24)?.min(window.max(1)),
        };
        check(family, file, folder)?;
        let mut config = folder.config.clone();
        for (key, value) in [("max_position_embeddings", Value::from(shape.context)), ("rope_theta", theta(file))] {
            config[key] = value;
        }
        Ok(Some(Self { family, config, shape }))
    }

    /// Bytes of what the model computes beside its keys and values, at the most: each layer spreads the keys and values over
    /// all heads, and holds the scores of all rows three times.
    pub fn activations(&self, rows: u64) -> u64 {
        let s = &self.shape;
        let product = |factors: &[u64]| factors.iter().fold(4u64, |all, factor| all.saturating_mul(*factor));
        let spread = product(&[2, 2, s.heads, s.head_dim, s.context]);
        let scores = product(&[3, s.heads, rows, s.context]);
        s.activations(rows, 1).saturating_add(spread).saturating_add(scores)
    }

    /// Cosines and sines of all positions, made in several steps.
    pub fn rotations(&self) -> u64 {
        [4, 4, self.shape.context, self.shape.head_dim].into_iter().fold(1, u64::saturating_mul)
    }
}

/// Refuses what would be ignored.
fn check(family: Family, file: &ModelFile, folder: &Folder) -> std::result::Result<(), HeaderError> {
    settings::check_any(file)?;
    for key in ["rope_scaling", "rope_parameters"] {
        for (name, value) in file.config(key).and_then(Value::as_object).into_iter().flatten() {
            let known = match name.as_str() {
                "rope_theta" => value.is_number(),
                "rope_type" | "type" => value == "default",
                _ => false,
            };
            if !known {
                let what = format!("{name} of its {key} is {value}, which is not known for this architecture");
                return Err(folder.unsupported(what));
            }
        }
    }
    let tied = file.config("tie_word_embeddings").and_then(Value::as_bool);
    match family {
        Family::StarCoder2 if tied == Some(false) => {
            Err(folder
                .unsupported("its output matrix is not its embedding's, which is not known for this architecture"))
        }
        Family::Olmo2 if file.config("clip_qkv").is_some() => {
            Err(folder.unsupported("clip_qkv is not known for this architecture"))
        }
        Family::StarCoder2 | Family::Olmo2 => Ok(()),
    }
}

fn theta(file: &ModelFile) -> Value {
    let named = file.config("rope_theta").or_else(|| file.config("rope_parameters.rope_theta"));
    named.cloned().unwrap_or_else(|| Value::from(10_000.0))
}

enum Forward {
    StarCoder2(starcoder2::Model),
    Olmo2(olmo2::Model),
}

/// One that is loaded.
pub struct OtherModel {
    inner: RefCell<Inner>,
    shape: Shape,
    bytes: usize,
}

struct Inner {
    forward: Forward,
    /// Tokens whose keys and values it has.
    computed: usize,
}

impl OtherModel {
    /// In F32, whatever the file holds.
    pub fn load(file: &ModelFile, other: &Other) -> Result<Self> {
        let ModelFile::Folder(folder) = file else { bail!("it is not a folder") };
        let names = folder.tensors.keys().cloned();
        let tensors: HashMap<String, Tensor> =
            names.map(|name| folder.tensor(&name).map(|tensor| (name, tensor))).collect::<Result<_>>()?;
        let bytes = tensors.values().map(|tensor| tensor.elem_count() * DType::F32.size_in_bytes()).sum();
        let weights = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
        let config = other.config.clone();
        let forward = match other.family {
            Family::StarCoder2 => Forward::StarCoder2(starcoder2::Model::new(&read(config)?, weights)?),
            Family::Olmo2 => Forward::Olmo2(olmo2::Model::new(&read(config)?, weights)?),
        };
        Ok(Self { inner: RefCell::new(Inner { forward, computed: 0 }), shape: other.shape, bytes })
    }

    pub fn stored_bytes(&self) -> usize {
        self.bytes
    }

    /// It counts positions; what they hold is in the model.
    pub fn pool(&self, tokens: u64) -> KvPool<Inside> {
        KvPool::over(Inside, tokens as usize / BLOCK).unshared()
    }
}

fn read<T: serde::de::DeserializeOwned>(config: Value) -> Result<T> {
    serde_json::from_value(config).map_err(|error| candle_core::Error::wrap(error).context("config.json"))
}

impl Inner {
    fn compute(&mut self, tokens: &[u32], before: usize) -> Result<Tensor> {
        if before == 0 {
            match &mut self.forward {
                Forward::StarCoder2(model) => model.clear_kv_cache(),
                Forward::Olmo2(model) => model.clear_kv_cache(),
            }
        } else if before != self.computed {
            bail!("{before} tokens were computed, and the model has {}", self.computed)
        }
        // Nothing is known of it if this fails.
        self.computed = 0;
        let input = Tensor::new(tokens, &Device::Cpu)?.unsqueeze(0)?;
        let scores = match &mut self.forward {
            Forward::StarCoder2(model) => model.forward(&input, before)?,
            Forward::Olmo2(model) => model.forward(&input, before)?,
        };
        self.computed = before + tokens.len();
        scores.flatten_to(1)
    }
}

impl Network for OtherModel {
    type Memory = Inside;

    const REWINDS: bool = false;

    fn trouble(&self, _: &candle_core::Error) -> Trouble {
        Trouble::Pass
    }

    fn shape(&self) -> &Shape {
        &self.shape
    }

    fn original(&self) -> Option<u64> {
        None
    }

    fn forward(&self, _: &mut KvPool<Inside>, parts: &[Rows<'_>], _: bool) -> Result<Option<Tensor>> {
        let [part] = parts else { bail!("{} sequences in a pass for one", parts.len()) };
        let scores = self.inner.borrow_mut().compute(part.tokens, part.kv.len())?;
        match part.scored {
            0 => Ok(None),
            1 => Ok(Some(scores)),
            more => bail!("{more} scores of a pass that has one"),
        }
    }

    fn into_kept(self) -> Option<Model> {
        None
    }
}

/// The memory of keys and values that are inside a model.
pub struct Inside;

impl BlockMemory for Inside {
    fn prepare(&mut self, _: BlockId) {}

    fn copy(&mut self, _: BlockId, _: BlockId, _: usize) -> Result<()> {
        bail!("keys and values inside a model cannot be copied")
    }

    fn take_out(&self, _: BlockId) -> Result<Values> {
        bail!("keys and values inside a model cannot be taken out")
    }

    fn put_back(&mut self, _: BlockId, _: &Values) -> Result<()> {
        bail!("keys and values inside a model cannot be put back")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::candle::parity::{Case, folder};

    const FAMILIES: [&str; 2] = ["starcoder2", "olmo2"];

    fn load(family: &str) -> (OtherModel, Vec<Case>) {
        let folder = folder(family);
        let file = ModelFile::read(&folder).unwrap();
        let model = OtherModel::load(&file, &Other::of(&file).unwrap().unwrap()).unwrap();
        let expected = std::fs::read_to_string(folder.join("expected.json")).unwrap();
        (model, serde_json::from_str(&expected).unwrap())
    }

    #[test]
    fn scores_and_text_are_those_of_transformers_however_a_prompt_is_cut() {
        for family in FAMILIES {
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
                        let rows = Rows { kv: &kv, tokens: &tokens[kv.len()..][..take], scored: 1 };
                        scores = model.forward(&mut pool, &[rows], false).unwrap();
                        pool.advance(&mut kv, &tokens, take);
                    }
                    let scores = scores.unwrap().to_vec2::<f32>().unwrap().remove(0);
                    if at == 0 {
                        let apart = scores.iter().zip(&case.logits).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                        assert!(apart < 1e-3, "{family} {:?}: {apart}", case.text);
                    }
                    let best = scores.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0 as u32;
                    assert_eq!(best, case.greedy[at], "{family} {:?} token {at} in pieces of {chunk}", case.text);
                    tokens.push(best);
                }
                pool.end(kv, &tokens);
            }
        }
    }

    #[test]
    fn keys_and_values_of_another_sequence_are_not_gone_on_with() {
        let (model, cases) = load("olmo2");
        let mut pool = model.pool(512);
        let compute = |kv: &_, tokens: &[u32], pool: &mut _| {
            model.forward(pool, &[Rows { kv, tokens, scored: 1 }], false).map(|_| ()).map_err(|e| e.to_string())
        };
        let ids = &cases[2].ids[..20];
        let (mut first, mut second) = (pool.begin(ids, false, false), pool.begin(ids, false, false));
        assert!(pool.grow(&mut first, 20) && pool.grow(&mut second, 20));
        compute(&first, ids, &mut pool).unwrap();
        pool.advance(&mut first, ids, 20);
        compute(&second, &ids[..5], &mut pool).unwrap();
        let said = compute(&first, &ids[..1], &mut pool).unwrap_err();
        assert!(said.contains("20 tokens were computed, and the model has 5"), "{said}");
    }

    #[test]
    fn what_would_be_ignored_is_refused() {
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
            Other::of(&file).map(|other| other.unwrap().shape.context).map_err(|error| error.to_string())
        };
        assert_eq!(read("starcoder2", "sliding_window", 100.into()), Ok(100), "no longer sequences");
        assert_eq!(read("starcoder2", "sliding_window", Value::Null), Ok(512));
        let yarn = serde_json::json!({ "rope_type": "yarn", "factor": 4.0 });
        for (family, key, value, word) in [
            ("starcoder2", "tie_word_embeddings", false.into(), "output matrix"),
            ("olmo2", "clip_qkv", 8.0.into(), "clip_qkv"),
            ("olmo2", "rope_parameters", yarn, "yarn"),
            ("olmo2", "rope_scaling", serde_json::json!({ "factor": 4.0 }), "factor"),
            ("olmo2", "quantization_config", serde_json::json!({ "quant_method": "awq" }), "awq"),
            ("starcoder2", "is_encoder_decoder", true.into(), "is_encoder_decoder"),
            ("olmo2", "num_attention_heads", 6.into(), "divide"),
            ("olmo2", "num_key_value_heads", 0.into(), "num_key_value_heads"),
            ("olmo2", "num_key_value_heads", 3.into(), "divide"),
            ("olmo2", "num_hidden_layers", 1_000_000_000_000u64.into(), "num_hidden_layers"),
            ("olmo2", "hidden_size", 0.into(), "hidden_size"),
            ("olmo2", "hidden_size", 128.into(), "embedding"),
            ("olmo2", "max_position_embeddings", u64::MAX.into(), "max_position_embeddings"),
            ("olmo2", "vocab_size", Value::Null, "vocab_size"),
        ] {
            let said = read(family, key, value).unwrap_err();
            assert!(said.contains(word), "{said}");
        }
    }
}
