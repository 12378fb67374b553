//! Preparations that a project declares in `.cfq/checks.toml`: what the checks need is installed once, on the base commit,
//! from a registry, and no check reaches the registry.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use cfq_agent_runner::checks::Registry;
use cfq_proto::loop_step::EscalationReason;
use cfq_proto::review::Quarantine;
use cfq_proto::task::TaskState;
use cfq_tests::cluster::{Cluster, Options, WAIT_LIMIT};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};
use cfq_tests::wait;

/// A registry with one package, a script that compares two words.
struct PackageServer {
    address: String,
    requests: Arc<AtomicUsize>,
}

impl PackageServer {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let requests = Arc::new(AtomicUsize::new(0));
        let counted = requests.clone();
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
                while lines.next().and_then(Result::ok).is_some_and(|line| !line.is_empty()) {}
                counted.fetch_add(1, Ordering::Relaxed);
                let package = "[ \"$1\" = \"$2\" ]\n";
                let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", package.len());
                // The client may have gone.
                drop(stream.write_all((head + package).as_bytes()));
            }
        });
        Self { address, requests }
    }

    fn requests(&self) -> usize {
        self.requests.load(Ordering::Relaxed)
    }

    fn options(&self) -> Options {
        Options { registries: vec![Registry::try_from(self.address.clone()).unwrap()], ..Options::default() }
    }

    /// A Python program that prints the package of a server.
    fn fetch(address: &str) -> String {
        format!(
            "import urllib.request as u; print(u.urlopen('http://{address}/compare.sh', timeout=5).read().decode())"
        )
    }

    /// A project whose check needs the package. `before` is a part of the script that installs it.
    fn repo(&self, before: &str) -> UserRepo {
        let install = format!(
            "mkdir -p vendor ~/.packages && {before} python3 -c \"{}\" >vendor/compare.sh && echo $(pwd) >~/.packages/path",
            Self::fetch(&self.address)
        );
        let check = "sh vendor/compare.sh \"$(cat add.py)\" right && sh vendor/compare.sh $(cat ~/.packages/path) $(pwd) && \
                     rm vendor/compare.sh && ! python3 fetch.py";
        let declared = format!(
            "[[prepare]]\nname = \"packages\"\nrun = {:?}\nlock_files = [\"packages.lock\"]\n\
             keep = [\"vendor/\", \"~/.packages/\"]\n[[check]]\nname = \"tests\"\nrun = {:?}\n",
            ["sh", "-c", &install],
            ["sh", "-c", check]
        );
        let repo = UserRepo::with_uncommitted_changes();
        let fetch = Self::fetch(&self.address);
        repo.commit(&[("packages.lock", "compare 1\n"), ("fetch.py", &fetch), (".cfq/checks.toml", &declared)]);
        repo
    }
}

fn says(text: &str) -> Reply {
    Reply::Text(file("add.py", &format!("{text}\n")))
}

fn praise() -> Reply {
    Reply::Text(review(99, &[]))
}

#[tokio::test(flavor = "multi_thread")]
async fn package_is_installed_once_and_no_check_reaches_the_registry() {
    let server = PackageServer::start();
    let cluster = Cluster::start_with(server.options()).await;
    let repo = server.repo("");
    for _ in 0..2 {
        cluster.models.script("alpha", vec![says("wrong"), says("right")]);
        cluster.models.script("beta", vec![praise()]);
        let task = cluster.submit(&cluster.spec(&repo)).await;
        let detail = cluster.wait_until_settled(task).await;
        assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
        let quarantines: Vec<_> = detail.iterations.iter().map(|iteration| iteration.quarantine).collect();
        assert_eq!(quarantines, [Some(Quarantine::FailedChecks), None]);
        assert_eq!(server.requests(), 1, "what a check deletes is there again for the next one");
        cluster.run_oracle(task, &repo).await;
    }
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn changed_lock_file_is_installed_only_after_a_human_has_accepted_it() {
    let server = PackageServer::start();
    let cluster = Cluster::start_with(server.options()).await;
    let reply = format!("{}\n{}", file("add.py", "right\n"), file("packages.lock", "compare 2\n"));
    cluster.models.script("alpha", vec![Reply::Text(reply)]);
    let repo = server.repo("");
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.escalation.unwrap().reason, EscalationReason::DangerousOutputDetected, "{}", detail.reason);
    let iteration = &detail.iterations[0];
    assert_eq!((iteration.quarantine, iteration.ran.len()), (Some(Quarantine::Dangerous), 0));
    let finding = iteration.findings[0].to_string();
    assert!(finding.starts_with("packages.lock: changes what the preparation `packages` installs"), "{finding}");
    assert_eq!(server.requests(), 1);
    // As the base of another task, it is installed.
    repo.commit(&[("packages.lock", "compare 2\n")]);
    cluster.models.script("alpha", vec![says("right")]);
    cluster.models.script("beta", vec![praise()]);
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!((detail.summary.state, server.requests()), (TaskState::Merged, 2), "{}", detail.reason);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_preparation_fails_the_task_before_a_model_call() {
    let server = PackageServer::start();
    // Another port of the same machine is permitted.
    let registries = vec![Registry::try_from("127.0.0.1:1".to_owned()).unwrap()];
    let cluster = Cluster::start_with(Options { registries, ..Options::default() }).await;
    cluster.models.script("alpha", vec![says("right")]);
    let repo = server.repo("");
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Failed, "{}", detail.reason);
    let refused = format!("{} is not in `registries` under [checks]", server.address);
    for part in ["the preparation `packages` of the checks failed: exit code 1", &refused, "cfq retry TASK"] {
        assert!(detail.reason.contains(part), "{}", detail.reason);
    }
    assert_eq!((detail.iterations.len(), cluster.models.call_count("alpha"), server.requests()), (0, 0, 0));
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn runner_killed_during_a_preparation_installs_again() {
    let server = PackageServer::start();
    let cluster = Cluster::start_with(server.options()).await;
    cluster.models.script("alpha", vec![says("right")]);
    cluster.models.script("beta", vec![praise()]);
    let marker = format!("4.{}", std::process::id());
    let repo = server.repo(&format!("sleep {marker} &&"));
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let until = |wanted: bool| {
        let state = (sleeping(&marker) > 0) == wanted;
        async move { if state { Ok(()) } else { Err("not yet".to_owned()) } }
    };
    wait::until("the preparation to run", WAIT_LIMIT, || until(true)).await;
    cluster.kill9("runner");
    wait::until("the preparation to end with its runner", Duration::from_secs(10), || until(false)).await;
    assert_eq!(server.requests(), 0);
    cluster.start_service("runner");
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    assert_eq!((server.requests(), cluster.models.call_count("alpha")), (1, 1));
    cluster.finish().await;
}

/// Number of processes that sleep for this time.
fn sleeping(seconds: &str) -> usize {
    let ids = std::fs::read_dir("/proc").unwrap().flatten();
    let lines = ids.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
    lines.filter(|line| line.starts_with(format!("sleep\0{seconds}").as_bytes())).count()
}
