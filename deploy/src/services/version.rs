//! Version check of a service's program, by running it with `--version`. A file of the right name may be built for
//! another machine, lack a library, or be inaccessible to the user it will run as; only running it shows that.

use std::fmt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use cfq_link::child::Account;
use serde::{Deserialize, Serialize};

use super::ServiceKind;
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

    /// Parses the first word that starts like a version: `postgres (PostgreSQL) 15.18 (Debian)`, `nats-server:
    /// v2.15.1`.
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

/// The version of the service's program at `path`, or why it cannot be used.
pub fn probe(kind: ServiceKind, path: &Path, account: Option<Account>) -> Result<Version, String> {
    let version = match kind {
        ServiceKind::Nats => run(path, account)?,
        ServiceKind::Postgres => {
            let (server, initdb) = (run(&path.join("postgres"), account)?, run(&path.join("initdb"), account)?);
            if server.major != initdb.major {
                return Err(format!("its postgres is version {server}, but its initdb is version {initdb}"));
            }
            server
        }
    };
    let min = kind.min_version();
    if version < min {
        return Err(format!("it is version {version}, older than {min}"));
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
    let output =
        command.output().map_err(|error| match account.and_then(|account| closed_parent(program, account)) {
            Some(folder) => format!(
                "the unprivileged user that runs it under root cannot run {name}, because other users cannot enter {}",
                folder.display()
            ),
            None => format!("{name} does not run ({error})"),
        })?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        return Err(format!("`{name} --version` failed ({}) {}", output.status, stderr.trim()).trim().to_owned());
    }
    Version::parse(&text).ok_or_else(|| format!("`{name} --version` printed {:?}, which has no version", text.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn versions_are_parsed_from_program_output() {
        let parse = |text| Version::parse(text).unwrap();
        assert_eq!(parse("postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)"), Version::new(15, 18, 0));
        assert_eq!(parse("nats-server: v2.15.1"), Version::new(2, 15, 1));
        assert_eq!(parse("postgres (PostgreSQL) 19beta2"), Version::new(19, 0, 0));
        assert_eq!(Version::parse("no version"), None);
        assert!(Version::new(2, 9, 25) < ServiceKind::Nats.min_version());
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
            while reason.contains("Text file busy") {
                reason = probe(ServiceKind::Nats, &program, None).unwrap_err();
            }
            reason
        };
        assert!(script("#!/bin/sh\necho nats-server: v2.9.10").contains("older than 2.10"));
        assert!(script("#!/bin/sh\necho lost >&2; exit 3").contains("lost"));
        assert!(script("#!/bin/sh\necho hello").contains("has no version"));
    }
}
