//! Record of a fetched model: a file in the model folder that lists the model's files.
//!
//! A record appears by a rename after everything it names is on disk, so a model with a record is complete. Three locks
//! protect a folder: `.pull` is held while files are fetched into the folder or removed from it; a model's `.lock` is
//! held shared by each process that uses the model, and exclusively for its removal; `.records` is held while a record
//! is changed.

use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use cfq_proto::model::ModelId;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::checksum::Checksum;
use super::{ModelError, file_error};

/// Version of the format of records.
const RECORD_FORMAT_VERSION: u32 = 1;

/// Record of a fetched model, stored as JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelRecord {
    /// Version of this format.
    pub format: u32,
    /// The model.
    pub model: ModelId,
    /// Whether the model is excluded from eviction.
    pub pinned: bool,
    /// Time of the fetch, in seconds since 1970.
    pub fetched_at: i64,
    /// Time of the last use, in seconds since 1970.
    pub used_at: i64,
    /// Where the model was fetched from; only for models from a hub.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<ModelOrigin>,
    /// Files of the model; the file that an engine loads is first.
    pub files: Vec<StoredFile>,
}

/// Place on a hub that a model was fetched from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ModelOrigin {
    /// Address of the hub.
    pub endpoint: String,
    /// Name of the repository, as `org/name`.
    pub repo: String,
    /// Requested revision.
    pub revision: String,
    /// Commit to which the revision resolved at the fetch. The model stays at this commit until it is updated.
    pub commit: String,
}

/// A file of a fetched model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StoredFile {
    /// Path relative to the model folder, so that the folder can be moved.
    pub path: PathBuf,
    /// Size, in bytes.
    pub bytes: u64,
    /// Checksum by which the file was verified.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checksum: Option<Checksum>,
}

impl ModelRecord {
    /// Creates the record of a model that was fetched at `now` (seconds since 1970).
    pub fn new(model: ModelId, origin: Option<ModelOrigin>, files: Vec<StoredFile>, now: i64) -> Self {
        Self { format: RECORD_FORMAT_VERSION, model, pinned: false, fetched_at: now, used_at: now, origin, files }
    }

    /// Reads a record; `None` if there is no such file.
    ///
    /// # Errors
    /// [`ModelError::UnreadableRecord`] if it is not a record of this version or names files outside the model folder,
    /// else [`ModelError::Io`].
    pub fn read(path: &Path) -> Result<Option<Self>, ModelError> {
        let bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Ok(None);
            }
            Err(error) => return Err(file_error("read", path)(error)),
        };
        let unreadable = |reason: String| ModelError::UnreadableRecord { path: path.to_owned(), reason };
        let record: Self = serde_json::from_slice(&bytes).map_err(|error| unreadable(error.to_string()))?;
        if record.format != RECORD_FORMAT_VERSION {
            let reason = format!("its format is {}, this version supports {RECORD_FORMAT_VERSION}", record.format);
            return Err(unreadable(reason));
        }
        // The files are removed with the model, so their paths must not lead out of the model folder.
        let inside = |file: &StoredFile| file.path.components().all(|c| matches!(c, Component::Normal(_)));
        if record.files.is_empty() || !record.files.iter().all(inside) {
            return Err(unreadable("it names no files, or files outside the model folder".to_owned()));
        }
        Ok(Some(record))
    }

    /// Size of all files, in bytes.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// Whether every file exists and has the recorded size.
    pub fn is_complete(&self, models: &Path) -> bool {
        self.files.iter().all(|file| fs::metadata(models.join(&file.path)).is_ok_and(|meta| meta.len() == file.bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::model_files::write_json;

    #[test]
    fn records_of_0_1_are_read_and_written_unchanged() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/records");
        for (name, files) in [("hub-0.1.json", 3), ("package-0.1.json", 1)] {
            let record = ModelRecord::read(&folder.join(name)).unwrap().unwrap();
            assert_eq!(record.files.len(), files);
            let text = fs::read_to_string(folder.join(name)).unwrap();
            assert_eq!(serde_json::to_string_pretty(&record).unwrap(), text.trim(), "{name}");
        }
    }

    #[test]
    fn record_is_read_back_and_an_invalid_one_is_refused_with_its_path() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/m.json");
        assert_eq!(ModelRecord::read(&path).unwrap(), None);
        let file = StoredFile { path: "hf/o/r/c/m.gguf".into(), bytes: 5, checksum: Checksum::sha256(&"a".repeat(64)) };
        let mut record = ModelRecord::new("hf:o/r:m.gguf".parse().unwrap(), None, vec![file], 7);
        write_json(&path, &record).unwrap();
        assert_eq!(ModelRecord::read(&path).unwrap().as_ref(), Some(&record));
        record.files[0].path = "../../etc/passwd".into();
        write_json(&path, &record).unwrap();
        assert!(ModelRecord::read(&path).unwrap_err().to_string().contains("m.json"));
        record.files[0].path = "x".into();
        record.format = 2;
        write_json(&path, &record).unwrap();
        assert!(ModelRecord::read(&path).unwrap_err().to_string().contains("format is 2"));
    }

    /// Records written by the first version that had records must stay readable.
    #[test]
    fn first_record_format_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.json");
        let first = r#"{"format":1,"model":"hf:o/r:m.gguf","pinned":true,"fetched_at":1,"used_at":2,
            "origin":{"endpoint":"https://huggingface.co/","repo":"o/r","revision":"main","commit":"0123456789abcdef"},
            "files":[{"path":"hf/o/r/0123456789abcdef/m.gguf","bytes":3,
            "checksum":"git-sha1:ce013625030ba8dba906f756967f9e9ca394464a"}]}"#;
        fs::write(&path, first).unwrap();
        let record = ModelRecord::read(&path).unwrap().unwrap();
        assert!(record.pinned && record.bytes() == 3 && !record.is_complete(folder.path()));
    }
}
