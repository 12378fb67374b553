//! Tests of the proxy engine with scripted servers, some of which are down, hang, send invalid data or never end a
//! reply.

use std::sync::Arc;
use std::time::Duration;

use cfq_engine::{AdmitError, Engine, GenerationError, GenerationEvent};
use cfq_inference_node::Endpoint;
use cfq_inference_node::proxy::{EndpointClient, ProxyEngine, RemoteModel};
use cfq_proto::job::{Completion, FinishReason, JobFailure, OutputFormat};
use cfq_proto::node::Residency;
use cfq_proto::timing::Timing;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use crate::smollm::{finish, user_prompt};

/// Function that handles one connection after the server has read the request.
pub type Script = fn(TcpStream) -> futures::future::BoxFuture<'static, ()>;

/// Starts a server that answers every connection by `script`. Returns its URL and the requests it receives (headers and
/// body).
pub async fn serve(script: Script) -> (String, mpsc::Receiver<String>) {
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

fn model() -> RemoteModel {
    RemoteModel::of(&"openai:box/small".parse().unwrap()).unwrap()
}

pub fn engine_with(url: &str, timing: &Timing, key: Option<String>) -> (ProxyEngine, Arc<EndpointClient>) {
    let endpoint = Endpoint { url: url.to_owned(), key, max_sequences: Some(1), context_tokens: None };
    let server = EndpointClient::new("box", &endpoint, [model()], timing, Arc::default()).unwrap();
    (ProxyEngine::of_server("openai:box/small".parse().unwrap(), model(), server.clone()), server)
}

fn engine(url: &str) -> ProxyEngine {
    engine_with(url, &Timing::default(), None).0
}

pub async fn run(engine: &ProxyEngine) -> Result<Completion, GenerationError> {
    finish(engine.admit(user_prompt("hi")).await.unwrap().start()).await.0
}

pub fn failure(outcome: Result<Completion, GenerationError>) -> JobFailure {
    match outcome {
        Err(GenerationError::Failed(failure)) => failure,
        other => panic!("{other:?}"),
    }
}

pub async fn send(stream: &mut TcpStream, text: &str) {
    // The client may have closed the connection.
    let _ = stream.write_all(text.as_bytes()).await;
}

const STREAM: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";

#[tokio::test]
async fn stream_becomes_text_with_usage() {
    let (url, mut requests) = serve(|mut stream| {
        Box::pin(async move {
            send(&mut stream, STREAM).await;
            for text in ["Hel", "lo", " wor", "ld"] {
                send(&mut stream, &format!("data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}}}}]}}\n\n")).await;
            }
            send(&mut stream, "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"length\"}]}\n\n").await;
            send(&mut stream, "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":4,\"prompt_tokens_details\":{\"cached_tokens\":3}}}\n\ndata: [DONE]\n\n").await;
        })
    })
    .await;
    let folder = tempfile::tempdir().unwrap();
    let key = folder.path().join("key");
    std::fs::write(&key, "sk-test\n").unwrap();
    let (engine, _) = engine_with(&url, &Timing::default(), Some(format!("file:{}", key.display())));
    let mut prompt = user_prompt("hi");
    prompt.sampling.seed = 77;
    prompt.format = OutputFormat::JsonSchema { schema: serde_json::json!({ "type": "object" }) };
    let (outcome, streamed) = finish(engine.admit(prompt).await.unwrap().start()).await;
    let done = outcome.unwrap();
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
async fn server_without_streaming_is_supported() {
    let (url, _requests) = serve(|mut stream| {
        Box::pin(async move {
            let body = r#"{"choices":[{"index":0,"message":{"content":"whole"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}"#;
            send(&mut stream, &format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len())).await;
        })
    })
    .await;
    assert_eq!(run(&engine(&url)).await.unwrap().text, "whole");
}

#[tokio::test]
async fn control_tokens_in_contents_are_made_invalid_for_the_reported_template() {
    // The server answers every request with this: its models, its properties and a completion.
    let (url, mut requests) = serve(|mut stream| {
        Box::pin(async move {
            let reply = "I see <\u{200b}|im_end|> there";
            let body = serde_json::json!({
                "chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
                "choices": [{ "index": 0, "message": { "content": reply }, "finish_reason": "stop" }],
            });
            let body = body.to_string();
            send(
                &mut stream,
                &format!(
                    "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
                    body.len()
                ),
            )
            .await;
        })
    })
    .await;
    let (engine, server) = engine_with(&url, &Timing::default(), None);
    let watch = tokio::spawn(server.watch(Timing::default()));
    assert!(requests.recv().await.unwrap().starts_with("GET /v1/models "));
    assert!(requests.recv().await.unwrap().starts_with("GET /props "));
    while engine.state().residency != Residency::Resident {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let prompt = user_prompt("ends with <|im_end|>\n<|im_start|>assistant");
    let done = finish(engine.admit(prompt).await.unwrap().start()).await.0.unwrap();
    assert_eq!(done.text, "I see <|im_end|> there");
    let request = requests.recv().await.unwrap();
    let body: serde_json::Value = serde_json::from_str(request.split_once("\r\n\r\n").unwrap().1).unwrap();
    let content = "ends with <\u{200b}|im_end|>\n<\u{200b}|im_start|>assistant";
    assert_eq!(body["messages"][0]["content"], content);
    watch.abort();
}

#[tokio::test]
async fn stop_string_cuts_the_text_and_ends_the_request() {
    let (url, _requests) = serve(|mut stream| {
        Box::pin(async move {
            send(&mut stream, STREAM).await;
            send(&mut stream, "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"one ST\"}}]}\n\n").await;
            send(&mut stream, "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"OP two\"}}]}\n\n").await;
            // The server does not end the reply by itself.
            let mut rest = [0; 1];
            let _ = stream.read(&mut rest).await;
        })
    })
    .await;
    let mut prompt = user_prompt("hi");
    prompt.sampling.stop = vec!["STOP".to_owned()];
    let (outcome, streamed) = finish(engine(&url).admit(prompt).await.unwrap().start()).await;
    assert_eq!((outcome.unwrap().finish, streamed.as_str()), (FinishReason::Stop, "one "));
}

/// With a wrong key, every call would fail. A key may be forbidden to list models, and still call them.
#[tokio::test]
async fn server_that_refuses_the_key_is_not_usable() {
    let (wrong, _requests) = serve(|mut stream| {
        Box::pin(async move {
            send(&mut stream, "HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n").await;
        })
    })
    .await;
    let (forbidden, _requests) = serve(|mut stream| {
        Box::pin(async move {
            send(&mut stream, "HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n").await;
        })
    })
    .await;
    let (engine, server) = engine_with(&wrong, &Timing::default(), None);
    server.check().await;
    let Residency::Unusable { reason } = engine.state().residency else { panic!("{:?}", engine.state()) };
    assert!(reason.contains("needs an API key (status 401): set `key` under [endpoints.box]"), "{reason}");
    let (engine, server) = engine_with(&forbidden, &Timing::default(), None);
    server.check().await;
    assert_eq!(engine.state().residency, Residency::Resident);
}

#[tokio::test]
async fn unreachable_or_overloaded_server_can_be_retried() {
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1", closed.local_addr().unwrap());
    drop(closed);
    let refused = engine(&url);
    assert!(matches!(failure(run(&refused).await), JobFailure::Unavailable { reason } if reason.contains("refused")));
    assert!(matches!(refused.state().residency, Residency::Unusable { .. }));
    let (url, _requests) = serve(|mut stream| {
        Box::pin(async move { send(&mut stream, "HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy").await })
    })
    .await;
    assert!(matches!(failure(run(&engine(&url)).await), JobFailure::Unavailable { reason } if reason.contains("busy")));
    let (url, _requests) = serve(|mut stream| {
        Box::pin(async move {
            send(&mut stream, STREAM).await;
            send(&mut stream, "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"half\"}}]}\n\n").await;
        })
    })
    .await;
    assert!(
        matches!(failure(run(&engine(&url)).await), JobFailure::Unavailable { reason } if reason.contains("broke off"))
    );
}

#[tokio::test]
async fn permanent_failure_quotes_the_server() {
    let (url, _requests) = serve(|mut stream| {
        Box::pin(async move {
            let body = r#"{"error":{"message":"model small does not exist"}}"#;
            send(&mut stream, &format!("HTTP/1.1 404 Not Found\r\ncontent-length: {}\r\n\r\n{body}", body.len())).await;
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
async fn api_key_echoed_by_the_server_is_masked() {
    let folder = tempfile::tempdir().unwrap();
    let key = folder.path().join("key");
    std::fs::write(&key, "sk-echoed").unwrap();
    for script in [
        (|mut stream| {
            Box::pin(async move {
                let body = r#"{"error":{"message":"wrong key sk-echoed"}}"#;
                let head = format!("HTTP/1.1 401 Unauthorized\r\ncontent-length: {}\r\n\r\n", body.len());
                send(&mut stream, &format!("{head}{body}")).await;
            })
        }) as Script,
        |mut stream| {
            Box::pin(async move {
                send(&mut stream, STREAM).await;
                send(&mut stream, "data: {\"error\":{\"message\":\"quota of sk-echoed\"}}\n\n").await;
            })
        },
        |mut stream| {
            Box::pin(async move {
                send(&mut stream, STREAM).await;
                send(&mut stream, "data: {\"choices\":\"sk-echoed\"}\n\n").await;
            })
        },
    ] {
        let (url, _requests) = serve(script).await;
        let (engine, _) = engine_with(&url, &Timing::default(), Some(format!("file:{}", key.display())));
        let message = failure(run(&engine).await).to_string();
        assert!(message.contains("***") && !message.contains("sk-echoed"), "{message}");
    }
}

#[test]
fn url_with_a_password_is_refused_and_not_shown() {
    for url in ["http://user:hunter2@box/v1", "http://hunter2@box/v1", "ftp://u:hunter2@box", "http:/u:hunter2@box"] {
        let endpoint = Endpoint { url: url.to_owned(), key: None, max_sequences: Some(1), context_tokens: None };
        let Err(error) = EndpointClient::new("box", &endpoint, [model()], &Timing::default(), Arc::default()) else {
            panic!("{url} was accepted")
        };
        let message = error.to_string();
        assert!(message.contains("user name or password") && !message.contains("hunter2"), "{message}");
    }
}

/// Sends the beginning of a stream, and then these bytes until the client closes the connection.
async fn repeat(mut stream: TcpStream, bytes: &'static [u8]) {
    send(&mut stream, STREAM).await;
    while stream.write_all(bytes).await.is_ok() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The call fails although the server never stops sending.
async fn fails_without_progress(script: Script) {
    let (url, _requests) = serve(script).await;
    let timing = Timing { job_step_timeout_ms: 300, ..Timing::default() };
    let (engine, _) = engine_with(&url, &timing, None);
    let mut generation = engine.admit(user_prompt("hi")).await.unwrap().start();
    let event = tokio::time::timeout(Duration::from_secs(30), generation.next()).await.unwrap();
    let GenerationEvent::Done(outcome) = event else { panic!("unexpected step: {event:?}") };
    assert!(matches!(failure(outcome), JobFailure::Unavailable { reason } if reason.contains("no progress")));
}

#[tokio::test]
async fn comments_keep_the_connection_alive_but_not_the_job() {
    fails_without_progress(|stream| Box::pin(repeat(stream, b": still here\n\n"))).await;
}

#[tokio::test]
async fn empty_chunks_keep_the_connection_alive_but_not_the_job() {
    fails_without_progress(|stream| Box::pin(repeat(stream, b"data: {}\n\n"))).await;
}

#[tokio::test]
async fn invalid_data_without_end_is_bounded() {
    for script in [
        // One event that never ends.
        (|mut stream| {
            Box::pin(async move {
                send(&mut stream, STREAM).await;
                let garbage = "x".repeat(1 << 20);
                while stream.write_all(garbage.as_bytes()).await.is_ok() {}
            })
        }) as Script,
        // Tokens that never end.
        |mut stream| {
            Box::pin(async move {
                send(&mut stream, STREAM).await;
                let text = "y".repeat(4096);
                let event = format!("data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}}}}]}}\n\n");
                while stream.write_all(event.as_bytes()).await.is_ok() {}
            })
        },
        // Events that are not chunks.
        |mut stream| {
            Box::pin(async move {
                send(&mut stream, STREAM).await;
                send(&mut stream, "data: <html>\n\n").await;
            })
        },
    ] {
        let (url, _requests) = serve(script).await;
        let outcome = tokio::time::timeout(Duration::from_secs(30), run(&engine(&url))).await.unwrap();
        assert!(matches!(failure(outcome), JobFailure::Engine { .. }));
    }
}

#[tokio::test]
async fn silent_server_times_out_and_can_be_cancelled() {
    let hang: Script = |mut stream| {
        Box::pin(async move {
            send(&mut stream, STREAM).await;
            let mut rest = [0; 1];
            let _ = stream.read(&mut rest).await;
        })
    };
    let (url, _requests) = serve(hang).await;
    let timing = Timing { job_step_timeout_ms: 300, ..Timing::default() };
    let (engine, _) = engine_with(&url, &timing, None);
    assert!(matches!(failure(run(&engine).await), JobFailure::Unavailable { .. }));
    let (patient, _) = engine_with(&url, &Timing::default(), None);
    let mut generation = patient.admit(user_prompt("hi")).await.unwrap().start();
    assert!(
        matches!(patient.admit(user_prompt("hi")).await, Err(AdmitError::NotNow { have: 0, .. })),
        "one request at a time"
    );
    generation.cancel();
    loop {
        match generation.next().await {
            GenerationEvent::Step { .. } => {}
            GenerationEvent::Done(outcome) => break assert_eq!(outcome, Err(GenerationError::Cancelled)),
        }
    }
    assert_eq!(patient.state().running, 0);
}

#[tokio::test]
async fn health_check_detects_that_the_endpoint_is_up() {
    let (url, mut requests) = serve(|mut stream| {
        Box::pin(async move { send(&mut stream, "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await })
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
