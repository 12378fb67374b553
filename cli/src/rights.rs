//! Account, groups and capabilities of the processes of a cfq that runs as root, and the files that they need.
//!
//! The scheduler needs no right of root. The node reads model files that only root may read. The runner reads and writes
//! root's repositories, so it stays root, but it may not change the owner or the mode of other users' files.

use std::ffi::OsString;
use std::fs::Metadata;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use cfq_deploy::{Paths, files};
use cfq_inference_node::models::is_store_entry;
use cfq_link::child::{Account, Capabilities, Rights};

use crate::output;

/// The first port that every user may listen on.
const FIRST_UNPRIVILEGED_PORT: u16 = 1024;
/// What the node keeps, if root has it.
const OF_NODE: Capabilities = Capabilities::DAC_READ_SEARCH;
/// What the runner keeps: it writes to repositories of every user that root's configuration permits.
const OF_RUNNER: Capabilities = Capabilities::DAC_OVERRIDE;
/// Folders and names of the device files of GPUs.
const GPU_DEVICES: [(&str, &str); 4] =
    [("/dev", "nvidia"), ("/dev/nvidia-caps", ""), ("/dev/dri", ""), ("/dev", "dxg")];

/// Account and other rights of a process; by default those of `cfq up`.
#[derive(Debug, Clone, Default)]
pub struct ProcessRights {
    pub account: Option<Account>,
    pub rights: Option<Rights>,
}

impl ProcessRights {
    /// `account` is that of the services; `None` if cfq does not run as root.
    pub fn of_scheduler(account: Option<Account>, bind: SocketAddr) -> Self {
        let capabilities = match bind.port() < FIRST_UNPRIVILEGED_PORT {
            true => Capabilities::NET_BIND_SERVICE,
            false => Capabilities::NONE,
        };
        Self { account, rights: account.map(|_| Rights { groups: Vec::new(), capabilities }) }
    }

    pub fn of_node(account: Option<Account>) -> Self {
        Self { account, rights: account.map(|_| Rights { groups: gpu_groups(), capabilities: OF_NODE }) }
    }

    pub fn of_runner(account: Option<Account>) -> Self {
        Self { account: None, rights: account.map(|_| Rights { groups: Vec::new(), capabilities: OF_RUNNER }) }
    }
}

/// Describes what the kernel does not offer to limit the process that parses model files; `None` if nothing is missing.
pub fn missing_sandbox_limits() -> Option<String> {
    let missing = cfq_inference_node::sandbox::missing_limits();
    let names = missing.join(" and ");
    (!missing.is_empty())
        .then(|| format!("the process that parses model files works without {names}: the kernel lacks it"))
}

/// Gives the model folder to the account of the node, and warns of what the node cannot do.
pub fn prepare_node(model_dir: &Path, account: Account) -> anyhow::Result<()> {
    if !OF_NODE.without(Capabilities::of_this_thread()).is_empty() {
        output::print_stderr(&format!(
            "cfq: warning: this root lacks {OF_NODE}, so the node reads only model files that the account with user id {} \
             may read: give that account access to other model files, or start the container with this capability",
            account.uid
        ));
    }
    if let Some(kept) = files::give_folder(model_dir, account, is_store_entry)? {
        let Account { uid, gid } = account;
        output::print_stderr(&format!(
            "cfq: warning: {kept}, so the node, which runs as user id {uid}, serves the models there but fetches none: \
             run `chown -R {uid}:{gid} {}`, or choose another folder with model_dir under [node]",
            model_dir.display()
        ));
    }
    Ok(())
}

/// Environment with which GPU libraries work as `account`: they cache compiled kernels in the home folder otherwise,
/// which is root's. Creates the device files that only root can create.
pub fn gpu_environment(paths: &Paths, account: Account) -> anyhow::Result<Vec<(OsString, OsString)>> {
    const CACHE: &str = "CUDA_CACHE_PATH";
    if !Path::new("/dev/nvidiactl").exists() {
        return Ok(Vec::new());
    }
    // The driver starts this setuid program itself, but it gets no rights in a process with `no_new_privs`.
    let mut modprobe = Command::new("nvidia-modprobe");
    modprobe.args(["-c", "0", "-u"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    if let Err(error) = modprobe.status() {
        tracing::debug!(%error, "nvidia-modprobe does not run");
    }
    if std::env::var_os(CACHE).is_some() {
        return Ok(Vec::new());
    }
    let folder = paths.data.join("cuda-cache");
    files::create_folder(&folder, 0o700, Some(account))?;
    Ok(vec![(CACHE.into(), folder.into())])
}

/// Groups other than root's that may use a GPU which not every user may use.
fn gpu_groups() -> Vec<u32> {
    let in_folder = |(folder, prefix): (&str, &str)| {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let prefix = prefix.to_owned();
        entries.map(|entry| entry.path()).filter(move |path| has_prefix(path, &prefix)).collect::<Vec<PathBuf>>()
    };
    let devices = GPU_DEVICES.into_iter().flat_map(in_folder).filter_map(|path| std::fs::metadata(path).ok());
    let mut groups: Vec<u32> = devices.filter_map(|device| needed_group(&device)).collect();
    groups.sort_unstable();
    groups.dedup();
    groups
}

fn has_prefix(path: &Path, prefix: &str) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix))
}

fn needed_group(device: &Metadata) -> Option<u32> {
    let may = |bits: u32| device.mode() & bits == bits;
    let needed = device.file_type().is_char_device() && may(0o060) && !may(0o006) && device.gid() != 0;
    needed.then_some(device.gid())
}
