//! Detects dangerous shell commands, in a command line or in arguments joined by spaces: `rm` with the recursive and
//! force flags on an absolute or home path, and database clients that are given a destructive statement.

use super::{DangerKind, WorkLimit, sql};

/// Command-line clients of databases, which take statements as arguments.
const DATABASE_CLIENTS: [&str; 7] = ["psql", "mysql", "mariadb", "sqlite3", "sqlcmd", "clickhouse-client", "cockroach"];

/// Returns the dangers in a command line, each with the text of its command.
pub(super) fn dangers(text: &str, work: &WorkLimit) -> Vec<(DangerKind, String)> {
    if !work.take(text.len()) {
        return Vec::new();
    }
    // Make writes `$$HOME` and `$(HOME)`; braces separate words below.
    let text = text.replace("$$", "$").replace("$(HOME)", "$HOME").replace("${HOME", "$HOME ");
    let mut found = Vec::new();
    for command in text.split([';', '|', '&', '\n', '`']) {
        let words: Vec<&str> = command
            .split(|c: char| c.is_whitespace() || matches!(c, '"' | '\'' | ',' | '[' | ']' | '(' | ')' | '{' | '}'))
            .filter(|w| !w.is_empty())
            .collect();
        let deletes = words.iter().enumerate().any(|(i, word)| {
            is_command(word, "rm") && work.take(words.len() - i) && is_recursive_force_delete(&words[i + 1..])
        });
        if deletes {
            found.push((DangerKind::DeletesFiles, words.join(" ")));
        }
    }
    let is_client = |word: &str| DATABASE_CLIENTS.iter().any(|client| is_command(word, client));
    if text.split(|c: char| c.is_whitespace() || matches!(c, '"' | '\'' | '(' | '`' | ',' | '[')).any(is_client) {
        for statement in quoted(&text) {
            let dangers = sql::destructive(statement, sql::SqlSource::Call, work);
            found.extend(dangers.into_iter().map(|(kind, range)| (kind, statement[range].to_owned())));
        }
    }
    found
}

/// True if `word` is the command `name`, with or without a path.
fn is_command(word: &str, name: &str) -> bool {
    word.rsplit('/').next().is_some_and(|last| last.eq_ignore_ascii_case(name))
}

/// The texts between quotes.
fn quoted(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut rest = text;
    while let Some(open) = rest.find(['"', '\'']) {
        let quote = if rest[open..].starts_with('"') { '"' } else { '\'' };
        let inner = &rest[open + 1..];
        let Some(end) = inner.find(quote) else { break };
        found.push(&inner[..end]);
        rest = &inner[end + 1..];
    }
    found
}

fn is_recursive_force_delete(arguments: &[&str]) -> bool {
    let (mut recursive, mut force, mut rooted) = (false, false, false);
    for argument in arguments {
        if let Some(long) = argument.strip_prefix("--") {
            recursive |= long == "recursive";
            force |= long == "force";
        } else if let Some(short) = argument.strip_prefix('-') {
            recursive |= short.contains(['r', 'R']);
            force |= short.contains(['f', 'F']);
        } else {
            rooted |= argument.starts_with(['/', '~']) || argument.starts_with("$HOME");
        }
    }
    recursive && force && rooted
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(text: &str) -> Vec<DangerKind> {
        dangers(text, &WorkLimit::default()).into_iter().map(|(kind, _)| kind).collect()
    }

    #[test]
    fn recursive_force_delete_of_rooted_paths_is_found() {
        for bad in [
            "rm -rf /",
            "rm -fr ~/x",
            "sudo rm -r -f /var",
            "cd x && rm --recursive --force /",
            "/bin/rm -Rf $HOME",
            "rm -rf \"/\"",
            "['rm', '-rf', '/']",
            "$(rm -rf ~)",
            "RM -RF /",
            "rm -rf ${HOME}/x",
            "rm -rf \"${HOME:?}\"",
            "\trm -rf $$HOME",
            "rm -rf $(HOME)/x",
        ] {
            assert_eq!(kinds(bad), [DangerKind::DeletesFiles], "{bad}");
        }
        for good in
            ["rm -rf build", "rm -r /tmp/x", "rm -f /tmp/x", "farm -rf /", "rm -rf ./x; ls /", "echo rm", "rm file -rf"]
        {
            assert_eq!(kinds(good), [], "{good}");
        }
    }

    #[test]
    fn each_command_of_a_line_is_reported() {
        let found = dangers("rm -rf /tmp/x; rm -rf ~", &WorkLimit::default());
        let commands: Vec<&str> = found.iter().map(|(_, command)| command.as_str()).collect();
        assert_eq!(commands, ["rm -rf /tmp/x", "rm -rf ~"]);
    }

    #[test]
    fn statements_for_database_clients_are_checked() {
        assert_eq!(kinds("psql \"$URL\" -c 'DROP TABLE users'"), [DangerKind::DropsTable]);
        assert_eq!(kinds("/usr/bin/mysql -e \"DELETE FROM users\""), [DangerKind::DeletesAllRows]);
        for good in ["echo 'DROP TABLE users'", "psql -c 'DELETE FROM users WHERE id = 1'", "psql -f drop.sql"] {
            assert_eq!(kinds(good), [], "{good}");
        }
    }
}
