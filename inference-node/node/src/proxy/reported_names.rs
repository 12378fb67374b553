//! What a model server tells about the control tokens of a model, by the server's program:
//! - llama.cpp: `GET /props` has the chat template and the names of BOS and EOS.
//! - Ollama: `POST /api/show` has the template, the stop strings, and the tokens with their kinds.
//! - vLLM, if it was started with `--enable-tokenizer-info-endpoint`: `GET /tokenizer_info` has the chat template and the
//!   special tokens.
//!
//! The OpenAI protocol has no such request, so each is tried; other servers answer with an error.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::EndpointClient;
use super::control_names::ControlNames;

/// Maximum bytes that are read of an answer. Ollama sends the whole vocabulary, with its merges.
const MAX_ANSWER_BYTES: usize = 64 << 20;
/// Kind of a control token in a GGUF file.
const CONTROL: i64 = 3;

/// Answer of llama.cpp.
#[derive(Deserialize)]
struct Properties {
    chat_template: String,
    #[serde(default)]
    bos_token: String,
    #[serde(default)]
    eos_token: String,
}

/// Answer of Ollama.
#[derive(Deserialize)]
struct Model {
    template: String,
    /// Lines of parameters, among them the stop strings.
    #[serde(default)]
    parameters: String,
    #[serde(default)]
    model_info: ModelInfo,
}

#[derive(Default, Deserialize)]
struct ModelInfo {
    #[serde(default, rename = "tokenizer.ggml.tokens")]
    tokens: Option<Vec<String>>,
    #[serde(default, rename = "tokenizer.ggml.token_type")]
    kinds: Option<Vec<i64>>,
}

/// The names of control tokens of the server's model `remote`; `None` if the server does not tell them.
pub(super) async fn of_model(server: &EndpointClient, remote: &str) -> Option<ControlNames> {
    let root = server.url.trim_end_matches("/v1");
    let get = |path: &str| server.client.get(format!("{root}{path}"));
    if let Some(answer) = ask::<Properties>(server, get("/props")).await {
        let Properties { chat_template, bos_token, eos_token } = answer;
        return Some(ControlNames::of_template(&chat_template).with([bos_token, eos_token]));
    }
    let show = server.client.post(format!("{root}/api/show")).json(&json!({ "model": remote, "verbose": true }));
    if let Some(Model { template, parameters, model_info }) = ask(server, show).await {
        let tokens = model_info.tokens.unwrap_or_default().into_iter().zip(model_info.kinds.unwrap_or_default());
        let control = tokens.filter(|(_, kind)| *kind == CONTROL).map(|(name, _)| name);
        return Some(ControlNames::of_template(&format!("{template}\n{parameters}")).with(control));
    }
    let answer: Value = ask(server, get("/tokenizer_info")).await?;
    let template = answer.get("chat_template")?.as_str().unwrap_or_default();
    Some(ControlNames::of_template(template).with(special_tokens(&answer)))
}

/// The names of special tokens in an answer of vLLM, which has the form of tokenizer_config.json.
fn special_tokens(answer: &Value) -> Vec<String> {
    let text = |token: &Value| token.as_str().or_else(|| token.get("content")?.as_str()).map(str::to_owned);
    let named = ["bos_token", "eos_token", "pad_token", "unk_token"].into_iter().filter_map(|key| answer.get(key));
    let additional = answer.get("additional_special_tokens").and_then(Value::as_array);
    let added = answer.get("added_tokens_decoder").and_then(Value::as_object);
    let added = added.into_iter().flat_map(|tokens| tokens.values());
    let special = added.filter(|token| token.get("special").and_then(Value::as_bool) == Some(true));
    named.chain(additional.into_iter().flatten()).chain(special).filter_map(text).collect()
}

/// The answer to a request; `None` if it is an error, too long or not of this form.
async fn ask<T: DeserializeOwned>(server: &EndpointClient, request: reqwest::RequestBuilder) -> Option<T> {
    let mut answer = server.authorized(request).send().await.ok()?;
    let mut body = Vec::new();
    while answer.status().is_success() && body.len() < MAX_ANSWER_BYTES {
        match answer.chunk().await.ok()? {
            Some(bytes) => body.extend_from_slice(&bytes),
            None => break,
        }
    }
    serde_json::from_slice(&body).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_tokens_of_vllm_are_found_in_all_forms() {
        let answer = json!({
            "bos_token": null, "eos_token": "<|im_end|>", "pad_token": { "content": "<pad>" },
            "additional_special_tokens": ["<|a|>", { "content": "<|b|>" }],
            "added_tokens_decoder": {
                "1": { "content": "<|c|>", "special": true }, "2": { "content": "<think>", "special": false },
            },
        });
        assert_eq!(special_tokens(&answer), ["<|im_end|>", "<pad>", "<|a|>", "<|b|>", "<|c|>"]);
    }
}
