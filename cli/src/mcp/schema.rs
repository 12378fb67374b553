//! JSON schemas of the tools, in the subset that all known MCP clients read: without references, without `null` among
//! the types of an optional argument, with `enum` instead of `oneOf`, and without the number formats of schemars. They
//! are short, because the AI of a client reads those of the arguments.

use std::sync::Arc;

use rmcp::model::JsonObject;
use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::Value;

/// The schema of a tool's arguments.
pub fn of_arguments<T: JsonSchema>() -> Arc<JsonObject> {
    Arc::new(generate::<T>(SchemaSettings::draft2020_12()))
}

/// The schema of a tool's structured content.
pub fn of_reply<T: JsonSchema>() -> Arc<JsonObject> {
    let mut schema = Value::Object(generate::<T>(SchemaSettings::draft2020_12().for_serialize()));
    remove_limits(&mut schema);
    match schema {
        Value::Object(schema) => Arc::new(schema),
        _ => Arc::default(),
    }
}

/// Removes the limits of lists and texts: those of reviews are for the critic, and a reply may have several reviews in one.
fn remove_limits(schema: &mut Value) {
    match schema {
        Value::Array(schemas) => schemas.iter_mut().for_each(remove_limits),
        Value::Object(object) => {
            object.retain(|keyword, value| !(matches!(&**keyword, "maxItems" | "maxLength") && value.is_number()));
            object.values_mut().for_each(remove_limits);
        }
        _ => {}
    }
}

fn generate<T: JsonSchema>(settings: SchemaSettings) -> JsonObject {
    let settings = settings.with(|settings| settings.inline_subschemas = true);
    let schema = settings.into_generator().into_root_schema_for::<T>();
    let mut schema = schema.to_value();
    simplify(&mut schema);
    let Value::Object(mut schema) = schema else { return JsonObject::new() };
    schema.remove("title");
    schema.remove("description");
    // A tool without arguments needs an object, too.
    schema.entry("type").or_insert_with(|| "object".into());
    schema
}

fn simplify(schema: &mut Value) {
    match schema {
        Value::Array(schemas) => schemas.iter_mut().for_each(simplify),
        Value::Object(object) => {
            simplify_object(object);
            object.values_mut().for_each(simplify);
        }
        _ => {}
    }
}

fn simplify_object(object: &mut JsonObject) {
    if object.get("format").and_then(Value::as_str).is_some_and(is_number_format) {
        object.remove("format");
    }
    if object.get("default").is_some_and(is_empty) {
        object.remove("default");
    }
    if let Some(Value::String(description)) = object.get_mut("description") {
        // The line ends of the doc comment.
        *description = description.replace('\n', " ");
    }
    if let Some(Value::Array(types)) = object.get_mut("type") {
        types.retain(|name| name != "null");
        if let [only] = types.as_slice() {
            let only = only.clone();
            object.insert("type".into(), only);
        }
    }
    if let Some(Value::Array(values)) = object.get_mut("enum") {
        values.retain(|value| !value.is_null());
    }
    if let Some(Value::Array(variants)) = object.get_mut("anyOf") {
        variants.retain(|variant| variant.get("type").is_none_or(|name| name != "null"));
        if let [Value::Object(only)] = variants.as_mut_slice() {
            let only = std::mem::take(only);
            object.remove("anyOf");
            // The description of the field is kept, not that of its type.
            for (key, value) in only {
                object.entry(key).or_insert(value);
            }
        }
    }
    // An enum whose variants have doc comments.
    if let Some(Value::Array(variants)) = object.get("oneOf")
        && let Some(values) = variants.iter().map(|variant| variant.get("const").cloned()).collect::<Option<Vec<_>>>()
    {
        object.remove("oneOf");
        object.insert("type".into(), "string".into());
        object.insert("enum".into(), values.into());
    }
}

fn is_empty(default: &Value) -> bool {
    match default {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.values().all(is_empty),
        Value::Bool(_) | Value::Number(_) => false,
    }
}

fn is_number_format(format: &str) -> bool {
    format.starts_with("uint") || format.starts_with("int") || matches!(format, "double" | "float")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(JsonSchema)]
    #[allow(dead_code)]
    struct Arguments {
        /// How many,
        /// at most.
        count: Option<u32>,
        /// The part.
        part: Option<Part>,
        /// Its kind.
        #[schemars(default)]
        kind: Option<Kind>,
    }

    /// A part.
    #[derive(JsonSchema)]
    #[allow(dead_code)]
    struct Part {
        /// Its share.
        share: f64,
    }

    #[derive(JsonSchema)]
    #[allow(dead_code)]
    enum Kind {
        /// The first one.
        A,
        /// The other one.
        B,
    }

    #[test]
    fn schema_has_only_what_all_clients_read() {
        let expected = serde_json::json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {
                "count": { "description": "How many, at most.", "type": "integer", "minimum": 0 },
                "part": {
                    "description": "The part.",
                    "type": "object",
                    "properties": { "share": { "description": "Its share.", "type": "number" } },
                    "required": ["share"]
                },
                "kind": { "description": "Its kind.", "type": "string", "enum": ["A", "B"] }
            }
        });
        assert_eq!(Value::Object((*of_arguments::<Arguments>()).clone()), expected);
    }
}
