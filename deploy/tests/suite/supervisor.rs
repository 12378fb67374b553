//! Tests of a process that supervises the servers: the lock that it holds, and what remains after it is killed.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use cfq_deploy::stack::StackAddresses;
use cfq_deploy::{DataLock, Paths, Stack, StackError};
use cfq_link::child::ProcessIdentity;

use crate::lab::{Lab, chain, options, remember, remembered, running};

#[tokio::test(flavor = "multi_thread")]
#[ignore = "not a test: the process that the other tests start and kill"]
async fn supervisor_process() {
    let Some(data) = std::env::var_os("CFQ_TEST_SUPERVISE").map(PathBuf::from) else { return };
    let cache = Paths::from_environment().unwrap().cache;
    let paths = Paths { config: data.with_file_name("config"), data, cache };
    let stack = Stack::start(&paths, options()).await.unwrap_or_else(|error| panic!("{}", chain(&error)));
    remember(&stack.addresses().postgres).await;
    let ready = paths.data.join("ready");
    std::fs::write(ready.with_extension("part"), serde_json::to_vec(stack.addresses()).unwrap()).unwrap();
    std::fs::rename(ready.with_extension("part"), &ready).unwrap();
    std::future::pending::<()>().await;
}

/// Starts [`supervisor_process`] and waits until its servers are ready. Returns the process and the servers' addresses.
async fn supervisor(lab: &Lab) -> (std::process::Child, StackAddresses) {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "supervisor::supervisor_process", "--ignored", "--nocapture"])
        .env("CFQ_TEST_SUPERVISE", &lab.paths.data)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let ready = lab.paths.data.join("ready");
    let wait = async {
        while !ready.exists() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(120), wait).await.unwrap();
    (child, serde_json::from_slice(&std::fs::read(ready).unwrap()).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn second_start_reports_the_lock_holder() {
    let lab = Lab::new();
    let (mut child, _) = supervisor(&lab).await;
    let error = Stack::start(&lab.paths, options()).await.unwrap_err();
    let message = error.to_string();
    assert!(matches!(error, StackError::Lock(_)), "{message}");
    let process = format!("process {}", child.id());
    assert!(message.contains(&process) && message.contains("supervisor_process"), "{message}");
    assert_eq!(DataLock::holder(&lab.paths).unwrap().unwrap().process.pid, child.id());
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(DataLock::holder(&lab.paths).unwrap(), None);
    lab.start().await.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn start_reclaims_services_of_a_killed_supervisor() {
    let lab = Lab::new();
    let (mut child, addresses) = supervisor(&lab).await;
    let services = [running(&lab.paths, "postgres"), running(&lab.paths, "nats")];
    // While suspended, the services cannot act on the parent-death signal, as on a machine that is too busy to run
    // them.
    for service in &services {
        let stopped = Command::new("kill").args(["-STOP", &service.pid.to_string()]).status().unwrap();
        assert!(stopped.success());
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(services.iter().all(ProcessIdentity::is_alive), "the services outlive the supervisor");
    let stack = lab.start().await;
    assert!(!services.iter().any(ProcessIdentity::is_alive));
    assert_eq!(stack.addresses(), &addresses);
    assert_eq!(remembered(&addresses.postgres).await, 1);
    stack.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn services_exit_after_their_supervisor_is_killed() {
    let lab = Lab::new();
    let (mut child, _) = supervisor(&lab).await;
    let services = [running(&lab.paths, "postgres"), running(&lab.paths, "nats")];
    child.kill().unwrap();
    child.wait().unwrap();
    for service in services {
        assert!(service.ended(Duration::from_secs(30)).await);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn services_without_pidfiles_are_found_and_stopped() {
    let lab = Lab::new();
    let (mut child, addresses) = supervisor(&lab).await;
    let services = [running(&lab.paths, "postgres"), running(&lab.paths, "nats")];
    for service in &services {
        assert!(Command::new("kill").args(["-STOP", &service.pid.to_string()]).status().unwrap().success());
    }
    for name in ["postgres", "nats"] {
        std::fs::remove_file(lab.paths.pidfile(name)).unwrap();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(services.iter().all(ProcessIdentity::is_alive), "the services outlive the supervisor");
    let stack = lab.start().await;
    assert!(!services.iter().any(ProcessIdentity::is_alive));
    assert_eq!(remembered(&addresses.postgres).await, 1);
    stack.stop().await.unwrap();
}
