//! Latency model: predicts how many prompt rows a pass computes in a given time.
//!
//! A row takes a fixed time and an additional time for each token it attends to, so the same number of rows takes
//! longer late in a prompt than at its beginning. Both coefficients are fitted to the measured passes by least squares
//! with exponentially decaying weights. Short prompts carry no information about the coefficient of attention; while
//! only short prompts are measured, it keeps its previous value.

use std::time::Duration;

/// Factor by which the weight of all earlier passes decays with each new one.
const PASS_WEIGHT_DECAY: f64 = 0.95;
/// Weight of the previous value of `per_attended` in a fit, as a number of attended tokens per row: passes that attend
/// to more tokens per row than this outweigh the previous value.
const PRIOR_ATTENDED_PER_ROW: f64 = 64.0;

/// The work of one forward pass.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct BatchWork {
    /// Number of rows.
    pub rows: f64,
    /// Number of tokens that a row attends to, summed over the rows.
    pub attended: f64,
}

impl BatchWork {
    /// The work of `rows` rows after `past` cached tokens of the same sequence.
    pub fn new(rows: usize, past: usize) -> Self {
        let (rows, past) = (rows as f64, past as f64);
        Self { rows, attended: rows * (past + rows / 2.0) }
    }
}

impl std::iter::Sum for BatchWork {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        parts.fold(Self::default(), |a, b| Self { rows: a.rows + b.rows, attended: a.attended + b.attended })
    }
}

/// Weighted sums over the measured passes, and the coefficients fitted to them. Times are in seconds.
#[derive(Debug, Clone, Default)]
pub struct LatencyModel {
    rows_rows: f64,
    rows_attended: f64,
    attended_attended: f64,
    rows_time: f64,
    attended_time: f64,
    /// Time of a row without attention, in seconds.
    per_row: f64,
    /// Additional time of a row per token that it attends to, in seconds.
    per_attended: f64,
}

impl LatencyModel {
    /// Adds a measured pass and fits the coefficients again.
    pub fn record(&mut self, work: BatchWork, took: Duration) {
        let BatchWork { rows, attended } = work;
        let took = took.as_secs_f64();
        let add = |sum: &mut f64, new: f64| *sum = PASS_WEIGHT_DECAY * *sum + new;
        add(&mut self.rows_rows, rows * rows);
        add(&mut self.rows_attended, rows * attended);
        add(&mut self.attended_attended, attended * attended);
        add(&mut self.rows_time, rows * took);
        add(&mut self.attended_time, attended * took);
        self.fit();
    }

    /// Solves the normal equations of time = per_row * rows + per_attended * attended, regularized towards the previous
    /// value of `per_attended`.
    fn fit(&mut self) {
        let prior = self.rows_rows * PRIOR_ATTENDED_PER_ROW * PRIOR_ATTENDED_PER_ROW;
        let (bb, bt) = (self.attended_attended + prior, self.attended_time + prior * self.per_attended);
        let determinant = self.rows_rows * bb - self.rows_attended * self.rows_attended;
        if determinant <= 0.0 {
            return;
        }
        let per_attended = (self.rows_rows * bt - self.rows_attended * self.rows_time) / determinant;
        // Noise must not make either coefficient negative.
        self.per_attended = per_attended.clamp(0.0, self.attended_time / self.attended_attended.max(f64::MIN_POSITIVE));
        self.per_row = ((self.rows_time - self.per_attended * self.rows_attended) / self.rows_rows).max(0.0);
    }

    /// Number of rows of a prompt that a pass computes in `time`. Each row attends to `past` cached tokens and to the
    /// preceding rows of the pass. `None` before the first measurement.
    pub fn rows_in(&self, time: Duration, past: usize) -> Option<f64> {
        let first = self.per_row + self.per_attended * past as f64;
        if first <= 0.0 {
            return None;
        }
        // per_attended / 2 * rows^2 + first * rows = time
        let time = time.as_secs_f64();
        Some(2.0 * time / (first + (first * first + 2.0 * self.per_attended * time).sqrt()))
    }

    /// Prefill rate of a whole prompt of `tokens` tokens, in tokens per second. It is comparable between machines,
    /// since it does not depend on the lengths of the measured prompts. `None` before the first measurement.
    pub fn prefill_rate(&self, tokens: f64) -> Option<f64> {
        let seconds = self.per_row + self.per_attended * tokens / 2.0;
        (seconds > 0.0).then(|| 1.0 / seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PER_ROW: f64 = 1e-3;
    const PER_ATTENDED: f64 = 1e-6;
    const TIME: Duration = Duration::from_millis(250);

    fn duration(work: BatchWork, noise: f64) -> Duration {
        Duration::from_secs_f64((PER_ROW * work.rows + PER_ATTENDED * work.attended) * noise)
    }

    /// Prefills a prompt in chunks that take `TIME` according to the model; returns the actual duration of the longest
    /// chunk, in seconds.
    fn prefill(model: &mut LatencyModel, from: usize, until: usize, mut noise: impl FnMut() -> f64) -> f64 {
        let (mut at, mut longest) = (from, 0.0f64);
        while at < until {
            let rows = model.rows_in(TIME, at).map_or(32, |rows| rows as usize).clamp(8, 512);
            let work = BatchWork::new(rows, at);
            longest = longest.max(duration(work, 1.0).as_secs_f64());
            model.record(work, duration(work, noise()));
            at += rows;
        }
        longest
    }

    #[test]
    fn chunks_of_a_long_prompt_keep_their_duration() {
        let mut model = LatencyModel::default();
        let longest = prefill(&mut model, 0, 16_000, || 1.0);
        // The second chunk is planned from the measurement of the first chunk only, which had no cached tokens before
        // it.
        assert!((0.2..0.3).contains(&longest), "{longest}");
        assert!((model.rows_in(TIME, 8_000).unwrap() - 27.7).abs() < 1.0, "{model:?}");
    }

    #[test]
    fn short_prompts_do_not_erase_the_attention_coefficient() {
        let mut model = LatencyModel::default();
        prefill(&mut model, 0, 16_000, || 1.0);
        for _ in 0..300 {
            prefill(&mut model, 0, 40, || 1.0);
        }
        // The prefix was cached: the prefill starts in the middle.
        let longest = prefill(&mut model, 12_000, 16_000, || 1.0);
        assert!(longest < 0.3, "{longest}");
    }

    #[test]
    fn prefill_rate_does_not_depend_on_the_measured_lengths() {
        let mut model = LatencyModel::default();
        assert_eq!(model.prefill_rate(1000.0), None);
        prefill(&mut model, 0, 64, || 1.0);
        let (short, truth) = (model.prefill_rate(1000.0).unwrap(), 1.0 / (PER_ROW + PER_ATTENDED * 500.0));
        prefill(&mut model, 0, 16_000, || 1.0);
        let long = model.prefill_rate(1000.0).unwrap();
        assert!((long / truth - 1.0).abs() < 0.05, "{long}, not {truth}");
        // Measurements of short prompts do not show the cost of attention, so the predicted rate is too high, at most
        // that of rows without attention.
        assert!(short <= 1.05 / PER_ROW && short >= truth, "{short}, not {truth}");
    }

    #[test]
    fn noise_makes_no_coefficient_negative_and_no_chunk_long() {
        let mut state = 1u32;
        let mut noise = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            0.8 + f64::from(state >> 8) / f64::from(1u32 << 24) * 0.4
        };
        let mut model = LatencyModel::default();
        assert_eq!(model.rows_in(TIME, 0), None);
        for round in 0..20 {
            let longest = prefill(&mut model, 0, 6_000, &mut noise);
            assert!(round == 0 || longest < 0.4, "round {round}: {longest}");
            assert!(model.per_row >= 0.0 && model.per_attended >= 0.0, "{model:?}");
        }
    }
}
