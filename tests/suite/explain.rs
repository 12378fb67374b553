//! Tests of `cfq jobs` and `cfq explain`: what a user sees of the queue's decisions.

use cfq_proto::http::{Explanation, JobFilter, JobList, JobListItem, NodeVerdict, TaskWait};
use cfq_proto::ids::{JobId, TaskKey};
use cfq_proto::job::JobState;
use cfq_proto::task::TaskState;
use cfq_tests::cli_json;
use cfq_tests::cluster::{Cluster, Options, TOKEN, WAIT_LIMIT, cfq, tail};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Gate, Reply, file, review};
use cfq_tests::wait;

/// Number of sequences that the node runs at once on a model of the test cluster.
const SEQUENCES: usize = 4;

async fn explain(cluster: &Cluster, task: TaskKey) -> Explanation {
    cluster.client.explain(task).await.unwrap()
}

/// A cluster whose runner has six slots, and eight tasks: the calls of four run until the gate is opened, two wait for a
/// node, and two tasks wait for a slot.
async fn busy_cluster(gate: &Gate, repo: &UserRepo) -> (Cluster, Vec<TaskKey>) {
    let mut options = Options { runner_slots: 6, ..Options::default() };
    (options.timing.slot_wait_ms, options.timing.job_step_timeout_ms) = (120_000, 120_000);
    let cluster = Cluster::start_with(options).await;
    cluster.models.script("alpha", vec![Reply::Gated(String::new(), file("add.py", "# one\n"), gate.clone())]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let mut tasks = Vec::new();
    for n in 0..8 {
        let mut spec = cluster.spec(repo);
        spec.description += &format!(" Task {n}.");
        tasks.push(cluster.submit(&spec).await);
        if n < SEQUENCES {
            cluster.wait_until_generating(tasks[n]).await;
        } else if n < 6 {
            cluster.wait_until_queued(tasks[n]).await;
        }
    }
    (cluster, tasks)
}

/// The text of a command that succeeds.
fn text(cluster: &Cluster, args: &[&str]) -> String {
    let output = cfq(cluster, cluster.dir.path(), args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

async fn metric(cluster: &Cluster, name: &str) -> f64 {
    let http = cfq_link::outbound::api_client().unwrap();
    let request = http.get(format!("{}/metrics", cluster.client.url())).bearer_auth(TOKEN);
    let page = request.send().await.unwrap().text().await.unwrap();
    let line = page.lines().find(|line| line.starts_with(&format!("{name} "))).unwrap_or_else(|| panic!("{page}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_job_and_task_are_explained_and_the_error_of_the_estimate_is_measured() {
    let (gate, repo) = (Gate::closed(), UserRepo::with_uncommitted_changes());
    let (cluster, tasks) = busy_cluster(&gate, &repo).await;
    let mut waiting = Vec::new();
    for (task, before) in [(tasks[4], 0), (tasks[5], 1)] {
        let explained = explain(&cluster, task).await;
        assert_eq!((explained.task.state, explained.warning.as_str()), (TaskState::Running, ""));
        let job = &explained.jobs[0];
        let plan = job.plan.as_ref().unwrap();
        let (position, estimate) = (plan.position.unwrap(), plan.estimate.as_ref().unwrap());
        assert_eq!((job.state, position.before, position.queued), (JobState::Queued, before, 2));
        assert_eq!((plan.nodes[0].node.as_str(), &plan.nodes[0].verdict), ("n1", &NodeVerdict::NoFreeSlot));
        let cost = plan.nodes[0].cost.unwrap();
        assert_eq!((cost.other_sequences as usize, cost.free_slots), (SEQUENCES, 0), "{cost:?}");
        assert!(cost.prefill_ms > 0 && cost.decode_ms > 0, "{cost:?}");
        assert!(estimate.start_in_ms > 0 && estimate.end_in_ms > estimate.start_in_ms, "{estimate:?}");
        waiting.push(job.id);
    }
    let ready = explain(&cluster, tasks[7]).await;
    let expected = TaskWait::RunnerSlot { before: 1, slots: 6, free: 0, runners: 1, running_tasks_limit: None };
    assert_eq!((ready.task.state, ready.task.waits_for), (TaskState::Ready, Some(expected)));
    let running = explain(&cluster, tasks[0]).await;
    let plan = running.jobs[0].plan.as_ref().unwrap();
    assert!(running.jobs[0].placement.contains("prefill") && plan.estimate.is_some(), "{running:?}");

    let of_task = text(&cluster, &["explain", "t6"]);
    for part in
        ["t6  running", "position  1 job is before it, of 2", "estimate  starts in about", "n1: no free sequence slot"]
    {
        assert!(of_task.contains(part), "{part:?} is not in {of_task}");
    }
    assert!(text(&cluster, &["explain", &waiting[1].to_string()]).contains("position  1 job is before it"), "by job");
    let of_ready = text(&cluster, &["explain", "t8"]);
    assert!(of_ready.contains("1 ready task is before it") && of_ready.contains("0 of 6 slots are free"), "{of_ready}");

    assert_eq!(metric(&cluster, "cfq_job_wait_estimate_ratio_count").await, 0.0);
    gate.open();
    for task in &tasks {
        cluster.wait_until_settled(*task).await;
    }
    assert!(metric(&cluster, "cfq_job_wait_estimate_ratio_count").await >= 2.0);
    let ended = text(&cluster, &["explain", &waiting[0].to_string()]);
    assert!(ended.contains("attempt   1 on n1, done after"), "{ended}");
    cluster.finish().await;
}

/// All pages of the jobs that match.
async fn pages(cluster: &Cluster, filter: &JobFilter) -> Vec<JobId> {
    let (mut jobs, mut filter) = (Vec::new(), filter.clone());
    loop {
        let page = cluster.client.jobs(&filter).await.unwrap();
        assert!(page.jobs.len() <= filter.limit as usize);
        jobs.extend(page.jobs.iter().map(|job| job.id));
        let Some(next) = page.next else { return jobs };
        filter.after = Some(next);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_are_listed_by_page_and_filter() {
    let (gate, repo) = (Gate::closed(), UserRepo::with_uncommitted_changes());
    let (cluster, tasks) = busy_cluster(&gate, &repo).await;
    let by = |state| JobFilter { states: vec![state], limit: 2, ..JobFilter::default() };
    assert_eq!(pages(&cluster, &by(JobState::Running)).await.len(), SEQUENCES);
    let all = pages(&cluster, &JobFilter { limit: 4, ..JobFilter::default() }).await;
    let mut newest_first = all.clone();
    newest_first.sort_by(|a, b| b.cmp(a));
    newest_first.dedup();
    assert_eq!((all.len(), &newest_first), (6, &all), "each job once, newest first");
    let queued: JobList = cli_json::parse(&text(&cluster, &["--json", "jobs", "--state", "queued"]));
    let [second, first] = queued.jobs.as_slice() else { panic!("{queued:?}") };
    assert_eq!((first.task.0, second.task.0, queued.next), (5, 6, None));
    assert!(first.reason.contains("waits for free capacity") && first.waiting_ms > 0, "{first:?}");
    assert_eq!((first.running_ms, first.attempt, &first.node), (0, 0, &None));
    gate.open();
    for task in &tasks {
        cluster.wait_until_settled(*task).await;
    }
    let of_task = JobFilter { task: Some(tasks[0]), limit: 10, ..JobFilter::default() };
    let of_task = cluster.client.jobs(&of_task).await.unwrap().jobs;
    let roles: Vec<String> = of_task.iter().map(|job| job.role.to_string()).collect();
    assert_eq!(roles, ["beta", "alpha"]);
    let is_complete = |job: &JobListItem| job.state == JobState::Done && job.output_tokens.is_some_and(|n| n > 0);
    assert!(of_task.iter().all(is_complete), "{of_task:?}");
    let beta = JobFilter { model: Some(cluster.model("beta")), limit: 3, ..JobFilter::default() };
    assert_eq!(pages(&cluster, &beta).await.len(), tasks.len());
    let on_node = |node: &str| JobFilter { node: Some(node.parse().unwrap()), limit: 5, ..JobFilter::default() };
    assert_eq!(pages(&cluster, &on_node("n1")).await.len(), 2 * tasks.len());
    assert_eq!(pages(&cluster, &on_node("n2")).await, []);
    let list = text(&cluster, &["jobs", "--limit", "3"]);
    assert!(list.starts_with("JOB") && list.lines().count() == 4, "{list}");
    for (args, word) in [
        (["jobs", "--state", "finished"], "queued, placed"),
        (["jobs", "--task", "t99"], "cfq ls"),
        (["explain", "t99", "--json"], "cfq jobs"),
        (["explain", "x", "--json"], "t42"),
    ] {
        let output = cfq(&cluster, cluster.dir.path(), &args);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && error.contains(word), "{args:?}: {error}");
    }
    cluster.finish().await;
}

/// A scheduler that stands by asks the leader. Once the leader was killed, the reply says that its plan is missing.
#[tokio::test(flavor = "multi_thread")]
async fn standby_asks_the_leader_and_says_when_it_does_not_answer() {
    let mut options = Options { second_scheduler: true, ..Options::default() };
    // Nobody takes over while the test asks.
    (options.timing.leader_renewal_ms, options.timing.leader_ttl_ms) = (1_000, 60_000);
    let cluster = Cluster::start_with(options).await;
    let leads = async |service: &str| {
        wait::until("a scheduler to lead", WAIT_LIMIT, || async {
            let log = std::fs::read_to_string(cluster.log(service)).unwrap_or_default();
            if log.contains("became leader") { Ok(()) } else { Err(tail(&cluster.log(service))) }
        })
        .await;
    };
    // The test's client uses the first scheduler, which releases the leadership when it stops.
    cluster.stop("scheduler").await;
    leads("second_scheduler").await;
    cluster.start_service("scheduler");
    cluster.wait_until_ready().await;
    let repo = UserRepo::with_uncommitted_changes();
    cluster.kill9("node");
    let task = cluster.submit(&cluster.spec(&repo)).await;
    cluster.wait_until_queued(task).await;
    wait::until("the leader's plan", WAIT_LIMIT, || async {
        let explained = explain(&cluster, task).await;
        let plan = explained.jobs.first().and_then(|job| job.plan.as_ref());
        let verdict = plan.and_then(|plan| plan.nodes.first()).map(|node| node.verdict.clone());
        let is_lost = matches!(verdict, Some(NodeVerdict::NotAlive { .. }));
        if is_lost && explained.warning.is_empty() { Ok(()) } else { Err(format!("{explained:?}")) }
    })
    .await;
    cluster.kill9("second_scheduler");
    let explained = explain(&cluster, task).await;
    assert!(explained.warning.contains("the leader did not answer"), "{explained:?}");
    assert_eq!((explained.jobs[0].state, &explained.jobs[0].plan), (JobState::Queued, &None));
    let output = cfq(&cluster, cluster.dir.path(), &["explain", "t1"]);
    let (shown, warned) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && shown.contains("queued"), "{shown}");
    assert!(warned.contains("the leader did not answer"), "{warned}");
}
