//! Models from a hub that speaks Hugging Face's protocol.
//!
//! The client is implemented here, on the workspace's HTTP client, instead of using the `hf-hub` crate. Version 1.0 of
//! that crate depends on 221 crates, among them a second crypto provider, which this workspace does not permit (one TLS
//! stack, `ring`), and a chunk store with its own database. It also does not resume the download of a killed process,
//! does not verify checksums, and has no error for a gated repository. Three requests of the protocol suffice. The
//! disadvantage: files above 50 GB, which the hub serves only over its chunk protocol, cannot be fetched.
//!
//! On disk, below `hf/<org>/<name>/`: `<commit>/<file>` is a complete, verified file; `.partial-<model>/<checksum>` is
//! a partial download, next to a note that names its model and total size; `<model>.json` is the record of a complete
//! model.

mod access;
mod client;
mod error;
mod needed;
#[cfg(test)]
mod tests;
mod transfer;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use cfq_proto::model::ModelId;
use serde::{Deserialize, Serialize};

pub use access::{Hub, HubConfig, HubRetryPolicy};
pub use error::HubError;

use super::checksum::Checksum;
use super::model_files::{file_stem, sync_folder, write_json};
use super::{ModelError, PullProgress};
use client::{FileInfo, HubClient, RequestTarget, Revision};
use needed::SelectionError;
use transfer::{FileProgress, Retries, TargetFile, TransferError, file_error};

const MAIN_BRANCH: &str = "main";
const NOTE_FILE: &str = "for.json";
/// Maximum size of an index of shards, in bytes: it is fetched before the quota and the disk are checked, and read as a
/// whole. The index of a model with some hundred experts per layer has about 10 MB.
const MAX_INDEX_BYTES: u64 = 64 << 20;

/// The model to fetch, and the folder to fetch it into.
pub(super) struct PullRequest<'a> {
    pub model: &'a ModelId,
    pub repo: &'a str,
    /// Requested revision; `None` is the main branch.
    pub revision: Option<&'a str>,
    pub file: &'a str,
    /// The repository's folder.
    pub folder: &'a Path,
    /// Files of this repository that are on disk already, by checksum.
    pub known: &'a [(Checksum, PathBuf)],
}

/// Note in the folder of a partial download: the model, and its size.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct PartialNote {
    pub model: ModelId,
    /// Size of all files of the complete model, in bytes.
    pub bytes: u64,
}

/// A fetched model.
#[derive(Debug)]
pub(super) struct PulledModel {
    pub endpoint: String,
    pub revision: String,
    pub commit: String,
    /// Path, size and checksum of each file; the file that an engine loads is first.
    pub files: Vec<(PathBuf, u64, Checksum)>,
}

/// The folder of a model's partial download.
pub(super) fn partial_folder(folder: &Path, model: &ModelId) -> PathBuf {
    folder.join(format!(".partial-{}", file_stem(model)))
}

/// Reads the folder of a partial download: its note, and the number of bytes fetched so far.
pub(super) fn unfinished(folder: &Path) -> Option<(PartialNote, u64)> {
    let note: PartialNote = serde_json::from_slice(&fs::read(folder.join(NOTE_FILE)).ok()?).ok()?;
    let files = fs::read_dir(folder).ok()?.flatten().filter(|entry| entry.file_name() != NOTE_FILE);
    let have = files.filter_map(|entry| entry.metadata().ok()).map(|meta| meta.len()).sum();
    Some((note, have))
}

/// Function that frees disk space for a number of bytes; the error says why that is not possible.
pub(super) type FreeSpace<'a> = dyn FnMut(u64, &mut dyn FnMut(PullProgress)) -> Result<(), ModelError> + 'a;

/// Fetches the missing files of a model. `free_space` is called before the transfer, with the number of bytes that the
/// transfer adds. Blocks, and must not be called from asynchronous code.
pub(super) fn pull(
    hub: &Hub,
    request: &PullRequest<'_>,
    free_space: &mut FreeSpace<'_>,
    report: &mut dyn FnMut(PullProgress),
) -> Result<PulledModel, ModelError> {
    let hub_error = |source| ModelError::HubFetch { model: request.model.clone(), source };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(file_error("start a runtime for", request.folder))
        .map_err(hub_error)?;
    let pulled = async {
        let client = HubClient::new(hub).map_err(hub_error)?;
        let mut changed = false;
        loop {
            match attempt(&client, request, free_space, report).await {
                Ok(pulled) => return Ok(pulled),
                Err(PullError::Model(error)) => return Err(error),
                Err(PullError::Transfer(TransferError::Hub(error))) => return Err(hub_error(error)),
                Err(PullError::Transfer(TransferError::FileChanged)) if changed => {
                    let (repo, file) = (request.repo.to_owned(), request.file.to_owned());
                    return Err(hub_error(HubError::FileKeepsChanging { repo, file }));
                }
                Err(PullError::Transfer(TransferError::FileChanged)) => {
                    changed = true;
                    let reason = "the file changed on the hub".to_owned();
                    report(PullProgress::Retrying { reason, wait: std::time::Duration::ZERO });
                }
            }
        }
    };
    let stopped = async {
        match hub.stop.clone() {
            Some(mut stop) => stop.raised().await,
            None => std::future::pending().await,
        }
    };
    runtime.block_on(async {
        tokio::select! {
            biased;
            () = stopped => Err(hub_error(HubError::Stopped)),
            pulled = pulled => pulled,
        }
    })
}

enum PullError {
    Model(ModelError),
    Transfer(TransferError),
}

impl From<HubError> for PullError {
    fn from(error: HubError) -> Self {
        Self::Transfer(TransferError::Hub(error))
    }
}

impl From<TransferError> for PullError {
    fn from(error: TransferError) -> Self {
        Self::Transfer(error)
    }
}

/// Resolves the revision and fetches its files.
async fn attempt(
    client: &HubClient,
    request: &PullRequest<'_>,
    free_space: &mut FreeSpace<'_>,
    report: &mut dyn FnMut(PullProgress),
) -> Result<PulledModel, PullError> {
    let requested = request.revision.unwrap_or(MAIN_BRANCH);
    let revision = describe(client, request, requested, report).await?;
    let names: BTreeSet<&str> = revision.files.keys().map(String::as_str).collect();
    let mut list = needed::with_companions(request.file, &names).map_err(|error| selection_error(request, error))?;
    let snapshot = request.folder.join(&revision.commit);
    let partials = partial_folder(request.folder, request.model);
    fs::create_dir_all(&partials).map_err(file_error("create", &partials))?;

    let mut targets = target_files(client, request, &revision, &list, report).await?;
    if needed::is_index(request.file)
        && let Some(index) = targets.first()
    {
        // The index names the weight files.
        if index.size > MAX_INDEX_BYTES {
            let (repo, file) = (request.repo.to_owned(), request.file.to_owned());
            return Err(HubError::IndexTooLarge { repo, file, size: index.size, limit: MAX_INDEX_BYTES }.into());
        }
        let mut progress = FileProgress { report: &mut *report, offset: None };
        fetch_file(client, request, &revision.commit, index, &snapshot, &partials, &mut progress).await?;
        let path = snapshot.join(request.file);
        let bytes = fs::read(&path).map_err(file_error("read", &path))?;
        let shards = needed::shards(request.file, &bytes, &names).map_err(|error| selection_error(request, error))?;
        targets.extend(target_files(client, request, &revision, &shards, report).await?);
        list.extend(shards);
    }

    remove_obsolete_partials(&partials, &targets)?;
    let total = total_bytes(request, &targets)?;
    let present = |t: &TargetFile| -> u64 {
        if is_complete(&snapshot.join(&t.path), t.size) {
            return t.size;
        }
        fs::metadata(partials.join(t.checksum.hex())).map_or(0, |meta| meta.len().min(t.size))
    };
    let have: u64 = targets.iter().map(present).sum();
    let note = PartialNote { model: request.model.clone(), bytes: total };
    write_json(&partials.join(NOTE_FILE), &note).map_err(PullError::Model)?;
    report(PullProgress::Started { files: targets.len(), bytes: total, have });
    free_space(total - have, report).map_err(PullError::Model)?;

    let mut before = 0;
    for target in &targets {
        let mut progress = FileProgress { report: &mut *report, offset: Some((before, total)) };
        fetch_file(client, request, &revision.commit, target, &snapshot, &partials, &mut progress).await?;
        before += target.size;
        report(PullProgress::Transferred { done: before, total });
    }
    let files = targets.into_iter().map(|t| (snapshot.join(&t.path), t.size, t.checksum)).collect();
    let endpoint = client.endpoint.to_string();
    Ok(PulledModel { endpoint, revision: requested.to_owned(), commit: revision.commit, files })
}

/// Resolves a revision, with retries.
async fn describe(
    client: &HubClient,
    request: &PullRequest<'_>,
    revision: &str,
    report: &mut dyn FnMut(PullProgress),
) -> Result<Revision, HubError> {
    let mut retries = Retries::new(client);
    loop {
        match client.describe(RequestTarget { repo: request.repo, revision, file: None }).await {
            Ok(revision) => return Ok(revision),
            Err(failure) => retries.wait_after(failure, report).await?,
        }
    }
}

/// Size and checksum of each file in `list`. If the description of the repository omits them, they are requested file
/// by file.
async fn target_files(
    client: &HubClient,
    request: &PullRequest<'_>,
    revision: &Revision,
    list: &[String],
    report: &mut dyn FnMut(PullProgress),
) -> Result<Vec<TargetFile>, HubError> {
    let mut targets = Vec::new();
    for path in list {
        let mut info = revision.files.get(path).cloned().unwrap_or_default();
        let mut retries = Retries::new(client);
        while info.size.is_none() || info.checksum.is_none() {
            let target = RequestTarget { repo: request.repo, revision: &revision.commit, file: Some(path) };
            match client.file_info(target).await {
                Ok(complete @ FileInfo { size: Some(_), checksum: Some(_) }) => info = complete,
                Ok(_) => return Err(HubError::NoChecksum { repo: request.repo.to_owned(), file: path.clone() }),
                Err(failure) => retries.wait_after(failure, report).await?,
            }
        }
        if let FileInfo { size: Some(size), checksum: Some(checksum) } = info {
            targets.push(TargetFile { path: path.clone(), size, checksum });
        }
    }
    Ok(targets)
}

/// Size of all files; the hub's sizes are not trusted.
fn total_bytes(request: &PullRequest<'_>, targets: &[TargetFile]) -> Result<u64, HubError> {
    targets.iter().try_fold(0u64, |total, target| total.checked_add(target.size)).ok_or_else(|| {
        let reason = "the sizes of its files add up to more than 64 bits".to_owned();
        HubError::UnexpectedResponse { what: request.repo.to_owned(), reason }
    })
}

fn is_complete(path: &Path, size: u64) -> bool {
    fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.len() == size)
}

/// Provides one file in the folder of the commit: by a hard link if the same content is on disk under another commit,
/// else from the hub.
async fn fetch_file(
    client: &HubClient,
    request: &PullRequest<'_>,
    commit: &str,
    target: &TargetFile,
    snapshot: &Path,
    partials: &Path,
    progress: &mut FileProgress<'_>,
) -> Result<(), TransferError> {
    let path = snapshot.join(&target.path);
    if is_complete(&path, target.size) {
        return Ok(());
    }
    let folder = path.parent().unwrap_or(snapshot);
    fs::create_dir_all(folder).map_err(file_error("create", folder))?;
    let same = request.known.iter().find(|(sum, path)| *sum == target.checksum && is_complete(path, target.size));
    if let Some((_, existing)) = same
        && fs::hard_link(existing, &path).is_ok()
    {
        return Ok(sync_folder(folder).map_err(file_error("write", folder))?);
    }
    let partial = partials.join(target.checksum.hex());
    let source = RequestTarget { repo: request.repo, revision: commit, file: Some(&target.path) };
    transfer::fetch(client, source, target, &partial, progress).await?;
    fs::rename(&partial, &path).map_err(file_error("write", &path))?;
    Ok(sync_folder(folder).map_err(file_error("write", folder))?)
}

/// Removes partial files that no target needs any more, because the revision moved.
fn remove_obsolete_partials(partials: &Path, targets: &[TargetFile]) -> Result<(), HubError> {
    for entry in fs::read_dir(partials).map_err(file_error("read", partials))?.flatten() {
        let name = entry.file_name();
        let needed = name == NOTE_FILE || targets.iter().any(|t| name == t.checksum.hex());
        if !needed {
            fs::remove_file(entry.path()).map_err(file_error("remove", &entry.path()))?;
        }
    }
    Ok(())
}

fn selection_error(request: &PullRequest<'_>, error: SelectionError) -> HubError {
    let (repo, file) = (request.repo.to_owned(), request.file.to_owned());
    match error {
        SelectionError::FileNotFound { choices } => HubError::FileNotFound { repo, file, choices },
        SelectionError::SplitPart { whole } => HubError::SplitPart { repo, file, whole },
        SelectionError::NotAModelFile => HubError::NotAModelFile { repo, file },
        SelectionError::InvalidIndex(reason) => HubError::InvalidIndex { repo, file, reason },
    }
}
