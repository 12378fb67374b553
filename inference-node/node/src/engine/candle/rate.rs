//! How many rows of prompts a pass computes in a given time.
//!
//! A row takes time by itself and more for each token it attends to, so a thousand tokens into a prompt the same rows take
//! longer than at its beginning. Both parts are fitted to the passes that were measured, by least squares in which a pass
//! counts less with each one after it. Short prompts say nothing about the second part; while they are all there is, what
//! was known of it stays.

use std::time::Duration;

/// Share of its weight that a pass keeps with each one after it.
const KEEPS: f64 = 0.95;
/// Tokens attended to from which on a pass outweighs what was known of the second part.
const TELLING: f64 = 64.0;

/// Rows that went through one pass.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Load {
    pub rows: f64,
    /// Tokens attended to, summed over the rows.
    pub attended: f64,
}

impl Load {
    /// So many rows after `before` tokens of the same sequence.
    pub fn of(rows: usize, before: usize) -> Self {
        let (rows, before) = (rows as f64, before as f64);
        Self { rows, attended: rows * (before + rows / 2.0) }
    }
}

impl std::iter::Sum for Load {
    fn sum<I: Iterator<Item = Self>>(loads: I) -> Self {
        loads.fold(Self::default(), |a, b| Self { rows: a.rows + b.rows, attended: a.attended + b.attended })
    }
}

/// Sums of the passes measured, and what they come to.
#[derive(Debug, Clone, Default)]
pub struct Rate {
    rows_rows: f64,
    rows_attended: f64,
    attended_attended: f64,
    rows_time: f64,
    attended_time: f64,
    /// Seconds a row, and a row and token attended to.
    row: f64,
    token: f64,
}

impl Rate {
    pub fn measured(&mut self, load: Load, took: Duration) {
        let Load { rows, attended } = load;
        let took = took.as_secs_f64();
        let add = |sum: &mut f64, new: f64| *sum = KEEPS * *sum + new;
        add(&mut self.rows_rows, rows * rows);
        add(&mut self.rows_attended, rows * attended);
        add(&mut self.attended_attended, attended * attended);
        add(&mut self.rows_time, rows * took);
        add(&mut self.attended_time, attended * took);
        self.fit();
    }

    fn fit(&mut self) {
        let known = self.rows_rows * TELLING * TELLING;
        let (bb, bt) = (self.attended_attended + known, self.attended_time + known * self.token);
        let determinant = self.rows_rows * bb - self.rows_attended * self.rows_attended;
        if determinant <= 0.0 {
            return;
        }
        let token = (self.rows_rows * bt - self.rows_attended * self.rows_time) / determinant;
        // Neither part is less than nothing, whatever the noise says.
        self.token = token.clamp(0.0, self.attended_time / self.attended_attended.max(f64::MIN_POSITIVE));
        self.row = ((self.rows_time - self.token * self.rows_attended) / self.rows_rows).max(0.0);
    }

    /// Rows that take `time`, where each attends to `before` tokens and to those of the pass; `None` while nothing is known.
    pub fn rows_in(&self, time: Duration, before: usize) -> Option<f64> {
        let first = self.row + self.token * before as f64;
        if first <= 0.0 {
            return None;
        }
        // token / 2 * rows^2 + first * rows = time
        let time = time.as_secs_f64();
        Some(2.0 * time / (first + (first * first + 2.0 * self.token * time).sqrt()))
    }

    /// Tokens a second of a prompt of so many, from its beginning: what can be compared, whatever lengths were measured.
    pub fn of_prompt(&self, tokens: f64) -> Option<f64> {
        let seconds = self.row + self.token * tokens / 2.0;
        (seconds > 0.0).then(|| 1.0 / seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW: f64 = 1e-3;
    const TOKEN: f64 = 1e-6;
    const TIME: Duration = Duration::from_millis(250);

    fn took(load: Load, noise: f64) -> Duration {
        Duration::from_secs_f64((ROW * load.rows + TOKEN * load.attended) * noise)
    }

    /// The prompt goes through in pieces of what fits the time; the seconds of the longest.
    fn prefill(rate: &mut Rate, from: usize, until: usize, mut noise: impl FnMut() -> f64) -> f64 {
        let (mut at, mut longest) = (from, 0.0f64);
        while at < until {
            let rows = rate.rows_in(TIME, at).map_or(32, |rows| rows as usize).clamp(8, 512);
            let load = Load::of(rows, at);
            longest = longest.max(took(load, 1.0).as_secs_f64());
            rate.measured(load, took(load, noise()));
            at += rows;
        }
        longest
    }

    #[test]
    fn pieces_of_a_long_prompt_keep_their_time() {
        let mut rate = Rate::default();
        let longest = prefill(&mut rate, 0, 16_000, || 1.0);
        // The second piece is planned by the first alone, which began at nothing.
        assert!((0.2..0.3).contains(&longest), "{longest}");
        assert!((rate.rows_in(TIME, 8_000).unwrap() - 27.7).abs() < 1.0, "{rate:?}");
    }

    #[test]
    fn what_short_prompts_do_not_show_is_not_forgotten() {
        let mut rate = Rate::default();
        prefill(&mut rate, 0, 16_000, || 1.0);
        for _ in 0..300 {
            prefill(&mut rate, 0, 40, || 1.0);
        }
        // The prefix was cached: it goes on in the middle.
        let longest = prefill(&mut rate, 12_000, 16_000, || 1.0);
        assert!(longest < 0.3, "{longest}");
    }

    #[test]
    fn the_rate_of_a_prompt_is_told_alike_after_short_and_long_ones() {
        let mut rate = Rate::default();
        assert_eq!(rate.of_prompt(1000.0), None);
        prefill(&mut rate, 0, 64, || 1.0);
        let (short, truth) = (rate.of_prompt(1000.0).unwrap(), 1.0 / (ROW + TOKEN * 500.0));
        prefill(&mut rate, 0, 16_000, || 1.0);
        let long = rate.of_prompt(1000.0).unwrap();
        assert!((long / truth - 1.0).abs() < 0.05, "{long}, not {truth}");
        // Of short ones alone, what longer ones cost is not known: at most a row's own time.
        assert!(short <= 1.05 / ROW && short >= truth, "{short}, not {truth}");
    }

    #[test]
    fn noise_makes_no_part_negative_and_no_piece_long() {
        let mut state = 1u32;
        let mut noise = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            0.8 + f64::from(state >> 8) / f64::from(1u32 << 24) * 0.4
        };
        let mut rate = Rate::default();
        assert_eq!(rate.rows_in(TIME, 0), None);
        for round in 0..20 {
            let longest = prefill(&mut rate, 0, 6_000, &mut noise);
            assert!(round == 0 || longest < 0.4, "round {round}: {longest}");
            assert!(rate.row >= 0.0 && rate.token >= 0.0, "{rate:?}");
        }
    }
}
