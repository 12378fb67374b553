//! Installs what the checks of a project need: runs its preparations on the base commit, before anything that a model wrote
//! runs, and gives the folders that they create to the checks.
//!
//! A preparation runs in a sandbox with namespaces, with an empty home folder, and reaches only registries, through a proxy
//! (see `registry_proxy`). Its folders are kept for as long as its lock files, its command and the machine's configuration
//! stay the same (see `prepared_store`). A check sees them at the same paths, may change them, and its changes are
//! discarded.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use cfq_sandbox::{CommandEnd, CommandLimits, CommandOutcome, LaunchError, Mount, MountChanges, SandboxLevel};
use sha2::{Digest, Sha256};

use super::DeclaredChecks;
use super::check_findings::quoted_output;
use super::check_run_error::CheckRunError;
use super::preparation::{KeptFolder, LockDigest, Preparation, hex};
use super::prepared_store::PreparedFolder;
use super::project::{CheckRunner, RunContext, processor_time, remove};
use super::registry_proxy::{PROXY_PORT, Registry, RegistryProxy};
use super::verdict::CheckOutcome;
use crate::workstream::GitError;

/// Paths of the checkout and of the home folder in a sandbox with namespaces. Installed programs contain them.
pub(super) const CHECKOUT_PATH: &str = "/checkout";
pub(super) const HOME_PATH: &str = "/home/user";
/// Folders of a prepared folder.
const OF_CHECKOUT: &str = "checkout";
const OF_HOME: &str = "home";
/// Changed if the content of prepared folders changes.
const KEY_VERSION: &str = "1";
/// Limits that differ from those of checks: packages are many files and some large ones.
const MAX_FILES: u64 = 1_000_000;
const MAX_FILE_BYTES: u64 = 8 << 30;
const MAX_DISK_BYTES: u64 = 32 << 30;

/// A preparation that ran.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreparationRun {
    /// Its name.
    pub name: String,
    /// Elapsed time.
    pub wall: Duration,
}

/// The folders that the checks get.
#[derive(Debug, Default)]
pub(super) struct PreparedEnvironment {
    pub mounts: Vec<Mount>,
    folders: Vec<PreparedFolder>,
    /// The preparations that had to run.
    pub ran: Vec<PreparationRun>,
}

impl CheckRunner {
    /// Installs what the checks of a commit need, unless it is installed already. `name` is a name for the folder that no
    /// other task uses. Returns the preparations that had to run. Blocks.
    ///
    /// # Errors
    /// [`CheckRunError::NotPrepared`] if a preparation fails, and the errors of [`CheckRunner::run`].
    pub fn prepare(
        &self,
        name: &str,
        declared: &DeclaredChecks,
        commit: &str,
        check_out: impl Fn(&Path, &str) -> Result<(), GitError>,
        cancelled: &AtomicBool,
    ) -> Result<Vec<PreparationRun>, CheckRunError> {
        Ok(self.context(name, declared, commit, check_out, cancelled)?.environment.ran)
    }

    /// Returns what the runs of checks share. Runs the preparations that did not run yet.
    pub(super) fn context<'a, F: Fn(&Path, &str) -> Result<(), GitError>>(
        &self,
        name: &str,
        declared: &DeclaredChecks,
        commit: &str,
        check_out: F,
        cancelled: &'a AtomicBool,
    ) -> Result<RunContext<'a, F>, CheckRunError> {
        let level = self.level()?;
        self.create_root().map_err(|source| CheckRunError::Folder { path: self.root.clone(), source })?;
        let environment = PreparedEnvironment::default();
        let mut context = RunContext { level, folder: self.root.join(name), check_out, cancelled, environment };
        let mut digest = self.machine_digest();
        for (preparation, locked) in &declared.preparations {
            if level != SandboxLevel::Namespaces {
                return Err(CheckRunError::NoNamespaces { reasons: self.missing_levels() });
            }
            // The folders of earlier ones are part of what it sees.
            add(&mut digest, preparation, locked);
            let mut ran = None;
            let folder = self.prepared.get_or_create(&key(&digest), cancelled, |folder| {
                ran = Some(self.run_preparation(&context, preparation, commit, folder)?);
                Ok(())
            })?;
            let environment = &mut context.environment;
            environment.mounts.extend(preparation.keep.iter().map(|kept| mount(kept, &folder.path)));
            environment.folders.push(folder);
            environment.ran.extend(ran);
        }
        Ok(context)
    }

    /// Whether everything that the checks of a commit need is installed.
    pub fn is_prepared(&self, declared: &DeclaredChecks) -> bool {
        let mut digest = self.machine_digest();
        declared.preparations.iter().all(|(preparation, locked)| {
            add(&mut digest, preparation, locked);
            self.prepared.contains(&key(&digest))
        })
    }

    /// What the machine contributes to a preparation.
    fn machine_digest(&self) -> Sha256 {
        let mut digest = Sha256::new();
        let release = fs::read("/etc/os-release").unwrap_or_default();
        let config = serde_json::to_vec(&(&self.config.readable, &self.config.env)).unwrap_or_default();
        for part in [KEY_VERSION.as_bytes(), &release, &config] {
            digest.update((part.len() as u64).to_le_bytes());
            digest.update(part);
        }
        digest
    }

    /// Runs a preparation on a commit and moves the folders that it keeps into `folder`.
    fn run_preparation<F: Fn(&Path, &str) -> Result<(), GitError>>(
        &self,
        context: &RunContext<'_, F>,
        preparation: &Preparation,
        commit: &str,
        folder: &Path,
    ) -> Result<PreparationRun, CheckRunError> {
        let name = preparation.name.clone();
        tracing::info!(preparation = name, "preparing the checks of a project");
        let start = Instant::now();
        remove(&context.folder)?;
        let prepared = self.install(context, preparation, commit, folder);
        if let Err(error) = remove(&context.folder) {
            tracing::warn!(%error, "cannot remove the checkout of a preparation");
        }
        prepared?;
        let run = PreparationRun { name, wall: start.elapsed() };
        tracing::info!(preparation = run.name, ms = run.wall.as_millis(), "prepared the checks of a project");
        Ok(run)
    }

    fn install<F: Fn(&Path, &str) -> Result<(), GitError>>(
        &self,
        context: &RunContext<'_, F>,
        preparation: &Preparation,
        commit: &str,
        folder: &Path,
    ) -> Result<(), CheckRunError> {
        let own: Vec<Mount> = preparation.keep.iter().map(|kept| mount(kept, folder)).collect();
        let work = self.check_out_into(context, commit, &own)?;
        let mut command = self.sandboxed_command(context, &preparation.run);
        let of_project = std::mem::take(&mut command.env);
        command.env = proxy_variables(&self.config.registries).into_iter().chain(of_project).collect();
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
                    "{} cannot be executed in the sandbox ({source}); install it, or name its folder with `readable` under \
                     [checks] in cfq.toml",
                    program.display()
                ),
                refused: String::new(),
                output: String::new(),
            },
            source => CheckRunError::Sandbox { check: preparation.name.clone(), source },
        })?;
        if outcome.end == CommandEnd::Cancelled {
            return Err(CheckRunError::Cancelled);
        }
        let refused = match proxy {
            Some(Ok(proxy)) => proxy.refused(),
            Some(Err(source)) => return Err(CheckRunError::Proxy(source)),
            None => Vec::new(),
        };
        if !outcome.end.is_success() {
            return Err(not_prepared(preparation, outcome.end.to_string(), refused, outcome));
        }
        for kept in &preparation.keep {
            let (top, of_top) = match kept.is_in_home {
                true => (context.scratch().join("home"), OF_HOME),
                false => (work.clone(), OF_CHECKOUT),
            };
            if !is_real_folder(&top, &kept.path) {
                let end = format!("it exited with code 0, but left no folder {kept}, which `keep` names");
                return Err(not_prepared(preparation, end, refused, outcome));
            }
            let target = folder.join(of_top).join(&kept.path);
            let moved = target.parent().map_or(Ok(()), fs::create_dir_all);
            moved
                .and_then(|()| fs::rename(top.join(&kept.path), &target))
                .map_err(|source| CheckRunError::Folder { path: target.clone(), source })?;
        }
        Ok(())
    }
}

fn not_prepared(
    preparation: &Preparation,
    end: String,
    refused: Vec<String>,
    outcome: CommandOutcome,
) -> CheckRunError {
    let output = [outcome.stdout.bytes, outcome.stderr.bytes];
    let refused = match refused.as_slice() {
        [] => String::new(),
        hosts => format!(
            "; it asked for {}, and `registries` under [checks] in cfq.toml does not permit this",
            hosts.join(", ")
        ),
    };
    CheckRunError::NotPrepared {
        name: preparation.name.clone(),
        end,
        refused,
        output: quoted_output(&CheckOutcome { end: outcome.end, report: None, output }),
    }
}

/// Adds a preparation to the digest of what was prepared before.
fn add(digest: &mut Sha256, preparation: &Preparation, locked: &LockDigest) {
    let declared = serde_json::to_vec(preparation).unwrap_or_default();
    for part in [declared.as_slice(), locked.0.as_bytes()] {
        digest.update((part.len() as u64).to_le_bytes());
        digest.update(part);
    }
}

/// Name of the folder of the preparations that a digest contains.
fn key(digest: &Sha256) -> String {
    hex(&digest.clone().finalize()[..16])
}

/// Where a check sees a folder that a preparation has kept.
fn mount(kept: &KeptFolder, prepared: &Path) -> Mount {
    let (of_top, inside) = if kept.is_in_home { (OF_HOME, HOME_PATH) } else { (OF_CHECKOUT, CHECKOUT_PATH) };
    Mount {
        source: prepared.join(of_top).join(&kept.path),
        target: Path::new(inside).join(&kept.path),
        changes: MountChanges::Discarded,
    }
}

/// Variables by which programs find the proxy. Java reads properties instead.
fn proxy_variables(registries: &[Registry]) -> Vec<(OsString, OsString)> {
    let proxy = format!("http://127.0.0.1:{PROXY_PORT}");
    let java =
        ["http", "https"].map(|scheme| format!("-D{scheme}.proxyHost=127.0.0.1 -D{scheme}.proxyPort={PROXY_PORT}"));
    let mut variables = vec![("JAVA_TOOL_OPTIONS".into(), java.join(" ").into())];
    let names =
        ["http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "npm_config_proxy", "npm_config_https_proxy"];
    variables.extend(names.map(|name| (name.into(), proxy.clone().into())));
    // Servers that the preparation starts, unless a registry has the same name: one of this machine.
    let is_own = |name: &&str| !registries.iter().any(|registry| registry.host() == *name);
    let own: Vec<_> = ["localhost", "127.0.0.1"].into_iter().filter(is_own).collect();
    variables.extend(["no_proxy", "NO_PROXY"].map(|name| (name.into(), own.join(",").into())));
    variables
}

/// Whether `path` is a folder below `top` and no part of it is a link, which could lead out of the sandbox.
fn is_real_folder(top: &Path, path: &str) -> bool {
    let mut folder = top.to_owned();
    Path::new(path).components().all(|component| {
        folder.push(component);
        folder.symlink_metadata().is_ok_and(|metadata| metadata.is_dir())
    })
}

/// Checks that the kept folders can be mounted in a checkout.
///
/// # Errors
/// The path of a file or link in the checkout that is in the way.
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
            assert_eq!(is_real_folder(top.path(), name), expected, "{name}");
        }
    }

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
