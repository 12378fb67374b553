//! Comparison with `git apply`: on a patch that git made, both give the same bytes; on a patch for another version of
//! the file, a result of both is the same.

use std::path::Path;
use std::process::{Command, Output};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::files::Files;

/// Runs git in `folder`, without the settings of the user.
fn git(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new("git");
    command.current_dir(folder).args(arguments);
    command.env("GIT_CONFIG_NOSYSTEM", "1").env("GIT_CONFIG_GLOBAL", "/dev/null").env("GIT_CEILING_DIRECTORIES", "/");
    command.output().unwrap()
}

/// The patch from `old` to `new`, made by git; empty if they are equal.
fn patch(folder: &Path, old: &str, new: &str, context: usize) -> String {
    for (side, text) in [("a", old), ("b", new)] {
        std::fs::create_dir_all(folder.join(side)).unwrap();
        std::fs::write(folder.join(side).join("f.txt"), text).unwrap();
    }
    let context = format!("-U{context}");
    let output = git(folder, &["diff", "--no-index", "--no-prefix", &context, "a/f.txt", "b/f.txt"]);
    String::from_utf8(output.stdout).unwrap()
}

/// The text that `git apply` makes of `old`; `None` if it refuses the patch.
fn applied_by_git(folder: &Path, old: &str, patch: &str) -> Option<String> {
    std::fs::write(folder.join("f.txt"), old).unwrap();
    std::fs::write(folder.join("p"), patch).unwrap();
    let output = git(folder, &["apply", "p"]);
    output.status.success().then(|| std::fs::read_to_string(folder.join("f.txt")).unwrap())
}

fn texts() -> impl Strategy<Value = String> {
    "((a|b|  b|-- c|\\+\\+ d|g|)(\n|\n|\r\n)){1,20}(a|x)?"
}

#[test]
fn clean_patches_give_the_same_bytes_as_git_apply() {
    let folder = tempfile::tempdir().unwrap();
    let mut runner = TestRunner::new(Config::with_cases(300));
    let inputs = (texts(), texts(), 1_usize..5);
    let outcome = runner.run(&inputs, |(old, new, context)| {
        let patch = patch(folder.path(), &old, &new, context);
        let Some(by_git) = applied_by_git(folder.path(), &old, &patch).filter(|_| !patch.is_empty()) else {
            return Ok(());
        };
        prop_assert_eq!(&by_git, &new);
        let reply = format!("The change:\n```diff\n{patch}```\n");
        let after = Files::of(&[("f.txt", &old)]).text_after("f.txt", &reply);
        prop_assert_eq!(after.as_deref(), Ok(new.as_str()), "{}", patch);
        Ok(())
    });
    outcome.unwrap();
}

#[test]
fn patch_of_another_version_gives_the_same_bytes_or_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut runner = TestRunner::new(Config::with_cases(300));
    // Lines that differ, so that a hunk has few places, and an old version with lines before and after them.
    let lines = prop::collection::vec(0_u8..40, 6..16);
    let inputs = (lines, 0_usize..6, 0_usize..4, 0_usize..4);
    let both = std::cell::Cell::new(0);
    let outcome = runner.run(&inputs, |(lines, at, above, below)| {
        let text = |lines: &[String]| lines.iter().map(|line| format!("{line}\n")).collect::<String>();
        let old: Vec<String> = lines.iter().map(|n| format!("line {n}")).collect();
        let mut new = old.clone();
        new[at] = "changed".to_owned();
        let patch = patch(folder.path(), &text(&old), &text(&new), 3);
        let more = |name: &str, count: usize| (0..count).map(|n| format!("{name} {n}")).collect::<Vec<_>>();
        let other = text(&[more("above", above), old, more("below", below)].concat());
        let by_git = applied_by_git(folder.path(), &other, &patch);
        let ours = Files::of(&[("f.txt", &other)]).text_after("f.txt", &format!("```diff\n{patch}```\n"));
        if let (Some(by_git), Ok(ours)) = (by_git, ours) {
            prop_assert_eq!(by_git, ours, "{}", patch);
            both.set(both.get() + 1);
        }
        Ok(())
    });
    outcome.unwrap();
    assert!(both.get() > 100, "only {} patches were applied by both", both.get());
}
