//! What a request puts in focus.

use std::collections::BTreeSet;

use super::map_error::MapError;
use super::rank::MAX_DEFINING_FILES;
use super::symbols::FileSymbols;

/// What is in focus.
pub(super) struct Focus {
    /// By file: whether it has a named path, is in a named folder, or has a named definition.
    pub files: Vec<bool>,
    /// File and index of the named definitions.
    pub symbols: BTreeSet<(usize, usize)>,
}

impl Focus {
    /// Finds what the names mean.
    ///
    /// # Errors
    /// [`MapError::UnknownFocus`].
    pub(super) fn find(files: &[(&str, &FileSymbols)], names: &[String]) -> Result<Self, MapError> {
        let mut focus = Self { files: vec![false; files.len()], symbols: BTreeSet::new() };
        for name in names {
            if !focus.add(files, name) {
                return Err(MapError::UnknownFocus(name.clone()));
            }
        }
        Ok(focus)
    }

    /// Adds the names that the repository has. Ignores a name that means more than [`MAX_DEFINING_FILES`] files, such as
    /// `new` or `mod.rs`: it does not tell which of them is meant.
    pub(super) fn add_mentioned(&mut self, files: &[(&str, &FileSymbols)], names: &[String]) {
        for name in names {
            let mut found = Self { files: vec![false; files.len()], symbols: BTreeSet::new() };
            found.add(files, name);
            if found.files.iter().filter(|is_found| **is_found).count() <= MAX_DEFINING_FILES {
                self.files.iter_mut().zip(found.files).for_each(|(file, is_found)| *file |= is_found);
                self.symbols.extend(found.symbols);
            }
        }
    }

    /// Adds what a name means. Returns false if it means nothing.
    fn add(&mut self, files: &[(&str, &FileSymbols)], name: &str) -> bool {
        let name = name.trim_start_matches("./").trim_end_matches('/');
        let mut is_known = false;
        for (index, (path, symbols)) in files.iter().enumerate() {
            let named = symbols.symbols.iter().enumerate().filter(|(_, symbol)| symbol.name.as_deref() == Some(name));
            let named: Vec<(usize, usize)> = named.map(|(symbol, _)| (index, symbol)).collect();
            if !named.is_empty() || contains(path, name) {
                is_known = true;
                self.files[index] = true;
                self.symbols.extend(named);
            }
        }
        is_known
    }
}

/// Whether the whole parts of `name` follow each other in a path: those of a file, or of a folder around it.
fn contains(path: &str, name: &str) -> bool {
    !name.is_empty()
        && path.match_indices(name).any(|(start, _)| {
            let end = start + name.len();
            let bytes = path.as_bytes();
            (start == 0 || bytes[start - 1] == b'/') && (end == bytes.len() || bytes[end] == b'/')
        })
}
