//! The event loop of a simulated cluster.

mod faults;
mod nodes;
mod scheduler;

use std::collections::HashMap;

use cfq_proto::ids::NodeId;
use cfq_proto::model::ModelId;

use super::checks::Violations;
use super::config::{ClusterConfig, Faults};
use super::leader::Leader;
use super::messages::{ToNode, ToScheduler};
use super::network::{NetworkCounts, copies};
use super::node::SimNode;
use super::tables::{JobEnd, TableCounts, Tables};
use crate::arrivals::Arrivals;
use crate::engine::EngineConfig;
use crate::event_queue::{EventQueue, MS, Micros};
use crate::metrics::Metrics;
use crate::rng::Rng;
use crate::trace::{Call, Workload};

/// Time after the last arrival, or after the end of the faults, at which the run is given up.
const MAX_DRAIN: Micros = 24 * 3_600 * 1_000 * MS;

#[derive(Debug)]
enum Event {
    Arrive(usize),
    Cancel(usize),
    ToScheduler { node: usize, boot: u32, message: ToScheduler },
    ToNode { node: usize, boot: u32, message: ToNode },
    Heartbeat { node: usize, boot: u32 },
    LedgerChanged { node: usize, boot: u32 },
    Loaded { node: usize, boot: u32, model: usize },
    FirstToken { node: usize, boot: u32, lease: u64 },
    Timer { node: usize, boot: u32, lease: u64, timer: u64 },
    Plan,
    Tick,
    Resync,
    NewLeader,
    LeaderLost,
    DatabaseDown,
    Crash(usize),
    Restart(usize),
    Disconnect(usize),
}

/// What a run did.
#[derive(Debug)]
pub struct Outcome {
    /// Measurements.
    pub metrics: Metrics,
    /// Violated properties.
    pub violations: Violations,
    /// Numbers of jobs by their end: done, failed, dead, cancelled.
    pub ends: [u64; 4],
    /// Jobs that had not ended when the run was given up.
    pub unfinished: usize,
    /// Writes to the tables.
    pub tables: TableCounts,
    /// Messages.
    pub network: NetworkCounts,
    /// Numbers of events, plans, effects carried out a second time, effects of replaced leaders, changes of the leader,
    /// crashes of nodes.
    pub counts: RunCounts,
    /// Virtual time at the end, in s.
    pub virtual_s: f64,
}

/// Numbers of what a run did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RunCounts {
    /// Events.
    pub events: u64,
    /// Plans.
    pub plans: u64,
    /// Effects that were carried out a second time.
    pub repeated: u64,
    /// Steps that were compared with a plan that looks at everything.
    pub compared: u64,
    /// Effects of replaced leaders.
    pub replaced: u64,
    /// Changes of the leader.
    pub leaders: u64,
    /// Crashes of nodes.
    pub crashes: u64,
    /// Attempts that a node stopped because its lease was not confirmed.
    pub stopped: u64,
    /// Results that were not committed, because their attempt was not the current one.
    pub fenced: u64,
}

struct World<'a> {
    config: ClusterConfig,
    calls: &'a [Call],
    models: Vec<ModelId>,
    events: EventQueue<Event>,
    rng: Rng,
    tables: Tables,
    leader: Option<Leader>,
    nodes: Vec<SimNode>,
    arrivals: Arrivals,
    arrived: Vec<Micros>,
    has_first_token: Vec<bool>,
    poison: Vec<bool>,
    running_on: HashMap<usize, (usize, u32, u64)>,
    unarrived: usize,
    /// Whether the leader is paused: it neither reads rows nor plans until another one has taken over.
    leader_is_paused: bool,
    plan_is_due: bool,
    plan_is_scheduled: bool,
    database_down_until: Micros,
    grace_until: Micros,
    metrics: Metrics,
    violations: Violations,
    network: NetworkCounts,
    counts: RunCounts,
    loads_before_restarts: u64,
    next_timer: u64,
    last_arrival: Micros,
}

/// Runs a workload on a cluster until every job has ended.
pub fn run(workload: &Workload, config: ClusterConfig) -> Outcome {
    let mut world = World::new(workload, config);
    while let Some(event) = world.events.pop() {
        world.counts.events += 1;
        world.handle(event);
        if world.is_over() {
            break;
        }
    }
    world.outcome()
}

impl<'a> World<'a> {
    fn new(workload: &'a Workload, config: ClusterConfig) -> Self {
        let names: Vec<NodeId> =
            (0..config.nodes).filter_map(|index| NodeId::new(format!("n{index:04}")).ok()).collect();
        let models: Vec<ModelId> =
            (0..workload.models.len()).filter_map(|index| format!("path:/m{index}.gguf").parse().ok()).collect();
        let mut rng = Rng::new(config.seed);
        let mut events = EventQueue::default();
        let (arrivals, first) = Arrivals::new(workload);
        let calls = workload.calls.len();
        first.into_iter().for_each(|(call, at)| events.at(at, Event::Arrive(call)));
        let EngineConfig { kv_tokens, host_tokens, .. } = config.engine;
        let error = config.faults.clock_rate_error;
        let node = |index| SimNode::new(index, config.engine, models.len(), 1.0 + error * (2.0 * rng.unit() - 1.0));
        let nodes: Vec<SimNode> = (0..config.nodes).map(node).collect();
        let tables = Tables::new(names, models.clone(), &config.timing);
        let mut world = Self {
            config,
            calls: &workload.calls,
            models,
            events,
            rng,
            leader: Some(Leader::new(0, &config.timing, &tables)),
            tables,
            nodes,
            arrivals,
            arrived: vec![0; calls],
            has_first_token: vec![false; calls],
            poison: vec![false; calls],
            running_on: HashMap::new(),
            unarrived: calls,
            leader_is_paused: false,
            plan_is_due: false,
            plan_is_scheduled: false,
            database_down_until: 0,
            grace_until: 0,
            metrics: Metrics::new(config.nodes as u64 * (kv_tokens + host_tokens)),
            violations: Violations::default(),
            network: NetworkCounts::default(),
            counts: RunCounts::default(),
            loads_before_restarts: 0,
            next_timer: 0,
            last_arrival: 0,
        };
        world.start();
        world
    }

    /// Registers the nodes and starts the recurring events.
    fn start(&mut self) {
        for index in 0..self.nodes.len() {
            self.nodes[index].engine.preload(index % self.models.len().max(1));
            self.boot(index);
            self.schedule_fault(self.config.faults.crash_interval_s, Event::Crash(index));
            self.schedule_fault(self.config.faults.partition_interval_s, Event::Disconnect(index));
        }
        let sweep = self.config.timing.sweep_ms * MS;
        self.events.after(sweep, Event::Tick);
        self.events.after(self.config.timing.resync_ms * MS, Event::Resync);
        self.schedule_fault(self.config.faults.leader_interval_s, Event::LeaderLost);
        self.schedule_fault(self.config.faults.database_interval_s, Event::DatabaseDown);
    }

    fn faults(&self) -> Option<Faults> {
        let is_active = (self.events.now() as f64) < self.config.faults.until_s * 1e6;
        is_active.then_some(self.config.faults)
    }

    /// Schedules a fault after a random time with this mean, if faults are still injected then.
    fn schedule_fault(&mut self, mean_s: f64, event: Event) {
        if mean_s <= 0.0 {
            return;
        }
        let at = self.events.now() + (self.rng.exponential(mean_s) * 1e6) as Micros;
        if (at as f64) < self.config.faults.until_s * 1e6 {
            self.events.at(at, event);
        }
    }

    fn is_over(&self) -> bool {
        let all_ended = self.unarrived == 0 && self.tables.jobs.is_empty();
        let given_up = self.events.now() > MAX_DRAIN + self.last_arrival + (self.config.faults.until_s * 1e6) as Micros;
        all_ended || given_up
    }

    fn handle(&mut self, event: Event) {
        self.tables.now_ms = self.events.now_ms();
        match event {
            Event::Arrive(call) => self.arrive(call),
            Event::Cancel(job) => self.cancel(job),
            Event::ToScheduler { node, boot, message } => self.at_scheduler(node, boot, message),
            Event::ToNode { node, boot, message } => self.at_node(node, boot, message),
            Event::Heartbeat { node, boot } => self.heartbeat(node, boot),
            Event::LedgerChanged { node, boot } => self.ledger_changed(node, boot),
            Event::Loaded { node, boot, model } => self.loaded(node, boot, model),
            Event::FirstToken { node, boot, lease } => self.first_token(node, boot, lease),
            Event::Timer { node, boot, lease, timer } => self.timer(node, boot, lease, timer),
            Event::Plan => self.plan(),
            Event::Tick => self.tick(),
            Event::Resync => self.resync(),
            Event::NewLeader => self.new_leader(),
            Event::LeaderLost => self.leader_lost(),
            Event::DatabaseDown => self.database_down(),
            Event::Crash(node) => self.crash(node),
            Event::Restart(node) => self.restart(node),
            Event::Disconnect(node) => self.disconnect(node),
        }
    }

    /// Sends a message to the scheduler.
    fn send_to_scheduler(&mut self, node: usize, message: ToScheduler) {
        let boot = self.nodes[node].boot;
        let faults = self.faults();
        let (delays, copies) = copies(&mut self.rng, faults.as_ref(), &mut self.network);
        if self.is_disconnected(node) {
            return;
        }
        for delay in &delays[..copies] {
            self.events.after(*delay, Event::ToScheduler { node, boot, message: message.clone() });
        }
    }

    /// Sends a message to a boot of a node.
    fn send_to_node(&mut self, node: usize, boot: u32, message: ToNode) {
        let faults = self.faults();
        let (delays, copies) = copies(&mut self.rng, faults.as_ref(), &mut self.network);
        if self.is_disconnected(node) {
            return;
        }
        for delay in &delays[..copies] {
            self.events.after(*delay, Event::ToNode { node, boot, message: message.clone() });
        }
    }

    fn is_disconnected(&self, node: usize) -> bool {
        self.events.now() < self.nodes[node].disconnected_until
    }

    fn is_database_up(&self) -> bool {
        self.events.now() >= self.database_down_until
    }

    fn outcome(mut self) -> Outcome {
        let mut ends = [0; 4];
        for job in self.tables.ended.values() {
            let index = match job.end {
                JobEnd::Done => 0,
                JobEnd::Failed => 1,
                JobEnd::Dead => 2,
                JobEnd::Cancelled => 3,
            };
            ends[index] += 1;
        }
        let unfinished = self.tables.jobs.len() + self.unarrived;
        self.violations.check(unfinished == 0, || format!("{unfinished} jobs did not end"));
        self.metrics.loads =
            self.loads_before_restarts + self.nodes.iter().map(|node| node.engine.loads()).sum::<u64>();
        Outcome {
            metrics: self.metrics,
            violations: self.violations,
            ends,
            unfinished,
            tables: self.tables.counts,
            network: self.network,
            counts: self.counts,
            virtual_s: self.events.now() as f64 / 1e6,
        }
    }
}
