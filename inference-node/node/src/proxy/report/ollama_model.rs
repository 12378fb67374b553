//! Answer of Ollama about a model (<https://docs.ollama.com/api-reference/show-model-details>).

use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::super::control_names::ControlNames;

/// Kind of a control token in a GGUF file.
const CONTROL: i64 = 3;
/// Maximum number of tokens of a vocabulary that are used. The largest vocabularies have about 260,000.
const MAX_TOKENS: usize = 1 << 20;

#[derive(Deserialize)]
pub(super) struct OllamaModel {
    #[serde(default)]
    template: String,
    /// Lines with a name and a value, among them the stop strings.
    #[serde(default)]
    parameters: String,
    model_info: ModelInfo,
}

impl OllamaModel {
    pub(super) fn control_names(&self) -> ControlNames {
        let tokens = self.model_info.tokens.iter().zip(&self.model_info.kinds);
        let control = tokens.filter(|(_, kind)| **kind == CONTROL).map(|(name, _)| name.clone());
        ControlNames::of_template(&format!("{}\n{}", self.template, self.parameters)).with(control)
    }

    /// Context length in the model's own parameters.
    pub(super) fn num_ctx(&self) -> Option<u64> {
        let parameters = self.parameters.lines().filter_map(|line| line.trim().split_once(char::is_whitespace));
        parameters.filter(|(name, _)| *name == "num_ctx").find_map(|(_, value)| value.trim().parse().ok())
    }

    /// Maximum context length of the model.
    pub(super) fn max_context(&self) -> Option<u64> {
        self.model_info.context_length
    }
}

/// The used ones of a GGUF file's metadata, most of which is the vocabulary. The key of the context's length begins with
/// the name of the architecture.
#[derive(Default)]
struct ModelInfo {
    tokens: Vec<String>,
    kinds: Vec<i64>,
    context_length: Option<u64>,
}

impl<'de> Deserialize<'de> for ModelInfo {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Metadata;

        impl<'de> Visitor<'de> for Metadata {
            type Value = ModelInfo;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("metadata of a model")
            }

            fn visit_unit<E>(self) -> Result<ModelInfo, E> {
                Ok(ModelInfo::default())
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ModelInfo, A::Error> {
                let mut info = ModelInfo::default();
                while let Some(key) = map.next_key::<String>()? {
                    match key.as_str() {
                        "tokenizer.ggml.tokens" => info.tokens = map.next_value::<Vocabulary<_>>()?.0,
                        "tokenizer.ggml.token_type" => info.kinds = map.next_value::<Vocabulary<_>>()?.0,
                        key if key.ends_with(".context_length") => info.context_length = map.next_value()?,
                        _ => drop(map.next_value::<IgnoredAny>()?),
                    }
                }
                Ok(info)
            }
        }

        deserializer.deserialize_any(Metadata)
    }
}

/// Values of all tokens, up to a maximum number of tokens; no values for `null`.
struct Vocabulary<T>(Vec<T>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Vocabulary<T> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Values<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Values<T> {
            type Value = Vocabulary<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list or null")
            }

            fn visit_unit<E>(self) -> Result<Vocabulary<T>, E> {
                Ok(Vocabulary(Vec::new()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<Vocabulary<T>, A::Error> {
                let mut kept = Vec::new();
                while kept.len() < MAX_TOKENS {
                    match values.next_element()? {
                        Some(value) => kept.push(value),
                        None => return Ok(Vocabulary(kept)),
                    }
                }
                while values.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Vocabulary(kept))
            }
        }

        deserializer.deserialize_any(Values(PhantomData))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn context_and_control_tokens_are_read() {
        let model: OllamaModel = serde_json::from_str(
            r#"{ "template": "<|im_start|>", "parameters": "stop                           \"<|im_end|>\"\nnum_ctx                        8192",
                 "model_info": { "general.architecture": "qwen2", "qwen2.context_length": 32768,
                                 "tokenizer.ggml.merges": null, "tokenizer.ggml.token_type": [1, 3],
                                 "tokenizer.ggml.tokens": ["e", "<|endoftext|>"] } }"#,
        )
        .unwrap();
        assert_eq!((model.num_ctx(), model.max_context()), (Some(8192), Some(32_768)));
        let expected = ControlNames::of_template("<|im_start|><|im_end|>").with(["<|endoftext|>".to_owned()]);
        assert_eq!(model.control_names(), expected);
        let bare: OllamaModel = serde_json::from_str(r#"{ "model_info": null }"#).unwrap();
        assert_eq!((bare.num_ctx(), bare.max_context()), (None, None));
        assert!(serde_json::from_str::<OllamaModel>("{}").is_err(), "not from Ollama");
    }

    #[test]
    fn endless_vocabulary_is_cut() {
        let kinds =
            format!(r#"{{"tokenizer.ggml.token_type":[{}1],"a.context_length":7}}"#, "1,".repeat(MAX_TOKENS + 5));
        let info: ModelInfo = serde_json::from_str(&kinds).unwrap();
        assert_eq!((info.kinds.len(), info.context_length), (MAX_TOKENS, Some(7)));
    }
}
