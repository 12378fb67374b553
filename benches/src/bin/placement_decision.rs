//! Time of one placement decision: an event (a job arrives, a job ends, a heartbeat) is fed to the planner, which
//! answers with effects. "placement" is the arrival of a job while all nodes are idle. The baseline, measured in the same run, is the smallest cluster and queue.
//!
//!     cargo run --release -p cfq-benches --bin placement_decision
//!     ... -- --nodes 10,64 --jobs 1000,100000 --blocks 100000
//!
//! `--full-plan` measures plans that look at everything, instead of steps that look at what has changed.
//!
//! Otherwise all slots are taken and all other jobs wait. Each node serves two of four models with four slots each. `--blocks` is
//! the number of prompt blocks that each node has cached for each model.
#![allow(clippy::print_stdout)]

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use cfq_proto::ids::{JobId, NodeId};
use cfq_proto::job::JobRole;
use cfq_proto::model::ModelId;
use cfq_proto::node::{KvTiers, Ledger, ModelState, Residency};
use cfq_proto::task::Priority;
use cfq_scheduler_core::{
    Effect, Job, JobPhase, Node, NodeFailures, PlannerState, PlannerTiming, Step, plan, plan_step,
};

const TIMING: PlannerTiming = PlannerTiming {
    lease_ttl_ms: 6_000,
    accept_timeout_ms: 3_000,
    prepare_timeout_ms: 50_000,
    retry_ceiling_ms: 600_000,
};
const MODELS: usize = 4;
const MODELS_PER_NODE: usize = 2;
const SLOTS: usize = 4;
/// Prompts that share their beginning; each waiting job belongs to one of these families.
const PROMPT_FAMILIES: u64 = 1_000;
const BLOCKS_PER_PROMPT: u64 = 24;
const MAX_EFFECTS_PER_STEP: usize = 256;
/// Events measured of each kind, unless the time is up before.
const MAX_EVENTS: usize = 1_000;
const MAX_TIME_PER_KIND: Duration = Duration::from_secs(3);

struct Arguments {
    nodes: Vec<usize>,
    jobs: Vec<usize>,
    blocks: u64,
    is_full_plan: bool,
}

fn main() -> anyhow::Result<()> {
    let arguments = arguments()?;
    println!("{:>6} {:>9}  {:10} {:>12} {:>12} {:>8}", "nodes", "jobs", "event", "p50", "p99", "p99 x");
    let mut baseline: BTreeMap<&str, f64> = BTreeMap::new();
    let mut line = |nodes: usize, jobs: usize, event: &'static str, times: &[Duration]| {
        let (p50, p99) = (percentile_us(times, 50), percentile_us(times, 99));
        let ratio = p99 / *baseline.entry(event).or_insert(p99);
        println!("{nodes:6} {jobs:9}  {event:10} {p50:9.1} µs {p99:9.1} µs {ratio:8.1}");
    };
    for &nodes in &arguments.nodes {
        let mut idle = Cluster::new(nodes, None, &arguments)?;
        line(nodes, 0, "placement", &idle.measure_idle()?);
        for &jobs in &arguments.jobs {
            let mut cluster = Cluster::new(nodes, Some(jobs), &arguments)?;
            for (event, times) in cluster.measure()? {
                line(nodes, jobs, event, &times);
            }
        }
    }
    Ok(())
}

fn arguments() -> anyhow::Result<Arguments> {
    let (nodes, jobs) = (vec![10, 64, 1_000], vec![1_000, 100_000, 1_000_000]);
    let mut parsed = Arguments { nodes, jobs, blocks: 1_000, is_full_plan: false };
    let mut args = std::env::args().skip(1);
    while let Some(name) = args.next() {
        if name == "--full-plan" {
            parsed.is_full_plan = true;
            continue;
        }
        let value = args.next().with_context(|| format!("{name} needs a value"))?;
        let numbers = || value.split(',').map(|n| Ok(n.parse()?)).collect::<anyhow::Result<Vec<usize>>>();
        match name.as_str() {
            "--nodes" => parsed.nodes = numbers()?,
            "--jobs" => parsed.jobs = numbers()?,
            "--blocks" => parsed.blocks = value.parse()?,
            other => bail!("unknown argument {other}; use --nodes, --jobs, --blocks and --full-plan"),
        }
    }
    Ok(parsed)
}

/// A planner whose nodes are full, with jobs that wait.
struct Cluster {
    state: PlannerState,
    nodes: Vec<Node>,
    running: Vec<Job>,
    now_ms: i64,
    next_id: u64,
    is_full_plan: bool,
}

impl Cluster {
    /// A cluster with this number of waiting jobs, whose slots are all taken; an idle one if it is `None`.
    fn new(nodes: usize, waiting: Option<usize>, arguments: &Arguments) -> anyhow::Result<Self> {
        let &Arguments { blocks, is_full_plan, .. } = arguments;
        let (state, now_ms) = (PlannerState::new(TIMING), 1_000_000);
        let mut cluster = Self { state, nodes: Vec::new(), running: Vec::new(), now_ms, next_id: 1, is_full_plan };
        for index in 0..nodes {
            let mut node = cluster.node(index, blocks)?;
            if waiting.is_none() {
                node.ledger.models.iter_mut().for_each(|model| model.running = 0);
            }
            cluster.state.on_node_row(node.clone());
            cluster.fill_prefix_caches(&node, blocks)?;
            for slot in 0..waiting.map_or(0, |_| MODELS_PER_NODE * SLOTS) {
                let model = node.ledger.models[slot / SLOTS].model.clone();
                let job = Job { attempt: 1, phase: running_on(&node, cluster.now_ms - 2), ..cluster.job(model)? };
                cluster.state.on_job_row(job.clone(), cluster.now_ms - 2);
                cluster.running.push(job);
            }
            cluster.nodes.push(node);
        }
        for _ in 0..waiting.unwrap_or(0) {
            let job = cluster.any_job()?;
            cluster.state.on_job_row(job, cluster.now_ms);
        }
        cluster.settle()?;
        Ok(cluster)
    }

    fn id<T: std::str::FromStr<Err: std::error::Error + Send + Sync + 'static>>(&mut self) -> anyhow::Result<T> {
        self.next_id += 1;
        // Multiplied by an odd number, so that the order of the ids is not that of the creation.
        Ok(format!("{:016x}{:016x}", self.next_id.wrapping_mul(0x9e37_79b9_7f4a_7c15), self.next_id).parse()?)
    }

    fn node(&mut self, index: usize, blocks: u64) -> anyhow::Result<Node> {
        let models = (0..MODELS_PER_NODE).map(|offset| {
            Ok(ModelState {
                model: model_id(index + offset)?,
                residency: Residency::Resident,
                device: "cuda:0".to_owned(),
                need_bytes: 1 << 30,
                context_tokens: 32_768,
                kv_tokens_free: 500_000,
                kv_tiers: KvTiers { device: blocks.saturating_mul(154), offloaded: 0 },
                running: SLOTS as u32,
                max_sequences: SLOTS as u32,
                prefill_rate: 1_000.0 + index as f64,
                decode_rate: 50.0 + (index % 7) as f64,
                load_rate: 1e9,
                tokens_per_byte: 0.3,
            })
        });
        let ledger = Ledger { version: 1, models: models.collect::<anyhow::Result<_>>()?, ..Ledger::default() };
        let id = NodeId::new(format!("node-{index:04}"))?;
        Ok(Node { id, boot: self.id()?, ledger, seen_ms: self.now_ms, cordoned: false, exclusions: BTreeMap::new() })
    }

    fn fill_prefix_caches(&mut self, node: &Node, blocks: u64) -> anyhow::Result<()> {
        for model in &node.ledger.models {
            for family in 0..blocks / BLOCKS_PER_PROMPT {
                let phase = running_on(node, self.now_ms - 2);
                let prefix = chain(family % PROMPT_FAMILIES, family / PROMPT_FAMILIES);
                let job = Job { phase, prefix, ..self.job(model.model.clone())? };
                let id = job.id;
                self.state.on_job_row(job, self.now_ms - 3);
                self.state.on_job_ended(id, self.now_ms - 1);
            }
        }
        Ok(())
    }

    fn job(&mut self, model: ModelId) -> anyhow::Result<Job> {
        let number = self.next_id / 2;
        Ok(Job {
            id: self.id()?,
            task: self.id()?,
            role: JobRole::Alpha,
            model,
            priority: Priority::try_from((number % 4) as i16)?,
            deadline_ms: number.is_multiple_of(5).then_some(self.now_ms + 3_600_000),
            created_ms: self.now_ms - (number % 1_000) as i64,
            prompt_bytes: BLOCKS_PER_PROMPT * 512,
            prefix: chain(number % PROMPT_FAMILIES, 0),
            max_tokens: 100 << (number % 5),
            counted_tokens: None,
            refused_by: BTreeMap::new(),
            node_failures: NodeFailures::default(),
            first_failure_ms: None,
            no_node_ms: 0,
            has_fallback: false,
            losses: 0,
            unaccepted: 0,
            suspicions: 0,
            last_failure: None,
            attempt: 0,
            phase: JobPhase::Queued,
        })
    }

    fn any_job(&mut self) -> anyhow::Result<Job> {
        let model = model_id((self.next_id / 8) as usize)?;
        self.job(model)
    }

    /// The next effects: of a step, or of a full plan.
    fn decide(&mut self) -> Step {
        if self.is_full_plan {
            Step { effects: plan(&self.state, self.now_ms), is_cut: false }
        } else {
            plan_step(&mut self.state, self.now_ms, MAX_EFFECTS_PER_STEP)
        }
    }

    /// Carries out effects until there are none.
    fn settle(&mut self) -> anyhow::Result<()> {
        loop {
            let Step { effects, is_cut } = self.decide();
            if effects.is_empty() && !is_cut {
                return Ok(());
            }
            self.carry_out(effects)?;
        }
    }

    /// Applies placements as if the nodes accepted them at once. Other effects do not occur in this cluster.
    fn carry_out(&mut self, effects: Vec<Effect>) -> anyhow::Result<()> {
        for effect in effects {
            let Effect::Place { job, attempt, node, .. } = effect else { bail!("unexpected effect {effect:?}") };
            let on = self.nodes.iter().find(|n| n.id == node).context("unknown node")?.clone();
            let waiting = self.state.job(job).context("unknown job")?.clone();
            let job = Job { attempt, phase: running_on(&on, self.now_ms), ..waiting };
            self.state.on_job_row(job.clone(), self.now_ms);
            self.running.push(job);
        }
        Ok(())
    }

    /// Times from the arrival of a job until its placement, while no job waits and all nodes have free slots.
    fn measure_idle(&mut self) -> anyhow::Result<Vec<Duration>> {
        timed(|_| {
            let job = self.any_job()?;
            let id = job.id;
            let began = Instant::now();
            self.state.on_job_row(job, self.now_ms);
            let Step { effects, .. } = self.decide();
            let took = began.elapsed();
            ensure!(effects.len() == 1, "one job arrived: {effects:?}");
            self.carry_out(effects)?;
            self.state.on_job_ended(id, self.now_ms);
            self.settle()?;
            Ok(took)
        })
    }

    fn measure(&mut self) -> anyhow::Result<Vec<(&'static str, Vec<Duration>)>> {
        let arrivals = timed(|_| {
            let job = self.any_job()?;
            let began = Instant::now();
            self.state.on_job_row(job, self.now_ms);
            let Step { effects, .. } = self.decide();
            let took = began.elapsed();
            self.carry_out(effects)?;
            Ok(took)
        })?;
        let ends = timed(|round| {
            let ended: JobId = self.running.swap_remove(round * 7_919 % self.running.len()).id;
            let began = Instant::now();
            self.state.on_job_ended(ended, self.now_ms);
            let Step { effects, .. } = self.decide();
            let took = began.elapsed();
            ensure!(!effects.is_empty(), "a job ended and none was placed");
            self.carry_out(effects)?;
            self.settle()?;
            Ok(took)
        })?;
        let heartbeats = timed(|round| {
            let index = round * 7_919 % self.nodes.len();
            let mut node = self.nodes[index].clone();
            node.seen_ms = self.now_ms + 1;
            node.ledger.version += 1;
            self.nodes[index] = node.clone();
            let began = Instant::now();
            self.state.on_node_row(node);
            let Step { effects, .. } = self.decide();
            let took = began.elapsed();
            self.carry_out(effects)?;
            Ok(took)
        })?;
        Ok(vec![("arrival", arrivals), ("end", ends), ("heartbeat", heartbeats)])
    }
}

fn model_id(number: usize) -> anyhow::Result<ModelId> {
    Ok(format!("path:/models/{}.gguf", number % MODELS).parse()?)
}

fn running_on(node: &Node, accepted_ms: i64) -> JobPhase {
    JobPhase::Running { node: node.id.clone(), boot: node.boot, accepted_ms }
}

/// Hashes of a prompt's blocks. The prompts of one family share the first half.
fn chain(family: u64, variant: u64) -> Vec<u64> {
    let hash = |block: u64| {
        let variant = if block < BLOCKS_PER_PROMPT / 2 { 0 } else { variant };
        ((variant * PROMPT_FAMILIES + family) * BLOCKS_PER_PROMPT + block).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    };
    (0..BLOCKS_PER_PROMPT).map(hash).collect()
}

/// Times of up to [`MAX_EVENTS`] events.
fn timed(mut event: impl FnMut(usize) -> anyhow::Result<Duration>) -> anyhow::Result<Vec<Duration>> {
    let (mut times, began) = (Vec::new(), Instant::now());
    for round in 0..MAX_EVENTS {
        times.push(event(round)?);
        if began.elapsed() > MAX_TIME_PER_KIND {
            break;
        }
    }
    Ok(times)
}

fn percentile_us(times: &[Duration], p: usize) -> f64 {
    cfq_benches::percentile(&mut times.to_vec(), p).as_secs_f64() * 1e6
}
