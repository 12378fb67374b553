//! The steps of the incremental planner, compared with full plans over random sequences of events.

use std::collections::BTreeMap;

use cfq_proto::ids::NodeId;
use cfq_proto::model::ModelId;
use cfq_proto::node::{KvTiers, ModelState, Residency};
use cfq_proto::prefix::PREFIX_BLOCK_BYTES;
use cfq_proto::task::Priority;
use proptest::prelude::*;

use super::{carry_out, job, model, new_id, node, placements};
use crate::{BackoffPolicy, Effect, Exclusion, Job, JobPhase, Node, PlannerState, order_key, plan, plan_step};

const NODES: usize = 4;
const MODELS: usize = 3;

/// One event. An index selects one of the things that exist, modulo their number.
#[derive(Debug, Clone)]
enum Event {
    Submit {
        model: usize,
        priority: i16,
        prompt_bytes: u64,
        max_tokens: u32,
        suspicions: u32,
    },
    /// The node accepts the first job that was placed on it.
    Accept {
        node: usize,
    },
    /// A running job ends.
    End {
        job: usize,
    },
    /// A job is cancelled, in whatever state it is.
    Cancel {
        job: usize,
    },
    /// An attempt fails and the job waits, with a backoff on the node.
    FailAttempt {
        job: usize,
    },
    /// A placed or running job is lost.
    Lose {
        job: usize,
    },
    /// The node refuses a placed job for now, or for ever.
    Refuse {
        job: usize,
        for_ever: bool,
    },
    /// The ledger states what the node runs.
    Heartbeat {
        node: usize,
    },
    /// The model changes its residency.
    Residency {
        node: usize,
        model: usize,
        residency: u8,
    },
    Drain {
        node: usize,
    },
    Yield {
        node: usize,
        model: usize,
    },
    Restart {
        node: usize,
    },
    Gone {
        node: usize,
    },
    Unresponsive {
        node: usize,
    },
    /// Nothing happens for this time.
    Wait {
        ms: i64,
    },
    /// The row of a job is read again although it has not changed.
    Reread {
        job: usize,
    },
    /// The clock of the database is set back.
    ClockSetBack,
    LookAtAll,
}

fn any_event() -> impl Strategy<Value = Event> {
    let (nodes, jobs, models) = (0..NODES, 0..100usize, 0..MODELS);
    prop_oneof![
        12 => (models.clone(), 0i16..4, 0u64..6_000, 1u32..1_500, prop_oneof![20 => Just(0u32), 1 => Just(2u32)])
            .prop_map(|(model, priority, prompt_bytes, max_tokens, suspicions)| Event::Submit {
                model, priority, prompt_bytes, max_tokens, suspicions
            }),
        6 => nodes.clone().prop_map(|node| Event::Accept { node }),
        6 => jobs.clone().prop_map(|job| Event::End { job }),
        1 => jobs.clone().prop_map(|job| Event::Cancel { job }),
        1 => jobs.clone().prop_map(|job| Event::FailAttempt { job }),
        1 => jobs.clone().prop_map(|job| Event::Lose { job }),
        1 => (jobs.clone(), any::<bool>()).prop_map(|(job, for_ever)| Event::Refuse { job, for_ever }),
        8 => nodes.clone().prop_map(|node| Event::Heartbeat { node }),
        2 => (nodes.clone(), models.clone(), 0u8..6)
            .prop_map(|(node, model, residency)| Event::Residency { node, model, residency }),
        1 => nodes.clone().prop_map(|node| Event::Drain { node }),
        1 => (nodes.clone(), models).prop_map(|(node, model)| Event::Yield { node, model }),
        1 => nodes.clone().prop_map(|node| Event::Restart { node }),
        1 => nodes.clone().prop_map(|node| Event::Gone { node }),
        1 => nodes.prop_map(|node| Event::Unresponsive { node }),
        4 => prop_oneof![1i64..2_000, 1i64..40_000, 1i64..700_000].prop_map(|ms| Event::Wait { ms }),
        1 => jobs.prop_map(|job| Event::Reread { job }),
        1 => Just(Event::ClockSetBack),
        1 => Just(Event::LookAtAll),
    ]
}

fn model_named(index: usize) -> ModelId {
    format!("path:/{index}.gguf").parse().unwrap()
}

struct World {
    state: PlannerState,
    nodes: Vec<Node>,
    now_ms: i64,
}

impl World {
    fn new() -> Self {
        let models = |node: usize| {
            (0..MODELS).filter(move |model| !(node + model).is_multiple_of(MODELS)).map(|index| ModelState {
                model: model_named(index),
                need_bytes: 5,
                kv_tiers: KvTiers { device: 2_000, offloaded: 0 },
                ..model(3_000, 3)
            })
        };
        let nodes: Vec<Node> = (0..NODES).map(|i| node(&format!("n{i}"), models(i).collect(), 0)).collect();
        let mut state = PlannerState::new(super::TIMING);
        nodes.iter().for_each(|node| state.on_node_row(node.clone()));
        Self { state, nodes, now_ms: 0 }
    }

    /// The job with this index among those that the filter selects.
    fn pick(&self, index: usize, filter: impl Fn(&Job) -> bool) -> Option<Job> {
        let jobs: Vec<&Job> = self.state.jobs.values().filter(|job| filter(job)).collect();
        jobs.get(index % jobs.len().max(1)).map(|job| (*job).clone())
    }

    fn node_row(&mut self, index: usize, change: impl FnOnce(&mut Node)) {
        let node = &mut self.nodes[index];
        change(node);
        node.seen_ms = self.now_ms;
        node.ledger.version += 1;
        self.state.on_node_row(node.clone());
    }

    fn apply(&mut self, event: Event) {
        let now = self.now_ms;
        match event {
            Event::Submit { model, priority, prompt_bytes, max_tokens, suspicions } => {
                let new = job(Priority::try_from(priority).unwrap(), now);
                let prefix = (0..prompt_bytes / PREFIX_BLOCK_BYTES as u64).map(|block| block + prompt_bytes % 3 * 100);
                let prefix = prefix.collect();
                let new = Job { model: model_named(model), prompt_bytes, prefix, max_tokens, suspicions, ..new };
                self.state.on_job_row(new, now);
            }
            Event::Accept { node } => {
                let id = &self.nodes[node].id;
                let is_placed_here = |job: &Job| {
                    matches!(job.phase, JobPhase::Placed { .. }) && job.holder().is_some_and(|(on, _)| on == id)
                };
                let Some(job) = self.pick(0, is_placed_here) else { return };
                let (node, boot) = job.holder().unwrap();
                let phase = JobPhase::Running { node: node.clone(), boot, accepted_ms: now };
                self.state.on_job_row(Job { phase, ..job.clone() }, now);
            }
            Event::End { job } => {
                let is_running = |job: &Job| matches!(job.phase, JobPhase::Running { .. });
                let Some(job) = self.pick(job, is_running) else { return };
                self.state.on_job_ended(job.id, now);
            }
            Event::Cancel { job } => {
                let Some(job) = self.pick(job, |_| true) else { return };
                self.state.on_job_ended(job.id, now);
            }
            Event::FailAttempt { job } => {
                let Some(mut job) = self.pick(job, |job| job.holder().is_some()) else { return };
                let node = job.holder().unwrap().0.clone();
                let policy = BackoffPolicy { base_ms: 1_000, cap_ms: 256_000 };
                job.node_failures.record(job.id, node, now, policy);
                job.first_failure_ms.get_or_insert(now);
                self.state.on_job_row(Job { phase: JobPhase::Queued, ..job }, now);
            }
            Event::Lose { job } => {
                let Some(job) = self.pick(job, |job| job.holder().is_some()) else { return };
                self.state.on_job_row(Job { phase: JobPhase::Queued, losses: job.losses + 1, ..job }, now);
            }
            Event::Refuse { job, for_ever } => {
                let is_placed = |job: &Job| matches!(job.phase, JobPhase::Placed { .. });
                let Some(mut job) = self.pick(job, is_placed) else { return };
                let node = job.holder().unwrap().0.clone();
                job.phase = JobPhase::Queued;
                if for_ever {
                    job.refused_by.insert(node.clone(), "too long".into());
                } else if let Some(index) = self.nodes.iter().position(|n| n.id == node) {
                    let exclusion = Exclusion { version: self.nodes[index].ledger.version, at_ms: now };
                    self.nodes[index].exclusions.insert(job.model.clone(), exclusion);
                    self.state.on_node_row(self.nodes[index].clone());
                }
                self.state.on_job_row(job, now);
            }
            Event::Heartbeat { node } => {
                let mut taken: BTreeMap<ModelId, (u32, u64)> = BTreeMap::new();
                for job in self.state.held_jobs(&self.nodes[node].id) {
                    if let JobPhase::Running { boot, .. } = job.phase
                        && boot == self.nodes[node].boot
                    {
                        let taken = taken.entry(job.model.clone()).or_default();
                        let row = self.nodes[node].model(&job.model).cloned().unwrap_or_else(|| model(0, 0));
                        (taken.0, taken.1) = (taken.0 + 1, taken.1 + crate::cost::kv_reservation(job, &row));
                    }
                }
                self.node_row(node, |node| {
                    for m in &mut node.ledger.models {
                        let (running, tokens) = taken.get(&m.model).copied().unwrap_or_default();
                        (m.running, m.kv_tokens_free) = (running, 3_000u64.saturating_sub(tokens));
                    }
                });
            }
            Event::Residency { node, model, residency } => self.node_row(node, |node| {
                let count = node.ledger.models.len();
                node.ledger.models[model % count].residency = match residency {
                    0 => Residency::Available,
                    1 => Residency::Loading,
                    2 => Residency::Unusable { reason: "no such file".into() },
                    _ => Residency::Resident,
                };
            }),
            Event::Drain { node } => self.node_row(node, |node| node.ledger.draining ^= true),
            Event::Yield { node, model } => self.node_row(node, |node| {
                let model = model_named(model);
                if node.ledger.yields.remove(&model).is_none() {
                    node.ledger.yields.insert(model, "a game".into());
                }
            }),
            Event::Restart { node } => self.node_row(node, |node| {
                node.boot = new_id();
                node.ledger.models.iter_mut().for_each(|m| (m.running, m.kv_tokens_free) = (0, 3_000));
            }),
            Event::Gone { node } => {
                let id: NodeId = self.nodes[node].id.clone();
                self.state.on_node_gone(&id);
            }
            Event::Unresponsive { node } => {
                let id = self.nodes[node].id.clone();
                self.state.on_node_unresponsive(&id, now);
            }
            Event::Wait { ms } => self.now_ms += ms,
            Event::Reread { job } => {
                let Some(job) = self.pick(job, |_| true) else { return };
                self.state.on_job_row(job, now);
            }
            Event::ClockSetBack => self.now_ms -= 20_000,
            Event::LookAtAll => self.state.look_at_all(),
        }
    }

    /// The effects of a step, which must be those of the full plan.
    fn step(&mut self) -> Vec<Effect> {
        let expected = sorted(plan(&self.state, self.now_ms));
        let step = plan_step(&mut self.state, self.now_ms, usize::MAX);
        assert!(!step.is_cut);
        assert_eq!(sorted(step.effects.clone()), expected);
        step.effects
    }
}

/// Effects in an order that does not depend on the order in which the jobs were looked at.
fn sorted(mut effects: Vec<Effect>) -> Vec<String> {
    effects.sort_by_key(|effect| (effect.is_record(), effect.job()));
    let mut texts: Vec<String> = effects.iter().map(|effect| format!("{effect:?}")).collect();
    texts.sort();
    texts
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Whatever has happened, a step that looks only at the changes decides the same as a plan that looks at everything.
    /// Some effects are not carried out: their writes were rejected, or the scheduler has not come to them.
    #[test]
    fn steps_decide_the_same_as_full_plans(
        events in prop::collection::vec((any_event(), prop::bool::weighted(0.7), prop::bool::weighted(0.9)), 1..120),
    ) {
        let mut world = World::new();
        for (event, decides, carries_out) in events {
            world.apply(event);
            if decides {
                let effects = world.step();
                let done: Vec<Effect> = if carries_out { effects } else { effects.into_iter().step_by(2).collect() };
                carry_out(&mut world.state, &done, world.now_ms);
            }
        }
        for _ in 0..3 {
            let effects = world.step();
            carry_out(&mut world.state, &effects, world.now_ms);
        }
    }

    /// Steps of few effects place the same jobs, on the same nodes, as one plan.
    #[test]
    fn small_steps_place_the_same_jobs_as_one_plan(
        jobs in prop::collection::vec((0..MODELS, 0i16..4), 1..60), max_effects in 1usize..4,
    ) {
        let mut world = World::new();
        for (model, priority) in jobs {
            let (prompt_bytes, max_tokens, suspicions) = (100, 100, 0);
            world.apply(Event::Submit { model, priority, prompt_bytes, max_tokens, suspicions });
        }
        let mut expected = placements(&plan(&world.state, 0));
        let mut found = Vec::new();
        loop {
            let step = plan_step(&mut world.state, 0, max_effects);
            prop_assert!(step.effects.len() <= max_effects);
            found.extend(placements(&step.effects));
            carry_out(&mut world.state, &step.effects, 0);
            if !step.is_cut {
                break;
            }
        }
        prop_assert!(found.is_sorted_by_key(|(job, _)| order_key(&world.state.jobs[job])));
        expected.sort();
        found.sort();
        prop_assert_eq!(found, expected);
    }
}
