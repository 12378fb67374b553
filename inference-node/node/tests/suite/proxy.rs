//! The proxy engine against a scripted server, and servers that are down, hang, lie or never end.

use std::sync::Arc;
use std::time::Duration;

use cfq_inference_node::Endpoint;
use cfq_inference_node::engine::proxy::{ProxyEngine, Server};
use cfq_inference_node::engine::{Ended, Engine, Event, Refused};
use cfq_proto::job::{Completion, FinishReason, JobFailure, OutputFormat};
use cfq_proto::node::Residency;
use cfq_proto::timing::Timing;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use crate::smollm::{ask, finish};

/// What the server does with one connection, after the request was read.
type Script = fn(TcpStream) -> futures::future::BoxFuture<'static, ()>;

/// A server that answers every connection by `script`; requests (headers and body) are reported.
async fn serve(script: Script) -> (String, mpsc::Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    let (seen, requests) = mpsc::channel(16);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let seen = seen.clone();
            tokio::spawn(async move {
                let mut request = Vec::new();
                let mut chunk = [0; 4096];
                loop {
                    let n = stream.read(&mut chunk).await.unwrap_or(0);
                    request.extend_from_slice(&chunk[..n]);
                    let text = String::from_utf8_lossy(&request).into_owned();
                    let Some((head, body)) = text.split_once("\r\n\r\n") else {
                        if n == 0 {
                            return;
                        }
                        continue;
                    };
                    let length = head
                        .to_lowercase()
                        .lines()
                        .find_map(|l| l.strip_prefix("content-length: ")?.parse::<usize>().ok());
                    if n == 0 || body.len() >= length.unwrap_or(0) {
                        break;
                    }
                }
                let _ = seen.send(String::from_utf8_lossy(&request).into_owned()).await;
                script(stream).await;
            });
        }
    });
    (url, requests)
}

fn engine_with(url: &str, timing: &Timing, key: Option<String>) -> (ProxyEngine, Arc<Server>) {
    let endpoint = Endpoint { url: url.to_owned(), key, max_sequences: 1 };
    let server = Server::new("box", &endpoint, timing, Arc::default()).unwrap();
    (ProxyEngine::new("openai:box/small".parse().unwrap(), server.clone()).unwrap(), server)
}

fn engine(url: &str) -> ProxyEngine {
    engine_with(url, &Timing::default(), None).0
}

async fn run(engine: &ProxyEngine) -> Result<Completion, Ended> {
    finish(engine.admit(ask("hi")).await.unwrap().start()).await.0
}

fn failure(how: Result<Completion, Ended>) -> JobFailure {
    match how {
        Err(Ended::Failed(failure)) => failure,
        other => panic!("{other:?}"),
    }
}

async fn say(stream: &mut TcpStream, text: &str) {
    // The other side may have had enough.
    let _ = stream.write_all(text.as_bytes()).await;
}

const STREAM: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";

#[tokio::test]
async fn a_stream_becomes_text_with_its_usage() {
    let (url, mut requests) = serve(|mut stream| {
        Box::pin(async move {
            say(&mut stream, STREAM).await;
            for text in ["Hel", "lo", " wor", "ld"] {
                say(&mut stream, &format!("data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}}}}]}}\n\n")).await;
            }
            say(&mut stream, "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"length\"}]}\n\n").await;
            say(&mut stream, "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":4,\"prompt_tokens_details\":{\"cached_tokens\":3}}}\n\ndata: [DONE]\n\n").await;
        })
    })
    .await;
    let folder = tempfile::tempdir().unwrap();
    let key = folder.path().join("key");
    std::fs::write(&key, "sk-test\n").unwrap();
    let (engine, _) = engine_with(&url, &Timing::default(), Some(format!("file:{}", key.display())));
    let mut prompt = ask("hi");
    prompt.sampling.seed = 77;
    prompt.format = OutputFormat::JsonSchema { schema: serde_json::json!({ "type": "object" }) };
    let (how, streamed) = finish(engine.admit(prompt).await.unwrap().start()).await;
    let done = how.unwrap();
    assert_eq!(
        (done.text.as_str(), streamed.as_str(), done.finish),
        ("Hello world", "Hello world", FinishReason::Length)
    );
    assert_eq!((done.usage.prompt_tokens, done.usage.output_tokens, done.usage.cached_tokens), (9, 4, 3));
    let request = requests.recv().await.unwrap();
    assert!(request.starts_with("POST /v1/chat/completions "), "{request}");
    assert!(request.contains("authorization: Bearer sk-test"), "{request}");
    let body: serde_json::Value = serde_json::from_str(request.split_once("\r\n\r\n").unwrap().1).unwrap();
    assert_eq!((&body["model"], &body["seed"], &body["stream"]), (&"small".into(), &77.into(), &true.into()));
    assert_eq!(body["response_format"]["type"], "json_schema");
}

#[tokio::test]
async fn a_server_that_does_not_stream_is_read_too() {
    let (url, _requests) = serve(|mut stream| {
        Box::pin(async move {
            let body = r#"{"choices":[{"index":0,"message":{"content":"whole"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}"#;
            say(&mut stream, &format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len())).await;
        })
    })
    .await;
    assert_eq!(run(&engine(&url)).await.unwrap().text, "whole");
}

#[tokio::test]
async fn our_own_stop_strings_cut_and_end_the_reading() {
    let (url, _requests) = serve(|mut stream| {
        Box::pin(async move {
            say(&mut stream, STREAM).await;
            say(&mut stream, "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"one ST\"}}]}\n\n").await;
            say(&mut stream, "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"OP two\"}}]}\n\n").await;
            // Never ends by itself.
            let mut rest = [0; 1];
            let _ = stream.read(&mut rest).await;
        })
    })
    .await;
    let mut prompt = ask("hi");
    prompt.sampling.stop = vec!["STOP".to_owned()];
    let (how, streamed) = finish(engine(&url).admit(prompt).await.unwrap().start()).await;
    assert_eq!((how.unwrap().finish, streamed.as_str()), (FinishReason::Stop, "one "));
}

#[tokio::test]
async fn a_server_that_is_down_or_overloaded_is_worth_a_retry() {
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1", closed.local_addr().unwrap());
    drop(closed);
    let refused = engine(&url);
    assert!(matches!(failure(run(&refused).await), JobFailure::Unavailable { reason } if reason.contains("refused")));
    assert!(matches!(refused.state().residency, Residency::Unusable { .. }));
    let (url, _requests) = serve(|mut stream| {
        Box::pin(async move { say(&mut stream, "HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy").await })
    })
    .await;
    assert!(matches!(failure(run(&engine(&url)).await), JobFailure::Unavailable { reason } if reason.contains("busy")));
    let (url, _requests) = serve(|mut stream| {
        Box::pin(async move {
            say(&mut stream, STREAM).await;
            say(&mut stream, "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"half\"}}]}\n\n").await;
        })
    })
    .await;
    assert!(
        matches!(failure(run(&engine(&url)).await), JobFailure::Unavailable { reason } if reason.contains("broke off"))
    );
}

#[tokio::test]
async fn what_a_retry_cannot_mend_carries_the_servers_words() {
    let (url, _requests) = serve(|mut stream| {
        Box::pin(async move {
            let body = r#"{"error":{"message":"model small does not exist"}}"#;
            say(&mut stream, &format!("HTTP/1.1 404 Not Found\r\ncontent-length: {}\r\n\r\n{body}", body.len())).await;
        })
    })
    .await;
    let failure = failure(run(&engine(&url)).await);
    assert!(
        matches!(&failure, JobFailure::Rejected { reason } if reason.contains("model small does not exist")),
        "{failure}"
    );
}

#[tokio::test]
async fn a_key_that_the_server_echoes_is_not_passed_on() {
    let folder = tempfile::tempdir().unwrap();
    let key = folder.path().join("key");
    std::fs::write(&key, "sk-echoed").unwrap();
    for script in [
        (|mut stream| {
            Box::pin(async move {
                let body = r#"{"error":{"message":"wrong key sk-echoed"}}"#;
                let head = format!("HTTP/1.1 401 Unauthorized\r\ncontent-length: {}\r\n\r\n", body.len());
                say(&mut stream, &format!("{head}{body}")).await;
            })
        }) as Script,
        |mut stream| {
            Box::pin(async move {
                say(&mut stream, STREAM).await;
                say(&mut stream, "data: {\"error\":{\"message\":\"quota of sk-echoed\"}}\n\n").await;
            })
        },
        |mut stream| {
            Box::pin(async move {
                say(&mut stream, STREAM).await;
                say(&mut stream, "data: {\"choices\":\"sk-echoed\"}\n\n").await;
            })
        },
    ] {
        let (url, _requests) = serve(script).await;
        let (engine, _) = engine_with(&url, &Timing::default(), Some(format!("file:{}", key.display())));
        let told = failure(run(&engine).await).to_string();
        assert!(told.contains("***") && !told.contains("sk-echoed"), "{told}");
    }
}

#[test]
fn an_address_with_a_password_is_refused_and_not_shown() {
    for url in ["http://user:hunter2@box/v1", "http://hunter2@box/v1", "ftp://u:hunter2@box", "http:/u:hunter2@box"] {
        let endpoint = Endpoint { url: url.to_owned(), key: None, max_sequences: 1 };
        let Err(error) = Server::new("box", &endpoint, &Timing::default(), Arc::default()) else {
            panic!("{url} was taken")
        };
        let told = error.to_string();
        assert!(told.contains("user name or password") && !told.contains("hunter2"), "{told}");
    }
}

#[tokio::test]
async fn comments_keep_a_connection_alive_and_not_a_job() {
    let (url, _requests) = serve(|mut stream| {
        Box::pin(async move {
            say(&mut stream, STREAM).await;
            while stream.write_all(b": still here\n\n").await.is_ok() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
    })
    .await;
    let timing = Timing { job_step_ms: 300, ..Timing::default() };
    let (engine, _) = engine_with(&url, &timing, None);
    let mut generation = engine.admit(ask("hi")).await.unwrap().start();
    let event = tokio::time::timeout(Duration::from_secs(30), generation.next()).await.unwrap();
    let Event::Done(how) = event else { panic!("a step: {event:?}") };
    assert!(matches!(failure(how), JobFailure::Unavailable { reason } if reason.contains("waiting")));
}

#[tokio::test]
async fn garbage_without_end_is_bounded() {
    for script in [
        // One event that never ends.
        (|mut stream| {
            Box::pin(async move {
                say(&mut stream, STREAM).await;
                let garbage = "x".repeat(1 << 20);
                while stream.write_all(garbage.as_bytes()).await.is_ok() {}
            })
        }) as Script,
        // Tokens that never end.
        |mut stream| {
            Box::pin(async move {
                say(&mut stream, STREAM).await;
                let text = "y".repeat(4096);
                let event = format!("data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}}}}]}}\n\n");
                while stream.write_all(event.as_bytes()).await.is_ok() {}
            })
        },
        // Events that are no chunks.
        |mut stream| {
            Box::pin(async move {
                say(&mut stream, STREAM).await;
                say(&mut stream, "data: <html>\n\n").await;
            })
        },
    ] {
        let (url, _requests) = serve(script).await;
        let how = tokio::time::timeout(Duration::from_secs(30), run(&engine(&url))).await.unwrap();
        assert!(matches!(failure(how), JobFailure::Engine { .. }));
    }
}

#[tokio::test]
async fn silence_ends_and_a_cancel_ends_sooner() {
    let hang: Script = |mut stream| {
        Box::pin(async move {
            say(&mut stream, STREAM).await;
            let mut rest = [0; 1];
            let _ = stream.read(&mut rest).await;
        })
    };
    let (url, _requests) = serve(hang).await;
    let timing = Timing { job_step_ms: 300, ..Timing::default() };
    let (engine, _) = engine_with(&url, &timing, None);
    assert!(matches!(failure(run(&engine).await), JobFailure::Unavailable { .. }));
    let (patient, _) = engine_with(&url, &Timing::default(), None);
    let mut generation = patient.admit(ask("hi")).await.unwrap().start();
    assert!(matches!(patient.admit(ask("hi")).await, Err(Refused::NotNow { have: 0, .. })), "one at a time");
    generation.cancel();
    loop {
        match generation.next().await {
            Event::Step { .. } => {}
            Event::Done(how) => break assert_eq!(how, Err(Ended::Cancelled)),
        }
    }
    assert_eq!(patient.state().running, 0);
}

#[tokio::test]
async fn a_check_sees_the_endpoint_come_up() {
    let (url, mut requests) = serve(|mut stream| {
        Box::pin(async move { say(&mut stream, "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await })
    })
    .await;
    let (engine, server) = engine_with(&url, &Timing::default(), None);
    assert_eq!(engine.state().residency, Residency::Loading);
    let watching = tokio::spawn(server.watch(Timing::default()));
    assert!(requests.recv().await.unwrap().starts_with("GET /v1/models "));
    while engine.state().residency != Residency::Resident {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    watching.abort();
}
