//! The file of a backup: a tar archive, compressed with zstd. It contains `manifest.json`, then `keys/NAME` for each key,
//! then `database.dump` in pg_dump's custom format.

use std::cell::Cell;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::path::{Component, Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::{BackupError, Manifest};
use crate::files::{self, FileError};

/// Version of the archive's layout.
pub const FORMAT: u32 = 1;
const MANIFEST: &str = "manifest.json";
const KEYS: &str = "keys";
const DATABASE: &str = "database.dump";
const ZSTD_LEVEL: i32 = 3;
/// Ends of the names of keys. Nothing else in the folder of keys belongs to a backup, and nothing else is restored.
const KEY_ENDS: [&str; 6] = ["json", "key", "password", "pem", "seed", "token"];
/// Maximum size of the manifest, and of a key, in bytes.
pub const MAX_SMALL_BYTES: u64 = 1 << 20;
/// Maximum size of all entries before the database, in bytes.
const MAX_KEYS_BYTES: u64 = 64 << 20;
/// Size of the pieces in which files are copied, in bytes.
const COPY_BYTES: usize = 1 << 16;

/// Writes the archive to a temporary file in `folder`, which gets the name `to` once it is complete and on disk.
pub fn write(
    manifest: &Manifest,
    keys: &Path,
    mut dump: File,
    folder: &Path,
    to: &Path,
    stop: &AtomicBool,
) -> Result<u64, BackupError> {
    let failed = || |source| BackupError::Write { path: to.to_owned(), source };
    let archive = tempfile::Builder::new().prefix(".cfq-backup-").tempfile_in(folder).map_err(failed())?;
    let mut encoder = zstd::Encoder::new(archive.as_file(), ZSTD_LEVEL).map_err(failed())?;
    encoder.include_checksum(true).map_err(failed())?;
    let mut tar = tar::Builder::new(encoder);
    let created = Duration::from_secs_f64(manifest.created_at).as_secs();
    let mut append = |name: &Path, bytes: u64, content: &mut dyn Read| -> io::Result<()> {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes);
        header.set_mode(0o600);
        header.set_mtime(created);
        tar.append_data(&mut header, name, content)
    };
    let text = serde_json::to_vec_pretty(manifest).map_err(io::Error::other).map_err(failed())?;
    append(Path::new(MANIFEST), text.len() as u64, &mut &text[..]).map_err(failed())?;
    for name in key_names(keys)? {
        let path = keys.join(&name);
        let content = fs::read(&path).map_err(files::error("read", &path))?;
        if content.len() as u64 > MAX_SMALL_BYTES {
            return Err(BackupError::LargeKey { path });
        }
        append(&Path::new(KEYS).join(name), content.len() as u64, &mut &content[..]).map_err(failed())?;
    }
    let bytes = dump.seek(io::SeekFrom::End(0)).map_err(failed())?;
    dump.rewind().map_err(failed())?;
    append(Path::new(DATABASE), bytes, &mut Stoppable { inner: dump, stop }).map_err(failed())?;
    tar.into_inner().and_then(|encoder| encoder.finish()).and_then(|file| file.sync_all()).map_err(failed())?;
    let bytes = archive.as_file().metadata().map_err(failed())?.len();
    if stop.load(Ordering::Relaxed) {
        return Err(BackupError::Interrupted);
    }
    match archive.persist_noclobber(to) {
        Ok(_) => {}
        Err(error) if error.error.kind() == io::ErrorKind::AlreadyExists => {
            return Err(BackupError::Exists { path: to.to_owned() });
        }
        Err(error) => return Err(failed()(error.error)),
    }
    files::sync_folder(folder)?;
    Ok(bytes)
}

fn is_key(name: &OsStr) -> bool {
    let path = Path::new(name);
    path.extension().and_then(OsStr::to_str).is_some_and(|end| KEY_ENDS.contains(&end))
}

/// Names of the keys in a folder, in order.
fn key_names(folder: &Path) -> Result<Vec<PathBuf>, FileError> {
    let failed = || files::error("read", folder);
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed())? {
        let entry = entry.map_err(failed())?;
        if entry.file_type().map_err(failed())?.is_file() && is_key(&entry.file_name()) {
            names.push(PathBuf::from(entry.file_name()));
        }
    }
    names.sort();
    Ok(names)
}

/// Reads an archive: writes the keys to the folder `keys`, and the database to `dump`, which is then at its beginning.
pub fn read(
    file: File,
    keys: &Path,
    mut dump: File,
    from: &Path,
    stop: &AtomicBool,
) -> Result<(Manifest, File), BackupError> {
    let unreadable = |source| BackupError::Unreadable { path: from.to_owned(), source };
    let missing = |what: &str| unreadable(io::Error::new(io::ErrorKind::UnexpectedEof, format!("it has no {what}")));
    let left = Rc::new(Cell::new(MAX_KEYS_BYTES));
    let decoder = Limited { inner: zstd::Decoder::new(file).map_err(unreadable)?, left: left.clone() };
    let mut tar = tar::Archive::new(decoder);
    let mut entries = tar.entries().map_err(unreadable)?;
    let manifest = match entries.next().transpose().map_err(unreadable)? {
        Some(entry) if entry.path().is_ok_and(|path| path == Path::new(MANIFEST)) => {
            small(entry).map_err(unreadable)?
        }
        _ => return Err(missing(MANIFEST)),
    };
    let manifest: serde_json::Value = serde_json::from_slice(&manifest).map_err(io::Error::from).map_err(unreadable)?;
    if manifest["format"] != FORMAT {
        let version = manifest["cfq_version"].as_str().unwrap_or("of another version").to_owned();
        return Err(BackupError::Format { path: from.to_owned(), version });
    }
    let manifest: Manifest = serde_json::from_value(manifest).map_err(io::Error::from).map_err(unreadable)?;
    let mut has_database = false;
    for entry in entries {
        let mut entry = entry.map_err(unreadable)?;
        let path = entry.path().map_err(unreadable)?.into_owned();
        let parts: Vec<Component<'_>> = path.components().collect();
        match &parts[..] {
            [Component::Normal(folder), Component::Normal(name)] if *folder == KEYS && is_key(name) => {
                files::write_private(&keys.join(name), &small(entry).map_err(unreadable)?, None)?;
            }
            [Component::Normal(name)] if *name == DATABASE => {
                left.set(u64::MAX);
                copy(&mut entry, &mut dump, stop).map_err(|error| match error {
                    CopyError::Read(error) => unreadable(error),
                    CopyError::Write(error) => files::error("write", keys)(error).into(),
                })?;
                has_database = true;
            }
            _ => return Err(unreadable(io::Error::other(format!("it contains {}", path.display())))),
        }
    }
    if !has_database {
        return Err(missing(DATABASE));
    }
    // The checksum is at the end.
    io::copy(&mut tar.into_inner(), &mut io::sink()).map_err(unreadable)?;
    dump.rewind().map_err(files::error("read", from))?;
    Ok((manifest, dump))
}

/// The content of a small entry.
fn small(entry: impl Read) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    entry.take(MAX_SMALL_BYTES + 1).read_to_end(&mut content)?;
    if content.len() as u64 > MAX_SMALL_BYTES {
        return Err(io::Error::other("an entry is too large"));
    }
    Ok(content)
}

enum CopyError {
    Read(io::Error),
    Write(io::Error),
}

fn copy(from: &mut impl Read, to: &mut File, stop: &AtomicBool) -> Result<(), CopyError> {
    let mut from = Stoppable { inner: from, stop };
    let mut piece = vec![0; COPY_BYTES];
    loop {
        match from.read(&mut piece).map_err(CopyError::Read)? {
            0 => return Ok(()),
            read => to.write_all(&piece[..read]).map_err(CopyError::Write)?,
        }
    }
}

/// A reader of at most as many bytes as are left.
struct Limited<R> {
    inner: R,
    left: Rc<Cell<u64>>,
}

impl<R: Read> Read for Limited<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        match self.left.get().checked_sub(read as u64) {
            Some(left) => self.left.set(left),
            None => return Err(io::Error::other("the entries before the database are too large")),
        }
        Ok(read)
    }
}

/// A reader that fails once the flag is raised.
struct Stoppable<'s, R> {
    inner: R,
    stop: &'s AtomicBool,
}

impl<R: Read> Read for Stoppable<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(io::Error::other("interrupted"));
        }
        self.inner.read(buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let rows = [("tasks".to_owned(), 1)].into();
        Manifest { format: FORMAT, cfq_version: "0.1.0".to_owned(), created_at: 0.0, postgres: 15, rows }
    }

    /// Reads an archive with a manifest and these entries. Returns the error, and the names of the keys that were written.
    fn read_entries(entries: &[(&str, usize)]) -> (String, Vec<PathBuf>) {
        let folder = tempfile::tempdir().unwrap();
        let (path, keys) = (folder.path().join("backup"), folder.path().join(KEYS));
        fs::create_dir(&keys).unwrap();
        let encoder = zstd::Encoder::new(File::create(&path).unwrap(), ZSTD_LEVEL).unwrap();
        let mut tar = tar::Builder::new(encoder);
        let text = serde_json::to_vec(&manifest()).unwrap();
        let manifest = (MANIFEST, text);
        let entries = entries.iter().map(|(name, bytes)| (*name, vec![0; *bytes]));
        for (name, content) in std::iter::once(manifest).chain(entries) {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            tar.append_data(&mut header, name, &content[..]).unwrap();
        }
        tar.into_inner().unwrap().finish().unwrap();
        let dump = tempfile::tempfile_in(folder.path()).unwrap();
        let error = read(File::open(&path).unwrap(), &keys, dump, &path, &AtomicBool::new(false)).unwrap_err();
        let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
        let mut written: Vec<PathBuf> = fs::read_dir(&keys).unwrap().map(|e| e.unwrap().file_name().into()).collect();
        written.sort();
        (format!("{error}: {cause}"), written)
    }

    #[test]
    fn only_keys_and_the_database_are_read() {
        for name in ["keys/run.sh", "keys/.bashrc", "keys/a/b.key", "key", "other/b.key"] {
            let (error, written) = read_entries(&[(name, 10), (DATABASE, 10)]);
            assert!(error.contains("not a complete backup") && error.contains(name), "{name}: {error}");
            assert!(written.is_empty(), "{name}: {written:?}");
        }
    }

    #[test]
    fn entries_before_the_database_are_limited() {
        let (error, written) = read_entries(&[("keys/a.key", MAX_SMALL_BYTES as usize + 1)]);
        assert!(error.contains("too large") && written.is_empty(), "{error} {written:?}");
        let names: Vec<String> = (0..70).map(|n| format!("keys/{n}.key")).collect();
        let many: Vec<(&str, usize)> = names.iter().map(|name| (name.as_str(), MAX_SMALL_BYTES as usize)).collect();
        let (error, written) = read_entries(&many);
        assert!(error.contains("before the database are too large") && written.len() < 70, "{error} {written:?}");
    }

    #[test]
    fn archive_without_a_database_is_not_complete() {
        let (error, _) = read_entries(&[("keys/a.key", 10)]);
        assert!(error.contains("it has no database.dump"), "{error}");
    }
}
