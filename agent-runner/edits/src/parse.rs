//! Parses a creator's reply into edits.

use std::borrow::Cow;

use crate::edit::{Change, Edit};
use crate::label::{HunkLabel, block_label, hunk_label, is_auxiliary, language, path_in_comment};
use crate::languages::Languages;
use crate::path::repo_path;
use crate::problem::ReplyProblem;
use crate::sections::{FencedBlock, Section, sections};
use crate::syntax::search_replace::is_search_marker;
use crate::syntax::{MAX_HUNKS, apply_patch, search_replace, unified_diff};

/// Maximum length of a reply, in bytes: above any answer of a model.
const MAX_REPLY_BYTES: usize = 8 * 1024 * 1024;
/// Maximum number of edits in one reply. More edits than files are normal, because a file may have several.
const MAX_EDITS: usize = 512;
/// Maximum number of lines, such as comments, above the diff in a block.
const MAX_LINES_ABOVE_DIFF: usize = 3;
/// Maximum number of lines that are not blank up to the beginning of the patch in a block.
const MAX_LINES_ABOVE_PATCH: usize = 5;

/// The file that an unlabelled code block is written to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplyTarget {
    /// Path in the repository; not validated.
    pub path: String,
}

/// Parses a creator's reply into edits, in the order of the reply. Every path in the result is a valid repository path. If
/// the reply is `truncated` at its maximum length, the last edit must be complete: half a file may parse, so its missing
/// end would not be detected.
///
/// # Errors
/// A [`ReplyProblem`] if the reply has no usable block, an invalid path, an incomplete hunk or a truncated file.
pub fn parse(
    reply: &str,
    target: &ReplyTarget,
    truncated: bool,
    languages: &impl Languages,
) -> Result<Vec<Edit>, ReplyProblem> {
    if reply.len() > MAX_REPLY_BYTES {
        return Err(ReplyProblem::ReplyTooLong { bytes: reply.len(), max: MAX_REPLY_BYTES });
    }
    let reply = without_reasoning(reply.trim_start_matches('\u{feff}'));
    let reply = with_plain_line_ends(reply);
    let (sections, last_line) = sections(&reply);
    let mut edits = EditList { edits: Vec::new(), hunks: 0, target: &target.path };
    let mut is_cut = truncated && last_line.is_some_and(is_beginning_of_an_edit);
    for (n, section) in sections.iter().enumerate() {
        let is_last = n + 1 == sections.len();
        let count = edits.edits.len();
        let is_complete = match section {
            Section::Block(block) => {
                edits.add_block(block, truncated)?;
                block.closed
            }
            Section::Hunk { lines, line_above } => {
                edits.add_hunks(line_above.unwrap_or_default(), lines)?;
                false
            }
            Section::Patch(lines) => {
                edits.extend(apply_patch::parse(lines)?)?;
                apply_patch::is_complete(lines)
            }
            Section::Diff(lines) => {
                let path = edits.current_path();
                edits.extend(unified_diff::parse_unfenced(&path, lines)?)?;
                false
            }
        };
        // The end of an edit outside of a block is not certain if the reply is cut.
        is_cut |= truncated && is_last && !is_complete && edits.edits.len() > count;
    }
    let edits = edits.edits;
    match edits.last() {
        Some(last) if is_cut => return Err(ReplyProblem::Truncated { path: last.path.clone() }),
        Some(_) => return Ok(edits),
        None if is_cut => return Err(ReplyProblem::TruncatedEdit),
        None => {}
    }
    let blocks = || {
        sections.iter().filter_map(|section| match section {
            Section::Block(block) => Some(block),
            Section::Hunk { .. } | Section::Patch(_) | Section::Diff(_) => None,
        })
    };
    let write = |content| Ok::<_, ReplyProblem>(vec![whole_file(repo_path(&target.path)?, content, None)]);
    if let Some(block) = unlabelled_block(blocks, target, languages) {
        if truncated && !block.closed {
            return Err(ReplyProblem::Truncated { path: repo_path(&target.path)? });
        }
        return write(block.lines.join("\n"));
    }
    if blocks().next().is_none() && is_code(&target.path, &reply, languages) {
        if truncated {
            return Err(ReplyProblem::Truncated { path: repo_path(&target.path)? });
        }
        return write(reply.trim().to_owned());
    }
    Err(ReplyProblem::NoBlock)
}

/// The edits of a reply so far.
struct EditList<'a> {
    edits: Vec<Edit>,
    hunks: usize,
    target: &'a str,
}

impl EditList<'_> {
    /// The file of hunks that name none: that of the last edit, else the target.
    fn current_path(&self) -> String {
        let last = self.edits.last().map(|edit| match &edit.change {
            Change::Modify { rename_to: Some(to), .. } => to,
            Change::Modify { rename_to: None, .. } | Change::Write { .. } | Change::Create { .. } => &edit.path,
            Change::Delete { .. } => &edit.path,
        });
        last.cloned().unwrap_or_else(|| self.target.to_owned())
    }

    fn extend(&mut self, edits: Vec<Edit>) -> Result<(), ReplyProblem> {
        for edit in edits {
            if let Change::Modify { hunks, .. } = &edit.change {
                self.hunks += hunks.len();
            }
            if self.edits.len() == MAX_EDITS || self.hunks > MAX_HUNKS {
                return Err(ReplyProblem::TooManyEdits { max: MAX_EDITS });
            }
            self.edits.push(edit);
        }
        Ok(())
    }

    /// Adds the edits of a block. A block that is no edit, such as an example or a command, adds none.
    fn add_block(&mut self, block: &FencedBlock<'_>, truncated: bool) -> Result<(), ReplyProblem> {
        let label = block_label(block);
        match kind_of(block) {
            BlockKind::Patch => self.extend(apply_patch::parse(&block.lines)?),
            BlockKind::Hunks => {
                let path = label.map_or_else(|| self.current_path(), |(path, _)| path);
                // The line above the block decides if it names a file in another form than a whole file's.
                let is_label_line = block.line_above.is_some_and(|line| hunk_label(line) != HunkLabel::None);
                let line_above = if is_label_line { block.line_above } else { None };
                self.add_hunks_of(&path, line_above.unwrap_or_default(), &block.lines)
            }
            BlockKind::Diff => {
                let first = block.lines.iter().position(|line| !line.trim().is_empty()).unwrap_or_default();
                let comment = block.lines.get(first).and_then(|line| path_in_comment(line));
                let lines = &block.lines[first + usize::from(comment.is_some() && block.lines.len() > first)..];
                let path = match (label, block.line_above.map(hunk_label)) {
                    (Some((path, _)), _) | (None, Some(HunkLabel::Path(path))) => path,
                    (None, Some(HunkLabel::None | HunkLabel::Unclear) | None) => self.current_path(),
                };
                self.extend(unified_diff::parse(&path, lines)?)
            }
            BlockKind::Other => {
                let Some((path, label)) = file_label(block) else { return Ok(()) };
                let path = repo_path(&path)?;
                if truncated && !block.closed {
                    return Err(ReplyProblem::Truncated { path });
                }
                let has_hunks = |edit: &Edit| match &edit.change {
                    Change::Modify { hunks, rename_to, .. } => {
                        !hunks.is_empty() && *rename_to.as_ref().unwrap_or(&edit.path) == path
                    }
                    Change::Write { .. } | Change::Create { .. } | Change::Delete { .. } => false,
                };
                if self.edits.iter().any(has_hunks) {
                    return Err(ReplyProblem::HunksAndWholeFile { path });
                }
                let lines = if label.is_some() { &block.lines[1..] } else { &block.lines[..] };
                self.extend(vec![whole_file(path, lines.join("\n"), label.map(str::to_owned))])
            }
        }
    }

    /// Adds search/replace blocks, of which the first stands below `line_above`.
    fn add_hunks(&mut self, line_above: &str, lines: &[&str]) -> Result<(), ReplyProblem> {
        let path = self.current_path();
        self.add_hunks_of(&path, line_above, lines)
    }

    fn add_hunks_of(&mut self, path: &str, line_above: &str, lines: &[&str]) -> Result<(), ReplyProblem> {
        let lines: Vec<&str> = std::iter::once(line_above).chain(lines.iter().copied()).collect();
        let edit = |(path, hunks): (String, _)| {
            let change = Change::Modify { hunks, rename_to: None, executable: None, in_order: false };
            Ok(Edit::new(repo_path(&path)?, change))
        };
        let edits = search_replace::parse(path, &lines)?.into_iter().map(edit).collect::<Result<_, ReplyProblem>>()?;
        self.extend(edits)
    }
}

/// A whole file. A blank line before the closing fence is not part of it: models add one, and git reports blank lines at
/// the end of a file as an error.
fn whole_file(path: String, content: String, label: Option<String>) -> Edit {
    let content = if content.is_empty() || content.ends_with('\n') { content } else { format!("{content}\n") };
    Edit::new(path, Change::Write { content, label })
}

/// What a block contains.
enum BlockKind {
    Patch,
    Diff,
    /// Search/replace blocks.
    Hunks,
    /// A file, or something that is no edit.
    Other,
}

fn kind_of(block: &FencedBlock<'_>) -> BlockKind {
    let blank = block.lines.iter().take_while(|line| line.trim().is_empty()).count();
    let lines = &block.lines[blank..];
    let is_named_diff = matches!(language(block.info).as_str(), "diff" | "patch" | "udiff");
    match () {
        () if patch_file_label(block).is_some() => BlockKind::Other,
        () if starts_with_patch(lines) => BlockKind::Patch,
        () if (0..lines.len().min(MAX_LINES_ABOVE_DIFF)).any(|n| unified_diff::starts_with_diff(&lines[n..])) => {
            BlockKind::Diff
        }
        () if lines.iter().any(|line| is_search_marker(line)) => BlockKind::Hunks,
        () if is_named_diff || unified_diff::starts_with_hunk(lines) => BlockKind::Diff,
        () => BlockKind::Other,
    }
}

/// The label of a block, if it names a file that is a patch itself. Such a file is sent whole.
fn patch_file_label(block: &FencedBlock<'_>) -> Option<(String, bool)> {
    block_label(block).filter(|(path, _)| path.ends_with(".patch") || path.ends_with(".diff"))
}

/// True if a patch begins in the first lines that are not blank. Models put a shell command above it.
fn starts_with_patch(lines: &[&str]) -> bool {
    let first: Vec<&str> =
        lines.iter().filter(|line| !line.trim().is_empty()).take(MAX_LINES_ABOVE_PATCH).copied().collect();
    apply_patch::is_patch(&first)
}

/// Path of a whole file, and its first line if that is the label.
fn file_label<'t>(block: &FencedBlock<'t>) -> Option<(String, Option<&'t str>)> {
    let label = patch_file_label(block).or_else(|| {
        if !is_auxiliary(block.info) {
            return block_label(block);
        }
        // A block of commands below a line with the name `a.py` is not the content of `a.py`, so the line above is
        // ignored. The block's own first line or info string may still name a file.
        block_label(&FencedBlock { line_above: None, ..block.clone() })
    });
    label.map(|(path, is_first)| (path, if is_first { block.lines.first().copied() } else { None }))
}

/// The block to assign to the target file: the first in the target's language, else the first that is not auxiliary.
fn unlabelled_block<'b, 't: 'b, I: Iterator<Item = &'b FencedBlock<'t>>>(
    blocks: impl Fn() -> I,
    target: &ReplyTarget,
    languages: &impl Languages,
) -> Option<&'b FencedBlock<'t>> {
    let wanted = target.path.rsplit_once('.').map_or("", |(_, e)| e);
    let is_wanted = |b: &&FencedBlock<'_>| {
        !b.lines.is_empty() && languages.extension(&language(b.info)).is_some_and(|e| e == wanted)
    };
    blocks().find(is_wanted).or_else(|| blocks().find(|b| !b.lines.is_empty() && !is_auxiliary(b.info)))
}

/// True if the last line of a reply that was cut begins an edit.
fn is_beginning_of_an_edit(line: &str) -> bool {
    ["<<<<", "*** ", "--- ", "diff --git"].iter().any(|key| line.starts_with(key))
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

/// Removes carriage returns if the reply itself has them: at the end of its first fence or marker. Otherwise they are part
/// of the edits.
fn with_plain_line_ends(reply: &str) -> Cow<'_, str> {
    let is_structure = |line: &&str| ["```", "~~~", "--- ", "*** ", "<<<<<"].iter().any(|key| line.starts_with(key));
    let first = reply.split('\n').find(is_structure).or_else(|| reply.split('\n').next());
    match first.is_some_and(|line| line.ends_with('\r')) {
        true => Cow::Owned(reply.replace("\r\n", "\n")),
        false => Cow::Borrowed(reply),
    }
}

/// True if text without a fence is code: it has more than one line and parses without a syntax error.
fn is_code(path: &str, text: &str, languages: &impl Languages) -> bool {
    let text = text.trim();
    text.lines().count() > 1 && languages.is_valid(path, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::edit::Position;
    use crate::languages::SyntaxProblem;
    use proptest::prelude::*;

    /// Takes lines that end with a colon or a bracket, or contain `=`, for Python.
    struct FewLanguages;

    impl Languages for FewLanguages {
        fn extension(&self, name: &str) -> Option<&'static str> {
            matches!(name, "python" | "py").then_some("py")
        }

        fn syntax_error(&self, path: &str, text: &str) -> Option<SyntaxProblem> {
            (!self.is_valid(path, text)).then(|| SyntaxProblem { line: 1, message: "prose".into() })
        }

        fn is_valid(&self, path: &str, text: &str) -> bool {
            let is_code = |l: &str| l.is_empty() || l.ends_with([':', ')']) || l.contains(['=', '+']);
            path.ends_with(".py") && text.lines().all(is_code)
        }
    }

    fn target() -> ReplyTarget {
        ReplyTarget { path: "add.py".into() }
    }

    fn parsed(reply: &str) -> Result<Vec<Edit>, ReplyProblem> {
        parse(reply, &target(), false, &FewLanguages)
    }

    fn files(reply: &str) -> Vec<(String, String)> {
        let summary = |edit: Edit| match edit.change {
            Change::Write { content, .. } => (edit.path, content),
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
        // A patch that is a file itself, and edits in the order of the reply.
        assert_eq!(files(&format!("### fix.patch\n```diff\n{diff}```")), one("fix.patch", diff));
        let both = files(&format!("### a.py\n```python\nb = 1\n```\n```diff\n{diff}```"));
        assert_eq!(both, [("a.py".into(), "b = 1\n".into()), ("a.py".to_owned(), "1 hunks".to_owned())]);
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
        assert_eq!(problem("I cannot help with that."), ReplyProblem::NoBlock);
        assert_eq!(problem(""), ReplyProblem::NoBlock);
        assert!(matches!(problem("### ../evil.py\n```\nx\n```"), ReplyProblem::Path(_)));
        assert!(matches!(problem("### a.py\n```\nx\n```\n### .git/hooks/x.py\n```\nx\n```"), ReplyProblem::Path(_)));
        assert!(matches!(problem("### a.py\n```\n<<<<<<< SEARCH\nx\n```"), ReplyProblem::Incomplete { .. }));
    }

    #[test]
    fn truncated_reply_accepts_only_closed_blocks() {
        let truncated = |reply: &str| parse(reply, &target(), true, &FewLanguages);
        let at = |path: &str| Err(ReplyProblem::Truncated { path: path.into() });
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
        assert_eq!(problem, ReplyProblem::ReplyTooLong { bytes: long.len(), max: MAX_REPLY_BYTES });
        let blocks = |count| "a.py\n```python\nx = 1\n```\n".repeat(count);
        assert_eq!(parsed(&blocks(MAX_EDITS)).unwrap().len(), MAX_EDITS);
        let problem = parsed(&blocks(5_000)).unwrap_err();
        assert_eq!(problem, ReplyProblem::TooManyEdits { max: MAX_EDITS });
        assert!(problem.to_string().contains("send fewer"), "{problem}");
        let hunk = "<<<<<<< SEARCH\na\n=======\nb\n>>>>>>> REPLACE\n";
        let hunks = format!("a.py\n{}", hunk.repeat(100_000));
        assert!(matches!(parsed(&hunks), Err(ReplyProblem::TooManyEdits { .. })));
        assert_eq!(parsed(&"\n".repeat(MAX_REPLY_BYTES)), Err(ReplyProblem::NoBlock));
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
