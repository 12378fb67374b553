//! Detects destructive SQL statements: `DROP TABLE`, `DROP DATABASE`, and `DELETE FROM` without its own `WHERE` or
//! `LIMIT`. Comments and string literals are skipped; clauses in parentheses belong to another statement.

use std::ops::Range;

use super::{DangerKind, WorkLimit};

/// Origin of the SQL text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SqlSource {
    /// A file of statements.
    File,
    /// A string argument of a call named like a database function. Some such calls (`text`, `run`) also take prose.
    Call,
}

/// First keywords of SQL statements. A text that begins with another word is prose that only mentions deletion.
const FIRST_KEYWORDS: [&str; 18] = [
    "DELETE", "DROP", "WITH", "BEGIN", "START", "EXPLAIN", "CREATE", "ALTER", "INSERT", "UPDATE", "SELECT", "MERGE",
    "SET", "USE", "DO", "DECLARE", "IF", "EXEC",
];

#[derive(Debug, Clone, PartialEq, Eq)]
enum SqlToken {
    /// A keyword or an unquoted name, in upper case.
    Word(String),
    /// A quoted name.
    QuotedName,
    OpenParen,
    CloseParen,
    /// `;`
    Semicolon,
}

/// Returns the dangers in `text` with the positions of their statements: from the keyword to the statement's end.
pub(super) fn destructive(text: &str, source: SqlSource, work: &WorkLimit) -> Vec<(DangerKind, Range<usize>)> {
    if !work.take(text.len()) {
        return Vec::new();
    }
    let tokens = tokens(text);
    let mut found = Vec::new();
    let mut statement_start = 0;
    for (i, (offset, token)) in tokens.iter().enumerate() {
        if *token == SqlToken::Semicolon {
            statement_start = i + 1;
        }
        let SqlToken::Word(word) = token else { continue };
        let first = tokens.get(statement_start).map(|(_, t)| t);
        let is_statement = match (source, first) {
            (SqlSource::File, _) => true,
            (SqlSource::Call, Some(SqlToken::Word(first))) => FIRST_KEYWORDS.contains(&first.as_str()),
            (
                SqlSource::Call,
                Some(SqlToken::QuotedName | SqlToken::OpenParen | SqlToken::CloseParen | SqlToken::Semicolon) | None,
            ) => true,
        };
        let next = tokens.get(i + 1).map(|(_, t)| t);
        let next_is = |words: &[&str]| matches!(next, Some(SqlToken::Word(w)) if words.contains(&w.as_str()));
        match word.as_str() {
            "DROP" if is_statement && next_is(&["TABLE", "DATABASE"]) => {
                found.push((DangerKind::DropsTable, *offset..statement_end(&tokens[i..], text, work)));
            }
            "DELETE" if is_statement && next_is(&["FROM"]) => {
                let rest = &tokens[i + 2..];
                if is_unbounded(rest, work) && !(source == SqlSource::Call && is_prose(rest)) {
                    found.push((DangerKind::DeletesAllRows, *offset..statement_end(&tokens[i..], text, work)));
                }
            }
            _ => {}
        }
    }
    found
}

/// Offset of the end of the statement that `tokens` begin in.
fn statement_end(tokens: &[(usize, SqlToken)], text: &str, work: &WorkLimit) -> usize {
    let mut rest = tokens.iter().take_while(|_| work.take(1));
    rest.find(|(_, token)| *token == SqlToken::Semicolon).map_or(text.len(), |(offset, _)| *offset)
}

/// True if the tokens after `DELETE FROM` name a table and have neither `WHERE` nor `LIMIT` before the end of the
/// statement or of its parenthesis.
fn is_unbounded(rest: &[(usize, SqlToken)], work: &WorkLimit) -> bool {
    let mut depth = 0usize;
    let mut table = false;
    for (_, token) in rest.iter().take_while(|_| work.take(1)) {
        match token {
            SqlToken::OpenParen => depth += 1,
            SqlToken::CloseParen if depth == 0 => break,
            SqlToken::CloseParen => depth -= 1,
            SqlToken::Semicolon => break,
            SqlToken::Word(word) if depth == 0 && matches!(word.as_str(), "WHERE" | "LIMIT") => return false,
            SqlToken::Word(_) | SqlToken::QuotedName => table = true,
        }
    }
    table
}

/// True if the tokens after `DELETE FROM` are prose: more words than a table and its alias, and no SQL clause among
/// them.
fn is_prose(rest: &[(usize, SqlToken)]) -> bool {
    const CLAUSES: [&str; 12] = [
        "AS",
        "USING",
        "RETURNING",
        "ORDER",
        "PARTITION",
        "OUTPUT",
        "OPTION",
        "JOIN",
        "INNER",
        "LEFT",
        "CROSS",
        "WITH",
    ];
    let words: Vec<&str> = rest
        .iter()
        .map_while(|(_, token)| match token {
            SqlToken::Word(word) => Some(word.as_str()),
            SqlToken::QuotedName => Some(""),
            SqlToken::OpenParen | SqlToken::CloseParen | SqlToken::Semicolon => None,
        })
        .take(4)
        .collect();
    words.len() > 2 && !words.iter().any(|word| CLAUSES.contains(word))
}

/// Words, parentheses and semicolons with their offsets, in bytes.
fn tokens(text: &str) -> Vec<(usize, SqlToken)> {
    let mut tokens = Vec::new();
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let at = text.len() - rest.len();
        let length = match c {
            '-' if rest.starts_with("--") => rest.find('\n').unwrap_or(rest.len()),
            '/' if rest.starts_with("/*") => rest.find("*/").map_or(rest.len(), |i| i + 2),
            '\'' => quoted_length(rest, c),
            '"' | '`' => {
                tokens.push((at, SqlToken::QuotedName));
                quoted_length(rest, c)
            }
            '(' | ')' | ';' => {
                let token = match c {
                    '(' => SqlToken::OpenParen,
                    ')' => SqlToken::CloseParen,
                    _ => SqlToken::Semicolon,
                };
                tokens.push((at, token));
                1
            }
            c if is_word_char(c) => {
                let word: String = rest.chars().take_while(|c| is_word_char(*c)).collect();
                tokens.push((at, SqlToken::Word(word.to_uppercase())));
                word.len()
            }
            c => c.len_utf8(),
        };
        rest = rest.get(length..).unwrap_or_default();
    }
    tokens
}

fn is_word_char(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '.')
}

/// Length of the quoted text at the start of `text`, with both quotes, in bytes. 1 if the closing quote is missing, so
/// that a stray quote cannot hide the text after it.
fn quoted_length(text: &str, quote: char) -> usize {
    text.get(1..).and_then(|inner| inner.find(quote)).map_or(1, |i| i + 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn kinds(text: &str) -> Vec<DangerKind> {
        let kinds = |source| -> Vec<DangerKind> {
            destructive(text, source, &WorkLimit::default()).into_iter().map(|(kind, _)| kind).collect()
        };
        assert_eq!(kinds(SqlSource::File), kinds(SqlSource::Call), "{text}");
        kinds(SqlSource::File)
    }

    #[test]
    fn unbounded_statements_are_found() {
        assert_eq!(kinds("DROP TABLE users;"), [DangerKind::DropsTable]);
        assert_eq!(kinds("drop\n database x"), [DangerKind::DropsTable]);
        for bad in [
            "DELETE FROM users;",
            "delete from \"users\"",
            "DELETE FROM a.users ; SELECT 1 WHERE x",
            "DELETE FROM users RETURNING id;",
            "DELETE FROM a USING b;",
            "DELETE FROM a USING (SELECT id FROM b WHERE old) b;",
            "WITH gone AS (DELETE FROM users RETURNING id) SELECT * FROM gone WHERE id > 1;",
            "DELETE FROM users /* WHERE id = 1 */;",
            "DELETE FROM users -- WHERE id = 1\n;",
            "DELETE FROM users AS u",
            "SELECT 'it; DELETE FROM users;",
            "BEGIN; DELETE FROM users RETURNING 'WHERE'; COMMIT;",
        ] {
            assert_eq!(kinds(bad), [DangerKind::DeletesAllRows], "{bad}");
        }
    }

    #[test]
    fn bounded_statements_are_not_found() {
        for good in [
            "DELETE FROM users WHERE id = 1;",
            "DELETE FROM a USING b WHERE a.id = b.id RETURNING a.id;",
            "DELETE FROM log ORDER BY at LIMIT 100;",
            "DROP INDEX i;",
            "SELECT * FROM users;",
            "INSERT INTO notes VALUES ('never DELETE FROM users; or DROP TABLE users;');",
            "CREATE TABLE a (b int REFERENCES c ON DELETE CASCADE);",
        ] {
            assert_eq!(kinds(good), [], "{good}");
        }
    }

    #[test]
    fn prose_in_a_call_is_not_a_statement() {
        let of = |text| destructive(text, SqlSource::Call, &WorkLimit::default());
        assert_eq!(of("please delete from the list all that is old"), []);
        assert_eq!(of("Delete from the list all that is old"), []);
        assert_eq!(of("Never drop table salt"), []);
        assert!(!destructive("FOR EACH ROW DELETE FROM a;", SqlSource::File, &WorkLimit::default()).is_empty());
    }
}
