//! The file system of a sandbox with namespaces: an empty tmpfs on which the permitted files and folders are mounted.
//!
//! The new root is built beside the old one. The process first moves to a tmpfs that has the old root below `/old` and
//! the new one below `/new`, so that no mount hides the source of a later one. Then `/new` becomes the root, and the
//! old root is unmounted.

use std::ffi::{CString, OsStr};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind_recursive, mount_change, unmount,
};
use rustix::process::{chdir, pivot_root};

use super::namespaces::USER;
use super::program::{self, Folders};
use super::system_files::{DEVICES, system_files};
use crate::protocol::FailedStep;
use crate::{MountChanges, SandboxedCommand};

/// Existing folders, of which the first is used as the mount point of the tmpfs.
const BASES: [&str; 3] = ["/tmp", "/var/tmp", "/run"];
/// Options of the tmpfs that holds only mount points and small files.
const SKELETON: &str = "mode=0755,size=4m,nr_inodes=16k";
/// Maximum size of shared memory, in bytes.
const MAX_SHARED_MEMORY_BYTES: u64 = 512 << 20;

/// `MOUNT_ATTR_RDONLY`, `MOUNT_ATTR_NOSUID` and `MOUNT_ATTR_NODEV` of mount_setattr(2).
const READ_ONLY: u64 = 1;
const NO_SETUID: u64 = 2;
const NO_DEVICES: u64 = 4;

/// Builds the file system and makes it the root of this process.
pub(super) fn build(command: &SandboxedCommand, folders: &Folders) -> Result<(), FailedStep> {
    let mounts = Mounts::of(command, folders)?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .map_err(|error| FailedStep::new("separate mounts from those of the machine", error))?;
    enter_base()?;
    for path in &mounts.system {
        mirror(path)?;
    }
    create_settings(&program::home(command, folders))?;
    create_devices(command)?;
    mount_special("proc", "/new/proc", "")?;
    bind(&folders.tmp, Path::new("/tmp"), NO_SETUID | NO_DEVICES)?;
    for PlannedMount { source, target, content, is_elsewhere } in &mounts.of_command {
        if *is_elsewhere {
            refuse_links(target)?;
        }
        match content {
            MountContent::Same { attributes } => bind(source, target, *attributes)?,
            MountContent::Overlay { changes } => {
                if overlay(source, target, changes).is_err() {
                    bind(source, target, READ_ONLY | NO_SETUID | NO_DEVICES)?;
                }
            }
        }
    }
    // Everything that may be written is a mount of its own.
    set_attributes("/new/dev", false, READ_ONLY)?;
    set_attributes("/new", false, READ_ONLY)?;
    leave_old_root()
}

/// What is mounted. Paths are without symbolic links, because links of the old root lead elsewhere during the build.
struct Mounts {
    system: Vec<PathBuf>,
    of_command: Vec<PlannedMount>,
}

/// A mount of a file or folder.
struct PlannedMount {
    source: PathBuf,
    target: PathBuf,
    content: MountContent,
    /// Whether the target is a path of the sandbox alone, which may be in a folder that a program has written.
    is_elsewhere: bool,
}

enum MountContent {
    /// The source itself.
    Same { attributes: u64 },
    /// The source with changes, which are stored in a folder.
    Overlay { changes: PathBuf },
}

impl Mounts {
    fn of(command: &SandboxedCommand, folders: &Folders) -> Result<Self, FailedStep> {
        let writable = command.writable.iter().map(PathBuf::as_path).chain([folders.scratch.as_path()]);
        let mut of_command = Vec::new();
        let readable = command.readable.iter().map(|path| (path.as_path(), READ_ONLY | NO_SETUID | NO_DEVICES));
        for (path, attributes) in readable.chain(writable.map(|path| (path, NO_SETUID | NO_DEVICES))) {
            let source = resolve(path)?;
            let same = |target| PlannedMount {
                source: source.clone(),
                target,
                content: MountContent::Same { attributes },
                is_elsewhere: false,
            };
            // The name that the command uses exists too, as a mount point of its own.
            if source != path {
                of_command.push(same(path.to_owned()));
            }
            of_command.push(same(source.clone()));
        }
        for (index, mount) in command.mounts.iter().enumerate() {
            let content = match mount.changes {
                MountChanges::Kept => MountContent::Same { attributes: NO_SETUID | NO_DEVICES },
                MountChanges::Discarded => MountContent::Overlay { changes: folders.create_changes(index)? },
            };
            of_command.push(PlannedMount {
                source: resolve(&mount.source)?,
                target: mount.target.clone(),
                content,
                is_elsewhere: true,
            });
        }
        // A folder is mounted before the folders inside of it. The sort is stable: the writable one of two wins.
        of_command.sort_by_key(|mount| mount.target.components().count());
        Ok(Self { system: system_files(), of_command })
    }
}

fn resolve(path: &Path) -> Result<PathBuf, FailedStep> {
    fs::canonicalize(path).map_err(|error| FailedStep::new(format!("open {}", path.display()), error))
}

/// Moves this process to a tmpfs with the old root in `/old` and a tmpfs for the new one in `/new`.
fn enter_base() -> Result<(), FailedStep> {
    let base = BASES.into_iter().find(|base| Path::new(base).is_dir()).unwrap_or(BASES[0]);
    mount_tmpfs(base, SKELETON)?;
    let folder = |name: &str| Path::new(base).join(name);
    let enter = || -> io::Result<()> {
        fs::create_dir(folder("old"))?;
        fs::create_dir(folder("new"))?;
        pivot_root(base, folder("old"))?;
        Ok(chdir("/")?)
    };
    enter().map_err(|error| FailedStep::new("enter the new file system", error))?;
    mount_tmpfs("/new", SKELETON)
}

fn leave_old_root() -> Result<(), FailedStep> {
    let leave = || -> rustix::io::Result<()> {
        chdir("/new")?;
        // The old root is now mounted above the new one.
        pivot_root(".", ".")?;
        unmount(".", UnmountFlags::DETACH)?;
        chdir("/")
    };
    leave().map_err(|error| FailedStep::new("leave the old file system", error))
}

/// Makes a file, folder or link of the system visible.
fn mirror(path: &Path) -> Result<(), FailedStep> {
    let step = |error| FailedStep::new(format!("make {} visible", path.display()), error);
    let old = old(path);
    let metadata = old.symlink_metadata().map_err(step)?;
    if metadata.is_symlink() {
        let new = new(path);
        let create = || -> io::Result<()> {
            fs::create_dir_all(new.parent().unwrap_or(&new))?;
            symlink(fs::read_link(&old)?, &new)
        };
        return create().map_err(step);
    }
    bind(path, path, READ_ONLY | NO_SETUID | NO_DEVICES)
}

/// Mounts the file or folder `source` of the old root on `target` of the new one.
fn bind(source: &Path, target: &Path, attributes: u64) -> Result<(), FailedStep> {
    let (old, new) = (old(source), new(target));
    let mount = || -> io::Result<()> {
        create_mount_point(&new, old.symlink_metadata()?.is_dir())?;
        Ok(mount_bind_recursive(&old, &new)?)
    };
    mount().map_err(|error| FailedStep::new(format!("make {} visible", source.display()), error))?;
    set_attributes(&new, true, attributes)
}

/// Fails if a part of a mount point is a link: it could lead to the old root.
fn refuse_links(target: &Path) -> Result<(), FailedStep> {
    let mut path = PathBuf::from("/new");
    for component in target.components().skip(1) {
        path.push(component);
        if path.symlink_metadata().is_ok_and(|metadata| metadata.is_symlink()) {
            let error = io::Error::from(rustix::io::Errno::LOOP);
            return Err(FailedStep::new(format!("mount a folder on {}", target.display()), error));
        }
    }
    Ok(())
}

/// Mounts the folder `source` of the old root on `target` of the new one; changes are stored in folders in `changes`.
fn overlay(source: &Path, target: &Path, changes: &Path) -> io::Result<()> {
    let new = new(target);
    create_mount_point(&new, true)?;
    let mut options = b"userxattr".to_vec();
    for (name, path) in [
        (&b",lowerdir="[..], source.to_owned()),
        (b",upperdir=", changes.join("upper")),
        (b",workdir=", changes.join("work")),
    ] {
        options.extend(name);
        for byte in old(&path).as_os_str().as_bytes() {
            if matches!(byte, b'\\' | b':' | b',') {
                options.push(b'\\');
            }
            options.push(*byte);
        }
    }
    let options = CString::new(options).map_err(io::Error::other)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    Ok(mount("overlay", &new, "overlay", flags, Some(options.as_c_str()))?)
}

fn create_mount_point(path: &Path, is_dir: bool) -> io::Result<()> {
    if path.symlink_metadata().is_ok() {
        return Ok(());
    }
    if is_dir {
        return fs::create_dir_all(path);
    }
    fs::create_dir_all(path.parent().unwrap_or(path))?;
    fs::write(path, "")
}

/// Files in `/etc` that name the sandbox's own user and host.
fn create_settings(home: &OsStr) -> Result<(), FailedStep> {
    // Java finds the home folder here. A name that cannot be in the file is replaced.
    let home = home.to_str().filter(|home| !home.contains([':', '\n'])).unwrap_or("/tmp");
    let files = [
        ("passwd", format!("user:x:{USER}:{USER}:user:{home}:/bin/sh\n")),
        ("group", format!("user:x:{USER}:\n")),
        ("hosts", "127.0.0.1 localhost sandbox\n::1 localhost sandbox\n".to_owned()),
        ("nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\n".to_owned()),
    ];
    let create = || -> io::Result<()> {
        fs::create_dir_all("/new/etc")?;
        files.iter().try_for_each(|(name, text)| fs::write(Path::new("/new/etc").join(name), text))
    };
    create().map_err(|error| FailedStep::new("create the files of /etc", error))
}

/// `/dev` with the devices that programs need, terminals of its own, and shared memory.
fn create_devices(command: &SandboxedCommand) -> Result<(), FailedStep> {
    create_mount_point(Path::new("/new/dev"), true).map_err(|error| FailedStep::new("create /dev", error))?;
    mount_tmpfs("/new/dev", "mode=0755,size=64k,nr_inodes=64")?;
    for device in DEVICES {
        bind(Path::new(device), Path::new(device), READ_ONLY | NO_SETUID)?;
    }
    mount_special("devpts", "/new/dev/pts", "newinstance,ptmxmode=0666,mode=620")?;
    let shared_bytes = (command.limits.memory_bytes / 2).clamp(1, MAX_SHARED_MEMORY_BYTES);
    create_mount_point(Path::new("/new/dev/shm"), true).map_err(|error| FailedStep::new("create /dev/shm", error))?;
    mount_tmpfs("/new/dev/shm", &format!("mode=1777,size={shared_bytes},nr_inodes=16k"))?;
    let links = [
        ("pts/ptmx", "ptmx"),
        ("/proc/self/fd", "fd"),
        ("/proc/self/fd/0", "stdin"),
        ("/proc/self/fd/1", "stdout"),
        ("/proc/self/fd/2", "stderr"),
    ];
    let mut links = links.into_iter();
    links
        .try_for_each(|(target, name)| symlink(target, Path::new("/new/dev").join(name)))
        .map_err(|error| FailedStep::new("create the links of /dev", error))
}

fn mount_tmpfs(path: &str, options: &str) -> Result<(), FailedStep> {
    mount_special("tmpfs", path, options)
}

fn mount_special(kind: &str, path: &str, options: &str) -> Result<(), FailedStep> {
    let flags = match kind {
        "devpts" => MountFlags::NOSUID | MountFlags::NOEXEC,
        "proc" => MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC,
        _ => MountFlags::NOSUID | MountFlags::NODEV,
    };
    let mount = || -> io::Result<()> {
        create_mount_point(Path::new(path), true)?;
        let options = CString::new(options).map_err(io::Error::other)?;
        Ok(mount(kind, path, kind, flags, Some(options.as_c_str()))?)
    };
    mount().map_err(|error| FailedStep::new(format!("mount {kind}"), error))
}

/// Sets attributes of a mount, and of those below it if `recursive`.
fn set_attributes(path: impl AsRef<Path>, recursive: bool, attributes: u64) -> Result<(), FailedStep> {
    let path = path.as_ref();
    let step = |error| FailedStep::new(format!("limit the rights of {}", path.display()), error);
    let name = CString::new(path.as_os_str().as_bytes()).map_err(|error| step(io::Error::other(error)))?;
    let flags = if recursive { libc::AT_RECURSIVE } else { 0 };
    let attributes = libc::mount_attr { attr_set: attributes, attr_clr: 0, propagation: 0, userns_fd: 0 };
    // SAFETY: the kernel reads the path and the structure, whose size is given.
    #[allow(unsafe_code)]
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            libc::AT_FDCWD,
            name.as_ptr(),
            flags,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    if result == -1 { Err(step(io::Error::last_os_error())) } else { Ok(()) }
}

fn old(path: &Path) -> PathBuf {
    below("/old", path)
}

fn new(path: &Path) -> PathBuf {
    below("/new", path)
}

fn below(root: &str, path: &Path) -> PathBuf {
    Path::new(root).join(path.strip_prefix("/").unwrap_or(path))
}
