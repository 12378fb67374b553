//! The edits a reply asks for.

use super::ReplyProblem;
use super::fence::{Block, blocks};
use super::label::{in_line, of_block};
use super::replace::{Hunk, hunks, is_start};
use super::target::Target;
use crate::checks::{Language, extension, syntax_error};
use crate::workstream::repo_path;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Edit {
    /// The whole file.
    Write { path: String, content: String },
    /// Changes in a file that is there.
    Replace { path: String, hunks: Vec<Hunk> },
}

impl Edit {
    pub fn path(&self) -> &str {
        match self {
            Self::Write { path, .. } | Self::Replace { path, .. } => path,
        }
    }
}

/// Reads a creator's reply. Every path in the result is plain and inside the repository. Of a reply that was `cut` at its
/// longest length, only what was closed before counts: half a file may well parse, and its tail would be lost unseen.
pub fn parse(reply: &str, target: &Target, cut: bool) -> Result<Vec<Edit>, ReplyProblem> {
    let reply = without_thoughts(reply);
    let whole = |block: &Block<'_>, path: &str| match cut && !block.closed {
        true => Err(ReplyProblem::Cut { path: path.to_owned() }),
        false => Ok(()),
    };
    let blocks = blocks(&reply);
    let mut edits = Vec::new();
    for block in &blocks {
        if let Some((path, first_line)) = labelled(block) {
            let path = repo_path(&path)?;
            whole(block, &path)?;
            let lines = if first_line { &block.lines[1..] } else { &block.lines[..] };
            edits.push(edit(path, lines)?);
        }
    }
    if !edits.is_empty() {
        return Ok(edits);
    }
    if let Some(edit) = unfenced_hunks(&reply)? {
        return Ok(vec![edit]);
    }
    if let Some(block) = unlabelled(&blocks, target) {
        whole(block, &target.path)?;
        return Ok(vec![edit(repo_path(&target.path)?, &block.lines)?]);
    }
    if blocks.iter().any(|b| language_of(b) == "diff") {
        return Err(ReplyProblem::OnlyDiff);
    }
    match target.language {
        Some(language) if blocks.is_empty() && is_code(language, &reply) => {
            if cut {
                return Err(ReplyProblem::Cut { path: target.path.clone() });
            }
            Ok(vec![Edit::Write { path: repo_path(&target.path)?, content: ended(reply.trim()) }])
        }
        Some(_) | None => Err(ReplyProblem::NoBlock),
    }
}

fn edit(path: String, lines: &[&str]) -> Result<Edit, ReplyProblem> {
    if lines.iter().any(|l| is_start(l)) {
        let hunks = hunks(&path, lines)?;
        return Ok(Edit::Replace { path, hunks });
    }
    Ok(Edit::Write { path, content: ended(&lines.join("\n")) })
}

/// A block's label; one of hunks may also carry it on the line before the first marker.
fn labelled(block: &Block<'_>) -> Option<(String, bool)> {
    if is_aside(block) && !block.lines.iter().any(|l| is_start(l)) {
        // A command to run beside `a.py` is not the file. Its own first line or info string still names one.
        let alone = Block { above: None, ..block.clone() };
        return of_block(&alone);
    }
    of_block(block).or_else(|| {
        let marker = block.lines.iter().position(|l| is_start(l))?;
        let before = marker.checked_sub(1)?;
        in_line(block.lines[before]).map(|path| (path, false))
    })
}

/// The block to take for the target: of its language if one is, else the only one, asides left out.
fn unlabelled<'b, 't>(blocks: &'b [Block<'t>], target: &Target) -> Option<&'b Block<'t>> {
    let wanted = target.path.rsplit_once('.').map_or("", |(_, e)| e);
    let of_language =
        blocks.iter().find(|b| !b.lines.is_empty() && extension(&language_of(b)).is_some_and(|e| e == wanted));
    of_language.or_else(|| blocks.iter().find(|b| !b.lines.is_empty() && !is_aside(b)))
}

fn language_of(block: &Block<'_>) -> String {
    let end = |c: char| c.is_whitespace() || matches!(c, ':' | '{' | ',');
    block.info.split(end).next().unwrap_or_default().to_ascii_lowercase()
}

/// Commands, their output and diffs stand in fences too.
fn is_aside(block: &Block<'_>) -> bool {
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

/// Hunks that stand in the text without a fence, for one file.
fn unfenced_hunks(reply: &str) -> Result<Option<Edit>, ReplyProblem> {
    let lines: Vec<&str> = reply.lines().collect();
    let Some(first) = lines.iter().position(|l| is_start(l)) else { return Ok(None) };
    let label = lines[..first].iter().rev().take(3).find_map(|l| in_line(l));
    let Some(path) = label else { return Ok(None) };
    let path = repo_path(&path)?;
    let hunks = hunks(&path, &lines[first..])?;
    Ok(Some(Edit::Replace { path, hunks }))
}

/// Models that think aloud do so before the answer; nothing in there is meant as a file.
fn without_thoughts(reply: &str) -> String {
    let mut text = reply.to_owned();
    while let Some(start) = text.find("<think>") {
        let end = text[start..].find("</think>").map_or(text.len(), |i| start + i + "</think>".len());
        text.replace_range(start..end, "");
    }
    // Some chat templates open the thought in the prompt, so that only its end is in the reply.
    match text.rfind("</think>") {
        Some(end) => text[end + "</think>".len()..].to_owned(),
        None => text,
    }
}

/// Bare code: it parses, and it defines or does something on more than one line.
fn is_code(language: Language, text: &str) -> bool {
    let text = text.trim();
    text.lines().count() > 1 && syntax_error(language, text).is_none()
}

/// Text files end with a line break.
fn ended(text: &str) -> String {
    if text.is_empty() || text.ends_with('\n') { text.to_owned() } else { format!("{text}\n") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn target() -> Target {
        Target { path: "add.py".into(), language: Some(Language::Python) }
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
    fn named_blocks() {
        let reply = "Sure.\n\n### a/b.py\n```python\nx = 1\n```\n\nAnd `c.md`:\n````md\n```\ny\n```\n````\nRun it:\n```bash\npython a/b.py\n```\n";
        assert_eq!(
            files(reply),
            [("a/b.py".into(), "x = 1\n".into()), ("c.md".to_owned(), "```\ny\n```\n".to_owned())]
        );
        assert_eq!(files("```python\n# a.py\nx = 1\n```"), one("a.py", "x = 1\n"));
        assert_eq!(files("```python a.py\n# b.py\nx = 1\n```"), one("a.py", "# b.py\nx = 1\n"));
    }

    #[test]
    fn an_unnamed_block_is_the_target() {
        assert_eq!(
            files("Here:\n```python\ndef add(a, b):\n    return a + b\n```\nUse:\n```python\nadd(1, 2)\n```"),
            one("add.py", "def add(a, b):\n    return a + b\n")
        );
        assert_eq!(files("```\nx = 1\n"), one("add.py", "x = 1\n"));
        assert_eq!(files("```bash\npip install x\n```\n```python\nx = 1\n```"), one("add.py", "x = 1\n"));
        assert_eq!(files("def add(a, b):\n    return a + b"), one("add.py", "def add(a, b):\n    return a + b\n"));
    }

    #[test]
    fn thoughts_are_no_files() {
        assert_eq!(files("<think>```python\nbad\n```</think>\n```python\nx = 1\n```"), one("add.py", "x = 1\n"));
        assert_eq!(files("```python\nbad\n```</think>\n```python\nx = 1\n```"), one("add.py", "x = 1\n"));
    }

    #[test]
    fn hunks_fenced_and_not() {
        let hunk = "<<<<<<< SEARCH\na\n=======\nb\n>>>>>>> REPLACE";
        for reply in
            [format!("### a.py\n```python\n{hunk}\n```"), format!("```\na.py\n{hunk}\n```"), format!("a.py\n{hunk}\n")]
        {
            assert_eq!(files(&reply), one("a.py", "1 hunks"), "{reply}");
        }
    }

    #[test]
    fn what_cannot_be_read_is_said() {
        let problem = |reply: &str| parse(reply, &target(), false).unwrap_err();
        assert_eq!(problem("I cannot help with that."), ReplyProblem::NoBlock);
        assert_eq!(problem(""), ReplyProblem::NoBlock);
        assert_eq!(problem("```diff\n-a\n+b\n```"), ReplyProblem::OnlyDiff);
        assert!(matches!(problem("### ../evil.py\n```\nx\n```"), ReplyProblem::Path(_)));
        assert!(matches!(problem("### a.py\n```\nx\n```\n### .git/hooks/x.py\n```\nx\n```"), ReplyProblem::Path(_)));
        assert!(matches!(problem("### a.py\n```\n<<<<<<< SEARCH\nx\n```"), ReplyProblem::Incomplete { .. }));
    }

    #[test]
    fn of_a_reply_that_was_cut_only_what_was_closed_counts() {
        let cut = |reply: &str| parse(reply, &target(), true);
        let at = |path: &str| Err(ReplyProblem::Cut { path: path.into() });
        assert_eq!(cut("### a.py\n```python\nx = 1\ny = 2\n"), at("a.py"));
        assert_eq!(cut("```python\nx = 1\ny = 2\n``"), at("add.py"));
        assert_eq!(cut("def add(a, b):\n    return a + b\n"), at("add.py"));
        assert_eq!(cut("### a.py\n```\nx = 1\n```\n### b.py\n```\ny = 1\n"), at("b.py"));
        let whole = "### a.py\n```\nx = 1\n```\n";
        for rest in ["It is called", "Run it:\n```bash\npython", ""] {
            assert_eq!(cut(&format!("{whole}{rest}")), parse(whole, &target(), false), "{rest}");
        }
        assert_eq!(
            cut("```python\nx = 1\n```\nUse:\n```python\nadd(").unwrap(),
            parse("```python\nx = 1\n```", &target(), false).unwrap()
        );
    }

    proptest! {
        #[test]
        fn any_reply_is_read_without_a_panic(reply in "(```|~~~|###|`|a\\.py|\\.\\./|<<<<<<< SEARCH|=======|>>>>>>> REPLACE|<think>|</think>|x = 1|é|[ \n]){0,30}", cut: bool) {
            if let Ok(edits) = parse(&reply, &target(), cut) {
                for edit in edits {
                    let path = repo_path(edit.path());
                    prop_assert_eq!(path.as_deref(), Ok(edit.path()));
                }
            }
        }
    }
}
