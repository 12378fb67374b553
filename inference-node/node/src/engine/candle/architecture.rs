//! What makes one family of models differ from another, as data.
//!
//! A decoder-only transformer of our time is one forward pass with a few switches. [`FAMILIES`] lists how each family sets
//! them; sizes, bases and windows come from the model's own file. A file that says something this build would have to
//! ignore is refused, by name: a model that runs almost right is worse than one that does not.

use cfq_memory::{Shape, WeightSum};

use crate::engine::candle::linear;
use crate::engine::candle::others;
use crate::engine::candle::rope::{Pairs, Rope};
use crate::engine::candle::settings::{self, Does};
use crate::engine::candle::stretch::{Long, ropes};
use crate::engine::candle::tensors::Part;
use crate::models::file::{Key, ModelFile, TensorFacts};
use crate::models::header::HeaderError;

/// The switches of one family.
#[derive(Debug)]
struct Family {
    gguf: &'static str,
    /// `model_type` in config.json.
    config: &'static [&'static str],
    /// How the family's GGUF files arrange rotated pairs; the hub's layout always has halves.
    pairs: Pairs,
    /// Queries, keys and values in one matrix, gate and up in another.
    fused: bool,
    qkv_bias: bool,
    head_norms: bool,
    /// Norms after attention and after the feed-forward too.
    post_norms: bool,
    /// GELU by its tanh approximation, instead of SiLU.
    gelu: bool,
    /// Embeddings times the root of the width, and norms stored minus one in the hub's layout.
    gemma: bool,
    /// Every so many layers one sees everything and the others a window; 1: the window, if any, is everybody's.
    window_every: u64,
    /// Feed-forwards are mixtures of experts.
    experts: bool,
}

const PLAIN: Family = Family {
    gguf: "llama",
    config: &["llama", "mistral"],
    pairs: Pairs::Halves,
    fused: false,
    qkv_bias: false,
    head_norms: false,
    post_norms: false,
    gelu: false,
    gemma: false,
    window_every: 1,
    experts: false,
};

const GEMMA: Family = Family { post_norms: true, gelu: true, gemma: true, ..PLAIN };

const FAMILIES: [Family; 7] = [
    Family { pairs: Pairs::Neighbours, ..PLAIN },
    Family { gguf: "qwen2", config: &["qwen2"], qkv_bias: true, ..PLAIN },
    Family { gguf: "qwen3", config: &["qwen3"], head_norms: true, ..PLAIN },
    Family { gguf: "qwen3moe", config: &["qwen3_moe"], head_norms: true, experts: true, ..PLAIN },
    Family { gguf: "phi3", config: &["phi3"], fused: true, ..PLAIN },
    Family { gguf: "gemma2", config: &["gemma2"], window_every: 2, ..GEMMA },
    Family { gguf: "gemma3", config: &["gemma3_text"], head_norms: true, window_every: 6, ..GEMMA },
];

/// What people should read when theirs is not among them.
const KNOWN: &str = "llama (with Mistral, SmolLM2 and DeepSeek-distill), qwen2, qwen3 and its mixtures, phi3, gemma2 and gemma3 (text only: a folder of type gemma3_text, or a GGUF file)";

const fn key(gguf: &'static str, config: &'static str) -> Key {
    Key { gguf, config }
}

const LAYERS: Key = key("block_count", "num_hidden_layers");
const HIDDEN: Key = key("embedding_length", "hidden_size");
const HEADS: Key = key("attention.head_count", "num_attention_heads");
const KV_HEADS: Key = key("attention.head_count_kv", "num_key_value_heads");
const HEAD_DIM: Key = key("attention.key_length", "head_dim");
const VALUE_DIM: Key = key("attention.value_length", "head_dim");
const FEED_FORWARD: Key = key("feed_forward_length", "intermediate_size");
const CONTEXT: Key = key("context_length", "max_position_embeddings");
const EPSILON: Key = key("attention.layer_norm_rms_epsilon", "rms_norm_eps");
const WINDOW: Key = key("attention.sliding_window", "sliding_window");
const ATTENTION_CAP: Key = key("attn_logit_softcapping", "attn_logit_softcapping");
const OUTPUT_CAP: Key = key("final_logit_softcapping", "final_logit_softcapping");
const EXPERTS: Key = key("expert_count", "num_experts");
/// The name newer libraries write.
const LOCAL_EXPERTS: Key = key("expert_count", "num_local_experts");
const EXPERTS_USED: Key = key("expert_used_count", "num_experts_per_tok");
const EXPERT_FEED_FORWARD: Key = key("expert_feed_forward_length", "moe_intermediate_size");

/// Everything the forward pass and the ledger need to know before the weights are read.
#[derive(Debug, Clone)]
pub struct Architecture {
    pub shape: Shape,
    pub epsilon: f32,
    /// What query and key products are multiplied with.
    pub scale: f32,
    /// Scores are squeezed into plus and minus this.
    pub attention_cap: Option<f32>,
    pub output_cap: Option<f32>,
    pub embedding_scale: f32,
    pub pairs: Pairs,
    pub fused: bool,
    pub head_norms: bool,
    pub post_norms: bool,
    pub gelu: bool,
    /// Added to every norm's weights.
    pub norm_offset: f32,
    /// The output matrix is the embedding's.
    pub tied: bool,
    pub layers: Vec<LayerKind>,
    /// Rotations the layers choose from.
    pub ropes: Vec<Rope>,
    /// The rotation for sequences longer than `original` positions, where the file has one (Phi-3).
    pub long: Option<Long>,
    /// Where feed-forwards are mixtures; `shape.feed_forward` is then one expert's.
    pub experts: Option<Experts>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Experts {
    pub count: u32,
    /// Of which a token goes through so many.
    pub used: u32,
    /// The shares of those add up to one.
    pub normalised: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerKind {
    /// Positions back that are seen, the own one included.
    pub window: Option<usize>,
    /// Which of the ropes.
    pub rope: usize,
}

impl Architecture {
    /// Refuses what this build cannot run, before anything is loaded.
    pub fn read(file: &ModelFile) -> Result<Self, HeaderError> {
        let name = file.architecture();
        let family = FAMILIES
            .iter()
            .find(|f| if file.is_gguf() { f.gguf == name } else { f.config.contains(&name) })
            .ok_or_else(|| {
            file.unsupported(format!(
                "its architecture is {name:?}; this version runs {KNOWN}; and on the CPU, one sequence at a \
                     time, folders of {}. Other models can be served by any program \
                     that speaks the OpenAI protocol and named as openai:ENDPOINT/MODEL",
                others::KNOWN
            ))
        })?;
        let shape = shape(file, family)?;
        let experts = experts(file, family)?;
        settings::check(file, Does { gelu: family.gelu, window_every: family.window_every })?;
        let layers = layers(file, family, &shape)?;
        let (ropes, long) = ropes(file, &shape, layers.iter().any(|l| l.rope == 1))?;
        let output = Self::name(file, family.post_norms, Part::Output, 0);
        let tied = match file.config("tie_word_embeddings").and_then(|v| v.as_bool()) {
            Some(false) if file.tensor(&output).is_none() => {
                return Err(file.unsupported(format!("tensor {output} is missing")));
            }
            // A matrix of its own beside it is not used then.
            Some(tied) => tied,
            None => file.tensor(&output).is_none(),
        };
        let architecture = Self {
            epsilon: file.real(EPSILON).ok_or_else(|| missing(file, EPSILON))?,
            scale: scale(file, family, &shape),
            attention_cap: file.real(ATTENTION_CAP),
            output_cap: file.real(OUTPUT_CAP),
            embedding_scale: if family.gemma { (shape.hidden as f32).sqrt() } else { 1.0 },
            pairs: if file.is_gguf() { family.pairs } else { Pairs::Halves },
            fused: family.fused,
            head_norms: family.head_norms,
            post_norms: family.post_norms,
            gelu: family.gelu,
            norm_offset: if family.gemma && !file.is_gguf() { 1.0 } else { 0.0 },
            tied,
            layers,
            ropes,
            long,
            experts,
            shape,
        };
        architecture.check_tensors(file, family)?;
        Ok(architecture)
    }

    fn name(file: &ModelFile, post_norms: bool, part: Part, layer: u64) -> String {
        if file.is_gguf() { part.gguf(layer) } else { part.hub(layer, post_norms).unwrap_or_default() }
    }

    /// What `file` calls a tensor.
    pub fn tensor(&self, file: &ModelFile, part: Part, layer: u64) -> String {
        Self::name(file, self.post_norms, part, layer)
    }

    /// What is known of a part before it is read: of one expert where the file's tensor holds all of them.
    pub fn facts(&self, file: &ModelFile, part: Part, layer: u64) -> Option<TensorFacts> {
        let facts = file.tensor(&self.tensor(file, part, layer))?;
        match part.expert().filter(|_| file.is_gguf()) {
            None => Some(facts),
            Some(_) => match (facts.dims.split_first(), self.experts) {
                (Some((count, dims)), Some(experts)) if *count == u64::from(experts.count) => {
                    Some(TensorFacts { dims: dims.to_vec(), ..facts })
                }
                _ => None,
            },
        }
    }

    /// The matrices of a layer with their (rows, columns).
    fn matrices(&self) -> Vec<(Part, [u64; 2])> {
        let s = &self.shape;
        let (queries, keys) = (s.heads * s.head_dim, s.kv_heads * s.head_dim);
        let output = (Part::AttentionOutput, [s.hidden, queries]);
        if let Some(experts) = self.experts {
            let mut all = vec![
                (Part::Query, [queries, s.hidden]),
                (Part::Key, [keys, s.hidden]),
                (Part::Value, [keys, s.hidden]),
                output,
                (Part::Router, [u64::from(experts.count), s.hidden]),
            ];
            for at in 0..experts.count {
                all.push((Part::ExpertGate(at), [s.feed_forward, s.hidden]));
                all.push((Part::ExpertUp(at), [s.feed_forward, s.hidden]));
                all.push((Part::ExpertDown(at), [s.hidden, s.feed_forward]));
            }
            return all;
        }
        let down = (Part::Down, [s.hidden, s.feed_forward]);
        if self.fused {
            let qkv = (Part::QueryKeyValue, [queries + 2 * keys, s.hidden]);
            return vec![qkv, output, (Part::GateUp, [2 * s.feed_forward, s.hidden]), down];
        }
        vec![
            (Part::Query, [queries, s.hidden]),
            (Part::Key, [keys, s.hidden]),
            (Part::Value, [keys, s.hidden]),
            output,
            (Part::Gate, [s.feed_forward, s.hidden]),
            (Part::Up, [s.feed_forward, s.hidden]),
            down,
        ]
    }

    /// The vectors of a layer with their lengths, and whether the layer cannot do without.
    fn vectors(&self, family: &Family) -> Vec<(Part, u64, bool)> {
        let s = &self.shape;
        let (queries, keys) = (s.heads * s.head_dim, s.kv_heads * s.head_dim);
        let mut all = vec![
            (Part::AttentionNorm, s.hidden, true),
            (Part::FeedForwardNorm, s.hidden, true),
            (Part::AttentionOutputBias, s.hidden, false),
        ];
        if !family.fused {
            let bias = |part, length| (part, length, family.qkv_bias);
            all.extend([bias(Part::QueryBias, queries), bias(Part::KeyBias, keys), bias(Part::ValueBias, keys)]);
        }
        if family.head_norms {
            all.extend([(Part::QueryNorm, s.head_dim, true), (Part::KeyNorm, s.head_dim, true)]);
        }
        if family.post_norms {
            all.extend([(Part::PostAttentionNorm, s.hidden, true), (Part::PostFeedForwardNorm, s.hidden, true)]);
        }
        all
    }

    /// Every tensor that is needed is there with its shape, and none is there that would be ignored.
    fn check_tensors(&self, file: &ModelFile, family: &Family) -> Result<(), HeaderError> {
        let s = &self.shape;
        let mut known = std::collections::HashSet::new();
        let mut expect = |part: Part, layer: u64, dims: &[u64], needed: bool| {
            let name = self.tensor(file, part, layer);
            match self.facts(file, part, layer) {
                None if needed => return Err(file.unsupported(format!("tensor {name} is missing"))),
                Some(facts) if facts.dims != dims => {
                    return Err(file.unsupported(format!("tensor {name} is {:?}, expected {dims:?}", facts.dims)));
                }
                None | Some(_) => {}
            }
            known.insert(name);
            Ok(())
        };
        expect(Part::Embedding, 0, &[s.vocabulary, s.hidden], true)?;
        expect(Part::OutputNorm, 0, &[s.hidden], true)?;
        expect(Part::Output, 0, &[s.vocabulary, s.hidden], false)?;
        for layer in 0..s.layers {
            for (part, dims) in self.matrices() {
                expect(part, layer, &dims, true)?;
            }
            for (part, length, needed) in self.vectors(family) {
                expect(part, layer, &[length], needed)?;
            }
        }
        if file.is_gguf() {
            let half = self.ropes.first().map_or(0, |r| r.frequencies.len() as u64);
            for part in [Part::RopeFactors, Part::RopeFactorsShort, Part::RopeFactorsLong] {
                expect(part, 0, &[half], false)?;
            }
        }
        match file.tensor_names().into_iter().find(|n| !known.contains(*n) && !n.ends_with("rotary_emb.inv_freq")) {
            Some(extra) => {
                Err(file.unsupported(format!("it has a tensor {extra:?}, which this version would have to ignore")))
            }
            None => Ok(()),
        }
    }

    /// The matrices of every layer.
    pub fn matrix_parts(&self) -> Vec<Part> {
        self.matrices().into_iter().map(|(part, _)| part).collect()
    }

    /// What the weights will hold; `None` if a matrix cannot be placed.
    pub fn weights(&self, file: &ModelFile, kernels: cfq_memory::Kernels) -> Option<WeightSum> {
        let mut sum = WeightSum::default();
        let parts = self.matrix_parts();
        let layers = (0..self.shape.layers).flat_map(|l| parts.iter().map(move |p| (*p, l)));
        let output = (!self.tied).then_some((Part::Output, 0));
        for (part, layer) in layers.chain([(Part::Embedding, 0)]).chain(output) {
            sum.add(&linear::plan(&self.facts(file, part, layer)?, kernels)?)?;
        }
        Some(sum)
    }
}

fn missing(file: &ModelFile, key: Key) -> HeaderError {
    file.unsupported(format!("{} is missing", file.name_of(key)))
}

fn shape(file: &ModelFile, family: &Family) -> Result<Shape, HeaderError> {
    let number = |key: Key, most: u64| {
        file.number(key)
            .filter(|n| (1..=most).contains(n))
            .ok_or_else(|| file.unsupported(format!("{} is missing, zero or above {most}", file.name_of(key))))
    };
    let hidden = number(HIDDEN, 1 << 17)?;
    let heads = number(HEADS, 1 << 12)?;
    let kv_heads = if file.number(KV_HEADS).is_some() { number(KV_HEADS, heads)? } else { heads };
    let head_dim = file.number(HEAD_DIM).unwrap_or(hidden / heads);
    let fits = heads.is_multiple_of(kv_heads) && head_dim > 0 && head_dim <= 1 << 10 && head_dim.is_multiple_of(2);
    if !fits || file.number(VALUE_DIM).is_some_and(|d| d != head_dim) {
        let what = format!("{heads} heads of {head_dim}, {kv_heads} for keys, is no shape of {}", family.gguf);
        return Err(file.unsupported(what));
    }
    let embedding = file.tensor(&Architecture::name(file, family.post_norms, Part::Embedding, 0));
    Ok(Shape {
        layers: number(LAYERS, 1_000)?,
        heads,
        kv_heads,
        head_dim,
        hidden,
        feed_forward: number(if family.experts { EXPERT_FEED_FORWARD } else { FEED_FORWARD }, 1 << 20)?,
        vocabulary: embedding.and_then(|t| t.dims.first().copied()).unwrap_or(0),
        context: number(CONTEXT, 1 << 24)?,
    })
}

/// Most experts of a layer: twice what the largest models have.
const EXPERTS_MOST: u64 = 1024;

fn experts(file: &ModelFile, family: &Family) -> Result<Option<Experts>, HeaderError> {
    let Some(count) = file.number(EXPERTS).or_else(|| file.number(LOCAL_EXPERTS)).filter(|count| *count > 0) else {
        return if family.experts { Err(missing(file, EXPERTS)) } else { Ok(None) };
    };
    if !family.experts {
        return Err(
            file.unsupported(format!("it is a mixture of experts of {}, which this version does not run", family.gguf))
        );
    }
    let used = file.number(EXPERTS_USED).ok_or_else(|| missing(file, EXPERTS_USED))?;
    if count > EXPERTS_MOST || used == 0 || used > count {
        return Err(
            file.unsupported(format!("{used} of {count} experts for each token is no mixture of {}", family.gguf))
        );
    }
    // llama.cpp's graph for this architecture always does.
    let normalised = file.is_gguf() || file.config("norm_topk_prob").and_then(|v| v.as_bool()) == Some(true);
    Ok(Some(Experts { count: count as u32, used: used as u32, normalised }))
}

/// One over the root of the head's size, but where Gemma says otherwise.
fn scale(file: &ModelFile, family: &Family, shape: &Shape) -> f32 {
    let by = file.config("query_pre_attn_scalar").and_then(|v| v.as_f64()).map(|v| v as f32);
    // GGUF has no key for it: by the size of the model, as llama.cpp tells the 27 B ones.
    let by_width = file.is_gguf() && matches!((family.gguf, shape.layers), ("gemma2", 46) | ("gemma3", 62));
    let by = by.unwrap_or(if by_width { (shape.hidden / shape.heads) as f32 } else { shape.head_dim as f32 });
    1.0 / by.sqrt()
}

fn layers(file: &ModelFile, family: &Family, shape: &Shape) -> Result<Vec<LayerKind>, HeaderError> {
    let window = file.number(WINDOW).filter(|w| *w > 0).map(|w| w as usize);
    // A window as long as the context hides nothing.
    let window = window.filter(|w| (*w as u64) < shape.context);
    let types = file.config("layer_types").and_then(|v| v.as_array());
    let on = file.config("use_sliding_window").and_then(|v| v.as_bool());
    if on == Some(true) && types.is_none() {
        return Err(file.unsupported("it uses a sliding window and does not say in which layers (layer_types)"));
    }
    // Gemma 3 turns its windowed layers at a rate of their own.
    let two_ropes = family.gguf == "gemma3";
    (0..shape.layers)
        .map(|layer| {
            let windowed = match types.map(|t| t.get(layer as usize).and_then(|v| v.as_str())) {
                Some(Some("sliding_attention")) => true,
                Some(Some("full_attention")) => false,
                Some(other) => return Err(file.unsupported(format!("layer {layer} has the type {other:?}"))),
                None if family.window_every > 1 => (layer + 1) % family.window_every != 0,
                None => !family.gguf.starts_with("qwen"),
            };
            let windowed = windowed && on != Some(false);
            Ok(LayerKind { window: window.filter(|_| windowed), rope: usize::from(two_ropes && windowed) })
        })
        .collect()
}
