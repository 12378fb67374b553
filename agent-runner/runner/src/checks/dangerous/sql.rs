//! Destructive SQL, statement by statement: `DROP TABLE` and `DROP DATABASE`, and a `DELETE FROM` that no `WHERE` or `LIMIT`
//! of its own bounds. Comments and string literals are passed over; what follows in parentheses is another statement's.

use super::What;

/// Where the text comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// A file of statements.
    File,
    /// A string that a call with a database's name takes. Some such calls (`text`, `run`) also take sentences.
    Call,
}

/// What a statement begins with. A sentence that speaks of deleting begins otherwise.
const BEGINNINGS: [&str; 18] = [
    "DELETE", "DROP", "WITH", "BEGIN", "START", "EXPLAIN", "CREATE", "ALTER", "INSERT", "UPDATE", "SELECT", "MERGE",
    "SET", "USE", "DO", "DECLARE", "IF", "EXEC",
];

#[derive(Debug, Clone, PartialEq, Eq)]
enum Token {
    /// In upper case; also a quoted name, which is no keyword.
    Word(String),
    Name,
    Open,
    Close,
    End,
}

/// What the statements in `text` do, each with its offset in bytes.
pub(super) fn destructive(text: &str, source: Source) -> Vec<(What, usize)> {
    let tokens = tokens(text);
    let mut found = Vec::new();
    let mut begins = 0;
    for (i, (offset, token)) in tokens.iter().enumerate() {
        if *token == Token::End {
            begins = i + 1;
        }
        let Token::Word(word) = token else { continue };
        let first = tokens.get(begins).map(|(_, t)| t);
        let is_statement = match (source, first) {
            (Source::File, _) => true,
            (Source::Call, Some(Token::Word(first))) => BEGINNINGS.contains(&first.as_str()),
            (Source::Call, Some(Token::Name | Token::Open | Token::Close | Token::End) | None) => true,
        };
        let next = tokens.get(i + 1).map(|(_, t)| t);
        let next_is = |words: &[&str]| matches!(next, Some(Token::Word(w)) if words.contains(&w.as_str()));
        match word.as_str() {
            "DROP" if is_statement && next_is(&["TABLE", "DATABASE"]) => found.push((What::DropsTable, *offset)),
            "DELETE" if is_statement && next_is(&["FROM"]) => {
                let rest = &tokens[i + 2..];
                if is_unbounded(rest) && !(source == Source::Call && is_sentence(rest)) {
                    found.push((What::DeletesAllRows, *offset));
                }
            }
            _ => {}
        }
    }
    found
}

/// Of what follows `DELETE FROM`: a table, and neither `WHERE` nor `LIMIT` before the statement or its parenthesis ends.
fn is_unbounded(rest: &[(usize, Token)]) -> bool {
    let mut depth = 0usize;
    let mut table = false;
    for (_, token) in rest {
        match token {
            Token::Open => depth += 1,
            Token::Close if depth == 0 => break,
            Token::Close => depth -= 1,
            Token::End => break,
            Token::Word(word) if depth == 0 && matches!(word.as_str(), "WHERE" | "LIMIT") => return false,
            Token::Word(_) | Token::Name => table = true,
        }
    }
    table
}

/// Whether what follows `DELETE FROM` goes on as no statement does: beyond a table and its other name, without a clause.
fn is_sentence(rest: &[(usize, Token)]) -> bool {
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
            Token::Word(word) => Some(word.as_str()),
            Token::Name => Some(""),
            Token::Open | Token::Close | Token::End => None,
        })
        .take(4)
        .collect();
    words.len() > 2 && !words.iter().any(|word| CLAUSES.contains(word))
}

/// Words, parentheses and statement ends with their offsets.
fn tokens(text: &str) -> Vec<(usize, Token)> {
    let mut tokens = Vec::new();
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let at = text.len() - rest.len();
        let length = match c {
            '-' if rest.starts_with("--") => rest.find('\n').unwrap_or(rest.len()),
            '/' if rest.starts_with("/*") => rest.find("*/").map_or(rest.len(), |i| i + 2),
            '\'' => quoted(rest, c),
            '"' | '`' => {
                tokens.push((at, Token::Name));
                quoted(rest, c)
            }
            '(' | ')' | ';' => {
                let token = match c {
                    '(' => Token::Open,
                    ')' => Token::Close,
                    _ => Token::End,
                };
                tokens.push((at, token));
                1
            }
            c if is_part(c) => {
                let word: String = rest.chars().take_while(|c| is_part(*c)).collect();
                tokens.push((at, Token::Word(word.to_uppercase())));
                word.len()
            }
            c => c.len_utf8(),
        };
        rest = rest.get(length..).unwrap_or_default();
    }
    tokens
}

fn is_part(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '.')
}

/// Length of what begins with a quote, with it and the one that ends it. If none does, of the quote alone: nothing may hide
/// behind a stray one.
fn quoted(text: &str, quote: char) -> usize {
    text.get(1..).and_then(|inner| inner.find(quote)).map_or(1, |i| i + 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn kinds(text: &str) -> Vec<What> {
        let kinds = |source| -> Vec<What> { destructive(text, source).into_iter().map(|(what, _)| what).collect() };
        assert_eq!(kinds(Source::File), kinds(Source::Call), "{text}");
        kinds(Source::File)
    }

    #[test]
    fn unbounded_statements_are_found() {
        assert_eq!(kinds("DROP TABLE users;"), [What::DropsTable]);
        assert_eq!(kinds("drop\n database x"), [What::DropsTable]);
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
            assert_eq!(kinds(bad), [What::DeletesAllRows], "{bad}");
        }
    }

    #[test]
    fn bounded_ones_are_not() {
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
    fn a_sentence_in_a_call_is_no_statement() {
        let of = |text| destructive(text, Source::Call);
        assert_eq!(of("please delete from the list all that is old"), []);
        assert_eq!(of("Delete from the list all that is old"), []);
        assert_eq!(of("Never drop table salt"), []);
        assert!(!destructive("FOR EACH ROW DELETE FROM a;", Source::File).is_empty());
    }
}
