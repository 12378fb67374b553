//! The user account that every process but `cfq up` itself and the runner runs as if cfq runs as root. Postgres refuses
//! to run as root, and the others do not need it. The account is not `nobody`, which unrelated programs may use: these could then change the
//! database's files, and root reads some of these files.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use cfq_link::child::{Account, Capabilities};

use crate::files::{self, FileError};
use crate::status_output::StatusOutput;

/// Name of the account if none is configured.
const DEFAULT_ACCOUNT_NAME: &str = "cfq";
/// Number of attempts to create the account: useradd fails while another program changes the accounts.
const CREATE_ATTEMPTS: u32 = 20;
const CREATE_RETRY_INTERVAL: Duration = Duration::from_millis(250);
const PASSWD: &str = "/etc/passwd";
/// File of the lock that one process holds while it creates the account.
const CREATION_LOCK: &str = "/run/cfq-account.lock";

#[derive(Debug, thiserror::Error)]
pub enum AccountError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(
        "as root, cfq runs Postgres, NATS, scheduler and node as the account `{name}`, but {passwd} has no such account; {}",
        next_steps(name)
    )]
    Missing { name: String, passwd: PathBuf },
    #[error(
        "as root, cfq runs Postgres, NATS, scheduler and node as the account `{name}`, which does not exist and which \
         `useradd` did not create ({reason}); {}",
        next_steps(name)
    )]
    NotCreated { name: String, reason: String },
    #[error(
        "Postgres, NATS, scheduler and node cannot run as {name:?}, which is root or in root's group; name another account \
         in `account` under [services], or in CFQ_ACCOUNT"
    )]
    Root { name: String },
    #[error(
        "as root, cfq runs Postgres, NATS, scheduler and node as another account, but this root lacks {missing}; run cfq \
         as an ordinary user, or start the container with these capabilities (`docker run --cap-add`)"
    )]
    Capabilities { missing: Capabilities },
}

fn next_steps(name: &str) -> String {
    format!(
        "create it with `useradd {} {name}`, name an account that no other program uses in `account` under [services] \
         or in CFQ_ACCOUNT, or run cfq as an ordinary user",
        USERADD_OPTIONS.join(" ")
    )
}

/// Options for an account without password, login and home folder.
const USERADD_OPTIONS: [&str; 7] =
    ["--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent", "--shell", "/usr/sbin/nologin"];

/// What root needs to start processes as another account, and to use the files of that account.
const NEEDED_CAPABILITIES: Capabilities =
    Capabilities::CHOWN.with(Capabilities::DAC_OVERRIDE).with(Capabilities::SETGID).with(Capabilities::SETUID);

/// Name of the account that `CFQ_ACCOUNT` sets; `None` if it is unset or empty.
pub fn from_environment() -> Option<String> {
    std::env::var("CFQ_ACCOUNT").ok().filter(|name| !name.is_empty())
}

/// Returns the account of Postgres, NATS, scheduler and node. `None` if cfq runs as an ordinary user: they then share the
/// account of that user. `configured` is a name or `UID:GID`; if it is `None`, the default account is returned, and
/// created if it does not exist.
pub fn for_services(configured: Option<&str>, status: StatusOutput) -> Result<Option<Account>, AccountError> {
    match existing(configured) {
        Err(AccountError::Missing { name, .. }) if configured.is_none() => create(&name, status).map(Some),
        found => found,
    }
}

/// Like [`for_services`], but creates nothing.
pub fn existing(configured: Option<&str>) -> Result<Option<Account>, AccountError> {
    if !rustix::process::geteuid().is_root() {
        return Ok(None);
    }
    let missing = NEEDED_CAPABILITIES.without(Capabilities::of_this_thread());
    if !missing.is_empty() {
        return Err(AccountError::Capabilities { missing });
    }
    let name = configured.unwrap_or(DEFAULT_ACCOUNT_NAME);
    let passwd = Path::new(PASSWD);
    let text = files::read_if_exists(passwd)?.unwrap_or_default();
    match parse_ids(name).or_else(|| find(&text, name)) {
        None => Err(AccountError::Missing { name: name.to_owned(), passwd: passwd.to_owned() }),
        Some(account) if account.uid == 0 || account.gid == 0 => Err(AccountError::Root { name: name.to_owned() }),
        Some(account) => Ok(Some(account)),
    }
}

fn create(name: &str, status: StatusOutput) -> Result<Account, AccountError> {
    let passwd = Path::new(PASSWD);
    // Two concurrent runs of useradd for one name can both succeed, and the second changes the ids of the first.
    // Only root can open the file of this lock.
    let path = Path::new(CREATION_LOCK);
    let lock = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(path)
        .map_err(files::error("open", path))?;
    lock.lock().map_err(files::error("lock", path))?;
    let created = || Ok::<_, FileError>(find(&files::read_if_exists(passwd)?.unwrap_or_default(), name));
    let mut reason = String::new();
    for _ in 0..CREATE_ATTEMPTS {
        // Another cfq may have created the account before this one got the lock.
        if let Some(account) = created()? {
            return Ok(account);
        }
        let mut useradd = Command::new("useradd");
        useradd.args(USERADD_OPTIONS).arg(name).stdin(Stdio::null());
        // Root's PATH may lack the folders of administration programs, for example in a cron job.
        useradd.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        match useradd.output() {
            Ok(output) if output.status.success() => {
                status.print(&format!(
                    "created the account `{name}`, as which Postgres, NATS, scheduler and node run (`userdel {name}` removes \
                     it)"
                ));
                continue;
            }
            Ok(output) => reason = String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            Err(error) => return Err(AccountError::NotCreated { name: name.to_owned(), reason: error.to_string() }),
        }
        std::thread::sleep(CREATE_RETRY_INTERVAL);
    }
    created()?.ok_or_else(|| AccountError::NotCreated { name: name.to_owned(), reason })
}

/// Parses a pair of numeric ids, `UID:GID`.
fn parse_ids(text: &str) -> Option<Account> {
    let (uid, gid) = text.split_once(':')?;
    Some(Account { uid: uid.parse().ok()?, gid: gid.parse().ok()? })
}

fn find(passwd: &str, wanted: &str) -> Option<Account> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        let (name, _password, uid, gid) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
        (name == wanted).then_some(())?;
        Some(Account { uid: parse_id(uid)?, gid: parse_id(gid)? })
    })
}

/// Parses a numeric id. macOS writes the id of `nobody` as -2.
#[allow(clippy::cast_sign_loss, reason = "user ids wrap: -2 is 4294967294")]
fn parse_id(text: &str) -> Option<u32> {
    text.parse().ok().or_else(|| text.parse::<i32>().ok().map(|id| id as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn account_is_found_by_name() {
        let passwd = "root:x:0:0::/root:/bin/sh\n\nbroken\nnobody:x:65534:65533:n:/:/usr/sbin/nologin\n";
        assert_eq!(find(passwd, "nobody"), Some(Account { uid: 65534, gid: 65533 }));
        assert_eq!(
            find("nobody:*:-2:-2::/var/empty:/usr/bin/false", "nobody"),
            Some(Account { uid: 4294967294, gid: 4294967294 })
        );
        assert_eq!(find(passwd, "cfq"), None);
    }

    #[test]
    fn configured_account_is_a_name_or_a_pair_of_ids_and_never_root() {
        if !rustix::process::geteuid().is_root() {
            assert_eq!(existing(Some("root")).unwrap(), None, "an ordinary user's services run as that user");
            return;
        }
        assert_eq!(existing(Some("450:451")).unwrap(), Some(Account { uid: 450, gid: 451 }));
        for root in ["root", "0:0", "0:451", "450:0"] {
            assert!(matches!(existing(Some(root)), Err(AccountError::Root { .. })), "{root}");
        }
        let message = existing(Some("no such account")).unwrap_err().to_string();
        for part in ["no such account", "useradd --system", "[services]", "CFQ_ACCOUNT"] {
            assert!(message.contains(part), "{part} in {message}");
        }
    }
}
