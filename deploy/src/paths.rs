//! Where things lie. As a user the XDG folders; as root the system's, and never below /root, because the engines then
//! run as another user who must be able to walk there. `CFQ_DATA`, `CFQ_CACHE` and `CFQ_CONFIG` override.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use cfq_link::child::Account;

use crate::files::{self, FileError};

#[derive(Debug, thiserror::Error)]
pub enum PathsError {
    #[error("neither HOME nor {variable} is set, so there is no place for cfq's files; set one of them")]
    NoHome { variable: &'static str },
    #[error(transparent)]
    File(#[from] FileError),
    #[error(
        "{folder} is closed to other users, and {path} lies below it; cfq runs as root, so its engines run as another \
         user and must be able to pass. Run `chmod o+x {folder}`, or choose another place with CFQ_DATA and CFQ_CACHE"
    )]
    Closed { folder: PathBuf, path: PathBuf },
}

/// cfq's three folders, and the names of what is in them.
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
        let place = |ours, xdg, below_home, system| -> Result<PathBuf, PathsError> {
            if let Some(path) = set(ours) {
                return Ok(std::path::absolute(&path).map_err(files::failed("use", &path))?);
            }
            if root {
                return Ok(PathBuf::from(system));
            }
            // XDG: a relative value is to be ignored.
            if let Some(path) = set(xdg).filter(|path| path.is_absolute()) {
                return Ok(path.join("cfq"));
            }
            let home = set("HOME").ok_or(PathsError::NoHome { variable: ours })?;
            Ok(home.join(below_home).join("cfq"))
        };
        Ok(Self {
            data: place("CFQ_DATA", "XDG_DATA_HOME", ".local/share", "/var/lib/cfq")?,
            cache: place("CFQ_CACHE", "XDG_CACHE_HOME", ".cache", "/var/cache/cfq")?,
            config: place("CFQ_CONFIG", "XDG_CONFIG_HOME", ".config", "/etc/cfq")?,
        })
    }

    pub fn engines(&self) -> PathBuf {
        self.cache.join("engines")
    }

    pub fn models(&self) -> PathBuf {
        self.cache.join("models")
    }

    pub fn lock(&self) -> PathBuf {
        self.data.join("lock")
    }

    /// Pidfiles.
    pub fn run(&self) -> PathBuf {
        self.data.join("run")
    }

    pub fn log(&self, process: &str) -> PathBuf {
        self.data.join("log").join(format!("{process}.log"))
    }

    pub fn pidfile(&self, process: &str) -> PathBuf {
        self.run().join(format!("{process}.pid"))
    }

    /// Passwords, seeds and tokens; readable by the user cfq runs as, nobody else.
    pub fn keys(&self) -> PathBuf {
        self.data.join("keys")
    }

    pub fn postgres(&self) -> PathBuf {
        self.data.join("postgres")
    }

    pub fn nats(&self) -> PathBuf {
        self.data.join("nats")
    }

    /// Checks that `account` can walk to the data folder, then makes it and what stands in it.
    pub fn prepare(&self, account: Option<Account>) -> Result<(), PathsError> {
        if let Some(folder) = account.and_then(|account| closed_parent(&self.data, account)) {
            return Err(PathsError::Closed { folder, path: self.data.clone() });
        }
        // The engines' account must pass through the data folder; everything below has its own mode.
        files::folder(&self.data, if account.is_some() { 0o711 } else { 0o700 }, None)?;
        for private in [self.run(), self.data.join("log"), self.keys()] {
            files::folder(&private, 0o700, None)?;
        }
        Ok(())
    }
}

/// The first folder above `path`, from the root down and with links resolved, that `account` may not pass through.
pub fn closed_parent(path: &Path, account: Account) -> Option<PathBuf> {
    // What is not there yet will be made with the right mode.
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

    fn with(pairs: &'static [(&str, &str)]) -> impl Fn(&str) -> Option<OsString> {
        move |name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).into())
    }

    #[test]
    fn a_user_gets_the_xdg_folders_and_root_the_systems() {
        let user =
            Paths::resolve(with(&[("HOME", "/home/u"), ("XDG_CACHE_HOME", "/c"), ("XDG_DATA_HOME", "rel")]), false);
        let user = user.unwrap();
        assert_eq!(user.cache, Path::new("/c/cfq"));
        assert_eq!(user.data, Path::new("/home/u/.local/share/cfq"));
        assert_eq!(user.config, Path::new("/home/u/.config/cfq"));
        let root = Paths::resolve(with(&[("HOME", "/root"), ("XDG_DATA_HOME", "/root/d")]), true).unwrap();
        assert_eq!(root.data, Path::new("/var/lib/cfq"));
        assert!(Paths::resolve(with(&[]), false).is_err());
    }

    #[test]
    fn our_own_variables_come_first() {
        let paths =
            Paths::resolve(with(&[("CFQ_DATA", "/d"), ("CFQ_CACHE", "/k"), ("CFQ_CONFIG", "/e")]), true).unwrap();
        assert_eq!((paths.data, paths.cache, paths.config), ("/d".into(), "/k".into(), "/e".into()));
    }

    #[test]
    fn the_folder_that_stops_another_user_is_named() {
        let top = tempfile::tempdir().unwrap();
        let deep = top.path().join("a/b");
        fs::create_dir_all(&deep).unwrap();
        let stranger = Account { uid: 4_000_000, gid: 4_000_000 };
        let real = top.path().canonicalize().unwrap();
        fs::set_permissions(&real, fs::Permissions::from_mode(0o700)).unwrap();
        assert_eq!(closed_parent(&deep.join("c"), stranger), Some(real.clone()));
        assert_eq!(closed_parent(&deep.join("not/yet/there"), stranger), Some(real.clone()));
        fs::set_permissions(&real, fs::Permissions::from_mode(0o711)).unwrap();
        assert_eq!(closed_parent(&deep.join("c"), stranger), None);
        fs::set_permissions(real.join("a"), fs::Permissions::from_mode(0o750)).unwrap();
        assert_eq!(closed_parent(&deep.join("c"), stranger), Some(real.join("a")));
    }
}
