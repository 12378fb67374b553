//! Detects dangerous code in languages with a tree-sitter grammar.

use tree_sitter::Node;

use super::bindings::{self, operands};
use super::{Danger, DangerKind, Lines, WorkLimit, literals, loops};
use crate::checks::language::Language;
use crate::checks::syntax::advance;

/// Maximum depth of a syntax tree; hand-written code stays far below it.
const MAX_SYNTAX_DEPTH: u32 = 5_000;
/// Maximum length of a function's qualified name, in bytes; longer names are chains of calls.
const MAX_NAME_BYTES: usize = 200;

/// Returns the dangers in `text`, in document order.
pub(super) fn dangers(language: Language, text: &str, work: &WorkLimit) -> Vec<Danger> {
    let Ok(tree) = language.parse(text) else {
        work.exceed();
        return Vec::new();
    };
    let lines = Lines::new(text);
    let bindings = bindings::of(tree.root_node(), text, work);
    let mut found = Vec::new();
    let mut cursor = tree.root_node().walk();
    loop {
        let node = cursor.node();
        if !work.take(1) || cursor.depth() > MAX_SYNTAX_DEPTH {
            work.exceed();
            break;
        }
        let row = node.start_position().row;
        if loops::is_infinite(language, node, text, work) {
            found.push(Danger::new(DangerKind::EndlessLoop, &lines, row, lines.line(row)));
        }
        if let Some(callee) = callee(node, text) {
            // `Command::new("rm").arg("-rf")`: the arguments are spread over the method chain.
            let is_chain = literals::last_component(&callee) == "new";
            let call = if is_chain { method_chain(node, work) } else { node };
            let arguments = node.child_by_field_name("arguments").filter(|_| !is_chain).unwrap_or(call);
            let mut kinds = Vec::new();
            for name in bindings.names(&callee) {
                if is_dynamic_code(language, node, name) {
                    kinds.push(DangerKind::DynamicCode);
                }
                if literals::runs_strings(name) {
                    let operands = operands(arguments, text, work);
                    kinds.extend(literals::dangers_in_arguments(name, &operands, text, &bindings, work));
                }
            }
            kinds.sort_unstable();
            kinds.dedup();
            let code = text.get(call.byte_range()).unwrap_or_default();
            if !kinds.is_empty() && work.take(code.len()) {
                found.extend(kinds.into_iter().map(|kind| Danger::new(kind, &lines, row, code)));
            }
        }
        if !advance(&mut cursor, true) {
            break;
        }
    }
    found
}

/// Full name of the function, constructor or macro that a node invokes; `None` for other nodes.
fn callee(node: Node<'_>, text: &str) -> Option<String> {
    let field = match node.kind() {
        "call" | "call_expression" => "function",
        "new_expression" => "constructor",
        "macro_invocation" => "macro",
        _ => return None,
    };
    let name = text.get(node.child_by_field_name(field)?.byte_range())?;
    // Only the last component of a long chain of calls is needed.
    let name = &name[name.floor_char_boundary(name.len().saturating_sub(MAX_NAME_BYTES))..];
    Some(name.chars().filter(|c| !c.is_whitespace()).collect())
}

fn is_dynamic_code(language: Language, node: Node<'_>, name: &str) -> bool {
    match language {
        Language::Python => matches!(
            name,
            "eval" | "exec" | "builtins.eval" | "builtins.exec" | "__builtins__.eval" | "__builtins__.exec"
        ),
        Language::JavaScript | Language::TypeScript | Language::Tsx => {
            matches!(name, "eval" | "window.eval" | "globalThis.eval")
                || (name == "Function" && matches!(node.kind(), "new_expression" | "call_expression"))
        }
        // Neither language has eval; their `exec` starts a program and is checked as a command.
        Language::Rust | Language::Go => false,
    }
}

/// Outermost call of the method chain that begins with `node`.
fn method_chain<'t>(node: Node<'t>, work: &WorkLimit) -> Node<'t> {
    let mut top = node;
    while let Some(parent) = top.parent().filter(|_| work.take(1)) {
        match parent.kind() {
            "field_expression" | "call_expression" | "member_expression" | "await_expression" | "try_expression" => {
                top = parent
            }
            _ => break,
        }
    }
    top
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(language: Language, text: &str) -> Vec<DangerKind> {
        dangers(language, text, &WorkLimit::default()).into_iter().map(|d| d.kind).collect()
    }

    #[test]
    fn infinite_loops_are_found_and_ending_loops_are_not() {
        use Language::*;
        for (language, infinite) in [
            (Python, "while True:\n    x += 1\n"),
            (Python, "while 1:\n    for a in b:\n        break\n"),
            (Python, "while True:\n    def f():\n        return 1\n"),
            (JavaScript, "while (true) { x++ }"),
            (JavaScript, "for (;;) { switch (x) { case 1: break } }"),
            (TypeScript, "do { x++ } while (true)"),
            (Rust, "fn f() { loop { x += 1; } }"),
            (Rust, "fn f() { while true { for a in b { break; } } }"),
            (Go, "package a\nfunc f() { for { x++ } }"),
            (Go, "package a\nfunc f() { for ;; { x++ } }"),
        ] {
            assert_eq!(kinds(language, infinite), [DangerKind::EndlessLoop], "{infinite}");
        }
        for (language, ending) in [
            (Python, "while True:\n    if x:\n        break\n"),
            (Python, "def f():\n    while True:\n        yield 1\n"),
            (Python, "async def f():\n    while True:\n        await g()\n"),
            (Python, "while True:\n    raise E\n"),
            (Python, "while x:\n    x -= 1\n"),
            (JavaScript, "for (;;) { if (x) return }"),
            (JavaScript, "a: for (;;) { for (;;) { break a } }"),
            (JavaScript, "for (let i = 0; i < 3; i++) { }"),
            (Rust, "fn f() { loop { if x { break } } }"),
            (Rust, "fn f() -> R { loop { g()?; } }"),
            (Rust, "fn f() { 'a: loop { loop { break 'a; } } }"),
            (Go, "package a\nfunc f() { for { select { case <-c: } } }"),
            (Go, "package a\nfunc f() { for i := 0; i < 3; i++ { } }"),
            (Go, "package a\nfunc f() { for _, x := range y { } }"),
            (Go, "package a\nfunc f() { for x < 3 { } }"),
        ] {
            assert_eq!(kinds(language, ending), [], "{ending}");
        }
    }

    #[test]
    fn dynamic_code_is_found_in_calls_only() {
        use Language::*;
        for (language, bad) in
            [(Python, "eval(x)"), (Python, "y = [exec(z)]"), (JavaScript, "eval(x)"), (TypeScript, "new Function('a')")]
        {
            assert_eq!(kinds(language, bad), [DangerKind::DynamicCode], "{bad}");
        }
        for (language, good) in [
            (Python, "# eval(x)\n"),
            (Python, "print('eval(x)')"),
            (Python, "model.eval()"),
            (Python, "def evaluate(x):\n    return x\n"),
            (JavaScript, "/a/.exec(s)"),
            (JavaScript, "// eval(x)\n"),
            (Go, "package a\nfunc f() { exec.Command(\"ls\") }"),
        ] {
            assert_eq!(kinds(language, good), [], "{good}");
        }
    }

    #[test]
    fn strings_are_checked_only_in_calls_that_run_them() {
        use Language::*;
        for (language, bad) in [
            (Python, "os.system('rm -rf /')"),
            (Python, "subprocess.run(['rm', '-rf', '/'])"),
            (Python, "subprocess.run(f\"rm -rf ~/{x}\", shell=True)"),
            (JavaScript, "execSync(`rm -rf ~`)"),
            (Rust, "fn f() { Command::new(\"rm\").arg(\"-rf\").arg(\"/\").status(); }"),
            (Go, "package a\nfunc f() { exec.Command(\"rm\", \"-rf\", \"/\").Run() }"),
        ] {
            assert_eq!(kinds(language, bad), [DangerKind::DeletesFiles], "{bad}");
        }
        assert_eq!(kinds(Python, "cursor.execute('DROP TABLE users')"), [DangerKind::DropsTable]);
        assert_eq!(kinds(JavaScript, "db.query(\"DELETE FROM users;\")"), [DangerKind::DeletesAllRows]);
        assert_eq!(kinds(Python, "cursor.execute('DELETE FROM users WHERE id = %s', x)"), []);
        for bad in ["DELETE FROM users RETURNING id;", "DELETE FROM a USING b;", "DELETE FROM users"] {
            assert_eq!(kinds(Python, &format!("cursor.execute('{bad}')")), [DangerKind::DeletesAllRows], "{bad}");
        }
        assert_eq!(kinds(Python, "client.text('please delete from the list all that is old')"), []);
        for good in
            ["print('rm -rf /')", "x = 'DROP TABLE users'", "'''rm -rf /'''", "# rm -rf /", "raise E('rm -rf /')"]
        {
            assert_eq!(kinds(Python, good), [], "{good}");
        }
    }

    #[test]
    fn constants_and_aliases_are_followed_one_step() {
        use Language::*;
        for (language, bad) in [
            (Python, "x = 'rm -rf'\nos.system(x + ' /')"),
            (Python, "X = 'ls'\nX = 'rm -rf'\nsubprocess.run(X + ' ~', shell=True)"),
            (Python, "cmd = ['rm', '-rf', '/']\nsubprocess.run(cmd)"),
            (Python, "from os import system as s\ns('rm -rf /')"),
            (Python, "s = os.system\ns('rm -rf /')"),
            (Python, "os.system('rm -r'\n  'f /')"),
            (Python, "os.execvp('rm', ['rm', '-rf', '/'])"),
            (JavaScript, "const x = 'rm -rf'; execSync(x + ' /')"),
            (JavaScript, "import { execSync as e } from 'child_process'; e('rm -rf /')"),
            (JavaScript, "const { exec: e } = require('child_process'); e('rm -rf /')"),
            (TypeScript, "const e = cp.execSync; e('rm -rf /')"),
            (Rust, "const P: &str = \"/\"; fn f() { Command::new(\"rm\").arg(\"-rf\").arg(P).status(); }"),
            (Rust, "use std::process::Command as C; fn f() { C::new(\"rm\").args([\"-rf\", \"/\"]).status(); }"),
            (Go, "package a\nfunc f() { x := \"/\"; exec.Command(\"rm\", \"-rf\", x).Run() }"),
            (Go, "package a\nfunc f() { run := exec.Command; run(\"rm\", \"-rf\", \"/\") }"),
        ] {
            assert_eq!(kinds(language, bad), [DangerKind::DeletesFiles], "{bad}");
        }
        for (language, bad) in [
            (Python, "e = eval\ne(x)"),
            (Python, "from builtins import exec as run\nrun(x)"),
            (JavaScript, "const e = eval; e(x)"),
        ] {
            assert_eq!(kinds(language, bad), [DangerKind::DynamicCode], "{bad}");
        }
        assert_eq!(kinds(Python, "q = 'DROP TABLE'\ndb.execute(q + ' users')"), [DangerKind::DropsTable]);
        assert_eq!(kinds(Python, "db.execute('DELETE FROM ' + table)"), [DangerKind::DeletesAllRows]);
        for good in [
            "db.execute('DELETE FROM users' ' WHERE id = 1')",
            "db.execute('DELETE FROM ' + table + ' WHERE id = 1')",
            "x = 'rm -rf'\nprint(x + ' /')",
            "x = 'rm -rf'\nos.system(x + ' build')",
            "run = model.eval\nrun(x)",
        ] {
            assert_eq!(kinds(Python, good), [], "{good}");
        }
    }

    #[test]
    fn two_dangers_of_a_line_are_both_found() {
        assert_eq!(kinds(Language::Python, "eval(a); eval(b)"), [DangerKind::DynamicCode; 2]);
    }

    #[test]
    fn quadratic_code_exceeds_the_work_limit() {
        for code in [
            format!("{}1{}", "run(".repeat(60_000), ")".repeat(60_000)),
            format!("x{}", ".run(eval(x))".repeat(30_000)),
            format!("{}{}", "while (1) {".repeat(30_000), "}".repeat(30_000)),
        ] {
            let work = WorkLimit::default();
            dangers(Language::JavaScript, &code, &work);
            assert!(work.is_exceeded(), "{}", &code[..20]);
        }
    }
}
