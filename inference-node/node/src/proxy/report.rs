//! What a server reports about a model: the control tokens and the context length. The OpenAI protocol has no request for
//! this, so the requests of the known programs are tried; other servers answer them with an error.
//! - llama.cpp: `GET /props` has the chat template, the names of BOS and EOS, and the context length.
//! - Ollama: `POST /api/show` has the template, the parameters, the maximum context length, and the tokens with their
//!   kinds.
//! - vLLM, if it was started with `--enable-tokenizer-info-endpoint`: `GET /tokenizer_info` has the chat template and the
//!   special tokens.
//! - LM Studio: `GET /api/v0/models` has the context length with which the model is loaded.
//! - vLLM, OpenRouter and others: the list of models has the context length.

use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::context_error::plausible_length;
use super::control_names::ControlNames;
use super::protocol::{Protocol, RemoteModel};
use super::server::Server;

mod ollama_model;

use ollama_model::OllamaModel;

/// Context length of models on Ollama, in tokens, if neither the configuration nor the model sets one. Ollama's own
/// default is 4,096 tokens on GPUs with less than 24 GiB, which the prompt of a review exceeds; longer contexts need
/// memory that such GPUs often lack.
pub(super) const OLLAMA_CONTEXT_TOKENS: u32 = 16_384;
/// First version of Ollama whose chat requests have the field `truncate`.
const MIN_OLLAMA_VERSION: [u64; 3] = [0, 12, 6];
/// Version of Ollama programs that are built from source.
const UNVERSIONED: [u64; 3] = [0, 0, 0];
/// Maximum bytes that are read of an answer of Ollama about a model: it has the whole vocabulary, with its merges.
const MAX_MODEL_BYTES: usize = 64 << 20;
/// Maximum bytes that are read of another answer. The longest lists of models have about 1 MiB.
const MAX_ANSWER_BYTES: usize = 4 << 20;
/// Timeout of one question.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// The same for the whole vocabulary, over a slow network.
const MODEL_TIMEOUT: Duration = Duration::from_secs(60);

/// What a server reports about a model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ModelReport {
    /// Names of the control tokens; `None` if the server does not report them.
    pub(super) control_names: Option<Arc<ControlNames>>,
    /// Context length, in tokens.
    pub(super) context_tokens: Option<u32>,
    /// Maximum context length of the model, in tokens.
    pub(super) max_context_tokens: Option<u32>,
    /// Why the model cannot be used although the server answers.
    pub(super) unusable: Option<String>,
    /// Whether the last questions were not answered, so that they are asked again. The other fields are those of the last
    /// answers.
    pub(super) is_incomplete: bool,
    /// Whether the server has ever answered. Ollama has named its version then.
    pub(super) is_answered: bool,
}

/// The server did not answer a question: the connection broke, the time was over, or it reports an error of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Unanswered;

/// Asks the server about a model. `before` is the last report: what the server does not answer now is taken from it.
pub(super) async fn of_model(server: &Server, model: &RemoteModel, before: ModelReport) -> ModelReport {
    match model.protocol {
        Protocol::OpenAi => of_openai_model(server, &model.name, before).await,
        Protocol::Ollama => of_ollama_model(server, model, before).await,
    }
}

/// Why a model cannot be used that is not on its server.
pub(super) fn missing(server: &Server, model: &RemoteModel) -> String {
    let (url, name, endpoint) = (server.root(), &model.name, &server.name);
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

async fn of_openai_model(server: &Server, name: &str, before: ModelReport) -> ModelReport {
    let root = server.root();
    let get = |path: &str| server.client.get(format!("{root}{path}"));
    let mut is_incomplete = false;
    let properties = ask::<Properties>(server, get("/props")).await;
    if let Some(answer) = answered(properties, &mut is_incomplete) {
        let Properties { chat_template, bos_token, eos_token, default_generation_settings } = answer;
        let names = ControlNames::of_template(&chat_template).with([bos_token, eos_token]);
        let context_tokens = default_generation_settings.n_ctx.and_then(plausible_length);
        let control_names = Some(Arc::new(names));
        return ModelReport { control_names, context_tokens, is_answered: true, ..ModelReport::default() };
    }
    let shown = show(server, name).await.map(|answer| if let Answer::Is(model) = answer { Some(model) } else { None });
    if let Some(model) = answered(shown, &mut is_incomplete) {
        if !before.is_answered {
            tracing::warn!(
                endpoint = server.name,
                model = name,
                "this server is Ollama, whose OpenAI-compatible API silently truncates long prompts; use the model id \
                 ollama:{}/{name}",
                server.name
            );
        }
        let control_names = Some(Arc::new(model.control_names()));
        return ModelReport { control_names, is_answered: true, ..ModelReport::default() };
    }
    let tokenizer = answered(ask::<Value>(server, get("/tokenizer_info")).await, &mut is_incomplete);
    let mut control_names = tokenizer.and_then(|answer| names_of_tokenizer(&answer)).map(Arc::new);
    let mut context_tokens = None;
    for list in [get("/api/v0/models"), server.client.get(format!("{}/models", server.url))] {
        if context_tokens.is_none() {
            let list = answered(ask::<ModelList>(server, list).await, &mut is_incomplete);
            context_tokens = list.and_then(|list| list.context_length(name));
        }
    }
    if is_incomplete {
        control_names = control_names.or(before.control_names);
        context_tokens = context_tokens.or(before.context_tokens);
    }
    ModelReport { control_names, context_tokens, is_incomplete, is_answered: true, ..ModelReport::default() }
}

/// The answer; `None` and an incomplete report if there was none.
fn answered<T>(answer: Result<Option<T>, Unanswered>, is_incomplete: &mut bool) -> Option<T> {
    answer.unwrap_or_else(|Unanswered| {
        *is_incomplete = true;
        None
    })
}

/// A list of models, in the forms of LM Studio, vLLM and OpenRouter.
#[derive(Deserialize)]
struct ModelList {
    data: Vec<ListedModel>,
}

#[derive(Deserialize)]
struct ListedModel {
    id: String,
    /// In LM Studio, if the model is loaded.
    loaded_context_length: Option<u64>,
    /// In vLLM.
    max_model_len: Option<u64>,
    /// In OpenRouter: the maximum of all providers, and that of the provider that is used.
    context_length: Option<u64>,
    top_provider: Option<Provider>,
}

#[derive(Deserialize)]
struct Provider {
    context_length: Option<u64>,
}

impl ModelList {
    /// The context length of a model.
    fn context_length(&self, name: &str) -> Option<u32> {
        let model = self.data.iter().find(|model| model.id == name)?;
        let of_provider = model.top_provider.as_ref().and_then(|provider| provider.context_length);
        let lengths = [model.loaded_context_length, model.max_model_len, of_provider, model.context_length];
        lengths.into_iter().flatten().find_map(plausible_length)
    }
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

async fn of_ollama_model(server: &Server, model: &RemoteModel, before: ModelReport) -> ModelReport {
    let unusable = |reason| ModelReport { unusable: Some(reason), is_answered: true, ..ModelReport::default() };
    match unusable_ollama(server).await {
        Ok(None) => {}
        Ok(Some(reason)) => return unusable(reason),
        Err(Unanswered) => return ModelReport { is_incomplete: true, ..before },
    }
    match show(server, &model.name).await {
        Ok(Answer::Is(shown)) => ModelReport {
            control_names: Some(Arc::new(shown.control_names())),
            context_tokens: shown.num_ctx().and_then(plausible_length),
            max_context_tokens: shown.max_context().and_then(plausible_length),
            is_answered: true,
            ..ModelReport::default()
        },
        Ok(Answer::NotFound) => unusable(missing(server, model)),
        Ok(Answer::Other) => ModelReport { is_answered: true, ..ModelReport::default() },
        Err(Unanswered) => ModelReport { unusable: None, is_incomplete: true, is_answered: true, ..before },
    }
}

/// Why the server cannot be used in Ollama's protocol; `None` if it can.
pub(super) async fn unusable_ollama(server: &Server) -> Result<Option<String>, Unanswered> {
    let version = server.client.get(format!("{}/api/version", server.root()));
    Ok(match question(server, version, MAX_ANSWER_BYTES, ANSWER_TIMEOUT).await? {
        Answer::Is(Version { version }) => {
            parse_version(&version).filter(is_outdated).map(|version| outdated(server.root(), version))
        }
        Answer::NotFound => {
            let (url, endpoint) = (server.root(), &server.name);
            Some(format!(
                "{url} is not Ollama; for a server with the OpenAI protocol, name its models openai:{endpoint}/MODEL"
            ))
        }
        Answer::Other => None,
    })
}

/// Why a version of Ollama cannot be used.
fn outdated(url: &str, version: [u64; 3]) -> String {
    let text = |version: [u64; 3]| version.map(|number| number.to_string()).join(".");
    format!(
        "{url} is Ollama {}, which silently truncates long prompts; update it to {} or later",
        text(version),
        text(MIN_OLLAMA_VERSION)
    )
}

/// The numbers of a version; `None` if it has another form.
fn parse_version(version: &str) -> Option<[u64; 3]> {
    let numbers = version.trim_start_matches('v').split(['-', '+']).next().unwrap_or_default().split('.');
    numbers.map(|number| number.parse().ok()).collect::<Option<Vec<u64>>>()?.try_into().ok()
}

/// Whether this version of Ollama cannot report prompts that are too long as errors.
fn is_outdated(version: &[u64; 3]) -> bool {
    *version < MIN_OLLAMA_VERSION && *version != UNVERSIONED
}

/// What Ollama reports about a model.
async fn show(server: &Server, name: &str) -> Result<Answer<OllamaModel>, Unanswered> {
    let request = server.client.post(format!("{}/api/show", server.root()));
    question(server, request.json(&json!({ "model": name, "verbose": true })), MAX_MODEL_BYTES, MODEL_TIMEOUT).await
}

/// An answer to a question.
enum Answer<T> {
    Is(T),
    NotFound,
    /// Another status, or another form.
    Other,
}

/// The answer to a question in this form; `None` if the server has another one.
async fn ask<T: DeserializeOwned>(server: &Server, request: reqwest::RequestBuilder) -> Result<Option<T>, Unanswered> {
    Ok(match question(server, request, MAX_ANSWER_BYTES, ANSWER_TIMEOUT).await? {
        Answer::Is(answer) => Some(answer),
        Answer::NotFound | Answer::Other => None,
    })
}

async fn question<T: DeserializeOwned>(
    server: &Server,
    request: reqwest::RequestBuilder,
    max_bytes: usize,
    timeout: Duration,
) -> Result<Answer<T>, Unanswered> {
    let request = server.authorized(request).timeout(timeout);
    let mut answer = request.send().await.map_err(|_| Unanswered)?;
    match answer.status() {
        reqwest::StatusCode::NOT_FOUND => return Ok(Answer::NotFound),
        reqwest::StatusCode::NOT_IMPLEMENTED => return Ok(Answer::Other),
        status if status.is_server_error() => return Err(Unanswered),
        status if !status.is_success() => return Ok(Answer::Other),
        _ => {}
    }
    let mut body = Vec::new();
    while let Some(bytes) = answer.chunk().await.map_err(|_| Unanswered)? {
        if body.len() + bytes.len() > max_bytes {
            return Ok(Answer::Other);
        }
        body.extend_from_slice(&bytes);
    }
    Ok(serde_json::from_slice(&body).map_or(Answer::Other, Answer::Is))
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
    fn context_length_is_found_in_the_lists_of_known_servers() {
        let list = json!({ "object": "list", "data": [
            { "id": "other", "max_model_len": 4096, "name": "Other" },
            { "id": "vllm", "max_model_len": 32_768 },
            { "id": "open/router", "context_length": 200_000, "top_provider": { "context_length": 131_072 } },
            { "id": "no/limit", "context_length": 8192, "top_provider": { "context_length": null } },
            { "id": "lm-studio", "max_context_length": 131_072, "loaded_context_length": 4096 },
            { "id": "not-loaded", "max_context_length": 131_072 },
            { "id": "wrong", "max_model_len": 99_999_999_999u64 },
            { "id": "plain" },
        ] });
        let list: ModelList = serde_json::from_value(list).unwrap();
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
            assert_eq!(list.context_length(name), expected, "{name}");
        }
    }

    #[test]
    fn versions_of_ollama_are_compared_by_number() {
        let is_outdated = |version| parse_version(version).is_some_and(|version| is_outdated(&version));
        for old in ["0.12.5", "0.9.6", "0.1.48", "v0.12.0-rc1"] {
            assert!(is_outdated(old), "{old}");
        }
        for new in ["0.12.6", "0.12.10", "0.32.15", "1.0.0", "0.0.0", "0.12.6-rc0", "", "main", "0.13"] {
            assert!(!is_outdated(new), "{new}");
        }
        // The text of the server is not repeated.
        assert!(outdated("u", parse_version("0.1.0-sk-key").unwrap()).starts_with("u is Ollama 0.1.0, which"));
    }
}
