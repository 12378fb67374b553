//! Time to run `true` in a sandbox, at each level that this machine offers. The baselines, measured in turns in the same
//! run, are `true` without a sandbox and `bwrap` with all namespaces, if it is installed. A program in a sandbox never
//! runs as root: started as root, the benchmark runs all of them as `nobody`.
//!
//!     cargo run -p cfq-benches --bin sandbox_start -- target/debug/cfq
#![allow(clippy::print_stdout)]

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use cfq_benches::{median, percentile};
use cfq_sandbox::{CommandLimits, SandboxAccount, SandboxLauncher, SandboxLevel, SandboxedCommand};

const RUNS: usize = 200;
/// User and group if the benchmark runs as root.
const NOBODY: SandboxAccount = SandboxAccount { uid: 65534, gid: 65534 };

fn main() -> anyhow::Result<()> {
    let cfq = std::env::args().nth(1).context("argument: the cfq binary, or cfq-sandbox-launcher")?;
    let is_root = std::fs::metadata("/proc/self")?.uid() == 0;
    let account = is_root.then_some(NOBODY);
    let folder = tempfile::tempdir_in("/var/tmp")?;
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777))?;
    // A program in a private folder could not be executed by another account.
    let program = folder.path().join("launcher");
    std::fs::copy(&cfq, &program)?;
    let args: &[&str] = if cfq.ends_with("launcher") { &[] } else { &["serve", "sandbox-launcher"] };
    let launcher = SandboxLauncher { program, args: args.iter().map(Into::into).collect(), account };
    let level = launcher.probe()?.level.context("this machine offers no sandbox")?;
    let levels: Vec<SandboxLevel> = SandboxLevel::ALL.into_iter().filter(|other| *other <= level).collect();
    let has_bwrap = Command::new("bwrap").arg("--version").stdout(Stdio::null()).status().is_ok();

    let names = ["true"].into_iter().chain(has_bwrap.then_some("bwrap")).chain(levels.iter().map(|l| l.as_str()));
    let mut times: Vec<(&str, Vec<Duration>)> = names.map(|name| (name, Vec::new())).collect();
    for _ in 0..RUNS {
        for (name, times) in &mut times {
            let start = Instant::now();
            match levels.iter().find(|level| level.as_str() == *name) {
                Some(level) => run_in_sandbox(&launcher, *level, folder.path())?,
                None => run_baseline(name, account)?,
            }
            times.push(start.elapsed());
        }
    }
    for (name, mut times) in times {
        println!("{name:10} median {:5.1} ms, p95 {:5.1} ms", ms(median(&mut times)), ms(percentile(&mut times, 95)));
    }
    Ok(())
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

fn run_in_sandbox(launcher: &SandboxLauncher, level: SandboxLevel, folder: &Path) -> anyhow::Result<()> {
    let command = SandboxedCommand {
        program: "/bin/true".into(),
        args: Vec::new(),
        env: Vec::new(),
        work_dir: folder.to_owned(),
        readable: Vec::<PathBuf>::new(),
        writable: Vec::new(),
        mounts: Vec::new(),
        scratch_dir: folder.to_owned(),
        listener_port: None,
        limits: CommandLimits::default(),
    };
    let outcome = launcher.run(level, &command, &AtomicBool::new(false))?;
    ensure!(outcome.end.is_success(), "true in the sandbox: {}", outcome.end);
    Ok(())
}

fn run_baseline(name: &str, account: Option<SandboxAccount>) -> anyhow::Result<()> {
    let mut command = Command::new(name);
    if name == "bwrap" {
        command.args([
            "--unshare-all",
            "--die-with-parent",
            "--new-session",
            "--cap-drop",
            "ALL",
            "--ro-bind",
            "/usr",
            "/usr",
        ]);
        for folder in ["bin", "lib", "lib64"] {
            command.args(["--symlink", &format!("usr/{folder}"), &format!("/{folder}")]);
        }
        command.args(["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "/bin/true"]);
    }
    if let Some(SandboxAccount { uid, gid }) = account {
        command.uid(uid).gid(gid);
    }
    command.current_dir("/").stdin(Stdio::null()).stdout(Stdio::null());
    ensure!(command.status()?.success(), "{name} failed");
    Ok(())
}
