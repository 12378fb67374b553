//! Parses a creator's reply into edits.

use std::borrow::Cow;

use crate::edit::{Change, Edit};
use crate::fence::{FencedBlock, blocks};
use crate::label::{block_label, path_in_line};
use crate::path::repo_path;
use crate::problem::Problem;
use crate::syntax::search_replace::is_search_marker;
use crate::syntax::{apply_patch, search_replace, unified_diff};

/// Maximum length of a reply, in bytes: above any answer of a model.
const MAX_REPLY_BYTES: usize = 8 * 1024 * 1024;
/// Maximum number of edits in one reply. More edits than files are normal, because a file may have several.
const MAX_EDITS: usize = 512;

/// The file that an unlabelled code block is written to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplyTarget {
    /// Path in the repository; not validated.
    pub path: String,
}

/// A syntax error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SyntaxError {
    /// Line number, from 1.
    pub line: usize,
    /// Description of the error.
    pub message: String,
}

/// What the caller knows about programming languages.
pub trait Languages {
    /// The usual file extension of a language, given the name that code blocks use for it.
    fn extension(&self, name: &str) -> Option<&'static str>;

    /// The first syntax error of the text of the file `path`; `None` if it has none or cannot be checked.
    fn syntax_error(&self, path: &str, text: &str) -> Option<SyntaxError>;

    /// True if the text is known to be free of syntax errors, which needs a grammar for the file `path`.
    fn is_valid(&self, path: &str, text: &str) -> bool;
}

/// Parses a creator's reply. Every path in the result is a valid repository path. If the reply is `truncated` at its
/// maximum length, only blocks with a closing fence are accepted: half a file may parse, so its missing end would not
/// be detected.
///
/// # Errors
/// A [`Problem`] if the reply has no usable block, an invalid path, an incomplete hunk or a truncated file.
pub fn parse(
    reply: &str,
    target: &ReplyTarget,
    truncated: bool,
    languages: &impl Languages,
) -> Result<Vec<Edit>, Problem> {
    if reply.len() > MAX_REPLY_BYTES {
        return Err(Problem::ReplyTooLong { bytes: reply.len(), max: MAX_REPLY_BYTES });
    }
    let reply = without_reasoning(reply);
    let reply = with_plain_line_ends(reply);
    let blocks = blocks(&reply);
    let mut edits = Vec::new();
    // A diff of a file that the reply also contains as a whole only repeats it.
    let mut from_diffs = Vec::new();
    for block in &blocks {
        let is_cut = truncated && !block.closed;
        match kind_of(block) {
            BlockKind::Patch => {
                let patch = apply_patch::parse(&block.lines)?;
                check_not_truncated(is_cut && !apply_patch::is_complete(&block.lines), &patch)?;
                edits.extend(patch);
            }
            BlockKind::Diff => {
                let label = block_label(block).map(|(path, _)| path);
                let diff = diff_edits(&block.lines, label.as_deref(), &target.path)?;
                check_not_truncated(is_cut, &diff)?;
                from_diffs.extend(diff);
            }
            BlockKind::Other => {
                if let Some((path, first_line)) = label_of(block) {
                    let path = repo_path(&path)?;
                    if is_cut {
                        return Err(Problem::Truncated { path });
                    }
                    let lines = if first_line { &block.lines[1..] } else { &block.lines[..] };
                    edits.extend(labelled_edits(path, lines)?);
                }
            }
        }
        if edits.len() + from_diffs.len() > MAX_EDITS {
            return Err(Problem::TooManyEdits { max: MAX_EDITS });
        }
    }
    let written = |path: &str| edits.iter().any(|e| e.path == path && matches!(e.change, Change::Write { .. }));
    from_diffs.retain(|edit| !written(&edit.path));
    edits.extend(from_diffs);
    if !edits.is_empty() {
        return Ok(edits);
    }
    let unfenced = unfenced_edits(&reply, truncated)?;
    if !unfenced.is_empty() {
        return Ok(unfenced);
    }
    if let Some(block) = unlabelled_block(&blocks, target, languages) {
        let path = repo_path(&target.path)?;
        if truncated && !block.closed {
            return Err(Problem::Truncated { path });
        }
        return labelled_edits(path, &block.lines);
    }
    if blocks.is_empty() && is_code(&target.path, &reply, languages) {
        let path = repo_path(&target.path)?;
        if truncated {
            return Err(Problem::Truncated { path });
        }
        return Ok(vec![Edit { path, change: Change::Write { content: with_final_newline(reply.trim()) } }]);
    }
    Err(Problem::NoBlock)
}

/// What a block contains.
enum BlockKind {
    Patch,
    Diff,
    /// A file, hunks, or something that is no edit.
    Other,
}

fn kind_of(block: &FencedBlock<'_>) -> BlockKind {
    let is_named_diff = matches!(language_of(block).as_str(), "diff" | "patch" | "udiff");
    match () {
        () if patch_file_label(block).is_some() => BlockKind::Other,
        () if starts_with_patch(&block.lines) => BlockKind::Patch,
        () if starts_with_diff(&block.lines) => BlockKind::Diff,
        () if block.lines.iter().any(|line| is_search_marker(line)) => BlockKind::Other,
        () if is_named_diff => BlockKind::Diff,
        () => BlockKind::Other,
    }
}

/// The label of a block, if it names a file that is a patch itself. Such a file is sent whole.
fn patch_file_label(block: &FencedBlock<'_>) -> Option<(String, bool)> {
    block_label(block).filter(|(path, _)| path.ends_with(".patch") || path.ends_with(".diff"))
}

/// True if a patch begins in the first lines that are not blank. Models put a shell command above it.
fn starts_with_patch(lines: &[&str]) -> bool {
    let first: Vec<&str> = lines.iter().filter(|line| !line.trim().is_empty()).take(2).copied().collect();
    apply_patch::is_patch(&first)
}

/// True if the first lines that are not blank are the header of a diff.
fn starts_with_diff(lines: &[&str]) -> bool {
    let blank = lines.iter().take_while(|line| line.trim().is_empty()).count();
    let first = lines.get(blank).copied().unwrap_or_default();
    (first.starts_with("diff --git ") || first.starts_with("--- ") || first.starts_with("Index: "))
        && unified_diff::is_diff(&lines[blank..])
}

/// The edits of a block that is a diff. Hunks without the name of a file belong to the one that labels the block, or to
/// the target.
fn diff_edits(lines: &[&str], label: Option<&str>, target: &str) -> Result<Vec<Edit>, Problem> {
    let path = label.unwrap_or(target);
    let edits = unified_diff::parse(Some(path), lines)?;
    if !edits.is_empty() {
        return Ok(edits);
    }
    Ok(unified_diff::bare_hunk(repo_path(path)?, lines).into_iter().collect())
}

fn check_not_truncated(is_cut: bool, edits: &[Edit]) -> Result<(), Problem> {
    match edits.last() {
        Some(last) if is_cut => Err(Problem::Truncated { path: last.path.clone() }),
        Some(_) | None => Ok(()),
    }
}

/// The edits that a block's lines describe: hunks, or the whole file `path`. A blank line before the closing fence is
/// not part of the file: models add one, and git reports blank lines at the end of a file as an error.
fn labelled_edits(path: String, lines: &[&str]) -> Result<Vec<Edit>, Problem> {
    if !lines.iter().any(|line| is_search_marker(line)) {
        return Ok(vec![Edit { path, change: Change::Write { content: with_final_newline(&lines.join("\n")) } }]);
    }
    hunk_edits(Some(&path), lines)
}

fn hunk_edits(path: Option<&str>, lines: &[&str]) -> Result<Vec<Edit>, Problem> {
    let files = search_replace::parse(path, lines)?;
    let edit = |(path, hunks): (String, _)| {
        let change = Change::Modify { hunks, rename_to: None, executable: None, in_order: false };
        Ok(Edit { path: repo_path(&path)?, change })
    };
    files.into_iter().map(edit).collect()
}

/// Label of a block (see [`block_label`]). A block of hunks may also have its label on the line before the first
/// marker.
fn label_of(block: &FencedBlock<'_>) -> Option<(String, bool)> {
    if let Some(label) = patch_file_label(block) {
        return Some(label);
    }
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
fn unlabelled_block<'b, 't>(
    blocks: &'b [FencedBlock<'t>],
    target: &ReplyTarget,
    languages: &impl Languages,
) -> Option<&'b FencedBlock<'t>> {
    let wanted = target.path.rsplit_once('.').map_or("", |(_, e)| e);
    let is_wanted =
        |b: &&FencedBlock<'_>| !b.lines.is_empty() && languages.extension(&language_of(b)).is_some_and(|e| e == wanted);
    blocks.iter().find(is_wanted).or_else(|| blocks.iter().find(|b| !b.lines.is_empty() && !is_auxiliary(b)))
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
            | "udiff"
    )
}

/// The edits of a reply without a usable block: a patch, a diff, or search/replace blocks below the name of their file.
fn unfenced_edits(reply: &str, truncated: bool) -> Result<Vec<Edit>, Problem> {
    let lines: Vec<&str> = reply.split('\n').collect();
    if apply_patch::is_patch(&lines) {
        let edits = apply_patch::parse(&lines)?;
        check_not_truncated(truncated && !apply_patch::is_complete(&lines), &edits)?;
        return Ok(edits);
    }
    if let Some(first) = lines.iter().position(|l| is_search_marker(l)) {
        let label = lines[..first].iter().rev().take(3).find_map(|l| path_in_line(l));
        return match label {
            Some(path) => hunk_edits(Some(&path), &lines[first..]),
            None => Ok(Vec::new()),
        };
    }
    // Blank lines first: `starts_with_diff` skips all that follow.
    let start = (0..lines.len()).find(|n| !lines[*n].trim().is_empty() && starts_with_diff(&lines[*n..]));
    let Some(start) = start else { return Ok(Vec::new()) };
    let edits = unified_diff::parse(None, &lines[start..])?;
    check_not_truncated(truncated, &edits)?;
    Ok(edits)
}

/// Removes the reasoning with which models begin a reply, in `<think>` sections; blocks in them are not files. The same
/// tags in the files of the reply stay.
fn without_reasoning(reply: &str) -> &str {
    let mut rest = reply;
    while let Some(reasoning) = rest.trim_start().strip_prefix("<think>") {
        rest = reasoning.split_once("</think>").map_or("", |(_, after)| after);
    }
    if rest.len() < reply.len() {
        return rest;
    }
    // Some chat templates put `<think>` into the prompt, so that the reply has only the closing tag, at the end of a line.
    let ends_line = |after: &str| after.split('\n').next().is_some_and(|line| line.trim().is_empty());
    match reply.split_once("</think>") {
        Some((before, after)) if !before.contains("<think>") && ends_line(after) => after,
        Some(_) | None => reply,
    }
}

/// Removes carriage returns if the whole reply has them. Otherwise they are part of the edits.
fn with_plain_line_ends(reply: &str) -> Cow<'_, str> {
    let lines = reply.matches('\n').count();
    match lines > 0 && reply.matches("\r\n").count() == lines {
        true => Cow::Owned(reply.replace("\r\n", "\n")),
        false => Cow::Borrowed(reply),
    }
}

/// True if text without a fence is code: it has more than one line and parses without a syntax error.
fn is_code(path: &str, text: &str, languages: &impl Languages) -> bool {
    let text = text.trim();
    text.lines().count() > 1 && languages.is_valid(path, text)
}

/// Adds the final newline of a text file, if it is missing.
fn with_final_newline(text: &str) -> String {
    if text.is_empty() || text.ends_with('\n') { text.to_owned() } else { format!("{text}\n") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::edit::Position;
    use proptest::prelude::*;

    /// Takes lines that end with a colon or a bracket, or contain `=`, for Python.
    struct FewLanguages;

    impl Languages for FewLanguages {
        fn extension(&self, name: &str) -> Option<&'static str> {
            matches!(name, "python" | "py").then_some("py")
        }

        fn syntax_error(&self, path: &str, text: &str) -> Option<SyntaxError> {
            (!self.is_valid(path, text)).then(|| SyntaxError { line: 1, message: "prose".into() })
        }

        fn is_valid(&self, path: &str, text: &str) -> bool {
            let is_code = |l: &str| l.is_empty() || l.ends_with([':', ')']) || l.contains(['=', '+']);
            path.ends_with(".py") && text.lines().all(is_code)
        }
    }

    fn target() -> ReplyTarget {
        ReplyTarget { path: "add.py".into() }
    }

    fn parsed(reply: &str) -> Result<Vec<Edit>, Problem> {
        parse(reply, &target(), false, &FewLanguages)
    }

    fn files(reply: &str) -> Vec<(String, String)> {
        let summary = |edit: Edit| match edit.change {
            Change::Write { content } => (edit.path, content),
            Change::Modify { hunks, .. } => (edit.path, format!("{} hunks", hunks.len())),
            Change::Create { .. } => (edit.path, "created".into()),
            Change::Delete { .. } => (edit.path, "deleted".into()),
        };
        parsed(reply).unwrap().into_iter().map(summary).collect()
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
        let later = "a.py\n```\nx = 1\n```\n<think>\nb.py\n```\ny = 1\n```\n</think>\n";
        assert_eq!(files(later), one("a.py", "x = 1\n"));
    }

    #[test]
    fn tags_of_reasoning_in_a_file_are_text() {
        for line in ["a = \"<think>b</think>\"", "a = \"</think>\"", "<think>", "</think>"] {
            let content = format!("x = 1\n{line}\n");
            for reasoning in ["", "<think>hm</think>\n"] {
                // A closing tag alone is that of reasoning whose opening tag is in the prompt.
                if line != "</think>" || !reasoning.is_empty() {
                    assert_eq!(
                        files(&format!("{reasoning}a.py\n```\n{content}```\n")),
                        one("a.py", &content),
                        "{line}"
                    );
                }
            }
        }
    }

    #[test]
    fn hunks_are_found_with_and_without_a_fence() {
        let hunk = "<<<<<<< SEARCH\na\n=======\nb\n>>>>>>> REPLACE";
        for reply in
            [format!("### a.py\n```python\n{hunk}\n```"), format!("```\na.py\n{hunk}\n```"), format!("a.py\n{hunk}\n")]
        {
            assert_eq!(files(&reply), one("a.py", "1 hunks"), "{reply}");
        }
        let two = format!("```\na.py\n{hunk}\nb.py\n{hunk}\n```");
        assert_eq!(files(&two), [("a.py".into(), "1 hunks".into()), ("b.py".to_owned(), "1 hunks".to_owned())]);
    }

    #[test]
    fn diffs_and_patches_are_found_with_and_without_a_fence() {
        let diff = "--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-a\n+b\n";
        let patch = "*** Begin Patch\n*** Update File: a.py\n-a\n+b\n*** End Patch\n";
        for edit in [diff, patch] {
            for reply in [
                edit.to_owned(),
                format!("I change one line:\n\n{edit}"),
                format!("```\n{edit}```\n"),
                format!("```diff\n{edit}```\nDone."),
            ] {
                assert_eq!(files(&reply), one("a.py", "1 hunks"), "{reply}");
            }
        }
        assert_eq!(files("### a.py\n```diff\n@@ -1 +1 @@\n-a\n+b\n```"), one("a.py", "1 hunks"));
        assert_eq!(files("```diff\n-a\n+b\n```"), one("add.py", "1 hunks"));
        // A patch that is a file itself, and a diff that only repeats a file.
        assert_eq!(files(&format!("### fix.patch\n```diff\n{diff}```")), one("fix.patch", diff));
        assert_eq!(files(&format!("### a.py\n```python\nb = 1\n```\n```diff\n{diff}```")), one("a.py", "b = 1\n"));
        let blank_kept = "```diff\n--- a/r.md\n+++ b/r.md\n@@ -1,2 +1,3 @@\n ```\n+x\n ```\n```\n";
        assert_eq!(files(blank_kept), one("r.md", "1 hunks"));
    }

    #[test]
    fn carriage_returns_of_the_whole_reply_are_ignored() {
        assert_eq!(files("```python\r\nx = 1\r\n```\r\n"), one("add.py", "x = 1\n"));
        let edits = parsed("--- a/a.py\r\n+++ b/a.py\r\n@@ -1 +1 @@\r\n-a\r\n+b\r\n").unwrap();
        let Change::Modify { hunks, .. } = &edits[0].change else { panic!("{edits:?}") };
        assert_eq!((hunks[0].new_lines(), hunks[0].position.clone()), (vec!["b"], Position::OldLine(1)));
        assert!(!hunks[0].states_line_ends);
    }

    #[test]
    fn unusable_replies_are_reported() {
        let problem = |reply: &str| parsed(reply).unwrap_err();
        assert_eq!(problem("I cannot help with that."), Problem::NoBlock);
        assert_eq!(problem(""), Problem::NoBlock);
        assert!(matches!(problem("### ../evil.py\n```\nx\n```"), Problem::Path(_)));
        assert!(matches!(problem("### a.py\n```\nx\n```\n### .git/hooks/x.py\n```\nx\n```"), Problem::Path(_)));
        assert!(matches!(problem("### a.py\n```\n<<<<<<< SEARCH\nx\n```"), Problem::Incomplete { .. }));
    }

    #[test]
    fn truncated_reply_accepts_only_closed_blocks() {
        let truncated = |reply: &str| parse(reply, &target(), true, &FewLanguages);
        let at = |path: &str| Err(Problem::Truncated { path: path.into() });
        assert_eq!(truncated("### a.py\n```python\nx = 1\ny = 2\n"), at("a.py"));
        assert_eq!(truncated("```python\nx = 1\ny = 2\n``"), at("add.py"));
        assert_eq!(truncated("def add(a, b):\n    return a + b\n"), at("add.py"));
        assert_eq!(truncated("### a.py\n```\nx = 1\n```\n### b.py\n```\ny = 1\n"), at("b.py"));
        let complete = "### a.py\n```\nx = 1\n```\n";
        for rest in ["It is called", "Run it:\n```bash\npython", ""] {
            assert_eq!(truncated(&format!("{complete}{rest}")), parsed(complete), "{rest}");
        }
        assert_eq!(
            truncated("```python\nx = 1\n```\nUse:\n```python\nadd(").unwrap(),
            parsed("```python\nx = 1\n```").unwrap()
        );
        let diff = "--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-a\n+b\n";
        assert_eq!(truncated(&format!("```diff\n{diff}")), at("a.py"));
        assert_eq!(truncated(diff), at("a.py"));
        let patch = "*** Begin Patch\n*** Update File: a.py\n-a\n+b\n";
        assert_eq!(truncated(patch), at("a.py"));
        assert!(truncated(&format!("{patch}*** End Patch\nIt is")).is_ok());
    }

    #[test]
    fn large_replies_are_refused() {
        let long = format!("```python\n{}```\n", "x = 1\n".repeat(2_000_000));
        let problem = parsed(&long).unwrap_err();
        assert_eq!(problem, Problem::ReplyTooLong { bytes: long.len(), max: MAX_REPLY_BYTES });
        let blocks = |count| "a.py\n```python\nx = 1\n```\n".repeat(count);
        assert_eq!(parsed(&blocks(MAX_EDITS)).unwrap().len(), MAX_EDITS);
        let problem = parsed(&blocks(5_000)).unwrap_err();
        assert_eq!(problem, Problem::TooManyEdits { max: MAX_EDITS });
        assert!(problem.to_string().contains("send fewer"), "{problem}");
        let hunk = "<<<<<<< SEARCH\na\n=======\nb\n>>>>>>> REPLACE\n";
        let hunks = format!("a.py\n{}", hunk.repeat(100_000));
        assert!(matches!(parsed(&hunks), Err(Problem::TooManyEdits { .. })));
        assert_eq!(parsed(&"\n".repeat(MAX_REPLY_BYTES)), Err(Problem::NoBlock));
        let thoughts = format!("{}```python\nx = 1\n```", "<think>a</think>".repeat(100_000));
        assert_eq!(files(&thoughts), one("add.py", "x = 1\n"));
    }

    proptest! {
        #[test]
        fn parse_does_not_panic_on_any_reply(reply in "(```|```diff|~~~|###|`|a\\.py|\\.\\./|<<<<<<< SEARCH|=======|>>>>>>> REPLACE|<think>|</think>|diff --git a/a b/a|--- a/a|\\+\\+\\+ b/a|@@ -1,2 \\+1 @@|@@|\\*\\*\\* Begin Patch|\\*\\*\\* Update File: a|\\*\\*\\* Add File: b|\\*\\*\\* Move to: c|\\+|-|\\\\|x = 1|é|[ \r\n]|\n){0,40}", truncated: bool) {
            if let Ok(edits) = parse(&reply, &target(), truncated, &FewLanguages) {
                for edit in edits {
                    let path = repo_path(&edit.path);
                    prop_assert_eq!(path.as_deref(), Ok(edit.path.as_str()));
                }
            }
        }
    }
}
