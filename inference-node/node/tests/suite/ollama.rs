//! Tests of the proxy engine with scripted servers that answer as Ollama does.

use std::sync::Arc;
use std::time::Duration;

use cfq_engine::{Engine, GenerationEvent};
use cfq_inference_node::Endpoint;
use cfq_inference_node::proxy::{EndpointClient, ProxyEngine, RemoteModel};
use cfq_proto::job::{FinishReason, JobFailure};
use cfq_proto::node::Residency;
use cfq_proto::timing::Timing;
use serde_json::json;

use crate::proxy::{Script, failure, run, send, serve};
use crate::smollm::{finish, user_prompt};

fn model() -> RemoteModel {
    RemoteModel::of(&"ollama:box/small".parse().unwrap()).unwrap()
}

async fn engine(script: Script) -> (ProxyEngine, tokio::sync::mpsc::Receiver<String>) {
    engine_with(script, &Timing::default()).await
}

async fn engine_with(script: Script, timing: &Timing) -> (ProxyEngine, tokio::sync::mpsc::Receiver<String>) {
    let (url, requests) = serve(script).await;
    // Requests go to the address without the version of the OpenAI protocol.
    let endpoint = Endpoint { url, key: None, max_sequences: Some(1), context_tokens: Some(2048) };
    let server = EndpointClient::new("box", &endpoint, [model()], timing, Arc::default()).unwrap();
    (ProxyEngine::of_server("ollama:box/small".parse().unwrap(), model(), server), requests)
}

/// A server, whether the failure is the expected one, and words in its message.
type Case<'c> = (Script, &'c dyn Fn(&JobFailure) -> bool, &'c str);

/// Sends a reply with this status and body.
async fn answer(stream: &mut tokio::net::TcpStream, status: &str, content_type: &str, body: &str) {
    let length = body.len();
    let head = format!("HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\ncontent-length: {length}\r\n\r\n");
    send(stream, &format!("{head}{body}")).await;
}

#[tokio::test]
async fn lines_become_text_with_usage() {
    let (engine, mut requests) = engine(|mut stream| {
        Box::pin(async move {
            let body = concat!(
                r#"{"message":{"role":"assistant","content":"","thinking":"hm"},"done":false}"#,
                "\n",
                r#"{"message":{"role":"assistant","content":"Hel"},"done":false}"#,
                "\n",
                r#"{"message":{"role":"assistant","content":"lo"},"done":false}"#,
                "\n",
                r#"{"message":{"role":"assistant","content":""},"done":true,"done_reason":"stop","prompt_eval_count":9,"eval_count":3}"#,
            );
            answer(&mut stream, "200 OK", "application/x-ndjson", body).await;
        })
    })
    .await;
    let done = run(&engine).await.unwrap();
    assert_eq!((done.text.as_str(), done.finish), ("Hello", FinishReason::Stop));
    assert_eq!((done.usage.prompt_tokens, done.usage.output_tokens), (9, 3));
    let request = requests.recv().await.unwrap();
    assert!(request.starts_with("POST /api/chat "), "{request}");
    let body: serde_json::Value = serde_json::from_str(request.split_once("\r\n\r\n").unwrap().1).unwrap();
    assert_eq!((&body["model"], &body["truncate"], &body["stream"]), (&json!("small"), &json!(false), &json!(true)));
    assert_eq!(body["options"]["num_ctx"], 2048);
    assert_eq!(engine.state().context_tokens, 2048);
}

#[tokio::test]
async fn failures_are_classified() {
    let too_long = |outcome: &JobFailure| matches!(outcome, JobFailure::TooLong { have: 2048, .. });
    let unavailable = |outcome: &JobFailure| matches!(outcome, JobFailure::Unavailable { .. });
    let rejected = |outcome: &JobFailure| matches!(outcome, JobFailure::Rejected { .. });
    let scripts: [Case<'_>; 6] = [
        (
            |mut stream| {
                Box::pin(async move {
                    let body = r#"{"error":"the input length exceeds the context length"}"#;
                    answer(&mut stream, "400 Bad Request", "application/json", body).await;
                })
            },
            &too_long,
            "the model's context has 2048",
        ),
        (
            |mut stream| {
                Box::pin(async move {
                    let body =
                        "{\"message\":{\"content\":\"a\"}}\n{\"error\":\"llama runner process has terminated\"}\n";
                    answer(&mut stream, "200 OK", "application/x-ndjson", body).await;
                })
            },
            &unavailable,
            "runner process has terminated",
        ),
        (
            |mut stream| {
                Box::pin(async move {
                    answer(&mut stream, "200 OK", "application/x-ndjson", "{\"message\":{\"content\":\"a\"}}\n").await;
                })
            },
            &unavailable,
            "broke off",
        ),
        (
            |mut stream| {
                Box::pin(async move {
                    let body = r#"{"error":"server busy, please try again.  maximum pending requests exceeded"}"#;
                    answer(&mut stream, "503 Service Unavailable", "application/json", body).await;
                })
            },
            &unavailable,
            "server busy",
        ),
        (
            |mut stream| {
                Box::pin(async move {
                    let body = r#"{"error":"\"embedder\" does not support chat"}"#;
                    answer(&mut stream, "400 Bad Request", "application/json", body).await;
                })
            },
            &rejected,
            "does not support chat",
        ),
        (
            |mut stream| Box::pin(async move { answer(&mut stream, "200 OK", "application/x-ndjson", "<html>").await }),
            &|outcome| matches!(outcome, JobFailure::Engine { .. }),
            "invalid chat completion",
        ),
    ];
    for (script, is_expected, words) in scripts {
        let (engine, _requests) = engine(script).await;
        let outcome = failure(run(&engine).await);
        assert!(is_expected(&outcome) && outcome.to_string().contains(words), "{outcome:?}");
    }
}

#[tokio::test]
async fn model_that_was_removed_is_unusable_until_the_server_has_it_again() {
    let (engine, _requests) = engine(|mut stream| {
        Box::pin(async move {
            answer(&mut stream, "404 Not Found", "application/json", r#"{"error":"model 'small' not found"}"#).await;
        })
    })
    .await;
    let outcome = failure(run(&engine).await);
    assert!(matches!(&outcome, JobFailure::Unavailable { .. }), "{outcome:?}");
    assert!(outcome.to_string().contains("`cfq models pull ollama:box/small`"), "{outcome}");
    assert!(matches!(engine.state().residency, Residency::Unusable { .. }), "{:?}", engine.state());
}

/// Ollama sends the head of its reply with the first token, after it has loaded the model.
#[tokio::test]
async fn load_that_takes_longer_than_a_step_does_not_fail_the_call() {
    let timing = Timing { job_step_timeout_ms: 100, ..Timing::default() };
    let slow: Script = |mut stream| {
        Box::pin(async move {
            tokio::time::sleep(Duration::from_millis(500)).await;
            let body = r#"{"message":{"content":"done"},"done":true,"done_reason":"stop"}"#;
            answer(&mut stream, "200 OK", "application/x-ndjson", body).await;
        })
    };
    let (engine, _requests) = engine_with(slow, &timing).await;
    let mut generation = engine.admit(user_prompt("hi")).await.unwrap().start();
    // The wait is reported as a step, so that the job keeps its lease.
    assert!(matches!(generation.next().await, GenerationEvent::Step { .. }));
    assert_eq!(finish(generation).await.0.unwrap().text, "done");
}
