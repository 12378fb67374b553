//! A proxy between one service and NATS that loses one message: a request of the service, or the reply to one. It parses
//! NATS's protocol only as far as needed to find the messages.

use std::sync::{Arc, Mutex};

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};

/// Which message is lost: the first one that matches.
#[derive(Debug, Clone)]
pub enum Lost {
    /// A request on this subject whose body contains the text.
    Request { subject: String, text: &'static str },
    /// A reply to a request on this subject, if the reply's body contains the text.
    Reply { subject: String, text: &'static str },
}

/// A running proxy. Its connections end with the test's runtime.
pub struct NatsProxy {
    /// URL that the service connects to.
    pub url: String,
    state: Arc<Mutex<State>>,
}

struct State {
    lost: Lost,
    is_lost: bool,
    /// Subjects on which the replies to the matching requests arrive.
    inboxes: Vec<String>,
}

/// One message or command of NATS's protocol, as it was received.
struct Frame {
    bytes: Vec<u8>,
    verb: String,
    /// Arguments of the command, for example its subject.
    arguments: Vec<String>,
}

impl NatsProxy {
    pub async fn start(server: &str, lost: Lost) -> Self {
        let server = server.trim_start_matches("nats://").to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("nats://{}", listener.local_addr().unwrap());
        let state = Arc::new(Mutex::new(State { lost, is_lost: false, inboxes: Vec::new() }));
        let shared = state.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (server, state) = (server.clone(), shared.clone());
                tokio::spawn(async move {
                    let Ok(server) = TcpStream::connect(server).await else { return };
                    let (from_client, to_client) = client.into_split();
                    let (from_server, to_server) = server.into_split();
                    tokio::select! {
                        () = forward(from_client, to_server, &state) => {}
                        () = forward(from_server, to_client, &state) => {}
                    }
                });
            }
        });
        Self { url, state }
    }

    /// Whether the message was lost.
    pub fn is_lost(&self) -> bool {
        self.state.lock().unwrap().is_lost
    }
}

async fn forward(from: OwnedReadHalf, mut to: OwnedWriteHalf, state: &Mutex<State>) {
    let mut from = BufReader::new(from);
    while let Some(frame) = read_frame(&mut from).await {
        let is_lost = state.lock().unwrap().on_frame(&frame);
        if !is_lost && to.write_all(&frame.bytes).await.is_err() {
            return;
        }
    }
}

async fn read_frame(from: &mut BufReader<OwnedReadHalf>) -> Option<Frame> {
    let mut bytes = Vec::new();
    from.read_until(b'\n', &mut bytes).await.ok().filter(|read| *read > 0)?;
    let line = String::from_utf8_lossy(&bytes).into_owned();
    let mut words = line.split_ascii_whitespace().map(str::to_owned);
    let verb = words.next().unwrap_or_default().to_ascii_uppercase();
    let arguments: Vec<String> = words.collect();
    if matches!(verb.as_str(), "PUB" | "HPUB" | "MSG" | "HMSG") {
        let length: usize = arguments.last()?.parse().ok()?;
        let start = bytes.len();
        bytes.resize(start + length + b"\r\n".len(), 0);
        from.read_exact(&mut bytes[start..]).await.ok()?;
    }
    Some(Frame { bytes, verb, arguments })
}

impl State {
    /// Whether this frame is the message to lose.
    fn on_frame(&mut self, frame: &Frame) -> bool {
        let Some(first) = frame.arguments.first() else { return false };
        if self.is_lost {
            return false;
        }
        let contains = |text: &str| String::from_utf8_lossy(&frame.bytes).contains(text);
        let is_request = matches!(frame.verb.as_str(), "PUB" | "HPUB");
        let is_delivery = matches!(frame.verb.as_str(), "MSG" | "HMSG");
        self.is_lost = match &self.lost {
            Lost::Request { subject, text } => is_request && first == subject && contains(text),
            Lost::Reply { subject, .. } if is_request && first == subject => {
                self.inboxes.extend(frame.arguments.get(1).cloned());
                false
            }
            Lost::Reply { text, .. } => is_delivery && self.inboxes.contains(first) && contains(text),
        };
        self.is_lost
    }
}
