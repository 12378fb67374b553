//! What is counted, with conventional Prometheus names. The names are an interface: a snapshot test holds them.

use cfq_proto::node::{Device, DeviceKind, ModelState, Residency};
use prometheus::{
    Encoder, Gauge, GaugeVec, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, Opts, Registry,
    TextEncoder,
};

use crate::store::Gauges;

#[derive(Debug, Clone)]
pub struct Metrics {
    registry: Registry,
    http: IntCounterVec,
    http_seconds: HistogramVec,
    bus: IntCounterVec,
    bus_seconds: HistogramVec,
    pub placements: IntCounter,
    pub republished: IntCounter,
    pub jobs_lost: IntCounter,
    pub tasks_lost: IntCounter,
    pub leader: IntGauge,
    pub elections: IntCounter,
    pub feeds: IntGauge,
    pub feed_looks: IntCounter,
    tasks: GaugeVec,
    jobs: GaugeVec,
    beat_age: GaugeVec,
    devices: DeviceGauges,
    models: ModelGauges,
    oldest: Gauge,
    dead_tuples: Gauge,
    questions: Gauge,
}

fn gauges(registry: &Registry, name: &str, help: &str, labels: &[&str]) -> Result<GaugeVec, prometheus::Error> {
    let made = GaugeVec::new(Opts::new(name, help), labels)?;
    registry.register(Box::new(made.clone()))?;
    Ok(made)
}

/// What the nodes' devices say of themselves.
#[derive(Debug, Clone)]
struct DeviceGauges {
    memory: GaugeVec,
    others: GaugeVec,
    temperature: GaugeVec,
    power: GaugeVec,
    power_limit: GaugeVec,
    throttled: GaugeVec,
}

impl DeviceGauges {
    fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let gauges = |name: &str, help: &str| gauges(registry, name, help, &["node", "device"]);
        Ok(Self {
            memory: gauges("cfq_device_memory_bytes", "Memory of a device.")?,
            others: gauges("cfq_device_memory_others_bytes", "Memory of a device that other processes hold.")?,
            temperature: gauges("cfq_device_temperature_celsius", "Temperature of a card.")?,
            power: gauges("cfq_device_power_watts", "What a card draws.")?,
            power_limit: gauges("cfq_device_power_limit_watts", "The most a card may draw.")?,
            throttled: gauges("cfq_device_throttled", "1 while a card runs slower than it could.")?,
        })
    }

    /// A device that is lost, or whose node is, leaves nothing behind.
    fn set(&self, devices: &[(String, Device)]) {
        let all = [&self.memory, &self.others, &self.temperature, &self.power, &self.power_limit, &self.throttled];
        all.iter().for_each(|gauges| gauges.reset());
        for (node, device) in devices {
            let set = |gauges: &GaugeVec, value: f64| gauges.with_label_values(&[node.as_str(), &device.id]).set(value);
            let watts = |milliwatts: u32| f64::from(milliwatts) / 1000.0;
            set(&self.memory, device.memory_total as f64);
            set(&self.others, device.memory_others as f64);
            device.temperature_c.into_iter().for_each(|celsius| set(&self.temperature, f64::from(celsius)));
            device.power_mw.into_iter().for_each(|power| set(&self.power, watts(power)));
            device.power_limit_mw.into_iter().for_each(|power| set(&self.power_limit, watts(power)));
            if device.kind == DeviceKind::Cuda {
                set(&self.throttled, f64::from(u8::from(!device.throttled.is_empty())));
            }
        }
    }
}

/// What the nodes' models say of their keys and values.
#[derive(Debug, Clone)]
struct ModelGauges {
    free: GaugeVec,
    held: GaugeVec,
}

impl ModelGauges {
    fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let gauges = |name: &str, help: &str, labels: &[&str]| gauges(registry, name, help, labels);
        let help = "Tokens whose keys and values are in a model's own pool (device) or parked in its node's memory.";
        Ok(Self {
            free: gauges("cfq_model_kv_tokens_free", "Tokens that a model has room for now.", &["node", "model"])?,
            held: gauges("cfq_model_kv_tokens", help, &["node", "model", "tier"])?,
        })
    }

    /// Parked ones outlive their model's stay in memory.
    fn set(&self, models: &[(String, ModelState)]) {
        [&self.free, &self.held].iter().for_each(|gauges| gauges.reset());
        for (node, state) in models {
            let (node, model) = (node.as_str(), state.model.as_str());
            if state.residency == Residency::Resident {
                self.free.with_label_values(&[node, model]).set(state.kv_tokens_free as f64);
            }
            for (tier, tokens) in [("device", state.kv_tiers.device), ("parked", state.kv_tiers.parked)] {
                self.held.with_label_values(&[node, model, tier]).set(tokens as f64);
            }
        }
    }
}

#[derive(Debug, thiserror::Error)]
#[error("cannot set the metrics up")]
pub struct MetricsError(#[from] prometheus::Error);

impl Metrics {
    pub fn new() -> Result<Self, MetricsError> {
        let registry = Registry::new();
        let counter = |name: &str, help: &str| -> Result<IntCounter, MetricsError> {
            let made = IntCounter::with_opts(Opts::new(name, help))?;
            registry.register(Box::new(made.clone()))?;
            Ok(made)
        };
        let counters = |name: &str, help: &str, labels: &[&str]| -> Result<IntCounterVec, MetricsError> {
            let made = IntCounterVec::new(Opts::new(name, help), labels)?;
            registry.register(Box::new(made.clone()))?;
            Ok(made)
        };
        let histogram = |name: &str, help: &str, labels: &[&str]| -> Result<HistogramVec, MetricsError> {
            let buckets = vec![0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0];
            let made = HistogramVec::new(HistogramOpts::new(name, help).buckets(buckets), labels)?;
            registry.register(Box::new(made.clone()))?;
            Ok(made)
        };
        let gauges = |name: &str, help: &str, label: &str| gauges(&registry, name, help, &[label]);
        let int_gauge = |name: &str, help: &str| -> Result<IntGauge, MetricsError> {
            let made = IntGauge::with_opts(Opts::new(name, help))?;
            registry.register(Box::new(made.clone()))?;
            Ok(made)
        };
        let gauge = |name: &str, help: &str| -> Result<Gauge, MetricsError> {
            let made = Gauge::with_opts(Opts::new(name, help))?;
            registry.register(Box::new(made.clone()))?;
            Ok(made)
        };
        let build = gauges("cfq_build_info", "Always 1; the version is the label.", "version")?;
        build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1.0);
        Ok(Self {
            http: counters("cfq_http_requests_total", "HTTP requests answered.", &["method", "path", "status"])?,
            http_seconds: histogram(
                "cfq_http_request_duration_seconds",
                "Time to the answer's head.",
                &["method", "path"],
            )?,
            bus: counters("cfq_bus_requests_total", "Requests of nodes and runners.", &["verb", "outcome"])?,
            bus_seconds: histogram("cfq_bus_request_duration_seconds", "Time to the answer.", &["verb"])?,
            placements: counter("cfq_placements_total", "Attempts placed on a node.")?,
            republished: counter("cfq_orders_republished_total", "Orders sent again because nobody accepted them.")?,
            jobs_lost: counter("cfq_job_leases_expired_total", "Job leases that ran out.")?,
            tasks_lost: counter("cfq_task_leases_expired_total", "Task leases that ran out.")?,
            leader: int_gauge("cfq_leader", "1 while this scheduler leads.")?,
            elections: counter("cfq_elections_total", "Times this scheduler took the lead.")?,
            feeds: int_gauge("cfq_feeds", "Event feeds open.")?,
            feed_looks: counter("cfq_feed_looks_total", "Times a task's feed asked the database for events.")?,
            tasks: gauges("cfq_tasks", "Tasks by state.", "state")?,
            jobs: gauges("cfq_jobs", "Jobs by state.", "state")?,
            beat_age: gauges("cfq_node_last_beat_age_seconds", "Time since a node's last beat.", "node")?,
            devices: DeviceGauges::new(&registry)?,
            models: ModelGauges::new(&registry)?,
            oldest: gauge("cfq_oldest_queued_job_age_seconds", "Age of the oldest job that waits for placement.")?,
            dead_tuples: gauge("cfq_jobs_dead_tuples", "Dead rows of the job table; growth means autovacuum lags.")?,
            questions: gauge("cfq_open_questions", "Questions only a human can answer.")?,
            registry,
        })
    }

    pub fn http(&self, method: &str, path: &str, status: u16, seconds: f64) {
        self.http.with_label_values(&[method, path, &status.to_string()]).inc();
        self.http_seconds.with_label_values(&[method, path]).observe(seconds);
    }

    pub fn bus(&self, verb: &str, outcome: &str, seconds: f64) {
        self.bus.with_label_values(&[verb, outcome]).inc();
        self.bus_seconds.with_label_values(&[verb]).observe(seconds);
    }

    /// The page, with the database's figures where they could be read.
    pub fn page(&self, read: Option<&Gauges>) -> Result<Vec<u8>, MetricsError> {
        if let Some(read) = read {
            self.tasks.reset();
            read.tasks.iter().for_each(|(state, n)| self.tasks.with_label_values(&[state]).set(*n as f64));
            self.jobs.reset();
            read.jobs.iter().for_each(|(state, n)| self.jobs.with_label_values(&[state]).set(*n as f64));
            self.beat_age.reset();
            read.nodes.iter().for_each(|(node, age)| self.beat_age.with_label_values(&[node]).set(*age));
            self.devices.set(&read.devices);
            self.models.set(&read.models);
            self.oldest.set(read.oldest_queued_job_s);
            self.dead_tuples.set(read.dead_job_tuples as f64);
            self.questions.set(read.open_questions as f64);
        }
        let mut page = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut page)?;
        Ok(page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_and_labels_are_an_interface() {
        let metrics = Metrics::new().unwrap();
        metrics.http("GET", "/api/v1/tasks", 200, 0.01);
        metrics.bus("beat", "answered", 0.01);
        let mut gauges = Gauges::default();
        gauges.tasks.insert("ready".into(), 1);
        gauges.jobs.insert("queued".into(), 1);
        gauges.nodes.push(("den".into(), 0.5));
        let card = serde_json::json!({
            "id": "cuda:0", "kind": "cuda", "name": "a card", "memory_total": 8, "memory_others": 1,
            "temperature_c": 51, "power_mw": 120_500, "power_limit_mw": 350_000,
        });
        gauges.devices.push(("den".into(), serde_json::from_value(card).unwrap()));
        let tiers = cfq_proto::node::KvTiers { device: 640, parked: 96 };
        let model = "path:/m.gguf".parse().unwrap();
        let state = crate::testing::node_hello(cfq_proto::ids::BootId::fresh()).ledger.models.remove(0);
        gauges.models.push(("den".into(), ModelState { model, kv_tiers: tiers, ..state }));
        let page = String::from_utf8(metrics.page(Some(&gauges)).unwrap()).unwrap();
        assert!(page.contains("cfq_model_kv_tokens{model=\"path:/m.gguf\",node=\"den\",tier=\"parked\"} 96"), "{page}");
        let mut names: Vec<String> = page
            .lines()
            .filter(|l| !l.starts_with('#') && !l.contains("_bucket{") && !l.contains("_sum{"))
            .map(|l| l.split(' ').next().unwrap().replace(env!("CARGO_PKG_VERSION"), "VERSION"))
            .collect();
        names.sort();
        insta::assert_snapshot!(names.join("\n"), @r#"
        cfq_build_info{version="VERSION"}
        cfq_bus_request_duration_seconds_count{verb="beat"}
        cfq_bus_requests_total{outcome="answered",verb="beat"}
        cfq_device_memory_bytes{device="cuda:0",node="den"}
        cfq_device_memory_others_bytes{device="cuda:0",node="den"}
        cfq_device_power_limit_watts{device="cuda:0",node="den"}
        cfq_device_power_watts{device="cuda:0",node="den"}
        cfq_device_temperature_celsius{device="cuda:0",node="den"}
        cfq_device_throttled{device="cuda:0",node="den"}
        cfq_elections_total
        cfq_feed_looks_total
        cfq_feeds
        cfq_http_request_duration_seconds_count{method="GET",path="/api/v1/tasks"}
        cfq_http_requests_total{method="GET",path="/api/v1/tasks",status="200"}
        cfq_job_leases_expired_total
        cfq_jobs_dead_tuples
        cfq_jobs{state="queued"}
        cfq_leader
        cfq_model_kv_tokens_free{model="path:/m.gguf",node="den"}
        cfq_model_kv_tokens{model="path:/m.gguf",node="den",tier="device"}
        cfq_model_kv_tokens{model="path:/m.gguf",node="den",tier="parked"}
        cfq_node_last_beat_age_seconds{node="den"}
        cfq_oldest_queued_job_age_seconds
        cfq_open_questions
        cfq_orders_republished_total
        cfq_placements_total
        cfq_task_leases_expired_total
        cfq_tasks{state="ready"}
        "#);
    }
}
