//! Tests of the commands with a server that accepts connections and then does not answer, answers slowly, answers
//! something else than HTTP, or fails. Each command ends by itself, with an error that says what happened and the next
//! step.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use cfq_tests::cfq_up::{Home, Up};
use cfq_tests::cluster::{WAIT_LIMIT, kill_with_parent};
use cfq_tests::{binary, signal, wait};

type Behaviour = fn(TcpStream);

/// Starts a server and returns its URL.
fn serve(behaviour: Behaviour) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            std::thread::spawn(move || behaviour(stream.unwrap()));
        }
    });
    url
}

/// Reads the request, then sends `bytes`. True if they were sent.
fn reply(stream: &mut TcpStream, bytes: &[u8]) -> bool {
    let mut request = [0; 4096];
    stream.read(&mut request).is_ok() && stream.write_all(bytes).is_ok()
}

fn silent(mut stream: TcpStream) {
    drop(stream.read_to_end(&mut Vec::new()));
}

/// Sends a byte of the body now and then, so that no single read takes long.
fn slow(mut stream: TcpStream) {
    let mut sent = reply(&mut stream, b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n");
    while sent {
        std::thread::sleep(Duration::from_millis(500));
        sent = stream.write_all(b" ").is_ok();
    }
}

fn endless(mut stream: TcpStream) {
    let mut sent = reply(&mut stream, b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n");
    while sent {
        sent = stream.write_all(&[b' '; 65536]).is_ok();
    }
}

fn garbage(mut stream: TcpStream) {
    reply(&mut stream, b"\x00\x01SSH-2.0-other\r\n\r\n");
}

fn hang_up(mut stream: TcpStream) {
    reply(&mut stream, b"");
}

fn fail(mut stream: TcpStream) {
    reply(&mut stream, b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
}

fn page(mut stream: TcpStream) {
    reply(&mut stream, b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\nconnection: close\r\n\r\n<html>");
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_reports_a_postgres_that_does_not_answer() {
    let home = Home::new().await;
    let data = home.path("data");
    let up = Up::start(&home, None, &data, data.clone());
    up.client().await;
    let pid_file = std::fs::read_to_string(data.join("postgres/postmaster.pid")).unwrap();
    let postmaster = pid_file.lines().next().unwrap().trim().parse().unwrap();
    signal::send(postmaster, libc::SIGSTOP);
    let mut doctor = home.cfq(None, &data, &["doctor"]);
    let log = home.path("doctor.log");
    doctor.stdout(std::fs::File::create(&log).unwrap());
    kill_with_parent(&mut doctor);
    let mut child = doctor.spawn().unwrap();
    let ended = wait::until("doctor to end", WAIT_LIMIT, || {
        let done = child.try_wait().unwrap();
        async move { done.ok_or_else(|| "still running".to_owned()) }
    });
    let status = ended.await;
    signal::send(postmaster, libc::SIGCONT);
    let text = std::fs::read_to_string(&log).unwrap();
    assert_eq!(status.code(), Some(4), "{text}");
    assert!(text.contains("FAIL  postgres") && text.contains("no answer within 5 s"), "{text}");
    assert!(up.stop().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_report_a_server_that_does_not_work() {
    let home = tempfile::tempdir().unwrap();
    let program = tokio::task::block_in_place(binary::cfq);
    let cases: [(&str, Behaviour, &[&str]); 7] = [
        ("silent", silent, &["did not answer in time", "cfq logs --process scheduler"]),
        ("slow", slow, &["did not answer in time", "cfq logs --process scheduler"]),
        ("endless", endless, &["unexpected response", "same version"]),
        ("garbage", garbage, &["the connection to http://127.0.0.1", "check that a cfq server listens there"]),
        ("hang_up", hang_up, &["the connection to http://127.0.0.1", "check that a cfq server listens there"]),
        ("fail", fail, &["500 Internal Server Error", "check that cfq listens at this address"]),
        ("page", page, &["unexpected response", "check that it is a cfq server"]),
    ];
    let mut running: Vec<(String, &[&str], std::path::PathBuf, Child)> = Vec::new();
    for (name, behaviour, words) in cases {
        for args in [&["ls"][..], &["show", "t1"], &["logs", "t1"]] {
            let log = home.path().join(format!("{name}-{}", args[0]));
            let mut command = Command::new(&program);
            command.args(args).env("CFQ_URL", serve(behaviour)).env("CFQ_TOKEN", "0123456789abcdef");
            command.env("CFQ_DATA", home.path().join("data")).stdin(Stdio::null()).stdout(Stdio::null());
            command.stderr(std::fs::File::create(&log).unwrap());
            kill_with_parent(&mut command);
            running.push((format!("{name} {args:?}"), words, log, command.spawn().unwrap()));
        }
    }
    for (name, words, log, mut child) in running {
        let status = wait::until(&format!("cfq to end, {name}"), WAIT_LIMIT, || {
            let done = child.try_wait().unwrap();
            async move { done.ok_or_else(|| "still running".to_owned()) }
        })
        .await;
        let text = std::fs::read_to_string(&log).unwrap();
        assert_eq!(status.code(), Some(5), "{name}: {text}");
        for word in words {
            assert!(text.contains(word), "{name}: {word:?} is not in {text:?}");
        }
    }
}
