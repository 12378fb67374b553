//! Rejects settings in a model's metadata that change what the model computes and that this version does not implement.
//!
//! An unknown tensor is rejected by name ([`super::architecture`]). An ignored setting would leave no such trace: the
//! model would load, run, and answer worse. So the settings known to matter are checked here and rejected unless they
//! agree with what this version computes.

use serde_json::Value;

use crate::model::file::{MetadataKey, ModelFile};
use crate::model::gguf::HeaderError;

/// Properties of a family's forward pass that config.json may contradict.
#[derive(Debug, Clone, Copy)]
pub struct FamilyConfig {
    /// Whether the activation is GELU (tanh approximation) instead of SiLU.
    pub gelu: bool,
    /// Period n of the attention pattern: every n-th layer has full attention, the others a sliding window. 1: no
    /// pattern.
    pub window_every: u64,
}

/// Checks the metadata of a model that runs in this crate's own forward pass.
///
/// # Errors
/// [`HeaderError::Unsupported`] with the setting's name and value.
pub fn check(file: &ModelFile, family: FamilyConfig) -> Result<(), HeaderError> {
    if file.is_gguf() { check_gguf(file) } else { check_config(file, family) }
}

fn check_config(file: &ModelFile, family: FamilyConfig) -> Result<(), HeaderError> {
    let unsupported = |what: String| Err(file.unsupported(format!("{what}, which this version does not support")));
    // Gemma's files have the activation under the first name and may have a wrong value under the second.
    let names = if family.gelu { ["hidden_activation", "hidden_act"] } else { ["hidden_act", "hidden_activation"] };
    let activation = names.into_iter().find_map(|name| Some((name, file.config(name)?)));
    if let Some((name, value)) = activation {
        let known: &[&str] = if family.gelu { &["gelu_pytorch_tanh", "gelu_new"] } else { &["silu", "swish"] };
        if !value.as_str().is_some_and(|v| known.contains(&v)) {
            return unsupported(format!("its {name} is {value}"));
        }
    }
    check_common(file)?;
    if file.config("decoder_sparse_step").and_then(Value::as_u64).is_some_and(|step| step != 1) {
        return unsupported("not all of its layers are mixtures of experts (decoder_sparse_step)".to_owned());
    }
    if file.config("mlp_only_layers").and_then(Value::as_array).is_some_and(|layers| !layers.is_empty()) {
        return unsupported("some of its layers are not mixtures of experts (mlp_only_layers)".to_owned());
    }
    let every = file.config("sliding_window_pattern").and_then(Value::as_u64);
    if let Some(every) = every.filter(|every| *every != family.window_every && file.config("layer_types").is_none()) {
        return unsupported(format!("its sliding_window_pattern is {every}"));
    }
    Ok(())
}

/// Checks the settings of config.json that no family supports.
///
/// # Errors
/// [`HeaderError::Unsupported`] with the setting's name.
pub fn check_common(file: &ModelFile) -> Result<(), HeaderError> {
    if let Some(method) = file.config("quantization_config") {
        let method = method.get("quant_method").and_then(Value::as_str).unwrap_or("unnamed");
        return Err(file.unsupported(format!(
            "its weights are quantized ({method}); this version reads quantized weights only from GGUF files"
        )));
    }
    let on = |name: &&&str| file.config(name).is_some_and(|v| v.as_bool() != Some(false));
    if let Some(name) = ["use_bidirectional_attention", "is_encoder_decoder", "add_cross_attention"].iter().find(on) {
        return Err(file.unsupported(format!("it sets {name}, which this version does not support")));
    }
    Ok(())
}

/// GGUF keys of scales and expert layouts that other architectures use. A file of a supported architecture must not set
/// them.
const UNSUPPORTED_GGUF_KEYS: [&str; 8] = [
    "attention.scale",
    "attention.clamp_kqv",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "expert_weights_scale",
    "expert_shared_count",
    "leading_dense_block_count",
];

fn check_gguf(file: &ModelFile) -> Result<(), HeaderError> {
    let key = |gguf: &'static str| MetadataKey { gguf, config: "(none)" };
    for name in UNSUPPORTED_GGUF_KEYS {
        // Counts are integers, scales are floating-point numbers. Converters write zero for "none".
        let value = file.get_f32(key(name)).or_else(|| file.get_u64(key(name)).map(|count| count as f32));
        if let Some(value) = value.filter(|value| *value != 0.0) {
            let name = file.key_name(key(name));
            return Err(file.unsupported(format!("its {name} is {value}, which this version does not support")));
        }
    }
    let ModelFile::Gguf(header) = file else { return Ok(()) };
    let causal = file.key_name(key("attention.causal"));
    if header.get_bool(&causal) == Some(false) {
        return Err(file.unsupported(format!("its {causal} is false, which this version does not support")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use candle_core::Device;
    use candle_core::quantized::QTensor;
    use candle_core::quantized::gguf_file::{self, Value};
    use serde_json::json;

    use crate::model::architecture::Architecture;
    use crate::model::file::ModelFile;
    use crate::parity::FAMILIES;

    /// Reads the fixture of a family with one value of its config.json changed.
    fn read_changed(family: &str, name: &str, value: serde_json::Value) -> Result<Architecture, String> {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(family);
        let folder = tempfile::tempdir().unwrap();
        std::fs::copy(from.join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
        let text = std::fs::read_to_string(from.join("config.json")).unwrap();
        let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
        config[name] = value;
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        Architecture::read(&ModelFile::read(folder.path()).unwrap()).map_err(|e| e.to_string())
    }

    /// Reads the GGUF fixture of the mixture-of-experts family with one more value in its metadata.
    fn read_gguf_with(key: &str, value: Value) -> Result<Architecture, String> {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models/qwen3-moe/model.gguf");
        let mut source = std::io::Cursor::new(std::fs::read(fixture).unwrap());
        let mut content = gguf_file::Content::read(&mut source).unwrap();
        content.metadata.insert(key.to_owned(), value);
        let mut tensors: Vec<(&str, QTensor)> = Vec::new();
        for name in content.tensor_infos.keys() {
            tensors.push((name.as_str(), content.tensor(&mut source, name, &Device::Cpu).unwrap()));
        }
        let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(name, tensor)| (*name, tensor)).collect();
        let metadata: Vec<(&str, &Value)> = content.metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        gguf_file::write(&mut std::fs::File::create(&path).unwrap(), &metadata, &tensors).unwrap();
        Architecture::read(&ModelFile::read(&path).unwrap()).map_err(|e| e.to_string())
    }

    #[test]
    fn unsupported_gguf_key_is_rejected_whether_integer_or_float() {
        for (key, value, word) in [
            ("qwen3moe.expert_shared_count", Value::U32(0), ""),
            ("qwen3moe.expert_shared_count", Value::U32(2), "qwen3moe.expert_shared_count is 2"),
            ("qwen3moe.leading_dense_block_count", Value::U64(1), "qwen3moe.leading_dense_block_count is 1"),
            ("qwen3moe.expert_weights_scale", Value::F32(0.0), ""),
            ("qwen3moe.expert_weights_scale", Value::F32(2.5), "qwen3moe.expert_weights_scale is 2.5"),
        ] {
            match read_gguf_with(key, value) {
                Ok(_) => assert_eq!(word, "", "{key}"),
                Err(error) => assert!(!word.is_empty() && error.contains(word), "{key}: {error}"),
            }
        }
    }

    #[test]
    fn unsupported_setting_is_rejected_by_name() {
        for (family, name, value, word) in [
            ("llama", "hidden_act", json!("gelu"), "hidden_act is \"gelu\""),
            ("gemma2", "hidden_activation", json!("gelu"), "hidden_activation is \"gelu\""),
            ("qwen3", "quantization_config", json!({ "quant_method": "awq" }), "quantized (awq)"),
            ("gemma3", "use_bidirectional_attention", json!(true), "use_bidirectional_attention"),
            ("llama", "tie_word_embeddings", json!(true), ""),
            ("qwen2", "tie_word_embeddings", json!(false), "lm_head.weight is missing"),
            ("llama", "rope_parameters", json!({ "rope_theta": 1e4, "factor": 8.0 }), "no rope_type"),
            ("gemma3", "rope_parameters", json!({ "rope_type": "linear", "factor": 8.0 }), "full_attention"),
            ("qwen2", "rope_parameters", json!({ "rope_type": "dynamic", "factor": 4.0 }), "\"dynamic\""),
            ("qwen2", "rope_parameters", json!({ "rope_type": "yarn", "factor": 4.0, "mscale": 1.0 }), "mscale"),
            ("qwen2", "rope_parameters", json!({ "rope_type": "yarn" }), "no factor"),
            ("qwen3-moe", "mlp_only_layers", json!([0]), "mlp_only_layers"),
            ("qwen3-moe", "decoder_sparse_step", json!(2), "decoder_sparse_step"),
            ("qwen3-moe", "num_experts_per_tok", json!(9), "8 experts, 9 per token"),
            ("qwen3-moe", "num_local_experts", json!(7), "expected [7, 64]"),
            ("qwen3", "num_experts", json!(8), "a mixture-of-experts model of the qwen3 family"),
            ("qwen2", "rope_scaling", json!({ "factor": 4.0 }), "conflicting rope parameters"),
        ] {
            match read_changed(family, name, value) {
                Ok(_) => assert_eq!(word, "", "{family} {name}"),
                Err(error) => assert!(!word.is_empty() && error.contains(word), "{family} {name}: {error}"),
            }
        }
        for family in FAMILIES {
            read_changed(family, "architectures", json!([])).unwrap();
        }
    }
}
