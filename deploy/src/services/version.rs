//! Version check of a service's program, by running it with `--version`. A file of the right name may be built for
//! another processor, lack a library, or be inaccessible to the account that runs it; only a run detects that.

use std::fmt;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use cfq_link::child::Account;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::ServiceKind;
use crate::paths::closed_parent;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
    pub patch: u32,
}

impl Version {
    pub const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self { major, minor, patch }
    }

    /// Parses the first word that begins like a version, for example in `postgres (PostgreSQL) 15.18 (Debian)` and
    /// `nats-server: v2.15.1`.
    fn parse(text: &str) -> Option<Self> {
        text.split_ascii_whitespace().find_map(|word| {
            let mut numbers = word.trim_start_matches('v').split('.').map(|part| {
                let digits: String = part.chars().take_while(char::is_ascii_digit).collect();
                digits.parse::<u32>().ok()
            });
            let major = numbers.next()??;
            let mut next = || numbers.next().flatten().unwrap_or(0);
            Some(Self { major, minor: next(), patch: next() })
        })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.major)?;
        if self.minor > 0 || self.patch > 0 {
            write!(f, ".{}", self.minor)?;
        }
        if self.patch > 0 { write!(f, ".{}", self.patch) } else { Ok(()) }
    }
}

/// Reason why a program cannot be used for a service.
#[derive(Debug, thiserror::Error)]
pub enum UnusableProgram {
    #[error("{program} is a folder")]
    Folder { program: PathBuf },
    /// The account that runs the program cannot enter `folder`, a folder above the program.
    #[error(
        "cfq runs as root and starts {program} under another account, which cannot enter {folder}: run \
         `chmod o+x {folder}`"
    )]
    ClosedFolder { program: PathBuf, folder: PathBuf },
    #[error("{program} does not run ({error})")]
    DoesNotRun { program: PathBuf, error: io::Error },
    #[error("`{program} --version` failed ({status}){}", after_space(stderr))]
    VersionFailed { program: PathBuf, status: ExitStatus, stderr: String },
    #[error("`{program} --version` printed {output:?}, which has no version")]
    NoVersion { program: PathBuf, output: String },
    #[error("its postgres is version {postgres}, but its initdb is version {initdb}")]
    MixedVersions { postgres: Version, initdb: Version },
    #[error("it is version {version}, older than {min}")]
    TooOld { version: Version, min: Version },
    #[error("its version is {version}, but the data folder needs Postgres {pinned}")]
    OtherMajor { version: Version, pinned: u32 },
}

fn after_space(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!(" {text}") }
}

/// Returns the version of the service's program at `path`.
pub fn probe(kind: ServiceKind, path: &Path, account: Option<Account>) -> Result<Version, UnusableProgram> {
    let version = match kind {
        ServiceKind::Nats => run(path, account)?,
        ServiceKind::Postgres => {
            let (postgres, initdb) = (run(&path.join("postgres"), account)?, run(&path.join("initdb"), account)?);
            if postgres.major != initdb.major {
                return Err(UnusableProgram::MixedVersions { postgres, initdb });
            }
            postgres
        }
    };
    let min = kind.min_version();
    if version < min {
        return Err(UnusableProgram::TooOld { version, min });
    }
    Ok(version)
}

fn run(path: &Path, account: Option<Account>) -> Result<Version, UnusableProgram> {
    let program = path.to_owned();
    if path.is_dir() {
        return Err(UnusableProgram::Folder { program });
    }
    let mut command = Command::new(path);
    command.arg("--version").env_clear().current_dir("/").stdin(Stdio::null());
    if let Some(account) = account {
        command.uid(account.uid).gid(account.gid);
    }
    let output = match command.output() {
        Ok(output) => output,
        Err(error) => {
            return Err(match account.and_then(|account| closed_parent(path, account)) {
                Some(folder) => UnusableProgram::ClosedFolder { program, folder },
                None => UnusableProgram::DoesNotRun { program, error },
            });
        }
    };
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(UnusableProgram::VersionFailed { program, status: output.status, stderr });
    }
    let text = String::from_utf8_lossy(&output.stdout);
    Version::parse(&text).ok_or_else(|| UnusableProgram::NoVersion { program, output: text.trim().to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    /// True if the file could not be run because it is open for writing.
    fn is_busy(reason: &UnusableProgram) -> bool {
        matches!(reason, UnusableProgram::DoesNotRun { error, .. } if error.kind() == io::ErrorKind::ExecutableFileBusy)
    }

    #[test]
    fn versions_are_parsed_from_program_output() {
        let parse = |text| Version::parse(text).unwrap();
        assert_eq!(parse("postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)"), Version::new(15, 18, 0));
        assert_eq!(parse("nats-server: v2.15.1"), Version::new(2, 15, 1));
        assert_eq!(parse("postgres (PostgreSQL) 19beta2"), Version::new(19, 0, 0));
        assert_eq!(Version::parse("no version"), None);
        assert!(Version::new(2, 12, 2) < ServiceKind::Nats.min_version());
        assert!(Version::new(2, 12, 3) == ServiceKind::Nats.min_version());
    }

    #[test]
    fn old_and_broken_programs_are_rejected_with_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("nats-server");
        let script = |text: &str| {
            // A new file each time: a child forked by another test's thread may still hold the previous file open.
            fs::remove_file(&program).ok();
            fs::write(&program, text).unwrap();
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
            let mut reason = probe(ServiceKind::Nats, &program, None).unwrap_err();
            while is_busy(&reason) {
                reason = probe(ServiceKind::Nats, &program, None).unwrap_err();
            }
            reason
        };
        let old = script("#!/bin/sh\necho nats-server: v2.12.2");
        assert!(
            matches!(old, UnusableProgram::TooOld { .. }) && old.to_string().contains("older than 2.12.3"),
            "{old}"
        );
        let failing = script("#!/bin/sh\necho lost >&2; exit 3");
        assert!(matches!(&failing, UnusableProgram::VersionFailed { stderr, .. } if stderr == "lost"), "{failing}");
        assert!(failing.to_string().ends_with(") lost"), "{failing}");
        let other = script("#!/bin/sh\necho hello");
        assert!(matches!(&other, UnusableProgram::NoVersion { output, .. } if output == "hello"), "{other}");
    }
}
