//! The folder of the socket. The path of a socket is limited to about a hundred bytes, so a deep data folder gets a
//! short socket folder elsewhere: in the user's runtime folder, or in /tmp. Another user could have created a folder
//! there first, so an existing folder is used only if it belongs to the right user and is private.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use cfq_link::child::Account;

use super::PostgresError;
use crate::files;
use crate::paths::Paths;

/// Longest path of the folder, in bytes: a socket's path may have at most 104 bytes on macOS (108 on Linux), including
/// the terminating zero. Of these, 19 are for `/.s.PGSQL.5432.lock`, the longest name that Postgres creates in the
/// folder.
const MAX_FOLDER_BYTES: usize = 104 - 1 - 19;

/// The path of the socket folder. Creates nothing.
pub fn folder(paths: &Paths, account: Option<Account>) -> PathBuf {
    let in_data = paths.data.join("postgres-socket");
    if fits(&in_data) {
        return in_data;
    }
    let name = format!("cfq-{}", files::path_hash(&paths.data));
    let runtime = match account {
        Some(_) => Some(PathBuf::from("/run")),
        None => std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from),
    };
    let runtime = runtime.filter(|folder| folder.is_dir()).map(|folder| folder.join(&name)).filter(|path| fits(path));
    runtime.unwrap_or_else(|| Path::new("/tmp").join(&name))
}

fn fits(path: &Path) -> bool {
    path.as_os_str().len() <= MAX_FOLDER_BYTES
}

/// Creates the socket folder, or checks owner and mode of an existing one.
pub fn create_folder(paths: &Paths, account: Option<Account>) -> Result<PathBuf, PostgresError> {
    let path = folder(paths, account);
    let owner = account.map_or_else(|| rustix::process::geteuid().as_raw(), |account| account.uid);
    // In a folder of root, only root can have created it, for the account of an earlier start.
    let changes_account = account.is_some() && path.parent().is_some_and(files::only_own_user_writes);
    if let Ok(existing) = std::fs::symlink_metadata(&path)
        && !(existing.is_dir() && (existing.uid() == owner || changes_account) && existing.mode() & 0o077 == 0)
    {
        return Err(PostgresError::SocketFolder { path });
    }
    files::create_folder(&path, 0o700, account)?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn paths(data: PathBuf) -> Paths {
        Paths { data, cache: "/c".into(), config: "/e".into() }
    }

    #[test]
    fn deep_data_folder_gets_a_short_socket_folder_of_its_own() {
        let deep = |name: &str| paths(Path::new("/data").join("x".repeat(120)).join(name));
        let (a, b) = (folder(&deep("a"), None), folder(&deep("b"), None));
        assert!(fits(&a) && a != b);
        assert_eq!(folder(&paths("/data".into()), None), Path::new("/data/postgres-socket"));
    }

    #[test]
    fn socket_folder_open_to_others_is_refused() {
        let data = tempfile::tempdir().unwrap();
        let paths = paths(data.path().to_owned());
        let path = create_folder(&paths, None).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert!(matches!(create_folder(&paths, None), Err(PostgresError::SocketFolder { .. })));
    }
}
