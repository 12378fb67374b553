//! Detects dangers in files without a grammar: patterns are matched on the text without comments, and in code also
//! without string literals.

use super::{
    Danger, DangerKind, Lines, WorkLimit, calls, html, json, logical_lines, notebook, python_path, shell, sql,
};

/// Maximum length of the parentheses of an unconditional loop, in bytes.
const MAX_UNCONDITIONAL_HEAD_BYTES: usize = 200;

/// Comment syntax of a kind of file, and the patterns to match in such files.
struct FileStyle {
    /// Markers that start a comment to the end of the line.
    line_comments: &'static [&'static str],
    /// True if `/* */` comments exist.
    block_comments: bool,
    /// True to match shell commands.
    shell: bool,
    /// True to match SQL statements.
    sql: bool,
    /// True for a programming language: loops and eval calls are matched outside string literals.
    code: bool,
}

fn extension(path: &str) -> String {
    let name = path.rsplit('/').next().unwrap_or(path);
    name.rsplit_once('.').map_or("", |(_, e)| e).to_ascii_lowercase()
}

/// Style of a file; `None` for prose and data, which are not checked.
fn style_of(path: &str) -> Option<FileStyle> {
    let name = path.rsplit('/').next().unwrap_or(path).to_ascii_lowercase();
    let extension = extension(path);
    let hash: &[&str] = &["#"];
    Some(match (name.as_str(), extension.as_str()) {
        _ if is_prose(path) => return None,
        (_, "sql" | "psql" | "ddl") => {
            FileStyle { line_comments: &["--"], block_comments: true, shell: false, sql: true, code: false }
        }
        (_, "sh" | "bash" | "zsh" | "ksh" | "fish" | "yml" | "yaml" | "mk" | "toml" | "service" | "cfg" | "ini")
        | ("dockerfile" | "makefile" | "justfile" | "gnumakefile" | "containerfile", _) => {
            FileStyle { line_comments: hash, block_comments: false, shell: true, sql: false, code: false }
        }
        (_, "rb" | "pl" | "pm" | "ex" | "exs" | "r" | "jl") => {
            FileStyle { line_comments: hash, block_comments: false, shell: true, sql: false, code: true }
        }
        (_, "lua") => FileStyle { line_comments: &["--"], block_comments: false, shell: true, sql: false, code: true },
        (_, "php") => {
            FileStyle { line_comments: &["//", "#"], block_comments: true, shell: true, sql: false, code: true }
        }
        (
            _,
            "c" | "h" | "cc" | "cpp" | "cxx" | "hpp" | "java" | "kt" | "kts" | "cs" | "swift" | "scala" | "dart" | "m"
            | "groovy" | "zig",
        ) => FileStyle { line_comments: &["//"], block_comments: true, shell: false, sql: false, code: true },
        // A file without an extension, or with an unknown extension, may be a script.
        _ => FileStyle { line_comments: hash, block_comments: false, shell: true, sql: false, code: false },
    })
}

/// True for prose and data, which are not executed.
pub(super) fn is_prose(path: &str) -> bool {
    matches!(extension(path).as_str(), "md" | "rst" | "txt" | "adoc" | "css" | "csv" | "xml" | "lock")
}

/// Returns the dangers in the file at `path`.
pub(super) fn dangers(path: &str, text: &str, work: &WorkLimit) -> Vec<Danger> {
    let extension = extension(path);
    match extension.as_str() {
        "html" | "htm" | "xhtml" | "svg" | "vue" | "svelte" => return html::dangers(text, work),
        "json" | "jsonc" | "json5" | "webmanifest" => return json::dangers(text, work),
        "ipynb" => return notebook::dangers(text, work),
        "pth" => return python_path::dangers(text, work),
        _ => {}
    }
    let Some(style) = style_of(path) else { return Vec::new() };
    let lines = Lines::new(text);
    let uncommented = blank_out(text, &style, false);
    let mut found = Vec::new();
    if style.shell {
        let is_yaml = matches!(extension.as_str(), "yml" | "yaml");
        for (row, command) in logical_lines::commands(&uncommented, is_yaml, work) {
            let dangers = shell::dangers(&command, work);
            found.extend(dangers.into_iter().map(|(kind, code)| Danger::new(kind, &lines, row, &code)));
        }
    }
    let mut report = |kind, range: std::ops::Range<usize>| {
        if work.take(range.len()) {
            found.push(Danger::new(kind, &lines, lines.row_of(range.start), &uncommented[range]));
        }
    };
    if style.sql {
        for (kind, range) in sql::destructive(&uncommented, sql::SqlSource::File, work) {
            report(kind, range);
        }
    }
    if style.code {
        let code = blank_out(text, &style, true);
        for offset in whole_words(&code, "eval").chain(whole_words(&code, "exec")) {
            let before = code[..offset].trim_end();
            let after = code[offset + 4..].trim_start();
            let is_method =
                before.ends_with(['.', '>']) || ["def", "func", "function", "fun"].iter().any(|d| before.ends_with(d));
            if after.starts_with('(') && !is_method {
                report(DangerKind::DynamicCode, offset..end_of_line(&code, offset));
            }
        }
        for offset in whole_words(&code, "while").chain(whole_words(&code, "for")) {
            if is_infinite_loop(&code, offset, work) {
                report(DangerKind::EndlessLoop, offset..end_of_line(&code, offset));
            }
        }
        // Commands in files that may contain shell lines are reported above.
        let skipped: &[DangerKind] = if style.shell { &[DangerKind::DeletesFiles] } else { &[] };
        for (kind, range) in calls::dangers(&code, &uncommented, skipped, work) {
            report(kind, range);
        }
    }
    found
}

fn end_of_line(text: &str, offset: usize) -> usize {
    text[offset..].find('\n').map_or(text.len(), |end| offset + end)
}

/// Offsets of `word` as a whole word, in bytes.
fn whole_words<'t>(text: &'t str, word: &'t str) -> impl Iterator<Item = usize> + 't {
    let is_word_char = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(word)
        .map(|(i, _)| i)
        .filter(move |i| !text[..*i].ends_with(is_word_char) && !text[*i + word.len()..].starts_with(is_word_char))
}

/// True for `while (true)` and `for (;;)` whose body has no keyword that leaves the loop.
fn is_infinite_loop(code: &str, offset: usize, work: &WorkLimit) -> bool {
    let keyword = code[offset..].chars().take_while(char::is_ascii_alphabetic).collect::<String>();
    let head = code.len() - code[offset + keyword.len()..].trim_start().len();
    if !code[head..].starts_with('(') {
        return false;
    }
    // An unconditional head is short.
    let end = code.floor_char_boundary(code.len().min(head + MAX_UNCONDITIONAL_HEAD_BYTES));
    let Some(close) = code[head..end].find(')').map(|i| head + i) else { return false };
    let condition: String = code[head + 1..close].chars().filter(|c| !c.is_whitespace()).collect();
    let unconditional = match keyword.as_str() {
        "while" => matches!(condition.to_ascii_lowercase().as_str(), "true" | "1"),
        "for" => condition == ";;",
        _ => false,
    };
    if !unconditional {
        return false;
    }
    let after = code[close + 1..].trim_start();
    let body = if after.starts_with('{') {
        braced_block(after, work)
    } else {
        // The body of `do { .. } while (true);`, else a single statement.
        let before = code[..offset].trim_end();
        match before.ends_with('}') {
            true if after.starts_with(';') && work.take(before.len() / 8) => {
                before.rfind("do").map_or("", |i| &before[i..])
            }
            _ => after.split_inclusive(';').next().unwrap_or_default(),
        }
    };
    work.take(body.len())
        && !["break", "return", "throw", "goto", "await", "yield", "exit", "raise"]
            .iter()
            .any(|w| whole_words(body, w).next().is_some())
}

/// The block at the start of `text`, from the opening brace to the matching closing one.
fn braced_block<'t>(text: &'t str, work: &WorkLimit) -> &'t str {
    let mut depth = 0usize;
    for (i, c) in text.char_indices().take_while(|_| work.take(1)) {
        match c {
            '{' => depth += 1,
            '}' => {
                depth -= 1;
                if depth == 0 {
                    return &text[..=i];
                }
            }
            _ => {}
        }
    }
    text
}

/// Returns the text with comments replaced by spaces, and with string contents replaced too if `strings` is true.
/// Newlines and offsets stay the same.
fn blank_out(text: &str, style: &FileStyle, strings: bool) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    let mut quote: Option<char> = None;
    let erase = |out: &mut String, piece: &str| {
        out.extend(piece.bytes().map(|b| if b == b'\n' { '\n' } else { ' ' }));
    };
    while let Some(c) = rest.chars().next() {
        if let Some(open) = quote {
            let escaped = c == '\\' && rest.len() > 1;
            let take = if escaped { 1 + rest[1..].chars().next().map_or(0, char::len_utf8) } else { c.len_utf8() };
            if !escaped && (c == open || c == '\n') {
                quote = None;
                out.push(c);
            } else if strings {
                erase(&mut out, &rest[..take]);
            } else {
                out.push_str(&rest[..take]);
            }
            rest = &rest[take..];
            continue;
        }
        let at_word_start = out.chars().next_back().is_none_or(char::is_whitespace);
        let comment = style.line_comments.iter().any(|m| rest.starts_with(m) && (*m != "#" || at_word_start));
        if comment {
            let end = rest.find('\n').unwrap_or(rest.len());
            erase(&mut out, &rest[..end]);
            rest = &rest[end..];
        } else if style.block_comments && rest.starts_with("/*") {
            let end = rest.find("*/").map_or(rest.len(), |i| i + 2);
            erase(&mut out, &rest[..end]);
            rest = &rest[end..];
        } else {
            if matches!(c, '"' | '\'') {
                quote = Some(c);
            }
            out.push(c);
            rest = &rest[c.len_utf8()..];
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn kinds(path: &str, text: &str) -> Vec<(DangerKind, u32)> {
        dangers(path, text, &WorkLimit::default()).into_iter().map(|d| (d.kind, d.line)).collect()
    }

    #[test]
    fn dangers_in_shell_scripts_and_sql_are_found() {
        assert_eq!(kinds("x.sh", "ls\nrm -rf /\n"), [(DangerKind::DeletesFiles, 2)]);
        assert_eq!(kinds("x.sh", "# rm -rf /\necho ok # rm -rf /\n"), []);
        assert_eq!(kinds("Dockerfile", "RUN rm -rf \\\n  /\n"), [(DangerKind::DeletesFiles, 1)]);
        assert_eq!(kinds("x.sql", "-- DROP TABLE a;\nSELECT 1;\nDROP TABLE b;\n"), [(DangerKind::DropsTable, 3)]);
        assert_eq!(kinds("x.sql", "/* DELETE FROM a; */ DELETE FROM a WHERE b;\n"), []);
        assert_eq!(kinds("README.md", "DROP TABLE a; rm -rf /\n"), []);
        assert_eq!(kinds("x.sql", "SELECT 1;\nDELETE FROM users\nRETURNING id;\n"), [(DangerKind::DeletesAllRows, 2)]);
        assert_eq!(kinds("x.sql", "DELETE FROM a USING b;\n"), [(DangerKind::DeletesAllRows, 1)]);
    }

    #[test]
    fn dangers_in_html_and_json_commands_are_found() {
        assert_eq!(
            kinds("package.json", "{\"scripts\": {\n\"postinstall\": \"rm -rf ~\"}}"),
            [(DangerKind::DeletesFiles, 2)]
        );
        assert_eq!(kinds("web/index.html", "<body>\n<script>eval(x)</script>"), [(DangerKind::DynamicCode, 2)]);
        assert_eq!(kinds("data.json", "{\"note\": \"rm -rf /; eval(x)\"}"), []);
    }

    #[test]
    fn dangers_in_code_without_a_grammar_are_found() {
        assert_eq!(kinds("A.java", "class A { void f() {\n while (true) { x++; } } }"), [(DangerKind::EndlessLoop, 2)]);
        assert_eq!(kinds("A.java", "while (true) { if (x) break; }"), []);
        assert_eq!(kinds("a.c", "// while (true) {}\nchar *s = \"while(1){}\";\n"), []);
        assert_eq!(kinds("a.c", "for ( ; ; ) { }"), [(DangerKind::EndlessLoop, 1)]);
        assert_eq!(kinds("a.c", "do { x++; } while (1);"), [(DangerKind::EndlessLoop, 1)]);
        assert_eq!(kinds("a.php", "<?php eval($x);"), [(DangerKind::DynamicCode, 1)]);
        assert_eq!(kinds("a.php", "<?php $db->exec('x'); // eval($x)\n"), []);
        assert_eq!(kinds("a.rb", "def eval(x)\nend\n"), []);
    }

    proptest! {
        #[test]
        fn dangers_does_not_panic_on_any_text(text in ".{0,80}", lines in "[a-z(){};'\"#/*\\\\\n -]{0,80}") {
            for path in ["a.sh", "a.sql", "a.java", "a.php", "a.lua", "a.html", "a.json", "a.yml", "a.ipynb", "a.pth", "x"] {
                dangers(path, &text, &WorkLimit::default());
                dangers(path, &lines, &WorkLimit::default());
            }
        }
    }
}
