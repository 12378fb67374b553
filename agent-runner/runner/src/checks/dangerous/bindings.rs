//! Collects what names of a file stand for: strings assigned to a name, and other names of a function.

use tree_sitter::Node;

use super::WorkLimit;
use super::literals::{Bindings, Operand, OperandValue, joined};
use crate::checks::syntax::advance;

/// Maximum length of the code that a name is bound to, in bytes; longer code is not a command.
const MAX_BOUND_BYTES: usize = 2_000;

/// Returns the bindings of the file with the syntax tree `root`.
pub(super) fn of(root: Node<'_>, text: &str, work: &WorkLimit) -> Bindings {
    let mut bindings = Bindings::default();
    let mut cursor = root.walk();
    loop {
        let node = cursor.node();
        if !work.take(1) {
            break;
        }
        if let Some((left, right)) = fields_of(node.kind())
            && let (Some(left), Some(right)) = (node.child_by_field_name(left), node.child_by_field_name(right))
        {
            bind(&mut bindings, left, right, text, work);
        }
        if !advance(&mut cursor, true) {
            break;
        }
    }
    bindings
}

/// Fields with the new name and its value, for the kinds of nodes that bind a name.
fn fields_of(kind: &str) -> Option<(&'static str, &'static str)> {
    Some(match kind {
        "assignment" | "assignment_expression" | "short_var_declaration" | "assignment_statement" => ("left", "right"),
        "variable_declarator" | "const_item" | "static_item" | "const_spec" | "var_spec" | "named_expression" => {
            ("name", "value")
        }
        "let_declaration" => ("pattern", "value"),
        "aliased_import" | "import_specifier" => ("alias", "name"),
        "use_as_clause" => ("alias", "path"),
        "pair_pattern" => ("value", "key"),
        _ => return None,
    })
}

fn bind(bindings: &mut Bindings, left: Node<'_>, right: Node<'_>, text: &str, work: &WorkLimit) {
    let code = |node: Node<'_>| text.get(node.byte_range()).unwrap_or_default();
    if is_list(left) || is_list(right) {
        // Go writes even a single value as a list.
        for (name, value) in elements(left).into_iter().zip(elements(right)) {
            bind_one(bindings, code(name), value, text, work);
        }
        return;
    }
    bind_one(bindings, code(left), right, text, work);
}

fn is_list(node: Node<'_>) -> bool {
    matches!(node.kind(), "expression_list" | "pattern_list")
}

/// Elements of a list, or the node itself.
fn elements(node: Node<'_>) -> Vec<Node<'_>> {
    if !is_list(node) {
        return vec![node];
    }
    let mut cursor = node.walk();
    node.named_children(&mut cursor).collect()
}

fn bind_one(bindings: &mut Bindings, name: &str, value: Node<'_>, text: &str, work: &WorkLimit) {
    let is_name = !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | '$'));
    let code = text.get(value.byte_range()).unwrap_or_default();
    if !is_name || code.len() > MAX_BOUND_BYTES {
        return;
    }
    match value.kind() {
        "identifier"
        | "attribute"
        | "member_expression"
        | "selector_expression"
        | "scoped_identifier"
        | "dotted_name"
        | "property_identifier"
        | "type_identifier" => bindings.bind_alias(name, code.to_owned()),
        "string"
        | "template_string"
        | "string_literal"
        | "raw_string_literal"
        | "interpreted_string_literal"
        | "concatenated_string"
        | "binary_operator"
        | "binary_expression"
        | "parenthesized_expression"
        | "list"
        | "array"
        | "tuple"
        | "array_expression"
        | "reference_expression"
        | "composite_literal"
        | "expression_list" => {
            let strings = joined(&operands(value, text, work), text, &Bindings::default(), 0);
            if !strings.is_empty() {
                bindings.bind_string(name, strings.join(" "));
            }
        }
        _ => {}
    }
}

/// String literals and names in `node`, in document order.
pub(super) fn operands(node: Node<'_>, text: &str, work: &WorkLimit) -> Vec<Operand> {
    let mut found = Vec::new();
    let mut stack = vec![node];
    while let Some(node) = stack.pop().filter(|_| work.take(1)) {
        let code = text.get(node.byte_range()).unwrap_or_default();
        match node.kind() {
            "string" | "template_string" | "string_literal" | "raw_string_literal" | "interpreted_string_literal" => {
                let body = code.trim_start_matches(|c: char| c.is_ascii_alphabetic() || c == '#');
                let value = OperandValue::Literal(body.trim_matches(['"', '\'', '`', '#']).to_owned());
                found.push(Operand { range: node.byte_range(), value });
            }
            "identifier" => {
                found.push(Operand { range: node.byte_range(), value: OperandValue::Name(code.to_owned()) })
            }
            _ => {
                let mut cursor = node.walk();
                let mut children: Vec<_> = node.named_children(&mut cursor).collect();
                children.reverse();
                stack.extend(children);
            }
        }
    }
    found
}
