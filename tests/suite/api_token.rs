//! Tests of the API token on one machine: the commands send it only to the server of their data folder, and it can be
//! rotated while everything runs.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cfq_proto::client::{Client, ClientError};
use cfq_proto::ids::TaskKey;
use cfq_proto::task::TaskState;
use cfq_tests::cfq_up::{Home, Up};
use cfq_tests::cluster::{WAIT_LIMIT, kill_with_parent};
use cfq_tests::postgres::copy_seed;
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Gate, Reply, file, review};
use cfq_tests::wait;

/// A program of another user that listens on the server's port: it answers like the server, and records what it
/// receives.
struct Impostor(Arc<Mutex<String>>);

impl Impostor {
    async fn start(address: &str) -> Self {
        let listener = wait::until("the port to be free", WAIT_LIMIT, || async {
            TcpListener::bind(address).map_err(|error| error.to_string())
        })
        .await;
        let received = Arc::new(Mutex::new(String::new()));
        let record = received.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                stream.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
                let mut bytes = [0; 4096];
                let read = stream.read(&mut bytes).unwrap_or(0);
                record.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..read]));
                let reply = "HTTP/1.1 200 OK\r\ncontent-length: 12\r\nconnection: close\r\n\r\n{\"tasks\":[]}";
                drop(stream.write_all(reply.as_bytes()));
            }
        });
        Self(received)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn token_is_not_sent_to_another_program_on_the_port_of_a_killed_server() {
    let home = Home::new().await;
    let data = home.path("data");
    copy_seed(&data).await;
    let up = Up::start(&home, None, &data, data.clone());
    let url = up.client().await.url().to_owned();
    let token = std::fs::read_to_string(data.join("keys/api.token")).unwrap();
    let ls = tokio::task::block_in_place(|| home.cfq(None, &data, &["ls"]).output().unwrap());
    assert!(ls.status.success(), "{ls:?}");

    // SIGKILL of `cfq up`; the kernel then kills its children, and all files of the server stay.
    drop(up);
    let impostor = Impostor::start(url.trim_start_matches("http://")).await;
    for args in [&["ls"][..], &["show", "t1"], &["logs", "t1"], &["nodes"]] {
        for own_url in [None, Some(&url)] {
            let mut command = home.cfq(None, &data, args);
            command.envs(own_url.map(|url| ("CFQ_URL", url)));
            let output = tokio::task::block_in_place(|| command.output().unwrap());
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert!(!impostor.0.lock().unwrap().contains(token.trim()), "{args:?} sent the token");
            assert_eq!(output.status.code(), Some(5), "{args:?}: {stderr}");
            assert!(stderr.contains("cfq up -d"), "{stderr}");
        }
    }
    assert_eq!(*impostor.0.lock().unwrap(), "", "nothing was sent to the other program");
}

#[tokio::test(flavor = "multi_thread")]
async fn rotated_token_replaces_the_old_one_while_everything_continues() {
    let home = Home::new().await;
    let gate = Gate::closed();
    let reply = file("add.py", "# early words\ndef add(a, b):\n    return a + b");
    let (first, rest) = reply.split_at(reply.find("early words").unwrap() + "early words\n".len());
    home.models.script("alpha", vec![Reply::Gated(first.into(), rest.into(), gate.clone())]);
    home.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let data = home.path("data");
    copy_seed(&data).await;
    let run = |args: &[&str]| tokio::task::block_in_place(|| home.cfq(None, &data, args).output().unwrap());
    let none = run(&["token", "rotate"]);
    assert!(none.status.code() == Some(2) && String::from_utf8_lossy(&none.stderr).contains("cfq up"), "{none:?}");

    let up = Up::start(&home, None, &data, data.clone());
    let old: Client = up.client().await;
    let repo = UserRepo::with_uncommitted_changes();
    let submit = ["submit", "Write add(a, b) in add.py", "--language", "python", "--repo"];
    let submitted = run(&[&submit[..], &[repo.path().to_str().unwrap()]].concat());
    assert!(submitted.status.success(), "{submitted:?}; {}", up.diagnostics());
    let log = home.path("watch.log");
    let mut watch = home.cfq(None, &data, &["watch", "t1"]);
    watch
        .stdout(std::fs::File::create(&log).unwrap())
        .stderr(std::fs::File::options().append(true).open(&log).unwrap());
    kill_with_parent(&mut watch);
    let mut watch = watch.spawn().unwrap();
    wait::until("the watch to print generated text", WAIT_LIMIT, || async {
        let text = std::fs::read_to_string(&log).unwrap();
        if text.contains("early words") { Ok(()) } else { Err(text) }
    })
    .await;

    let before = std::fs::read_to_string(data.join("keys/api.token")).unwrap();
    let rotated = run(&["token", "rotate"]);
    assert!(rotated.status.success(), "{rotated:?}");
    let after = std::fs::read_to_string(data.join("keys/api.token")).unwrap();
    assert_ne!(before, after);
    let printed = String::from_utf8_lossy(&rotated.stdout).into_owned();
    assert!(!printed.contains(&after), "the token is not printed: {printed}");

    let refused = old.tasks(None, 1).await.unwrap_err();
    assert!(matches!(refused, ClientError::Refused { status: 401, .. }), "{refused:?}");
    let ls = run(&["ls"]);
    assert!(ls.status.success() && String::from_utf8_lossy(&ls.stdout).contains("t1"), "{ls:?}");
    let new = up.client().await;
    gate.open();
    let status = wait::until("the watch to end", WAIT_LIMIT, || {
        let done = watch.try_wait().unwrap();
        let text = std::fs::read_to_string(&log).unwrap();
        async move { done.ok_or(text) }
    })
    .await;
    assert!(status.success(), "{}", std::fs::read_to_string(&log).unwrap());
    let detail = new.task(TaskKey::Number(cfq_proto::ids::TaskNumber(1))).await.unwrap();
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    assert!(detail.jobs.iter().all(|job| job.failures == 0 && job.losses == 0), "{:?}", detail.jobs);
    assert!(up.stop().await.success());
}
