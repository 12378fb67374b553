//! Reads what the commands print with `--json` into the types of the HTTP API, which have seconds instead of RFC 3339.

use serde::de::DeserializeOwned;
use serde_json::Value;

/// The value of one line.
pub fn parse<T: DeserializeOwned>(line: &str) -> T {
    let mut value: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    to_seconds(&mut value);
    serde_json::from_value(value).unwrap_or_else(|error| panic!("{error}: {line}"))
}

fn to_seconds(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(to_seconds),
        Value::Object(fields) => {
            for (key, field) in fields {
                let is_time = key.ends_with("at") || matches!(key.as_str(), "last_seen" | "deadline" | "commit_time");
                let time = field.as_str().filter(|_| is_time).and_then(|text| text.parse::<jiff::Timestamp>().ok());
                match time {
                    // Whole numbers, so that integers can be read, too.
                    Some(time) if time.subsec_nanosecond() == 0 => *field = time.as_second().into(),
                    Some(time) => *field = (time.as_millisecond() as f64 / 1_000.0).into(),
                    None => to_seconds(field),
                }
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}
