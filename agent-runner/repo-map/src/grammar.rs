//! Grammars of the repository map: which nodes of a syntax tree define a symbol.

use std::sync::OnceLock;

use tree_sitter::Node;

/// Whether the map shows the definitions of a file, by its extension.
pub fn has_symbols(path: &str) -> bool {
    Grammar::of_path(path).is_some()
}

/// Kind of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A name.
    Identifier,
    /// It may define something, or enclose definitions.
    Definition,
    Other,
}

/// What a node means for the map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Meaning<'t> {
    /// It defines the symbol with the name in this node.
    Definition {
        name: Node<'t>,
        /// Whether the language does not let other files use it by this name.
        is_local: bool,
    },
    /// It encloses definitions, and defines nothing: `impl` in Rust.
    Container { implements_trait: bool },
}

/// Languages whose files use each other's definitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Family {
    Python,
    JavaScript,
    Rust,
    Go,
    C,
    Java,
}

/// A language of which the map shows symbols.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Grammar {
    Python,
    JavaScript,
    TypeScript,
    Tsx,
    Rust,
    Go,
    C,
    Cpp,
    Java,
}

impl Grammar {
    /// The grammar for a file, by its extension.
    pub(super) fn of_path(path: &str) -> Option<Self> {
        match path.rsplit_once('.')?.1.to_ascii_lowercase().as_str() {
            "py" | "pyi" | "pyw" => Some(Self::Python),
            "js" | "mjs" | "cjs" | "jsx" => Some(Self::JavaScript),
            "ts" | "mts" | "cts" => Some(Self::TypeScript),
            "tsx" => Some(Self::Tsx),
            "rs" => Some(Self::Rust),
            "go" => Some(Self::Go),
            "c" => Some(Self::C),
            // A header may be one of C++, whose grammar reads those of C, too.
            "h" | "hh" | "hpp" | "hxx" | "cc" | "cpp" | "cxx" | "cu" | "cuh" => Some(Self::Cpp),
            "java" => Some(Self::Java),
            _ => None,
        }
    }

    pub(super) fn family(self) -> Family {
        match self {
            Self::Python => Family::Python,
            Self::JavaScript | Self::TypeScript | Self::Tsx => Family::JavaScript,
            Self::Rust => Family::Rust,
            Self::Go => Family::Go,
            Self::C | Self::Cpp => Family::C,
            Self::Java => Family::Java,
        }
    }

    pub(super) fn language(self) -> tree_sitter::Language {
        let language = match self {
            Self::Python => tree_sitter_python::LANGUAGE,
            Self::JavaScript => tree_sitter_javascript::LANGUAGE,
            Self::TypeScript => tree_sitter_typescript::LANGUAGE_TYPESCRIPT,
            Self::Tsx => tree_sitter_typescript::LANGUAGE_TSX,
            Self::Rust => tree_sitter_rust::LANGUAGE,
            Self::Go => tree_sitter_go::LANGUAGE,
            Self::C => tree_sitter_c::LANGUAGE,
            Self::Cpp => tree_sitter_cpp::LANGUAGE,
            Self::Java => tree_sitter_java::LANGUAGE,
        };
        language.into()
    }

    /// The kinds of nodes of this grammar, by their number: comparing their names for each node would take longer than
    /// parsing.
    pub(super) fn kinds(self) -> &'static [Kind] {
        static KINDS: [OnceLock<Vec<Kind>>; 9] = [const { OnceLock::new() }; 9];
        KINDS[self as usize].get_or_init(|| {
            let language = self.language();
            let kind = |id| {
                let name = u16::try_from(id).ok().and_then(|id| language.node_kind_for_id(id)).unwrap_or_default();
                if name.ends_with("identifier") {
                    Kind::Identifier
                } else if self.definitions().contains(&name) {
                    Kind::Definition
                } else {
                    Kind::Other
                }
            };
            (0..language.node_kind_count()).map(kind).collect()
        })
    }

    /// What a node of the kind [`Kind::Definition`] means; `None` if it is no definition and no container.
    /// `ancestors` are the kinds of the nodes around it, its parent at the end.
    pub(super) fn meaning<'t>(self, node: Node<'t>, ancestors: &[&str]) -> Option<Meaning<'t>> {
        match self {
            Self::Python => python(node, ancestors),
            Self::JavaScript | Self::TypeScript | Self::Tsx => javascript(node, ancestors),
            Self::Rust => rust(node, ancestors),
            Self::Go => go(node, ancestors),
            Self::C | Self::Cpp => c(node, ancestors),
            Self::Java => java(node),
        }
    }

    /// Names of the kinds that may define something, or enclose definitions.
    fn definitions(self) -> &'static [&'static str] {
        match self {
            Self::Python => &["class_definition", "function_definition", "assignment"],
            Self::JavaScript | Self::TypeScript | Self::Tsx => &[
                "function_declaration",
                "generator_function_declaration",
                "function_signature",
                "class_declaration",
                "abstract_class_declaration",
                "interface_declaration",
                "type_alias_declaration",
                "enum_declaration",
                "internal_module",
                "method_definition",
                "method_signature",
                "abstract_method_signature",
                "variable_declarator",
                "public_field_definition",
                "field_definition",
                "assignment_expression",
            ],
            Self::Rust => &[
                "impl_item",
                "struct_item",
                "enum_item",
                "union_item",
                "type_item",
                "trait_item",
                "function_item",
                "function_signature_item",
                "macro_definition",
                "const_item",
                "static_item",
                "mod_item",
            ],
            Self::Go => {
                &["function_declaration", "method_declaration", "type_spec", "type_alias", "const_spec", "var_spec"]
            }
            Self::C | Self::Cpp => &[
                "function_definition",
                "type_definition",
                "declaration",
                "field_declaration",
                "struct_specifier",
                "union_specifier",
                "enum_specifier",
                "class_specifier",
                "namespace_definition",
                "alias_declaration",
                "concept_definition",
                "preproc_function_def",
                "preproc_def",
            ],
            Self::Java => &[
                "class_declaration",
                "interface_declaration",
                "enum_declaration",
                "record_declaration",
                "annotation_type_declaration",
                "annotation_type_element_declaration",
                "method_declaration",
                "constructor_declaration",
                "field_declaration",
            ],
        }
    }
}

fn definition(name: Node<'_>) -> Option<Meaning<'_>> {
    Some(Meaning::Definition { name, is_local: false })
}

/// The definition whose name is in the field `name`.
fn named(node: Node<'_>) -> Option<Meaning<'_>> {
    node.child_by_field_name("name").and_then(definition)
}

fn python<'t>(node: Node<'t>, ancestors: &[&str]) -> Option<Meaning<'t>> {
    if node.kind() != "assignment" {
        return named(node);
    }
    // A constant of the module: `NAME = value` at the top.
    if !ancestors.ends_with(&["module", "expression_statement"]) {
        return None;
    }
    node.child_by_field_name("left").filter(|left| left.kind() == "identifier").and_then(definition)
}

fn javascript<'t>(node: Node<'t>, ancestors: &[&str]) -> Option<Meaning<'t>> {
    let is_function = |field: &str| {
        let value = node.child_by_field_name(field).map_or("", |value| value.kind());
        matches!(value, "arrow_function" | "function_expression" | "generator_function")
    };
    match node.kind() {
        "variable_declarator" => {
            let is_top = matches!(ancestors, [.., "program" | "export_statement", _]);
            let name = node.child_by_field_name("name").filter(|name| name.kind() == "identifier")?;
            (is_top || is_function("value")).then(|| definition(name)).flatten()
        }
        "public_field_definition" | "field_definition" => {
            let name = node.child_by_field_name("name").or_else(|| node.child_by_field_name("property"))?;
            is_function("value").then(|| definition(name)).flatten()
        }
        // `exports.start = function () {}`.
        "assignment_expression" => {
            let left = node.child_by_field_name("left").filter(|left| left.kind() == "member_expression")?;
            let name = left.child_by_field_name("property")?;
            is_function("right").then(|| definition(name)).flatten()
        }
        _ => named(node),
    }
}

fn rust<'t>(node: Node<'t>, ancestors: &[&str]) -> Option<Meaning<'t>> {
    let name = match node.kind() {
        "impl_item" => {
            let implements_trait = node.child_by_field_name("trait").is_some();
            return Some(Meaning::Container { implements_trait });
        }
        // A module without a body is in another file, which the map shows by its path.
        "mod_item" => node.child_by_field_name("body").and_then(|_| node.child_by_field_name("name"))?,
        _ => node.child_by_field_name("name")?,
    };
    let is_public = node.child(0).is_some_and(|first| first.kind() == "visibility_modifier");
    let is_of_trait = ancestors.ends_with(&["trait_item", "declaration_list"]);
    Some(Meaning::Definition { name, is_local: !is_public && !is_of_trait && node.kind() != "macro_definition" })
}

fn go<'t>(node: Node<'t>, ancestors: &[&str]) -> Option<Meaning<'t>> {
    match node.kind() {
        // Of a package, not of a function; with or without parentheses.
        "const_spec" | "var_spec" => match ancestors {
            [.., "source_file", _] | [.., "source_file", _, "var_spec_list"] => named(node),
            _ => None,
        },
        _ => named(node),
    }
}

fn c<'t>(node: Node<'t>, ancestors: &[&str]) -> Option<Meaning<'t>> {
    match node.kind() {
        "function_definition" | "type_definition" => declared_name(node).and_then(definition),
        // The prototype of a function, also of a method in a class. In a function, a variable can look like one.
        "declaration" | "field_declaration" => {
            let declarator = node.child_by_field_name("declarator")?;
            let is_function = is_prototype(declarator) && !ancestors.contains(&"compound_statement");
            is_function.then(|| declared_name(node)).flatten().and_then(definition)
        }
        // Without a body it is a use of the type. A type definition shows its name.
        "struct_specifier" | "union_specifier" | "enum_specifier" | "class_specifier" => node
            .child_by_field_name("body")
            .filter(|_| !ancestors.ends_with(&["type_definition"]))
            .and_then(|_| named(node)),
        // Without a value it is the guard of a header.
        "preproc_def" => node.child_by_field_name("value").and_then(|_| named(node)),
        _ => named(node),
    }
}

fn java(node: Node<'_>) -> Option<Meaning<'_>> {
    if node.kind() != "field_declaration" {
        return named(node);
    }
    // A constant.
    let modifiers = node.child(0).filter(|first| first.kind() == "modifiers")?;
    let has = |word: &str| (0..modifiers.child_count()).any(|n| modifiers.child(n).is_some_and(|m| m.kind() == word));
    let name = node.child_by_field_name("declarator")?.child_by_field_name("name")?;
    (has("static") && has("final")).then(|| definition(name)).flatten()
}

/// Nesting of declarators, such as pointers, in which a name is looked for.
const MAX_DECLARATORS: usize = 8;

/// The declarators of a declaration, from the outer ones to the inner ones.
fn declarators(node: Node<'_>) -> impl Iterator<Item = Node<'_>> {
    std::iter::successors(Some(node), |node| match node.kind() {
        // It has no field for its declarator.
        "reference_declarator" | "parenthesized_declarator" => node.named_child(0),
        _ => node.child_by_field_name("declarator"),
    })
    .take(MAX_DECLARATORS)
}

/// Whether a declarator is that of a function, and not of a pointer to one.
fn is_prototype(declarator: Node<'_>) -> bool {
    declarators(declarator).any(|node| {
        let name = node.child_by_field_name("declarator");
        node.kind() == "function_declarator" && name.is_some_and(|name| name.kind() != "parenthesized_declarator")
    })
}

/// The list of parameters of a definition.
pub(super) fn parameters(node: Node<'_>) -> Option<Node<'_>> {
    let of_value = || node.child_by_field_name("value")?.child_by_field_name("parameters");
    let of_declarator = || declarators(node).find_map(|declarator| declarator.child_by_field_name("parameters"));
    node.child_by_field_name("parameters").or_else(of_value).or_else(of_declarator)
}

/// The name that a declaration of C declares.
fn declared_name(node: Node<'_>) -> Option<Node<'_>> {
    let innermost = declarators(node).last()?;
    // `Class::method`: the method.
    let parts = std::iter::successors(Some(innermost), |node| match node.kind() {
        "qualified_identifier" => node.child_by_field_name("name"),
        _ => None,
    });
    let name = parts.take(MAX_DECLARATORS).last()?;
    matches!(name.kind(), "identifier" | "field_identifier" | "type_identifier" | "destructor_name" | "operator_name")
        .then_some(name)
}
