//! Errors of parsers without the names of Rust types.

/// The text of an error with the type that it expects in plain words: `expected u8` as `expected a whole number from 0 to
/// 255`.
pub fn plain_types(text: &str) -> String {
    let Some((before, expected)) = text.rsplit_once("expected ") else { return text.to_owned() };
    let end = expected.find([' ', ',', '\n']).unwrap_or(expected.len());
    let plain = match &expected[..end] {
        "f32" | "f64" => "a number",
        "u8" => "a whole number from 0 to 255",
        "u16" => "a whole number from 0 to 65535",
        "u32" => "a whole number from 0 to 4294967295",
        "u64" | "usize" => "a whole number of at least 0",
        "i8" | "i16" | "i32" | "i64" => "a whole number",
        _ => return text.to_owned(),
    };
    format!("{before}expected {plain}{}", &expected[end..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_types_are_replaced() {
        for (text, expected) in [
            ("string \"many\", expected u8", "string \"many\", expected a whole number from 0 to 255"),
            ("expected f64, got x", "expected a number, got x"),
            ("expected usize\n", "expected a whole number of at least 0\n"),
            ("expected one of `u8`", "expected one of `u8`"),
            ("u8", "u8"),
        ] {
            assert_eq!(plain_types(text), expected);
        }
    }
}
