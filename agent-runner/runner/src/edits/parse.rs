//! Parses a creator's reply into edits.

use super::ReplyProblem;
use super::fence::{FencedBlock, blocks};
use super::label::{block_label, path_in_line};
use super::replace::{Hunk, hunks, is_search_marker};
use super::target::ReplyTarget;
use crate::checks::{Language, extension, syntax_error};
use crate::workstream::repo_path;

/// Maximum length of a reply, in bytes: above any answer of a model.
const MAX_REPLY_BYTES: usize = 8 * 1024 * 1024;
/// Maximum number of edits in one reply. More edits than files are normal, because a file may have several.
const MAX_EDITS: usize = 512;

/// One edit of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Edit {
    /// Writes the whole file.
    Write { path: String, content: String },
    /// Applies search/replace hunks to an existing file.
    Replace { path: String, hunks: Vec<Hunk> },
}

impl Edit {
    /// Path of the edited file, relative to the repository.
    pub fn path(&self) -> &str {
        match self {
            Self::Write { path, .. } | Self::Replace { path, .. } => path,
        }
    }
}

/// Parses a creator's reply. Every path in the result is a valid repository path. If the reply is `truncated` at its
/// maximum length, only blocks with a closing fence are accepted: half a file may parse, so its missing end would not
/// be detected.
///
/// # Errors
/// A [`ReplyProblem`] if the reply has no usable block, an invalid path, an incomplete hunk or a truncated file.
pub fn parse(reply: &str, target: &ReplyTarget, truncated: bool) -> Result<Vec<Edit>, ReplyProblem> {
    if reply.len() > MAX_REPLY_BYTES {
        return Err(ReplyProblem::ReplyTooLong { bytes: reply.len(), max: MAX_REPLY_BYTES });
    }
    let reply = without_reasoning(reply);
    let check_closed = |block: &FencedBlock<'_>, path: &str| match truncated && !block.closed {
        true => Err(ReplyProblem::Truncated { path: path.to_owned() }),
        false => Ok(()),
    };
    let blocks = blocks(&reply);
    let mut edits = Vec::new();
    for block in &blocks {
        if let Some((path, first_line)) = label_of(block) {
            if edits.len() == MAX_EDITS {
                return Err(ReplyProblem::TooManyEdits { max: MAX_EDITS });
            }
            let path = repo_path(&path)?;
            check_closed(block, &path)?;
            let lines = if first_line { &block.lines[1..] } else { &block.lines[..] };
            edits.push(edit_of(path, lines)?);
        }
    }
    if !edits.is_empty() {
        return Ok(edits);
    }
    if let Some(edit) = unfenced_hunks(&reply)? {
        return Ok(vec![edit]);
    }
    if let Some(block) = unlabelled_block(&blocks, target) {
        check_closed(block, &target.path)?;
        return Ok(vec![edit_of(repo_path(&target.path)?, &block.lines)?]);
    }
    if blocks.iter().any(|b| language_of(b) == "diff") {
        return Err(ReplyProblem::OnlyDiff);
    }
    match target.language {
        Some(language) if blocks.is_empty() && is_code(language, &reply) => {
            if truncated {
                return Err(ReplyProblem::Truncated { path: target.path.clone() });
            }
            Ok(vec![Edit::Write { path: repo_path(&target.path)?, content: with_final_newline(reply.trim()) }])
        }
        Some(_) | None => Err(ReplyProblem::NoBlock),
    }
}

/// The edit that a block's lines describe: hunks, or the whole file.
fn edit_of(path: String, lines: &[&str]) -> Result<Edit, ReplyProblem> {
    if lines.iter().any(|l| is_search_marker(l)) {
        let hunks = hunks(&path, lines)?;
        return Ok(Edit::Replace { path, hunks });
    }
    Ok(Edit::Write { path, content: with_final_newline(&lines.join("\n")) })
}

/// Label of a block (see [`block_label`]). A block of hunks may also have its label on the line before the first
/// marker.
fn label_of(block: &FencedBlock<'_>) -> Option<(String, bool)> {
    if is_auxiliary(block) && !block.lines.iter().any(|l| is_search_marker(l)) {
        // A block of commands below a line with the name `a.py` is not the content of `a.py`, so the line above is
        // ignored. The block's own first line or info string may still name a file.
        let without_line_above = FencedBlock { line_above: None, ..block.clone() };
        return block_label(&without_line_above);
    }
    block_label(block).or_else(|| {
        let marker = block.lines.iter().position(|l| is_search_marker(l))?;
        let before = marker.checked_sub(1)?;
        path_in_line(block.lines[before]).map(|path| (path, false))
    })
}

/// The block to assign to the target file: the first in the target's language, else the first that is not auxiliary.
fn unlabelled_block<'b, 't>(blocks: &'b [FencedBlock<'t>], target: &ReplyTarget) -> Option<&'b FencedBlock<'t>> {
    let wanted = target.path.rsplit_once('.').map_or("", |(_, e)| e);
    let of_language =
        blocks.iter().find(|b| !b.lines.is_empty() && extension(&language_of(b)).is_some_and(|e| e == wanted));
    of_language.or_else(|| blocks.iter().find(|b| !b.lines.is_empty() && !is_auxiliary(b)))
}

/// First word of the info string, in lower case.
fn language_of(block: &FencedBlock<'_>) -> String {
    let end = |c: char| c.is_whitespace() || matches!(c, ':' | '{' | ',');
    block.info.split(end).next().unwrap_or_default().to_ascii_lowercase()
}

/// True for blocks that are usually not files: commands, their output and diffs.
fn is_auxiliary(block: &FencedBlock<'_>) -> bool {
    matches!(
        language_of(block).as_str(),
        "sh" | "bash"
            | "shell"
            | "zsh"
            | "console"
            | "terminal"
            | "text"
            | "txt"
            | "plaintext"
            | "output"
            | "diff"
            | "patch"
    )
}

/// Parses a reply's search/replace hunks, ignoring fences, as one edit of the file that is named above the first hunk.
/// `None` if there is no hunk or no such name.
fn unfenced_hunks(reply: &str) -> Result<Option<Edit>, ReplyProblem> {
    let lines: Vec<&str> = reply.lines().collect();
    let Some(first) = lines.iter().position(|l| is_search_marker(l)) else { return Ok(None) };
    let label = lines[..first].iter().rev().take(3).find_map(|l| path_in_line(l));
    let Some(path) = label else { return Ok(None) };
    let path = repo_path(&path)?;
    let hunks = hunks(&path, &lines[first..])?;
    Ok(Some(Edit::Replace { path, hunks }))
}

/// Removes the reasoning of models that emit `<think>` sections before the answer; blocks in them are not files.
fn without_reasoning(reply: &str) -> String {
    let (mut text, mut rest) = (String::with_capacity(reply.len()), reply);
    while let Some((before, reasoning)) = rest.split_once("<think>") {
        text.push_str(before);
        rest = reasoning.split_once("</think>").map_or("", |(_, after)| after);
    }
    text.push_str(rest);
    // Some chat templates put `<think>` into the prompt, so that the reply has only the closing tag.
    match text.rfind("</think>") {
        Some(end) => text[end + "</think>".len()..].to_owned(),
        None => text,
    }
}

/// True if text without a fence is code: it has more than one line and parses without a syntax error.
fn is_code(language: Language, text: &str) -> bool {
    let text = text.trim();
    text.lines().count() > 1 && syntax_error(language, text) == Ok(None)
}

/// Adds the final newline of a text file, if it is missing.
fn with_final_newline(text: &str) -> String {
    if text.is_empty() || text.ends_with('\n') { text.to_owned() } else { format!("{text}\n") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn target() -> ReplyTarget {
        ReplyTarget { path: "add.py".into(), language: Some(Language::Python) }
    }

    fn files(reply: &str) -> Vec<(String, String)> {
        parse(reply, &target(), false)
            .unwrap()
            .into_iter()
            .map(|e| match e {
                Edit::Write { path, content } => (path, content),
                Edit::Replace { path, hunks } => (path, format!("{} hunks", hunks.len())),
            })
            .collect()
    }

    fn one(path: &str, content: &str) -> Vec<(String, String)> {
        vec![(path.into(), content.into())]
    }

    #[test]
    fn labelled_blocks_are_their_files() {
        let reply = "Sure.\n\n### a/b.py\n```python\nx = 1\n```\n\nAnd `c.md`:\n````md\n```\ny\n```\n````\nRun it:\n```bash\npython a/b.py\n```\n";
        assert_eq!(
            files(reply),
            [("a/b.py".into(), "x = 1\n".into()), ("c.md".to_owned(), "```\ny\n```\n".to_owned())]
        );
        assert_eq!(files("```python\n# a.py\nx = 1\n```"), one("a.py", "x = 1\n"));
        assert_eq!(files("```python a.py\n# b.py\nx = 1\n```"), one("a.py", "# b.py\nx = 1\n"));
    }

    #[test]
    fn unlabelled_block_is_the_target_file() {
        assert_eq!(
            files("Here:\n```python\ndef add(a, b):\n    return a + b\n```\nUse:\n```python\nadd(1, 2)\n```"),
            one("add.py", "def add(a, b):\n    return a + b\n")
        );
        assert_eq!(files("```\nx = 1\n"), one("add.py", "x = 1\n"));
        assert_eq!(files("```bash\npip install x\n```\n```python\nx = 1\n```"), one("add.py", "x = 1\n"));
        assert_eq!(files("def add(a, b):\n    return a + b"), one("add.py", "def add(a, b):\n    return a + b\n"));
    }

    #[test]
    fn blocks_in_reasoning_are_ignored() {
        assert_eq!(files("<think>```python\nbad\n```</think>\n```python\nx = 1\n```"), one("add.py", "x = 1\n"));
        assert_eq!(files("```python\nbad\n```</think>\n```python\nx = 1\n```"), one("add.py", "x = 1\n"));
    }

    #[test]
    fn hunks_are_found_with_and_without_a_fence() {
        let hunk = "<<<<<<< SEARCH\na\n=======\nb\n>>>>>>> REPLACE";
        for reply in
            [format!("### a.py\n```python\n{hunk}\n```"), format!("```\na.py\n{hunk}\n```"), format!("a.py\n{hunk}\n")]
        {
            assert_eq!(files(&reply), one("a.py", "1 hunks"), "{reply}");
        }
    }

    #[test]
    fn unusable_replies_are_reported() {
        let problem = |reply: &str| parse(reply, &target(), false).unwrap_err();
        assert_eq!(problem("I cannot help with that."), ReplyProblem::NoBlock);
        assert_eq!(problem(""), ReplyProblem::NoBlock);
        assert_eq!(problem("```diff\n-a\n+b\n```"), ReplyProblem::OnlyDiff);
        assert!(matches!(problem("### ../evil.py\n```\nx\n```"), ReplyProblem::Path(_)));
        assert!(matches!(problem("### a.py\n```\nx\n```\n### .git/hooks/x.py\n```\nx\n```"), ReplyProblem::Path(_)));
        assert!(matches!(problem("### a.py\n```\n<<<<<<< SEARCH\nx\n```"), ReplyProblem::Incomplete { .. }));
    }

    #[test]
    fn truncated_reply_accepts_only_closed_blocks() {
        let truncated = |reply: &str| parse(reply, &target(), true);
        let at = |path: &str| Err(ReplyProblem::Truncated { path: path.into() });
        assert_eq!(truncated("### a.py\n```python\nx = 1\ny = 2\n"), at("a.py"));
        assert_eq!(truncated("```python\nx = 1\ny = 2\n``"), at("add.py"));
        assert_eq!(truncated("def add(a, b):\n    return a + b\n"), at("add.py"));
        assert_eq!(truncated("### a.py\n```\nx = 1\n```\n### b.py\n```\ny = 1\n"), at("b.py"));
        let complete = "### a.py\n```\nx = 1\n```\n";
        for rest in ["It is called", "Run it:\n```bash\npython", ""] {
            assert_eq!(truncated(&format!("{complete}{rest}")), parse(complete, &target(), false), "{rest}");
        }
        assert_eq!(
            truncated("```python\nx = 1\n```\nUse:\n```python\nadd(").unwrap(),
            parse("```python\nx = 1\n```", &target(), false).unwrap()
        );
    }

    #[test]
    fn large_replies_are_refused() {
        let long = format!("```python\n{}```\n", "x = 1\n".repeat(2_000_000));
        let problem = parse(&long, &target(), false).unwrap_err();
        assert_eq!(problem, ReplyProblem::ReplyTooLong { bytes: long.len(), max: MAX_REPLY_BYTES });
        let blocks = |count| "a.py\n```python\nx = 1\n```\n".repeat(count);
        assert_eq!(parse(&blocks(MAX_EDITS), &target(), false).unwrap().len(), MAX_EDITS);
        let problem = parse(&blocks(5_000), &target(), false).unwrap_err();
        assert_eq!(problem, ReplyProblem::TooManyEdits { max: MAX_EDITS });
        assert!(problem.to_string().contains("send fewer"), "{problem}");
        let hunk = "<<<<<<< SEARCH\na\n=======\nb\n>>>>>>> REPLACE\n";
        let hunks = format!("a.py\n{}", hunk.repeat(100_000));
        assert!(matches!(parse(&hunks, &target(), false), Err(ReplyProblem::TooManyEdits { .. })));
        let thoughts = format!("{}```python\nx = 1\n```", "<think>a</think>".repeat(100_000));
        assert_eq!(files(&thoughts), one("add.py", "x = 1\n"));
    }

    proptest! {
        #[test]
        fn parse_does_not_panic_on_any_reply(reply in "(```|~~~|###|`|a\\.py|\\.\\./|<<<<<<< SEARCH|=======|>>>>>>> REPLACE|<think>|</think>|x = 1|é|[ \n]){0,30}", truncated: bool) {
            if let Ok(edits) = parse(&reply, &target(), truncated) {
                for edit in edits {
                    let path = repo_path(edit.path());
                    prop_assert_eq!(path.as_deref(), Ok(edit.path()));
                }
            }
        }
    }
}
