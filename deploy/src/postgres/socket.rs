//! The folder of the socket. A socket's path must fit into about a hundred bytes, so below a deep data folder a short
//! place is taken instead: the user's runtime folder, or /tmp, where somebody else could have been faster, so what is
//! there is only used if it is ours and closed.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use cfq_link::child::Account;

use super::PostgresError;
use crate::files;
use crate::paths::Paths;

/// 104 bytes of path on macOS with the zero (Linux has 108), less `/.s.PGSQL.5432.lock`, which is longer than the
/// socket's own name and made beside it.
const LONGEST: usize = 104 - 1 - 19;

pub fn place(paths: &Paths, account: Option<Account>) -> PathBuf {
    let beside = paths.data.join("postgres-socket");
    if fits(&beside) {
        return beside;
    }
    let name = format!("cfq-{}", files::short_name(&paths.data));
    let runtime = match account {
        Some(_) => Some(PathBuf::from("/run")),
        None => std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from),
    };
    let runtime = runtime.filter(|folder| folder.is_dir()).map(|folder| folder.join(&name)).filter(|path| fits(path));
    runtime.unwrap_or_else(|| Path::new("/tmp").join(&name))
}

fn fits(path: &Path) -> bool {
    path.as_os_str().len() <= LONGEST
}

pub fn folder(paths: &Paths, account: Option<Account>) -> Result<PathBuf, PostgresError> {
    let path = place(paths, account);
    let owner = account.map_or_else(|| rustix::process::geteuid().as_raw(), |account| account.uid);
    if let Ok(there) = std::fs::symlink_metadata(&path)
        && !(there.is_dir() && there.uid() == owner && there.mode() & 0o077 == 0)
    {
        return Err(PostgresError::SocketFolder { path });
    }
    files::folder(&path, 0o700, account)?;
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
    fn a_deep_data_folder_gets_a_short_socket_of_its_own() {
        let deep = |name: &str| paths(Path::new("/data").join("x".repeat(120)).join(name));
        let (a, b) = (place(&deep("a"), None), place(&deep("b"), None));
        assert!(fits(&a) && a != b);
        assert_eq!(place(&paths("/data".into()), None), Path::new("/data/postgres-socket"));
    }

    #[test]
    fn a_folder_open_to_others_is_refused() {
        let data = tempfile::tempdir().unwrap();
        let paths = paths(data.path().to_owned());
        let path = folder(&paths, None).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert!(matches!(folder(&paths, None), Err(PostgresError::SocketFolder { .. })));
    }
}
