//! Models behind Ollama, in its own protocol: no prompt is truncated without an error, missing models are pulled.

use cfq_proto::model::ModelId;
use cfq_proto::node::Residency;
use cfq_proto::task::TaskState;
use cfq_tests::cluster::{Cluster, Options, WAIT_LIMIT, cfq};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};
use cfq_tests::wait;
use serde_json::json;

const ADD: &str = "def add(a, b):\n    return a + b\n";

fn options(context_tokens: Option<u32>) -> Options {
    let models = ["alpha", "beta"].map(|name| format!("ollama:scripted/{name}"));
    Options {
        models: models.iter().map(|model| model.parse().unwrap()).collect(),
        alpha: models[0].clone(),
        beta: models[1].clone(),
        context_tokens,
        ..Options::default()
    }
}

/// The state of the model in the list of nodes.
async fn residency(cluster: &Cluster, model: &str) -> Option<Residency> {
    let model: ModelId = model.parse().unwrap();
    let nodes = cluster.client.nodes().await.unwrap();
    let models = nodes.into_iter().flat_map(|node| node.ledger.models);
    models.into_iter().find(|state| state.model == model).map(|state| state.residency)
}

#[tokio::test(flavor = "multi_thread")]
async fn prompt_that_does_not_fit_is_rebuilt_and_never_truncated_by_the_server() {
    const CONTEXT_TOKENS: u32 = 4096;
    let cluster = Cluster::start_with(options(Some(CONTEXT_TOKENS))).await;
    cluster.models.script("alpha", vec![Reply::Text(file("add.py", ADD))]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let long: String = (0..2000).map(|n| format!("line {n} of a long file\n")).collect();
    repo.commit(&[("notes.txt", &long)]);
    let mut spec = cluster.spec(&repo);
    spec.context_files = vec!["notes.txt".to_owned()];
    let task = cluster.submit(&spec).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    let requests = cluster.models.requests();
    assert!(requests.len() >= 2, "{requests:?}");
    for request in requests {
        assert_eq!(request["options"]["num_ctx"], CONTEXT_TOKENS);
        assert_eq!((&request["truncate"], &request["shift"]), (&json!(false), &json!(false)));
        // A prompt that the server had truncated would lack its first message.
        assert_eq!(request["messages"][0]["role"], "system", "{request}");
    }
    let prompt = &cluster.models.prompts("alpha")[0];
    assert!(prompt.contains("line 1 of a long file") && prompt.contains("more bytes omitted"), "{prompt}");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn model_that_the_server_lacks_is_named_with_the_command_that_fetches_it() {
    let cluster = Cluster::start_with(Options { alpha: "openai:scripted/alpha".into(), ..options(None) }).await;
    cluster.models.script("alpha", vec![Reply::Text(file("add.py", ADD))]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    const MODEL: &str = "ollama:scripted/beta";
    wait::until("the model is usable", WAIT_LIMIT, || async {
        match residency(&cluster, MODEL).await {
            Some(Residency::Resident) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    // The model is removed from the server; the next call finds this.
    cluster.models.remove_until_pulled("beta");
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let reason = wait::until("the model is unusable", WAIT_LIMIT, || async {
        match residency(&cluster, MODEL).await {
            Some(Residency::Unusable { reason }) => Ok(reason),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    assert!(
        reason.contains("does not have beta") && reason.contains("cfq models pull ollama:scripted/beta"),
        "{reason}"
    );
    let home = tempfile::tempdir().unwrap();
    let url = cluster.models.ollama_url();
    std::fs::create_dir_all(home.path().join("config")).unwrap();
    std::fs::write(home.path().join("config/cfq.toml"), format!("[endpoints.scripted]\nurl = \"{url}\"\n")).unwrap();
    let unknown = cfq(&cluster, home.path(), &["models", "pull", "ollama:scripted/nothing"]);
    let text = String::from_utf8_lossy(&unknown.stderr).into_owned();
    assert!(
        unknown.status.code() == Some(2) && text.contains("could not fetch nothing: pull model manifest"),
        "{text}"
    );
    let pulled = cfq(&cluster, home.path(), &["models", "pull", MODEL]);
    let text = String::from_utf8_lossy(&pulled.stdout).into_owned();
    assert!(pulled.status.success() && text.contains("ollama:scripted/beta is on http://"), "{pulled:?}");
    // The node finds the model at its next check, and the task continues.
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn old_version_that_always_truncates_prompts_is_not_used() {
    let cluster = Cluster::start_with(options(None)).await;
    cluster.models.set_ollama_version("0.11.4");
    cluster.models.set_down(true);
    wait::until("the server is down", WAIT_LIMIT, || async {
        match residency(&cluster, "ollama:scripted/alpha").await {
            Some(Residency::Unusable { .. }) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    cluster.models.set_down(false);
    wait::until("the version is refused", WAIT_LIMIT, || async {
        match residency(&cluster, "ollama:scripted/alpha").await {
            Some(Residency::Unusable { reason }) if reason.contains("is Ollama 0.11.4, which silently truncates") => {
                Ok(())
            }
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    cluster.finish().await;
}
