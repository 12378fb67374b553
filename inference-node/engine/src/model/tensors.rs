//! The tensors of a decoder-only transformer, and their names in GGUF files and in Hugging Face model folders.

/// The role of a tensor in the model; for most roles there is one tensor per layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TensorRole {
    /// Token embedding, (vocabulary, hidden).
    Embedding,
    /// Norm before the output matrix.
    OutputNorm,
    /// Output matrix, (vocabulary, hidden).
    Output,
    /// Norm before attention.
    AttentionNorm,
    /// Query projection.
    Query,
    /// Key projection.
    Key,
    /// Value projection.
    Value,
    /// Query, key and value projections as one matrix, in that order of rows.
    QueryKeyValue,
    /// Bias of the query projection.
    QueryBias,
    /// Bias of the key projection.
    KeyBias,
    /// Bias of the value projection.
    ValueBias,
    /// Output projection of attention.
    AttentionOutput,
    /// Bias of the output projection of attention.
    AttentionOutputBias,
    /// Norm of each head's query.
    QueryNorm,
    /// Norm of each head's key.
    KeyNorm,
    /// Norm after attention, before the residual addition (Gemma).
    PostAttentionNorm,
    /// Norm before the feed-forward.
    FeedForwardNorm,
    /// Gate projection of the feed-forward.
    Gate,
    /// Up projection of the feed-forward.
    Up,
    /// Gate and up projections as one matrix, in that order of rows.
    GateUp,
    /// Down projection of the feed-forward.
    Down,
    /// Router of a mixture of experts: gives one score per expert.
    Router,
    /// Gate projection of one expert. GGUF stores all experts of a layer in one tensor.
    ExpertGate(u32),
    /// Up projection of one expert.
    ExpertUp(u32),
    /// Down projection of one expert.
    ExpertDown(u32),
    /// Norm after the feed-forward, before the residual addition (Gemma).
    PostFeedForwardNorm,
    /// Divisors of RoPE's frequencies, computed by the converter (Llama 3). GGUF only.
    RopeFactors,
    /// LongRoPE's short factors. GGUF only.
    RopeFactorsShort,
    /// LongRoPE's long factors. GGUF only.
    RopeFactorsLong,
}

impl TensorRole {
    /// The expert's index, for roles that GGUF stores as one tensor for all experts.
    pub fn expert(self) -> Option<u32> {
        match self {
            Self::ExpertGate(expert) | Self::ExpertUp(expert) | Self::ExpertDown(expert) => Some(expert),
            _ => None,
        }
    }

    /// The tensor's name in GGUF. Roles that are not per layer ignore `layer`.
    pub fn gguf_name(self, layer: u64) -> String {
        let name = match self {
            Self::Embedding => return "token_embd.weight".to_owned(),
            Self::OutputNorm => return "output_norm.weight".to_owned(),
            Self::Output => return "output.weight".to_owned(),
            Self::RopeFactors => return "rope_freqs.weight".to_owned(),
            Self::RopeFactorsShort => return "rope_factors_short.weight".to_owned(),
            Self::RopeFactorsLong => return "rope_factors_long.weight".to_owned(),
            Self::AttentionNorm => "attn_norm.weight",
            Self::Query => "attn_q.weight",
            Self::Key => "attn_k.weight",
            Self::Value => "attn_v.weight",
            Self::QueryKeyValue => "attn_qkv.weight",
            Self::QueryBias => "attn_q.bias",
            Self::KeyBias => "attn_k.bias",
            Self::ValueBias => "attn_v.bias",
            Self::AttentionOutput => "attn_output.weight",
            Self::AttentionOutputBias => "attn_output.bias",
            Self::QueryNorm => "attn_q_norm.weight",
            Self::KeyNorm => "attn_k_norm.weight",
            Self::PostAttentionNorm => "post_attention_norm.weight",
            Self::FeedForwardNorm => "ffn_norm.weight",
            Self::Gate => "ffn_gate.weight",
            // Fused files store both under this name, the gate's rows first.
            Self::Up | Self::GateUp => "ffn_up.weight",
            Self::Down => "ffn_down.weight",
            Self::Router => "ffn_gate_inp.weight",
            Self::ExpertGate(_) => "ffn_gate_exps.weight",
            Self::ExpertUp(_) => "ffn_up_exps.weight",
            Self::ExpertDown(_) => "ffn_down_exps.weight",
            Self::PostFeedForwardNorm => "post_ffw_norm.weight",
        };
        format!("blk.{layer}.{name}")
    }

    /// The tensor's name in the Hugging Face layout; `post_norms` as in [`super::architecture::Architecture`]. `None`
    /// if this layout has no such tensor.
    pub fn hugging_face_name(self, layer: u64, post_norms: bool) -> Option<String> {
        let name = match self {
            Self::Embedding => return Some("model.embed_tokens.weight".to_owned()),
            Self::OutputNorm => return Some("model.norm.weight".to_owned()),
            Self::Output => return Some("lm_head.weight".to_owned()),
            Self::RopeFactors | Self::RopeFactorsShort | Self::RopeFactorsLong => return None,
            Self::AttentionNorm => "input_layernorm.weight",
            Self::Query => "self_attn.q_proj.weight",
            Self::Key => "self_attn.k_proj.weight",
            Self::Value => "self_attn.v_proj.weight",
            Self::QueryKeyValue => "self_attn.qkv_proj.weight",
            Self::QueryBias => "self_attn.q_proj.bias",
            Self::KeyBias => "self_attn.k_proj.bias",
            Self::ValueBias => "self_attn.v_proj.bias",
            Self::AttentionOutput => "self_attn.o_proj.weight",
            Self::AttentionOutputBias => "self_attn.o_proj.bias",
            Self::QueryNorm => "self_attn.q_norm.weight",
            Self::KeyNorm => "self_attn.k_norm.weight",
            // post_attention_layernorm means two different norms, depending on the family.
            Self::PostAttentionNorm => "post_attention_layernorm.weight",
            Self::FeedForwardNorm if post_norms => "pre_feedforward_layernorm.weight",
            Self::FeedForwardNorm => "post_attention_layernorm.weight",
            Self::Gate => "mlp.gate_proj.weight",
            Self::Up => "mlp.up_proj.weight",
            Self::GateUp => "mlp.gate_up_proj.weight",
            Self::Down => "mlp.down_proj.weight",
            Self::Router => "mlp.gate.weight",
            Self::ExpertGate(expert) => {
                return Some(format!("model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight"));
            }
            Self::ExpertUp(expert) => {
                return Some(format!("model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"));
            }
            Self::ExpertDown(expert) => {
                return Some(format!("model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"));
            }
            Self::PostFeedForwardNorm => "post_feedforward_layernorm.weight",
        };
        Some(format!("model.layers.{layer}.{name}"))
    }
}
