//! The producer: submits small tasks with idempotency keys, from outside cfq. It notes an obligation only after the
//! server acknowledged the task.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cfq_proto::client::{Client, ClientError};
use cfq_proto::task::TaskSpec;
use tokio::task::JoinSet;

use super::plan::Random;

/// Pause between two submissions.
const SUBMIT_INTERVAL: Duration = Duration::from_millis(150);
/// Pause before a submission that was not acknowledged is repeated.
const RETRY_INTERVAL: Duration = Duration::from_millis(150);
/// Maximum number of submissions that are not acknowledged yet.
const MAX_SUBMISSIONS: usize = 8;
/// Number of tasks not at rest above which nothing is submitted, so that the backlog stays small.
const MAX_BACKLOG: usize = 30;
/// One of this many acknowledged submissions is repeated.
const REPEATED_SHARE: u64 = 6;

/// What the producer knows.
#[derive(Default)]
pub struct Ledger {
    /// The number of each submitted task, by idempotency key.
    pub submitted: Mutex<BTreeMap<String, u64>>,
    /// The id of each acknowledged task, by idempotency key.
    pub acknowledged: Mutex<BTreeMap<String, String>>,
    pub violations: Mutex<Vec<String>>,
    /// Submissions that failed and were repeated.
    pub failed_submits: AtomicU64,
    /// Tasks not at rest, as last seen by the watch.
    pub backlog: AtomicUsize,
    pub stop: AtomicBool,
}

/// Name of the function and file that task `number` asks for.
pub fn function(number: u64) -> String {
    format!("chaos_{number}")
}

/// Content of the file that task `number` asks for.
pub fn content(number: u64) -> String {
    format!("def {}():\n    return {number}", function(number))
}

/// Number of the task in a text that contains the name of its function.
pub fn number_in(text: &str) -> Option<u64> {
    let (_, rest) = text.split_once("chaos_")?;
    let end = rest.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(rest.len());
    rest[..end].parse().ok()
}

/// Submits tasks until `Ledger::stop` is set and every submission is acknowledged.
pub async fn produce(client: Client, template: TaskSpec, seed: u64, ledger: Arc<Ledger>) {
    let mut random = Random(!seed);
    let mut submissions = JoinSet::new();
    let mut number = 0;
    while !ledger.stop.load(Ordering::SeqCst) {
        tokio::time::sleep(SUBMIT_INTERVAL).await;
        while submissions.try_join_next().is_some() {}
        if submissions.len() >= MAX_SUBMISSIONS || ledger.backlog.load(Ordering::SeqCst) > MAX_BACKLOG {
            continue;
        }
        number += 1;
        let name = function(number);
        let description = format!("Write a Python function {name}() in {name}.py that returns {number}.");
        let spec = TaskSpec { description, ..template.clone() };
        let repeat = random.below(REPEATED_SHARE) == 0;
        submissions.spawn(submit(client.clone(), spec, number, seed, repeat, ledger.clone()));
    }
    while submissions.join_next().await.is_some() {}
}

async fn submit(client: Client, spec: TaskSpec, number: u64, seed: u64, repeat: bool, ledger: Arc<Ledger>) {
    let key = format!("chaos-{seed}-{number}");
    ledger.submitted.lock().unwrap().insert(key.clone(), number);
    let Some(id) = submit_until_acknowledged(&client, &spec, &key, &ledger).await else { return };
    ledger.acknowledged.lock().unwrap().insert(key.clone(), id.clone());
    if repeat
        && let Some(again) = submit_until_acknowledged(&client, &spec, &key, &ledger).await
        && again != id
    {
        ledger.violations.lock().unwrap().push(format!("key {key} was acknowledged as task {id} and as {again}"));
    }
}

/// Returns the id of the task; `None` if the server refuses the task for a reason that no retry removes.
async fn submit_until_acknowledged(client: &Client, spec: &TaskSpec, key: &str, ledger: &Ledger) -> Option<String> {
    loop {
        match client.submit(spec, Some(key)).await {
            Ok(reply) => return Some(reply.id.to_string()),
            Err(ClientError::Refused { status, body }) if status < 500 && status != 429 => {
                ledger.violations.lock().unwrap().push(format!("{key} was refused with {status}: {body:?}"));
                return None;
            }
            Err(_) => {
                ledger.failed_submits.fetch_add(1, Ordering::SeqCst);
                tokio::time::sleep(RETRY_INTERVAL).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_is_read_from_a_text() {
        assert_eq!(number_in("a function chaos_17() in chaos_17.py"), Some(17));
        assert_eq!(number_in("add.py"), None);
        assert_eq!(number_in(&content(3)), Some(3));
    }
}
