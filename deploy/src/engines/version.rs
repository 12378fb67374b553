//! Asking an engine what it is. Running it is the check: a file of that name may be for another machine, lack a
//! library, or be closed to the user it will run as.

use std::fmt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use cfq_link::child::Account;
use serde::{Deserialize, Serialize};

use super::Kind;
use crate::paths::closed_parent;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
    pub patch: u32,
}

impl Version {
    pub const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self { major, minor, patch }
    }

    /// The first word that starts like a version: `postgres (PostgreSQL) 15.18 (Debian)`, `nats-server: v2.15.1`.
    fn read(text: &str) -> Option<Self> {
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

/// The version of the engine at `path`, or why it cannot be used.
pub fn probe(kind: Kind, path: &Path, account: Option<Account>) -> Result<Version, String> {
    let version = match kind {
        Kind::Nats => run(path, account)?,
        Kind::Postgres => {
            let (server, initdb) = (run(&path.join("postgres"), account)?, run(&path.join("initdb"), account)?);
            if server.major != initdb.major {
                return Err(format!("its postgres is {server} and its initdb {initdb}"));
            }
            server
        }
    };
    let minimum = kind.minimum();
    if version < minimum {
        return Err(format!("it is version {version}, older than {minimum}"));
    }
    Ok(version)
}

fn run(program: &Path, account: Option<Account>) -> Result<Version, String> {
    let name = program.display();
    if program.is_dir() {
        return Err(format!("{name} is a folder"));
    }
    let mut command = Command::new(program);
    command.arg("--version").env_clear().current_dir("/").stdin(Stdio::null());
    if let Some(account) = account {
        command.uid(account.uid).gid(account.gid);
    }
    let output = command.output().map_err(|error| {
        match account.and_then(|account| closed_parent(program, account)) {
            Some(folder) => format!(
                "{name} cannot be run by the unprivileged user that engines run as under root, because {} is closed to others",
                folder.display()
            ),
            None => format!("{name} does not run ({error})"),
        }
    })?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr);
        return Err(format!("`{name} --version` failed ({}) {}", output.status, words.trim()).trim().to_owned());
    }
    Version::read(&text).ok_or_else(|| format!("`{name} --version` says {:?}, which names no version", text.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn versions_are_read_from_what_engines_print() {
        let read = |text| Version::read(text).unwrap();
        assert_eq!(read("postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)"), Version::new(15, 18, 0));
        assert_eq!(read("nats-server: v2.15.1"), Version::new(2, 15, 1));
        assert_eq!(read("postgres (PostgreSQL) 19beta2"), Version::new(19, 0, 0));
        assert_eq!(Version::read("no version"), None);
        assert!(Version::new(2, 9, 25) < Kind::Nats.minimum());
    }

    #[test]
    fn too_old_and_broken_are_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("nats-server");
        let script = |text: &str| {
            // A new file each time: the one before may still be held open by a child forked by another test's thread.
            fs::remove_file(&program).ok();
            fs::write(&program, text).unwrap();
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
            let mut reason = probe(Kind::Nats, &program, None).unwrap_err();
            while reason.contains("Text file busy") {
                reason = probe(Kind::Nats, &program, None).unwrap_err();
            }
            reason
        };
        assert!(script("#!/bin/sh\necho nats-server: v2.9.10").contains("older than 2.10"));
        assert!(script("#!/bin/sh\necho lost >&2; exit 3").contains("lost"));
        assert!(script("#!/bin/sh\necho hello").contains("names no version"));
    }
}
