//! Index of the prompt blocks that nodes are believed to have in their prefix caches.
//!
//! A node reports how many tokens of keys and values it can reuse, but not of which prompts. The index infers this from
//! the prompts that were sent to the node: a KV pool evicts the least recently used blocks first, and the end of a
//! prompt before its beginning. So for each node the index keeps the blocks by their last use, never more than the node
//! can hold, and after each ledger no more than the node reports. If this is wrong, a prompt is computed on one node
//! although another node had it cached. Nothing else depends on the index, so it is not stored, and a new leader starts
//! with an empty one.
//!
//! The index also estimates what a new prompt costs besides its own prefill: the time until the prefills that were sent
//! to the node before have ended, and the time to compute again what the prompt evicts. The second cost keeps the
//! nodes' caches at one age: without it, a node that gets many new prompts evicts blocks that are still used while
//! another node keeps blocks that nobody asks for any more.

use std::collections::BTreeMap;

use cfq_proto::ids::{BootId, NodeId};
use cfq_proto::model::ModelId;
use cfq_proto::node::ModelState;

use crate::cost::tokens_per_block;
use crate::node::Node;

/// Maximum number of blocks tracked for a model on a node: four megabytes of text.
const MAX_TRACKED_BLOCKS: usize = 8192;
/// Time since its last use after which a block counts half, in ms.
const REUSE_HALVING_MS: f64 = 300_000.0;
/// Times that a block which was just used is expected to be computed again if it is evicted. More than one, because the
/// blocks behind it become useless too. Both numbers are the best of those tried in the simulator (docs/benchmarks.md).
const EVICTION_WEIGHT: f64 = 3.0;

#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct PrefixIndex(BTreeMap<ModelId, BTreeMap<NodeId, NodeBlocks>>);

/// What the index knows about a prompt on a node.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct PromptEstimate {
    /// Leading blocks of the prompt that the node is believed to have cached.
    pub cached_blocks: u64,
    /// Time until the prefills that were sent to the node before have ended, in ms.
    pub wait_ms: f64,
    /// Expected time to compute the blocks again that the prompt evicts, in ms.
    pub eviction_ms: f64,
}

/// Blocks of one model on one boot of a node, by their hash and by their last use. A restart empties the cache.
#[derive(Debug, Clone, PartialEq)]
struct NodeBlocks {
    boot: BootId,
    last_use: BTreeMap<u64, u64>,
    /// Blocks by their last use, with its time in ms.
    by_last_use: BTreeMap<u64, (u64, i64)>,
    next_use: u64,
    /// Number of blocks that the node can hold: the most that it reported as free or cached.
    pool_blocks: usize,
    /// Number of blocks added since the last ledger: the next one may not contain them yet.
    unreported: usize,
    /// Expected end of the prefills that were sent to the node, in ms.
    prefill_end_ms: f64,
}

impl PrefixIndex {
    /// Records that the node computes, or has computed, the prompt with this prefix hash chain.
    pub fn record_prompt(&mut self, node: &NodeId, boot: BootId, model: &ModelId, chain: &[u64], now_ms: i64) {
        let blocks = self.blocks_mut(node, boot, model);
        // Most prompts share their beginning, so the beginning is recorded as used last.
        chain.iter().rev().for_each(|block| blocks.touch(*block, now_ms));
        blocks.shrink_to(blocks.pool_blocks.min(MAX_TRACKED_BLOCKS));
    }

    /// Records that a prefill of this duration was sent to the node.
    pub fn record_prefill(&mut self, node: &NodeId, boot: BootId, model: &ModelId, prefill_ms: f64, now_ms: i64) {
        let blocks = self.blocks_mut(node, boot, model);
        blocks.prefill_end_ms = blocks.prefill_end_ms.max(now_ms as f64) + prefill_ms;
    }

    /// Records that the node computes no prompt.
    pub fn on_idle(&mut self, node: &NodeId) {
        self.0.values_mut().filter_map(|nodes| nodes.get_mut(node)).for_each(|blocks| blocks.prefill_end_ms = 0.0);
    }

    /// Adopts what a new ledger of the node reports about its caches.
    pub fn on_ledger(&mut self, node: &Node) {
        for model in &node.ledger.models {
            let blocks = self.blocks_mut(&node.id, node.boot, &model.model);
            let to_blocks = |tokens: u64| (tokens as f64 / tokens_per_block(model)) as usize;
            let reported = to_blocks(model.kv_tiers.device.saturating_add(model.kv_tiers.offloaded));
            blocks.pool_blocks = blocks.pool_blocks.max(reported).max(to_blocks(model.kv_tokens_free));
            blocks.shrink_to(reported.saturating_add(blocks.unreported));
            blocks.unreported = 0;
        }
    }

    /// Removes all blocks of a node.
    pub fn forget_node(&mut self, node: &NodeId) {
        self.0.values_mut().for_each(|nodes| drop(nodes.remove(node)));
        self.0.retain(|_, nodes| !nodes.is_empty());
    }

    /// Number of leading blocks of the chain that the node is believed to have cached for the model.
    pub fn cached_blocks(&self, node: &Node, model: &ModelState, chain: &[u64]) -> u64 {
        let Some(blocks) = self.blocks(node, model) else { return 0 };
        chain.iter().take_while(|block| blocks.last_use.contains_key(block)).count() as u64
    }

    /// Estimates what the prompt with this chain costs on the node. `block_ms` is the time to compute one block.
    pub fn estimate(
        &self,
        node: &Node,
        model: &ModelState,
        chain: &[u64],
        block_ms: f64,
        now_ms: i64,
    ) -> PromptEstimate {
        let Some(blocks) = self.blocks(node, model) else { return PromptEstimate::default() };
        let cached = chain.iter().take_while(|block| blocks.last_use.contains_key(block)).count();
        let new_blocks = chain.len() - cached;
        let evicted = (blocks.last_use.len() + new_blocks).saturating_sub(blocks.pool_blocks).min(new_blocks);
        let reuse = |(_, last_use_ms): &(u64, i64)| {
            let age_ms = now_ms.saturating_sub(*last_use_ms).max(0) as f64;
            EVICTION_WEIGHT / (1.0 + age_ms / REUSE_HALVING_MS)
        };
        PromptEstimate {
            cached_blocks: cached as u64,
            wait_ms: (blocks.prefill_end_ms - now_ms as f64).max(0.0),
            eviction_ms: block_ms * blocks.by_last_use.values().take(evicted).map(reuse).sum::<f64>(),
        }
    }

    fn blocks(&self, node: &Node, model: &ModelState) -> Option<&NodeBlocks> {
        self.0.get(&model.model)?.get(&node.id).filter(|blocks| blocks.boot == node.boot)
    }

    fn blocks_mut(&mut self, node: &NodeId, boot: BootId, model: &ModelId) -> &mut NodeBlocks {
        let nodes = self.0.entry(model.clone()).or_default();
        let blocks = nodes.entry(node.clone()).or_insert_with(|| NodeBlocks::new(boot));
        if blocks.boot != boot {
            *blocks = NodeBlocks { pool_blocks: blocks.pool_blocks, ..NodeBlocks::new(boot) };
        }
        blocks
    }
}

impl NodeBlocks {
    fn new(boot: BootId) -> Self {
        let (last_use, by_last_use) = (BTreeMap::new(), BTreeMap::new());
        Self { boot, last_use, by_last_use, next_use: 0, pool_blocks: 0, unreported: 0, prefill_end_ms: 0.0 }
    }

    fn touch(&mut self, block: u64, now_ms: i64) {
        match self.last_use.insert(block, self.next_use) {
            Some(before) => drop(self.by_last_use.remove(&before)),
            None => self.unreported += 1,
        }
        self.by_last_use.insert(self.next_use, (block, now_ms));
        self.next_use += 1;
    }

    /// Removes the least recently used blocks until at most `max_blocks` are left.
    fn shrink_to(&mut self, max_blocks: usize) {
        while self.last_use.len() > max_blocks
            && let Some((_, (oldest, _))) = self.by_last_use.pop_first()
        {
            self.last_use.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use cfq_proto::job::{ChatMessage, ChatRole};
    use cfq_proto::messages::PrefillHint;
    use cfq_proto::node::KvTiers;
    use cfq_proto::prefix;
    use cfq_proto::task::{Agent, Priority};
    use proptest::prelude::*;

    use super::*;
    use crate::tests::{job, model, model_id, new_id, node, placements, state};
    use crate::{Effect, Job, JobPhase, PlannerState, plan};

    /// Two equal nodes, each with `tokens` reusable tokens.
    fn two_nodes(tokens: u64) -> [Node; 2] {
        let kv_tiers = KvTiers { device: tokens / 2, offloaded: tokens - tokens / 2 };
        ["a", "b"].map(|name| node(name, vec![ModelState { kv_tiers, ..model(65_536, 4) }], 0))
    }

    fn job_with_blocks(blocks: std::ops::Range<u64>) -> Job {
        let prompt_bytes = (blocks.end - blocks.start) * prefix::PREFIX_BLOCK_BYTES as u64;
        Job { prompt_bytes, prefix: blocks.collect(), ..job(Priority::P2, 0) }
    }

    fn run_to_end(state: &mut PlannerState, job: &Job, on: &Node) {
        let phase = JobPhase::Running { node: on.id.clone(), boot: on.boot, accepted_ms: -1 };
        state.on_job_row(Job { phase, ..job.clone() }, 0);
        state.on_job_ended(job.id, 0);
    }

    /// Two heartbeats: the first may have been sent before what ran last.
    fn heartbeats(state: &mut PlannerState, node: &Node) {
        (1..3).for_each(|seen_ms| state.on_node_row(Node { seen_ms, ..node.clone() }));
    }

    fn placement_of(mut state: PlannerState, job: Job) -> (NodeId, String) {
        state.on_job_row(job, 0);
        match plan(&state, 0).as_slice() {
            [Effect::Place { node, reason, .. }] => (node.clone(), reason.clone()),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn prompt_is_placed_on_its_cached_prefix_unless_another_node_is_faster() {
        let [a, mut b] = two_nodes(10_000);
        let mut s = state(vec![a.clone(), b.clone()], vec![]);
        assert_eq!(placement_of(s.clone(), job_with_blocks(0..20)).0, a.id, "of equal nodes the first");
        run_to_end(&mut s, &job_with_blocks(0..20), &b);
        let revision = job_with_blocks(0..24);
        let (node, reason) = placement_of(s.clone(), revision.clone());
        assert_eq!(node, b.id);
        // 24 blocks of 512 bytes and 32 tokens of the template, at 0.3 tokens per byte; 20 blocks are cached.
        assert!(reason.contains("prefill 647 tokens (3072 cached) 6.5 s"), "{reason}");
        assert_eq!(placement_of(s.clone(), job_with_blocks(100..124)).0, a.id, "not cached anywhere");
        b.ledger.models[0].decode_rate = 1.0;
        s.on_node_row(b);
        assert_eq!(placement_of(s, revision).0, a.id);
    }

    #[test]
    fn model_on_disk_with_offloaded_keys_is_loaded_first() {
        let [mut a, mut b] = two_nodes(10_000);
        for node in [&mut a, &mut b] {
            node.ledger.models[0].residency = cfq_proto::node::Residency::Available;
        }
        let mut s = state(vec![a, b.clone()], vec![]);
        run_to_end(&mut s, &job_with_blocks(0..20), &b);
        s.on_job_row(job_with_blocks(0..20), 0);
        assert!(matches!(plan(&s, 0).first(), Some(Effect::Load { node, .. }) if *node == b.id), "{:?}", plan(&s, 0));
    }

    #[test]
    fn least_recently_used_blocks_and_those_of_an_old_boot_do_not_count() {
        let [a, b] = two_nodes(3_100);
        let mut s = state(vec![a, b.clone()], vec![]);
        let cached = |s: &PlannerState, blocks: std::ops::Range<u64>| {
            let node = &s.nodes[&b.id];
            s.prefix_index.cached_blocks(node, &node.ledger.models[0], &blocks.collect::<Vec<_>>())
        };
        run_to_end(&mut s, &job_with_blocks(0..12), &b);
        run_to_end(&mut s, &job_with_blocks(100..112), &b);
        assert_eq!((cached(&s, 100..112), cached(&s, 0..12)), (12, 12), "the ledger is older than the prompts");
        heartbeats(&mut s, &b);
        // At 153.6 tokens per block, 20 blocks are cached.
        assert_eq!((cached(&s, 100..112), cached(&s, 0..12), cached(&s, 0..4)), (12, 8, 4));
        let restarted = Node { boot: new_id(), ..b.clone() };
        s.on_node_row(restarted.clone());
        assert_eq!(cached(&s, 100..112), 0);
        run_to_end(&mut s, &job_with_blocks(0..2), &restarted);
        assert_eq!((cached(&s, 100..112), cached(&s, 0..4)), (0, 2));
        s.on_node_gone(&b.id);
        s.on_node_row(restarted);
        assert_eq!(cached(&s, 0..4), 0);
    }

    #[test]
    fn new_prompt_goes_where_it_evicts_the_older_blocks() {
        let pool = 24 * 154;
        let [a, b] = two_nodes(pool).map(|mut node| {
            node.ledger.models[0].kv_tokens_free = pool;
            node
        });
        let mut s = state(vec![a.clone(), b.clone()], vec![]);
        for (blocks, on, at_ms) in [(0..24, &b, 0), (100..124, &a, 300_000)] {
            let job = job_with_blocks(blocks);
            let phase = JobPhase::Running { node: on.id.clone(), boot: on.boot, accepted_ms: at_ms };
            s.on_job_row(Job { phase, ..job.clone() }, at_ms);
            s.on_job_ended(job.id, at_ms);
        }
        for node in [&a, &b] {
            s.on_node_row(Node { seen_ms: 300_000, ..node.clone() });
        }
        let place = |blocks| {
            let mut s = s.clone();
            s.on_job_row(Job { max_tokens: 1, ..job_with_blocks(blocks) }, 300_000);
            placements(&plan(&s, 300_000))[0].1.clone()
        };
        assert_eq!(place(200..220), b.id, "the blocks of b were used longer ago");
        assert_eq!(place(100..120), a.id);
    }

    #[test]
    fn prompt_waits_for_the_prefills_sent_before_it() {
        let [a, b] = two_nodes(100_000);
        let mut s = state(vec![a.clone(), b.clone()], vec![]);
        let sent = job_with_blocks(0..20);
        let phase =
            JobPhase::Placed { node: a.id.clone(), boot: a.boot, lease: new_id(), placed_ms: 0, preparing_ms: None };
        s.on_job_row(Job { attempt: 1, phase, ..sent }, 0);
        let estimate = |s: &PlannerState, now_ms: i64| {
            let node = &s.nodes[&a.id];
            s.prefix_index.estimate(node, &node.ledger.models[0], &[0, 1, 99], 1_000.0, now_ms)
        };
        // 20 blocks of 512 bytes at 0.3 tokens per byte, and 32 tokens of the template, at 100 tokens per second.
        assert_eq!((estimate(&s, 0).wait_ms, estimate(&s, 10_000).wait_ms), (31_040.0, 21_040.0));
        assert_eq!((estimate(&s, 40_000).wait_ms, estimate(&s, 0).cached_blocks), (0.0, 2));
    }

    #[test]
    fn review_is_placed_where_its_prompt_was_prefilled() {
        let [a, b] = two_nodes(10_000);
        let mut s = state(vec![a, b.clone()], vec![]);
        let messages = vec![ChatMessage { role: ChatRole::User, content: "x".repeat(6_000) }];
        let chain = prefix::chain(model_id().as_str(), &messages);
        let review = Job { prompt_bytes: 6_000, prefix: chain, ..job(Priority::P2, 0) };
        let (task, model) = (review.task, model_id());
        let hint = PrefillHint { task, role: Agent::Beta, model, messages, max_tokens: 200, deterministic: false };
        s.on_prefill_hint_sent(&b.id, &hint);
        assert_eq!(placement_of(s, review).0, b.id);
    }

    proptest! {
        #[test]
        fn no_more_blocks_count_than_the_node_reports(
            ran_there in prop::collection::vec((0u64..40, 1u64..40), 0..20),
            tokens in 0u64..8_000,
        ) {
            let [a, b] = two_nodes(tokens);
            let mut s = state(vec![a, b.clone()], vec![]);
            for (from, count) in &ran_there {
                run_to_end(&mut s, &job_with_blocks(*from..from + count), &b);
            }
            heartbeats(&mut s, &b);
            let node = &s.nodes[&b.id];
            let cached = |block: u64| s.prefix_index.cached_blocks(node, &node.ledger.models[0], &[block]);
            let blocks: u64 = (0..80).map(cached).sum();
            prop_assert!(blocks as f64 * 153.6 <= tokens as f64, "{blocks} blocks in {tokens} tokens");
            let ran = |block: &u64| ran_there.iter().any(|(from, count)| (*from..from + count).contains(block));
            let distinct = (0..80u64).filter(ran).count();
            prop_assert!(blocks as usize == distinct.min((tokens as f64 / 153.6) as usize), "{blocks}");
            prop_assert_eq!(placements(&plan(&s, 0)).len(), 0);
        }
    }
}
