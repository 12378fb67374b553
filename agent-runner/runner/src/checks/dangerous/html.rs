//! Detects dangers in scripts of HTML pages: the content of `<script>` elements and of event attributes
//! (`onclick="..."`) is checked in its language. Text, comments and data blocks are ignored.

use super::{Danger, Lines, WorkLimit, grammar};
use crate::checks::language::Language;

/// Returns the dangers in the scripts of a page.
pub(super) fn dangers(text: &str, work: &WorkLimit) -> Vec<Danger> {
    let lines = Lines::new(text);
    scripts(text, work)
        .into_iter()
        .flat_map(|(code, language)| {
            // `code` is a slice of `text`.
            let first_row = lines.row_of(code.as_ptr() as usize - text.as_ptr() as usize);
            let dangers = grammar::dangers(language, code, work);
            dangers.into_iter().map(move |danger| danger.moved_down(first_row)).collect::<Vec<_>>()
        })
        .collect()
}

/// Scripts of a page with their languages, in order.
fn scripts<'t>(text: &'t str, work: &WorkLimit) -> Vec<(&'t str, Language)> {
    let mut found = Vec::new();
    let mut rest = text;
    while let Some(open) = rest.find('<') {
        rest = &rest[open..];
        if rest.starts_with("<!--") {
            rest = rest.find("-->").map_or("", |end| &rest[end..]);
            continue;
        }
        let tag = tag(rest, work);
        found.extend(inline_scripts(tag).map(|code| (code, Language::JavaScript)));
        rest = &rest[tag.len()..];
        if is_script(tag) {
            let body = &rest[..end_of_script(rest)];
            rest = &rest[body.len()..];
            found.extend(script_language(tag).map(|language| (body, language)));
        }
    }
    found
}

/// The tag at the start of `text`, from `<` to the closing `>` outside quotes; only the `<` if no tag begins there.
fn tag<'t>(text: &'t str, work: &WorkLimit) -> &'t str {
    if !text[1..].starts_with(|c: char| c.is_ascii_alphabetic() || c == '/') {
        return &text[..1];
    }
    let mut quote = None;
    for (i, c) in text.char_indices().skip(1).take_while(|_| work.take(1)) {
        match (quote, c) {
            (None, '>') => return &text[..=i],
            (None, '"' | '\'') => quote = Some(c),
            (Some(open), c) if open == c => quote = None,
            // The tag is not closed; the next one begins here.
            (None, '<') => return &text[..i],
            _ => {}
        }
    }
    // An unclosed quote: the text after the `<` is still checked.
    &text[..1]
}

fn is_script(tag: &str) -> bool {
    let name = tag.get(1..7).is_some_and(|name| name.eq_ignore_ascii_case("script"));
    name && tag[7..].starts_with(|c: char| c.is_whitespace() || matches!(c, '>' | '/')) && !tag.ends_with("/>")
}

/// Byte offset of the script's end: at `</script`, or the end of the file.
fn end_of_script(text: &str) -> usize {
    let is_script_end = |at: &usize| text.get(at + 2..at + 8).is_some_and(|name| name.eq_ignore_ascii_case("script"));
    text.match_indices("</").map(|(at, _)| at).find(is_script_end).unwrap_or(text.len())
}

/// Language of a script element; `None` for a data block or a template.
fn script_language(tag: &str) -> Option<Language> {
    let kind = attributes(tag).into_iter().find(|(name, _)| matches!(name.as_str(), "type" | "lang"));
    let Some((_, kind)) = kind else { return Some(Language::JavaScript) };
    let kind = kind.trim().to_ascii_lowercase();
    match kind.as_str() {
        "ts" | "typescript" | "text/typescript" => Some(Language::TypeScript),
        "tsx" | "text/tsx" => Some(Language::Tsx),
        "" | "module" | "js" | "jsx" | "text/babel" | "text/jsx" => Some(Language::JavaScript),
        kind if kind.ends_with("javascript") || kind.ends_with("ecmascript") => Some(Language::JavaScript),
        _ => None,
    }
}

/// Values of attributes that contain code: event attributes (`on...`) and `javascript:` URLs.
fn inline_scripts(tag: &str) -> impl Iterator<Item = &str> {
    attributes(tag).into_iter().filter_map(|(name, value)| {
        let script_url = value.trim_start().get(..11).filter(|p| p.eq_ignore_ascii_case("javascript:"));
        match (name.strip_prefix("on"), script_url) {
            (Some(event), _) if !event.is_empty() => Some(value),
            (_, Some(_)) => value.split_once(':').map(|(_, code)| code),
            _ => None,
        }
    })
}

/// Attributes of a tag: names in lower case, with their values without quotes.
fn attributes(tag: &str) -> Vec<(String, &str)> {
    let mut found = Vec::new();
    let mut rest = tag;
    while let Some(equals) = rest.find('=') {
        let name: String = rest[..equals]
            .trim_end()
            .chars()
            .rev()
            .take_while(|c| c.is_alphanumeric() || matches!(c, '-' | '_'))
            .collect::<Vec<_>>()
            .into_iter()
            .rev()
            .collect();
        let after = rest[equals + 1..].trim_start();
        let (value, remaining) = match after.chars().next() {
            Some(quote @ ('"' | '\'')) => {
                let inner = &after[1..];
                let end = inner.find(quote).unwrap_or(inner.len());
                (&inner[..end], inner.get(end + 1..).unwrap_or_default())
            }
            Some(_) | None => {
                let end = after.find(|c: char| c.is_whitespace() || c == '>').unwrap_or(after.len());
                after.split_at(end)
            }
        };
        found.push((name.to_ascii_lowercase(), value));
        rest = remaining;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checks::dangerous::DangerKind;
    use proptest::prelude::*;

    fn kinds(text: &str) -> Vec<(DangerKind, u32)> {
        dangers(text, &WorkLimit::default()).into_iter().map(|d| (d.kind, d.line)).collect()
    }

    #[test]
    fn scripts_are_checked_in_their_language() {
        assert_eq!(kinds("<p>x</p>\n<script>\neval(x)\n</script>\n"), [(DangerKind::DynamicCode, 3)]);
        let module = "<SCRIPT type='module' src=\"a.js\">while (true) { x++ }</SCRIPT>";
        assert_eq!(kinds(module), [(DangerKind::EndlessLoop, 1)]);
        assert_eq!(kinds("<script lang=\"ts\">const f: number = 1; eval(x)</script>"), [(DangerKind::DynamicCode, 1)]);
        assert_eq!(kinds("<script>eval(x)"), [(DangerKind::DynamicCode, 1)]);
        assert_eq!(kinds("<a title=\"a > b\"\n onclick=\"eval(x)\">y</a>"), [(DangerKind::DynamicCode, 2)]);
        assert_eq!(kinds("<a href='javascript:eval(x)'>y</a>"), [(DangerKind::DynamicCode, 1)]);
        assert_eq!(kinds("<p>1 < 2</p><script>eval(x)</script>"), [(DangerKind::DynamicCode, 1)]);
    }

    #[test]
    fn text_comments_and_data_are_ignored() {
        for good in [
            "<p>eval(x) and <code>while (true) {}</code></p>",
            "<!-- <script>eval(x)</script> -->",
            "<script type=\"application/json\">{\"a\": \"eval(x)\"}</script>",
            "<script>// eval(x)\nf('eval(x)')</script>",
            "<a on=\"eval(x)\" title='javascript'>x</a>",
            "<scripted>eval(x)</scripted>",
            "<p>it is < 'that</p>",
        ] {
            assert_eq!(kinds(good), [], "{good}");
        }
    }

    proptest! {
        #[test]
        fn dangers_does_not_panic_on_any_page(text in "(<script|</script>|<!--|-->|<a |on|=|\"|'|>|<|/|eval\\(x\\)|é|[a-z \n]){0,30}") {
            dangers(&text, &WorkLimit::default());
        }
    }
}
