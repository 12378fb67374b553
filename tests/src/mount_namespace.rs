//! A mount namespace for a test: it contains a small or read-only file system, mounted at a folder and visible only to
//! programs that are started through [`MountNamespace`]. If the tests do not run as root, a user namespace is created
//! too, in which the programs run under the user's own id.
//!
//! The namespace and its mounts exist as long as its holder process, a `cat` that ends with this process.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use cfq_test_skip::skip;

/// A namespace with one mount; dropping it removes the mount.
pub struct MountNamespace {
    holder: Child,
    /// User and group id of the programs, if a user namespace was needed.
    mapped: Option<(u32, u32)>,
}

impl MountNamespace {
    /// Mounts a file system of `mib` MiB at the folder `at`, which must exist. If this user cannot create a mount
    /// namespace, reports `test` as skipped and returns `None`.
    pub fn with_tmpfs(test: &str, at: &Path, mib: u32) -> Option<Self> {
        let mount = format!("mount -t tmpfs -o mode=0755,size={mib}m cfq-test '{}'", at.display());
        Self::with_mount(test, &mount)
    }

    /// Like [`Self::with_tmpfs`], but the file system is read-only.
    pub fn with_read_only(test: &str, at: &Path) -> Option<Self> {
        Self::with_mount(test, &format!("mount -t tmpfs -o mode=0755,ro cfq-test '{}'", at.display()))
    }

    /// Like [`Self::with_tmpfs`], but the file `at` has the content of the file `source`.
    pub fn with_file(test: &str, source: &Path, at: &Path) -> Option<Self> {
        Self::with_mount(test, &format!("mount --bind '{}' '{}'", source.display(), at.display()))
    }

    fn with_mount(test: &str, mount: &str) -> Option<Self> {
        // SAFETY: plain system calls without arguments.
        #[allow(unsafe_code)]
        let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
        let mapped = (uid != 0).then_some((uid, gid));
        let mut command = Command::new("unshare");
        if mapped.is_some() {
            command.args(["--user", "--map-root-user"]);
        }
        command.args(["--mount", "sh", "-c", &format!("{mount} && echo mounted && exec cat")]);
        let pipes = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut holder = match pipes.spawn() {
            Ok(holder) => holder,
            Err(error) => {
                skip(test, &format!("cannot run unshare: {error}"));
                return None;
            }
        };
        let mut line = String::new();
        BufReader::new(holder.stdout.take().unwrap()).read_line(&mut line).unwrap();
        if line.trim() != "mounted" {
            let mut why = String::new();
            holder.stderr.take().unwrap().read_to_string(&mut why).unwrap();
            holder.wait().unwrap();
            skip(test, &format!("this user cannot create a mount namespace: {why}"));
            return None;
        }
        Some(Self { holder, mapped })
    }

    /// A command that runs a program inside the namespace. `nsenter` executes the program, so the spawned process id is
    /// the program's own.
    pub fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.holder.id().to_string(), "--mount"]);
        if let Some((uid, gid)) = self.mapped {
            command.args(["--user", "--preserve-credentials", "unshare", "--user"]);
            command.args([format!("--map-user={uid}"), format!("--map-group={gid}")]);
        }
        command.arg(program);
        command
    }

    /// Path by which this process, outside the namespace, reaches `path` inside it.
    pub fn path(&self, path: &Path) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root", self.holder.id())).join(path.strip_prefix("/").unwrap())
    }
}

impl Drop for MountNamespace {
    fn drop(&mut self) {
        drop(self.holder.kill());
        drop(self.holder.wait());
    }
}
