//! Paths of Unix sockets. The operating system limits such a path to about a hundred bytes; a data folder may be deeper.

use std::io;
use std::path::{Path, PathBuf};

/// Longest path of a socket, in bytes: 104 on macOS (108 on Linux), including the terminating zero.
const MAX_SOCKET_PATH_BYTES: usize = 103;

/// Returns a path to the socket `path` that is short enough to bind or to connect to. `path` itself if it is short
/// enough; otherwise, on Linux, a path through an open handle of its folder. This process keeps that handle, because
/// the short path is valid as long as the handle is open.
///
/// # Errors
/// The operating system's error if the folder cannot be opened; [`io::ErrorKind::InvalidFilename`] if the path is too
/// long and the system has no shorter one.
pub fn short_path(path: &Path) -> io::Result<PathBuf> {
    if path.as_os_str().len() <= MAX_SOCKET_PATH_BYTES {
        return Ok(path.to_owned());
    }
    through_folder_handle(path)
}

#[cfg(target_os = "linux")]
fn through_folder_handle(path: &Path) -> io::Result<PathBuf> {
    use std::os::fd::IntoRawFd;
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidFilename.into());
    };
    let handle = std::fs::File::open(folder)?.into_raw_fd();
    Ok(Path::new("/proc/self/fd").join(handle.to_string()).join(name))
}

#[cfg(not(target_os = "linux"))]
fn through_folder_handle(_path: &Path) -> io::Result<PathBuf> {
    Err(io::Error::new(
        io::ErrorKind::InvalidFilename,
        format!("the path has more than {MAX_SOCKET_PATH_BYTES} bytes; choose a shorter data folder with CFQ_DATA"),
    ))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn short_path_is_used_as_it_is() {
        assert_eq!(short_path(Path::new("/data/run/api.sock")).unwrap(), Path::new("/data/run/api.sock"));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn socket_in_a_deep_folder_can_be_bound_and_reached() {
        let top = tempfile::tempdir().unwrap();
        let deep = top.path().join("x".repeat(120));
        std::fs::create_dir(&deep).unwrap();
        let path = deep.join("api.sock");
        assert!(UnixListener::bind(&path).is_err(), "the path is not too long for this test");
        let _listener = UnixListener::bind(short_path(&path).unwrap()).unwrap();
        assert!(path.exists());
        UnixStream::connect(short_path(&path).unwrap()).unwrap();
    }
}
