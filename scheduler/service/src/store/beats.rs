//! What a beat asks and hears, alike for nodes and runners: the leases it lists, and what became of each (DESIGN.md,
//! promise 5). Which rows the leases are in is their own affair.

use cfq_proto::ids::LeaseId;
use cfq_proto::messages::{Beat, BeatReply};
use uuid::Uuid;

pub(super) struct Listed {
    pub all: Vec<Uuid>,
    /// Those whose work made a step lately: only these are extended, whatever the heartbeat says.
    pub moving: Vec<Uuid>,
}

impl Listed {
    pub fn of(beat: &Beat, longest_step_ms: u64) -> Self {
        let leases = |moving: &dyn Fn(u64) -> bool| {
            beat.held.iter().filter(|h| moving(h.step_age_ms)).map(|h| h.lease.0).collect()
        };
        Self { all: leases(&|_| true), moving: leases(&|age| age <= longest_step_ms) }
    }

    /// `live` are those of `all` that are still the sender's; a stuck one is neither extended nor lost yet.
    pub fn answer(self, known: bool, extended: Vec<Uuid>, live: &[Uuid]) -> BeatReply {
        BeatReply {
            extended: extended.into_iter().map(LeaseId).collect(),
            lost: self.all.into_iter().filter(|lease| !live.contains(lease)).map(LeaseId).collect(),
            hello_again: !known,
        }
    }
}
