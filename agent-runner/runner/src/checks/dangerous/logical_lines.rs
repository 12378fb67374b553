//! Joins the lines of a file that form one command.

use super::WorkLimit;

/// Returns the commands of a file with their first rows. A backslash continues a line. In YAML, a folded block scalar
/// (`>`) and a list of single words are one command each.
pub(super) fn commands(text: &str, is_yaml: bool, work: &WorkLimit) -> Vec<(usize, String)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    let mut row = 0;
    while let Some(line) = lines.get(row) {
        let first = row;
        let mut command = String::new();
        let is_folded = is_yaml && is_folded_scalar(line);
        let word = if is_yaml { list_word(line) } else { None };
        if is_folded {
            command.push_str(line);
            row += 1;
            let indent = indentation(line);
            while let Some(line) = lines.get(row).filter(|l| l.trim().is_empty() || indentation(l) > indent) {
                command.push(' ');
                command.push_str(line.trim());
                row += 1;
            }
        } else if word.is_some() {
            while let Some(word) = lines.get(row).copied().and_then(list_word) {
                command.push_str(word);
                command.push(' ');
                row += 1;
            }
        } else {
            while let Some(line) = lines.get(row) {
                row += 1;
                command.push_str(line.trim_end_matches('\\'));
                command.push(' ');
                if !line.ends_with('\\') {
                    break;
                }
            }
        }
        if !work.take(1) {
            break;
        }
        found.push((first, command));
    }
    found
}

fn indentation(line: &str) -> usize {
    line.len() - line.trim_start_matches(' ').len()
}

/// True for a line such as `run: >-`.
fn is_folded_scalar(line: &str) -> bool {
    let line = line.trim_end();
    [">", ">-", ">+"].iter().any(|mark| line.strip_suffix(mark).is_some_and(|rest| rest.ends_with([' ', '\t'])))
}

/// The word of a list item that consists of one word, such as `- rm`.
fn list_word(line: &str) -> Option<&str> {
    let word = line.trim().strip_prefix("- ")?.trim();
    (!word.is_empty() && !word.contains([' ', ':'])).then_some(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_command_are_joined() {
        let of = |text, is_yaml| commands(text, is_yaml, &WorkLimit::default());
        assert_eq!(of("a \\\n b\nc", false), [(0, "a   b ".to_owned()), (2, "c ".to_owned())]);
        let yaml = "run: >-\n  rm -rf\n  /\nargs:\n  - rm\n  - -rf\nx: 1\n";
        let found = of(yaml, true);
        let expected = [(0, "run: >- rm -rf /"), (3, "args: "), (4, "rm -rf "), (6, "x: 1 ")];
        assert_eq!(found, expected.map(|(row, command)| (row, command.to_owned())));
    }
}
