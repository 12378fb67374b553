//! `cfq checks`: the checks of a project without a task and without a running cfq.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use cfq_tests::repo::UserRepo;
use cfq_tests::{binary, signal};

/// The folders of a user. As root, checks run as `nobody`.
fn home() -> tempfile::TempDir {
    let home = tempfile::Builder::new().prefix("cfq-test-").tempdir().unwrap();
    std::fs::create_dir(home.path().join("config")).unwrap();
    if std::fs::metadata("/proc/self").unwrap().uid() == 0 {
        let dir = home.path().join("checks");
        std::fs::create_dir(&dir).unwrap();
        for path in [home.path(), &dir] {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o711)).unwrap();
        }
        let config = format!("[checks]\ndir = {dir:?}\naccount = {{ uid = 65534, gid = 65534 }}\n");
        std::fs::write(home.path().join("config/cfq.toml"), config).unwrap();
    }
    home
}

fn command(home: &Path, repo: &UserRepo, args: &[&str]) -> Command {
    let mut command = Command::new(binary::cfq());
    command.arg("checks").args(args).current_dir(repo.path()).stdin(Stdio::null());
    for (name, folder) in [("CFQ_DATA", "data"), ("CFQ_CONFIG", "config"), ("CFQ_CACHE", "cache")] {
        command.env(name, home.join(folder));
    }
    command
}

/// Runs `cfq checks ARGS`; returns the exit code, stdout and stderr.
fn checks(home: &Path, repo: &UserRepo, args: &[&str]) -> (i32, String, String) {
    let Output { status, stdout, stderr } = command(home, repo, args).output().unwrap();
    (status.code().unwrap(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

/// Number of checkouts that exist.
fn checkouts(home: &Path) -> usize {
    let roots = ["cache/checks", "checks"].map(|folder| std::fs::read_dir(home.join(folder)));
    let roots = roots.into_iter().flatten().flatten().flatten();
    let roots = roots.filter(|entry| entry.file_name().to_string_lossy().starts_with("cfq-checks-"));
    roots.map(|root| std::fs::read_dir(root.path()).map_or(0, Iterator::count)).sum()
}

/// A script that writes a report of two tests, of which the second fails unless `fixed` exists.
const REPORTING: &str = "{ echo '<testsuite name=\"s\"><testcase name=\"a\"/><testcase name=\"b\">'\n\
                         [ -e fixed ] || echo '<failure message=\"b is broken\"/>'\n\
                         echo '</testcase></testsuite>'; } >r.xml\n[ -e fixed ]\n";
const DECLARED: &str = "[[check]]\nname = \"tests\"\nrun = [\"sh\", \"t.sh\"]\nreport = \"r.xml\"\n\
                        [[check]]\nname = \"style\"\nrun = [\"true\"]\n";

#[test]
fn checks_of_a_commit_run_without_a_task() {
    let (home, repo) = (home(), UserRepo::with_uncommitted_changes());
    let run = |args: &[&str]| checks(home.path(), &repo, args);
    let (code, _, error) = run(&["run"]);
    assert!(code == 2 && error.contains("declares no checks: `cfq checks init` writes .cfq/checks.toml"), "{error}");
    repo.commit(&[("t.sh", REPORTING), (".cfq/checks.toml", DECLARED)]);
    let before = repo.fingerprint().commit;
    let (code, listed, error) = run(&["show"]);
    assert_eq!((code, error.as_str()), (0, ""));
    assert_eq!(listed, "tests: sh t.sh (at most 600 s, report r.xml)\nstyle: true (at most 600 s)\n");
    let untouched = repo.fingerprint();
    let (code, shown, error) = run(&["run"]);
    assert_eq!(code, 4, "{shown}{error}");
    assert!(
        shown.starts_with("tests failed (exit code 1) in ") && shown.contains(", 2 tests); failed: s::b\n"),
        "{shown}"
    );
    assert!(
        shown.contains("\nstyle passed in ") && error.starts_with("1 of 2 checks failed or did not run at commit "),
        "{shown}{error}"
    );
    let (code, shown, _) = run(&["run", "style"]);
    assert!(code == 0 && !shown.contains("tests"), "{shown}");
    let (code, _, error) = run(&["run", "styel"]);
    assert!(code == 2 && error.contains("there is no check \"styel\"; the commit declares: tests, style"), "{error}");
    // Compared with a commit on which the test fails too.
    let (code, shown, _) = run(&["run", "tests", "--base", &before]);
    assert!(code == 0 && shown.contains("known failures: s::b"), "{shown}");
    assert_eq!(repo.fingerprint(), untouched);
    repo.commit(&[("fixed", "")]);
    let fixed = repo.fingerprint().commit;
    let (code, shown, _) = run(&["run", "tests", "--commit", &fixed, "--json"]);
    let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(
        (code, &shown["passed"], &shown["tests"], &shown["commit"]),
        (0, &true.into(), &2.into(), &fixed.as_str().into())
    );
    assert_eq!(checkouts(home.path()), 0);
}

#[test]
fn missing_program_is_named_and_the_other_checks_run() {
    let (home, repo) = (home(), UserRepo::with_uncommitted_changes());
    let run = |args: &[&str]| checks(home.path(), &repo, args);
    let declared =
        "[[check]]\nname = \"lint\"\nrun = [\"no-such-linter\"]\n[[check]]\nname = \"style\"\nrun = [\"true\"]\n";
    repo.commit(&[(".cfq/checks.toml", declared)]);
    let base = repo.fingerprint().commit;
    for args in [&["run"][..], &["run", "--base", &base]] {
        let (code, shown, error) = run(args);
        let expected =
            "lint did not run: cannot run the check `lint`: no-such-linter cannot be executed in the sandbox";
        assert!(code == 4 && shown.starts_with(expected) && shown.contains("\nstyle passed in "), "{shown}{error}");
        assert!(error.starts_with("1 of 2 checks failed or did not run at commit "), "{error}");
    }
    let (_, shown, _) = run(&["run", "lint", "--json"]);
    let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    assert!(shown["passed"] == false && shown["problem"].as_str().unwrap().contains("install it"), "{shown}");
    repo.commit(&[(".cfq/checks.toml", "[[check]]\nname = \"lint\"\nruns = 1\n")]);
    let (code, _, error) = run(&["show"]);
    assert!(code == 2 && error.contains(".cfq/checks.toml is invalid: line 3: unknown field `runs`"), "{error}");
}

#[test]
fn interrupted_check_leaves_no_checkout() {
    let (home, repo) = (home(), UserRepo::with_uncommitted_changes());
    repo.commit(&[(".cfq/checks.toml", "[[check]]\nname = \"slow\"\nrun = [\"sleep\", \"600\"]\n")]);
    let mut running =
        command(home.path(), &repo, &["run"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    while checkouts(home.path()) == 0 {
        assert!(std::time::Instant::now() < deadline, "no checkout");
        std::thread::sleep(Duration::from_millis(20));
    }
    signal::send(running.id(), libc::SIGINT);
    assert_eq!(running.wait().unwrap().code(), Some(130));
    assert_eq!(checkouts(home.path()), 0);
}

#[test]
fn proposed_checks_are_written_once() {
    let (home, repo) = (home(), UserRepo::with_uncommitted_changes());
    let run = |args: &[&str]| checks(home.path(), &repo, args);
    let (code, _, error) = run(&["init"]);
    assert!(code == 2 && error.contains("no known test runner was found"), "{error}");
    std::fs::write(repo.path().join("tox.ini"), "").unwrap();
    let (code, printed, _) = run(&["init", "--print"]);
    assert!(code == 0 && printed.contains("run = [\"python3\", \"-m\", \"unittest\"]"), "{printed}");
    let path = repo.path().join(".cfq/checks.toml");
    assert!(!path.exists());
    let (code, _, error) = run(&["init"]);
    assert_eq!((code, std::fs::read_to_string(&path).unwrap().trim_end()), (0, printed.trim_end()), "{error}");
    std::fs::write(&path, "mine").unwrap();
    let (code, _, error) = run(&["init"]);
    assert!(code == 2 && error.contains("exists already"), "{error}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "mine");
}
