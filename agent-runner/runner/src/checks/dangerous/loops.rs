//! Detects infinite loops: the condition is always true and nothing in the body leaves the loop.

use tree_sitter::Node;

use super::WorkLimit;
use crate::checks::language::Language;

/// True if `node` is an infinite loop. `text` is the whole file.
pub(super) fn is_infinite(language: Language, node: Node<'_>, text: &str, work: &WorkLimit) -> bool {
    let source = |n: Node<'_>| text.get(n.byte_range()).unwrap_or_default().trim_matches(['(', ')', ' ']).to_owned();
    let always_true = |n: Option<Node<'_>>| n.is_some_and(|n| matches!(source(n).as_str(), "true" | "True" | "1"));
    let condition = node.child_by_field_name("condition");
    let unconditional = match (language, node.kind()) {
        (Language::Python, "while_statement") => always_true(condition),
        (Language::JavaScript | Language::TypeScript | Language::Tsx, "while_statement" | "do_statement") => {
            always_true(condition)
        }
        (Language::JavaScript | Language::TypeScript | Language::Tsx, "for_statement") => {
            condition.is_none_or(|c| c.kind() == "empty_statement") || always_true(condition)
        }
        (Language::Rust, "loop_expression") => true,
        (Language::Rust, "while_expression") => always_true(condition),
        (Language::Go, "for_statement") => {
            let mut cursor = node.walk();
            let head = node.named_children(&mut cursor).find(|c| c.kind() != "block" && c.kind() != "comment");
            match head {
                None => true,
                Some(head) if head.kind() == "for_clause" => head.child_by_field_name("condition").is_none(),
                Some(head) => always_true(Some(head)),
            }
        }
        _ => false,
    };
    unconditional && node.child_by_field_name("body").is_some_and(|body| !leaves(language, body, text, work))
}

/// True if something in the loop's body leaves the loop.
fn leaves(language: Language, body: Node<'_>, text: &str, work: &WorkLimit) -> bool {
    // An explicit stack instead of recursion: generated text can nest deeper than the thread's stack allows.
    // The flag is true if an unlabelled `break` at the node would leave the loop.
    let mut stack = vec![(body, true)];
    while let Some((node, breakable)) = stack.pop() {
        if !work.take(1) {
            return true;
        }
        match node.kind() {
            "break_statement" | "break_expression" => {
                let labelled = (0..node.named_child_count() as u32)
                    .filter_map(|i| node.named_child(i))
                    .any(|c| matches!(c.kind(), "label" | "label_name" | "statement_identifier" | "lifetime"));
                if breakable || labelled {
                    return true;
                }
            }
            "return_statement" | "return_expression" | "raise_statement" | "throw_statement" | "goto_statement" => {
                return true;
            }
            "await" | "await_expression" | "yield" | "yield_expression" => return true,
            "try_expression" if language == Language::Rust => return true,
            // Waiting on a channel in Go counts as leaving the loop, like `await` in other languages.
            "select_statement" | "receive_statement" => return true,
            "unary_expression" if language == Language::Go && node_text(node, text).starts_with("<-") => return true,
            "call" | "call_expression" | "macro_invocation" if ends_process(node_text(node, text)) => return true,
            kind if is_function(kind) => continue,
            _ => {}
        }
        let inner = breakable && !captures_break(node.kind());
        let mut cursor = node.walk();
        stack.extend(node.named_children(&mut cursor).map(|child| (child, inner)));
    }
    false
}

fn node_text<'t>(node: Node<'_>, text: &'t str) -> &'t str {
    text.get(node.byte_range()).unwrap_or_default()
}

/// True for loops and switches: an unlabelled `break` inside such a node leaves this node, not a loop around it.
fn captures_break(kind: &str) -> bool {
    matches!(
        kind,
        "while_statement"
            | "for_statement"
            | "for_in_statement"
            | "do_statement"
            | "switch_statement"
            | "expression_switch_statement"
            | "type_switch_statement"
            | "loop_expression"
            | "while_expression"
            | "for_expression"
    )
}

fn is_function(kind: &str) -> bool {
    matches!(
        kind,
        "function_definition"
            | "lambda"
            | "class_definition"
            | "function_declaration"
            | "function_expression"
            | "generator_function"
            | "generator_function_declaration"
            | "arrow_function"
            | "method_definition"
            | "class_declaration"
            | "closure_expression"
            | "function_item"
            | "async_block"
            | "func_literal"
    )
}

fn ends_process(code: &str) -> bool {
    [
        "sys.exit(",
        "os._exit(",
        "exit(",
        "quit(",
        "process.exit(",
        "panic!",
        "unreachable!",
        "todo!",
        "unimplemented!",
        "bail!",
    ]
    .iter()
    .chain(&["std::process::exit(", "process::exit(", "panic(", "os.Exit(", "log.Fatal"])
    .any(|start| code.starts_with(start))
}
