//! Mounts of a test's own: a file system of few bytes, or one that cannot be written, at a folder that only the programs
//! started here see mounted. Root gets a mount namespace; an ordinary user a user namespace besides, in which programs run
//! under that user's own id again, so that they find themselves as on the machine.
//!
//! The namespace lives as long as its holder, a `cat` that ends with this process, and goes with all its mounts.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

pub struct Room {
    holder: Child,
    /// User and group, where a user namespace was needed.
    mapped: Option<(u32, u32)>,
}

impl Room {
    /// A file system of `mib` MiB at `at`, which must exist.
    pub fn small(at: &Path, mib: u32) -> Option<Self> {
        Self::with(&format!("mount -t tmpfs -o mode=0755,size={mib}m cfq-test '{}'", at.display()))
    }

    /// Nothing can be written at `at`, whoever asks.
    pub fn read_only(at: &Path) -> Option<Self> {
        Self::with(&format!("mount -t tmpfs -o mode=0755,ro cfq-test '{}'", at.display()))
    }

    /// `None` where the machine allows none of this, with the reason on stderr.
    fn with(mount: &str) -> Option<Self> {
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
                eprintln!("skipped: unshare cannot be run ({error})");
                return None;
            }
        };
        let mut said = String::new();
        BufReader::new(holder.stdout.take().unwrap()).read_line(&mut said).unwrap();
        if said.trim() != "mounted" {
            let mut why = String::new();
            holder.stderr.take().unwrap().read_to_string(&mut why).unwrap();
            holder.wait().unwrap();
            eprintln!("skipped: this machine lets this user make no namespace with a mount ({})", why.trim());
            return None;
        }
        Some(Self { holder, mapped })
    }

    /// A program that sees the mount; it keeps the process id of what is spawned.
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

    /// Where this process finds what lies at `path` in there.
    pub fn path(&self, path: &Path) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root", self.holder.id())).join(path.strip_prefix("/").unwrap())
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        drop(self.holder.kill());
        drop(self.holder.wait());
    }
}
