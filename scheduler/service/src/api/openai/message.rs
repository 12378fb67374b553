//! Messages of a chat request.

use cfq_proto::job::{ChatMessage, ChatRole};
use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::error::OpenAiError;
use super::tools::{RequestToolCall, result_text, text_with_tool_calls};

/// A message as the client sent it.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[schemars(rename = "ChatRequestMessage")]
pub struct Message {
    role: String,
    #[serde(default)]
    content: Option<Content>,
    #[serde(default)]
    tool_calls: Option<Vec<RequestToolCall>>,
    /// The call whose result a message of the role `tool` has. It is ignored: results follow their calls in order.
    #[serde(default, rename = "tool_call_id")]
    #[schemars(with = "Option<String>")]
    _tool_call_id: Option<IgnoredAny>,
}

#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "must be text or a list of parts")]
#[schemars(rename = "ChatMessageContent")]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[schemars(rename = "ChatMessagePart")]
struct Part {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    text: Option<String>,
    #[serde(default)]
    refusal: Option<String>,
}

/// The messages of a prompt.
///
/// # Errors
/// The parameter, such as `messages[2].role`, and what can be used instead.
pub fn chat_messages(messages: Vec<Message>) -> Result<Vec<ChatMessage>, OpenAiError> {
    if messages.is_empty() {
        return Err(OpenAiError::invalid("messages", "messages: is empty; send at least one message"));
    }
    let mut read: Vec<ChatMessage> = Vec::with_capacity(messages.len());
    let mut follows_result = false;
    for (n, message) in messages.into_iter().enumerate() {
        let is_result = message.role == "tool";
        let message = chat_message(message, n)?;
        // Templates expect that the roles alternate, so the results of several calls are one message.
        match read.last_mut().filter(|_| is_result && follows_result) {
            Some(results) => {
                results.content.push('\n');
                results.content.push_str(&message.content);
            }
            None => read.push(message),
        }
        follows_result = is_result;
    }
    Ok(read)
}

fn chat_message(message: Message, n: usize) -> Result<ChatMessage, OpenAiError> {
    let calls = message.tool_calls.unwrap_or_default();
    let role = match message.role.as_str() {
        "system" | "developer" => ChatRole::System,
        "user" => ChatRole::User,
        "tool" => {
            let content = result_text(&text_of(message.content, &format!("messages[{n}].content"))?);
            return Ok(ChatMessage { role: ChatRole::User, content });
        }
        "assistant" => {
            let content = match message.content {
                None => String::new(),
                content => text_of(content, &format!("messages[{n}].content"))?,
            };
            return Ok(ChatMessage { role: ChatRole::Assistant, content: text_with_tool_calls(content, &calls) });
        }
        other => {
            return Err(OpenAiError::invalid(
                format!("messages[{n}].role"),
                format!(
                    "messages[{n}].role: {other:?} is not supported; use system, developer, user, assistant or tool"
                ),
            ));
        }
    };
    let content = text_of(message.content, &format!("messages[{n}].content"))?;
    Ok(ChatMessage { role, content })
}

/// The text of a message's content; parts are joined.
fn text_of(content: Option<Content>, param: &str) -> Result<String, OpenAiError> {
    let parts = match content {
        None => return Err(OpenAiError::invalid(param, format!("{param}: is missing; send the text of the message"))),
        Some(Content::Text(text)) => return Ok(text),
        Some(Content::Parts(parts)) => parts,
    };
    let mut text = String::new();
    for (n, part) in parts.into_iter().enumerate() {
        match (part.kind.as_str(), part.text, part.refusal) {
            ("text", Some(part), _) | ("refusal", _, Some(part)) => text.push_str(&part),
            (kind, _, _) => {
                return Err(OpenAiError::invalid(
                    format!("{param}[{n}]"),
                    format!(
                        "{param}[{n}]: a part of the type {} is not supported: cfq takes only text",
                        OpenAiError::quoted(kind)
                    ),
                ));
            }
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(messages: Value) -> Result<Vec<ChatMessage>, String> {
        chat_messages(serde_json::from_value(messages).unwrap())
            .map_err(|error| error.to_json()["error"]["message"].as_str().unwrap().to_owned())
    }

    #[test]
    fn texts_and_parts_become_messages_and_other_content_is_named() {
        let messages = read(json!([
            { "role": "developer", "content": "Be short." },
            { "role": "user", "content": [{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }] },
            { "role": "assistant", "content": "c", "tool_calls": [] },
            { "role": "assistant", "content": null },
            { "role": "assistant", "content": [{ "type": "refusal", "refusal": "No." }] },
        ]));
        let expected = [
            (ChatRole::System, "Be short."),
            (ChatRole::User, "ab"),
            (ChatRole::Assistant, "c"),
            (ChatRole::Assistant, ""),
            (ChatRole::Assistant, "No."),
        ];
        assert_eq!(
            messages.unwrap(),
            expected.map(|(role, content)| ChatMessage { role, content: content.to_owned() })
        );
        let call =
            |name: &str| json!({ "id": "x", "type": "function", "function": { "name": name, "arguments": "{}" } });
        let with_calls = read(json!([
            { "role": "user", "content": "a" },
            { "role": "assistant", "content": null, "tool_calls": [call("f"), call("g")] },
            { "role": "tool", "tool_call_id": "x", "content": "1" },
            { "role": "tool", "tool_call_id": "y", "content": [{ "type": "text", "text": "2" }] },
            { "role": "user", "content": "b" },
        ]))
        .unwrap();
        assert_eq!(with_calls.len(), 4, "the results are one message: {with_calls:?}");
        assert!(with_calls[1].content.contains("\"name\":\"g\""), "{with_calls:?}");
        let results = "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>";
        assert_eq!((with_calls[2].role, with_calls[2].content.as_str()), (ChatRole::User, results));
        for (messages, word) in [
            (json!([]), "is empty"),
            (json!([{ "role": "function", "content": "x" }]), "messages[0].role"),
            (json!([{ "role": "tool" }]), "messages[0].content"),
            (json!([{ "role": "user" }]), "messages[0].content"),
            (json!([{ "role": "user", "content": [{ "type": "image_url", "image_url": {} }] }]), "\"image_url\""),
        ] {
            let error = read(messages.clone()).unwrap_err();
            assert!(error.contains(word), "{messages}: {error}");
        }
    }
}
