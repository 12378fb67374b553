//! Comparison with `git apply`: on a patch that git made, both give the same bytes; on a patch for another version of
//! the file, a result of both is the same.

use std::os::unix::fs::PermissionsExt;
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
    let count = std::cell::Cell::new(0);
    let outcome = runner.run(&inputs, |(old, new, context)| {
        let patch = patch(folder.path(), &old, &new, context);
        let Some(by_git) = applied_by_git(folder.path(), &old, &patch).filter(|_| !patch.is_empty()) else {
            return Ok(());
        };
        count.set(count.get() + 1);
        prop_assert_eq!(&by_git, &new);
        let reply = format!("The change:\n```diff\n{patch}```\n");
        let after = Files::of(&[("f.txt", &old)]).text_after("f.txt", &reply);
        prop_assert_eq!(after.as_deref(), Ok(new.as_str()), "{}", patch);
        Ok(())
    });
    outcome.unwrap();
    assert!(count.get() > 250, "git applied only {} patches", count.get());
}

#[test]
fn patches_of_several_files_give_the_same_files_as_git_apply() {
    let folder = tempfile::tempdir().unwrap();
    let (work, other) = (folder.path().join("work"), folder.path().join("other"));
    let long: String = (0..40).map(|n| format!("line {n}\n")).collect();
    std::fs::create_dir_all(&work).unwrap();
    assert!(git(&work, &["init", "-q"]).status.success());
    let write = |path: &str, text: &str, mode: u32| {
        let path = work.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    for (path, text) in
        [("keep", "a\n"), ("change", &long), ("rename", &long), ("move", &long), ("old", "x\ny\n"), ("mode", "m\n")]
    {
        write(path, text, 0o644);
    }
    let commit = ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "m"];
    assert!(git(&work, &["add", "-A"]).status.success() && git(&work, &commit).status.success());
    assert!(git(folder.path(), &["clone", "-q", "work", "other"]).status.success());
    write("change", &long.replace("line 3\n", "").replace("line 30", "line thirty"), 0o644);
    for (from, to) in [("rename", "dir/renamed"), ("move", "moved")] {
        assert!(work.join(from).exists());
        write(to, &if to == "moved" { long.replace("line 20", "twenty") } else { long.clone() }, 0o644);
        std::fs::remove_file(work.join(from)).unwrap();
    }
    std::fs::remove_file(work.join("old")).unwrap();
    write("mode", "m\n", 0o755);
    write("new/file", "n", 0o644);
    write("new/run", "r\n", 0o755);
    write("new/empty", "", 0o644);
    assert!(git(&work, &["add", "-A"]).status.success());
    let patch = git(&work, &["diff", "--cached", "-M"]);
    let patch = String::from_utf8(patch.stdout).unwrap();
    for part in ["rename from", "new file mode 100755", "deleted file mode", "new mode 100755", "similarity index 100%"]
    {
        assert!(patch.contains(part), "{patch}");
    }
    std::fs::write(other.join("../p"), &patch).unwrap();
    let files = read(&other);
    assert!(git(&other, &["apply", "../p"]).status.success());
    let after = files.after(&format!("```diff\n{patch}```\n")).unwrap();
    assert_eq!(after, read(&other));
}

/// The files of a folder, without its git folder.
fn read(folder: &Path) -> Files {
    let mut files = Files::default();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(next).unwrap().flatten().filter(|entry| entry.file_name() != ".git") {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let executable = entry.metadata().unwrap().permissions().mode() & 0o100 != 0;
            let name = path.strip_prefix(folder).unwrap().to_str().unwrap().to_owned();
            files.files.insert(name, (std::fs::read(&path).unwrap(), executable));
        }
    }
    files
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
