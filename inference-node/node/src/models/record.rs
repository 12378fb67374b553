//! What is known of a fetched model, in a file beside it, and who has a hand on it.
//!
//! A record appears by a rename after all that it names is on disk, so whatever has a record is whole. Three locks, all the
//! kernel's and so gone with their holder: `.pull` of a folder is held while something is fetched into or removed from it;
//! a model's `.lock` is shared by all that use it, and taken alone by who removes it; `.records` covers a change to a record.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use cfq_proto::model::ModelId;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::hub::Checksum;
use super::{ModelError, file_error};

const FORMAT: u32 = 1;
/// A look at a lock takes microseconds; who still has it after so many is using it.
const LOOKS: u32 = 5;
const LOOK: Duration = Duration::from_millis(10);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub format: u32,
    pub model: ModelId,
    pub pinned: bool,
    /// Seconds since 1970, as the other.
    pub fetched_at: i64,
    pub used_at: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<Origin>,
    /// The model's own first.
    pub files: Vec<StoredFile>,
}

/// Where on a hub the files are from. The commit is what the revision stood for; it stays until the model is updated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    pub endpoint: String,
    pub repo: String,
    pub revision: String,
    pub commit: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredFile {
    /// Below the model folder, so that it can be moved.
    pub path: PathBuf,
    pub bytes: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checksum: Option<Checksum>,
}

impl Record {
    pub fn new(model: ModelId, origin: Option<Origin>, files: Vec<StoredFile>, now: i64) -> Self {
        Self { format: FORMAT, model, pinned: false, fetched_at: now, used_at: now, origin, files }
    }

    pub fn read(path: &Path) -> Result<Option<Self>, ModelError> {
        let bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Ok(None);
            }
            Err(error) => return Err(file_error("read", path)(error)),
        };
        let unreadable = |why: String| ModelError::Record { path: path.to_owned(), why };
        let record: Self = serde_json::from_slice(&bytes).map_err(|error| unreadable(error.to_string()))?;
        if record.format != FORMAT {
            return Err(unreadable(format!("its format is {}, this version knows {FORMAT}", record.format)));
        }
        // The paths are removed with the model: they must not lead elsewhere.
        let below = |file: &StoredFile| file.path.components().all(|c| matches!(c, std::path::Component::Normal(_)));
        if record.files.is_empty() || !record.files.iter().all(below) {
            return Err(unreadable("it names files outside the model folder, or none".to_owned()));
        }
        Ok(Some(record))
    }

    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// Every file there with its size.
    pub fn is_whole(&self, models: &Path) -> bool {
        self.files.iter().all(|file| fs::metadata(models.join(&file.path)).is_ok_and(|meta| meta.len() == file.bytes))
    }
}

/// Complete and on disk, or as it was.
pub fn write_json<T: Serialize>(path: &Path, value: &T) -> Result<(), ModelError> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    let write = || -> io::Result<()> {
        let temporary = path.with_extension(format!("tmp-{}", std::process::id()));
        let mut file = File::create(&temporary)?;
        file.write_all(&serde_json::to_vec_pretty(value)?)?;
        file.sync_all()?;
        fs::rename(&temporary, path)?;
        sync(folder)
    };
    fs::create_dir_all(folder).map_err(file_error("create", folder))?;
    write().map_err(file_error("write", path))
}

/// The names in a folder, on disk.
pub fn sync(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// A file name for a model: readable, and its own.
pub fn stem(model: &ModelId) -> String {
    let digest = Sha256::digest(model.as_str());
    let own: String = digest.iter().take(8).map(|b| format!("{b:02x}")).collect();
    let last = model.as_str().rsplit(['/', ':']).next().unwrap_or_default();
    let fits = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_') { c } else { '_' };
    let name: String = last.chars().map(fits).take(100).collect();
    format!("{}-{own}", name.trim_start_matches('.'))
}

/// A lock that ends with its holder.
#[derive(Debug)]
pub struct Lock {
    file: File,
}

impl Lock {
    fn open(path: &Path) -> Result<File, ModelError> {
        let folder = path.parent().unwrap_or(Path::new("/"));
        fs::create_dir_all(folder).map_err(file_error("create", folder))?;
        let file = File::options().create(true).write(true).truncate(false).open(path);
        file.map_err(file_error("write", path))
    }

    /// `None` if somebody has it.
    pub fn try_alone(path: &Path) -> Result<Option<Self>, ModelError> {
        let file = Self::open(path)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Self { file })),
            Err(fs::TryLockError::WouldBlock) => Ok(None),
            Err(fs::TryLockError::Error(error)) => Err(file_error("lock", path)(error)),
        }
    }

    /// The same, but not put off by somebody who only looks whether it is taken, as `cfq models ls` does.
    pub fn try_alone_a_while(path: &Path) -> Result<Option<Self>, ModelError> {
        for _ in 0..LOOKS {
            if let Some(lock) = Self::try_alone(path)? {
                return Ok(Some(lock));
            }
            std::thread::sleep(LOOK);
        }
        Self::try_alone(path)
    }

    /// Waits for it.
    pub fn alone(path: &Path) -> Result<Self, ModelError> {
        let file = Self::open(path)?;
        file.lock().map_err(file_error("lock", path))?;
        Ok(Self { file })
    }

    /// Waits for it; others may share it.
    pub fn shared(path: &Path) -> Result<Self, ModelError> {
        let file = Self::open(path)?;
        file.lock_shared().map_err(file_error("lock", path))?;
        Ok(Self { file })
    }
}

impl Drop for Lock {
    /// Closing is not enough: a child that is between fork and exec has the same open file.
    fn drop(&mut self) {
        if let Err(error) = self.file.unlock() {
            tracing::debug!(%error, "cannot unlock a model");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_0_1_are_read_and_written_again_as_they_were() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/records");
        for (name, files) in [("hub-0.1.json", 3), ("package-0.1.json", 1)] {
            let record = Record::read(&folder.join(name)).unwrap().unwrap();
            assert_eq!(record.files.len(), files);
            let text = fs::read_to_string(folder.join(name)).unwrap();
            assert_eq!(serde_json::to_string_pretty(&record).unwrap(), text.trim(), "{name}");
        }
    }

    #[test]
    fn a_record_is_read_back_and_a_strange_one_is_refused_with_its_place() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/m.json");
        assert_eq!(Record::read(&path).unwrap(), None);
        let file = StoredFile { path: "hf/o/r/c/m.gguf".into(), bytes: 5, checksum: Checksum::sha256(&"a".repeat(64)) };
        let mut record = Record::new("hf:o/r:m.gguf".parse().unwrap(), None, vec![file], 7);
        write_json(&path, &record).unwrap();
        assert_eq!(Record::read(&path).unwrap().as_ref(), Some(&record));
        record.files[0].path = "../../etc/passwd".into();
        write_json(&path, &record).unwrap();
        assert!(Record::read(&path).unwrap_err().to_string().contains("m.json"));
        record.files[0].path = "x".into();
        record.format = 2;
        write_json(&path, &record).unwrap();
        assert!(Record::read(&path).unwrap_err().to_string().contains("format is 2"));
    }

    /// Written by the version that began with records: it must stay readable.
    #[test]
    fn the_first_format_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.json");
        let first = r#"{"format":1,"model":"hf:o/r:m.gguf","pinned":true,"fetched_at":1,"used_at":2,
            "origin":{"endpoint":"https://huggingface.co/","repo":"o/r","revision":"main","commit":"0123456789abcdef"},
            "files":[{"path":"hf/o/r/0123456789abcdef/m.gguf","bytes":3,
            "checksum":"git-sha1:ce013625030ba8dba906f756967f9e9ca394464a"}]}"#;
        fs::write(&path, first).unwrap();
        let record = Record::read(&path).unwrap().unwrap();
        assert!(record.pinned && record.bytes() == 3 && !record.is_whole(folder.path()));
    }

    #[test]
    fn names_are_readable_distinct_and_short() {
        let stem = |id: &str| super::stem(&id.parse().unwrap());
        assert!(stem("hf:o/r:a/model q4.gguf").starts_with("model_q4.gguf-"));
        assert_ne!(stem("hf:o/r:m.gguf"), stem("hf:o/r@v1:m.gguf"));
        assert!(stem(&format!("hf:o/r:{}", "x".repeat(200))).len() < 130);
        assert!(!stem("hf:o/r:.hidden").starts_with('.'));
    }

    #[test]
    fn whoever_shares_a_lock_keeps_others_from_having_it_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.lock");
        let (one, two) = (Lock::shared(&path).unwrap(), Lock::shared(&path).unwrap());
        assert!(Lock::try_alone(&path).unwrap().is_none());
        drop((one, two));
        assert!(Lock::try_alone(&path).unwrap().is_some());
    }

    #[test]
    fn a_lock_ends_with_its_holder_though_a_fork_still_has_the_file_open() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let first = Lock::try_alone(&path).unwrap().unwrap();
        let as_a_fork_has_it = first.file.try_clone().unwrap();
        assert!(Lock::try_alone(&path).unwrap().is_none());
        drop(first);
        assert!(Lock::try_alone(&path).unwrap().is_some());
        drop(as_a_fork_has_it);
    }
}
