//! The planner's properties, over random clusters, and the small stories it must get right.

use std::collections::BTreeMap;

use cfq_proto::ids::{JobId, NodeId};
use cfq_proto::job::JobFailure;
use cfq_proto::model::ModelId;
use cfq_proto::node::{KvTiers, Ledger, ModelState, Residency};
use cfq_proto::task::{Agent, Priority};
use proptest::prelude::*;

use crate::*;

pub(crate) const LIMITS: Limits = Limits { lease_ttl_ms: 6_000, accept_ms: 3_000, retry_ceiling_ms: 600_000 };

/// A new id each time, the same ones in every run.
pub(crate) fn id<T: std::str::FromStr<Err: std::fmt::Debug>>() -> T {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
    format!("{:032x}", NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)).parse().unwrap()
}

pub(crate) fn model_id() -> ModelId {
    "path:/m.gguf".parse().unwrap()
}

pub(crate) fn job(priority: Priority, created_ms: i64) -> Job {
    Job {
        id: id(),
        task: id(),
        role: Agent::Alpha,
        model: model_id(),
        priority,
        deadline_ms: None,
        created_ms,
        prompt_bytes: 1_000,
        prefix: vec![],
        max_tokens: 200,
        known_need: None,
        never: BTreeMap::new(),
        setbacks: Setbacks::default(),
        first_failure_ms: None,
        no_node_ms: 0,
        losses: 0,
        failure: String::new(),
        attempt: 0,
        phase: Phase::Queued,
    }
}

pub(crate) fn model(kv_tokens_free: u64, max_sequences: u32) -> ModelState {
    ModelState {
        model: model_id(),
        residency: Residency::Resident,
        device: "cpu".into(),
        need_bytes: 1,
        context_tokens: 8192,
        kv_tokens_free,
        kv_tiers: KvTiers::default(),
        running: 0,
        max_sequences,
        prefill_rate: 100.0,
        decode_rate: 10.0,
        load_rate: 0.0,
        tokens_per_byte: 0.3,
    }
}

pub(crate) fn node(name: &str, models: Vec<ModelState>, seen_ms: i64) -> Node {
    let ledger = Ledger { version: 1, models, ..Ledger::default() };
    Node { id: NodeId::new(name).unwrap(), boot: id(), ledger, seen_ms, left_out: BTreeMap::new() }
}

pub(crate) fn state(nodes: Vec<Node>, jobs: Vec<Job>) -> State {
    let mut state = State::new(LIMITS);
    nodes.into_iter().for_each(|n| state.node(n));
    jobs.into_iter().for_each(|j| state.job(j, 0));
    state
}

/// Carries a plan out as Postgres would if every write is committed.
pub(crate) fn carry_out(state: &mut State, effects: &[Effect], now_ms: i64) {
    for effect in effects {
        match effect.clone() {
            Effect::Place { job, attempt, node, boot, .. } => {
                let mut row = state.jobs[&job].clone();
                row.attempt = attempt;
                row.phase = Phase::Placed { node, boot, lease: id(), placed_ms: now_ms };
                state.job(row, now_ms);
            }
            Effect::Resend { job, lease, .. } => state.resent(job, lease, now_ms),
            Effect::Unplace { job, node, deaf, .. } => {
                let mut row = state.jobs[&job].clone();
                row.phase = Phase::Queued;
                state.job(row, now_ms);
                if deaf {
                    state.deaf(&node, now_ms);
                }
            }
            Effect::Fail { job, .. } => state.job_over(job, now_ms),
            Effect::Load { node, boot, model, .. } => state.asked_to_load(node, boot, model, now_ms),
            Effect::Unavailable { job, reason, .. } => {
                let mut row = state.jobs[&job].clone();
                row.first_failure_ms = Some(now_ms);
                row.failure = reason;
                state.job(row, now_ms);
            }
            Effect::Explain { job, waiting, no_node_ms, .. } => {
                let mut row = state.jobs[&job].clone();
                row.no_node_ms = no_node_ms;
                if waiting.is_served() && row.noted_unavailable() {
                    row.first_failure_ms = None;
                }
                state.job(row, now_ms);
                state.explained(job, waiting, now_ms);
            }
        }
    }
}

pub(crate) fn placed(effects: &[Effect]) -> Vec<(JobId, NodeId)> {
    effects
        .iter()
        .filter_map(|e| match e {
            Effect::Place { job, node, .. } => Some((*job, node.clone())),
            _ => None,
        })
        .collect()
}

prop_compose! {
    fn any_job()(priority in 0i16..4, created_ms in 0i64..100_000, prompt_bytes in 0u64..20_000, max_tokens in 1u32..2_000,
                 deadline_ms in prop::option::of(0i64..1_000_000)) -> Job {
        Job { prompt_bytes, max_tokens, deadline_ms, ..job(Priority::try_from(priority).unwrap(), created_ms) }
    }
}

prop_compose! {
    fn any_node(name: &'static str)(free in 0u64..20_000, slots in 0u32..5, running in 0u32..5, prefill in 0.0f64..500.0, decode in 0.0f64..50.0) -> Node {
        let mut m = model(free, slots);
        (m.running, m.prefill_rate, m.decode_rate) = (running.min(slots), prefill, decode);
        node(name, vec![m], 100_000)
    }
}

proptest! {
    #[test]
    fn never_beyond_the_ledger_and_planning_twice_changes_nothing(
        a in any_node("a"), b in any_node("b"), jobs in prop::collection::vec(any_job(), 0..30),
    ) {
        let now = 100_500;
        let mut s = state(vec![a.clone(), b.clone()], jobs.clone());
        let effects = plan(&s, now);
        for n in [&a, &b] {
            let m = &n.ledger.models[0];
            let here: Vec<&Job> = placed(&effects).into_iter().filter(|(_, on)| *on == n.id)
                .map(|(id, _)| jobs.iter().find(|j| j.id == id).unwrap()).collect();
            prop_assert!(here.len() as u32 <= m.max_sequences.saturating_sub(m.running));
            let tokens: u64 = here.iter().map(|j| crate::price::need(j, m)).sum();
            let alone_on_idle = here.len() == 1 && m.running == 0 && crate::price::prompt_tokens(here[0], m) < m.kv_tokens_free;
            prop_assert!(tokens <= m.kv_tokens_free || alone_on_idle, "{tokens} of {}", m.kv_tokens_free);
        }
        carry_out(&mut s, &effects, now);
        prop_assert_eq!(plan(&s, now), vec![]);
        // Also after the same rows are loaded again, as by a new leader.
        let mut again = state(vec![a, b], vec![]);
        s.jobs.values().for_each(|j| again.job(j.clone(), now));
        prop_assert_eq!(placed(&plan(&again, now)), vec![]);
    }

    #[test]
    fn what_outranks_is_never_passed_on_the_same_model(a in any_node("a"), jobs in prop::collection::vec(any_job(), 1..30)) {
        let now = 100_500;
        let s = state(vec![a], jobs.clone());
        let taken: Vec<JobId> = placed(&plan(&s, now)).into_iter().map(|(j, _)| j).collect();
        let last = jobs.iter().filter(|j| taken.contains(&j.id)).map(|j| rank(j, now)).max();
        for waiting in jobs.iter().filter(|j| !taken.contains(&j.id)) {
            prop_assert!(last.is_none_or(|l| l < rank(waiting, now)));
        }
    }

    /// One slot, and a new P0 with a pressing deadline each time it is free: the P3 is still placed in its stated time.
    #[test]
    fn nobody_starves(work_ms in 1_000i64..120_000) {
        let patient = job(Priority::P3, 0);
        let mut now = 0;
        let mut s = state(vec![node("a", vec![model(4096, 1)], 0)], vec![patient.clone()]);
        s.job(Job { deadline_ms: Some(1), ..job(Priority::P0, 0) }, 0);
        loop {
            let effects = plan(&s, now);
            let took = placed(&effects);
            if took.iter().any(|(j, _)| *j == patient.id) {
                break;
            }
            prop_assert!(now <= OVERDUE_MS + work_ms, "still waiting at {now}");
            carry_out(&mut s, &effects, now);
            now += work_ms;
            took.iter().for_each(|(j, _)| s.job_over(*j, now));
            s.job(Job { deadline_ms: Some(1), ..job(Priority::P0, now) }, now);
            let mut n = s.nodes.values().next().unwrap().clone();
            n.seen_ms = now;
            s.node(n);
        }
    }
}

#[test]
fn p0_goes_before_p3() {
    let (low, high) = (job(Priority::P3, 0), job(Priority::P0, 1_000));
    let s = state(vec![node("a", vec![model(4096, 1)], 1_000)], vec![low, high.clone()]);
    assert_eq!(placed(&plan(&s, 1_000)).iter().map(|(j, _)| *j).collect::<Vec<_>>(), vec![high.id]);
}

#[test]
fn a_large_job_in_front_keeps_its_room_free_of_small_ones_behind() {
    let mut m = model(1_000, 4);
    m.running = 1;
    let large = Job { max_tokens: 3_000, ..job(Priority::P1, 0) };
    let small = Job { max_tokens: 10, ..job(Priority::P2, 0) };
    let s = state(vec![node("a", vec![m], 0)], vec![large, small]);
    assert_eq!(placed(&plan(&s, 0)), vec![]);
}

#[test]
fn room_between_two_beats_is_counted_both_ways() {
    let first = job(Priority::P2, 0);
    let second = job(Priority::P2, 1);
    let n = node("a", vec![model(4096, 1)], 1_000);
    let mut s = state(vec![n.clone()], vec![first.clone(), second.clone()]);
    let effects = plan(&s, 1_000);
    carry_out(&mut s, &effects, 1_000);
    // Accepted, but the ledger is older: still subtracted.
    let running = Job {
        attempt: 1,
        phase: Phase::Running { node: n.id.clone(), boot: n.boot, accepted_ms: 1_100 },
        ..first.clone()
    };
    s.job(running, 1_100);
    assert_eq!(placed(&plan(&s, 1_200)), vec![]);
    // A beat after the acceptance counts it in the ledger; not subtracted a second time, still no slot.
    let mut counted = n.clone();
    (counted.seen_ms, counted.ledger.version, counted.ledger.models[0].running) = (2_000, 2, 1);
    s.node(counted.clone());
    assert_eq!(placed(&plan(&s, 2_100)), vec![]);
    // It is over: the slot is free although the ledger does not know yet.
    s.job_over(first.id, 2_500);
    assert_eq!(placed(&plan(&s, 2_500)), vec![(second.id, n.id.clone())]);
    // And not counted twice once the next beat says so.
    (counted.seen_ms, counted.ledger.version, counted.ledger.models[0].running) = (4_000, 3, 0);
    s.node(counted);
    assert_eq!(placed(&plan(&s, 4_000)), vec![(second.id, n.id)]);
}

#[test]
fn a_node_that_said_not_now_is_left_out_until_its_ledger_is_later() {
    let mut n = node("a", vec![model(4096, 1)], 0);
    n.left_out.insert(model_id(), LeftOut { version: 3, at_ms: 0 });
    let waiting = job(Priority::P2, 0);
    let mut s = state(vec![n.clone()], vec![waiting.clone()]);
    assert_eq!(placed(&plan(&s, 100)), vec![]);
    n.ledger.version = 3;
    s.node(n.clone());
    assert_eq!(placed(&plan(&s, 100)), vec![]);
    n.ledger.version = 4;
    s.node(n.clone());
    assert_eq!(placed(&plan(&s, 100)), vec![(waiting.id, n.id)]);
}

#[test]
fn a_job_refused_for_ever_everywhere_fails_with_every_nodes_words() {
    let n = node("a", vec![model(4096, 1)], 0);
    let mut refused = job(Priority::P2, 0);
    refused.never.insert(n.id.clone(), "a model of another architecture".into());
    let effects = plan(&state(vec![n], vec![refused]), 0);
    let [Effect::Fail { failure: JobFailure::Rejected { reason }, .. }] = effects.as_slice() else {
        panic!("{effects:?}")
    };
    assert!(reason.contains("a: a model of another architecture"), "{reason}");
}

#[test]
fn after_a_failure_another_node_is_taken_at_once_and_the_same_one_only_after_the_ladder() {
    let (a, b) = (node("a", vec![model(4096, 1)], 0), node("b", vec![model(4096, 1)], 0));
    let mut failed = job(Priority::P2, 0);
    failed.first_failure_ms = Some(0);
    failed.setbacks.record(failed.id, a.id.clone(), 0, Ladder { base_ms: 1_000, cap_ms: 256_000 });
    let only_a = state(vec![a.clone()], vec![failed.clone()]);
    assert_eq!(placed(&plan(&only_a, 1)), vec![]);
    assert_eq!(placed(&plan(&only_a, 1_000)), vec![(failed.id, a.id.clone())]);
    assert_eq!(placed(&plan(&state(vec![a, b.clone()], vec![failed.clone()]), 1)), vec![(failed.id, b.id)]);
}

#[test]
fn an_endpoint_that_is_down_everywhere_fails_the_job_at_the_ceiling_and_not_before() {
    let mut n = node("a", vec![model(4096, 1)], 0);
    n.ledger.models[0].residency = Residency::Unusable { reason: "connection refused".into() };
    let mut s = state(vec![n.clone()], vec![job(Priority::P2, 0)]);
    let effects = plan(&s, 0);
    assert!(matches!(effects.as_slice(), [Effect::Unavailable { .. }]), "{effects:?}");
    carry_out(&mut s, &effects, 0);
    for now in [1, 599_999] {
        n.seen_ms = now;
        s.node(n.clone());
        let effects = plan(&s, now);
        assert!(effects.iter().all(|e| matches!(e, Effect::Explain { .. })), "{effects:?}");
    }
    n.seen_ms = 600_000;
    s.node(n);
    let effects = plan(&s, 600_000);
    assert!(
        matches!(effects.as_slice(), [Effect::Fail { failure: JobFailure::Unavailable { .. }, .. }]),
        "{effects:?}"
    );
}

#[test]
fn an_endpoint_that_came_back_has_its_whole_ceiling_again() {
    let mut n = node("a", vec![model(4096, 1)], 0);
    let mut other = job(Priority::P0, 0);
    let waiting = job(Priority::P2, 0);
    n.ledger.models[0].residency = Residency::Unusable { reason: "connection refused".into() };
    let mut s = state(vec![n.clone()], vec![waiting.clone()]);
    let effects = plan(&s, 0);
    carry_out(&mut s, &effects, 0);
    assert_eq!(s.jobs[&waiting.id].first_failure_ms, Some(0));
    // It is back, but somebody else has its only place.
    (n.seen_ms, n.ledger.version, n.ledger.models[0].residency) = (60_000, 2, Residency::Resident);
    s.node(n.clone());
    other.phase = Phase::Running { node: n.id.clone(), boot: n.boot, accepted_ms: 60_000 };
    s.job(other, 60_000);
    let effects = plan(&s, 60_000);
    carry_out(&mut s, &effects, 60_000);
    assert_eq!(s.jobs[&waiting.id].first_failure_ms, None);
    // Long after the first trouble there is trouble again: that is a new one.
    (n.seen_ms, n.ledger.version) = (700_000, 3);
    n.ledger.models[0].residency = Residency::Unusable { reason: "connection refused".into() };
    s.node(n);
    let effects = plan(&s, 700_000);
    assert!(matches!(effects.as_slice(), [Effect::Unavailable { .. }]), "{effects:?}");
}

#[test]
fn a_node_that_has_no_room_or_drains_is_not_one_that_fails() {
    let n = node("a", vec![model(4096, 1)], 700_000);
    let mut failed_once = job(Priority::P2, 0);
    failed_once.first_failure_ms = Some(0);
    failed_once.setbacks.record(failed_once.id, n.id.clone(), 0, Ladder { base_ms: 1_000, cap_ms: 256_000 });
    let left_out = Node { left_out: [(model_id(), LeftOut { version: 1, at_ms: 699_000 })].into(), ..n.clone() };
    let mut draining = n.clone();
    draining.ledger.draining = true;
    for busy in [left_out, draining] {
        let effects = plan(&state(vec![busy], vec![failed_once.clone()]), 700_000);
        assert!(!effects.iter().any(|e| matches!(e, Effect::Fail { .. })), "{effects:?}");
    }
    assert_eq!(placed(&plan(&state(vec![n], vec![failed_once]), 700_000)).len(), 1);
}

#[test]
fn a_model_that_no_live_node_has_fails_the_job_at_the_ceiling_and_without_nodes_it_waits() {
    let mut n = node("a", vec![model(4096, 1)], 0);
    let other: ModelId = "path:/other.gguf".parse().unwrap();
    let mut s = state(vec![n.clone()], vec![Job { model: other, first_failure_ms: Some(0), ..job(Priority::P2, 0) }]);
    let explains = |effects: &[Effect]| {
        let [Effect::Explain { waiting, .. }] = effects else { panic!("{effects:?}") };
        waiting.clone()
    };
    // Nobody is up for longer than the ceiling, and that does not count.
    let effects = plan(&s, 700_000);
    assert_eq!(explains(&effects), Waiting::NoNodeUp);
    carry_out(&mut s, &effects, 700_000);
    assert_eq!(plan(&s, 9_000_000), vec![]);
    let began = 10_000_000;
    n.seen_ms = began;
    s.node(n.clone());
    let effects = plan(&s, began);
    assert!(matches!(explains(&effects), Waiting::NoNode { .. }));
    carry_out(&mut s, &effects, began);
    n.seen_ms = began + 600_000;
    s.node(n);
    assert!(plan(&s, began + 599_999).iter().all(|e| matches!(e, Effect::Explain { .. })));
    let effects = plan(&s, began + 600_000);
    let [Effect::Fail { failure: JobFailure::Unavailable { reason }, .. }] = effects.as_slice() else {
        panic!("{effects:?}")
    };
    assert!(reason.contains("model path:/other.gguf") && reason.contains("served are: path:/m.gguf"), "{reason}");
}

/// A cluster whose schedulers die every few minutes, with all nodes away for an hour in between.
#[test]
fn new_leaders_and_hours_without_nodes_neither_stop_nor_hurry_the_count() {
    let mut n = node("a", vec![model(4096, 1)], 0);
    let mut row = Job { model: "path:/other.gguf".parse().unwrap(), ..job(Priority::P2, 0) };
    let (mut now, mut beside_nodes, mut leaders) = (0, 0, 0);
    let failed = loop {
        leaders += 1;
        assert!(leaders < 10, "it waits for ever");
        let mut s = state(vec![n.clone()], vec![row.clone()]);
        // Until the node beats again it is not up; then this leader lives three minutes.
        let effects = plan(&s, now);
        carry_out(&mut s, &effects, now);
        let until = now + 180_000;
        let failed = loop {
            n.seen_ms = now;
            s.node(n.clone());
            let effects = plan(&s, now);
            carry_out(&mut s, &effects, now);
            if !s.jobs.contains_key(&row.id) {
                break true;
            }
            if now >= until {
                break false;
            }
            (now, beside_nodes) = (now + 5_000, beside_nodes + 5_000);
        };
        if failed {
            break beside_nodes;
        }
        row = s.jobs[&row.id].clone();
        now += 3_600_000;
    };
    assert!((600_000..=600_000 + 30_000 * leaders).contains(&failed), "{failed} ms, {leaders} leaders");
}

#[test]
fn a_placed_job_is_sent_again_twice_then_taken_back_from_a_deaf_node() {
    let mut n = node("a", vec![model(4096, 1)], 0);
    let waiting = job(Priority::P2, 0);
    let mut s = state(vec![n.clone()], vec![waiting.clone()]);
    let mut seen = Vec::new();
    for now in (0..20_000).step_by(500) {
        n.seen_ms = now;
        s.node(n.clone());
        let effects = plan(&s, now);
        seen.extend(effects.iter().map(|e| match e {
            Effect::Place { .. } => (now, "place"),
            Effect::Resend { .. } => (now, "resend"),
            Effect::Unplace { deaf: true, .. } => (now, "unplace"),
            other => panic!("{other:?}"),
        }));
        carry_out(&mut s, &effects, now);
    }
    assert_eq!(seen, vec![(0, "place"), (3_000, "resend"), (6_000, "resend"), (9_000, "unplace")]);
    n.ledger.version = 2;
    s.node(n);
    assert_eq!(placed(&plan(&s, 20_000)).len(), 1, "its ledger changed: it gets work again");
}

#[test]
fn a_placed_job_of_a_node_that_went_silent_or_came_back_goes_back_at_once() {
    let n = node("a", vec![model(4096, 1)], 0);
    let waiting = job(Priority::P2, 0);
    let mut s = state(vec![n.clone()], vec![waiting]);
    let effects = plan(&s, 0);
    carry_out(&mut s, &effects, 0);
    let mut silent = s.clone();
    assert!(matches!(plan(&silent, 6_001).as_slice(), [Effect::Unplace { deaf: false, .. }]));
    silent.node(Node { boot: id(), seen_ms: 1_000, ..n });
    assert!(matches!(plan(&silent, 1_000).as_slice(), [Effect::Unplace { deaf: false, .. }]));
}

#[test]
fn a_model_that_makes_way_gets_nothing_and_the_job_waits_however_long_that_is() {
    let mut yields = node("a", vec![model(4096, 1)], 0);
    yields.ledger.yields.insert(model_id(), "game on cuda:0".to_owned());
    let waits = |now_ms| {
        let n = Node { seen_ms: now_ms, ..yields.clone() };
        let [Effect::Explain { waiting, .. }] = &plan(&state(vec![n], vec![job(Priority::P0, 0)]), now_ms)[..] else {
            panic!("it waits")
        };
        waiting.to_string()
    };
    for now_ms in [0, 10 * 3_600_000] {
        let said = waits(now_ms);
        assert!(said.starts_with("waits: a makes way for game on cuda:0 (yield_at"), "{said}");
    }
    let other = node("b", vec![model(4096, 1)], 0);
    let effects = plan(&state(vec![yields.clone(), other], vec![job(Priority::P0, 0)]), 0);
    assert_eq!(placed(&effects).iter().map(|(_, node)| node.as_str()).collect::<Vec<_>>(), ["b"]);
    // A node that has it on its disk loads it meanwhile.
    let mut on_disk = node("b", vec![model(4096, 1)], 0);
    on_disk.ledger.models[0].residency = Residency::Available;
    let effects = plan(&state(vec![yields.clone(), on_disk], vec![job(Priority::P0, 0)]), 0);
    assert!(effects.iter().any(|e| matches!(e, Effect::Load { node, .. } if node.as_str() == "b")), "{effects:?}");
    // What cannot be used says so beside it.
    let mut broken = node("b", vec![model(4096, 1)], 0);
    broken.ledger.models[0].residency = Residency::Unusable { reason: "no such file".to_owned() };
    let effects = plan(&state(vec![yields, broken], vec![job(Priority::P0, 0)]), 0);
    let [Effect::Explain { waiting, .. }] = &effects[..] else { panic!("{effects:?}") };
    let said = waiting.to_string();
    assert!(said.contains("a makes way for game on cuda:0; b: no such file"), "{said}");
}

#[test]
fn a_draining_node_and_one_that_loads_get_nothing() {
    let mut draining = node("a", vec![model(4096, 1)], 0);
    draining.ledger.draining = true;
    let mut loading = node("b", vec![model(4096, 1)], 0);
    loading.ledger.models[0].residency = Residency::Loading;
    assert_eq!(placed(&plan(&state(vec![draining, loading], vec![job(Priority::P0, 0)]), 0)), vec![]);
}

#[test]
fn a_database_clock_that_was_set_back_an_hour_neither_keeps_a_dead_node_alive_nor_a_lost_order_waiting() {
    let hour = 3_600_000;
    let dead = node("a", vec![model(4096, 1)], hour);
    assert!(!dead.alive(1_000, LIMITS.lease_ttl_ms));
    let live = node("b", vec![model(4096, 1)], 1_000);
    let ordered = Job {
        phase: Phase::Placed { node: live.id.clone(), boot: live.boot, lease: id(), placed_ms: hour },
        ..job(Priority::P2, 0)
    };
    assert!(matches!(plan(&state(vec![live], vec![ordered]), 1_000).as_slice(), [Effect::Resend { .. }]));
}
