//! Tests of a start as root on a machine where the account of the services, or another user, tries to use it.

use std::os::unix::fs::{MetadataExt, lchown, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use cfq_deploy::Stack;

use crate::lab::{Lab, chain, options, remember, remembered};

/// A user id that no account has.
const OTHER_USER: u32 = 4_000_000;
/// User id of `nobody`, as which cfq 0.1 ran the services if it ran as root.
const NOBODY: u32 = 65_534;

/// True if this test runs as root; otherwise reports the test as skipped.
fn is_root(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        cfq_test_skip::skip(test, "only root runs Postgres and NATS as another user");
    }
    root
}

fn owner(path: &Path) -> u32 {
    std::fs::symlink_metadata(path).unwrap().uid()
}

/// Replaces the entry `path` by a link to `target` that belongs to the owner of the folder, as the account of the
/// services can do.
fn plant_link(path: &Path, target: &Path) {
    if path.exists() {
        std::fs::rename(path, path.with_extension("moved")).unwrap();
    }
    symlink(target, path).unwrap();
    lchown(path, Some(owner(path.parent().unwrap())), None).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn planted_link_changes_no_file_of_root() {
    if !is_root("planted_link_changes_no_file_of_root") {
        return;
    }
    let lab = Lab::new();
    lab.start().await.stop().await.unwrap();
    let target = lab.folder.path().join("target");
    std::fs::create_dir(&target).unwrap();
    let mode = std::fs::metadata(&target).unwrap().mode();
    plant_link(&lab.paths.nats().join("store"), &target);
    // nats-server cannot write to the target, so the start fails.
    let started = Stack::start(&lab.paths, options()).await;
    assert_eq!((owner(&target), std::fs::metadata(&target).unwrap().mode()), (0, mode), "{:?}", started.err());
}

#[tokio::test(flavor = "multi_thread")]
async fn planted_link_reveals_no_file_of_root() {
    if !is_root("planted_link_reveals_no_file_of_root") {
        return;
    }
    let lab = Lab::new();
    lab.start().await.stop().await.unwrap();
    let secret = lab.folder.path().join("secret");
    std::fs::write(&secret, "canary").unwrap();
    plant_link(&lab.paths.postgres().join("PG_VERSION"), &secret);
    let message = chain(&Stack::start(&lab.paths, options()).await.unwrap_err());
    assert!(message.contains("PG_VERSION") && !message.contains("canary"), "{message}");
}

#[tokio::test(flavor = "multi_thread")]
async fn services_of_root_have_an_account_of_their_own_and_keep_their_data() {
    if !is_root("services_of_root_have_an_account_of_their_own_and_keep_their_data") {
        return;
    }
    let lab = Lab::new();
    let stack = lab.start().await;
    remember(&stack.addresses().postgres).await;
    stack.stop().await.unwrap();
    // The folders as cfq 0.1 left them.
    let folders = [lab.paths.postgres(), lab.paths.nats(), lab.paths.data.join("postgres-socket")];
    let chown = Command::new("chown").arg("-R").arg(format!("{NOBODY}:{NOBODY}")).args(&folders).status().unwrap();
    assert!(chown.success());
    let stack = lab.start().await;
    assert_eq!(remembered(&stack.addresses().postgres).await, 1);
    for folder in &folders {
        assert!(![0, NOBODY].contains(&owner(folder)), "{}", folder.display());
    }
    let version = lab.paths.postgres().join("PG_VERSION");
    assert_eq!(owner(&version), owner(&lab.paths.postgres()));
    for process in ["postgres", "nats"] {
        let user = crate::lab::running(&lab.paths, process).user();
        assert_eq!(user, Some(owner(&lab.paths.postgres())), "{process}");
    }
    stack.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn process_of_another_user_is_not_terminated_as_an_orphan() {
    if !is_root("process_of_another_user_is_not_terminated_as_an_orphan") {
        return;
    }
    let lab = Lab::new();
    let config = lab.paths.nats().join("nats.conf");
    let mut others = [("-D", &lab.paths.postgres()), ("--config", &config)].map(|(flag, path)| {
        let mut shell = Command::new("sh");
        shell.args(["-c", "read line", "sh", flag]).arg(path);
        shell.stdin(Stdio::piped()).uid(OTHER_USER).gid(OTHER_USER).spawn().unwrap()
    });
    let stack = lab.start().await;
    for other in &mut others {
        assert_eq!(other.try_wait().unwrap(), None, "still running");
        other.kill().unwrap();
        other.wait().unwrap();
    }
    stack.stop().await.unwrap();
}
