//! Opens model files that may be anything: opening a FIFO waits for a writer, and a device has no end.

use std::fs::{File, FileType};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use crate::model::gguf::HeaderError;

/// Opens a file for reading. A folder can be opened, but not read.
///
/// # Errors
/// [`HeaderError::SpecialFile`] for a FIFO, a socket or a device; [`HeaderError::Open`].
pub fn open(path: &Path) -> Result<File, HeaderError> {
    let failed = |source| HeaderError::Open { path: path.to_owned(), source };
    let refuse_special = |kind: FileType| match special_kind(kind) {
        Some(kind) => Err(HeaderError::SpecialFile { path: path.to_owned(), kind }),
        None => Ok(()),
    };
    refuse_special(std::fs::metadata(path).map_err(failed)?.file_type())?;
    // The path may name another file by now. Without waiting, even a FIFO is opened at once.
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(failed)?;
    refuse_special(file.metadata().map_err(failed)?.file_type())?;
    Ok(file)
}

/// The name of a kind of file that is neither a regular file nor a folder.
fn special_kind(kind: FileType) -> Option<&'static str> {
    if kind.is_fifo() {
        Some("FIFO")
    } else if kind.is_socket() {
        Some("socket")
    } else if kind.is_char_device() || kind.is_block_device() {
        Some("device")
    } else {
        None
    }
}
