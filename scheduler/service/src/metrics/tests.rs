use super::*;
use crate::store::EndedAttempt;

/// A page with a value of every metric.
fn page() -> String {
    let metrics = Metrics::new().unwrap();
    metrics.observe_http("GET", "/api/v1/tasks", 200, 0.01);
    metrics.observe_nats("heartbeat", "answered", 0.01);
    let model = || "path:/m.gguf".parse().unwrap();
    let usage = serde_json::json!({
        "prompt_tokens": 100, "cached_tokens": 60, "output_tokens": 30, "resumed_tokens": 10,
        "first_token_ms": 250, "total_ms": 1500,
    });
    let done = EndedAttempt::Done { model: model(), usage: serde_json::from_value(usage).unwrap() };
    metrics.attempts.observe(&"den".parse().unwrap(), &done);
    metrics.attempts.observe(&"den".parse().unwrap(), &EndedAttempt::Failed);
    let mut gauges = Gauges::default();
    gauges.tasks.insert("ready".into(), 1);
    gauges.jobs.insert("queued".into(), 1);
    gauges.nodes.push(("den".into(), 0.5));
    let gpu = serde_json::json!({
        "id": "cuda:0", "kind": "cuda", "name": "a GPU", "memory_total": 8, "memory_others": 1,
        "temperature_c": 51, "power_mw": 120_500, "power_limit_mw": 350_000,
    });
    gauges.devices.push(("den".into(), serde_json::from_value(gpu).unwrap()));
    let tiers = cfq_proto::node::KvTiers { device: 640, offloaded: 96 };
    let model = model();
    let state = crate::testing::node_registration(cfq_proto::ids::BootId::fresh()).ledger.models.remove(0);
    gauges.models.push(("den".into(), ModelState { model, kv_tiers: tiers, ..state }));
    String::from_utf8(metrics.encode(Some(&gauges)).unwrap()).unwrap()
}

/// The rules of `promtool check metrics` for help texts, types and units in names.
#[test]
fn metrics_follow_the_conventions_of_prometheus() {
    let page = page();
    let lines = |kind: &'static str| page.lines().filter_map(move |line| line.strip_prefix(kind)?.split_once(' '));
    let types: Vec<(&str, &str)> = lines("# TYPE ").collect();
    assert!(types.len() > 20, "{page}");
    for (name, kind) in types {
        assert!(lines("# HELP ").any(|(named, help)| named == name && help.ends_with('.')), "{name} has no help");
        assert_eq!(name.ends_with("_total"), kind == "counter", "{name} is a {kind}");
        assert!(name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_'), "{name}");
        let parts: Vec<&str> = name.split('_').collect();
        let last = parts[parts.len() - 1];
        assert!(!["count", "sum", "bucket"].contains(&last), "{name} ends like a series of a histogram");
        let types = ["counter", "gauge", "histogram", "summary"];
        let other_units = "milliseconds microseconds minutes hours kilobytes megabytes gigabytes mib gib milliwatts \
                           percent fahrenheit s ms us ns sec b kb mb gb tb m h d";
        let is_refused = |part: &str| types.contains(&part) || other_units.split(' ').any(|unit| unit == part);
        let refused: Vec<_> = parts.into_iter().filter(|part| is_refused(part)).collect();
        assert!(refused.is_empty(), "{name}: no types in names, and only base units: {refused:?}");
    }
}

/// An alert on a metric that is not exported would never fire.
#[test]
fn documented_metrics_are_exported() {
    let (page, documented) = (page(), include_str!("../../../../docs/reference/metrics.md"));
    let names = documented.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    for name in names {
        assert!(page.contains(&format!("# TYPE {name} ")), "{name} is documented, and not exported");
    }
}

#[test]
fn tokens_are_counted_once_where_they_were_generated() {
    let page = page();
    for series in [
        "cfq_attempts_ended_total{node=\"den\",outcome=\"done\"} 1",
        "cfq_attempts_ended_total{node=\"den\",outcome=\"failed\"} 1",
        "cfq_prompt_tokens_total{model=\"path:/m.gguf\",node=\"den\"} 100",
        "cfq_cached_prompt_tokens_total{model=\"path:/m.gguf\",node=\"den\"} 60",
        "cfq_generated_tokens_total{model=\"path:/m.gguf\",node=\"den\"} 20",
        "cfq_job_time_to_first_token_seconds_sum{model=\"path:/m.gguf\",node=\"den\"} 0.25",
        "cfq_job_duration_seconds_sum{model=\"path:/m.gguf\",node=\"den\"} 1.5",
    ] {
        assert!(page.lines().any(|line| line == series), "{series} is not in {page}");
    }
}

#[test]
fn metric_names_and_labels_are_pinned() {
    let page = page();
    let offloaded = "cfq_model_kv_tokens{model=\"path:/m.gguf\",node=\"den\",tier=\"offloaded\"} 96";
    assert!(page.contains(offloaded), "{page}");
    let mut names: Vec<String> = page
        .lines()
        .filter(|l| !l.starts_with('#') && !l.contains("_bucket{") && !l.contains("_sum{"))
        .map(|l| l.split(' ').next().unwrap().replace(env!("CARGO_PKG_VERSION"), "VERSION"))
        .collect();
    names.sort();
    insta::assert_snapshot!(names.join("\n"), @r#"
    cfq_attempts_ended_total{node="den",outcome="done"}
    cfq_attempts_ended_total{node="den",outcome="failed"}
    cfq_attempts_ended_total{node="den",outcome="released"}
    cfq_build_info{version="VERSION"}
    cfq_cached_prompt_tokens_total{model="path:/m.gguf",node="den"}
    cfq_device_memory_bytes{device="cuda:0",node="den"}
    cfq_device_memory_other_processes_bytes{device="cuda:0",node="den"}
    cfq_device_power_limit_watts{device="cuda:0",node="den"}
    cfq_device_power_watts{device="cuda:0",node="den"}
    cfq_device_temperature_celsius{device="cuda:0",node="den"}
    cfq_device_throttled{device="cuda:0",node="den"}
    cfq_elections_won_total
    cfq_event_feed_polls_total
    cfq_generated_tokens_total{model="path:/m.gguf",node="den"}
    cfq_http_request_duration_seconds_count{method="GET",path="/api/v1/tasks"}
    cfq_http_requests_total{method="GET",path="/api/v1/tasks",status="200"}
    cfq_job_duration_seconds_count{model="path:/m.gguf",node="den"}
    cfq_job_leases_expired_total
    cfq_job_time_to_first_token_seconds_count{model="path:/m.gguf",node="den"}
    cfq_job_wait_estimate_ratio_count
    cfq_job_wait_estimate_ratio_sum
    cfq_jobs_dead_tuples
    cfq_jobs{state="queued"}
    cfq_leader
    cfq_model_kv_free_tokens{model="path:/m.gguf",node="den"}
    cfq_model_kv_tokens{model="path:/m.gguf",node="den",tier="device"}
    cfq_model_kv_tokens{model="path:/m.gguf",node="den",tier="offloaded"}
    cfq_nats_request_duration_seconds_count{verb="heartbeat"}
    cfq_nats_requests_total{outcome="answered",verb="heartbeat"}
    cfq_node_last_heartbeat_age_seconds{node="den"}
    cfq_node_starts_total{node="den"}
    cfq_oldest_queued_job_age_seconds
    cfq_open_calls
    cfq_open_event_feeds
    cfq_open_questions
    cfq_placements_total
    cfq_prompt_tokens_total{model="path:/m.gguf",node="den"}
    cfq_task_leases_expired_total
    cfq_tasks{state="ready"}
    cfq_work_orders_resent_total
    "#);
}
