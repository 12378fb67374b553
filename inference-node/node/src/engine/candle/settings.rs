//! Settings of a model's file that change what it computes and that this build does not have.
//!
//! Tensors nobody would read are refused by name ([`super::architecture`]); a setting nobody would read leaves no such
//! trace: the model loads, runs, and answers worse. So the ones known to matter are looked at here, and refused unless they
//! say what this build does anyway.

use serde_json::Value;

use crate::models::file::{Key, ModelFile};
use crate::models::header::HeaderError;

/// What the family does, where files may say something else.
#[derive(Debug, Clone, Copy)]
pub struct Does {
    /// GELU by its tanh approximation, instead of SiLU.
    pub gelu: bool,
    /// Every so many layers one sees everything.
    pub window_every: u64,
}

pub fn check(file: &ModelFile, does: Does) -> Result<(), HeaderError> {
    if file.is_gguf() { check_gguf(file) } else { check_config(file, does) }
}

fn check_config(file: &ModelFile, does: Does) -> Result<(), HeaderError> {
    let refuse = |what: String| Err(file.unsupported(format!("{what}, which this version does not do")));
    // Gemma's files say it under the first name and may keep a wrong value under the second.
    let names = if does.gelu { ["hidden_activation", "hidden_act"] } else { ["hidden_act", "hidden_activation"] };
    let said = names.into_iter().find_map(|name| Some((name, file.config(name)?)));
    if let Some((name, value)) = said {
        let known: &[&str] = if does.gelu { &["gelu_pytorch_tanh", "gelu_new"] } else { &["silu", "swish"] };
        if !value.as_str().is_some_and(|v| known.contains(&v)) {
            return refuse(format!("its {name} is {value}"));
        }
    }
    check_any(file)?;
    if file.config("decoder_sparse_step").and_then(Value::as_u64).is_some_and(|step| step != 1) {
        return refuse("not every layer of it is a mixture (decoder_sparse_step)".to_owned());
    }
    if file.config("mlp_only_layers").and_then(Value::as_array).is_some_and(|layers| !layers.is_empty()) {
        return refuse("some of its layers are no mixtures (mlp_only_layers)".to_owned());
    }
    let every = file.config("sliding_window_pattern").and_then(Value::as_u64);
    if let Some(every) = every.filter(|every| *every != does.window_every && file.config("layer_types").is_none()) {
        return refuse(format!("its sliding_window_pattern is {every}"));
    }
    Ok(())
}

/// Of a config.json, whatever its family.
pub fn check_any(file: &ModelFile) -> Result<(), HeaderError> {
    if let Some(method) = file.config("quantization_config") {
        let method = method.get("quant_method").and_then(Value::as_str).unwrap_or("unnamed");
        return Err(file.unsupported(format!(
            "its weights are quantised ({method}), which this version reads only from GGUF files"
        )));
    }
    let on = |name: &&&str| file.config(name).is_some_and(|v| v.as_bool() != Some(false));
    if let Some(name) = ["use_bidirectional_attention", "is_encoder_decoder", "add_cross_attention"].iter().find(on) {
        return Err(file.unsupported(format!("it has {name} on, which this version does not do")));
    }
    Ok(())
}

/// Scales that other architectures' graphs apply under names of the same form.
const SCALES: [&str; 8] = [
    "attention.scale",
    "attention.clamp_kqv",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    // And parts of mixtures that others have.
    "expert_weights_scale",
    "expert_shared_count",
    "leading_dense_block_count",
];

fn check_gguf(file: &ModelFile) -> Result<(), HeaderError> {
    let key = |gguf: &'static str| Key { gguf, config: "(none)" };
    for name in SCALES {
        // Zero is how converters say that there is none.
        if let Some(value) = file.real(key(name)).filter(|v| *v != 0.0) {
            let name = file.name_of(key(name));
            return Err(file.unsupported(format!("its {name} is {value}, which this version does not do")));
        }
    }
    let ModelFile::Gguf(header) = file else { return Ok(()) };
    let causal = file.name_of(key("attention.causal"));
    if header.flag(&causal) == Some(false) {
        return Err(file.unsupported(format!("its {causal} is false, which this version does not do")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use crate::engine::candle::architecture::Architecture;
    use crate::engine::candle::parity::FAMILIES;
    use crate::models::file::ModelFile;

    /// The fixture of a family with one value of its config.json set; what reading it says.
    fn changed(family: &str, name: &str, value: serde_json::Value) -> Result<Architecture, String> {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(family);
        let folder = tempfile::tempdir().unwrap();
        std::fs::copy(from.join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
        let text = std::fs::read_to_string(from.join("config.json")).unwrap();
        let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
        config[name] = value;
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        Architecture::read(&ModelFile::read(folder.path()).unwrap()).map_err(|e| e.to_string())
    }

    #[test]
    fn what_would_have_to_be_ignored_is_refused_by_name() {
        for (family, name, value, word) in [
            ("llama", "hidden_act", json!("gelu"), "hidden_act is \"gelu\""),
            ("gemma2", "hidden_activation", json!("gelu"), "hidden_activation is \"gelu\""),
            ("qwen3", "quantization_config", json!({ "quant_method": "awq" }), "quantised (awq)"),
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
            ("qwen3-moe", "num_experts_per_tok", json!(9), "9 of 8 experts"),
            ("qwen3-moe", "num_local_experts", json!(7), "expected [7, 64]"),
            ("qwen3", "num_experts", json!(8), "a mixture of experts of qwen3"),
            ("qwen2", "rope_scaling", json!({ "factor": 4.0 }), "two things about its rope"),
        ] {
            match changed(family, name, value) {
                Ok(_) => assert_eq!(word, "", "{family} {name}"),
                Err(said) => assert!(!word.is_empty() && said.contains(word), "{family} {name}: {said}"),
            }
        }
        for family in FAMILIES {
            changed(family, "architectures", json!([])).unwrap();
        }
    }
}
