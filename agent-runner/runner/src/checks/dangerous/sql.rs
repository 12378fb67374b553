//! Destructive SQL, statement by statement.

use super::What;

/// What the statements in `text` do, each with its offset in bytes.
pub(super) fn destructive(text: &str) -> Vec<(What, usize)> {
    let mut found = Vec::new();
    let mut start = 0;
    for statement in text.split_inclusive(';') {
        let words: Vec<(usize, String)> = words(statement);
        for (i, (offset, word)) in words.iter().enumerate() {
            let follows = |n: usize| words.get(i + n).map(|(_, w)| w.as_str());
            match (word.as_str(), follows(1)) {
                ("DROP", Some("TABLE" | "DATABASE")) => found.push((What::DropsTable, start + offset)),
                ("DELETE", Some("FROM")) => {
                    let rest = &words[i + 2..];
                    // Without a table's name it is a sentence, not a statement.
                    let table = !rest.is_empty();
                    let short = rest.len() <= 2 || ends_after_table(statement, words[i + 1].0);
                    if table && short && !rest.iter().any(|(_, w)| w == "WHERE") {
                        found.push((What::DeletesAllRows, start + offset));
                    }
                }
                _ => {}
            }
        }
        start += statement.len();
    }
    found
}

/// `DELETE FROM name ;`: nothing but the name before the statement's end.
fn ends_after_table(statement: &str, from: usize) -> bool {
    let rest = statement.get(from + "FROM".len()..).unwrap_or_default();
    rest.trim_end_matches(|c: char| c == ';' || c.is_whitespace() || matches!(c, '"' | '\'' | '`' | ')'))
        .split_whitespace()
        .count()
        == 1
}

/// Words in upper case with their offsets.
fn words(text: &str) -> Vec<(usize, String)> {
    let mut words = Vec::new();
    let mut begin = None;
    for (i, c) in text.char_indices().chain([(text.len(), ' ')]) {
        let part = c.is_alphanumeric() || c == '_';
        match (begin, part) {
            (None, true) => begin = Some(i),
            (Some(b), false) => {
                words.push((b, text[b..i].to_uppercase()));
                begin = None;
            }
            (None, false) | (Some(_), true) => {}
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(text: &str) -> Vec<What> {
        destructive(text).into_iter().map(|(what, _)| what).collect()
    }

    #[test]
    fn unbounded_statements_are_found() {
        assert_eq!(kinds("DROP TABLE users;"), [What::DropsTable]);
        assert_eq!(kinds("drop\n database x"), [What::DropsTable]);
        assert_eq!(kinds("DELETE FROM users;"), [What::DeletesAllRows]);
        assert_eq!(kinds("delete from \"users\""), [What::DeletesAllRows]);
        assert_eq!(kinds("DELETE FROM a.users ; SELECT 1 WHERE x"), [What::DeletesAllRows]);
    }

    #[test]
    fn bounded_ones_are_not() {
        for good in [
            "DELETE FROM users WHERE id = 1;",
            "DROP INDEX i;",
            "SELECT * FROM users;",
            "please delete from the list all that is old",
        ] {
            assert_eq!(kinds(good), [], "{good}");
        }
    }
}
