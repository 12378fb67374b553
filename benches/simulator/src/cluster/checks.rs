//! Properties that hold after every event:
//!
//! - a leader that has read all rows places no more on a node than its slots and its KV pool admit (checked once the
//!   faults have stopped; a node refuses what a leader with an old cache places);
//! - a step that looks only at what has changed decides the same as a plan that looks at everything;
//! - at most one node runs a job at a time: an attempt starts only after the holder of an earlier one has stopped;
//! - a job that has ended does not change;
//! - no job is placed while one waits that was submitted more than 40 minutes earlier, for the same model, and that the
//!   node could run;
//! - an effect that is carried out again changes nothing;
//! - the plan of a leader that was replaced changes nothing;
//! - once the faults have stopped, every job ends.

/// Violations of the properties.
#[derive(Debug, Default)]
pub struct Violations {
    /// Number of violations.
    pub count: u64,
    /// The first violations.
    pub first: Vec<String>,
}

/// Number of violations that are described.
const MAX_DESCRIBED: usize = 10;

impl Violations {
    /// Records a violation.
    pub fn report(&mut self, describe: impl FnOnce() -> String) {
        self.count += 1;
        if self.first.len() < MAX_DESCRIBED {
            self.first.push(describe());
        }
    }

    /// Records a violation if the property does not hold.
    pub fn check(&mut self, holds: bool, describe: impl FnOnce() -> String) {
        if !holds {
            self.report(describe);
        }
    }
}
