//! Text completions: a model continues a text that no chat template was applied to.

use cfq_tests::cluster::{Cluster, Options, TOKEN, WAIT_LIMIT};
use cfq_tests::scripted::Reply;
use cfq_tests::small_model::SMALL_MODEL;
use reqwest::StatusCode;
use serde_json::{Value, json};

async fn post(cluster: &Cluster, body: &Value) -> (StatusCode, String) {
    let http = cfq_link::outbound::api_client().unwrap();
    let request = http.post(format!("{}/v1/completions", cluster.client.url())).bearer_auth(TOKEN).json(body);
    let response = tokio::time::timeout(WAIT_LIMIT, request.send()).await.unwrap().unwrap();
    (response.status(), response.text().await.unwrap())
}

async fn whole(cluster: &Cluster, body: &Value) -> Value {
    let (status, reply) = post(cluster, body).await;
    assert_eq!(status, StatusCode::OK, "{reply}");
    serde_json::from_str(&reply).unwrap()
}

/// The chunks of a stream, which must end with `[DONE]`.
async fn streamed(cluster: &Cluster, body: &Value) -> Vec<Value> {
    let (status, reply) = post(cluster, body).await;
    assert_eq!(status, StatusCode::OK, "{reply}");
    let mut data: Vec<&str> = reply.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
    assert_eq!(data.pop(), Some("[DONE]"), "{reply}");
    data.into_iter().map(|chunk| serde_json::from_str(chunk).unwrap()).collect()
}

fn text_of(chunks: &[Value]) -> String {
    chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn endpoint_gets_the_text_and_its_reply_arrives_whole_or_as_a_stream() {
    for kind in ["openai", "ollama"] {
        let models = ["alpha", "beta"].map(|name| format!("{kind}:scripted/{name}"));
        let cluster = Cluster::start_with(Options {
            models: models.iter().map(|model| model.parse().unwrap()).collect(),
            alpha: models[0].clone(),
            beta: models[1].clone(),
            ..Options::default()
        })
        .await;
        let answer = " world, and a second chunk.";
        cluster.models.script("alpha", vec![Reply::Text(answer.into())]);
        let body = json!({ "model": "alpha", "prompt": "Hello,", "max_tokens": 50, "seed": 7 });
        let reply = whole(&cluster, &body).await;
        assert_eq!((&reply["object"], &reply["model"]), (&json!("text_completion"), &json!("alpha")), "{reply}");
        let choice = json!({ "index": 0, "text": answer, "logprobs": null, "finish_reason": "stop" });
        assert_eq!(reply["choices"], json!([choice]), "{reply}");
        assert_eq!(reply["usage"]["prompt_tokens"], 10, "{reply}");
        assert!(reply["id"].as_str().unwrap().starts_with("cmpl-"), "{reply}");

        let mut body = body;
        (body["stream"], body["stream_options"]) = (json!(true), json!({ "include_usage": true }));
        let chunks = streamed(&cluster, &body).await;
        assert_eq!(text_of(&chunks), answer, "{chunks:?}");
        let (usage, text) = chunks.split_last().unwrap();
        assert_eq!((&usage["choices"], &usage["usage"]["prompt_tokens"]), (&json!([]), &json!(10)), "{usage}");
        assert!(text.iter().all(|chunk| chunk["usage"].is_null() && chunk["object"] == "text_completion"), "{text:?}");
        assert_eq!(text.last().unwrap()["choices"][0]["finish_reason"], "stop", "{text:?}");

        for request in cluster.models.requests() {
            assert_eq!(request["prompt"], "Hello,", "{request}");
            assert!(request.get("messages").is_none(), "{request}");
            assert_eq!(request["raw"] == json!(true), kind == "ollama", "{request}");
        }
        cluster.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn small_model_continues_a_text_without_a_template() {
    let options = Options { models: vec![SMALL_MODEL.parse().unwrap()], ..Options::default() };
    let cluster = Cluster::start_with(options).await;
    let text = "The capital of France is";
    let body = json!({ "model": SMALL_MODEL, "prompt": text, "max_tokens": 8, "temperature": 0, "logprobs": 2 });
    let reply = whole(&cluster, &body).await;
    let choice = &reply["choices"][0];
    assert!(choice["text"].as_str().unwrap().contains("Paris"), "{reply}");
    // The template would add its own tokens and a system message.
    let prompt_tokens = reply["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!((5..=7).contains(&prompt_tokens), "{reply}");
    let logprobs = &choice["logprobs"];
    let tokens: Vec<&str> =
        logprobs["tokens"].as_array().unwrap().iter().map(|token| token.as_str().unwrap()).collect();
    assert_eq!(tokens.concat(), choice["text"].as_str().unwrap(), "{reply}");
    for (n, top) in logprobs["top_logprobs"].as_array().unwrap().iter().enumerate() {
        // The token itself is one of the two, because it is the most likely one.
        assert_eq!(top.as_object().unwrap().len(), 2, "{reply}");
        // Greedy decoding takes the most likely token.
        assert!(logprobs["token_logprobs"][n].as_f64().unwrap() >= top[tokens[n]].as_f64().unwrap(), "{reply}");
    }
    assert_eq!(logprobs["text_offset"][1].as_u64().unwrap() as usize, tokens[0].chars().count(), "{reply}");

    // Names of control tokens in the prompt are text.
    let control = |text: &str| json!({ "model": SMALL_MODEL, "prompt": text, "max_tokens": 1 });
    let as_text = whole(&cluster, &control("<|im_end|>")).await;
    assert!(as_text["usage"]["prompt_tokens"].as_u64().unwrap() > 2, "{as_text}");

    let regex = json!({ "model": SMALL_MODEL, "prompt": "Is water wet? Answer:", "structured_outputs": { "choice": [" yes", " no"] } });
    let chosen = whole(&cluster, &regex).await;
    assert!([" yes", " no"].contains(&chosen["choices"][0]["text"].as_str().unwrap()), "{chosen}");

    let long = "word ".repeat(20_000);
    let (status, too_long) = post(&cluster, &json!({ "model": SMALL_MODEL, "prompt": long })).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    let too_long: Value = serde_json::from_str(&too_long).unwrap();
    let expected = (&json!("prompt"), &json!("context_length_exceeded"));
    assert_eq!((&too_long["error"]["param"], &too_long["error"]["code"]), expected, "{too_long}");
    cluster.finish().await;
}
