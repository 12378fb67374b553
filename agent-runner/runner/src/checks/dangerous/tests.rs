use super::*;

fn kinds(path: &str, text: &str) -> Vec<DangerKind> {
    dangers(path, text).unwrap().into_iter().map(|danger| danger.kind).collect()
}

fn added(path: &str, before: &str, after: &str) -> Vec<u32> {
    added_dangers(path, before, after).unwrap().into_iter().map(|danger| danger.line).collect()
}

#[test]
fn added_danger_is_not_hidden_by_a_similar_old_one() {
    let long = "x".repeat(120);
    let line = |end: &str| format!("subprocess.run(['echo', '{long}'], check=True); {end}\n");
    assert_eq!(added("a.py", &line("eval(a)"), &line("eval(b)")), [1], "equal in the first 100 characters");
    let spread = |path: &str| format!("subprocess.run(\n    ['rm', '-rf', '{path}'])\n");
    assert_eq!(added("a.py", &spread("/tmp/x"), &spread("/")), [1], "equal first lines");
    let chain = |path: &str| format!("fn f() {{ Command::new(\"rm\").arg(\"-rf\")\n.arg(\"{path}\").status(); }}\n");
    assert_eq!(added("a.rs", &chain("/tmp/x"), &chain("/")), [1], "equal beginnings");
    assert_eq!(added("a.py", "eval(a)\n", "eval(a); eval(b)\n"), [1]);
    assert_eq!(added("a.py", "eval(a)\n", "eval(a); eval(a)\n"), [1]);
    assert_eq!(added("a.sh", "rm -rf /tmp/x\n", "rm -rf /tmp/x; rm -rf /\n"), [1]);
    assert_eq!(added("a.sql", "DROP TABLE a;\n", "DROP TABLE a; DROP TABLE b;\n"), [1]);
    assert_eq!(added("a.php", "eval($a);\n", "eval($a); eval($b);\n"), [1, 1], "the rest of the line is part of it");
    assert_eq!(added("package.json", r#"{"scripts": {"a": "rm -rf ~/a"}}"#, r#"{"scripts": {"a": "rm -rf ~/"}}"#), [1]);
}

#[test]
fn moved_and_indented_dangers_are_not_added() {
    assert_eq!(added("a.py", "x = eval(a)\n", "try:\n    y = eval(a)\n"), Vec::<u32>::new());
    assert_eq!(added("a.py", "while True:\n    x += 1\n", "y = 1\nwhile True:\n    x += 2\n"), Vec::<u32>::new());
    assert_eq!(added("a.sh", "rm -rf /tmp/x\n", "if y; then\n  rm -rf /tmp/x\nfi\n"), Vec::<u32>::new());
}

#[test]
fn files_that_run_by_themselves_are_checked() {
    use DangerKind::*;
    for (path, bad, kind) in [
        (".github/workflows/ci.yml", "jobs:\n  a:\n    steps:\n      - run: rm -rf ~\n", DeletesFiles),
        (".github/workflows/ci.yml", "      - run: >-\n          rm -rf\n          $HOME\n", DeletesFiles),
        (".github/workflows/ci.yml", "      - run: psql -c 'DROP TABLE users'\n", DropsTable),
        (".gitlab-ci.yml", "test:\n  script:\n    - make && rm -rf /\n", DeletesFiles),
        ("deploy.yaml", "command:\n  - rm\n  - -rf\n  - /\n", DeletesFiles),
        (".envrc", "rm -rf ~/x\n", DeletesFiles),
        ("a.ipynb", r#"{"cells": [{"cell_type": "code", "source": "exec(x)"}]}"#, DynamicCode),
        ("site.pth", "./lib\nimport os; os.system('rm -rf /')\n", DeletesFiles),
        (".githooks/pre-commit", "#!/bin/sh\nrm -rf /\n", DeletesFiles),
        (".githooks/pre-push", "#!/usr/bin/env python3\nimport os\nexec(os.environ['X'])\n", DynamicCode),
        ("hooks/post-merge", "#!/usr/bin/node\neval(x)\n", DynamicCode),
        ("Makefile", "clean:\n\trm -rf $(HOME)/build\n", DeletesFiles),
        ("Makefile", "clean:\n\trm -rf $$HOME\n", DeletesFiles),
        ("package.json", r#"{"scripts": {"prepare": "rm -rf ${HOME}"}}"#, DeletesFiles),
    ] {
        assert_eq!(kinds(path, bad), [kind], "{path}: {bad}");
    }
    for (path, good) in [
        (".github/workflows/ci.yml", "      - run: >-\n          rm -rf\n          target\n      - run: ls /\n"),
        ("site.pth", "/usr/lib/x\n# import os; eval(x)\n"),
        ("Makefile", "clean:\n\trm -rf build\n"),
        ("hooks/readme", "eval(x)\n"),
    ] {
        assert_eq!(kinds(path, good), [], "{path}: {good}");
    }
}

#[test]
fn calls_without_a_grammar_that_run_strings_are_checked() {
    use DangerKind::*;
    for (path, bad, kind) in [
        ("a.c", "int main() { system(\"rm -rf /\"); }", DeletesFiles),
        ("a.c", "execl(\"/bin/rm\", \"rm\", \"-rf\", \"/\", NULL);", DeletesFiles),
        ("a.c", "#define CMD \"rm -rf\"\nsystem(CMD \" /\");", DeletesFiles),
        ("a.cpp", "auto s = std::system;\ns(\"rm -rf /\");", DeletesFiles),
        ("a.cpp", "const std::string x = \"rm -rf\";\nstd::system((x + \" /\").c_str());", DeletesFiles),
        ("A.java", "Runtime.getRuntime().exec(\"rm -rf /\");", DeletesFiles),
        ("A.java", "new ProcessBuilder(\"rm\", \"-rf\", \"/\").start();", DeletesFiles),
        ("A.cs", "Process.Start(\"rm\", \"-rf /\");", DeletesFiles),
        ("a.kt", "val x = \"rm -rf\"\nRuntime.getRuntime().exec(x + \" ~\")", DeletesFiles),
        ("A.java", "stmt.executeUpdate(\"DROP TABLE users\");", DropsTable),
        ("a.c", "sqlite3_exec(db, \"DROP TABLE users\", 0, 0, 0);", DropsTable),
        ("a.php", "<?php $db->query('DROP TABLE users');", DropsTable),
        ("a.rb", "connection.execute(\"DROP TABLE users\")", DropsTable),
        ("A.cs", "new SqlCommand(\"DROP TABLE \" + name, connection);", DropsTable),
        ("A.java", "stmt.execute(\"DELETE FROM users\");", DeletesAllRows),
    ] {
        assert_eq!(kinds(path, bad), [kind], "{bad}");
    }
    for (path, good) in [
        ("a.c", "printf(\"rm -rf /\");"),
        ("a.c", "// system(\"rm -rf /\");\nputs(\"system(\\\"rm -rf /\\\")\");"),
        ("a.c", "system(\"rm -rf build\");"),
        ("A.java", "stmt.execute(\"DELETE FROM users\" + \" WHERE id = 1\");"),
        ("A.java", "log.info(\"DROP TABLE users\");"),
    ] {
        assert_eq!(kinds(path, good), [], "{good}");
    }
}

#[test]
fn bidirectional_control_characters_are_found_in_sources() {
    // The comment's end is shown before the condition (CVE-2021-42574).
    let trojan = "def f():\n    access = 'user\u{202e} \u{2066}# check\u{2069} \u{2066}'\n";
    for path in ["a.py", "a.c", "a.json", "Makefile", "a.html"] {
        assert_eq!(kinds(path, trojan), [DangerKind::BidiControl], "{path}");
    }
    let code = dangers("a.py", trojan).unwrap().remove(0).code;
    assert_eq!(code, "access = 'user<U+202E> <U+2066># check<U+2069> <U+2066>'");
    assert_eq!(added("a.py", trojan, &format!("x = 1\n{trojan}")), Vec::<u32>::new());
    assert_eq!(kinds("a.md", trojan), []);
    assert_eq!(kinds("a.py", "x = 'שלום'  # \u{200f}\n"), []);
}
