//! The oracle checks invariants of a task that has finished or waits for a human. It reads sources outside cfq: the
//! model server's record of calls, the user's git repository, and the rows in Postgres, read over a separate
//! connection. cfq's API and event feed are compared with these sources and never trusted alone. The oracle fails if
//! there is nothing to compare: it never passes on an empty list.

use std::collections::BTreeMap;

use cfq_proto::http::TaskDetail;
use cfq_proto::ids::TaskKey;
use cfq_proto::review::ReviewFeedback;
use cfq_proto::task::TaskState;
use serde_json::Value;

use crate::cluster::Cluster;
use crate::repo::UserRepo;
use crate::scripted::{Call, End, Reply, file, review};
use crate::task_rows::{JobRow, TaskRows};

impl Cluster {
    /// Asserts that model calls, database rows, commits and events of a task agree, and that each effect happened once.
    /// The task must have finished or wait for a human.
    pub async fn run_oracle(&self, task: TaskKey, repo: &UserRepo) -> TaskDetail {
        self.wait_until_nodes_idle().await;
        let detail = self.client.task(task).await.unwrap();
        let mut connection = self.database.connect().await;
        let rows = TaskRows::of(&mut connection, &detail.summary.id.to_string()).await;
        assert_eq!(rows.state, detail.summary.state.as_str(), "the state in the API is the state in Postgres");
        let calls = self.models.all_calls();
        every_call_belongs_to_an_attempt(&JobRow::all(&mut connection).await, &calls);
        jobs_were_done_once(&rows, &calls);
        steps_have_no_gap(&rows);
        git_matches_the_recorded_steps(&rows, repo, &calls);
        self.feed_matches_postgres(task, &rows).await;
        detail
    }

    /// Asserts, after a fault, that a new task reaches `merged` and passes the oracle.
    pub async fn assert_fresh_task_succeeds(&self) {
        self.models.script("alpha", vec![Reply::Text(file("add.py", "def add(a, b):\n    return a + b"))]);
        self.models.script("beta", vec![Reply::Text(review(95, &[]))]);
        let repo = UserRepo::with_uncommitted_changes();
        let task = TaskKey::Id(self.submit_with_retries(&self.spec(&repo), "fresh").await.id);
        let detail = self.wait_until_settled(task).await;
        assert_eq!(detail.summary.state, TaskState::Merged, "a new task after the fault: {}", detail.reason);
        self.run_oracle(task, &repo).await;
    }

    pub(crate) async fn feed_matches_postgres(&self, task: TaskKey, rows: &TaskRows) {
        let events = self.client.events(task, 0).await.unwrap().events;
        let fed: Vec<(i64, Value)> =
            events.iter().map(|e| (e.task_seq, serde_json::to_value(&e.body).unwrap())).collect();
        assert!(!fed.is_empty(), "a task without an event");
        assert_eq!(fed.iter().map(|t| t.0).collect::<Vec<_>>(), (1..=fed.len() as i64).collect::<Vec<_>>());
        let stored: Vec<(i64, Value)> = rows.events.iter().map(|e| (e.seq, e.body.clone())).collect();
        assert_eq!(fed, stored, "the feed has every stored event, once, in order");
    }
}

/// Asserts that the task's final state matches its last iteration: merged if the review meets the threshold and has no
/// critical defect, else escalated. For tests in which a real model is the critic.
#[track_caller]
pub fn assert_state_follows_review(detail: &TaskDetail) {
    let Some(last) = detail.iterations.last() else {
        panic!("{} without an iteration: {}; {:#?}", detail.summary.state, detail.reason, detail.jobs)
    };
    let passes = |review: &ReviewFeedback| review.quality_score >= detail.summary.threshold && !review.has_critical();
    let expected = match last.quarantine.is_none() && last.review.as_ref().is_some_and(passes) {
        true => TaskState::Merged,
        false => TaskState::Escalated,
    };
    let (quarantine, review) = (last.quarantine, &last.review);
    assert_eq!(detail.summary.state, expected, "{}; {quarantine:?}, {review:?}", detail.reason);
}

/// Asserts that, over all tasks of the cluster, each prompt was sent to a model at most as often as attempts with this
/// prompt were accepted.
pub(crate) fn every_call_belongs_to_an_attempt(jobs: &[JobRow], calls: &[Call]) {
    let mut allowed: BTreeMap<(&str, String), usize> = BTreeMap::new();
    for job in jobs {
        let accepted = job.attempts.iter().filter(|a| a.accepted).count();
        *allowed.entry((job.model_name(), job.messages.to_string())).or_default() += accepted;
    }
    let mut seen: BTreeMap<(&str, String), usize> = BTreeMap::new();
    for call in calls {
        *seen.entry((&call.model, call.messages.to_string())).or_default() += 1;
    }
    for (call, seen) in seen {
        let allowed = allowed.get(&call).copied().unwrap_or(0);
        assert!(seen <= allowed, "{} was called {seen} times by {allowed} attempts: {}", call.0, call.1);
    }
}

/// Asserts that the attempts of each job are numbered without a gap and have ended, and that each completed job has one
/// result, one event, and a completed model call with its text.
pub(crate) fn jobs_were_done_once(rows: &TaskRows, calls: &[Call]) {
    assert!(!rows.jobs.is_empty(), "a settled task that called no model");
    for job in &rows.jobs {
        let outcomes: Vec<Option<&str>> = job.attempts.iter().map(|a| a.outcome.as_deref()).collect();
        let count = |outcome: &str| outcomes.iter().filter(|o| **o == Some(outcome)).count();
        let numbers: Vec<i32> = job.attempts.iter().map(|a| a.attempt).collect();
        assert_eq!(numbers, (1..=job.attempt).collect::<Vec<_>>(), "attempts of {job:?}");
        assert!(!outcomes.contains(&None), "an attempt is still open although the task is settled: {job:?}");
        assert_eq!((count("lost"), count("failed")), (job.losses as usize, job.failures as usize), "{job:?}");
        let done = usize::from(job.state == "done");
        assert_eq!(count("done"), done, "each result belongs to one attempt: {job:?}");
        let events = rows.events.iter().filter(|e| e.is_job(&job.id, "done")).count();
        assert_eq!(events, done, "one event for a result: {job:?}");
        let text = job.completion.as_ref().map(|c| c["inline"]["text"].as_str().expect("tests keep results small"));
        assert_eq!(text.is_some(), done == 1, "{job:?}");
        let is_own = |c: &&Call| c.model == job.model_name() && c.messages == job.messages;
        if let Some(text) = text.filter(|_| job.is_scripted()) {
            let sent: Vec<&Call> = calls.iter().filter(is_own).filter(|c| c.end == Some(End::Answered)).collect();
            assert!(sent.iter().any(|c| c.sent == text), "no call sent {text:?}; the calls sent {sent:?}");
        }
    }
}

/// Asserts that steps are numbered without a gap and match the rows of iterations, reviews and pull requests.
pub(crate) fn steps_have_no_gap(rows: &TaskRows) {
    assert!(!rows.steps.is_empty(), "a settled task without a step");
    let seqs: Vec<i32> = rows.steps.iter().map(|s| s.seq).collect();
    assert_eq!(seqs, (0..rows.steps.len() as i32).collect::<Vec<_>>(), "steps");
    let count = |kind: &str| rows.steps.iter().filter(|s| s.kind == kind).count();
    assert_eq!(count("generated"), rows.iterations.len(), "one iteration per generated step");
    assert_eq!(count("reviewed"), rows.reviews as usize, "one review per reviewed step");
    assert_eq!(count("pr_opened"), rows.prs.len(), "one pull request per step that opened one");
    assert!(rows.prs.len() <= 1, "one pull request at most: {:?}", rows.prs);
    assert!(count("merged") <= 1 && count("delivered") <= 1, "{:?}", rows.steps);
    let terminal = ["merged", "accepted", "reviewed", "failed", "cancelled"];
    let ended = rows.events.iter().filter(|e| terminal.iter().any(|state| e.is_task(state))).count();
    let expected = usize::from(terminal.contains(&rows.state.as_str()));
    assert_eq!(ended, expected, "one terminal event in a terminal state, else none");
    if rows.state == "merged" {
        assert_eq!((count("merged"), count("delivered"), count("handed_off")), (1, 1, 1), "{:?}", rows.steps);
        assert_eq!(rows.prs[0].0, "merged");
        assert!(rows.prs[0].1.is_some(), "a merge commit");
    }
}

/// Asserts that the user's repository has the delivered branch and no other branch of this task, that the branch has
/// one commit per iteration that is not quarantined, and that its files are texts that a model sent.
pub(crate) fn git_matches_the_recorded_steps(rows: &TaskRows, repo: &UserRepo, calls: &[Call]) {
    let prefix = format!("cfq/t{}-", rows.number);
    let branches: Vec<String> = repo.branches().into_iter().filter(|b| b.starts_with(&prefix)).collect();
    let expected: Vec<String> = rows.delivered.iter().map(|(branch, _)| branch.clone()).collect();
    assert_eq!(branches, expected, "the delivered branch and no other");
    assert!(rows.state != "merged" || !branches.is_empty(), "merged without a branch");
    let Some((branch, tip)) = &rows.delivered else { return };
    let commits = repo.history(branch, &rows.base);
    assert_eq!(commits.last(), Some(tip), "the branch ends at the recorded commit");
    let recorded: Vec<String> = rows.iterations.iter().filter_map(|i| i.commit.clone()).collect();
    if rows.state == "merged" {
        let passed = rows.iterations.iter().filter(|iteration| iteration.passed);
        let passed: Vec<String> = passed.filter_map(|i| i.commit.clone()).collect();
        assert_eq!(commits, passed, "one commit per iteration that is not quarantined, in order");
    } else {
        assert!(commits.iter().all(|c| recorded.contains(c)), "{commits:?} are not all among {recorded:?}");
    }
    let files = repo.changed(branch, &rows.base);
    assert!(!files.is_empty(), "a result without a changed file");
    if rows.jobs.iter().all(JobRow::is_scripted) {
        for (path, text) in files {
            let sent = calls.iter().any(|c| c.end == Some(End::Answered) && c.sent.contains(text.trim_end()));
            assert!(sent, "{path} on {branch} contains text that no model sent: {text:?}");
        }
    }
}

/// Each test except the first gives the oracle an inconsistent state, which the oracle must reject.
#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::task_rows::{AttemptRow, EventRow, StepRow};

    fn job() -> JobRow {
        let attempt = AttemptRow {
            attempt: 1,
            accepted: true,
            outcome: Some("done".into()),
            lease: String::new(),
            boot: String::new(),
        };
        JobRow {
            id: "j".into(),
            model: "openai:scripted/alpha".into(),
            state: "done".into(),
            attempt: 1,
            losses: 0,
            failures: 0,
            messages: json!(["write"]),
            completion: Some(json!({ "inline": { "text": "words" } })),
            attempts: vec![attempt],
        }
    }

    fn call() -> Call {
        Call { model: "alpha".into(), messages: json!(["write"]), sent: "words".into(), end: Some(End::Answered) }
    }

    fn rows(jobs: Vec<JobRow>) -> TaskRows {
        let done = json!({ "type": "job_changed", "job": "j", "state": "done" });
        TaskRows {
            number: 1,
            state: "escalated".into(),
            base: "b".into(),
            delivered: None,
            jobs,
            steps: vec![StepRow { seq: 0, kind: "started".into() }],
            iterations: vec![],
            reviews: 0,
            prs: vec![],
            events: vec![EventRow { seq: 1, body: done }],
        }
    }

    #[test]
    fn consistent_state_is_accepted() {
        every_call_belongs_to_an_attempt(&[job()], &[call()]);
        jobs_were_done_once(&rows(vec![job()]), &[call()]);
        steps_have_no_gap(&rows(vec![job()]));
    }

    #[test]
    #[should_panic(expected = "called 2 times by 1 attempts")]
    fn extra_call_is_detected() {
        every_call_belongs_to_an_attempt(&[job()], &[call(), call()]);
    }

    #[test]
    #[should_panic(expected = "called 1 times by 0 attempts")]
    fn call_without_a_job_is_detected() {
        every_call_belongs_to_an_attempt(&[job()], &[Call { messages: json!(["other"]), ..call() }]);
    }

    #[test]
    #[should_panic(expected = "called no model")]
    fn empty_job_list_is_detected() {
        jobs_were_done_once(&rows(vec![]), &[call()]);
    }

    #[test]
    #[should_panic(expected = "no call sent")]
    fn result_of_a_disconnected_call_is_detected() {
        jobs_were_done_once(&rows(vec![job()]), &[Call { end: Some(End::Disconnected), ..call() }]);
    }

    #[test]
    #[should_panic(expected = "one event for a result")]
    fn duplicate_result_event_is_detected() {
        let mut rows = rows(vec![job()]);
        rows.events.push(EventRow { seq: 2, body: rows.events[0].body.clone() });
        jobs_were_done_once(&rows, &[call()]);
    }

    #[test]
    #[should_panic(expected = "is still open")]
    fn open_attempt_is_detected() {
        let mut job = job();
        job.attempts[0].outcome = None;
        jobs_were_done_once(&rows(vec![job]), &[call()]);
    }

    #[test]
    #[should_panic(expected = "steps")]
    fn missing_step_is_detected() {
        let mut rows = rows(vec![job()]);
        rows.steps[0].seq = 1;
        steps_have_no_gap(&rows);
    }
}
