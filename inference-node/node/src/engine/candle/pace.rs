//! How large a pass may be where memory ran short in one.
//!
//! A card's pool is taken at the load; what a pass computes with is not, and somebody else's program may have taken it
//! meanwhile. Then the sequences wait, and the next pass is the smallest there is: the oldest alone, with the least piece of
//! its prompt. If that finds no memory either the card is of no use. Otherwise passes grow again, as connections do after a
//! loss: by doubling to half of what was too much, slowly from there.

use crate::engine::candle::batcher::CHUNK_MOST;

/// Rows of the next pass, and sequences that share it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    rows: usize,
    /// Up to here it doubles.
    steady: usize,
    /// The last pass found no memory.
    short: bool,
}

impl Pace {
    pub const FULL: Self = Self { rows: usize::MAX, steady: usize::MAX, short: false };

    /// Most rows of the next pass and sequences in it; a prompt's least piece may be more.
    pub fn rows(self) -> usize {
        self.rows
    }

    pub fn is_full(self) -> bool {
        self.rows == usize::MAX
    }

    /// A pass of so many rows found no memory. False if the one before it did not either.
    pub fn shortened(&mut self, rows: usize) -> bool {
        let again = self.short;
        *self = Self { rows: 1, steady: (rows / 2).max(1), short: true };
        !again
    }

    /// A pass was computed.
    pub fn went_well(&mut self) {
        self.short = false;
        let next = match self.rows {
            rows if rows < self.steady => (rows * 2).min(self.steady),
            rows => rows.saturating_add((rows / 16).max(1)),
        };
        self.rows = if next > CHUNK_MOST { usize::MAX } else { next };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_begins_small_again_doubles_to_half_and_grows_slowly_from_there() {
        let mut pace = Pace::FULL;
        pace.went_well();
        assert!(pace.is_full());
        assert!(pace.shortened(48));
        let rows: Vec<usize> = (0..9)
            .map(|_| {
                let rows = pace.rows();
                pace.went_well();
                rows
            })
            .collect();
        assert_eq!(rows, [1, 2, 4, 8, 16, 24, 25, 26, 27]);
        let mut passes = 0;
        while !pace.is_full() {
            pace.went_well();
            passes += 1;
        }
        assert!((20..100).contains(&passes), "{passes} more to a full one");
    }

    #[test]
    fn only_two_in_a_row_are_too_many() {
        let mut pace = Pace::FULL;
        assert!(pace.shortened(1));
        pace.went_well();
        assert!(pace.shortened(1));
        assert!(!pace.shortened(1));
    }
}
