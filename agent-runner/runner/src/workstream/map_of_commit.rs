//! The repository map of a commit. The symbols of its files are parsed once for each content and kept in a cache, which
//! all worktrees of the repository share.

use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::io::{BufReader, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cfq_repo_map::{FileSymbols, MAX_SOURCE_BYTES, MapRequest, RepoMap, SymbolCache, has_symbols, repo_map};
use git2::Repository;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::error::{GitError, io_context};
use super::size_limits::{SizeLimits, StopCondition};
use super::source::find_source_repository;
use super::start_point::{StartPoint, StartPointRequest};
use super::tree_files::{TreeFile, read_text, shared_folder, tree_files};

/// Maximum number of files and folders of a repository that is mapped.
const MAX_ENTRIES: u64 = 300_000;
/// Files that are read ahead, for each thread that parses.
const QUEUED_FILES: usize = 4;

/// What to map.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepoMapRequest {
    /// The repository and the commit.
    pub start: StartPointRequest,
    /// What to show of it.
    pub map: MapRequest,
    /// Folder of the caches, which exists.
    pub cache_dir: PathBuf,
    /// Time in which files are parsed, in milliseconds. What is parsed is kept, so that the next request continues.
    pub parse_within_ms: u64,
}

/// The reply to a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RepoMapReply {
    Map {
        start: StartPoint,
        map: RepoMap,
    },
    /// The time was over after so many of these files; the same request continues.
    Unfinished {
        parsed: usize,
        files: usize,
    },
    /// The map cannot be made as requested.
    Refused {
        reason: String,
    },
}

/// Threads that parse files. They are started before a process forbids itself to start any.
pub(super) struct Parsers {
    files: SyncSender<SourceFile>,
    parsed: Receiver<(usize, FileSymbols)>,
    /// Maximum number of files sent and not received.
    most: usize,
}

struct SourceFile {
    index: usize,
    path: String,
    text: String,
}

impl Parsers {
    /// Starts one thread for each processor.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(super) fn start() -> std::io::Result<Self> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let most = threads * QUEUED_FILES;
        let (files, queue) = sync_channel::<SourceFile>(most);
        let (sender, parsed) = sync_channel(most);
        let queue = Arc::new(Mutex::new(queue));
        for _ in 0..threads {
            let (queue, sender) = (queue.clone(), sender.clone());
            std::thread::Builder::new().name("parser".into()).spawn(move || {
                loop {
                    // A receiver is consistent even if a thread panicked while it held the lock.
                    let next = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok(SourceFile { index, path, text }) = next else { return };
                    let symbols = FileSymbols::of(&path, &text).unwrap_or(FileSymbols::NONE);
                    if sender.send((index, symbols)).is_err() {
                        return;
                    }
                }
            })?;
        }
        Ok(Self { files, parsed, most })
    }
}

impl RepoMapRequest {
    /// Makes the map.
    ///
    /// # Errors
    /// As [`StartPointRequest::find`], the errors of `stop`, [`GitError::TooLarge`], and [`GitError::Io`] if the cache
    /// cannot be written.
    pub(super) fn answer(&self, parsers: &Parsers, stop: &StopCondition) -> Result<RepoMapReply, GitError> {
        let start = self.start.find()?;
        let repository = find_source_repository(&self.start.dir)?;
        let limits = SizeLimits { entries: MAX_ENTRIES, ..SizeLimits::default() };
        let files = tree_files(&repository, &start.base, &limits, stop)?;
        let cache_file = self.cache_dir.join(cache_name(shared_folder(&repository)));
        let mut cache = read_cache(&cache_file);
        let unparsed = unparsed(&files, &cache);
        let until = Instant::now() + Duration::from_millis(self.parse_within_ms);
        let parsed = parse(&repository, &files, &unparsed, parsers, (until, stop), &mut cache)?;
        let ids: Vec<String> = files.iter().map(|file| file.id.to_string()).collect();
        cache.retain_some(files.iter().zip(&ids).map(|(file, id)| (file.path.as_str(), id.as_str())));
        if cache.has_changed() {
            io_context(format!("write {}", cache_file.display()), write_cache(&cache, &cache_file))?;
        }
        if parsed < unparsed.len() {
            let with_symbols = files.iter().filter(|file| is_source(file)).count();
            return Ok(RepoMapReply::Unfinished {
                parsed: with_symbols - (unparsed.len() - parsed),
                files: with_symbols,
            });
        }
        let none = FileSymbols::NONE;
        let symbols = |(file, id): (&TreeFile, &String)| cache.get(&file.path, id).unwrap_or(&none);
        let files: Vec<(&str, &FileSymbols)> =
            files.iter().zip(&ids).map(|file| (file.0.path.as_str(), symbols(file))).collect();
        Ok(match repo_map(&files, &self.map) {
            Ok(map) => RepoMapReply::Map { start, map },
            Err(error) => RepoMapReply::Refused { reason: error.to_string() },
        })
    }
}

fn is_source(file: &TreeFile) -> bool {
    file.is_plain && has_symbols(&file.path)
}

/// Indexes of the files that the cache lacks, each content once.
fn unparsed(files: &[TreeFile], cache: &SymbolCache) -> Vec<usize> {
    let mut seen = HashSet::new();
    let is_unparsed = |file: &TreeFile| is_source(file) && cache.get(&file.path, &file.id.to_string()).is_none();
    let mut is_new = |file: &TreeFile| {
        let extension = file.path.rsplit_once('.').map(|(_, extension)| extension.to_owned());
        seen.insert((file.id, extension))
    };
    (0..files.len()).filter(|index| is_unparsed(&files[*index]) && is_new(&files[*index])).collect()
}

/// Parses files until the time is over. Returns how many of them are in the cache now.
fn parse(
    repository: &Repository,
    files: &[TreeFile],
    unparsed: &[usize],
    parsers: &Parsers,
    (until, stop): (Instant, &StopCondition),
    cache: &mut SymbolCache,
) -> Result<usize, GitError> {
    let mut sent = 0;
    let mut received = 0;
    let receive = |cache: &mut SymbolCache| match parsers.parsed.recv() {
        Ok((index, symbols)) => {
            cache.insert(&files[index].path, &files[index].id.to_string(), symbols);
            Ok(())
        }
        // All threads have panicked.
        Err(_) => Err(GitError::Cancelled { operation: "parse the files of the repository".to_owned() }),
    };
    for index in unparsed {
        stop.check("parse the files of the repository")?;
        if Instant::now() >= until {
            break;
        }
        // A file that is missing, as in a partial clone, too large or binary has no symbols.
        let text = read_text(repository, files[*index].id, MAX_SOURCE_BYTES).unwrap_or_default();
        if sent - received == parsers.most {
            receive(cache)?;
            received += 1;
        }
        let path = files[*index].path.clone();
        if parsers.files.send(SourceFile { index: *index, path, text }).is_err() {
            return Err(GitError::Cancelled { operation: "parse the files of the repository".to_owned() });
        }
        sent += 1;
    }
    while received < sent {
        receive(cache)?;
        received += 1;
    }
    Ok(received)
}

/// File name of a repository's cache.
fn cache_name(shared_folder: &Path) -> String {
    let path = shared_folder.canonicalize().unwrap_or_else(|_| shared_folder.to_owned());
    let digest = Sha256::digest(path.as_os_str().as_encoded_bytes());
    let hex: String = digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    format!("{hex}.json.zst")
}

/// The cache in a file; an empty one if the file is absent or cannot be used, because it can be made again.
fn read_cache(file: &Path) -> SymbolCache {
    let Ok(opened) = File::open(file) else { return SymbolCache::default() };
    SymbolCache::read(BufReader::new(opened)).unwrap_or_else(|error| {
        tracing::info!(file = %file.display(), error = %error, "the symbols of the repository are read again");
        SymbolCache::default()
    })
}

/// Replaces the file as a whole. Of two processes that write at the same time, one wins; the other's new symbols are
/// parsed again later.
fn write_cache(cache: &SymbolCache, file: &Path) -> std::io::Result<()> {
    let temporary = file.with_extension(format!("{}.new", std::process::id()));
    let written = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary).and_then(|opened| {
        let mut target = BufWriter::new(opened);
        cache.write(&mut target)?;
        target.flush()?;
        fs::rename(&temporary, file)
    });
    if written.is_err() {
        // Absent if it could not be created.
        drop(fs::remove_file(&temporary));
    }
    written
}

#[cfg(test)]
mod tests;
