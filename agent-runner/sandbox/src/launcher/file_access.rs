//! Files that a program may open without a file system of its own (Landlock).

use std::path::Path;

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreated, RulesetCreatedAttr, RulesetError, Scope,
};

use super::system_files::{DEVICES, system_files};
use crate::SandboxedCommand;
use crate::protocol::FailedStep;

/// Version of Landlock that is needed: the first one that limits signals and abstract sockets (Linux 6.12).
const LANDLOCK: ABI = ABI::V6;
/// Settings that a file system of its own replaces.
const ACCOUNTS: [&str; 4] = ["/etc/passwd", "/etc/group", "/etc/hosts", "/etc/nsswitch.conf"];
/// Facts about the machine. The folders of processes are not among them: other processes are in the same folder.
const MACHINE_FACTS: [&str; 7] = [
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/stat",
    "/proc/version",
    "/proc/filesystems",
    "/proc/sys/vm/overcommit_memory",
    "/sys/devices/system/cpu",
];

/// The rules for `command`, not applied yet.
pub(super) fn rules(command: &SandboxedCommand) -> Result<RulesetCreated, FailedStep> {
    let mut rules = create().map_err(|error| FailedStep::new("use Landlock", std::io::Error::other(error)))?;
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let execute = read | AccessFs::Execute;
    let write = AccessFs::from_all(LANDLOCK)
        & !(AccessFs::MakeChar | AccessFs::MakeBlock | AccessFs::IoctlDev | AccessFs::MakeSock);
    // A link of the system may lead nowhere.
    let system: Vec<_> = system_files().into_iter().filter(|path| path.exists()).collect();
    let settings = ACCOUNTS.iter().chain(&MACHINE_FACTS).map(Path::new).filter(|path| path.exists());
    let of_system = system.iter().map(|path| (path.as_path(), execute)).chain(settings.map(|path| (path, read)));
    let devices = DEVICES.iter().map(Path::new).filter(|path| path.exists());
    let devices = devices.map(|path| (path, AccessFs::ReadFile | AccessFs::WriteFile));
    let readable = command.readable.iter().map(|path| (path.as_path(), execute));
    let writable = command.writable.iter().chain([&command.scratch_dir]).map(|path| (path.as_path(), write));
    for (path, access) in of_system.chain(devices).chain(readable).chain(writable) {
        rules = add(rules, path, access)?;
    }
    Ok(rules)
}

/// Permits this process to signal only processes that it starts from now on, so that it can signal all of them at once.
pub(super) fn limit_signals() -> Result<(), FailedStep> {
    let limit = || -> Result<(), RulesetError> {
        let rules =
            Ruleset::default().set_compatibility(CompatLevel::HardRequirement).scope(Scope::Signal)?.create()?;
        rules.restrict_self().map(drop)
    };
    limit().map_err(|error| FailedStep::new("use Landlock", std::io::Error::other(error)))
}

fn create() -> Result<RulesetCreated, RulesetError> {
    Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(LANDLOCK))?
        .handle_access(AccessNet::from_all(LANDLOCK))?
        .scope(Scope::from_all(LANDLOCK))?
        .create()
}

fn add(rules: RulesetCreated, path: &Path, access: BitFlags<AccessFs>) -> Result<RulesetCreated, FailedStep> {
    let step = |error| FailedStep::new(format!("open {}", path.display()), error);
    let is_dir = std::fs::metadata(path).map_err(step)?.is_dir();
    // Rights that only folders have are refused for files.
    let access = if is_dir { access } else { access & AccessFs::from_file(LANDLOCK) };
    let opened = PathFd::new(path).map_err(|error| step(std::io::Error::other(error)))?;
    rules.add_rule(PathBeneath::new(opened, access)).map_err(|error| step(std::io::Error::other(error)))
}
