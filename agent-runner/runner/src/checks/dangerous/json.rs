//! Detects dangerous commands in JSON files: the scripts and hooks of `package.json` and `composer.json`, and the tasks
//! of `deno.json` and of editors. Package managers run some of them automatically (`postinstall`). All other strings
//! are data and are not checked.

use serde_json::Value;

use super::{Danger, Lines, WorkLimit, shell};

/// Suffixes of the keys that hold commands: every string in the value of such a key, at any depth, is a command.
const COMMAND_KEY_SUFFIXES: [&str; 7] = ["scripts", "tasks", "command", "commands", "hooks", "lint-staged", "exec"];

/// Returns the dangers in the commands of a JSON file, sorted by line.
pub(super) fn dangers(text: &str, work: &WorkLimit) -> Vec<Danger> {
    let lines = Lines::new(text);
    let mut found = Vec::new();
    let Ok(value) = serde_json::from_str::<Value>(text) else {
        // Invalid JSON, or JSON with comments: commands cannot be located, so each line is checked as a command.
        for (row, line) in text.lines().enumerate() {
            found.extend(
                shell::dangers(line, work).into_iter().map(|(kind, code)| Danger::new(kind, &lines, row, &code)),
            );
        }
        return found;
    };
    let mut report = |command: &str, key: &str, first: &str| {
        let dangers = shell::dangers(command, work);
        // Locating a command searches the whole text.
        if !dangers.is_empty() && work.take(text.len()) {
            let row = row_of(key, first, text);
            found.extend(dangers.into_iter().map(|(kind, code)| Danger::new(kind, &lines, row, &code)));
        }
    };
    let mut stack = vec![(&value, "", false)];
    while let Some((value, key, is_command)) = stack.pop() {
        match value {
            Value::String(command) if is_command => report(command, key, command),
            Value::Array(items) => {
                // An array such as `["rm", "-rf", "/"]` is one command.
                let words: Vec<&str> = items.iter().filter_map(Value::as_str).collect();
                let is_argument_list = is_command
                    && words.len() == items.len()
                    && words.iter().all(|word| shell::dangers(word, work).is_empty());
                if let (true, Some(first)) = (is_argument_list, words.first()) {
                    report(&words.join(" "), key, first);
                }
                stack.extend(items.iter().map(|item| (item, key, is_command)));
            }
            Value::Object(fields) => {
                // A program beside its arguments, as in the tasks of editors.
                if let (Some(Value::String(program)), Some(Value::Array(arguments))) =
                    (fields.get("command"), fields.get("args"))
                {
                    let words: Vec<&str> = arguments.iter().filter_map(Value::as_str).collect();
                    report(&format!("{program} {}", words.join(" ")), "command", program);
                }
                let is_command = |key: &str| is_command || is_command_key(key);
                stack.extend(fields.iter().map(|(key, value)| (value, key.as_str(), is_command(key))));
            }
            Value::String(_) | Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }
    found.sort_by_key(|danger| danger.line);
    found
}

fn is_command_key(key: &str) -> bool {
    let key = key.to_ascii_lowercase();
    COMMAND_KEY_SUFFIXES.iter().any(|suffix| key.ends_with(suffix))
}

/// Row of a string, from 0: the first line that has the key and the string, else the first that has the string.
fn row_of(key: &str, string: &str, text: &str) -> usize {
    let (key, string) = (Value::from(key).to_string(), Value::from(string).to_string());
    let row_with =
        |needles: &[&String]| text.lines().position(|line| needles.iter().all(|n| line.contains(n.as_str())));
    row_with(&[&key, &string]).or_else(|| row_with(&[&string])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<u32> {
        dangers(text, &WorkLimit::default()).into_iter().map(|d| d.line).collect()
    }

    #[test]
    fn commands_are_checked_and_data_is_not() {
        let package = "{\n  \"name\": \"rm -rf ~\",\n  \"scripts\": {\n    \"test\": \"jest\",\n    \"postinstall\": \"rm -rf ~\"\n  }\n}\n";
        assert_eq!(lines(package), [5]);
        assert_eq!(lines(r#"{"scripts": {"clean": ["echo x", "rm -rf \"$HOME\""]}}"#), [1]);
        assert_eq!(lines(r#"{"postCreateCommand": ["rm", "-rf", "/"]}"#), [1]);
        assert_eq!(lines(r#"{"tasks": [{"label": "x", "command": "rm -rf /"}]}"#), [1]);
        assert_eq!(lines("{\"tasks\": [\n{\"command\": \"rm\", \"args\": [\"-rf\", \"/\"]}]}"), [2]);
        assert_eq!(lines(r#"{"husky": {"hooks": {"pre-commit": "rm -rf ~"}}}"#), [1]);
        assert_eq!(lines(r#"{"scripts": {"reset": "psql -c 'DROP TABLE users'"}}"#), [1]);
        assert_eq!(lines("{ // settings\n \"postCreateCommand\": \"rm -rf /\" }"), [2]);
        assert_eq!(lines(r#"{"description": "rm -rf /", "scripts": {"clean": "rm -rf dist"}}"#), Vec::<u32>::new());
    }
}
