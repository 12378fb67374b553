//! Rendering of prompt templates.

use cfq_proto::visible_text::{SOURCE_CHARACTERS, visible};
use minijinja::{Environment, UndefinedBehavior, Value};

/// Error: a prompt template does not render. It is a bug in the template, which the tests detect.
#[derive(Debug, thiserror::Error)]
#[error("cannot render the {role} prompt")]
pub struct PromptError {
    role: &'static str,
    #[source]
    source: minijinja::Error,
}

/// Renders a prompt template. Undefined values are errors. Control and invisible characters are shown as code points,
/// because a model must see them in the code that it reviews; nothing else is escaped.
pub(super) fn render(role: &'static str, template: &str, values: Value) -> Result<String, PromptError> {
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.add_filter("fenced", fenced);
    let text = environment.render_str(template, values).map_err(|source| PromptError { role, source })?;
    Ok(visible(&text, SOURCE_CHARACTERS).into_owned())
}

/// Returns a code block around `text`, labelled with the language of `path`. Its fence is longer than every fence
/// inside `text`.
pub(super) fn fenced(text: &str, path: Option<&str>) -> String {
    let inner = text.lines().filter_map(|line| {
        let line = line.trim_start();
        Some(line.len() - line.trim_start_matches('`').len()).filter(|n| *n >= 3)
    });
    let fence = "`".repeat(inner.max().map_or(3, |n| n + 1));
    let label = path.and_then(|p| p.rsplit_once('.')).map_or("", |(_, extension)| match extension {
        "py" | "pyi" => "python",
        "js" | "mjs" | "cjs" => "javascript",
        "ts" | "mts" => "typescript",
        "rs" => "rust",
        other => other,
    });
    format!("{fence}{label}\n{}\n{fence}", text.trim_end_matches('\n'))
}

/// Start of a line comment in the language of `path`; empty if unknown.
pub(super) fn comment_prefix(path: &str) -> &'static str {
    match path.rsplit_once('.').map_or("", |(_, e)| e) {
        "js" | "mjs" | "cjs" | "jsx" | "ts" | "tsx" | "rs" | "go" | "c" | "h" | "cpp" | "hpp" | "java" | "kt"
        | "cs" | "swift" | "scala" | "php" | "css" => "// ",
        "sql" | "lua" => "-- ",
        "py" | "sh" | "rb" | "pl" | "yaml" | "yml" | "toml" => "# ",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fence_is_longer_than_fences_inside() {
        assert_eq!(fenced("a\n````\nb\n````\n", Some("x.md")), "`````md\na\n````\nb\n````\n`````");
        assert_eq!(fenced("x = `1`\n", None), "```\nx = `1`\n```");
    }

    #[test]
    fn hidden_characters_are_visible_in_prompts() {
        let text =
            render("critic", "{{ text }}", minijinja::context! { text => "a\u{202e}b\x1b\r\n\u{e0041}" }).unwrap();
        assert_eq!(text, "a<U+202E>b<U+001B>\r\n<U+E0041>");
    }
}
