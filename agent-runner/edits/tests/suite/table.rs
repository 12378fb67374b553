//! Cases of edits in every syntax, among them those that other programs get wrong.

use cfq_edits::{ChangedFile, NotWritableReason, ReplyProblem};

use super::files::Files;

/// A search/replace block below the name of its file.
fn block(path: &str, search: &str, replace: &str) -> String {
    format!("### {path}\n```\n<<<<<<< SEARCH\n{search}\n=======\n{replace}\n>>>>>>> REPLACE\n```\n")
}

fn diff(path: &str, hunks: &str) -> String {
    format!("```diff\n--- a/{path}\n+++ b/{path}\n{hunks}\n```\n")
}

fn patch(body: &str) -> String {
    format!("*** Begin Patch\n{body}\n*** End Patch\n")
}

/// The same change of the line `old`, which is the second one of the file, below `first`.
fn in_all_syntaxes(path: &str, first: &str, old: &str, new: &str) -> [(&'static str, String); 3] {
    [
        ("search/replace", block(path, old, new)),
        ("unified diff", diff(path, &format!("@@ -1,2 +1,2 @@\n {first}\n-{old}\n+{new}"))),
        ("patch", patch(&format!("*** Update File: {path}\n@@\n-{old}\n+{new}"))),
    ]
}

#[test]
fn each_syntax_changes_one_line() {
    let files = Files::of(&[("a.txt", "one\ntwo\nthree\n"), ("b.txt", "other\n")]);
    for (syntax, reply) in in_all_syntaxes("a.txt", "one", "two", "2") {
        let after = files.after(&reply).unwrap();
        assert_eq!(after.files["a.txt"].0, b"one\n2\nthree\n", "{syntax}");
        assert_eq!(after.files["b.txt"], files.files["b.txt"], "{syntax}");
    }
    let whole = files.text_after("a.txt", "### a.txt\n```\none\n2\nthree\n```\n").unwrap();
    assert_eq!(whole, "one\n2\nthree\n");
}

#[test]
fn two_identical_targets_are_refused_and_the_model_can_choose() {
    let files = Files::of(&[("a.txt", "f\nx\ng\nx\n")]);
    let place = |line: &str| format!("### a.txt\n```\n<<<<<<< SEARCH{line}\nx\n=======\ny\n>>>>>>> REPLACE\n```\n");
    for reply in [
        place(""),
        diff("a.txt", "@@\n-x\n+y"),
        // The stated line is neither of them.
        diff("a.txt", "@@ -9 +9 @@\n-x\n+y"),
        patch("*** Update File: a.txt\n@@\n-x\n+y"),
    ] {
        let problem = files.after(&reply).unwrap_err();
        assert!(matches!(problem, ReplyProblem::Ambiguous { count: 2, .. }), "{reply}: {problem}");
        let message = problem.to_string();
        assert!(message.contains("1. line 2 below `f`, 2. line 4 below `g`"), "{message}");
    }
    for reply in [
        place(" line 4"),
        diff("a.txt", "@@ -4 +4 @@\n-x\n+y"),
        diff("a.txt", "@@ line 4\n-x\n+y"),
        patch("*** Update File: a.txt\n@@ line 4\n-x\n+y"),
        patch("*** Update File: a.txt\n@@ g\n-x\n+y"),
        patch("*** Update File: a.txt\n@@\n-x\n+y\n*** End of File"),
    ] {
        assert_eq!(files.text_after("a.txt", &reply).unwrap(), "f\nx\ng\ny\n", "{reply}");
    }
}

#[test]
fn reply_with_a_later_file_that_fails_is_refused() {
    let files = Files::of(&[("a.txt", "one\ntwo\n"), ("b.txt", "x\n")]);
    for (syntax, good) in in_all_syntaxes("a.txt", "one", "two", "2") {
        let bad = match syntax {
            "patch" => good.replace("*** End Patch", "*** Update File: b.txt\n@@\n-nowhere\n+y\n*** End Patch"),
            "unified diff" => good.replace("\n```\n", "\n--- a/b.txt\n+++ b/b.txt\n@@ -1 +1 @@\n-nowhere\n+y\n```\n"),
            _ => good + &block("b.txt", "nowhere", "y"),
        };
        let problem = files.after(&bad).unwrap_err();
        assert!(matches!(&problem, ReplyProblem::NotFound { path, .. } if path == "b.txt"), "{syntax}: {problem}");
    }
}

#[test]
fn text_in_another_file_than_the_named_one_is_not_found() {
    for other in ["x\ny\n", "one\nTWO\n"] {
        let files = Files::of(&[("a.txt", "one\ntwo\n"), ("b.txt", other)]);
        for (syntax, reply) in in_all_syntaxes("b.txt", "one", "two", "2") {
            let problem = files.after(&reply).unwrap_err();
            assert!(matches!(&problem, ReplyProblem::NotFound { path, .. } if path == "b.txt"), "{syntax}: {problem}");
        }
    }
    let files = Files::of(&[("a.txt", "one\ntwo\n"), ("b.txt", "one\ntwo\n")]);
    for (syntax, reply) in in_all_syntaxes("b.txt", "one", "two", "2") {
        assert_eq!(files.after(&reply).unwrap().files["a.txt"], files.files["a.txt"], "{syntax}");
    }
}

#[test]
fn two_places_are_refused_in_each_step_of_tolerance() {
    for file in ["x\na b\ny\na b\n", "x\na b \ny\na b  \n", "x\n  a b\ny\n  a b\n", "x\na\u{a0}b\ny\na\u{a0}b\n"] {
        let files = Files::of(&[("a.txt", file)]);
        let problem = files.after(&block("a.txt", "a b", "c")).unwrap_err();
        let message = problem.to_string();
        assert!(message.contains("2 times: `a b`; 1. line 2 below `x`, 2. line 4 below `y`"), "{file:?}: {message}");
    }
}

#[test]
fn added_file_must_not_exist_unless_it_is_the_same() {
    let files = Files::of(&[("a.txt", "one\n")]);
    let added = |path: &str, text: &str| {
        let diff = format!("```diff\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+{text}\n```\n");
        [diff, patch(&format!("*** Add File: {path}\n+{text}"))]
    };
    for reply in added("a.txt", "other") {
        assert_eq!(files.after(&reply).unwrap_err(), ReplyProblem::Exists { path: "a.txt".into() }, "{reply}");
    }
    for reply in added("new/dir/b.txt", "one") {
        assert_eq!(files.text_after("new/dir/b.txt", &reply).unwrap(), "one\n");
    }
    for reply in added("a.txt", "one") {
        assert_eq!(files.after(&reply).unwrap_err(), ReplyProblem::NothingChanged, "{reply}");
    }
}

#[test]
fn lost_indentation_is_restored() {
    let files = Files::of(&[("a.py", "class A:\n    def f(self):\n        return 1\n")]);
    let (old, new) = ("def f(self):\n    return 1", "def f(self):\n    x = 2\n    return x");
    let expected = "class A:\n    def f(self):\n        x = 2\n        return x\n";
    for reply in [
        block("a.py", old, new),
        diff("a.py", "@@ -2,2 +2,3 @@\n def f(self):\n-    return 1\n+    x = 2\n+    return x"),
        patch("*** Update File: a.py\n@@\n def f(self):\n-    return 1\n+    x = 2\n+    return x"),
    ] {
        assert_eq!(files.text_after("a.py", &reply).unwrap(), expected, "{reply}");
    }
}

#[test]
fn trailing_blanks_are_tolerated_and_kept() {
    let files = Files::of(&[("a.txt", "one  \ntwo\t\nthree  \n")]);
    for (syntax, reply) in in_all_syntaxes("a.txt", "one", "two", "2") {
        assert_eq!(files.text_after("a.txt", &reply).unwrap(), "one  \n2\nthree  \n", "{syntax}");
    }
}

#[test]
fn look_alike_characters_are_tolerated_and_kept() {
    let files = Files::of(&[("a.txt", "say \u{201c}hi\u{201d}\nx \u{2014} y\n\u{2026} end\u{a0}here\n")]);
    for (syntax, reply) in in_all_syntaxes("a.txt", "say \"hi\"", "x - y", "2") {
        let expected = "say \u{201c}hi\u{201d}\n2\n\u{2026} end\u{a0}here\n";
        assert_eq!(files.text_after("a.txt", &reply).unwrap(), expected, "{syntax}");
    }
    let reply = block("a.txt", "x - y\n... end here", "x - y\nmore\n... end here");
    let expected = "say \u{201c}hi\u{201d}\nx \u{2014} y\nmore\n\u{2026} end\u{a0}here\n";
    assert_eq!(files.text_after("a.txt", &reply).unwrap(), expected);
}

#[test]
fn line_ends_final_newline_and_byte_order_mark_are_kept() {
    for (old, new) in [
        ("one\r\ntwo\r\nthree\r\n", "one\r\n2\r\nthree\r\n"),
        ("one\r\ntwo\nthree\r\n", "one\r\n2\nthree\r\n"),
        ("one\ntwo\nthree", "one\n2\nthree"),
        ("one\ntwo", "one\n2"),
        ("\u{feff}one\ntwo\n", "\u{feff}one\n2\n"),
    ] {
        let files = Files::of(&[("a.txt", old)]);
        for (syntax, reply) in in_all_syntaxes("a.txt", "one", "two", "2") {
            assert_eq!(files.text_after("a.txt", &reply).unwrap(), new, "{syntax} {old:?}");
        }
    }
    let files = Files::of(&[("a.txt", "one\r\ntwo")]);
    assert_eq!(files.text_after("a.txt", "### a.txt\n```\none\n2\n```\n").unwrap(), "one\r\n2");
}

#[test]
fn file_in_another_encoding_keeps_its_bytes() {
    let mut files = Files::default();
    files.files.insert("a.txt".into(), (b"caf\xe9 \x81\none\ntwo\n".to_vec(), false));
    for (syntax, reply) in in_all_syntaxes("a.txt", "one", "two", "na\u{ef}ve") {
        let reply = reply.replace("@@ -1,2 +1,2 @@", "@@ -2,2 +2,2 @@");
        let after = files.after(&reply).unwrap();
        assert_eq!(after.files["a.txt"].0, b"caf\xe9 \x81\none\nna\xefve\n", "{syntax}");
    }
    let problem = files.after(&block("a.txt", "one", "\u{65e5}")).unwrap_err();
    assert_eq!(problem, ReplyProblem::NotEncodable { path: "a.txt".into(), character: '\u{65e5}' });
    // A zero byte: binary, or UTF-16.
    files.files.insert("b.bin".into(), (b"a\0b\n".to_vec(), false));
    let problem = files.after(&block("b.bin", "a", "b")).unwrap_err();
    assert!(matches!(problem, ReplyProblem::File(p) if p.reason == NotWritableReason::NotText));
    let removed = files.after(&patch("*** Delete File: b.bin")).unwrap();
    assert!(!removed.files.contains_key("b.bin"));
}

#[test]
fn mode_is_kept_or_changed_by_a_diff() {
    let mut files = Files::of(&[("a.txt", "one\ntwo\n")]);
    files.files.insert("run.sh".into(), (b"one\ntwo\n".to_vec(), true));
    for (syntax, reply) in in_all_syntaxes("run.sh", "one", "two", "2") {
        assert_eq!(files.after(&reply).unwrap().files["run.sh"], (b"one\n2\n".to_vec(), true), "{syntax}");
    }
    let mode = "```diff\ndiff --git a/a.txt b/a.txt\nold mode 100644\nnew mode 100755\n```\n";
    assert_eq!(files.after(mode).unwrap().files["a.txt"], (b"one\ntwo\n".to_vec(), true));
    let new =
        "```diff\ndiff --git a/n.sh b/n.sh\nnew file mode 100755\n--- /dev/null\n+++ b/n.sh\n@@ -0,0 +1 @@\n+x\n```\n";
    assert_eq!(files.after(new).unwrap().files["n.sh"], (b"x\n".to_vec(), true));
    let moved = files.after(&patch("*** Update File: run.sh\n*** Move to: bin/run.sh\n@@\n-two\n+2")).unwrap();
    assert_eq!(moved.files["bin/run.sh"], (b"one\n2\n".to_vec(), true));
    assert!(!moved.files.contains_key("run.sh"));
}

#[test]
fn renames_and_removals() {
    let files = Files::of(&[("a.txt", "one\ntwo\n"), ("b.txt", "x\n")]);
    let rename =
        "```diff\ndiff --git a/a.txt b/c.txt\nsimilarity index 100%\nrename from a.txt\nrename to c.txt\n```\n";
    let after = files.after(rename).unwrap();
    assert_eq!((after.files.get("a.txt"), &after.files["c.txt"]), (None, &files.files["a.txt"]));
    let onto = patch("*** Update File: a.txt\n*** Move to: b.txt\n@@\n-two\n+2");
    assert_eq!(files.after(&onto).unwrap_err(), ReplyProblem::NewNameExists { path: "b.txt".into() });
    let instead = patch("*** Delete File: b.txt\n*** Update File: a.txt\n*** Move to: b.txt\n@@\n-two\n+2");
    assert_eq!(files.after(&instead).unwrap(), Files::of(&[("b.txt", "one\n2\n")]));
    for reply in [
        patch("*** Delete File: a.txt"),
        "```diff\n--- a/a.txt\n+++ /dev/null\n@@ -1,2 +0,0 @@\n-one\n-two\n```\n".to_owned(),
    ] {
        assert_eq!(files.after(&reply).unwrap(), Files::of(&[("b.txt", "x\n")]), "{reply}");
    }
    let other = "```diff\n--- a/a.txt\n+++ /dev/null\n@@ -1,2 +0,0 @@\n-one\n-2\n```\n";
    assert_eq!(files.after(other).unwrap_err(), ReplyProblem::OtherContent { path: "a.txt".into() });
    let missing = ReplyProblem::NoSuchFile { path: "src/a.txt".into(), same_name: Some("a.txt".into()) };
    assert_eq!(files.after(&patch("*** Delete File: src/a.txt")).unwrap_err(), missing);
    assert_eq!(files.after(&block("src/a.txt", "one", "1")).unwrap_err(), missing);
    assert_eq!(
        missing.to_string(),
        "src/a.txt: the file does not exist, but a.txt does: use that path; to create it, send it whole"
    );
}

#[test]
fn paths_outside_the_tree_links_and_submodules_are_refused() {
    let mut files = Files::of(&[("a.txt", "one\ntwo\n")]);
    files.others.insert("link".into(), NotWritableReason::Symlink);
    files.others.insert("sub".into(), NotWritableReason::Submodule);
    for (path, is_file_problem) in [
        ("../a.txt", false),
        ("/etc/passwd.txt", false),
        (".git/config.txt", false),
        (".GIT/hooks/x.txt", false),
        ("d/../../a.txt", false),
        ("link", true),
        ("link/a.txt", true),
        ("sub/a.txt", true),
        ("a.txt/b.txt", true),
    ] {
        let moved = patch(&format!("*** Update File: a.txt\n*** Move to: {path}\n@@\n-two\n+2"));
        let replies = in_all_syntaxes(path, "one", "two", "2").map(|(_, reply)| reply);
        let others = [
            moved,
            patch(&format!("*** Delete File: {path}")),
            patch(&format!("*** Add File: {path}\n+x")),
            format!("```diff\ndiff --git a/a.txt b/{path}\nrename from a.txt\nrename to {path}\n```\n"),
        ];
        for reply in replies.into_iter().chain(others) {
            // `link` alone is no name in a heading.
            if path == "link" && reply.starts_with("###") {
                continue;
            }
            let problem = files.after(&reply).unwrap_err();
            let expected = match is_file_problem {
                true => matches!(problem, ReplyProblem::File(_)),
                false => matches!(problem, ReplyProblem::Path(_)),
            };
            assert!(expected, "{reply}: {problem:?}");
        }
    }
    let link = "```diff\ndiff --git a/x b/x\nnew file mode 120000\n--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+/etc\n```\n";
    assert!(matches!(files.after(link).unwrap_err(), ReplyProblem::File(p) if p.reason == NotWritableReason::Symlink));
}

#[test]
fn edit_that_is_applied_already_is_a_success() {
    let base = Files::of(&[("a.txt", "one\ntwo\n"), ("b.txt", "x\n"), ("c.txt", "c\n")]);
    for (syntax, reply) in in_all_syntaxes("a.txt", "one", "two", "the second") {
        let previous = base.changes(&reply, &[]).unwrap();
        assert_eq!(base.changes(&reply, &previous).unwrap(), previous, "{syntax}");
    }
    let reply = patch("*** Delete File: b.txt\n*** Update File: c.txt\n*** Move to: d.txt\n@@\n-c\n+the new one");
    let previous = base.changes(&reply, &[]).unwrap();
    assert_eq!(base.changes(&reply, &previous).unwrap(), previous);
    // A file that the base does not have was never removed.
    assert!(matches!(base.changes(&patch("*** Delete File: z.txt"), &[]), Err(ReplyProblem::NoSuchFile { .. })));
}

#[test]
fn hunk_that_adds_a_syntax_error_is_refused_with_both_views() {
    let files = Files::of(&[("a.py", "a = f()\nb = g()\nc = 1\n")]);
    let problem = files.after(&block("a.py", "b = g()", "b = g())")).unwrap_err();
    let ReplyProblem::AddsSyntaxError { line: 2, before, after, .. } = &problem else { panic!("{problem:?}") };
    assert!(before.contains("   2| b = g()\n") && after.contains("   2| b = g())\n"), "{problem}");
    // One that was there before, one in a whole file, and one that a later hunk of the reply repairs.
    let broken = Files::of(&[("a.py", "a = f())\nb = 1\n")]);
    assert_eq!(broken.text_after("a.py", &block("a.py", "b = 1", "b = 2")).unwrap(), "a = f())\nb = 2\n");
    assert_eq!(files.text_after("a.py", "### a.py\n```\nx)\n```\n").unwrap(), "x)\n");
    let repaired = block("a.py", "b = g()", "b = g())") + &block("a.py", "b = g())", "b = h()");
    assert_eq!(files.text_after("a.py", &repaired).unwrap(), "a = f()\nb = h()\nc = 1\n");
}

#[test]
fn lines_of_a_file_that_look_like_an_edit_are_text() {
    let text = "one\n*** Begin Patch\n<<<<<<< SEARCH\n=======\n>>>>>>> REPLACE\n*** End Patch\ntwo\n";
    let files = Files::of(&[("a.txt", text)]);
    let hunk = "@@ -1,7 +1,7 @@\n one\n *** Begin Patch\n <<<<<<< SEARCH\n =======\n >>>>>>> REPLACE\n *** End Patch\n-two\n+2";
    assert_eq!(files.text_after("a.txt", &diff("a.txt", hunk)).unwrap(), text.replace("two", "2"));
    let body = "*** Update File: a.txt\n@@\n *** Begin Patch\n <<<<<<< SEARCH\n =======\n >>>>>>> REPLACE\n *** End Patch\n-two\n+2";
    assert_eq!(files.text_after("a.txt", &patch(body)).unwrap(), text.replace("two", "2"));
}

#[test]
fn rename_and_mode_do_not_hide_a_syntax_error() {
    let files = Files::of(&[("a.py", "a = f()\n")]);
    let broken = block("a.py", "a = f()", "a = f())");
    let mode = "```diff\ndiff --git a/a.py b/a.py\nold mode 100644\nnew mode 100755\n```\n";
    let rename = "```diff\ndiff --git a/a.py b/b.py\nrename from a.py\nrename to b.py\n```\n";
    for (after, path) in [("", "a.py"), (mode, "a.py"), (rename, "b.py")] {
        let problem = files.after(&format!("{broken}{after}")).unwrap_err();
        assert!(matches!(&problem, ReplyProblem::AddsSyntaxError { path: at, .. } if at == path), "{after}: {problem}");
    }
    let renamed = files.changes(rename, &[]).unwrap();
    let problem = files.changes(&block("b.py", "a = f()", "a = f())"), &renamed).unwrap_err();
    assert!(matches!(problem, ReplyProblem::AddsSyntaxError { .. }), "{problem}");
}

#[test]
fn new_path_of_a_renamed_file_is_checked() {
    let mut files = Files::of(&[("a.txt", "one\n"), ("b.txt", "one\n")]);
    files.files.insert("lfs.bin".into(), (b"oid 0\n".to_vec(), false));
    files.others.insert("lfs.bin".into(), NotWritableReason::Lfs);
    let moved = |to: &str, lines: &str| {
        patch(&format!("*** Delete File: a.txt\n*** Update File: a.txt\n*** Move to: {to}\n@@\n{lines}"))
    };
    // Only a file that an edit has written can be the renamed one.
    for to in ["lfs.bin", "b.txt"] {
        let problem = files.after(&moved(to, "-oid 0\n+oid 1")).unwrap_err();
        assert!(matches!(problem, ReplyProblem::NoSuchFile { .. }), "{to}: {problem}");
    }
}

#[test]
fn content_with_the_markers_of_an_edit_is_refused_unless_the_file_has_them() {
    let content = "text\n<<<<<<< HEAD\na\n=======\nb\n>>>>>>> branch\n";
    let reply = format!("### a.txt\n````\n{content}````\n");
    let problem = Files::of(&[("a.txt", "text\n")]).after(&reply).unwrap_err();
    assert!(matches!(&problem, ReplyProblem::Marker { line, .. } if line == "<<<<<<< HEAD"), "{problem}");
    let files = Files::of(&[("a.txt", "<<<<<<< SEARCH\n")]);
    assert_eq!(files.text_after("a.txt", &reply).unwrap(), content);
}

#[test]
fn large_file_may_be_edited_but_not_grow() {
    let line = "x".repeat(99) + "\n";
    let large = line.repeat(7_000) + "last\n";
    let files = Files::of(&[("a.txt", &large)]);
    assert_eq!(files.text_after("a.txt", &block("a.txt", "last", "end")).unwrap(), large.replace("last", "end"));
    let rename = "```diff\ndiff --git a/a.txt b/b.txt\nrename from a.txt\nrename to b.txt\n```\n";
    assert_eq!(files.text_after("b.txt", rename).unwrap(), large);
    let problem = files.after(&block("a.txt", "last", "longer")).unwrap_err();
    assert!(matches!(problem, ReplyProblem::TooLarge { .. }), "{problem}");
}

#[test]
fn hunks_are_counted_over_the_whole_reply() {
    let files = Files::of(&[("a.txt", "one\n")]);
    let hunks = "<<<<<<< SEARCH\nx\n=======\ny\n>>>>>>> REPLACE\n".repeat(300);
    let reply = format!("### a.txt\n```\n{hunks}```\n### b.txt\n```\n{hunks}```\n");
    assert_eq!(files.after(&reply).unwrap_err(), ReplyProblem::TooManyEdits { max: 512 });
}

#[test]
fn whole_file_after_its_hunks_is_refused() {
    let files = Files::of(&[("a.txt", "one\ntwo\n")]);
    let reply = block("a.txt", "one", "1") + "### a.txt\n```\n3\n```\n";
    assert_eq!(files.after(&reply).unwrap_err(), ReplyProblem::HunksAndWholeFile { path: "a.txt".into() });
}

#[test]
fn sizes_are_limited() {
    let files = Files::of(&[("a.txt", "one\n"), ("big.txt", &"x\n".repeat(5 << 20))]);
    let long = "x".repeat(cfq_edits::MAX_FILE_BYTES + 1);
    assert!(matches!(files.after(&format!("### b.txt\n```\n{long}\n```")), Err(ReplyProblem::TooLarge { .. })));
    assert!(matches!(files.after(&block("a.txt", "one", &long)), Err(ReplyProblem::TooLarge { .. })));
    assert!(matches!(files.after(&block("big.txt", "x", "y")), Err(ReplyProblem::BaseTooLarge { .. })));
    let many: String = (0..100).map(|n| format!("### f{n}.txt\n```\nx\n```\n")).collect();
    assert!(matches!(files.after(&many), Err(ReplyProblem::TooManyFiles { count: 100, .. })));
    let both = "### n.d\n```\nx\n```\n### n.d/m.txt\n```\nx\n```\n";
    assert!(matches!(files.after(both), Err(ReplyProblem::File(p)) if p.reason == NotWritableReason::FileAndFolder));
}

#[test]
fn unchanged_file_is_not_part_of_the_artifact() {
    let files = Files::of(&[("a.txt", "one\n")]);
    assert_eq!(files.after("### a.txt\n```\none\n```\n").unwrap_err(), ReplyProblem::NothingChanged);
    let previous: Vec<ChangedFile> = files.changes("### a.txt\n```\n1\n```\n### b.txt\n```\n2\n```\n", &[]).unwrap();
    let changed = files.changes("### a.txt\n```\none\n```\n", &previous).unwrap();
    assert_eq!(changed.iter().map(|f| f.path.as_str()).collect::<Vec<_>>(), ["b.txt"]);
}
