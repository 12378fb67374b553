//! What must hold of a task at rest, told by those who are not the scheduler: the model server's list of calls, the user's git
//! repository, and the rows in Postgres, read over a connection of the test's own. cfq's API and event feed are compared with
//! them and prove nothing by themselves. Where there is nothing to compare the oracle fails: it never passes on an empty list.

use std::collections::BTreeMap;

use cfq_proto::http::TaskDetail;
use cfq_proto::ids::TaskKey;
use cfq_proto::task::TaskState;
use serde_json::Value;

use crate::cluster::Cluster;
use crate::repo::UserRepo;
use crate::rows::{Job, Rows};
use crate::scripted::{Call, End, Reply, file, review};

impl Cluster {
    /// Calls, rows, commits and events of a task at rest agree, and each effect happened once.
    pub async fn oracle(&self, task: TaskKey, repo: &UserRepo) -> TaskDetail {
        self.node_is_idle().await;
        let detail = self.client.task(task).await.unwrap();
        let mut connection = self.database.connect().await;
        let rows = Rows::of(&mut connection, &detail.summary.id.to_string()).await;
        assert_eq!(rows.state, detail.summary.state.as_str(), "the API says what Postgres holds");
        let calls = self.models.seen();
        every_call_belongs_to_an_attempt(&Job::all(&mut connection).await, &calls);
        jobs_were_done_once(&rows, &calls);
        steps_have_no_gap(&rows);
        git_holds_what_was_recorded(&rows, repo, &calls);
        self.feed_is_what_postgres_holds(task, &rows).await;
        detail
    }

    /// After a fault: a task of its own goes all the way.
    pub async fn a_fresh_task_works(&self) {
        self.models.script("alpha", vec![Reply::Text(file("add.py", "def add(a, b):\n    return a + b"))]);
        self.models.script("beta", vec![Reply::Text(review(95, &[]))]);
        let repo = UserRepo::with_uncommitted_changes();
        let task = TaskKey::Id(self.submit_again(&self.spec(&repo), "fresh").await.id);
        let detail = self.rests(task).await;
        assert_eq!(detail.summary.state, TaskState::Merged, "a fresh task: {}", detail.reason);
        self.oracle(task, &repo).await;
    }

    async fn feed_is_what_postgres_holds(&self, task: TaskKey, rows: &Rows) {
        let events = self.client.events(task, 0).await.unwrap().events;
        let told: Vec<(i64, Value)> =
            events.iter().map(|e| (e.task_seq, serde_json::to_value(&e.body).unwrap())).collect();
        assert!(!told.is_empty(), "a task without an event");
        assert_eq!(told.iter().map(|t| t.0).collect::<Vec<_>>(), (1..=told.len() as i64).collect::<Vec<_>>());
        let kept: Vec<(i64, Value)> = rows.events.iter().map(|e| (e.seq, e.body.clone())).collect();
        assert_eq!(told, kept, "the feed tells every event that is kept, once, in order");
    }
}

/// Nothing was asked of a model that no accepted attempt may have asked, over all tasks of the cluster.
fn every_call_belongs_to_an_attempt(jobs: &[Job], calls: &[Call]) {
    let mut allowed: BTreeMap<(&str, String), usize> = BTreeMap::new();
    for job in jobs {
        let accepted = job.attempts.iter().filter(|a| a.accepted).count();
        *allowed.entry((job.remote(), job.messages.to_string())).or_default() += accepted;
    }
    let mut seen: BTreeMap<(&str, String), usize> = BTreeMap::new();
    for call in calls {
        *seen.entry((&call.model, call.messages.to_string())).or_default() += 1;
    }
    for (what, seen) in seen {
        let allowed = allowed.get(&what).copied().unwrap_or(0);
        assert!(seen <= allowed, "{} was asked {seen} times by {allowed} attempts: {}", what.0, what.1);
    }
}

fn jobs_were_done_once(rows: &Rows, calls: &[Call]) {
    assert!(!rows.jobs.is_empty(), "a task at rest that asked no model");
    for job in &rows.jobs {
        let outcomes: Vec<Option<&str>> = job.attempts.iter().map(|a| a.outcome.as_deref()).collect();
        let count = |outcome: &str| outcomes.iter().filter(|o| **o == Some(outcome)).count();
        let numbers: Vec<i32> = job.attempts.iter().map(|a| a.attempt).collect();
        assert_eq!(numbers, (1..=job.attempt).collect::<Vec<_>>(), "attempts of {job:?}");
        assert!(!outcomes.contains(&None), "an attempt still lives although the task rests: {job:?}");
        assert_eq!((count("lost"), count("failed")), (job.losses as usize, job.failures as usize), "{job:?}");
        let done = usize::from(job.state == "done");
        assert_eq!(count("done"), done, "as many attempts brought the result as there are results: {job:?}");
        let told = rows.events.iter().filter(|e| e.is_job(&job.id, "done")).count();
        assert_eq!(told, done, "as often is it told: {job:?}");
        let text = job.completion.as_ref().map(|c| c["inline"]["text"].as_str().expect("tests keep results small"));
        assert_eq!(text.is_some(), done == 1, "{job:?}");
        let is_its = |c: &&Call| c.model == job.remote() && c.messages == job.messages;
        if let Some(text) = text.filter(|_| job.is_scripted()) {
            let sent: Vec<&Call> = calls.iter().filter(is_its).filter(|c| c.end == Some(End::Answered)).collect();
            assert!(sent.iter().any(|c| c.sent == text), "no model ever said {text:?}; it said {sent:?}");
        }
    }
}

fn steps_have_no_gap(rows: &Rows) {
    assert!(!rows.steps.is_empty(), "a task at rest without a step");
    let seqs: Vec<i32> = rows.steps.iter().map(|s| s.seq).collect();
    assert_eq!(seqs, (0..rows.steps.len() as i32).collect::<Vec<_>>(), "steps");
    let count = |kind: &str| rows.steps.iter().filter(|s| s.kind == kind).count();
    assert_eq!(count("generated"), rows.iterations.len(), "one iteration a generated step");
    assert_eq!(count("reviewed"), rows.reviews as usize, "one review a reviewed step");
    assert_eq!(count("pr_opened"), rows.prs.len(), "one pull request a step that opened one");
    assert!(rows.prs.len() <= 1, "one pull request at most: {:?}", rows.prs);
    assert!(count("merged") <= 1 && count("delivered") <= 1, "{:?}", rows.steps);
    let terminal = ["merged", "accepted", "failed", "cancelled"];
    let ended = rows.events.iter().filter(|e| terminal.iter().any(|state| e.is_task(state))).count();
    assert_eq!(ended, usize::from(terminal.contains(&rows.state.as_str())), "it ends once or not at all");
    if rows.state == "merged" {
        assert_eq!((count("merged"), count("delivered"), count("handed_off")), (1, 1, 1), "{:?}", rows.steps);
        assert_eq!(rows.prs[0].0, "merged");
        assert!(rows.prs[0].1.is_some(), "a merge commit");
    }
}

fn git_holds_what_was_recorded(rows: &Rows, repo: &UserRepo, calls: &[Call]) {
    let prefix = format!("cfq/t{}-", rows.number);
    let branches: Vec<String> = repo.branches().into_iter().filter(|b| b.starts_with(&prefix)).collect();
    let expected: Vec<String> = rows.delivered.iter().map(|(branch, _)| branch.clone()).collect();
    assert_eq!(branches, expected, "the branch that was delivered and no other");
    assert!(rows.state != "merged" || !branches.is_empty(), "merged without a branch");
    let Some((branch, tip)) = &rows.delivered else { return };
    let commits = repo.history(branch, &rows.base);
    assert_eq!(commits.last(), Some(tip), "the branch ends where it was recorded to end");
    let recorded: Vec<String> = rows.iterations.iter().flatten().cloned().collect();
    if rows.state == "merged" {
        assert_eq!(commits, recorded, "one commit an iteration, in their order");
    } else {
        assert!(commits.iter().all(|c| recorded.contains(c)), "{commits:?} are not all among {recorded:?}");
    }
    let files = repo.changed(branch, &rows.base);
    assert!(!files.is_empty(), "a result without a changed file");
    if rows.jobs.iter().all(Job::is_scripted) {
        for (path, text) in files {
            let said = calls.iter().any(|c| c.end == Some(End::Answered) && c.sent.contains(text.trim_end()));
            assert!(said, "{path} on {branch} holds what no model wrote: {text:?}");
        }
    }
}

/// An oracle that never says no is worth nothing: each of these is a lie it must not believe.
#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::rows::{Attempt, Event, Step};

    fn job() -> Job {
        let attempt = Attempt {
            attempt: 1,
            accepted: true,
            outcome: Some("done".into()),
            lease: String::new(),
            boot: String::new(),
        };
        Job {
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

    fn rows(jobs: Vec<Job>) -> Rows {
        let done = json!({ "type": "job_changed", "job": "j", "state": "done" });
        Rows {
            number: 1,
            state: "escalated".into(),
            base: "b".into(),
            delivered: None,
            jobs,
            steps: vec![Step { seq: 0, kind: "started".into() }],
            iterations: vec![],
            reviews: 0,
            prs: vec![],
            events: vec![Event { seq: 1, body: done }],
        }
    }

    #[test]
    fn what_agrees_is_believed() {
        every_call_belongs_to_an_attempt(&[job()], &[call()]);
        jobs_were_done_once(&rows(vec![job()]), &[call()]);
        steps_have_no_gap(&rows(vec![job()]));
    }

    #[test]
    #[should_panic(expected = "asked 2 times by 1 attempts")]
    fn a_call_too_many_is_seen() {
        every_call_belongs_to_an_attempt(&[job()], &[call(), call()]);
    }

    #[test]
    #[should_panic(expected = "asked 1 times by 0 attempts")]
    fn a_call_that_no_job_asked_for_is_seen() {
        every_call_belongs_to_an_attempt(&[job()], &[Call { messages: json!(["other"]), ..call() }]);
    }

    #[test]
    #[should_panic(expected = "asked no model")]
    fn an_empty_list_of_jobs_is_no_proof() {
        jobs_were_done_once(&rows(vec![]), &[call()]);
    }

    #[test]
    #[should_panic(expected = "no model ever said")]
    fn a_result_that_was_broken_off_at_the_model_is_seen() {
        jobs_were_done_once(&rows(vec![job()]), &[Call { end: Some(End::Left), ..call() }]);
    }

    #[test]
    #[should_panic(expected = "as often is it told")]
    fn a_result_told_twice_is_seen() {
        let mut rows = rows(vec![job()]);
        rows.events.push(Event { seq: 2, body: rows.events[0].body.clone() });
        jobs_were_done_once(&rows, &[call()]);
    }

    #[test]
    #[should_panic(expected = "still lives")]
    fn an_attempt_that_never_ended_is_seen() {
        let mut job = job();
        job.attempts[0].outcome = None;
        jobs_were_done_once(&rows(vec![job]), &[call()]);
    }

    #[test]
    #[should_panic(expected = "steps")]
    fn a_step_that_is_missing_is_seen() {
        let mut rows = rows(vec![job()]);
        rows.steps[0].seq = 1;
        steps_have_no_gap(&rows);
    }
}
