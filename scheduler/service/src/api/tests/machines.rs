//! Tests of joining over the API.

use cfq_proto::http::{JoinReply, JoinTokenReply, MachineList, MachineView};
use cfq_proto::join_token::JoinToken;
use cfq_proto::timing::Timing;

use super::*;

const WITHOUT_API_TOKEN: [(&str, &str); 1] = [("authorization", "")];

async fn lan() -> Service {
    let env = TestEnv::new().await;
    let join_info = JoinInfo {
        authority: [9; 32],
        urls: vec!["https://10.0.0.2:7710".to_owned()],
        nats_port: 7711,
        models: vec![MODEL.parse().unwrap()],
        timing: Timing::default(),
    };
    Service::reachable(Some(join_info), SchedulerLimits::default(), env.store.clone(), Some(env))
}

fn key() -> String {
    nkeys::KeyPair::new_user().public_key()
}

async fn token(service: &Service, body: Value) -> JoinTokenReply {
    let (status, body) = service.post("/api/v1/join-tokens", &[], &body).await;
    assert_eq!(status, StatusCode::CREATED, "{}", String::from_utf8_lossy(&body));
    read(&body)
}

fn join(token: &str, name: &str, key: &str) -> Value {
    json!({ "token": token, "name": name, "nats_key": key, "version": "0.1.0" })
}

#[tokio::test]
async fn machine_joins_with_its_token_and_without_the_api_token() {
    let service = lan().await;
    let created = token(&service, json!({ "ttl_seconds": 60 })).await;
    assert_eq!(created.urls, ["https://10.0.0.2:7710"]);
    assert_eq!(created.token.parse::<JoinToken>().unwrap().authority, [9; 32]);
    // The name of the host counts only if nothing else names the machine.
    let mut body = join(&created.token, "gpu1", &key());
    body["fallback_name"] = "den".into();
    let (status, reply) = service.post("/api/v1/join", &WITHOUT_API_TOKEN, &body).await;
    assert_eq!(status, StatusCode::OK, "{}", String::from_utf8_lossy(&reply));
    let reply: JoinReply = read(&reply);
    assert_eq!((reply.name.as_str(), reply.nats_port), ("gpu1", 7711));
    assert_eq!(reply.models, [MODEL.parse().unwrap()]);
    let bound = token(&service, json!({ "ttl_seconds": 60, "name": "gpu2" })).await;
    for (token, name) in [(bound, "gpu2"), (token(&service, json!({ "ttl_seconds": 60 })).await, "den")] {
        let body = json!({ "token": token.token, "fallback_name": "den", "nats_key": key(), "version": "0.1.0" });
        let (_, reply) = service.post("/api/v1/join", &WITHOUT_API_TOKEN, &body).await;
        assert_eq!(read::<JoinReply>(&reply).name.as_str(), name);
    }
    let (_, machines) = service.get("/api/v1/machines").await;
    let names: Vec<String> = read::<MachineList>(&machines).machines.iter().map(|m| m.name.to_string()).collect();
    assert_eq!(names, ["den", "gpu1", "gpu2"]);
    let (status, revoked) = service.post("/api/v1/machines/gpu1/revoke", &[], &json!({})).await;
    assert!(status.is_success() && read::<MachineView>(&revoked).revoked_at.is_some());
}

/// Requests without the API token, with a join token in its place, and to a server that other machines cannot reach.
#[tokio::test]
async fn without_the_api_token_only_joining_is_allowed() {
    let service = lan().await;
    let created = token(&service, json!({ "ttl_seconds": 60 })).await;
    let bearer = format!("Bearer {}", created.token);
    // The server may get another address at any time, but a name must be known.
    let moved = [("authorization", ""), ("host", "10.9.8.7:7710")];
    let (status, _) = service.post("/api/v1/join", &moved, &join("secret", "gpu1", &key())).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    for headers in [&WITHOUT_API_TOKEN[..], &[("authorization", bearer.as_str())][..]] {
        for path in [
            "/api/v1/join-tokens",
            "/api/v1/join-tokens/remove",
            "/api/v1/machines/gpu1/revoke",
            "/api/v1/join/",
            "/api/v1/tasks",
        ] {
            let (status, _) = service.post(path, headers, &json!({ "ttl_seconds": 60 })).await;
            assert_eq!(status, StatusCode::UNAUTHORIZED, "{path}");
        }
        let (status, _) = service.send(request(Method::GET, "/api/v1/machines", headers, Body::empty())).await;
        assert_eq!(status, StatusCode::UNAUTHORIZED);
    }
    let foreign = [("authorization", ""), ("host", "evil.example")];
    let (status, _) = service.post("/api/v1/join", &foreign, &join(&created.token, "gpu1", &key())).await;
    assert_eq!(status, StatusCode::FORBIDDEN);
    let local = Service::new().await;
    for (path, body) in
        [("/api/v1/join-tokens", json!({ "ttl_seconds": 60 })), ("/api/v1/join", join(&created.token, "gpu1", &key()))]
    {
        let (status, body) = local.post(path, &[], &body).await;
        let message = read::<ErrorReply>(&body).error.message;
        assert!(status == StatusCode::CONFLICT && message.contains("cfq up --lan"), "{status} {message}");
    }
}

#[tokio::test]
async fn unusable_request_is_refused_with_its_field_and_changes_nothing() {
    let service = lan().await;
    for ttl in [0, 604_801] {
        let (status, body) = service.post("/api/v1/join-tokens", &[], &json!({ "ttl_seconds": ttl })).await;
        let error = read::<ErrorReply>(&body).error;
        assert_eq!((status, error.field.as_deref()), (StatusCode::BAD_REQUEST, Some("ttl_seconds")));
    }
    let created = token(&service, json!({ "ttl_seconds": 60, "name": "gpu1" })).await;
    let unknown = JoinToken::new(uuid::Uuid::now_v7(), [1; 32], [9; 32]).to_string();
    let damaged_key = {
        let key = key();
        format!("{}{}", &key[..55], if key.ends_with('A') { 'B' } else { 'A' })
    };
    for (body, status, field) in [
        (join("secret", "gpu1", &key()), StatusCode::BAD_REQUEST, Some("token")),
        (join(&created.token, "gpu2", &key()), StatusCode::BAD_REQUEST, Some("name")),
        (join(&created.token, "GPU 1", &key()), StatusCode::BAD_REQUEST, Some("name")),
        (join(&created.token, "gpu1", &damaged_key), StatusCode::BAD_REQUEST, Some("nats_key")),
        (join(&created.token, "gpu1", "U\" } }"), StatusCode::BAD_REQUEST, Some("nats_key")),
        (join(&unknown, "gpu1", &key()), StatusCode::FORBIDDEN, None),
        (
            json!({ "token": created.token, "nats_key": key(), "version": "0.0.1" }),
            StatusCode::BAD_REQUEST,
            Some("version"),
        ),
        (join(&"x".repeat(5000), "gpu1", &key()), StatusCode::PAYLOAD_TOO_LARGE, None),
    ] {
        let (got, reply) = service.post("/api/v1/join", &WITHOUT_API_TOKEN, &body).await;
        let error = read::<ErrorReply>(&reply).error;
        assert_eq!((got, error.field.as_deref()), (status, field), "{body} {}", error.message);
    }
    let (_, machines) = service.get("/api/v1/machines").await;
    assert_eq!(read::<MachineList>(&machines).machines, []);
}
