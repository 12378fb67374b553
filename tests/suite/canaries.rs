//! Test that no secret leaves the places that need it. Each secret is a canary, a text that occurs nowhere else, and is
//! searched for in everything that cfq writes, stores, sends to a model and shows to other programs of the machine.

use std::collections::BTreeMap;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use cfq_link::child::ProcessIdentity;
use cfq_proto::client::Client;
use cfq_proto::http::TaskDetail;
use cfq_proto::ids::TaskKey;
use cfq_proto::task::TaskState;
use cfq_tests::cfq_up::{Home, Up};
use cfq_tests::cluster::WAIT_LIMIT;
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};
use cfq_tests::{binary, postgres, signal, wait};

/// A secret.
struct Canary {
    name: &'static str,
    value: String,
    /// The processes in whose environment the secret may be.
    may_have: &'static [&'static str],
}

/// Secrets in the environment of `cfq up`: variable, value, and the processes that may have it.
const ENVIRONMENT: [(&str, &str, &[&str]); 4] = [
    ("CFQ_TEST_ENDPOINT_KEY", "canary-endpoint-environment", &["up", "node"]),
    ("CFQ_TEST_HUB_TOKEN", "canary-hub-token", &["up", "node"]),
    ("CFQ_TOKEN", "canary-token-of-another-server", &["up"]),
    ("CFQ_TEST_SECRET", "canary-unrelated", &["up"]),
];
/// Secrets in files of the data folder, which cfq keeps if they exist.
const KEY_FILES: [(&str, &str); 3] = [
    ("api.token", "canary-api-token"),
    ("postgres.password", "canary-postgres-password"),
    ("postgres-admin.password", "canary-postgres-admin-password"),
];
const ENDPOINT_KEY_IN_FILE: &str = "canary-endpoint-file";

/// Configures the secrets: an endpoint with a key in the environment for Alpha, one with a key in a file for Beta, and
/// a token for the hub.
fn configure(home: &Home) {
    let key_file = home.path("endpoint.key");
    std::fs::write(&key_file, ENDPOINT_KEY_IN_FILE).unwrap();
    std::fs::set_permissions(&key_file, std::fs::Permissions::from_mode(0o600)).unwrap();
    let config = home.path("cfq.toml");
    let text = std::fs::read_to_string(&config).unwrap();
    let text = text.replace("openai:s/beta", "openai:f/beta");
    let text = text.replace("[timing]", "key = \"env:CFQ_TEST_ENDPOINT_KEY\"\n[timing]");
    let rest = format!(
        "\n[endpoints.f]\nurl = \"{}\"\nkey = \"file:{}\"\n[hub]\ntoken = \"env:CFQ_TEST_HUB_TOKEN\"\n",
        home.models.url(),
        key_file.display()
    );
    std::fs::write(&config, text + &rest).unwrap();
    let keys = home.path("data/keys");
    std::fs::DirBuilder::new().mode(0o700).recursive(true).create(&keys).unwrap();
    for (name, value) in KEY_FILES {
        std::fs::write(keys.join(name), value).unwrap();
        std::fs::set_permissions(keys.join(name), std::fs::Permissions::from_mode(0o600)).unwrap();
    }
}

/// All secrets, including the NATS seeds, which cfq has generated.
fn canaries(data: &Path) -> Vec<Canary> {
    let mut canaries: Vec<Canary> = ENVIRONMENT
        .iter()
        .map(|(name, value, may_have)| Canary { name, value: (*value).to_owned(), may_have })
        .chain(KEY_FILES.map(|(name, value)| Canary { name, value: value.to_owned(), may_have: &[] }))
        .collect();
    canaries.push(Canary { name: "endpoint.key", value: ENDPOINT_KEY_IN_FILE.to_owned(), may_have: &[] });
    for entry in std::fs::read_dir(data.join("keys")).unwrap().flatten() {
        if entry.path().extension().is_some_and(|extension| extension == "seed") {
            let value = std::fs::read_to_string(entry.path()).unwrap().trim().to_owned();
            canaries.push(Canary { name: "NATS seed", value, may_have: &[] });
        }
    }
    assert_eq!(canaries.len(), ENVIRONMENT.len() + KEY_FILES.len() + 1 + 3, "three seeds");
    canaries
}

/// Asserts that no canary occurs in `content`, except those in `permitted`.
#[track_caller]
fn assert_none(canaries: &[Canary], place: &str, content: &[u8], process: Option<&str>) {
    for canary in canaries {
        let found = content.windows(canary.value.len()).any(|window| window == canary.value.as_bytes());
        let permitted = process.is_some_and(|process| canary.may_have.contains(&process));
        assert!(permitted || !found, "{} is in {place}", canary.name);
    }
}

/// All regular files below `folder`, except those in `excluded`.
fn files(folder: &Path, excluded: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        let (path, kind) = (entry.path(), entry.file_type().unwrap());
        if kind.is_dir() && path != excluded {
            files.extend(self::files(&path, excluded));
        } else if kind.is_file() {
            files.push(path);
        }
    }
    files
}

/// All processes of this `cfq up`, by id. The name is that of the pidfile, or that of the parent process.
fn processes(up: u32, data: &Path) -> BTreeMap<u32, String> {
    let mut named = BTreeMap::from([(up, "up".to_owned())]);
    for part in ["scheduler", "node", "runner", "postgres", "nats"] {
        let record = std::fs::read(data.join("run").join(format!("{part}.pid"))).unwrap();
        let identity: ProcessIdentity = serde_json::from_slice(&record).unwrap();
        named.insert(identity.pid, part.to_owned());
    }
    let mut parents: Vec<u32> = named.keys().copied().collect();
    while let Some(parent) = parents.pop() {
        for child in signal::children_of(parent) {
            if !named.contains_key(&child.pid) {
                named.insert(child.pid, named[&parent].clone());
                parents.push(child.pid);
            }
        }
    }
    named
}

async fn run_task(client: &Client, repo: &UserRepo) -> TaskDetail {
    let spec = serde_json::from_value(serde_json::json!({
        "description": "Write add(a, b) in add.py", "language": "python", "repo": repo.path(),
        "base": repo.fingerprint().commit,
    }))
    .unwrap();
    let task = TaskKey::Id(client.submit(&spec, None).await.unwrap().id);
    wait::until("the task to end", WAIT_LIMIT, || async {
        let detail = client.task(task).await.map_err(|e| e.to_string())?;
        if detail.summary.state.is_settled() { Ok(detail) } else { Err(format!("{:?}", detail.summary)) }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn secrets_are_only_where_they_are_needed() {
    let home = Home::new().await;
    configure(&home);
    let data = home.path("data");
    let add = |n: u32| Reply::Text(file("add.py", &format!("# try {n}\ndef add(a, b):\n    return a + b")));
    home.models.script("alpha", vec![add(1), add(2)]);
    home.models.script("beta", vec![Reply::Text(review(60, &[])), Reply::Text(review(95, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();

    let mut through = Command::new("env");
    through.args(ENVIRONMENT.map(|(name, value, _)| format!("{name}={value}")));
    through.env_remove("HF_TOKEN").env("CFQ_LOG", "debug").arg(tokio::task::block_in_place(binary::cfq));
    let up = Up::start(&home, Some(through), &data, data.clone());
    let client = up.client().await;
    let detail = run_task(&client, &repo).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}\n{}", detail.reason, up.diagnostics());
    // A server that repeats the key in its error message, which cfq stores and logs.
    home.models.script("alpha", vec![Reply::Status(400, format!("wrong key {}", ENVIRONMENT[0].1))]);
    let detail = run_task(&client, &repo).await;
    assert_eq!(detail.summary.state, TaskState::Escalated, "{}", detail.reason);
    assert!(detail.reason.contains("wrong key"), "{}", detail.reason);

    // The secrets are in use: the endpoints received the keys, and the client has sent the API token.
    for (model, key) in home.models.authorizations() {
        let expected = if model == "alpha" { ENVIRONMENT[0].1 } else { ENDPOINT_KEY_IN_FILE };
        assert_eq!(key, format!("Bearer {expected}"), "{model}");
    }

    let canaries = canaries(&data);
    for (pid, part) in processes(up.pid(), &data) {
        for (file, process) in [("cmdline", None), ("environ", Some(part.as_str()))] {
            // A backend of Postgres may have ended meanwhile.
            let content = std::fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
            assert_none(&canaries, &format!("{file} of {part}, process {pid}"), &content, process);
        }
    }
    assert_none(&canaries, "requests to the models", format!("{:?}", home.models.requests()).as_bytes(), None);
    let paths = cfq_deploy::Paths { data: data.clone(), ..postgres::user_paths() };
    assert_none(&canaries, "the database", postgres::dump(&paths).await.as_bytes(), None);
    for settled in client.tasks(None, 10).await.unwrap().tasks {
        let events = client.events(TaskKey::Id(settled.id), 0).await.unwrap();
        assert_none(&canaries, "events", serde_json::to_string(&events).unwrap().as_bytes(), None);
    }

    // Files last, when Postgres and NATS have written everything: logs, database files, NATS store, repositories.
    assert!(up.stop().await.success());
    let mut searched = files(&data, &data.join("keys"));
    for part in ["log/scheduler.log", "log/node.log", "log/runner.log", "postgres/PG_VERSION", "nats/nats.conf"] {
        assert!(searched.contains(&data.join(part)), "{part} in {searched:?}");
    }
    searched.push(home.path("up.log"));
    searched.extend(files(&repo.path(), Path::new("")));
    for path in searched {
        assert_none(&canaries, &path.display().to_string(), &std::fs::read(&path).unwrap(), None);
    }
}
