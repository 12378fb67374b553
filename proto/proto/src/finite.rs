//! Reads the floating-point fields of messages. JSON has no infinite numbers, but its numbers may be larger than
//! `f32::MAX`. serde_json refuses such a number, except in a value that serde buffers (in an enum with a tag, in a
//! flattened field): there it becomes infinite, the message is then written with `null` in its place, and its receiver
//! cannot read it.

use serde::de::{Deserialize, Deserializer, Error};

/// Reads a number.
///
/// # Errors
/// If it is beyond the range of `f32`.
pub(crate) fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f32, D::Error> {
    check(f32::deserialize(deserializer)?)
}

/// Reads a number or `null`.
///
/// # Errors
/// If the number is beyond the range of `f32`.
pub(crate) fn optional<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f32>, D::Error> {
    Option::<f32>::deserialize(deserializer)?.map(check).transpose()
}

fn check<E: Error>(number: f32) -> Result<f32, E> {
    match number.is_finite() {
        true => Ok(number),
        false => Err(E::custom(format_args!("the number must be from {} to {}", f32::MIN, f32::MAX))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_str, from_value};

    use crate::job::{Sampling, TokenLogprobs};
    use crate::task::AgentBinding;

    fn buffered(text: &str) -> Value {
        from_str(text).unwrap()
    }

    #[test]
    fn number_beyond_the_range_of_f32_is_refused() {
        for field in ["temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"] {
            let with = |number: &str| from_value::<Sampling>(buffered(&format!("{{\"{field}\":{number}}}")));
            assert!(with("0.5").is_ok() && with("-3e38").is_ok(), "{field}");
            for number in ["1e39", "-1e300"] {
                let error = with(number).unwrap_err().to_string();
                assert!(error.contains("the number must be from"), "{field}: {error}");
            }
        }
        assert!(from_value::<AgentBinding>(buffered(r#"{"temperature":1e39}"#)).is_err());
        assert_eq!(from_str::<AgentBinding>(r#"{"temperature":null}"#).unwrap(), AgentBinding::default());
        let position = |number: &str| {
            let text = format!(r#"{{"token":"a","logprob":{number},"top_logprobs":[{{"token":"b","logprob":0}}]}}"#);
            from_str::<TokenLogprobs>(&text)
        };
        assert!(position("-2.5").is_ok());
        assert!(position("-1e39").is_err());
    }
}
