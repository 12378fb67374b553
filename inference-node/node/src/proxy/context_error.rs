//! Finds out whether a server refuses a prompt because it does not fit the model's context. The protocols have no common
//! error for this: some servers state it in fields, all of them in the message.

use std::ops::RangeInclusive;

use serde_json::Value;

/// Words for the context in messages of servers.
const NAMES: [&str; 5] =
    ["context length", "context size", "context window", "context limit", "maximum number of tokens"];
/// Other words for a prompt that does not fit.
const OTHER_WORDS: &str = "prompt is too long";
/// Maximum distance of the number after a name of the context, in bytes, as in "context length is only 4096 tokens".
const MAX_DISTANCE: usize = 40;
/// Context lengths of models are in this range, in tokens. Other numbers of a server are not used.
const PLAUSIBLE_LENGTHS: RangeInclusive<u32> = 128..=1 << 30;

/// What the server tells about a prompt that does not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ContextExceeded {
    /// Tokens of the prompt.
    pub(super) prompt_tokens: Option<u64>,
    /// Tokens of the model's context.
    pub(super) context_tokens: Option<u64>,
}

impl ContextExceeded {
    /// `None` if the error is another one. `error` is the error object or text of the server, `message` its message.
    pub(super) fn of(error: &Value, message: &str) -> Option<Self> {
        let text = message.to_ascii_lowercase();
        let field = |name: &str| error.get(name).and_then(Value::as_str);
        let is_stated =
            field("code") == Some("context_length_exceeded") || field("type") == Some("exceed_context_size_error");
        let named = NAMES.iter().find_map(|name| Some((text.find(name)?, name.len())));
        if !is_stated && named.is_none() && !text.contains(OTHER_WORDS) {
            return None;
        }
        let number = |name: &str| error.get(name).and_then(Value::as_u64).and_then(plausible_length);
        let after_name = || number_in(text.get(named?.0 + named?.1..)?);
        let context_tokens = number("n_ctx").or_else(after_name);
        Some(Self {
            prompt_tokens: number("n_prompt_tokens").map(u64::from),
            context_tokens: context_tokens.map(u64::from),
        })
    }
}

/// A context length that a server reports; `None` if no model has such a context.
pub(super) fn plausible_length(tokens: u64) -> Option<u32> {
    u32::try_from(tokens).ok().filter(|tokens| PLAUSIBLE_LENGTHS.contains(tokens))
}

/// The first number near the beginning of the text, in the same sentence.
fn number_in(text: &str) -> Option<u32> {
    let near = &text[..text.floor_char_boundary(MAX_DISTANCE)];
    let near = near.split(". ").next()?;
    let begin = near.find(|c: char| c.is_ascii_digit())?;
    let digits: String = text[begin..].chars().take_while(|c| c.is_ascii_digit()).collect();
    digits.parse().ok().and_then(plausible_length)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn errors_of_the_known_servers_are_recognized() {
        let exceeded = |prompt_tokens, context_tokens| Some(ContextExceeded { prompt_tokens, context_tokens });
        let llama_cpp = json!({
            "code": 400, "message": "request (5120 tokens) exceeds the available context size (4096 tokens), try increasing it",
            "type": "exceed_context_size_error", "n_prompt_tokens": 5120, "n_ctx": 4096,
        });
        for (error, message, expected) in [
            (llama_cpp.clone(), llama_cpp["message"].as_str().unwrap(), exceeded(Some(5120), Some(4096))),
            // OpenAI and vLLM
            (
                json!({ "code": "context_length_exceeded" }),
                "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens.",
                exceeded(None, Some(8192)),
            ),
            (json!({ "code": "context_length_exceeded" }), "too long", exceeded(None, None)),
            (json!("x"), "It exceeds the context length. However, you requested 9000 tokens.", exceeded(None, None)),
            (json!("x"), "prompt is too long: 210000 tokens > 200000 maximum", exceeded(None, None)),
            // LM Studio
            (
                json!("x"),
                "Trying to keep the first 9000 tokens when context the overflows. However, the model is loaded with \
                 context length of only 4096 tokens",
                exceeded(None, Some(4096)),
            ),
            // Ollama, with its own runner and with llama.cpp's
            (json!("x"), "the input length exceeds the context length", exceeded(None, None)),
            (
                json!("x"),
                "request (5120 tokens) exceeds the available context size (4096 tokens), try increasing it",
                exceeded(None, Some(4096)),
            ),
            (json!({ "code": "invalid_api_key" }), "Incorrect API key provided", None),
            (json!("x"), "model requires more system memory (8 GiB) than is available", None),
        ] {
            assert_eq!(ContextExceeded::of(&error, message), expected, "{message}");
        }
    }

    #[test]
    fn implausible_numbers_are_not_used() {
        for message in [
            "context length 0",
            "context length 99999999999999999999999",
            "context size ｜｜｜｜｜｜｜｜｜｜｜｜｜｜ 4096",
        ] {
            let context_tokens = ContextExceeded::of(&json!("x"), message).unwrap().context_tokens;
            assert_eq!(context_tokens, None, "{message}");
        }
    }
}
