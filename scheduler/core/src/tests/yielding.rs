//! Tests of nodes that yield their GPU to a program of the machine's owner.

use cfq_proto::node::Residency;
use cfq_proto::task::Priority;

use super::{job, model, model_id, node, placements, state};
use crate::{Effect, Node, plan};

#[test]
fn yielding_model_gets_no_work_and_its_job_waits_without_a_limit() {
    let mut yielding = node("a", vec![model(4096, 1)], 0);
    yielding.ledger.yields.insert(model_id(), "game on cuda:0".to_owned());
    let pending_text = |now_ms| {
        let n = Node { seen_ms: now_ms, ..yielding.clone() };
        let [Effect::Explain { pending, .. }] = &plan(&state(vec![n], vec![job(Priority::P0, 0)]), now_ms)[..] else {
            panic!("the job is not pending")
        };
        pending.to_string()
    };
    for now_ms in [0, 10 * 3_600_000] {
        let text = pending_text(now_ms);
        assert!(text.starts_with("waits: a yields to game on cuda:0 (see yield_bytes"), "{text}");
    }
    let other = node("b", vec![model(4096, 1)], 0);
    let effects = plan(&state(vec![yielding.clone(), other], vec![job(Priority::P0, 0)]), 0);
    assert_eq!(placements(&effects).iter().map(|(_, node)| node.as_str()).collect::<Vec<_>>(), ["b"]);
    // While node `a` yields, a node that has the model on disk loads it.
    let mut on_disk = node("b", vec![model(4096, 1)], 0);
    on_disk.ledger.models[0].residency = Residency::Available;
    let effects = plan(&state(vec![yielding.clone(), on_disk], vec![job(Priority::P0, 0)]), 0);
    assert!(effects.iter().any(|e| matches!(e, Effect::Load { node, .. } if node.as_str() == "b")), "{effects:?}");
    // The reason of a node that cannot serve the model is listed too.
    let mut broken = node("b", vec![model(4096, 1)], 0);
    broken.ledger.models[0].residency = Residency::Unusable { reason: "no such file".to_owned() };
    let effects = plan(&state(vec![yielding, broken], vec![job(Priority::P0, 0)]), 0);
    let [Effect::Explain { pending, .. }] = &effects[..] else { panic!("{effects:?}") };
    let text = pending.to_string();
    assert!(text.contains("a yields to game on cuda:0; b: no such file"), "{text}");
}

#[test]
fn cordoned_node_gets_no_work_and_its_jobs_wait_without_a_limit() {
    let cordoned = Node { cordoned: true, ..node("a", vec![model(4096, 1)], 0) };
    for now_ms in [0, 10 * 3_600_000] {
        let n = Node { seen_ms: now_ms, ..cordoned.clone() };
        let effects = plan(&state(vec![n], vec![job(Priority::P0, 0)]), now_ms);
        let [Effect::Explain { pending, .. }] = &effects[..] else { panic!("{effects:?}") };
        assert_eq!(pending.to_string(), "waits: a is cordoned (`cfq machines uncordon NAME` ends this)");
    }
    // Another node takes the work, and loads the model for it.
    let effects =
        plan(&state(vec![cordoned.clone(), node("b", vec![model(4096, 1)], 0)], vec![job(Priority::P0, 0)]), 0);
    assert_eq!(placements(&effects).iter().map(|(_, node)| node.as_str()).collect::<Vec<_>>(), ["b"]);
    let mut on_disk = node("b", vec![model(4096, 1)], 0);
    on_disk.ledger.models[0].residency = Residency::Available;
    let effects = plan(&state(vec![cordoned.clone(), on_disk.clone()], vec![job(Priority::P0, 0)]), 0);
    assert!(effects.iter().any(|e| matches!(e, Effect::Load { node, .. } if node.as_str() == "b")), "{effects:?}");
    // A cordoned node loads nothing, and the reason of a node that cannot serve the model is listed too.
    on_disk.cordoned = true;
    let effects = plan(&state(vec![on_disk.clone()], vec![job(Priority::P0, 0)]), 0);
    assert!(!effects.iter().any(|e| matches!(e, Effect::Load { .. })), "{effects:?}");
    let mut broken = node("c", vec![model(4096, 1)], 0);
    broken.ledger.models[0].residency = Residency::Unusable { reason: "no such file".to_owned() };
    let effects = plan(&state(vec![cordoned.clone(), on_disk, broken], vec![job(Priority::P0, 0)]), 0);
    let [Effect::Explain { pending, .. }] = &effects[..] else { panic!("{effects:?}") };
    assert!(pending.to_string().starts_with("waits: a is cordoned; b is cordoned; c: no such file ("), "{pending}");
    // A load on a cordoned node does not keep another node from loading the model.
    let mut loading = node("a", vec![model(4096, 1)], 0);
    loading.ledger.models[0].residency = Residency::Loading;
    let loading = Node { cordoned: true, ..loading };
    let mut on_disk = node("b", vec![model(4096, 1)], 0);
    on_disk.ledger.models[0].residency = Residency::Available;
    let effects = plan(&state(vec![loading, on_disk], vec![job(Priority::P0, 0)]), 0);
    assert!(effects.iter().any(|e| matches!(e, Effect::Load { node, .. } if node.as_str() == "b")), "{effects:?}");
    // When the cordon ends, the job is placed.
    let mut waiting = state(vec![cordoned.clone()], vec![job(Priority::P0, 0)]);
    waiting.on_node_row(Node { cordoned: false, ..cordoned });
    assert_eq!(placements(&plan(&waiting, 0)).len(), 1);
}
