//! Symbols of files that were parsed before, by the content of the file, so that all worktrees and commits of a
//! repository share them.
//!
//! The stored form is JSON, compressed with zstd. It begins with a version; another version is discarded, as the
//! grammars may have changed.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Read, Write};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::symbols::{FileSymbols, Symbol};

/// Version of the stored form: that of this crate, and the number of the layout.
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "/1");
/// zstd's fastest standard level.
const LEVEL: i32 = 1;
/// Maximum size of the stored form when it is decompressed, in bytes.
const MAX_BYTES: u64 = 1 << 30;
/// A stored cache has at most this many times the files of the commit that was mapped last.
const MAX_RATIO: usize = 4;

/// Error: the stored form cannot be read. The cache can be made again from the files.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// It cannot be decompressed, or is no JSON of the expected form.
    #[error("the stored symbols cannot be read")]
    Unreadable(#[source] io::Error),
    /// Another version of cfq stored it.
    #[error("the symbols were stored by version {0}")]
    OtherVersion(String),
}

/// The stored form. Names are stored once, because most are used in many files.
#[derive(Serialize, Deserialize)]
struct Stored {
    version: String,
    names: Vec<Arc<str>>,
    files: BTreeMap<String, StoredFile>,
}

/// Symbols of a file; each name is an index.
#[derive(Serialize, Deserialize)]
struct StoredFile {
    /// Name, line, text and parent of each symbol.
    symbols: Vec<(Option<u32>, u32, String, Option<u32>)>,
    /// Uses of names.
    references: Vec<(u32, u32)>,
}

impl StoredFile {
    fn of(symbols: &FileSymbols, mut index: impl FnMut(&Arc<str>) -> u32) -> Self {
        let references = symbols.references.iter().map(|(name, uses)| (index(name), *uses)).collect();
        let stored =
            |symbol: &Symbol| (symbol.name.as_ref().map(&mut index), symbol.line, symbol.text.clone(), symbol.parent);
        Self { symbols: symbols.symbols.iter().map(stored).collect(), references }
    }

    /// The symbols; `None` if an index is none of a name, or of a symbol before.
    fn symbols(self, names: &[Arc<str>]) -> Option<FileSymbols> {
        let name = |index: u32| names.get(index as usize).cloned();
        let symbols = self.symbols.into_iter().enumerate().map(|(position, (index, line, text, parent))| {
            let name = match index {
                Some(index) => Some(name(index)?),
                None => None,
            };
            let is_before = parent.is_none_or(|parent| (parent as usize) < position);
            is_before.then_some(Symbol { name, line, text, parent })
        });
        let symbols = symbols.collect::<Option<_>>()?;
        let references = self.references.into_iter().map(|(index, uses)| Some((name(index)?, uses)));
        Some(FileSymbols { symbols, references: references.collect::<Option<_>>()? })
    }
}

/// Symbols by the id of a file's content.
#[derive(Debug, Default)]
pub struct SymbolCache {
    files: BTreeMap<String, FileSymbols>,
    has_changed: bool,
}

impl SymbolCache {
    /// Reads the stored form.
    ///
    /// # Errors
    /// [`CacheError`] if it cannot be used.
    pub fn read(stored: impl Read) -> Result<Self, CacheError> {
        let decoder = zstd::Decoder::new(stored).map_err(CacheError::Unreadable)?;
        let mut text = Vec::new();
        decoder.take(MAX_BYTES).read_to_end(&mut text).map_err(CacheError::Unreadable)?;
        let stored: Stored = serde_json::from_slice(&text).map_err(|error| CacheError::Unreadable(error.into()))?;
        if stored.version != VERSION {
            return Err(CacheError::OtherVersion(stored.version));
        }
        let Stored { names, files, .. } = stored;
        let files = files.into_iter().map(|(key, file)| Some((key, file.symbols(&names)?))).collect::<Option<_>>();
        let files = files.ok_or_else(|| CacheError::Unreadable(io::ErrorKind::InvalidData.into()))?;
        Ok(Self { files, has_changed: false })
    }

    /// Writes the stored form.
    ///
    /// # Errors
    /// Those of `target`.
    pub fn write(&self, target: impl Write) -> io::Result<()> {
        let mut names = Vec::new();
        let mut indexes: HashMap<Arc<str>, u32> = HashMap::new();
        let mut index = |name: &Arc<str>| {
            *indexes.entry(name.clone()).or_insert_with(|| {
                names.push(name.clone());
                u32::try_from(names.len() - 1).unwrap_or(u32::MAX)
            })
        };
        let files =
            self.files.iter().map(|(key, symbols)| (key.clone(), StoredFile::of(symbols, &mut index))).collect();
        let mut encoder = zstd::Encoder::new(target, LEVEL)?;
        serde_json::to_writer(&mut encoder, &Stored { version: VERSION.to_owned(), names, files })?;
        encoder.finish()?.flush()
    }

    /// The symbols of a file with this content. The path matters because it selects the grammar.
    pub fn get(&self, path: &str, content_id: &str) -> Option<&FileSymbols> {
        self.files.get(&key(path, content_id))
    }

    /// Adds the symbols of a file.
    pub fn insert(&mut self, path: &str, content_id: &str, symbols: FileSymbols) {
        self.files.insert(key(path, content_id), symbols);
        self.has_changed = true;
    }

    /// Whether anything was added since the cache was read.
    pub fn has_changed(&self) -> bool {
        self.has_changed
    }

    /// Removes other files than these if there are too many of them. The items are paths and ids of contents.
    pub fn retain_some<'f>(&mut self, files: impl ExactSizeIterator<Item = (&'f str, &'f str)>) {
        if self.files.len() <= files.len().saturating_mul(MAX_RATIO) {
            return;
        }
        let mut kept = BTreeMap::new();
        for (path, content_id) in files {
            let key = key(path, content_id);
            if let Some(symbols) = self.files.remove(&key) {
                kept.insert(key, symbols);
            }
        }
        self.files = kept;
        self.has_changed = true;
    }
}

fn key(path: &str, content_id: &str) -> String {
    let extension = path.rsplit_once('.').map_or("", |(_, extension)| extension);
    format!("{content_id}.{extension}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn symbols(path: &str, text: &str) -> FileSymbols {
        FileSymbols::of(path, text).unwrap()
    }

    #[test]
    fn what_is_stored_is_read_again() {
        let mut cache = SymbolCache::default();
        cache.insert("a.py", "1", symbols("a.py", "def first(second): return second\n"));
        let mut stored = Vec::new();
        cache.write(&mut stored).unwrap();
        let read = SymbolCache::read(stored.as_slice()).unwrap();
        assert_eq!(read.get("b/a.py", "1"), cache.get("a.py", "1"));
        assert!(read.get("a.py", "1").is_some() && !read.has_changed());
        assert!(read.get("a.ts", "1").is_none(), "another grammar");
    }

    #[test]
    fn damaged_or_foreign_cache_is_refused() {
        assert!(matches!(SymbolCache::read(&b"x"[..]), Err(CacheError::Unreadable(_))));
        let other = zstd::encode_all(&br#"{"version":"0.0.1/1","names":[],"files":{}}"#[..], LEVEL).unwrap();
        assert!(matches!(SymbolCache::read(other.as_slice()), Err(CacheError::OtherVersion(_))));
    }

    #[test]
    fn index_that_is_none_is_refused() {
        for symbols in ["[[1,1,\"a\",null]]", "[[null,1,\"a\",0]]"] {
            let stored = format!(
                r#"{{"version":"{VERSION}","names":["a"],"files":{{"1.py":{{"symbols":{symbols},"references":[]}}}}}}"#
            );
            let stored = zstd::encode_all(stored.as_bytes(), LEVEL).unwrap();
            assert!(matches!(SymbolCache::read(stored.as_slice()), Err(CacheError::Unreadable(_))), "{symbols}");
        }
    }

    #[test]
    fn contents_of_earlier_commits_are_removed_when_they_are_many() {
        let mut cache = SymbolCache::default();
        for content in 0..10 {
            cache.insert("a.py", &content.to_string(), symbols("a.py", "def first(): pass\n"));
        }
        cache.retain_some([("a.py", "3"); 3].into_iter());
        assert!(cache.get("a.py", "1").is_some(), "ten of twelve");
        cache.retain_some([("a.py", "3")].into_iter());
        assert!(cache.get("a.py", "3").is_some() && cache.get("a.py", "1").is_none());
    }
}
