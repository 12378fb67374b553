//! Parameters that chat requests and text requests have in common. Parameters that only describe the client are ignored. A
//! parameter that would change the result, and that cfq does not support, is refused.

use cfq_proto::job::{OutputFormat, Sampling};
use cfq_proto::task::Priority;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};
use uuid::Uuid;

use super::error::OpenAiError;

/// Maximum number of stop strings.
const MAX_STOP_STRINGS: usize = 16;

/// The parameters as the client sent them.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(expecting = "a JSON object with the parameters of the request")]
pub struct Parameters {
    /// Sends the text as it is generated.
    #[serde(default)]
    stream: Option<bool>,
    #[serde(default)]
    stream_options: Option<StreamOptions>,
    /// Maximum length of the output, in tokens. Default: 2,048 in a conversation, 16 for a text.
    #[serde(default)]
    max_tokens: Option<u32>,
    /// 0 to 2; 1 by default.
    #[serde(default)]
    temperature: Option<f32>,
    /// Above 0, at most 1.
    #[serde(default)]
    top_p: Option<f32>,
    /// Number of most likely tokens to sample from; all by default.
    #[serde(default)]
    top_k: Option<i64>,
    /// 0 to 1.
    #[serde(default)]
    min_p: Option<f32>,
    /// 0.1 to 10; 1 is off.
    #[serde(default)]
    repetition_penalty: Option<f32>,
    /// -2 to 2.
    #[serde(default)]
    frequency_penalty: Option<f32>,
    /// -2 to 2.
    #[serde(default)]
    presence_penalty: Option<f32>,
    /// The same seed gives the same text from a model that cfq runs itself.
    #[serde(default)]
    seed: Option<i64>,
    /// At most 16 strings before which the generation ends.
    #[serde(default)]
    stop: Option<Stop>,
    /// Must be 1.
    #[serde(default)]
    n: Option<u32>,
    #[serde(default)]
    response_format: Option<ResponseFormat>,
    #[serde(default)]
    structured_outputs: Option<StructuredOutputs>,
    /// `priority`, `auto`, `default` or `flex`.
    #[serde(default)]
    service_tier: Option<String>,
    /// Those of the other parameters that are refused if they are used.
    #[serde(flatten, deserialize_with = "refusable")]
    #[schemars(skip)]
    refusable: Map<String, Value>,
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

fn refusable<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Map<String, Value>, D::Error> {
    let mut others = Map::deserialize(deserializer)?;
    others.retain(|name, _| UNSUPPORTED.contains(&name.as_str()));
    Ok(others)
}

#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
struct StreamOptions {
    /// Sends the usage in a last chunk.
    #[serde(default)]
    include_usage: Option<bool>,
}

#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "must be text or a list of texts")]
#[schemars(rename = "StopStrings")]
enum Stop {
    One(String),
    Many(Vec<String>),
}

#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ResponseFormat {
    Text,
    JsonObject,
    JsonSchema { json_schema: NamedSchema },
}

#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[schemars(rename = "ResponseFormatSchema")]
struct NamedSchema {
    #[serde(default)]
    schema: Option<Value>,
}

/// Constraints beyond the protocol, with the names that vLLM uses; exactly one of them.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct StructuredOutputs {
    /// JSON schema.
    #[serde(default)]
    json: Option<Value>,
    /// Texts, one of which is the output.
    #[serde(default)]
    choice: Option<Vec<String>>,
    /// Regular expression.
    #[serde(default)]
    regex: Option<String>,
    /// Grammar in llguidance's Lark notation.
    #[serde(default)]
    grammar: Option<String>,
}

/// How the result is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    /// As one JSON body.
    Json,
    /// As server-sent events; the last one has the usage if the client asked for it.
    Stream { include_usage: bool },
}

impl Parameters {
    /// Refuses parameters that would change the result.
    pub fn refuse_unsupported(&self) -> Result<(), OpenAiError> {
        let is_used = |param: &str, value: &Value| match value {
            Value::Null | Value::Bool(false) => false,
            Value::Number(number) => number.as_f64() != Some(if param == "best_of" { 1.0 } else { 0.0 }),
            Value::Array(values) => !values.is_empty(),
            Value::Object(values) => !values.is_empty(),
            Value::String(text) => !text.is_empty() && text != "none",
            Value::Bool(true) => true,
        };
        let mut used = UNSUPPORTED
            .into_iter()
            .filter(|param| self.refusable.get(*param).is_some_and(|value| is_used(param, value)));
        used.next().map_or(Ok(()), |param| Err(unsupported(param)))
    }

    /// The sampling parameters, with the maximum output in tokens, and without those that the forms of requests have in
    /// different ways.
    pub fn sampling(&self, max_tokens: u32) -> Result<Sampling, OpenAiError> {
        if self.n.is_some_and(|n| n != 1) {
            return Err(OpenAiError::invalid("n", "n: must be 1; send one request for each choice"));
        }
        let stop = match self.stop.clone() {
            None => Vec::new(),
            Some(Stop::One(stop)) => vec![stop],
            Some(Stop::Many(stop)) => stop,
        };
        if stop.len() > MAX_STOP_STRINGS || stop.iter().any(String::is_empty) {
            return Err(OpenAiError::invalid("stop", "stop: must have at most 16 entries, and none may be empty"));
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
            max_tokens,
            ..Sampling::default()
        })
    }

    /// The maximum output, in tokens: that of the parameter with this name, else `max_tokens`, else the default.
    pub fn max_tokens(&self, other: Option<(&'static str, u32)>, default: u32) -> Result<u32, OpenAiError> {
        let (param, limit) = other.unwrap_or(("max_tokens", self.max_tokens.unwrap_or(default)));
        if limit == 0 {
            return Err(OpenAiError::invalid(param, format!("{param}: must be at least 1")));
        }
        Ok(limit)
    }

    /// How the result is sent.
    pub fn delivery(&self) -> Delivery {
        match self.stream {
            Some(true) => {
                let options = self.stream_options.clone().unwrap_or_default();
                Delivery::Stream { include_usage: options.include_usage.unwrap_or(false) }
            }
            _ => Delivery::Json,
        }
    }

    /// The parameter that constrains the output.
    pub fn constraint(&self) -> Option<&'static str> {
        match (&self.structured_outputs, &self.response_format) {
            (Some(_), _) => Some("structured_outputs"),
            (None, Some(ResponseFormat::JsonSchema { .. } | ResponseFormat::JsonObject)) => Some("response_format"),
            (None, Some(ResponseFormat::Text) | None) => None,
        }
    }

    /// The constraint of the output.
    pub fn format(&self) -> Result<OutputFormat, OpenAiError> {
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

    /// Priority of the call. A user waits for it, so it is above the default priority of tasks.
    pub fn priority(&self) -> Result<Priority, OpenAiError> {
        match self.service_tier.as_deref() {
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
}

/// The error for a parameter that would change the result.
pub fn unsupported(param: &'static str) -> OpenAiError {
    OpenAiError::invalid(param, format!("{param}: is not supported by cfq yet; leave it out"))
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

/// A seed for a request without one. Servers behind endpoints read it as a signed number of 32 bits.
fn random_seed() -> u64 {
    Uuid::now_v7().as_u64_pair().1 & 0x7fff_ffff
}
