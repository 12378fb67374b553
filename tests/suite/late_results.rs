//! A result that comes after its attempt was given up. A node that was stopped past its lease finds a whole reply in its hands
//! and says nothing; and where something is said under the old lease all the same, by a client of the test's own with the
//! node's key, it is refused at every moment of the job's further life.

use cfq_link::Session;
use cfq_proto::blob::Carried;
use cfq_proto::ids::{NodeId, TaskKey};
use cfq_proto::job::{Completion, FinishReason, Outcome, Usage};
use cfq_proto::messages::{FenceReply, JobFence, JobReport};
use cfq_proto::subject::{self, Identity};
use cfq_proto::task::TaskState;
use cfq_proto::timing::Timing;
use cfq_tests::cluster::{Cluster, PATIENCE};
use cfq_tests::repo::UserRepo;
use cfq_tests::rows::Job;
use cfq_tests::scripted::{End, Gate, Reply, file, review};
use cfq_tests::wait;

const LATE: &str = "late words of an attempt that was given up";

/// The node's key and name, and the report of the attempt that was given up.
struct Late {
    session: Session,
    report: JobReport,
}

impl Late {
    /// Of the only attempt there is.
    async fn of_the_first_attempt(cluster: &Cluster) -> Self {
        let job = only_job(cluster).await;
        let attempt = &job.attempts[0];
        let fence = JobFence { job: job.id.parse().unwrap(), attempt: 1, lease: attempt.lease.parse().unwrap() };
        let text = file("add.py", &format!("# {LATE}\ndef add(a, b):\n    return a + b"));
        let completion = Carried::Inline(Completion {
            text,
            finish: FinishReason::Stop,
            usage: Usage::default(),
            logprobs: Vec::new(),
        });
        let report = JobReport { fence, boot: attempt.boot.parse().unwrap(), outcome: Outcome::Done { completion } };
        let identity = Identity::Node(NodeId::new("n1").unwrap());
        let session = Session::connect(&cluster.nats.config("node"), identity, &Timing::default()).await.unwrap();
        Self { session, report }
    }

    async fn is_told(&self) -> FenceReply {
        let subject = subject::node(&NodeId::new("n1").unwrap(), "result");
        wait::until("an answer to the late result", PATIENCE, || async {
            self.session.request::<_, FenceReply>(&subject, &self.report).await.map_err(|e| e.to_string())
        })
        .await
    }
}

async fn only_job(cluster: &Cluster) -> Job {
    let mut jobs = Job::all(&mut cluster.database.connect().await).await;
    assert_eq!(jobs.len(), 1, "{jobs:?}");
    jobs.remove(0)
}

/// The calls of the creator so far, and how each ended.
fn ends(cluster: &Cluster) -> Vec<Option<End>> {
    cluster.models.seen().iter().filter(|c| c.model == "alpha").map(|c| c.end).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_node_is_taken_over_and_a_late_result_is_refused() {
    let cluster = Cluster::start().await;
    let gate = Gate::closed();
    let text = file("add.py", "def add(a, b):\n    return a + b");
    let (first, rest) = text.split_at(text.find("return").unwrap());
    cluster.models.script("alpha", vec![Reply::Held(first.into(), rest.into(), gate.clone())]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let identity = Identity::Scheduler;
    let overhears = Session::connect(&cluster.nats.config("scheduler"), identity, &Timing::default()).await.unwrap();
    let subject = subject::node(&NodeId::new("n1").unwrap(), "result");
    let mut reports = overhears.subscribe::<JobReport>(&subject).await.unwrap();
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    wait::until("a model that writes", PATIENCE, || async {
        let calls = cluster.models.seen();
        if calls.iter().any(|c| c.sent == first) { Ok(()) } else { Err(format!("{calls:?}")) }
    })
    .await;

    // While nobody listens the reply becomes whole; it waits in the stopped node's socket.
    cluster.signal("node", libc::SIGSTOP);
    gate.open();
    wait::until("the reply to be whole", PATIENCE, || async {
        if ends(&cluster) == [Some(End::Answered)] { Ok(()) } else { Err(format!("{:?}", ends(&cluster))) }
    })
    .await;
    cluster.job_lost(task).await;
    assert_eq!(only_job(&cluster).await.attempts[0].outcome.as_deref(), Some("lost"));

    let late = Late::of_the_first_attempt(&cluster).await;
    assert_eq!(late.is_told().await, FenceReply::Stale, "while the job waits for its next attempt");
    assert_eq!(only_job(&cluster).await.completion, None);
    cluster.signal("node", libc::SIGCONT);
    let detail = cluster.rests(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    assert_eq!(late.is_told().await, FenceReply::Stale, "after the task has ended");

    let detail = cluster.oracle(task, &repo).await;
    assert_eq!(detail.iterations.len(), 1);
    assert!(detail.jobs.iter().any(|j| j.losses == 1 && j.failures == 0 && j.attempt == 2), "{:?}", detail.jobs);
    assert_eq!(ends(&cluster), [Some(End::Answered); 2], "both attempts got a whole reply");
    let added = repo.show(&detail.delivered_branch.unwrap(), "add.py").unwrap();
    assert!(added.contains("def add") && !added.contains(LATE), "{added}");
    // Who woke up with the whole reply of a lost attempt told nobody: under the old lease only this test has spoken.
    let old = late.report.fence;
    let (mut ours, mut theirs) = (0, 0);
    let read = async {
        while ours < 2 {
            match reports.next().await.expect("the connection stays").body.unwrap() {
                report if report == late.report => ours += 1,
                report if report.fence == old => panic!("the woken node reported a lost attempt: {report:?}"),
                _ => theirs += 1,
            }
        }
    };
    tokio::time::timeout(PATIENCE, read).await.expect("what was said is overheard");
    assert!(theirs >= 2, "the node reported what it did under its new lease, and {theirs} is too little");
    cluster.a_fresh_task_works().await;
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_result_is_refused_while_the_next_attempt_runs() {
    let cluster = Cluster::start().await;
    let gate = Gate::closed();
    let text = file("add.py", "def add(a, b):\n    return a + b");
    let (first, rest) = text.split_at(text.find("return").unwrap());
    cluster.models.script("alpha", vec![Reply::Held(first.into(), rest.into(), gate.clone())]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let task: TaskKey = cluster.submit(&cluster.spec(&repo)).await;
    cluster.generates(task).await;
    let late = Late::of_the_first_attempt(&cluster).await;
    cluster.kill9("node");
    cluster.job_lost(task).await;
    cluster.start_service("node");
    wait::until("the second attempt", PATIENCE, || async {
        let job = only_job(&cluster).await;
        if (job.attempt, job.state.as_str()) == (2, "running") { Ok(()) } else { Err(format!("{job:?}")) }
    })
    .await;
    assert_eq!(late.is_told().await, FenceReply::Stale);
    let job = only_job(&cluster).await;
    assert_eq!((job.attempt, job.state.as_str(), &job.completion), (2, "running", &None), "it goes on as it was");

    gate.open();
    assert_eq!(cluster.rests(task).await.summary.state, TaskState::Merged);
    let detail = cluster.oracle(task, &repo).await;
    assert!(!repo.show(&detail.delivered_branch.unwrap(), "add.py").unwrap().contains(LATE));
    cluster.a_fresh_task_works().await;
    cluster.finish().await;
}
