//! The models of the self-check: small models of each family and format, and models of common sizes.

use candle_core::quantized::GgmlDType;

use crate::model::random::RandomFile;

/// A model small enough for any machine, whose matrix rows are whole k-quant blocks.
const SMALL: RandomFile = RandomFile {
    family: "llama",
    hidden: 256,
    feed_forward: 512,
    layers: 3,
    experts: None,
    heads: 8,
    kv_heads: 2,
    head_dim: 32,
    vocabulary: 320,
    context: 512,
    window: None,
    format: GgmlDType::F32,
    embedding: GgmlDType::F32,
    output: Some(GgmlDType::F32),
    random_rows: usize::MAX,
};

/// A mixture-of-experts model in which every token is routed to all experts: with top-k routing, different rounding
/// could choose different experts where scores are similar.
const MIXTURE: RandomFile =
    RandomFile { family: "qwen3moe", feed_forward: 256, experts: Some((4, 4)), head_dim: 64, ..SMALL };

/// One unquantized model of each family.
pub fn families() -> Vec<(String, RandomFile)> {
    let gemma = RandomFile { output: None, window: Some(48), head_dim: 64, ..SMALL };
    [
        ("llama", SMALL),
        ("mistral (a window)", RandomFile { window: Some(40), ..SMALL }),
        ("qwen2", RandomFile { family: "qwen2", output: None, ..SMALL }),
        ("qwen3", RandomFile { family: "qwen3", head_dim: 64, ..SMALL }),
        ("qwen3moe", MIXTURE),
        ("phi3", RandomFile { family: "phi3", kv_heads: 8, ..SMALL }),
        ("gemma2", RandomFile { family: "gemma2", ..gemma }),
        ("gemma3", RandomFile { family: "gemma3", layers: 7, ..gemma }),
    ]
    .map(|(name, file)| (name.to_owned(), file))
    .to_vec()
}

/// Models of the self-check whose layers are split over `devices` devices; each has at least one layer per device.
pub fn split(devices: usize) -> Vec<(String, RandomFile)> {
    let gemma = RandomFile { output: None, window: Some(48), head_dim: 64, family: "gemma2", ..SMALL };
    let shapes = [("llama", SMALL), ("qwen3moe", MIXTURE), ("gemma2", gemma)];
    let file = |file: RandomFile| RandomFile { layers: file.layers.max(devices), ..file };
    shapes.map(|(name, shape)| (format!("{name}, split over {devices} devices"), file(shape))).to_vec()
}

/// One model of each format that GPUs support.
pub fn formats() -> Vec<(String, RandomFile)> {
    [
        GgmlDType::F16,
        GgmlDType::BF16,
        GgmlDType::Q4_0,
        GgmlDType::Q4_1,
        GgmlDType::Q5_0,
        GgmlDType::Q5_1,
        GgmlDType::Q8_0,
        GgmlDType::Q2K,
        GgmlDType::Q3K,
        GgmlDType::Q4K,
        GgmlDType::Q5K,
        GgmlDType::Q6K,
    ]
    .map(|format| {
        let file = RandomFile { format, embedding: format, output: Some(format), ..SMALL };
        (format!("llama {format:?}"), file)
    })
    .to_vec()
}

/// The model for the checks of the whole engine.
pub fn engine_model() -> RandomFile {
    RandomFile { family: "qwen2", format: GgmlDType::Q4K, embedding: GgmlDType::Q6K, output: None, ..SMALL }
}

/// The models for the checks of memory and speed.
pub fn sizes(quick: bool) -> Vec<(&'static str, RandomFile)> {
    let quantized =
        RandomFile { family: "qwen2", format: GgmlDType::Q4K, embedding: GgmlDType::Q6K, output: None, ..SMALL };
    if quick {
        return vec![("small", RandomFile { context: 8192, ..quantized })];
    }
    let large = RandomFile { layers: 28, head_dim: 128, context: 32_768, random_rows: 16, ..quantized };
    vec![
        (
            "1.5 B",
            RandomFile { hidden: 1536, feed_forward: 8960, heads: 12, kv_heads: 2, vocabulary: 151_936, ..large },
        ),
        (
            "7 B",
            RandomFile {
                hidden: 3584,
                feed_forward: 18_944,
                heads: 28,
                kv_heads: 4,
                vocabulary: 152_064,
                output: Some(GgmlDType::Q6K),
                ..large
            },
        ),
    ]
}
