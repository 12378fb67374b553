//! Limit of the batch size after a pass ran out of memory.
//!
//! A GPU's KV pool is allocated when the model is loaded, but the scratch memory is allocated by each pass, and another
//! program may have taken that memory in the meantime. If the allocation fails, all sequences are preempted, and the
//! next pass is the smallest possible: the oldest sequence alone, with the smallest chunk of its prompt. If that runs
//! out of memory too, the GPU is unusable. Otherwise the limit grows as the congestion window of TCP does after a loss
//! (RFC 5681, slow start and congestion avoidance): it doubles up to half of the size that failed, and grows slowly
//! from there.

use crate::backend::forward::MAX_PREFILL_ROWS;

/// Limit of the number of rows, and of the number of sequences, of the next pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchLimit {
    rows: usize,
    /// Number of rows up to which the limit doubles after each successful pass; beyond it the limit grows slowly.
    slow_start_threshold: usize,
    /// Whether the last pass ran out of memory.
    last_failed: bool,
}

impl BatchLimit {
    /// The limit that allows any batch size.
    pub const UNLIMITED: Self = Self { rows: usize::MAX, slow_start_threshold: usize::MAX, last_failed: false };

    /// Maximum number of rows, and of sequences, of the next pass. The smallest prefill chunk may exceed it.
    pub fn rows(self) -> usize {
        self.rows
    }

    /// Whether there is currently no limit.
    pub fn is_unlimited(self) -> bool {
        self.rows == usize::MAX
    }

    /// Reduces the limit after a pass of `rows` rows ran out of memory. Returns false if the previous pass ran out of
    /// memory, too.
    pub fn on_out_of_memory(&mut self, rows: usize) -> bool {
        let repeated = self.last_failed;
        *self = Self { rows: 1, slow_start_threshold: (rows / 2).max(1), last_failed: true };
        !repeated
    }

    /// Raises the limit after a successful pass.
    pub fn on_success(&mut self) {
        self.last_failed = false;
        let next = match self.rows {
            rows if rows < self.slow_start_threshold => (rows * 2).min(self.slow_start_threshold),
            rows => rows.saturating_add((rows / 16).max(1)),
        };
        self.rows = if next > MAX_PREFILL_ROWS { usize::MAX } else { next };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_doubles_up_to_half_of_the_failed_size_and_then_grows_slowly() {
        let mut limit = BatchLimit::UNLIMITED;
        limit.on_success();
        assert!(limit.is_unlimited());
        assert!(limit.on_out_of_memory(48));
        let rows: Vec<usize> = (0..9)
            .map(|_| {
                let rows = limit.rows();
                limit.on_success();
                rows
            })
            .collect();
        assert_eq!(rows, [1, 2, 4, 8, 16, 24, 25, 26, 27]);
        let mut passes = 0;
        while !limit.is_unlimited() {
            limit.on_success();
            passes += 1;
        }
        assert!((20..100).contains(&passes), "{passes} passes until there is no limit");
    }

    #[test]
    fn only_the_second_failure_in_a_row_is_final() {
        let mut limit = BatchLimit::UNLIMITED;
        assert!(limit.on_out_of_memory(1));
        limit.on_success();
        assert!(limit.on_out_of_memory(1));
        assert!(!limit.on_out_of_memory(1));
    }
}
