//! Fuzz target for a creator's replies. The input is a file, a zero byte, and a text.
//!
//! The text as a reply must result in edits of valid paths, and in files within the limits that are the same every time,
//! or in an error. And the diff from the file to the text, applied to the file, must give the text.

#![no_main]

use cfq_edits::{
    BaseFile, BaseFiles, FileProblem, ChangedFile, Languages, MAX_FILE_BYTES, ReplyProblem, ReplyTarget, SyntaxProblem, apply,
    decode, encode, parse, repo_path,
};
use libfuzzer_sys::fuzz_target;

const PATH: &str = "a.py";

/// A base with one file, which may be executable.
struct OneFile<'a>(&'a [u8]);

impl BaseFiles for OneFile<'_> {
    fn check_writable(&self, _: &str) -> Result<(), FileProblem> {
        Ok(())
    }

    fn size(&self, path: &str) -> Option<usize> {
        (path == PATH).then_some(self.0.len())
    }

    fn read(&self, path: &str) -> Option<BaseFile> {
        (path == PATH).then(|| BaseFile { bytes: self.0.to_vec(), executable: self.0.len() % 2 == 0 })
    }
}

/// A language in which a line must not end with a backslash.
struct NoBackslash;

impl Languages for NoBackslash {
    fn extension(&self, name: &str) -> Option<&'static str> {
        (name == "python").then_some("py")
    }

    fn syntax_error(&self, _: &str, text: &str) -> Option<SyntaxProblem> {
        let line = text.lines().position(|line| line.ends_with('\\'))? + 1;
        Some(SyntaxProblem { line, message: "backslash".to_owned() })
    }

    fn is_valid(&self, path: &str, text: &str) -> bool {
        self.syntax_error(path, text).is_none()
    }
}

fn changes(
    old: &[u8],
    reply: &str,
    truncated: bool,
    previous: &[ChangedFile],
) -> Result<Vec<ChangedFile>, ReplyProblem> {
    let target = ReplyTarget { path: "src/add.py".to_owned() };
    let edits = parse(reply, &target, truncated, &NoBackslash)?;
    for edit in &edits {
        assert_eq!(repo_path(&edit.path).as_deref(), Ok(edit.path.as_str()));
    }
    apply(&edits, previous, &OneFile(old), &NoBackslash)
}

/// The unified diff between two texts, with one hunk and three lines of context.
fn diff(old: &str, new: &str) -> String {
    let (old, new): (Vec<&str>, Vec<&str>) = (old.split_inclusive('\n').collect(), new.split_inclusive('\n').collect());
    let before = old.iter().zip(&new).take_while(|(a, b)| a == b).count();
    let most = old.len().min(new.len()) - before;
    let after = old.iter().rev().zip(new.iter().rev()).take(most).take_while(|(a, b)| a == b).count();
    let (first, last) = (before.saturating_sub(3), after.saturating_sub(3));
    let (old_count, new_count) = (old.len() - first - last, new.len() - first - last);
    let start = |count: usize| if count == 0 { first } else { first + 1 };
    let mut text = format!(
        "--- a/{PATH}\n+++ b/{PATH}\n@@ -{},{old_count} +{},{new_count} @@\n",
        start(old_count),
        start(new_count)
    );
    let mut push = |mark: char, lines: &[&str]| {
        for line in lines {
            text.push(mark);
            text.push_str(line);
            if !line.ends_with('\n') {
                text.push_str("\n\\ No newline at end of file\n");
            }
        }
    };
    push(' ', &old[first..before]);
    push('-', &old[before..old.len() - after]);
    push('+', &new[before..new.len() - after]);
    push(' ', &old[old.len() - after..old.len() - last]);
    text
}

fuzz_target!(|input: &[u8]| {
    let split = input.iter().position(|byte| *byte == 0);
    let (old, text) = split.map_or((b"x = 1\n".as_slice(), input), |at| (&input[..at], &input[at + 1..]));
    let Ok(text) = std::str::from_utf8(text) else { return };
    for truncated in [false, true] {
        let changed = changes(old, text, truncated, &[]);
        for file in changed.iter().flatten() {
            assert_eq!(repo_path(&file.path).as_deref(), Ok(file.path.as_str()));
            let Some(content) = &file.content else { continue };
            assert!(content.text.len() <= MAX_FILE_BYTES.max(old.len() * 3));
            encode(&content.text, content.encoding).unwrap();
        }
        assert_eq!(changed, changes(old, text, truncated, &[]));
        // The next iteration may send the same reply.
        let _again = changes(old, text, truncated, changed.as_deref().unwrap_or_default());
    }
    let Ok((old_text, encoding)) = decode(old) else { return };
    // A byte order mark is not a part of the first line.
    let is_possible = text != old_text && encode(text, encoding).is_ok();
    // A closing tag of reasoning may be that of a reply whose opening tag is in the prompt.
    let tagged = text.contains("</think>") || old_text.contains("</think>");
    if !is_possible || tagged || text.contains(['\0', '\u{feff}']) || old_text.contains('\u{feff}') {
        return;
    }
    // A fence that is longer than each one in the text. A reply in which all lines end with CRLF is read as one with LF.
    let fence = "`".repeat(text.len().max(old_text.len()) + 3);
    let reply = format!("The change:\n{fence}diff\n{}{fence}\n", diff(&old_text, text));
    match changes(old, &reply, false, &[]) {
        Ok(changed) => assert_eq!(changed[0].content.as_ref().unwrap().text, text),
        Err(ReplyProblem::AddsSyntaxError { .. } | ReplyProblem::TooLarge { .. }) => {}
        Err(problem) => panic!("{problem}: {reply}"),
    }
});
