//! Size and number of the files below a folder.

use std::path::Path;

use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, fstat, openat, statat, statvfs};

/// Maximum depth of folders that is followed. A program that nests them deeper is stopped.
const MAX_DEPTH: usize = 256;
/// Unit of `st_blocks`, in bytes.
pub(super) const BLOCK_BYTES: u64 = 512;

/// Size and number of files.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct DiskUsage {
    /// Disk space in bytes; files with several names count once.
    pub(super) bytes: u64,
    /// Files and folders.
    pub(super) files: u64,
    /// True if folders are nested deeper than is counted.
    pub(super) is_too_deep: bool,
}

impl DiskUsage {
    /// Counts what is below `folders`, not following links and without other mounts. Stops where more than `max_files`
    /// are found. Folders that cannot be read count as empty.
    pub(super) fn of(folders: &[&Path], max_files: u64) -> Self {
        Self::default().with(folders, max_files)
    }

    /// Adds what is below `folders`, as [`DiskUsage::of`] counts it.
    pub(super) fn with(mut self, folders: &[&Path], max_files: u64) -> Self {
        for folder in folders {
            self.add(folder, max_files);
        }
        self
    }

    fn add(&mut self, folder: &Path, max_files: u64) {
        let Ok(top) = openat(CWD, folder, FLAGS, Mode::empty()) else { return };
        let Ok(device) = fstat(&top).map(|stat| stat.st_dev) else { return };
        let mut open: Vec<Dir> = read_dir(top).into_iter().collect();
        while let Some(dir) = open.last_mut() {
            if self.files > max_files {
                return;
            }
            let Some(entry) = dir.read() else {
                open.pop();
                continue;
            };
            let Ok(entry) = entry else { continue };
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            let Ok(fd) = dir.fd() else { continue };
            let Ok(stat) = statat(fd, name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            // Changes to a mounted folder are counted where they are stored.
            if stat.st_dev != device {
                continue;
            }
            self.files += 1;
            let is_dir = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
            let names = if is_dir { 1 } else { u64::from(stat.st_nlink as u32).max(1) };
            self.bytes += u64::try_from(stat.st_blocks).unwrap_or_default() * BLOCK_BYTES / names;
            if is_dir {
                let below = openat(fd, name, FLAGS, Mode::empty()).ok().and_then(read_dir);
                match below {
                    Some(_) if open.len() >= MAX_DEPTH => self.is_too_deep = true,
                    Some(below) => open.push(below),
                    None => {}
                }
            }
        }
    }
}

/// Free space of the file system of a folder, in bytes, for users other than root. `None` if it is unknown.
pub(super) fn free_bytes(folder: &Path) -> Option<u64> {
    let system = statvfs(folder).ok()?;
    Some(system.f_bavail.saturating_mul(system.f_frsize))
}

const FLAGS: OFlags = OFlags::DIRECTORY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

fn read_dir(folder: OwnedFd) -> Option<Dir> {
    Dir::new(folder).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_and_files_with_several_names_count_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::create_dir(path("a")).unwrap();
        std::fs::write(path("a/file"), vec![1; 1 << 20]).unwrap();
        std::fs::hard_link(path("a/file"), path("same")).unwrap();
        std::os::unix::fs::symlink("/usr", path("link")).unwrap();
        let usage = DiskUsage::of(&[folder.path()], 100);
        assert_eq!((usage.files, usage.is_too_deep), (4, false));
        assert!((1 << 20..(1 << 20) + (64 << 10)).contains(&usage.bytes), "{usage:?}");
        assert_eq!(DiskUsage::of(&[folder.path()], 1).files, 2, "stops after the maximum");
    }

    #[test]
    fn deep_folders_are_reported() {
        let folder = tempfile::tempdir().unwrap();
        let deep = "d/".repeat(MAX_DEPTH + 1);
        std::fs::create_dir_all(folder.path().join(deep)).unwrap();
        assert!(DiskUsage::of(&[folder.path()], 1000).is_too_deep);
    }
}
