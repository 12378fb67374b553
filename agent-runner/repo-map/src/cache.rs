//! Symbols of files that were parsed before, by the content of the file, so that all worktrees and commits of a
//! repository share them.
//!
//! The stored form is JSON, compressed with zstd. It begins with a version; another version is discarded, as the
//! grammars may have changed.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Read, Write};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::symbols::{FileSymbols, Reach, Symbol};

/// Version of the stored form: that of this crate, and a number that grows with each change of the layout, of a grammar
/// or of what is a symbol.
const CACHE_VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "/3");
/// zstd's fastest standard level.
const ZSTD_LEVEL: i32 = 1;
/// Maximum size of the stored form when it is decompressed, in bytes.
const MAX_DECOMPRESSED_BYTES: u64 = 512 << 20;
/// Minimum capacity of the cache, in files.
const MIN_CAPACITY: usize = 50_000;
/// Capacity of the cache for each file of the commit. Files of other commits are evicted if there are more.
const CAPACITY_PER_FILE: usize = 4;
/// Approximate number of files that are written in the time in which one is parsed.
const FILES_WRITTEN_PER_PARSE: usize = 100;

/// Error: the stored form cannot be read. The cache can be made again from the files.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// It cannot be decompressed, or is not JSON of the expected form.
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

/// Name, reach, line, text and parent of a symbol.
type StoredSymbol = (Option<u32>, Reach, u32, Arc<str>, Option<u32>);

/// Symbols of a file; each name is an index.
#[derive(Serialize, Deserialize)]
struct StoredFile {
    symbols: Vec<StoredSymbol>,
    /// Uses of names.
    references: Vec<(u32, u32)>,
}

impl StoredFile {
    fn of(symbols: &FileSymbols, mut index: impl FnMut(&Arc<str>) -> u32) -> Self {
        let references = symbols.references.iter().map(|(name, uses)| (index(name), *uses)).collect();
        let stored = |symbol: &Symbol| {
            (symbol.name.as_ref().map(&mut index), symbol.reach, symbol.line, symbol.text.clone(), symbol.parent)
        };
        Self { symbols: symbols.symbols.iter().map(stored).collect(), references }
    }

    /// The symbols; `None` if the index of a name is out of range, or that of a parent is not before its child.
    fn symbols(self, names: &[Arc<str>]) -> Option<FileSymbols> {
        let name = |index: u32| names.get(index as usize).cloned();
        let symbols = self.symbols.into_iter().enumerate().map(|(position, (index, reach, line, text, parent))| {
            let name = match index {
                Some(index) => Some(name(index)?),
                None => None,
            };
            let is_before = parent.is_none_or(|parent| (parent as usize) < position);
            is_before.then_some(Symbol { name, reach, line, text, parent })
        });
        let symbols = symbols.collect::<Option<_>>()?;
        let references = self.references.into_iter().map(|(index, uses)| Some((name(index)?, uses.max(1))));
        Some(FileSymbols { symbols, references: references.collect::<Option<_>>()? })
    }
}

/// Symbols by the id of a file's content.
#[derive(Debug, Default)]
pub struct SymbolCache {
    files: BTreeMap<String, FileSymbols>,
    /// Number of files that were added or evicted since the cache was read.
    changed: usize,
}

impl SymbolCache {
    /// Reads the stored form.
    ///
    /// # Errors
    /// [`CacheError`] if it cannot be used.
    pub fn read(stored: impl Read) -> Result<Self, CacheError> {
        let decoder = zstd::Decoder::new(stored).map_err(CacheError::Unreadable)?;
        let mut text = Vec::new();
        decoder.take(MAX_DECOMPRESSED_BYTES).read_to_end(&mut text).map_err(CacheError::Unreadable)?;
        let stored: Stored = serde_json::from_slice(&text).map_err(|error| CacheError::Unreadable(error.into()))?;
        drop(text);
        if stored.version != CACHE_VERSION {
            return Err(CacheError::OtherVersion(stored.version));
        }
        let Stored { names, files, .. } = stored;
        let files = files.into_iter().map(|(key, file)| Some((key, file.symbols(&names)?))).collect::<Option<_>>();
        let files = files.ok_or_else(|| CacheError::Unreadable(io::ErrorKind::InvalidData.into()))?;
        Ok(Self { files, changed: 0 })
    }

    /// Writes the stored form.
    ///
    /// # Errors
    /// Those of `target`, and [`io::ErrorKind::FileTooLarge`] if the stored form could not be read again.
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
        let encoder = zstd::Encoder::new(target, ZSTD_LEVEL)?;
        let mut encoder = LimitedWriter { target: encoder, remaining_bytes: MAX_DECOMPRESSED_BYTES };
        serde_json::to_writer(&mut encoder, &Stored { version: CACHE_VERSION.to_owned(), names, files })?;
        encoder.target.finish()?.flush()
    }

    /// The symbols of a file with this content. The path matters because it selects the grammar.
    pub fn get(&self, path: &str, content_id: &str) -> Option<&FileSymbols> {
        self.files.get(&key(path, content_id))
    }

    /// Adds the symbols of a file.
    pub fn insert(&mut self, path: &str, content_id: &str, symbols: FileSymbols) {
        self.files.insert(key(path, content_id), symbols);
        self.changed += 1;
    }

    /// Whether anything was added since the cache was read.
    pub fn has_changed(&self) -> bool {
        self.changed > 0
    }

    /// Whether so much has changed that it takes longer to parse it again than to write the whole cache.
    pub fn is_worth_writing(&self) -> bool {
        self.changed.saturating_mul(FILES_WRITTEN_PER_PARSE) > self.files.len()
    }

    /// Evicts other files than these if the cache is over its capacity. The items are paths and ids of contents.
    pub fn evict_others<'f>(&mut self, files: impl ExactSizeIterator<Item = (&'f str, &'f str)>) {
        if self.files.len() <= files.len().saturating_mul(CAPACITY_PER_FILE).max(MIN_CAPACITY) {
            return;
        }
        let mut kept = BTreeMap::new();
        for (path, content_id) in files {
            let key = key(path, content_id);
            if let Some(symbols) = self.files.remove(&key) {
                kept.insert(key, symbols);
            }
        }
        self.changed += self.files.len();
        self.files = kept;
    }
}

/// Writes at most a number of bytes.
struct LimitedWriter<W> {
    target: W,
    remaining_bytes: u64,
}

impl<W: Write> Write for LimitedWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.target.write(bytes)?;
        let remaining = self.remaining_bytes.checked_sub(written as u64);
        self.remaining_bytes = remaining.ok_or(io::ErrorKind::FileTooLarge)?;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.target.flush()
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
    fn few_changes_are_not_worth_writing_a_large_cache() {
        let mut cache = SymbolCache::default();
        for content in 0..1000 {
            cache.insert("a.py", &content.to_string(), FileSymbols::NONE);
        }
        assert!(cache.is_worth_writing());
        let mut stored = Vec::new();
        cache.write(&mut stored).unwrap();
        let mut cache = SymbolCache::read(stored.as_slice()).unwrap();
        for content in 1000..1010 {
            cache.insert("a.py", &content.to_string(), FileSymbols::NONE);
        }
        assert!(cache.has_changed() && !cache.is_worth_writing());
        cache.insert("a.py", "1010", FileSymbols::NONE);
        assert!(cache.is_worth_writing());
    }

    #[test]
    fn more_than_can_be_read_again_is_not_written() {
        let mut limited = LimitedWriter { target: Vec::new(), remaining_bytes: 3 };
        assert_eq!(limited.write(b"123").unwrap(), 3);
        assert_eq!(limited.write(b"4").unwrap_err().kind(), io::ErrorKind::FileTooLarge);
    }

    #[test]
    fn damaged_or_foreign_cache_is_refused() {
        assert!(matches!(SymbolCache::read(&b"x"[..]), Err(CacheError::Unreadable(_))));
        let other = zstd::encode_all(&br#"{"version":"0.0.1/1","names":[],"files":{}}"#[..], ZSTD_LEVEL).unwrap();
        assert!(matches!(SymbolCache::read(other.as_slice()), Err(CacheError::OtherVersion(_))));
    }

    #[test]
    fn index_out_of_range_is_refused() {
        for symbols in ["[[1,\"File\",1,\"a\",null]]", "[[null,\"File\",1,\"a\",0]]"] {
            let stored = format!(
                r#"{{"version":"{CACHE_VERSION}","names":["a"],"files":{{"1.py":{{"symbols":{symbols},"references":[]}}}}}}"#
            );
            let stored = zstd::encode_all(stored.as_bytes(), ZSTD_LEVEL).unwrap();
            assert!(matches!(SymbolCache::read(stored.as_slice()), Err(CacheError::Unreadable(_))), "{symbols}");
        }
    }

    #[test]
    fn contents_of_earlier_commits_are_removed_when_they_are_many() {
        let mut cache = SymbolCache::default();
        for content in 0..MIN_CAPACITY {
            cache.insert("a.py", &content.to_string(), FileSymbols::NONE);
        }
        cache.evict_others([("a.py", "3")].into_iter());
        assert!(cache.get("a.py", "1").is_some(), "few enough");
        cache.insert("a.ts", "1", FileSymbols::NONE);
        cache.evict_others([("a.py", "3")].into_iter());
        assert!(cache.get("a.py", "3").is_some() && cache.get("a.py", "1").is_none());
    }
}
