//! File names and durable writes in the model folder.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use cfq_proto::model::ModelId;
use serde::Serialize;
use sha2::{Digest, Sha256};

use super::{ModelError, file_error};

/// Maximum length of the readable part of a file name, in characters.
const MAX_NAME_CHARS: usize = 100;

/// Writes a JSON file atomically: after a crash it has either its new or its old contents.
///
/// # Errors
/// [`ModelError::Io`].
pub fn write_json<T: Serialize>(path: &Path, value: &T) -> Result<(), ModelError> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    let write = || -> io::Result<()> {
        let temporary = path.with_extension(format!("tmp-{}", std::process::id()));
        let mut file = File::create(&temporary)?;
        file.write_all(&serde_json::to_vec_pretty(value)?)?;
        file.sync_all()?;
        fs::rename(&temporary, path)?;
        sync_folder(folder)
    };
    fs::create_dir_all(folder).map_err(file_error("create", folder))?;
    write().map_err(file_error("write", path))
}

/// Makes the entries of a folder durable (fsync).
///
/// # Errors
/// If the folder cannot be opened or written.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// File stem of a model: the readable end of its id, followed by a digest of the whole id, which makes the stem unique.
pub fn file_stem(model: &ModelId) -> String {
    let digest = Sha256::digest(model.as_str());
    let unique: String = digest.iter().take(8).map(|b| format!("{b:02x}")).collect();
    let last = model.as_str().rsplit(['/', ':']).next().unwrap_or_default();
    let allowed = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_') { c } else { '_' };
    let name: String = last.chars().map(allowed).take(MAX_NAME_CHARS).collect();
    format!("{}-{unique}", name.trim_start_matches('.'))
}

#[cfg(test)]
mod tests {
    #[test]
    fn file_stems_are_readable_distinct_and_short() {
        let stem = |id: &str| super::file_stem(&id.parse().unwrap());
        assert!(stem("hf:o/r:a/model q4.gguf").starts_with("model_q4.gguf-"));
        assert_ne!(stem("hf:o/r:m.gguf"), stem("hf:o/r@v1:m.gguf"));
        assert!(stem(&format!("hf:o/r:{}", "x".repeat(200))).len() < 130);
        assert!(!stem("hf:o/r:.hidden").starts_with('.'));
    }
}
