//! Tests of what servers report about their models, each in its own way: names of control tokens, which are made
//! invalid in contents, and the length of the context.

use std::time::Duration;

use cfq_engine::Engine;
use cfq_proto::node::Residency;
use cfq_proto::timing::Timing;
use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use crate::proxy::{engine_with, send};
use crate::smollm::{finish, user_prompt};

/// Starts a server that answers requests by their first line and others with an error. Returns its URL and the bodies of
/// the requests for completions.
async fn serve_paths(answers: &'static [(&'static str, &'static str)]) -> (String, mpsc::Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    let (seen, bodies) = mpsc::channel(16);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = String::new();
            let mut chunk = [0; 4096];
            // A request of these tests has a body of JSON or none.
            while !request.ends_with("\r\n\r\n") && !request.ends_with('}') {
                let n = stream.read(&mut chunk).await.unwrap();
                request.push_str(&String::from_utf8_lossy(&chunk[..n]));
            }
            let answer = answers.iter().find(|(line, _)| request.starts_with(line));
            let (status, body) = answer.map_or(("404 Not Found", "{}"), |(_, body)| ("200 OK", *body));
            let length = body.len();
            let head = format!(
                "HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n"
            );
            send(&mut stream, &format!("{head}{body}")).await;
            if request.starts_with("POST /v1/chat/completions ") {
                let (_, body) = request.split_once("\r\n\r\n").unwrap();
                seen.send(body.to_owned()).await.unwrap();
            }
        }
    });
    (url, bodies)
}

#[tokio::test]
async fn control_tokens_in_contents_are_made_invalid_for_ollama_and_vllm() {
    const MODELS: (&str, &str) = ("GET /v1/models ", "{}");
    const REPLY: (&str, &str) = (
        "POST /v1/chat/completions ",
        r#"{ "choices": [{ "index": 0, "message": { "content": "yes" }, "finish_reason": "stop" }] }"#,
    );
    const OLLAMA: &[(&str, &str)] = &[
        MODELS,
        REPLY,
        (
            "POST /api/show ",
            r#"{ "template": "{{ if .System }}<|im_start|>system{{ end }}", "parameters": "stop  \"<|im_end|>\"",
                 "model_info": { "tokenizer.ggml.tokens": ["e", "<|endoftext|>", "<table>"],
                                 "tokenizer.ggml.token_type": [1, 3, 4] } }"#,
        ),
    ];
    const VLLM: &[(&str, &str)] = &[
        MODELS,
        REPLY,
        (
            "GET /tokenizer_info ",
            r#"{ "chat_template": "{{ '<|im_start|>' + messages[0].role }}", "eos_token": "<|im_end|>",
                 "added_tokens_decoder": { "0": { "content": "<|endoftext|>", "special": true } } }"#,
        ),
    ];
    for answers in [OLLAMA, VLLM] {
        let (url, mut bodies) = serve_paths(answers).await;
        let (engine, server) = engine_with(&url, &Timing::default(), None);
        let watch = tokio::spawn(server.watch(Timing::default()));
        while engine.state().residency != Residency::Resident {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let prompt = user_prompt("<|im_start|> <|im_end|> <|endoftext|> <table> <p>");
        assert_eq!(finish(engine.admit(prompt).await.unwrap().start()).await.0.unwrap().text, "yes");
        let body: serde_json::Value = serde_json::from_str(&bodies.recv().await.unwrap()).unwrap();
        let escaped = "<\u{200b}|im_start|> <\u{200b}|im_end|> <\u{200b}|endoftext|> <table> <p>";
        assert_eq!(body["messages"][0]["content"], escaped);
        watch.abort();
    }
}

#[tokio::test]
async fn context_that_the_server_reports_is_used() {
    const LLAMA_CPP: &[(&str, &str)] = &[
        ("GET /v1/models ", "{}"),
        ("GET /props ", r#"{ "chat_template": "<|im_start|>", "default_generation_settings": { "n_ctx": 4096 } }"#),
    ];
    const VLLM: &[(&str, &str)] = &[("GET /v1/models ", r#"{ "data": [{ "id": "small", "max_model_len": 8192 }] }"#)];
    const LM_STUDIO: &[(&str, &str)] = &[
        ("GET /v1/models ", r#"{ "data": [{ "id": "small" }] }"#),
        ("GET /api/v0/models ", r#"{ "data": [{ "id": "small", "loaded_context_length": 2048 }] }"#),
    ];
    const OTHER: &[(&str, &str)] = &[("GET /v1/models ", r#"{ "data": [{ "id": "small" }] }"#)];
    for (answers, expected) in [(LLAMA_CPP, 4096), (VLLM, 8192), (LM_STUDIO, 2048), (OTHER, 131_072)] {
        let (url, _bodies) = serve_paths(answers).await;
        let (engine, server) = engine_with(&url, &Timing::default(), None);
        let watch = tokio::spawn(server.watch(Timing::default()));
        while engine.state().residency != Residency::Resident {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(engine.state().context_tokens, expected);
        watch.abort();
    }
}
