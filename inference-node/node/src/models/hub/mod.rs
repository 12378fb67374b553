//! Models from a hub that speaks Hugging Face's protocol.
//!
//! A client of our own over the outbound HTTP client, and not the `hf-hub` crate: version 1.0 brings 221 crates, among them
//! a second crypto provider, which this workspace refuses (one TLS stack, `ring`), and a chunk store with its own database;
//! it resumes no download of a killed process, compares no checksum with what arrived, and has no word for a gated
//! repository. What is needed of the protocol is three requests. The price: files above 50 GB, which the hub hands out
//! over its chunk protocol only, cannot be fetched; split models are refused anyway.
//!
//! On disk, below `hf/<org>/<name>/`: `<commit>/<file>` is a whole and checked file; `.partial-<model>/<checksum>` is one
//! that is being fetched, with a note of what for; `<model>.json` records what was fetched, and makes it a model.

mod access;
mod checksum;
mod client;
mod error;
mod needed;
mod transfer;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use cfq_proto::model::ModelId;
use serde::{Deserialize, Serialize};

pub use access::{Hub, HubConfig, Patience};
pub use checksum::Checksum;
pub use error::HubError;

use super::{ModelError, Step, record};
use client::{Client, Described, Revision, Subject};
use needed::Fault;
use transfer::{Failed, Target, Tries, failed};

const MAIN: &str = "main";
const NOTE: &str = "for.json";

/// What is to be fetched, and to where.
pub(super) struct Wanted<'a> {
    pub model: &'a ModelId,
    pub repo: &'a str,
    pub revision: Option<&'a str>,
    pub file: &'a str,
    /// The repository's folder.
    pub place: &'a Path,
    /// Files of this repository that are here already, by checksum.
    pub known: &'a [(Checksum, PathBuf)],
}

/// What a partial download is for.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Note {
    pub model: ModelId,
    pub bytes: u64,
}

#[derive(Debug)]
pub(super) struct Pulled {
    pub endpoint: String,
    pub revision: String,
    pub commit: String,
    /// Path, size and checksum; the model's own file first.
    pub files: Vec<(PathBuf, u64, Checksum)>,
}

pub(super) fn partial_folder(place: &Path, model: &ModelId) -> PathBuf {
    place.join(format!(".partial-{}", record::stem(model)))
}

/// What was being fetched into a `.partial-` folder, and the bytes there are of it.
pub(super) fn unfinished(folder: &Path) -> Option<(Note, u64)> {
    let note: Note = serde_json::from_slice(&fs::read(folder.join(NOTE)).ok()?).ok()?;
    let files = fs::read_dir(folder).ok()?.flatten().filter(|entry| entry.file_name() != NOTE);
    let have = files.filter_map(|entry| entry.metadata().ok()).map(|meta| meta.len()).sum();
    Some((note, have))
}

/// Makes room for so many bytes, or says why not.
pub(super) type Room<'a> = dyn FnMut(u64, &mut dyn FnMut(Step)) -> Result<(), ModelError> + 'a;

/// Fetches what is missing. `room` is asked before anything large comes, for the bytes that will be added. Blocks, and must
/// not be called from asynchronous code.
pub(super) fn pull(
    hub: &Hub,
    wanted: &Wanted<'_>,
    room: &mut Room<'_>,
    report: &mut dyn FnMut(Step),
) -> Result<Pulled, ModelError> {
    let of_model = |source| ModelError::Hub { model: wanted.model.clone(), source };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(failed("start a runtime for", wanted.place))
        .map_err(of_model)?;
    let pulled = async {
        let client = Client::new(hub).map_err(of_model)?;
        let mut changed = false;
        loop {
            match once(&client, wanted, room, report).await {
                Ok(pulled) => return Ok(pulled),
                Err(Stopped::Model(error)) => return Err(error),
                Err(Stopped::Failed(Failed::Hub(error))) => return Err(of_model(error)),
                Err(Stopped::Failed(Failed::Changed)) if changed => {
                    let (repo, file) = (wanted.repo.to_owned(), wanted.file.to_owned());
                    return Err(of_model(HubError::Changing { repo, file }));
                }
                Err(Stopped::Failed(Failed::Changed)) => {
                    changed = true;
                    let why = "the file changed on the hub".to_owned();
                    report(Step::Again { why, wait: std::time::Duration::ZERO });
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
            () = stopped => Err(of_model(HubError::Stopped)),
            pulled = pulled => pulled,
        }
    })
}

enum Stopped {
    Model(ModelError),
    Failed(Failed),
}

impl From<HubError> for Stopped {
    fn from(error: HubError) -> Self {
        Self::Failed(Failed::Hub(error))
    }
}

impl From<Failed> for Stopped {
    fn from(failed: Failed) -> Self {
        Self::Failed(failed)
    }
}

async fn once(
    client: &Client,
    wanted: &Wanted<'_>,
    room: &mut Room<'_>,
    report: &mut dyn FnMut(Step),
) -> Result<Pulled, Stopped> {
    let asked = wanted.revision.unwrap_or(MAIN);
    let revision = describe(client, wanted, asked, report).await?;
    let names: BTreeSet<&str> = revision.files.keys().map(String::as_str).collect();
    let mut list = needed::beside(wanted.file, &names).map_err(|fault| fault_error(wanted, fault))?;
    let snapshot = wanted.place.join(&revision.commit);
    let partials = partial_folder(wanted.place, wanted.model);
    fs::create_dir_all(&partials).map_err(failed("create", &partials))?;

    let mut targets = targets(client, wanted, &revision, &list, report).await?;
    if needed::is_index(wanted.file)
        && let Some(index) = targets.first()
    {
        // Small, and says which of the large ones belong to it.
        one(client, wanted, &revision.commit, index, &snapshot, &partials, report, &mut |_| Step::Quiet).await?;
        let path = snapshot.join(wanted.file);
        let bytes = fs::read(&path).map_err(failed("read", &path))?;
        let shards = needed::shards(wanted.file, &bytes, &names).map_err(|fault| fault_error(wanted, fault))?;
        targets.extend(self::targets(client, wanted, &revision, &shards, report).await?);
        list.extend(shards);
    }

    forget_others(&partials, &targets)?;
    let total = targets.iter().map(|t| t.size).sum();
    let there = |t: &Target| -> u64 {
        if is_whole(&snapshot.join(&t.path), t.size) {
            return t.size;
        }
        fs::metadata(partials.join(t.checksum.hex())).map_or(0, |meta| meta.len().min(t.size))
    };
    let have: u64 = targets.iter().map(there).sum();
    let note = Note { model: wanted.model.clone(), bytes: total };
    record::write_json(&partials.join(NOTE), &note).map_err(Stopped::Model)?;
    report(Step::Begins { files: targets.len(), bytes: total, have });
    room(total - have, report).map_err(Stopped::Model)?;

    let mut before = 0;
    for target in &targets {
        let done = &mut |bytes| Step::Bytes { done: before + bytes, total };
        one(client, wanted, &revision.commit, target, &snapshot, &partials, report, done).await?;
        before += target.size;
        report(Step::Bytes { done: before, total });
    }
    let files = targets.into_iter().map(|t| (snapshot.join(&t.path), t.size, t.checksum)).collect();
    Ok(Pulled { endpoint: client.endpoint.to_string(), revision: asked.to_owned(), commit: revision.commit, files })
}

async fn describe(
    client: &Client,
    wanted: &Wanted<'_>,
    revision: &str,
    report: &mut dyn FnMut(Step),
) -> Result<Revision, HubError> {
    let mut tries = Tries::new(client);
    loop {
        match client.describe(Subject { repo: wanted.repo, revision, file: None }).await {
            Ok(revision) => return Ok(revision),
            Err(trouble) => tries.after(trouble, report).await?,
        }
    }
}

/// Size and checksum of each file, asked for one by one where the repository's description leaves them out.
async fn targets(
    client: &Client,
    wanted: &Wanted<'_>,
    revision: &Revision,
    list: &[String],
    report: &mut dyn FnMut(Step),
) -> Result<Vec<Target>, HubError> {
    let mut targets = Vec::new();
    for path in list {
        let mut described = revision.files.get(path).cloned().unwrap_or_default();
        let mut tries = Tries::new(client);
        while described.size.is_none() || described.checksum.is_none() {
            let subject = Subject { repo: wanted.repo, revision: &revision.commit, file: Some(path) };
            match client.look(subject).await {
                Ok(Described { size: Some(size), checksum: Some(checksum) }) => {
                    described = Described { size: Some(size), checksum: Some(checksum) };
                }
                Ok(_) => return Err(HubError::NoChecksum { repo: wanted.repo.to_owned(), file: path.clone() }),
                Err(trouble) => tries.after(trouble, report).await?,
            }
        }
        if let Described { size: Some(size), checksum: Some(checksum) } = described {
            targets.push(Target { path: path.clone(), size, checksum });
        }
    }
    Ok(targets)
}

fn is_whole(path: &Path, size: u64) -> bool {
    fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.len() == size)
}

/// Puts one file in its place, from what is here under another commit if it is the same, else from the hub.
#[allow(clippy::too_many_arguments)]
async fn one(
    client: &Client,
    wanted: &Wanted<'_>,
    commit: &str,
    target: &Target,
    snapshot: &Path,
    partials: &Path,
    report: &mut dyn FnMut(Step),
    done: &mut dyn FnMut(u64) -> Step,
) -> Result<(), Failed> {
    let place = snapshot.join(&target.path);
    if is_whole(&place, target.size) {
        return Ok(());
    }
    let folder = place.parent().unwrap_or(snapshot);
    fs::create_dir_all(folder).map_err(failed("create", folder))?;
    let same = wanted.known.iter().find(|(sum, path)| *sum == target.checksum && is_whole(path, target.size));
    if let Some((_, here)) = same
        && fs::hard_link(here, &place).is_ok()
    {
        return Ok(record::sync(folder).map_err(failed("write", folder))?);
    }
    let partial = partials.join(target.checksum.hex());
    let subject = Subject { repo: wanted.repo, revision: commit, file: Some(&target.path) };
    transfer::fetch(client, subject, target, &partial, report, done).await?;
    fs::rename(&partial, &place).map_err(failed("write", &place))?;
    Ok(record::sync(folder).map_err(failed("write", folder))?)
}

/// Halves of files that are no longer wanted: the revision moved on.
fn forget_others(partials: &Path, targets: &[Target]) -> Result<(), HubError> {
    for entry in fs::read_dir(partials).map_err(failed("read", partials))?.flatten() {
        let name = entry.file_name();
        let wanted = name == NOTE || targets.iter().any(|t| name == t.checksum.hex());
        if !wanted {
            fs::remove_file(entry.path()).map_err(failed("remove", &entry.path()))?;
        }
    }
    Ok(())
}

fn fault_error(wanted: &Wanted<'_>, fault: Fault) -> HubError {
    let (repo, file) = (wanted.repo.to_owned(), wanted.file.to_owned());
    match fault {
        Fault::Absent { choices } => HubError::NoFile { repo, file, choices },
        Fault::Part { whole } => HubError::Part { repo, file, whole },
        Fault::NoModel => HubError::NoModel { repo, file },
        Fault::Index(why) => HubError::Index { repo, file, why },
    }
}
