//! The repository map of a commit. The symbols of its files are parsed once for each content and kept in a cache, which
//! all worktrees of the repository share.

use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::io::{BufReader, BufWriter, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cfq_repo_map::{FileSymbols, MAX_SOURCE_BYTES, MapRequest, RepoMap, SymbolCache, has_symbols, repo_map};
use git2::Repository;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::error::{GitError, io_context};
use super::size_limits::{SizeLimits, StopCondition};
use super::start_point::{StartPoint, StartPointRequest};
use super::tree_files::{TreeFile, read_text, shared_folder, tree_files};

/// Maximum number of files and folders of a repository that is mapped.
const MAX_ENTRIES: u64 = 300_000;
/// Files that are read ahead, for each thread that parses.
const QUEUED_FILES: usize = 4;
/// Maximum number of threads that parse. Each needs memory for a syntax tree.
const MAX_THREADS: usize = 8;
/// Interval at which the wait for a thread checks whether it must stop.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Name of the folder of the caches.
const SYMBOLS_FOLDER: &str = "symbols";
/// Name of the cache in its folder.
const CACHE_FILE: &str = "symbols.json.zst";
/// Age after which a partly written cache belongs to no running process.
const MAX_PARTIAL_AGE: Duration = Duration::from_secs(3600);

/// What to map.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepoMapRequest {
    /// The repository and the commit.
    pub start: StartPointRequest,
    /// What to show of it.
    pub map: MapRequest,
    /// Folder of the caches, which exists. Each repository has a folder of its own in it.
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

/// Returns the folder of the caches below `parent`, and creates it if it is missing. Only this user reads it.
///
/// # Errors
/// If it cannot be created.
pub fn symbols_folder(parent: &Path) -> std::io::Result<PathBuf> {
    let folder = parent.join(SYMBOLS_FOLDER);
    create_private_folder(&folder)?;
    folder.canonicalize()
}

fn create_private_folder(folder: &Path) -> std::io::Result<()> {
    match fs::DirBuilder::new().mode(0o700).create(folder) {
        Err(source) if source.kind() != std::io::ErrorKind::AlreadyExists => Err(source),
        _ => Ok(()),
    }
}

/// Threads that parse files. They are started before a process forbids itself to start any.
pub(super) struct Parsers {
    files: SyncSender<SourceFile>,
    parsed: Receiver<(usize, FileSymbols)>,
    /// Maximum number of files sent and not received.
    max_in_flight: usize,
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
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
        let max_in_flight = threads * QUEUED_FILES;
        let (files, queue) = sync_channel::<SourceFile>(max_in_flight);
        let (sender, parsed) = sync_channel(max_in_flight);
        let queue = Arc::new(Mutex::new(queue));
        for _ in 0..threads {
            let (queue, sender) = (queue.clone(), sender.clone());
            std::thread::Builder::new().name("parser".into()).spawn(move || {
                loop {
                    // A receiver is consistent even if a thread panicked while it held the lock.
                    let next = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok(SourceFile { index, path, text }) = next else { return };
                    // Every file has a result, so that nobody waits for one that was the cause of a panic.
                    let symbols = std::panic::catch_unwind(|| FileSymbols::of(&path, &text));
                    let symbols = symbols.ok().flatten().unwrap_or(FileSymbols::NONE);
                    if sender.send((index, symbols)).is_err() {
                        return;
                    }
                }
            })?;
        }
        Ok(Self { files, parsed, max_in_flight })
    }
}

impl RepoMapRequest {
    /// Makes the map.
    ///
    /// # Errors
    /// As [`StartPointRequest::open`], the errors of `stop`, [`GitError::TooLarge`], and [`GitError::Io`] if the cache
    /// cannot be written.
    pub(super) fn answer(&self, parsers: &Parsers, stop: &StopCondition) -> Result<RepoMapReply, GitError> {
        let began = Instant::now();
        let (repository, start) = self.start.open()?;
        let limits = SizeLimits { entries: MAX_ENTRIES, ..SizeLimits::default() };
        let files = tree_files(&repository, &start.base, &limits, stop)?;
        let cache_file = self.create_cache_folder(shared_folder(&repository))?.join(CACHE_FILE);
        remove_old_partial_files(&cache_file);
        let reads = Instant::now();
        let mut cache = read_cache(&cache_file);
        let read_time = reads.elapsed();
        let unparsed = unparsed(&files, &cache);
        // Writing the cache takes about as long as reading it. Each call parses at least something.
        let within = Duration::from_millis(self.parse_within_ms);
        let until = (began + within.saturating_sub(2 * read_time)).max(Instant::now() + within / 4);
        let parsed = match parse(&repository, &files, &unparsed, parsers, (until, stop), &mut cache) {
            Ok(parsed) => parsed,
            Err(stopped) => {
                // The next call continues, if there is still time to write.
                if cache.has_changed() {
                    drop(write_cache(&cache, &cache_file));
                }
                return Err(stopped);
            }
        };
        let ids: Vec<String> = files.iter().map(|file| file.id.to_string()).collect();
        cache.evict_others(files.iter().zip(&ids).map(|(file, id)| (file.path.as_str(), id.as_str())));
        let is_unfinished = parsed < unparsed.len();
        if (cache.is_worth_writing() || is_unfinished)
            && let Err(source) = write_cache(&cache, &cache_file)
        {
            let operation = format!("write the cache {}", cache_file.display());
            if is_unfinished {
                return Err(GitError::Io { operation, source });
            }
            tracing::warn!(error = %source, "cannot {operation}; the files are read again next time");
        }
        if is_unfinished {
            let with_symbols = files.iter().filter(|file| is_source(file)).count();
            return Ok(RepoMapReply::Unfinished {
                parsed: with_symbols - (unparsed.len() - parsed),
                files: with_symbols,
            });
        }
        let none = FileSymbols::NONE;
        // A link may have the same content as a file.
        let symbols =
            |(file, id): (&TreeFile, &String)| cache.get(&file.path, id).filter(|_| is_source(file)).unwrap_or(&none);
        let files: Vec<(&str, &FileSymbols)> =
            files.iter().zip(&ids).map(|file| (file.0.path.as_str(), symbols(file))).collect();
        Ok(match repo_map(&files, &self.map) {
            Ok(map) => RepoMapReply::Map { start, map },
            Err(error) => RepoMapReply::Refused { reason: error.to_string() },
        })
    }

    /// The folder of a repository's cache; it is created. Only this user reads it.
    pub(super) fn create_cache_folder(&self, shared_folder: &Path) -> Result<PathBuf, GitError> {
        let folder = self.cache_dir.join(cache_name(shared_folder));
        io_context(format!("create the folder {}", folder.display()), create_private_folder(&folder))?;
        Ok(folder)
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

/// Parses files until the time is over. Returns how many of them are in the cache now, or cannot be read.
fn parse(
    repository: &Repository,
    files: &[TreeFile],
    unparsed: &[usize],
    parsers: &Parsers,
    (until, stop): (Instant, &StopCondition),
    cache: &mut SymbolCache,
) -> Result<usize, GitError> {
    const OPERATION: &str = "parse the files of the repository";
    let mut sent = 0;
    let mut received = 0;
    let mut unreadable = 0;
    let receive = |cache: &mut SymbolCache| {
        loop {
            match parsers.parsed.recv_timeout(CHECK_INTERVAL) {
                Ok((index, symbols)) => {
                    cache.insert(&files[index].path, &files[index].id.to_string(), symbols);
                    return Ok(());
                }
                Err(RecvTimeoutError::Timeout) => stop.check(OPERATION)?,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(GitError::Cancelled { operation: OPERATION.to_owned() });
                }
            }
        }
    };
    for index in unparsed {
        stop.check(OPERATION)?;
        if Instant::now() >= until {
            break;
        }
        let text = match read_text(repository, files[*index].id, MAX_SOURCE_BYTES) {
            // A file that is too large, or no text, has no symbols.
            Ok(text) => text.unwrap_or_default(),
            // It is missing, as in a partial clone, and may be there next time.
            Err(_) => {
                unreadable += 1;
                continue;
            }
        };
        if sent - received == parsers.max_in_flight {
            receive(cache)?;
            received += 1;
        }
        let path = files[*index].path.clone();
        if parsers.files.send(SourceFile { index: *index, path, text }).is_err() {
            return Err(GitError::Cancelled { operation: OPERATION.to_owned() });
        }
        sent += 1;
    }
    while received < sent {
        receive(cache)?;
        received += 1;
    }
    Ok(received + unreadable)
}

/// Name of the folder of a repository's cache.
fn cache_name(shared_folder: &Path) -> String {
    let path = shared_folder.canonicalize().unwrap_or_else(|_| shared_folder.to_owned());
    let digest = Sha256::digest(path.as_os_str().as_encoded_bytes());
    digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect()
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
    // Processes in other containers may have the same id.
    let process = cfq_link::clock::process_clock();
    let partial = file.with_file_name(format!("{process}{PARTIAL}"));
    let opened = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&partial)?;
    let mut target = BufWriter::new(opened);
    let written = cache.write(&mut target).and_then(|()| target.flush()).and_then(|()| fs::rename(&partial, file));
    if written.is_err() {
        drop(fs::remove_file(&partial));
    }
    written
}

/// End of the name of a file that is being written.
const PARTIAL: &str = ".partial";

/// Removes what killed processes left.
fn remove_old_partial_files(cache_file: &Path) {
    let Some(entries) = cache_file.parent().and_then(|folder| fs::read_dir(folder).ok()) else { return };
    for entry in entries.flatten() {
        let modified = entry.metadata().and_then(|metadata| metadata.modified());
        let is_old = modified.is_ok_and(|time| time.elapsed().is_ok_and(|age| age > MAX_PARTIAL_AGE));
        if is_old && entry.file_name().to_string_lossy().ends_with(PARTIAL) {
            drop(fs::remove_file(entry.path()));
        }
    }
}

#[cfg(test)]
mod tests;
