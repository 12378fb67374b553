//! Makes characters visible that change how a text is shown, or are not shown at all: control characters, characters
//! that change the direction of text, and invisible ones. Text of a model or a repository that contains them could
//! control a terminal, or show a reader other code than the one that runs.

use std::borrow::Cow;

/// Characters that text on a terminal may contain: line ends and tabs.
pub const TERMINAL_CHARACTERS: &[char] = &['\n', '\t'];
/// Characters that text for a model may contain, because ordinary sources and documents contain them.
pub const SOURCE_CHARACTERS: &[char] =
    &['\n', '\t', '\r', '\u{c}', '\u{ad}', '\u{61c}', '\u{200b}', '\u{200e}', '\u{200f}', '\u{feff}'];

/// Replaces each character that is not shown as itself by its code point, such as `<U+202E>`; characters in `allowed`
/// stay.
pub fn visible<'t>(text: &'t str, allowed: &[char]) -> Cow<'t, str> {
    replaced(text, allowed, |out, c| out.push_str(&format!("<U+{:04X}>", u32::from(c))))
}

/// Escapes the same characters in a JSON text, which stays equal as JSON.
pub fn visible_json(json: &str) -> Cow<'_, str> {
    replaced(json, TERMINAL_CHARACTERS, |out, c| {
        for unit in c.encode_utf16(&mut [0; 2]) {
            out.push_str(&format!("\\u{unit:04x}"));
        }
    })
}

fn replaced<'t>(text: &'t str, allowed: &[char], write: impl Fn(&mut String, char)) -> Cow<'t, str> {
    let is_hidden = |c: char| is_hidden(c) && !allowed.contains(&c);
    if !text.contains(is_hidden) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_hidden(c) {
            write(&mut out, c);
        } else {
            out.push(c);
        }
    }
    Cow::Owned(out)
}

/// True for control characters, and for format characters that change the direction of text, separate lines or are
/// invisible. Joiners are not among them: scripts and emoji need them.
fn is_hidden(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}'
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_characters_are_shown_as_code_points() {
        let text = "a\x1b[2J\u{202e}b\u{9b}c\r\n\td\u{e0041}\u{200b}";
        assert_eq!(visible(text, TERMINAL_CHARACTERS), "a<U+001B>[2J<U+202E>b<U+009B>c<U+000D>\n\td<U+E0041><U+200B>");
        assert!(visible("a\r\n\u{c}", SOURCE_CHARACTERS).contains("\r\n\u{c}"));
        for plain in ["x = 'שלום' # ü 日本 👩‍💻\n", "", "\t{}\n"] {
            assert!(matches!(visible(plain, TERMINAL_CHARACTERS), Cow::Borrowed(same) if same == plain));
        }
    }

    #[test]
    fn escaped_json_is_equal() {
        let value = serde_json::json!({ "a": "x\u{202e}\x1b\u{7f}\u{e0041}\"y" });
        let escaped = visible_json(&value.to_string()).into_owned();
        assert!(escaped.is_ascii() && escaped.contains("\\u202e") && escaped.contains("\\u001b"), "{escaped}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&escaped).unwrap(), value);
    }
}
