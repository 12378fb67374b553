//! The user account that Postgres and NATS run as. Postgres refuses to run as root, and neither server needs root. If
//! cfq runs as root, both therefore run as an account that owns nothing else.

use std::path::{Path, PathBuf};

use cfq_link::child::Account;

use crate::files::{self, FileError};

/// Name of the account. It exists on every supported system; a dedicated account would have to be created and removed.
const ACCOUNT_NAME: &str = "nobody";

#[derive(Debug, thiserror::Error)]
pub enum AccountError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(
        "as root, cfq runs Postgres and NATS as the account `{ACCOUNT_NAME}`, but {passwd} has no such account; add \
         it, or run cfq as an ordinary user"
    )]
    Missing { passwd: PathBuf },
}

/// Returns the account that Postgres and NATS run as. `None` if cfq runs as an ordinary user: they then share the
/// account of that user.
pub fn for_services() -> Result<Option<Account>, AccountError> {
    if !rustix::process::geteuid().is_root() {
        return Ok(None);
    }
    let passwd = Path::new("/etc/passwd");
    let text = files::read_if_exists(passwd)?.unwrap_or_default();
    find(&text).map(Some).ok_or_else(|| AccountError::Missing { passwd: passwd.to_owned() })
}

fn find(passwd: &str) -> Option<Account> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        let (name, _password, uid, gid) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
        (name == ACCOUNT_NAME).then_some(())?;
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
        assert_eq!(find(passwd), Some(Account { uid: 65534, gid: 65533 }));
        assert_eq!(
            find("nobody:*:-2:-2::/var/empty:/usr/bin/false"),
            Some(Account { uid: 4294967294, gid: 4294967294 })
        );
        assert_eq!(find("root:x:0:0::/root:/bin/sh"), None);
    }
}
