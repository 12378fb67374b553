//! The body of a chat request.

use cfq_proto::job::{OutputFormat, Prompt, PromptForm};
use cfq_proto::task::Priority;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;

use super::error::OpenAiError;
use super::message::{Message, chat_messages};
use super::parameters::{Delivery, Parameters, unsupported};
use super::tools::{Tool, Tools};

/// Maximum output if the request names none, in tokens. It is not the model's context, because placement and the KV pool
/// reserve room for it, and servers behind endpoints refuse more than their context holds.
const DEFAULT_MAX_TOKENS: u32 = 2_048;
/// Maximum number of alternatives for each token.
const MAX_TOP_LOGPROBS: u8 = 20;

/// A chat request as the client sent it, without the parameters that text requests have too.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(expecting = "a JSON object with model and messages")]
pub struct ChatRequest {
    /// An id of `GET /v1/models`.
    pub model: String,
    messages: Vec<Message>,
    /// Maximum length of the output, in tokens; 2,048 by default.
    #[serde(default)]
    max_completion_tokens: Option<u32>,
    /// Returns the log probabilities of the output; not in a stream.
    #[serde(default)]
    logprobs: Option<bool>,
    /// Number of most likely tokens at each position.
    #[serde(default)]
    #[schemars(range(max = 20))]
    top_logprobs: Option<u8>,
    #[serde(default)]
    prediction: Option<Prediction>,
    /// Functions that the model may call.
    #[serde(default)]
    tools: Option<Vec<Tool>>,
    /// `auto`, `none`, `required`, or an object that names a function.
    #[serde(default)]
    tool_choice: Option<Value>,
    #[serde(default)]
    parallel_tool_calls: Option<bool>,
    /// Must be `text` only.
    #[serde(default)]
    modalities: Option<Vec<String>>,
}

/// Text that the answer may repeat, for example a file that it edits.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
struct Prediction {
    /// Text, or a list of text parts.
    content: Value,
}

/// A checked request, without its model.
#[derive(Debug, Clone)]
pub struct Call {
    pub prompt: Prompt,
    /// The functions that the model may call.
    pub tools: Tools,
    pub priority: Priority,
    pub delivery: Delivery,
    /// The parameter that constrains the output.
    pub constraint: Option<&'static str>,
}

impl ChatRequest {
    /// Checks the request.
    pub fn into_call(mut self, parameters: &Parameters) -> Result<Call, OpenAiError> {
        parameters.refuse_unsupported()?;
        if self.modalities.iter().flatten().any(|kind| kind != "text") {
            return Err(unsupported("modalities"));
        }
        let tools = Tools::of(self.tools.take().unwrap_or_default(), self.tool_choice.as_ref())?
            .with_parallel_calls(self.parallel_tool_calls.unwrap_or(true));
        let constraint = parameters.constraint().or_else(|| tools.constraint().map(|_| "tools"));
        let delivery = parameters.delivery();
        let limit = self.max_completion_tokens.map(|limit| ("max_completion_tokens", limit));
        let mut sampling = parameters.sampling(parameters.max_tokens(limit, DEFAULT_MAX_TOKENS)?)?;
        sampling.logprobs = self.logprobs(delivery)?;
        sampling.previous = self.predicted_text()?;
        let format = match (parameters.format()?, tools.constraint()) {
            (format, None) => format,
            (OutputFormat::Text, Some(call)) => call,
            (_, Some(_)) => {
                return Err(OpenAiError::invalid(
                    "tool_choice",
                    "tool_choice: a call of a function cannot be required together with another format of the output",
                ));
            }
        };
        let priority = parameters.priority()?;
        let mut messages = chat_messages(self.messages)?;
        tools.describe(&mut messages);
        let prompt = Prompt { messages, sampling, format, form: PromptForm::Chat };
        Ok(Call { prompt, tools, priority, delivery, constraint })
    }

    fn logprobs(&self, delivery: Delivery) -> Result<Option<u8>, OpenAiError> {
        let logprobs = match (self.logprobs, self.top_logprobs) {
            (Some(true), top) if top.is_none_or(|top| top <= MAX_TOP_LOGPROBS) => Some(top.unwrap_or(0)),
            (Some(true), _) => return Err(OpenAiError::invalid("top_logprobs", "top_logprobs: must be from 0 to 20")),
            (_, Some(top)) if top > 0 => {
                return Err(OpenAiError::invalid("top_logprobs", "top_logprobs: needs logprobs to be true"));
            }
            _ => None,
        };
        if logprobs.is_some() && delivery != Delivery::Json {
            return Err(OpenAiError::invalid("logprobs", "logprobs: are not sent in a stream; set stream to false"));
        }
        Ok(logprobs)
    }

    fn predicted_text(&self) -> Result<String, OpenAiError> {
        let Some(prediction) = &self.prediction else { return Ok(String::new()) };
        let part = |part: &Value| part["text"].as_str().map(str::to_owned);
        let text = match &prediction.content {
            Value::String(text) => Some(text.clone()),
            Value::Array(parts) => parts.iter().map(part).collect(),
            _ => None,
        };
        text.ok_or_else(|| OpenAiError::invalid("prediction.content", "prediction.content: must be text"))
    }
}

#[cfg(test)]
mod tests {
    use cfq_proto::job::Sampling;
    use serde_json::json;

    use super::*;

    fn read(fields: Value) -> Result<Call, Value> {
        let mut body = json!({ "model": "m", "messages": [{ "role": "user", "content": "x" }] });
        for (name, value) in fields.as_object().unwrap() {
            body[name] = value.clone();
        }
        let request: ChatRequest = serde_json::from_value(body.clone()).unwrap();
        request.into_call(&serde_json::from_value(body).unwrap()).map_err(|error| error.to_json()["error"].clone())
    }

    #[test]
    fn parameters_of_the_protocol_reach_the_sampler() {
        let call = read(json!({
            "stream": true, "stream_options": { "include_usage": true }, "max_completion_tokens": 7, "temperature": 0.5,
            "top_p": 0.9, "top_k": 40, "min_p": 0.1, "frequency_penalty": 1, "presence_penalty": -1, "seed": 42,
            "stop": ["a", "b"], "prediction": { "type": "content", "content": [{ "type": "text", "text": "old" }] },
            "service_tier": "flex", "user": "u", "parallel_tool_calls": false, "tools": [], "logit_bias": {},
        }))
        .unwrap();
        let sampling = Sampling {
            temperature: 0.5,
            top_p: Some(0.9),
            top_k: Some(40),
            min_p: Some(0.1),
            frequency_penalty: 1.0,
            presence_penalty: -1.0,
            seed: 42,
            stop: vec!["a".into(), "b".into()],
            max_tokens: 7,
            previous: "old".into(),
            ..Sampling::default()
        };
        assert_eq!(call.prompt.sampling, sampling);
        assert_eq!((call.priority, call.delivery), (Priority::P3, Delivery::Stream { include_usage: true }));

        let plain = read(json!({})).unwrap();
        let Sampling { temperature, max_tokens, .. } = plain.prompt.sampling;
        assert_eq!((temperature, max_tokens, plain.priority), (1.0, DEFAULT_MAX_TOKENS, Priority::P1));
        assert!(read(json!({ "best_of": 1, "function_call": "none", "suffix": "x" })).is_ok());
        assert!(read(json!({ "ignore_eos": false, "min_tokens": 0, "guided_json": null, "metadata": {} })).is_ok());
        assert_eq!((plain.delivery, plain.prompt.format), (Delivery::Json, OutputFormat::Text));
        assert_ne!(read(json!({})).unwrap().prompt.sampling.seed, plain.prompt.sampling.seed);
        let logprobs = read(json!({ "logprobs": true, "top_logprobs": 3 })).unwrap();
        assert_eq!(logprobs.prompt.sampling.logprobs, Some(3));
    }

    #[test]
    fn constraint_of_the_output_is_taken_from_either_parameter() {
        let format = |fields| read(fields).unwrap().prompt.format;
        let schema = json!({ "type": "array" });
        let named = json!({ "type": "json_schema", "json_schema": { "name": "x", "strict": true, "schema": schema } });
        assert_eq!(format(json!({ "response_format": named })), OutputFormat::JsonSchema { schema: schema.clone() });
        let object = OutputFormat::JsonSchema { schema: json!({ "type": "object" }) };
        assert_eq!(format(json!({ "response_format": { "type": "json_object" } })), object);
        assert_eq!(format(json!({ "response_format": { "type": "text" } })), OutputFormat::Text);
        let regex = OutputFormat::Regex { pattern: "a+".into() };
        assert_eq!(format(json!({ "structured_outputs": { "regex": "a+" } })), regex);
        let choice = OutputFormat::Regex { pattern: r"yes\.|<no\!>".into() };
        assert_eq!(format(json!({ "structured_outputs": { "choice": ["yes.", "<no!>"] } })), choice);
        let both = json!({ "response_format": { "type": "json_object" }, "structured_outputs": { "regex": "a+" } });
        assert_eq!(read(both).unwrap_err()["param"], "structured_outputs");
    }

    #[test]
    fn unusable_parameter_is_named() {
        for (fields, param) in [
            (json!({ "n": 2 }), "n"),
            (json!({ "max_tokens": 0 }), "max_tokens"),
            (json!({ "temperature": 2.1 }), "temperature"),
            (json!({ "top_p": 0 }), "top_p"),
            (json!({ "presence_penalty": 3 }), "presence_penalty"),
            (json!({ "stop": [""] }), "stop"),
            (json!({ "logprobs": true, "top_logprobs": 21 }), "top_logprobs"),
            (json!({ "top_logprobs": 2 }), "top_logprobs"),
            (json!({ "logprobs": true, "stream": true }), "logprobs"),
            (json!({ "tools": [{ "type": "web_search" }] }), "tools[0].type"),
            (json!({ "functions": [{}] }), "functions"),
            (json!({ "logit_bias": { "1": 5 } }), "logit_bias"),
            (json!({ "modalities": ["text", "audio"] }), "modalities"),
            (json!({ "service_tier": "gold" }), "service_tier"),
            (json!({ "guided_choice": ["a", "b"] }), "guided_choice"),
            (json!({ "min_tokens": 3 }), "min_tokens"),
            (json!({ "ignore_eos": true }), "ignore_eos"),
            (json!({ "structured_outputs": {} }), "structured_outputs"),
            (json!({ "structured_outputs": { "choice": [] } }), "structured_outputs"),
            (json!({ "prediction": { "type": "content", "content": 1 } }), "prediction.content"),
        ] {
            let error = read(fields.clone()).unwrap_err();
            let message = error["message"].as_str().unwrap();
            assert!(error["param"] == param && message.starts_with(param), "{fields}: {error}");
        }
        let tool = json!([{ "type": "function", "function": { "name": "f" } }]);
        let required = json!({ "tools": tool, "tool_choice": "required" });
        let call = read(required.clone()).unwrap();
        assert!(matches!(call.prompt.format, OutputFormat::JsonSchema { .. }) && !call.tools.is_empty());
        assert!(call.prompt.messages[0].content.contains("<tools>"), "{:?}", call.prompt.messages);
        let mut both = required;
        both["response_format"] = json!({ "type": "json_object" });
        assert_eq!(read(both).unwrap_err()["param"], "tool_choice");
        assert!(read(json!({ "tools": tool, "tool_choice": "none" })).unwrap().tools.is_empty());
    }
}
