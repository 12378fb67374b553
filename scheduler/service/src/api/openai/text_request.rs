//! The body of a text request: a prompt without a conversation.

use cfq_proto::job::{ChatMessage, ChatRole, Prompt, PromptForm};
use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::chat_request::Call;
use super::error::OpenAiError;
use super::parameters::{Delivery, Parameters, unsupported};
use super::tools::Tools;

/// Maximum output if the request names none, in tokens, as in the protocol.
const DEFAULT_MAX_TOKENS: u32 = 16;
/// Maximum number of alternatives for each token.
const MAX_LOGPROBS: u8 = 20;

/// A text request as the client sent it, without the parameters that chat requests have too.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(expecting = "a JSON object with model and prompt")]
pub struct TextRequest {
    /// An id of `GET /v1/models`.
    pub model: String,
    prompt: TextPrompt,
    /// Returns the log probabilities of the output, with this number of most likely tokens at each position; not in a
    /// stream.
    #[serde(default)]
    #[schemars(range(max = 20))]
    logprobs: Option<u8>,
    /// The same as `max_tokens`.
    #[serde(default)]
    max_completion_tokens: Option<u32>,
    /// Text after the output: must be empty.
    #[serde(default)]
    suffix: Option<String>,
    #[serde(default)]
    #[schemars(skip)]
    messages: Option<IgnoredAny>,
    #[serde(default)]
    #[schemars(skip)]
    tools: Option<Vec<IgnoredAny>>,
    #[serde(default)]
    #[schemars(skip)]
    top_logprobs: Option<u8>,
}

#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "must be text, or a list of one text; lists of tokens are not supported")]
enum TextPrompt {
    One(String),
    List(Vec<String>),
}

impl TextRequest {
    /// Checks the request.
    pub fn into_call(self, parameters: &Parameters) -> Result<Call, OpenAiError> {
        parameters.refuse_unsupported()?;
        let of_chats = [
            ("messages", self.messages.is_some()),
            ("tools", self.tools.is_some_and(|tools| !tools.is_empty())),
            ("top_logprobs", self.top_logprobs.is_some_and(|top| top > 0)),
        ];
        if let Some((param, _)) = of_chats.into_iter().find(|(_, is_used)| *is_used) {
            let message = format!("{param}: is a parameter of /v1/chat/completions; leave it out, or use that path");
            return Err(OpenAiError::invalid(param, message));
        }
        if self.suffix.is_some_and(|suffix| !suffix.is_empty()) {
            return Err(unsupported("suffix"));
        }
        let delivery = parameters.delivery();
        let limit = self.max_completion_tokens.map(|limit| ("max_completion_tokens", limit));
        let mut sampling = parameters.sampling(parameters.max_tokens(limit, DEFAULT_MAX_TOKENS)?)?;
        sampling.logprobs = self.logprobs;
        if self.logprobs.is_some_and(|logprobs| logprobs > MAX_LOGPROBS) {
            return Err(OpenAiError::invalid("logprobs", "logprobs: must be from 0 to 20"));
        }
        if self.logprobs.is_some() && delivery != Delivery::Json {
            return Err(OpenAiError::invalid("logprobs", "logprobs: are not sent in a stream; set stream to false"));
        }
        let content = match self.prompt {
            TextPrompt::One(text) => text,
            TextPrompt::List(mut texts) => match (texts.pop(), texts.len()) {
                (Some(text), 0) => text,
                _ => return Err(OpenAiError::invalid("prompt", "prompt: send one request for each prompt")),
            },
        };
        if content.is_empty() {
            return Err(OpenAiError::invalid("prompt", "prompt: is empty; send the text that the model continues"));
        }
        let messages = vec![ChatMessage { role: ChatRole::User, content }];
        let prompt = Prompt { messages, sampling, format: parameters.format()?, form: PromptForm::Text };
        Ok(Call {
            prompt,
            tools: Tools::default(),
            priority: parameters.priority()?,
            delivery,
            constraint: parameters.constraint(),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(fields: Value) -> Result<Call, Value> {
        let mut body = json!({ "model": "m", "prompt": "x" });
        for (name, value) in fields.as_object().unwrap() {
            body[name] = value.clone();
        }
        let request: TextRequest = serde_json::from_value(body.clone()).unwrap();
        request.into_call(&serde_json::from_value(body).unwrap()).map_err(|error| error.to_json()["error"].clone())
    }

    #[test]
    fn prompt_is_taken_as_it_is() {
        let call = read(json!({ "prompt": ["a b"], "logprobs": 2, "temperature": 0.5 })).unwrap();
        let Prompt { messages, sampling, form, .. } = call.prompt;
        assert_eq!((messages[0].content.as_str(), messages.len(), form), ("a b", 1, PromptForm::Text));
        assert_eq!((sampling.max_tokens, sampling.logprobs, sampling.temperature), (16, Some(2), 0.5));
        assert_eq!(read(json!({ "max_tokens": 7 })).unwrap().prompt.sampling.max_tokens, 7);
        assert_eq!(read(json!({ "max_completion_tokens": 8 })).unwrap().prompt.sampling.max_tokens, 8);
        assert!(read(json!({ "suffix": "", "tools": [], "top_logprobs": 0 })).is_ok());
    }

    #[test]
    fn unusable_parameter_is_named() {
        for (fields, param) in [
            (json!({ "prompt": "" }), "prompt"),
            (json!({ "prompt": [] }), "prompt"),
            (json!({ "prompt": ["a", "b"] }), "prompt"),
            (json!({ "logprobs": 21 }), "logprobs"),
            (json!({ "logprobs": 0, "stream": true }), "logprobs"),
            (json!({ "echo": true }), "echo"),
            (json!({ "best_of": 2 }), "best_of"),
            (json!({ "suffix": "end" }), "suffix"),
            (json!({ "messages": [] }), "messages"),
            (json!({ "tools": [{}] }), "tools"),
            (json!({ "top_logprobs": 2 }), "top_logprobs"),
            (json!({ "max_completion_tokens": 0 }), "max_completion_tokens"),
            (json!({ "n": 2 }), "n"),
        ] {
            let error = read(fields.clone()).unwrap_err();
            let message = error["message"].as_str().unwrap();
            assert!(error["param"] == param && message.starts_with(param), "{fields}: {error}");
        }
    }
}
