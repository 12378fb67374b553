//! Arrivals of a workload's calls: at their times, or after the end of the calls they wait for.

use crate::event_queue::{MS, Micros};
use crate::trace::{Arrival, Workload};

/// Calls that wait for others.
#[derive(Debug)]
pub struct Arrivals {
    /// For each call: the calls that wait for it, with the delay after its end.
    dependents: Vec<Vec<(usize, Micros)>>,
    /// For each call: the number of calls it still waits for, and the earliest time.
    open: Vec<(usize, Micros)>,
}

impl Arrivals {
    /// Returns the state, and the calls that wait for no other, with their times.
    pub fn new(workload: &Workload) -> (Self, Vec<(usize, Micros)>) {
        let mut arrivals =
            Self { dependents: vec![Vec::new(); workload.calls.len()], open: vec![(0, 0); workload.calls.len()] };
        let mut first = Vec::new();
        for (index, call) in workload.calls.iter().enumerate() {
            match &call.arrival {
                Arrival::At(ms) => first.push((index, micros(*ms))),
                Arrival::After(calls) => {
                    arrivals.open[index].0 = calls.len();
                    for (before, delay_ms) in calls {
                        arrivals.dependents[*before].push((index, micros(*delay_ms)));
                    }
                }
            }
        }
        (arrivals, first)
    }

    /// Returns the calls that no longer wait for any other after this one ended at `now`, with the times of their
    /// arrival.
    pub fn ended(&mut self, call: usize, now: Micros) -> Vec<(usize, Micros)> {
        let mut ready = Vec::new();
        for (dependent, delay) in std::mem::take(&mut self.dependents[call]) {
            let (open, earliest) = &mut self.open[dependent];
            *open -= 1;
            *earliest = (*earliest).max(now + delay);
            if *open == 0 {
                ready.push((dependent, *earliest));
            }
        }
        ready
    }
}

fn micros(ms: f64) -> Micros {
    (ms * MS as f64) as Micros
}
