//! Tests of starts and restarts: what they keep, what they repair, and what they refuse.

use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use cfq_deploy::services::{ServiceKind, ServiceOrigin};
use cfq_deploy::{Paths, ServiceOptions, ServiceSource, Stack, StackOptions};
use cfq_link::child::Signal;

use crate::lab::{Lab, chain, join, node, options, remember, remembered, running};

#[tokio::test(flavor = "multi_thread")]
async fn restart_keeps_data_addresses_and_port() {
    let lab = Lab::new();
    // Create the folder that an interrupted initdb leaves.
    std::fs::create_dir_all(lab.paths.data.join("postgres.new/data/base")).unwrap();
    std::fs::write(lab.paths.data.join("postgres.new/data/PG_VERSION"), "15\n").unwrap();
    let clock = Instant::now();
    let stack = lab.start().await;
    eprintln!("first start {:?}: {:?}", clock.elapsed(), stack.addresses().programs);
    let addresses = stack.addresses().clone();
    remember(&addresses.postgres).await;
    assert!(!lab.paths.data.join("postgres.new").exists());
    let clock = Instant::now();
    stack.stop().await.unwrap();
    eprintln!("stop {:?}", clock.elapsed());
    assert_eq!(std::fs::read_dir(lab.paths.run()).unwrap().count(), 0, "no pidfile remains");
    let clock = Instant::now();
    let stack = lab.start().await;
    let second = clock.elapsed();
    eprintln!("second start {second:?}");
    assert!(second < Duration::from_secs(10), "{second:?}");
    assert_eq!(stack.addresses(), &addresses, "same folders and same port");
    assert_eq!(remembered(&addresses.postgres).await, 1);
    stack.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_service_restarts_at_the_same_address() {
    let lab = Lab::new();
    let mut stack = lab.start().await;
    let addresses = stack.addresses().clone();
    remember(&addresses.postgres).await;
    for (name, kind) in [("postgres", ServiceKind::Postgres), ("nats", ServiceKind::Nats)] {
        assert!(running(&lab.paths, name).signal(Signal::Kill).unwrap());
        let restarted = tokio::time::timeout(Duration::from_secs(60), stack.supervise()).await.unwrap().unwrap();
        assert_eq!((restarted.kind, restarted.attempt), (kind, 1));
    }
    assert_eq!(remembered(&addresses.postgres).await, 1);
    join(&addresses.nats, &node()).await;
    stack.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn taken_stored_port_is_replaced_and_taken_fixed_port_is_refused() {
    let lab = Lab::new();
    let stack = lab.start().await;
    let url = stack.addresses().nats.url.clone();
    stack.stop().await.unwrap();
    let port: u16 = url.rsplit(':').next().unwrap().parse().unwrap();
    let taken = std::net::TcpListener::bind(("127.0.0.1", port)).unwrap();
    let stack = lab.start().await;
    assert_ne!(stack.addresses().nats.url, url);
    stack.stop().await.unwrap();
    let error = Stack::start(&lab.paths, StackOptions { nats_port: Some(port), ..options() }).await.unwrap_err();
    assert!(chain(&error).contains(&format!("127.0.0.1:{port} is in use")), "{}", chain(&error));
    drop(taken);
    let fixed = Stack::start(&lab.paths, StackOptions { nats_port: Some(port), ..options() }).await.unwrap();
    assert_eq!(fixed.addresses().nats.url, url);
    fixed.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn fetched_services_run_in_a_deep_data_folder() {
    let lab = Lab::new();
    let data = lab.folder.path().join("deep, and with a \"name\"").join("x".repeat(100)).join("data");
    let paths = Paths { data, ..lab.paths.clone() };
    let services = ServiceOptions { source: ServiceSource::Fetched, ..ServiceOptions::default() };
    let stack = Stack::start(&paths, StackOptions { services, ..options() })
        .await
        .unwrap_or_else(|error| panic!("{}", chain(&error)));
    let addresses = stack.addresses().clone();
    let fetched = addresses.programs.iter().all(|program| program.origin == ServiceOrigin::Fetched);
    assert!(fetched, "{:?}", addresses.programs);
    assert!(addresses.postgres.host.as_os_str().len() < 100);
    remember(&addresses.postgres).await;
    stack.stop().await.unwrap();
    std::fs::remove_dir_all(&addresses.postgres.host).unwrap();
}

/// After a power failure and a reboot, the process id in Postgres's lock file may belong to another process. Postgres
/// must start nevertheless.
#[tokio::test(flavor = "multi_thread")]
async fn postgres_lock_file_of_another_process_is_removed() {
    let lab = Lab::new();
    lab.start().await.stop().await.unwrap();
    let other_process = std::process::id();
    let lock = format!("{other_process}\n{}\n1\n5432\n\n\n        1         1\n", lab.paths.postgres().display());
    std::fs::write(lab.paths.postgres().join("postmaster.pid"), lock).unwrap();
    lab.start().await.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn data_of_another_postgres_major_is_refused_with_next_steps() {
    let lab = Lab::new();
    std::fs::create_dir_all(lab.paths.postgres()).unwrap();
    std::fs::write(lab.paths.postgres().join("PG_VERSION"), "12\n").unwrap();
    let message = chain(&Stack::start(&lab.paths, options()).await.unwrap_err());
    for part in ["made by Postgres 12", "--postgres-bin DIR", "CFQ_DATA=DIR"] {
        assert!(message.contains(part), "{message}");
    }
    assert_eq!(std::fs::read_dir(lab.paths.postgres()).unwrap().count(), 1, "nothing was changed");
}

#[tokio::test(flavor = "multi_thread")]
async fn file_in_place_of_the_data_folder_is_reported() {
    let lab = Lab::new();
    std::fs::write(&lab.paths.data, "").unwrap();
    let message = chain(&Stack::start(&lab.paths, options()).await.unwrap_err());
    assert!(message.contains("a file exists where a folder is needed") && message.contains("/data"), "{message}");
}

#[tokio::test(flavor = "multi_thread")]
async fn closed_parent_folder_is_reported_under_root() {
    if !rustix::process::geteuid().is_root() {
        let reason = "only root runs Postgres and NATS as another user";
        return cfq_test_skip::skip("closed_parent_folder_is_reported_under_root", reason);
    }
    let lab = Lab::new();
    let closed = lab.folder.path().canonicalize().unwrap();
    std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o700)).unwrap();
    let message = chain(&Stack::start(&lab.paths, options()).await.unwrap_err());
    assert!(message.contains(&format!("chmod o+x {}", closed.display())), "{message}");
}
