use cfq_proto::job::{Completion, FinishReason, PromptForm, TokenLogprob, TokenLogprobs, Usage};
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Value, json};

use super::super::schema::{ChatCompletion, ChatCompletionChunk, TextCompletion};
use super::super::tools::{ToolCall, Tools};
use super::ReplyHead;

fn head(form: PromptForm, tools: Value) -> ReplyHead {
    let tools = Tools::of(serde_json::from_value(tools).unwrap(), None).unwrap();
    let (id, model) = ("x".to_owned(), "m".to_owned());
    ReplyHead { id, created: 1, model, include_usage: true, form, tools }
}

fn completion(text: &str) -> Completion {
    let own = TokenLogprob { token: "é".to_owned(), logprob: -0.5 };
    let other = TokenLogprob { token: "b".to_owned(), logprob: -1.5 };
    let logprobs = vec![TokenLogprobs { own, top_logprobs: vec![other] }; 2];
    Completion { text: text.to_owned(), finish: FinishReason::Stop, usage: Usage::default(), logprobs }
}

/// Panics unless the value has the fields of the schema, with values of its types.
fn check(value: &Value, schema: &Value, definitions: &Value, at: &str) {
    if let Some(reference) = schema["$ref"].as_str() {
        let name = reference.rsplit('/').next().unwrap();
        return check(value, &definitions[name], definitions, at);
    }
    if let Some(alternatives) = schema["anyOf"].as_array() {
        let is_null = |schema: &Value| schema["type"] == "null";
        let wanted = alternatives.iter().find(|schema| is_null(schema) == value.is_null()).expect(at);
        return check(value, wanted, definitions, at);
    }
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    let types = schema["type"].to_string();
    assert!(types.contains(&format!("\"{kind}\"")), "{at}: {value} is no {types}");
    match value {
        Value::Array(values) => values.iter().for_each(|value| check(value, &schema["items"], definitions, at)),
        Value::Object(fields) => {
            for (name, value) in fields {
                let of_field = schema["properties"].get(name).unwrap_or(&schema["additionalProperties"]);
                assert!(of_field.is_object(), "{at}.{name} is not in the schema");
                check(value, of_field, definitions, &format!("{at}.{name}"));
            }
            for required in schema["required"].as_array().into_iter().flatten() {
                assert!(fields.contains_key(required.as_str().unwrap()), "{at}: {required} is missing in {value}");
            }
        }
        _ => {}
    }
}

fn matches<T: JsonSchema>(value: &Value) {
    let settings = schemars::generate::SchemaSettings::draft2020_12().for_serialize();
    let mut schemas = SchemaGenerator::new(settings);
    let schema = schemas.subschema_for::<T>().to_value();
    check(value, &schema, &schemas.take_definitions(true).into(), &T::schema_name());
}

#[test]
fn bodies_are_as_the_document_describes_them() {
    let tool = json!([{ "type": "function", "function": { "name": "f", "parameters": { "type": "object" } } }]);
    let call = "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
    let chat = head(PromptForm::Chat, tool);
    for text in ["an answer", call] {
        let whole = chat.whole(&completion(text));
        assert_eq!(whole["choices"][0]["message"].get("tool_calls").is_some(), text == call, "{whole}");
        matches::<ChatCompletion>(&whole);
    }
    let calls = [ToolCall { id: "call".to_owned(), name: "f".to_owned(), arguments: "{}".to_owned() }];
    let chunks = [
        chat.first_chunk().unwrap(),
        chat.text_chunk("a"),
        chat.tool_calls_chunk(&calls),
        chat.last_chunk(FinishReason::Length, &[]),
        chat.usage_chunk(&Usage::default()),
    ];
    chunks.iter().for_each(matches::<ChatCompletionChunk>);

    let text = head(PromptForm::Text, json!([]));
    assert_eq!(text.first_chunk(), None);
    let chunks =
        [text.text_chunk("a"), text.last_chunk(FinishReason::Length, &[]), text.usage_chunk(&Usage::default())];
    chunks.iter().for_each(matches::<TextCompletion>);
    let whole = text.whole(&completion("éé"));
    matches::<TextCompletion>(&whole);
    matches::<TextCompletion>(&text.whole(&Completion { logprobs: vec![], ..completion("éé") }));
    // The token itself is among the most likely ones, and positions count characters.
    let logprobs = &whole["choices"][0]["logprobs"];
    assert_eq!(logprobs["top_logprobs"][0], json!({ "é": -0.5, "b": -1.5 }));
    assert_eq!(logprobs["text_offset"], json!([0, 1]));
}
