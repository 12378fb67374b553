//! What should be written next. Wished properties, held by the tests in `properties`:
//!
//! - a node never gets more than its last ledger admits, in tokens and in sequences;
//! - a plan that was carried out leaves nothing more to do: planning twice changes nothing;
//! - a job that outranks another is never passed by it on a model both wait for, so nobody starves;
//! - a model is loaded for the job that ranks first of those that want one on a node, and no other has to go for it while a
//!   job of higher rank waits there: so two models with room for one take turns, and none is let go before it has served;
//! - a job under which nodes were lost more than once runs alone on its node, and one node is kept free for it meanwhile.

use std::collections::BTreeMap;

use cfq_proto::ids::{BootId, JobId, LeaseId, NodeId};
use cfq_proto::job::JobFailure;
use cfq_proto::model::ModelId;
use cfq_proto::node::{ModelState, Residency};

use crate::job::{Job, Phase};
use crate::load::{self, Claim, Loads};
use crate::node::Node;
use crate::order::rank;
use crate::price::{Price, price};
use crate::state::{Company, Room, State};

/// Times a placed attempt is published again to a node that beats but does not accept it.
const RESENDS: u32 = 2;
/// A wait beside nodes that lack the model is written down in such parts of the retry ceiling: a scheduler that dies loses
/// no more of the count, and a job that waits costs no more writes.
const KEPT_PARTS: u64 = 20;

/// Each but `Load` is one compare-and-set on (job, attempt); what it leaves is fed back into the state.
#[derive(Debug, Clone, PartialEq)]
pub enum Effect {
    /// Queued -> placed as `attempt` (one above the row's), then publish.
    Place { job: JobId, attempt: i32, node: NodeId, boot: BootId, reason: String },
    /// Publish the same attempt again: the first message may be lost.
    Resend { job: JobId, attempt: i32, lease: LeaseId, node: NodeId, boot: BootId },
    /// Placed -> queued; nothing was accepted, so nothing is counted. `deaf`: the node beats but does not take work.
    Unplace { job: JobId, attempt: i32, lease: LeaseId, node: NodeId, deaf: bool, why: String },
    /// Queued -> failed.
    Fail { job: JobId, attempt: i32, failure: JobFailure },
    /// Every node that has the model says it cannot serve it: the retry ceiling starts to count.
    Unavailable { job: JobId, attempt: i32, reason: String },
    /// Ask the node to load the model the job waits for; the node lets idle ones go where that takes room. Nothing is written.
    Load { job: JobId, node: NodeId, boot: BootId, model: ModelId, reason: String },
    /// Why it waits, for people; written when it changes, and now and then while `no_node_ms` grows.
    Explain { job: JobId, attempt: i32, waiting: Waiting, no_node_ms: u64 },
}

impl Effect {
    /// The job whose row it writes.
    pub fn job(&self) -> JobId {
        match self {
            Self::Place { job, .. }
            | Self::Resend { job, .. }
            | Self::Unplace { job, .. }
            | Self::Fail { job, .. }
            | Self::Unavailable { job, .. }
            | Self::Load { job, .. }
            | Self::Explain { job, .. } => *job,
        }
    }
}

/// Why a queued job is not placed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Waiting {
    NoNode {
        model: ModelId,
    },
    /// The machines may be starting.
    NoNodeUp,
    Loading {
        model: ModelId,
    },
    Unusable {
        reasons: String,
    },
    /// The ladder after a failure.
    Backoff,
    /// Their machines' owners use the cards for something else.
    Yields {
        to: String,
    },
    /// For a node that does nothing else.
    Alone,
    Room,
}

impl Waiting {
    /// True where some node serves the model again, whatever it said before: what was noted as unavailable is over, and
    /// only failures of the job's own attempts still count.
    pub fn is_served(&self) -> bool {
        match self {
            Self::Loading { .. } | Self::Yields { .. } | Self::Backoff | Self::Alone | Self::Room => true,
            Self::NoNode { .. } | Self::NoNodeUp | Self::Unusable { .. } => false,
        }
    }
}

impl std::fmt::Display for Waiting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NoNode { model } => write!(f, "waits: no node that is up has the model {model}"),
            Self::NoNodeUp => f.write_str("waits: no node is up"),
            Self::Loading { model } => write!(f, "waits: {model} is not loaded yet"),
            Self::Unusable { reasons } => write!(f, "waits: {reasons}"),
            Self::Yields { to } => write!(f, "waits: {to} (yield_at and yield_ignores under [node] say for whom)"),
            Self::Backoff => f.write_str("waits before it is tried again"),
            Self::Alone => f.write_str("waits for a node that does nothing else: nodes were lost while they ran it"),
            Self::Room => f.write_str("waits for room on a node"),
        }
    }
}

/// What is left while this plan is made.
struct Free<'a> {
    rooms: BTreeMap<(&'a NodeId, &'a ModelId), Room>,
    company: BTreeMap<&'a NodeId, Company>,
    /// By node.
    loads: BTreeMap<&'a NodeId, Loads<'a>>,
}

impl<'a> Free<'a> {
    fn company(&self, node: &'a NodeId) -> Company {
        self.company.get(node).copied().unwrap_or_default()
    }

    fn take(&mut self, job: &'a Job, node: &'a NodeId, room: Room, need: u64) {
        self.rooms.insert((node, &job.model), room.without(need));
        self.company.entry(node).or_default().take(job);
        self.loads.entry(node).or_default().kept = true;
    }

    /// What a job waits for is kept from those behind it: its place, or for one that runs alone the node that is soonest empty.
    fn keep_for(&mut self, job: &'a Job, open: &[(&'a Node, &'a ModelState)]) {
        if job.is_suspect() {
            if let Some((node, _)) = open.iter().min_by_key(|(node, _)| self.company(&node.id).jobs) {
                self.company.entry(&node.id).or_default().closed = true;
            }
            return;
        }
        for (node, _) in open {
            self.rooms.insert((&node.id, &job.model), CLOSED);
            self.loads.entry(&node.id).or_default().kept = true;
        }
    }

    /// The models that have to go take nothing more.
    fn clear(&mut self, state: &State, claim: Claim<'a>) {
        let node = claim.node;
        let beside = |model: &ModelState| self.rooms.get(&(&node.id, &model.model)).map(|room| room.beside);
        for model in claim.on(|model| beside(model).unwrap_or_else(|| state.room(node, model).beside) == 0) {
            self.rooms.insert((&node.id, &model.model), CLOSED);
        }
    }
}

/// For whoever comes after.
const CLOSED: Room = Room { tokens: 0, slots: 0, beside: u32::MAX };

/// Pure: the same state and time give the same effects, in the order they should be carried out.
pub fn plan(state: &State, now_ms: i64) -> Vec<Effect> {
    let mut effects: Vec<Effect> =
        state.jobs.values().filter_map(|job| overdue_acceptance(state, job, now_ms)).collect();
    let mut queued: Vec<&Job> = state.jobs.values().filter(|j| matches!(j.phase, Phase::Queued)).collect();
    queued.sort_by_key(|job| rank(job, now_ms));
    let mut free = Free { rooms: BTreeMap::new(), company: state.company(), loads: state.loads() };
    for job in queued {
        effects.extend(place(state, job, now_ms, &mut free));
    }
    let wanted = free.loads.into_iter().flat_map(|(node, loads)| loads.wanted.into_iter().map(move |l| (node, l)));
    effects.extend(wanted.filter(|(node, load)| !state.asked_lately(node, load.model, now_ms)).filter_map(
        |(node, load)| {
            let boot = state.nodes.get(node)?.boot;
            let (node, model) = (node.clone(), load.model.clone());
            Some(Effect::Load { job: load.job, node, boot, model, reason: load.reason })
        },
    ));
    effects
}

fn overdue_acceptance(state: &State, job: &Job, now_ms: i64) -> Option<Effect> {
    let Phase::Placed { node, boot, lease, placed_ms } = &job.phase else { return None };
    let unplace = |deaf: bool, why: String| {
        Some(Effect::Unplace { job: job.id, attempt: job.attempt, lease: *lease, node: node.clone(), deaf, why })
    };
    let holder = state.nodes.get(node).filter(|n| n.boot == *boot);
    if !holder.is_some_and(|n| n.alive(now_ms, state.limits.lease_ttl_ms)) {
        return unplace(false, format!("{node} went away before it took the job"));
    }
    let resent = state.resent.get(&job.id).filter(|r| r.lease == *lease);
    let since = resent.map_or(*placed_ms, |r| r.last_ms);
    // Placed far in the future: the database's clock was set back since, and says nothing about how long it waits.
    if now_ms.abs_diff(since) < state.limits.accept_ms {
        return None;
    }
    if resent.is_some_and(|r| r.times >= RESENDS) {
        return unplace(true, format!("{node} is alive but did not take the job"));
    }
    Some(Effect::Resend { job: job.id, attempt: job.attempt, lease: *lease, node: node.clone(), boot: *boot })
}

fn place<'a>(state: &'a State, job: &'a Job, now_ms: i64, free: &mut Free<'a>) -> Option<Effect> {
    let holders: Vec<(&Node, &ModelState)> = state.serving(&job.model, now_ms).collect();
    let able: Vec<_> = holders.iter().copied().filter(|(n, _)| !job.never.contains_key(&n.id)).collect();
    if !holders.is_empty() && able.is_empty() {
        let reasons: Vec<String> = job.never.iter().map(|(node, why)| format!("{node}: {why}")).collect();
        let reason = format!("no node can run it: {}", reasons.join("; "));
        return Some(Effect::Fail { job: job.id, attempt: job.attempt, failure: JobFailure::Rejected { reason } });
    }
    // What makes way may do so for hours: as good as not there.
    let serves = |(n, m): &(&Node, &ModelState)| {
        matches!(m.residency, Residency::Resident) && !n.ledger.yields.contains_key(&m.model)
    };
    let resident: Vec<_> = able.iter().copied().filter(serves).collect();
    let open: Vec<_> = resident
        .iter()
        .copied()
        .filter(|(n, _)| !job.setbacks.blocks(&n.id, now_ms) && state.takes_work(n, &job.model, now_ms))
        .collect();
    let mut best: Option<(Price, &Node, Room)> = None;
    for (node, model) in &open {
        if !free.company(&node.id).admits(job) {
            continue;
        }
        let room = *free.rooms.entry((&node.id, &job.model)).or_insert_with(|| state.room(node, model));
        let offer = price(job, model, room.beside, state.held.shared(node, model, &job.prefix));
        let Some(need) = fits(&offer, room) else { continue };
        let better = best.as_ref().is_none_or(|(other, ..)| offer.total_ms() < other.total_ms());
        if better {
            best = Some((Price { need, ..offer }, node, room));
        }
    }
    if let Some((price, node, room)) = best {
        free.take(job, &node.id, room, price.need);
        let reason = reason(&price, node, room, open.len());
        return Some(Effect::Place {
            job: job.id,
            attempt: job.attempt + 1,
            node: node.id.clone(),
            boot: node.boot,
            reason,
        });
    }
    free.keep_for(job, &open);
    if resident.is_empty() {
        let takers = able.iter().copied().filter(|(n, _)| {
            !job.setbacks.blocks(&n.id, now_ms)
                && state.takes_work(n, &job.model, now_ms)
                && free.company(&n.id).admits(job)
        });
        if let Some(claim) = load::want(job, &able, takers.collect(), &state.held, &mut free.loads) {
            free.clear(state, claim);
        }
    }
    // Only what fails counts: a node that drains, loads or has no room has not failed.
    let failing = |(n, m): &(&Node, &ModelState)| {
        job.setbacks.blocks(&n.id, now_ms) || matches!(m.residency, Residency::Unusable { .. })
    };
    if let Some(first) = job.first_failure_ms
        && now_ms >= first.saturating_add_unsigned(state.limits.retry_ceiling_ms)
        && !able.is_empty()
        && able.iter().all(failing)
    {
        let minutes = state.limits.retry_ceiling_ms as f64 / 60_000.0;
        let reason = format!("tried for {minutes:.1} minutes without an answer; the last failure: {}", job.failure);
        return Some(Effect::Fail { job: job.id, attempt: job.attempt, failure: JobFailure::Unavailable { reason } });
    }
    let waiting = match able.is_empty() {
        true if state.served(now_ms).is_none() => Waiting::NoNodeUp,
        true => Waiting::NoNode { model: job.model.clone() },
        false => waiting(job, &able, resident.is_empty(), open.is_empty()),
    };
    let no_node_ms = no_node_ms(state, job, &waiting, now_ms);
    if let Waiting::NoNode { model } = &waiting
        && no_node_ms >= state.limits.retry_ceiling_ms
    {
        let failure = JobFailure::Unavailable { reason: given_up(state, model, now_ms) };
        return Some(Effect::Fail { job: job.id, attempt: job.attempt, failure });
    }
    if let (Waiting::Unusable { reasons }, None) = (&waiting, job.first_failure_ms) {
        return Some(Effect::Unavailable { job: job.id, attempt: job.attempt, reason: reasons.clone() });
    }
    let before = state.explained.get(&job.id).map(|e| &e.waiting);
    let ends_a_count = waiting.is_served() && (job.no_node_ms > 0 || job.noted_unavailable());
    let worth_a_word = match &waiting {
        // The common case of a busy cluster, which passes by itself: not worth a write, unless something else stands there.
        Waiting::Room => before.is_some_and(|before| *before != Waiting::Room),
        Waiting::NoNode { .. } => {
            before != Some(&waiting)
                || no_node_ms >= job.no_node_ms.saturating_add((state.limits.retry_ceiling_ms / KEPT_PARTS).max(1))
        }
        Waiting::NoNodeUp
        | Waiting::Loading { .. }
        | Waiting::Unusable { .. }
        | Waiting::Yields { .. }
        | Waiting::Backoff
        | Waiting::Alone => before != Some(&waiting),
    };
    (worth_a_word || ends_a_count).then_some(Effect::Explain { job: job.id, attempt: job.attempt, waiting, no_node_ms })
}

/// How long it has waited beside live nodes that all lack the model. Kept with the job, so that no number of new leaders
/// makes it wait for ever. Time in which no node was up, or no scheduler looked, says nothing about the model and is left
/// out; once a node has the model, the count begins anew.
fn no_node_ms(state: &State, job: &Job, waiting: &Waiting, now_ms: i64) -> u64 {
    let since = state
        .explained
        .get(&job.id)
        .filter(|e| matches!(e.waiting, Waiting::NoNode { .. }))
        .map_or(0, |e| u64::try_from(now_ms.saturating_sub(e.at_ms)).unwrap_or(0));
    match waiting {
        Waiting::NoNode { .. } | Waiting::NoNodeUp => job.no_node_ms.saturating_add(since),
        Waiting::Loading { .. }
        | Waiting::Unusable { .. }
        | Waiting::Yields { .. }
        | Waiting::Backoff
        | Waiting::Alone
        | Waiting::Room => 0,
    }
}

/// The tokens to admit it with, where it fits. A model that runs nothing takes a job whose estimate exceeds the whole pool
/// as long as the prompt itself fits: it would wait for ever, and the node counts exactly and refuses.
fn fits(price: &Price, room: Room) -> Option<u64> {
    if room.slots == 0 {
        None
    } else if price.need <= room.tokens {
        Some(price.need)
    } else if room.beside == 0 && price.prompt_tokens < room.tokens {
        Some(room.tokens)
    } else {
        None
    }
}

/// A model that no node lists is most often misspelt or was never set up: waiting would end never, and hold its runner.
fn given_up(state: &State, model: &ModelId, now_ms: i64) -> String {
    let minutes = state.limits.retry_ceiling_ms as f64 / 60_000.0;
    let served: Vec<&str> = state.served(now_ms).into_iter().flatten().map(ModelId::as_str).collect();
    let served = if served.is_empty() { "none".to_owned() } else { served.join(", ") };
    format!(
        "no node that is up has the model {model}, for {minutes:.1} minutes; served are: {served}. Take one of those, or \
         name {model} in a node's configuration ([node] models, and [endpoints] if it is behind one) and start that node anew"
    )
}

fn waiting(job: &Job, able: &[(&Node, &ModelState)], none_resident: bool, none_open: bool) -> Waiting {
    if none_resident {
        let yields =
            able.iter().filter_map(|(n, m)| Some(format!("{} makes way for {}", n.id, n.ledger.yields.get(&m.model)?)));
        let unusable = able.iter().filter_map(|(n, m)| match &m.residency {
            Residency::Unusable { reason } => Some(format!("{}: {reason}", n.id)),
            Residency::Resident | Residency::Available | Residency::Loading => None,
        });
        let (yields, unusable): (Vec<String>, Vec<String>) = (yields.collect(), unusable.collect());
        return if unusable.len() == able.len() {
            Waiting::Unusable { reasons: unusable.join("; ") }
        } else if yields.len() + unusable.len() == able.len() {
            let all: Vec<String> = yields.into_iter().chain(unusable).collect();
            Waiting::Yields { to: all.join("; ") }
        } else {
            Waiting::Loading { model: job.model.clone() }
        };
    }
    match none_open {
        true if !job.setbacks.0.is_empty() => Waiting::Backoff,
        false if job.is_suspect() => Waiting::Alone,
        true | false => Waiting::Room,
    }
}

/// The decision's numbers, kept with the job and shown to people.
fn reason(price: &Price, node: &Node, room: Room, candidates: usize) -> String {
    let held = if price.held > 0 { format!(" and {} held there", price.held) } else { String::new() };
    format!(
        "{} of {candidates} open: resident, prefill {} tokens{held} {:.1} s, decode {:.1} s, needs {} of {} free tokens, {} of {} slots free, ledger {}",
        node.id,
        price.prompt_tokens - price.held,
        price.prefill_ms / 1000.0,
        price.decode_ms / 1000.0,
        price.need,
        room.tokens,
        room.slots,
        room.slots.saturating_add(room.beside),
        node.ledger.version,
    )
}

impl Room {
    fn without(self, need: u64) -> Self {
        Self {
            tokens: self.tokens.saturating_sub(need),
            slots: self.slots.saturating_sub(1),
            beside: self.beside.saturating_add(1),
        }
    }
}
