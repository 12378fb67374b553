//! Commands inside data: the scripts of `package.json` and `composer.json`, the tasks of `deno.json` and editors. A package
//! manager runs them, some without being asked (`postinstall`); all other strings of a JSON file are only data.

use serde_json::Value;

use super::{Danger, What, at, shell};

/// Below a key with such an ending, strings are commands.
const COMMANDS: [&str; 4] = ["scripts", "tasks", "command", "commands"];

pub(super) fn dangers(text: &str) -> Vec<Danger> {
    let mut found = Vec::new();
    let Ok(value) = serde_json::from_str::<Value>(text) else {
        // With comments or broken: nobody can say what is a command, so each line may be one.
        for (row, line) in text.lines().enumerate() {
            if shell::deletes_files(line) {
                found.push(at(What::DeletesFiles, text, row));
            }
        }
        return found;
    };
    let mut stack = vec![(&value, "", false)];
    while let Some((value, key, runs)) = stack.pop() {
        match value {
            Value::String(command) if runs && shell::deletes_files(command) => {
                found.push(at(What::DeletesFiles, text, row_of(key, command, text)));
            }
            Value::Array(items) => {
                // `["rm", "-rf", "/"]` is one command, too.
                let words: Vec<&str> = items.iter().filter_map(Value::as_str).collect();
                let one = runs && words.len() == items.len() && !words.iter().any(|w| shell::deletes_files(w));
                if one && shell::deletes_files(&words.join(" ")) {
                    let first = words.first().copied().unwrap_or_default();
                    found.push(at(What::DeletesFiles, text, row_of(key, first, text)));
                }
                stack.extend(items.iter().map(|item| (item, key, runs)));
            }
            Value::Object(fields) => {
                stack.extend(fields.iter().map(|(key, value)| (value, key.as_str(), runs || names_commands(key))));
            }
            Value::String(_) | Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }
    found.sort_by_key(|danger| danger.line);
    found
}

fn names_commands(key: &str) -> bool {
    let key = key.to_ascii_lowercase();
    COMMANDS.iter().any(|ending| key.ends_with(ending))
}

/// The line a string stands on, from 0; behind its key, if both are on one.
fn row_of(key: &str, string: &str, text: &str) -> usize {
    let (key, string) = (Value::from(key).to_string(), Value::from(string).to_string());
    let with = |needles: &[&String]| text.lines().position(|line| needles.iter().all(|n| line.contains(n.as_str())));
    with(&[&key, &string]).or_else(|| with(&[&string])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<u32> {
        dangers(text).into_iter().map(|d| d.line).collect()
    }

    #[test]
    fn commands_count_and_data_does_not() {
        let package = "{\n  \"name\": \"rm -rf ~\",\n  \"scripts\": {\n    \"test\": \"jest\",\n    \"postinstall\": \"rm -rf ~\"\n  }\n}\n";
        assert_eq!(lines(package), [5]);
        assert_eq!(lines(r#"{"scripts": {"clean": ["echo x", "rm -rf \"$HOME\""]}}"#), [1]);
        assert_eq!(lines(r#"{"postCreateCommand": ["rm", "-rf", "/"]}"#), [1]);
        assert_eq!(lines(r#"{"tasks": [{"label": "x", "command": "rm -rf /"}]}"#), [1]);
        assert_eq!(lines("{ // settings\n \"postCreateCommand\": \"rm -rf /\" }"), [2]);
        assert_eq!(lines(r#"{"description": "rm -rf /", "scripts": {"clean": "rm -rf dist"}}"#), Vec::<u32>::new());
    }
}
