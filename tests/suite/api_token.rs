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

/// Tokens of clients, created and used as their users do: with the commands, and over MCP.
#[tokio::test(flavor = "multi_thread")]
async fn tokens_of_clients_allow_what_their_roles_allow() {
    let home = Home::new().await;
    let gate = Gate::closed();
    let held = |gate: &Gate| Reply::Gated("```".into(), "".into(), gate.clone());
    home.models.script("alpha", vec![held(&gate), held(&gate), held(&gate)]);
    let data = home.path("data");
    copy_seed(&data).await;
    let up = Up::start(&home, None, &data, data.clone());
    let url = up.client().await.url().to_owned();
    let run = |token: Option<&str>, args: &[&str]| {
        let mut command = home.cfq(None, &data, args);
        command.envs(token.map(|_| ("CFQ_URL", &url))).envs(token.map(|token| ("CFQ_TOKEN", token)));
        let output = tokio::task::block_in_place(|| command.output().unwrap());
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let create = |args: &[&str]| {
        let (code, token, note) = run(None, &[&["token", "create"], args].concat());
        assert!(code == Some(0) && token.starts_with("cfqa_") && note.contains("only now"), "{code:?} {note}");
        token
    };
    let repo = UserRepo::with_uncommitted_changes();
    let path = repo.path();
    let path = path.to_str().unwrap();
    let editor = create(&["--role", "submit", "--name", "editor", "--running-tasks", "1", "--repo", path]);
    let (metrics, reader) = (
        create(&["--role", "metrics", "--name", "prometheus"]),
        create(&["--role", "read", "--name", "reader", "--ttl", "30d"]),
    );

    let submit = ["submit", "Write add(a, b) in add.py", "--language", "python", "--repo", path];
    for (task, token) in [("t1", Some(&editor)), ("t2", Some(&editor)), ("t3", None)] {
        let (code, printed, note) = run(token.map(String::as_str), &submit);
        assert!(code == Some(0) && printed.contains(task), "{printed} {note}");
    }
    let (code, _, note) = run(Some(&reader), &submit);
    assert!(code == Some(2) && note.contains("has the role read") && note.contains("role submit"), "{note}");
    wait::until("the third task to run, and the second to wait for the limit of its token", WAIT_LIMIT, || async {
        let (_, list, _) = run(Some(&reader), &["ls"]);
        let (_, why, _) = run(Some(&reader), &["explain", "t2"]);
        let runs = |task: &str| list.lines().any(|line| line.contains(task) && line.contains("running"));
        let is_limited = why.contains("1 task runs, which is the token's limit");
        if runs("t1") && runs("t3") && !runs("t2") && is_limited { Ok(()) } else { Err(format!("{list}\n{why}")) }
    })
    .await;

    let (code, _, note) = run(Some(&editor), &["cancel", "t3"]);
    assert!(
        code != Some(0) && note.contains("t3 was submitted with another token than that of the client editor"),
        "{code:?} {note}"
    );
    let (code, printed, note) = run(Some(&editor), &["cancel", "t2"]);
    assert!(code == Some(0), "{printed} {note}");
    let (_, shown, _) = run(None, &["show", "t2"]);
    assert!(shown.contains("the client editor"), "{shown}");
    for args in [&["ls"][..], &["nodes"], &["token", "ls"]] {
        let (code, _, note) = run(Some(&metrics), args);
        assert!(code == Some(2) && note.contains("has the role metrics"), "{args:?}: {code:?} {note}");
    }

    let http = cfq_link::outbound::api_client().unwrap();
    let get = async |token: &str, path: &str| {
        http.get(format!("{url}{path}")).bearer_auth(token).send().await.unwrap().status().as_u16()
    };
    assert_eq!((get(&metrics, "/metrics").await, get(&metrics, "/api/v1/tasks").await), (200, 403));
    let call = async |token: &str, tool: &str, arguments: serde_json::Value| {
        let body = serde_json::json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call",
                                      "params": {"name": tool, "arguments": arguments}});
        let request = http.post(format!("{url}/mcp")).bearer_auth(token).json(&body);
        let request = request.header("accept", "application/json, text/event-stream");
        let reply = request.header("mcp-protocol-version", "2025-11-25").send().await.unwrap();
        (reply.status().as_u16(), reply.text().await.unwrap())
    };
    assert_eq!(call(&metrics, "list_tasks", serde_json::json!({})).await.0, 403, "MCP needs the role read");
    let session = serde_json::json!({"session_id": "t3"});
    let (status, reply) = call(&editor, "cancel_task", session).await;
    assert!(status == 200 && !reply.contains("\"cancelled\""), "{reply}");

    let (_, tokens, _) = run(None, &["token", "ls"]);
    assert!(tokens.contains("editor") && tokens.contains("1 running task") && !tokens.contains(&editor), "{tokens}");
    assert_eq!(run(None, &["token", "rm", "editor", "nobody"]).0, Some(4));
    let (code, _, note) = run(Some(&editor), &["ls"]);
    assert!(code == Some(2) && note.contains("token"), "{code:?} {note}");
    let logs: String = std::fs::read_dir(data.join("log"))
        .unwrap()
        .map(|file| String::from_utf8_lossy(&std::fs::read(file.unwrap().path()).unwrap()).into_owned())
        .collect();
    assert!(logs.contains("created an API token") && !logs.contains("cfqa_"), "no token is logged");
    gate.open();
    assert!(up.stop().await.success());
}
