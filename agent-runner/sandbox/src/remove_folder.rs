//! Removal of a folder that a program in a sandbox has written.
//!
//! The program may have nested folders so deep that a recursive removal runs out of stack, open files or length of paths,
//! and may have taken the rights from its own folders. A folder that is nested too deep is moved to the top and removed
//! from there.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags, chmod, fchmod, fstat, openat, renameat, unlinkat};
use rustix::io::Errno;

/// Depth at which a folder is moved to the top instead of being followed.
const MAX_DEPTH: usize = 64;
/// Maximum number of rounds. Each one shortens the deepest folder by [`MAX_DEPTH`].
const MAX_ROUNDS: u32 = 100_000;
const FLAGS: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Removes a folder and everything below it, without following links. Succeeds if it does not exist. No program may run
/// in it.
///
/// # Errors
/// The first error of the system; a part may have been removed.
pub fn remove_folder(path: &Path) -> io::Result<()> {
    let top = match open(CWD, path) {
        Ok(top) => top,
        Err(Errno::NOENT) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let mut left = 0;
    for _ in 0..MAX_ROUNDS {
        let before = left;
        empty(&top, &mut left)?;
        if before == left {
            break;
        }
    }
    Ok(unlinkat(CWD, path, AtFlags::REMOVEDIR)?)
}

/// Opens a folder; gives its owner the rights that are needed. Never follows a link.
fn open(parent: impl AsFd, name: impl rustix::path::Arg + Copy) -> rustix::io::Result<OwnedFd> {
    match openat(&parent, name, FLAGS, Mode::empty()) {
        Err(Errno::ACCESS) => {}
        Err(error) => return Err(error),
        Ok(folder) => {
            // A folder that can be read may not permit to remove what is in it. Fails for a folder of another account.
            if fstat(&folder)?.st_mode & Mode::RWXU.bits() != Mode::RWXU.bits() {
                let _ = fchmod(&folder, Mode::RWXU);
            }
            return Ok(folder);
        }
    }
    let path = openat(&parent, name, FLAGS | OFlags::PATH, Mode::empty())?;
    // A descriptor without the right to read cannot change modes, but its path can.
    chmod(format!("/proc/self/fd/{}", path.as_raw_fd()), Mode::RWXU)?;
    openat(&path, ".", FLAGS, Mode::empty())
}

/// Removes what is in `top`, except folders that it moves there and folders that were not empty. Increases `left` by their
/// number.
fn empty(top: &OwnedFd, left: &mut u64) -> io::Result<()> {
    let mut open_dirs = vec![(Dir::read_from(top)?, None::<CString>)];
    loop {
        let depth = open_dirs.len();
        let Some((dir, _)) = open_dirs.last_mut() else { return Ok(()) };
        let Some(entry) = dir.read() else {
            if let Some((_, Some(name))) = open_dirs.pop()
                && let Some((parent, _)) = open_dirs.last()
            {
                *left += u64::from(!remove_empty(parent, &name)?);
            }
            continue;
        };
        let entry = entry?;
        let name: CString = entry.file_name().to_owned();
        if name.as_c_str() == c"." || name.as_c_str() == c".." {
            continue;
        }
        match unlinkat(dir.fd()?, &name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => continue,
            // Linux reports the first one for a folder, POSIX the second one.
            Err(Errno::ISDIR | Errno::PERM) => {}
            Err(error) => return Err(error.into()),
        }
        let below = open(dir.fd()?, name.as_c_str())?;
        if depth < MAX_DEPTH {
            open_dirs.push((Dir::new(below)?, Some(name)));
            continue;
        }
        *left += 1;
        let new_name = format!(".cfq-removed-{}-{left}", std::process::id());
        renameat(dir.fd()?, &name, top, new_name)?;
    }
}

/// Removes a folder that was emptied. False if it is not empty: entries can be missed in a folder that changes while it is
/// read, and the next round sees them.
fn remove_empty(parent: &Dir, name: &CStr) -> io::Result<bool> {
    match unlinkat(parent.fd()?, name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => Ok(true),
        Err(Errno::NOTEMPTY | Errno::EXIST) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn deep_and_closed_folders_are_removed_and_links_are_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let kept = folder.path().join("kept");
        fs::write(&kept, "").unwrap();
        let top = folder.path().join("top");
        fs::create_dir(&top).unwrap();
        symlink(folder.path(), top.join("link")).unwrap();
        fs::create_dir_all(top.join("closed/inner")).unwrap();
        fs::set_permissions(top.join("closed"), fs::Permissions::from_mode(0o000)).unwrap();
        // Too long for a path, so it is nested by moves.
        for _ in 0..100 {
            let part = folder.path().join("part");
            fs::create_dir_all(part.join("d/".repeat(99))).unwrap();
            fs::write(part.join("d/file"), "").unwrap();
            let end = part.join("d/".repeat(99));
            match fs::rename(top.join("nested"), end.join("nested")) {
                Ok(()) => {}
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::NotFound),
            }
            fs::rename(&part, top.join("nested")).unwrap();
        }
        remove_folder(&top).unwrap();
        assert!(!top.exists() && kept.exists());
        remove_folder(&top).unwrap();
        assert!(remove_folder(&kept).is_err(), "a file");
    }
}
