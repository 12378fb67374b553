//! Installs what the checks of a project need: runs its preparations on the base commit, before any
//! result of the task runs, and gives the folders that they create to the checks.
//!
//! A preparation runs in a sandbox with namespaces, with an empty home folder, and reaches only registries, through a
//! proxy (see `registry_proxy`). Its folders are kept for as long as its lock files, its command and the machine's
//! configuration stay the same (see `prepared_store`). A check sees them at the same paths, may change them, and its
//! changes are discarded.

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, lchown};
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use cfq_sandbox::{CommandEnd, CommandLimits, CommandOutcome, LaunchError, Mount, SandboxLevel};
use sha2::{Digest, Sha256};

use super::DeclaredChecks;
use super::check_findings::quoted_output;
use super::check_run_error::{CheckRunError, remedy_for_missing};
use super::environment::{CHECKOUT_SUBDIR, HOME_SUBDIR, PreparationRun, PreparedEnvironment, mount};
use super::package_manager_variables::package_manager_variables;
use super::preparation::{LockedContent, Preparation, hex};
use super::project::{CheckRunner, RunContext, processor_time, remove};
use super::registry_proxy::{PROXY_PORT, RegistryProxy};
use super::verdict::CheckOutcome;
use crate::workstream::Mirror;

/// Changed if the content of prepared folders changes.
const KEY_VERSION: &str = "1";
/// Exit code of a shell that does not find a program.
const PROGRAM_NOT_FOUND: i32 = 127;
/// Limits that differ from those of checks: packages are many files and some large ones.
const MAX_FILES: u64 = 1_000_000;
const MAX_FILE_BYTES: u64 = 8 << 30;
const MAX_DISK_BYTES: u64 = 32 << 30;

impl CheckRunner {
    /// Installs what the checks of a commit need, unless it is installed already. `name` is a name for the folder that
    /// no other task uses. Returns the preparations that had to run. Blocks.
    ///
    /// # Errors
    /// [`CheckRunError::NotPrepared`] if a preparation fails, and the errors of [`CheckRunner::run`].
    pub fn prepare(
        &self,
        name: &str,
        declared: &DeclaredChecks,
        commit: &str,
        mirror: &Mirror,
        cancelled: &AtomicBool,
    ) -> Result<Vec<PreparationRun>, CheckRunError> {
        Ok(self.prepare_context(name, declared, Some(commit), mirror, cancelled)?.environment.ran)
    }

    /// Returns what the runs of checks share. Runs the preparations that did not run yet on `commit`; without it, this
    /// is an error.
    pub(super) fn prepare_context<'a>(
        &self,
        name: &str,
        declared: &DeclaredChecks,
        commit: Option<&str>,
        mirror: &'a Mirror,
        cancelled: &'a AtomicBool,
    ) -> Result<RunContext<'a>, CheckRunError> {
        let level = self.level()?;
        self.create_root().map_err(|source| CheckRunError::Folder { path: self.root.clone(), source })?;
        let environment = PreparedEnvironment::default();
        let (folder, activity) = (self.root.join(name), self.activities.guard(name));
        let mut context = RunContext { level, folder, mirror, cancelled, environment, activity };
        let mut digest = self.machine_digest();
        for (preparation, locked) in &declared.preparations {
            if level != SandboxLevel::Namespaces {
                return Err(CheckRunError::NoNamespaces { reasons: self.missing_level_reasons() });
            }
            // The folders of earlier ones are part of what it sees.
            update_digest(&mut digest, preparation, locked);
            let mut ran = None;
            let folder = self.prepared.get_or_create(&key(&digest), name, cancelled, |folder| {
                let not_installed = || CheckRunError::MergeNotPrepared { name: preparation.name.clone() };
                let commit = commit.ok_or_else(not_installed)?;
                ran = Some(self.run_preparation(&context, preparation, commit, folder)?);
                Ok(())
            })?;
            context.environment.add(&preparation.keep, folder, ran);
        }
        Ok(context)
    }

    /// Whether everything that the checks of a commit need is installed.
    pub fn is_prepared(&self, declared: &DeclaredChecks) -> bool {
        let mut digest = self.machine_digest();
        declared.preparations.iter().all(|(preparation, locked)| {
            update_digest(&mut digest, preparation, locked);
            self.prepared.contains(&key(&digest))
        })
    }

    /// What the machine contributes to a preparation.
    fn machine_digest(&self) -> Sha256 {
        let mut digest = Sha256::new();
        let release = fs::read("/etc/os-release").unwrap_or_default();
        let account = self.config.account.map(|account| (account.uid, account.gid));
        let config = serde_json::to_vec(&(&self.config.readable, &self.config.env, account)).unwrap_or_default();
        for part in [KEY_VERSION.as_bytes(), &release, &config] {
            digest.update((part.len() as u64).to_le_bytes());
            digest.update(part);
        }
        digest
    }

    /// Runs a preparation on a commit and moves the folders that it keeps into `folder`.
    fn run_preparation(
        &self,
        context: &RunContext<'_>,
        preparation: &Preparation,
        commit: &str,
        folder: &Path,
    ) -> Result<PreparationRun, CheckRunError> {
        let name = preparation.name.clone();
        tracing::info!(preparation = name, "preparing the checks of a project");
        context.activity.set(format!("installing what the checks need (preparation `{name}`)"));
        let start = Instant::now();
        remove(&context.folder)?;
        let prepared = self.install(context, preparation, commit, folder);
        if let Err(error) = remove(&context.folder) {
            tracing::warn!(%error, "cannot remove the checkout of a preparation");
        }
        let problems = prepared?;
        if !problems.is_empty() {
            tracing::warn!(preparation = name, ?problems, "a preparation succeeded with problems");
        }
        let run = PreparationRun { name, wall: start.elapsed(), path: folder.with_extension(""), problems };
        tracing::info!(preparation = run.name, ms = run.wall.as_millis(), "prepared the checks of a project");
        Ok(run)
    }

    fn install(
        &self,
        context: &RunContext<'_>,
        preparation: &Preparation,
        commit: &str,
        folder: &Path,
    ) -> Result<Vec<String>, CheckRunError> {
        let own = preparation.keep.iter().map(|kept| mount(kept, folder));
        let mounts: Vec<Mount> = context.environment.mounts.iter().cloned().chain(own).collect();
        self.check_out_into(context, commit, &mounts, None)?;
        let mut command = self.sandboxed_command(context, &preparation.run);
        let configured = std::mem::take(&mut command.env);
        command.env = package_manager_variables(&self.config.registries).into_iter().chain(configured).collect();
        command.listener_port = Some(PROXY_PORT);
        let wall = preparation.timeout();
        command.limits = CommandLimits {
            wall,
            cpu: processor_time(wall),
            files: MAX_FILES,
            file_bytes: MAX_FILE_BYTES,
            disk_bytes: MAX_DISK_BYTES,
            ..CommandLimits::default()
        };
        let mut proxy = None;
        let ran = self.launcher.run_with_listener(context.level, &command, context.cancelled, |listener| {
            proxy = Some(RegistryProxy::start(listener, self.config.registries.clone()));
        });
        let outcome = ran.map_err(|error| match error {
            LaunchError::Program { program, source } => CheckRunError::NotPrepared {
                name: preparation.name.clone(),
                end: format!(
                    "{} cannot be executed in the sandbox ({source}); {}",
                    program.display(),
                    remedy_for_missing(&program.to_string_lossy())
                ),
                problems: String::new(),
                output: String::new(),
            },
            source => CheckRunError::Sandbox { check: preparation.name.clone(), source },
        })?;
        if outcome.end == CommandEnd::Cancelled {
            return Err(CheckRunError::Cancelled);
        }
        let mut problems = match proxy {
            Some(Ok(proxy)) => proxy.problems(),
            Some(Err(source)) => return Err(CheckRunError::Proxy(source)),
            None => Vec::new(),
        };
        if !outcome.end.is_success() {
            return Err(not_prepared(preparation, &problems, outcome));
        }
        for kept in &preparation.keep {
            // The program may have replaced everything below the folder of the run, also its home folder.
            let (top, subdir) = match kept.is_in_home {
                true => (context.scratch().join("home"), HOME_SUBDIR),
                false => (context.work(), CHECKOUT_SUBDIR),
            };
            let source = top.join(&kept.path);
            let target = folder.join(subdir).join(&kept.path);
            let moved = match is_real_folder(&context.folder, &source) {
                true => self.keep(&source, &target),
                // A package manager may create no folder if nothing is to be installed.
                false => {
                    problems.push(format!("it did not create the folder {kept}, which `keep` names"));
                    self.keep_empty(&target)
                }
            };
            moved.map_err(|source| CheckRunError::Folder { path: target, source })?;
        }
        Ok(problems)
    }

    /// Creates an empty folder in the store, which belongs to the checks.
    fn keep_empty(&self, target: &Path) -> io::Result<()> {
        self.prepared.create_folder(target)?;
        self.config.account.map_or(Ok(()), |account| lchown(target, Some(account.uid), Some(account.gid)))
    }

    /// Moves a folder into the store.
    fn keep(&self, source: &Path, target: &Path) -> io::Result<()> {
        if let Some(parent) = target.parent() {
            self.prepared.create_folder(parent)?;
        }
        // A folder that its owner may not write cannot get another parent.
        let mode = source.symlink_metadata()?.permissions().mode();
        if mode & 0o700 != 0o700 {
            fs::set_permissions(source, fs::Permissions::from_mode(mode | 0o700))?;
        }
        fs::rename(source, target)
    }
}

fn not_prepared(preparation: &Preparation, problems: &[String], outcome: CommandOutcome) -> CheckRunError {
    let problems = match problems {
        [] => String::new(),
        problems => format!("; {}", problems.join("; ")),
    };
    let mut end = outcome.end.to_string();
    if outcome.end == CommandEnd::Exited(PROGRAM_NOT_FOUND) {
        end.push_str(
            "; a program was not found in the sandbox: name its folder with `readable` under [checks] in cfq.toml",
        );
    }
    let output = [outcome.stdout.bytes, outcome.stderr.bytes];
    CheckRunError::NotPrepared {
        name: preparation.name.clone(),
        end,
        problems,
        output: quoted_output(&CheckOutcome { end: outcome.end, report: None, coverage: None, output }),
    }
}

/// Adds a preparation to the digest of what was prepared before.
fn update_digest(digest: &mut Sha256, preparation: &Preparation, locked: &LockedContent) {
    let part = serde_json::to_vec(&(preparation, locked)).unwrap_or_default();
    digest.update((part.len() as u64).to_le_bytes());
    digest.update(part);
}

/// Name of the folder of the preparations that a digest contains.
fn key(digest: &Sha256) -> String {
    hex(&digest.clone().finalize()[..16])
}

/// Whether `path` is a folder below `top` and no part between them is a link, which could lead out of the sandbox. No
/// program may run that can change it.
fn is_real_folder(top: &Path, path: &Path) -> bool {
    let Ok(below) = path.strip_prefix(top) else { return false };
    let mut folder = top.to_owned();
    below.components().all(|component| {
        folder.push(component);
        folder.symlink_metadata().is_ok_and(|metadata| metadata.is_dir())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_that_are_reached_through_links_are_not_kept() {
        let top = tempfile::tempdir().unwrap();
        let path = |name: &str| top.path().join(name);
        fs::create_dir_all(path("real/inner")).unwrap();
        std::os::unix::fs::symlink("/etc", path("link")).unwrap();
        std::os::unix::fs::symlink("real", path("alias")).unwrap();
        fs::write(path("file"), "").unwrap();
        for (name, expected) in [
            ("real", true),
            ("real/inner", true),
            ("link", false),
            ("alias/inner", false),
            ("file", false),
            ("missing", false),
        ] {
            assert_eq!(is_real_folder(top.path(), &path(name)), expected, "{name}");
        }
        assert!(!is_real_folder(&path("real"), top.path()), "not below");
    }
}
