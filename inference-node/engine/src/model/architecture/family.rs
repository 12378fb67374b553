//! The supported model families, as data: one decoder-only transformer with a few switches.

use crate::model::file::ModelFile;
use crate::model::rope::RopeLayout;

/// Properties of one model family: the switches of the forward pass.
#[derive(Debug)]
pub(super) struct Family {
    /// Name of the family in GGUF (`general.architecture`).
    pub gguf: &'static str,
    /// Names of the family in config.json (`model_type`).
    pub config: &'static [&'static str],
    /// The RoPE layout of the family's GGUF files; the Hugging Face layout is always half-split.
    pub rope_layout: RopeLayout,
    /// Whether one matrix holds the query, key and value projections, and another the gate and up projections.
    pub fused: bool,
    /// Whether the query, key and value projections have biases.
    pub qkv_bias: bool,
    /// Whether each head's query and key are normalized.
    pub head_norms: bool,
    /// Whether attention and feed-forward are also followed by norms.
    pub post_norms: bool,
    /// Whether the activation is GELU (tanh approximation) instead of SiLU.
    pub gelu: bool,
    /// Whether embeddings are multiplied by sqrt(hidden), and the weights of norms are stored minus one in the Hugging
    /// Face layout.
    pub gemma: bool,
    /// Period n of the attention pattern: every n-th layer has full attention, the others a sliding window. 1: no
    /// pattern; all layers have the window that the file sets, if any (for Qwen, no layer has a window). Not used if
    /// the file lists the type of each layer.
    pub window_every: u64,
    /// Whether feed-forwards are mixtures of experts.
    pub experts: bool,
}

const PLAIN: Family = Family {
    gguf: "llama",
    config: &["llama", "mistral"],
    rope_layout: RopeLayout::HalfSplit,
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
    Family { rope_layout: RopeLayout::Interleaved, ..PLAIN },
    Family { gguf: "qwen2", config: &["qwen2"], qkv_bias: true, ..PLAIN },
    Family { gguf: "qwen3", config: &["qwen3"], head_norms: true, ..PLAIN },
    Family { gguf: "qwen3moe", config: &["qwen3_moe"], head_norms: true, experts: true, ..PLAIN },
    Family { gguf: "phi3", config: &["phi3"], fused: true, ..PLAIN },
    Family { gguf: "gemma2", config: &["gemma2"], window_every: 2, ..GEMMA },
    Family { gguf: "gemma3", config: &["gemma3_text"], head_norms: true, window_every: 6, ..GEMMA },
];

/// Names of the families above, for error messages.
pub(super) const NATIVE_FAMILIES: &str = "llama (with Mistral, SmolLM2 and DeepSeek-distill), qwen2, qwen3 and its \
    mixtures, phi3, gemma2 and gemma3 (text only: a folder of type gemma3_text, or a GGUF file)";
/// Names of the families that run in candle-transformers, for error messages.
pub(super) const CANDLE_TRANSFORMERS_FAMILIES: &str = "starcoder2 and olmo2";

/// The family of `file`; `None` if it is not supported.
pub(super) fn family_of(file: &ModelFile) -> Option<&'static Family> {
    let name = file.architecture();
    FAMILIES.iter().find(|f| if file.is_gguf() { f.gguf == name } else { f.config.contains(&name) })
}
