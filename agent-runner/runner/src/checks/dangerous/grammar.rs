//! Detects dangerous code in languages with a tree-sitter grammar.

use tree_sitter::Node;

use super::{Danger, DangerKind, danger_at, loops, shell, sql};
use crate::checks::language::Language;
use crate::checks::syntax::advance;

/// Names of functions that run their string arguments as a shell command; only the last component of a qualified name.
const SHELL_CALLS: [&str; 24] = [
    "system",
    "popen",
    "Popen",
    "run",
    "call",
    "check_call",
    "check_output",
    "getoutput",
    "getstatusoutput",
    "create_subprocess_shell",
    "create_subprocess_exec",
    "spawn",
    "spawnSync",
    "exec",
    "execSync",
    "execFile",
    "execFileSync",
    "execa",
    "execaCommand",
    "$",
    "new",
    "Command",
    "CommandContext",
    "sh",
];

/// Names of functions and macros that run their string arguments as database statements; only the last component of a
/// qualified name.
const DATABASE_CALLS: [&str; 24] = [
    "execute",
    "executemany",
    "executescript",
    "execute_batch",
    "batch_execute",
    "exec",
    "Exec",
    "ExecContext",
    "MustExec",
    "query",
    "Query",
    "QueryRow",
    "QueryContext",
    "query_as",
    "query_scalar",
    "raw",
    "Raw",
    "sql",
    "text",
    "run",
    "prepare",
    "Prepare",
    "unsafe",
    "$queryRawUnsafe",
];

/// Returns the dangers in `text`, in document order.
pub(super) fn dangers(language: Language, text: &str) -> Vec<Danger> {
    let Some(tree) = language.parser().and_then(|mut parser| parser.parse(text, None)) else { return Vec::new() };
    let mut found = Vec::new();
    let mut cursor = tree.root_node().walk();
    loop {
        let node = cursor.node();
        let row = node.start_position().row;
        if loops::is_infinite(language, node, text) {
            found.push(danger_at(DangerKind::EndlessLoop, text, row));
        }
        if let Some(name) = callee(node, text) {
            if is_dynamic_code(language, node, &name) {
                found.push(danger_at(DangerKind::DynamicCode, text, row));
            }
            found.extend(dangers_in_strings(node, text, &name).map(|kind| danger_at(kind, text, row)));
        }
        if !advance(&mut cursor, true) {
            break;
        }
    }
    found.dedup();
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
    let name = node.child_by_field_name(field)?;
    Some(text.get(name.byte_range())?.chars().filter(|c| !c.is_whitespace()).collect())
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

/// Dangers in the string arguments of a call to `name`.
fn dangers_in_strings(node: Node<'_>, text: &str, name: &str) -> impl Iterator<Item = DangerKind> {
    let last = name.rsplit(['.', ':']).next().unwrap_or(name);
    let mut found = Vec::new();
    let (shell, database) = (SHELL_CALLS.contains(&last), DATABASE_CALLS.contains(&last));
    if shell || database {
        // `Command::new("rm").arg("-rf")`: the arguments are spread over the method chain.
        let call = if last == "new" { method_chain(node) } else { node };
        let strings = string_literals(call, text);
        if shell && shell::deletes_files(&strings.join(" ")) {
            found.push(DangerKind::DeletesFiles);
        }
        if database {
            found.extend(strings.iter().flat_map(|s| sql::destructive(s, sql::SqlSource::Call)).map(|(kind, _)| kind));
        }
    }
    found.dedup();
    found.into_iter()
}

/// Outermost call of the method chain that begins with `node`.
fn method_chain(node: Node<'_>) -> Node<'_> {
    let mut top = node;
    while let Some(parent) = top.parent() {
        match parent.kind() {
            "field_expression" | "call_expression" | "member_expression" | "await_expression" | "try_expression" => {
                top = parent
            }
            _ => break,
        }
    }
    top
}

/// Contents of all string literals in `node`, without quotes.
fn string_literals(node: Node<'_>, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut stack = vec![node];
    while let Some(node) = stack.pop() {
        let is_string = matches!(
            node.kind(),
            "string" | "template_string" | "string_literal" | "raw_string_literal" | "interpreted_string_literal"
        );
        if is_string {
            let literal = text.get(node.byte_range()).unwrap_or_default();
            let body = literal.trim_start_matches(|c: char| c.is_ascii_alphabetic() || c == '#');
            found.push(body.trim_matches(['"', '\'', '`', '#']).to_owned());
        } else {
            let mut cursor = node.walk();
            let mut children: Vec<_> = node.named_children(&mut cursor).collect();
            children.reverse();
            stack.extend(children);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(language: Language, text: &str) -> Vec<DangerKind> {
        dangers(language, text).into_iter().map(|d| d.kind).collect()
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
}
