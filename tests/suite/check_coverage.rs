//! Coverage that a project, or a task, requires of the tests.

use cfq_proto::event::{Event, EventBody};
use cfq_proto::ids::TaskKey;
use cfq_proto::loop_step::Step;
use cfq_proto::review::{LineCoverage, Quarantine};
use cfq_proto::task::{CoverageTarget, TaskState};
use cfq_tests::cluster::{Cluster, cfq};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};

/// Runs test.py, and writes which lines of calc.py were executed, in the format of LCOV.
const MEASURE: &str = r#"
import dis, sys

def trace(frame, event, argument):
    if frame.f_code.co_filename == "calc.py":
        executed.add(frame.f_lineno)
        return trace

def lines(code):
    own = {line for _, line in dis.findlinestarts(code) if line}
    return own.union(*(lines(inner) for inner in code.co_consts if hasattr(inner, "co_code")))

executed, names = set(), {}
code = compile(open("calc.py").read(), "calc.py", "exec")
sys.settrace(trace)
exec(code, names)
exec(open("test.py").read(), names)
sys.settrace(None)
with open("lcov.info", "w") as report:
    data = "".join(f"DA:{line},{int(line in executed)}\n" for line in sorted(lines(code)))
    report.write(f"SF:calc.py\n{data}end_of_record\n")
"#;

const CALC: &str = "def add(a, b):\n    return a + b\n";
const CHECKS: &str = "[[check]]\nname = \"tests\"\nrun = [\"python3\", \"measure.py\"]\ncoverage = \"lcov.info\"\n\
                      min_coverage = 80\n";

/// The checks that ran, with their coverage.
async fn runs(cluster: &Cluster, task: TaskKey) -> Vec<(bool, Option<LineCoverage>)> {
    let events = cluster.client.events(task, 0).await.unwrap().events;
    let of_event = |event: Event| match event.body {
        EventBody::StepCommitted { step: Step::Checked { ran, .. }, .. } => ran,
        _ => Vec::new(),
    };
    events.into_iter().flat_map(of_event).map(|run| (run.passed, run.coverage)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn result_that_covers_too_few_lines_is_revised() {
    let cluster = Cluster::start().await;
    let repo = UserRepo::with_uncommitted_changes();
    // A report that is committed is none of a check's.
    let forged = "SF:calc.py\nDA:1,1\nend_of_record\n";
    let test = "assert add(1, 2) == 3\n";
    let base = [("calc.py", CALC), ("test.py", test), ("measure.py", MEASURE), ("lcov.info", forged)];
    repo.commit(&[&base[..], &[(".cfq/checks.toml", CHECKS)]].concat());
    let calc = format!("{CALC}\n\ndef sub(a, b):\n    c = a\n    c -= b\n    return c\n");
    let untested = file("calc.py", &calc);
    let tested = format!("{untested}\n{}", file("test.py", &format!("{test}assert sub(3, 2) == 1\n")));
    cluster.models.script("alpha", vec![Reply::Text(untested), Reply::Text(tested)]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    let [first, second] = detail.iterations.as_slice() else { panic!("{:#?}", detail.iterations) };
    assert_eq!(first.quarantine, Some(Quarantine::FailedChecks));
    let message = &first.findings[0].message;
    let expected = "the tests of the check `tests` cover 50.0 % of 6 lines, and at least 80 % are required";
    assert!(message.starts_with(expected), "{message}");
    assert!(cluster.models.prompts("alpha")[1].contains("at least 80 % are required"));
    assert_eq!(second.quarantine, None);
    let covered = |covered| Some(LineCoverage { covered, total: 6 });
    assert_eq!(runs(&cluster, task).await, [(false, covered(3)), (true, covered(6))]);
    let home = tempfile::tempdir().unwrap();
    let shown = cfq(&cluster, home.path(), &["show", &detail.summary.number.to_string()]);
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains("covers 100.0 % of 6 lines"), "{shown}");
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn task_requires_a_coverage_of_its_files() {
    let cluster = Cluster::start().await;
    let repo = UserRepo::with_uncommitted_changes();
    let checks = CHECKS.replace("min_coverage = 80\n", "");
    let calc = format!("{CALC}\n\ndef sub(a, b):\n    c = a\n    c -= b\n    return c\n");
    let test = "assert add(1, 2) == 3\n";
    repo.commit(&[("calc.py", &calc), ("test.py", test), ("measure.py", MEASURE), (".cfq/checks.toml", &checks)]);
    let same = file("test.py", &format!("{test}assert add(2, 2) == 4\n"));
    let more = file("test.py", &format!("{test}assert sub(3, 2) == 1\n"));
    cluster.models.script("alpha", vec![Reply::Text(same), Reply::Text(more)]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let mut spec = cluster.spec(&repo);
    spec.coverage = Some(CoverageTarget { percent: 90, files: vec!["calc.py".to_owned()] });
    let task = cluster.submit(&spec).await;
    let detail = cluster.wait_until_settled(task).await;
    assert_eq!(detail.summary.state, TaskState::Merged, "{}", detail.reason);
    let [first, second] = detail.iterations.as_slice() else { panic!("{:#?}", detail.iterations) };
    assert_eq!(first.quarantine, Some(Quarantine::FailedChecks));
    let expected = "the tests cover 50.0 % of 6 lines of calc.py; the task requires at least 90 %";
    assert_eq!(first.findings[0].message, expected);
    assert_eq!(second.quarantine, None);
    for model in ["alpha", "beta"] {
        let prompt = &cluster.models.prompts(model)[0];
        assert!(prompt.contains("The tests must execute at least 90 % of the lines of calc.py."), "{model}: {prompt}");
    }
    let covered = |covered| Some(LineCoverage { covered, total: 6 });
    assert_eq!(runs(&cluster, task).await, [(true, covered(3)), (true, covered(6))]);
    spec.coverage = Some(CoverageTarget { percent: 101, files: Vec::new() });
    let refused = cluster.client.check_task(&spec).await.unwrap_err().to_string();
    assert!(refused.contains("coverage.percent"), "{refused}");
    cluster.finish().await;
}
