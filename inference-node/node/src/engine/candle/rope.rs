//! Rotary position embedding: pairs of a head's values turn with the position, each pair at its own frequency.
//!
//! RoFormer, <https://arxiv.org/abs/2104.09864>. Angles are computed for the positions of a step instead of being kept
//! for the whole context: a table for 128 thousand positions costs more memory than the arithmetic costs time.

/// Which values of a head turn together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairs {
    /// 2i and 2i + 1: Llama's files in GGUF.
    Neighbours,
    /// i and i + half: everything else.
    Halves,
}

/// How fast each pair turns.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Radians per position, one a pair; pairs beyond it stand still.
    pub frequencies: Vec<f32>,
    /// On cosine and sine alike; makes up for attention over stretched contexts.
    pub magnitude: f32,
}

/// What YaRN is told.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Yarn {
    pub factor: f32,
    /// Positions the model was made with.
    pub original: f32,
    /// Turns over those from which on a pair is left alone, and up to which it is stretched wholly.
    pub fast: f32,
    pub slow: f32,
    pub magnitude: f32,
}

impl Yarn {
    pub const FAST: f32 = 32.0;
    pub const SLOW: f32 = 1.0;

    /// The paper's, for a stretch by `factor`.
    pub fn magnitude(factor: f32) -> f32 {
        if factor > 1.0 { 0.1 * factor.ln() + 1.0 } else { 1.0 }
    }
}

impl Rope {
    /// `dims` values of each head turn, on the geometric scale from 1 to 1 / base.
    pub fn new(base: f32, dims: usize) -> Self {
        let frequencies = (0..dims / 2).map(|i| 1.0 / base.powf((2 * i) as f32 / dims as f32)).collect();
        Self { frequencies, magnitude: 1.0 }
    }

    /// Position interpolation: the context is stretched evenly.
    pub fn stretched(mut self, factor: f32) -> Self {
        self.frequencies.iter_mut().for_each(|f| *f /= factor);
        self
    }

    /// Each frequency divided by its own factor; those without one stay.
    pub fn divided(mut self, factors: &[f32]) -> Self {
        self.frequencies.iter_mut().zip(factors).for_each(|(f, factor)| *f /= factor);
        self
    }

    /// Llama 3's stretching: long waves by `factor`, short ones not at all, those between by parts.
    /// <https://github.com/meta-llama/llama-models>, `apply_scaling`.
    pub fn llama3(mut self, factor: f32, low: f32, high: f32, original: f32) -> Self {
        for frequency in &mut self.frequencies {
            let wave = 2.0 * std::f32::consts::PI / *frequency;
            if wave > original / low {
                *frequency /= factor;
            } else if wave >= original / high {
                let smooth = (original / wave - low) / (high - low);
                *frequency = (1.0 - smooth) * *frequency / factor + smooth * *frequency;
            }
        }
        self
    }

    /// YaRN: pairs that turn often over the original context stay, those that turn seldom are stretched, those between by
    /// parts. <https://arxiv.org/abs/2309.00071>, with the corrections' bounds rounded outwards as its authors' code has it.
    pub fn yarn(mut self, base: f32, yarn: Yarn) -> Self {
        let pairs = self.frequencies.len();
        let dims = (2 * pairs) as f32;
        // The pair that turns so often over the original context.
        let turning =
            |times: f32| dims * (yarn.original / (times * 2.0 * std::f32::consts::PI)).ln() / (2.0 * base.ln());
        let low = turning(yarn.fast).floor().max(0.0);
        let high = turning(yarn.slow).ceil().min(dims - 1.0);
        for (pair, frequency) in self.frequencies.iter_mut().enumerate() {
            let share = ((pair as f32 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
            *frequency = *frequency / yarn.factor * share + *frequency * (1.0 - share);
        }
        self.magnitude = yarn.magnitude;
        self
    }

    /// Appends the cosines and sines of one position, one each a pair.
    pub fn angles(&self, position: usize, cos: &mut Vec<f32>, sin: &mut Vec<f32>) {
        for frequency in &self.frequencies {
            let (s, c) = (position as f32 * frequency).sin_cos();
            cos.push(c * self.magnitude);
            sin.push(s * self.magnitude);
        }
    }
}

/// Turns the vectors of one row, (heads, head dim), in place.
pub fn rotate(row: &mut [f32], head_dim: usize, pairs: Pairs, cos: &[f32], sin: &[f32]) {
    let half = cos.len();
    for head in row.chunks_exact_mut(head_dim) {
        match pairs {
            Pairs::Neighbours => {
                for (pair, (c, s)) in head.chunks_exact_mut(2).zip(cos.iter().zip(sin)) {
                    let (a, b) = (pair[0], pair[1]);
                    pair[0] = a * c - b * s;
                    pair[1] = b * c + a * s;
                }
            }
            Pairs::Halves => {
                let (first, second) = head.split_at_mut(half);
                for ((a, b), (c, s)) in first.iter_mut().zip(second).zip(cos.iter().zip(sin)) {
                    (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_layouts_turn_the_same_vectors() {
        let rope = Rope::new(10_000.0, 4);
        assert_eq!(rope.frequencies, [1.0, 0.01]);
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        rope.angles(3, &mut cos, &mut sin);
        let mut neighbours = [1.0, 0.0, 0.5, 2.0];
        let mut halves = [1.0, 0.5, 0.0, 2.0];
        rotate(&mut neighbours, 4, Pairs::Neighbours, &cos, &sin);
        rotate(&mut halves, 4, Pairs::Halves, &cos, &sin);
        assert_eq!([neighbours[0], neighbours[2], neighbours[1], neighbours[3]], halves);
        assert!((neighbours[0] - 3f32.cos()).abs() < 1e-6 && (neighbours[1] - 3f32.sin()).abs() < 1e-6);
    }

    #[test]
    fn what_does_not_turn_stays() {
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        Rope::new(10.0, 2).angles(1, &mut cos, &mut sin);
        let mut row = [1.0, 1.0, 7.0, 8.0];
        rotate(&mut row, 4, Pairs::Halves, &cos, &sin);
        assert_eq!(row[2..], [7.0, 8.0]);
    }

    #[test]
    fn yarn_leaves_what_turns_often_and_stretches_what_turns_seldom() {
        let yarn = Yarn { factor: 4.0, original: 64.0, fast: 32.0, slow: 1.0, magnitude: Yarn::magnitude(4.0) };
        let rope = Rope::new(10_000.0, 16).yarn(10_000.0, yarn);
        let plain = Rope::new(10_000.0, 16);
        assert_eq!(rope.frequencies[0], plain.frequencies[0]);
        // A turn takes more than the 64 positions from the third pair on.
        for pair in 3..8 {
            assert_eq!(rope.frequencies[pair], plain.frequencies[pair] / 4.0);
        }
        assert!(rope.frequencies[1] < plain.frequencies[1] && rope.frequencies[1] > plain.frequencies[1] / 4.0);
        assert!((rope.magnitude - 1.138_629_4).abs() < 1e-6 && Yarn::magnitude(1.0) == 1.0);
    }

    // Expected: transformers 5.23, _compute_llama3_parameters with factor 8, low 1, high 4, original 64, base 10000, dim 8.
    #[test]
    fn llama3_leaves_short_waves_and_stretches_long_ones() {
        let rope = Rope::new(10_000.0, 8).llama3(8.0, 1.0, 4.0, 64.0);
        assert_eq!(rope.frequencies[0], 1.0);
        assert!((rope.frequencies[3] - 0.001 / 8.0).abs() < 1e-9);
    }
}
