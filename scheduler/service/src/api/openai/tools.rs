//! Tool calling: the model calls functions of the client.
//!
//! Most open models learned the same notation for tool calls: a JSON object with `name` and `arguments` between the tags
//! `<tool_call>` and `</tool_call>` (Hermes, Qwen). The functions are described in the system message and tool calls are
//! parsed from the text, so that tool calling works with every model, whatever its chat template contains. If a tool call
//! is required, the output is constrained to a JSON schema, so the output is always a tool call.

use cfq_proto::job::{ChatMessage, ChatRole, OutputFormat};
use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value, json};
use uuid::Uuid;

use super::error::OpenAiError;

/// Maximum number of functions.
const MAX_TOOLS: usize = 128;
/// Maximum length of a function's name, in bytes.
const MAX_NAME_BYTES: usize = 64;

const CALL_BEGIN: &str = "<tool_call>";
const CALL_END: &str = "</tool_call>";

/// A function as the client sent it.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[schemars(rename = "ChatTool")]
pub struct Tool {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    function: Option<Function>,
}

#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[schemars(rename = "ChatToolFunction")]
struct Function {
    name: String,
    #[serde(default)]
    description: Option<String>,
    #[serde(default)]
    parameters: Option<Value>,
}

/// A tool call in a message of the conversation.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[schemars(rename = "ChatRequestToolCall")]
pub struct RequestToolCall {
    function: RequestFunction,
    /// Ignored.
    #[serde(default, rename = "id")]
    #[schemars(with = "Option<String>")]
    _id: Option<IgnoredAny>,
    /// `function`
    #[serde(default, rename = "type")]
    #[schemars(with = "Option<String>")]
    _kind: Option<IgnoredAny>,
}

#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[schemars(rename = "ChatRequestToolCallFunction")]
struct RequestFunction {
    name: String,
    #[serde(default)]
    arguments: String,
}

/// The functions that the model may call, or has to call.
#[derive(Debug, Clone, Default)]
pub struct Tools {
    functions: Vec<Function>,
    is_required: bool,
    /// Only the first of several tool calls is returned.
    is_single: bool,
}

/// A tool call that the model made.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolCall {
    pub id: String,
    pub name: String,
    /// The arguments as JSON text.
    pub arguments: String,
}

impl Tools {
    /// Checks the parameters `tools` and `tool_choice`.
    pub fn of(tools: Vec<Tool>, choice: Option<&Value>) -> Result<Self, OpenAiError> {
        if tools.len() > MAX_TOOLS {
            return Err(OpenAiError::invalid("tools", "tools: has more than 128 entries; remove some"));
        }
        let functions = tools.into_iter().enumerate().map(|(n, tool)| function(tool, n));
        let functions: Vec<Function> = functions.collect::<Result<_, _>>()?;
        let refuse = |reason: &str| Err(OpenAiError::invalid("tool_choice", format!("tool_choice: {reason}")));
        match choice {
            None => Ok(Self { functions, ..Self::default() }),
            Some(Value::String(choice)) if choice == "auto" => Ok(Self { functions, ..Self::default() }),
            Some(Value::String(choice)) if choice == "none" => Ok(Self::default()),
            Some(Value::String(choice)) if choice == "required" && !functions.is_empty() => {
                Ok(Self { functions, is_required: true, ..Self::default() })
            }
            Some(Value::String(choice)) if choice == "required" => refuse("needs tools to call"),
            Some(choice) => match choice["function"]["name"].as_str() {
                Some(name) => match functions.into_iter().find(|function| function.name == name) {
                    Some(function) => Ok(Self { functions: vec![function], is_required: true, ..Self::default() }),
                    None => refuse(&format!("there is no function {} in tools", OpenAiError::quoted(name))),
                },
                None => refuse("must be none, auto, required, or an object that names a function"),
            },
        }
    }

    /// Sets whether a reply may have several tool calls.
    pub fn with_parallel_calls(self, are_allowed: bool) -> Self {
        Self { is_single: !are_allowed, ..self }
    }

    pub fn is_empty(&self) -> bool {
        self.functions.is_empty()
    }

    /// Adds the description of the functions to the system message, or as one.
    pub fn describe(&self, messages: &mut Vec<ChatMessage>) {
        if self.is_empty() {
            return;
        }
        let mut text = "You can call the functions below. To call one, write a JSON object with the keys \"name\" and \
                        \"arguments\" between <tool_call> and </tool_call>, for example:\n\
                        <tool_call>\n{\"name\": \"NAME\", \"arguments\": {\"KEY\": \"VALUE\"}}\n</tool_call>\n\
                        Write one such block for each call, and nothing after the last one. The results follow in the \
                        next message. Call a function only if it helps with the request.\n<tools>\n"
            .to_owned();
        for function in &self.functions {
            let mut described = json!({ "name": function.name });
            if let Some(description) = &function.description {
                described["description"] = json!(description);
            }
            if let Some(parameters) = &function.parameters {
                described["parameters"] = parameters.clone();
            }
            text.push_str(&described.to_string());
            text.push('\n');
        }
        text.push_str("</tools>");
        match messages.first_mut().filter(|message| message.role == ChatRole::System) {
            Some(system) => {
                system.content.push_str("\n\n");
                system.content.push_str(&text);
            }
            None => messages.insert(0, ChatMessage { role: ChatRole::System, content: text }),
        }
    }

    /// The constraint under which the model has to call a function; `None` if it may write text.
    pub fn constraint(&self) -> Option<OutputFormat> {
        if !self.is_required {
            return None;
        }
        let call = |function: &Function, root: &str| {
            let mut arguments = function.parameters.clone().unwrap_or_else(|| json!({ "type": "object" }));
            move_references(&mut arguments, &format!("{root}/properties/arguments"));
            json!({
                "type": "object",
                "properties": { "name": { "const": function.name }, "arguments": arguments },
                "required": ["name", "arguments"],
                "additionalProperties": false,
            })
        };
        let schema = match self.functions.as_slice() {
            [function] => call(function, "#"),
            functions => {
                let calls = functions.iter().enumerate().map(|(n, function)| call(function, &format!("#/anyOf/{n}")));
                json!({ "anyOf": calls.collect::<Value>() })
            }
        };
        Some(OutputFormat::JsonSchema { schema })
    }

    /// The text before the tool calls, and the tool calls. Returns the text unchanged and no tool calls if one is malformed
    /// or names an unknown function.
    pub fn parse_tool_calls(&self, text: &str) -> (String, Vec<ToolCall>) {
        if self.is_empty() {
            return (text.to_owned(), Vec::new());
        }
        let read = match text.find(CALL_BEGIN) {
            Some(begin) => self.tagged(&text[begin..]).map(|calls| (text[..begin].trim_end().to_owned(), calls)),
            // Some models leave the tags out.
            None => self.untagged(text).map(|calls| (String::new(), calls)),
        };
        let Some((content, mut calls)) = read.filter(|(_, calls)| !calls.is_empty()) else {
            return (text.to_owned(), Vec::new());
        };
        if self.is_single {
            calls.truncate(1);
        }
        (content, calls)
    }

    fn tagged(&self, text: &str) -> Option<Vec<ToolCall>> {
        let mut calls = Vec::new();
        for block in text.split(CALL_BEGIN).skip(1) {
            // The last tag is missing if the text ended with it as a stop string or control token.
            let (call, rest) = block.split_once(CALL_END).unwrap_or((block, ""));
            calls.push(self.call(&serde_json::from_str(call.trim()).ok()?)?);
            if !rest.trim().is_empty() {
                return None;
            }
        }
        Some(calls)
    }

    fn untagged(&self, text: &str) -> Option<Vec<ToolCall>> {
        let text = text.trim();
        let fenced = text.strip_prefix("```json").or(text.strip_prefix("```"));
        let text = fenced.and_then(|text| text.strip_suffix("```")).unwrap_or(text);
        match serde_json::from_str(text.trim()).ok()? {
            Value::Array(calls) => calls.iter().map(|call| self.call(call)).collect(),
            call => Some(vec![self.call(&call)?]),
        }
    }

    fn call(&self, call: &Value) -> Option<ToolCall> {
        let name = call.get("name")?.as_str()?;
        self.functions.iter().find(|function| function.name == name)?;
        let arguments = match call.get("arguments").or_else(|| call.get("parameters")) {
            Some(Value::Object(arguments)) => arguments.clone(),
            Some(Value::Null) | None => Map::new(),
            Some(_) => return None,
        };
        let id = format!("call_{}", Uuid::now_v7().simple());
        Some(ToolCall { id, name: name.to_owned(), arguments: Value::Object(arguments).to_string() })
    }

    /// Number of leading bytes of an incomplete text that cannot be part of a tool call.
    pub fn safe_prefix_len(&self, text: &str) -> usize {
        if self.is_empty() {
            return text.len();
        }
        if self.is_required || text.trim_start().starts_with(['{', '[', '`']) || text.trim_start().is_empty() {
            return 0;
        }
        let end = text.find(CALL_BEGIN).unwrap_or_else(|| {
            // The beginning of a tag at the end.
            let partial = (1..CALL_BEGIN.len()).rev().find(|n| text.ends_with(&CALL_BEGIN[..*n]));
            text.len() - partial.unwrap_or(0)
        });
        // White space before a call is not part of the text.
        text[..end].trim_end().len()
    }
}

/// Lets references to parts of a schema refer to the same parts after the schema was moved to `root`.
fn move_references(schema: &mut Value, root: &str) {
    match schema {
        Value::Object(fields) => {
            if let Some(Value::String(target)) = fields.get_mut("$ref")
                && let Some(path) = target.strip_prefix('#').filter(|path| path.is_empty() || path.starts_with('/'))
            {
                *target = format!("{root}{path}");
            }
            fields.values_mut().for_each(|part| move_references(part, root));
        }
        Value::Array(parts) => parts.iter_mut().for_each(|part| move_references(part, root)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn function(tool: Tool, n: usize) -> Result<Function, OpenAiError> {
    let refuse = |field: &str, reason: &str| {
        let param = format!("tools[{n}].{field}");
        Err(OpenAiError::invalid(param.clone(), format!("{param}: {reason}")))
    };
    if tool.kind != "function" {
        let kind = OpenAiError::quoted(&tool.kind);
        return refuse("type", &format!("{kind} is not supported; use function"));
    }
    let Some(function) = tool.function else { return refuse("function", "is missing") };
    let is_plain = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'_' | b'-' | b'.');
    if function.name.is_empty() || function.name.len() > MAX_NAME_BYTES || !function.name.bytes().all(is_plain) {
        return refuse("function.name", "must have 1 to 64 letters, digits, underscores, hyphens and dots");
    }
    if function.parameters.as_ref().is_some_and(|parameters| !parameters.is_object()) {
        return refuse("function.parameters", "must be a JSON schema");
    }
    Ok(function)
}

/// The text of an assistant's message with calls, as the model would have written it.
pub fn text_with_tool_calls(content: String, calls: &[RequestToolCall]) -> String {
    let mut text = content;
    for RequestToolCall { function, .. } in calls {
        let arguments = serde_json::from_str(&function.arguments).unwrap_or_else(|_| json!(function.arguments));
        if !text.is_empty() {
            text.push('\n');
        }
        let call = json!({ "name": function.name, "arguments": arguments });
        text.push_str(&format!("{CALL_BEGIN}\n{call}\n{CALL_END}"));
    }
    text
}

/// The result of a call, as text of a message of the user.
pub fn result_text(content: &str) -> String {
    format!("<tool_response>\n{content}\n</tool_response>")
}

#[cfg(test)]
mod tests;
