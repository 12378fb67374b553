//! Prometheus metrics of the scheduler. Dashboards and alerts depend on the metric names, so a snapshot test pins them.

use cfq_proto::node::{Device, DeviceKind, ModelState, Residency};
use prometheus::{
    Encoder, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, Opts,
    Registry, TextEncoder,
};

use crate::store::Gauges;
use attempts::AttemptMetrics;

mod attempts;

/// All metrics of this process. Clones share the values.
#[derive(Debug, Clone)]
pub struct Metrics {
    registry: Registry,
    http_requests: IntCounterVec,
    http_seconds: HistogramVec,
    nats_requests: IntCounterVec,
    nats_seconds: HistogramVec,
    pub placements: IntCounter,
    pub attempts: AttemptMetrics,
    pub wait_estimate_ratio: Histogram,
    pub work_orders_resent: IntCounter,
    pub job_leases_expired: IntCounter,
    pub task_leases_expired: IntCounter,
    pub leader: IntGauge,
    pub elections_won: IntCounter,
    pub node_starts: IntCounterVec,
    pub open_event_feeds: IntGauge,
    pub open_calls: IntGauge,
    pub event_feed_polls: IntCounter,
    tasks: GaugeVec,
    jobs: GaugeVec,
    heartbeat_age: GaugeVec,
    devices: DeviceGauges,
    models: ModelGauges,
    oldest_queued_job_age: Gauge,
    jobs_dead_tuples: Gauge,
    open_questions: Gauge,
}

fn gauges(registry: &Registry, name: &str, help: &str, labels: &[&str]) -> Result<GaugeVec, prometheus::Error> {
    let gauges = GaugeVec::new(Opts::new(name, help), labels)?;
    registry.register(Box::new(gauges.clone()))?;
    Ok(gauges)
}

/// Gauges of the nodes' devices, as the nodes report them.
#[derive(Debug, Clone)]
struct DeviceGauges {
    memory: GaugeVec,
    other_processes: GaugeVec,
    temperature: GaugeVec,
    power: GaugeVec,
    power_limit: GaugeVec,
    throttled: GaugeVec,
}

impl DeviceGauges {
    fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let gauges = |name: &str, help: &str| gauges(registry, name, help, &["node", "device"]);
        Ok(Self {
            memory: gauges("cfq_device_memory_bytes", "Total memory of the device.")?,
            other_processes: gauges(
                "cfq_device_memory_other_processes_bytes",
                "Memory of the device that other processes use.",
            )?,
            temperature: gauges("cfq_device_temperature_celsius", "Temperature of the GPU.")?,
            power: gauges("cfq_device_power_watts", "Power that the GPU draws.")?,
            power_limit: gauges("cfq_device_power_limit_watts", "Power limit of the GPU.")?,
            throttled: gauges("cfq_device_throttled", "1 while the GPU is throttled, else 0.")?,
        })
    }

    /// Replaces all device series, so that a device that is lost, or whose node is lost, is no longer exported.
    fn set(&self, devices: &[(String, Device)]) {
        let all =
            [&self.memory, &self.other_processes, &self.temperature, &self.power, &self.power_limit, &self.throttled];
        all.iter().for_each(|gauges| gauges.reset());
        for (node, device) in devices {
            let set = |gauges: &GaugeVec, value: f64| gauges.with_label_values(&[node.as_str(), &device.id]).set(value);
            let watts = |milliwatts: u32| f64::from(milliwatts) / 1000.0;
            set(&self.memory, device.memory_total as f64);
            set(&self.other_processes, device.memory_others as f64);
            device.temperature_c.into_iter().for_each(|celsius| set(&self.temperature, f64::from(celsius)));
            device.power_mw.into_iter().for_each(|power| set(&self.power, watts(power)));
            device.power_limit_mw.into_iter().for_each(|power| set(&self.power_limit, watts(power)));
            if device.kind == DeviceKind::Cuda {
                set(&self.throttled, f64::from(u8::from(!device.throttled.is_empty())));
            }
        }
    }
}

/// Gauges of the models' KV caches, as the nodes report them.
#[derive(Debug, Clone)]
struct ModelGauges {
    free_tokens: GaugeVec,
    tokens: GaugeVec,
}

impl ModelGauges {
    fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let gauges = |name: &str, help: &str, labels: &[&str]| gauges(registry, name, help, labels);
        let help = "Tokens in the model's KV cache, by tier: device, or offloaded to host memory.";
        Ok(Self {
            free_tokens: gauges(
                "cfq_model_kv_free_tokens",
                "Tokens for which the model's KV cache has free capacity.",
                &["node", "model"],
            )?,
            tokens: gauges("cfq_model_kv_tokens", help, &["node", "model", "tier"])?,
        })
    }

    /// Replaces all series of the models' KV caches. The number of tokens per tier is exported even while the model is
    /// not resident; the number of free tokens is not.
    fn set(&self, models: &[(String, ModelState)]) {
        [&self.free_tokens, &self.tokens].iter().for_each(|gauges| gauges.reset());
        for (node, state) in models {
            let (node, model) = (node.as_str(), state.model.as_str());
            if state.residency == Residency::Resident {
                self.free_tokens.with_label_values(&[node, model]).set(state.kv_tokens_free as f64);
            }
            for (tier, tokens) in [("device", state.kv_tiers.device), ("offloaded", state.kv_tiers.offloaded)] {
                self.tokens.with_label_values(&[node, model, tier]).set(tokens as f64);
            }
        }
    }
}

#[derive(Debug, thiserror::Error)]
#[error("cannot register or encode the metrics")]
pub struct MetricsError(#[from] prometheus::Error);

impl Metrics {
    pub fn new() -> Result<Self, MetricsError> {
        let registry = Registry::new();
        let counter = |name: &str, help: &str| -> Result<IntCounter, MetricsError> {
            let counter = IntCounter::with_opts(Opts::new(name, help))?;
            registry.register(Box::new(counter.clone()))?;
            Ok(counter)
        };
        let counters = |name: &str, help: &str, labels: &[&str]| -> Result<IntCounterVec, MetricsError> {
            let counters = IntCounterVec::new(Opts::new(name, help), labels)?;
            registry.register(Box::new(counters.clone()))?;
            Ok(counters)
        };
        let histogram = |name: &str, help: &str, labels: &[&str]| -> Result<HistogramVec, MetricsError> {
            let buckets = vec![0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0];
            let histogram = HistogramVec::new(HistogramOpts::new(name, help).buckets(buckets), labels)?;
            registry.register(Box::new(histogram.clone()))?;
            Ok(histogram)
        };
        let gauges = |name: &str, help: &str, label: &str| gauges(&registry, name, help, &[label]);
        let int_gauge = |name: &str, help: &str| -> Result<IntGauge, MetricsError> {
            let gauge = IntGauge::with_opts(Opts::new(name, help))?;
            registry.register(Box::new(gauge.clone()))?;
            Ok(gauge)
        };
        let gauge = |name: &str, help: &str| -> Result<Gauge, MetricsError> {
            let gauge = Gauge::with_opts(Opts::new(name, help))?;
            registry.register(Box::new(gauge.clone()))?;
            Ok(gauge)
        };
        let wait_estimate_ratio = Histogram::with_opts(
            HistogramOpts::new(
                "cfq_job_wait_estimate_ratio",
                "Actual wait of a placed job, divided by the wait that was estimated last.",
            )
            .buckets(vec![0.1, 0.25, 0.5, 0.75, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0]),
        )?;
        registry.register(Box::new(wait_estimate_ratio.clone()))?;
        let build = gauges("cfq_build_info", "Always 1; the label is the version of this build.", "version")?;
        build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1.0);
        Ok(Self {
            http_requests: counters(
                "cfq_http_requests_total",
                "Answered HTTP requests.",
                &["method", "path", "status"],
            )?,
            http_seconds: histogram(
                "cfq_http_request_duration_seconds",
                "Time until the response headers are sent.",
                &["method", "path"],
            )?,
            nats_requests: counters(
                "cfq_nats_requests_total",
                "NATS requests of nodes and runners.",
                &["verb", "outcome"],
            )?,
            nats_seconds: histogram("cfq_nats_request_duration_seconds", "Time until the reply is ready.", &["verb"])?,
            placements: counter("cfq_placements_total", "Attempts that were placed on a node.")?,
            attempts: AttemptMetrics::new(&registry)?,
            wait_estimate_ratio,
            work_orders_resent: counter(
                "cfq_work_orders_resent_total",
                "Work orders that were sent again because no node accepted them in time.",
            )?,
            job_leases_expired: counter("cfq_job_leases_expired_total", "Job leases that expired.")?,
            task_leases_expired: counter("cfq_task_leases_expired_total", "Task leases that expired.")?,
            leader: int_gauge("cfq_leader", "1 while this scheduler is the leader, else 0.")?,
            elections_won: counter("cfq_elections_won_total", "Elections that this scheduler won.")?,
            node_starts: counters(
                "cfq_node_starts_total",
                "Times that the node's process was started again.",
                &["node"],
            )?,
            open_event_feeds: int_gauge("cfq_open_event_feeds", "Open event feeds.")?,
            open_calls: int_gauge("cfq_open_calls", "Open model calls of clients of the OpenAI-compatible API.")?,
            event_feed_polls: counter(
                "cfq_event_feed_polls_total",
                "Database queries for new events by the feeds of single tasks.",
            )?,
            tasks: gauges("cfq_tasks", "Tasks by state.", "state")?,
            jobs: gauges("cfq_jobs", "Jobs by state.", "state")?,
            heartbeat_age: gauges(
                "cfq_node_last_heartbeat_age_seconds",
                "Time since the last heartbeat of the node.",
                "node",
            )?,
            devices: DeviceGauges::new(&registry)?,
            models: ModelGauges::new(&registry)?,
            oldest_queued_job_age: gauge("cfq_oldest_queued_job_age_seconds", "Age of the oldest queued job.")?,
            jobs_dead_tuples: gauge(
                "cfq_jobs_dead_tuples",
                "Dead tuples of the jobs table; growth means that autovacuum lags behind.",
            )?,
            open_questions: gauge("cfq_open_questions", "Open questions that wait for a human's answer.")?,
            registry,
        })
    }

    pub fn observe_http(&self, method: &str, path: &str, status: u16, seconds: f64) {
        self.http_requests.with_label_values(&[method, path, &status.to_string()]).inc();
        self.http_seconds.with_label_values(&[method, path]).observe(seconds);
    }

    pub fn observe_nats(&self, verb: &str, outcome: &str, seconds: f64) {
        self.nats_requests.with_label_values(&[verb, outcome]).inc();
        self.nats_seconds.with_label_values(&[verb]).observe(seconds);
    }

    /// Encodes the metrics page in the Prometheus text format. `read` holds the numbers read from the database; if it
    /// is `None` (the database is unavailable), the gauges of these numbers keep their last values.
    pub fn encode(&self, read: Option<&Gauges>) -> Result<Vec<u8>, MetricsError> {
        if let Some(read) = read {
            self.tasks.reset();
            read.tasks.iter().for_each(|(state, n)| self.tasks.with_label_values(&[state]).set(*n as f64));
            self.jobs.reset();
            read.jobs.iter().for_each(|(state, n)| self.jobs.with_label_values(&[state]).set(*n as f64));
            self.heartbeat_age.reset();
            for (node, age) in &read.nodes {
                self.heartbeat_age.with_label_values(&[node]).set(*age);
                self.attempts.add_node(node);
                self.node_starts.with_label_values(&[node]);
            }
            read.models.iter().for_each(|(node, state)| self.attempts.add_model(node, state.model.as_str()));
            self.devices.set(&read.devices);
            self.models.set(&read.models);
            self.oldest_queued_job_age.set(read.oldest_queued_job_s);
            self.jobs_dead_tuples.set(read.dead_job_tuples as f64);
            self.open_questions.set(read.open_questions as f64);
        }
        let mut page = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut page)?;
        Ok(page)
    }
}

#[cfg(test)]
mod tests;
