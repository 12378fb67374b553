//! Random edits: the diff between two texts, applied to the first, gives the second.

use cfq_edits::{Change, Edit, Hunk, HunkLine, Position};
use proptest::prelude::*;
use similar::TextDiff;

use super::files::Files;

/// Texts of few different lines, so that hunks have similar places, with all line ends. Without lines that look like
/// headers, because some diffs of the library have wrong counts; `git_apply` tests them.
fn texts() -> impl Strategy<Value = String> {
    "((a|b|  b|- c|\\+ d|@@ e|)(\n|\n|\n|\r\n)){0,25}(a|x|b)?"
}

fn fenced(diff: &str) -> String {
    format!("```diff\n{diff}```\n")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn diff_applied_to_the_old_text_gives_the_new_one(old in texts(), new in texts(), context in 1_usize..5) {
        let files = Files::of(&[("f.txt", &old)]);
        let diff = TextDiff::from_lines(&old, &new);
        let diff = diff.unified_diff().context_radius(context).header("a/f.txt", "b/f.txt").to_string();
        if old == new {
            return Ok(());
        }
        // A whole reply with CRLF is taken for one with LF.
        let plain = format!("The change:\n{}", fenced(&diff));
        // A hunk without context has no place in a file that is not empty.
        let is_pure_insertion = diff.lines().any(|line| line.starts_with("@@ -") && line.contains(",0 +"));
        prop_assume!(!is_pure_insertion || old.is_empty());
        let after = files.text_after("f.txt", &plain);
        prop_assert_eq!(after.as_deref(), Ok(new.as_str()), "{}", diff);
    }

    #[test]
    fn whole_file_gives_the_new_text(old in "([abc ]{0,3}\n){0,20}", new in "([abc ]{0,3}\n){0,20}[abc]\n") {
        prop_assume!(old != new);
        let files = Files::of(&[("f.txt", &old)]);
        let after = files.text_after("f.txt", &format!("### f.txt\n````\n{new}````\n"));
        prop_assert_eq!(after.as_deref(), Ok(new.as_str()));
    }

    #[test]
    fn unique_lines_are_replaced_and_all_others_kept(count in 2_usize..40, at in 0_usize..40, ends in any::<u64>()) {
        let at = at % count;
        let line = |n: usize| {
            let blanks = " ".repeat(n % 3);
            let end = if ends >> n & 1 == 1 { "\r\n" } else { "\n" };
            format!("line {n}{blanks}{end}")
        };
        let old: String = (0..count).map(line).collect();
        let files = Files::of(&[("f.txt", &old)]);
        let edit = format!("### f.txt\n```\n<<<<<<< SEARCH\nline {at}\n=======\nnew\n>>>>>>> REPLACE\n```\n");
        let after = files.text_after("f.txt", &edit).unwrap();
        let end = if line(at).ends_with("\r\n") { "\r\n" } else { "\n" };
        let new: String = (0..count).map(|n| if n == at { format!("new{end}") } else { line(n) }).collect();
        prop_assert_eq!(after, new);
    }

    #[test]
    fn no_edit_panics(old in texts(), lines in prop::collection::vec((0_u8..3, "(a|b|  b||x)"), 0..8), place in 0_usize..30, kind in 0_u8..5) {
        let line = |(kind, text): (u8, String)| match kind {
            0 => HunkLine::Keep(text),
            1 => HunkLine::Remove(text),
            _ => HunkLine::Add(text),
        };
        let position = match kind {
            0 => Position::Unstated,
            1 => Position::Line(place),
            2 => Position::OldLine(place),
            3 => Position::After(vec!["a".into(), "b".into()]),
            _ => Position::AtEndAfter(vec!["b".into()]),
        };
        let hunk = Hunk {
            lines: lines.into_iter().map(line).collect(),
            position,
            final_newline: (place % 3 == 0).then_some(place % 2 == 0),
            states_line_ends: place % 5 == 0,
            other_readings: Vec::new(),
            has_marks: place % 7 == 0,
        };
        let change = Change::Modify { hunks: vec![hunk.clone(), hunk], rename_to: None, executable: None, in_order: place % 2 == 0 };
        let files = Files::of(&[("f.txt", &old)]);
        let _ = cfq_edits::apply(&[Edit::new("f.txt", change)], &[], &files, &super::files::Brackets);
    }
}
