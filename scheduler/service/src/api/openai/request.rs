//! The body of a chat request. Parameters that only describe the client are ignored. A parameter that would change the
//! result, and that cfq does not support, is refused.

use cfq_proto::job::{OutputFormat, Prompt, Sampling};
use cfq_proto::task::Priority;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use uuid::Uuid;

use super::error::OpenAiError;
use super::message::{Message, chat_messages};
use super::tools::{Tool, Tools};

/// Maximum output if the request names none, in tokens. It is not the model's context, because placement and the KV pool
/// reserve room for it, and servers behind endpoints refuse more than their context holds.
const DEFAULT_MAX_TOKENS: u32 = 2_048;
/// Maximum number of stop strings.
const MAX_STOP_STRINGS: usize = 16;
/// Maximum number of alternatives for each token.
const MAX_TOP_LOGPROBS: u8 = 20;

/// A chat request as the client sent it.
#[derive(Debug, Clone, Deserialize)]
#[serde(expecting = "a JSON object with model and messages")]
pub struct ChatRequest {
    pub model: String,
    messages: Vec<Message>,
    #[serde(default)]
    stream: Option<bool>,
    #[serde(default)]
    stream_options: Option<StreamOptions>,
    #[serde(default)]
    max_tokens: Option<u32>,
    #[serde(default)]
    max_completion_tokens: Option<u32>,
    #[serde(default)]
    temperature: Option<f32>,
    #[serde(default)]
    top_p: Option<f32>,
    #[serde(default)]
    top_k: Option<i64>,
    #[serde(default)]
    min_p: Option<f32>,
    #[serde(default)]
    repetition_penalty: Option<f32>,
    #[serde(default)]
    frequency_penalty: Option<f32>,
    #[serde(default)]
    presence_penalty: Option<f32>,
    #[serde(default)]
    seed: Option<i64>,
    #[serde(default)]
    stop: Option<Stop>,
    #[serde(default)]
    n: Option<u32>,
    #[serde(default)]
    logprobs: Option<bool>,
    #[serde(default)]
    top_logprobs: Option<u8>,
    #[serde(default)]
    response_format: Option<ResponseFormat>,
    #[serde(default)]
    structured_outputs: Option<StructuredOutputs>,
    #[serde(default)]
    prediction: Option<Prediction>,
    #[serde(default)]
    service_tier: Option<String>,
    #[serde(default)]
    tools: Option<Vec<Tool>>,
    #[serde(default)]
    tool_choice: Option<Value>,
    #[serde(default)]
    parallel_tool_calls: Option<bool>,
    #[serde(default)]
    modalities: Option<Vec<String>>,
    /// All other parameters.
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// Parameters of the protocol and of other servers that would change the result, and that cfq does not support.
const UNSUPPORTED: [&str; 17] = [
    "functions",
    "function_call",
    "logit_bias",
    "audio",
    "web_search_options",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "bad_words",
    "echo",
    "best_of",
    "use_beam_search",
    "chat_template_kwargs",
];

#[derive(Debug, Clone, Default, Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: Option<bool>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(untagged, expecting = "must be text or a list of texts")]
enum Stop {
    One(String),
    Many(Vec<String>),
}

#[derive(Debug, Clone, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ResponseFormat {
    Text,
    JsonObject,
    JsonSchema { json_schema: NamedSchema },
}

#[derive(Debug, Clone, Deserialize)]
struct NamedSchema {
    #[serde(default)]
    schema: Option<Value>,
}

/// Constraints beyond the protocol, with the names that vLLM uses.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct StructuredOutputs {
    #[serde(default)]
    json: Option<Value>,
    #[serde(default)]
    choice: Option<Vec<String>>,
    #[serde(default)]
    regex: Option<String>,
    #[serde(default)]
    grammar: Option<String>,
}

/// Text that the answer may repeat, for example a file that it edits.
#[derive(Debug, Clone, Deserialize)]
struct Prediction {
    content: Value,
}

/// How the result is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    /// As one JSON body.
    Json,
    /// As server-sent events; the last one has the usage if the client asked for it.
    Stream { include_usage: bool },
}

/// A checked request, without its model.
#[derive(Debug, Clone)]
pub struct ChatCall {
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
    pub fn into_call(mut self) -> Result<ChatCall, OpenAiError> {
        self.refuse_unsupported()?;
        let tools = Tools::of(self.tools.take().unwrap_or_default(), self.tool_choice.as_ref())?
            .with_parallel_calls(self.parallel_tool_calls.unwrap_or(true));
        let constraint = match (&self.structured_outputs, &self.response_format) {
            (Some(_), _) => Some("structured_outputs"),
            (None, Some(ResponseFormat::JsonSchema { .. } | ResponseFormat::JsonObject)) => Some("response_format"),
            (None, Some(ResponseFormat::Text) | None) => tools.constraint().map(|_| "tools"),
        };
        let delivery = match self.stream {
            Some(true) => {
                let options = self.stream_options.clone().unwrap_or_default();
                Delivery::Stream { include_usage: options.include_usage.unwrap_or(false) }
            }
            _ => Delivery::Json,
        };
        let sampling = self.sampling(delivery)?;
        let format = match (self.format()?, tools.constraint()) {
            (format, None) => format,
            (OutputFormat::Text, Some(call)) => call,
            (_, Some(_)) => {
                return Err(OpenAiError::invalid(
                    "tool_choice",
                    "tool_choice: a call of a function cannot be required together with another format of the output",
                ));
            }
        };
        let priority = priority(self.service_tier.as_deref())?;
        let mut messages = chat_messages(self.messages)?;
        tools.describe(&mut messages);
        let prompt = Prompt { messages, sampling, format };
        Ok(ChatCall { prompt, tools, priority, delivery, constraint })
    }

    fn refuse_unsupported(&self) -> Result<(), OpenAiError> {
        let is_used = |param: &str, value: &Value| match value {
            Value::Null | Value::Bool(false) => false,
            Value::Number(number) => number.as_f64() != Some(if param == "best_of" { 1.0 } else { 0.0 }),
            Value::Array(values) => !values.is_empty(),
            Value::Object(values) => !values.is_empty(),
            Value::String(text) => text != "none",
            Value::Bool(true) => true,
        };
        let mut used =
            UNSUPPORTED.into_iter().filter(|param| self.others.get(*param).is_some_and(|value| is_used(param, value)));
        let other_modality = self.modalities.iter().flatten().any(|kind| kind != "text").then_some("modalities");
        match used.next().or(other_modality) {
            Some(param) => {
                Err(OpenAiError::invalid(param, format!("{param}: is not supported by cfq yet; leave it out")))
            }
            None => Ok(()),
        }
    }

    fn sampling(&self, delivery: Delivery) -> Result<Sampling, OpenAiError> {
        if self.n.is_some_and(|n| n != 1) {
            return Err(OpenAiError::invalid("n", "n: must be 1; send one request for each choice"));
        }
        let (param, limit) = match (self.max_completion_tokens, self.max_tokens) {
            (Some(limit), _) => ("max_completion_tokens", limit),
            (None, Some(limit)) => ("max_tokens", limit),
            (None, None) => ("max_tokens", DEFAULT_MAX_TOKENS),
        };
        if limit == 0 {
            return Err(OpenAiError::invalid(param, format!("{param}: must be at least 1")));
        }
        let stop = match self.stop.clone() {
            None => Vec::new(),
            Some(Stop::One(stop)) => vec![stop],
            Some(Stop::Many(stop)) => stop,
        };
        if stop.len() > MAX_STOP_STRINGS || stop.iter().any(String::is_empty) {
            return Err(OpenAiError::invalid("stop", "stop: must have at most 16 entries, and none may be empty"));
        }
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
        // Other servers and templates use -1 and 0 for "all tokens".
        let top_k = self.top_k.filter(|k| *k > 0).map(|k| u32::try_from(k).unwrap_or(u32::MAX));
        Ok(Sampling {
            temperature: in_range("temperature", self.temperature, 0.0..=2.0)?.unwrap_or(1.0),
            top_p: in_range("top_p", self.top_p, f32::MIN_POSITIVE..=1.0)?,
            top_k,
            min_p: in_range("min_p", self.min_p, 0.0..=1.0)?,
            repetition_penalty: in_range("repetition_penalty", self.repetition_penalty, 0.1..=10.0)?.unwrap_or(1.0),
            frequency_penalty: in_range("frequency_penalty", self.frequency_penalty, -2.0..=2.0)?.unwrap_or(0.0),
            presence_penalty: in_range("presence_penalty", self.presence_penalty, -2.0..=2.0)?.unwrap_or(0.0),
            seed: self.seed.map_or_else(random_seed, |seed| seed as u64),
            stop,
            max_tokens: limit,
            previous: self.predicted_text()?,
            logprobs,
            ..Sampling::default()
        })
    }

    fn format(&self) -> Result<OutputFormat, OpenAiError> {
        let constraint = match &self.response_format {
            None | Some(ResponseFormat::Text) => None,
            Some(ResponseFormat::JsonObject) => Some(OutputFormat::JsonSchema { schema: json!({ "type": "object" }) }),
            Some(ResponseFormat::JsonSchema { json_schema }) => {
                let schema = json_schema.schema.clone().unwrap_or_else(|| json!({ "type": "object" }));
                Some(OutputFormat::JsonSchema { schema })
            }
        };
        let Some(outputs) = &self.structured_outputs else { return Ok(constraint.unwrap_or_default()) };
        let param = "structured_outputs";
        if outputs.choice.as_ref().is_some_and(Vec::is_empty) {
            return Err(OpenAiError::invalid(param, format!("{param}: choice has no text")));
        }
        let named = [
            constraint,
            outputs.json.clone().map(|schema| OutputFormat::JsonSchema { schema }),
            outputs.choice.as_deref().map(one_of),
            outputs.regex.clone().map(|pattern| OutputFormat::Regex { pattern }),
            outputs.grammar.clone().map(|lark| OutputFormat::Grammar { lark }),
        ];
        let mut named = named.into_iter().flatten();
        match (named.next(), named.next()) {
            (Some(format), None) => Ok(format),
            (None, _) => {
                Err(OpenAiError::invalid(param, format!("{param}: has none of json, choice, regex and grammar")))
            }
            (Some(_), Some(_)) => {
                Err(OpenAiError::invalid(param, format!("{param}: only one constraint of the output is possible")))
            }
        }
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

/// The value if it is in the range.
fn in_range(
    param: &'static str,
    value: Option<f32>,
    range: std::ops::RangeInclusive<f32>,
) -> Result<Option<f32>, OpenAiError> {
    match value {
        Some(value) if !range.contains(&value) => {
            let least = if *range.start() == f32::MIN_POSITIVE {
                "above 0 and at most".to_owned()
            } else {
                format!("from {} to", range.start())
            };
            Err(OpenAiError::invalid(param, format!("{param}: must be {least} {}", range.end())))
        }
        value => Ok(value),
    }
}

/// The output is one of these texts.
fn one_of(choices: &[String]) -> OutputFormat {
    let escape = |choice: &String| {
        let mut escaped = String::new();
        for c in choice.chars() {
            // In the regular expressions of the engine, an escaped angle bracket is a word boundary.
            if c.is_ascii_punctuation() && !matches!(c, '<' | '>') {
                escaped.push('\\');
            }
            escaped.push(c);
        }
        escaped
    };
    OutputFormat::Regex { pattern: choices.iter().map(escape).collect::<Vec<_>>().join("|") }
}

/// Priority of a call. A user waits for it, so it is above the default priority of tasks.
fn priority(service_tier: Option<&str>) -> Result<Priority, OpenAiError> {
    match service_tier {
        None | Some("auto" | "default" | "scale") => Ok(Priority::P1),
        Some("priority") => Ok(Priority::P0),
        Some("flex") => Ok(Priority::P3),
        Some(other) => Err(OpenAiError::invalid(
            "service_tier",
            format!(
                "service_tier: {} is not supported; use auto, default, flex or priority",
                OpenAiError::quoted(other)
            ),
        )),
    }
}

/// A seed for a request without one. Servers behind endpoints read it as a signed number of 32 bits.
fn random_seed() -> u64 {
    Uuid::now_v7().as_u64_pair().1 & 0x7fff_ffff
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(fields: Value) -> Result<ChatCall, Value> {
        let mut body = json!({ "model": "m", "messages": [{ "role": "user", "content": "x" }] });
        for (name, value) in fields.as_object().unwrap() {
            body[name] = value.clone();
        }
        let request: ChatRequest = serde_json::from_value(body).unwrap();
        request.into_call().map_err(|error| error.to_json()["error"].clone())
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
        assert!(read(json!({ "best_of": 1, "function_call": "none" })).is_ok());
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
