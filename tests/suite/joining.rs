//! Tests of several machines: they join by the printed command only, take work, and are lost in four ways in the middle of
//! a call. Every task ends, each result is delivered once, and what a lost machine sends later changes nothing.

mod server;

use std::collections::BTreeMap;

use cfq_proto::http::{JobFilter, JobSummary};
use cfq_proto::job::JobState;
use cfq_tests::cfq_up::Up;
use cfq_tests::cluster::WAIT_LIMIT;
use cfq_tests::machines::Network;
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Gate, Reply, file, review};
use cfq_tests::{signal, wait};
use server::Server;

fn result() -> String {
    file("add.py", "def add(a, b):\n    return a + b")
}

/// Scripts a creator whose calls wait for the gate, and a critic that accepts.
fn script(server: &Server, gate: &Gate) {
    let models = &server.home.models;
    models.script("alpha", vec![Reply::Gated("I write it.\n".to_owned(), result(), gate.clone())]);
    models.script("beta", vec![Reply::Text(review(95, &[]))]);
}

fn on_node<'a>(jobs: &'a [JobSummary], node: &str) -> Vec<&'a JobSummary> {
    jobs.iter().filter(|job| job.node.as_ref().is_some_and(|n| n.as_str() == node)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_joins_by_the_printed_command_and_its_work_survives_its_end() {
    let server = Server::on_loopback().await;
    let mut command = server.new_command(None).await;
    command.extend(["--name".to_owned(), "gpu1".to_owned()]);
    let machine = server.start_machine(None, "gpu1", &command);
    server.wait_until_alive(2).await;
    assert!(server.machine("gpu1").await.unwrap().alive);
    let reused = server.run_machine(None, "gpu2", &command);
    let text = String::from_utf8_lossy(&reused.stderr).into_owned();
    assert!(reused.status.code() == Some(2) && text.contains("already used"), "{text}");

    let gate = Gate::closed();
    script(&server, &gate);
    let repos: Vec<UserRepo> = (0..4).map(|_| UserRepo::with_uncommitted_changes()).collect();
    let mut tasks = Vec::new();
    for repo in &repos {
        tasks.push(server.submit(repo).await);
    }
    // Both nodes run two calls at a time.
    let running = server.wait_until_running(&tasks).await;
    assert_eq!((on_node(&running, "gpu1").len(), running.len()), (2, 4), "{running:?}");
    kill(&machine);
    gate.open();
    server.wait_until_merged(&tasks).await;
    for job in server.creator_jobs(&tasks).await {
        let was_lost = on_node(&running, "gpu1").iter().any(|lost| lost.id == job.id);
        assert_eq!((job.losses, job.failures), (i32::from(was_lost), 0), "{job:?}");
    }
    for repo in &repos {
        assert_eq!(repo.branches().iter().filter(|branch| branch.starts_with("cfq/")).count(), 1);
    }

    for (data, words) in [("gpu1", "\"join\"\n"), ("data", "\"up\" \"--lan\"\n")] {
        let mut args = vec!["service", "install", "--print"];
        args.extend((data == "data").then_some("--lan"));
        let printed = server.home.cfq(None, &server.home.path(data), &args).output().unwrap();
        let text = String::from_utf8(printed.stdout).unwrap();
        assert!(printed.status.success() && text.contains(words), "{data}: {text}");
    }

    // The machine comes back without a token, and is refused after its access was revoked.
    drop(machine);
    let mut machine = server.start_machine(None, "gpu1", &["join".to_owned()]);
    server.wait_until_alive(2).await;
    server.client.revoke_machine(&"gpu1".parse().unwrap()).await.unwrap();
    server.wait_until_alive(1).await;
    assert_eq!(machine.exit_code().await, Some(2), "{}", machine.output());
    assert!(machine.output().contains("its access was revoked"), "{}", machine.output());
    assert!(server.up.stop().await.success());
}

/// A machine that uses another token keeps its key and its name; after it was revoked, it gets another key.
#[tokio::test(flavor = "multi_thread")]
async fn machine_that_joins_again_keeps_its_name() {
    let server = Server::on_loopback().await;
    let machine = server.start_machine(None, "gpu1", &server.new_command(Some("gpu1")).await);
    server.wait_until_alive(2).await;
    let status = server.run_machine(None, "gpu1", &["status".to_owned()]);
    let text = String::from_utf8_lossy(&status.stdout).into_owned();
    assert!(
        status.status.success() && text.contains("as gpu1: its node runs") && text.contains("accepts it"),
        "{text}"
    );
    let doctor = server.run_machine(None, "gpu1", &["doctor".to_owned()]);
    let text = String::from_utf8_lossy(&doctor.stdout).into_owned();
    assert!(text.contains("which accepts this machine") && !text.contains("restore it from a backup"), "{text}");
    assert!(machine.stop().await.success());
    server.wait_until_alive(1).await;
    let key = server.machine("gpu1").await.unwrap().nats_key;
    let machine = server.start_machine(None, "gpu1", &server.new_command(None).await);
    server.wait_until_alive(2).await;
    assert_eq!(server.machine("gpu1").await.unwrap().nats_key, key);
    assert!(machine.stop().await.success());
    server.wait_until_alive(1).await;
    server.client.revoke_machine(&"gpu1".parse().unwrap()).await.unwrap();
    let machine = server.start_machine(None, "gpu1", &server.new_command(Some("gpu1")).await);
    server.wait_until_alive(2).await;
    assert_ne!(server.machine("gpu1").await.unwrap().nats_key, key, "a revoked key is not used again");
    assert_eq!(server.client.machines().await.unwrap().len(), 1);
    assert!(machine.stop().await.success());
    assert!(server.up.stop().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_join_reports_its_cause() {
    let server = Server::on_loopback().await;
    let command = server.new_command(Some("gpu1")).await;
    let (url, token) = (&command[1], &command[2]);
    let other_authority = {
        let token: cfq_proto::join_token::JoinToken = token.parse().unwrap();
        cfq_proto::join_token::JoinToken::new(token.id, [1; 32], [2; 32]).to_string()
    };
    let plain = url.replacen("https", "http", 1);
    let nats = format!("https://127.0.0.1:{}", server.nats_port());
    for (args, code, words) in [
        (vec![url.as_str(), &other_authority], 2, "it was not issued by the expected authority"),
        (vec![plain.as_str(), token], 2, "joining needs https://"),
        (vec![nats.as_str(), token], 2, "does not use TLS"),
        (vec!["https://127.0.0.1:1", token], 5, "check that `cfq up --lan` runs there"),
        (vec![url.as_str(), &token[..token.len() - 4]], 2, "incomplete or damaged"),
        (vec![url.as_str(), token, "--name", "gpu2"], 2, "is for a machine named gpu1"),
        (vec![url.as_str(), token, "--name", "GPU"], 2, "GPU"),
        (vec![], 2, "has joined no server yet"),
        (vec![url.as_str()], 2, "needs a join token"),
    ] {
        let args: Vec<String> = ["join"].iter().chain(&args).map(|arg| (*arg).to_owned()).collect();
        let output = server.run_machine(None, "gpu1", &args);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(code) && text.contains(words), "{args:?}: {:?} {text}", output.status);
    }
    assert_eq!(server.client.machines().await.unwrap(), []);
    let taken = server.run_server_command(&["token", "create", "--name", &server.own_name().await]);
    assert!(String::from_utf8_lossy(&taken.stderr).contains("is the name of a machine or of the server"), "{taken:?}");
    // The token is still unused.
    let machine = server.start_machine(None, "gpu1", &command);
    server.wait_until_alive(2).await;
    assert!(machine.stop().await.success());
    assert!(server.up.stop().await.success());
}

/// What runs on a cordoned machine ends there, and nothing else starts there. If all machines are cordoned, a task waits
/// with this reason.
#[tokio::test(flavor = "multi_thread")]
async fn cordoned_machine_gets_no_work_until_the_cordon_ends() {
    let server = Server::on_loopback().await;
    let machine = server.start_machine(None, "gpu1", &server.new_command(Some("gpu1")).await);
    server.wait_until_alive(2).await;
    let nodes = server.client.nodes().await.unwrap();
    let own = nodes.iter().find(|node| node.id.as_str() != "gpu1").unwrap().id.clone();
    let gpu1 = "gpu1".parse().unwrap();
    let gate = Gate::closed();
    script(&server, &gate);
    let repos: Vec<UserRepo> = (0..3).map(|_| UserRepo::with_uncommitted_changes()).collect();
    assert!(server.client.cordon_node(&own, true).await.unwrap().cordoned);
    let first = server.submit(&repos[0]).await;
    let running = server.wait_until_running(&[first]).await;
    assert_eq!(on_node(&running, "gpu1").len(), 1, "{running:?}");
    server.client.cordon_node(&gpu1, true).await.unwrap();
    let second = server.submit(&repos[1]).await;
    wait::until("the reason of the waiting call", WAIT_LIMIT, || async {
        let jobs = server.client.jobs(&JobFilter::default()).await.map_err(|e| e.to_string())?;
        let reasons: Vec<String> = jobs.jobs.into_iter().map(|job| job.reason).collect();
        let waits = |reason: &String| reason.contains("gpu1 is cordoned") && reason.contains("machines uncordon");
        if reasons.iter().any(waits) { Ok(()) } else { Err(format!("{reasons:?}")) }
    })
    .await;
    server.client.cordon_node(&own, false).await.unwrap();
    let running = server.wait_until_running(&[first, second]).await;
    assert_eq!((on_node(&running, "gpu1").len(), on_node(&running, own.as_str()).len()), (1, 1), "{running:?}");
    let mut drain = server.home.cfq(None, &server.home.path("data"), &["machines", "drain", "gpu1"]);
    let drain = tokio::task::spawn_blocking(move || drain.output().unwrap());
    gate.open();
    server.wait_until_merged(&[first, second]).await;
    let drained = drain.await.unwrap();
    assert!(drained.status.success(), "{drained:?}");
    let jobs = server.creator_jobs(&[first, second]).await;
    assert!(jobs.iter().all(|job| (job.attempt, job.losses) == (1, 0)), "the running call ended there: {jobs:?}");
    assert!(machine.stop().await.success());
    assert!(server.up.stop().await.success());
}

/// The ways to lose a machine in the middle of a call.
#[derive(Debug, Clone, Copy)]
enum Fault {
    Killed,
    Frozen,
    Cut,
    /// The machine still receives, but nothing that it sends arrives.
    Mute,
}

#[tokio::test(flavor = "multi_thread")]
async fn each_joined_machine_can_be_lost() {
    const TEST: &str = "each_joined_machine_can_be_lost";
    let Some(network) = Network::new(TEST, &["srv", "gpu1", "gpu2"]) else { return };
    let server = Server::on_machine(&network, "srv").await;
    let first = server.start_machine(Some(&network), "gpu1", &server.new_command(None).await);
    let second = server.start_machine(Some(&network), "gpu2", &server.new_command(Some("gpu2")).await);
    let mut machines = BTreeMap::from([("gpu1", first), ("gpu2", second)]);
    server.wait_until_alive(3).await;
    // Another machine gets nothing without TLS.
    let mut plain = server.home.cfq(Some(network.cfq("gpu2")), &server.machine_data("gpu2"), &["ls"]);
    plain.env("CFQ_URL", format!("http://{}:7710", network.address("srv"))).env("CFQ_TOKEN", "of nobody");
    let plain = tokio::task::block_in_place(|| plain.output().unwrap());
    assert!(String::from_utf8_lossy(&plain.stderr).contains("use https://"), "{plain:?}");

    for (fault, lost) in [(Fault::Cut, "gpu1"), (Fault::Mute, "gpu2"), (Fault::Frozen, "gpu1"), (Fault::Killed, "gpu2")]
    {
        let gate = Gate::closed();
        script(&server, &gate);
        let repos: Vec<UserRepo> = (0..4).map(|_| UserRepo::with_uncommitted_changes()).collect();
        let mut tasks = Vec::new();
        // The first call runs on the machine that is lost, and the others anywhere.
        server.cordon_others(lost, true).await;
        for (index, repo) in repos.iter().enumerate() {
            tasks.push(server.submit(repo).await);
            if index == 0 {
                server.wait_until_running(&tasks).await;
                server.cordon_others(lost, false).await;
            }
        }
        let before = server.wait_until_running(&tasks).await;
        let affected: Vec<_> = on_node(&before, lost).iter().map(|job| job.id).collect();
        assert!(!affected.is_empty(), "{fault:?}: no call on {lost}: {before:?}");
        let children = children(machines[lost].pid());
        match fault {
            Fault::Killed => kill(&machines[lost]),
            Fault::Frozen => children.iter().for_each(|pid| signal::send(*pid, libc::SIGSTOP)),
            Fault::Cut => network.cut(lost),
            Fault::Mute => network.cut_one_way(lost, "srv"),
        }
        let clock = std::time::Instant::now();
        wait::until("the calls of the lost machine to run elsewhere", WAIT_LIMIT, || async {
            let jobs = server.creator_jobs(&tasks).await;
            let moved = jobs.iter().filter(|job| affected.contains(&job.id)).all(|job| {
                job.state == JobState::Running && job.attempt > 1 && job.node.as_ref().unwrap().as_str() != lost
            });
            if moved { Ok(()) } else { Err(format!("{fault:?} {jobs:?}")) }
        })
        .await;
        eprintln!("{fault:?}: {} calls ran elsewhere after {:?}", affected.len(), clock.elapsed());
        gate.open();
        server.wait_until_merged(&tasks).await;
        let merged = server.creator_jobs(&tasks).await;
        match fault {
            Fault::Killed => {
                machines.remove(lost);
                machines.insert(lost, server.start_machine(Some(&network), lost, &["join".to_owned()]));
            }
            Fault::Frozen => children.iter().for_each(|pid| signal::send(*pid, libc::SIGCONT)),
            Fault::Cut => network.connect(lost),
            Fault::Mute => network.connect_one_way(lost, "srv"),
        }
        // The machine comes back, and whatever it still sends arrives before the result of its next call.
        server.wait_until_alive(3).await;
        server.run_one_task_on(lost).await;
        let after = server.creator_jobs(&tasks).await;
        assert_eq!(after, merged, "{fault:?}: a late result changed something");
        for job in &after {
            let losses = i32::from(affected.contains(&job.id));
            assert_eq!((job.losses, job.failures, job.state), (losses, 0, JobState::Done), "{fault:?} {job:?}");
        }
        for repo in &repos {
            let delivered = repo.branches().iter().filter(|branch| branch.starts_with("cfq/")).count();
            assert_eq!(delivered, 1, "{fault:?}");
        }
    }
    for machine in machines.into_values() {
        assert!(machine.stop().await.success());
    }
    assert!(server.up.stop().await.success());
}

/// As after a new lease of DHCP, without a restart of the server: its certificate was issued for the address before.
#[tokio::test(flavor = "multi_thread")]
async fn server_is_found_again_at_another_address() {
    const TEST: &str = "server_is_found_again_at_another_address";
    let Some(network) = Network::new(TEST, &["srv", "gpu1"]) else { return };
    let server = Server::on_machine(&network, "srv").await;
    let machine = server.start_machine(Some(&network), "gpu1", &server.new_command(None).await);
    server.wait_until_alive(2).await;
    let address = network.move_to_another_address("srv");
    server.wait_until_alive(1).await;
    assert!(machine.stop().await.success());
    let command = ["join".to_owned(), address.to_string()];
    let machine = server.start_machine(Some(&network), "gpu1", &command);
    server.wait_until_alive(2).await;
    assert!(machine.output().contains("is at https://10.77.0.101:7710 now"), "{}", machine.output());
    assert!(machine.stop().await.success());
    server.wait_until_alive(1).await;
    let machine = server.start_machine(Some(&network), "gpu1", &["join".to_owned()]);
    server.wait_until_alive(2).await;
    assert!(machine.stop().await.success());
    assert!(server.up.stop().await.success());
}

/// Kills a machine's processes at once. The supervisor is stopped first, because it would start the others again, and they
/// would stop in order after its end.
fn kill(machine: &Up) {
    signal::send(machine.pid(), libc::SIGSTOP);
    children(machine.pid()).into_iter().for_each(|pid| signal::send(pid, libc::SIGKILL));
    signal::send(machine.pid(), libc::SIGKILL);
}

/// Ids of the processes that a process has started.
fn children(pid: u32) -> Vec<u32> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let of_thread = |thread: std::fs::DirEntry| std::fs::read_to_string(thread.path().join("children")).unwrap();
    threads
        .map(of_thread)
        .flat_map(|ids| ids.split_whitespace().map(|id| id.parse().unwrap()).collect::<Vec<_>>())
        .collect()
}
