//! Tests of tasks that wait for other tasks, through the command line.

use cfq_proto::http::TaskDetail;
use cfq_proto::ids::{TaskKey, TaskNumber};
use cfq_proto::task::TaskState;
use cfq_tests::cluster::{Cluster, WAIT_LIMIT, cfq};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Gate, Reply, file, review};
use cfq_tests::wait;

struct Client {
    cluster: Cluster,
    repo: UserRepo,
    home: tempfile::TempDir,
}

impl Client {
    async fn start() -> Self {
        let cluster = Cluster::start().await;
        cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
        Self { cluster, repo: UserRepo::with_uncommitted_changes(), home: tempfile::tempdir().unwrap() }
    }

    /// Runs a command and returns its exit code and both outputs.
    fn run(&self, args: &[&str]) -> (Option<i32>, String) {
        let output = cfq(&self.cluster, self.home.path(), args);
        let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        (output.status.code(), text)
    }

    #[track_caller]
    fn succeed(&self, args: &[&str]) -> String {
        let (code, text) = self.run(args);
        assert_eq!(code, Some(0), "{args:?}: {text}");
        text
    }

    /// Submits a task that writes `file`.
    #[track_caller]
    fn submit(&self, file: &str, more: &[&str]) -> String {
        let description = format!("Write a function in {file}");
        let repo = self.repo.path().display().to_string();
        let args = ["submit", &description, "--language", "python", "--repo", &repo];
        self.succeed(&[&args[..], more].concat())
    }

    async fn wait_for(&self, task: i64, state: TaskState) -> TaskDetail {
        self.cluster.wait_for_state(TaskKey::Number(TaskNumber(task)), state).await
    }
}

fn python(name: &str) -> String {
    file(name, "def f():\n    return 1\n")
}

#[tokio::test(flavor = "multi_thread")]
async fn task_starts_only_after_its_predecessor_is_merged() {
    let client = Client::start().await;
    let gate = Gate::closed();
    let gated = Reply::Gated(String::new(), python("a.py"), gate.clone());
    client.cluster.models.script("alpha", vec![gated, Reply::Text(python("b.py"))]);
    client.submit("a.py", &[]);
    client.submit("b.py", &["--after", "t1"]);
    client.wait_for(1, TaskState::Running).await;
    assert!(client.succeed(&["ls"]).contains("waits for t1"), "{}", client.succeed(&["ls"]));
    let shown = client.succeed(&["show", "t2"]);
    assert!(shown.contains("after       t1 (running)") && shown.contains("waits for t1"), "{shown}");
    assert!(client.succeed(&["show", "t1"]).contains("blocks      t2 (blocked)"));
    let repo = client.repo.path().display().to_string();
    let (code, text) = client.run(&["submit", "x", "--after", "t9", "--repo", &repo]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("after: there is no task t9"), "{text}");
    gate.open();
    let second = client.wait_for(2, TaskState::Merged).await;
    let events = client.cluster.client.events(client.cluster.key(&second), 0).await.unwrap().events;
    let first = client.wait_for(1, TaskState::Merged).await;
    let merged = client.cluster.client.events(client.cluster.key(&first), 0).await.unwrap().events;
    let at = |events: &[cfq_proto::event::Event], state: TaskState| {
        let is_state = |event: &&cfq_proto::event::Event| matches!(event.body, cfq_proto::event::EventBody::TaskStateChanged { to, .. } if to == state);
        events.iter().find(is_state).unwrap().at
    };
    assert!(at(&merged, TaskState::Merged) <= at(&events, TaskState::Ready));
    client.cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn retry_of_a_cancelled_predecessor_takes_over_its_dependents() {
    let client = Client::start().await;
    let gate = Gate::closed();
    let gated = Reply::Gated(String::new(), python("a.py"), gate.clone());
    client.cluster.models.script("alpha", vec![gated, Reply::Text(python("b.py"))]);
    client.submit("a.py", &[]);
    client.submit("b.py", &["--after", "t1"]);
    let (code, text) = client.run(&["retry", "t1"]);
    assert!(code == Some(2) && text.contains("only failed, cancelled and accepted tasks can be retried"), "{text}");
    client.succeed(&["cancel", "t1"]);
    wait::until("the reason in `cfq ls`", WAIT_LIMIT, || async {
        let list = client.succeed(&["ls"]);
        if list.contains("t1 is cancelled: run `cfq retry t1`") { Ok(()) } else { Err(list) }
    })
    .await;
    // Nothing happens until a user decides, so the watch ends.
    let (code, text) = client.run(&["watch", "t2"]);
    assert!(code == Some(3) && text.contains("t1 is cancelled: run `cfq retry t1`"), "{text}");
    gate.open();
    assert!(client.succeed(&["retry", "t1"]).contains("t1 is retried by t3"));
    client.wait_for(2, TaskState::Merged).await;
    client.wait_for(3, TaskState::Merged).await;
    let shown = client.succeed(&["show", "t2"]);
    assert!(shown.contains("after       t3 (merged)"), "{shown}");
    client.cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn task_with_a_time_is_queued_until_then() {
    let client = Client::start().await;
    client.cluster.models.script("alpha", vec![Reply::Text(python("a.py"))]);
    let (code, text) = client.run(&["submit", "x", "--at", "tomorrow"]);
    assert!(code == Some(2) && text.contains("\"tomorrow\" is not a time: use 2026-"), "{text}");
    let date = std::process::Command::new("date").args(["-u", "-d", "+5 seconds", "+%Y-%m-%d %H:%M:%S UTC"]).output();
    let at = String::from_utf8(date.unwrap().stdout).unwrap();
    client.submit("a.py", &["--at", at.trim()]);
    let queued = client.cluster.client.task(TaskKey::Number(TaskNumber(1))).await.unwrap();
    assert_eq!(queued.summary.state, TaskState::Queued);
    let run_at = queued.spec.run_at.unwrap();
    let list = client.succeed(&["ls"]);
    assert!(list.contains("queued") && list.contains("starts at 20"), "{list}");
    assert!(client.succeed(&["show", "t1"]).contains("run at      20"));
    let merged = client.wait_for(1, TaskState::Merged).await;
    let events = client.cluster.client.events(client.cluster.key(&merged), 0).await.unwrap().events;
    let started = events
        .iter()
        .find(|event| matches!(event.body, cfq_proto::event::EventBody::TaskStateChanged { to: TaskState::Ready, .. }));
    assert!(started.unwrap().at >= run_at as f64, "{started:?}");
    client.cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn batch_is_accepted_as_a_whole_and_a_cycle_is_named() {
    let client = Client::start().await;
    let scripted = ["a.py", "b.py", "c.py"].map(|name| Reply::Text(python(name)));
    client.cluster.models.script("alpha", scripted.to_vec());
    let file = client.home.path().join("tasks.yaml");
    let submit = |entries: &str| {
        let repo = client.repo.path().display().to_string();
        std::fs::write(&file, format!("repo: {repo}\nlanguage: python\ntasks:\n{entries}")).unwrap();
        client.run(&["submit", "-f", file.to_str().unwrap()])
    };
    let entry =
        |name: &str, after: &str| format!("- {{name: {name}, description: Write {name}.py, after: [{after}]}}\n");
    for (entries, words) in [
        ([entry("a", "c"), entry("b", "a"), entry("c", "b")], "a after c after b after a; remove one"),
        ([entry("a", ""), entry("b", "a"), entry("c", "d")], "tasks[2].after: no task of the batch has the name d"),
        ([entry("a", ""), entry("b", "t7"), entry("c", "b")], "there is no task t7"),
        ([entry("a", ""), entry("b", "a"), entry("b", "a")], "two tasks of the batch have the name b"),
    ] {
        let (code, text) = submit(&entries.concat());
        assert!(code != Some(0) && text.contains(words), "{words:?} is not in {text:?}");
    }
    assert!(client.cluster.client.tasks(None, 10).await.unwrap().tasks.is_empty(), "nothing was accepted");
    // The last task comes first in the file.
    let (code, text) = submit(&[entry("c", "a, b"), entry("b", "a"), entry("a", "")].concat());
    assert!(code == Some(0) && text.contains("t3 accepted (c)") && text.contains("t1 accepted (a)"), "{text}");
    let last = client.wait_for(3, TaskState::Merged).await;
    assert_eq!(last.predecessors.iter().map(|task| task.number.0).collect::<Vec<_>>(), [1, 2]);
    client.cluster.finish().await;
}
