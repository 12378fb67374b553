//! Tests the files for Prometheus and Grafana in deploy/: they use metrics and labels that cfq exports, and promtool
//! accepts them. promtool is part of Prometheus; without it, its part is skipped.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use cfq_tests::cluster::{Cluster, TOKEN};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap()
}

/// A row of the tables in docs/reference/metrics.md.
#[derive(Debug, PartialEq)]
struct Documented {
    kind: String,
    labels: BTreeSet<String>,
}

fn documented() -> BTreeMap<String, Documented> {
    let page = read("docs/reference/metrics.md");
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `cfq_"));
    rows.map(|row| {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let name = format!("cfq_{}", cells[0].trim_end_matches('`'));
        let labels = cells[2].split(',').map(|label| label.trim().trim_matches('`').to_owned());
        (name, Documented { kind: cells[1].to_owned(), labels: labels.filter(|label| !label.is_empty()).collect() })
    })
    .collect()
}

/// The documented metric to which a series belongs: its own name, or for a histogram the name without its ending.
fn metric<'n>(series: &'n str, documented: &BTreeMap<String, Documented>) -> Option<&'n str> {
    let endings = ["", "_bucket", "_sum", "_count"];
    endings.into_iter().filter_map(|ending| series.strip_suffix(ending)).find(|name| documented.contains_key(*name))
}

/// The names of metrics in a text, each with the names of the labels in the braces that follow it.
fn used(text: &str) -> Vec<(String, BTreeSet<String>)> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let starts = text.match_indices("cfq_").map(|(at, _)| at);
    starts
        .map(|at| {
            let rest = &text[at..];
            let (name, after) = rest.split_at(rest.find(|c| !is_name(c)).unwrap_or(rest.len()));
            let matchers = after.strip_prefix('{').and_then(|m| m.split_once('}')).map_or("", |(inside, _)| inside);
            (name.to_owned(), label_names(matchers))
        })
        .collect()
}

/// The names in `a="1", b=~"2"`.
fn label_names(matchers: &str) -> BTreeSet<String> {
    let names = matchers.split(',').filter_map(|matcher| matcher.split_once(['=', '!']));
    names.map(|(name, _)| name.trim().to_owned()).collect()
}

/// The labels by which expressions in a text group.
fn grouped(text: &str) -> BTreeSet<String> {
    let lists = text.split("by (").skip(1).filter_map(|rest| rest.split_once(')'));
    lists.flat_map(|(list, _)| list.split(',').map(|label| label.trim().to_owned())).collect()
}

/// All expressions of the dashboard, with values for Grafana's variables.
fn dashboard_expressions() -> Vec<String> {
    let dashboard: serde_json::Value = serde_json::from_str(&read("deploy/grafana/dashboards/cfq.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
    let expressions = targets.map(|target| target["expr"].as_str().unwrap());
    expressions.map(|e| e.replace("$__rate_interval", "5m").replace("$job", "cfq")).collect()
}

/// Runs promtool, which has to succeed.
fn promtool(folder: &Path, args: &[&str], stdin: Stdio) {
    let output = Command::new("promtool").args(args).current_dir(folder).stdin(stdin).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "promtool {args:?}: {}", String::from_utf8_lossy(&text));
}

#[tokio::test(flavor = "multi_thread")]
async fn exported_metrics_are_documented_and_follow_the_conventions() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![Reply::Text(file("add.py", "def add(a, b):\n    return a + b"))]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let repo = UserRepo::with_uncommitted_changes();
    let task = cluster.submit(&cluster.spec(&repo)).await;
    cluster.wait_until_settled(task).await;
    let http = cfq_link::outbound::api_client().unwrap();
    let page = http.get(format!("{}/metrics", cluster.client.url())).bearer_auth(TOKEN).send().await.unwrap();
    let page = page.text().await.unwrap();

    let documented = documented();
    let types: Vec<_> = page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' ')).collect();
    for (name, kind) in &types {
        assert_eq!(documented.get(*name).map(|d| d.kind.as_str()), Some(*kind), "{name} in docs/reference/metrics.md");
    }
    for expected in ["cfq_generated_tokens_total", "cfq_job_duration_seconds", "cfq_attempts_ended_total"] {
        assert!(types.iter().any(|(name, _)| *name == expected), "{expected} is not in {page}");
    }
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        // The value of a label may contain braces: a path such as `/api/v1/tasks/{key}`.
        let (series, _) = line.rsplit_once(' ').unwrap();
        let (name, labels) = series.strip_suffix('}').and_then(|s| s.split_once('{')).unwrap_or((series, ""));
        let mut labels = label_names(labels);
        labels.remove("le");
        let of = metric(name, &documented).unwrap_or_else(|| panic!("{name} is not documented"));
        assert_eq!(labels, documented[of].labels, "labels of {name}");
    }
    if has_promtool("exported_metrics_are_documented_and_follow_the_conventions/promtool") {
        let path = cluster.dir.path().join("metrics.txt");
        std::fs::write(&path, &page).unwrap();
        promtool(cluster.dir.path(), &["check", "metrics"], std::fs::File::open(&path).unwrap().into());
    }
    cluster.finish().await;
}

fn has_promtool(part: &str) -> bool {
    let found = Command::new("promtool").arg("--version").output().is_ok();
    if !found {
        cfq_test_skip::skip(part, "promtool, which is part of Prometheus, is not installed");
    }
    found
}

#[test]
fn alerts_and_dashboard_use_documented_metrics_and_labels() {
    let documented = documented();
    let mut known: BTreeSet<String> = documented.values().flat_map(|metric| metric.labels.clone()).collect();
    known.extend(["alertname", "job", "le"].map(str::to_owned));
    let expressions = dashboard_expressions();
    assert!(expressions.len() > 30, "{expressions:?}");
    let alerts = read("deploy/prometheus/cfq-alerts.yml");
    for text in expressions.iter().chain([&alerts, &read("deploy/prometheus/cfq-alerts-test.yml")]) {
        let unknown: Vec<String> = grouped(text).difference(&known).cloned().collect();
        assert!(unknown.is_empty(), "no metric has the labels {unknown:?} in {text}");
        for (name, labels) in used(text) {
            let of = metric(&name, &documented).unwrap_or_else(|| panic!("{name} is not exported: {text}"));
            let own = &documented[of].labels;
            let is_own = |label: &String| own.contains(label) || ["job", "instance"].contains(&label.as_str());
            assert!(labels.iter().all(is_own), "{name} has the labels {own:?}, and not {labels:?}");
        }
    }
}

#[test]
fn promtool_accepts_alerts_configuration_and_dashboard() {
    if !has_promtool("promtool_accepts_alerts_configuration_and_dashboard") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for name in ["prometheus.yml", "cfq-alerts.yml", "cfq-alerts-test.yml"] {
        std::fs::copy(root().join("deploy/prometheus").join(name), folder.path().join(name)).unwrap();
    }
    std::fs::write(folder.path().join("cfq.token"), "token").unwrap();
    // promtool reads expressions in rules only. A JSON string is a YAML string, too.
    let rules = dashboard_expressions().into_iter().enumerate().map(|(at, expression)| {
        format!("      - {{ record: \"panel:{at}\", expr: {} }}\n", serde_json::Value::from(expression))
    });
    let rules = format!("groups:\n  - name: dashboard\n    rules:\n{}", rules.collect::<String>());
    std::fs::write(folder.path().join("dashboard.yml"), rules).unwrap();
    for args in [
        &["check", "config", "prometheus.yml"][..],
        &["test", "rules", "cfq-alerts-test.yml"],
        &["check", "rules", "dashboard.yml"],
    ] {
        promtool(folder.path(), args, Stdio::null());
    }
}
