//! The locations of cfq's files: the XDG folders for an ordinary user, the system's folders for root. The folders of
//! root are never below /root, because most processes then run as another user that must be able to enter them.
//! `CFQ_DATA`, `CFQ_CACHE` and `CFQ_CONFIG` override all of them.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use cfq_link::child::Account;

use crate::files::{self, FileError, FolderError};

#[derive(Debug, thiserror::Error)]
pub enum PathsError {
    #[error("neither HOME nor {variable} is set, so cfq has no place for its files; set one of them")]
    NoHome { variable: &'static str },
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Folder(#[from] FolderError),
    #[error(
        "other users cannot enter {folder}, which contains {path}; as root, cfq runs most of its processes as \
         another user. Run `chmod o+x {folder}`, or choose other folders with CFQ_DATA and CFQ_CACHE"
    )]
    Closed { folder: PathBuf, path: PathBuf },
}

/// cfq's three folders, and the paths inside them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paths {
    pub data: PathBuf,
    pub cache: PathBuf,
    pub config: PathBuf,
}

impl Paths {
    pub fn from_environment() -> Result<Self, PathsError> {
        Self::resolve(|name| env::var_os(name), rustix::process::geteuid().is_root())
    }

    fn resolve(variable: impl Fn(&str) -> Option<OsString>, root: bool) -> Result<Self, PathsError> {
        let set = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let folder = |own, xdg, below_home, system| -> Result<PathBuf, PathsError> {
            if let Some(path) = set(own) {
                return Ok(std::path::absolute(&path).map_err(files::error("use", &path))?);
            }
            if root {
                return Ok(PathBuf::from(system));
            }
            // The XDG specification ignores a relative value.
            if let Some(path) = set(xdg).filter(|path| path.is_absolute()) {
                return Ok(path.join("cfq"));
            }
            let home = set("HOME").ok_or(PathsError::NoHome { variable: own })?;
            Ok(home.join(below_home).join("cfq"))
        };
        Ok(Self {
            data: folder("CFQ_DATA", "XDG_DATA_HOME", ".local/share", "/var/lib/cfq")?,
            cache: folder("CFQ_CACHE", "XDG_CACHE_HOME", ".cache", "/var/cache/cfq")?,
            config: folder("CFQ_CONFIG", "XDG_CONFIG_HOME", ".config", "/etc/cfq")?,
        })
    }

    /// Folder of the fetched Postgres and NATS programs. It keeps its name from cfq 0.1, so that nothing is fetched
    /// twice.
    pub fn services(&self) -> PathBuf {
        self.cache.join("engines")
    }

    /// Folder of the fetched models.
    pub fn models(&self) -> PathBuf {
        self.cache.join("models")
    }

    /// Folder of the server policies. It need not exist.
    pub fn server_policies_folder(&self) -> PathBuf {
        self.config.join("policies")
    }

    /// The lock file of the data folder.
    pub fn lock(&self) -> PathBuf {
        self.data.join("lock")
    }

    /// Folder of the pidfiles and of other files of the running processes.
    pub fn run(&self) -> PathBuf {
        self.data.join("run")
    }

    pub fn log(&self, process: &str) -> PathBuf {
        self.data.join("log").join(format!("{process}.log"))
    }

    pub fn pidfile(&self, process: &str) -> PathBuf {
        self.run().join(format!("{process}.pid"))
    }

    /// Folder of passwords, seeds and tokens. Only the user that cfq runs as can list it; each file is readable only by
    /// its owner.
    pub fn keys(&self) -> PathBuf {
        self.data.join("keys")
    }

    pub fn postgres(&self) -> PathBuf {
        self.data.join("postgres")
    }

    pub fn nats(&self) -> PathBuf {
        self.data.join("nats")
    }

    /// Checks that `account` can enter the data folder, then creates the data folder and its private subfolders. The
    /// account can enter two of them, whose files it may read if they belong to it, and can create nothing there.
    pub fn prepare(&self, account: Option<Account>) -> Result<(), PathsError> {
        if let Some(folder) = account.and_then(|account| closed_parent(&self.data, account)) {
            return Err(PathsError::Closed { folder, path: self.data.clone() });
        }
        // The account of the services must be able to enter the data folder; everything below has its own mode.
        files::create_folder(&self.data, if account.is_some() { 0o711 } else { 0o700 }, None)?;
        files::create_folder(&self.data.join("log"), 0o700, None)?;
        for entered in [self.run(), self.keys()] {
            files::create_entered_folder(&entered, account)?;
        }
        Ok(())
    }
}

/// The topmost folder above `path`, with links resolved, that `account` may not enter; `None` if it may enter all.
pub fn closed_parent(path: &Path, account: Account) -> Option<PathBuf> {
    // Only existing folders are checked; missing ones will be created with the right mode.
    let real = path.parent()?.ancestors().find_map(|folder| folder.canonicalize().ok())?;
    let mut folders: Vec<&Path> = real.ancestors().collect();
    folders.reverse();
    let closed = folders.into_iter().find(|folder| {
        fs::metadata(folder).is_ok_and(|meta| {
            let bit = if meta.uid() == account.uid {
                0o100
            } else if meta.gid() == account.gid {
                0o010
            } else {
                0o001
            };
            meta.mode() & bit == 0
        })
    });
    closed.map(Path::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn environment(pairs: &'static [(&str, &str)]) -> impl Fn(&str) -> Option<OsString> {
        move |name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).into())
    }

    #[test]
    fn users_get_xdg_folders_and_root_gets_system_folders() {
        let variables = environment(&[("HOME", "/home/u"), ("XDG_CACHE_HOME", "/c"), ("XDG_DATA_HOME", "rel")]);
        let user = Paths::resolve(variables, false).unwrap();
        assert_eq!(user.cache, Path::new("/c/cfq"));
        assert_eq!(user.data, Path::new("/home/u/.local/share/cfq"));
        assert_eq!(user.config, Path::new("/home/u/.config/cfq"));
        let variables = environment(&[("HOME", "/root"), ("XDG_DATA_HOME", "/root/d")]);
        let root = Paths::resolve(variables, true).unwrap();
        assert_eq!(root.data, Path::new("/var/lib/cfq"));
        assert!(Paths::resolve(environment(&[]), false).is_err());
    }

    #[test]
    fn cfq_variables_take_precedence() {
        let variables = environment(&[("CFQ_DATA", "/d"), ("CFQ_CACHE", "/k"), ("CFQ_CONFIG", "/e")]);
        let paths = Paths::resolve(variables, true).unwrap();
        assert_eq!((paths.data, paths.cache, paths.config), ("/d".into(), "/k".into(), "/e".into()));
    }

    #[test]
    fn fetched_services_of_0_1_are_found() {
        let paths = Paths { data: "/d".into(), cache: "/k".into(), config: "/e".into() };
        assert_eq!(paths.services(), Path::new("/k/engines"));
    }

    #[test]
    fn folder_that_another_user_cannot_enter_is_found() {
        let top = tempfile::tempdir().unwrap();
        let deep = top.path().join("a/b");
        fs::create_dir_all(&deep).unwrap();
        let other_user = Account { uid: 4_000_000, gid: 4_000_000 };
        let real = top.path().canonicalize().unwrap();
        fs::set_permissions(&real, fs::Permissions::from_mode(0o700)).unwrap();
        assert_eq!(closed_parent(&deep.join("c"), other_user), Some(real.clone()));
        assert_eq!(closed_parent(&deep.join("not/yet/there"), other_user), Some(real.clone()));
        fs::set_permissions(&real, fs::Permissions::from_mode(0o711)).unwrap();
        assert_eq!(closed_parent(&deep.join("c"), other_user), None);
        fs::set_permissions(real.join("a"), fs::Permissions::from_mode(0o750)).unwrap();
        assert_eq!(closed_parent(&deep.join("c"), other_user), Some(real.join("a")));
    }
}
