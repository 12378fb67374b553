//! Tests that messages of cfq 0.1 still load. `fixtures/` holds every kind of message in the form that 0.1 writes, one
//! message per line: under `nats/` with its envelope, under `http/` as the body. This build must read each line and
//! write the same JSON, except for the names in [`RENAMED_FIELDS`] and [`RENAMED_TAGS`].
//!
//! Lines are never edited: when a type gets another field, the old lines stay and must load with its default, and a new
//! line shows the new form. If a line loads, but this build writes the message in another form, the line gets its own
//! file and a test that states the difference.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use cfq_proto::envelope;
use cfq_proto::event::{Event, EventBody, RunnerChange};
use cfq_proto::http::{
    ArtifactChain, CancelRequest, ErrorReply, ModelAnswer, ModelRequest, NodeView, PrView, ResolveRequest, StateReply,
    SubmitReply, SubmitRequest, TaskDetail, TaskList, TokensData,
};
use cfq_proto::job::{Outcome, ReleaseReason};
use cfq_proto::loop_step::Step;
use cfq_proto::messages::{
    Abandon, Accept, BlobGet, BlobGetReply, BlobPut, BlobPutReply, FenceReply, Heartbeat, HeartbeatReply, JobCancel,
    JobGet, JobReply, JobResult, JobSubmit, Journal, LeaseReply, LeaseRequest, ModelReply, NodeCommand,
    NodeRegistration, PrefillHint, Refuse, RegisterReply, Release, RunnerCommand, RunnerRegistration, StepReply,
    StepRequest, TokenFrame, WorkOrder,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn lines(path: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let lines: Vec<String> = text.lines().map(str::to_owned).collect();
    assert!(!lines.is_empty(), "{} is empty", path.display());
    lines
}

/// Renamed fields: (name in 0.1, current name).
const RENAMED_FIELDS: [(&str, &str); 6] = [
    ("ahead", "hint"),
    ("enough", "early_stop"),
    ("guessed_tokens", "drafted_tokens"),
    ("hello_again", "register_again"),
    ("parked", "offloaded"),
    ("written", "generated"),
];

/// Renamed values of the field `type`: (value in 0.1, current value).
const RENAMED_TAGS: [(&str, &str); 4] =
    [("ending", "unloading"), ("warm", "prefill"), ("welcome", "registered"), ("work_waits", "task_ready")];

/// Returns the current name for a name of 0.1.
fn current(name: &str, renamed: &[(&str, &str)]) -> String {
    renamed.iter().find(|(old, _)| *old == name).map_or(name, |(_, now)| *now).to_owned()
}

/// Replaces the names of 0.1 in a JSON value by the current names.
fn with_current_names(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            // The field `why` of 0.1 is `explanation` beside a typed reason, and `reason` elsewhere.
            let has_typed_reason = fields.contains_key("reason") || fields.contains_key("decision");
            let text_field = if has_typed_reason { "explanation" } else { "reason" };
            let renamed = fields.into_iter().map(|(name, value)| match value {
                Value::String(tag) if name == "type" => (name, Value::String(current(&tag, &RENAMED_TAGS))),
                text if name == "why" => (text_field.to_owned(), text),
                // The text of the event `runner_changed` in the fixtures.
                Value::String(text) if name == "what" && text == "took it" => {
                    ("change".to_owned(), json!({ "type": "granted" }))
                }
                value => (current(&name, &RENAMED_FIELDS), with_current_names(value)),
            });
            Value::Object(renamed.collect())
        }
        Value::Array(items) => items.into_iter().map(with_current_names).collect(),
        other => other,
    }
}

/// Replaces the names of ids in the HTTP API of 0.1: of tasks, of model calls, and the numbers of pull requests.
fn with_typed_ids(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let has = |names: &[&str]| names.iter().all(|name| fields.contains_key(*name));
            let renamed: &[(&str, &str)] = if has(&["number", "task", "branch"]) {
                &[("number", "pr"), ("task", "number")]
            } else if has(&["id", "number"]) && !has(&["task"]) {
                &[("id", "task")]
            } else if has(&["id", "role", "model"]) {
                &[("id", "job")]
            } else {
                &[]
            };
            let fields = fields.into_iter().map(|(name, value)| (current(&name, renamed), with_typed_ids(value)));
            Value::Object(fields.collect())
        }
        Value::Array(items) => items.into_iter().map(with_typed_ids).collect(),
        other => other,
    }
}

fn assert_same_json(path: &Path, expected: Value, encoded: &[u8]) {
    assert_eq!(expected, serde_json::from_slice::<Value>(encoded).unwrap(), "{}", path.display());
}

fn on_nats<T: Serialize + DeserializeOwned>(path: &Path) {
    for line in lines(path) {
        let body: T = envelope::decode(line.as_bytes()).unwrap_or_else(|e| panic!("{}: {e:?}: {line}", path.display()));
        let encoded = envelope::encode(&body).unwrap();
        assert_same_json(path, with_current_names(serde_json::from_str(&line).unwrap()), &encoded);
        assert_eq!(envelope::encode(&envelope::decode::<T>(&encoded).unwrap()).unwrap(), encoded, "{}", path.display());
    }
}

fn on_http<T: Serialize + DeserializeOwned>(path: &Path) {
    for line in lines(path) {
        let body: T = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{}: {e}: {line}", path.display()));
        let encoded = serde_json::to_vec(&body).unwrap();
        assert_same_json(path, with_typed_ids(with_current_names(serde_json::from_str(&line).unwrap())), &encoded);
        let again: T = serde_json::from_slice(&encoded).unwrap();
        assert_eq!(serde_json::to_vec(&again).unwrap(), encoded, "{}", path.display());
    }
}

type Kinds = [(&'static str, fn(&Path))];

/// Checks every kind of message against its fixture file; every fixture file must belong to a kind.
fn check_all(name: &str, kinds: &Kinds) {
    let files = std::fs::read_dir(folder(name)).unwrap();
    let found: BTreeSet<String> = files.map(|f| f.unwrap().file_name().into_string().unwrap()).collect();
    let known: BTreeSet<String> = kinds.iter().map(|(kind, _)| format!("{kind}.jsonl")).collect();
    assert_eq!(found, known);
    for (kind, read) in kinds {
        read(&folder(name).join(format!("{kind}.jsonl")));
    }
}

#[test]
fn nats_messages_of_0_1_load() {
    check_all(
        "nats",
        &[
            ("accept", on_nats::<Accept>),
            ("beat", on_nats::<Heartbeat>),
            ("beat_reply", on_nats::<HeartbeatReply>),
            ("blob_get", on_nats::<BlobGet>),
            ("blob_get_reply", on_nats::<BlobGetReply>),
            ("blob_put", on_nats::<BlobPut>),
            ("blob_put_reply", on_nats::<BlobPutReply>),
            ("fence_reply", on_nats::<FenceReply>),
            ("give_up", on_nats::<Abandon>),
            ("hello_reply", on_nats::<RegisterReply>),
            ("job_ask", on_nats::<JobSubmit>),
            ("job_drop", on_nats::<JobCancel>),
            ("job_look", on_nats::<JobGet>),
            ("job_reply", on_nats::<JobReply>),
            ("job_report", on_nats::<JobResult>),
            ("journal", on_nats::<Journal>),
            ("lease_reply", on_nats::<LeaseReply>),
            ("lease_request", on_nats::<LeaseRequest>),
            ("model_reply", on_nats::<ModelReply>),
            ("node_command", on_nats::<NodeCommand>),
            ("node_hello", on_nats::<NodeRegistration>),
            ("refuse", on_nats::<Refuse>),
            ("release", on_nats::<Release>),
            ("runner_command", on_nats::<RunnerCommand>),
            ("runner_hello", on_nats::<RunnerRegistration>),
            ("step_reply", on_nats::<StepReply>),
            ("step_request", on_nats::<StepRequest>),
            ("token_frame", on_nats::<TokenFrame>),
            ("warm_up", on_nats::<PrefillHint>),
            ("work_order", on_nats::<WorkOrder>),
        ],
    );
}

#[test]
fn http_bodies_of_0_1_load() {
    check_all(
        "http",
        &[
            ("artifact_chain", on_http::<ArtifactChain>),
            ("cancel_request", on_http::<CancelRequest>),
            ("error", on_http::<ErrorReply>),
            ("event", on_http::<Event>),
            ("model_answer", on_http::<ModelAnswer>),
            ("model_request", on_http::<ModelRequest>),
            ("node", on_http::<NodeView>),
            ("pr", on_http::<PrView>),
            ("resolve_request", on_http::<ResolveRequest>),
            ("state_reply", on_http::<StateReply>),
            ("submit_reply", on_http::<SubmitReply>),
            ("submit_request", on_http::<SubmitRequest>),
            ("task_detail", on_http::<TaskDetail>),
            ("task_list", on_http::<TaskList>),
            ("tokens", on_http::<TokensData>),
        ],
    );
}

/// The reason of a released attempt is a text in messages and in the database.
#[test]
fn release_reason_is_a_text_that_loads_as_its_variant() {
    for (reason, text) in [
        (ReleaseReason::Cancelled, "cancelled by the scheduler"),
        (ReleaseReason::Drained, "its node stops"),
        (ReleaseReason::Yielded { to: "game on cuda:0".into() }, "its node yields to game on cuda:0"),
        (ReleaseReason::Other("drains".into()), "drains"),
    ] {
        let outcome = Outcome::Released { reason };
        let json = serde_json::to_value(&outcome).unwrap();
        assert_eq!(json["reason"], text);
        assert_eq!(serde_json::from_value::<Outcome>(json).unwrap(), outcome);
    }
}

/// cfq 0.1 stored the change of a runner's lease as a text.
#[test]
fn runner_change_of_0_1_loads_as_its_variant() {
    let lost = RunnerChange::Lost { reason: "did not renew its lease".into() };
    for (text, change) in [("took the task", RunnerChange::Granted), ("lost: did not renew its lease", lost)] {
        let stored = json!({ "type": "runner_changed", "runner": "r1", "attempt": 1, "what": text });
        let body = EventBody::RunnerChanged { runner: "r1".into(), attempt: 1, change: change.clone() };
        assert_eq!(serde_json::from_value::<EventBody>(stored).unwrap(), body);
        assert_eq!(change.to_string(), text);
        let json = serde_json::to_value(&body).unwrap();
        assert_eq!(serde_json::from_value::<EventBody>(json).unwrap(), body);
    }
}

/// Tags of all variants of an enum, taken from its JSON schema.
fn variants(schema: schemars::Schema, tag: &str) -> BTreeSet<String> {
    let value = serde_json::to_value(schema).unwrap();
    let all = value["oneOf"].as_array().expect("an enum");
    all.iter().map(|one| one["properties"][tag]["const"].as_str().expect("a tag").to_owned()).collect()
}

/// Tags that occur in the lines of a fixture; `at` is the JSON pointer to the tag.
fn tags_in(file: &str, at: &str) -> BTreeSet<String> {
    let tag =
        |line: String| serde_json::from_str::<Value>(&line).unwrap().pointer(at).unwrap().as_str().unwrap().into();
    lines(&folder(file)).into_iter().map(tag).collect()
}

/// Steps and events stay in Postgres, so every new variant needs a line in the fixtures.
#[test]
fn every_step_and_event_has_a_fixture_line() {
    assert_eq!(tags_in("nats/step_request.jsonl", "/body/step/kind"), variants(schemars::schema_for!(Step), "kind"));
    assert_eq!(tags_in("http/event.jsonl", "/body/type"), variants(schemars::schema_for!(EventBody), "type"));
}
