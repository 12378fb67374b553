//! The models of the agents are changed while cfq runs: waiting calls move, running ones finish.

use cfq_proto::client::ClientError;
use cfq_proto::http::{AgentPatch, AgentPatchReply};
use cfq_proto::ids::TaskKey;
use cfq_proto::job::JobState;
use cfq_proto::model::ModelId;
use cfq_proto::node::Residency;
use cfq_proto::task::{Agent, TaskState};
use cfq_proto::timing::Timing;
use cfq_tests::cluster::{Cluster, Options, WAIT_LIMIT, cfq};
use cfq_tests::mcp_client::{McpClient, STATELESS};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Gate, Reply, file, review};
use cfq_tests::wait;
use serde_json::json;

const ADD: &str = "def add(a, b):\n    return a + b\n";
/// A model that no node has.
const ABSENT: &str = "hf:org/absent:m.gguf";

fn id(model: &str) -> ModelId {
    model.parse().unwrap()
}

async fn set_model(cluster: &Cluster, agent: Agent, model: Option<ModelId>) -> Result<AgentPatchReply, ClientError> {
    let patch = AgentPatch { model: Some(model), ..AgentPatch::default() };
    cluster.client.change_agent(agent, &patch).await
}

async fn refusal(cluster: &Cluster, agent: Agent, model: &str) -> String {
    match set_model(cluster, agent, Some(id(model))).await {
        Err(ClientError::Refused { body, .. }) => body.message,
        other => panic!("{other:?}"),
    }
}

async fn merged(cluster: &Cluster, task: TaskKey) -> Vec<String> {
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    detail.iterations.iter().map(|iteration| iteration.model.clone()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_call_moves_to_the_new_model_at_once() {
    let mut options = Options { alpha: ABSENT.into(), ..Options::default() };
    // A call to a model that no node has fails after this time.
    options.timing.retry_ceiling_ms = Timing::default().retry_ceiling_ms;
    let cluster = Cluster::start_with(options).await;
    cluster.models.script("alpha2", vec![Reply::Text(file("add.py", ADD)), Reply::Text(file("add.py", ADD))]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[])), Reply::Text(review(95, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let mut fixed = cluster.spec(&repo);
    fixed.agents.alpha.model = Some(id(ABSENT));
    let fixed = cluster.submit(&fixed).await;
    wait::until("both calls wait", WAIT_LIMIT, || async {
        let waiting = cluster.client.status().await.unwrap().jobs_in(JobState::Queued);
        if waiting == 2 { Ok(()) } else { Err(format!("{waiting} calls")) }
    })
    .await;
    let reply = set_model(&cluster, Agent::Alpha, Some(id("openai:scripted/alpha2"))).await.unwrap();
    assert_eq!((reply.moved_calls, reply.running_calls, reply.previous_model), (1, 0, Some(id(ABSENT))));
    assert_eq!(merged(&cluster, task).await, ["openai:scripted/alpha2"]);
    // A task that names its model keeps it.
    let detail = cluster.client.task(fixed).await.unwrap();
    assert_eq!((detail.summary.state.is_terminal(), detail.spec.agents.alpha.model), (false, Some(id(ABSENT))));
    // New tasks use it too, also after a restart of the scheduler.
    cluster.kill9("scheduler");
    cluster.start_service("scheduler");
    let next = TaskKey::Id(cluster.submit_with_retries(&cluster.spec(&repo), "next").await.id);
    assert_eq!(merged(&cluster, next).await, ["openai:scripted/alpha2"]);
    let cancelled = cluster.client.cancel(fixed, "").await;
    assert!(cancelled.is_ok(), "{cancelled:?}; {}", cluster.client.task(fixed).await.unwrap().reason);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn running_call_finishes_and_the_next_one_uses_the_new_model() {
    let cluster = Cluster::start_with(Options::default()).await;
    let gate = Gate::closed();
    let text = file("add.py", ADD);
    let (first, rest) = text.split_at(20);
    cluster.models.script("alpha", vec![Reply::Gated(first.to_owned(), rest.to_owned(), gate.clone())]);
    cluster.models.script("late", vec![Reply::Text(review(95, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    wait::until("Alpha's call runs", WAIT_LIMIT, || async {
        let running = cluster.client.status().await.unwrap().jobs_in(JobState::Running);
        if running == 1 { Ok(()) } else { Err(format!("{running} calls")) }
    })
    .await;
    // No node has this model in its configuration, but one has its server.
    let reply = set_model(&cluster, Agent::Beta, Some(id("openai:scripted/late"))).await.unwrap();
    assert_eq!((reply.moved_calls, reply.running_calls), (0, 0));
    let reply = set_model(&cluster, Agent::Alpha, Some(id("openai:scripted/alpha2"))).await.unwrap();
    assert_eq!((reply.moved_calls, reply.running_calls), (0, 1));
    gate.open();
    assert_eq!(merged(&cluster, task).await, ["openai:scripted/alpha"]);
    assert_eq!(cluster.models.prompts("late").len(), 1, "Beta's model was changed before its call");
    assert!(cluster.models.prompts("beta").is_empty() && cluster.models.prompts("alpha2").is_empty());
    // A node that starts again gets the model, which its configuration lacks.
    let boot = cluster.client.nodes().await.unwrap()[0].boot;
    cluster.kill9("node");
    cluster.start_service("node");
    wait::until("the node serves the model again", WAIT_LIMIT, || async {
        let nodes = cluster.client.nodes().await.unwrap();
        let mut models = nodes.iter().filter(|node| node.boot != boot).flat_map(|node| &node.ledger.models);
        match models.any(|state| state.model == id("openai:scripted/late") && state.residency == Residency::Resident) {
            true => Ok(()),
            false => Err(format!("{nodes:?}")),
        }
    })
    .await;
    let reset = set_model(&cluster, Agent::Beta, None).await.unwrap();
    assert_eq!(reset.agent.model, Some(id("openai:scripted/beta")));
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn model_that_no_node_can_use_changes_nothing() {
    let cluster = Cluster::start_with(Options::default()).await;
    let before = cluster.client.agents().await.unwrap();
    for (model, words) in [
        ("openai:typo/m", "endpoint typo is not configured"),
        ("command:typo", "command typo is not configured"),
        (ABSENT, "is not on this node's machine"),
    ] {
        let message = refusal(&cluster, Agent::Alpha, model).await;
        assert!(message.contains(words), "{message}");
    }
    cluster.models.set_down(true);
    let message = refusal(&cluster, Agent::Alpha, "openai:scripted/late").await;
    assert!(message.contains("nothing was changed") && message.contains("scripted"), "{message}");
    assert_eq!(cluster.client.agents().await.unwrap(), before);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn editor_and_command_line_change_the_model() {
    let cluster = Cluster::start().await;
    let (repo, home) = (UserRepo::with_uncommitted_changes(), tempfile::tempdir().unwrap());
    let mut mcp = McpClient::start(&cluster, &repo.path(), STATELESS).await;
    let arguments = json!({ "agent": "beta", "provider": { "model": "openai:scripted/alpha2" } });
    let reply = mcp.call("configure_endpoint", arguments).await;
    assert_eq!(
        (&reply["model"], &reply["previous_model"]),
        (&json!("openai:scripted/alpha2"), &json!("openai:scripted/beta"))
    );
    let wrong = json!({ "agent": "beta", "provider": { "model": "openai:typo/m" } });
    let error = mcp.call_error("configure_endpoint", wrong).await;
    assert!(error.contains("endpoint typo is not configured"), "{error}");
    let run = |args: &[&str]| {
        let output = cfq(&cluster, home.path(), args);
        let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        (output.status.code(), format!("{text}{errors}"))
    };
    let (code, text) = run(&["agents", "ls"]);
    assert!(
        code == Some(0) && text.contains("beta   openai:scripted/alpha2\n       (cfq.toml: openai:scripted/beta;"),
        "{text}"
    );
    let (code, text) = run(&["agents", "set", "beta", "openai:scripted/alpha"]);
    assert!(code == Some(0) && text.contains("beta uses openai:scripted/alpha from now on, on n1"), "{text}");
    let (code, text) = run(&["agents", "instruct", "beta", " "]);
    assert!(code == Some(2) && text.contains("--clear"), "{text}");
    let (code, text) = run(&["agents", "set", "gamma", "openai:scripted/alpha"]);
    assert!(code == Some(2) && text.contains("alpha or beta"), "{text}");
    let (code, text) = run(&["agents", "reset", "beta"]);
    assert!(code == Some(0) && text.contains("beta uses openai:scripted/beta"), "{text}");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn instructions_reach_the_next_call_of_their_agent() {
    const RULE: &str = "Write type hints.";
    let cluster = Cluster::start().await;
    let gate = Gate::closed();
    let text = file("add.py", ADD);
    let (first, rest) = text.split_at(20);
    let gated = || Reply::Gated(first.to_owned(), rest.to_owned(), gate.clone());
    cluster.models.script("alpha", vec![gated(), Reply::Text(file("add.py", &format!("{ADD}\n")))]);
    cluster.models.script("beta", vec![Reply::Text(review(50, &[])), Reply::Text(review(95, &[]))]);
    let (repo, home) = (UserRepo::with_uncommitted_changes(), tempfile::tempdir().unwrap());
    let mut spec = cluster.spec(&repo);
    spec.agents.beta.instructions = Some("Look at the names.".to_owned());
    let task = cluster.submit(&spec).await;
    cluster.wait_until_generating(task).await;
    let mut mcp = McpClient::start(&cluster, &repo.path(), STATELESS).await;
    for agent in ["alpha", "beta"] {
        let arguments = json!({ "agent": agent, "prompts": { "instructions": RULE } });
        assert_eq!(mcp.call("set_system_prompts", arguments).await["instructions"], json!(RULE));
    }
    let long = json!({ "agent": "beta", "prompts": { "instructions": "x".repeat(10_000) } });
    let error = mcp.call_error("set_system_prompts", long).await;
    assert!(error.contains("at most 8192 bytes"), "{error}");
    gate.open();
    merged(&cluster, task).await;
    let (alpha, beta) = (cluster.models.prompts("alpha"), cluster.models.prompts("beta"));
    assert_eq!([alpha[0].contains(RULE), alpha[1].contains(RULE)], [false, true]);
    // The instructions of a task replace those of all tasks.
    assert!(beta.iter().all(|prompt| prompt.contains("Look at the names.") && !prompt.contains(RULE)), "{beta:?}");
    let listed = cfq(&cluster, home.path(), &["agents", "ls"]);
    assert!(String::from_utf8_lossy(&listed.stdout).contains(RULE), "{listed:?}");
    let cleared = cfq(&cluster, home.path(), &["agents", "instruct", "alpha", "--clear"]);
    assert!(cleared.status.success(), "{cleared:?}");
    let agents = cluster.client.agents().await.unwrap().agents;
    assert_eq!(agents.iter().map(|agent| agent.instructions.is_some()).collect::<Vec<_>>(), [false, true]);
    cluster.finish().await;
}
