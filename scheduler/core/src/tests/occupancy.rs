//! Tests of which jobs share a node: a node that is full for one model still gets jobs for another model, and a job
//! that may have stopped two nodes shares its node with no other job.

use cfq_proto::model::ModelId;
use cfq_proto::node::ModelState;
use cfq_proto::task::Priority;
use proptest::prelude::*;

use super::{carry_out, job, model, model_id, node, placements, state};
use crate::{Effect, Exclusion, Job, JobPhase, Node, PendingReason, plan};

fn running(on: &Node, job: Job) -> Job {
    Job { attempt: 1, phase: JobPhase::Running { node: on.id.clone(), boot: on.boot, accepted_ms: 0 }, ..job }
}

#[test]
fn exclusion_for_one_model_does_not_apply_to_another() {
    let other: ModelId = "path:/other.gguf".parse().unwrap();
    let second = ModelState { model: other.clone(), ..model(4096, 1) };
    let mut n = node("a", vec![model(4096, 1), second], 0);
    n.exclusions.insert(model_id(), Exclusion { version: 1, at_ms: 0 });
    let (full, free) = (job(Priority::P0, 0), Job { model: other, ..job(Priority::P3, 0) });
    assert_eq!(placements(&plan(&state(vec![n.clone()], vec![full, free.clone()]), 0)), vec![(free.id, n.id)]);
}

#[test]
fn job_suspected_twice_runs_alone_and_a_node_is_reserved_for_it() {
    let n = node("a", vec![model(8192, 4)], 0);
    let busy = running(&n, job(Priority::P2, 0));
    let poison = Job { suspicions: 2, losses: 2, attempt: 2, ..job(Priority::P2, 1) };
    let behind = job(Priority::P2, 2);
    let mut s = state(vec![n.clone()], vec![busy.clone(), poison.clone(), behind.clone()]);
    let effects = plan(&s, 0);
    let [Effect::Explain { job: waits, pending: PendingReason::ExclusiveNode { lost_or_unaccepted: 2 }, .. }] =
        effects.as_slice()
    else {
        panic!("{effects:?}")
    };
    assert_eq!(*waits, poison.id);
    carry_out(&mut s, &effects, 0);
    assert_eq!(plan(&s, 0), vec![], "explained once, and no other job is placed");
    s.on_job_ended(busy.id, 1);
    let effects = plan(&s, 1);
    assert_eq!(placements(&effects), vec![(poison.id, n.id.clone())]);
    carry_out(&mut s, &effects, 1);
    assert_eq!(placements(&plan(&s, 1)), vec![], "no job joins it");
    s.on_job_ended(poison.id, 2);
    assert_eq!(placements(&plan(&s, 2)), vec![(behind.id, n.id)]);
}

#[test]
fn job_suspected_once_or_lost_beside_another_one_is_not_isolated() {
    let n = node("a", vec![model(8192, 4)], 0);
    let jobs =
        vec![Job { suspicions: 1, losses: 1, ..job(Priority::P2, 0) }, Job { losses: 2, ..job(Priority::P2, 0) }];
    assert_eq!(placements(&plan(&state(vec![n.clone()], jobs.clone()), 0)).len(), 2);
    let often = Job { losses: 4, unaccepted: 2, ..job(Priority::P1, 0) };
    let placed = placements(&plan(&state(vec![n], [jobs, vec![often.clone()]].concat()), 0));
    assert_eq!(placed.len(), 1, "a job that is lost again and again is isolated in the end");
    assert_eq!(placed[0].0, often.id);
}

#[test]
fn other_nodes_take_work_while_a_possible_poison_job_waits() {
    let (a, b) = (node("a", vec![model(8192, 4)], 0), node("b", vec![model(8192, 4)], 0));
    let on_a = running(&a, job(Priority::P2, 0));
    let on_b = [running(&b, job(Priority::P2, 0)), running(&b, job(Priority::P2, 0))];
    let poison = Job { suspicions: 2, ..job(Priority::P1, 0) };
    let behind = job(Priority::P2, 2);
    let jobs = vec![on_a, on_b[0].clone(), on_b[1].clone(), poison, behind.clone()];
    assert_eq!(placements(&plan(&state(vec![a, b.clone()], jobs), 0)), vec![(behind.id, b.id)]);
}

proptest! {
    #[test]
    fn possible_poison_job_never_shares_a_node(
        suspicions in prop::collection::vec(0u32..4, 1..20),
        ends in prop::collection::vec(any::<prop::sample::Index>(), 20),
    ) {
        let nodes = vec![node("a", vec![model(8192, 3)], 0), node("b", vec![model(8192, 3)], 0)];
        let small = |suspicions| Job { suspicions, prompt_bytes: 10, max_tokens: 10, ..job(Priority::P2, 0) };
        let jobs = suspicions.into_iter().map(small);
        let mut s = state(nodes, jobs.collect());
        for (round, end) in ends.into_iter().enumerate() {
            let now = i64::try_from(round).unwrap();
            let effects = plan(&s, now);
            carry_out(&mut s, &effects, now);
            prop_assert_eq!(placements(&plan(&s, now)), vec![]);
            let held: Vec<&Job> = s.jobs.values().filter(|j| j.holder().is_some()).collect();
            for poison in held.iter().filter(|j| j.may_be_poison()) {
                let node = poison.holder().map(|(node, _)| node);
                let on_its_node = held.iter().filter(|j| j.holder().map(|(other, _)| other) == node).count();
                prop_assert_eq!(on_its_node, 1);
            }
            if held.is_empty() {
                prop_assert!(s.jobs.is_empty(), "jobs wait while every node is idle");
                break;
            }
            let ended = held[end.index(held.len())].id;
            s.on_job_ended(ended, now);
        }
    }
}
