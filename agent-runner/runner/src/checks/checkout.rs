//! The folders of a run in the sandbox, and the command that runs in them.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use cfq_link::child::Account;
use cfq_sandbox::{CommandLimits, Mount, MountChanges, SandboxLevel, SandboxedCommand};

use super::check_run_error::CheckRunError;
use super::environment::{CHECKOUT_PATH, HOME_PATH, check_mount_points};
use super::project::{CheckRunner, RunContext};
use crate::workstream::{CheckedOut, check_out};

/// Folders that are searched for programs, after those of the configuration.
const SYSTEM_PATH: &str = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin:/run/current-system/sw/bin";

impl CheckRunner {
    /// Checks out a commit, in which the targets of `mounts` must not exist, and creates the folder of temporary files.
    /// `before` is what the folder of the checkout contains; `None` if it is not used again. Returns the folder of the
    /// checkout and its content.
    pub(super) fn check_out_into(
        &self,
        context: &RunContext<'_>,
        commit: &str,
        mounts: &[Mount],
        before: Option<CheckedOut>,
    ) -> Result<(PathBuf, CheckedOut), CheckRunError> {
        let folder_error = |path: &Path, source| CheckRunError::Folder { path: path.to_owned(), source };
        let (work, scratch) = (context.work(), context.scratch());
        for path in [&context.folder, &scratch] {
            fs::create_dir_all(path).map_err(|source| folder_error(path, source))?;
        }
        let content = check_out(context.mirror, &work, commit, before)?;
        check_mount_points(&work, mounts).map_err(|path| CheckRunError::KeptFolderInCommit {
            path: path.strip_prefix(&work).unwrap_or(&path).to_owned(),
            commit: commit.get(..12).unwrap_or(commit).to_owned(),
        })?;
        if let Some(account) = self.config.account {
            change_owner(&context.folder, account).map_err(|source| folder_error(&context.folder, source))?;
        }
        Ok((work, content))
    }

    /// The command that runs a program in the checkout of `context`.
    pub(super) fn sandboxed_command(&self, context: &RunContext<'_>, run: &[String]) -> SandboxedCommand {
        let (work, scratch) = (context.work(), context.scratch());
        let of_config = self.config.env.iter().map(|(name, value)| (OsString::from(name), OsString::from(value)));
        let mut env = vec![(OsString::from("PATH"), self.path())];
        let (work_dir, writable, mounts) = match context.level {
            SandboxLevel::Landlock => (work.clone(), vec![work], Vec::new()),
            SandboxLevel::Namespaces => {
                env.push(("HOME".into(), HOME_PATH.into()));
                let mount =
                    |source, target: &str| Mount { source, target: PathBuf::from(target), changes: MountChanges::Kept };
                let own = [mount(work, CHECKOUT_PATH), mount(scratch.join("home"), HOME_PATH)];
                let mounts = own.into_iter().chain(context.environment.mounts.iter().cloned()).collect();
                (PathBuf::from(CHECKOUT_PATH), Vec::new(), mounts)
            }
        };
        SandboxedCommand {
            program: OsString::from(run.first().map(String::as_str).unwrap_or_default()),
            args: run.iter().skip(1).map(OsString::from).collect(),
            env: env.into_iter().chain(of_config).collect(),
            work_dir,
            readable: self.config.readable.clone(),
            writable,
            mounts,
            scratch_dir: scratch,
            listener_port: None,
            limits: CommandLimits::default(),
        }
    }

    fn path(&self) -> OsString {
        let folders = self.config.readable.iter().flat_map(|path| [path.join("bin"), path.clone()]);
        let mut path: Vec<PathBuf> = folders.filter(|folder| folder.is_dir()).collect();
        path.extend(std::env::split_paths(SYSTEM_PATH));
        // A folder whose name contains a colon cannot be in the list.
        std::env::join_paths(path).unwrap_or_else(|_| SYSTEM_PATH.into())
    }
}

/// Gives a folder and everything below it to an account. Nothing has run in the folder, so its depth is limited.
fn change_owner(path: &Path, account: Account) -> io::Result<()> {
    let Account { uid, gid } = account;
    if path.symlink_metadata()?.is_dir() {
        for entry in fs::read_dir(path)? {
            change_owner(&entry?.path(), account)?;
        }
    }
    std::os::unix::fs::lchown(path, Some(uid), Some(gid))
}
