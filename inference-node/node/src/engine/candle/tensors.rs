//! The tensors of a decoder-only transformer and what each container calls them.

/// One tensor of the model, or one of every layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Part {
    Embedding,
    OutputNorm,
    Output,
    AttentionNorm,
    Query,
    Key,
    Value,
    /// The three above as one matrix, in that order.
    QueryKeyValue,
    QueryBias,
    KeyBias,
    ValueBias,
    AttentionOutput,
    AttentionOutputBias,
    /// Over each head's vector.
    QueryNorm,
    KeyNorm,
    /// After attention, before it is added to the stream (Gemma).
    PostAttentionNorm,
    FeedForwardNorm,
    Gate,
    Up,
    /// The two above as one matrix, in that order.
    GateUp,
    Down,
    /// Scores each expert of a mixture.
    Router,
    /// Of one expert. GGUF keeps those of a layer in one tensor, expert by expert.
    ExpertGate(u32),
    ExpertUp(u32),
    ExpertDown(u32),
    PostFeedForwardNorm,
    /// Divisors of the rotation's frequencies, computed by the converter.
    RopeFactors,
    RopeFactorsShort,
    RopeFactorsLong,
}

impl Part {
    /// Which expert's, of those that one tensor of a GGUF file holds.
    pub fn expert(self) -> Option<u32> {
        match self {
            Self::ExpertGate(at) | Self::ExpertUp(at) | Self::ExpertDown(at) => Some(at),
            _ => None,
        }
    }

    /// Of layer `layer`; parts that belong to no layer ignore it.
    pub fn gguf(self, layer: u64) -> String {
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
            // Fused files keep the gate's rows first under this name.
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

    /// In the hub's layout; `post_norms` as in [`super::architecture::Family`]. `None`: this layout has it elsewhere.
    pub fn hub(self, layer: u64, post_norms: bool) -> Option<String> {
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
            // The one name means two things, by family.
            Self::PostAttentionNorm => "post_attention_layernorm.weight",
            Self::FeedForwardNorm if post_norms => "pre_feedforward_layernorm.weight",
            Self::FeedForwardNorm => "post_attention_layernorm.weight",
            Self::Gate => "mlp.gate_proj.weight",
            Self::Up => "mlp.up_proj.weight",
            Self::GateUp => "mlp.gate_up_proj.weight",
            Self::Down => "mlp.down_proj.weight",
            Self::Router => "mlp.gate.weight",
            Self::ExpertGate(at) => return Some(format!("model.layers.{layer}.mlp.experts.{at}.gate_proj.weight")),
            Self::ExpertUp(at) => return Some(format!("model.layers.{layer}.mlp.experts.{at}.up_proj.weight")),
            Self::ExpertDown(at) => return Some(format!("model.layers.{layer}.mlp.experts.{at}.down_proj.weight")),
            Self::PostFeedForwardNorm => "post_feedforward_layernorm.weight",
        };
        Some(format!("model.layers.{layer}.{name}"))
    }
}
