//! Where a call that is expected would be placed, so that its prompt can be computed there ahead.
//!
//! The same prices as in a plan, with what the task itself runs left out: that is over by then. Room is not asked for, since
//! what is full now may be empty then, and nothing is kept for the call: if it goes elsewhere in the end, idle time was
//! lost and nothing else. Only a model that is resident is warmed; loading one is for jobs alone to want.

use cfq_proto::ids::NodeId;
use cfq_proto::messages::WarmUp;
use cfq_proto::node::Residency;
use cfq_proto::prefix::chain;

use crate::price::expected;
use crate::state::State;

/// `None` where no node could begin now.
pub fn warmer(state: &State, ahead: &WarmUp, now_ms: i64) -> Option<NodeId> {
    // Whoever has no call of its own under way warms nothing.
    if !state.jobs.values().any(|job| job.task == ahead.task) {
        return None;
    }
    let prompt_bytes = ahead.messages.iter().map(|message| message.content.len() as u64).sum();
    let chain = chain(ahead.model.as_str(), &ahead.messages);
    let able = state
        .serving(&ahead.model, now_ms)
        .filter(|(_, model)| matches!(model.residency, Residency::Resident))
        .filter(|(node, _)| state.takes_work(node, &ahead.model, now_ms));
    let priced = able.map(|(node, model)| {
        let own = |job: &&crate::Job| {
            job.task == ahead.task && job.model == ahead.model && job.holder() == Some((&node.id, node.boot))
        };
        let own = state.jobs.values().filter(own).count();
        let beside = state.room(node, model).beside.saturating_sub(u32::try_from(own).unwrap_or(u32::MAX));
        let links = state.held.shared(node, model, &chain);
        (expected(prompt_bytes, ahead.max_tokens, model, beside, links).total_ms(), node)
    });
    // Of equals the first, as in a plan.
    priced.min_by(|(a, _), (b, _)| a.total_cmp(b)).map(|(_, node)| node.id.clone())
}

#[cfg(test)]
mod tests {
    use cfq_proto::job::{ChatMessage, ChatRole};
    use cfq_proto::task::{Agent, Priority};

    use super::*;
    use crate::Phase;
    use crate::properties::{LIMITS, job, model, model_id, node, state};

    #[test]
    fn it_is_the_node_that_the_call_will_be_placed_on() {
        let mut own = job(Priority::P2, 0);
        let ahead = WarmUp {
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
        assert_eq!(warmer(&among(vec![]), &ahead, 0), None);
        // The creator that writes on `a` now will be done; a stranger there will not.
        a.ledger.models[0].running = 1;
        own.phase = Phase::Running { node: a.id.clone(), boot: a.boot, accepted_ms: -1 };
        let with_own = state(vec![a.clone(), b.clone()], vec![own]);
        assert_eq!(warmer(&with_own, &ahead, 0), Some(a.id.clone()));
        assert_eq!(warmer(&among(vec![a.clone(), b.clone()]), &ahead, 0), Some(b.id.clone()));
        let strangers = state(vec![a.clone(), b.clone()], vec![job(Priority::P2, 0)]);
        assert_eq!(warmer(&strangers, &ahead, 0), None, "a task that has no call under way");
        // A faster one is better, one that has to load first is none, and so are the dead and the draining.
        a.ledger.models[0].decode_rate = 100.0;
        assert_eq!(warmer(&among(vec![a.clone(), b.clone()]), &ahead, 0), Some(a.id.clone()));
        a.ledger.models[0].residency = Residency::Available;
        b.ledger.draining = true;
        assert_eq!(warmer(&among(vec![a.clone(), b.clone()]), &ahead, 0), None);
        b.ledger.draining = false;
        assert_eq!(warmer(&among(vec![b]), &ahead, 2 * LIMITS.lease_ttl_ms as i64), None);
    }
}
