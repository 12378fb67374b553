//! Symbols of a file: what it defines, and which names it uses.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::ops::ControlFlow;
use std::sync::Arc;

use cfq_proto::visible_text::{TERMINAL_CHARACTERS, visible};
use tree_sitter::{Node, ParseOptions, ParseState, Parser, Tree, TreeCursor};

use super::grammar::{Grammar, Kind, Meaning};

/// Maximum size of a file whose symbols are shown, in bytes. Larger sources are mostly generated.
pub const MAX_SOURCE_BYTES: usize = 1024 * 1024;
/// Maximum number of steps of a parse, in the units in which tree-sitter reports its progress.
const MAX_PARSE_STEPS: u32 = 50_000;
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

/// A definition, or what encloses definitions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Symbol {
    /// Its name; `None` if it only encloses definitions.
    pub name: Option<Arc<str>>,
    /// Line number, from 1.
    pub line: u32,
    /// The line of the source in which the name is.
    pub text: String,
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
    let mut read = |offset: usize, _| text.as_bytes().get(offset..).unwrap_or_default();
    parser.parse_with_options(&mut read, None, Some(options))
}

/// Walks through the tree with a cursor instead of recursion: a text can nest deeper than the stack allows.
fn collect(grammar: Grammar, tree: &Tree, text: &str) -> FileSymbols {
    let mut symbols = Vec::new();
    let mut references: BTreeMap<&str, u32> = BTreeMap::new();
    // Symbols that enclose the current node, with their depth in the tree.
    let mut enclosing: Vec<(u32, u32)> = Vec::new();
    let mut names = HashSet::new();
    let kinds = grammar.kinds();
    let mut cursor = tree.walk();
    let mut depth = 0_u32;
    loop {
        let node = cursor.node();
        while enclosing.last().is_some_and(|(at, _)| *at >= depth) {
            enclosing.pop();
        }
        let kind = kinds.get(usize::from(node.kind_id())).copied().unwrap_or(Kind::Other);
        if kind == Kind::Definition
            && symbols.len() < MAX_SYMBOLS
            && let Some(meaning) = grammar.meaning(node)
            && let Some(symbol) =
                symbol(node, meaning, enclosing.iter().take(MAX_LEVELS).next_back().map(|(_, index)| *index), text)
        {
            if let Meaning::Definition(name) = meaning {
                names.insert(name.id());
            }
            enclosing.push((depth, u32::try_from(symbols.len()).unwrap_or(u32::MAX)));
            symbols.push(symbol);
        }
        if kind == Kind::Identifier && node.child_count() == 0 && !names.contains(&node.id()) {
            count(&mut references, &text[node.byte_range()]);
        }
        if !advance(&mut cursor, &mut depth) {
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

fn symbol(node: Node<'_>, meaning: Meaning<'_>, parent: Option<u32>, text: &str) -> Option<Symbol> {
    let (name, at) = match meaning {
        Meaning::Definition(name) => (Some(Arc::from(&text[name.byte_range()])), name),
        Meaning::Container => (None, node),
    };
    if name.as_ref().is_some_and(|name: &Arc<str>| name.is_empty() || name.len() > *NAME_BYTES.end()) {
        return None;
    }
    let row = at.start_position().row;
    Some(Symbol { name, line: u32::try_from(row + 1).unwrap_or(u32::MAX), text: line_of(text, at), parent })
}

/// The line of the text in which a node begins, without indentation and an opening brace.
fn line_of(text: &str, node: Node<'_>) -> String {
    let start = node.start_byte();
    let begin = text[..start].rfind('\n').map_or(0, |i| i + 1);
    let end = text[start..].find('\n').map_or(text.len(), |i| start + i);
    let line = visible(text[begin..end].trim().trim_end_matches('{').trim_end(), TERMINAL_CHARACTERS);
    match line.char_indices().nth(MAX_LINE_CHARS) {
        Some((cut, _)) => format!("{} ...", &line[..cut]),
        None => line.into_owned(),
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

/// Moves the cursor to the next node in the order of the text, and keeps its depth. Returns false at the end.
fn advance(cursor: &mut TreeCursor<'_>, depth: &mut u32) -> bool {
    if cursor.goto_first_child() {
        *depth += 1;
        return true;
    }
    loop {
        if cursor.goto_next_sibling() {
            return true;
        }
        if !cursor.goto_parent() {
            return false;
        }
        *depth -= 1;
    }
}

#[cfg(test)]
mod tests;
