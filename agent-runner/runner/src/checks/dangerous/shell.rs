//! Detects `rm` with the recursive and force flags on an absolute or home path, in a command line or in arguments
//! joined by spaces.

/// True if `text` contains an `rm` command with the recursive and the force flag on an absolute or home path.
pub(super) fn deletes_files(text: &str) -> bool {
    text.split([';', '|', '&', '\n', '`']).any(|command| {
        let words: Vec<&str> = command
            .split(|c: char| c.is_whitespace() || matches!(c, '"' | '\'' | ',' | '[' | ']' | '(' | ')' | '{' | '}'))
            .filter(|w| !w.is_empty())
            .collect();
        words.iter().enumerate().any(|(i, word)| is_rm(word) && is_recursive_force_delete(&words[i + 1..]))
    })
}

fn is_rm(word: &str) -> bool {
    word.rsplit('/').next().is_some_and(|name| name.eq_ignore_ascii_case("rm"))
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
            rooted |=
                argument.starts_with(['/', '~']) || argument.starts_with("$HOME") || argument.starts_with("${HOME");
        }
    }
    recursive && force && rooted
}

#[cfg(test)]
mod tests {
    use super::deletes_files;

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
        ] {
            assert!(deletes_files(bad), "{bad}");
        }
        for good in
            ["rm -rf build", "rm -r /tmp/x", "rm -f /tmp/x", "farm -rf /", "rm -rf ./x; ls /", "echo rm", "rm file -rf"]
        {
            assert!(!deletes_files(good), "{good}");
        }
    }
}
