//! Loops with a condition that never fails and nothing inside that leaves them.

use tree_sitter::Node;

use crate::checks::language::Language;

/// Whether `node` is such a loop. `text` is the whole file.
pub(super) fn is_endless(language: Language, node: Node<'_>, text: &str) -> bool {
    let source = |n: Node<'_>| text.get(n.byte_range()).unwrap_or_default().trim_matches(['(', ')', ' ']).to_owned();
    let always = |n: Option<Node<'_>>| n.is_some_and(|n| matches!(source(n).as_str(), "true" | "True" | "1"));
    let condition = node.child_by_field_name("condition");
    let forever = match (language, node.kind()) {
        (Language::Python, "while_statement") => always(condition),
        (Language::JavaScript | Language::TypeScript | Language::Tsx, "while_statement" | "do_statement") => {
            always(condition)
        }
        (Language::JavaScript | Language::TypeScript | Language::Tsx, "for_statement") => {
            condition.is_none_or(|c| c.kind() == "empty_statement") || always(condition)
        }
        (Language::Rust, "loop_expression") => true,
        (Language::Rust, "while_expression") => always(condition),
        (Language::Go, "for_statement") => {
            let mut cursor = node.walk();
            let head = node.named_children(&mut cursor).find(|c| c.kind() != "block" && c.kind() != "comment");
            match head {
                None => true,
                Some(head) if head.kind() == "for_clause" => head.child_by_field_name("condition").is_none(),
                Some(head) => always(Some(head)),
            }
        }
        _ => false,
    };
    forever && node.child_by_field_name("body").is_some_and(|body| !leaves(language, body, text, true))
}

/// Whether something in `node` ends the loop around it. `breakable`: an unlabelled break here would still leave it.
fn leaves(language: Language, node: Node<'_>, text: &str, breakable: bool) -> bool {
    // Recursion is bounded by a stack of our own, since generated text can nest deeper than the thread's.
    let mut stack = vec![(node, breakable)];
    while let Some((node, breakable)) = stack.pop() {
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
            // Go waits on channels where others await.
            "select_statement" | "receive_statement" => return true,
            "unary_expression" if language == Language::Go && code(node, text).starts_with("<-") => return true,
            "call" | "call_expression" | "macro_invocation" if ends_process(code(node, text)) => return true,
            kind if is_function(kind) => continue,
            _ => {}
        }
        let inner = breakable && !takes_breaks(node.kind());
        let mut cursor = node.walk();
        stack.extend(node.named_children(&mut cursor).map(|child| (child, inner)));
    }
    false
}

fn code<'t>(node: Node<'_>, text: &'t str) -> &'t str {
    text.get(node.byte_range()).unwrap_or_default()
}

/// What inside a loop takes an unlabelled break for itself.
fn takes_breaks(kind: &str) -> bool {
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
