//! Dangers in files without a grammar: patterns on the text without comments, and for code without string literals.

use super::{Danger, What, at, html, json, shell, sql};

/// How a kind of file is read by its lines.
struct Style {
    /// What starts a comment to the end of the line.
    comments: &'static [&'static str],
    /// `/* */` too.
    blocks: bool,
    /// Commands of a shell.
    shell: bool,
    /// Statements of a database.
    sql: bool,
    /// A programming language: loops and eval are looked for, strings are left out there.
    code: bool,
}

fn extension(path: &str) -> String {
    let name = path.rsplit('/').next().unwrap_or(path);
    name.rsplit_once('.').map_or("", |(_, e)| e).to_ascii_lowercase()
}

fn style(path: &str) -> Option<Style> {
    let name = path.rsplit('/').next().unwrap_or(path).to_ascii_lowercase();
    let extension = extension(path);
    let hash: &[&str] = &["#"];
    Some(match (name.as_str(), extension.as_str()) {
        // Prose and data: nobody runs it.
        (_, "md" | "rst" | "txt" | "adoc" | "css" | "csv" | "xml" | "lock") => return None,
        (_, "sql" | "psql" | "ddl") => Style { comments: &["--"], blocks: true, shell: false, sql: true, code: false },
        (_, "sh" | "bash" | "zsh" | "ksh" | "fish" | "yml" | "yaml" | "mk" | "toml" | "service" | "cfg" | "ini")
        | ("dockerfile" | "makefile" | "justfile" | "gnumakefile" | "containerfile", _) => {
            Style { comments: hash, blocks: false, shell: true, sql: false, code: false }
        }
        (_, "rb" | "pl" | "pm" | "ex" | "exs" | "r" | "jl") => {
            Style { comments: hash, blocks: false, shell: true, sql: false, code: true }
        }
        (_, "lua") => Style { comments: &["--"], blocks: false, shell: true, sql: false, code: true },
        (_, "php") => Style { comments: &["//", "#"], blocks: true, shell: true, sql: false, code: true },
        (
            _,
            "c" | "h" | "cc" | "cpp" | "cxx" | "hpp" | "java" | "kt" | "kts" | "cs" | "swift" | "scala" | "dart" | "m"
            | "groovy" | "zig",
        ) => Style { comments: &["//"], blocks: true, shell: false, sql: false, code: true },
        // No extension, or an unknown one: it may be a script.
        _ => Style { comments: hash, blocks: false, shell: true, sql: false, code: false },
    })
}

pub(super) fn dangers(path: &str, text: &str) -> Vec<Danger> {
    match extension(path).as_str() {
        "html" | "htm" | "xhtml" | "svg" | "vue" | "svelte" => return html::dangers(text),
        "json" | "jsonc" | "json5" | "webmanifest" => return json::dangers(text),
        _ => {}
    }
    let Some(style) = style(path) else { return Vec::new() };
    let uncommented = blank(text, &style, false);
    let mut found = Vec::new();
    if style.shell {
        // A command may go on over a backslash; its place is its first line.
        let (mut command, mut first) = (String::new(), 0);
        for (row, line) in uncommented.lines().enumerate() {
            if command.is_empty() {
                first = row;
            }
            let going_on = line.ends_with('\\');
            command.push_str(line.trim_end_matches('\\'));
            command.push(' ');
            if !going_on {
                if shell::deletes_files(&command) {
                    found.push(at(What::DeletesFiles, text, first));
                }
                command.clear();
            }
        }
    }
    if style.sql {
        for (what, offset) in sql::destructive(&uncommented, sql::Source::File) {
            found.push(at(what, text, row_of(&uncommented, offset)));
        }
    }
    if style.code {
        let code = blank(text, &style, true);
        for offset in words(&code, "eval").chain(words(&code, "exec")) {
            let before = code[..offset].trim_end();
            let after = code[offset + 4..].trim_start();
            let is_method =
                before.ends_with(['.', '>']) || ["def", "func", "function", "fun"].iter().any(|d| before.ends_with(d));
            if after.starts_with('(') && !is_method {
                found.push(at(What::DynamicCode, text, row_of(&code, offset)));
            }
        }
        for offset in words(&code, "while").chain(words(&code, "for")) {
            if endless(&code, offset) {
                found.push(at(What::EndlessLoop, text, row_of(&code, offset)));
            }
        }
    }
    found
}

fn row_of(text: &str, offset: usize) -> usize {
    text[..offset].matches('\n').count()
}

/// Offsets of `word` where it stands alone.
fn words<'t>(text: &'t str, word: &'t str) -> impl Iterator<Item = usize> + 't {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(word)
        .map(|(i, _)| i)
        .filter(move |i| !text[..*i].ends_with(part) && !text[*i + word.len()..].starts_with(part))
}

/// `while (true)` and `for (;;)` whose block has no word that leaves it.
fn endless(code: &str, offset: usize) -> bool {
    let Some(head) = code[offset..].find('(').map(|i| offset + i) else { return false };
    let keyword = code[offset..head].trim_end();
    let Some(close) = code[head..].find(')').map(|i| head + i) else { return false };
    let condition: String = code[head + 1..close].chars().filter(|c| !c.is_whitespace()).collect();
    let forever = match keyword {
        "while" => matches!(condition.to_ascii_lowercase().as_str(), "true" | "1"),
        "for" => condition == ";;",
        _ => false,
    };
    if !forever {
        return false;
    }
    let after = code[close + 1..].trim_start();
    let body = if after.starts_with('{') {
        block(after)
    } else {
        // `do { .. } while (true);`, else one statement.
        let before = code[..offset].trim_end();
        match before.ends_with('}') {
            true if after.starts_with(';') => before.rfind("do").map_or("", |i| &before[i..]),
            _ => after.split_inclusive(';').next().unwrap_or_default(),
        }
    };
    !["break", "return", "throw", "goto", "await", "yield", "exit", "raise"]
        .iter()
        .any(|w| words(body, w).next().is_some())
}

/// From an opening brace to the one that closes it.
fn block(text: &str) -> &str {
    let mut depth = 0usize;
    for (i, c) in text.char_indices() {
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

/// The text with comments (and, if asked, string contents) turned into spaces; line breaks and offsets stay.
fn blank(text: &str, style: &Style, strings: bool) -> String {
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
        let comment = style.comments.iter().any(|m| rest.starts_with(m) && (*m != "#" || at_word_start));
        if comment {
            let end = rest.find('\n').unwrap_or(rest.len());
            erase(&mut out, &rest[..end]);
            rest = &rest[end..];
        } else if style.blocks && rest.starts_with("/*") {
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

    fn kinds(path: &str, text: &str) -> Vec<(What, u32)> {
        dangers(path, text).into_iter().map(|d| (d.what, d.line)).collect()
    }

    #[test]
    fn scripts_and_statements() {
        assert_eq!(kinds("x.sh", "ls\nrm -rf /\n"), [(What::DeletesFiles, 2)]);
        assert_eq!(kinds("x.sh", "# rm -rf /\necho ok # rm -rf /\n"), []);
        assert_eq!(kinds("Dockerfile", "RUN rm -rf \\\n  /\n"), [(What::DeletesFiles, 1)]);
        assert_eq!(kinds("x.sql", "-- DROP TABLE a;\nSELECT 1;\nDROP TABLE b;\n"), [(What::DropsTable, 3)]);
        assert_eq!(kinds("x.sql", "/* DELETE FROM a; */ DELETE FROM a WHERE b;\n"), []);
        assert_eq!(kinds("README.md", "DROP TABLE a; rm -rf /\n"), []);
        assert_eq!(kinds("x.sql", "SELECT 1;\nDELETE FROM users\nRETURNING id;\n"), [(What::DeletesAllRows, 2)]);
        assert_eq!(kinds("x.sql", "DELETE FROM a USING b;\n"), [(What::DeletesAllRows, 1)]);
    }

    #[test]
    fn pages_and_data_that_run_something() {
        assert_eq!(
            kinds("package.json", "{\"scripts\": {\n\"postinstall\": \"rm -rf ~\"}}"),
            [(What::DeletesFiles, 2)]
        );
        assert_eq!(kinds("web/index.html", "<body>\n<script>eval(x)</script>"), [(What::DynamicCode, 2)]);
        assert_eq!(kinds("data.json", "{\"note\": \"rm -rf /; eval(x)\"}"), []);
    }

    #[test]
    fn code_without_a_grammar() {
        assert_eq!(kinds("A.java", "class A { void f() {\n while (true) { x++; } } }"), [(What::EndlessLoop, 2)]);
        assert_eq!(kinds("A.java", "while (true) { if (x) break; }"), []);
        assert_eq!(kinds("a.c", "// while (true) {}\nchar *s = \"while(1){}\";\n"), []);
        assert_eq!(kinds("a.c", "for ( ; ; ) { }"), [(What::EndlessLoop, 1)]);
        assert_eq!(kinds("a.c", "do { x++; } while (1);"), [(What::EndlessLoop, 1)]);
        assert_eq!(kinds("a.php", "<?php eval($x);"), [(What::DynamicCode, 1)]);
        assert_eq!(kinds("a.php", "<?php $db->exec('x'); // eval($x)\n"), []);
        assert_eq!(kinds("a.rb", "def eval(x)\nend\n"), []);
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_a_panic(text in ".{0,80}", lines in "[a-z(){};'\"#/*\\\\\n -]{0,80}") {
            for path in ["a.sh", "a.sql", "a.java", "a.php", "a.lua", "a.html", "a.json", "x"] {
                dangers(path, &text);
                dangers(path, &lines);
            }
        }
    }
}
