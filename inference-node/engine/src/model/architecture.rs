//! The architecture of a model, read from its metadata.
//!
//! A current decoder-only transformer is one forward pass with a few switches. `architecture/family.rs` lists the
//! switches of each family; sizes, RoPE bases and windows come from the model's own file. A file with metadata or
//! tensors that this version would have to ignore is rejected with an error that names them: a model that runs almost
//! right is worse than one that does not run.

mod family;
mod hyperparameters;
mod tensor_list;

use cfq_memory::ModelShape;

use crate::model::architecture::family::{CANDLE_TRANSFORMERS_FAMILIES, NATIVE_FAMILIES, family_of};
use crate::model::architecture::hyperparameters::{
    ATTENTION_SOFTCAP, EPSILON, LOGIT_SOFTCAP, attention_scale, missing, read_experts, read_layers, read_shape,
};
use crate::model::file::{ModelFile, TensorMeta};
use crate::model::gguf::HeaderError;
use crate::model::rope::{Rope, RopeLayout};
use crate::model::rope_scaling::{LongContextRope, ModelRopes, read_ropes};
use crate::model::tensors::TensorRole;
use crate::model::unsupported_config::{self, FamilyConfig};

/// Everything that the forward pass and the memory estimate need to know before the weights are read.
#[derive(Debug, Clone)]
pub struct Architecture {
    /// Number and sizes of layers, heads and matrices.
    pub shape: ModelShape,
    /// Epsilon of RMSNorm.
    pub epsilon: f32,
    /// Factor applied to query-key products.
    pub attention_scale: f32,
    /// Soft cap of attention scores, cap * tanh(score / cap) (Gemma 2, <https://arxiv.org/abs/2408.00118>).
    pub attention_softcap: Option<f32>,
    /// Soft cap of the output logits.
    pub logit_softcap: Option<f32>,
    /// Factor applied to the embeddings.
    pub embedding_scale: f32,
    /// Which values of a head form a pair that RoPE rotates.
    pub rope_layout: RopeLayout,
    /// Whether one matrix holds the query, key and value projections, and another the gate and up projections.
    pub fused: bool,
    /// Whether each head's query and key are normalized.
    pub head_norms: bool,
    /// Whether attention and feed-forward are also followed by norms.
    pub post_norms: bool,
    /// Whether the activation is GELU (tanh approximation) instead of SiLU.
    pub gelu: bool,
    /// Offset added to every norm's weights.
    pub norm_offset: f32,
    /// Whether the embedding matrix is also the output matrix (tied weights).
    pub tied: bool,
    /// Attention parameters of each layer.
    pub layers: Vec<LayerAttention>,
    /// RoPE variants of the model; layers refer to them by [`LayerAttention::rope`].
    pub ropes: Vec<Rope>,
    /// The second RoPE of LongRoPE (Phi-3), which replaces the first entry of `ropes` in sequences longer than the
    /// original context; `None` for models without such a RoPE.
    pub long_rope: Option<LongContextRope>,
    /// The mixture of experts, in which case `shape.feed_forward` is the width of one expert; `None` for a dense model.
    pub experts: Option<Experts>,
}

/// A mixture of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Experts {
    /// Number of experts in a layer.
    pub count: u32,
    /// Number of experts that compute each token.
    pub per_token: u32,
    /// Whether the router's weights of the chosen experts are divided by their sum.
    pub normalized: bool,
}

/// Attention parameters that differ between layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerAttention {
    /// Sliding window: number of positions that are attended to, the current one included; `None`: all positions.
    pub window: Option<usize>,
    /// Index in [`Architecture::ropes`].
    pub rope: usize,
}

impl Architecture {
    /// Reads the architecture and rejects what this version cannot run, before anything is loaded.
    ///
    /// # Errors
    /// [`HeaderError::Unsupported`] with the value or tensor that is missing or not supported, or an error from reading
    /// RoPE factor tensors.
    pub fn read(file: &ModelFile) -> Result<Self, HeaderError> {
        let family = family_of(file).ok_or_else(|| {
            file.unsupported(format!(
                "its architecture is {:?}; this version supports {NATIVE_FAMILIES}, and as safetensors folders on the \
                 CPU, one sequence at a time, {CANDLE_TRANSFORMERS_FAMILIES}. Other models can be served by any \
                 program with an OpenAI-compatible API",
                file.architecture()
            ))
        })?;
        let shape = read_shape(file, family)?;
        let experts = read_experts(file, family)?;
        unsupported_config::check(file, FamilyConfig { gelu: family.gelu, window_every: family.window_every })?;
        let layers = read_layers(file, family, &shape)?;
        let ModelRopes { ropes, long } = read_ropes(file, &shape, layers.iter().any(|l| l.rope == 1))?;
        let output = Self::name_in(file, family.post_norms, TensorRole::Output, 0);
        let tied = match file.config("tie_word_embeddings").and_then(|v| v.as_bool()) {
            Some(false) if file.tensor(&output).is_none() => {
                return Err(file.unsupported(format!("tensor {output} is missing")));
            }
            // If true, an output matrix in the file is not used.
            Some(tied) => tied,
            None => file.tensor(&output).is_none(),
        };
        let architecture = Self {
            epsilon: file.get_f32(EPSILON).ok_or_else(|| missing(file, EPSILON))?,
            attention_scale: attention_scale(file, family, &shape),
            attention_softcap: file.get_f32(ATTENTION_SOFTCAP),
            logit_softcap: file.get_f32(LOGIT_SOFTCAP),
            embedding_scale: if family.gemma { (shape.hidden as f32).sqrt() } else { 1.0 },
            rope_layout: if file.is_gguf() { family.rope_layout } else { RopeLayout::HalfSplit },
            fused: family.fused,
            head_norms: family.head_norms,
            post_norms: family.post_norms,
            gelu: family.gelu,
            norm_offset: if family.gemma && !file.is_gguf() { 1.0 } else { 0.0 },
            tied,
            layers,
            ropes,
            long_rope: long,
            experts,
            shape,
        };
        architecture.check_tensors(file, family)?;
        Ok(architecture)
    }

    fn name_in(file: &ModelFile, post_norms: bool, role: TensorRole, layer: u64) -> String {
        if file.is_gguf() {
            role.gguf_name(layer)
        } else {
            role.hugging_face_name(layer, post_norms).unwrap_or_default()
        }
    }

    /// The tensor's name in `file`; empty if the format of `file` (GGUF or Hugging Face) has no such tensor.
    pub fn tensor_name(&self, file: &ModelFile, role: TensorRole, layer: u64) -> String {
        Self::name_in(file, self.post_norms, role, layer)
    }

    /// Shape and format of a tensor. If the file has one tensor for all experts of a layer, the shape is that of a
    /// single expert.
    pub fn tensor_meta(&self, file: &ModelFile, role: TensorRole, layer: u64) -> Option<TensorMeta> {
        let meta = file.tensor(&self.tensor_name(file, role, layer))?;
        match role.expert().filter(|_| file.is_gguf()) {
            None => Some(meta),
            Some(_) => match (meta.dims.split_first(), self.experts) {
                (Some((count, dims)), Some(experts)) if *count == u64::from(experts.count) => {
                    Some(TensorMeta { dims: dims.to_vec(), ..meta })
                }
                _ => None,
            },
        }
    }
}
