//! What preparations have installed, and where a check sees it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cfq_sandbox::{Mount, MountChanges};

use super::preparation::KeptFolder;
use super::prepared_store::PreparedFolder;

/// Paths of the checkout and of the home folder in a sandbox with namespaces. Installed programs contain them.
pub(super) const CHECKOUT_PATH: &str = "/checkout";
pub(super) const HOME_PATH: &str = "/home/user";
/// Folders of a prepared folder.
pub(super) const CHECKOUT_SUBDIR: &str = "checkout";
pub(super) const HOME_SUBDIR: &str = "home";

/// A preparation that ran.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreparationRun {
    /// Its name.
    pub name: String,
    /// Elapsed time.
    pub wall: Duration,
    /// Folder with what it created.
    pub path: PathBuf,
    /// What did not succeed although the command did: folders that it did not create, hosts that it did not reach.
    pub problems: Vec<String>,
}

/// The folders that the checks get.
#[derive(Debug, Default)]
pub(super) struct PreparedEnvironment {
    pub mounts: Vec<Mount>,
    folders: Vec<PreparedFolder>,
    /// The preparations that had to run.
    pub ran: Vec<PreparationRun>,
}

impl PreparedEnvironment {
    /// Adds the folders that a preparation has kept.
    pub fn add(&mut self, kept: &[KeptFolder], folder: PreparedFolder, ran: Option<PreparationRun>) {
        self.mounts.extend(kept.iter().map(|kept| mount(kept, &folder.path)));
        self.folders.push(folder);
        self.ran.extend(ran);
    }

    /// Identifies what is installed: another installation may have newer packages.
    pub fn id(&self) -> String {
        self.folders.iter().map(|folder| folder.id.as_str()).collect::<Vec<_>>().join(" ")
    }
}

/// Where a check sees a folder that a preparation has kept.
pub(super) fn mount(kept: &KeptFolder, prepared: &Path) -> Mount {
    let (subdir, inside) = if kept.is_in_home { (HOME_SUBDIR, HOME_PATH) } else { (CHECKOUT_SUBDIR, CHECKOUT_PATH) };
    Mount {
        source: prepared.join(subdir).join(&kept.path),
        target: Path::new(inside).join(&kept.path),
        changes: MountChanges::Discarded,
    }
}

/// Checks that the kept folders can be mounted in a checkout.
///
/// # Errors
/// The path of a file or link in the checkout that blocks a mount point.
pub(super) fn check_mount_points(work: &Path, mounts: &[Mount]) -> Result<(), PathBuf> {
    for mount in mounts {
        let Ok(inside) = mount.target.strip_prefix(CHECKOUT_PATH) else { continue };
        let mut folder = work.to_owned();
        for component in inside.components() {
            folder.push(component);
            match folder.symlink_metadata() {
                Ok(metadata) if metadata.is_dir() => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => break,
                Ok(_) | Err(_) => return Err(folder),
            }
        }
        let is_empty = |folder: &Path| fs::read_dir(folder).map_or(true, |mut entries| entries.next().is_none());
        if !is_empty(&work.join(inside)) {
            return Err(work.join(inside));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_are_empty_folders_or_do_not_exist() {
        let work = tempfile::tempdir().unwrap();
        let path = |name: &str| work.path().join(name);
        fs::create_dir_all(path("full/inner")).unwrap();
        fs::create_dir(path("empty")).unwrap();
        fs::write(path("file"), "").unwrap();
        std::os::unix::fs::symlink("/etc", path("link")).unwrap();
        for (name, problem) in [
            ("new", None),
            ("empty", None),
            ("full/inner", None),
            ("full/new/deep", None),
            ("full", Some("full")),
            ("file", Some("file")),
            ("file/x", Some("file")),
            ("link", Some("link")),
            ("link/x", Some("link")),
        ] {
            let kept = KeptFolder { is_in_home: false, path: name.to_owned() };
            let found = check_mount_points(work.path(), &[mount(&kept, Path::new("/prepared"))]);
            assert_eq!(found.err(), problem.map(path), "{name}");
        }
        let in_home = KeptFolder { is_in_home: true, path: "file".to_owned() };
        assert_eq!(check_mount_points(work.path(), &[mount(&in_home, Path::new("/prepared"))]), Ok(()));
    }
}
