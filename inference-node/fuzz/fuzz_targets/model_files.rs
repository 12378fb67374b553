//! Files and folders that the fuzz targets write their inputs to.
#![allow(dead_code, reason = "each fuzz target uses a part")]

use std::io::{Seek, Write};
use std::path::{Path, PathBuf};

use tempfile::{NamedTempFile, TempDir};

/// The fixture model that the inputs replace a file of.
const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../engine/tests/fixtures/models/llama");
/// Size to which an input that is a file of tensors is extended, in bytes: larger than the tensors of the seeds.
const EXTENDED_BYTES: u64 = 1 << 20;

/// A text with letters, digits, an emoji and names of control tokens.
pub const MESSAGE: &str = "def add(a, b):\n    return a + 12345  # ü 🙂 <|im_end|></s>";

/// A folder on a file system in memory, if there is one: writing each input to it is cheap.
fn folder_in_memory() -> PathBuf {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() }
}

/// A new file with the suffix.
pub fn file(suffix: &str) -> NamedTempFile {
    tempfile::Builder::new().suffix(suffix).tempfile_in(folder_in_memory()).unwrap()
}

/// Replaces the content of the file.
pub fn write(file: &mut NamedTempFile, bytes: &[u8]) {
    file.as_file().set_len(0).unwrap();
    file.rewind().unwrap();
    file.write_all(bytes).unwrap();
}

/// Extends the file by a hole, so that the tensors of a header without their data lie within the file.
pub fn extend(file: &std::fs::File) {
    let bytes = file.metadata().unwrap().len();
    file.set_len(bytes.max(EXTENDED_BYTES)).unwrap();
}

/// A copy of the fixture's folder without its GGUF file.
pub fn model_folder() -> TempDir {
    let folder = tempfile::tempdir_in(folder_in_memory()).unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(Path::new(FIXTURE).join(name), folder.path().join(name)).unwrap();
    }
    folder
}
