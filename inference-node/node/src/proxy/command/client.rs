//! A program that answers prompts: where it is, and how many runs of it there may be.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use cfq_engine::StateChanged;
use cfq_proto::node::Residency;
use cfq_proto::timing::Timing;

use super::config::{CommandConfig, CommandError};
use super::folder::RunFolders;
use crate::proxy::slots::RequestSlots;

/// Folder below the home folder in which programs of one user are installed, also by installers of agents.
const USER_PROGRAMS: &str = ".local/bin";
/// Number of heartbeat intervals between two checks whether the program is there.
const CHECK_INTERVALS: u32 = 5;

/// One program, shared by its models.
pub struct CommandClient {
    /// Name of the command in the configuration.
    pub(super) name: String,
    pub(super) config: CommandConfig,
    pub(super) slots: RequestSlots,
    pub(super) context_tokens: u32,
    pub(super) folders: Arc<RunFolders>,
    /// The path of the program, or why it cannot be used.
    program: Mutex<Result<PathBuf, String>>,
    changes: Arc<StateChanged>,
}

impl CommandClient {
    /// The program of the command `name`, whose runs have private folders below `folder`. `changes` is notified when the
    /// state of its models changes.
    ///
    /// # Errors
    /// [`CommandError`], without [`CommandError::Unknown`].
    pub fn new(
        name: &str,
        config: &CommandConfig,
        folder: Option<&Path>,
        changes: Arc<StateChanged>,
    ) -> Result<Arc<Self>, CommandError> {
        config.check(name)?;
        Ok(Arc::new(Self {
            name: name.to_owned(),
            slots: RequestSlots::new(config.sequences(), changes.clone()),
            context_tokens: config.context_tokens(name),
            folders: RunFolders::new(folder, name),
            program: Mutex::new(find_or_explain(name, config)),
            config: config.clone(),
            changes,
        }))
    }

    /// Checks that the program can be told this model.
    ///
    /// # Errors
    /// [`CommandError::ModelUnused`] and [`CommandError::ModelMissing`].
    pub fn check_model(&self, model: Option<&str>) -> Result<(), CommandError> {
        self.config.check_model(&self.name, model)
    }

    /// The path of the program, or why it cannot be used.
    pub(super) fn program(&self) -> Result<PathBuf, String> {
        self.program.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Checks whether the program is there.
    pub(super) fn check(&self) {
        let now = find_or_explain(&self.name, &self.config);
        let mut program = self.program.lock().unwrap_or_else(PoisonError::into_inner);
        if *program != now {
            match &now {
                Ok(path) => tracing::info!(command = self.name, path = %path.display(), "program found"),
                Err(reason) => tracing::warn!(command = self.name, reason, "program cannot be used"),
            }
            *program = now;
            drop(program);
            self.changes.send_replace(());
        }
    }

    /// Checks in an endless loop whether the program is there.
    pub async fn watch(self: Arc<Self>, timing: Timing) {
        loop {
            tokio::time::sleep(timing.heartbeat() * CHECK_INTERVALS).await;
            self.check();
        }
    }

    /// Residency of its models.
    pub(super) fn residency(&self) -> Residency {
        match self.program() {
            Ok(_) => Residency::Resident,
            Err(reason) => Residency::Unusable { reason },
        }
    }
}

impl CommandConfig {
    /// Path of the program of the command `name` on this machine.
    ///
    /// # Errors
    /// Why it cannot be used. [`CommandConfig::installation`] is the next step.
    pub fn find(&self, name: &str) -> Result<PathBuf, String> {
        find(name, self)
    }
}

/// As [`find`]; the reason contains the next step.
fn find_or_explain(name: &str, config: &CommandConfig) -> Result<PathBuf, String> {
    find(name, config).map_err(|reason| format!("{reason}: {}", config.installation(name)))
}

fn find(name: &str, config: &CommandConfig) -> Result<PathBuf, String> {
    let program = config.program(name);
    if program.is_absolute() {
        return match is_executable(&program) {
            true => Ok(program),
            false => Err(format!(
                "{} does not exist, or its mode or a folder above it does not let this account execute it",
                program.display()
            )),
        };
    }
    let home = std::env::var_os("HOME").map(|home| Path::new(&home).join(USER_PROGRAMS));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).filter(|folder| folder.is_absolute()).chain(home);
    let found = folders.map(|folder| folder.join(&program)).find(|path| is_executable(path));
    found.ok_or_else(|| format!("there is no program {} in PATH or ~/.local/bin", program.display()))
}

fn is_executable(path: &Path) -> bool {
    path.is_file() && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok()
}
