//! Baselines: routers that send each call to a node when it arrives. The node keeps the call in a queue of its own and
//! loads the model that the first call of this queue needs.

use std::collections::{HashSet, VecDeque};

use crate::arrivals::Arrivals;
use crate::engine::{Engine, EngineConfig, ModelStatus};
use crate::event_queue::{EventQueue, Micros};
use crate::metrics::Metrics;
use crate::trace::{Call, Workload};

/// How a baseline chooses the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Router {
    /// The nodes in turn.
    RoundRobin,
    /// The node with the fewest calls.
    LeastLoaded,
    /// The node that was sent the longest prefix of the prompt, if this is at least half of it, and otherwise the one
    /// that was sent the fewest distinct blocks; the node with the fewest calls while the numbers of calls differ by
    /// more than [`MAX_IMBALANCE`]. This is the rule of SGLang's router.
    CacheAware,
}

/// Difference of the numbers of calls from which the cache-aware router balances the load.
const MAX_IMBALANCE: usize = 32;

#[derive(Debug)]
enum Event {
    Arrive(usize),
    End { node: usize, call: usize },
    Loaded { node: usize, model: usize },
}

struct Node {
    engine: Engine,
    queue: VecDeque<usize>,
    /// Blocks that were sent to the node; only the cache-aware router uses them.
    sent: HashSet<u64>,
}

impl Node {
    fn calls(&self) -> usize {
        self.queue.len() + self.engine.sequences()
    }
}

/// Runs the workload with a baseline.
pub fn run(workload: &Workload, nodes: usize, config: EngineConfig, router: Router) -> Metrics {
    let models = workload.models.len();
    let mut fleet: Vec<Node> = (0..nodes)
        .map(|_| Node { engine: Engine::new(config, models), queue: VecDeque::new(), sent: HashSet::new() })
        .collect();
    fleet.iter_mut().enumerate().for_each(|(index, node)| node.engine.preload(index % models.max(1)));
    let mut metrics = Metrics::new(nodes as u64 * (config.kv_tokens + config.host_tokens));
    let mut events = EventQueue::default();
    let (mut arrivals, first) = Arrivals::new(workload);
    first.into_iter().for_each(|(call, at)| events.at(at, Event::Arrive(call)));
    let mut arrived: Vec<Micros> = vec![0; workload.calls.len()];
    let mut count = 0;
    while let Some(event) = events.pop() {
        let now = events.now();
        let index = match event {
            Event::Arrive(call) => {
                arrived[call] = now;
                metrics.pooled.call(&workload.calls[call]);
                let index = choose(&fleet, router, &workload.calls[call], count);
                count += 1;
                fleet[index].queue.push_back(call);
                fleet[index].sent.extend(&workload.calls[call].chain);
                index
            }
            Event::End { node, call } => {
                fleet[node].engine.end(call as u64);
                metrics.makespan_s = now as f64 / 1e6;
                arrivals.ended(call, now).into_iter().for_each(|(call, at)| events.at(at, Event::Arrive(call)));
                node
            }
            Event::Loaded { node, model } => {
                fleet[node].engine.loaded(model, now);
                node
            }
        };
        advance(&mut fleet[index], index, workload, &arrived, &mut events, &mut metrics);
    }
    metrics.loads = fleet.iter().map(|node| node.engine.loads()).sum();
    metrics
}

/// Starts the calls at the head of a node's queue, or the load they need.
fn advance(
    node: &mut Node,
    index: usize,
    workload: &Workload,
    arrived: &[Micros],
    events: &mut EventQueue<Event>,
    metrics: &mut Metrics,
) {
    let now = events.now();
    while let Some(&head) = node.queue.front() {
        let call = &workload.calls[head];
        if node.engine.admits(call) {
            node.queue.pop_front();
            let admitted = node.engine.start(head as u64, call, now);
            metrics.started(call, arrived[head], now, admitted.cached_tokens);
            metrics.first_token(arrived[head], admitted.first_token);
            events.at(admitted.end, Event::End { node: index, call: head });
            continue;
        }
        if node.engine.status(call.model) == ModelStatus::Available {
            node.engine.request_load(call.model);
        }
        if let Some((model, until)) = node.engine.start_load(now) {
            events.at(until, Event::Loaded { node: index, model });
        }
        return;
    }
}

fn choose(fleet: &[Node], router: Router, call: &Call, count: usize) -> usize {
    let indices = 0..fleet.len();
    let least_loaded = || indices.clone().min_by_key(|i| (fleet[*i].calls(), *i)).unwrap_or(0);
    match router {
        Router::RoundRobin => count % fleet.len(),
        Router::LeastLoaded => least_loaded(),
        Router::CacheAware => {
            let loads = fleet.iter().map(Node::calls);
            if loads.clone().max().unwrap_or(0) - loads.min().unwrap_or(0) > MAX_IMBALANCE {
                return least_loaded();
            }
            let matched = |i: &usize| call.chain.iter().take_while(|block| fleet[*i].sent.contains(*block)).count();
            let best = indices.clone().max_by_key(|i| (matched(i), std::cmp::Reverse(*i))).unwrap_or(0);
            if matched(&best) * 2 >= call.chain.len().max(1) {
                return best;
            }
            indices.min_by_key(|i| (fleet[*i].sent.len(), *i)).unwrap_or(0)
        }
    }
}
