//! What nodes are believed to hold of prompts they have computed.
//!
//! A node tells how many tokens of keys and values it can go on from, not whose they are. Which they are follows from what ran
//! there, since a pool lets go of what was used least lately and of a prompt's end before its beginning: a node is believed
//! to hold the links it used last, as many as its count reaches. Where that is wrong, a prompt is computed where it need not
//! be; nothing else rests on it, so it is nowhere written down and a new leader begins without.

use std::collections::BTreeMap;

use cfq_proto::ids::{BootId, NodeId};
use cfq_proto::model::ModelId;
use cfq_proto::node::ModelState;

use crate::node::Node;
use crate::price::link_tokens;

/// Links remembered of a model on a node: four megabytes of text.
const LINKS: usize = 8192;

#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Held(BTreeMap<(NodeId, ModelId), Used>);

/// Links by when they were used last; nothing of it outlives the process.
#[derive(Debug, Clone, PartialEq)]
struct Used {
    boot: BootId,
    last: BTreeMap<u64, u64>,
    order: BTreeMap<u64, u64>,
    next: u64,
}

impl Held {
    /// The node computes, or has computed, a prompt of this chain.
    pub fn used(&mut self, node: &NodeId, boot: BootId, model: &ModelId, chain: &[u64]) {
        let of = (node.clone(), model.clone());
        let used = self.0.entry(of).or_insert_with(|| Used::new(boot));
        if used.boot != boot {
            *used = Used::new(boot);
        }
        // The beginning is needed by most, so it counts as used last.
        chain.iter().rev().for_each(|link| used.touch(*link));
    }

    pub fn forget(&mut self, node: &NodeId) {
        self.0.retain(|(of, _), _| of != node);
    }

    /// How many links of the chain, from its beginning, the node has for its model.
    pub fn shared(&self, node: &Node, model: &ModelState, chain: &[u64]) -> u64 {
        let Some(used) = self.0.get(&(node.id.clone(), model.model.clone())).filter(|u| u.boot == node.boot) else {
            return 0;
        };
        let tokens = model.kv_tiers.device.saturating_add(model.kv_tiers.parked);
        let links = (tokens as f64 / link_tokens(model)) as usize;
        let Some(oldest) = used.order.keys().rev().take(links).next_back() else { return 0 };
        chain.iter().take_while(|link| used.last.get(link).is_some_and(|at| at >= oldest)).count() as u64
    }
}

impl Used {
    fn new(boot: BootId) -> Self {
        Self { boot, last: BTreeMap::new(), order: BTreeMap::new(), next: 0 }
    }

    fn touch(&mut self, link: u64) {
        if let Some(before) = self.last.insert(link, self.next) {
            self.order.remove(&before);
        }
        self.order.insert(self.next, link);
        self.next += 1;
        if self.order.len() > LINKS
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.last.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use cfq_proto::job::{ChatMessage, ChatRole};
    use cfq_proto::messages::WarmUp;
    use cfq_proto::node::KvTiers;
    use cfq_proto::prefix;
    use cfq_proto::task::{Agent, Priority};
    use proptest::prelude::*;

    use super::*;
    use crate::properties::{job, model, model_id, node, placed, state};
    use crate::{Effect, Job, Phase, State, plan};

    /// Two nodes alike, each with so many tokens of something.
    fn two(tokens: u64) -> [Node; 2] {
        let kv_tiers = KvTiers { device: tokens / 2, parked: tokens - tokens / 2 };
        ["a", "b"].map(|name| node(name, vec![ModelState { kv_tiers, ..model(65_536, 4) }], 0))
    }

    fn of_chain(links: std::ops::Range<u64>) -> Job {
        let prompt_bytes = (links.end - links.start) * prefix::BLOCK as u64;
        Job { prompt_bytes, prefix: links.collect(), ..job(Priority::P2, 0) }
    }

    fn ran(state: &mut State, job: &Job, on: &Node) {
        let phase = Phase::Running { node: on.id.clone(), boot: on.boot, accepted_ms: -1 };
        state.job(Job { phase, ..job.clone() }, 0);
        state.job_over(job.id, 0);
    }

    fn goes_to(mut state: State, job: Job) -> (NodeId, String) {
        state.job(job, 0);
        match plan(&state, 0).as_slice() {
            [Effect::Place { node, reason, .. }] => (node.clone(), reason.clone()),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_prompt_goes_where_its_beginning_is_unless_another_is_sooner_all_the_same() {
        let [a, mut b] = two(10_000);
        let mut s = state(vec![a.clone(), b.clone()], vec![]);
        assert_eq!(goes_to(s.clone(), of_chain(0..20)).0, a.id, "of equals the first");
        ran(&mut s, &of_chain(0..20), &b);
        let revision = of_chain(0..24);
        let (node, reason) = goes_to(s.clone(), revision.clone());
        assert_eq!(node, b.id);
        // 24 blocks of 512 bytes and 32 tokens of the template, at 0.3 tokens a byte; 20 blocks are there.
        assert!(reason.contains("prefill 647 tokens and 3072 held there 6.5 s"), "{reason}");
        assert_eq!(goes_to(s.clone(), of_chain(100..124)).0, a.id, "it knows nothing of that one");
        b.ledger.models[0].decode_rate = 1.0;
        s.node(b);
        assert_eq!(goes_to(s, revision).0, a.id);
    }

    #[test]
    fn a_model_on_disk_with_parked_keys_is_loaded_before_its_twin() {
        let [mut a, mut b] = two(10_000);
        for node in [&mut a, &mut b] {
            node.ledger.models[0].residency = cfq_proto::node::Residency::Available;
        }
        let mut s = state(vec![a, b.clone()], vec![]);
        ran(&mut s, &of_chain(0..20), &b);
        s.job(of_chain(0..20), 0);
        assert!(matches!(plan(&s, 0).last(), Some(Effect::Load { node, .. }) if *node == b.id), "{:?}", plan(&s, 0));
    }

    #[test]
    fn what_was_used_least_lately_is_not_counted_on_and_a_new_process_has_nothing() {
        let [a, b] = two(3_100);
        let mut s = state(vec![a, b.clone()], vec![]);
        let held = |s: &State, links: std::ops::Range<u64>| {
            let node = &s.nodes[&b.id];
            s.held.shared(node, &node.ledger.models[0], &links.collect::<Vec<_>>())
        };
        ran(&mut s, &of_chain(0..12), &b);
        ran(&mut s, &of_chain(100..112), &b);
        // 153.6 tokens a link: 20 of them are there.
        assert_eq!((held(&s, 100..112), held(&s, 0..12), held(&s, 0..4)), (12, 8, 4));
        let anew = Node { boot: crate::properties::id(), ..b.clone() };
        s.node(anew.clone());
        assert_eq!(held(&s, 100..112), 0);
        ran(&mut s, &of_chain(0..2), &anew);
        assert_eq!((held(&s, 100..112), held(&s, 0..4)), (0, 2));
        s.node_gone(&b.id);
        s.node(anew);
        assert_eq!(held(&s, 0..4), 0);
    }

    #[test]
    fn a_review_goes_where_its_prompt_was_computed_ahead() {
        let [a, b] = two(10_000);
        let mut s = state(vec![a, b.clone()], vec![]);
        let messages = vec![ChatMessage { role: ChatRole::User, content: "x".repeat(6_000) }];
        let chain = prefix::chain(model_id().as_str(), &messages);
        let review = Job { prompt_bytes: 6_000, prefix: chain, ..job(Priority::P2, 0) };
        let (task, model) = (review.task, model_id());
        let ahead = WarmUp { task, role: Agent::Beta, model, messages, max_tokens: 200, deterministic: false };
        s.warmed(&b.id, &ahead);
        assert_eq!(goes_to(s, review).0, b.id);
    }

    proptest! {
        #[test]
        fn no_more_is_counted_on_than_a_node_tells(
            ran_there in prop::collection::vec((0u64..40, 1u64..40), 0..20),
            tokens in 0u64..8_000,
        ) {
            let [a, b] = two(tokens);
            let mut s = state(vec![a, b.clone()], vec![]);
            for (from, count) in &ran_there {
                ran(&mut s, &of_chain(*from..from + count), &b);
            }
            let node = &s.nodes[&b.id];
            let held = |link: u64| s.held.shared(node, &node.ledger.models[0], &[link]);
            let links: u64 = (0..80).map(held).sum();
            prop_assert!(links as f64 * 153.6 <= tokens as f64, "{links} links in {tokens} tokens");
            let distinct = (0..80u64).filter(|l| ran_there.iter().any(|(from, n)| (*from..from + n).contains(l))).count();
            prop_assert!(links as usize == distinct.min((tokens as f64 / 153.6) as usize), "{links}");
            prop_assert_eq!(placed(&plan(&s, 0)).len(), 0);
        }
    }
}
