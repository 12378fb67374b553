//! Tests that results of lost attempts are rejected. Case 1: a node is suspended until its lease has expired; after it
//! resumes, it receives the model's complete reply and must not report it. Case 2: the test sends a report under the
//! old lease with the node's key; the scheduler must refuse it in every later state of the job.

use cfq_link::Session;
use cfq_proto::blob::Payload;
use cfq_proto::ids::{NodeId, TaskKey};
use cfq_proto::job::{Completion, FinishReason, Outcome, Usage};
use cfq_proto::messages::{FenceReply, JobFence, JobResult};
use cfq_proto::subject::{self, Identity};
use cfq_proto::task::TaskState;
use cfq_proto::timing::Timing;
use cfq_tests::cluster::{Cluster, WAIT_LIMIT};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{End, Gate, Reply, file, review};
use cfq_tests::task_rows::JobRow;
use cfq_tests::wait;

const LATE_TEXT: &str = "late text of a lost attempt";

/// A session with the node's key, and the report of a lost attempt.
struct LateReport {
    session: Session,
    report: JobResult,
}

impl LateReport {
    /// Creates the report for the first attempt of the only job.
    async fn of_first_attempt(cluster: &Cluster) -> Self {
        let job = only_job(cluster).await;
        let attempt = &job.attempts[0];
        let fence = JobFence { job: job.id.parse().unwrap(), attempt: 1, lease: attempt.lease.parse().unwrap() };
        let text = file("add.py", &format!("# {LATE_TEXT}\ndef add(a, b):\n    return a + b"));
        let completion = Payload::Inline(Completion {
            text,
            finish: FinishReason::Stop,
            usage: Usage::default(),
            logprobs: Vec::new(),
        });
        let report = JobResult { fence, boot: attempt.boot.parse().unwrap(), outcome: Outcome::Done { completion } };
        let identity = Identity::Node(NodeId::new("n1").unwrap());
        let session = Session::connect(&cluster.nats.config("node"), identity, &Timing::default()).await.unwrap();
        Self { session, report }
    }

    /// Sends the report until it gets a reply.
    async fn submit(&self) -> FenceReply {
        let subject = subject::node(&NodeId::new("n1").unwrap(), "result");
        wait::until("a reply to the late report", WAIT_LIMIT, || async {
            self.session.request::<_, FenceReply>(&subject, &self.report).await.map_err(|e| e.to_string())
        })
        .await
    }
}

async fn only_job(cluster: &Cluster) -> JobRow {
    let mut jobs = JobRow::all(&mut cluster.database.connect().await).await;
    assert_eq!(jobs.len(), 1, "{jobs:?}");
    jobs.remove(0)
}

/// How each of the creator's calls has ended; `None` for open calls.
fn ends(cluster: &Cluster) -> Vec<Option<End>> {
    cluster.models.all_calls().iter().filter(|c| c.model == "alpha").map(|c| c.end).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn late_result_of_a_suspended_node_is_refused() {
    let cluster = Cluster::start().await;
    let gate = Gate::closed();
    let text = file("add.py", "def add(a, b):\n    return a + b");
    let (first, rest) = text.split_at(text.find("return").unwrap());
    cluster.models.script("alpha", vec![Reply::Gated(first.into(), rest.into(), gate.clone())]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let identity = Identity::Scheduler;
    let listener = Session::connect(&cluster.nats.config("scheduler"), identity, &Timing::default()).await.unwrap();
    let subject = subject::node(&NodeId::new("n1").unwrap(), "result");
    let mut reports = listener.subscribe::<JobResult>(&subject).await.unwrap();
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    wait::until("the first part of the reply", WAIT_LIMIT, || async {
        let calls = cluster.models.all_calls();
        if calls.iter().any(|c| c.sent == first) { Ok(()) } else { Err(format!("{calls:?}")) }
    })
    .await;

    // The model server completes the reply while the node is suspended; the rest of it waits in the node's socket
    // buffer.
    cluster.signal("node", libc::SIGSTOP);
    gate.open();
    wait::until("the reply to be complete", WAIT_LIMIT, || async {
        if ends(&cluster) == [Some(End::Answered)] { Ok(()) } else { Err(format!("{:?}", ends(&cluster))) }
    })
    .await;
    cluster.wait_until_job_lost(task).await;
    assert_eq!(only_job(&cluster).await.attempts[0].outcome.as_deref(), Some("lost"));

    let late = LateReport::of_first_attempt(&cluster).await;
    assert_eq!(late.submit().await, FenceReply::Stale, "while the job waits for its next attempt");
    assert_eq!(only_job(&cluster).await.completion, None);
    cluster.signal("node", libc::SIGCONT);
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    assert_eq!(late.submit().await, FenceReply::Stale, "after the task has ended");

    let detail = cluster.run_oracle(task, &repo).await;
    assert_eq!(detail.iterations.len(), 1);
    assert!(detail.jobs.iter().any(|j| j.losses == 1 && j.failures == 0 && j.attempt == 2), "{:?}", detail.jobs);
    assert_eq!(ends(&cluster), [Some(End::Answered); 2], "both attempts got a complete reply");
    let added = repo.show(&detail.delivered_branch.unwrap(), "add.py").unwrap();
    assert!(added.contains("def add") && !added.contains(LATE_TEXT), "{added}");
    // The resumed node did not report the lost attempt's reply: the only report under the old lease is the one of this
    // test.
    let old = late.report.fence;
    let (mut ours, mut theirs) = (0, 0);
    let read = async {
        while ours < 2 {
            match reports.next().await.expect("an open connection").body.unwrap() {
                report if report == late.report => ours += 1,
                report if report.fence == old => panic!("the resumed node reported a lost attempt: {report:?}"),
                _ => theirs += 1,
            }
        }
    };
    tokio::time::timeout(WAIT_LIMIT, read).await.expect("both reports of the test");
    assert!(theirs >= 2, "the node reports under its new lease; only {theirs} reports seen");
    cluster.assert_fresh_task_succeeds().await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn late_result_is_refused_while_the_next_attempt_runs() {
    let cluster = Cluster::start().await;
    let gate = Gate::closed();
    let text = file("add.py", "def add(a, b):\n    return a + b");
    let (first, rest) = text.split_at(text.find("return").unwrap());
    cluster.models.script("alpha", vec![Reply::Gated(first.into(), rest.into(), gate.clone())]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let task: TaskKey = cluster.submit(&cluster.spec(&repo)).await;
    cluster.wait_until_generating(task).await;
    let late = LateReport::of_first_attempt(&cluster).await;
    cluster.kill9("node");
    cluster.wait_until_job_lost(task).await;
    cluster.start_service("node");
    wait::until("the second attempt", WAIT_LIMIT, || async {
        let job = only_job(&cluster).await;
        if (job.attempt, job.state.as_str()) == (2, "running") { Ok(()) } else { Err(format!("{job:?}")) }
    })
    .await;
    assert_eq!(late.submit().await, FenceReply::Stale);
    let job = only_job(&cluster).await;
    assert_eq!(
        (job.attempt, job.state.as_str(), &job.completion),
        (2, "running", &None),
        "the running attempt is unchanged"
    );

    gate.open();
    assert_eq!(cluster.wait_until_settled(task).await.summary.state, TaskState::Merged);
    let detail = cluster.run_oracle(task, &repo).await;
    assert!(!repo.show(&detail.delivered_branch.unwrap(), "add.py").unwrap().contains(LATE_TEXT));
    cluster.assert_fresh_task_succeeds().await;
    cluster.finish().await;
}
