//! What there is of the host's memory, by three reckonings: what is promised to nobody, what the machine has of that now, and
//! what there would be with all gone that may go.

use super::{Loaded, Loader};
use crate::gpu;

/// How exact the ledger is about it: one that changed with every page would be sent for every page.
const TOLD_IN: u64 = 64 << 20;

impl Loader {
    /// Bytes that are promised to nobody. Parked weights give way to whatever needs the room.
    pub(super) fn free(&self) -> u64 {
        self.total.saturating_sub(self.all().map(|l| l.need).sum())
    }

    /// The same, as far as the machine has them now, without what is parked.
    pub(super) fn have(&self) -> u64 {
        self.have_of(gpu::available_memory())
    }

    pub(super) fn have_of(&self, available: u64) -> u64 {
        self.free().saturating_sub(self.parked_bytes()).min(available.saturating_sub(self.to_come()))
    }

    /// What a load may take beside what is loaded, for the ledger.
    pub(super) fn told_of(&self, available: u64) -> u64 {
        let bytes = self.have_of(available).saturating_add(self.parked_bytes()).min(self.free());
        bytes - bytes % TOLD_IN
    }

    pub(super) fn parked_bytes(&self) -> u64 {
        self.parked.iter().map(|kept| kept.parked.bytes()).sum()
    }

    /// Bytes that the machine still calls available and that are promised: pools that were not filled yet, and the room for
    /// parked keys and values.
    pub(super) fn to_come(&self) -> u64 {
        let arena = self.arena.as_ref().map_or(0, |arena| arena.capacity().saturating_sub(arena.bytes()));
        self.all().map(|l| l.engine.to_come()).sum::<u64>().saturating_add(arena)
    }

    /// Those that stay whatever is wanted, and those that may go for it.
    pub(super) fn staying_and_going(&self) -> (Vec<&Loaded>, Vec<&Loaded>) {
        let (mut staying, mut going) = (Vec::new(), Vec::new());
        for (model, loaded) in &self.loaded {
            let of = if self.is_pinned(model) { &mut staying } else { &mut going };
            of.push(loaded);
        }
        going.extend(self.leaving.iter().map(|(_, loaded)| loaded));
        (staying, going)
    }

    /// Bytes of the host's memory that there would be with all gone that may go, and nothing parked. Of what they hold their
    /// need is the most that can come back.
    pub(super) fn most_of(&self, available: u64) -> u64 {
        let (staying, going) = self.staying_and_going();
        let needs = |of: Vec<&Loaded>| of.iter().map(|l| l.need).fold(0, u64::saturating_add);
        let back = needs(going).saturating_add(self.parked_bytes());
        let there = available.saturating_add(back).saturating_sub(self.to_come());
        self.total.saturating_sub(needs(staying)).min(there)
    }
}
