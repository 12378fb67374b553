//! The plan of a chaos run: an endless sequence of faults that is a function of the seed alone.

use std::time::Duration;

/// A part of cfq that runs as a process of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    Scheduler,
    Node,
    Runner,
    Nats,
    Postgres,
}

impl Part {
    pub const ALL: [Self; 5] = [Self::Scheduler, Self::Node, Self::Runner, Self::Nats, Self::Postgres];

    pub fn name(self) -> &'static str {
        match self {
            Self::Scheduler => "scheduler",
            Self::Node => "node",
            Self::Runner => "runner",
            Self::Nats => "nats",
            Self::Postgres => "postgres",
        }
    }
}

/// A fault without its duration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// SIGKILL; the part is started again at the end.
    Kill(Part),
    /// SIGSTOP, then SIGCONT at the end.
    Suspend(Part),
    /// A regular stop; the part is started again at the end.
    Restart(Part),
    /// SIGKILL of all parts, which are started again at the end.
    KillAll,
    /// A regular stop of all parts, which are started again at the end.
    RestartAll,
    /// Threads of another program use every core.
    BusyProcessor,
}

impl Kind {
    /// Every kind of fault once.
    pub fn all() -> Vec<Self> {
        let of_a_part = Part::ALL.into_iter().flat_map(|p| [Self::Kill(p), Self::Suspend(p), Self::Restart(p)]);
        of_a_part.chain([Self::KillAll, Self::RestartAll, Self::BusyProcessor]).collect()
    }

    /// Name for the report, for example `kill node`.
    pub fn name(self) -> String {
        match self {
            Self::Kill(part) => format!("kill {}", part.name()),
            Self::Suspend(part) => format!("suspend {}", part.name()),
            Self::Restart(part) => format!("restart {}", part.name()),
            Self::KillAll => "kill all".to_owned(),
            Self::RestartAll => "restart all".to_owned(),
            Self::BusyProcessor => "busy processor".to_owned(),
        }
    }
}

/// A fault with its times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    pub kind: Kind,
    /// Time without a fault before this one.
    pub pause: Duration,
    /// Time from the fault until its end.
    pub duration: Duration,
}

/// The faults of one seed. Every kind occurs once before any kind occurs again.
pub struct Plan {
    random: Random,
    rest: Vec<Kind>,
}

impl Plan {
    pub fn new(seed: u64) -> Self {
        Self { random: Random(seed), rest: Vec::new() }
    }
}

impl Iterator for Plan {
    type Item = Fault;

    fn next(&mut self) -> Option<Fault> {
        if self.rest.is_empty() {
            self.rest = Kind::all();
        }
        let index = self.random.below(self.rest.len() as u64) as usize;
        let kind = self.rest.swap_remove(index);
        let pause = Duration::from_millis(300 + self.random.below(4_200));
        // Half of the faults are shorter than a test cluster's lease TTL (2 s), the others longer.
        let milliseconds = match self.random.below(2) {
            0 => 50 + self.random.below(1_450),
            _ => 2_200 + self.random.below(3_300),
        };
        Some(Fault { kind, pause, duration: Duration::from_millis(milliseconds) })
    }
}

/// The generator SplitMix64 (Steele, Lea, Flood 2014).
pub struct Random(pub u64);

impl Random {
    /// A number in `0..limit`. Its slight bias does not matter for faults.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn plan_is_a_function_of_the_seed() {
        let plan = |seed| Plan::new(seed).take(100).collect::<Vec<_>>();
        assert_eq!(plan(7), plan(7));
        assert_ne!(plan(7), plan(8));
    }

    #[test]
    fn every_kind_occurs_once_before_any_occurs_again() {
        let kinds = Kind::all();
        let first: BTreeSet<Kind> = Plan::new(1).take(kinds.len()).map(|fault| fault.kind).collect();
        assert_eq!(first, kinds.into_iter().collect());
    }
}
