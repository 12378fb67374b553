//! Chooses the node that computes the prompt of an expected call in advance: the node where the call would be placed.
//!
//! Costs are computed as in a plan, but without the task's own running calls and the prompts that are being computed,
//! which will have ended when the expected call is placed, and without evictions. Free capacity is not required, because
//! a full node may have some by that time, and nothing is reserved for the call: if it is placed elsewhere in the end,
//! only idle time was lost. Only resident models qualify, because loads are requested only for jobs.

use cfq_proto::ids::NodeId;
use cfq_proto::messages::PrefillHint;
use cfq_proto::node::Residency;
use cfq_proto::prefix::chain;

use crate::cost::prefill_hint_cost;
use crate::job::Job;
use crate::state::PlannerState;

/// Returns the node on which the hinted prompt should be computed. `None` if no node on which the model is resident
/// accepts work for it now, or if the task has no job in progress.
pub fn prefill_node(state: &PlannerState, hint: &PrefillHint, now_ms: i64) -> Option<NodeId> {
    // Only a task with a call in progress may have prompts computed.
    if !state.jobs_of_task.contains_key(&hint.task) {
        return None;
    }
    let prompt_bytes = hint.messages.iter().map(|message| message.content.len() as u64).sum();
    let chain = chain(hint.model.as_str(), &hint.messages);
    let able = state
        .live_nodes_with(&hint.model, now_ms)
        .filter(|(_, model)| matches!(model.residency, Residency::Resident))
        .filter(|(node, _)| state.accepts_work(node, &hint.model, now_ms));
    let with_cost = able.map(|(node, model)| {
        let is_own = |job: &&Job| {
            job.task == hint.task && job.model == hint.model && job.holder() == Some((&node.id, node.boot))
        };
        let own = u32::try_from(state.held_jobs(&node.id).filter(is_own).count()).unwrap_or(u32::MAX);
        let concurrent = state.capacity(node, model).concurrent.saturating_sub(own);
        let cached_blocks = state.prefix_index.cached_blocks(node, model, &chain);
        (prefill_hint_cost(prompt_bytes, hint.max_tokens, model, concurrent, cached_blocks).total_ms(), node)
    });
    // On ties the first node is chosen, as in a plan.
    with_cost.min_by(|(a, _), (b, _)| a.total_cmp(b)).map(|(_, node)| node.id.clone())
}

#[cfg(test)]
mod tests {
    use cfq_proto::job::{ChatMessage, ChatRole};
    use cfq_proto::task::{Agent, Priority};

    use super::*;
    use crate::JobPhase;
    use crate::tests::{TIMING, job, model, model_id, node, state};

    #[test]
    fn prefill_node_is_where_the_call_will_be_placed() {
        let mut own = job(Priority::P2, 0);
        let hint = PrefillHint {
            task: own.task,
            role: Agent::Beta,
            model: model_id(),
            messages: vec![ChatMessage { role: ChatRole::User, content: "x".repeat(1000) }],
            max_tokens: 100,
            deterministic: false,
        };
        let (mut a, mut b) = (node("a", vec![model(4096, 4)], 0), node("b", vec![model(4096, 4)], 0));
        let queued = own.clone();
        let among = |nodes: Vec<_>| state(nodes, vec![queued.clone()]);
        assert_eq!(prefill_node(&among(vec![]), &hint, 0), None);
        // The task's own call on `a` will have ended when the expected call is placed; another task's call may not.
        a.ledger.models[0].running = 1;
        own.phase = JobPhase::Running { node: a.id.clone(), boot: a.boot, accepted_ms: -1 };
        let with_own = state(vec![a.clone(), b.clone()], vec![own]);
        assert_eq!(prefill_node(&with_own, &hint, 0), Some(a.id.clone()));
        assert_eq!(prefill_node(&among(vec![a.clone(), b.clone()]), &hint, 0), Some(b.id.clone()));
        let others = state(vec![a.clone(), b.clone()], vec![job(Priority::P2, 0)]);
        assert_eq!(prefill_node(&others, &hint, 0), None, "the task has no call in progress");
        // A faster node is better; a node that has to load the model, is dead or drains does not qualify.
        a.ledger.models[0].decode_rate = 100.0;
        assert_eq!(prefill_node(&among(vec![a.clone(), b.clone()]), &hint, 0), Some(a.id.clone()));
        a.ledger.models[0].residency = Residency::Available;
        b.ledger.draining = true;
        assert_eq!(prefill_node(&among(vec![a.clone(), b.clone()]), &hint, 0), None);
        b.ledger.draining = false;
        assert_eq!(prefill_node(&among(vec![b]), &hint, 2 * TIMING.lease_ttl_ms as i64), None);
    }
}
