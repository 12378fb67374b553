//! Unpacking of a wheel. A wheel is a zip file from a third party, so the number of entries and the bytes actually
//! written are limited, and no entry may be written outside the destination folder.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};

use zip::ZipArchive;

use super::{WheelError, file_error, remove_abandoned};

/// Number of written files that are kept open and then synced together: few enough for the limit on open files, many
/// enough that one journal commit of the file system covers many of them.
const FILES_PER_SYNC: usize = 128;

/// Limits for unpacking one wheel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnpackLimits {
    /// Maximum total size of all unpacked files, in bytes.
    pub bytes: u64,
    /// Maximum number of entries in the archive.
    pub entries: usize,
}

/// Unpacks the entries that `wanted` accepts into the new folder `dest`. Files keep their executable bit and are
/// readable by all users. An existing `dest` is left unchanged, because another process has then already unpacked the
/// same wheel.
///
/// # Errors
/// See [`WheelError`].
pub fn extract(
    wheel: &Path,
    dest: &Path,
    wanted: impl Fn(&str) -> bool,
    limits: UnpackLimits,
) -> Result<(), WheelError> {
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

fn unpack(wheel: &Path, root: &Path, wanted: impl Fn(&str) -> bool, limits: UnpackLimits) -> Result<(), WheelError> {
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
        let stays_below = relative.components().all(|part| matches!(part, Component::Normal(_)));
        if !stays_below || name.contains(['\0', '\\']) || entry.is_symlink() {
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
        // Reads one byte more than allowed, to distinguish a file of exactly the limit from a larger one.
        let copied = io::copy(&mut (&mut entry).take(left.saturating_add(1)), &mut file)
            .map_err(file_error("unpack to", &path))?;
        left = left.checked_sub(copied).ok_or_else(too_large)?;
        // The umask may have removed bits that another user needs to run this file.
        file.set_permissions(fs::Permissions::from_mode(mode)).map_err(file_error("write", &path))?;
        written.push((path, file));
        if written.len() >= FILES_PER_SYNC {
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

    const LIMITS: UnpackLimits = UnpackLimits { bytes: 1 << 20, entries: 10 };

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
    fn wanted_entries_are_unpacked_with_their_executable_bit() {
        let folder = tempfile::tempdir().unwrap();
        let wheel =
            wheel(folder.path(), &[("a/bin/run", 0o700, b"run"), ("a/data", 0o600, b"data"), ("b", 0o600, b"b")]);
        let dest = folder.path().join("out");
        extract(&wheel, &dest, |name| name.starts_with("a/"), LIMITS).unwrap();
        assert_eq!((mode(&dest.join("a/bin/run")), mode(&dest.join("a/data"))), (0o755, 0o644));
        assert_eq!(mode(&dest.join("a/bin")), 0o755);
        assert!(!dest.join("b").exists());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "the wheel and the folder, no temporary");
    }

    #[test]
    fn name_outside_the_folder_is_rejected_and_nothing_is_written() {
        for name in ["../evil", "/etc/evil", "a/../../evil", "a\\..\\evil"] {
            let folder = tempfile::tempdir().unwrap();
            let wheel = wheel(folder.path(), &[("fine", 0o644, b"x"), (name, 0o644, b"x")]);
            let dest = folder.path().join("out");
            let error = extract(&wheel, &dest, |_| true, LIMITS).unwrap_err();
            assert!(matches!(error, WheelError::UnsafeName { .. }), "{name}: {error}");
            assert!(!dest.exists());
        }
    }

    #[test]
    fn link_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a-1-py3-none-any.whl");
        let mut zip = ZipWriter::new(File::create(&path).unwrap());
        zip.add_symlink("link", "/etc/passwd", SimpleFileOptions::default()).unwrap();
        zip.finish().unwrap();
        let error = extract(&path, &folder.path().join("out"), |_| true, LIMITS).unwrap_err();
        assert!(matches!(error, WheelError::UnsafeName { .. }), "{error}");
    }

    #[test]
    fn limits_apply_to_bytes_and_entries() {
        let folder = tempfile::tempdir().unwrap();
        let wheel = wheel(folder.path(), &[("a", 0o644, &[7; 600]), ("b", 0o644, &[7; 600])]);
        let dest = folder.path().join("out");
        for limits in [UnpackLimits { bytes: 1199, entries: 2 }, UnpackLimits { bytes: 1200, entries: 1 }] {
            let error = extract(&wheel, &dest, |_| true, limits).unwrap_err();
            assert!(matches!(error, WheelError::TooLarge { .. }), "{error}");
            assert!(!dest.exists());
        }
        extract(&wheel, &dest, |_| true, UnpackLimits { bytes: 1200, entries: 2 }).unwrap();
    }

    #[test]
    fn truncated_wheel_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let wheel = wheel(folder.path(), &[("a", 0o644, &[7; 6000])]);
        let bytes = fs::read(&wheel).unwrap();
        fs::write(&wheel, &bytes[..bytes.len() / 2]).unwrap();
        let error = extract(&wheel, &folder.path().join("out"), |_| true, LIMITS).unwrap_err();
        assert!(matches!(error, WheelError::Zip { .. }), "{error}");
    }
}
