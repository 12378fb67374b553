//! What cfq 0.1 said is still understood. `fixtures/` holds every kind of message in the form 0.1 writes it, one a line: under
//! `nats/` with its envelope, under `http/` as the body. Today's code must read each line and write it again as it was.
//!
//! A line is never edited: where a type gets another field, yesterday's lines stay and must load by a default, and
//! a new line shows the new form. A line that is read and not written again as it was goes to a file of its own with a test
//! that says what became of it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use cfq_proto::envelope;
use cfq_proto::event::{Event, EventBody};
use cfq_proto::http::{
    ArtifactChain, CancelRequest, ErrorReply, ModelAnswer, ModelRequest, NodeView, PrView, ResolveRequest, StateReply,
    SubmitReply, SubmitRequest, TaskDetail, TaskList, TokensData,
};
use cfq_proto::looping::Step;
use cfq_proto::messages::{
    Accept, Beat, BeatReply, BlobGet, BlobGetReply, BlobPut, BlobPutReply, FenceReply, GiveUp, HelloReply, JobAsk,
    JobDrop, JobLook, JobReply, JobReport, Journal, LeaseReply, LeaseRequest, ModelReply, NodeCommand, NodeHello,
    Refuse, Release, RunnerCommand, RunnerHello, StepReply, StepRequest, TokenFrame, WarmUp, WorkOrder,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn lines(path: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let lines: Vec<String> = text.lines().map(str::to_owned).collect();
    assert!(!lines.is_empty(), "{} is empty", path.display());
    lines
}

fn same(path: &Path, before: &str, after: &[u8]) {
    let parsed = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap();
    assert_eq!(parsed(before.as_bytes()), parsed(after), "{}", path.display());
}

fn on_nats<T: Serialize + DeserializeOwned>(path: &Path) {
    for line in lines(path) {
        let body: T = envelope::decode(line.as_bytes()).unwrap_or_else(|e| panic!("{}: {e:?}: {line}", path.display()));
        same(path, &line, &envelope::encode(&body).unwrap());
    }
}

fn on_http<T: Serialize + DeserializeOwned>(path: &Path) {
    for line in lines(path) {
        let body: T = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{}: {e}: {line}", path.display()));
        same(path, &line, &serde_json::to_vec(&body).unwrap());
    }
}

type Kinds = [(&'static str, fn(&Path))];

/// Every kind has its file, and every file a kind.
fn all_are_read(name: &str, kinds: &Kinds) {
    let files = std::fs::read_dir(folder(name)).unwrap();
    let found: BTreeSet<String> = files.map(|f| f.unwrap().file_name().into_string().unwrap()).collect();
    let known: BTreeSet<String> = kinds.iter().map(|(kind, _)| format!("{kind}.jsonl")).collect();
    assert_eq!(found, known);
    for (kind, read) in kinds {
        read(&folder(name).join(format!("{kind}.jsonl")));
    }
}

#[test]
fn messages_on_nats() {
    all_are_read(
        "nats",
        &[
            ("accept", on_nats::<Accept>),
            ("beat", on_nats::<Beat>),
            ("beat_reply", on_nats::<BeatReply>),
            ("blob_get", on_nats::<BlobGet>),
            ("blob_get_reply", on_nats::<BlobGetReply>),
            ("blob_put", on_nats::<BlobPut>),
            ("blob_put_reply", on_nats::<BlobPutReply>),
            ("fence_reply", on_nats::<FenceReply>),
            ("give_up", on_nats::<GiveUp>),
            ("hello_reply", on_nats::<HelloReply>),
            ("job_ask", on_nats::<JobAsk>),
            ("job_drop", on_nats::<JobDrop>),
            ("job_look", on_nats::<JobLook>),
            ("job_reply", on_nats::<JobReply>),
            ("job_report", on_nats::<JobReport>),
            ("journal", on_nats::<Journal>),
            ("lease_reply", on_nats::<LeaseReply>),
            ("lease_request", on_nats::<LeaseRequest>),
            ("model_reply", on_nats::<ModelReply>),
            ("node_command", on_nats::<NodeCommand>),
            ("node_hello", on_nats::<NodeHello>),
            ("refuse", on_nats::<Refuse>),
            ("release", on_nats::<Release>),
            ("runner_command", on_nats::<RunnerCommand>),
            ("runner_hello", on_nats::<RunnerHello>),
            ("step_reply", on_nats::<StepReply>),
            ("step_request", on_nats::<StepRequest>),
            ("token_frame", on_nats::<TokenFrame>),
            ("warm_up", on_nats::<WarmUp>),
            ("work_order", on_nats::<WorkOrder>),
        ],
    );
}

#[test]
fn bodies_over_http() {
    all_are_read(
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

/// Names of an enum's variants, as its schema lists them.
fn variants(schema: schemars::Schema, tag: &str) -> BTreeSet<String> {
    let value = serde_json::to_value(schema).unwrap();
    let all = value["oneOf"].as_array().expect("an enum");
    all.iter().map(|one| one["properties"][tag]["const"].as_str().expect("a tag").to_owned()).collect()
}

fn told(file: &str, at: &str) -> BTreeSet<String> {
    let tag =
        |line: String| serde_json::from_str::<Value>(&line).unwrap().pointer(at).unwrap().as_str().unwrap().into();
    lines(&folder(file)).into_iter().map(tag).collect()
}

/// Steps and events are kept for ever in Postgres: whoever adds one adds its line here.
#[test]
fn every_step_and_every_event_has_a_line() {
    assert_eq!(told("nats/step_request.jsonl", "/body/step/kind"), variants(schemars::schema_for!(Step), "kind"));
    assert_eq!(told("http/event.jsonl", "/body/type"), variants(schemars::schema_for!(EventBody), "type"));
}
