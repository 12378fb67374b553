//! Reads the sizes and constants of an architecture from the metadata, under the keys of GGUF or of config.json.

use cfq_memory::ModelShape;

use crate::model::architecture::family::Family;
use crate::model::architecture::{Architecture, Experts, LayerAttention};
use crate::model::file::{MetadataKey, ModelFile};
use crate::model::gguf::HeaderError;
use crate::model::tensors::TensorRole;

const fn key(gguf: &'static str, config: &'static str) -> MetadataKey {
    MetadataKey { gguf, config }
}

const LAYERS: MetadataKey = key("block_count", "num_hidden_layers");
const HIDDEN: MetadataKey = key("embedding_length", "hidden_size");
const HEADS: MetadataKey = key("attention.head_count", "num_attention_heads");
const KV_HEADS: MetadataKey = key("attention.head_count_kv", "num_key_value_heads");
const HEAD_DIM: MetadataKey = key("attention.key_length", "head_dim");
const VALUE_DIM: MetadataKey = key("attention.value_length", "head_dim");
const FEED_FORWARD: MetadataKey = key("feed_forward_length", "intermediate_size");
const CONTEXT: MetadataKey = key("context_length", "max_position_embeddings");
const WINDOW: MetadataKey = key("attention.sliding_window", "sliding_window");
const EXPERTS: MetadataKey = key("expert_count", "num_experts");
/// Number of experts, under the config.json name that newer versions of transformers write.
const LOCAL_EXPERTS: MetadataKey = key("expert_count", "num_local_experts");
const EXPERTS_PER_TOKEN: MetadataKey = key("expert_used_count", "num_experts_per_tok");
const EXPERT_FEED_FORWARD: MetadataKey = key("expert_feed_forward_length", "moe_intermediate_size");
pub(super) const EPSILON: MetadataKey = key("attention.layer_norm_rms_epsilon", "rms_norm_eps");
pub(super) const ATTENTION_SOFTCAP: MetadataKey = key("attn_logit_softcapping", "attn_logit_softcapping");
pub(super) const LOGIT_SOFTCAP: MetadataKey = key("final_logit_softcapping", "final_logit_softcapping");

/// Maximum number of experts of a layer: twice what the largest models have.
const MAX_EXPERTS: u64 = 1024;

pub(super) fn missing(file: &ModelFile, key: MetadataKey) -> HeaderError {
    file.unsupported(format!("{} is missing", file.key_name(key)))
}

/// The model's sizes; each is bounded, so that products of them do not overflow.
pub(super) fn read_shape(file: &ModelFile, family: &Family) -> Result<ModelShape, HeaderError> {
    let size = |key: MetadataKey, max: u64| {
        file.get_u64(key)
            .filter(|n| (1..=max).contains(n))
            .ok_or_else(|| file.unsupported(format!("{} is missing, zero or above {max}", file.key_name(key))))
    };
    let hidden = size(HIDDEN, 1 << 17)?;
    let heads = size(HEADS, 1 << 12)?;
    let kv_heads = if file.get_u64(KV_HEADS).is_some() { size(KV_HEADS, heads)? } else { heads };
    let head_dim = file.get_u64(HEAD_DIM).unwrap_or(hidden / heads);
    let valid = heads.is_multiple_of(kv_heads) && head_dim > 0 && head_dim <= 1 << 10 && head_dim.is_multiple_of(2);
    if !valid || file.get_u64(VALUE_DIM).is_some_and(|d| d != head_dim) {
        let what = format!(
            "{heads} query heads and {kv_heads} KV heads with head dimension {head_dim} are invalid for the {} family",
            family.gguf
        );
        return Err(file.unsupported(what));
    }
    let embedding = file.tensor(&Architecture::name_in(file, family.post_norms, TensorRole::Embedding, 0));
    Ok(ModelShape {
        layers: size(LAYERS, 1_000)?,
        heads,
        kv_heads,
        head_dim,
        hidden,
        feed_forward: size(if family.experts { EXPERT_FEED_FORWARD } else { FEED_FORWARD }, 1 << 20)?,
        vocabulary: embedding.and_then(|t| t.dims.first().copied()).unwrap_or(0),
        context: size(CONTEXT, 1 << 24)?,
    })
}

/// The mixture of experts, if the family has one.
pub(super) fn read_experts(file: &ModelFile, family: &Family) -> Result<Option<Experts>, HeaderError> {
    let count = file.get_u64(EXPERTS).or_else(|| file.get_u64(LOCAL_EXPERTS)).filter(|count| *count > 0);
    let Some(count) = count else {
        return if family.experts { Err(missing(file, EXPERTS)) } else { Ok(None) };
    };
    if !family.experts {
        let what = format!(
            "it is a mixture-of-experts model of the {} family, and this version supports only dense models of that \
             family",
            family.gguf
        );
        return Err(file.unsupported(what));
    }
    let per_token = file.get_u64(EXPERTS_PER_TOKEN).ok_or_else(|| missing(file, EXPERTS_PER_TOKEN))?;
    if count > MAX_EXPERTS || per_token == 0 || per_token > count {
        let what = format!("{count} experts, {per_token} per token, are not valid for the {} family", family.gguf);
        return Err(file.unsupported(what));
    }
    // llama.cpp's graph for this architecture always normalizes the routing weights.
    let normalized = file.is_gguf() || file.config("norm_topk_prob").and_then(|v| v.as_bool()) == Some(true);
    Ok(Some(Experts { count: count as u32, per_token: per_token as u32, normalized }))
}

/// Factor applied to query-key products: 1 / sqrt(d), where d is the head dimension or the value that Gemma models use
/// instead.
pub(super) fn attention_scale(file: &ModelFile, family: &Family, shape: &ModelShape) -> f32 {
    let divisor = file.config("query_pre_attn_scalar").and_then(|v| v.as_f64()).map(|v| v as f32);
    // GGUF has no key for Gemma's value. It differs from the head dimension only in the 27 B models (hidden / heads),
    // which llama.cpp recognizes by their number of layers.
    let by_hidden = file.is_gguf() && matches!((family.gguf, shape.layers), ("gemma2", 46) | ("gemma3", 62));
    let divisor =
        divisor.unwrap_or(if by_hidden { (shape.hidden / shape.heads) as f32 } else { shape.head_dim as f32 });
    1.0 / divisor.sqrt()
}

/// Window and RoPE of each layer.
pub(super) fn read_layers(
    file: &ModelFile,
    family: &Family,
    shape: &ModelShape,
) -> Result<Vec<LayerAttention>, HeaderError> {
    let window = file.get_u64(WINDOW).filter(|w| *w > 0).map(|w| w as usize);
    // A window at least as long as the context excludes no position.
    let window = window.filter(|w| (*w as u64) < shape.context);
    let types = file.config("layer_types").and_then(|v| v.as_array());
    let enabled = file.config("use_sliding_window").and_then(|v| v.as_bool());
    if enabled == Some(true) && types.is_none() {
        return Err(file.unsupported("it uses a sliding window but does not list its layers (layer_types)"));
    }
    // Gemma 3 has a separate RoPE for its windowed layers.
    let two_ropes = family.gguf == "gemma3";
    (0..shape.layers)
        .map(|layer| {
            let windowed = match types.map(|t| t.get(layer as usize).and_then(|v| v.as_str())) {
                Some(Some("sliding_attention")) => true,
                Some(Some("full_attention")) => false,
                Some(other) => return Err(file.unsupported(format!("layer {layer} has the unknown type {other:?}"))),
                None if family.window_every > 1 => (layer + 1) % family.window_every != 0,
                None => !family.gguf.starts_with("qwen"),
            };
            let windowed = windowed && enabled != Some(false);
            Ok(LayerAttention { window: window.filter(|_| windowed), rope: usize::from(two_ropes && windowed) })
        })
        .collect()
}
