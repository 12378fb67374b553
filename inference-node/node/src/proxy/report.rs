//! What a server tells about a model: the control tokens and the length of the context. The OpenAI protocol has no
//! request for this, so the requests of the known programs are tried; other servers answer them with an error.
//! - llama.cpp: `GET /props` has the chat template, the names of BOS and EOS, and the length of the context.
//! - Ollama: `POST /api/show` has the template, the parameters, the longest context, and the tokens with their kinds.
//! - vLLM, if it was started with `--enable-tokenizer-info-endpoint`: `GET /tokenizer_info` has the chat template and the
//!   special tokens.
//! - LM Studio: `GET /api/v0/models` has the length of the context with which the model is loaded.
//! - vLLM, OpenRouter and others: the list of models has the length of the context.

use std::sync::Arc;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::EndpointClient;
use super::control_names::ControlNames;
use super::protocol::{Protocol, RemoteModel};

mod ollama_model;

use ollama_model::OllamaModel;

/// Length of the context of models on Ollama, in tokens, if neither the configuration nor the model states one. Ollama's
/// own default is 4,096 tokens on GPUs with less than 24 GiB, which the prompt of a review exceeds; longer contexts need
/// memory that such GPUs often lack.
pub(super) const OLLAMA_CONTEXT_TOKENS: u32 = 16_384;
/// First version of Ollama that can be told not to shorten prompts.
const MIN_OLLAMA_VERSION: [u64; 3] = [0, 12, 6];
/// Version of Ollama programs that are built from source.
const UNVERSIONED: [u64; 3] = [0, 0, 0];
/// Maximum bytes that are read of an answer. Ollama sends the whole vocabulary, with its merges.
const MAX_ANSWER_BYTES: usize = 64 << 20;
/// Lengths of contexts above this are not believed.
const MAX_CONTEXT_TOKENS: u64 = 1 << 30;

/// What a server tells about a model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ModelReport {
    /// Names of the control tokens; `None` if the server does not tell them.
    pub(super) control_names: Option<Arc<ControlNames>>,
    /// Length of the context, in tokens.
    pub(super) context_tokens: Option<u32>,
    /// Longest context that the model supports, in tokens.
    pub(super) max_context_tokens: Option<u32>,
    /// Why the model cannot be used although the server answers.
    pub(super) unusable: Option<String>,
}

/// Asks the server about a model.
pub(super) async fn of_model(server: &EndpointClient, model: &RemoteModel) -> ModelReport {
    match model.protocol {
        Protocol::OpenAi => of_openai_model(server, &model.name).await,
        Protocol::Ollama => of_ollama_model(server, model).await,
    }
}

/// Why a model cannot be used that is not on its server.
pub(super) fn missing(server: &EndpointClient, model: &RemoteModel) -> String {
    let (url, name, endpoint) = (server.root(), &model.name, server.name());
    format!("{url} does not have {name}; to fetch it, run `cfq models pull ollama:{endpoint}/{name}`")
}

/// Answer of llama.cpp.
#[derive(Deserialize)]
struct Properties {
    chat_template: String,
    #[serde(default)]
    bos_token: String,
    #[serde(default)]
    eos_token: String,
    #[serde(default)]
    default_generation_settings: GenerationSettings,
}

#[derive(Default, Deserialize)]
struct GenerationSettings {
    n_ctx: Option<u64>,
}

async fn of_openai_model(server: &EndpointClient, name: &str) -> ModelReport {
    let root = server.root();
    let get = |path: &str| server.client.get(format!("{root}{path}"));
    if let Ok(answer) = ask::<Properties>(server, get("/props")).await {
        let Properties { chat_template, bos_token, eos_token, default_generation_settings } = answer;
        let names = ControlNames::of_template(&chat_template).with([bos_token, eos_token]);
        let context_tokens = default_generation_settings.n_ctx.and_then(believed);
        return ModelReport { control_names: Some(Arc::new(names)), context_tokens, ..ModelReport::default() };
    }
    if let Ok(model) = show(server, name).await {
        tracing::warn!(
            endpoint = server.name(),
            model = name,
            "this server is Ollama, which shortens prompts without saying so if they are requested by its \
             OpenAI-compatible address: name the model ollama:{}/{name}",
            server.name()
        );
        return ModelReport { control_names: Some(Arc::new(model.control_names())), ..ModelReport::default() };
    }
    let tokenizer: Option<Value> = ask(server, get("/tokenizer_info")).await.ok();
    let control_names = tokenizer.and_then(|answer| names_of_tokenizer(&answer)).map(Arc::new);
    let lists = [get("/api/v0/models"), server.client.get(format!("{}/models", server.url))];
    let mut context_tokens = None;
    for list in lists {
        if let Ok(list) = ask::<Value>(server, list).await {
            context_tokens = context_tokens.or_else(|| listed_context(&list, name));
        }
    }
    ModelReport { control_names, context_tokens, ..ModelReport::default() }
}

/// The length of the context of a model in a list of models.
fn listed_context(list: &Value, name: &str) -> Option<u32> {
    let models = list.get("data")?.as_array()?;
    let model = models.iter().find(|model| model.get("id").and_then(Value::as_str) == Some(name))?;
    let top_provider = model.get("top_provider").and_then(|provider| provider.get("context_length"));
    // LM Studio, vLLM, OpenRouter.
    let fields = ["loaded_context_length", "max_model_len", "context_length"].map(|field| model.get(field));
    let lengths = [fields[0], fields[1], top_provider, fields[2]].into_iter().flatten();
    lengths.filter_map(Value::as_u64).find_map(believed)
}

fn believed(tokens: u64) -> Option<u32> {
    u32::try_from(tokens).ok().filter(|tokens| (1..MAX_CONTEXT_TOKENS).contains(&u64::from(*tokens)))
}

fn names_of_tokenizer(answer: &Value) -> Option<ControlNames> {
    let template = answer.get("chat_template")?.as_str().unwrap_or_default();
    Some(ControlNames::of_template(template).with(special_tokens(answer)))
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

#[derive(Deserialize)]
struct Version {
    version: String,
}

async fn of_ollama_model(server: &EndpointClient, model: &RemoteModel) -> ModelReport {
    let unusable = |reason| ModelReport { unusable: Some(reason), ..ModelReport::default() };
    if let Some(reason) = unusable_ollama(server).await {
        return unusable(reason);
    }
    match show(server, &model.name).await {
        Ok(shown) => ModelReport {
            control_names: Some(Arc::new(shown.control_names())),
            context_tokens: shown.num_ctx().and_then(believed),
            max_context_tokens: shown.max_context().and_then(believed),
            unusable: None,
        },
        Err(Some(status)) if status == reqwest::StatusCode::NOT_FOUND => unusable(missing(server, model)),
        Err(_) => ModelReport::default(),
    }
}

/// Why the server cannot be used in Ollama's protocol; `None` if it can, or does not answer.
pub(super) async fn unusable_ollama(server: &EndpointClient) -> Option<String> {
    let version = server.client.get(format!("{}/api/version", server.root()));
    match ask::<Version>(server, version).await {
        Ok(Version { version }) => is_outdated(&version).then(|| outdated(server.root(), &version)),
        Err(Some(status)) if status == reqwest::StatusCode::NOT_FOUND => {
            let (url, endpoint) = (server.root(), server.name());
            Some(format!(
                "{url} is not Ollama; for a server with the OpenAI protocol, name its models openai:{endpoint}/MODEL"
            ))
        }
        Err(_) => None,
    }
}

/// Why a version of Ollama cannot be used.
fn outdated(url: &str, version: &str) -> String {
    let [major, minor, patch] = MIN_OLLAMA_VERSION;
    let version: String = version.chars().take(32).collect();
    format!(
        "{url} is Ollama {version}, which shortens long prompts without saying so; update it to {major}.{minor}.{patch} \
         or later"
    )
}

/// Whether Ollama of this version cannot be told not to shorten prompts. Versions that cannot be parsed count as new.
fn is_outdated(version: &str) -> bool {
    let numbers = version.trim_start_matches('v').split(['-', '+']).next().unwrap_or_default().split('.');
    let numbers: Option<Vec<u64>> = numbers.map(|number| number.parse().ok()).collect();
    let parsed = numbers.and_then(|numbers| <[u64; 3]>::try_from(numbers).ok());
    parsed.is_some_and(|version| version < MIN_OLLAMA_VERSION && version != UNVERSIONED)
}

/// What Ollama tells about a model.
async fn show(server: &EndpointClient, name: &str) -> Result<OllamaModel, Option<reqwest::StatusCode>> {
    let request = server.client.post(format!("{}/api/show", server.root()));
    ask(server, request.json(&json!({ "model": name, "verbose": true }))).await
}

/// The answer to a request. The error is the status; `None` if the answer is too long or not of this form.
async fn ask<T: DeserializeOwned>(
    server: &EndpointClient,
    request: reqwest::RequestBuilder,
) -> Result<T, Option<reqwest::StatusCode>> {
    let mut answer = server.authorized(request).send().await.map_err(|_| None)?;
    if !answer.status().is_success() {
        return Err(Some(answer.status()));
    }
    let mut body = Vec::new();
    while body.len() < MAX_ANSWER_BYTES {
        match answer.chunk().await.map_err(|_| None)? {
            Some(bytes) => body.extend_from_slice(&bytes),
            None => break,
        }
    }
    serde_json::from_slice(&body).map_err(|_| None)
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

    #[test]
    fn context_of_a_model_is_found_in_the_lists_of_known_servers() {
        let list = json!({ "data": [
            { "id": "other", "max_model_len": 1 },
            { "id": "vllm", "max_model_len": 32_768 },
            { "id": "open/router", "context_length": 200_000, "top_provider": { "context_length": 131_072 } },
            { "id": "no/limit", "context_length": 8192, "top_provider": { "context_length": null } },
            { "id": "lm-studio", "max_context_length": 131_072, "loaded_context_length": 4096 },
            { "id": "not-loaded", "max_context_length": 131_072 },
            { "id": "wrong", "max_model_len": 99_999_999_999u64 },
            { "id": "plain" },
        ] });
        for (name, expected) in [
            ("vllm", Some(32_768)),
            ("open/router", Some(131_072)),
            ("no/limit", Some(8192)),
            ("lm-studio", Some(4096)),
            ("not-loaded", None),
            ("wrong", None),
            ("plain", None),
            ("absent", None),
        ] {
            assert_eq!(listed_context(&list, name), expected, "{name}");
        }
        assert_eq!(listed_context(&json!({ "object": "list" }), "a"), None);
    }

    #[test]
    fn versions_of_ollama_are_compared_by_number() {
        for old in ["0.12.5", "0.9.6", "0.1.48", "v0.12.0-rc1"] {
            assert!(is_outdated(old), "{old}");
        }
        for new in ["0.12.6", "0.12.10", "0.32.15", "1.0.0", "0.0.0", "0.12.6-rc0", "", "main", "0.13"] {
            assert!(!is_outdated(new), "{new}");
        }
    }
}
