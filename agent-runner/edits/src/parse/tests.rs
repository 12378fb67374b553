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
    assert_eq!(files(reply), [("a/b.py".into(), "x = 1\n".into()), ("c.md".to_owned(), "```\ny\n```\n".to_owned())]);
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
                assert_eq!(files(&format!("{reasoning}a.py\n```\n{content}```\n")), one("a.py", &content), "{line}");
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
