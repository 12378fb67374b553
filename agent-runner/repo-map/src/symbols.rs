//! Symbols of a file: what it defines, and which names it uses.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::ops::ControlFlow;
use std::sync::Arc;

use cfq_proto::visible_text::visible;
use serde::{Deserialize, Serialize};
use tree_sitter::{Node, ParseOptions, ParseState, Parser, Tree, TreeCursor};

use super::grammar::{Grammar, Kind, Meaning, parameters};

/// Maximum size of a file whose symbols are shown, in bytes. Larger sources are mostly generated.
pub const MAX_SOURCE_BYTES: usize = 1024 * 1024;
/// Maximum number of steps of a parse, in the units in which tree-sitter reports its progress.
const MAX_PARSE_STEPS: u32 = 50_000;
/// How often a text may be read while it is parsed, on average.
const MAX_READS: usize = 16;
/// Number of bytes that are read at once.
const READ_BYTES: usize = 4096;
/// Maximum number of symbols of one file.
const MAX_SYMBOLS: usize = 5_000;
/// Maximum number of different names that a file uses.
const MAX_REFERENCES: usize = 5_000;
/// Lengths of the names that are counted, in bytes. Shorter ones, such as `i`, are mostly variables.
const NAME_BYTES: std::ops::RangeInclusive<usize> = 3..=100;
/// Maximum number of symbols around a symbol. Those that are nested deeper are shown at this level.
const MAX_LEVELS: usize = 6;
/// Maximum length of the line that shows a symbol, in characters.
const MAX_LINE_CHARS: usize = 140;
/// Maximum length of this line in bytes.
const MAX_SHOWN_BYTES: usize = 180;
/// Maximum length of the part of a source that is read for this line, after the name, in bytes.
const MAX_LINE_BYTES: usize = 400;
/// Maximum length of the part of a source in which the beginning of the line is looked for, in bytes.
const MAX_INDENTATION_BYTES: usize = 400;
/// Maximum length of the part of the line before the name that is shown, in bytes.
const MAX_BYTES_BEFORE_NAME: usize = 80;

/// From where a definition can be used by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Reach {
    /// From its own file, or seldom from others.
    File,
    /// From other files, as a member of a type: other types may have one of the same name.
    Member,
    /// From other files.
    Repository,
}

/// A definition, or what encloses definitions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Symbol {
    /// Its name; `None` if it only encloses definitions.
    pub name: Option<Arc<str>>,
    /// From where it can be used.
    pub reach: Reach,
    /// Line number, from 1.
    pub line: u32,
    /// The line of the source in which the name is.
    pub text: Arc<str>,
    /// Index of the symbol that encloses it.
    pub parent: Option<u32>,
}

/// Symbols of one file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FileSymbols {
    /// In the order of the text.
    pub(super) symbols: Vec<Symbol>,
    /// How often each name is used, except where it is defined; sorted by name.
    pub(super) references: Vec<(Arc<str>, u32)>,
}

impl FileSymbols {
    /// No symbols, as of a file in a language without a grammar.
    pub const NONE: Self = Self { symbols: Vec::new(), references: Vec::new() };

    /// Symbols of a file; `None` if there is no grammar for its extension. A text that cannot be parsed within the
    /// limits has none; one with syntax errors has those that are recognized.
    pub fn of(path: &str, text: &str) -> Option<Self> {
        let grammar = Grammar::of_path(path)?;
        Some(match parse(grammar, text) {
            Some(tree) => collect(grammar, &tree, text),
            None => Self::NONE,
        })
    }

    /// The symbols without those of modules of tests, which Rust has in the same file as the code.
    pub(super) fn without_tests(&self) -> Cow<'_, Self> {
        if !self.symbols.iter().any(Symbol::is_test_module) {
            return Cow::Borrowed(self);
        }
        let mut is_test = vec![false; self.symbols.len()];
        // A symbol follows what encloses it.
        for (index, symbol) in self.symbols.iter().enumerate() {
            is_test[index] = symbol.is_test_module() || symbol.parent.is_some_and(|parent| is_test[parent as usize]);
        }
        let symbols = keep(self.symbols.clone(), |index| !is_test[index]);
        Cow::Owned(Self { symbols, references: self.references.clone() })
    }
}

fn parse(grammar: Grammar, text: &str) -> Option<Tree> {
    if text.len() > MAX_SOURCE_BYTES {
        return None;
    }
    let mut parser = Parser::new();
    // Fails only for a grammar with an incompatible ABI, which the tests detect.
    parser.set_language(&grammar.language()).ok()?;
    let mut steps = 0;
    let mut progress = |_: &ParseState| {
        steps += 1;
        if steps > MAX_PARSE_STEPS { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let options = ParseOptions::new().progress_callback(&mut progress);
    // Some grammars read to the end of the text in one step, and again in the next one.
    let mut remaining_bytes = text.len().saturating_mul(MAX_READS).max(READ_BYTES);
    let mut is_exhausted = false;
    let mut read = |offset: usize, _| {
        // Without a character that is cut off: tree-sitter would read its rest without checking that there is one.
        let end = text.ceil_char_boundary(offset.saturating_add(READ_BYTES).min(text.len()));
        let chunk = text.as_bytes().get(offset..end).unwrap_or_default();
        if chunk.len() > remaining_bytes {
            is_exhausted = true;
            return &[][..];
        }
        remaining_bytes -= chunk.len();
        chunk
    };
    let tree = parser.parse_with_options(&mut read, None, Some(options));
    // The end of the budget was the end of the text for the parser.
    tree.filter(|_| !is_exhausted)
}

/// A symbol around the current node.
struct Enclosing {
    /// Its depth in the tree.
    depth: usize,
    /// Its index.
    index: u32,
    /// Whether it implements the definitions of a trait.
    implements_trait: bool,
    /// The reach of what it encloses.
    inside: Reach,
}

/// Walks through the tree with a cursor instead of recursion: a text can nest deeper than the stack allows.
fn collect(grammar: Grammar, tree: &Tree, text: &str) -> FileSymbols {
    let mut symbols = Vec::new();
    let mut references: BTreeMap<&str, u32> = BTreeMap::new();
    let mut enclosing: Vec<Enclosing> = Vec::new();
    let mut names = HashSet::new();
    let kinds = grammar.kinds();
    let mut cursor = tree.walk();
    // Kinds of the nodes around the current one; a node finds its parent only by a search from the root.
    let mut ancestors: Vec<&str> = Vec::new();
    loop {
        let node = cursor.node();
        let depth = ancestors.len();
        while enclosing.last().is_some_and(|symbol| symbol.depth >= depth) {
            enclosing.pop();
        }
        let kind = kinds.get(usize::from(node.kind_id())).copied().unwrap_or(Kind::Other);
        if kind == Kind::Definition
            && symbols.len() < MAX_SYMBOLS
            && let Some(meaning) = grammar.meaning(node, &ancestors)
            && let Some(mut symbol) = symbol(node, meaning, text)
        {
            symbol.parent = enclosing.iter().take(MAX_LEVELS).next_back().map(|symbol| symbol.index);
            if let Some(around) = enclosing.last() {
                let inside = if around.implements_trait { Reach::File } else { around.inside };
                symbol.reach = symbol.reach.min(inside);
            }
            if let Meaning::Definition { name, .. } = meaning {
                names.insert(name.id());
            }
            let implements_trait = meaning == Meaning::Container { implements_trait: true };
            let index = u32::try_from(symbols.len()).unwrap_or(u32::MAX);
            enclosing.push(Enclosing { depth, index, implements_trait, inside: reach_inside(node.kind()) });
            symbols.push(symbol);
        }
        if kind == Kind::Identifier && node.child_count() == 0 && !names.contains(&node.id()) {
            count(&mut references, &text[node.byte_range()]);
        }
        if !advance(&mut cursor, &mut ancestors) {
            break;
        }
    }
    let references = references.into_iter().map(|(name, uses)| (Arc::from(name), uses)).collect();
    FileSymbols { symbols: without_empty_containers(symbols), references }
}

fn count<'t>(references: &mut BTreeMap<&'t str, u32>, name: &'t str) {
    if !NAME_BYTES.contains(&name.len()) {
        return;
    }
    if let Some(uses) = references.get_mut(name) {
        *uses += 1;
    } else if references.len() < MAX_REFERENCES {
        references.insert(name, 1);
    }
}

fn symbol(node: Node<'_>, meaning: Meaning<'_>, text: &str) -> Option<Symbol> {
    let (name, reach, shown) = match meaning {
        Meaning::Definition { name, is_local } => {
            let name_text = &text[name.byte_range()];
            if name_text.is_empty() || name_text.len() > *NAME_BYTES.end() {
                return None;
            }
            // The underscore is a convention, also of languages in which others could use the name.
            let is_local = is_local || name_text.starts_with('_');
            (Some(Arc::from(name_text)), if is_local { Reach::File } else { Reach::Repository }, name)
        }
        Meaning::Container { .. } => (None, Reach::File, node),
    };
    // The name of a type of C follows its fields.
    let is_after_body = node.kind() == "type_definition" && node.start_position().row < shown.start_position().row;
    let (row, line) = match (is_after_body, &name) {
        (true, Some(name)) => {
            (node.start_position().row, format!("{} ... {name}", line_of(text, node.start_byte(), 1)))
        }
        _ => {
            let row = shown.start_position().row;
            let last = parameters(node).map_or(row, |list| list.end_position().row);
            (row, line_of(text, shown.start_byte(), last.saturating_sub(row) + 1))
        }
    };
    Some(Symbol { name, reach, line: u32::try_from(row + 1).unwrap_or(u32::MAX), text: line.into(), parent: None })
}

/// The line of the text around a position, joined with the lines after it, without indentation and an opening brace.
fn line_of(text: &str, position: usize, lines: usize) -> String {
    let before = text.floor_char_boundary(position.saturating_sub(MAX_INDENTATION_BYTES));
    let after = text.ceil_char_boundary(position.saturating_add(MAX_LINE_BYTES).min(text.len()));
    let begin = text[before..position].rfind('\n').map_or(before, |i| before + i + 1);
    // In a long line, the name has to be in the part that is shown.
    let is_late = text[begin..position].trim_start().len() > MAX_BYTES_BEFORE_NAME;
    let begin = if is_late { text.floor_char_boundary(position - MAX_BYTES_BEFORE_NAME / 2) } else { begin };
    let mut line = String::new();
    if is_late {
        line.push_str("... ");
    }
    for part in text[begin..after].lines().take(lines) {
        let part = part.trim();
        if !line.is_empty() && !line.ends_with(['(', '[']) && !part.starts_with([')', ']']) {
            line.push(' ');
        }
        line.push_str(part);
    }
    let line = line.replace('\t', " ");
    let line = visible(line.trim_end_matches('{').trim_end(), &[]);
    // Other scripts than Latin have up to one token for each byte.
    let cut = line.char_indices().nth(MAX_LINE_CHARS).map_or(line.len(), |(cut, _)| cut);
    let cut = line.floor_char_boundary(cut.min(MAX_SHOWN_BYTES));
    if cut < line.len() { format!("{} ...", &line[..cut]) } else { line.into_owned() }
}

/// The reach of definitions that a node of this kind encloses.
fn reach_inside(kind: &str) -> Reach {
    match kind {
        "mod_item" | "namespace_definition" | "internal_module" => Reach::Repository,
        "class_definition"
        | "class_declaration"
        | "abstract_class_declaration"
        | "interface_declaration"
        | "enum_declaration"
        | "record_declaration"
        | "annotation_type_declaration"
        | "struct_item"
        | "enum_item"
        | "union_item"
        | "trait_item"
        | "impl_item"
        | "type_spec"
        | "type_definition"
        | "struct_specifier"
        | "union_specifier"
        | "enum_specifier"
        | "class_specifier" => Reach::Member,
        // Functions.
        _ => Reach::File,
    }
}

impl Symbol {
    fn is_test_module(&self) -> bool {
        matches!(self.name.as_deref(), Some("tests" | "test")) && self.text.contains("mod ")
    }
}

/// The symbols without the containers in which nothing is defined.
fn without_empty_containers(symbols: Vec<Symbol>) -> Vec<Symbol> {
    let mut used = vec![false; symbols.len()];
    // A symbol follows what encloses it.
    for (index, symbol) in symbols.iter().enumerate().rev() {
        used[index] |= symbol.name.is_some();
        if let Some(parent) = symbol.parent.filter(|_| used[index]) {
            used[parent as usize] = true;
        }
    }
    keep(symbols, |index| used[index])
}

/// Some of the symbols, whose parents are kept as well.
fn keep(symbols: Vec<Symbol>, is_kept: impl Fn(usize) -> bool) -> Vec<Symbol> {
    let mut moved = vec![0; symbols.len()];
    let mut kept: Vec<Symbol> = Vec::with_capacity(symbols.len());
    for (index, mut symbol) in symbols.into_iter().enumerate() {
        if is_kept(index) {
            moved[index] = u32::try_from(kept.len()).unwrap_or(u32::MAX);
            symbol.parent = symbol.parent.map(|parent| moved[parent as usize]);
            kept.push(symbol);
        }
    }
    kept
}

/// Moves the cursor to the next node in the order of the text, and keeps the kinds of the nodes around it. Returns
/// false at the end.
fn advance<'t>(cursor: &mut TreeCursor<'t>, ancestors: &mut Vec<&'t str>) -> bool {
    let kind = cursor.node().kind();
    if cursor.goto_first_child() {
        ancestors.push(kind);
        return true;
    }
    loop {
        if cursor.goto_next_sibling() {
            return true;
        }
        if !cursor.goto_parent() {
            return false;
        }
        ancestors.pop();
    }
}

#[cfg(test)]
mod tests;
