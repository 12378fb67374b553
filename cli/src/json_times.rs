//! Times in the JSON of the commands. The types of the HTTP API have seconds since 1970; for people and scripts, the
//! commands print RFC 3339.

use serde_json::Value;

/// Fields that are points in time, apart from those that end with `_at`.
const TIMES: [&str; 5] = ["at", "last_seen", "deadline", "ended_before", "commit_time"];

fn is_time(key: &str) -> bool {
    key.ends_with("_at") || TIMES.contains(&key)
}

/// Replaces seconds since 1970 by RFC 3339, in all fields that are points in time.
pub fn to_rfc_3339(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(to_rfc_3339),
        Value::Object(fields) => {
            for (key, field) in fields {
                match field.as_f64().filter(|_| is_time(key)).and_then(rfc_3339) {
                    Some(text) => *field = text.into(),
                    None => to_rfc_3339(field),
                }
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// `2026-12-01T06:30:00Z`, with milliseconds unless they are 0.
fn rfc_3339(seconds: f64) -> Option<String> {
    let at = jiff::Timestamp::from_millisecond((seconds * 1_000.0).round() as i64).ok()?;
    Some(at.to_string())
}

/// Describes these fields in a JSON schema as what they are.
pub fn in_schema(schema: &mut Value) {
    match schema {
        Value::Array(schemas) => schemas.iter_mut().for_each(in_schema),
        Value::Object(object) => {
            if let Some(Value::Object(properties)) = object.get_mut("properties") {
                for (key, property) in properties.iter_mut().filter(|(key, _)| is_time(key)) {
                    time_in_schema(key, property);
                }
            }
            object.values_mut().for_each(in_schema);
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn time_in_schema(key: &str, property: &mut Value) {
    let is_number = |name: &Value| name == "number" || name == "integer";
    let is_optional = match &property["type"] {
        Value::Array(names) if names.iter().any(is_number) => true,
        name if is_number(name) => false,
        _ => return,
    };
    let description = property["description"].as_str().unwrap_or(key).replace(", in seconds since 1970", "");
    *property = serde_json::json!({ "description": description, "type": "string", "format": "date-time" });
    if is_optional {
        property["type"] = serde_json::json!(["string", "null"]);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn times_are_rfc_3339() {
        let mut value = json!({
            "tasks": [{ "created_at": 1_796_106_600.25, "number": 7, "spec": { "run_at": null, "deadline": 1_796_106_600 } }],
            "at": "12:30", "silent_s": 3,
        });
        to_rfc_3339(&mut value);
        let expected = json!({
            "tasks": [{
                "created_at": "2026-12-01T06:30:00.25Z", "number": 7,
                "spec": { "run_at": null, "deadline": "2026-12-01T06:30:00Z" },
            }],
            "at": "12:30", "silent_s": 3,
        });
        assert_eq!(value, expected);
    }

    #[test]
    fn schema_says_what_is_printed() {
        let mut schema = json!({ "properties": {
            "ended_at": { "description": "When it ended, in seconds since 1970.", "type": ["number", "null"], "format": "double" },
            "number": { "type": "integer" },
        }});
        in_schema(&mut schema);
        let expected = json!({ "properties": {
            "ended_at": { "description": "When it ended.", "type": ["string", "null"], "format": "date-time" },
            "number": { "type": "integer" },
        }});
        assert_eq!(schema, expected);
    }
}
