//! The oracle of a chaos run: compares what the producer knows with Postgres, the model server and both repositories.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::AssertUnwindSafe;

use cfq_proto::ids::TaskKey;
use futures::FutureExt;

use super::producer::{Ledger, content, function};
use super::repository::{Files, Merges, fsck, refs};
use super::watch::TaskRow;
use crate::cluster::Cluster;
use crate::oracle;
use crate::repo::UserRepo;
use crate::task_rows::{JobRow, TaskRows};

/// The user's repository before the run.
pub struct Before {
    files: Files,
    refs: BTreeMap<String, String>,
}

impl Before {
    pub fn of(repo: &UserRepo) -> Self {
        Self { files: Files::of(&repo.path()), refs: refs(&repo.open()) }
    }
}

/// What the oracle found.
#[derive(Default)]
pub struct Verdict {
    pub violations: Vec<String>,
    /// Number of tasks by state.
    pub states: BTreeMap<String, usize>,
    /// Tasks that are not merged, with their reasons.
    pub not_merged: Vec<String>,
    /// Attempts of jobs that ended without a result, by outcome, and leases of tasks that ended before their task.
    /// Later messages of the former holder are fenced off.
    pub fenced_off: BTreeMap<String, usize>,
    pub duplicates: usize,
    pub losses: usize,
}

/// Runs a check that reports a violation with a panic.
fn check(violations: &mut Vec<String>, what: &str, check: impl FnOnce()) {
    if let Err(panic) = std::panic::catch_unwind(AssertUnwindSafe(check)) {
        violations.push(format!("{what}: {}", message(&*panic)));
    }
}

/// The message of a panic.
pub fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without a message").to_owned()
}

/// Checks everything. All tasks must be at rest.
pub async fn verdict(
    cluster: &Cluster,
    repo: &UserRepo,
    before: &Before,
    ledger: &Ledger,
    rows: &[TaskRow],
) -> Verdict {
    let mut verdict = Verdict::default();
    verdict.compare_with_ledger(ledger, rows);
    let calls = cluster.models.all_calls();
    let mut connection = cluster.database.connect().await;
    let jobs = JobRow::all(&mut connection).await;
    for outcome in jobs.iter().flat_map(|job| &job.attempts).filter_map(|attempt| attempt.outcome.as_deref()) {
        if outcome != "done" {
            *verdict.fenced_off.entry(format!("job attempts {outcome}")).or_default() += 1;
        }
    }
    let leases: usize = rows.iter().map(|row| (row.attempt as usize).saturating_sub(1)).sum();
    if leases > 0 {
        verdict.fenced_off.insert("task leases ended early".to_owned(), leases);
    }
    check(&mut verdict.violations, "model calls", || oracle::every_call_belongs_to_an_attempt(&jobs, &calls));
    let merges = Merges::of(&cluster.dir.path().join("runner-data"));
    let numbers = ledger.submitted.lock().unwrap().clone();
    let (mut delivered, mut merged) = (BTreeMap::new(), BTreeSet::new());
    for row in rows {
        *verdict.states.entry(row.state.clone()).or_default() += 1;
        if row.state != "merged" {
            verdict.not_merged.push(format!("task {} is {}: {}", row.number, row.state, row.reason));
        }
        let what = format!("task {} ({})", row.number, row.id);
        let task = TaskRows::of(&mut connection, &row.id).await;
        let violations = &mut verdict.violations;
        check(violations, &what, || oracle::jobs_were_done_once(&task, &calls));
        check(violations, &what, || oracle::steps_have_no_gap(&task));
        check(violations, &what, || oracle::git_matches_the_recorded_steps(&task, repo, &calls));
        let feed = cluster.feed_matches_postgres(TaskKey::Id(row.id.parse().unwrap()), &task);
        if let Err(panic) = AssertUnwindSafe(feed).catch_unwind().await {
            violations.push(format!("{what}: {}", message(&*panic)));
        }
        if let Some((branch, commit)) = &task.delivered {
            delivered.insert(format!("refs/heads/{branch}"), commit.clone());
        }
        let number = row.idempotency_key.as_ref().and_then(|key| numbers.get(key)).copied();
        if let (Some(number), Some((branch, commit)), "merged") = (number, &task.delivered, row.state.as_str()) {
            merged.insert(commit.clone());
            let count = merges.count(commit);
            verdict.duplicates += count.saturating_sub(1) as usize;
            if count != 1 {
                verdict.violations.push(format!("{what} is merged, and {commit} was merged {count} times into main"));
            }
            let text = repo.show(branch, &format!("{}.py", function(number)));
            if text.as_ref().map(|text| text.trim_end()) != Some(&content(number)) {
                verdict.violations.push(format!("{what}: {branch} contains {text:?}"));
            }
        }
    }
    let unexpected = merges.unexpected(&merged);
    verdict.violations.extend(unexpected.into_iter().map(|id| format!("{id} was merged, but no merged task has it")));
    verdict.compare_refs(&before.refs, &refs(&repo.open()), &delivered);
    verdict.violations.extend(Files::of(&repo.path()).changes_since(&before.files));
    verdict.violations.extend(fsck(&repo.path()));
    verdict
}

impl Verdict {
    /// Every acknowledged task exists once under its key; no other task exists than the submitted ones.
    fn compare_with_ledger(&mut self, ledger: &Ledger, rows: &[TaskRow]) {
        let by_key: BTreeMap<&str, &TaskRow> =
            rows.iter().filter_map(|row| Some((row.idempotency_key.as_deref()?, row))).collect();
        self.duplicates += rows.len() - by_key.len();
        if by_key.len() != rows.len() {
            self.violations.push(format!("{} tasks have {} idempotency keys", rows.len(), by_key.len()));
        }
        for (key, id) in &*ledger.acknowledged.lock().unwrap() {
            match by_key.get(key.as_str()) {
                Some(row) if row.id == *id => {}
                other => {
                    self.losses += 1;
                    self.violations.push(format!("{key} was acknowledged as task {id}; Postgres has {other:?}"));
                }
            }
        }
        let submitted = ledger.submitted.lock().unwrap();
        for key in by_key.keys().filter(|key| !submitted.contains_key(**key)) {
            self.violations.push(format!("a task with the key {key} exists, which was never submitted"));
        }
    }

    /// The refs of before are unchanged, and the others are the delivered branches.
    fn compare_refs(
        &mut self,
        before: &BTreeMap<String, String>,
        after: &BTreeMap<String, String>,
        delivered: &BTreeMap<String, String>,
    ) {
        let expected: BTreeMap<&String, &String> = before.iter().chain(delivered).collect();
        for (name, target) in &expected {
            if after.get(*name) != Some(*target) {
                self.violations.push(format!("{name} should be {target} and is {:?}", after.get(*name)));
            }
        }
        for name in after.keys().filter(|name| !expected.contains_key(name)) {
            self.duplicates += usize::from(name.starts_with("refs/heads/cfq/"));
            self.violations.push(format!("the user's repository has {name}, which no task delivered"));
        }
    }
}

/// Each test gives the oracle an inconsistent state, which it must report.
#[cfg(test)]
mod tests {
    use super::*;

    fn ledger() -> Ledger {
        let ledger = Ledger::default();
        ledger.submitted.lock().unwrap().insert("k".into(), 1);
        ledger.acknowledged.lock().unwrap().insert("k".into(), "a".into());
        ledger
    }

    fn row(id: &str, key: &str) -> TaskRow {
        TaskRow {
            id: id.into(),
            number: 1,
            idempotency_key: Some(key.into()),
            state: "merged".into(),
            reason: String::new(),
            attempt: 1,
            lease: None,
        }
    }

    fn compared(rows: &[TaskRow]) -> Verdict {
        let mut verdict = Verdict::default();
        verdict.compare_with_ledger(&ledger(), rows);
        verdict
    }

    #[test]
    fn acknowledged_task_that_exists_is_accepted() {
        assert!(compared(&[row("a", "k")]).violations.is_empty());
    }

    #[test]
    fn missing_task_is_a_loss() {
        assert_eq!(compared(&[]).losses, 1);
        assert_eq!(compared(&[row("b", "k")]).losses, 1);
    }

    #[test]
    fn task_that_was_not_submitted_is_a_violation() {
        assert_eq!(compared(&[row("a", "k"), row("b", "other")]).violations.len(), 1);
    }

    #[test]
    fn changed_missing_and_additional_refs_are_violations() {
        let refs = |all: &[(&str, &str)]| all.iter().map(|(n, t)| ((*n).to_owned(), (*t).to_owned())).collect();
        let (before, delivered) = (refs(&[("refs/heads/master", "1")]), refs(&[("refs/heads/cfq/t1-a", "2")]));
        let count = |after: &[(&str, &str)]| {
            let mut verdict = Verdict::default();
            verdict.compare_refs(&before, &refs(after), &delivered);
            (verdict.violations.len(), verdict.duplicates)
        };
        assert_eq!(count(&[("refs/heads/master", "1"), ("refs/heads/cfq/t1-a", "2")]), (0, 0));
        assert_eq!(count(&[("refs/heads/master", "2"), ("refs/heads/cfq/t1-a", "2")]), (1, 0));
        assert_eq!(count(&[("refs/heads/master", "1")]), (1, 0));
        let twice = [("refs/heads/master", "1"), ("refs/heads/cfq/t1-a", "2"), ("refs/heads/cfq/t1-a-2", "2")];
        assert_eq!(count(&twice), (1, 1));
    }
}
