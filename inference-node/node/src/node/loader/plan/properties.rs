//! Property tests of the planner with random histories, and tests of each rule of its policy.

use std::time::Duration;

use proptest::prelude::*;

use super::event::{LoaderAction, LoaderEvent, PublishedStatus};
use super::sim::{FIRST_RETRY, LOAD_GRACE_PERIOD, Sim, SimModel, model_id};
use super::state::{ModelPhase, StartModel};
use crate::node::unusable::UnusableReason;

/// A step of a random history.
#[derive(Debug, Clone)]
enum Action {
    Request(usize),
    Unload(usize),
    StartSequence(usize),
    EndSequences(usize),
    Advance(u64),
    Pin(usize, bool),
    Yield(bool),
    OtherProgram(u64),
    LoadTogether(Vec<usize>),
}

const MODELS: usize = 5;

fn action() -> impl Strategy<Value = Action> {
    let model = 0..MODELS;
    prop_oneof![
        6 => model.clone().prop_map(Action::Request),
        1 => model.clone().prop_map(Action::Unload),
        4 => model.clone().prop_map(Action::StartSequence),
        4 => model.clone().prop_map(Action::EndSequences),
        2 => (0u64..20_000).prop_map(Action::Advance),
        1 => (model.clone(), any::<bool>()).prop_map(|(model, pinned)| Action::Pin(model, pinned)),
        1 => any::<bool>().prop_map(Action::Yield),
        1 => (0u64..60).prop_map(Action::OtherProgram),
        1 => prop::collection::vec(model, 0..MODELS).prop_map(Action::LoadTogether),
    ]
}

fn sim_model() -> impl Strategy<Value = SimModel> {
    let sizes = (1u64..60, 1u64..20, 0u64..60, prop::option::of(1u64..80));
    (sizes, prop::bool::weighted(0.8), prop::bool::weighted(0.9)).prop_map(
        |((weights, min_kv_tokens, more, gpu_bytes), is_installed, is_readable)| SimModel {
            weights,
            min_kv_tokens,
            max_kv_tokens: min_kv_tokens + more,
            gpu_bytes,
            is_installed,
            is_readable,
        },
    )
}

fn perform(sim: &mut Sim, action: Action) {
    match action {
        Action::Request(model) => {
            // The registry refuses requests during a yield, but requests made before it may still be in the queue.
            sim.request(&model_id(model));
        }
        Action::Unload(model) => {
            sim.process(LoaderEvent::UnloadRequested(model_id(model)));
        }
        Action::StartSequence(model) => sim.start_sequence(&model_id(model)),
        Action::EndSequences(model) => sim.end_sequences(&model_id(model)),
        Action::Advance(ms) => sim.advance(Duration::from_millis(ms)),
        Action::Pin(model, true) => {
            sim.pinned.insert(model_id(model));
        }
        Action::Pin(model, false) => {
            sim.pinned.remove(&model_id(model));
        }
        Action::Yield(yielding) => {
            sim.yielding = yielding;
            sim.process(LoaderEvent::EnginesChanged);
        }
        Action::OtherProgram(bytes) => sim.other_bytes = bytes,
        Action::LoadTogether(models) => {
            let pending = |model: &usize| {
                let phase = sim.state.phase(&model_id(*model));
                matches!(phase, ModelPhase::Unknown | ModelPhase::OnDisk | ModelPhase::Loading)
            };
            let models: std::collections::BTreeSet<usize> = models.into_iter().filter(pending).collect();
            let start = |model: usize| {
                let interrupted_loads = model / (MODELS - 1) * 2;
                StartModel { model: model_id(model), interrupted_loads }
            };
            sim.process(LoaderEvent::LoadTogether(models.into_iter().map(start).collect()));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    /// [`Sim`] checks each action: capacities, pins, useless evictions, backfill, yields, and that planning twice
    /// changes nothing. This test also checks that every waiting model is loaded or refused once the running sequences
    /// end.
    #[test]
    fn every_history_keeps_the_policy_and_no_model_waits_without_end(
        models in prop::collection::vec(sim_model(), MODELS..=MODELS),
        host_bytes in 0u64..150,
        weight_cache_bytes in 0u64..80,
        gpus in prop::collection::vec(0u64..120, 0..3),
        shared_unloads in 0u32..4,
        actions in prop::collection::vec(action(), 0..60),
    ) {
        let mut sim = Sim::new(host_bytes, weight_cache_bytes, &gpus, models);
        sim.shared_unloads = shared_unloads;
        for action in actions {
            perform(&mut sim, action);
        }
        sim.yielding = false;
        sim.process(LoaderEvent::EnginesChanged);
        for _ in 0..3 * MODELS {
            (0..MODELS).for_each(|model| sim.end_sequences(&model_id(model)));
            sim.run_for(LOAD_GRACE_PERIOD);
        }
        prop_assert!(sim.state.waiting.is_empty(), "{:?}", sim.state.waiting);
        prop_assert!(sim.state.unloading.is_empty() && sim.state.starting.is_empty() && sim.state.loading.is_none());
        for model in 0..MODELS {
            let phase = sim.state.phase(&model_id(model));
            prop_assert!(phase != ModelPhase::Loading, "{model} is loading, but in no queue");
        }
    }
}

fn host_model(weights: u64) -> SimModel {
    let (min_kv_tokens, max_kv_tokens) = (9, 9);
    SimModel { weights, min_kv_tokens, max_kv_tokens, gpu_bytes: None, is_installed: true, is_readable: true }
}

/// A machine with `host_bytes` for models, and with models of 30 bytes each, of which 10 are for the KV pool and
/// scratch memory.
fn sim_of(host_bytes: u64, weight_cache_bytes: u64, models: usize) -> Sim {
    Sim::new(host_bytes, weight_cache_bytes, &[], vec![host_model(20); models])
}

fn evictions(actions: &[LoaderAction]) -> Vec<usize> {
    let evicted = actions.iter().filter_map(|action| match action {
        LoaderAction::BeginUnload { model, .. } => (0..9).find(|index| model_id(*index) == *model),
        _ => None,
    });
    evicted.collect()
}

fn use_once(sim: &mut Sim, model: usize) {
    sim.start_sequence(&model_id(model));
    sim.end_sequences(&model_id(model));
}

#[test]
fn least_recently_used_idle_model_is_evicted_before_a_busy_one() {
    let mut sim = sim_of(90, 0, 5);
    for model in [0, 1, 2] {
        sim.request(&model_id(model));
    }
    for model in [2, 0, 1] {
        use_once(&mut sim, model);
    }
    sim.start_sequence(&model_id(2));
    sim.start_sequence(&model_id(0));
    // Model 1 is the most recently used model, but it is the only idle one, so it is evicted.
    assert_eq!(evictions(&sim.request(&model_id(3))), [1]);
    assert_eq!(sim.state.phase(&model_id(3)), ModelPhase::Resident);
    sim.start_sequence(&model_id(3));
    // All models are busy, so the least recently used one takes no more sequences.
    assert_eq!(evictions(&sim.request(&model_id(4))), [2]);
    assert_eq!(sim.state.phase(&model_id(2)), ModelPhase::Unloading);
    assert_eq!(sim.state.phase(&model_id(4)), ModelPhase::Loading);
    sim.end_sequences(&model_id(2));
    assert_eq!(sim.state.phase(&model_id(4)), ModelPhase::Resident);
}

#[test]
fn unused_model_is_not_evicted_during_its_grace_period() {
    let mut sim = sim_of(30, 0, 2);
    sim.request(&model_id(0));
    assert_eq!(evictions(&sim.request(&model_id(1))), [0; 0]);
    sim.advance(LOAD_GRACE_PERIOD - Duration::from_millis(1));
    assert_eq!(sim.state.phase(&model_id(0)), ModelPhase::Resident);
    assert!(sim.state.next_wakeup(sim.now) <= sim.now + Duration::from_secs(1));
    sim.advance(Duration::from_millis(1));
    assert_eq!(sim.state.phase(&model_id(1)), ModelPhase::Resident);
}

#[test]
fn cached_weights_are_dropped_before_a_model_is_evicted() {
    let mut sim = sim_of(70, 40, 3);
    sim.request(&model_id(0));
    sim.request(&model_id(1));
    sim.process(LoaderEvent::UnloadRequested(model_id(0)));
    assert_eq!(sim.state.cached_bytes(), 20);
    let actions = sim.request(&model_id(2));
    assert!(actions.contains(&LoaderAction::DropCachedWeights { model: model_id(0) }), "{actions:?}");
    assert_eq!(evictions(&actions), [0; 0]);
    assert_eq!(sim.state.phase(&model_id(1)), ModelPhase::Resident);
}

#[test]
fn weight_cache_drops_its_least_recently_used_weights() {
    let mut sim = sim_of(90, 45, 3);
    (0..3).for_each(|model| drop(sim.request(&model_id(model))));
    for model in [1, 0, 2] {
        sim.process(LoaderEvent::UnloadRequested(model_id(model)));
    }
    let cached: Vec<_> = sim.state.cached.iter().map(|cached| cached.model.clone()).collect();
    assert_eq!(cached, [model_id(0), model_id(2)]);
}

#[test]
fn retry_waits_grow_and_a_request_by_hand_is_tried_at_once() {
    let mut sim = sim_of(60, 0, 3);
    sim.request(&model_id(0));
    sim.request(&model_id(1));
    sim.pinned = [model_id(0), model_id(1)].into();
    for wait in [FIRST_RETRY, FIRST_RETRY * 2] {
        let actions = sim.request(&model_id(2));
        let refused = |action: &LoaderAction| match action {
            LoaderAction::SetStatus {
                status: PublishedStatus::Unusable(UnusableReason::OutOfMemory { shortage, retry_after }),
                ..
            } => shortage.pinned == [model_id(0), model_id(1)] && *retry_after == wait,
            _ => false,
        };
        assert!(actions.iter().any(refused), "{actions:?}");
        assert_eq!(sim.state.backoff.next_due(), Some(sim.now + wait));
    }
    sim.advance(FIRST_RETRY * 2);
    assert_eq!(sim.state.phase(&model_id(2)), ModelPhase::OnDisk);
    sim.pinned.clear();
    sim.run_for(LOAD_GRACE_PERIOD);
    sim.request(&model_id(2));
    assert_eq!(sim.state.phase(&model_id(2)), ModelPhase::Resident);
    assert_eq!(sim.state.backoff.next_due(), None);
}

#[test]
fn models_loaded_together_share_the_memory() {
    let growing = SimModel { max_kv_tokens: 1000, ..host_model(20) };
    let mut sim = Sim::new(120, 0, &[], vec![growing.clone(), growing.clone(), growing]);
    let start = |model| StartModel { model: model_id(model), interrupted_loads: 0 };
    sim.process(LoaderEvent::LoadTogether((0..3).map(start).collect()));
    let bytes: Vec<u64> = sim.state.loaded.values().map(|loaded| loaded.host_bytes).collect();
    assert_eq!(bytes, [40, 40, 40]);
}

#[test]
fn start_skips_models_that_do_not_fit_or_whose_loads_ended_the_node() {
    let mut sim = sim_of(59, 0, 3);
    let start = |(model, interrupted_loads)| StartModel { model: model_id(model), interrupted_loads };
    sim.process(LoaderEvent::LoadTogether([(0, 1), (1, 0), (2, 2)].map(start).into()));
    assert_eq!(sim.state.phase(&model_id(0)), ModelPhase::Resident);
    let statuses = &sim.statuses;
    assert!(matches!(&statuses[&model_id(1)], PublishedStatus::OnDisk { shortage: Some(_), .. }), "{statuses:?}");
    let interrupted = UnusableReason::LoadsInterrupted { model: model_id(2), loads: 2 };
    assert_eq!(statuses[&model_id(2)], PublishedStatus::Unusable(interrupted));
    assert_eq!(sim.state.backoff.next_due(), None);
}

#[test]
fn nothing_is_loaded_during_a_yield_and_unloads_continue() {
    let mut sim = sim_of(30, 0, 2);
    sim.request(&model_id(0));
    sim.start_sequence(&model_id(0));
    sim.yielding = true;
    sim.process(LoaderEvent::UnloadRequested(model_id(0)));
    sim.request(&model_id(1));
    sim.end_sequences(&model_id(0));
    assert_eq!(sim.state.phase(&model_id(0)), ModelPhase::OnDisk);
    assert_eq!(sim.state.phase(&model_id(1)), ModelPhase::Loading);
    sim.yielding = false;
    sim.process(LoaderEvent::EnginesChanged);
    assert_eq!(sim.state.phase(&model_id(1)), ModelPhase::Resident);
}

#[test]
fn start_retry_waits_for_the_end_of_a_yield() {
    // Both models get a share of 20 bytes, which is too small, and may be retried with all 40 bytes.
    let mut sim = sim_of(40, 0, 2);
    sim.yields_during_load = true;
    let start = |model| StartModel { model: model_id(model), interrupted_loads: 0 };
    let actions = sim.process(LoaderEvent::LoadTogether([0, 1].map(start).into()));
    assert_eq!(actions.iter().filter(|action| matches!(action, LoaderAction::Load(_))).count(), 1, "{actions:?}");
    assert_eq!(sim.state.waiting, [model_id(0), model_id(1)]);
    sim.yielding = false;
    sim.process(LoaderEvent::EnginesChanged);
    assert_eq!(sim.state.phase(&model_id(0)), ModelPhase::Resident);
}
